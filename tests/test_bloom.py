"""BLOOM with zinfer's attention: the logits of transformers' own forward pass, without scores in memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomGelu

from tests import Checkpoints, Patch, test_ragged
from tests.running import error
from tests.test_parity import load, prompts
from zinfer.engine import EngineError
from zinfer.engine.stream import bloom


def models(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model as it is, and adapted."""
    both = [AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval() for _ in range(2)]
    bloom.adapt(both[1].transformer.h)
    return both[0], both[1]


@torch.inference_mode()
@pytest.mark.parametrize("bias_bytes", [1, 1 << 20])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)])
def test_a_prompt_and_steps_give_the_logits_of_transformers(
    dtype: torch.dtype, within: float, padded: bool, bias_bytes: int, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    """Biases are made for one head at a time, or for all."""
    monkeypatch.setattr(bloom, "BIAS_BYTES", bias_bytes)
    ids, mask = prompts((29, 12, 21) if padded else (29, 29, 29))
    outputs = []
    for model in models(checkpoint("bloom"), dtype):
        first = model(ids, attention_mask=mask if padded else None, use_cache=True)
        more = torch.cat([mask, torch.ones(3, 4, dtype=torch.int64)], 1)
        steps = [first.logits]
        for count, at in ((3, 32), (1, 33)):
            seen = more[:, :at] if padded else None
            steps.append(
                model(ids[:, :count], attention_mask=seen, past_key_values=first.past_key_values, use_cache=True).logits
            )
        outputs.append(steps)
    for expected, actual in zip(*outputs, strict=True):
        real = mask.bool() if padded and expected.shape[1] == mask.shape[1] else torch.ones(expected.shape[:2]).bool()
        assert error(actual[real], expected[real]) < within


class Sizes(TorchDispatchMode):
    """The most values of a tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        result = function(*args, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and "view" not in str(function):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


@torch.inference_mode()
def test_scores_of_all_heads_are_never_in_memory(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    monkeypatch.setattr(bloom, "BIAS_BYTES", 1)
    model, adapted = models(checkpoint("bloom"), torch.float32)
    ids, mask = prompts((400,))
    heads, largest = model.config.n_head, []
    for each in (model, adapted):
        with Sizes() as sizes:  # type: ignore[no-untyped-call]
            each(ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        largest.append(sizes.largest)
    assert largest[0] >= heads * 400**2 > largest[1]


def test_layers_sliced_for_exact_parallelism_keep_their_own_attention(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = checkpoint("bloom")
    sliced = Path(shutil.copytree(whole, tmp_path / "sliced"))
    config = json.loads((sliced / "config.json").read_text())
    (sliced / "config.json").write_text(json.dumps(config | {"pretraining_tp": 2, "slow_but_exact": True}))
    _, adapted = models(sliced, torch.float32)
    assert not any("forward" in vars(module) for module in adapted.modules())
    test_ragged.check(load("stream", sliced, "cpu"), joins=False)
    attention = [load("stream", folder, "cpu").effective().settings["attention"] for folder in (sliced, whole)]
    assert attention == ["eager", "sdpa"], "plans of records count what was computed"
    with pytest.raises(EngineError, match="computes attention itself"):
        load("stream", sliced, "cpu", kv_offload="cpu")


def test_only_attention_and_gelu_are_adapted(checkpoint: Checkpoints) -> None:
    _, adapted = models(checkpoint("bloom"), torch.float32)
    assert {type(module) for module in adapted.modules() if "forward" in vars(module)} == {BloomAttention, BloomGelu}
