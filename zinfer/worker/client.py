"""Client of a server: prompts over HTTP, a thread each, and the times at which their tokens arrive."""

import http.client
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from zinfer.engine.server.completions import Completion, body, complete, token_times
from zinfer.engine.server.engine import Server

TIMEOUT_S = 3600.0  # between two tokens


def draw(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Return random token ids of these lengths. They are not the lowest, often special; equal seeds, equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    low = min(8, vocab_size - 1)
    return [torch.randint(low, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def ask(
    server: Server, prompt: Sequence[int], output_len: int, ready: Callable[[], object] = lambda: None
) -> Completion:
    """Have a prompt continued by `output_len` tokens, once `ready` returns. Raises EngineError, ServerDied."""
    request = body(server.model, prompt, output_len, server.preset.body)
    ready()
    try:
        asked, events = complete(server.address, request, TIMEOUT_S)
        return Completion(asked, token_times(events, len(prompt), output_len))
    except (OSError, http.client.HTTPException) as error:
        raise server.broken(error) from error


def ask_at_once(server: Server, prompts: Sequence[Sequence[int]], output_len: int) -> list[Completion]:
    """Send prompts at the same time; return their answers. Raises as `ask` does."""
    barrier = threading.Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(ask, server, prompt, output_len, barrier.wait) for prompt in prompts]
        return [job.result() for job in jobs]
