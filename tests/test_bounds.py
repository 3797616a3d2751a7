"""Limits of what is typed and read: options, recipes, machines, records, and files that are no files."""

import errno
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest

from tests.fuzz_documents import prepare, run
from tests.results import accuracy_run, case, codec_run, kept_point, point, reuse_run, sweep, traced
from tests.test_cli import verbs
from zinfer.core.machine import Machine, MachineError, override
from zinfer.core.units import duration, figures, parse_bytes
from zinfer.job.recipe import RecipeError, make_sweep, read_toml
from zinfer.record import study
from zinfer.record.jsonl import StoreError
from zinfer.record.measurement import Effective
from zinfer.record.store import Header, encode, read
from zinfer.system import documents, machines


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)


PLAN = ["plan", "-m", "bloom-tiny", "--machine", "h200"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PLAN, "--batch-size", "1-1000000000+1"], "at most 1,000 sizes"),
        ([*PLAN, "--batch-size", "9" * 30], "write auto"),
        ([*PLAN, "--batch-size", "1,2000000000"], "sizes from 1 to 1,000,000,000"),
        ([*PLAN, "--input-len", "9" * 5000], "write positive whole numbers"),
        ([*PLAN, "--output-len", ",".join(map(str, range(1, 1200)))], "1,199 values: at most 1,000"),
        ([*PLAN, "--gpus", "2000000"], "gpus=2000000"),
        ([*PLAN, "--gpu-weights", "1e400GB"], "is too large"),
        ([*PLAN, "--set", "h2d_bandwidth=1e400GB/s"], "is not a value for h2d_bandwidth"),
        ([*PLAN, "--set", "nvme_bandwidth=1e300"], "is not a value for nvme_bandwidth"),
        (["best", "r.jsonl", "--utilisation", "5e-324"], "write 0, or a number from 1e-09 on"),
        (["best", "r.jsonl", "--sla", "ttft:p99:<=:" + "9" * 400 + "s"], "is not a duration"),
        (["best", "r.jsonl", "--sla", "output_tok_s:mean:>=:" + "9" * 400], "is not a rate"),
        (["best", "r.jsonl", "--demand", "1e300Mtok/day"], "is not a demand"),
        (["best", "r.jsonl", "--demand", "1Mtok", "--deadline", "9" * 400 + "h"], "is not a duration"),
        (["compare", "r.jsonl", "r.jsonl", "--fail-on-regression", "9" * 400 + "%"], "write a number up to"),
        (["run", "-m", "bloom-tiny", "-p", "x", "--seed", "9" * 30], "up to 9,223,372,036,854,775,808"),
        (["run", "-m", "bloom-tiny", "-p", "x", "--kv-cache-size", "1e400GB"], "is too large"),
        (["run", "-m", "bloom-tiny", "-p", "x" * (1 << 21)], "characters: at most 1,048,576"),
        (["run", "-m", "a" * 3000, "-p", "x"], "at most 1024"),
        (["best", "a" * 5000], "5,000 characters: at most 4,096"),
        (["export", "r.jsonl", "-o", "a" * 5000], "5,000 characters: at most 4,096"),
        (["run", "-m", "bloom-tiny", "-p", "x", "-O", "gpus=" + "9" * 400], "write a whole number"),
        (["study", "reuse", "-m", "bloom-tiny", "--context", "9999999999k"], "up to 1,000,000,000"),
        (["probe", "--memory", "1"], "--memory: 64MiB at least"),
    ],
)
def test_an_option_out_of_bounds_is_refused_at_once(words: list[str], message: str) -> None:
    Path("r.jsonl").write_bytes(b"".join(encode(record) + b"\n" for record in sweep()[:4]))
    code, out, err, _ = run(words)
    assert (code, out) == (2, ""), err
    assert message in err
    assert len(err) < 2500


def test_many_uses_of_an_option_and_a_number_for_a_name_are_within_bounds() -> None:
    many = ["-p", "x"] * 1001
    context = verbs()["run"].make_context("run", ["-m", "m", *many, "-O", "packed=20240101123456"])
    assert len(context.params["prompts"]) == 1001
    assert dict(context.params["settings"]) == {"packed": (20240101123456,)}


