"""Prompts in a process with limits: the ids of transformers, and no template, tokenizer or text that harms another."""

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import Checkpoints, alive, children, wait
from tests.inline import SPEC
from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.tokenizer_files import ChatTemplate
from zinfer.core.model import ModelError, ModelSpec
from zinfer.generation import tokenizer_process, tokenizer_server
from zinfer.generation.tokenizer_process import Refusal, TokenizerProcess

pytestmark = pytest.mark.torch  # `checkpoint` saves models
TALK = [{"role": "user", "content": "hi"}]
CHAT = [
    {"role": "system", "content": "Be <brief>. "},
    {"role": "user", "content": 'Say "\u00e9\n"'},
    {"role": "assistant", "content": " Yes"},
    {"role": "user", "content": ""},
]
TEMPLATES = [
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}\n    {% endfor %}\n{% if add_generation_prompt %}<go>{% endif %}",
    "{{ tools is none }} {{ documents is none }} {{ x is defined }}|{{ strftime_now('%Y') }} {{ messages | tojson }}",
]
TEXTS = ["Once upon a time", "a", " ", "\u00e9\u6f22\U0001f600 x", "</s><pad>", "\x00\n\t", "x" * 3000]


def spec_of(folder: Path, **fields: Any) -> ModelSpec:
    return SPEC.model_copy(update={"directory": str(folder), "vocab_size": 400, "max_position": None} | fields)


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "PROMPT_S", 0.4)
    monkeypatch.setattr(tokenizer_process, "REQUEST_BYTES", 1 << 28)


