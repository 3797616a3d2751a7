"""Zero-copy kernel, by which small tensors overtake the weights: in Triton's interpreter and compiled.

The kernel runs in a process of its own (`tests.interpreter`).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_codec import compile_for_h100

SIZES = (64, 4096, 4096 + 64, 3 * 4096 + 192)


@pytest.mark.slow
def test_the_kernel_copies_all_and_no_more(by_kernel: Any) -> None:
    for size, (source, copied) in zip(SIZES, by_kernel, strict=True):
        assert source.numel() == size
        assert torch.equal(copied[:size], source)
        assert bool((copied[size:] == 7).all())


def test_the_kernel_compiles_for_an_h100() -> None:
    from zinfer.engine import zero_copy

    compile_for_h100(zero_copy._copy, {"BLOCK": zero_copy.BLOCK}, {"source": "*i32", "out": "*i32"})


def test_without_a_gpu_no_kernel_runs_and_the_reason_is_given() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from zinfer.engine.triton_check import trouble

    assert re.search("CUDA|NVIDIA", trouble() or "")


@pytest.mark.gpu
def test_a_zero_copy_transfer_overtakes_waiting_copies() -> None:
    if not torch.cuda.is_available():
        pytest.skip("only a GPU's copies wait in line")
    from zinfer.engine.zero_copy import zero_copy

    gpu = torch.device("cuda")
    weights = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    target, second = torch.empty_like(weights, device=gpu), torch.cuda.Stream()
    shapes = ((3, 1, 77), (120, 1, 14336), (1,), (5, 0), (64, 8, 1, 128))
    for shape in shapes:  # compiles the kernel and locks the buffers' pages: both would wait for the copies
        zero_copy(torch.randn(shape).bfloat16(), gpu)
    torch.cuda.synchronize()
    for shape in shapes * 3:
        with torch.cuda.stream(second):
            for _ in range(4):
                target.copy_(weights, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(second)
        tensor = torch.randn(shape).bfloat16()
        with torch.inference_mode(len(shape) == 3):
            copied_tensor = zero_copy(tensor, gpu)
        torch.cuda.current_stream().synchronize()
        assert not copied.query()  # it did not wait for them
        assert torch.equal(copied_tensor.cpu(), tensor)


def main(path: Path) -> None:
    """Run the kernel on `SIZES` bytes before memory it must spare."""
    from zinfer.engine.zero_copy import copy

    copies = []
    for size in SIZES:
        source = torch.randint(256, (size,), dtype=torch.uint8)
        out = torch.full((size + 64,), 7, dtype=torch.uint8)
        copy(source, out[:size])
        copies.append((source, out))
    torch.save(copies, path)
