"""The padded model computes what the trained one does."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.padded import easy_first, pad, prompts_of, requests
from tools.trained import tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=64, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=0.01, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 2)
    config.save_pretrained(tmp_path / "small")
    tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "small" / "model.safetensors", {"source": "drawn", "format": "pt"})
    return tmp_path / "small"


def test_a_padded_model_has_the_logits_of_the_small_one(source: Path, tmp_path: Path) -> None:
    facts = pad(source, tmp_path / "large", hidden_size=1024, intermediate_size=2000, layers=5)
    assert facts == "drawn; padded with zeros to 0 GB: 3 layers of 5 change nothing"
    token_ids = torch.randint(0, 90, (3, 17))
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids).logits
        for folder in (source, tmp_path / "large")
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert logits[0].std() > 0.1
    large = (tmp_path / "large" / "model.safetensors").stat()
    assert large.st_blocks * 512 < large.st_size / 4, "zeros are holes"


@pytest.mark.parametrize(("hidden_size", "layers", "message"), [(128, 5, "a norm would round"), (256, 1, "larger")])
def test_shapes_that_cannot_be_are_refused(
    hidden_size: int, layers: int, message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        pad(source, tmp_path / "large", hidden_size, 2000, layers)


def test_requests_continue_places_of_the_texts_in_turn() -> None:
    texts = ["abcdefghij" * 10, "0123456789" * 4]
    prompts = prompts_of(texts, 8, 12)
    assert "".join(prompt[0] for prompt in prompts) == "a0c7e4g1"
    lines = [json.loads(line)["body"] for line in requests(prompts, 5).splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert {len(line["prompt"]) for line in lines} == {12}
    assert {(line["max_tokens"], line["temperature"]) for line in lines} == {(5, 0)}


@torch.inference_mode()
def test_the_first_prompt_is_an_easy_one(source: Path) -> None:
    tokenizer().save_pretrained(source)
    model, dice = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), random.Random(1)
    prompts = ["".join(dice.choices("0123456789ABCDEFGH", k=10)) for _ in range(12)]
    first, *others = easy_first(source, prompts, 6)
    assert others == [prompt for prompt in prompts if prompt != first]
    sure = {}
    for prompt in prompts:
        ids, total = list(prompt.encode()), 0.0
        for _ in range(6):
            best = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max(-1)
            ids.append(int(best.indices))
            total += float(best.values)
        sure[prompt] = total
    assert sum(sure[prompt] > sure[first] for prompt in prompts) == 3