def test_every_number_of_every_verb_is_bounded() -> None:
    Path("r.jsonl").touch()
    needed = {"compare": ["r.jsonl", "r.jsonl"], "batch": ["r.jsonl", "-o", "o.jsonl"]}
    for verb, command in verbs().items():
        words = needed.get(verb, []) + ["-m", "m"] * any("--model" in param.opts for param in command.params)
        numbers = [param for param in command.params if param.metavar in ("N", "X")]
        for param, wrong in product(numbers, ("nan", "inf", "1e300", "5e-324", "9" * 60)):
            with pytest.raises(click.BadParameter) as refused:
                command.make_context(verb, [*words, param.opts[-1], wrong])
            assert refused.value.param is param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": []}, "model: "),
        ({"model": ["m"] * 1001}, "model: "),
        ({"model": [f"m{n}" for n in range(900)], "engine": ["a", "b"]}, "3,600 loads"),
        ({"model": "m", "input_len": list(range(1, 400)), "output_len": list(range(1, 400))}, "318,402 points"),
        ({"model": "m", "batch_size": ["a"]}, "batch sizes"),
        ({"model": "m", "batch_size": True}, "batch sizes"),
        ({"model": "m", "batch_size": 10**30}, "batch sizes"),
        ({"model": "m\x1b[2J"}, "model.0: a name has no control characters"),
        ({"model": "m", "options": {"a": []}}, "options.a"),
        ({"model": "m", "options": 3}, "options"),
        ({"model": "m", "timeout_s": float("nan")}, "timeout_s"),
        ({"model": "m", "tolerance": float("nan")}, "tolerance"),
        ({"model": "m", "repeats": 10**12}, "repeats"),
        ({"model": "m", "layers": 0}, "layers.0"),
        ({"model": "m", "input_len": -1}, "input_len.0"),
        ({"model": "m", "gpu_weights": "1e400GB"}, "gpu_weights"),
        ({"model": "m", "description": "a" * 5000}, "description"),
    ],
)
def test_a_recipe_out_of_bounds_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make_sweep(fields, "r.toml")
    assert str(refused.value).startswith("r.toml: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'model = "\xff"', "not UTF-8"),
        (b"model = " + b"[" * 60_000, "nested too deep"),
        (b"model = [" + b'"m",' * 100_000 + b"]", "larger than 65,536 bytes"),
        (b"model = ", "is damaged"),
        (b"repeats = " + b"9" * 5000, "is damaged"),
    ],
)
def test_a_recipe_that_is_no_recipe_is_refused_at_once(content: bytes, message: str) -> None:
    path = Path("sweeps/r.toml")
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=message) as refused:
        read_toml(path)
    assert str(refused.value).startswith("sweeps/r.toml ")


def test_an_axis_has_each_value_once_and_sizes_and_times_have_an_end() -> None:
    assert make_sweep({"model": ["m", "m"], "input_len": [1, 1, 2]}, "r").input_len == (1, 2)
    for text in ("1e400GB", "9" * 5000, "1e18GB"):
        with pytest.raises(ValueError, match="too large"):
            parse_bytes(text)
    ends = (figures(float("inf")), figures(float("nan")), duration(float("inf")))
    assert ends == ("inf", "nan", "inf s")


WRONG_MACHINES: dict[str, tuple[dict[str, Any], ...]] = {
    "h2d_bandwidth": ({"h2d_bandwidth": 0}, {"h2d_bandwidth": -1.0}, {"h2d_bandwidth": 1e300}),
    "host_bytes": ({"host_bytes": 0},),
    "": ({"host_bytes": 10**30},),
    "both, or neither": ({"gpu_count": 1, "gpu_bytes": 0}, {"gpu_count": 0, "gpu_bytes": 1}),
    "gpu_count": ({"gpu_count": -1},),
    "name": ({"name": ""}, {"name": "a" * 1000}),
    "matmul_flops": ({"matmul_flops": 1e-300},),
    "details": ({"details": []},),
    "details.host": ({"details": {"host": 3}},),
    "details.host.cores": ({"details": {"host": {"cores": "many"}}},),
}


