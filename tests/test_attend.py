"""CPU kernels of attention: results equal torch's, for all shapes."""

import platform
import shutil
import subprocess
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import Patch
from zinfer.engine.stream.kv import cpu_kernel
from zinfer.engine.stream.kv.cpu import attend_all

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


LESSER = ("x86-64-v3", "x86-64")  # without AVX-512, and without AVX2


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip a test of compiled code without a C compiler. Torch's substitute is tested everywhere. An error in
    `attend.c` itself does not skip the test."""
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
        doubles = [cpu_kernel.dequantized(states, torch.float32).double() for states in stored]
        exact.append((doubles[0], doubles[1]))
    return blocks, exact


@pytest.mark.usefixtures("compiler")
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.sampled_from([(1,), (130,), (5, 128, 257), (2000, 3), (1300,)]),
    count=st.sampled_from([1, 2, 5, 128]),
    sizes=st.sampled_from([(1, 1), (8, 8), (128, 128), (40, 33), (64, 256), (300, 31)]),
    dtype=st.sampled_from((*DTYPES, torch.int8)),
    biases=st.lists(st.sampled_from(["each", "rows", "hidden"]), max_size=3),
    threads=st.sampled_from([1, 7]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_attention_to_several_micro_batches_is_that_of_each(**drawn: Any) -> None:
    """Threads take parts of the tokens where heads are few."""
    check_attention(**drawn)


def check_attention(
    lengths: tuple[int, ...],
    count: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    biases: list[str],
    threads: int,
    softcap: float | None,
    sinks: bool,
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
    logits = noise(heads, dtype=torch.float32) if sinks else None
    added = [
        [kinds[kind].expand(rows, -1, -1, -1)[2 * number :][:2, ..., longest - length :] for kind in biases]
        for number, length in enumerate(lengths)
    ]
    mixed = cpu_kernel.attend(queries, blocks, added, 0.3, threads, softcap, logits)
    every = None if logits is None else logits[:, None].expand(heads, count)
    for states, actual, (keys, values), bias in zip(queries.split(2), mixed.split(2), exact, added, strict=True):
        expected = exact_attention(states, keys, values, bias, softcap, every, 0.3)
        assert torch.allclose(actual.double(), expected, atol=2e-5, rtol=1e-5)


def exact_attention(
    queries: Tensor, keys: Tensor, values: Tensor, biases: list[Tensor], softcap: Any, sinks: Any, scale: float
) -> Tensor:
    """Return attention in float64. Queries are ``[B, heads, n, D]``, sinks ``[heads, n]``."""
    scores = scale * queries.double() @ keys.double().mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    for bias in biases:
        scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, ..., None].expand(len(queries), -1, -1, 1)], -1)
    return scores.softmax(-1)[..., : keys.shape[2]].nan_to_num() @ values.double()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("length", "threads"), [(40, 2), (1300, 7)])  # tokens as one part, and as several
def test_a_number_that_is_none_stays_visible_and_what_is_hidden_does_not_count(length: int, threads: int) -> None:
    attend = partial(cpu_kernel.attend, threads=threads)
    keys, values = noise(1, 16, length, 8, dtype=torch.float32), noise(1, 16, length, 8, dtype=torch.float32)
    queries, hidden = torch.ones(1, 16, 1, 8), length - 33
    nothing = torch.full((1, 1, 1, length), float("-inf"))
    assert torch.equal(attend(queries, [(keys, values)], [[nothing]]), torch.zeros(1, 16, 1, 8))
    broken = keys.clone()
    broken[0, 3, 20, 0] = float("nan")
    assert attend(queries, [(broken, values)])[0, :, 0, 0].isnan().nonzero().tolist() == [[3]]
    queries[0, 5] = float("nan")
    assert attend(queries, [(keys, values)])[0, :, 0, 0].isnan().nonzero().tolist() == [[5]]
    queries[0, 5] = 1
    expected = attend(queries, [(keys[:, :, hidden:], values[:, :, hidden:])])
    for low in (torch.finfo(torch.float32).min, float("-inf")):
        seen = torch.zeros(1, 1, 1, length).masked_fill(torch.arange(length) < hidden, low)
        assert torch.allclose(attend(queries, [(keys, values)], [[seen]]), expected, atol=1e-6)


@pytest.mark.usefixtures("compiler")
def test_unsuitable_shapes_are_left_to_torch() -> None:
    """Many queries, wide values, wide keys, and rows that lie apart."""
    for count, width, columns in ((1, 16, 16), (129, 16, 16), (1, 16, 300), (1, 2000, 16), (1, 40, 40)):
        (keys, values), *_ = blocks_of((40,), 3, width, columns, torch.bfloat16)[0]
        block = (keys.mT, values.mT) if width == 40 else (keys, values)
        assert cpu_kernel.can_attend(noise(2, 3, count, width), [block]) == (count * width == columns == 16)


@pytest.mark.usefixtures("compiler")
def test_every_half_is_read_right() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16).view(256, 1, 1, 256)
    mixed = cpu_kernel.attend(torch.ones(256, 1, 1, 8), [(torch.ones(256, 1, 1, 8).half(), halves)])
    assert torch.equal(mixed.nan_to_num(nan=7.0), halves.float().nan_to_num(nan=7.0))


@pytest.mark.parametrize("lesser", [pytest.param(LESSER[0], marks=pytest.mark.slow), LESSER[1]], indirect=True)
def test_every_processor_computes_the_same(lesser: None) -> None:
    """Sizes that fill the vector registers, exceed them, or fall short. For each width of registers, in rows and
    elements."""
    all_sizes = (128, 128), (40, 33), (300, 80), (33, 1)
    for dtype, sizes, count in product((*DTYPES, torch.int8), all_sizes, (1, 2, 3, 4, 9)):
        check_attention((5, 257), count, sizes, dtype, ["each", "hidden"], 2, 2.0 if count == 4 else None, count == 3)
    test_a_number_that_is_none_stays_visible_and_what_is_hidden_does_not_count(1300, 7)
    test_every_half_is_read_right()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [2, 6, 260])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (3.0, False), (None, True)])
def test_attention_of_all_rows_is_that_of_each(
    compiled: bool, dtype: torch.dtype, count: int, softcap: float | None, sinks: bool, monkeypatch: Patch
) -> None:
    """Two micro-batches of unlike lengths; a mask hides padding, a bias is that of each head. Two query heads share a
    head of keys, each with half of the queries."""
    if not compiled:
        monkeypatch.setattr(cpu_kernel, "library", lambda: None)
    blocks, exact = blocks_of((40, 33), 12, 16, 16, dtype)
    queries = noise(4, 12, count, 16)
    pads = torch.tensor([0, 5, 9, 8])[:, None, None, None]
    hidden = torch.zeros(4, 1, 1, 40).masked_fill_(torch.arange(40) < pads, -1e30)
    biases = [hidden, noise(4, 12, 1, 40, dtype=torch.float32)]
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) if sinks else None
    parts = [slice(0, 2), slice(2, 4)]
    added = [[bias[rows, ..., 40 - length :] for bias in biases] for rows, length in zip(parts, (40, 33), strict=True)]
    mixed = attend_all(queries, blocks, added, 0.25, softcap, logits)
    each = None if logits is None else logits.view(12, 2).repeat_interleave(count // 2, 1)
    for rows, (keys, values), bias in zip(parts, exact, added, strict=True):
        expected = exact_attention(queries[rows], keys, values, bias, softcap, each, 0.25)
        assert torch.allclose(mixed[rows].double(), expected, atol=0.03)


@pytest.mark.usefixtures("compiler")
def test_rows_in_8_bits_are_as_good_as_their_bits() -> None:
    states = noise(2, 3, 257, 33) * torch.logspace(-3, 3, 257)[:, None]
    matrix = cpu_kernel.quantize_rows(states).view(torch.int8)[..., :33]
    exact = cpu_kernel.dequantized(matrix, torch.float32)
    assert bool(((exact - states).abs() <= states.abs().amax(-1, keepdim=True) / 253).all())
    assert cpu_kernel.can_attend(noise(2, 3, 2, 33), [(matrix, matrix)])
    assert not cpu_kernel.can_attend(noise(2, 3, 2, 33), [(matrix.contiguous(), matrix)])  # the scales are lost
    with pytest.raises(ValueError, match="without the scales"):
        cpu_kernel.dequantized(matrix.contiguous(), torch.float32)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("stored", [*DTYPES, torch.int8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_attends_with_any_two_types(dtype: torch.dtype, stored: torch.dtype) -> None:
    blocks, ((keys, values),) = blocks_of((40,), 3, 16, 16, stored)
    queries = noise(2, 3, 4, 16, dtype=dtype)
    assert cpu_kernel.library() is None
    mixed = attend_all(queries, blocks, [], 0.25)
    assert mixed.dtype == torch.float32
    assert torch.allclose(mixed.double(), exact_attention(queries, keys, values, [], None, None, 0.25), atol=1e-5)


def test_without_a_compiler_that_works_there_is_no_library(fresh: None, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_kernel, "COMPILERS", ("false", "no-such-compiler"))
    assert cpu_kernel.library() is None
    assert list((tmp_path / "zinfer").iterdir()) == []


def test_a_user_without_a_home_folder_is_not_an_error(fresh: None, monkeypatch: Patch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
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
