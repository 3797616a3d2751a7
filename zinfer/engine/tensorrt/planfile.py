"""Plan files: what a built engine is kept in, and what has to agree before one is loaded.

A plan is as large as the model and good for one model, one set of shapes, one library version and one kind of GPU. All
of that is its key: the file's name ends in the key's digest, and the JSON file beside it tells the key in full. The
JSON is written last, so a plan without one is not finished.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zinfer.engine import EngineError
from zinfer.engine.tensorrt.attention import CacheKind
from zinfer.engine.tensorrt.library import Name
from zinfer.spec import atomic
from zinfer.spec.case import LoadFormat
from zinfer.spec.model import Dtype
from zinfer.spec.units import gb
from zinfer.spec.value import Frozen

PLANS = Path("engines/plans")
END_BYTES = 1 << 20  # at either end of a plan, that its checksum covers; all of 350 GB would take minutes to sum


class PlanKey(Frozen):
    """Everything that a plan depends on."""

    model: str
    revision: str  # of the weights, as `zinfer.spec.source` tells it
    dtype: Dtype
    load_format: LoadFormat
    layers: int | None  # of a slice
    max_batch_size: int
    max_seq_len: int  # prompt and generated tokens together
    cache: CacheKind
    network: int  # NETWORK_VERSION
    library: Name
    version: str
    target: str  # the compute capabilities it is for

    @property
    def stem(self) -> str:
        """The file's name without its ending: readable, and unlike that of any other key."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        name = Path(self.model).name + ("" if self.layers is None else f"-{self.layers}l")
        return f"{name}-{self.dtype}-b{self.max_batch_size}-s{self.max_seq_len}-{digest}"


class PlanFile(Frozen):
    """A finished plan, as its JSON file tells it."""

    key: PlanKey
    path: Path
    size: int
    checksum: str
    prefill_rows: int  # sequences that one prefill pass takes
    weight_bytes: int
    build_s: float = 0.0

    def check(self) -> None:
        """Raises EngineError unless the file is there, whole and unchanged."""
        try:
            size = self.path.stat().st_size
            checksum = _checksum(self.path)
        except OSError as error:
            raise EngineError(f"{self.path}: {error.strerror}; build it again") from None
        if size != self.size:
            raise EngineError(
                f"{self.path} has {size} bytes and should have {self.size}: it is cut off; build it again"
            )
        if checksum != self.checksum:
            raise EngineError(f"{self.path} is not the plan that its JSON file describes; build it again")


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        digest.update(stream.read(END_BYTES))
        stream.seek(max(0, path.stat().st_size - END_BYTES))
        digest.update(stream.read(END_BYTES))
    return digest.hexdigest()[:16]


def finish(path: Path, key: PlanKey, **facts: Any) -> PlanFile:
    """Write the JSON file of the plan `path`, which makes it one that `find` finds."""
    size, checksum = path.stat().st_size, _checksum(path)
    file = PlanFile(key=key, path=path, size=size, checksum=checksum, **facts)
    text = file.model_dump_json(indent=1, exclude={"path"})
    atomic.write(path.with_suffix(".json"), text + "\n")
    return file


def read(path: Path) -> PlanFile:
    """The plan whose file is `path`, by the JSON file beside it; its bytes are not looked at. Raises EngineError."""
    beside = path.with_suffix(".json")
    if not path.is_file():
        raise EngineError(f"no plan {path}")
    try:
        return PlanFile.model_validate({**json.loads(beside.read_text()), "path": path})
    except FileNotFoundError:
        raise EngineError(f"{path} has no {beside.name} beside it: its build was cut off; build it again") from None
    except (ValidationError, ValueError, OSError, TypeError):
        raise EngineError(f"{beside} does not describe a plan; build it again") from None


def disagreements(wanted: PlanKey, found: PlanKey) -> list[str]:
    """Why `found` cannot serve where `wanted` (its maxima taken as the least that will do) is needed."""
    names = {
        "revision": "its weights are of revision", "dtype": "its weights are",
        "load_format": "its weights are", "layers": "its layers are", "network": "its network has version",
        "library": "it was built by", "version": f"it was built by {found.library}", "target": "it is for GPUs of",
    }  # fmt: skip
    told = []
    for field, words in names.items():
        is_, should = getattr(found, field), getattr(wanted, field)
        if is_ != should:
            told.append(f"{words} {is_}, not {should}")
    if found.max_batch_size < wanted.max_batch_size:
        told.append(f"its largest batch is {found.max_batch_size}, not {wanted.max_batch_size}")
    if found.max_seq_len < wanted.max_seq_len:
        told.append(f"its longest sequence is {found.max_seq_len}, not {wanted.max_seq_len}")
    return told


def find(wanted: PlanKey, where: str = "auto") -> PlanFile:
    """The plan at the path `where`, or with ``auto`` the one in `PLANS` that serves `wanted` with the largest batch.

    Raises EngineError that says what there is, why it does not serve, and the command that builds what is needed.
    """
    if where != "auto":
        file = read(Path(where))
        if told := disagreements(wanted, file.key):
            raise EngineError(f"{where} does not serve: {'; '.join(told)}. Build one: {build_command(wanted)}")
        file.check()
        return file
    serving, refused = [], []
    for path in sorted(PLANS.glob("*.plan")):
        try:
            file = read(path)
            if wanted.model != file.key.model and wanted.revision != file.key.revision:
                continue
            told = disagreements(wanted, file.key)
            if not told:
                file.check()
                serving.append(file)
        except EngineError as error:
            told = [str(error)]
        if told:
            refused.append(f"{path.name} does not serve: {'; '.join(told)}")
    if serving:
        return max(serving, key=lambda file: (file.key.max_batch_size, -file.key.max_seq_len))
    known = f" {refused[-1]}." if refused else ""
    raise EngineError(
        f"no TensorRT plan of {wanted.model} in {PLANS} to run.{known} Build one: {build_command(wanted)}"
    )


def build_command(wanted: PlanKey) -> str:
    """The command that builds `wanted`."""
    words = f"zinfer build --model {wanted.model} --dtype {wanted.dtype} --load-format {wanted.load_format}"
    words += "" if wanted.layers is None else f" --layers {wanted.layers}"
    return f"{words} --max-batch-size {wanted.max_batch_size} --max-seq-len {wanted.max_seq_len}"


def check_space(folder: Path, needed: int) -> None:
    """Raises EngineError unless `folder`'s disk has `needed` bytes free."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EngineError(f"{folder} has {gb(free)} free and the plan needs {gb(needed)}: -o puts it on another disk")