@pytest.mark.parametrize("message", WRONG_MACHINES)
def test_a_machine_out_of_bounds_is_refused(message: str) -> None:
    path = Path("machine.json")
    good = {"name": "m", "source": "measured", "gpu_count": 1, "gpu_bytes": 1 << 30}
    for bandwidth in (5e10, True):
        path.write_text(json.dumps(good | {"h2d_bandwidth": bandwidth}))
        assert machines.load(path).h2d_bandwidth == bandwidth
    for fields in WRONG_MACHINES[message]:
        path.write_text(json.dumps(good | fields))
        with pytest.raises(MachineError, match=r"^machine\.json") as refused:
            machines.load(path)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(MachineError, match="gpu_bytes"):  # set by hand, it has the same bounds
        override(Machine(name="cpu", source="measured", host_bytes=1 << 30), "gpu_bytes=80GB")


def effective(**fields: Any) -> dict[str, Effective]:
    return {"effective": Effective.model_construct(gpu_weight_bytes=0, **fields)}


AT_LEAST = "ttft_ms.0: Input should be greater than or equal to 0.0001 (not "
WRONG: dict[str, dict[str, Any]] = {
    f"{AT_LEAST}'0.0')": {"ttft_ms": (0.0, 1.0, 1.0)},
    f"{AT_LEAST}'1e-300')": {"ttft_ms": (1e-300, 1.0, 1.0)},
    f"{AT_LEAST}'-5.0')": {"ttft_ms": (-5.0, 1.0, 1.0)},
    "ttft_ms.0: Input should be less": {"ttft_ms": (1e300, 1.0, 1.0)},
    "step_ms.0.0: ": {"step_ms": ((0.0,) * 31,) * 3},
    "step_ms: 2 repeats, and ttft_ms has 3": {"step_ms": ((1.0,) * 31,) * 2},
    "step_ms: 5 steps for 32 tokens": {"step_ms": ((1.0,) * 5,) * 3},
    "link_bandwidth: ": {"link_bandwidth": 0.0},
    "load_s: ": {"load_s": -1.0},
    "gpu_peak_bytes: ": {"gpu_peak_bytes": -1},
    "num_layers: 80 of 70 layers": {"num_layers": 80},
    "machine: ": {"machine": "a" * 100_000},
    "gpu: 1e+300 is too large": {"gpu": {"energy_j": 1e300}},
    "case.model: String should have at most 1024": {"case": case(4).model_copy(update={"model": "a" * 5000})},
    "predicted.step_ms: ": {"predicted": {"step_ms": -1.0}},
    "effective.streamed_bytes_per_step: ": effective(streamed_bytes_per_step=-1),
    "effective.settings: slot_bytes without ring_depth": effective(settings={"slot_bytes": 1}),
    "effective.settings: ring_depth: 'x'": effective(settings={"ring_depth": "x"}),
    "timeline: GPU 1 of 1": {"timeline": tuple(span._replace(rank=1) for span in traced())},
    "timeline: a step of no length": {"timeline": tuple(span._replace(start_ms=-1.0, end_ms=0.0) for span in traced())},
}


@pytest.mark.parametrize("reason", WRONG)
def test_records_that_nobody_can_believe_are_counted_and_left_out(reason: str) -> None:
    """Every reader gets the other points. The warning names file and line."""
    good = [point(case(size)) for size in (1, 2)]
    wrong = point(case(4)).model_copy(update=WRONG[reason])
    path = Path("r.jsonl")
    path.write_bytes(b"".join(encode(record) + b"\n" for record in (Header(machine="h100"), good[0], wrong, good[1])))
    records = read(path)
    assert records.points == tuple(good)
    assert [damage.line for damage in records.damaged] == [3]
    assert reason in str(records.warning)
    verbs = ["best", "export", "compare r.jsonl", "plot --format svg"] if reason == next(iter(WRONG)) else ["export"]
    for words in ([*verb.split(), "r.jsonl"] for verb in verbs):
        code, out, err, _ = run(words)
        assert code == 0, err
        assert out
        assert f"left out r.jsonl:3: {reason}" in err


