"""Command `zinfer plan`: axes, calibration and replaced figures, without torch and without running anything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests import Patch, invoke, mentions
from tests.results import case, point
from zinfer.core.engine import OptionError
from zinfer.core.machine import catalogue
from zinfer.record.store import Store

ROOT = Path(__file__).parents[1]
H100 = f"{ROOT}/sweeps/results/nvidia-h100-80gb-hbm3"
OPT, BLOOM = "-m opt-30b --machine h100-80gb", "-m bloom-176b --machine h100-80gb --offload cpu"
# all weights over the link, and the KV cache on the GPU
STREAMED = "--gpu-weights 0% --kv-offload none"
STREAMED_OPT = f"{OPT} --offload cpu {STREAMED}"


def plan(*words: str, code: int = 0) -> str:
    result = planned_by(*words, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout


def planned_by(*words: str, **settings: Any) -> Result:
    """Run the verb; each of `words` may be several."""
    return invoke("plan", *" ".join(words).split(), **settings)


def rows(*words: str) -> list[dict[str, Any]]:
    plans: list[dict[str, Any]] = json.loads(plan(*words, "--json"))
    return plans


def test_every_option_is_an_axis() -> None:
    words = "-m opt-30b,bloom-7b1 --machine h100-80gb,a100-80gb --offload cpu"
    plans = rows(words, "--batch-size 1,4 --input-len 128,512 --gpu-weights 0%,50% --gpus 1,2")
    assert len(plans) == 2**6
    assert {row["machine"]["name"] for row in plans} == {"h100-80gb", "a100-80gb"}
    assert {tuple(map(tuple, row["case"]["options"])) for row in plans} == {(), (("gpus", 2),)}


def test_drafts_count_by_their_acceptance() -> None:
    """Geometric series of tokens, drafting time, and no drafts without gain."""
    words = f"{BLOOM} {STREAMED} --batch-size 4"
    (plain,) = rows(words)
    for acceptance in (0.0, 0.3, 0.7):
        alone, ngram, small = rows(words, f"--draft none,ngram,bloom-560m --acceptance {acceptance}")
        assert (alone["step_s"], alone["drafting"]) == (plain["step_s"], None)
        for row in (ngram, small):
            drafts = (drafting := row["drafting"])["drafts"]
            gain = sum(acceptance**position for position in range(drafts + 1))
            assert (drafts > 0) == (acceptance > 0)
            assert drafting["tokens_a_pass"] == pytest.approx(gain)
            assert row["step_s"] == pytest.approx((drafting["pass_s"] + drafting["drafting_s"]) / gain)
            assert row["acceptance_from"] == "stated, not measured"
            assert row["decode_tok_s"] == pytest.approx(plain["decode_tok_s"] * gain, rel=0.02)
        assert small["gpu"]["weights"] > ngram["gpu"]["weights"] == alone["gpu"]["weights"]
        assert small["drafting"]["drafting_s"] >= ngram["drafting"]["drafting_s"] == 0
    (same,) = rows("-m opt-1.3b --machine h100-80gb --offload none --batch-size 1 --draft opt-1.3b --acceptance 0.6")
    assert same["drafting"]["drafts"] == 0, "a model that drafts for itself costs what it gains"


def test_the_acceptance_is_told_with_its_source() -> None:
    drafting = f"{BLOOM} --batch-size 4 --draft bloom-560m"
    told = r"tokens of each row from a pass with \d+ drafts, of .* acceptance 0.50 \(stated, not measured\)"
    assert re.search(told, plan(drafting, "--acceptance 0.5"))
    assert "no record says how often a draft is right" in plan(drafting)
    assert "drafts" not in plan(BLOOM, "--batch-size 4")
    refused = planned_by(BLOOM, "--batch-size 4 --acceptance 0.5")
    assert (refused.exit_code, "add --draft" in refused.output) == (2, True)


def test_a_codec_is_no_axis_of_weights_that_stay() -> None:
    cases = [row["case"] for row in rows(OPT, "--weight-codec none,lossless")]
    assert [(case["offload"], *map(tuple, case["options"])) for case in cases] == [
        ("none",), ("cpu", ("weight_codec", "none")), ("cpu", ("weight_codec", "lossless")),
    ]  # fmt: skip


def test_auto_is_the_batch_with_the_best_throughput() -> None:
    words = f"{OPT} --offload cpu --gpu-weights auto --batch-size"
    *others, best = rows(words, "1,2,4,8,16,32,64,auto")
    assert best["output_tok_s"] >= max(row["output_tok_s"] for row in others if row["fits"])
    assert best["max_batch_size"] > best["case"]["workload"]["batch_size"] > 1
    assert [best] == rows(words, "auto"), "numbers before it are planned too"
    assert [row["case"]["workload"]["batch_size"] for row in others] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("fields", "settings", "named"),
    [
        ({}, {}, True),
        ({}, {"step_s": 30.0}, False),  # slower
        ({"engine": "stream"}, {}, False),  # whose own records the plan predicts
        ({"output_len": 64}, {}, False),  # other work
        ({"layers": 3}, {}, False),
        ({"model": "bloom-7b1"}, {}, False),
        ({}, {"machine": "another"}, False),
        ({}, {"status": "crashed"}, False),
    ],
)
def test_a_server_that_a_record_shows_to_be_faster_is_named(
    tmp_path: Path, monkeypatch: Patch, fields: dict[str, Any], settings: dict[str, Any], named: bool
) -> None:
    folder = tmp_path / "sweeps" / "results" / "nvidia-h100-80gb-hbm3"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_bytes((Path(H100) / "machine.json").read_bytes())
    asked = case(8, **{"engine": "llama-server", "layers": None, **fields})
    made: dict[str, Any] = {"step_s": 0.2, "machine": folder.name, "command": "c", "started_at": "2026-11-01"}
    with Store(folder / "servers.jsonl") as store:
        store.append(point(asked, **made | settings))
    monkeypatch.chdir(tmp_path)
    words = plan(BLOOM)
    assert mentions(words, "llama-server cpu, batch 8", "nvidia-h100-80gb-hbm3", "2026-11-01") is named
    assert ("server" in words) is named
    for more in ("--batch-size 4", "--set gpu_bytes=48GB"):  # fewer rows, less memory than the server had
        assert "server" not in plan(BLOOM, more)


def test_a_plan_tells_that_it_leaves_out_a_cpu_whose_rate_is_unknown() -> None:
    words = "-m gpt-oss-120b --offload cpu --batch-size 1,64 --machine"
    (line,) = re.findall(".*left out.*", plan(words, "rtx-4090"))
    assert mentions(line, "batch 1: --experts cpu", "50 GB/s (assumed)", "`zinfer probe` measures it")
    assert "left out" not in plan(words, "rtx-4090", "--set host_bandwidth=60GB/s")
    assert "left out" not in plan(words, "h100-80gb")


def test_a_calibrated_plan_has_a_band_and_is_slower_than_the_limit() -> None:
    words = f"{STREAMED_OPT} --batch-size 8"
    (limit,), (result,), (shipped,) = (rows(words, more) for more in ("", f"--calibrate {H100}", "--calibrate"))
    assert limit["error"] is None
    assert 0.85 * limit["output_tok_s"] < result["output_tok_s"] < limit["output_tok_s"]
    assert shipped["output_tok_s"] == pytest.approx(result["output_tok_s"], rel=0.1)
    assert all(0 < row["error"] < 0.15 for row in (result, shipped))
    assert "physical limits" in plan(words)
    text = plan(words, "--calibrate", H100)
    assert "physical limits" not in text
    assert "predicted" in text
    assert "±" in text


def test_the_room_for_the_cache_is_named_where_it_bounds_the_batch() -> None:
    small, full = rows(STREAMED_OPT, "--batch-size 1,auto")
    assert (small["bounds"], full["bounds"]) == (["link"], ["link", "KV capacity"])
    assert "link, KV capacity" in plan(STREAMED_OPT)


def test_replaced_figures_are_shown() -> None:
    words = f"{STREAMED_OPT} --batch-size 8 --set host_bandwidth=1TB/s --set"
    (before,), (after,) = (rows(words, f"h2d_bandwidth={rate}GB/s") for rate in (54.9, 109.8))
    assert before["step_s"] == pytest.approx(2 * after["step_s"])
    text = plan(words, "h2d_bandwidth=109.8GB/s")
    assert "h100-80gb*" in text
    assert mentions(text, "109.8 GB/s", "set by hand", "54.9 GB/s")


def test_a_recipe_plans_bloom_on_several_machines(monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    text = plan("bloom-176b-machines", "--calibrate", "sweeps/results")
    assert text.count("predicted,") == 1, "the ranking"
    refused = invoke("sweep", "bloom-176b-machines")
    assert "zinfer plan bloom-176b-machines" in str(refused.exception)


def test_a_model_that_does_not_fit_is_reported_once_with_a_remedy() -> None:
    result = planned_by("-m bloom-176b --machine h100-80gb")
    assert result.exit_code == 0
    assert "does not fit" in result.stdout
    assert len(re.findall(r"\d GB of GPU memory", result.stderr)) == 1
    plan("-m bloom-176b --machine h100-80gb --offload none", code=4)


def test_a_batch_beyond_the_largest_does_not_fit() -> None:
    words = f"{OPT} --offload none --batch-size"
    (best,) = rows(words, "auto")
    assert best["fits"]
    largest = best["max_batch_size"]
    assert [row["fits"] for row in rows(words, f"{largest},{largest + 1}")] == [True, False]
    assert plan(words, f"{largest},{largest + 1}").count("does not") == 1
    plan(words, f"{largest + 1}", code=4)
    text = plan("-m opt-66b --machine h100-80gb --batch-size 1,2,4")
    assert [text.count(words) for words in ("does not fit", "stream none", "stream cpu  ")] == [1, 1, 3]


def test_what_no_engine_runs_is_not_listed_or_said_to_be_so() -> None:
    plans = rows(OPT, "--engine tensorrt,accelerate --offload cpu,nvme")
    loads = [f"{row['case']['engine']} {row['case']['offload']}" for row in plans]
    assert loads == ["tensorrt cpu", "accelerate cpu", "accelerate nvme"]
    refused = planned_by(OPT, "--engine tensorrt --offload nvme")
    assert refused.exit_code == 2
    assert mentions(refused.stderr, "tensorrt", "nvme", "accelerate")
    assert mentions(planned_by(OPT, "--engine accelerate --gpus 2 --offload cpu").stderr, "gpus=2", "what-if")


def test_what_several_gpus_cannot_do_is_said() -> None:
    words = "-m opt-30b --machine h200 --set host_bytes=400GiB --gpus 2"
    result = planned_by(words, "--offload none")
    assert result.exit_code == 4
    assert mentions(result.stderr, "gpus=2 does not go with offload none")
    result = planned_by(words)  # all of it fits one GPU
    assert result.exit_code == 0
    assert mentions(result.output, "all of it fits", "stream cpu gpus=2")


def test_formats_are_planned_for_engines_that_have_them() -> None:
    words = f"{STREAMED_OPT} --weights as-released,int4,fp8"
    sizes = {row["case"].get("weights"): row["streamed_bytes"] for row in rows(words)}
    assert sizes.keys() == {None, "int4", "fp8"}
    assert sizes["int4"] == pytest.approx(4.125 / 16 * sizes[None], rel=0.01)
    assert sizes["fp8"] == pytest.approx(0.83 / 2 * sizes[None], rel=0.01)
    some = planned_by(words, "--engine stream,deepspeed,accelerate")
    assert some.exit_code == 0
    assert mentions(some.stderr, "left out: --weights fp8 is for stream", "deepspeed takes int4")
    assert mentions(some.stderr, "--weights int4 is for stream, deepspeed", "accelerate has no packed weights")
    with pytest.raises(OptionError, match="int4 is for stream, deepspeed: engine tensorrt has no packed"):
        planned_by(words, "--engine tensorrt --weights int4", catch_exceptions=False)


def test_unknown_memory_is_an_assumption_that_is_told() -> None:
    result = planned_by(STREAMED_OPT)
    assert mentions(result.stderr, "host memory is not known", "--host-memory")
    (size,) = re.findall(r"--host-memory (\d+GiB)", result.stderr)
    enough = planned_by(STREAMED_OPT, "--host-memory", size)
    assert (enough.exit_code, enough.stderr) == (0, "")
    plan(STREAMED_OPT, f"--host-memory {int(size[:-3]) - 2}GiB", code=4)
    assert rows(STREAMED_OPT)[0]["assumes"]


def test_a_level_chooses_the_batch_and_a_price_gives_the_cost() -> None:
    (free,), (kept,) = rows(STREAMED_OPT), rows(STREAMED_OPT, "--sla ttft:mean:<=:2s")
    assert kept["prefill_s"] <= 2 < free["prefill_s"]
    (next_one,) = rows(STREAMED_OPT, f"--batch-size {kept['case']['workload']['batch_size'] + 1}")
    assert next_one["prefill_s"] > 2, "the largest batch that keeps the level has the best throughput"
    text = plan(STREAMED_OPT, "--sla ttft:mean:<=:2s --price 2.5 --prompts 2k")
    for words in ("ttft mean <= 2 s: predicted", "USD a million output tokens", "2,000 prompts take"):
        assert words in text
    text = plan(STREAMED_OPT, "--sla ttft:mean:<=:1ms", code=4)
    assert re.search(r"No plan of \d keeps every level", text)
    assert "missed by" in text


PROMPTS = "-m opt-30b --machine h100-80gb,l40s --offload cpu --batch-size 16 --prompts 1k"


def ranked(*words: str, code: int = 0) -> list[list[str]]:
    """Return the cells of the ranking, a list a machine."""
    lines = [line for line in plan(*words, code=code).splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_several_machines_are_ranked_in_one_table() -> None:
    words = "-m opt-30b --machine t4,l40s,h200,h100-80gb --offload cpu --batch-size 4"
    names = [row[0] for row in ranked(words)]
    rates = {row["machine"]["name"]: row["output_tok_s"] for row in rows(words)}
    assert names == sorted(rates, key=lambda name: -rates[name])
    assert plan(words).count("opt-30b") == 1, "no table of each machine"
    prices = "--price t4=0.1,l40s=9 --price h200=1 --price 2"
    usd = {"t4": 0.1, "l40s": 9, "h200": 1, "h100-80gb": 2}
    by_cost = sorted(usd, key=lambda name: usd[name] / rates[name])
    assert [row[0] for row in ranked(words, prices)] == by_cost != names
    (row,) = (row for row in rows(words, prices, "--sla ttft<=1s") if row["machine"]["name"] == "h200")
    assert row["usd_per_mtok"] == pytest.approx(1e6 / row["output_tok_s"] / 3600)
    assert (row["usd_per_gpu_hour"], row["price_assumed"]) == (1, False)
    assert row["levels"] == [{"level": "ttft p99 <= 1 s", "predicted": pytest.approx(row["prefill_s"]), "ok": True}]
    assert [row[0] for row in ranked(words, prices, "--objective throughput")] == names


def test_a_ranking_marks_what_is_assumed_and_ends_with_what_does_not_fit() -> None:
    words = "-m bloom-176b --machine t4,rtx-3090,rtx-4090,gh200-96gb,b300 --offload cpu"
    table = {row[0].rstrip("*"): row for row in ranked(words)}
    assert list(table)[-1] == "t4"
    assert table["t4"][1].startswith("no: ")
    assert [table[name][1] for name in ("rtx-3090", "rtx-4090")] == ["yes", "yes"]
    marked = {name: row[7].endswith("?") for name, row in table.items()}
    assert marked == {"rtx-3090": True, "rtx-4090": True, "b300": True, "gh200-96gb": False, "t4": False}
    assert {name: "~" in row[8] for name, row in table.items() if len(row[8])} == {"rtx-3090": True, "rtx-4090": True}
    stating = ranked(words, "--host-memory rtx-3090=64GiB --host-memory rtx-4090=1TiB --price 1")
    stated = {row[0].rstrip("*"): row for row in stating}
    assert stated["rtx-3090"][1].startswith("no: host ")
    assert re.fullmatch(r"\d+ GiB", stated["rtx-4090"][7])
    assert stated["rtx-4090"][8] == "1.00"
    for wrong, why in (("dgx-spark", "not among the machines"), ("t4", "is not a value")):
        refused = planned_by(words, f"--host-memory {wrong}=lots")
        assert why in refused.output + str(refused.exception)


def test_all_machines_get_the_host_memory_that_they_can_have() -> None:
    words = f"-m opt-30b --offload cpu --batch-size 1 --host-memory 80GiB {STREAMED} --machine"
    names = [row[0] for row in ranked(words, "all")]
    assert {name.rstrip("*") for name in names} == set(catalogue())
    assert [name for name in names if not name.endswith("*")] == ["dgx-spark"], "its memory is the GPU's"
    assert names[-1] == "dgx-spark"
    assert "share one memory" in str(planned_by(words, "dgx-spark").exception)


def test_levels_rank_before_the_rate() -> None:
    words = f"-m opt-30b --machine t4,h100-80gb,l40s --offload cpu --batch-size 4,16,64 {STREAMED}"
    table = ranked(words, "--sla ttft<=3s --want 5tok/s")
    assert [(row[0], row[3]) for row in table] == [("h100-80gb", "64"), ("l40s", "16"), ("t4", "4")]
    assert [row[10].partition(":")[0] for row in table] == ["yes", "yes", "no"]
    assert re.fullmatch(r"no: [\d.]+ s ttft, [\d.]+ tok/s", table[-1][10])
    ranked("-m opt-30b --machine t4,v100-16gb --sla ttft<=1ms", code=4)


def test_prompts_give_hours_and_usd() -> None:
    words = f"{PROMPTS} --price 2"
    for row, cells in zip(rows(words), ranked(words), strict=True):
        hours, machine = 63 * row["e2e_s"] / 3600, row["machine"]["name"]
        assert row["prompts_hours"] == pytest.approx(hours)
        assert row["prompts_usd"] == pytest.approx(2 * hours)
        assert float(cells[10].removesuffix(" h")) == pytest.approx(hours, rel=0.01)
        alone, assumed = (plan(each, "--machine", machine) for each in (words, PROMPTS))
        assert f"1,000 prompts take {cells[10]} on {machine} for {cells[11]} USD, at batch 16." in alone
        assert mentions(assumed, "USD an hour", machine, "is assumed", "RunPod", "2026-03-10")
        assert "is assumed" not in alone


def test_a_deadline_gives_the_number_of_machines() -> None:
    words = f"{PROMPTS} --deadline 30min"
    for row, cells in zip(rows(words), ranked(words), strict=True):
        batches, needed = int(1800 / row["e2e_s"]), row["machines_for_deadline"]  # a machine ends so many of 63 in time
        assert (needed - 1) * batches < 63 <= needed * batches
        assert cells[12] == str(needed)
        alone = plan(words, "--machine", row["machine"]["name"])
        assert f"to end within 30 min 00 s it takes {needed} machine" in alone
    assert "no number of machines is enough" in plan(PROMPTS, "--machine l40s --deadline 1s")
    assert planned_by("-m opt-30b --deadline 1h").exit_code == 2


def test_where_nothing_fits_the_command_for_other_machines_is_named() -> None:
    done = planned_by("-m opt-66b --machine t4 --offload none")
    assert done.exit_code == 4
    assert mentions(done.stderr, "another machine", "zinfer plan --model opt-66b --machine all", "ranks")


def test_what_has_no_answer_is_told_once() -> None:
    done = planned_by("-m bloom-tiny --machine h100-80gb --input-len 4096")
    assert mentions(str(done.exception), "--input-len 4096", "exceed the 2048 positions")
    assert "left out" not in done.stderr, "the error says it"
