"""Lossless codec: every bit returns, from the plain decoder and from the kernel, and the sizes are as promised.

The kernel runs in a process of its own (`tests.interpreter`), one for all cases.
"""

import mmap
from collections.abc import Callable
from ctypes import CDLL, addressof, c_char, c_size_t, c_void_p
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import Patch
from zinfer.engine.quantization.dequantize import Codes, expand, table
from zinfer.engine.stream.weights import codec, formats
from zinfer.engine.stream.weights.codec import BLOCK, Encoded, Layout, decode, encode

E4M3 = torch.float8_e4m3fn


def gaussian(numel: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def noise(numel: int, seed: int = 0) -> Tensor:
    """Return random bits: NaN, infinities, denormals and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16).view(torch.bfloat16)


def exponents(weights: dict[int, int], numel: int = BLOCK, bits: int = 16) -> Tensor:
    """Return values whose exponents are drawn by weight, with random other bits."""
    generator = torch.Generator().manual_seed(len(weights))
    drawn = torch.multinomial(torch.tensor([*weights.values()]).float(), numel, True, generator=generator)
    chosen = torch.tensor([*weights])[drawn]
    if bits == 16:
        return (noise(numel).view(torch.int16) & -0x7F81 | chosen.to(torch.int16) << 7).view(torch.bfloat16)
    others = torch.randint(256, (numel,), generator=generator, dtype=torch.uint8)
    return (others & 0x87 | chosen.to(torch.uint8) << 3).view(E4M3)


def every_pattern() -> Tensor:
    """Return all 65,536 bit patterns, spread over common values."""
    values = gaussian(12 * BLOCK)
    places = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))[: 1 << 16]
    values[places] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    return values


def fp8(numel: int, scale: float = 100.0, seed: int = 0) -> Tensor:
    """Return normally distributed e4m3 numbers. All 256 codes are among them, NaN too, if there is room."""
    dice = torch.Generator().manual_seed(seed)
    codes = (torch.randn(numel, generator=dice) * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
    if numel > 1 << 12:
        codes[torch.randperm(numel, generator=dice)[:256]] = torch.arange(256, dtype=torch.uint8)
    return codes.view(E4M3)


fp8_of = partial(exponents, bits=8)


CASES: dict[str, Callable[[], Tensor]] = {
    "every pattern": every_pattern,
    "gaussian": lambda: gaussian(2 * BLOCK),
    "odd size": lambda: gaussian(BLOCK + 77, seed=1),
    "a value more": lambda: gaussian(BLOCK + 1, seed=2),
    "heavy tails": lambda: gaussian(BLOCK) * gaussian(BLOCK, 1.0, seed=3),
    "constant": lambda: torch.full((BLOCK,), -0.3, dtype=torch.bfloat16),
    "zeros of both signs": lambda: torch.tensor([0.0, -0.0]).repeat(BLOCK // 2).bfloat16(),
    "denormal": lambda: exponents({0: 1}),
    "infinite or not a number": lambda: exponents({255: 1}),
    "far apart": lambda: exponents({0: 5, 255: 5, 1: 5, 254: 1, 128: 1}),
    "three exponents": lambda: exponents({100: 1, 90: 1, 200: 1}),
    "four": lambda: exponents({100: 9, 90: 9, 200: 9, 3: 1}),
    "twelve": lambda: exponents({10 * i: 1 << i for i in range(12)}),
    "thirteen": lambda: exponents({10 * i: 1 << i for i in range(13)}),
    "half escapes": lambda: exponents(dict.fromkeys(range(100, 106), 1)),
    "noise in between": lambda: torch.cat([gaussian(BLOCK), noise(BLOCK), torch.ones(BLOCK).bfloat16()]),
    "a scale each": lambda: torch.cat([gaussian(BLOCK, 10.0**scale) for scale in (-30, 0, 30)]),
}
AS_ON_A_GPU = ("odd size", "half escapes")


def share(encoded: Encoded) -> float:
    return 8 * encoded.layout.size / (encoded.layout.bits * encoded.shape.numel())


def same(left: Tensor, right: Tensor) -> bool:
    """Compare bit by bit."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def encoded(values: Tensor) -> Encoded:
    result = encode(values)
    assert result is not None
    assert result.data.numel() == result.layout.size < values.nbytes
    assert result.layout.size % 16 == 0
    return result


def decoded(source: Encoded) -> Tensor:
    """Decode with the plain decoder, and check that neighbouring memory is unchanged."""
    dtype = torch.bfloat16 if source.layout.bits == 16 else E4M3
    memory = torch.full((source.layout.numel + 32,), -7.0, dtype=dtype)
    decode(source.data, source.layout, memory[16:-16].view(source.shape))
    assert (memory[:16].float() == -7).all()
    assert (memory[-16:].float() == -7).all()
    return memory[16:-16].view(source.shape)


@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(name: str) -> None:
    values = CASES[name]()
    assert same(decoded(encoded(values)), values)


FP8_BLOCKS = st.one_of(
    st.builds(fp8, st.just(BLOCK), st.sampled_from([1e-3, 1.0, 100.0]), st.integers(0, 9)),
    st.builds(fp8_of, st.dictionaries(st.integers(0, 15), st.integers(1, 10000), min_size=1)),
)
BLOCKS = st.one_of(
    st.builds(gaussian, st.just(BLOCK), st.sampled_from([1e-38, 1e-3, 0.02, 1.0, 1e30]), st.integers(0, 9)),
    st.builds(exponents, st.dictionaries(st.integers(0, 255), st.integers(1, 10000), min_size=1, max_size=40)),
    st.builds(noise, st.just(BLOCK), st.integers(0, 9)),
)


@given(
    values=st.one_of(
        st.builds(
            lambda blocks, tail, seed: torch.cat([*blocks, noise(tail, seed)]),
            st.lists(BLOCKS, min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 99),
        ),
        st.builds(
            lambda blocks, tail: torch.cat([*blocks, fp8_of(dict.fromkeys(range(16), 1), BLOCK)[:tail]]),
            st.lists(FP8_BLOCKS, min_size=1, max_size=4), st.integers(0, 40),
        ),
    )
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_data_is_coded_without_loss_or_stays_raw(values: Tensor) -> None:
    result = encode(values)
    if result is not None:
        assert result.layout.size < values.nbytes
        assert same(decoded(result), values)


RAW: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0, dtype=torch.bfloat16),
    "less than a block": lambda: gaussian(BLOCK - 1),
    "noise": lambda: noise(4 * BLOCK),
    "fp16": lambda: gaussian(BLOCK).half(),
    "fp32": lambda: gaussian(BLOCK).float(),
    "int8": lambda: gaussian(BLOCK).float().char(),
    "more noise than weights": lambda: torch.cat([gaussian(BLOCK), noise(4 * BLOCK)]),
    "less than a block of fp8": lambda: fp8(BLOCK - 1),
    "noise in fp8": lambda: fp8_of(dict.fromkeys(range(16), 1), 3 * BLOCK),
    "e5m2": lambda: gaussian(BLOCK).to(torch.float8_e5m2),
}


