"""Lossless codec: every bit returns, from the plain decoder and from the kernel, and the sizes are as promised.

The kernel runs in Triton's interpreter. This must be chosen before triton is imported, which other tests may have done,
so all cases run in one process of their own: this file, run as a script.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL, addressof, c_char, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zinfer.engine.stream import codec
from zinfer.engine.stream.codec import BLOCK, Encoded, Layout, decode, encode


def gaussian(numel: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def noise(numel: int, seed: int = 0) -> Tensor:
    """Return random bits: NaN, infinities, denormals and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator, dtype=torch.int16).view(torch.bfloat16)


def exponents(weights: dict[int, int], numel: int = BLOCK) -> Tensor:
    """Return values whose exponents are drawn by weight, with random other bits."""
    generator = torch.Generator().manual_seed(len(weights))
    drawn = torch.multinomial(torch.tensor([*weights.values()]).float(), numel, True, generator=generator)
    bits = torch.tensor([*weights])[drawn].to(torch.int16) << 7
    return (noise(numel).view(torch.int16) & -0x7F81 | bits).view(torch.bfloat16)


def every_pattern() -> Tensor:
    """Return all 65,536 bit patterns, spread over common values."""
    values = gaussian(12 * BLOCK)
    places = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))[: 1 << 16]
    values[places] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    return values


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
    return encoded.layout.size / (2 * encoded.shape.numel())


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def encoded(values: Tensor) -> Encoded:
    result = encode(values)
    assert result is not None
    assert result.data.numel() == result.layout.size < values.nbytes
    assert result.layout.size % 16 == 0
    return result


def decoded(source: Encoded) -> Tensor:
    """Decode with the plain decoder into memory with neighbours, which must not change."""
    memory = torch.full((source.layout.numel + 32,), -7.0, dtype=torch.bfloat16)
    decode(source.data, source.layout, memory[16:-16].view(source.shape))
    assert (memory[:16] == -7).all()
    assert (memory[-16:] == -7).all()
    return memory[16:-16].view(source.shape)


@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(name: str) -> None:
    values = CASES[name]()
    assert same(decoded(encoded(values)), values)


BLOCKS = st.one_of(
    st.builds(gaussian, st.just(BLOCK), st.sampled_from([1e-38, 1e-3, 0.02, 1.0, 1e30]), st.integers(0, 9)),
    st.builds(exponents, st.dictionaries(st.integers(0, 255), st.integers(1, 10000), min_size=1, max_size=40)),
    st.builds(noise, st.just(BLOCK), st.integers(0, 9)),
)


@given(blocks=st.lists(BLOCKS, min_size=1, max_size=4), tail=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_data_is_coded_without_loss_or_stays_raw(blocks: list[Tensor], tail: int, seed: int) -> None:
    values = torch.cat([*blocks, noise(tail, seed)])
    result = encode(values)
    if result is not None:
        assert result.layout.size < values.nbytes
        assert same(decoded(result), values)


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0, dtype=torch.bfloat16),
        gaussian(BLOCK - 1),
        noise(4 * BLOCK),
        gaussian(BLOCK).half(),
        gaussian(BLOCK).float(),
        gaussian(BLOCK).float().char(),
        torch.cat([gaussian(BLOCK), noise(4 * BLOCK)]),
    ],
    ids=["empty", "less than a block", "noise", "fp16", "fp32", "int8", "more noise than weights"],
)
def test_data_that_does_not_shrink_stays_raw(values: Tensor) -> None:
    assert encode(values) is None


def test_small_tensors_and_other_types_are_not_worth_it() -> None:
    assert not codec.worth_coding(gaussian(codec.MIN_NUMEL - 1))
    assert codec.worth_coding(gaussian(codec.MIN_NUMEL))
    assert not codec.worth_coding(gaussian(codec.MIN_NUMEL).half())
    assert encode(gaussian(BLOCK - 1)) is None
    assert encode(gaussian(BLOCK)) is not None


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
    ids=["transposed", "odd offset", "parameter", "strided"],
)
def test_any_view_is_encoded_as_it_looks(view: Callable[[Tensor], Tensor]) -> None:
    values = view(gaussian(4 * BLOCK))
    result = encoded(values)
    assert result.shape == values.shape
    assert same(decoded(result), values.detach())


def test_chunks_leave_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_gaussian_weights_take_67_percent(scale: float) -> None:
    values = gaussian(64 * BLOCK, scale)
    assert entropy(values) + 0.004 < share(encoded(values)) < entropy(values) + 0.009
    assert share(encoded(values)) < 0.668


def test_tables_follow_rows_of_differing_scale() -> None:
    values = torch.cat([gaussian(BLOCK, 2 ** (row / 4), seed=row) for row in range(64)])
    assert share(encoded(values)) < entropy(values) - 0.05


