"""Plan files: storage of built engines, checked before use.

A plan is valid for one model, one set of shapes, one library version and one kind of GPU: its key, whose digest ends
the file's name. The JSON file next to it holds the whole key and is written last: without it a plan is not finished.
"""

import hashlib
from pathlib import Path
from typing import Any

from zinfer.core.case import LoadFormat
from zinfer.core.model import Dtype
from zinfer.core.value import Frozen
from zinfer.engine import EngineError
from zinfer.engine.tensorrt.library import Name
from zinfer.system import atomic
from zinfer.system.documents import read_object

PLANS = Path("engines/plans")
LEVEL = 1  # builder optimisation level: 3, the library's default, takes twice as long or longer
END_BYTES = 1 << 20  # bytes at either end that the checksum covers; a sum over 350 GB would take minutes


class PlanKey(Frozen):
    """Everything that a plan depends on."""

    model: str
    revision: str  # revision of the weights, see `zinfer.checkpoint.source`
    dtype: Dtype
    load_format: LoadFormat
    layers: int | None  # decoder layers of a slice; None for the whole model
    max_batch_size: int
    max_seq_len: int  # prompt and generated tokens together
    network: int  # NETWORK_VERSION
    library: Name
    version: str
    target: str  # compute capabilities of the GPUs that it runs on

    @property
    def stem(self) -> str:
        """File name without its suffix: readable, and different for every key."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        name = Path(self.model).name + ("" if self.layers is None else f"-{self.layers}l")
        return f"{name}-{self.dtype}-b{self.max_batch_size}-s{self.max_seq_len}-{digest}"


class PlanFile(Frozen):
    """A finished plan, as its JSON file describes it."""

    key: PlanKey
    path: Path
    size: int  # bytes
    checksum: str
    prefill_rows: int  # sequences in one prefill pass
    weight_bytes: int  # bytes of the layers' weights
    build_s: float = 0.0
    allow_nan: bool = False  # weights with NaN or infinity may be in it
    level: int = LEVEL

    def check(self) -> None:
        """Raise EngineError unless the file exists, whole and unchanged."""
        try:
            size, checksum = self.path.stat().st_size, _checksum(self.path)
        except OSError as error:
            raise EngineError(f"{self.path}: {error.strerror}; build it again") from None
        if (size, checksum) != (self.size, self.checksum):
            raise EngineError(f"{self.path} is cut off, or not the plan that its JSON file describes; build it again")


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        digest.update(stream.read(END_BYTES))
        stream.seek(max(0, path.stat().st_size - END_BYTES))
        digest.update(stream.read(END_BYTES))
    return digest.hexdigest()[:16]


def finish(path: Path, key: PlanKey, **facts: Any) -> PlanFile:
    """Write the JSON file of a plan, so that `find` finds it."""
    size, checksum = path.stat().st_size, _checksum(path)
    file = PlanFile(key=key, path=path, size=size, checksum=checksum, **facts)
    text = file.model_dump_json(indent=1, exclude={"path"})
    atomic.write(path.with_suffix(".json"), text + "\n")
    return file


def read(path: Path) -> PlanFile:
    """Read the plan `path` from the JSON file next to it. Raises EngineError."""
    description = path.with_suffix(".json")
    if not path.is_file():
        raise EngineError(f"no plan file {path}")
    try:
        return PlanFile.model_validate({**read_object(description), "path": path})
    except (ValueError, OSError):
        raise EngineError(f"{description} is missing, or does not describe a plan; build it again") from None


def disagreements(wanted: PlanKey, key: PlanKey) -> list[str]:
    """Return why a plan of `key` cannot serve instead of `wanted`."""
    names = ("revision", "dtype", "load_format", "layers", "network", "library", "version", "target")
    pairs = {name: (getattr(key, name), getattr(wanted, name)) for name in PlanKey.model_fields}
    others = [f"its {name} is {pairs[name][0]}, not {pairs[name][1]}" for name in names if len({*pairs[name]}) > 1]
    limits = {name: pairs[name] for name in ("max_batch_size", "max_seq_len")}
    return others + [f"its {name} is {has}, less than {needs}" for name, (has, needs) in limits.items() if has < needs]


def find(wanted: PlanKey, where: str = "auto") -> PlanFile:
    """Return the plan at `where`, or another that serves `wanted`. With ``auto`` it is the one in `PLANS` with the
    largest batch. Raises EngineError where there is none, with the reason why a plan that exists does not serve, and
    the command that builds the right one."""
    paths = sorted(PLANS.glob("*.plan")) if where == "auto" else [Path(where)]
    serving, refused = [], ""
    for path in paths:
        try:
            file = read(path)
            if where == "auto" and wanted.model != file.key.model and wanted.revision != file.key.revision:
                continue
            reasons = disagreements(wanted, file.key)
            if not reasons:
                file.check()
                serving.append(file)
        except EngineError as error:
            reasons = [str(error)]
        refused = f" {path.name} does not fit: {'; '.join(reasons)}." if reasons else refused
    if serving:
        return max(serving, key=lambda file: (file.key.max_batch_size, -file.key.max_seq_len))
    place = f"in {PLANS}" if where == "auto" else where
    raise EngineError(f"no TensorRT plan {place} that runs {wanted.model}.{refused} Build one: {build_command(wanted)}")


def build_command(wanted: PlanKey) -> str:
    """Return the command that builds `wanted`."""
    layers = "" if wanted.layers is None else f" --layers {wanted.layers}"
    command = f"zinfer pack --engine tensorrt --model {wanted.model} --dtype {wanted.dtype}"
    command += f" --load-format {wanted.load_format}{layers}"
    return f"{command} --max-batch-size {wanted.max_batch_size} --max-seq-len {wanted.max_seq_len}"