def test_data_that_does_not_shrink_stays_raw() -> None:
    assert [name for name, values in RAW.items() if encode(values()) is not None] == []
    values = gaussian(codec.MIN_NUMEL)
    assert [codec.worth_coding(each) for each in (values, values[1:], values.half())] == [True, False, False]


def test_a_block_that_the_sample_misjudges_stays_raw() -> None:
    values = gaussian(8 * BLOCK)
    bits = values[:BLOCK].view(torch.int16)
    # The three commonest exponents of the counted values are nowhere else: nearly all values are escapes.
    wrong = torch.randint(40, 256, (BLOCK,), dtype=torch.int16)
    wrong[:: codec._STRIDE] = torch.arange(BLOCK)[:: codec._STRIDE].div(codec._STRIDE).remainder(256).short()
    bits.copy_(bits & -0x7F81 | wrong << 7)
    assert encode(values) is None
    bits[:100] &= -0x7F81
    assert encode(values) is not None


@pytest.mark.parametrize(
    "view",
    [
        lambda values: values.view(4, -1).T,
        lambda values: values[3 : 3 + 3 * BLOCK],
        lambda values: torch.nn.Parameter(values.view(2, 2, -1)),
        lambda values: values[::2],
    ],
)
def test_any_view_is_encoded_as_it_looks(view: Callable[[Tensor], Tensor]) -> None:
    values = view(gaussian(4 * BLOCK))
    result = encoded(values)
    assert result.shape == values.shape
    assert same(decoded(result), values.detach())


