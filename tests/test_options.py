"""Options of engines: typed, validated when a case is made, listed by ``--help``; and records that outlive them."""

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import invoke
from zinfer.checkpoint import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.engine import (
    ENGINES,
    Offload,
    OptionError,
    PlanOptions,
    ServerOptions,
    StreamOptions,
    conflict,
    parse_options,
    plan_options,
    read_options,
    resolve_options,
    values,
)
from zinfer.job.recipe import Sweep
from zinfer.plan.planner import make_plan
from zinfer.system import machines

ROOT = Path(__file__).parents[1]


def case(engine: str = "stream", offload: Offload = "cpu", **options: Any) -> Case:
    workload = Workload(batch_size=1, input_len=512, output_len=32)
    return Case(model="opt-30b", engine=engine, offload=offload, workload=workload, options=tuple(options.items()))


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        ("stream", {"kv_offload": "disk"}, "kv_offload=disk: choose from none, cpu, auto"),
        ("stream", {"gpus": 0}, "gpus=0: write a whole number of at least 1"),
        ("stream", {"gpus": True}, "gpus=true: write a whole number of at least 1"),
        ("stream", {"pin_memory": True}, "engine stream has no option 'pin_memory'; its options: weight_codec, packed"),
        ("stream", {"ring_depth": 3}, "engine stream has no option 'ring_depth'"),
        ("deepspeed", {"tuned": "no"}, "tuned=no: choose from true, false"),
        (
            "deepspeed",
            {"prefetch_layers": 2},
            "engine deepspeed has no option 'prefetch_layers'; .* pin_memory, tuned, gpus$",
        ),
    ],
)
def test_an_unknown_option_or_value_is_refused_with_the_choices(engine: str, given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        resolve_options(engine, given)
    assert refused.value.exit_code == 2
    with pytest.raises(OptionError, match=words):
        list(Sweep(model=("m",), engine=(engine,), offload=("cpu",), options=given).loads())


def test_a_case_keeps_what_differs_from_the_defaults() -> None:
    assert resolve_options("stream", {"kv_offload": "none", "kv_attention": "cpu", "weight_codec": "auto"}) == (
        ("kv_attention", "cpu"),
        ("kv_offload", "none"),
    )
    assert resolve_options("tensorrt", {"plan": 7}) == (("plan", "7"),)
    assert case(cuda_graphs="auto", weight_codec="none") == case(weight_codec="none")
    assert case(weight_codec="none", kv_offload="cpu") == case(kv_offload="cpu", weight_codec="none")
    assert case("deepspeed", tuned=True) == case("deepspeed")
    assert dict(case("deepspeed", tuned=False).options) == {"tuned": False}


@pytest.mark.parametrize(
    ("engine", "options", "offload", "words"),
    [
        ("stream", {"kv_cache_dtype": "int8", "kv_offload": "cpu", "kv_attention": "gpu"}, "cpu",
         "kv_attention=gpu .*kv_cache_dtype=int8 .* choose from auto, cpu"),
        ("stream", {"kv_attention": "gpu"}, "none", "kv_attention=gpu .* needs offload cpu; choose from auto, cpu"),
        ("stream", {"experts": "on-demand"}, "none", "experts=on-demand .* only with offload cpu; choose from auto"),
        ("stream", {"experts": "on-demand"}, "nvme", "experts=on-demand does not go with offload nvme"),
        ("stream", {"experts": "on-demand", "gpus": 2}, "cpu", "experts=on-demand does not go with gpus=2"),
        ("stream", {"experts": "on-demand", "packed": "here"}, "cpu", "experts=on-demand .* packed=here.* choose from"),
        ("stream", {"gpus": 2}, "none", "gpus=2 does not go with offload none"),
        ("stream", {"gpus": 2}, "nvme", "gpus=2 does not go with offload nvme"),
        ("stream", {"host_weights": "40%"}, "cpu", "host_weights=40% does not go with offload cpu"),
        ("deepspeed", {"gpus": 2}, "none", "gpus=2 does not go with offload none"),
        ("deepspeed", {"gpus": 2}, "nvme", "gpus=2 does not go with offload nvme"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_before_a_process_starts(
    engine: str, options: Any, offload: Offload, words: str
) -> None:
    asked = case(engine, offload, **options)
    with pytest.raises(OptionError, match=words) as refused:
        parse_options(engine, asked.options, offload)
    assert "\n" not in str(refused.value)
    plan = make_plan(asked, resolve.resolve("opt-30b", None, None), machines.load("h100-80gb"))
    assert not plan.fits
    assert plan.why_not == conflict(engine, asked.options, offload)


def test_records_with_options_that_are_gone_can_be_read_and_planned() -> None:
    text = case("deepspeed", tuned=False).model_dump_json().replace('["tuned",false]', '["tuned",false],["old",3]')
    old = Case.model_validate_json(text)
    assert dict(old.options) == {"tuned": False, "old": 3}
    assert not read_options("deepspeed", old.options).model_dump()["tuned"]
    spec, machine = resolve.resolve("opt-30b", None, None), machines.load("h100-80gb")
    assert make_plan(old, spec, machine).step_s == make_plan(case("deepspeed", tuned=False), spec, machine).step_s
    assert read_options("stream", (("kv_offload", True), ("weight_codec", "none"))) == StreamOptions.model_validate(
        {"weight_codec": "none"}
    )
    assert plan_options("no-such-engine", (("gpus", 4),)) == PlanOptions.model_validate({"gpus": 4})
    with pytest.raises(OptionError, match="no option 'old'"):
        parse_options("deepspeed", old.options, "cpu")


def test_any_engine_may_be_planned_with_what_only_a_planner_knows() -> None:
    fields: dict[str, Any] = {"model": ("m",), "engine": ("accelerate",), "offload": ("cpu",)}
    wanted = Sweep(**fields, options={"gpus": (1, 2), "kv_offload": ("auto",)})
    assert [dict(load.options)["gpus"] for load in wanted.loads(planning=True)] == [1, 2]
    with pytest.raises(OptionError, match="gpus=0: write a whole number"):
        resolve_options("stream", {"gpus": 0}, planning=True)


@pytest.mark.parametrize("name", [*ENGINES, "vllm"])
def test_help_of_an_engine_lists_every_option_with_its_values(name: str) -> None:
    shown = invoke("run", "--help-engine", name).output
    for key, field in (ENGINES[name].options if name in ENGINES else ServerOptions).model_fields.items():
        assert f"{key}={'|'.join(values(field))}" in shown
        assert field.description


def test_help_of_an_unknown_engine_names_a_near_one() -> None:
    result = invoke("sweep", "--help-engine", "vlm")
    assert (result.exit_code, "did you mean 'vllm'?" in result.output) == (2, True)


def test_what_options_share_with_a_plan_takes_the_same_values() -> None:
    for kind in ENGINES.values():
        for name in kind.options.model_fields.keys() & PlanOptions.model_fields.keys():
            of_old_records = ["fp8"] if name == "kv_cache_dtype" else []
            assert values(kind.options.model_fields[name]) + of_old_records == values(PlanOptions.model_fields[name])


def test_a_record_of_a_removed_type_of_cache_is_read_and_not_run() -> None:
    asked = (("kv_cache_dtype", "fp8"),)
    assert plan_options("stream", asked).kv_quantized
    with pytest.raises(OptionError, match="choose from auto, bf16, int8"):
        resolve_options("stream", dict(asked))


def test_no_planner_knows_an_engine_and_no_engine_plans() -> None:
    for path in (ROOT / "zinfer" / "plan").glob("*.py"):
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not words & set(ENGINES), path
    for path in (ROOT / "zinfer" / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zinfer.plan"):
                assert {alias.name for alias in node.names} <= {"Plan", "Placement", "Tiers"}, path


def test_a_plan_of_another_batch_is_that_batchs_plan() -> None:
    spec, machine = resolve.resolve("opt-66b", None, None), machines.load("h100-80gb")
    first = make_plan(case(kv_offload="auto").model_copy(update={"gpu_weights": "auto"}), spec, machine, "/nvme")
    planner = first.planner()
    assert planner.plan is first
    for load in (
        Workload(batch_size=64, input_len=512, output_len=32),
        Workload(batch_size=3, input_len=9, output_len=4),
    ):
        other = make_plan(first.case.model_copy(update={"workload": load}), spec, machine, "/nvme")
        assert planner.at(load) == other
    assert first.placement.resident_layers
    assert sum(spec.layer_bytes for _ in first.placement.resident_layers) <= first.placement.resident_bytes
    assert first.placement.resident_bytes < first.resident_bytes, "what is given away leaves a margin"


@pytest.mark.parametrize(("share", "layers"), [("0%", 0), ("50%", 32), ("100%", 64), ("10GiB", 5)])
def test_layers_that_stay_are_spread_over_the_depth(share: str, layers: int) -> None:
    spec, machine = resolve.resolve("opt-66b", None, None), machines.load("h100-80gb")
    stay = make_plan(case().model_copy(update={"gpu_weights": share}), spec, machine).placement.resident_layers
    assert len(stay) == layers
    assert max((end - start for start, end in pairwise(stay)), default=0) <= 64 // max(1, layers) + 1
