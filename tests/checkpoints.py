"""Tiny random checkpoints in float32, in the published form. Sharded safetensors and a tokenizer.

Weights are drawn twenty times wider than a fresh model's, so that greedy tokens vary and depend on the prompt.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 128
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_SHAPE: dict[str, object] = {"num_hidden_layers": 3, "num_attention_heads": 4}
_FALCON = _SHAPE | {"alibi": False, "bias": False}

ARCHITECTURES: dict[str, dict[str, object]] = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "opt": _SHAPE | {"ffn_dim": 128, "max_position_embeddings": 64},
    "llama": _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96},
    "gpt_neox": _SHAPE | {"intermediate_size": 96},
    "falcon": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-old": _FALCON | {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    "qwen2": _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96, "tie_word_embeddings": True},
    "mistral": _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 32, "sliding_window": None},
    "mixtral": _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4},
}


def save_checkpoint(architecture: str, directory: Path, hidden_size: int = 64) -> Path:
    """Save a checkpoint of one of `ARCHITECTURES` in `directory`; the same weights every time."""
    settings = ARCHITECTURES[architecture] | {"vocab_size": VOCAB_SIZE, "hidden_size": hidden_size}
    if architecture == "opt":
        settings["word_embed_proj_dim"] = hidden_size
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(architecture.removesuffix("-old"), **settings, **ids, initializer_range=0.4)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # with tied embeddings a token would be its own successor
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(directory, max_shard_size=model.num_parameters() * 4 // 3)
    _tokenizer().save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character: special ones, printable ASCII, and names for the other ids."""
    words = [*_SPECIAL, *(chr(code) for code in range(32, 127))]
    words += [f"<{index}>" for index in range(len(words), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk, padding_side="left"
    )


def once(factory: pytest.TempPathFactory, save: Callable[[str, Path], object]) -> Callable[[str], Path]:
    """Return a function that saves a checkpoint of a name once."""

    @cache
    def make(name: str) -> Path:
        save(name, directory := factory.mktemp(name))
        return directory

    return make


def save_config(directory: Path, architecture: str, **settings: object) -> Path:
    """Save a checkpoint of a tiny model of any architecture in `directory`: 6 layers unless `settings` say otherwise,
    persistent buffers drawn like weights and different in each layer."""
    shape = _SHAPE | {"num_hidden_layers": 6, "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(architecture, **{**shape, **ids, "initializer_range": 0.4, **settings})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.normal_()
    model.save_pretrained(directory, max_shard_size=model.num_parameters() * 4 // 3)
    _tokenizer().save_pretrained(directory)
    return directory
