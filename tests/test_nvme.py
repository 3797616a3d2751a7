"""Offload nvme of `stream`: the tokens of layers from disk, and what disks do to them."""

import errno
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import PATIENCE_S, Patch, environment, quantized
from tests.checkpoints import save_checkpoint, save_config
from tests.command import probed, zinfer
from tests.grid import covering
from tests.running import equal
from tests.test_packed import write
from tests.test_parity import BATCHES, greedy, load, plan_of
from tests.test_ring import Answer, Bench, FakeQueues
from tests.test_ring import plain as plain_layer
from zinfer.analysis.timeline import idle, length_ms, share, total_ms
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.resolve import resolve
from zinfer.core.case import Case, LoadFormat, Offload, Workload
from zinfer.core.engine import OptionError, resolve_options
from zinfer.core.machine import Machine, override
from zinfer.engine import direct
from zinfer.engine.direct import PAGE, DirectFile, DirectWriter
from zinfer.engine.pinned import PinnedArena
from zinfer.engine.stream.engine import Stream
from zinfer.engine.stream.weights import chunk as chunk_module
from zinfer.engine.stream.weights import disk, packed
from zinfer.engine.stream.weights.disk import DiskSource
from zinfer.engine.stream.weights.ring import PrefetchRing
from zinfer.plan.planner import Plan, make_plan
from zinfer.plan.times import Efficiency
from zinfer.record.measurement import Effective
from zinfer.record.store import read
from zinfer.system.machines import load as load_machine
from zinfer.worker.session import failure_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("all_coded")


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a small model in a weight format."""

    @cache
    def make(stored: str) -> Path:
        folder = save_checkpoint("llama", tmp_path_factory.mktemp(stored) / "m", hidden_size=128)
        if stored == "bf16":
            return folder
        return quantized.fp8(folder) if stored == "fp8" else quantized.columns(folder, "gptq")[0]

    return make


def tokens(engine: Any) -> list[torch.Tensor]:
    return [greedy(engine, lengths) for lengths in BATCHES]


def in_memory(folder: Path, drive: Path, codec_: str = "auto") -> tuple[list[torch.Tensor], Effective]:
    """Return tokens and effective placement of a model in host memory."""
    engine = load("stream", folder, "cpu", drive, "bfloat16", weight_codec=codec_)
    return tokens(engine), engine.effective()


@pytest.mark.parametrize(
    ("way", "share"),
    covering(
        [("bf16", "none"), ("bf16", "lossless"), ("fp8", "lossless"), ("gptq", "lossless")], ["34%", "0%", "100%"]
    ),
)
def test_tokens_are_those_of_host_memory(
    way: tuple[str, str], share: str, models: Callable[[str], Path], drive: Path
) -> None:
    stored, codec_ = way
    folder = models(stored)
    expected, cpu = in_memory(folder, drive, codec_)
    engine = load("stream", folder, "nvme", drive, "bfloat16", weight_codec=codec_, host_weights=share)
    assert equal(tokens(engine), expected)
    nvme = engine.effective()
    (written,) = drive.glob(f"zinfer-weights-*/{packed.DATA}")
    assert nvme.nvme_weight_bytes <= written.stat().st_size < nvme.nvme_weight_bytes + 3 * PAGE
    assert nvme.streamed_bytes_per_step == cpu.streamed_bytes_per_step
    assert nvme.wire_bytes_per_step == cpu.wire_bytes_per_step
    layers, kept = engine.plan.model.num_layers, {"0%": 0, "34%": 1, "100%": 3}[share]
    assert nvme.settings["host_layers"] == kept
    assert nvme.settings["disk_reads"] == "direct"
    assert nvme.nvme_bytes_per_step == pytest.approx(nvme.wire_bytes * (layers - kept) / layers, rel=0.02)
    assert nvme.host_weight_bytes == pytest.approx(nvme.nvme_weight_bytes * kept / layers, rel=0.02)
    engine.close()
    assert not list(drive.iterdir())


def test_packed_layers_are_read_where_they_are(models: Callable[[str], Path], drive: Path) -> None:
    folder = models("bf16")
    expected, _ = in_memory(folder, drive)
    data = write(resolve(str(folder), "bfloat16", None)) / packed.DATA
    engine = load("stream", folder, "nvme", drive, "bfloat16", weight_codec="lossless", host_weights="40%")
    assert not list(drive.iterdir())
    assert equal(tokens(engine), expected)
    size = data.stat().st_size
    assert engine.effective().nvme_weight_bytes == pytest.approx(size, abs=4096)
    assert engine.loaded_bytes < size + engine.plan.model.other_bytes


def test_layers_on_the_gpu_and_keys_in_host_memory_go_with_it(models: Callable[[str], Path], drive: Path) -> None:
    folder = models("bf16")
    expected, _ = in_memory(folder, drive)
    engine = load("stream", folder, "nvme", drive, "bfloat16", device_rows=1, kv_offload="cpu", host_weights="40%")
    assert equal(tokens(engine), expected)
    assert engine.effective().settings["kv_host_rows"] == 1
    engine.close()
    two = greedy(Stream(plan(folder, drive, host_weights="0%")), (4, 3))
    engine = Stream(plan(folder, drive, host_weights="34%", on_gpu="34%"))
    assert torch.equal(greedy(engine, (4, 3)), two)
    assert engine.ring is not None
    assert len(engine.ring.streamed) == 2
    effective = engine.effective()
    assert effective.settings["host_layers"] == 1
    assert effective.nvme_bytes_per_step * 2 == effective.wire_bytes


def plan(
    folder: Path, drive: Path, on_gpu: str | None = None, offload: Offload = "nvme",
    load_format: LoadFormat = "safetensors", **options: Any,
) -> Plan:  # fmt: skip
    return plan_of(folder, "stream", offload, drive, "bfloat16", sizes=(2, 4, 3), load_format=load_format,
                   gpu_weights=on_gpu, **options)  # fmt: skip


def reads(monkeypatch: Patch, instead: Callable[[Any], int]) -> None:
    """Have `instead` read layers from now on; it gets the memory to fill."""
    real = os.preadv

    def preadv(file: int, parts: list[Any], offset: int) -> int:
        layers = os.readlink(f"/proc/self/fd/{file}").endswith(packed.DATA)
        return instead(parts[0]) if layers else real(file, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def fail(_part: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def lie(part: Any) -> int:
    part[:] = bytes(len(part))
    return len(part)


FAULTS: dict[str, tuple[Callable[[Any], int], str]] = {
    "the drive fails": (fail, "Input/output error"),
    "the file ends": (lambda _part: 0, "is cut off"),
    "other bytes come": (lie, "is damaged"),
}


def fault_of(run: Callable[[], object]) -> str:
    """Return the line that `run` fails with, as a record has it."""
    with pytest.raises((OSError, CheckpointError)) as error:
        run()
    status, line, _ = failure_of(error.value)
    assert status == "io_error"
    assert "\n" not in line
    return line


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_of_a_disk_is_one_line_and_never_text(
    fault: str, models: Callable[[str], Path], drive: Path, monkeypatch: Patch
) -> None:
    instead, message = FAULTS[fault]
    engine = Stream(plan(models("bf16"), drive, host_weights="0%"))
    with monkeypatch.context() as patch:
        reads(patch, instead)
        assert message in fault_of(lambda: greedy(engine, (4, 3)))
        engine.clear()
        assert message in fault_of(lambda: greedy(engine, (4, 3)))
    engine.clear()
    first = greedy(engine, (4, 3))  # the drive is well again
    engine.clear()
    assert torch.equal(greedy(engine, (4, 3)), first)
    engine.clear()
    if fault != "other bytes come":  # what was checked once is not checked again while the file is the same
        with monkeypatch.context() as patch:
            reads(patch, instead)
            assert message in fault_of(lambda: greedy(engine, (4, 3)))
    engine.close()
    with monkeypatch.context() as patch:  # while layers are read into host memory
        reads(patch, instead)
        assert message in fault_of(lambda: Stream.start(plan(models("bf16"), drive, host_weights="100%")))
    assert not list(drive.iterdir())


def test_a_file_that_changes_is_checked_again(models: Callable[[str], Path], drive: Path) -> None:
    engine = Stream(plan(models("bf16"), drive, host_weights="0%"))
    expected = greedy(engine, (4, 3))
    (written,) = drive.glob(f"*/{packed.DATA}")
    os.utime(written)
    assert torch.equal(greedy(engine, (4, 3)), expected), "only touched"
    with written.open("r+b") as stream:
        stream.seek(written.stat().st_size // 2)
        stream.write(b"other weights")
    assert f"{written}: layer 1 is damaged" in fault_of(lambda: greedy(engine, (4, 3)))
    os.truncate(written, 5000)
    assert "is cut off" in fault_of(lambda: greedy(engine, (4, 3)))


def test_a_disk_that_fills_while_layers_are_written_leaves_nothing(
    models: Callable[[str], Path], drive: Path, monkeypatch: Patch
) -> None:
    real, written = os.pwrite, [0]

    def pwrite(file: int, part: Any, offset: int) -> int:
        room = 500_000 - written[0]
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written[0] += (count := real(file, part[:room], offset))
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    message = fault_of(lambda: Stream.start(plan(models("bf16"), drive)))
    assert f"takes no more weights ({os.strerror(errno.ENOSPC)})" in message
    assert "--nvme-path" in message
    assert not list(drive.iterdir())


def test_a_file_system_without_direct_reads_is_read_all_the_same(
    models: Callable[[str], Path], drive: Path, monkeypatch: Patch
) -> None:
    expected = greedy(Stream(plan(models("bf16"), drive, host_weights="0%")), (4, 3))
    real, dropped = os.open, list[int]()

    def refuse(path: Any, flags: int, *mode: int, **others: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode, **others)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[3]))
    engine = Stream(plan(models("bf16"), drive, host_weights="0%"))
    assert torch.equal(greedy(engine, (4, 3)), expected)
    assert engine.effective().settings["disk_reads"].startswith("buffered")
    assert os.POSIX_FADV_DONTNEED in dropped


class Copying:
    """A point behind a copy that goes on until `end`."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def synchronize(self) -> None:
        assert self.end.wait(20)