def test_chunks_leave_no_seams(monkeypatch: Patch) -> None:
    values = gaussian(9 * BLOCK + 5)
    whole = encoded(values)
    monkeypatch.setattr(codec, "_CPU_CHUNK", 2)
    parts = encoded(values)
    assert parts.layout == whole.layout
    assert torch.equal(parts.data, whole.data)
    assert same(decoded(whole), values)


def entropy(values: Tensor) -> float:
    """Return the lower bound on the size of any code for exponents: 8 bits a value plus their entropy, as a share."""
    frequency = ((values.view(torch.int16) >> 7).to(torch.uint8).bincount() / values.numel()).double()
    frequency = frequency[frequency > 0]
    return (8 - float(frequency @ frequency.log2())) / 16


@pytest.mark.parametrize("scale", [0.02, 0.0283, 0.0168])
def test_gaussian_weights_take_67_percent_and_83_in_fp8(scale: float) -> None:
    values = gaussian(64 * BLOCK, scale)
    assert entropy(values) + 0.004 < share(encoded(values)) < min(0.668, entropy(values) + 0.009)
    assert share(encoded(fp8(64 * BLOCK))) < 0.832
    rows = torch.cat([gaussian(BLOCK, 2 ** (row / 4), seed=row) for row in range(64)])
    assert share(encoded(rows)) < entropy(rows) - 0.05, "tables follow rows of differing scale"


# What the three records of each block promise; None: noise.
DAMAGE = {"noise": None, "all to the end": (0, -1, -1), "far off": (-1, -1, -1), "ends before starts": (9000, 5000, 0)}


