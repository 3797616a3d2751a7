"""Command `zinfer plan`: axes, calibration, replaced figures and plots, without torch and without running anything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import mentions
from zinfer.cli import cli

ROOT = Path(__file__).parents[1]
RESULTS = str(ROOT / "sweeps" / "results")


def plan(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["plan", *words])
    assert result.exit_code == code, result.output
    return result.stdout


def rows(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(plan(*words, "--json"))
    return found


def test_every_option_is_an_axis() -> None:
    found = rows(
        "-m", "opt-30b,bloom-7b1", "--machine", "h100-80gb,a100-80gb", "--offload", "cpu", "--batch-size", "1,4",
        "--input-len", "128,512", "--gpu-weights", "0%,50%", "--gpus", "1,2",
    )  # fmt: skip
    assert len(found) == 2 * 2 * 2 * 2 * 2 * 2
    assert {row["machine"]["name"] for row in found} == {"h100-80gb", "a100-80gb"}
    assert {tuple(map(tuple, row["case"]["options"])) for row in found} == {(), (("gpus", 2),)}


def test_a_codec_is_no_axis_of_weights_that_stay() -> None:
    found = rows("-m", "opt-30b", "--machine", "h100-80gb", "--weight-codec", "none,lossless")
    assert [(row["case"]["offload"], row["case"]["options"]) for row in found] == [
        ("none", []), ("cpu", [["weight_codec", "none"]]), ("cpu", [["weight_codec", "lossless"]]),
    ]  # fmt: skip


def test_auto_is_the_batch_with_the_best_throughput() -> None:
    words = ("-m", "opt-30b", "--machine", "h100-80gb", "--offload", "cpu", "--gpu-weights", "auto")
    (best,) = rows(*words)
    others = rows(*words, "--batch-size", "1,2,4,8,16,32,64")
    assert best["output_tok_s"] >= max(row["output_tok_s"] for row in others if row["fits"])
    assert best["max_batch_size"] > best["case"]["workload"]["batch_size"] > 1


def test_a_calibrated_plan_has_a_band_and_is_slower_than_the_limit() -> None:
    words = ("-m", "opt-30b", "--machine", "h100-80gb", "--offload", "cpu", "--batch-size", "8")
    (limit,), (told,) = rows(*words), rows(*words, "--calibrate", RESULTS)
    assert limit["error"] is None
    assert 0 < told["error"] < 0.15
    assert 0.85 * limit["output_tok_s"] < told["output_tok_s"] < limit["output_tok_s"]
    assert "physical limits" in plan(*words)
    text = plan(*words, "--calibrate", RESULTS)
    assert "physical limits" not in text
    assert "predicted" in text
    assert "±" in text
    assert re.search(r"^stream: \d+\.\d% of the link, .* ms .* within \d+% ", text, re.M)


def test_the_room_for_the_cache_is_named_where_it_bounds_the_batch() -> None:
    words = ("-m", "opt-30b", "--machine", "h100-80gb", "--offload", "cpu")
    (full,), (small,) = rows(*words), rows(*words, "--batch-size", "1")
    assert full["bounds"] == ["link", "KV capacity"]
    assert small["bounds"] == ["link"]
    assert "link, KV capacity" in plan(*words)


def test_replaced_figures_are_shown() -> None:
    words = ("-m", "opt-30b", "--machine", "h100-80gb", "--offload", "cpu", "--batch-size", "8")
    (before,), (after,) = rows(*words), rows(*words, "--set", "h2d_bandwidth=109.8GB/s")
    assert before["step_s"] == pytest.approx(2 * after["step_s"])
    text = plan(*words, "--set", "h2d_bandwidth=109.8GB/s")
    assert "h100-80gb*" in text
    assert mentions(text, "109.8 GB/s", "set by hand", "54.9 GB/s")


def test_a_recipe_plans_bloom_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = plan("bloom-176b-machines", "--calibrate", "sweeps/results")
    assert text.count("predicted,") == 3
    assert mentions(text, "GH200", "H100", "deepspeed", "4-5x")
    assert mentions(text, "GH200", "A100", "deepspeed", "9-11x")
    refused = CliRunner().invoke(cli, ["sweep", "bloom-176b-machines"])
    assert "zinfer plan bloom-176b-machines" in str(refused.exception)


def test_the_figure_is_dashed_and_the_same_every_time(tmp_path: Path) -> None:
    words = ("-m", "opt-30b", "--machine", "h100-80gb,gh200-96gb", "--calibrate", RESULTS)
    for name in ("a.svg", "b.svg"):
        plan(*words, "--figure", str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"stroke-dasharray" in (tmp_path / "a.svg").read_bytes()


def test_a_model_that_does_not_fit_is_reported_once_with_a_remedy() -> None:
    result = CliRunner().invoke(cli, ["plan", "-m", "bloom-176b", "--machine", "h100-80gb"])
    assert result.exit_code == 0
    assert "does not fit" in result.stdout
    assert result.stderr.count("355.8 GB of GPU memory") == 1
