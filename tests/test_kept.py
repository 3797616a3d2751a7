"""KV snapshots: a prefill that continues from one gives exactly the tokens of computing everything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import Checkpoints
from tests.grid import covering
from tests.running import Past, decode, prefill, snapshot
from tests.test_parity import OUTPUT_LEN, load, prompts
from zinfer.core.case import Offload
from zinfer.engine import EngineError
from zinfer.engine.base import Engine
from zinfer.engine.kv_snapshot import RowsPast

ARCHITECTURES = ["bloom", "opt", "llama", "gpt_neox", "falcon", "falcon-old", "qwen2", "mixtral"]


def go_on(engine: Engine, token_ids: Tensor, mask: Tensor, past: Past = ()) -> Tensor:
    """Return greedy tokens, ``[B, OUTPUT_LEN]``."""
    tokens = [prefill(engine, token_ids, mask, reserve=OUTPUT_LEN, past=past).argmax(-1)]
    while len(tokens) < OUTPUT_LEN:
        tokens.append(decode(engine, tokens[-1]).argmax(-1))
    return torch.stack(tokens, dim=1)


def second_turn(token_ids: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return a first turn with answer, six more tokens, and mask. The mask has no padding."""
    new = torch.randint(4, 128, (len(token_ids), 6), generator=torch.Generator().manual_seed(5))
    whole = torch.cat([token_ids, answer, new], dim=1)
    return whole, torch.ones_like(whole)


@pytest.mark.parametrize(
    ("architecture", "way"), covering([*ARCHITECTURES], [("stream", "cpu"), ("stream", "none"), ("accelerate", "cpu")])
)
def test_tokens_are_those_of_computing_everything(
    architecture: str, way: tuple[str, Offload], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    (name, offload), directory = way, checkpoint(architecture)
    engine = load(name, directory, offload, tmp_path)
    assert engine.cannot_snapshot() is None
    token_ids, mask = prompts((9,))
    answer = go_on(engine, token_ids, mask)
    first = snapshot(engine, 0, 9)
    second = snapshot(engine, 9, 9 + OUTPUT_LEN - 1)  # the last token was chosen and not computed
    whole, ones = second_turn(token_ids, answer)
    computed = prefill(engine, whole, ones)
    reloaded = prefill(engine, whole, ones, past=(first, second))
    assert torch.allclose(computed, reloaded, atol=1e-4)
    part = prefill(engine, whole, ones, past=(first, second.head(4)))
    assert torch.allclose(computed, part, atol=1e-4)
    expected = go_on(engine, whole, ones)
    assert torch.equal(go_on(engine, whole, ones, (first, second)), expected)
    assert torch.equal(go_on(engine, whole, ones, (first.head(5),)), expected)
    with torch.inference_mode():
        for states in first.states:
            states.zero_()
    assert not torch.allclose(computed, prefill(engine, whole, ones, past=(first, second)), atol=1e-2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    theirs = model.generate(whole, attention_mask=ones, max_new_tokens=OUTPUT_LEN, do_sample=False)
    assert torch.equal(expected, theirs[:, whole.shape[1] :])


def test_deepspeed_keeps_too(checkpoint: Checkpoints) -> None:
    engine = load("deepspeed", checkpoint("bloom"), "cpu")
    token_ids, mask = prompts((9,))
    whole, ones = second_turn(token_ids, go_on(engine, token_ids, mask))
    kept = snapshot(engine, 0, 15)
    assert torch.equal(go_on(engine, whole, ones, (kept,)), go_on(engine, whole, ones))


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_padded_rows_go_on_together_and_in_blocks(architecture: str, at_once: int, checkpoint: Checkpoints) -> None:
    engine = load("stream", checkpoint(architecture), "cpu", tokens=4 * at_once)
    token_ids, mask = prompts((9, 5, 7))
    expected = go_on(engine, token_ids, mask)
    prefill(engine, token_ids, mask)
    pads = (0, 4, 2)
    rows = [[engine.snapshot(engine.batches[-1], 0, 5 - pad, row)] for row, pad in enumerate(pads)]
    past = RowsPast(rows, pads, 5)
    assert torch.equal(go_on(engine, token_ids, mask, past), expected)


@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_rows_with_beginnings_of_their_own_begin_together(architecture: str, checkpoint: Checkpoints) -> None:
    """Each row's first tokens come from its own snapshots alone. They were made with other rows, in one part or two."""
    engine = load("stream", checkpoint(architecture), "cpu")
    token_ids, mask = prompts((9, 5, 7))
    expected = go_on(engine, token_ids, mask)
    prefill(engine, token_ids, mask)
    batch = engine.batches[-1]
    rows = [[engine.snapshot(batch, 0, 4, 0), engine.snapshot(batch, 4, 9, 0)], [], [engine.snapshot(batch, 0, 7, 2)]]
    with pytest.raises(EngineError, match="positions 0 to 6 have not been computed"):
        engine.snapshot(batch, 0, 6, 1)
    past = RowsPast(rows, (0, 4, 2), 4)  # the second row begins there
    computed = prefill(engine, token_ids, mask)
    assert torch.allclose(prefill(engine, token_ids, mask, past=past), computed, atol=1e-4)
    tokens = [computed.argmax(-1)]
    while len(tokens) < OUTPUT_LEN:
        if len(tokens) == 1:
            prefill(engine, token_ids, mask, OUTPUT_LEN, past)
        tokens.append(decode(engine, tokens[-1]).argmax(-1))
    assert torch.equal(torch.stack(tokens, dim=1), expected)


def test_snapshots_that_cannot_be_made_or_used_are_refused(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    engine = load("stream", directory, "cpu")
    with pytest.raises(EngineError, match="positions 0 to 3 have not been computed"):
        snapshot(engine, 0, 3)
    token_ids, mask = prompts((9,))
    prefill(engine, token_ids, mask)
    kept = snapshot(engine, 0, 6)
    with pytest.raises(EngineError, match="positions 6 to 10 have not been computed"):
        snapshot(engine, 6, 10)
    engine.close()
    ways: list[dict[str, Any]] = [{"kv_cache_dtype": "int8"}, {"kv_offload": "cpu"}]
    for options in ways:
        engine = load("stream", directory, "cpu", **options)
        (option,) = options
        assert option in str(engine.cannot_snapshot())
        prefill(engine, token_ids, mask)
        with pytest.raises(EngineError, match=option):
            snapshot(engine, 0, 9)
        with pytest.raises(EngineError, match=option):
            prefill(engine, token_ids, mask, past=(kept,))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_a_gpu_reloads_from_page_locked_memory(
    architecture: str, offload: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    engine = load("stream", checkpoint(architecture), offload, tmp_path)
    token_ids, mask = prompts((9,))
    whole, ones = second_turn(token_ids, go_on(engine, token_ids, mask).cpu())
    expected = go_on(engine, whole, ones)
    kept = snapshot(engine, 0, 20)
    assert kept._arena.pinned
    for _ in range(20):  # copies that came too late would show at some time
        assert torch.equal(go_on(engine, whole, ones, (kept,)), expected)
    kept.close()
