"""Text generation, end to end: equal to that of `transformers`, and ended at the right token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.test_parity import MACHINE
from zinfer.engine.base import silent
from zinfer.engine.stream import Stream
from zinfer.generation.generate import Sampling, byte_tokenizer, choose, generate
from zinfer.plan.plan import make_plan
from zinfer.spec.case import Case, Workload
from zinfer.spec.model import ModelError, ModelSpec, from_directory

PROMPTS = ["Once upon a time", "No", "weights"]


def engine_for(directory: Path) -> tuple[Stream, ModelSpec]:
    spec = from_directory(directory)
    case = Case(
        model=str(directory),
        engine="stream",
        offload="cpu",
        workload=Workload(batch_size=2, input_len=16, output_len=16),
        dtype="float32",
        load_format="safetensors",
    )
    return Stream(make_plan(case, spec, MACHINE)), spec


def test_texts_are_those_of_transformers_in_any_batch(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    engine, spec = engine_for(directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for size in (1, 2, 3):
        texts = generate(engine, spec, PROMPTS, Sampling(output_len=16), size, silent)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            expected = whole.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[
                0, ids.shape[1] :
            ].tolist()
            stopped = 2 in expected
            assert text["prompt"] == prompt
            assert text["output_ids"] == (expected[: expected.index(2)] if stopped else expected)
            assert text["finish_reason"] == ("stop" if stopped else "length")
            assert text["output_text"] == tokenizer.decode(text["output_ids"], skip_special_tokens=True)
    engine.close()


def test_rows_end_at_their_own_end_token(checkpoint: Callable[..., Path]) -> None:
    """The third token of a row is declared its end: the row stops there, the others continue."""
    engine, spec = engine_for(checkpoint("opt"))
    free = generate(engine, spec, PROMPTS, Sampling(output_len=8, ignore_eos=True), 3, silent)
    end = free[0]["output_ids"][2]
    ended = spec.model_copy(update={"config": spec.config | {"eos_token_id": end}})
    config = Path(str(spec.directory)) / "generation_config.json"
    original = config.read_text()
    try:
        config.unlink()
        texts = generate(engine, ended, PROMPTS, Sampling(output_len=8), 3, silent)
    finally:
        config.write_text(original)
    for before, after in zip(free, texts, strict=True):
        ids = before["output_ids"]
        assert after["output_ids"] == (ids[: ids.index(end)] if end in ids else ids)
        assert after["finish_reason"] == ("stop" if end in ids else "length")
    assert texts[0]["finish_reason"] == "stop"
    engine.close()


def test_sampling_follows_the_probabilities_and_the_seed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).repeat(4000, 1)
    greedy = choose(logits, Sampling(), torch.Generator())
    assert greedy.unique().tolist() == [0]
    sampling = Sampling(temperature=0.7, top_p=1.0)
    drawn = choose(logits, sampling, torch.Generator().manual_seed(1))
    again = choose(logits, sampling, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    expected = torch.softmax(logits[0] / 0.7, -1)
    assert torch.allclose(shares, expected, atol=0.03)


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = choose(logits, Sampling(temperature=1.0, top_p=top_p), torch.Generator().manual_seed(3))
        assert set(drawn.tolist()) == kept


def test_prompts_that_cannot_run_are_refused(checkpoint: Callable[..., Path]) -> None:
    engine, spec = engine_for(checkpoint("opt"))
    with pytest.raises(ModelError, match="has no tokens"):
        generate(engine, spec, [""], Sampling(), 1, silent)
    with pytest.raises(ModelError, match="exceed the 64 positions"):
        generate(engine, spec, ["x" * 60], Sampling(output_len=8), 1, silent)
    engine.close()


def test_bytes_stand_in_where_there_is_no_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    encoded = tokenizer(["héllo", "a"], padding=True)
    assert tokenizer.decode(encoded.input_ids[0]) == "héllo"
    assert encoded.attention_mask[1].count(1) == 1
    assert encoded.input_ids[1][0] == tokenizer.pad_token_id
