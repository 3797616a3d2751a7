"""Command `zinfer best`: names the best configuration, in a table and as JSON."""

import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import Patch, invoke, mentions
from tests.results import case, plain, point, sweep
from zinfer.analysis.rates import rate_text
from zinfer.analysis.reproduce import case_commands
from zinfer.commands.batch import command as batch
from zinfer.commands.options import merged, one_load
from zinfer.core.case import Case, Workload
from zinfer.record.store import Store, read
from zinfer.system.machines import load

best = partial(invoke, "best")


def machines(*words: object) -> list[str]:
    """Return the machines of the groups that `best` shows."""
    return [group["machine"] for group in json.loads(best(*words, "--json").stdout)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    with Store(tmp_path / "h100" / "bloom.jsonl") as store:
        store.append(*sweep())
    whole: dict[str, Any] = {"model": "opt-[x]-30b", "layers": None, "load_format": "safetensors"}
    with Store(tmp_path / "h200" / "opt.jsonl") as store:
        store.append(point(case(4, **whole), machine="h200"))
        store.append(point(case(1, "accelerate", **whole), status="crashed", machine="h200"))
    return tmp_path


def test_the_table_answers_with_a_command(results: Path) -> None:
    done = best(results)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert mentions(lines[0], "Best of opt-[x]-30b, 512 in / 32 out: stream cpu, batch 4, ", " tok/s")
    (best_of_slice,) = (line for line in lines if line.startswith("Best of bloom-176b"))
    assert mentions(best_of_slice, "Best of bloom-176b, 14 of 70 layers, 512 in / 32 out: stream none, batch 8, ")
    head = next(nth for nth, line in enumerate(lines) if line.startswith("bloom-176b"))
    assert mentions(lines[head], "14 of 70 layers", "512 in", "32 out")
    assert mentions(lines[head + 1], "slice", "dummy weights")
    again = "zinfer sweep --model bloom-176b --engine stream --offload none --dtype bfloat16 --batch-size 8"
    assert any(again in line and "--layers 14" in line for line in lines)
    use = "zinfer batch prompts.jsonl -o answers.jsonl --model bloom-176b --engine stream"
    assert any(use in line and "--layers" not in line for line in lines)
    assert sum("zinfer plan --model bloom-176b" in line for line in lines) == 1, "the warning about a slice"
    assert "deepspeed:" not in done.stdout, "it was measured with offload only"
    for engine in ("Any engine:", "stream:"):
        assert any(line.startswith(engine) and re.search(r" cpu .* 0\.\d\dx", line) for line in lines)
    assert mentions(done.stdout, "accelerate cpu", "crashed", "batch 1")
    (row,) = re.findall("^│ deepspeed cpu.*", best(results, env={"COLUMNS": "200"}).stdout, re.MULTILINE)
    assert [cell.strip() for cell in row.strip("│").split("│")][-3:] == ["74%", "20.0 GiB", "64"]


def test_json_has_stable_keys(results: Path) -> None:
    second, first = json.loads(best(results, "--json").stdout)
    group = "machine model layers dtype load_format total_layers input_len output_len"
    assert " ".join(first) == f"{group} best best_by_load lossy_by_load offload edges"
    assert (first["layers"], first["total_layers"], first["load_format"]) == (14, 70, "dummy")
    keys = "engine offload weights options batch_size output_tok_s output_tok_s_half_width decode_tok_s prefill_tok_s "
    keys += "ttft_ms tpot_ms h2d_bandwidth link_share gpu_peak_bytes host_peak_bytes usd_per_mtok j_per_token command "
    assert set(first["best"]) == {*keys.split(), "use_command"}
    assert first["best"] == first["best_by_load"][0]
    assert first["best"]["h2d_bandwidth"] is None, "unknown is null, never 0"
    assert [entry["batch_size"] for entry in first["best_by_load"]] == [8, 64, 64, 32, 16]
    verdict = first["offload"][0]
    assert (verdict["engine"], verdict["offload"], verdict["gain"] < 1) == (None, "cpu", True)
    (edge,) = [edge for edge in first["edges"] if edge["options"]]
    assert (edge["engine"], edge["offload"], edge["options"]) == ("stream", "cpu", {"weight_codec": "lossless"})
    assert (edge["largest_ok"], edge["smallest_oom"]) == (64, 128)
    assert second["machine"] == "h200"
    assert "--layers" not in second["best"]["command"]


def test_filters_choose_model_and_machine(results: Path) -> None:
    assert machines(results, "--machine", "h200") == ["h200"]
    for name in ("bloom-176b", "BigScience/BLOOM"):
        assert machines(results, "--model", name) == ["h100"]
    done = best(results, "--model", "bloom-7b1")
    assert done.exit_code == 4
    assert "bloom-176b on h100" in done.stderr


@pytest.mark.parametrize("failed", [False, True])
def test_nothing_usable_is_one_message(tmp_path: Path, failed: bool) -> None:
    if failed:
        with Store(tmp_path / "a.jsonl") as store:
            store.append(point(case(1), status="oom_host"))
    done = best(tmp_path)
    assert done.exit_code == 4
    assert done.stderr.count("\n") == 1
    assert ("oom_host" if failed else "zinfer sweep") in done.stderr


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Provide a checkout with the records of two other machines; this machine is called mine."""
    folder = tmp_path / "sweeps" / "results"
    for machine in ("nvidia-h100", "nvidia-h200", "nvidia-h200-16-cores"):
        with Store(folder / machine / "a.jsonl") as store:
            store.append(point(case(4, layers=None), machine=machine))
    (folder / "nvidia-h100" / "torn.jsonl").write_text("torn\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.system.local.name", lambda: "mine")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("verb", ["best", "plot --format svg", "report"])
def test_answers_are_for_this_machine(shipped: Path, verb: str) -> None:
    done = invoke(*verb.split())
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert mentions(done.stderr, "mine", "`zinfer sweep demo`", "--machine all", "nvidia-h100", "nvidia-h200")
    with Store(shipped / "mine" / "b.jsonl") as store:
        store.append(point(case(4, layers=None), machine="mine"))
    done = invoke(*verb.split())
    assert (done.exit_code, done.stderr) == (0, ""), "damage in the records of others does not matter"
    assert "mine" in done.stdout
    assert "nvidia" not in done.stdout
    everything = invoke(*verb.split(), "--machine", "all")
    assert everything.exit_code == 0
    if verb == "report":
        assert [done.stdout, everything.stdout] == ["plots/mine/report.html\n", "plots/all/report.html\n"]
    else:
        assert all(path.name in everything.stdout for path in shipped.iterdir())


def test_a_limit_of_this_machine_is_this_machine(shipped: Path) -> None:
    with Store(shipped / "mine" / "c.jsonl") as store:
        store.append(point(case(4), machine="mine-gpu-24-gb"))
        store.append(point(case(4), machine="mine-2-gpu-24-gb"))
    assert machines() == ["mine-gpu-24-gb"]


def test_machines_are_asked_for_by_name(shipped: Path) -> None:
    assert machines("--machine", "nvidia-h200") == ["nvidia-h200"], "the very name"
    assert machines("--machine", "nvidia-h200-") == ["nvidia-h200-16-cores"], "the beginning of one"
    assert machines("--machine", "nvidia-h1,nvidia-h200") == ["nvidia-h100", "nvidia-h200"]
    assert machines(shipped) == ["nvidia-h100", "nvidia-h200", "nvidia-h200-16-cores"], "a folder that is named"
    done = best("--machine", "b200")
    assert (done.exit_code, done.stderr.count("\n")) == (4, 1)
    assert mentions(done.stderr, "b200", "nvidia-h100")


def test_lossy_settings_have_a_table_of_their_own(tmp_path: Path) -> None:
    lossy = case(8, layers=None, options=(("kv_cache_dtype", "int8"),))
    with Store(tmp_path / "a.jsonl") as store:
        store.append(point(case(8, layers=None), 2.0), point(lossy, 1.0))
    done = best(tmp_path)
    exact, apart, other = map(done.stdout.index, ("stream cpu", "Lossy settings", "kv_cache_dtype=int8"))
    assert exact < apart < other
    assert "`zinfer study accuracy`" in done.stdout
    assert re.match(r"Best of bloom-176b, .*: stream cpu, batch 8, [0-9.]+", done.stdout)
    decided = best(tmp_path, "--objective", "latency")
    assert mentions(decided.stdout, "Best by latency", "stream cpu", "batch 8")
    assert mentions(decided.stdout, "Best lossy setting", "int8", "`zinfer study accuracy`")
    asked = best(tmp_path, "--sla", "tpot:p99:<=:1.5s")  # which the exact setting misses
    assert mentions(asked.stdout, "No point of 1 keeps every level")
    assert mentions(asked.stdout, "Best lossy setting", "int8")


@pytest.mark.torch
def test_one_side_alone_gives_the_command_for_the_other(results: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """The command plans what `best` then finds beside the other records."""
    with Store(tmp_path / "one" / "a.jsonl") as store:
        store.append(point(case(8)), point(case(4, "deepspeed")))
    done = best(tmp_path / "one", "--json")
    (verdict,) = json.loads(done.stdout)[0]["offload"]
    assert (verdict["gain"], verdict["verdict"]) == (None, None)
    (words,) = re.findall(r"^fits on the GPU: not measured; measure it with `zinfer (.*)`$", verdict["words"])
    assert "-o sweeps/results/h100/bloom-176b-none.jsonl" in words
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: load("h200"))
    planned = json.loads(invoke(*shlex.split(words), "--dry-run", "--json").stdout)
    assert {plan["case"]["offload"] for plan in planned} == {"none"}
    assert [plan["case"]["workload"]["batch_size"] for plan in planned][:2] == [1, 8]
    assert {Case.model_validate(plan["case"]).load for plan in planned} == {case(1, offload="none")}


def test_the_later_time_counts_whatever_the_files_are_called(tmp_path: Path) -> None:
    """`best`, `report` and `plot` agree on a case in two files."""
    for name, month, step_s in (("b", 1, 1.0), ("a", 2, 2.0)):
        with Store(tmp_path / "h100" / f"{name}.jsonl") as store:
            begun = f"2026-0{month}-01T00:00:00+00:00"
            store.append(*(point(case(size), step_s, started_at=begun) for size in (4, 8)))
    newest = read(tmp_path / "h100" / "a.jsonl").points[1]
    assert newest.output_tok_s is not None
    (group,) = json.loads(best(tmp_path, "--json").stdout)
    shown = tmp_path / "report.html"
    assert group["best"]["output_tok_s"] == newest.output_tok_s
    assert invoke("report", tmp_path, "-o", shown).exit_code == 0
    table = next(line for line in plain(shown.read_text()).splitlines() if "stream cpu, batch 8" in line)
    assert f"| {rate_text(newest)} " in table
    assert invoke("plot", tmp_path, "-o", tmp_path / "p", "--format", "svg").exit_code == 0
    drawn = [(tmp_path / "p" / "h100" / f"{name}-throughput.svg").read_bytes() for name in "ab"]
    assert drawn[0] == drawn[1]


CASES = (
    case(8, layers=14, gpu_weights="0%"),
    case(4, "deepspeed", model="bloom-176b", layers=None, input_len=64, output_len=7, dtype="float16"),
    case(3, layers=None, gpu_weights="25%", options=(("kv_offload", "cpu"), ("weight_codec", "none"))),
    case(2, "accelerate", "none", layers=2, options=(("pin_memory", False),)),
)


@pytest.mark.torch
@pytest.mark.parametrize("asked", CASES, ids=lambda asked: asked.label())
def test_the_printed_commands_measure_the_same_case_and_use_its_configuration(
    asked: Case, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: load("h100-80gb"))
    sweep, use = map(shlex.split, case_commands(asked))
    done = invoke(*sweep[1:], "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    (plan,) = json.loads(done.stdout)
    assert Case.model_validate(plan["case"]) == asked
    Path("prompts.jsonl").touch()
    assert use[:2] == ["zinfer", "batch"]
    given = batch.make_context("batch", use[2:]).params
    assert given["layers"] is None, "the whole model"
    assert given["batch_size"] == (asked.workload.batch_size if asked.layers is None else None)
    loads = one_load("batch", merged(given))
    whole = {load.case("dummy", given["dtype"], 1, 1) for load in loads}
    least = Workload(batch_size=1, input_len=1, output_len=1)
    assert asked.load.model_copy(update={"layers": None, "workload": least}) in whole
    assert len(whole) == (2 if asked.layers is not None and asked.offload == "none" else 1)


def test_names_that_a_shell_would_read_are_quoted() -> None:
    asked = case(32, model="my model; rm", options=(("kv_offload", True),))
    for command in case_commands(asked):
        assert "'my model; rm'" in command
        assert "--option kv_offload=true" in command