def test_settings_reach_the_template_and_unknown_ones_are_refused(checkpoint: Checkpoints) -> None:
    template = "{{ 'think: ' if effort == 'high' }}{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}"
    with TokenizerProcess(spec_of(checkpoint("llama")), ChatTemplate(template)) as process:
        thinking, plain = process.encode([{"messages": TALK, "template": {"effort": "high"}}, {"messages": TALK}])
        quick = process.encode_quickly({"messages": TALK, "template": {"effort": "low"}})
        assert thinking == process.encode_alone("think: hi", special=False)
        assert plain == quick == process.encode_alone("hi", special=False)
        for name in ("efforts", "tools", "tokenize", "messages"):
            refused = process.encode_alone({"messages": TALK, "template": {name: True}})
            assert refused == Refusal("invalid_prompt", f"the model's chat template has no setting {name!r}")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tokenizers(kind: str, checkpoint: Checkpoints, folder: Path) -> Path:
    """Return the folder of a tokenizer of a kind; a pure-Python one of transformers is that of lines."""
    from transformers import BertTokenizer, CTRLTokenizer

    from tests.test_dialogue import sentencepiece
    from tools.trained import tokenizer as trained

    if kind in ("llama", "bloom"):
        return checkpoint(kind)
    (words := folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nonce\n##s\na")
    (merges := folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (lines := folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<unk>": 3, "x</w>": 4, "a@@": 5}')
    hf: Any = {
        "words": lambda: BertTokenizer(str(words)), "lines": lambda: CTRLTokenizer(str(lines), str(merges)),
        "sentencepiece": sentencepiece, "bytes": trained,
    }[kind]()  # fmt: skip
    hf.save_pretrained(saved := folder / "saved")
    (saved / "config.json").write_text('{"model_type": "llama"}')
    return saved


@pytest.mark.parametrize("kind", ["llama", "bloom", "words", "lines", "sentencepiece", "bytes"])
def test_ids_are_those_of_transformers(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = tokenizers(kind, checkpoint, tmp_path)
    hf = AutoTokenizer.from_pretrained(directory)
    hf.chat_template = TEMPLATES[0]
    with TokenizerProcess(spec_of(directory), ChatTemplate(TEMPLATES[0])) as process:
        for special in (True, False):
            expected = [list(hf(text, add_special_tokens=special).input_ids) for text in TEXTS]
            encoded = process.encode(TEXTS, special)
            assert [[] if isinstance(ids, Refusal) else ids for ids in encoded] == expected
        text = hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert process.encode([{"messages": CHAT}]) == [list(hf(text, add_special_tokens=False).input_ids)]
        assert process.facts.bos == hf.bos_token_id


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_is_rendered_by_transformers(template: str) -> None:
    from zinfer.generation.tokenizer import byte_tokenizer

    hf = byte_tokenizer()
    hf.bos_token, hf.eos_token = "<s>", "</s>"
    ours = tokenizer_server.Checkpoint(hf, template, 400, "m").render({"messages": CHAT})
    assert ours == hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, chat_template=template)


HOSTILE = {
    "steps": "{{ messages[0].content }}{% if messages[1:] %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
    "number": "{% if messages[1:] %}{{ 10 ** (10 ** 9 + messages | length) }}{% endif %}{{ messages[0].content }}",
    "characters": "{% if messages[1:] %}{{ 'a' * 10 ** 12 }}{% endif %}{{ messages[0].content }}",
    "list": "{% set n = namespace(x=messages[1:]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"
    "{{ messages[0].content }}",
    "recursion": "{{ messages[0].content }}{% macro f() %}{{ f() }}{% endmacro %}"
    "{% if messages[1:] %}{{ f() }}{% endif %}",
    "surrogate": "{{ messages[0].content }}{% if messages[1:] %}{{ '\\ud800' }}{% endif %}",
    "no": "{{ messages[0].content }}{% if messages[1:] %}{{ raise_exception('no\nmore') }}{% endif %}",
}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_conversation_that_fails_harms_no_other(name: str, checkpoint: Checkpoints) -> None:
    """Repeat a failing conversation among good ones and a completion's text."""
    with TokenizerProcess(spec_of(checkpoint("llama")), ChatTemplate(HOSTILE[name])) as process:
        good, began = process.encode(["hi"])[0], time.monotonic()
        supervisor = process._process.pid
        talk, chat = {"messages": TALK}, {"messages": CHAT}
        tries: list[list[Any]] = [[talk, chat, "hi"], [chat], [chat, talk]]
        for prompts in tries:
            for prompt, encoded in zip(prompts, process.encode(prompts), strict=True):
                if prompt == chat:
                    assert isinstance(encoded, Refusal)
                    assert encoded.code == "invalid_prompt"
                    assert "\n" not in encoded.message
                    assert len(encoded.message) < 500
                else:
                    assert encoded == good
        assert process._process.pid == supervisor, "nothing was loaded again"
        assert time.monotonic() - began < 150, "the limit is one of CPU time"


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def growing(kind: str) -> dict[str, Any]:
    return {"type": "Sequence", kind: [{"type": "Replace", "pattern": {"String": "z"}, "content": "zz"}] * 45}


READ_BADLY: dict[str, dict[str, Any]] = {
    "backtracking": {"pre_tokenizer": split("(?:z|zz)+b(?=(z|z?)+c)")},
    "growing": {"normalizer": growing("normalizers")},
    "another vocabulary": {"model": {"type": "WordLevel", "vocab": {"a": 5, "z": 4294967295}, "unk_token": "a"}},
}


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("name", READ_BADLY)
def test_a_prompt_that_the_tokenizer_fails_at_harms_no_other(name: str, folder: Path) -> None:
    change(folder / "tokenizer.json", **READ_BADLY[name])
    with TokenizerProcess(spec_of(folder)) as process:
        (before,) = process.encode(["a"])
        assert not isinstance(before, Refusal)
        encoded = process.encode(["a", "z" * 200, "a"])
        assert [encoded[0], encoded[2]] == [before, before]
        assert isinstance(encoded[1], Refusal), encoded[1]
        assert "\n" not in encoded[1].message


LOADED_BADLY: dict[str, tuple[dict[str, Any], str]] = {
    "growing": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "z" * 10**6}] * 50}},
                "CPU time or"),
    "a panic": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}}, "cannot be used"),
    "an abort": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////////"}}, "crashes the library"),
    "a regular expression": ({"pre_tokenizer": split("(")}, "has no tokenizer that transformers can load"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED_BADLY)
