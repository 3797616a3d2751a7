"""Measurement of a machine's bandwidths and matrix products. Only this file and `measure` hold a clock.

Each figure is the median of several samples after a warm-up; the rate of a copy depends on page-locked memory and on
traffic in the other direction. Without a GPU the CPU is the device: `h2d_bandwidth` is then a copy within host memory.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zinfer.core.errors import environment_error
from zinfer.core.machine import SHARING, Machine, MachineError
from zinfer.core.units import gb
from zinfer.engine import direct
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.read import as_bytes
from zinfer.system.host import attending_cpus, available_bytes, gpus, host_bytes, host_facts, name_of

if TYPE_CHECKING:
    from zinfer.engine.base import Engine

MIB = 1 << 20
BEYOND_CACHES = 4  # size of the KV cache in units of the processors' caches, so that no read comes from those
TIMES = 8  # copies of several GPUs in a sample, so that their launches do not count
COPIES = 12  # copies of the largest block in a sample, while the CPU computes attention
# Seconds of work before the first sample of what many threads do: they, and a new machine's memory, start slowly.
WARM_UP_S = 0.5
BUDGET_S = 2.0  # seconds for the repeats of one figure: a slow machine gets fewer samples, not a longer probe

Seconds = Callable[[Callable[[], object]], float]
Figures = dict[str, list[float]]  # samples of a machine's figures, by their names


def probe(
    nvme_path: str | Path | None = None,
    quick: bool = False,
    progress: Callable[[str], object] = str,
    memory: int | None = None,
) -> Machine:
    """Measure this machine, and the drive of the folder `nvme_path`. `quick` takes fewer samples of smaller blocks;
    `memory` is the host memory to measure with, in bytes, by default half of what can still be had.
    Page-locks 1 GiB at most, and leaves no file behind. Raises MachineError when `nvme_path` is not a folder, Full for
    one on a full disk."""
    if nvme_path is not None:
        if not Path(nvme_path).is_dir():
            raise MachineError(f"--nvme-path {nvme_path} is not a folder")
        if (free := shutil.disk_usage(nvme_path).free) < 4 * direct.REQUEST:
            fault = f"--nvme-path {nvme_path} has {gb(free)} free, too little to measure with: name another folder"
            raise environment_error(MachineError(fault))
    memory = available_bytes() // 2 if memory is None else memory
    cuda = torch.cuda.is_available()
    devices = gpus() if cuda else []
    details: dict[str, Any] = {"host": host_facts(), "torch": torch.__version__, "quick": quick}
    details["load_average"] = round(os.getloadavg()[0], 2)
    repeats, largest = (3, 256 * MIB) if quick else (7, 1024 * MIB)
    largest = max(MIB, min(largest, memory // 4))
    progress("host memory")
    size = min(largest, 256 * MIB) if not cuda else largest
    _warm_up(partial(_host_copy, size, 1))
    copies = _host_copy(size, repeats)
    progress("attention on the CPU")
    cache = min(max(size, BEYOND_CACHES * details["host"]["cache_bytes"]), memory // 4)
    figures: Figures = {
        "host_bandwidth": [2 * rate for rate in copies],
        "attention_bandwidth": _attention(cache, repeats, 1),
        "grouped_attention_bandwidth": _attention(cache, repeats, SHARING),
    }
    fields: dict[str, Any] = {}
    note = "measured by `zinfer probe`"
    if cuda:
        figures |= _probe_gpu(largest, cache, repeats, progress)
        if (count := torch.cuda.device_count()) > 1:
            figures |= _probe_gpus(largest, repeats, progress)
        fields |= {"gpu_count": count, "gpu_name": torch.cuda.get_device_name()}
        fields["gpu_bytes"] = torch.cuda.mem_get_info()[1]
        details["gpu"] = devices[0] if devices else {}
        fields["coherent"] = bool(details["gpu"].get("c2c"))
    else:
        progress("matrix product")
        products = [_matmul("cpu", name, 512 if quick else 1024, 3) for name in ("bfloat16", "float32")]
        figures |= {"h2d_bandwidth": copies, "d2h_bandwidth": copies, "hbm_bandwidth": figures["host_bandwidth"]}
        figures["matmul_flops"] = max(products, key=median)
        note += "; no GPU, so the CPU is the device and memory the link"
    if nvme_path is not None:
        progress(f"disk at {nvme_path}")
        fields["nvme_bytes"] = shutil.disk_usage(nvme_path).free
        try:
            figures["nvme_bandwidth"] = _probe_disk(nvme_path, quick)
        except OSError as error:
            note += f"; no direct I/O at the offload path ({error.strerror})"
    details["samples"] = {name: _summary(rates) for name, rates in figures.items()}
    medians = {name: summary["median"] for name, summary in details["samples"].items()}
    if cuda:  # few cores cannot copy as much
        at_once = medians["shared_attention_bandwidth"] + medians["shared_h2d_bandwidth"]
        medians["host_bandwidth"] = max(medians["host_bandwidth"], at_once, medians.get("links_bandwidth", 0.0))
    fields |= medians | {"name": name_of(devices), "source": "measured", "host_bytes": host_bytes(), "note": note}
    return Machine(details=details, **fields)


def measure_link(device: torch.device | str) -> float:
    """Return the bytes per second from pinned host memory to `device`. It is the median of five copies of 1 GiB; for
    the CPU, of 256 MiB within memory. Copies are smaller where memory is short. Measured before each load, so that a
    record has the link it ran on."""
    spare = max(MIB, available_bytes() // 8)
    if torch.device(device).type != "cuda":
        return median(_host_copy(min(256 * MIB, spare), 5))
    with _arena(min(1024 * MIB, spare)) as source:
        return median(_link(torch.empty_like(source, device=device), source, 5))


def measure_links(engine: "Engine") -> float | None:
    """Return the bytes per second of all links at once; None where there is one link, or none. It is the median of five
    samples of a quarter of the weights, out of the memory that they lie in."""
    amount = engine.bring()
    return None if amount is None else median(_rates(engine.bring, amount, _cpu_seconds, 5))


def rate(work: Callable[[], object], amount: float, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return median, spread and number of samples of a rate. `work` moves `amount` bytes on `device`."""
    seconds = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return _summary(_rates(work, amount, seconds, repeats)) | {"of": "bytes"}


