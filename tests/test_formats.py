"""Formats of weights from a configuration alone: which matrices are stored quantised, and in how many bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from zinfer.analysis import rates, reproduce
from zinfer.checkpoint import quantization, resolve
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.quantization import scheme
from zinfer.checkpoint.quantized_tensors import Quantization
from zinfer.core.case import Case, Workload
from zinfer.core.model import Matrix, ModelError, Weights
from zinfer.job.recipe import RecipeError, make_sweep
from zinfer.record.measurement import Measurement

UP = Matrix("mlp.up_proj", 512, 256)


def stored(config: dict[str, Any], module: str = "model.layers.3.mlp.up_proj", matrix: Matrix = UP) -> int:
    """Return the bytes that a matrix is stored in; 0 if it is not quantised."""
    headers = Quantization({"quantization_config": config}, "bfloat16").headers(matrix, module)
    return sum(header.nbytes for header in (headers or {}).values())


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = scheme("int4")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
CODES = 512 * 256


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (FP8, CODES + 4 * 2 * 4),
        (FP8 | {"modules_to_not_convert": ["mlp.up"]}, CODES + 4 * 2 * 4),  # not up to the end of a name
        (FP8 | {"modules_to_not_convert": ["mlp.up_proj"]}, 0),
        (FP8 | {"modules_to_not_convert": ["model.layers.3"]}, 0),
        (FP8 | {"modules_to_not_convert": ["model.layers.*.mlp"]}, 0),
        (FP8 | {"modules_to_not_convert": ["model.layers.33", "lm_head"]}, CODES + 4 * 2 * 4),
        (INT4, CODES // 2 + 512 * 2 * 2 + 16),
        (INT4 | {"ignore": ["model.layers.3.mlp.up_proj"]}, 0),
        (INT4 | {"ignore": ["re:.*up_proj$"]}, 0),
        (INT4 | {"ignore": ["up_proj"]}, CODES // 2 + 512 * 2 * 2 + 16),  # a whole name, or a pattern
        (scheme("int8"), CODES + 512 * 2),
        (scheme("fp8"), CODES + 512 * 2),
        (AWQ, CODES // 2 + 2 * 512 // 2 + 2 * 512 * 2),
        (AWQ | {"modules_to_not_convert": ["up"]}, 0),  # a part of a name
        (GPTQ, CODES // 2 + 2 * 512 // 2 + 2 * 512 * 2 + 256 * 4),
        (GPTQ | {"group_size": -1}, CODES // 2 + 512 // 2 + 512 * 2 + 256 * 4),
        ({"quant_method": "mxfp4"}, 0),  # experts alone
    ],
)
def test_modules_that_stay_in_16_bits_are_those_of_the_library(config: dict[str, Any], size: int) -> None:
    assert stored(config) == size


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (FP8 | {"modules_to_not_convert": "lm_head"}, "no list of names"),
        (FP8 | {"modules_to_not_convert": ["(a+)+$"]}, "too complex"),
        (INT4 | {"ignore": ["re:((a*)*)*$"]}, "too complex"),
        (INT4 | {"ignore": ["re:["]}, "no pattern"),
        (INT4 | {"ignore": ["re:" + "a" * 400]}, "too complex"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size"),
        (GPTQ | {"group_size": "128"}, "group_size"),
        (GPTQ | {"dynamic": {r"+:.*": {"bits": 8}}}, "names single modules"),
    ],
)
def test_fields_that_cannot_be_understood_are_refused_in_a_line(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=says) as fault:
        stored(config)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("weights", "bits"), [("int4", 4 + 16 / 128), ("int8", 8 + 16 / 14336), ("fp8", 8 + 16 / 14336)]
)
def test_formats_of_zinfer_count_codes_and_scales(weights: Weights, bits: float) -> None:
    plain, quantized = resolve.resolve("bloom-176b"), resolve.resolve("bloom-176b", weights=weights)
    assert quantized.stored_ratio == pytest.approx(bits / 16, rel=2e-3)
    assert (quantized.parameters, quantized.dtype, quantized.weights) == (plain.parameters, plain.dtype, weights)
    assert quantization.settings_of(quantized.config) is not None
    assert quantized.slice(2).stored_ratio == quantized.stored_ratio
    assert quantized.fp8_ratio == pytest.approx(0.5 if weights == "fp8" else 0.0, rel=2e-3)
    assert quantized.with_dtype("float32").fp8_ratio == quantized.fp8_ratio / 2
    assert (plain.fp8_ratio, resolve.as_released(quantized).fp8_ratio) == (0.0, 0.0)


@pytest.mark.torch
def test_other_formats_are_refused_for_models_that_have_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(resolve.resolve("llama-3.1-8b").config | {"quantization_config": FP8}))
    with pytest.raises((ModelError, CheckpointError), match="released quantised: --weights int4"):
        resolve.resolve(str(path), weights="int4")
    assert 0.5 < resolve.resolve(str(path)).stored_ratio < 0.51


# The axis of a sweep


LOAD = Workload(batch_size=2, input_len=8, output_len=4)


def case(**fields: Any) -> Case:
    given: dict[str, Any] = {"model": "m", "engine": "stream", "offload": "cpu", "workload": LOAD}
    return Case(**given | fields)


def test_a_sweep_has_formats_as_an_axis() -> None:
    wanted = make_sweep({"model": "m", "offload": "cpu", "weights": ["as-released", "int4", "int4"]}, "here")
    assert [load.weights for load in wanted.loads()] == ["as-released", "int4"]
    assert [load.case("dummy", "bfloat16", 8, 4).weights for load in wanted.loads()] == ["as-released", "int4"]
    with pytest.raises(RecipeError, match="weights"):
        make_sweep({"model": "m", "weights": "int3"}, "here")
    other = make_sweep({"model": "m", "engine": "deepspeed", "offload": "cpu", "weights": "fp8"}, "here")
    (load,) = other.loads()
    assert load.conflict is not None
    assert load.conflict.startswith("--weights fp8 is for stream: engine deepspeed takes int4, int8")


def test_records_without_a_format_are_written_as_before() -> None:
    assert "weights" not in json.loads(case().model_dump_json())
    assert Case.model_validate_json(case(weights="int4").model_dump_json()).weights == "int4"


def test_formats_that_were_not_released_rank_apart() -> None:
    plain, coded = (
        Measurement(case=case(weights=form), status="ok", machine="x", ttft_ms=(9.0,), step_ms=((time,) * 3,))
        for form, time in (("as-released", 9.0), ("int4", 3.0))
    )
    assert (plain.case.lossy, coded.case.lossy) == (False, True)
    assert rates.winner([plain, coded]) == plain
    assert rates.lossy([plain, coded]) == (coded,)
    assert "weights=int4" in coded.case.label()
    assert "weights" not in plain.case.label()
    assert "--weights int4" in reproduce.commands(coded)[0]