def test_studies_that_nobody_can_believe_are_left_out() -> None:
    codec, reuse, accuracy = codec_run("a"), reuse_run(kept_point(512, 9.0, 5.0)), accuracy_run()
    wrong: tuple[tuple[study.Study, dict[str, Any]], ...] = (
        (codec, {"rows": (codec.rows[0].model_copy(update={"raw_bytes": 0}),)}),
        (reuse, {"rows": (reuse.rows[0].model_copy(update={"recompute_ms": (0.0,)}),)}),
        (accuracy, {"samples": 10**30}),
    )
    for right, fields in wrong:
        path = Path(f"{right.study}.jsonl")
        study.append(path, right.model_copy(update=fields))
        study.append(path, right)
        studies = study.read(path, right.study)
        assert studies.runs == (right,)
        assert [damage.line for damage in studies.damaged] == [1]


READERS = [
    ["best", "X"], ["plot", "X"], ["report", "X", "-o", "o.html"], ["export", "X"], ["compare", "X.jsonl", "X.jsonl"],
    ["plan", "X.toml"], ["sweep", "X.toml"], ["plan", "-m", "bloom-tiny", "--machine", "X"],
    ["plan", "-m", "bloom-tiny", "--machine", "h200", "--calibrate", "X"],
    ["run", "-m", "bloom-tiny", "--prompt-file", "X"], ["batch", "X", "-o", "out.jsonl", "-m", "bloom-tiny"],
    ["study", "accuracy", "-m", "bloom-tiny", "--load-format", "dummy", "--kv-cache-dtype", "int8", "--prompt-file",
     "X"],
]  # fmt: skip


@pytest.mark.parametrize("words", READERS, ids=lambda words: " ".join(words[:2]) + words[-1][:2])
@pytest.mark.parametrize("kind", ["fifo", "dev/zero", "proc/self/mem", "folder", "denied"])
def test_what_is_no_readable_file_is_refused_without_a_wait(
    words: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(word for word in words if word.startswith("X"))
    if kind == "folder" and words[0] == "report":
        pytest.skip("a report of an empty folder says so on its first page")
    path, opened = Path(name), os.open
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            (path / "a.jsonl").mkdir(parents=True)
        case "denied":
            path.write_text("x")

            def refuse(file: Any, *args: Any, **more: Any) -> int:
                if str(file) == name:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
                return opened(file, *args, **more)

            monkeypatch.setattr("zinfer.system.documents.os.open", refuse)
        case device:
            path.symlink_to(f"/{device}")
    code, _, err, _ = run(words)  # a wait for a writer would have no end
    assert code in ((5,) if kind == "denied" else (2, 4, 5)), err
    assert not [word for word in ("Internal", "Traceback") if word in err]
    assert name in err or kind == "folder"
    assert len(err.strip().splitlines()) <= 4


def test_an_unreadable_file_among_others_is_named_and_passed_over() -> None:
    folder = Path("sweeps/results/h100")
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(encode(point(case(1))) + b"\n")
    os.mkfifo(folder / "pipe.jsonl")
    records = read(Path("sweeps/results"))
    assert len(records.points) == 1
    assert "pipe.jsonl:0: is not a regular file" in str(records.warning)
    with pytest.raises(StoreError, match="not a regular file"):
        read(folder / "pipe.jsonl")


def test_a_missing_file_and_an_odd_name_are_told_apart() -> None:
    with pytest.raises(FileNotFoundError):
        documents.read_bytes(Path("nothing"))
    for name in ("a\0b", "a" * 300, "machine.json/x"):
        Path("machine.json").write_text("{}")
        with pytest.raises(documents.DocumentError) as refused:
            documents.read_bytes(Path(name))
        assert refused.value.exit_code == 2
