"""Commands and code of the pages, run as written.

They run on a small checkpoint and on records in git, in this process.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import probed, zinfer
from tests.inline_worker import InlineWorker
from tests.test_readme import PAGES, TEXTS, inline_commands, shell_lines
from zinfer.system.host import slug

RESULTS = Path(__file__).parents[1] / "sweeps" / "results"
# What takes minutes, a cluster, a GPU, a drive or the hub; large weights, and a tokenizer that grammars can be for.
ELSEWHERE = re.compile(
    r"zinfer (demo|probe|serve|study codec)|--(cluster|ray|shard|merge|nvme-path|serve|structured-outputs)\b"
    r"|tensorrt|vllm|bigscience"
)
# Tables whose cells are whole commands.
TABLES = ("README.md", "docs/plan.md")


def run_here() -> list[str]:
    """Return the commands of code blocks, and of `TABLES`, that run anywhere."""
    cells = ("\n".join(line for line in TEXTS[page].splitlines() if line.startswith("| ")) for page in TABLES)
    lines = [line for page in PAGES for line in shell_lines(TEXTS[page])]
    lines += [line for text in cells for line in inline_commands(text)]
    return [line for line in dict.fromkeys(lines) if not ELSEWHERE.search(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    """Return a folder with the files that the pages name."""
    path = tmp_path_factory.mktemp("pages")
    probed(path)
    results = path / "sweeps" / "results"
    for machine in ("nvidia-h200", "nvidia-h200-x2"):
        shutil.copytree(RESULTS / machine, results / machine)
    demo = (RESULTS / "demo.record").read_text()
    for file in (results / "demo.record", results / slug() / "demo.jsonl", path / "before.jsonl", path / "after.jsonl"):
        file.write_text(demo)
    for engine in ("stream", "deepspeed"):
        wanted = {"engine": engine, "offload": "cpu"}
        kept = [line for line in demo.splitlines() if json.loads(line).get("case", wanted).items() >= wanted.items()]
        (path / f"{engine}.jsonl").write_text("\n".join([*kept, ""]))
    shutil.copytree(checkpoint("llama"), path / "my-checkpoint")
    (path / "prompts.txt").write_text("Once upon a time\nNo\n")
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (path / "prompts.jsonl").write_text(json.dumps(request) + "\n")
    (path / "turns.txt").write_text("Hello\n")
    return path


@pytest.mark.long
@pytest.mark.parametrize("line", run_here())
def test_commands_of_the_pages_run(line: str, folder: Path) -> None:
    """Run a command; a sweep only plans."""
    verb, *words = shlex.split(line, comments=True)[1:]
    if verb == "sweep":
        words = [*(word for word in words if word != "--resume"), "--dry-run"]
    words = words[: words.index("<")] if "<" in words else words
    done = zinfer(folder, verb, *words, stdin="Hello\n")
    here = verb == "plan" and not {"--machine", "--list"} & {*words}  # this machine may be too small (4)
    assert done.returncode in {0, 4 * here}, done.stderr
    assert done.stdout or verb == "batch"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)]
)
def test_code_of_the_pages_runs(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("zinfer.worker.process.Worker", InlineWorker)
    exec(compile(block, "page", "exec"), {})
    assert capsys.readouterr().out.strip()
