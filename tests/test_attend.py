"""CPU kernels of attention: products of a few rows with a long matrix equal torch's, for all shapes."""

import platform
import shutil
import subprocess
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import dropout, pad, scaled_dot_product_attention, softmax

from zinfer.engine.stream import cpu_kernel
from zinfer.engine.stream.cpu_attention import (
    DeferredScores,
    HostInt8Tensor,
    HostTensor,
    as_host_int8,
    as_host_tensor,
    stack_host_rows,
)
from zinfer.engine.stream.stacked import NotStackedError

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


LESSER = ("x86-64-v3", "x86-64")  # without AVX-512, and without AVX2


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip a test of compiled code without a C compiler. Torch's substitute is tested everywhere. An error in
    `attend.c` itself does not skip the test.
    """
    trial = tmp_path_factory.mktemp("compiler") / "trial.c"
    trial.write_text("#include <stdint.h>\n#include <string.h>\nint trial(void) { return 0; }\n")
    for name in filter(None, map(shutil.which, cpu_kernel.COMPILERS)):
        command = [name, *cpu_kernel.FLAGS, str(trial), "-o", str(trial.with_suffix(".so"))]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
    pytest.skip("there is no C compiler")


@pytest.fixture
def fresh(monkeypatch: Patch, tmp_path: Path) -> Any:
    """Look for the library anew, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_kernel.library.cache_clear()
    yield
    cpu_kernel.library.cache_clear()


@pytest.fixture
def lesser(request: pytest.FixtureRequest, compiler: None, fresh: None, monkeypatch: Patch) -> None:
    """Compile `attend.c` for a processor with fewer instructions than this one."""
    if platform.machine() != "x86_64":
        pytest.skip("for x86 only")
    flags = tuple(f"-march={request.param}" if flag == "-march=native" else flag for flag in cpu_kernel.FLAGS)
    monkeypatch.setattr(cpu_kernel, "FLAGS", flags)


@pytest.fixture
def no_compiler(fresh: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.usefixtures("compiler")
@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.integers(1, 5), max_size=2),
    rows=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 31, 255, 256, 257, 700]),
    width=st.sampled_from([1, 8, 33, 64, 128, 300]),
    spare=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_both_products_are_those_of_torch(
    batch: list[int], rows: int, tokens: int, width: int, spare: int, dtype: torch.dtype
) -> None:
    matrix = noise(*batch, tokens + spare, width, dtype=dtype)[..., :tokens, :]
    queries, chances = noise(*batch, rows, width, dtype=dtype), noise(*batch, rows, tokens, dtype=torch.float32)
    assert cpu_kernel.can_multiply(queries, matrix)
    for actual, exact in (
        (cpu_kernel.dots(queries, matrix), queries.double() @ matrix.double().transpose(-1, -2)),
        (cpu_kernel.mix(chances, matrix), chances.double() @ matrix.double()),
    ):
        assert actual.dtype == torch.float32
        assert torch.allclose(actual.double(), exact, atol=2e-5 * (tokens + width) ** 0.5, rtol=1e-4)


@pytest.mark.usefixtures("compiler")
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 3),
    width=st.sampled_from([1, 33, 128]),
    dtype=st.sampled_from((*DTYPES, torch.uint8)),
    turned=st.booleans(),
)
def test_new_tokens_of_several_blocks_are_stored_at_once(
    rows: list[int], heads: int, tokens: int, width: int, dtype: torch.dtype, turned: bool
) -> None:
    """Each block appends its own rows of the new states. With `turned`, not in order."""
    new = (100 * noise(sum(rows), heads, tokens, width, dtype=torch.float32)).abs().to(dtype)
    states = new.transpose(2, 3).contiguous().transpose(2, 3) if turned else new
    memories, copies, first = [], [], 0
    for count in rows:
        memories.append(torch.full((count + 1, heads, tokens + 5, width), 7, dtype=dtype))
        copies.append((memories[-1][:count, :, 3 : 3 + tokens], states[first : first + count]))
        first += count
    cpu_kernel.store(copies)
    first = 0
    for memory, count in zip(memories, rows, strict=True):
        expected = torch.full_like(memory, 7)
        expected[:count, :, 3 : 3 + tokens] = new[first : first + count]
        assert torch.equal(memory, expected)
        first += count


