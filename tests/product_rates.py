"""Rates of products with weights that stay on the GPU quantised, for whoever tunes their kernel.

`python -m tests.product_rates` prints a table for the matrices of BLOOM-176B in int4: the time of a product from codes,
in microseconds and as bytes of codes a second, beside that of unpacking the weight and multiplying, and of a product
with a weight of 16 bits. `--tiles` does so for other sizes of tiles, and `--experts` for the experts of gpt-oss-120b in
MXFP4, whose rows of codes are inputs, by the number of pairs of a token and an expert. It needs a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from zinfer.core.engine import chunk_factor
from zinfer.engine.stream import product_kernel, quantized
from zinfer.engine.stream.packed_layer import CHUNK_BYTES
from zinfer.engine.stream.quantized import CodesLayout, Run

SHAPES = (43008, 14336), (14336, 14336), (57344, 14336), (14336, 57344)  # rows and columns
TOKENS = 1, 8, 16, 32, 64
GROUP = 128
COPIES = 3  # of a weight, used in turn, so that the L2 cache holds none
TILES = (64, 4, 2048), (128, 3, 1024), (128, 4, 512), (128, 4, 2048), (128, 5, 1024), (256, 3, 512), (256, 4, 512)


def weight_of(rows: int, columns: int) -> tuple[Run, Tensor]:
    """Return a random matrix in int4, in chunks as a packed layer has them, and their bytes on the GPU."""
    most = max(1, CHUNK_BYTES * chunk_factor(4) // (2 * columns))
    count = -(-rows // most)
    first, last = (
        CodesLayout(
            size, columns, 4, "middle4", (1, GROUP), (size, columns // GROUP), torch.bfloat16, "", False, False, 1.0,
            1.0, torch.bfloat16, torch.bfloat16,
        )
        for size in (min(rows, most), rows - (count - 1) * most)
    )  # fmt: skip
    run = Run(first, last, count, -(-first.size // 256) * 256)
    data = torch.randint(0, 256, (run.size,), dtype=torch.uint8, device="cuda")
    for layout, part in chunks(run, data):
        layout.views(part).scales.copy_(torch.rand(layout.grid, device="cuda") / 100 + 0.001)
    return run, data


def chunks(run: Run, data: Tensor) -> list[tuple[CodesLayout, Tensor]]:
    """Return the layout and the bytes of each chunk of `run`."""
    layouts = [run.layout] * (run.count - 1) + [run.last]
    return [(one, data[number * run.stride :][: one.size]) for number, one in enumerate(layouts)]


def unpacked(run: Run, data: Tensor, out: Tensor) -> Tensor:
    """Unpack a weight into `out` ``[rows, columns]``, and return it."""
    for number, (layout, part) in enumerate(chunks(run, data)):
        place = number * run.layout.rows
        quantized.unpack(part, layout, out[place : place + layout.rows].view(-1))
    return out


def product(run: Run, data: Tensor, states: Tensor, out: Tensor) -> None:
    """Put the product of `states` ``[tokens, columns]`` with a weight into `out`, from its codes."""
    pair_columns = product_kernel.pair_columns(states, run.layout.bits)
    product_kernel.multiply(pair_columns, data, run, None, out, len(states))


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the time of a call: the least of three runs of a CUDA graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), list[float]()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats / len(calls))
    return min(times)


def show(rows: int, columns: int, tokens: Sequence[int], beside: bool = True) -> None:
    """Print a line for each number of tokens."""
    copies = [weight_of(rows, columns) for _ in range(COPIES)]
    wide = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda") if beside else torch.empty(0)
    for count in tokens:
        states = torch.randn((count, columns), device="cuda").bfloat16()
        out = torch.empty((count, rows), dtype=torch.bfloat16, device="cuda")
        own = microseconds([partial(product, run, data, states, out) for run, data in copies])
        line = f"{rows:6} x {columns:6} {count:6} {own:9.1f} {rows * columns / 2 / own / 1e3:7.0f}"
        if beside:
            plain = microseconds([partial(functional.linear, states, wide)], 5)
            both = microseconds([partial(unpacked, *copies[0], wide)], 5) + plain
            line += f" {both:9.1f} {plain:9.1f}"
        print(line, flush=True)


def show_experts(rows: int, columns: int, count: int = 128) -> None:
    """Print a line for each number of pairs of a token and an expert, at random; experts are ``[rows, columns]``."""
    size, whole = CHUNK_BYTES * chunk_factor(4) // (2 * columns) // 32 * 32, count * rows
    first, last = (
        CodesLayout(
            each, columns, 4, "e2m1", (32, 1), (each // 32, columns), torch.uint8, "e8m0", False, False, 1.0, 1.0,
            torch.bfloat16, torch.bfloat16,
        )
        for each in (size, whole % size or size)
    )  # fmt: skip
    run = Run(first, last, -(-whole // size), -(-first.size // 256) * 256)
    data = torch.randint(100, 128, (run.size,), dtype=torch.uint8, device="cuda")
    for pairs in (4, 16, 32, 64, 128, 256):
        states = torch.randn((pairs // 4, rows), device="cuda").bfloat16()
        experts = [torch.randint(0, count, (pairs // 4, 4), device="cuda") for _ in range(4)]
        calls = [partial(product_kernel.multiply_experts, states, data, run, one, count, True) for one in experts]
        own = microseconds(calls)
        read = sum(len(one.unique()) for one in experts) / len(experts) * rows * columns / 2
        print(f"{rows:6} x {columns:6} {pairs:6} {own:9.1f} {read / own / 1e3:7.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="compare sizes of tiles, at 8 tokens")
    parser.add_argument("--experts", action="store_true", help="show experts in MXFP4")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name())
    print(" rows x columns tokens  codes, us  GB/s   unpack + product, us   16 bits, us")
    for shape in SHAPES:
        show(*shape, TOKENS)
    for sizes in TILES if options.tiles else ():
        product_kernel.ROWS, product_kernel.STAGES, product_kernel.PROGRAMS = sizes
        print("rows, stages, programs:", *sizes)
        show(*SHAPES[1], (8,), beside=False)
    if options.experts:
        print(" inputs x columns pairs  codes, us  GB/s of distinct experts")
        for shape in ((2880, 5760), (2880, 2880)):
            show_experts(*shape)