def test_memory_that_is_being_copied_is_not_read_into(tmp_path: Path) -> None:
    weights = [torch.full((3 * PAGE,), number, dtype=torch.uint8) for number in range(5)]
    plain = [plain_layer([("weight", weight)], 0) for weight in weights]
    layers = stored(tmp_path / "layers.bin", zip(range(5), plain, weights, strict=True), 0)
    places, copies, seen = layers.layers, deque[tuple[Copying, Any]](), 0
    layers.begin(cycle(layer.chunks[0] for layer in places))
    assert layers.ring_bytes == 6 * PAGE, "room for two"
    for turn in range(12):
        content = layers.get(places[turn % 5].chunks[0])
        assert bool((content == turn % 5).all())
        copies.append((Copying(), content))
        layers.release(copies[-1][0])  # type: ignore[arg-type]
        if len(copies) == 2:
            time.sleep(0.02)
            assert not layers.ready(places[(turn + 1) % 5].chunks[0]), "no room"
            copying, content = copies.popleft()
            assert bool((content == (turn - 1) % 5).all())
            copying.end.set()
            seen += 1
    for copying, _ in copies:
        copying.end.set()
    layers.close()
    assert seen == 11


def test_commands_take_it(models: Callable[[str], Path], tmp_path: Path) -> None:
    probed(tmp_path)
    load = ["-m", str(models("bf16")), "-O", "weight_codec=none", "--output-len", "6"]
    way = ["--offload", "nvme", "--nvme-path", "drive", "-O", "host_weights=34%"]
    ran = [zinfer(tmp_path, "run", *load, *how, "-p", "Hello", "--ignore-eos", "--json")
           for how in (["--offload", "cpu"], way)]  # fmt: skip
    assert [done.returncode for done in ran] == [0, 0], ran[1].stderr
    answers = [[row["output_ids"] for row in json.loads(done.stdout)] for done in ran]
    assert answers[0] == answers[1] != [[]]
    words = ["sweep", *load, *way, "--batch-size", "2", "--input-len", "8", "-o", "r.jsonl"]
    done = zinfer(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (point,) = read(tmp_path / "r.jsonl").points
    assert point.effective is not None
    assert 0 < point.effective.nvme_bytes_per_step < point.effective.nvme_weight_bytes
    # On a busy machine disk and copies may be ahead by all that the traced step needs.
    assert {"compute"} <= {span.lane for span in point.timeline} <= {"compute", "copy", "disk", "unpack"}
    prompt = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}
    (tmp_path / "q.jsonl").write_text(json.dumps(prompt))
    done = zinfer(tmp_path, "batch", "q.jsonl", "-o", "o.jsonl", *load[:4], *way)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "o.jsonl").read_text())["response"]["status_code"] == 200
    assert not list((tmp_path / "drive").iterdir())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=6),
    where=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_reads_are_the_bytes_that_were_written(
    lengths: list[int], where: tuple[float, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("direct") / "layers.bin"
    content = np.random.default_rng(0).integers(0, 256, sum(lengths), dtype=np.uint8).tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "REQUEST", 2 * PAGE)
        with DirectWriter(path) as writer:
            for start, stop in pairwise(accumulate(lengths, initial=0)):
                writer.write(memoryview(content)[start:stop])
            writer.flush()
        assert path.read_bytes() == content
        first, last = sorted(round(share * len(content)) for share in where)
        begin, end = direct.aligned(first, last)
        room = mmap.mmap(-1, max(PAGE, end - begin))
        with DirectFile(path) as file, room as memory, memoryview(memory) as whole:
            for start, stop in file.requests(begin, end):
                with whole[start - begin : stop - begin] as part:
                    file.read(part, start, min(stop, last) - start)
            assert bytes(whole[first - begin : last - begin]) == content[first:last]


def test_plans_know_the_disk() -> None:
    """A model of twice the host's memory: what host memory cannot keep sets the pass, or the link where that is
    slower."""
    machine = override(override(load_machine("h100-80gb"), "nvme_bandwidth=12GB/s"), "host_bytes=512GiB")
    spec = resolve("llama-3.1-405b", None, None)
    case = Case(model="llama-3.1-405b", engine="stream", offload="nvme", options=(("weight_codec", "none"),),
                workload=Workload(batch_size=4, input_len=512, output_len=32))  # fmt: skip

    def planned(machine: Machine = machine, link: float | None = 1.0, **update: Any) -> Plan:
        efficiency = None if link is None else Efficiency(link_share=link)
        return make_plan(case.model_copy(update=update), spec, machine, "/drive", efficiency)

    auto = planned()
    layers = auto.placement.host_layers
    assert auto.fits, auto.why_not
    assert not make_plan(case.model_copy(update={"offload": "cpu"}), spec, machine).fits
    assert 0.85 * 512 * 2**30 < auto.host.total <= 0.9 * 512 * 2**30
    kept = len(layers) / spec.num_layers
    assert auto.host.weights == auto.placement.held_bytes == pytest.approx(kept * spec.streamed_bytes, rel=1e-6)
    assert auto.nvme.total == spec.streamed_bytes
    assert auto.bound_by == "nvme"
    assert auto.step_s == pytest.approx((1 - kept) * spec.streamed_bytes / 12e9)
    distances = np.diff([-1, *sorted(set(range(spec.num_layers)) - set(layers)), spec.num_layers])
    assert max(distances) - min(distances) <= 2, "evenly spread"
    quick = planned(override(machine, "nvme_bandwidth=60GB/s"))
    assert quick.bound_by == "link"
    assert quick.step_s == pytest.approx(spec.streamed_bytes / (machine.h2d_bandwidth or 0))
    bare = planned(options=(("host_weights", "0%"), ("weight_codec", "none")))
    assert not bare.placement.host_layers
    assert bare.step_s == pytest.approx(spec.streamed_bytes / 12e9)
    coded = planned(options=())
    assert coded.nvme.total == pytest.approx(0.67 * spec.streamed_bytes)
    assert len(coded.placement.host_layers) > len(layers)
    limit = planned(link=None)
    assert limit.step_s is not None
    assert auto.step_s is not None
    assert 0.9 * auto.step_s < limit.step_s <= auto.step_s
    resident = planned(link=None, gpu_weights="10%").placement
    assert not set(resident.resident_layers) & set(resident.host_layers)


TWICE = """
import resource, sys, threading
from pathlib import Path

import torch

from tests.running import decode, prefill
from zinfer.engine.stream.engine import Stream
from zinfer.plan.planner import Plan

threading.stack_size(1 << 18)  # stacks count
torch.set_num_threads(1)
small, cpu, nvme = map(Plan.model_validate_json, sys.stdin.read().splitlines())


def steps(plan):
    engine = Stream.start(plan)
    prefill(engine, torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long), reserve=2)
    decode(engine, torch.ones(2, dtype=torch.long))
    effective = engine.effective()
    engine.close()
    return effective


steps(small)  # all that is imported and kept
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + nvme.model.streamed_bytes // 2
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    steps(cpu)
    sys.exit("the limit holds the model in host memory")
except MemoryError:
    pass
print(steps(nvme).model_dump_json())
"""


@pytest.mark.slow  # imports everything in a process of its own
def test_a_model_of_twice_the_limit_of_memory_runs(tmp_path: Path, drive: Path) -> None:
    """Limit the process's memory beyond its start to half the layers."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    folder = save_config(tmp_path / "large", "llama", num_hidden_layers=32, **sizes)
    little = save_config(tmp_path / "small", "llama")
    how: dict[str, Any] = {"load_format": "dummy", "weight_codec": "none"}
    ways: list[dict[str, Any]] = [{"offload": "cpu"}, {"host_weights": "9MB"}]
    plans = [plan(little, drive, **how), *(plan(folder, drive, **way, **how) for way in ways)]
    done = subprocess.run(
        [sys.executable, "-c", TWICE], input="\n".join(plan.model_dump_json() for plan in plans), capture_output=True,
        text=True, env=environment(OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1"), timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    effective = Effective.model_validate_json(done.stdout)
    assert effective.nvme_weight_bytes > 260e6
    assert effective.settings["host_layers"] == 1
    assert effective.nvme_bytes_per_step == effective.nvme_weight_bytes * 31 / 32
    assert not list(drive.iterdir())


def test_shares_of_host_memory_are_checked() -> None:
    assert resolve_options("stream", {"host_weights": "64GiB"}) == (("host_weights", "64GiB"),)
    for wrong in ("lots", "140%", "-3GB", "nan%"):
        with pytest.raises(OptionError, match="choose from auto, SIZE"):
            resolve_options("stream", {"host_weights": wrong})


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([40, 512, 1300, 2600, 9000]), min_size=1, max_size=5),
    depth=st.integers(2, 7),
    ring=st.integers(0, 60_000),
    passes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=5),
    kept=st.sets(st.integers(0, 4)),
)
def test_no_buffer_is_read_early_or_overwritten_late(
    sizes: list[int], depth: int, ring: int, passes: list[tuple[int, int]], kept: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("layers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_module, "CHUNK_BYTES", 5000)
        bench = Bench(sizes, depth, FakeQueues(), patch, from_disk(folder, ring, kept & set(range(len(sizes)))))
        for number, (calls, count) in enumerate(passes):
            bench.borrowed.clear()
            bench.run_pass(calls, [Answer(index, number) for index in range(count)])
            assert bench.borrowed == [[f, layer, number, 7] for layer in range(len(sizes)) for f in range(count)]
        bench.close()


def test_a_trace_shows_the_reads_of_a_disk_beside_the_copies(tmp_path: Path, monkeypatch: Patch) -> None:
    """Reads of a real file, of 20 ms each: the link waits for them, and layers of host memory are not among them."""
    real = os.preadv

    def preadv(file: int, parts: list[Any], offset: int) -> int:
        time.sleep(0.02)
        return real(file, parts, offset)

    monkeypatch.setattr(chunk_module, "CHUNK_BYTES", 5000)
    bench = Bench([9000] * 6, 3, FakeQueues(), monkeypatch, from_disk(tmp_path, 20_000, {1, 4}))
    bench.run_pass()
    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(2):
        with bench.ring.watched() as trace:
            bench.run_pass()
        spans = trace.spans()
    bench.close()
    reads = [span for span in spans if span.lane == "disk"]
    assert {span.layer for span in reads} == {0, 2, 3, 5}
    assert len(reads) <= 10, "one for each chunk at most"
    assert [span.start_ms for span in reads] == sorted(span.start_ms for span in reads)
    assert all(span.end_ms > 0 for span in reads), "none that was over before the step"
    assert share(spans, "disk") > 0.6
    assert total_ms(idle(spans)) > 0.5 * length_ms(spans)
    for layer in (2, 3):
        last = max(span.end_ms for span in spans if (span.lane, span.layer) == ("copy", layer))
        ends = [span.end_ms for span in reads if span.layer == layer and span.start_ms < last]  # others: the next pass
        assert 0 < max(ends) <= last, "a piece is copied once it is there"


def stored(path: Path, layers: Any, ring_bytes: int) -> DiskSource:
    """Write layers into a file; return their source."""
    with DirectWriter(path) as writer:
        places, sums = disk.write(writer.write, layers)
    return DiskSource(DirectFile(path), places, sums, ring_bytes, False)


def from_disk(folder: Path, ring_bytes: int, kept: set[int]) -> Callable[..., PrefetchRing]:
    """Return a factory of rings for `Bench`. Their layers come from a file in `folder`."""

    def make(arena: PinnedArena, layers: list[Any], depth: int, device: torch.device, queues: Any) -> PrefetchRing:
        def from_zero() -> Any:
            for index, layer in enumerate(layers):
                chunks = tuple(replace(chunk, start=chunk.start - layer.start, end=chunk.end - layer.start)
                               for chunk in layer.chunks)  # fmt: skip
                yield index, replace(layer, chunks=chunks), arena.memory[layer.start : layer.end]

        ring = PrefetchRing(stored(folder / "layers.bin", from_zero(), ring_bytes), depth, device, queues)
        ring.hold(kept)
        return ring

    return make
