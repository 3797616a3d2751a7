"""Tokenizers of checkpoints that anybody may have written: no code, no other file, no hang, one line."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import Checkpoints, invoke
from tests.inline_worker import InlineWorker
from tests.test_tokenizer_process import change
from zinfer.checkpoint import tokenizer_files
from zinfer.checkpoint.configuration import CheckpointWarning
from zinfer.checkpoint.resolve import from_directory
from zinfer.core.model import ModelError
from zinfer.generation.tokenizer import Tokenizer

pytestmark = [pytest.mark.torch]  # `checkpoint` saves models
pytestmark += [pytest.mark.filterwarnings("ignore::zinfer.checkpoint.configuration.CheckpointWarning")]


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(from_directory(folder))


def refused(folder: Path, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:  # noqa: PT012
        tokenizer_files.chat_template(folder)
        tokenizer(folder)
    assert "\n" not in str(error.value)
    assert "zinfer-tokenizer-" not in str(error.value)


def trap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put code that leaves a mark when run into `folder`. It is in modules and pickles. Returns the mark's path."""
    mark = folder.parent / "mark"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("tokenization.py", "modeling.py", "generate.py", "configuration.py"):
        (folder / name).write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    pickled = f"cbuiltins\nexec\n(V{code}tR.".replace("\n'", "'").encode()
    for name in ("vocab.bin", "vocab.pkl", "vocab.pt", "pytorch_model.bin", "dict.pickle"):
        (folder / name).write_bytes(pickled)
    (folder / "adapter_config.json").write_text(json.dumps({"auto_mapping": {"base_model_class": "x"}, "peft_type": 3}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "modeling.P"}}))
    for name in ("huggingface_hub.snapshot_download", "huggingface_hub.hf_hub_download"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("something was fetched"))
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_in_module", lambda *_, **__: pytest.fail("code"))
    return mark


HOSTILE = [
    {"auto_map": {"AutoTokenizer": ["tokenization.T", "tokenization.T"]}},
    {"auto_map": {"AutoTokenizer": ["someone/code--tokenization.T", None]}},
    {"auto_map": ["tokenization.T", None]},
    {"auto_map": "tokenization.T"},
    {"tokenizer_class": "AutoModelForCausalLM"},
    {"tokenizer_class": "Trainer"},
    {"tokenizer_class": "RagTokenizer"},
    {"tokenizer_class": "os.system"},
    {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tokenization.T", "tokenization.T"]}},
    {"trust_remote_code": True, "custom_generate": "someone/code"},
    {"tokenizer_object": "x", "slow_tokenizer": "y", "init_inputs": ["/etc/passwd"]},
    {"tokenizer_file": "/etc/passwd", "vocab_file": "/etc/passwd", "gguf_file": "/etc/passwd"},
    {"sp_model_kwargs": {"model_file": "/etc/passwd"}},
    {"fast_tokenizer_files": ["../outside.json", "tokenizer.4.0.0.json"]},
    {"name_or_path": "someone/other", "_commit_hash": "x"},
]


@pytest.mark.parametrize("fields", HOSTILE)
def test_fields_that_name_code_or_files_do_nothing(
    fields: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, before = trap(folder, monkeypatch), set(sys.modules)
    expected = tokenizer(folder).hf("Hello").input_ids
    change(folder / "tokenizer_config.json", **fields)
    assert tokenizer(folder).hf("Hello").input_ids == expected
    assert not mark.exists()
    assert not [name for name in set(sys.modules) - before if "transformers_modules" in name]


def test_other_files_that_name_code_do_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = trap(folder, monkeypatch)
    change(folder / "generation_config.json", custom_generate="someone/code", trust_remote_code=True)
    change(
        folder / "config.json", tokenizer_class="Trainer", auto_map={"AutoTokenizer": "tokenization.T"},
        _name_or_path="someone/other", custom_generate="someone/code", use_kernels=True,
    )  # fmt: skip
    assert tokenizer(folder).ends == {2}
    assert not mark.exists()


def test_a_warning_names_what_was_left_out(folder: Path) -> None:
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}, tokenizer_class="Trainer")
    with pytest.warns(CheckpointWarning) as caught:
        tokenizer(folder)
    texts = [str(warning.message) for warning in caught]
    assert any("tokenizer_config.json: auto_map left out: code" in text for text in texts)
    assert any("tokenizer_class 'Trainer' left out" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", b'{"chat_template": 5}', r"tokenizer_config\.json: chat_template"),
        ("tokenizer_config.json", b'{"a":' * 10**5, r"tokenizer_config\.json .*nested"),
        ("tokenizer_config.json", b"\xff\xfe", r"tokenizer_config\.json is not UTF-8"),
        ("tokenizer.json", b"{}", "has no tokenizer that transformers can load"),
        ("tokenizer.json", b'{"version": "1.0", "model": ' + b"[" * 10**5, "has no tokenizer that transformers"),
        ("tokenizer.json", b"", "has no tokenizer that transformers can load"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not UTF-8"),
        ("chat_template.jinja", b"a" * ((1 << 20) + 1), r"chat_template\.jinja is larger than"),
        ("special_tokens_map.json", b"[]", r"special_tokens_map\.json is not a JSON object"),
        ("generation_config.json", b'{"eos_token_id": "2"}', r"generation_config\.json: eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [1, 1e99]}', r"generation_config\.json: eos_token_id"),
        ("generation_config.json", b"{", r"generation_config\.json is damaged"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, says: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    refused(folder, says)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "vocab.txt"]
)
@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/proc/kmsg", "itself"])
def test_only_regular_files_are_read(name: str, target: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    if target == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(name if target == "itself" else target)
    refused(folder, name)


@pytest.mark.parametrize("how", ["run", "chat", "batch"])
def test_a_missing_tokenizer_is_found_before_the_machine_and_the_load(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in [*folder.glob("*token*"), *folder.glob("*.jinja")]:
        path.unlink()
    (folder / "README.txt").write_text("a model")
    monkeypatch.setattr("zinfer.system.local.this_machine", lambda: pytest.fail("the machine was asked"))
    monkeypatch.setattr("zinfer.worker.process.Worker", lambda *_, **__: pytest.fail("a worker was started"))
    (tmp_path / "p.jsonl").write_text('{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    job = ["batch", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl"), "-m", str(folder)]
    words = {"run": ["run", "-m", str(folder), "-p", "a"], "chat": ["run", "-m", str(folder), "--chat"], "batch": job}[
        how
    ]
    result = invoke(*words)
    assert isinstance(result.exception, ModelError), result.exception
    assert "has no tokenizer: it holds no tokenizer.json" in str(result.exception)
    assert not (tmp_path / "o.jsonl").exists()


def test_a_tokenizer_that_cannot_be_loaded_is_found_before_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    monkeypatch.setattr("zinfer.worker.session.load", lambda *_: pytest.fail("weights were loaded"))
    result = invoke("run", "-m", folder, "-p", "a", "--offload", "cpu")
    assert isinstance(result.exception, ModelError), result.output
    assert "has no tokenizer that transformers can load" in str(result.exception)


def test_the_check_of_a_good_tokenizer_is_silent(folder: Path) -> None:
    tokenizer_files.require(folder)
    with tokenizer_files.cleaned(folder, lambda _: True) as clean:
        names = {path.name for path in clean.iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not clean.exists()
