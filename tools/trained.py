"""Small language model, trained on the spot: a trained checkpoint for machines without one.

`python -m tools.trained FOLDER` trains a Llama of 25 million weights to predict the bytes of Python's own standard
library, source and help texts, and writes a whole checkpoint: the weights as bf16, with a description of their
training; a tokenizer with one token per byte; `held-out.txt` and `held-out-prose.txt`, source and help texts that were
not trained on. This takes half a minute on a GPU; on a CPU use fewer `--steps` and a smaller `--batch`. With `--experts
32` each layer is a mixture of as many experts, of which a token takes 4, balanced by the auxiliary loss of published
mixtures.

The description states how much of the weights comes from training and not from their initial values: little, and they
are still Gaussian. It also states how far the largest channel of the keys stands out, because some large models have
such channels (Liu et al. 2024, arXiv:2402.02750), which make a KV cache hard to quantise.
"""

import argparse
import math
import platform
import sysconfig
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

LENGTH = 512  # bytes in a sample
HELD_OUT, HELD_OUT_PROSE = 25, 8  # one file in this many is held out, and one paragraph


def texts() -> tuple[bytes, bytes, bytes]:
    """Return text to train on, and two texts that are held out. They are Python's source and help."""
    folder = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "pydoc_data"}
    files = sorted(path for path in folder.rglob("*.py") if not outside & {*path.parts})
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, path in enumerate(files):
        parts[number % HELD_OUT == 0].append(path.read_bytes())
    prose = [*dict.fromkeys(part.strip("\n").encode() for text in topics.values() for part in text.split("\n\n"))]
    kept = len(prose) - len(prose) // HELD_OUT_PROSE
    training, unknown = b"\n\n".join(prose[:kept]), b"\n\n".join(prose[kept:])
    return b"\n".join([*parts[0], training]), b"\n".join(parts[1]), unknown


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ids are bytes."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, padding_side="left", clean_up_tokenization_spaces=False)


def layers_of(model: PreTrainedModel) -> Tensor:
    """Return the matrices of the model's layers, concatenated, on the CPU."""
    return torch.cat([p.detach().flatten().cpu() for p in model.model.layers.parameters() if p.dim() > 1])


@torch.inference_mode()
def prominence(model: PreTrainedModel, tokens: Tensor) -> float:
    """Return how far the keys' largest channel exceeds the median one."""
    keys = torch.stack([layer.keys for layer in model(input_ids=tokens, use_cache=True).past_key_values.layers])
    channels = keys.float().square().mean((1, 3)).sqrt()  # [layers, heads, head_dim]
    return float((channels.amax(-1) / channels.median(-1).values).mean())


def train(
    folder: Path,
    steps: int,
    batch: int,
    hidden_size: int = 512,
    layers: int = 6,
    learning_rate: float = 1e-3,
    experts: int = 0,
) -> str:
    """Train, write the checkpoint to `folder`, and return its description."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers, "num_attention_heads": max(hidden_size // 64, 1),
        "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel
    if experts:
        heads = shape["num_attention_heads"]
        shape |= {
            "num_key_value_heads": heads, "head_dim": 64, "num_experts": experts, "num_experts_per_tok": 4,
            "moe_intermediate_size": hidden_size, "norm_topk_prob": True, "router_aux_loss_coef": 0.01,
            "output_router_logits": True,
        }  # fmt: skip
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model, config = model.to(device), model.config
    drawn = layers_of(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    seen, *unseen = texts()
    data = torch.frombuffer(bytearray(seen), dtype=torch.uint8).to(device)
    window, losses = torch.arange(LENGTH, device=device), []

    def sample() -> Tensor:
        return data[torch.randint(len(data) - LENGTH, (batch, 1), device=device) + window].long()

    began = time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / max(steps // 20, 1), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        tokens = sample()
        with torch.autocast(device.type, torch.bfloat16, enabled=not experts):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}, {loss.item():.2f} nats a byte, {time.monotonic() - began:.0f} s", flush=True)
    tensors = {name: p.detach().bfloat16().cpu().contiguous() for name, p in model.named_parameters()}
    count = sum(p.numel() for p in tensors.values())
    trained = 1 - float(torch.corrcoef(torch.stack([drawn, layers_of(model)]))[0, 1]) ** 2
    learnt = "untrained"
    if steps:
        last = torch.stack(losses[-20:]).mean().item()
        read = f"{steps * batch * LENGTH / 1e6:.1f} million bytes of source and help texts of Python"
        learnt = f"trained for this on {read} {platform.python_version()}, to {last:.2f} nats a byte"
    kind = type(model).__name__.removesuffix("ForCausalLM")
    source = (
        f"{kind} of {count / 1e6:.0f} million weights, {learnt}; "
        f"{trained:.0%} of their variance is not that of their first values; the largest channel of a head's keys is "
        f"{prominence(model, sample()):.1f} times its median one"
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.output_router_logits = False
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for name, text in zip(("held-out.txt", "held-out-prose.txt"), unseen, strict=True):
        (folder / name).write_text(text.decode(errors="replace"), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"source": source, "format": "pt"})
    return source


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=0)
    print(train(**vars(parser.parse_args())))