def _warm_up(work: Callable[[], object]) -> None:
    began = perf_counter()
    while perf_counter() - began < WARM_UP_S:
        work()


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _cuda_seconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _gpu_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of work on all GPUs, whatever its streams."""

    def whole() -> None:
        work()
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)

    return _cpu_seconds(whole)


def _rates(
    work: Callable[[], object], amount: float, seconds: Seconds, repeats: int, min_samples: int = 1
) -> list[float]:
    """Return `amount` per second for each sample of `work`, after a warm-up. These are `repeats` samples, or fewer, but
    `min_samples`, if they take more than `BUDGET_S`."""
    seconds(work)
    rates: list[float] = []
    began = perf_counter()
    while len(rates) < min_samples or (len(rates) < repeats and perf_counter() - began < BUDGET_S):
        rates.append(amount / seconds(work))
    return rates


def _summary(rates: list[float]) -> dict[str, Any]:
    middle = median(rates)
    return {"median": middle, "spread": round((max(rates) - min(rates)) / middle, 4), "samples": len(rates)}


@contextmanager
def _arena(size: int, pin: bool = True) -> Iterator[Tensor]:
    with closing(PinnedArena(size, pin)) as arena:
        yield arena.memory[:size]


def _host_copy(size: int, repeats: int) -> list[float]:
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    return _rates(lambda: target.copy_(source), size, _cpu_seconds, repeats)


def _attention(size: int, repeats: int, sharing: int) -> list[float]:
    """Return the bytes per second that CPU attention reads; `sharing` query heads share each head of the cache."""
    with _attending(size, sharing) as (work, amount):
        _warm_up(work)
        return _rates(work, amount, _cpu_seconds, repeats)


@contextmanager
def _attending(size: int, sharing: int = 1) -> Iterator[tuple[Callable[[], object], int]]:
    """Yield a function that attends to 512 tokens a sequence. Its bytes come with it."""
    from zinfer.engine.stream.kv.cpu import attend_all

    heads = 32 // sharing
    shape = (max(1, size // (2 * 2 * heads * 512 * 128)), heads, 512, 128)
    query = torch.ones((shape[0], heads, sharing, shape[3]), dtype=torch.bfloat16)
    keys, values = (torch.ones(shape, dtype=torch.bfloat16) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(attending_cpus(before))
    try:
        yield partial(attend_all, query, [(keys, values)], [], None), 2 * keys.nbytes
    finally:
        torch.set_num_threads(before)


def _matmul(device: str, dtype: str, size: int, repeats: int) -> list[float]:
    """Return the FLOPs per second of a matrix product ``[size, size]``: random, since zeros run faster."""
    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    seconds = _cuda_seconds if device == "cuda" else _cpu_seconds
    return _rates(lambda: left @ right, 2 * size**3, seconds, repeats)


def _probe_gpu(largest: int, cache: int, repeats: int, progress: Callable[[str], object]) -> Figures:
    largest = min(largest, torch.cuda.mem_get_info()[0] // 4)
    device = torch.empty(largest, dtype=torch.uint8, device="cuda")
    progress("pageable copies")
    with _arena(largest, pin=False) as host:
        figures = {"pageable_bandwidth": _link(device, host, repeats)}
    progress("pinned copies")
    with _arena(largest) as host:
        figures |= {"h2d_bandwidth": _link(device, host, repeats), "d2h_bandwidth": _link(host, device, repeats)}
        progress("both directions at once")
        half = largest // 2
        pairs = [(device[:half], host[:half]), (host[half : 2 * half], device[half : 2 * half])]
        copies = [(target, source, [torch.cuda.Stream()]) for target, source in pairs]
        figures["duplex_bandwidth"] = _rates(partial(_at_once, copies), TIMES * half, _gpu_seconds, repeats)
        progress("link and CPU at once")
        figures |= _measure_concurrent(host, device, cache, repeats)
    progress("device memory")
    copy = partial(torch.empty_like(device).copy_, device)
    figures["hbm_bandwidth"] = _rates(copy, 2 * device.nbytes, _cuda_seconds, repeats)
    del device, copy, pairs, copies
    progress("matrix product")
    figures["matmul_flops"] = _matmul("cuda", "bfloat16", 8192, 2 * repeats)
    torch.cuda.empty_cache()
    return figures


def _probe_gpus(largest: int, repeats: int, progress: Callable[[str], object]) -> Figures:
    """Measure all links at once, and the exchange between GPUs."""
    count = torch.cuda.device_count()
    part = min(largest, *(torch.cuda.mem_get_info(number)[0] // 4 for number in range(count))) // count
    targets = [torch.empty(part * count, dtype=torch.uint8, device=f"cuda:{number}") for number in range(count)]
    streams = [[torch.cuda.Stream(number) for _ in range(count)] for number in range(count)]
    progress("all links at once")
    with _arena(part * count) as host:
        copies = [(target[:part], host[n * part :][:part], [streams[n][0]]) for n, target in enumerate(targets)]
        links = _rates(partial(_at_once, copies), TIMES * part * count, _gpu_seconds, repeats)
    progress("exchange between GPUs")
    copies = []
    for step in range(1, count):  # at any time each GPU is read by one other
        for n, target in enumerate(targets):
            other = (n + step) % count
            chunk = slice(other * part, (other + 1) * part)
            # Streams of their own on both ends: copies in the two directions would wait for each other.
            copies.append((target[chunk], targets[other][chunk], [streams[other][step], streams[n][count - step]]))
    gather = _rates(partial(_at_once, copies), TIMES * part * (count - 1), _gpu_seconds, repeats)
    return {"links_bandwidth": links, "gather_bandwidth": gather}


def _at_once(copies: list[tuple[Tensor, Tensor, list[torch.cuda.Stream]]]) -> None:
    """Issue copies, `TIMES` each: target, source, and the stream of each GPU."""
    for _ in range(TIMES):
        for target, source, streams in copies:
            with ExitStack() as current:
                for stream in streams:
                    current.enter_context(torch.cuda.stream(stream))
                target.copy_(source, non_blocking=True)


def _link(target: Tensor, source: Tensor, repeats: int) -> list[float]:
    return _rates(partial(target.copy_, source, non_blocking=True), source.nbytes, _cuda_seconds, repeats)


def _measure_concurrent(host: Tensor, device: Tensor, cache: int, repeats: int) -> Figures:
    """Return the rates of the link and of CPU attention, together."""
    figures: Figures = {"shared_h2d_bandwidth": [], "shared_attention_bandwidth": []}
    stream = torch.cuda.Stream()
    with _attending(cache) as (attend, amount):
        attend()
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(COPIES):
                    device.copy_(host, non_blocking=True)
                end.record()
            attended, began = 0, perf_counter()
            while not end.query():
                attend()
                attended += 1
            figures["shared_attention_bandwidth"].append(attended * amount / (perf_counter() - began))
            figures["shared_h2d_bandwidth"].append(COPIES * host.nbytes / (float(begin.elapsed_time(end)) / 1e3))
    return figures


def _probe_disk(folder: str | Path, quick: bool) -> list[float]:
    """Measure direct reads of a file in `folder`, as `stream` reads layers. The file disappears when it is closed,
    however the process ends. Raises OSError where direct I/O is refused or the disk is full."""
    size = min((512 if quick else 4096) * MIB, shutil.disk_usage(folder).free // 4)
    noise = os.urandom(direct.REQUEST)
    min_samples = 1 if quick else 3  # a drive that others use, too, is now faster, now slower
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        reader = stack.enter_context(direct.DirectFile(Path(f"/proc/self/fd/{file.fileno()}")))
        if not reader.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        began, blocks = perf_counter(), 0
        while (blocks + 1) * direct.REQUEST <= size and perf_counter() - began < BUDGET_S * (1 if quick else 2):
            blocks += file.write(noise) // direct.REQUEST
        os.fsync(file.fileno())
        if not blocks:
            raise OSError(errno.ENOSPC, "no space to measure with")
        memory = stack.enter_context(_arena(direct.THREADS * direct.REQUEST, pin=False))
        whole = as_bytes(memory)

        def read(thread: int) -> None:
            part = whole[thread * direct.REQUEST : (thread + 1) * direct.REQUEST]
            for block in range(thread, blocks, direct.THREADS):
                reader.read(part, block * direct.REQUEST, direct.REQUEST)

        def read_all() -> None:
            list(pool.map(read, range(direct.THREADS)))

        with ThreadPoolExecutor(direct.THREADS) as pool:
            return _rates(read_all, blocks * direct.REQUEST, _cpu_seconds, 3, min_samples)
