"""A tiny random model with byte-level tokens, whose answers grammars force; and schemas to draw."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
SPECIAL = ["<pad>", "<s>", "</s>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
_END = "{% endfor %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
TEMPLATES = {
    "plain": f"{_TURNS}{_END}[assistant]",
    "tags": f"""{_TOOLS}<tool_call>{{# "arguments": .. #}}</tool_call>{_TURNS}{_CALLS}{_END}[assistant]""",
    "json": f"""{_TOOLS}{{# "parameters": dictionary of argument name #}}{_TURNS}{_CALLS}{_END}[assistant]""",
    "harmony": _TOOLS + f"{_TURNS}{_CALLS}<|end|>{_END}<|start|>assistant{{# <|channel|> #}}",
    "thinks": f"{_TURNS}{_END}[assistant]{{% if open %}}<think>\n{{% endif %}}{{# </think> #}}",
}  # fmt: skip


def save(directory: Path, template: str = "plain") -> Path:
    """Save the model with one of `TEMPLATES`; the same weights every time."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fast.train([str(ROOT / "docs" / "architecture.md")], trainer)
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, SPECIAL.index("<|call|>")]}
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=96, vocab_size=fast.get_vocab_size() + 5, initializer_range=0.4, **ids,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(directory)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **names).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    return directory


def schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of bounded texts."""
    low, patterns = dice.randint(-50, 50), ["^[a-c]{2,4}$", "^(yes|no)$", r"^\d{3}-\d{2}$"]
    plain: list[dict[str, Any]] = [
        {"type": "string", "maxLength": dice.randint(1, 8)},
        {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)},
        {"type": "number", "minimum": 0, "maximum": dice.randint(1, 9)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": dice.sample(["a", "é", "東京", 1, 2.5, None, True, "x y"], dice.randint(1, 4))},
        {"const": dice.choice(["fixed", 7, {"a": [1]}, '"quoted"\n'])},
        {"type": "string", "pattern": dice.choice(patterns)},
    ]
    kind = dice.choice(["plain"] * 8 * (depth > 0) + ["array", "object"] * (depth < 2) + ["anyOf"] * (depth == 1))
    if kind == "plain":
        return dice.choice(plain)
    parts = [schema(dice, depth + 1) for _ in range(dice.randint(1, 4))]
    if kind == "anyOf":
        return {"anyOf": parts[:3]}
    if kind == "array":
        return {"type": "array", "items": parts[0], "minItems": low % 3, "maxItems": low % 3 + 1}
    fields = {f"{dice.choice('abcdef')}{number}": part for number, part in enumerate(parts)}
    asked = [name for name in fields if dice.random() < 0.7]
    return {"type": "object", "properties": fields, "required": asked, "additionalProperties": False}
