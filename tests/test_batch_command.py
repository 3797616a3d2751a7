"""Command `zinfer batch`: one file in, one file out, one summary line, and an exit code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import mentions, wait
from tests.command import interrupted, ran, started
from tests.test_rows import TEMPLATE


def line(name: str, chat: bool = False, **body: Any) -> str:
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def records(path: Path) -> dict[str | None, dict[str, Any]]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_file_of_prompts_is_answered_once(folder: Path, checkpoint: Callable[..., Path]) -> None:
    model = Path(shutil.copytree(checkpoint("llama"), folder / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    prompts, output = folder / "prompts.jsonl", folder / "out.jsonl"
    good = [line(f"p{size}", prompt="ab" * size, max_tokens=size, temperature=0) for size in range(1, 7)]
    talk = line("talk", chat=True, messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    bad = ["broken\n", line("n", prompt="x", n=2), line("empty", prompt=""), line("long", prompt="x", max_tokens=9999)]
    prompts.write_text("".join([*good, *bad, talk, line("role", chat=True, messages=[{"role": "bad", "content": ""}])]))
    words = ["batch", "prompts.jsonl", "-o", "out.jsonl", "-m", "model"]
    result = ran(folder, *words, code=3)
    assert result.stdout == ""
    *_, last = messages = result.stderr.strip().splitlines()
    assert len(messages) <= 4
    assert mentions(last, "7 answers", "5 errors", "out.jsonl", "tok/s")
    answers = records(output)
    assert len(output.read_text().splitlines()) == len(answers) == 12
    codes = {name: record["error"]["code"] for name, record in answers.items() if record["error"]}
    assert codes == {
        None: "invalid_json_line", "n": "unsupported_parameter", "empty": "invalid_prompt",
        "long": "context_length_exceeded", "role": "invalid_prompt",
    }  # fmt: skip
    for size in range(1, 7):
        usage = answers[f"p{size}"]["response"]["body"]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"] <= size) == (2 * size, True)
    body = answers["talk"]["response"]["body"]
    assert (body["choices"][0]["message"]["role"], body["model"]) == ("assistant", "model")

    before = output.read_bytes()
    again = ran(folder, *words, code=3)
    assert mentions(again.stderr, "7 answers", "5 errors", "out.jsonl")
    assert "tok/s" not in again.stderr
    (folder / "other.jinja").write_text("{{ messages[0].content }}")
    ran(folder, *words, "--chat-template", "other.jinja", code=6, says="chat_template: None -> ")
    absent = ran(folder, *words, "--chat-template", "absent", code=2, says="--chat-template absent: no such file")
    assert absent.stderr.count("\n") == 1
    ran(folder, *words, "--offload", "cpu", "--kv-cache-dtype", "int8", code=6, says="kv_cache_dtype: None -> int8")
    with prompts.open("a") as file:
        file.write(line("more", prompt="x", echo=True))
    other = ran(folder, *words, "--dtype", "bf16", code=6, says="dtype: float32 -> bfloat16")
    assert "prompts: " in other.stderr
    assert "--force" in other.stderr
    assert output.read_bytes() == before
    assert mentions(ran(folder, *words, "--force", code=3).stderr, "7 answers", "6 errors")
    assert output.read_bytes().startswith(before)
    assert len(records(output)) == 13


@pytest.mark.slow  # a process of its own; test_cli has the interrupts of the default run
def test_an_interrupt_says_how_to_go_on(folder: Path) -> None:
    lines = [line(str(key), prompt="x", max_tokens=3 + 40 * key) for key in range(40)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    words = ["batch", "prompts.jsonl", "-o", "out.jsonl", "-m", "bloom-tiny", "--load-format", "dummy"]
    process, output = started(folder, *words), folder / "out.jsonl"
    wait(lambda: output.exists() and output.stat().st_size)
    assert "same command" in interrupted(process)
    assert 0 < len(records(output)) < 40
    assert b'"tokens"' in (folder / "out.jsonl.job").read_bytes()