@pytest.mark.usefixtures("no_compiler")
def test_new_tokens_are_stored_without_a_compiler() -> None:
    memories, new = [torch.zeros(2, 3, 5, 8) for _ in range(2)], noise(4, 3, 1, 8, dtype=torch.float32)
    cpu_kernel.store([(memory[:, :, 4:], new[2 * at : 2 * at + 2]) for at, memory in enumerate(memories)])
    assert torch.equal(torch.cat(memories)[:, :, 4:], new)
    assert not torch.cat(memories)[:, :, :4].any()


def blocks_of(
    lengths: tuple[int, ...], heads: int, width: int, columns: int, dtype: torch.dtype
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return keys and values with spare room, and exact float64 values. Two rows for each length."""
    blocks, exact = [], []
    for length in lengths:
        both = [noise(2, heads, length + 3, size, dtype=torch.float32) for size in (width, columns)]
        if dtype == torch.int8:
            coded = [cpu_kernel.quantize_rows(states).view(torch.int8) for states in both]
            stored = [states[:, :, :length, :size] for states, size in zip(coded, (width, columns), strict=True)]
        else:
            stored = [states.to(dtype)[:, :, :length] for states in both]
        blocks.append((stored[0], stored[1]))
        wide = [cpu_kernel.dequantized(states, torch.float32).double() for states in stored]
        exact.append((wide[0], wide[1]))
    return blocks, exact


@pytest.mark.usefixtures("compiler")
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.sampled_from([(1,), (130,), (5, 128, 257), (2000, 3), (1300,)]),
    count=st.sampled_from([1, 2, 5, 128]),
    sizes=st.sampled_from([(8, 8), (128, 128), (40, 33), (64, 256)]),
    dtype=st.sampled_from((*DTYPES, torch.int8)),
    biases=st.lists(st.sampled_from(["each", "rows", "hidden"]), max_size=3),
    threads=st.sampled_from([1, 7]),
)
def test_attention_to_several_micro_batches_is_that_of_each(
    lengths: tuple[int, ...], count: int, sizes: tuple[int, int], dtype: torch.dtype, biases: list[str], threads: int
) -> None:
    """Threads take parts of the tokens where heads are few."""
    check_attention(lengths, count, sizes, dtype, biases, threads)


def check_attention(
    lengths: tuple[int, ...],
    count: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    biases: list[str],
    threads: int = 2,
) -> None:
    heads, rows, longest = 9, 2 * len(lengths), max(lengths)
    blocks, exact = blocks_of(lengths, heads, *sizes, dtype)
    queries = noise(rows, heads, count, sizes[0])
    hidden = (torch.arange(longest) < torch.arange(rows)[:, None, None, None]) & (torch.arange(longest) < longest - 1)
    kinds = {
        "each": noise(rows, heads, count, longest, dtype=torch.float32),
        "rows": noise(rows, 1, 1, longest, dtype=torch.float32),
        "hidden": torch.zeros(rows, 1, 1, longest).masked_fill_(hidden, float("-inf")),
    }
    assert cpu_kernel.can_attend(queries, blocks)
    mixed = cpu_kernel.attend(queries, blocks, [kinds[bias] for bias in biases], 0.3, threads)
    for number, (keys, values) in enumerate(exact):
        rows_of_batch = slice(2 * number, 2 * number + 2)
        scores = 0.3 * queries[rows_of_batch].double() @ keys.mT
        for kind in biases:
            scores = scores + kinds[kind].expand(rows, -1, -1, -1)[rows_of_batch, ..., longest - keys.shape[2] :]
        expected = torch.softmax(scores, dim=-1).nan_to_num() @ values
        assert torch.allclose(mixed[rows_of_batch].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("length", "threads"), [(40, 2), (1300, 7)])  # tokens as one part, and as several
def test_a_number_that_is_none_stays_visible_and_what_is_hidden_does_not_count(length: int, threads: int) -> None:
    attend = partial(cpu_kernel.attend, threads=threads)
    keys, values = noise(1, 16, length, 8, dtype=torch.float32), noise(1, 16, length, 8, dtype=torch.float32)
    queries, hidden = torch.ones(1, 16, 1, 8), length - 33
    nothing = torch.full((1, 1, 1, length), float("-inf"))
    assert torch.equal(attend(queries, [(keys, values)], [nothing]), torch.zeros(1, 16, 1, 8))
    broken = keys.clone()
    broken[0, 3, 20, 0] = float("nan")
    assert attend(queries, [(broken, values)])[0, :, 0, 0].isnan().nonzero().tolist() == [[3]]
    queries[0, 5] = float("nan")
    assert attend(queries, [(keys, values)])[0, :, 0, 0].isnan().nonzero().tolist() == [[5]]
    queries[0, 5] = 1
    expected = attend(queries, [(keys[:, :, hidden:], values[:, :, hidden:])])
    for low in (torch.finfo(torch.float32).min, float("-inf")):
        seen = torch.zeros(1, 1, 1, length).masked_fill(torch.arange(length) < hidden, low)
        assert torch.allclose(attend(queries, [(keys, values)], [seen]), expected, atol=1e-6)


@pytest.mark.usefixtures("compiler")
def test_values_may_be_too_wide_for_the_compiled_code() -> None:
    (blocks, _), queries = blocks_of((30,), 90, 16, 300, torch.bfloat16), noise(2, 90, 1, 16)
    assert not cpu_kernel.can_attend(queries, blocks)


def test_unsuitable_shapes_are_left_to_torch() -> None:
    keys = noise(2, 3, 40, 16)
    assert not cpu_kernel.can_multiply(noise(2, 3, 129, 16), keys)  # many rows
    assert not cpu_kernel.can_multiply(noise(2, 3, 1, 40), keys.transpose(-1, -2))  # no row of it is whole
    assert not cpu_kernel.can_multiply(noise(3, 1, 16), keys)
    assert not cpu_kernel.can_multiply(noise(1, 2000), noise(5, 2000))
    assert not cpu_kernel.can_multiply(torch.ones(1, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_one(dtype: torch.dtype) -> None:
    keys = noise(1, 4, 8, dtype=dtype)
    keys[0, 2], keys[0, 3, 1] = float("nan"), float("-inf")
    products = cpu_kernel.dots(torch.ones(1, 1, 8), keys)[0, 0]
    assert products.isnan().tolist() == [False, False, True, False]
    assert float(products[3]) == float("-inf")


def test_every_half_is_read_right() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).view(-1, 1)
    assert torch.equal(
        cpu_kernel.dots(torch.ones(1, 1), halves)[0].nan_to_num(nan=7.0), halves[:, 0].float().nan_to_num(nan=7.0)
    )


@pytest.mark.parametrize("lesser", LESSER, indirect=True)
def test_every_processor_computes_the_same(lesser: None) -> None:
    """Sizes that fill the vector registers, exceed them, or fall short. For each width of registers, in rows and
    elements.
    """
    shapes = [(1, 300, 128), (2, 129, 80), (3, 7, 33), (4, 128, 64), (5, 130, 300), (9, 3, 1)]
    for dtype, (rows, tokens, width) in product((*DTYPES, torch.int8), shapes):
        matrix = noise(2, 3, tokens, width, dtype=torch.float32 if dtype == torch.int8 else dtype)
        matrix = cpu_kernel.quantize_rows(matrix).view(torch.int8)[..., :width] if dtype == torch.int8 else matrix
        exact = cpu_kernel.dequantized(matrix, torch.float32).double()
        queries, chances = noise(2, 3, rows, width).float(), noise(2, 3, rows, tokens).float()
        assert cpu_kernel.can_multiply(queries, matrix)
        for actual, expected in (
            (cpu_kernel.dots(queries, matrix), queries.double() @ exact.transpose(-1, -2)),
            (cpu_kernel.mix(chances, matrix), chances.double() @ exact),
        ):
            assert torch.allclose(actual.double(), expected, atol=1e-3, rtol=1e-4)
    for dtype, sizes in product((*DTYPES, torch.int8), ((128, 128), (40, 33))):
        for count in (1, 5):
            check_attention((5, 257), count, sizes, dtype, ["each", "hidden"])
    test_a_number_that_is_none_stays_visible_and_what_is_hidden_does_not_count(1300, 7)
    test_every_half_is_read_right()
    for dtype in DTYPES:
        test_not_a_number_stays_one(dtype)


@pytest.mark.parametrize("groups", [8, 2, 1])
@pytest.mark.parametrize("mask", [None, "left padding", "bias", "bias of each head"])
@pytest.mark.parametrize("length", [1, 3])
def test_attention_is_that_of_torch(groups: int, mask: str | None, length: int) -> None:
    query, keys, values = noise(3, 8, length, 16), noise(3, groups, 50, 16), noise(3, groups, 60, 16)[:, :, 10:]
    seen: Tensor | None = None
    if mask == "left padding":
        seen = (torch.arange(50) >= torch.tensor([0, 7, 20])[:, None])[:, None, None]
    elif mask is not None:
        seen = noise(3, 8 if "head" in mask else 1, 1, 50)
    shared: dict[str, Any] = {"attn_mask": seen, "enable_gqa": groups != 8}
    expected = scaled_dot_product_attention(query.float(), keys.float(), values.float(), **_wide(shared))
    actual = scaled_dot_product_attention(query, as_host_tensor(keys, CPU), as_host_tensor(values, CPU), **shared)
    assert isinstance(actual, HostTensor)
    assert actual.dtype == torch.bfloat16
    assert torch.allclose(actual.float(), expected, atol=0.03)


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    seen = given["attn_mask"]
    return given | ({"attn_mask": seen.float()} if seen is not None and seen.dtype == torch.bfloat16 else {})


def step_by_step(query: Tensor, keys: Any, values: Any, bias: Tensor, mask: Tensor) -> Any:
    """Attend as BLOOM does: ``[rows * heads, 1, D]``, with a bias of each head, then a mask of each row."""
    scores = bias.baddbmm(batch1=query, batch2=keys.reshape(60, -1, 16).mT, beta=1.0, alpha=0.25)
    shares = softmax(scores.view(5, 12, 1, -1) + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    shares = dropout(shares, p=0.1, training=False)
    return torch.bmm(shares.view(60, 1, -1), values.reshape(60, -1, 16))


@pytest.fixture
def stacked(monkeypatch: Patch) -> dict[str, tuple[Any, Tensor]]:
    """Return keys and values of two micro-batches. As a model sees them, and as a plain rectangle."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    stacks: dict[str, tuple[Any, Tensor]] = {}
    for name in ("keys", "values"):
        blocks = [noise(rows, 12, length, 16) for rows, length in ((2, 40), (3, 33))]
        wide = torch.cat([pad(block, (0, 0, 40 - block.shape[2], 0)) for block in blocks])
        stacks[name] = stack_host_rows(blocks, CPU, torch.bfloat16), wide
    return stacks


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, the bias and the mask of `step_by_step`; the mask hides the padding of the last three
    rows."""
    hidden = (torch.arange(40) < 7) & (torch.arange(5) > 1)[:, None]
    mask = torch.zeros(5, 1, 1, 40, dtype=torch.bfloat16)
    mask.masked_fill_(hidden[:, None, None], torch.finfo(torch.bfloat16).min)
    return noise(60, 1, 16), noise(60, 1, 40), mask


@pytest.mark.usefixtures("compiler")
def test_attention_step_by_step_is_computed_at_once(
    stacked: dict[str, tuple[Any, Tensor]], inputs: tuple[Tensor, Tensor, Tensor], monkeypatch: Patch
) -> None:
    (keys, plain_keys), (values, plain_values) = stacked["keys"], stacked["values"]
    expected = step_by_step(inputs[0].float(), plain_keys.float(), plain_values.float(), *map(Tensor.float, inputs[1:]))
    monkeypatch.setattr(DeferredScores, "computed", lambda _: pytest.fail("scores were computed by themselves"))
    actual = step_by_step(inputs[0], keys, values, *inputs[1:])
    assert type(actual) is HostTensor
    assert (actual.dtype, actual.shape) == (torch.bfloat16, (60, 1, 16))
    assert torch.allclose(actual.float(), expected, atol=0.02)


@pytest.mark.usefixtures("compiler")
def test_a_mask_that_a_model_changes_is_read_anew(
    stacked: dict[str, tuple[Any, Tensor]], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    (keys, _), (values, _), (query, bias, mask) = stacked["keys"], stacked["values"], inputs
    before = step_by_step(query, keys, values, bias, mask).as_subclass(Tensor)
    mask[..., 20:] = torch.finfo(torch.bfloat16).min
    bias.zero_()
    after = step_by_step(query, keys, values, bias, mask).as_subclass(Tensor)
    assert not torch.allclose(before, after, atol=0.05)
    assert torch.equal(after, step_by_step(query, keys, values, bias.clone(), mask.clone()).as_subclass(Tensor))


def test_attention_step_by_step_without_a_compiler_is_the_same(
    no_compiler: None, stacked: dict[str, tuple[Any, Tensor]], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    (keys, plain_keys), (values, plain_values) = stacked["keys"], stacked["values"]
    expected = step_by_step(inputs[0].float(), plain_keys.float(), plain_values.float(), *map(Tensor.float, inputs[1:]))
    assert torch.allclose(step_by_step(inputs[0], keys, values, *inputs[1:]).float(), expected, atol=0.02)


@pytest.mark.parametrize(
    "use",
    [
        lambda scores, _: scores * 0.5,
        lambda scores, _: scores / 4 + 1.5,
        lambda scores, mask: mask + scores.view(5, 12, 1, 40),
        lambda scores, mask: (scores.view(5, 12, 1, 40) + mask) * 2,
        lambda scores, mask: scores.view(5, 12, 1, 40).masked_fill(mask < 0, -7.0),
        lambda scores, _: scores.transpose(0, 1).softmax(0),
        lambda scores, _: scores.softmax(-1).float().sum(-1),
        lambda scores, _: torch.cat([scores, scores], dim=-1),
        lambda scores, _: scores.view(30, 2, 40),
        lambda scores, _: dropout(scores.softmax(-1), p=0.5, training=True) > -1,
        lambda scores, _: scores.softmax(-1) @ torch.ones(60, 40, 3, dtype=torch.bfloat16),
    ],
)
def test_whatever_else_a_model_does_with_scores_is_that_of_torch(
    use: Any, stacked: dict[str, tuple[Any, Tensor]], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    keys, plain = stacked["keys"]
    query, _, mask = inputs
    actual = use(torch.bmm(query, keys.reshape(60, -1, 16).mT), mask)
    expected = use(torch.bmm(query, plain.reshape(60, -1, 16).mT), mask)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual = actual.as_subclass(Tensor) if type(actual) is HostTensor else actual.computed().as_subclass(Tensor)
    assert torch.allclose(actual.float(), expected.float(), atol=0.05, rtol=0.02)


def test_scores_that_are_changed_in_place_are_not_for_stacked_rows(
    stacked: dict[str, tuple[Any, Tensor]], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    scores = torch.bmm(inputs[0], stacked["keys"][0].reshape(60, -1, 16).mT)
    with pytest.raises(NotStackedError, match="masked_fill_ changes scores in place"):
        scores.masked_fill_(torch.zeros(60, 1, 40, dtype=torch.bool), 0.0)
    with pytest.raises(NotStackedError, match=r"\[2, 60, 1, 40\] added to scores \[60, 1, 40\]"):
        scores + torch.zeros(2, 60, 1, 40)


@pytest.fixture
def in_8_bits() -> tuple[HostInt8Tensor, Tensor]:
    """Return 8-bit keys as a model sees them, and their exact values: 2 sequences, 3 heads, 40 tokens, 16 values."""
    content = cpu_kernel.quantize_rows(noise(2, 3, 50, 16)).view(torch.int8)[:, :, :40, :16]
    return as_host_int8(content, CPU, torch.bfloat16), cpu_kernel.dequantized(content, torch.bfloat16)


@pytest.mark.parametrize(
    "use",
    [
        lambda keys: keys.to(torch.float32),
        lambda keys: keys * 2,
        lambda keys: keys[:, 1:, 5:],
        lambda keys: keys[:, :, None].expand(2, 3, 2, 40, 16).reshape(2, 6, 40, 16),
        lambda keys: keys.transpose(1, 2).contiguous(),
        lambda keys: keys.mT + 1,
        lambda keys: keys.reshape(6, 40, 16)[..., :8],
        lambda keys: torch.cat([keys, torch.ones(2, 3, 1, 16, dtype=torch.bfloat16)], dim=2),
        lambda keys: torch.einsum("bhtd,bhtd->bht", keys, keys),
        lambda keys: torch.ones(1, dtype=torch.float32).to(keys.dtype) + keys,
        lambda keys: torch.empty_like(keys).copy_(keys),
    ],
)
def test_8_bit_tensors_report_the_models_type(use: Any, in_8_bits: tuple[HostInt8Tensor, Tensor]) -> None:
    keys, exact = in_8_bits
    actual, expected = use(keys), use(exact)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.as_subclass(Tensor), expected)
    assert type(actual) is HostTensor
    assert (keys.dtype, keys.shape, keys.size(1), len(keys)) == (torch.bfloat16, (2, 3, 40, 16), 3, 2)


def test_products_of_attention_read_8_bits_directly(
    in_8_bits: tuple[HostInt8Tensor, Tensor], monkeypatch: Patch
) -> None:
    keys, exact = in_8_bits
    query, bias = noise(6, 1, 16), noise(6, 1, 40)
    monkeypatch.setattr(HostInt8Tensor, "dequantized", lambda _: pytest.fail("a copy was made"))
    flat = keys.reshape(6, 40, 16)
    assert type(flat) is type(flat.transpose(-1, -2)) is type(flat.mT) is HostInt8Tensor
    scores = bias.baddbmm(batch1=query, batch2=flat.mT, alpha=0.25)
    assert torch.allclose(
        scores.float(), torch.baddbmm(bias, query, exact.view(6, 40, 16).mT, alpha=0.25).float(), atol=0.05
    )
    chances = scores.softmax(-1)
    expected = torch.bmm(chances.as_subclass(Tensor), exact.view(6, 40, 16))
    assert torch.allclose(torch.bmm(chances, flat).float(), expected.float(), atol=0.02)
    attended = scaled_dot_product_attention(query.view(2, 3, 1, 16), keys, keys)
    assert torch.allclose(
        attended.float(), scaled_dot_product_attention(query.view(2, 3, 1, 16), exact, exact).float(), atol=0.02
    )


def test_an_int8_matrix_without_scales_is_refused() -> None:
    with pytest.raises(ValueError, match="without the scales"):
        cpu_kernel.dequantized(torch.zeros(3, 4, dtype=torch.int8), torch.float32)


def test_products_of_wrong_shapes_raise_torchs_error() -> None:
    keys = as_host_tensor(noise(3, 40, 16), CPU)
    for rows in (noise(3, 1, 8), noise(2, 1, 16)):
        with pytest.raises(RuntimeError):
            torch.bmm(rows, keys.mT)
    assert torch.matmul(noise(16), keys.mT).shape == (3, 40)
    out = torch.empty(3, 1, 40, dtype=torch.bfloat16)
    torch.bmm(noise(3, 1, 16), keys.mT, out=out)
    assert torch.equal(out, torch.bmm(noise(3, 1, 16), keys.as_subclass(Tensor).mT))
    target = torch.zeros(3, 40, 16, dtype=torch.bfloat16)
    target[1:] = keys[1:]
    assert torch.equal(target[1:], keys.as_subclass(Tensor)[1:])


@pytest.mark.usefixtures("compiler")
def test_rows_in_8_bits_are_as_good_as_their_bits() -> None:
    states = noise(2, 3, 257, 33) * torch.logspace(-3, 3, 257)[:, None]
    matrix = cpu_kernel.quantize_rows(states).view(torch.int8)[..., :33]
    exact = cpu_kernel.dequantized(matrix, torch.float32)
    assert bool(((exact - states).abs() <= states.abs().amax(-1, keepdim=True) / 253).all())
    assert cpu_kernel.can_multiply(noise(2, 3, 2, 33), matrix)
    assert not cpu_kernel.can_multiply(noise(2, 3, 2, 33), matrix.contiguous())  # the scales are lost


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("stored", [*DTYPES, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_computes_the_products_of_any_two_types(dtype: torch.dtype, stored: torch.dtype) -> None:
    matrix = noise(2, 3, 40, 16, dtype=torch.float32 if stored == torch.int8 else stored)
    matrix = cpu_kernel.quantize_rows(matrix).view(torch.int8)[..., :16] if stored == torch.int8 else matrix
    exact = cpu_kernel.dequantized(matrix, torch.float32).double()
    queries, chances = noise(2, 3, 4, 16, dtype=dtype), noise(2, 3, 4, 40, dtype=dtype)
    assert cpu_kernel.library() is None
    assert not cpu_kernel.can_multiply(queries, matrix)
    for actual, expected in (
        (cpu_kernel.dots(queries, matrix), queries.double() @ exact.transpose(-1, -2)),
        (cpu_kernel.mix(chances, matrix), chances.double() @ exact),
    ):
        assert actual.dtype == torch.float32
        assert torch.allclose(actual.double(), expected, atol=0.1, rtol=0.02)


def test_without_a_compiler_that_works_there_is_no_library(fresh: None, monkeypatch: Patch, tmp_path: Path) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", fail)
    assert cpu_kernel.library() is None
    assert list((tmp_path / "zinfer").iterdir()) == []


def test_a_user_without_a_home_folder_is_not_an_error(fresh: None, monkeypatch: Patch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cpu_kernel.library() is None


@pytest.mark.slow
def test_the_next_compiler_is_tried_and_compiles_once(
    compiler: None, fresh: None, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_kernel, "COMPILERS", ("false", "no-such-compiler", *cpu_kernel.COMPILERS))
    assert cpu_kernel.library() is not None
    (made,) = (tmp_path / "zinfer").iterdir()
    written = made.stat().st_mtime_ns
    cpu_kernel.library.cache_clear()
    assert cpu_kernel.library() is not None
    assert made.stat().st_mtime_ns == written
