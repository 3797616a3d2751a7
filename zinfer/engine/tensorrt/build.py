"""Build of a plan file from a model's weights.

The library holds up to two copies of the weights while it builds, and before TensorRT 10.8 a third one, the plan. Ours
is a mapped scratch file next to the plan, which the system may drop from memory.
"""

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zinfer.checkpoint.source import revision_of
from zinfer.core.case import LoadFormat
from zinfer.core.model import ModelSpec
from zinfer.core.progress import Progress, silent
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.pinned import lay_out
from zinfer.engine.state import ModelState
from zinfer.engine.tensorrt import planfile
from zinfer.engine.tensorrt.library import Library, Messages
from zinfer.engine.tensorrt.network import NETWORK_VERSION, make_network
from zinfer.engine.tensorrt.planfile import LEVEL, PlanFile, PlanKey
from zinfer.plan.bytes import Placement
from zinfer.system import atomic

CODE_BYTES = 256 << 20  # upper bound on the bytes of a plan that are not weights
COPIES = 2  # copies of the weights that the library makes: 1.4 to 2.0 with TensorRT-RTX 1.7 on a CPU
WORKING_BYTES = 3 << 30  # host memory of the process and of the library, besides the weights


def plan_key(
    library: Library, model: str, spec: ModelSpec, load_format: LoadFormat, layers: int | None, batch: int, length: int
) -> PlanKey:
    """Return the key of the plan that `library` builds on this machine. `model` is the user's name, as in a `Case`."""
    return PlanKey(
        model=model,
        revision=revision_of(spec, load_format),
        dtype=spec.dtype,
        load_format=load_format,
        layers=layers,
        max_batch_size=batch,
        max_seq_len=length,
        network=NETWORK_VERSION,
        library=library.name,
        version=library.version,
        target=library.target(),
    )


