"""Engine accelerate, beyond the parity that test_parity.py checks."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, RecurrentGemmaForCausalLM, Zamba2ForCausalLM

from tests.running import decode, prefill
from tests.test_parity import MACHINE, greedy, load, prompts
from tools.conformance.reference import reference
from tools.conformance.rows import side_by_side
from tools.conformance.small import Subject, save, small_model
from zinfer.checkpoint.resolve import from_directory, with_weights
from zinfer.cli import cli
from zinfer.core.case import Case, Offload, Workload
from zinfer.core.engine import OptionError, conflict
from zinfer.core.model import Dtype, Weights
from zinfer.engine import EngineError, kind
from zinfer.engine.accelerate import Accelerate, _assembled, _parts
from zinfer.engine.pinned import lay_out
from zinfer.plan.planner import make_plan
from zinfer.worker.process import versions
from zinfer.worker.session import not_as_asked


def test_only_decoder_layers_are_offloaded(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load("accelerate", checkpoint("bloom"), "cpu", tmp_path)
    greedy(loaded, (3, 2))
    spec, effective = loaded.plan.model, loaded.effective()
    assert effective.host_weight_bytes == effective.streamed_bytes_per_step == spec.streamed_bytes
    assert effective.gpu_weight_bytes == spec.other_bytes
    assert effective.pinned_bytes == 0  # there is no device to pin for
    loaded.close()
    loaded.close()


def test_files_lie_under_the_path_until_close(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load("accelerate", checkpoint("llama"), "nvme", tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.dat")]
    assert sum(sizes) == loaded.effective().nvme_weight_bytes == loaded.plan.model.streamed_bytes
    loaded.close()
    assert not list(tmp_path.iterdir())


def test_nvme_wants_a_folder(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--nvme-path"):
        load("accelerate", checkpoint("llama"), "nvme", tmp_path / "nowhere")


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("gpu_weights", ["0%", "50%"])
def test_weights_that_layers_share_stay_on_the_device(offload: Offload, gpu_weights: str, tmp_path: Path) -> None:
    directory = tmp_path / "zamba2"
    save(small_model(Subject("zamba2")), directory)
    known = reference(Zamba2ForCausalLM, directory)
    loaded = load("accelerate", directory, offload, tmp_path, gpu_weights=gpu_weights)
    assert float(side_by_side(loaded, known).max()) < known.tolerance
    spec, effective = loaded.plan.model, loaded.effective()
    away = spec.streamed_bytes - sum(loaded.plan.model.layer_parameters[:3]) * 4 * (gpu_weights == "50%")
    assert {effective.host_weight_bytes, effective.nvme_weight_bytes} == {0, away}
    assert effective.gpu_weight_bytes == spec.weight_bytes - away
    assert effective.streamed_bytes_per_step == away
    loaded.close()


def test_a_module_that_reads_weights_of_its_children_has_them(tmp_path: Path) -> None:
    directory = tmp_path / "recurrent_gemma"  # which multiplies with its convolution's weight by itself
    save(small_model(Subject("recurrent_gemma")), directory)
    known = reference(RecurrentGemmaForCausalLM, directory)
    loaded = load("accelerate", directory, "cpu", tmp_path)
    assert float(side_by_side(loaded, known).max()) < known.tolerance
    loaded.close()


def kept(loaded: Accelerate, gpu_weights: str) -> Accelerate:
    """Return the engine loaded anew with this part of the layers on the device."""
    plan = loaded.plan
    case = plan.case.model_copy(update={"gpu_weights": gpu_weights})
    return Accelerate(make_plan(case, plan.model, plan.machine, plan.nvme_path))


@pytest.mark.parametrize(("gpu_weights", "stay"), [("0%", 0), ("34%", 1), ("70%", 2), ("100%", 3)])
@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_the_first_layers_stay_lie_nowhere_else_and_give_the_same_tokens(
    offload: Offload, gpu_weights: str, stay: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    plain = load("accelerate", checkpoint("llama"), offload, tmp_path)
    assert isinstance(plain, Accelerate)
    loaded = kept(plain, gpu_weights)
    for lengths in ((9, 5, 7), (4, 6)):
        assert torch.equal(greedy(loaded, lengths), greedy(plain, lengths))
        plain.clear()
        loaded.clear()
    spec, effective, plan = loaded.plan.model, loaded.effective(), loaded.plan
    layer = spec.streamed_bytes // 3
    assert plan.placement.resident_layers == tuple(range(stay))
    assert effective.settings["resident_layers"] == stay
    assert effective.gpu_weight_bytes == plan.gpu.weights == spec.other_bytes + stay * layer
    assert effective.streamed_bytes_per_step == plan.streamed_bytes == (3 - stay) * layer
    found = {"cpu": effective.host_weight_bytes, "nvme": effective.nvme_weight_bytes}
    assert found.pop(offload) == {"cpu": plan.host, "nvme": plan.nvme}[offload].weights == (3 - stay) * layer
    assert list(found.values()) == [0]
    assert not_as_asked(plan.case, effective, spec.streamed_bytes) is None
    unasked = plan.case.model_copy(update={"gpu_weights": "34%"})
    assert (not_as_asked(unasked, effective, spec.streamed_bytes) is None) == (stay < 3)
    layers = loaded.model.model.layers
    assert [all(one.is_meta for one in layer.parameters()) for layer in layers] == [nth >= stay for nth in range(3)]
    loaded.close()
    plain.close()
    assert not list(tmp_path.iterdir())


def test_sizes_hold_whole_layers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plain = load("accelerate", checkpoint("llama"), "cpu", tmp_path)
    assert isinstance(plain, Accelerate)
    layer = plain.plan.model.streamed_bytes // 3
    for size, stay in ((layer - 1, 0), (2 * layer, 2), (3 * layer - 1, 2), (9 * layer, 3)):
        case = plain.plan.case.model_copy(update={"gpu_weights": f"{size}"})
        plan = make_plan(case, plain.plan.model, MACHINE)
        assert (len(plan.placement.resident_layers), plan.resident_bytes) == (stay, stay * layer)
    plain.close()


def test_what_stays_is_no_choice_of_the_batch() -> None:
    found = conflict("accelerate", (), "cpu", gpu_weights="auto")
    assert found is not None
    assert found.startswith(
        "--gpu-weights auto is decided for each batch, and engine accelerate places its weights once"
    )
    assert found.endswith("give a share (25%) or a size (40GiB)")
    assert conflict("accelerate", (), "nvme", gpu_weights="25%") is conflict("stream", (), "cpu", gpu_weights="auto")
    asked = ["-m", "bloom-tiny", "--engine", "accelerate", "--offload", "cpu", "--gpu-weights", "auto"]
    for words in (["sweep"], ["run", "-p", "x", "--load-format", "dummy"], ["plan", "--machine", "h200"]):
        refused = CliRunner().invoke(cli, [*words, *asked])
        assert isinstance(refused.exception, OptionError)
        assert str(refused.exception) == found


def quantised(
    directory: Path, weights: Weights, offload: Offload, path: Path, dtype: Dtype = "bfloat16",
    gpu_weights: str | None = None,
) -> Accelerate:  # fmt: skip
    case = Case(
        model=str(directory), engine="accelerate", offload=offload, weights=weights, dtype=dtype,
        gpu_weights=gpu_weights, workload=Workload(batch_size=2, input_len=9, output_len=4), load_format="safetensors",
    )  # fmt: skip
    spec = with_weights(from_directory(directory).with_dtype(dtype), weights)
    return Accelerate(make_plan(case, spec, MACHINE, str(path)))


def _kept_by_torchao(directory: Path, weights: Weights) -> Any:
    """Return the model of transformers whose layers torchao has quantised in place."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    quantize_(model.transformer.h, Int8WeightOnlyConfig() if weights == "int8" else PrototypeInt4WeightOnlyConfig())
    return model


