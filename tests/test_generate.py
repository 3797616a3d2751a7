"""Text generation, end to end: equal to that of `transformers`, and ended at the right token."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import Checkpoints, Patch
from tests.test_dialogue import sentencepiece
from tests.test_parity import plan_of
from zinfer.checkpoint.resolve import from_catalogue, from_directory
from zinfer.core.case import Workload
from zinfer.core.errors import NotFiniteError
from zinfer.core.model import ModelSpec
from zinfer.core.request import GREEDY, Sampling, nth_seed
from zinfer.engine.stream.engine import Stream
from zinfer.generation import scheduler
from zinfer.generation.schedule import largest_load
from zinfer.generation.sequence import Sequence
from zinfer.generation.tokenizer import Tokenizer, byte_tokenizer

PROMPTS = ["Once upon a time", "No", "weights"]


def engine_for(directory: Path) -> tuple[Stream, ModelSpec]:
    plan = plan_of(directory, sizes=(2, 16, 16))
    return Stream(plan), plan.model


def generate(
    engine: Stream,
    spec: ModelSpec,
    prompts: list[str],
    batch_size: int,
    output_len: int = 32,
    sampling: Sampling = GREEDY,
    ignore_eos: bool = False,
) -> list[Sequence]:
    tokenizer = Tokenizer(spec)
    sequences = [
        Sequence(
            tokenizer.hf(prompt).input_ids, output_len, ignore_eos=ignore_eos, key=number,
            sampling=sampling.model_copy(update={"seed": nth_seed(sampling.seed, number)}),
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    load = largest_load(engine.planner, [(len(row.prompt_ids), output_len) for row in sequences], batch_size)
    running = scheduler.ContinuousScheduler(engine, tokenizer, load, batch_size)
    running.add(sequences)
    while running.running:
        if any(row.error for row in running.step()):
            raise NotFiniteError
        assert len(running.schedule.running) <= batch_size
    running.release()
    assert engine.batches == []
    return sequences


def test_texts_are_those_of_transformers_in_any_batch(checkpoint: Checkpoints) -> None:
    directory = checkpoint("llama")
    engine, spec = engine_for(directory)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for size in (1, 2, 3):
        sequences = generate(engine, spec, PROMPTS, size, output_len=16)
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            expected = whole.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[
                0, ids.shape[1] :
            ].tolist()
            stopped = 2 in expected
            assert sequence.prompt_ids == ids[0].tolist()
            assert sequence.output_ids == (expected[: expected.index(2)] if stopped else expected)
            assert sequence.finish_reason == ("stop" if stopped else "length")
            assert sequence.text == tokenizer.decode(sequence.output_ids, skip_special_tokens=True)


def test_a_text_keeps_the_space_that_some_tokenizers_drop_at_the_beginning(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """As Llama 2's and Mixtral's do. Text that continues a prompt begins with it, an answer of a chat does not."""
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    file = directory / "tokenizer.json"
    drop = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content = json.loads(file.read_text()) | {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, drop]}}
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer(from_directory(directory))
    prompt, answer = (tokenizer.hf(text).input_ids for text in ("Once", " upon it"))
    assert tokenizer.decode(answer) == "upon it"
    for chat, stop, text in (
        (False, (), " upon it"), (True, (), "upon it"), (False, (" upon",), ""), (False, (" it",), " upon"),
    ):  # fmt: skip
        sequence = Sequence(prompt, len(answer), chat=chat, stop=stop)
        shown = ""
        for token in answer:
            if not sequence.ended:
                scheduler.add_token(tokenizer, sequence, token, True)
                shown += sequence.new_text(tokenizer)
        assert sequence.text == shown == text
    assert [tokenizer.text_of(token) for token in (answer[0], answer[1], 2)] == [" ", "u", "</s>"]


def test_rows_end_at_their_own_end_token(checkpoint: Checkpoints) -> None:
    """The third token of a row is declared its end: the row stops there, the others continue."""
    engine, spec = engine_for(checkpoint("opt"))
    free = generate(engine, spec, PROMPTS, 3, output_len=8, ignore_eos=True)
    end = free[0].output_ids[2]
    ended = spec.model_copy(update={"config": spec.config | {"eos_token_id": end}})
    config = Path(str(spec.directory)) / "generation_config.json"
    original = config.read_text()
    try:
        config.unlink()
        finished = generate(engine, ended, PROMPTS, 3, output_len=8)
    finally:
        config.write_text(original)
    for before, after in zip(free, finished, strict=True):
        ids = before.output_ids
        assert after.output_ids == (ids[: ids.index(end)] if end in ids else ids)
        assert after.finish_reason == ("stop" if end in ids else "length")
    assert finished[0].finish_reason == "stop"


def test_drawn_texts_do_not_depend_on_the_batch(checkpoint: Checkpoints) -> None:
    """Each prompt has chances of its own: two that are the same are continued in two ways."""
    engine, spec = engine_for(checkpoint("llama"))
    prompts = [*PROMPTS, PROMPTS[0]]
    sampling = Sampling(temperature=1.0, top_p=0.9, seed="3")
    ways = [
        [sequence.output_ids for sequence in generate(engine, spec, prompts, size, 12, sampling, ignore_eos=True)]
        for size in (1, 3, 4)
    ]
    assert ways[0] == ways[1] == ways[2]
    assert ways[0][0] != ways[0][3]
    ids = Tokenizer(spec).hf(PROMPTS[0]).input_ids
    row = Sequence(ids, 12, sampling, ignore_eos=True)  # as a batch job's is
    running = scheduler.ContinuousScheduler(
        engine, Tokenizer(spec), Workload(batch_size=1, input_len=16, output_len=16)
    )
    running.add([row])
    while running.running:
        running.step()
    assert row.output_ids == ways[0][0]
    other = generate(engine, spec, prompts, 4, 12, sampling.model_copy(update={"seed": "4"}), ignore_eos=True)
    assert [sequence.output_ids for sequence in other] != ways[0]


def test_output_that_is_no_number_is_a_failure(checkpoint: Checkpoints) -> None:
    engine, spec = engine_for(checkpoint("llama"))
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="not a number"):
        generate(engine, spec, PROMPTS, 3)


@pytest.mark.parametrize("kind", ["bytes of GPT-2", "bytes of Llama 2"])
def test_a_token_that_is_part_of_a_character_is_told_by_its_bytes(kind: str, monkeypatch: Patch) -> None:
    hf = byte_tokenizer() if kind == "bytes of GPT-2" else sentencepiece()
    monkeypatch.setattr("zinfer.generation.tokenizer.load_tokenizer", lambda _spec: hf)
    tokenizer = Tokenizer(from_catalogue("bloom-tiny"))
    tokens = hf("aé", add_special_tokens=False).input_ids[-3:]
    assert [tokenizer.text_of(token) for token in tokens] == ["a", "bytes:\\xc3", "bytes:\\xa9"]


def test_bytes_stand_in_where_there_is_no_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    encoded = tokenizer(["héllo", "a"], padding=True)
    assert tokenizer.decode(encoded.input_ids[0]) == "héllo"
    assert encoded.attention_mask[1].count(1) == 1
    assert encoded.input_ids[1][0] == tokenizer.pad_token_id