def build(
    library: Library,
    key: PlanKey,
    spec: ModelSpec,
    path: Path,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = lambda: False,
    host_bytes: int | None = None,
    allow_nan: bool = False,
    level: int = LEVEL,
) -> PlanFile:
    """Build the plan of `key` into `path`, which appears when whole. A higher `level` (0 to 5) tries more kernels.
    Raises EngineError for a model, a type or a shape without a network, and where the disk or host memory
    (`host_bytes`) is too small; MemoryError or torch's OutOfMemoryError when the library runs out of memory; and
    CancelledError. No plan is left behind after an error."""
    if spec.dtype == "float32" and spec.streamed_bytes > CODE_BYTES:
        raise EngineError("TensorRT plans are built in bfloat16 or float16: --dtype bfloat16")
    if host_bytes is not None and (peak := peak_host_bytes(library, spec)) > host_bytes:
        has = f"takes {gb(peak)} of host memory; this machine has {gb(host_bytes)}"
        raise EngineError(f"building a plan of {spec.name} {has}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < (needed := 2 * spec.streamed_bytes + CODE_BYTES):
        has = f"{path.parent} has {gb(free)} free and the plan needs {gb(needed)}"
        raise EngineError(f"{has}: name another disk with -o")
    started = time.monotonic()
    trt, messages = library.module, Messages(library.module)
    builder = trt.Builder(messages.logger)
    if builder is None:
        raise messages.failure(f"{library.name} cannot build here")
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # the only kind from TensorRT 11 on
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    state = ModelState(spec, key.load_format, allow_nan=allow_nan)

    def loading(what: str, share: float) -> None:
        if cancelled():
            raise CancelledError
        progress(what, share)

    with _weights(state, path.parent, loading) as tensors:
        net = make_network(library, network, state.model, spec, tensors, key.max_seq_len)
        builder.max_threads = len(os.sched_getaffinity(0))
        config = builder.create_builder_config()
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        config.builder_optimization_level = level
        config.progress_monitor = _monitor(trt, progress, cancelled)
        for profile in profiles(builder, net.inputs, key):
            if config.add_optimization_profile(profile) < 0:
                raise messages.failure(f"{library.name} refused the shapes of {path.name}")
        timings = f"{library.name}-{library.version}-{key.target.replace(', ', '_')}.timings"
        with _timing_cache(config, path.with_name(timings)), atomic.writing(path) as stream:
            built = _serialise(library, builder, network, config, stream)
            if cancelled():
                raise CancelledError
            if not built:
                raise messages.failure(f"{library.name} could not build {path.name}")
        weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return planfile.finish(
        path,
        key,
        prefill_rows=Placement().prefill_rows(key.max_batch_size, key.max_seq_len),
        weight_bytes=weight_bytes,
        build_s=round(time.monotonic() - started, 1),
        allow_nan=allow_nan,
        level=level,
    )


def peak_host_bytes(library: Library, spec: ModelSpec) -> int:
    """Return the bytes of host memory that a build takes."""
    return (COPIES if library.writes_streams else COPIES + 1) * spec.streamed_bytes + WORKING_BYTES


def profiles(builder: Any, inputs: dict[str, tuple[int | str, ...]], key: PlanKey) -> Iterator[Any]:
    """Yield the optimisation profiles: for several new positions, and for one of each row."""
    batch, length = key.max_batch_size, key.max_seq_len
    rows, any_length = Placement().prefill_rows(batch, length), (1, length, length)
    some = 1, (length + 1) // 2, length  # kernels are chosen for a prompt behind as many cached positions
    bounds: tuple[dict[str, tuple[int, int, int]], ...] = (
        {"B": (1, rows, rows), "S": some, "T": any_length, "C": any_length},
        {"B": (1, batch, batch), "S": (1, 1, 1), "T": any_length, "C": any_length},
    )
    for bound in bounds:
        profile = builder.create_optimization_profile()
        for name, sizes in inputs.items():
            shapes = [tuple(bound[size][i] if isinstance(size, str) else size for size in sizes) for i in range(3)]
            profile.set_shape(name, *shapes)
        yield profile


@contextmanager
def _weights(state: ModelState, folder: Path, progress: Progress) -> Iterator[dict[str, Tensor]]:
    """Provide the layers' parameters and buffers, views of a mapped file."""
    blocks, size = lay_out((name, entry.tensor) for name, entry in state.entries.items() if entry.layer is not None)
    # A GPU draws dummy weights a hundred times as fast, and the same ones as for other engines.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        mapped = mmap.mmap(file.fileno(), size)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        views = {name: block.view(memory) for name, block in blocks.items()}
        for name, tensor in state.load(device, progress):
            if name in views:
                views[name].copy_(tensor)
        yield views


@contextmanager
def _timing_cache(config: Any, path: Path) -> Iterator[None]:
    """Use and update the kernel timings of earlier builds. Those of another GPU are dropped."""
    for content in (path.read_bytes() if path.is_file() else b"", b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, False):
            break
    yield
    if content := bytes(config.get_timing_cache().serialize()):
        atomic.write(path, content)


def _serialise(library: Library, builder: Any, network: Any, config: Any, stream: BinaryIO) -> bool:
    """Build a plan into `stream`. Returns False if the library fails. Raises OSError if writing does."""
    if not library.writes_streams:
        built = builder.build_serialized_network(network, config)
        return built is not None and stream.write(built) > 0

    class Writer(library.module.IStreamWriter):  # type: ignore[misc,name-defined]
        error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return 0 if self.error is not None else stream.write(data)
            except OSError as error:
                self.error = error
                return 0

    writer = Writer()
    built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.error is not None:
        raise writer.error
    return bool(built)


def _monitor(trt: Any, progress: Progress, cancelled: Callable[[], bool]) -> Any:
    """Return a progress monitor; a phase within another is a step of it."""
    phases: dict[str, tuple[int, int]] = {}  # phases under way, the outermost first: steps done, steps

    def tell() -> None:
        share, width, under_way = 0.0, 1.0, [*phases.items()]  # threads of the library may change it
        for _, (done, steps) in under_way:
            share, width = share + width * done / steps, width / steps
        if under_way:
            progress(under_way[0][0].lower(), min(1.0, share))

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def phase_start(self, name: str, _parent: str | None, steps: int) -> None:
            phases[name] = 0, max(1, steps)
            tell()

        def phase_finish(self, name: str) -> None:
            phases.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            if name in phases:
                phases[name] = step + 1, phases[name][1]
                tell()
            return not cancelled()

    return Monitor()