def unsound() -> list[Any]:
    good = encoded(gaussian(BLOCK + 8))
    data, sections, out = good.data, good.layout.sections, torch.empty(BLOCK + 8, dtype=torch.bfloat16)
    memory = torch.empty(data.numel() + 16, dtype=torch.uint8)

    def layout(numel: int = BLOCK + 8, **changed: int) -> Layout:
        names = ("level_2", "level_3", "level_4", "rest", "tail", "end")
        return Layout(numel, tuple(changed.get(name, at) for name, at in zip(names, sections, strict=True)))

    return [
        pytest.param(data[:-16], layout(), out, id="data cut short"),
        pytest.param(data, layout(), out[:-1], id="out too small"),
        pytest.param(data, layout(), out.view(torch.int16), id="not bf16"),
        pytest.param(data.view(torch.int8), layout(), out, id="not bytes"),
        pytest.param(memory[1 : 1 + data.numel()], layout(), out, id="data not aligned"),
        pytest.param(data, layout(), torch.empty(BLOCK + 9, dtype=torch.bfloat16)[1:], id="out not aligned"),
        pytest.param(data, layout(), torch.empty(BLOCK + 8, 2, dtype=torch.bfloat16)[:, 0], id="out not contiguous"),
        pytest.param(data, layout(2 * BLOCK), torch.empty(2 * BLOCK, dtype=torch.bfloat16), id="other layout"),
        pytest.param(data, layout(level_2=0), out, id="levels among the mantissas"),
        pytest.param(data, layout(level_3=sections[3] + 1), out, id="parts out of order"),
        pytest.param(data, layout(rest=sections[4]), out, id="no bytes"),
        pytest.param(data, layout(tail=sections[5]), out, id="no tail"),
        pytest.param(data, Layout(BLOCK + 8, sections[1:]), out, id="a part too few"),
    ]


@pytest.mark.parametrize(("data", "layout", "out"), unsound())
def test_data_layout_and_output_that_do_not_fit_are_refused(data: Tensor, layout: Layout, out: Tensor) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        decode(data, layout, out)


def damaged(kind: str) -> Encoded:
    """Return two blocks of noise whose records promise more data than there is room for; the streams are long enough to
    try."""
    head = Layout(2 * BLOCK, ()).records + 3 * 8 * codec.LEVELS // 16
    layout = Layout(2 * BLOCK, (head, *range(head + 4096, head + 5 * 4096, 4096), head + 4 * 4096))
    data = noise(layout.size // 2).view(torch.uint8)
    records = data[layout.records * 16 : head * 16].view(torch.int32).view(3, -1)
    if kind == "all to the end":
        records[0], records[1:] = 0, -1
    elif kind == "far off":
        records.fill_(-1)
    elif kind == "ends before starts":
        records[:] = torch.tensor([[9000], [5000], [0]])
    return Encoded(data, torch.Size([2 * BLOCK]), layout)


DAMAGE = ("noise", "all to the end", "far off", "ends before starts")


def need_triton() -> None:
    if find_spec("triton") is None:
        pytest.fail("the kernel's tests need triton, which torch for CPUs does not bring along: pip install triton")


@pytest.fixture(scope="session")
def by_kernel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the results of the kernel on `CASES`, on some of them with other numbers of warps, and on damaged data."""
    need_triton()
    folder = tmp_path_factory.mktemp("kernel")
    # The interpreter is slow for each tile: most cases have larger tiles than on a GPU.
    jobs = [(name, encoded(values()), None if name in AS_ON_A_GPU else 32) for name, values in CASES.items()]
    jobs += [(f"{warps} warps", encoded(CASES["heavy tails"]()), warps) for warps in (1, 4)]
    jobs += [(kind, damaged(kind), 32) for kind in DAMAGE]
    work = [(name, job.data.clone(), job.layout.numel, job.layout.sections, warps) for name, job, warps in jobs]
    torch.save(work, folder / "jobs")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    results: dict[str, Tensor] = torch.load(folder / "results")
    return results


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_returns_every_bit(name: str, by_kernel: dict[str, Tensor]) -> None:
    values = CASES[name]()
    whole = values.numel() // BLOCK * BLOCK
    assert same(by_kernel[name][:whole], values[:whole])
    assert by_kernel[name][whole:].isnan().all()  # the kernel leaves the tail


@pytest.mark.parametrize("warps", [1, 4])
def test_the_number_of_warps_does_not_matter(warps: int, by_kernel: dict[str, Tensor]) -> None:
    assert same(by_kernel[f"{warps} warps"], by_kernel["heavy tails"])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_data_stay_within_bounds(kind: str, by_kernel: dict[str, Tensor]) -> None:
    # A read or write behind the data or the output would have ended the process.
    assert by_kernel[kind].numel() == 2 * BLOCK


def test_the_kernel_compiles_for_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_triton()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zinfer.engine.stream import decode as kernel

    constants = {"BLOCK": BLOCK, "LEVELS": codec.LEVELS, "MAX_ESCAPES": codec.MAX_ESCAPES, "ROWS": 32 * kernel.WARPS}
    types = {name: "constexpr" if name in constants else "i32" for name in kernel._decode.arg_names}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(2)}
    source = ASTSource(kernel._decode, types | {"data": "*u8", "out": "*bf16"}, constants, aligned)
    options = {"num_warps": kernel.WARPS, "num_stages": 1}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert code["cubin"]
    # Mantissas are read and values written 16 bytes at a time.
    assert "ld.global.v4.b32" in code["ptx"]
    assert "st.global.v4.b32" in code["ptx"]


def guarded(size: int) -> Tensor:
    """Return `size` bytes of memory; to read or write behind them ends the process."""
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    guard = addressof(c_char.from_buffer(memory)) + room
    if CDLL(None).mprotect(c_void_p(guard), c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect")
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)


def main(folder: Path) -> None:
    """Decode the data in `folder` with the kernel."""
    from zinfer.engine.stream import decode as kernel

    usual, results = kernel.WARPS, {}
    for name, data, numel, sections, warps in torch.load(folder / "jobs"):
        kernel.WARPS = warps or usual
        out = guarded(2 * numel).view(torch.bfloat16).fill_(torch.nan)
        constants = {"BLOCK": BLOCK, "LEVELS": codec.LEVELS, "MAX_ESCAPES": codec.MAX_ESCAPES}
        blocks, offsets = numel // BLOCK, sections[:-1]
        kernel.launch(guarded(data.numel()).copy_(data), out, blocks, offsets, **constants)
        results[name] = out.clone()
    torch.save(results, folder / "results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
