"""Trained model in the shape of a large one: its text, and the bytes of many more weights.

`python -m tools.padded SOURCE FOLDER` writes a Llama checkpoint that computes what the small one at SOURCE does. What
is added are zeros: channels of the hidden state, attention heads and columns of the feed-forward layers beside the
trained ones, and whole layers behind the trained ones, which leave the hidden state as it is. So a pass moves the bytes
of a large model, and the text, and with it the share of drafts that are right, is that of trained weights.

The zeros are holes in the file, so that it takes next to no room on the disk. A codec would find them: measure with
`-O weight_codec=none`. FOLDER gets `requests.jsonl`, too: 96 prompts, source and prose in turn, that a model which
`tools.trained` wrote was not trained on; before all others an easy one, for loads of a single request.
"""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

Shape = tuple[int, ...]
BYTES = 2  # of a weight in bfloat16
ALIGNMENT = 4096  # of the tensors in the file, so that its holes are whole pages


def shapes(config: Any) -> dict[str, Shape]:
    """Return the shapes of a Llama with untied embeddings, by name."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    result: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_hidden_layers):
        result |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            }.items()
        }  # fmt: skip
    return result


def pad(source: Path, folder: Path, hidden_size: int, intermediate_size: int, layers: int) -> str:
    """Write the checkpoint, and return its description. Raises ValueError for a source or a shape that cannot be."""
    config = AutoConfig.from_pretrained(source)
    ratio = hidden_size // config.hidden_size
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trained = config.num_hidden_layers
    if config.model_type != "llama" or config.tie_word_embeddings:
        raise ValueError(f"{source} is not a Llama with embeddings and output of their own")
    if hidden_size != ratio * config.hidden_size or 4 ** round(math.log(ratio, 4)) != ratio:
        raise ValueError(f"{hidden_size} channels are not {config.hidden_size} times 4, 16, 64, ..: a norm would round")
    if intermediate_size < config.intermediate_size or layers < trained:
        raise ValueError("the padded model has to be larger")
    # The mean over all channels is that over the trained ones, divided by the ratio.
    scale = 1 / math.sqrt(ratio)
    heads = config.num_attention_heads
    config.head_dim, config.hidden_size, config.intermediate_size = head, hidden_size, intermediate_size
    config.num_hidden_layers, config.num_attention_heads = layers, heads * ratio
    config.num_key_value_heads *= ratio  # each serves as many query heads as before
    config.rms_norm_eps /= ratio
    entries, offset = dict[str, Any](), 0
    for name, shape in shapes(config).items():
        size = math.prod(shape) * BYTES
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(source / "model.safetensors", "pt") as weights:
        origin = (weights.metadata() or {}).get("source", "trained weights")
        added = f"padded with zeros to {offset / 1e9:.0f} GB: {layers - trained} layers of {layers} change nothing"
        description = f"{origin}; {added}"
        header = json.dumps({"__metadata__": {"source": description, "format": "pt"}, **entries}).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        path = folder / "model.safetensors"
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + offset)
        for name in weights.keys():  # noqa: SIM118 (safe_open is no dictionary)
            begin, shape = 8 + len(header) + entries[name]["data_offsets"][0], entries[name]["shape"]
            tensor = weights.get_tensor(name).bfloat16()
            if "norm" in name:
                tensor = tensor * scale
            into = np.memmap(path, np.uint16, "r+", begin, shape)
            into[tuple(slice(0, size) for size in tensor.shape)] = tensor.view(torch.int16).numpy().view(np.uint16)
            into.flush()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    for tokenizer_file in source.glob("*token*"):
        shutil.copy(tokenizer_file, folder)
    return description


def prompts_of(texts: Sequence[str], count: int, input_len: int) -> list[str]:
    """Return the beginnings of continuations: places far from each other of `texts`, in turn."""
    places = count // len(texts)
    return [
        text[index * ((len(text) - input_len) // places) :][:input_len] for index in range(places) for text in texts
    ]


@torch.inference_mode()
def easy_first(source: Path, prompts: Sequence[str], output_len: int) -> list[str]:
    """Return `prompts` with an easy one before the others: of three in four the model at `source` is less sure how they
    continue (the mean log probability of `output_len` tokens, each the likeliest)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # In float32: rounding to fewer bits differs between devices, and decides between prompts that are nearly alike.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    shortest = min(map(len, ids))
    done = model.generate(
        torch.tensor([row[-shortest:] for row in ids], device=device), max_new_tokens=output_len, do_sample=False,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    sure = model.compute_transition_scores(done.sequences, done.scores, normalize_logits=True).mean(-1)
    easy = int(sure.argsort(descending=True)[len(prompts) // 4])
    return [prompts[easy], *prompts[:easy], *prompts[easy + 1 :]]


def requests(prompts: Sequence[str], output_len: int) -> str:
    """Return requests for greedy continuations as JSON lines."""
    bodies = [{"prompt": prompt, "max_tokens": output_len, "temperature": 0} for prompt in prompts]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden-size", type=int, default=8192)
    parser.add_argument("--intermediate-size", type=int, default=28672)
    parser.add_argument("--layers", type=int, default=38)
    options = vars(parser.parse_args())
    print(pad(**options))
    texts = [(options["source"] / name).read_text(encoding="utf-8") for name in ("held-out.txt", "held-out-prose.txt")]
    prompts = easy_first(options["source"], prompts_of(texts, 96, 384), 64)
    (options["folder"] / "requests.jsonl").write_text(requests(prompts, 64), encoding="utf-8")