@pytest.mark.parametrize(("weights", "offload"), [("int8", "cpu"), ("int4", "cpu"), ("int8", "none")])
def test_weights_of_torchao_cross_as_codes_and_give_its_logits(
    weights: Weights, offload: Offload, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    directory = checkpoint("bloom", 128)
    loaded = quantised(directory, weights, offload, tmp_path)
    model = _kept_by_torchao(directory, weights)
    token_ids, mask = prompts((9, 9))
    found, nxt = prefill(loaded, token_ids, mask, reserve=4), torch.tensor([5, 6])
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(found, model(token_ids).logits[:, -1])
        assert not torch.equal(found, exact(token_ids).logits[:, -1])
        expected = model(torch.cat([token_ids, nxt[:, None]], 1)).logits[:, -1]
    assert torch.allclose(decode(loaded, nxt), expected, atol=0.05)
    effective, plan = loaded.effective(), loaded.plan
    assert effective.settings["torchao"] == {"int8": "Int8Tensor", "int4": "Int4OpaqueTensor"}[weights]
    assert "torchao" in versions("accelerate", weights)
    assert "torchao" not in versions("accelerate")
    if offload == "cpu":
        assert loaded._offloaded is not None
        sizes = [
            part.nbytes for name, one in loaded._offloaded.state_dict.items() for part in _parts(name, one).values()
        ]
        assert effective.host_weight_bytes == effective.streamed_bytes_per_step == sum(sizes)
        # biases and norms stay in 16 bits: 1 % of a large layer, 2 % of this one
        assert sum(sizes) / plan.model.streamed_bytes == pytest.approx(plan.placement.wire_ratio, rel=0.1)
    loaded.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_torchao_that_stay_give_the_same_logits(
    weights: Weights, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    directory = checkpoint("bloom", 128)
    plain, loaded = (quantised(directory, weights, "cpu", tmp_path, gpu_weights=share) for share in (None, "34%"))
    token_ids, mask = prompts((9, 9))
    first, second = (prefill(engine, token_ids, mask, reserve=4) for engine in (plain, loaded))
    assert torch.equal(first, second)
    nxt = torch.tensor([5, 6])
    assert torch.equal(decode(plain, nxt), decode(loaded, nxt))
    full, told = plain.effective(), loaded.effective()
    assert (full.settings["resident_layers"], told.settings["resident_layers"]) == (0, 1)
    assert told.gpu_weight_bytes + told.host_weight_bytes == full.gpu_weight_bytes + full.host_weight_bytes
    assert told.host_weight_bytes == told.streamed_bytes_per_step == full.host_weight_bytes * 2 // 3
    plain.close()
    loaded.close()


def test_host_memory_holds_codes_in_the_layout_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of this layout needs a GPU; Accelerate's hooks bring its bytes unchanged, time after time."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int4TilePackedTo4dTensor

    codes = torch.randint(1 << 30, (8, 8, 32, 4), dtype=torch.int32)
    given = Int4TilePackedTo4dTensor(codes, torch.randn(8, 64, 2).bfloat16(), [1, 128], torch.Size([64, 1024]))
    module = torch.nn.Sequential(torch.nn.Linear(1024, 64, bias=False, device="meta", dtype=torch.bfloat16))
    module[0].weight = torch.nn.Parameter(given.to("meta"), requires_grad=False)
    meta = module[0].weight
    blocks, size = lay_out(_parts("0.weight", meta).items())
    memory = torch.zeros(size, dtype=torch.uint8)
    host = _assembled("0.weight", meta, {name: place.view(memory) for name, place in blocks.items()})
    host.copy_(given)
    assert sum(part.nbytes for part in (codes, given.scale_and_zero)) == size
    seen: list[Any] = []

    def linear(inputs: Any, weight: Any, _bias: Any) -> Any:
        seen.append(weight)
        return inputs

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    attach_align_device_hook_on_blocks(
        module, execution_device={"": torch.device("cpu"), "0": torch.device("cpu")}, offload={"0": True},
        weights_map={"0.weight": host},
    )  # fmt: skip
    for _ in range(2):
        module(torch.zeros(1, 1024))
        assert module[0].weight.is_meta
    assert len(seen) == 2
    for one in seen:
        assert torch.equal(one.qdata, codes)
        assert torch.equal(one.scale_and_zero, given.scale_and_zero)


def test_formats_that_torchao_does_not_have_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"torchao's int4 weights are for bfloat16, not for float32"):
        quantised(checkpoint("bloom"), "int4", "cpu", tmp_path, "float32")
    with pytest.raises(EngineError, match=r"linear modules, which hold \d+% of the layers of .*: leave --weights out"):
        quantised(checkpoint("mixtral"), "int8", "cpu", tmp_path)
    found = conflict("accelerate", (), "cpu", "fp8")
    assert found == "--weights fp8 is for stream: engine accelerate takes int4, int8"
    found = conflict("accelerate", (), "nvme", "int8")
    assert found is not None
    assert found.startswith("--weights int8 of engine accelerate does not go with offload nvme")
    assert found.endswith("choose from cpu, none")
    assert conflict("accelerate", (), "cpu", "int4") is conflict("accelerate", (), "nvme") is None


def test_groups_that_do_not_divide_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(EngineError, match=r"groups of 128: .* has 64 inputs"):
        quantised(checkpoint("bloom"), "int4", "cpu", tmp_path)


def test_torchao_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else find_spec(name))
    with pytest.raises(
        EngineError, match=r"accelerate needs torchao for --weights int4: pip install 'zinfer\[torchao\]'"
    ):
        kind("accelerate", "int4")
    assert kind("accelerate", "fp8") is kind("accelerate")  # refused for another reason
