"""Prefill and decode of one micro-batch: the two passes that most callers need, as functions over `Engine.forward`."""

from torch import Tensor

from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.transfer import to_device


def prefill(
    engine: Engine, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0, past: RowsPast | None = None
) -> tuple[MicroBatch, Tensor]:
    """Admit and compute left-padded prompts; return the micro-batch and the last logits ``[B, V]``. Token ids are int64
    ``[B, S]``, their mask has 1 for a token, 0 for padding; there is room for `reserve` further tokens. `past` holds
    first positions of these prompts, which are not computed again. If computing fails, the micro-batch is retired.
    Raises the errors of `Engine.admit` and `Engine.forward`."""
    batch = engine.admit(attention_mask, token_ids.shape[1] + reserve, past)
    try:
        (logits,) = engine.forward([Work(batch, to_device(token_ids[:, batch.length :], engine.device))])
    except BaseException:
        engine.retire(batch)
        raise
    return batch, logits[:, -1]


def decode(engine: Engine, batch: MicroBatch, token_ids: Tensor) -> Tensor:
    """Append one token a row, ``[B]`` on the device, to `batch`; return the next logits ``[B, V]``."""
    (logits,) = engine.forward([Work(batch, token_ids[:, None])])
    return logits[:, -1]
