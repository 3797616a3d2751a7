"""Texts of tokens: spaces that tokenizers drop, parts of characters, bytes where there is no tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from tests import Checkpoints, Patch
from tests.test_dialogue import sentencepiece
from zinfer.checkpoint.resolve import from_catalogue, from_directory
from zinfer.core.request import nth_seed
from zinfer.generation import scheduler
from zinfer.generation.sequence import Sequence
from zinfer.generation.tokenizer import Tokenizer, byte_tokenizer


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


def test_a_text_ends_at_the_tokens_that_any_file_names(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (directory / "generation_config.json").write_text('{"eos_token_id": [70, 71]}')
    spec = from_directory(directory)
    tokenizer = Tokenizer(spec.model_copy(update={"config": spec.config | {"eos_token_id": 72}}))
    assert tokenizer.ends == {2, 70, 71, 72}
    for token, ignore_eos in ((72, False), (72, True), (73, False)):
        scheduler.add_token(tokenizer, row := Sequence([69], 9, ignore_eos=ignore_eos), token, True)
        ended = token == 72 and not ignore_eos
        assert (row.finish_reason, row.output_ids) == (("stop", []) if ended else (None, [token]))


def test_the_first_of_several_rows_keeps_the_seed() -> None:
    """It is drawn as the row of a batch job is; two rows of the same prompt are drawn in two ways."""
    assert [nth_seed("3", number) for number in range(3)] == ["3", "3/1", "3/2"]


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
