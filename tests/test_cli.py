"""Commands from the user's side: each mistake gives one message and an exit code, never a traceback."""

import io
import json
import re
import shlex
import shutil
import signal
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import Mock

import click
import pytest

from tests import Checkpoints, Patch, mentions, wait
from tests.command import interrupted, small_files, started, zinfer, zinfer_process
from zinfer.cli import FOREIGN_OPTIONS, VERBS
from zinfer.commands.sweep import _announce, _check_settings
from zinfer.commands.verb import GROUPS
from zinfer.job.forecast import Outlook
from zinfer.job.recipe import Sweep
from zinfer.job.serve.server import listen
from zinfer.record.store import Header, Records, Store, read
from zinfer.system.host import slug

TINY = ["-m", "bloom-tiny", "--engine", "stream", "--input-len", "8", "--output-len", "4", "--repeats", "1"]
PROMPT = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
PROMPTS = {"p.jsonl": json.dumps(PROMPT), "empty.jsonl": "\n\n", "bad.jsonl": "{}\nx\n"}


def told(done: CompletedProcess[str], code: int, message: str = "", lines: int = 4) -> None:
    """Assert that a command ended with `code` and one message."""
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= lines
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("sweep", 2, "say what to measure"),
        ("sweep -m bloom-177b", 2, "did you mean"),
        ("sweep -m ''", 2, "nothing"),
        ("sweep -m bloom-tiny --offload gpu", 2, "choose from none, cpu, nvme"),
        ("sweep -m bloom-tiny --batch-size 0", 2, "--batch-size"),
        ("sweep -m bloom-tiny --offload nvme", 2, "--nvme-path"),
        ("sweep no-such-recipe", 2, "no recipe 'no-such-recipe'; choose from bloom-176b"),
        ("sweep -m bloom-176b --offload cpu", 5, "361.9 GB of host memory"),
        ("sweep -m bloom-tiny --slurm-arg time=9", 2, "--slurm-arg is for --cluster slurm"),
        ("sweep -m bloom-tiny --cluster slurm --dry-run", 2, "leave out all but one"),
        ("sweep -m bloom-tiny --cluster slurm --slurm-arg array=9", 2, "zinfer sets it itself"),
        ("sweep -m bloom-tiny --shard 1/2 --merge", 2, "leave out all but one"),
        ("run -m bloom-tiny -p x --load-format dummy -O kv_offload=disk", 2, "kv_offload=disk: choose from none, cpu"),
        ("study reuse -m bloom-tiny --context 1k,many", 2, "write numbers of tokens"),
        ("study reuse -m bloom-tiny --context 32", 2, "--context 32 has to exceed --new-tokens 32"),
        ("pack -m m --engine tensorrt --max-batch-size 2", 2, "needs --max-batch-size and --max-seq-len"),
        ("pack -m m --engine tensorrt --max-batch-size 2 --max-seq-len 9 --weights int4", 2, "--weights"),
        ("pack -m m --max-seq-len 9", 2, "--max-seq-len is for --engine tensorrt"),
        ("run -m bloom-tiny", 2, "no prompt"),
        ("run -m bloom-tiny -p x", 2, "--load-format dummy"),
        ("run -m bloom-tiny -p x --load-format dummy --offload none --gpu-weights 9%", 2, "--offload none"),
        ("run -m bloom-tiny -p x --system x", 2, "--system"),
        ("run -m bloom-tiny -p x --chat-template rag", 2, "--chat-template is for a conversation"),
        ("run -m bloom-tiny -p x --kv-cache-size 1GiB", 2, "--kv-cache-size is for a conversation"),
        ("run -m bloom-tiny -p x --chat --batch-size 2", 2, "--batch-size"),
        ("run -m bloom-tiny -p x --top-p 0.9", 2, "--top-p has no effect on greedy text: add --temperature"),
        ("run -m bloom-tiny -p x --logit-bias 5:1", 2, "'5:1': write token ids and what is added, as 11=-100,42=2.5"),
        ("run -m bloom-tiny -p x --chat-template-kwargs {}", 2, "--chat-template-kwargs is for a conversation"),
        ("run -m bloom-tiny -p x --chat --kv-cache-size lots", 2, "'lots' is not a size"),
        ("plan -m bloom-176b --machine cray-1", 2, "h100-80gb"),
        ("plan", 2, "say what to plan"),
        ("plan -m opt-30b --machine h200 --calibrate .", 4, "no point to calibrate with"),
        ("plan -m opt-30b --machine h200 --set speed=3", 2, "FIELD=VALUE"),
        ("plan -m opt-30b --machine h200 --gpu-weights lots", 2, "is not a size"),
        ("batch p.jsonl", 2, "--output"),
        ("batch p.jsonl -o o.jsonl", 2, "--model"),
        ("batch p.jsonl -o o.jsonl -m bloom-tiny", 2, "--load-format dummy"),
        ("batch p.jsonl -o o.jsonl -m m --engine tensorrt --offload nvme --nvme-path .", 2, "no offload nvme"),
        ("batch p.jsonl -o o.jsonl -m bloom-tiny -O kv_attention=cpu,gpu", 2, "axes belong to"),
        ("batch p.jsonl -o o.jsonl -m bloom-tiny --offload none --gpu-weights 9%", 2, "leave out"),
        ("batch p.jsonl -o p.jsonl -m bloom-tiny --load-format dummy", 2, "--output p.jsonl is"),
        ("batch empty.jsonl -o o.jsonl -m bloom-tiny", 2, "holds no request"),
        ("batch bad.jsonl -o o.jsonl -m bloom-tiny --load-format dummy", 4, "0 answers and 2 errors"),
        ("batch p.jsonl -o o.jsonl -m bloom-176b --load-format dummy", 5, "of host memory"),
        ("serve -m bloom-tiny", 2, "--load-format dummy"),
        ("serve -m bloom-tiny --load-format dummy --host no.such.host.invalid", 5, "--host no.such.host.invalid"),
        ("serve -m bloom-tiny --load-format dummy --host 127.0.0.1 --port PORT", 5, "Address already in use"),
        ("serve -m bloom-tiny --load-format dummy --api-key é", 2, "printable ASCII"),
        ("plot", 4, "sweeps/results"),
        ("swep", 2, "did you mean 'sweep'?"),
        ("sweep -m bloom-tiny --engine strem", 2, "?; choose from stream, deepspeed, accelerate"),
        ("sweep -m bloom-tiny -O wieght_codec=none", 2, "did you mean 'weight_codec'?"),
        ("plan --list machines h300", 2, "no machine 'h300'"),
        ("plan -m bloom-176b --machine mi300", 2, "did you mean 'mi300x'"),
        ("plan -m blom-176b --machine h200", 2, "did you mean 'bloom-176b'"),
        ("run -m ./nope -p x", 2, "no such folder: ./nope"),
    ],
)
def test_mistakes_get_one_message_and_a_code(folder: Path, words: str, code: int, message: str) -> None:
    for file, content in PROMPTS.items():
        (folder / file).write_text(content)
    with listen("127.0.0.1", 0) as taken:
        told(zinfer(folder, *shlex.split(words.replace("PORT", str(taken.getsockname()[1])))), code, message)
    assert {file: (folder / file).read_text() for file in PROMPTS} == PROMPTS


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")],
)
def test_a_command_without_memory_says_so(error: Exception, folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("zinfer.cli.cli.main", Mock(side_effect=error))
    done = zinfer(folder)
    assert (done.returncode, done.stderr) == (5, "Error: host memory ran out\n")


@pytest.mark.parametrize("words", [["sweep"], pytest.param(["run", "-p", "x"], marks=pytest.mark.slow)])
def test_a_model_that_cannot_be_found_is_one_line(folder: Path, words: list[str]) -> None:
    """Runs in a new process: huggingface_hub reads the environment at import."""
    told(zinfer_process(folder, *words, "-m", "someone/some-model"), 5, "someone/some-model")


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["run", "--max-new-tokens", "5"], ": here it is --max-tokens"),
        (["serve", "--tensor-parallel-size=2"], ": here it is --gpus"),
        (["batch", "--max-num-seqs", "5"], ": here it is --batch-size"),
        (["sweep", "--max-concurrency", "5"], ": here it is --concurrency"),
        (["serve", "--served-model-nam", "x"], ". Did you mean '--served-model-name'?"),
    ],
)  # fmt: skip
def test_options_of_other_programs_are_told_as_ours(words: list[str], ours: str, folder: Path) -> None:
    result = zinfer(folder, *words)
    assert result.returncode == 2
    assert f"No such option '{words[1].split('=')[0]}'{ours}" in result.stderr


