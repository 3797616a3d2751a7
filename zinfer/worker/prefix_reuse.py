"""Measures, in the worker, what `zinfer reuse` compares: a prefill of everything, and one that takes up a kept past."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Progress
from zinfer.engine.kv_file import drop_from_page_cache, read, write
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.plan.plan import Plan
from zinfer.spec.case import Workload
from zinfer.worker.measure import first_token_ms, prompts


class Rerun:
    """One measurement after the other on a loaded engine."""

    def __init__(self, plan: Plan, beat: Progress) -> None:
        self._plan, self._beat = plan, beat

    def measure(
        self, engine: Engine, context: int, new_tokens: int, repeats: int, folder: str | None
    ) -> dict[str, Any]:
        """The samples and findings of a `zinfer.record.prefix_reuse.Point`. A round of warm-up, then `repeats` rounds,
        in which each way has its turn; the file is read from its disk each time, as far as the file system can be told
        to.

        Raises EngineError where the engine cannot keep anything, and whatever running out of memory raises.
        """
        if (why_not := engine.cannot_snapshot()) is not None:
            raise EngineError(why_not)
        token_ids = prompts(Workload(batch_size=1, input_len=context, output_len=1), self._plan.model.vocab_size)
        token_ids = token_ids.to(engine.device)
        pin = engine.device.type == "cuda"
        with ExitStack() as stack:
            stack.callback(engine.clear)
            self._beat(f"{context:,} tokens", 0.0)
            _, batch, computed = first_token_ms(engine, token_ids)
            kept = engine.snapshot(batch, 0, context - new_tokens)
            engine.retire(batch)
            stack.callback(kept.close)
            ways: dict[str, Callable[[], Sequence[KVSnapshot]]] = {"recompute": lambda: (), "memory": lambda: (kept,)}
            path = None
            loaded: list[KVSnapshot] = []
            if folder is not None:
                path = Path(folder) / f"zinfer-reuse-{os.getpid()}.safetensors"
                stack.callback(path.unlink, missing_ok=True)
                write(kept, path, {})

                def from_disk(path: Path = path) -> Sequence[KVSnapshot]:
                    loaded.append(read(path, 0, pin))
                    return loaded

                ways["disk"] = from_disk
            samples: dict[str, list[float]] = {f"{way}_ms": [] for way in ways}
            difference, same = 0.0, True
            for turn in range(repeats + 1):
                for number, (way, past) in enumerate(ways.items()):
                    if way == "disk" and path is not None:
                        drop_from_page_cache(path)
                    try:
                        milliseconds, batch, logits = first_token_ms(engine, token_ids, past)
                        engine.retire(batch)
                    finally:
                        while loaded:
                            loaded.pop().close()
                    difference = max(difference, float((logits.float() - computed.float()).abs().max()))
                    same &= torch.equal(logits.argmax(-1), computed.argmax(-1))
                    if turn:  # the first one warms up
                        samples[f"{way}_ms"].append(round(milliseconds, 4))
                    done = turn * len(ways) + number + 1
                    self._beat(f"{context:,} tokens", done / (len(ways) * (repeats + 1)))
            return samples | {"kept_bytes": kept.nbytes, "same_token": same, "max_difference": difference}
