"""Zero-copy kernel, by which small tensors overtake the weights: in Triton's interpreter and compiled.

The kernel runs in a process of its own (`tests.interpreter`).
"""

import re
from pathlib import Path

import pytest
import torch

from tests.interpreter import interpreted

SIZES = (64, 4096, 4096 + 64, 3 * 4096 + 192)


@pytest.mark.slow
def test_the_kernel_copies_all_and_no_more(tmp_path: Path) -> None:
    interpreted(__name__, tmp_path / "copies")
    for size, (source, copied) in zip(SIZES, torch.load(tmp_path / "copies"), strict=True):
        assert source.numel() == size
        assert torch.equal(copied[:size], source)
        assert bool((copied[size:] == 7).all())


def test_the_kernel_compiles_for_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zinfer.engine import zero_copy

    types = {"source": "*i32", "out": "*i32", "words": "i32", "BLOCK": "constexpr"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(3)}
    source = ASTSource(zero_copy._copy, types, {"BLOCK": zero_copy.BLOCK}, aligned)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


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