def verbs() -> dict[str, click.Command]:
    """Return every command by its words."""
    commands = {verb: import_module(f"zinfer.commands.{verb}").command for verb in VERBS}
    kinds = {f"study {name}": kind for name, kind in commands["study"].commands.items()}
    return {verb: command for verb, command in (commands | kinds).items() if not isinstance(command, click.Group)}


@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_of_a_verb_shows_each_option_once_in_groups_and_is_short(folder: Path, columns: str) -> None:
    for verb, command in verbs().items():
        text = zinfer(folder, *verb.split(), "--help", COLUMNS=columns).stdout
        assert text.count("\n") <= 100, verb
        names = [word for param in command.params for word in param.opts if word.startswith("--")]
        options = re.split(r"^[A-Z]\w*:$", text, maxsplit=1, flags=re.MULTILINE)[1]
        shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)(?:, (--[\w-]+))?", options, re.MULTILINE)
        assert sorted(filter(None, sum(shown, ()))) == sorted([*names, "--help"]), verb
    groups = re.findall(r"^(\w+):$", zinfer(folder, "run", "--help").stdout, re.MULTILINE)
    assert groups == ["Model", "Workload", "Sampling", "Placement", "Other"]


def test_tables_of_options_name_those_of_some_verb() -> None:
    every = [param for command in verbs().values() for param in command.params]
    assert {name for names in GROUPS.values() for name in names.split()} <= {str(param.name) for param in every}
    ours = {word for param in every for word in param.opts}
    assert {*FOREIGN_OPTIONS.values()} <= ours
    assert not ours & FOREIGN_OPTIONS.keys()


