"""Result files: they survive kills, full disks, flipped bits, a second writer, and lines of another version."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.command import small_files
from tests.results import case, point, traced
from zinfer.core.case import Case, Workload
from zinfer.record import jsonl
from zinfer.record.measurement import Effective, Measurement, Span
from zinfer.record.store import Header, Records, Store, StoreError, decode, encode, read

HEADER = Header(machine="h100", recipe={"engines": ["stream"], "batch_size": [1, 2]}, versions={"zinfer": "0.1.0"})
POINTS = [point(case(size, output_len=3), repeats=2) for size in (1, 2, 4)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "h100" / "bloom.jsonl"
    with Store(path) as store:
        store.append(HEADER, *POINTS)
    return path


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def reason(line: bytes) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        decode(line)
    return str(caught.value)


def resealed(*without: str, **changes: object) -> bytes:
    """Return a point's line with changed fields and a right checksum. A zinfer of another version would write it so."""
    fields = json.loads(encode(POINTS[0])) | changes
    return jsonl.seal("point", {key: value for key, value in fields.items() if key not in ("checksum", *without)})


def read_back(line: bytes) -> Measurement:
    point = decode(line)
    assert isinstance(point, Measurement)
    return point


def test_a_file_holds_what_was_appended_as_json_with_a_version_and_a_checksum(file: Path) -> None:
    records = read(file)
    assert (records.points, records.headers, records.damaged) == (tuple(POINTS), (HEADER,), ())
    with Store(file) as store:
        store.append(POINTS[0])  # of repeated cases all are kept
        assert (read(file).points, read(file).headers, read(file).damaged) == ((*POINTS, POINTS[0]), (HEADER,), ())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["sweep", *["point"] * 4]
    assert all(line["schema_version"] == 2 and len(line["checksum"]) == 16 for line in lines)


@pytest.mark.usefixtures("no_sync")
def test_a_record_torn_at_any_byte_is_cut_off_and_kept_aside(tmp_path: Path) -> None:
    file, points = tmp_path / "short.jsonl", [point(case(size), status="oom_gpu", versions={}) for size in (1, 2, 4)]
    with Store(file) as store:
        store.append(*points[:2])
    whole = file.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    damaged = file.with_name(file.name + ".damaged")
    for end in (*range(start, len(whole) - 9, 5), *range(len(whole) - 9, len(whole))):
        file.write_bytes(whole[:end])
        damaged.unlink(missing_ok=True)
        kept = points[:2] if end == len(whole) - 1 else points[:1]  # only the newline is missing
        assert len(read(file).points) == len(kept)
        assert file.read_bytes() == whole[:end], "reading changes nothing"
        with Store(file) as store:
            assert len(read(store.path).points) == len(kept)
            store.append(points[2])
        records = read(file)
        assert records.points == (*kept, points[2])
        assert records.damaged == ()
        cut = b"" if end == start or len(kept) == 2 else whole[start:end] + b"\n"
        assert (damaged.read_bytes() if damaged.exists() else b"") == cut


def test_every_flipped_bit_is_detected() -> None:
    line = encode(POINTS[0])
    assert decode(line) == POINTS[0]
    for position in range(len(line)):
        for bit in range(8):
            flipped = bytearray(line)
            flipped[position] ^= 1 << bit
            for part in bytes(flipped).split(b"\n"):
                assert reason(part)


@pytest.mark.usefixtures("no_sync")
def test_a_flipped_byte_in_the_middle_costs_that_line_only(file: Path) -> None:
    whole = file.read_bytes()
    lines = whole.split(b"\n")
    start = len(lines[0]) + 1
    for position in range(start, start + len(lines[1]) + 1, 7):
        broken = bytearray(whole)
        broken[position] ^= 0x40
        file.write_bytes(broken)
        records = read(file)
        assert POINTS[0] not in records.points
        assert POINTS[2] in records.points
        assert records.headers == (HEADER,)
        assert records.damaged[0].line == 2
        assert "bloom.jsonl:2" in str(records.damaged[0])
        for _ in range(2):  # a second opening does not copy the line again
            assert read(file).damaged
            with Store(file):
                pass
        assert file.read_bytes() == broken
    damaged = file.with_name(file.name + ".damaged").read_bytes().splitlines()
    assert len(set(damaged)) == len(damaged)


