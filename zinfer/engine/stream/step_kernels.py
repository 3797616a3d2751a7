# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
"""Triton kernels of decode steps: products, norms, rotary positions, routers, new keys and values.

Such a step of a token or two spends more time between kernels, and in those too small for a GPU, than on reading
weights. cuBLAS splits a token's product among programs, and adds their sums in a second launch; queries, keys and
values are three of them. Here matrices that read the same states are one launch: each program multiplies a few rows.
Sums are in float32, in a fixed order; results are rounded where `transformers` rounds them. With TRITON_INTERPRET=1 in
the environment the kernels run on a CPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zinfer.engine.stream.weights.expand import TYPES, rounded

MAX_FUSED = 3  # matrices of a launch
PROGRAMS = 528  # of a product, at least, if it has the rows: four a multiprocessor of an H100
ROWS = 4  # of a program, at most
TILE, LONG = 4096, 8192  # products of a program at a time, 32 a thread; as many columns have twice as many
HEADS = 8  # heads that a program turns
LOWEST = tl.constexpr(-(1 << 63))  # key of an expert that is not there, or chosen


def products(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the products of `states` ``[tokens, K]`` with a few matrices.

    These are ``[N, K]``, all contiguous and of one type, with a bias ``[N]`` each or none. Results are ``[tokens, N]``.
    """
    tokens, columns = states.shape
    counts = tuple(map(len, weights))
    outputs = [states.new_empty(tokens, count) for count in counts]
    padded = triton.next_power_of_2(tokens)
    block = min(ROWS, max(1, triton.next_power_of_2(sum(counts) // PROGRAMS + 1) // 2))
    _products[(sum(triton.cdiv(count, block) for count in counts),)](
        states,
        tuple(weights),
        tuple(biases),
        tuple(outputs),
        counts,
        tokens,
        COLUMNS=columns,
        TOKENS=padded,
        BLOCK_ROWS=block,
        BLOCK_COLUMNS=min(triton.next_power_of_2(columns), (TILE if columns < LONG else 2 * TILE) // (block * padded)),
        num_warps=4,
    )
    return outputs


def normed(states: Tensor, weight: Tensor, eps: float, after: bool) -> Tensor:
    """Return the RMS norm of `states` ``[.., H]``, times `weight` ``[H]``.

    If `after`, it is rounded before it is multiplied, too.
    """
    size = states.shape[-1]
    states = states.contiguous()
    out = torch.empty_like(states, dtype=torch.promote_types(states.dtype, weight.dtype) if after else states.dtype)
    block = triton.next_power_of_2(size)
    _normed[(states.numel() // size,)](
        states, weight, out, eps, SIZE=size, AFTER=after, BLOCK=block, num_warps=min(16, max(1, block // 256))
    )
    return out


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions.

    Each value of the second half of a head is turned against the one at the same place of the first half. `query` is
    ``[B, H, n, D]``, `keys` ``[B, K, n, D]``. `cos` and `sin` are ``[B, n, D]``, or ``[B, n, D / 2]`` for both halves;
    the last dimension of all is contiguous.
    """
    rows, _, count, size = query.shape
    states, turned = (query, keys), (torch.empty_like(query), torch.empty_like(keys))
    heads = query.shape[1], keys.shape[1]
    _rotate[(rows * count, sum(triton.cdiv(number, HEADS) for number in heads))](
        states,
        turned,
        cos,
        sin,
        count,
        heads,
        tuple(tensor.stride()[:3] for tensor in states),
        tuple(tensor.stride()[:3] for tensor in turned),
        cos.stride()[:2],
        sin.stride()[:2],
        HALF=size // 2,
        SECOND=cos.shape[-1] - size // 2,
        TYPE=TYPES[query.dtype],
        BLOCK=triton.next_power_of_2(size // 2),
        HEADS=HEADS,
        num_warps=4,
    )
    return turned


def route(scores: Tensor, count: int, of_all: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of the `count` best experts.

    `scores` are contiguous ``[tokens, E]``. The weights are shares of a softmax over the chosen experts, or `of_all`,
    in `dtype`, the numbers int64, both ``[tokens, count]``, the largest first; of equal ones, the first expert's.
    """
    tokens, experts = scores.shape
    weights = torch.empty((tokens, count), dtype=dtype, device=scores.device)
    numbers = torch.empty((tokens, count), dtype=torch.int64, device=scores.device)
    _route[(tokens,)](
        scores,
        weights,
        numbers,
        EXPERTS=experts,
        COUNT=count,
        OF_ALL=of_all,
        BLOCK=triton.next_power_of_2(experts),
        CHOSEN=triton.next_power_of_2(count),
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, numbers


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Put new keys and values into their slots.

    New ones are ``[B, K, n, ..]``, `slots` ``[n]``, the memories ``[B, K, room, ..]``; the last dimension of all is
    contiguous.
    """
    rows, heads, count, _ = new_keys.shape
    memories, states = (keys, values), (new_keys, new_values)
    widths = new_keys.shape[3], new_values.shape[3]
    _append[(rows * heads * count, 2)](
        memories,
        states,
        slots,
        heads,
        count,
        widths,
        tuple(memory.stride()[:3] for memory in memories),
        tuple(state.stride()[:3] for state in states),
        BLOCK=triton.next_power_of_2(max(widths)),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["counts", "tokens"])
def _products(
    states,
    weights,
    biases,
    outputs,
    counts,
    tokens,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Multiply a block of rows of one of the matrices."""
    block = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK_COLUMNS)
    states += token[:, None] * COLUMNS + column[None, :]
    for number in tl.static_range(len(weights)):
        rows = counts[number]
        if (block >= 0) & (block * BLOCK_ROWS < rows):
            row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            matrix = weights[number] + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
            total = tl.zeros([TOKENS, BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
            for first in range(0, COLUMNS, BLOCK_COLUMNS):
                inside = (first + column < COLUMNS)[None, :]
                mask = (row < rows)[:, None] & inside
                tile = tl.load(matrix + first, mask=mask, other=0.0, eviction_policy="evict_first")
                state = tl.load(states + first, mask=(token < tokens)[:, None] & inside, other=0.0)
                total += tile.to(tl.float32)[None, :, :] * state.to(tl.float32)[:, None, :]
            value = tl.sum(total, 2)
            if biases[number] is not None:
                value += tl.load(biases[number] + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
            target = outputs[number] + token[:, None] * rows + row[None, :]
            mask = (token < tokens)[:, None] & (row < rows)[None, :]
            tl.store(target, rounded(value, outputs[number].dtype.element_ty), mask=mask)
        block -= tl.cdiv(rows, BLOCK_ROWS)


@triton.jit
def _normed(states, weight, out, eps, SIZE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """Normalise one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(states + row * SIZE + column, mask=inside, other=0.0)
    TYPE: tl.constexpr = states.dtype.element_ty
    value = value.to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    if AFTER:
        value = rounded(value, TYPE).to(tl.float32)
    value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    states,
    turned,
    cos,
    sin,
    count,
    heads,
    strides,
    turned_strides,
    cos_strides,
    sin_strides,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn `HEADS` heads of a token: of its query in the first programs, of its keys in the last ones."""
    row = (tl.program_id(0) // count).to(tl.int64)
    token = (tl.program_id(0) % count).to(tl.int64)
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    cos += row * cos_strides[0] + token * cos_strides[1] + column
    sin += row * sin_strides[0] + token * sin_strides[1] + column
    for part in tl.static_range(2):
        if (block >= 0) & (block * HEADS < heads[part]):
            head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
            inside = (head < heads[part]) & (column < HALF)[None, :]
            step, out_step = strides[part], turned_strides[part]
            source = states[part] + row * step[0] + token * step[2] + head * step[1] + column[None, :]
            out = turned[part] + row * out_step[0] + token * out_step[2] + head * out_step[1] + column[None, :]
            first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
            value = _turned(first, -second, cos, sin, column < HALF, TYPE)
            other = _turned(second, first, cos + SECOND, sin + SECOND, column < HALF, TYPE)
            tl.store(out, value, mask=inside)
            tl.store(out + HALF, other, mask=inside)
        block -= tl.cdiv(heads[part], HEADS)


@triton.jit
def _turned(value, other, cos, sin, inside, TYPE: tl.constexpr):
    """Return ``value * cos + other * sin``, each product rounded."""
    cosine = tl.load(cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    straight = rounded(value * cosine, TYPE).to(tl.float32)
    return rounded(straight + rounded(other * sine, TYPE).to(tl.float32), TYPE)


@triton.jit
def _route(
    scores,
    weights,
    numbers,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    OF_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose and weigh the experts of a token. The upper half of a key has a score's bits, in the order of integers,
    with NaN as the largest one, as in torch; the lower half counts experts from the end."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    rank = tl.arange(0, CHOSEN)
    score = tl.load(scores + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = tl.where(expert < EXPERTS, order.to(tl.int64) * 4294967296 + (BLOCK - expert), LOWEST)
    value = tl.full([CHOSEN], float("-inf"), tl.float32)
    number = tl.zeros([CHOSEN], tl.int64)
    for turn in range(COUNT):
        taken = key == tl.max(key, 0)
        value = tl.where(rank == turn, tl.sum(tl.where(taken, score, 0.0), 0), value)
        number = tl.where(rank == turn, tl.sum(tl.where(taken, expert, 0), 0), number)
        key = tl.where(taken, LOWEST, key)
    largest = tl.sum(tl.where(rank == 0, value, 0.0), 0)
    share = tl.exp(value - largest)
    if OF_ALL:
        share /= tl.sum(tl.exp(score - largest), 0)
    else:
        share /= tl.sum(share, 0)
    element = token * COUNT + rank
    tl.store(weights + element, rounded(share, weights.dtype.element_ty), mask=rank < COUNT)
    tl.store(numbers + element, number, mask=rank < COUNT)


@triton.jit
def _append(memories, states, slots, heads, count, widths, memory_strides, state_strides, BLOCK: tl.constexpr):
    """Store one head's key of a token, or its value."""
    token = tl.program_id(0) % count
    head = (tl.program_id(0) // count % heads).to(tl.int64)
    row = (tl.program_id(0) // count // heads).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for half in tl.static_range(2):
        if tl.program_id(1) == half:
            step, out_step = state_strides[half], memory_strides[half]
            source = states[half] + row * step[0] + head * step[1] + token * step[2]
            out = memories[half] + row * out_step[0] + head * out_step[1] + slot * out_step[2]
            inside = column < widths[half]
            tl.store(out + column, tl.load(source + column, mask=inside), mask=inside)
