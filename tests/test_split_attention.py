"""Test the split-positions attention kernel against PyTorch. It is for few queries, with the results of PyTorch's own.

The kernels run in a process of their own (`tests.interpreter`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests import test_graphs
from tests.checkpoints import ARCHITECTURES, save_config
from tests.interpreter import interpreted
from tests.running import decode, error, prefill
from tests.test_parity import load
from zinfer.engine.stream import graphs, split_attention
from zinfer.engine.stream.attention import bias

# Rows, heads of keys, queries, positions, sizes of a key and of a value.
SHAPES = ((1, 2, 4, 200, 64, 64), (2, 2, 1, 320, 80, 80), (1, 1, 20, 129, 24, 40), (1, 1, 2, 900, 16, 16))
MAX_SPLITS = 8  # under the interpreter: the last shape has two tiles a program
BIASES = {torch.float32: ("none", "one", "each"), torch.bfloat16: ("each",), torch.float16: ("each",)}
OTHERS = {
    "few positions": (1, 2, 4, 100, 64, 64),
    "many heads": (8, 32, 1, 200, 16, 16),
    "many queries": (1, 2, 65, 200, 16, 16),
    "large heads": (1, 1, 1, 200, 512, 512),
}


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, the latter with room for more positions."""
    rows, heads, count, positions, size, width = shape
    dice = torch.Generator().manual_seed(positions)
    query = torch.randn((rows, heads, count, size), generator=dice).to(dtype)
    keys, values = (torch.randn((rows, heads, positions + 13, n), generator=dice).to(dtype) for n in (size, width))
    return query, keys[:, :, :positions], values[:, :, :positions]


def biases(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Return biases: none, one for all queries, one for each; whole tiles of positions are hidden."""
    rows, _, count, positions, _, _ = shape
    seen = torch.rand((rows, count, positions), generator=torch.Generator().manual_seed(0)) < 0.5
    seen[..., -1] = True
    seen[:, :, :100] = False
    return {"none": None, "one": bias(seen[:, :1], dtype), "each": bias(seen, dtype)}


@pytest.fixture(scope="module")
def by_kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `main` saved."""
    path = tmp_path_factory.mktemp("split") / "results"
    interpreted(__name__, path)
    results: dict[str, Any] = torch.load(path)
    return results


@pytest.mark.parametrize("dtype", BIASES)
def test_the_kernel_gives_what_pytorch_gives(dtype: torch.dtype, by_kernel: dict[str, Any]) -> None:
    results = {name: pair for name, pair in by_kernel["kernel"].items() if name[0] == dtype}
    assert len(results) == len(SHAPES) * len(BIASES[dtype])
    for actual, expected in results.values():
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert error(actual, expected) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


def test_positions_of_a_head_are_split_among_programs(by_kernel: dict[str, Any]) -> None:
    assert by_kernel["splits"] == [4, 5, 3, 8]


def test_recorded_steps_give_the_same_logits(by_kernel: dict[str, Any]) -> None:
    ran, recorded, actual, expected = by_kernel["engine"]
    assert ran > 0
    assert recorded > 0
    for ours, other in zip(actual, expected, strict=True):
        assert error(ours, other) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 4, 32768, 128, 128), (4, 8, 16, 640, 256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_computes_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if max(shape[-2:]) * dtype.itemsize > split_attention.MAX_BYTES:
        pytest.skip("PyTorch computes it")
    query, keys, values = (tensor.cuda() for tensor in inputs(shape, dtype))
    for value in biases(shape, dtype).values():
        mask = None if value is None else value.cuda()
        actual = split_attention.split_attention(query, keys, values, attn_mask=mask, scale=None)
        wide = None if mask is None else mask.double()
        expected = scaled_dot_product_attention(query.double(), keys.double(), values.double(), attn_mask=wide)
        assert error(actual, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_to_pytorch(name: str) -> None:
    query, keys, values = inputs(OTHERS[name])
    actual = split_attention.split_attention(query, keys, values, attn_mask=None, scale=0.3)
    assert torch.equal(actual, scaled_dot_product_attention(query, keys, values, scale=0.3))


def main(path: Path) -> None:
    """Compute the tests' results where the interpreter runs the kernels."""
    from zinfer.engine.stream import attention_kernel as kernel

    results: dict[str, Any] = {"kernel": {}, "splits": []}
    combine, splits, kernel.MAX_SPLITS = kernel._combine, dict[Any, int](), MAX_SPLITS

    class Counted:
        """Kernel that notes the number of splits of each launch."""

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                splits[shape] = args[3]
                combine[grid](*args, **options)

            return launch

    kernel._combine = Counted()
    for shape in SHAPES:
        for dtype in BIASES:
            query, keys, values = inputs(shape, dtype)
            for name, attn_bias in biases(shape, dtype).items():
                if name not in BIASES[dtype]:
                    continue
                actual = split_attention.split_attention(query, keys, values, attn_mask=attn_bias, scale=None)
                mask = None if attn_bias is None else attn_bias.double()
                expected = scaled_dot_product_attention(query.double(), keys.double(), values.double(), attn_mask=mask)
                results["kernel"][dtype, shape, name] = actual, expected
    kernel._combine, results["splits"] = combine, [*splits.values()]

    split_attention.MIN_POSITIONS, graphs.TUNED = 1, replace(graphs.TUNED, bucket=4)
    attend, ran = kernel.attend, 0

    def counted(*args: Any) -> Tensor:
        nonlocal ran
        ran += 1
        return attend(*args)

    kernel.attend = counted  # type: ignore[assignment]
    recorder = test_graphs.Rerun()
    graphs.recorder_of = lambda _device: recorder  # type: ignore[assignment]
    directory = save_config(path.parent, "llama", **ARCHITECTURES["llama"])
    logits = []
    for way in ("auto", "off"):
        engine = load("stream", directory, "none", path.parent, cuda_graphs=way)
        ids = torch.arange(14).reshape(2, 7) % 11 + 3
        first = prefill(engine, ids, torch.ones_like(ids), reserve=8)
        logits.append([first, *(decode(engine, torch.tensor([3, 4])) for _ in range(5))])
        engine.close()
    results["engine"] = ran, recorder.recorded, *logits
    torch.save(results, path)
