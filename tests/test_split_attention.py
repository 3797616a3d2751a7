"""Test the split-positions attention kernel against PyTorch. It is for few queries, with the results of PyTorch's own.

The kernels run in a process of their own (`tests.interpreter`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tests import test_cache_kinds as kinds
from tests import test_graphs
from tests.checkpoints import ARCHITECTURES, save_config
from tests.running import decode, error, prefill
from tests.test_codec import compile_for_h100
from tests.test_parity import load
from zinfer.engine.stream import graphs, split_attention
from zinfer.engine.stream.attention import bias

# Rows, heads of keys, queries, positions, sizes of a key and of a value.
SHAPES = ((1, 2, 4, 200, 64, 64), (2, 2, 1, 320, 80, 80), (1, 1, 20, 129, 24, 40), (1, 1, 2, 900, 16, 16))
MAX_SPLITS = 8  # under the interpreter: the last shape has two tiles a program
BIASES = {torch.float32: ("none", "one", "each"), torch.bfloat16: ("each",), torch.float16: ("each",)}
# With sinks. A head of the first has one program, one of the last has queries of two tokens for each of eight heads.
SUNK = ((3, 2, 8, 60, 64, 64), (1, 2, 4, 200, 64, 64), (1, 2, 16, 129, 24, 40))
MODELS = {
    "llama": ARCHITECTURES["llama"] | {"num_hidden_layers": 2},
    "gpt_oss": kinds.KINDS["gpt_oss"]
    | {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"]},
}
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
    seen[:, :, : positions // 2] = False
    return {"none": None, "one": bias(seen[:, :1], dtype), "each": bias(seen, dtype)}


def sinks_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-4, 6, shape[1] * shape[2]).view(shape[1:3]).to(dtype)


def with_sinks(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Return attention in float64. A head's sink is the score of a further position whose value is zero."""
    query, keys, values = query.double(), *(pad(states.double(), (0, 0, 0, 1)) for states in (keys, values))
    bias = torch.zeros(*query.shape[:3], keys.shape[2], dtype=torch.float64, device=query.device)
    bias[..., -1] = sinks.double()
    if mask is not None:
        bias[..., :-1] += mask.double()
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias)


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


@pytest.mark.parametrize("dtype", BIASES)
def test_sinks_take_their_part_of_each_softmax(dtype: torch.dtype, by_kernel: dict[str, Any]) -> None:
    assert by_kernel["combined"] == [False, True, True], "a program that has all positions needs no other"
    results = [triple for name, triple in by_kernel["sinks"].items() if name[0] == dtype]
    assert len(results) == len(SUNK) * len(BIASES[dtype])
    for actual, plain, expected in results:
        assert actual.dtype == plain.dtype == dtype
        assert error(actual, expected) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
        assert error(plain, expected) < {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_give_the_same_logits(name: str, by_kernel: dict[str, Any]) -> None:
    ran, recorded, replaced, actual, expected = by_kernel[name]
    assert ran > 0
    assert replaced == ["Norms", "Linears", "Rotations", "Routers"][: 4 if name == "gpt_oss" else 3]
    assert recorded > 0
    for ours, other in zip(actual, expected, strict=True):
        assert error(ours, other) < 1e-5


@pytest.mark.parametrize("alone", [False, True])
def test_the_kernel_compiles_for_an_h100(alone: bool) -> None:
    from zinfer.engine.stream import attention_kernel as kernel

    constants = {
        "HEADS": 8, "COUNT": 8, "SIZE": 64, "WIDTH": 64, "ALONE": alone, "ASKED": 16,
        "SIZE_BLOCK": 64, "WIDTH_BLOCK": 64, "BLOCK": kernel.BLOCK,
    }  # fmt: skip
    types: dict[str, Any] = dict.fromkeys(("query", "keys", "values", "bias", "sinks"), "*bf16")
    types |= {"scale": "fp32", "sums": "*fp32", "partial": "*bf16" if alone else "*fp32"}
    types |= dict.fromkeys(("keys_strides", "values_strides", "bias_strides"), ("i32",) * 3)
    compile_for_h100(kernel._attend, constants, types, num_warps=kernel.WARPS)


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
        mask64 = None if mask is None else mask.double()
        expected = scaled_dot_product_attention(query.double(), keys.double(), values.double(), attn_mask=mask64)
        assert error(actual, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [*SUNK, *((rows, 8, 8, count, 64, 64) for rows in (1, 8, 300) for count in (151, 640))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gpu_computes_sinks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, keys, values = (tensor.cuda() for tensor in inputs(shape, dtype))
    sinks = sinks_of(shape, dtype).cuda()
    for value in biases(shape, dtype).values():
        mask = None if value is None else value.cuda()
        actual = split_attention.split_attention(query, keys, values, mask, None, sinks)
        expected = with_sinks(query, keys, values, mask, sinks)
        assert error(actual, expected) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
        assert torch.equal(actual, split_attention.split_attention(query, keys, values, mask, None, sinks))


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_to_pytorch(name: str) -> None:
    query, keys, values = inputs(OTHERS[name])
    actual = split_attention.split_attention(query, keys, values, attn_mask=None, scale=0.3)
    assert torch.equal(actual, scaled_dot_product_attention(query, keys, values, scale=0.3))


def main(path: Path) -> None:
    """Compute the tests' results where the interpreter runs the kernels."""
    from zinfer.engine.stream import attention_kernel as kernel
    from zinfer.engine.stream import step_kernels

    step_kernels.PROGRAMS = 8  # the interpreter is slow for each
    results: dict[str, Any] = {"kernel": {}, "sinks": {}}
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
    results["splits"] = [splits[shape] for shape in SHAPES]
    for shape in SUNK:
        for dtype, names in BIASES.items():
            query, keys, values = inputs(shape, dtype)
            sinks = sinks_of(shape, dtype)
            for name in names:
                given = query, keys, values, biases(shape, dtype)[name]
                ways = (
                    way(*given, None, sinks)
                    for way in (split_attention.split_attention, split_attention.plain_attention)
                )
                results["sinks"][dtype, shape, name] = *ways, with_sinks(*given, sinks)
    kernel._combine, results["combined"] = combine, [shape in splits for shape in SUNK]

    split_attention.MIN_POSITIONS, graphs.TUNED = 1, replace(graphs.TUNED, bucket=4)
    kernel.attend = counted = Mock(wraps=kernel.attend)
    for name, settings in MODELS.items():
        counted.reset_mock()
        recorder = test_graphs.Rerun()
        graphs.recorder_of = lambda _device, recorder=recorder: recorder  # type: ignore[misc]
        directory = save_config(path.parent / name, name, **settings)
        logits = []
        for way in ("auto", "off"):
            engine: Any = load("stream", directory, "none", path.parent, cuda_graphs=way)
            ids = torch.arange(14).reshape(2, 7) % 11 + 3
            first = prefill(engine, ids, torch.ones_like(ids), reserve=8)
            logits.append([first, *(decode(engine, torch.tensor([3, 4])) for _ in range(5))])
            if way == "auto":
                replaced = [type(kernels).__name__ for kernels in engine._graphs._replaced if kernels.places]
        results[name] = counted.call_count, recorder.recorded, replaced, *logits
    torch.save(results, path)
