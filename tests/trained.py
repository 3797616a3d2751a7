"""A small language model, trained here and now: weights that training shaped, where no checkpoint is at hand.

`python -m tests.trained FILE.safetensors` trains a Llama of 25 million weights to predict the bytes of Python's own
standard library and writes its matrices as bf16, with how they came about. Half a minute on a GPU; on a CPU take fewer
`--steps` of a smaller `--batch`. It is no published model: much smaller, and trained on far less, than those. How much
of the weights is training's and not what they began with, it says, too: little of it, and they are still Gaussian.
"""

import argparse
import math
import platform
import sysconfig
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 256  # bytes of a sample


def text() -> Tensor:
    """The source of the standard library, uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if not {"site-packages", "dist-packages"} & {*path.parts})
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def layers_of(model: LlamaForCausalLM) -> Tensor:
    """The matrices of its layers, end to end, on the CPU."""
    return torch.cat([p.detach().flatten().cpu() for p in model.model.layers.parameters() if p.dim() == 2])


def train(
    file: Path, steps: int, batch: int, hidden_size: int = 512, layers: int = 6, learning_rate: float = 1e-3
) -> str:
    """Train, write `file`, and return what it says of itself."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=max(hidden_size // 64, 1), max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    drawn = layers_of(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() != 2]}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    data, window, losses = text().to(device), torch.arange(LENGTH, device=device), []
    began = time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / max(steps // 20, 1), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        starts = torch.randint(len(data) - LENGTH, (batch, 1), device=device)
        tokens = data[starts + window].long()
        with torch.autocast(device.type, torch.bfloat16):
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
    last = torch.stack(losses[-20:]).mean().item()
    source = (
        f"Llama of {count / 1e6:.0f} million weights, trained for this on {steps * batch * LENGTH / 1e6:.1f} million "
        f"bytes of the standard library of Python {platform.python_version()}, to {last:.2f} nats a byte; "
        f"{trained:.0%} of their variance is not that of their first values"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, {"source": source})
    return source


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    print(train(arguments.file, arguments.steps, arguments.batch))