def test_a_model_may_stand_without_its_option(folder: Path, checkpoint: Checkpoints) -> None:
    model = str(checkpoint("llama"))
    more = ["--offload", "cpu", "--prompt", "ab", "--ignore-eos", "--json"]
    long, short = (
        zinfer(folder, "run", *words, *more)
        for words in (["--model", model, "--output-len", "3"], [model, "--max-tokens", "3"])
    )
    answers = [json.loads(run.stdout)[0]["output_ids"] for run in (long, short)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    for words in ([], [model, "-m", model]):
        refused = zinfer(folder, "run", *words, *more)
        assert (refused.returncode, "name one model" in refused.stderr) == (2, True)
    assert zinfer(folder, "plan", model).stdout == (plan := zinfer(folder, "plan", "-m", model)).stdout
    assert (plan.returncode, "stream cpu" in plan.stdout) == (0, True), plan.stderr
    assert "name one model" in zinfer(folder, "pack").stderr
    lengths = ["--offload", "cpu", "--request-lengths", "fixed:9,9", "--concurrency", "2,4", "--dry-run"]
    planned = zinfer(folder, "sweep", model, *lengths)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout == zinfer(folder, "sweep", "-m", model, *lengths).stdout
    assert all(f"{number} in flight" in planned.stdout for number in (2, 4))


def test_debug_shows_the_traceback(folder: Path) -> None:
    assert "Traceback" in zinfer_process(folder, "--debug", "sweep", "-m", "bloom-177b").stderr


@pytest.mark.torch
def test_sweep_to_best_and_back(folder: Path) -> None:
    """Measure, refuse to overwrite, resume, compare, plot and decide. The resumption measures no new points."""
    words = ["sweep", *TINY, "--offload", "cpu", "--batch-size", "1,2"]
    first = zinfer(folder, *words)
    assert first.returncode == 0, first.stderr
    path = folder / first.stdout.strip()
    assert path == folder / "sweeps" / "results" / slug() / "bloom-tiny.jsonl"
    assert [p.status for p in read(path).points] == ["ok"] * 2
    assert len(read(path).headers) == 1
    assert len(re.findall(r"^loaded .* [GM]B\b.* [GM]B/s$", first.stderr, re.MULTILINE)) == 1

    again = zinfer(folder, *words)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    resumed = zinfer(folder, *words, "--resume")
    assert resumed.returncode == 0
    assert resumed.stderr.count("[recorded]") == 2
    assert len(read(path).points) == 2

    changed = zinfer(folder, *words[:-1], "1,2,4", "--resume")
    assert changed.returncode == 6
    assert mentions(changed.stderr, "recipe.batch_size", "[1, 2]", "[1, 2, 4]")
    forced = zinfer(folder, *words[:-1], "1,2,4", "--resume", "--force")
    assert forced.returncode == 0
    assert len(read(path).points) == 3

    (best,) = json.loads(zinfer(folder, "best", "--json").stdout)
    assert best["best"]["command"].startswith("zinfer sweep --model bloom-tiny ")
    drawn = zinfer(folder, "plot")
    assert drawn.returncode == 0
    assert all((folder / line).is_file() for line in drawn.stdout.split())
    figures = {Path(line).stem.removeprefix("bloom-tiny-") for line in drawn.stdout.split()}
    assert figures == {"throughput", "latency", "timeline"}
    report = zinfer(folder, "report")
    assert report.returncode == 0, report.stderr


def test_an_old_file_without_a_setting_has_its_default() -> None:
    recipes = (Sweep(model=("a",)), Sweep(model=("a",), gpu_weights=("50%",)))
    new, other = (Header(machine="m", recipe=recipe.model_dump(mode="json")) for recipe in recipes)
    old = new.model_copy(update={"recipe": {k: v for k, v in new.recipe.items() if k != "gpu_weights"}})
    _check_settings(Path("out.jsonl"), Records(headers=(old,)), new, force=False)
    with pytest.raises(click.ClickException, match=r"recipe.gpu_weights: \[None\] -> \['50%'\]"):
        _check_settings(Path("out.jsonl"), Records(headers=(old,)), other, force=False)


@pytest.mark.parametrize(
    ("seconds", "yes", "terminal", "asks"),
    [(7200, False, True, True), (7200, True, True, False), (3000, False, True, False), (None, False, True, False),
     (7200, False, False, False)],
)  # fmt: skip
def test_a_sweep_of_more_than_an_hour_asks_first_on_a_terminal(
    seconds: float | None, yes: bool, terminal: bool, asks: bool, monkeypatch: Patch
) -> None:
    kind = type("Stream", (io.StringIO,), {"isatty": lambda _self: terminal})
    monkeypatch.setattr("sys.stdin", kind("n\n"))
    monkeypatch.setattr("sys.stderr", err := kind())
    with pytest.raises(click.Abort) if asks else nullcontext():
        line = _announce(Sweep(model=("m",)), Outlook(0, 9, False, seconds), yes)
        assert mentions(line, "9 points", "at most 15 minutes")
    assert ("Begin?" in err.getvalue()) == asks


def test_a_sweep_of_a_model_alone_measures_what_decides(folder: Path) -> None:
    result = zinfer(folder, "sweep", "--model", "bloom-tiny", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    cases = [plan["case"] for plan in json.loads(result.stdout)]
    peer = "deepspeed" if find_spec("deepspeed") else "accelerate"
    loads = dict.fromkeys((case["engine"], case["offload"]) for case in cases)
    assert [*loads] == [("stream", "none"), ("stream", "cpu"), ("accelerate", "none"), (peer, "cpu")]
    for load in loads:
        sizes = [case["workload"]["batch_size"] for case in cases if (case["engine"], case["offload"]) == load]
        assert sizes[:3] == [1, 8, 16]


def test_dry_run_loads_nothing(folder: Path) -> None:
    result = zinfer(folder, "sweep", *TINY, "--batch-size", "1,8", "--dry-run")
    assert result.returncode == 0
    *lines, last = result.stdout.splitlines()
    assert len(lines) == 4
    assert mentions(last, "2 loads", "not known", "4 points", "at most 15 minutes"), "its matmul rate is not known"
    assert not list(folder.rglob("*.jsonl"))


@pytest.mark.torch
def test_a_full_disk_keeps_what_was_measured(folder: Path) -> None:
    words = ["sweep", *TINY, "--offload", "none", "--batch-size", "1,2,4,8", "-o", "r.jsonl"]
    with small_files(2500):
        result = zinfer(folder, *words)
    assert result.returncode == 5, result.stderr
    assert "Traceback" not in result.stderr
    kept = read(folder / "r.jsonl")
    assert not kept.damaged
    assert 0 < len(kept.points) < 4
    assert zinfer(folder, *words, "--resume").returncode == 0
    assert [p.case.workload.batch_size for p in read(folder / "r.jsonl").points] == [1, 2, 4, 8]


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_keeps_everything_and_says_how_to_go_on(folder: Path, number: int) -> None:
    words = ["sweep", *TINY, "--offload", "none", "--batch-size", "1-4096*2", "-o", "r.jsonl"]
    process, path = started(folder, *words), folder / "r.jsonl"
    wait(lambda: path.is_file() and read(path).points)
    assert "--resume" in interrupted(process, number)
    statuses = [point.status for point in read(path).points]
    assert statuses[-1] == "cancelled"
    assert set(statuses[:-1]) == {"ok"}


def test_a_second_sweep_on_the_same_file_waits_for_nobody(folder: Path) -> None:
    with Store(folder / "r.jsonl"):
        result = zinfer(folder, "sweep", *TINY, "--offload", "none", "--batch-size", "1", "-o", "r.jsonl")
    told(result, 5, lines=2)


@pytest.mark.parametrize(("pickled", "message"), [(False, "is missing"), (True, "is pickled and is not read")])
def test_spoilt_checkpoints_are_refused(folder: Path, checkpoint: Checkpoints, pickled: bool, message: str) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), folder / "model"))
    sorted(directory.glob("*.safetensors"))[0].unlink()
    if pickled:
        for path in [*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"]:
            path.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for words in (["sweep", "-m", "model"], ["run", "-m", "model", "-p", "x"]):
        told(zinfer(folder, *words), 2, message)


def test_prompts_come_from_options_files_and_stdin(folder: Path, checkpoint: Checkpoints) -> None:
    (folder / "prompts.txt").write_text("second\n\nthird\n")
    words = ["run", "-m", str(checkpoint("llama")), "--offload", "cpu", "--output-len", "3", "--json"]
    result = zinfer(folder, *words, "-p", "first", "--prompt-file", "prompts.txt")
    assert result.returncode == 0, result.stderr
    assert [text["prompt"] for text in json.loads(result.stdout)] == ["first", "second", "third"]
    assert re.search(r"tok/s \(prompts .* tok/s, generation .* tok/s, median TTFT .*s\)", result.stderr)
    piped = zinfer(folder, *words, stdin="fourth\n")
    (answer,) = json.loads(piped.stdout)
    rates = {"prompt_tokens", "prompt_tok_s", "ttft_s", "decode_tok_s"}
    assert answer.keys() == {"prompt", "output_ids", "output_text", "finish_reason"} | rates
    assert answer["prompt"] == "fourth"
    assert all(answer[name] > 0 for name in rates)