def test_a_tokenizer_that_cannot_be_loaded_is_one_line(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer_process, "LOAD_S", 20.0)
    monkeypatch.setattr(tokenizer_process, "LOAD_BYTES", 1 << 30)
    fields, says = LOADED_BADLY[name]
    change(folder / "tokenizer.json", **fields)
    with TokenizerProcess(spec_of(folder)) as process, pytest.raises(ModelError, match=says) as error:
        process.encode(["a"])
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert capfd.readouterr().err == ""


def test_settings_of_padding_and_truncation_have_no_effect(folder: Path) -> None:
    pad = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>", "pad_to_multiple_of": None}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", padding=pad | {"strategy": {"Fixed": 10**12}}, truncation=cut)
    with TokenizerProcess(spec_of(folder)) as process:
        assert process.encode(["abc", "x"]) == [[69, 70, 71], [92]]


def test_of_a_prompt_that_is_far_too_long_the_beginning_is_read(checkpoint: Checkpoints) -> None:
    with TokenizerProcess(spec_of(checkpoint("llama")), max_tokens=20) as process:
        encoded = process.encode(["x" * 60, "y", "x" * 10**6])
        assert len(encoded[1]) == 1
        for refusal, length in ((encoded[0], "60 tokens"), (encoded[2], "240 tokens")):
            assert isinstance(refusal, Refusal)
            assert refusal.code == "context_length_exceeded"
            assert length in refusal.message


def test_a_conversation_without_a_template_is_refused(checkpoint: Checkpoints) -> None:
    with TokenizerProcess(spec_of(checkpoint("llama"))) as process:
        assert "has no chat template" in process.template.why_not
        refused, plain, empty = process.encode([{"messages": TALK}, "hi", ""])
        assert refused == Refusal("invalid_prompt", process.template.why_not)
        assert len(plain) == 2
        assert isinstance(empty, Refusal)
        assert "no tokens" in empty.message
        text = b"a\xff".decode(errors="surrogateescape")  # of a command line
        assert process.encode([text]) == process.encode(["a?"])


@pytest.mark.usefixtures("executed")
def test_a_child_can_open_no_file_and_ends_with_its_owner(checkpoint: Checkpoints) -> None:
    process = TokenizerProcess(spec_of(checkpoint("llama")))
    process.encode(["a"])
    (child,) = children(process._process.pid)
    limits = Path(f"/proc/{child}/limits").read_text()
    assert [line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")] == [["0", "0"]]
    (memory,) = (int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max address space"))
    assert memory < 3 << 30
    popen = process._process
    assert b"ZINFER" not in Path(f"/proc/{popen.pid}/environ").read_bytes()
    del process
    assert popen.poll() is not None
    wait(lambda: not alive(child))


@pytest.mark.usefixtures("executed")
def test_modules_of_the_working_folder_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a checkpoint's."""
    for name in ("json", "types", "transformers", "zinfer", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'mark')!r}, 'w').close()\n")
    monkeypatch.chdir(folder)
    with TokenizerProcess(spec_of(folder)) as process:
        assert process.encode(["abc"]) == [[69, 70, 71]]
    assert not (folder / "mark").exists()


def test_a_process_that_was_killed_is_started_again(checkpoint: Checkpoints) -> None:
    """The child goes on meanwhile; who needs another one has it loaded anew."""
    with TokenizerProcess(spec_of(checkpoint("llama"))) as process:
        before = process.encode(["abc"])
        (child,) = children(process._process.pid)
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        assert process.encode(["abc"]) == before
        os.kill(child, signal.SIGKILL)
        encoded = process.encode(["abc"])
        assert encoded == before or isinstance(encoded[0], Refusal)  # that one's child was killed
        assert process.encode(["abc"]) == before


