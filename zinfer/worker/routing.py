"""Measurement of routing: the experts that a mixture's routers choose for a text, and what a cache would have met.

A forward pass over a chunk of the text gives the choices of each of its tokens. The chunks follow each other through
the cache, as requests do; a step of several rows has a token of as many places in the text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zinfer.core.model import ModelSpec
from zinfer.engine.state import ModelState
from zinfer.engine.stream.experts.modules import routed_experts
from zinfer.engine.stream.experts.pool import ExpertCache
from zinfer.generation.tokenizer_process import TokenizerProcess, windows
from zinfer.plan.bytes import whole_tokens
from zinfer.record.study import Hits, Study, StudyError, Text, Touched
from zinfer.worker import process

SHARES = (0.1, 0.25, 0.5, 0.75)  # sizes of a cache, as shares of all experts
Step = Sequence[tuple[int, Sequence[int]]]  # numbers of layers, ascending, and of the experts that each chose


def side_by_side(steps: Sequence[Step], batch_size: int) -> list[Step]:
    """Make the steps of `batch_size` rows of those of one row: each row reads a part of the text."""
    length = len(steps) // batch_size
    return [
        [
            (rows[0][0], sorted({expert for _, experts in rows for expert in experts}))
            for rows in zip(*steps[token : length * batch_size : length], strict=True)
        ]
        for token in range(length)
    ]


def replay(steps: Iterable[Step], room: int) -> float:
    """Return the hit rate of a cache of `room` experts."""
    cache, hits, needs = ExpertCache(), 0, 0
    for step in steps:
        cache.next_pass()
        for layer, experts in step:
            keys = [(layer, expert) for expert in sorted(set(experts))]
            cached = [key for key in keys if key in cache]
            hits, needs = hits + len(cached), needs + len(keys)
            for key in (*cached, *(key for key in keys if key not in cached)):
                cache.insert(key, room)
    return hits / max(1, needs)


@torch.inference_mode()
def trace(spec: ModelSpec, chunks: Iterable[Sequence[int]]) -> Iterator[dict[int, Tensor]]:
    """Yield the experts, ``[T, K]``, that each layer chose for a chunk. Raises StudyError."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = ModelState(spec, "safetensors")
    weights = {name: torch.empty_like(entry.tensor, device=device) for name, entry in state.entries.items()}
    for name, tensor in state.load(device):
        weights[name].copy_(tensor)
    for name, tensor in weights.items():
        state.entries[name].put(tensor)
    model = state.model.to(device).eval()
    chosen, routed = dict[int, Tensor](), False

    def watch(number: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen[number] = [*args, *kwargs.values()][1]

    for number, layer in enumerate(state.layers):
        if len(modules := routed_experts(layer)) == 1:
            modules[0][1].register_forward_pre_hook(partial(watch, number), with_kwargs=True)
            routed = True
    if not routed:
        raise StudyError(f"{spec.name} has no routed experts that transformers' ExpertsInterface dispatches")
    for number, chunk in enumerate(chunks):
        token_ids = torch.tensor([chunk], device=device)
        if number == 0:
            model(input_ids=token_ids, use_cache=False)  # which finds the routers
        chosen.clear()
        model(input_ids=token_ids, use_cache=False)
        yield chosen


def measure(
    spec: ModelSpec, text: tuple[str, str], count: int, length: int, about: str, progress: Callable[[str], None]
) -> Study:
    """Measure `count` chunks of `length` tokens of `text`, (name, content). Raises StudyError."""
    start = process.study_header("stream")
    with TokenizerProcess(spec) as tokenizer:
        chunks, _ = windows(tokenizer, text[1], count, length)
    steps: list[Step] = []
    for chosen in trace(spec, chunks):
        layers = sorted((number, choices.tolist()) for number, choices in chosen.items())
        steps += ([(number, rows[token]) for number, rows in layers] for token in range(length))
        progress(f"{len(steps)} of {count * length} tokens")
    every = len(layers) * spec.num_experts
    sizes = dict.fromkeys(max(1, round(share * every)) for share in SHARES)
    rows, touched = list[Hits](), []
    largest = min(whole_tokens(spec) - 1, len(steps))  # of steps that bring experts on demand
    for batch_size in sorted({1 << power for power in range(largest.bit_length())} | {max(1, largest)}):
        batches = side_by_side(steps, batch_size)
        rows += [Hits(experts=size, hits=replay(batches, size), batch_size=batch_size) for size in sizes]
        if batch_size > 1:
            needs = sum(len(experts) for step in batches for _, experts in step)
            touched.append(Touched(batch_size=batch_size, share=needs / (len(batches) * every)))
        progress(f"steps of {batch_size} tokens")
    return Study(
        study="routing", model=spec.name, about=about, text=Text(name=text[0], tokens=len(steps)),
        num_layers=len(layers), num_experts=spec.num_experts, experts_per_token=len(steps[0][0][1]),
        rows=(*rows, *touched), **start,
    )  # fmt: skip