def test_a_garbled_last_line_is_cut_off_and_kept_aside(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"batch_size":4', b'"batch_size":5'))
    assert "checksum" in read(file).damaged[0].reason
    with Store(file) as store:
        assert read(store.path).points == tuple(POINTS[:2])
    assert file.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    assert b'"batch_size":5' in file.with_name(file.name + ".damaged").read_bytes()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (resealed(schema_version=3), "schema version 3"),
        (resealed(kind="energy"), "unknown kind of record 'energy'"),
        (resealed(status="fine"), "status"),
        (resealed(surprise=1), "surprise"),
        (resealed().replace(b'"status":"ok"', b'"status":"no"'), "checksum"),
        (resealed().replace(b",", b", ", 1), "checksum"),
        (b'{"checksum":"0","ttft_ms":[NaN]}', "not a whole record"),
        (b'{"checksum":"0","ttft_ms":[1e999]}', "not a whole record"),
        (b"[1]", "not a whole record"),
        (b"", "not a whole record"),
        (b"[" * 100_000, "not a whole record"),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: bytes, why: str) -> None:
    assert why in reason(line)


def test_lines_of_another_version_are_left_in_place(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(resealed(schema_version=3) + b"\n")
    before = file.read_bytes()
    assert [damage.line for damage in read(file).damaged] == [5]
    with Store(file):
        pass
    assert file.read_bytes() == before
    assert not file.with_name(file.name + ".damaged").exists()


def test_a_full_disk_leaves_the_whole_records(file: Path) -> None:
    with Store(file) as store:
        size = file.stat().st_size
        for room in (0, 1, 100, 500):
            with small_files(size + room), pytest.raises(StoreError, match=r"cannot write .*records in it are kept"):
                store.append(POINTS[0])
            assert file.stat().st_size == size
        store.append(POINTS[0])
    assert (len(read(file).points), read(file).damaged) == (4, ())


def test_a_failed_sync_takes_the_record_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    with Store(file) as store:
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(StoreError, match="Input/output error"):
            store.append(POINTS[0])
    assert file.read_bytes() == before


def test_a_second_writer_is_refused(file: Path) -> None:
    script = "import sys, pathlib; from zinfer.record.store import Store; Store(pathlib.Path(sys.argv[1]))"
    with Store(file) as store:
        read(store.path)  # closing a reader's descriptor must not release the lock
        with pytest.raises(StoreError, match="another zinfer is writing"):
            Store(file)
        other = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False)
        assert "another zinfer is writing" in other.stderr
    Store(file).close()


