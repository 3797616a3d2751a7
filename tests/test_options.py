"""Options of engines: typed, validated when a case is made, listed by ``--help``; and records that outlive them."""

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import invoke, results
from zinfer.checkpoint import resolve
from zinfer.core import engine as engines
from zinfer.core.case import Case, Workload
from zinfer.core.engine import ENGINES, Offload, OptionError, PlanOptions, StreamOptions, plan_options, values
from zinfer.job.recipe import Sweep
from zinfer.plan.planner import Plan, make_plan
from zinfer.system import machines

ROOT = Path(__file__).parents[1]


def case(engine: str = "stream", offload: Offload = "cpu", **options: Any) -> Case:
    return results.case(1, engine, offload, model="opt-30b", layers=None, options=tuple(options.items()))


def planned(asked: Case, model: str = "opt-30b", nvme_path: str | None = None) -> Plan:
    return make_plan(asked, resolve.resolve(model), machines.load("h100-80gb"), nvme_path)


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        ("stream", {"kv_offload": "disk"}, "kv_offload=disk: choose from none, cpu, auto"),
        ("stream", {"gpus": 0}, "gpus=0: write a whole number of at least 1"),
        ("stream", {"gpus": True}, "gpus=true: write a whole number of at least 1"),
        ("stream", {"pin_memory": True}, "engine stream has no option 'pin_memory'; its options: weight_codec, packed"),
        ("deepspeed", {"tuned": "no"}, "tuned=no: choose from true, false"),
        ("deepspeed", {"ring_depth": 2}, "engine deepspeed has no option 'ring_depth'; .* pin_memory, tuned, gpus$"),
    ],
)
def test_an_unknown_option_or_value_is_refused_with_the_choices(engine: str, given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        engines.resolve_options(engine, given)
    assert refused.value.exit_code == 2
    with pytest.raises(OptionError, match=words):
        list(Sweep(model=("m",), engine=(engine,), offload=("cpu",), options=given).loads())


def test_a_case_keeps_what_differs_from_the_defaults() -> None:
    given = {"kv_offload": "none", "kv_attention": "cpu", "weight_codec": "auto"}
    kept = engines.resolve_options("stream", given)
    assert kept == (("kv_attention", "cpu"), ("kv_offload", "none"))
    assert engines.resolve_options("tensorrt", {"plan": 7}) == (("plan", "7"),)
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
def test_contradictions_are_refused_at_once(engine: str, options: Any, offload: Offload, words: str) -> None:
    asked = case(engine, offload, **options)
    with pytest.raises(OptionError, match=words) as refused:
        engines.parse_options(engine, asked.options, offload)
    assert "\n" not in str(refused.value)
    plan = planned(asked)
    assert not plan.fits
    assert plan.why_not == engines.conflict(engine, asked.options, offload)


def test_records_with_options_that_are_gone_can_be_read_and_planned() -> None:
    text = case("deepspeed", tuned=False).model_dump_json().replace('["tuned",false]', '["tuned",false],["old",3]')
    old = Case.model_validate_json(text)
    assert dict(old.options) == {"tuned": False, "old": 3}
    assert not engines.read_options("deepspeed", old.options).model_dump()["tuned"]
    assert planned(old).step_s == planned(case("deepspeed", tuned=False)).step_s
    read = engines.read_options("stream", (("kv_offload", True), ("weight_codec", "none")))
    assert read == StreamOptions.model_validate({"weight_codec": "none"})
    assert plan_options("no-such-engine", (("gpus", 4),)) == PlanOptions.model_validate({"gpus": 4})
    with pytest.raises(OptionError, match="no option 'old'"):
        engines.parse_options("deepspeed", old.options, "cpu")
    asked = (("kv_cache_dtype", "fp8"),)  # a type that is gone
    assert plan_options("stream", asked).kv_quantized
    with pytest.raises(OptionError, match="choose from auto, bf16, int8"):
        engines.resolve_options("stream", dict(asked))


def test_any_engine_may_be_planned_with_what_only_a_planner_knows() -> None:
    fields: dict[str, Any] = {"model": ("m",), "engine": ("accelerate",), "offload": ("cpu",)}
    wanted = Sweep(**fields, options={"gpus": (1, 2), "kv_offload": ("auto",)})
    assert [dict(load.options)["gpus"] for load in wanted.loads(planning=True)] == [1, 2]
    with pytest.raises(OptionError, match="gpus=0: write a whole number"):
        engines.resolve_options("stream", {"gpus": 0}, planning=True)


@pytest.mark.parametrize("name", [*ENGINES, "vllm"])
def test_help_of_an_engine_lists_every_option_with_its_values(name: str) -> None:
    shown = invoke("run", "--help-engine", name).output
    for key, field in (ENGINES[name].options if name in ENGINES else engines.ServerOptions).model_fields.items():
        assert f"{key}={'|'.join(values(field))}" in shown
        assert field.description
    unknown = invoke("sweep", "--help-engine", name[:-1])
    assert (unknown.exit_code, f"did you mean '{name}'?" in unknown.output) == (2, True)


def test_what_options_share_with_a_plan_takes_the_same_values() -> None:
    for kind in ENGINES.values():
        for name in kind.options.model_fields.keys() & PlanOptions.model_fields.keys():
            of_old_records = ["fp8"] if name == "kv_cache_dtype" else []
            assert values(kind.options.model_fields[name]) + of_old_records == values(PlanOptions.model_fields[name])


def test_no_planner_knows_an_engine_and_no_engine_plans() -> None:
    for path in (ROOT / "zinfer" / "plan").glob("*.py"):
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not words & set(ENGINES), path
    for path in (ROOT / "zinfer" / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zinfer.plan"):
                assert {alias.name for alias in node.names} <= {"Plan", "Placement", "Tiers"}, path


def test_a_plan_of_another_batch_is_that_batchs_plan() -> None:
    first = planned(case(kv_offload="auto").model_copy(update={"gpu_weights": "auto"}), "opt-66b", "/nvme")
    planner = first.planner()
    assert planner.plan is first
    for batch_size, input_len, output_len in ((64, 512, 32), (3, 9, 4)):
        load = Workload(batch_size=batch_size, input_len=input_len, output_len=output_len)
        assert planner.at(load) == planned(first.case.model_copy(update={"workload": load}), "opt-66b", "/nvme")
    stay = len(first.placement.resident_layers)
    assert 0 < stay * first.model.layer_bytes <= first.placement.resident_bytes
    assert first.placement.resident_bytes < first.resident_bytes, "what is given away leaves a margin"


@pytest.mark.parametrize(("share", "layers"), [("0%", 0), ("50%", 32), ("100%", 64), ("10GiB", 5)])
def test_layers_that_stay_are_spread_over_the_depth(share: str, layers: int) -> None:
    stay = planned(case().model_copy(update={"gpu_weights": share}), "opt-66b").placement.resident_layers
    assert len(stay) == layers
    assert max((end - start for start, end in pairwise(stay)), default=0) <= 64 // max(1, layers) + 1
