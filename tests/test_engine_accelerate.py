"""Engine accelerate, beyond the parity that test_parity.py checks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RecurrentGemmaForCausalLM, Zamba2ForCausalLM

from tests import Checkpoints, invoke
from tests.grid import covering
from tests.test_parity import greedy, load, plan_of
from tools.conformance.reference import reference
from tools.conformance.rows import side_by_side
from tools.conformance.small import Subject, save, small_model
from zinfer.core.case import Offload
from zinfer.core.engine import OptionError, conflict
from zinfer.engine import EngineError
from zinfer.worker.session import not_as_asked


def test_nvme_wants_a_folder(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--nvme-path"):
        load("accelerate", checkpoint("llama"), "nvme", tmp_path / "nowhere")


@pytest.mark.parametrize(("offload", "gpu_weights"), covering(["cpu", "nvme"], ["0%", "50%"]))
def test_weights_that_layers_share_stay_on_the_device(offload: Offload, gpu_weights: str, tmp_path: Path) -> None:
    directory = tmp_path / "zamba2"
    save(small_model(Subject("zamba2")), directory)
    expected = reference(Zamba2ForCausalLM, directory)
    loaded = load("accelerate", directory, offload, tmp_path, gpu_weights=gpu_weights)
    assert float(side_by_side(loaded, expected).max()) < expected.tolerance
    spec, effective = loaded.plan.model, loaded.effective()
    away = spec.streamed_bytes - sum(loaded.plan.model.layer_parameters[:3]) * 4 * (gpu_weights == "50%")
    assert {effective.host_weight_bytes, effective.nvme_weight_bytes} == {0, away}
    assert effective.gpu_weight_bytes == spec.weight_bytes - away
    assert effective.streamed_bytes_per_step == away


def test_a_module_that_reads_weights_of_its_children_has_them(tmp_path: Path) -> None:
    directory = tmp_path / "recurrent_gemma"  # which multiplies with its convolution's weight by itself
    save(small_model(Subject("recurrent_gemma")), directory)
    expected = reference(RecurrentGemmaForCausalLM, directory)
    loaded = load("accelerate", directory, "cpu")
    assert float(side_by_side(loaded, expected).max()) < expected.tolerance


@pytest.mark.parametrize(("stay", "offload"), covering([0, 1, 2, 3], ["cpu", "nvme"]))
def test_the_first_layers_stay_lie_nowhere_else_and_give_the_same_tokens(
    stay: int, offload: Offload, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    plain = load("accelerate", checkpoint("llama"), offload, tmp_path)
    share = ("0%", "34%", "70%", "100%")[stay]
    loaded: Any = load("accelerate", checkpoint("llama"), offload, tmp_path, gpu_weights=share)
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
    actual = {"cpu": effective.host_weight_bytes, "nvme": effective.nvme_weight_bytes}
    assert actual.pop(offload) == {"cpu": plan.host, "nvme": plan.nvme}[offload].weights == (3 - stay) * layer
    assert list(actual.values()) == [0]
    assert effective.pinned_bytes == 0, "there is no device to pin for"
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.dat")) == (offload == "nvme") * (6 - stay) * layer
    assert not_as_asked(plan.case, effective, spec.streamed_bytes) is None
    unasked = plan.case.model_copy(update={"gpu_weights": "34%"})
    assert (not_as_asked(unasked, effective, spec.streamed_bytes) is None) == (stay < 3)
    away = [all(parameter.is_meta for parameter in layer.parameters()) for layer in loaded.model.model.layers]
    assert away == [nth >= stay for nth in range(3)]
    loaded.close()
    plain.close()
    assert not list(tmp_path.iterdir())


def test_sizes_hold_whole_layers(checkpoint: Checkpoints) -> None:
    layer = plan_of(checkpoint("llama"), "accelerate").model.streamed_bytes // 3
    for size, stay in ((layer - 1, 0), (2 * layer, 2), (3 * layer - 1, 2), (9 * layer, 3)):
        plan = plan_of(checkpoint("llama"), "accelerate", gpu_weights=f"{size}")
        assert (len(plan.placement.resident_layers), plan.resident_bytes) == (stay, stay * layer)


def test_what_stays_is_no_choice_of_the_batch() -> None:
    message = conflict("accelerate", (), "cpu", gpu_weights="auto")
    assert message
    assert "--gpu-weights auto" in message
    assert "engine accelerate" in message
    assert conflict("accelerate", (), "nvme", gpu_weights="25%") is conflict("stream", (), "cpu", gpu_weights="auto")
    asked = ["-m", "bloom-tiny", "--engine", "accelerate", "--offload", "cpu", "--gpu-weights", "auto"]
    for words in (["sweep"], ["run", "-p", "x", "--load-format", "dummy"], ["plan", "--machine", "h200"]):
        refused = invoke(*words, *asked)
        assert isinstance(refused.exception, OptionError)
        assert str(refused.exception) == message