def test_a_file_that_is_no_results_file_is_not_touched(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my\nnotes\n")
    with pytest.raises(StoreError, match="not a results file"):
        Store(notes)
    assert notes.read_text() == "my\nnotes\n"
    with pytest.raises(StoreError, match="cannot open"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="not a regular file"):
        Store(Path("/dev/null"))


def test_empty_and_header_only_files(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert read(path) == read(tmp_path) == Records()
    with Store(path) as store:
        store.append(HEADER)
        assert read(store.path).points == ()
    assert read(path).headers == (HEADER,)
    with pytest.raises(StoreError, match="cannot read"):
        read(tmp_path / "nowhere")


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    for name, measured in (("h200/b.jsonl", POINTS[2]), ("h100/z.jsonl", POINTS[1]), ("h100/a.jsonl", POINTS[0])):
        with Store(tmp_path / name) as store:
            store.append(measured)
    (tmp_path / "h100" / "machine.json").write_text("{}")
    (tmp_path / "h100" / "a.jsonl.damaged").write_text("x")
    records = read(tmp_path)
    assert records.points == tuple(POINTS)
    assert records.warning is None


def test_a_timeline_is_stored_as_short_rows_and_those_of_earlier_records_are_read() -> None:
    spans = traced(layers=70, decode_ms=6.2)
    plain, with_timeline = encode(POINTS[0]), encode(POINTS[0].model_copy(update={"timeline": spans}))
    assert json.loads(with_timeline)["timeline"][2] == ["copy", 2, 6.854, 97.899]
    assert len(spans) == 3 * 70 + 2
    assert len(with_timeline) - len(plain) < 36 * len(spans)
    assert [span.row() for span in read_back(with_timeline).timeline] == [span.row() for span in spans]
    earlier = read_back(resealed(timeline=[["decode", 3, 1.0, 2.5]]))
    assert earlier.timeline == (Span(lane="unpack", layer=3, start_ms=1.0, end_ms=2.5),)
    assert json.loads(encode(earlier))["timeline"] == [["unpack", 3, 1.0, 2.5]]
    assert decode(resealed("timeline")) == POINTS[0]


def test_not_a_number_is_written_as_null() -> None:
    nan, infinity = float("nan"), float("inf")
    gpu = {"throttle_reasons": [infinity, 1.0], "path": Path("x")}
    numbers = {"predicted": {"step_s": nan}, "gpu": gpu, "load_s": nan}
    measured = read_back(encode(POINTS[0].model_copy(update=numbers)))
    assert measured.predicted == {"step_s": None}
    assert measured.gpu == {"throttle_reasons": [None, 1.0], "path": "x"}
    assert measured.load_s is None
    with pytest.raises(ValidationError, match="ttft_ms"):
        Measurement.model_validate(POINTS[0].model_dump() | {"ttft_ms": (nan, 1.0)})


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
believed = st.floats(-1e18, 1e18) | st.integers(-(10**18), 10**18)
times = st.floats(1e-4, 1e9)
anything = st.recursive(st.none() | st.booleans() | believed | text, lambda inner: st.lists(inner) | (
    st.dictionaries(text, inner, max_size=3)
), max_leaves=5)  # fmt: skip
counts = st.integers(1, 10**6)
options = st.dictionaries(text, st.booleans() | believed | text, max_size=3)
chosen = options.map(lambda settings: tuple(sorted(settings.items())))
workloads = st.builds(Workload, batch_size=counts, input_len=counts, output_len=counts)
offloads, layers = st.sampled_from(["none", "cpu", "nvme"]), st.none() | counts
cases = st.builds(Case, model=text, engine=text, offload=offloads, workload=workloads, layers=layers, options=chosen)
LANES: tuple[Literal["copy", "unpack", "compute"], ...] = ("copy", "unpack", "compute")
sizes, steps = st.integers(0, 2**48), st.lists(times, max_size=4).map(tuple)
rows = st.tuples(st.sampled_from(LANES), st.none() | counts, st.floats(-1e6, 1e6), st.floats(0.001, 1e6))
timelines = st.lists(
    rows.map(lambda row: Span(row[0], row[1], round(min(row[2:]), 3), round(max(row[2:]), 3))), max_size=3
)
measurements = st.builds(
    Measurement,
    case=cases,
    status=st.sampled_from(["oom_gpu", "crashed"]),
    machine=text,
    error=st.none() | text,
    ttft_ms=st.tuples(times, times),
    step_ms=st.tuples(steps, steps),
    gpu_peak_bytes=st.none() | sizes,
    effective=st.none() | st.builds(Effective, gpu_weight_bytes=sizes, settings=st.dictionaries(text, anything)),
    gpu=st.dictionaries(text, st.none() | text | st.floats(0, 1e18), max_size=3),
    versions=st.dictionaries(text, text, max_size=3),
    predicted=st.dictionaries(text, st.floats(0, 1e18) | st.none(), max_size=3),
    timeline=timelines.map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(measurements)
def test_what_is_written_is_what_is_read(measured: Measurement) -> None:
    line = encode(measured)
    assert b"\n" not in line
    assert decode(line) == measured