def test_a_process_that_cannot_be_started_again_is_tried_at_the_next_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be short for a while: the facts stay known, and what was loaded once is loaded again."""
    with TokenizerProcess(spec_of(folder)) as process:
        facts = process.facts
        file = folder / "tokenizer.json"
        content = file.read_bytes()
        file.write_bytes(b"")
        os.killpg(process._process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ModelError, match="has no tokenizer that transformers can load"):
                process.encode(["abc"])
            assert process.facts == facts
        file.write_bytes(content)
        assert process.encode(["abc"]) == [[69, 70, 71]]


def test_a_panic_of_the_library_while_tokens_are_decoded_is_an_error_of_these() -> None:
    from zinfer.generation import tokenizer

    class PanicException(BaseException):
        """Stands for that of compiled code."""

    class Panics:
        def decode(self, ids: list[int], **_: bool) -> str:
            raise PanicException("index\nout of bounds") if ids else SystemExit

    with pytest.raises(ModelError, match="cannot decode tokens: index out of bounds"):
        tokenizer.decode(Panics(), [1])
    with pytest.raises(SystemExit):
        tokenizer.decode(Panics(), [])


@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "ends"),
    [
        (None, None, "</s>", {2}),
        ([2], 2, "</s>", {2}),
        ([2, 3], 2, "</s>", {2, 3}),
        (2, None, "<s>", {1, 2}),
        (2, [2, 50, 999], "</s>", {2, 50}),
        (-1, None, "<none>", set()),
    ],
)
def test_a_text_ends_at_every_token_that_a_file_names(
    generation: Any, config: Any, eos_token: str, ends: set[int], folder: Path
) -> None:
    from zinfer.generation.tokenizer import Tokenizer

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    change(folder / "tokenizer_config.json", eos_token=eos_token)
    spec = spec_of(folder, config={"eos_token_id": config}, vocab_size=128)
    assert Tokenizer(spec).ends == ends
    with TokenizerProcess(spec) as process:
        assert {*process.facts.ends} == ends


def test_the_template_is_that_of_the_first_file_that_has_one(folder: Path) -> None:
    find_template = partial(tokenizer_files.chat_template, folder)
    assert (find_template().text, find_template().names) == (None, ())
    change(folder / "tokenizer_config.json", chat_template=None)
    (folder / "processor_config.json").write_text('{"chat_template": "P", "image_token": 7}')
    assert find_template().text == "P"
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert find_template().text == "J"
    change(folder / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "R"}])
    assert find_template() == ChatTemplate(
        None, "the model's chat templates are rag, none the default: choose one with --chat-template", ("rag",)
    )
    assert find_template("rag").text == "R"
    change(folder / "tokenizer_config.json", chat_template={"default": "D", "rag": "R"})
    assert (find_template().text, find_template("rag").text) == ("D", "R")
    (more := folder / "additional_chat_templates").mkdir()
    (more / "tools.jinja").write_text("T")
    assert find_template().names == ("tools",), "files replace those of the configuration, as in transformers"
    (folder / "chat_template.jinja").write_text("F")
    assert (find_template().text, find_template("tools").text) == ("F", "T")
    other = folder / "other.jinja"
    other.write_text("O")
    assert find_template(str(other)).text == "O"
    for wanted in ("absent", str(folder / "absent.jinja")):
        with pytest.raises(ModelError, match=r"no such file or chat template; the model's are default, tools"):
            find_template(wanted)
    other.write_text("a" * ((1 << 20) + 1))
    for wanted in (str(other), str(folder), "/dev/zero"):
        with pytest.raises(ModelError, match=r"larger than|cannot be read|not a regular file"):
            find_template(wanted)
    (folder / "chat_template.jinja").unlink()
    (more / "tools.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"tools\.jinja is not UTF-8"):
        tokenizer_files.require(folder)
