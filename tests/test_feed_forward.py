"""Feed-forward networks in blocks of tokens."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import save_checkpoint
from zinfer.checkpoint.architecture import decoder_layers
from zinfer.engine.stream.feed_forward import split_by_tokens


@pytest.mark.parametrize(("name", "split"), [("llama", True), ("gpt_neox", True), ("mixtral", False)])
def test_a_long_prompt_passes_a_dense_network_in_blocks(name: str, split: bool, tmp_path: Path) -> None:
    """The experts of a mixture stay whole: their tokens are grouped by expert."""
    model = AutoModelForCausalLM.from_pretrained(save_checkpoint(name, tmp_path), dtype=torch.float32).eval()
    ids = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    _, layers = decoder_layers(model)
    assert split_by_tokens(layers, 5) == (len(layers) if split else 0)
    sizes = list[int]()
    for path, module in layers.named_modules():
        if isinstance(module, torch.nn.Linear) and ".mlp." in path:
            module.register_forward_pre_hook(lambda _, states: sizes.append(states[0][..., 0].numel()))
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert (max(sizes, default=18) <= 5) is split


def test_a_short_pass_is_computed_at_once() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    sizes = list[torch.Size]()
    network[0].register_forward_pre_hook(lambda _, states: sizes.append(states[0].shape))
    assert split_by_tokens([network], 8) == 1
    network(torch.ones(2, 4, 4))
    network(torch.ones(3, 4, 4))
    assert sizes == [(2, 4, 4), (1, 8, 4), (1, 4, 4)]