def damaged(kind: str, bits: int = 16) -> Encoded:
    """Return noise blocks whose records promise more data than fits. The streams are long enough to try."""
    head = Layout(2 * BLOCK, (), bits).records + 3 * 8 * codec.LEVELS // 16
    layout = Layout(2 * BLOCK, (head, *range(head + 4096, head + 5 * 4096, 4096), head + 4 * 4096), bits)
    data = noise(layout.size // 2).view(torch.uint8)
    if (promised := DAMAGE[kind]) is not None:
        records = data[layout.records * 16 : head * 16].view(torch.int32).view(3, -1)
        records[:] = torch.tensor(promised)[:, None]
    return Encoded(data, torch.Size([2 * BLOCK]), layout)


# Rows and columns, values that share a scale (None: all do), types of scales (e8m0: powers of two), between and after.
MATRICES: dict[str, tuple[tuple[int, int], tuple[int, int] | None, torch.dtype, torch.dtype, torch.dtype]] = {
    "blocks": ((128, 256), (128, 128), torch.float32, torch.bfloat16, torch.bfloat16),
    "odd blocks": ((128, 128), (30, 48), torch.float32, torch.bfloat16, torch.bfloat16),
    "one scale, fp16": ((64, 256), None, torch.float32, torch.float16, torch.float16),
    "scales of rows": ((1024, 272), (1, 272), torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "powers of two": ((64, 256), (1, 32), torch.float8_e8m0fnu, torch.float32, torch.bfloat16),
}


def matrix(name: str) -> tuple[formats.CodesLayout, Tensor, Tensor]:
    """Return a matrix of `MATRICES` as sent, and its values."""
    (rows, columns), block, kind, inner, dtype = MATRICES[name]
    grid = (1, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    dice = torch.Generator().manual_seed(5)
    if powers := kind == torch.float8_e8m0fnu:
        scales = torch.randint(110, 130, grid, generator=dice, dtype=torch.uint8)
    else:
        scales = (torch.rand(grid, generator=dice) * 0.01 + 0.001).to(kind)
    numbers = fp8(rows * columns).view(torch.uint8).view(rows, columns)
    codes = Codes(numbers, columns, 8, "e4m3", scales, block or (1, 1), inner, "e8m0" if powers else "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "MIN_NUMEL", 0)
        ((layout, data),) = formats.encode_chunks(codes, dtype, 1 << 20)
    assert layout.coded is not None
    assert data.numel() == layout.size < numbers.numel() + scales.nbytes
    return layout, data, expand(codes, dtype)


def equal(left: Tensor, right: Tensor) -> bool:
    """Compare bit by bit, but for the bits of NaN."""
    return torch.equal(left.isnan(), right.isnan()) and same(left.nan_to_num(0.0), right.nan_to_num(0.0))


@pytest.mark.parametrize("name", MATRICES)
def test_coded_rows_are_unpacked_with_their_scales(name: str, by_kernel: dict[str, Tensor]) -> None:
    layout, data, expected = matrix(name)
    out = torch.zeros_like(expected)
    formats.unpack(data, layout, out.view(-1))
    assert equal(out, expected)
    assert equal(by_kernel[name], expected)
    assert expected.isnan().any()


@pytest.mark.parametrize(
    ("rows", "columns", "width", "coded"),
    [
        (3072, 80, 80, [2048, 1024]),  # cut at whole blocks of the codec, which are 1,024 rows of it
        (3000, 80, 80, [2048]),
        (2048, 88, 88, []),  # 16 values of which reach into the next row
        (2048, 80, 20, []),  # they have two scales
    ],
)
def test_only_whole_blocks_of_values_with_one_scale_are_coded(
    rows: int, columns: int, width: int, coded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    numbers, scales = fp8(rows * columns).view(torch.uint8).view(rows, columns), torch.ones(rows, columns // width)
    codes = Codes(numbers, columns, 8, "e4m3", scales, (1, width), torch.bfloat16)
    chunks = formats.encode_chunks(codes, torch.bfloat16, 2 * 2500 * columns)
    assert [layout.rows for layout, _ in chunks if layout.coded is not None] == coded
    assert sum(layout.rows for layout, _ in chunks) == rows


EXPERTS = 3  # in the test of chosen ones; each has chunks of two and of one block
CHOSEN = [2, 7, 0, -1]  # the others are no experts


def experts() -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of experts, their places and values, ``[experts, bytes]``. Other bytes come first."""
    parts, places, values = [torch.zeros(32, dtype=torch.uint8)], [], []
    for expert in range(EXPERTS):
        chunks = []
        for blocks in (2, 1):
            values.append(gaussian(blocks * BLOCK, seed=4 * expert + blocks))
            coded = encoded(values[-1])
            offset = (3 * expert + (2 if blocks == 1 else 0)) * 2 * BLOCK
            chunks.append((coded.layout, sum(map(len, parts)), offset))
            parts.append(coded.data)
        rows = codec.chunk_places(chunks)
        assert rows is not None
        places.append(rows)
    return torch.cat(parts), torch.tensor(places), torch.cat(values).view(torch.uint8).view(EXPERTS, -1)


def test_chosen_experts_are_decoded_and_no_others(by_kernel: dict[str, Tensor]) -> None:
    data, places, values = experts()
    out = torch.full_like(values, 7)
    codec.decode_chosen(data, places, 2, torch.tensor(CHOSEN), out.view(-1))
    for decoded in (out, by_kernel["chosen"]):
        assert torch.equal(decoded[[0, 2]], values[[0, 2]])
        assert (decoded[1] == 7).all()
    with_tail = encoded(gaussian(BLOCK + 5))
    assert codec.chunk_places([(with_tail.layout, 0, 0)]) is None


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_returns_every_bit(name: str, by_kernel: dict[str, Tensor]) -> None:
    values = CASES[name]()
    whole = values.numel() // BLOCK * BLOCK
    assert same(by_kernel[name][:whole], values[:whole])
    assert by_kernel[name][whole:].isnan().all()  # the kernel leaves the tail


@pytest.mark.parametrize("kind", [*DAMAGE, "noise in fp8"])
def test_damaged_data_stay_within_bounds(kind: str, by_kernel: dict[str, Tensor]) -> None:
    # A read or write behind the data or the output would have ended the process.
    assert by_kernel[kind].numel() == 2 * BLOCK


def compile_for_h100(function: Any, constants: dict[str, Any], types: dict[str, Any], **options: int) -> None:
    """Compile a kernel; arguments that are neither `constants` nor have one of `types` are int32, pointers aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as cache:
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
        aligned = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(types.values()) if "*" in kind}
        source = ASTSource(function, types, constants, aligned)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def test_the_kernels_compile_for_an_h100() -> None:
    import triton.language as tl

    from zinfer.engine.stream.weights import decode as kernel
    from zinfer.engine.stream.weights.expand import _expand_blocks

    constants: dict[str, Any] = {"ROWS": 32 * kernel.WARPS}
    scaled = constants | {"SCALE_ROWS": 128, "SCALE_COLUMNS": 128, "scale_table": None, "INNER": tl.bfloat16}
    types = {"data": "*u8", "out": "*bf16", "table": "*i64", "chosen": "*i64"}
    types |= dict.fromkeys(("scales", "scale_table"), "*fp32")
    for function, values in ((kernel._decode, constants), (kernel._decode_chosen, constants), (_expand_blocks, scaled)):
        compile_for_h100(function, values, types, num_warps=kernel.WARPS, num_stages=1)


def guarded(size: int) -> Tensor:
    """Return `size` bytes of memory; to read or write behind them ends the process."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    guard = addressof(c_char.from_buffer(memory)) + room
    if CDLL(None).mprotect(c_void_p(guard), c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect")
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)


def main(path: Path) -> None:
    """Save what the kernels make of cases, experts, matrices and damaged data."""
    from zinfer.engine.stream.weights import decode as kernel
    from zinfer.engine.stream.weights.expand import launch_coded

    usual, results = kernel.WARPS, {}
    jobs = {name: encoded(values()) for name, values in CASES.items()} | {kind: damaged(kind) for kind in DAMAGE}
    for name, job in jobs.items():
        # The interpreter is slow for each tile: most cases have larger tiles than on a GPU.
        kernel.WARPS = usual if name in AS_ON_A_GPU else 32
        out = guarded(2 * job.layout.numel).view(torch.bfloat16).fill_(torch.nan)
        content = guarded(job.data.numel()).copy_(job.data)
        kernel.launch(content, out, job.layout.numel // BLOCK, job.layout.sections[:-1])
        results[name] = out.clone()
    kernel.WARPS = 32
    data, places, values = experts()
    out = guarded(values.numel()).fill_(7)
    kernel.launch_chosen(guarded(data.numel()).copy_(data), places, torch.tensor(CHOSEN), 2, out)
    results["chosen"] = out.view(EXPERTS, -1).clone()
    wrong = damaged("noise", 8)
    layout = replace(matrix("blocks")[0], rows=128, coded=wrong.layout)  # two blocks, one row of two scales
    noisy = layout, torch.cat([wrong.data, torch.zeros(16, dtype=torch.uint8)])
    for name, (layout, data) in ({name: matrix(name)[:2] for name in MATRICES} | {"noise in fp8": noisy}).items():
        codes = layout.views(data)
        codes = replace(codes, numbers=guarded(codes.numbers.numel()).copy_(codes.numbers))
        out = guarded(2 * layout.numel).view(layout.dtype).fill_(torch.nan).view(layout.rows, layout.columns)
        powers = table(layout.scale_table, torch.device("cpu")) if layout.scale_table else None
        assert layout.coded is not None
        launch_coded(codes, layout.coded, out, powers)
        results[name] = out.clone()
    torch.save(results, path)
