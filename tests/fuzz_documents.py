"""Trials with damaged recipes, machines, records, requests, prompts and options.

A trial is a kind and a seed: `trial` damages a file or an option, runs the verb that reads it as a user would, and
returns what came of it. `Outcome.fault` says what was wrong, if anything: an internal error, a traceback, more than a
few lines, a harmful character in what was printed, or more time than a second.
"""

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from tests.command import probed
from tests.damage_documents import NASTY, damaged, toml, torn
from tests.results import accuracy_run, codec_run, kept_point, point, request_point, reuse_run, sweep, traced
from zinfer.cli import main
from zinfer.record import study
from zinfer.record.jsonl import finite, seal
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestPoint
from zinfer.record.store import Header, encode
from zinfer.system.printable import printable

SECONDS = 3.0  # of CPU time, for a verb that does little else; the search of a plan takes about one
DRAWING_S = 8.0  # of CPU time, for one that draws figures

RECIPE: dict[str, Any] = {
    "description": "A sweep", "model": ["bloom-tiny", "opt-30b"], "engine": ["stream", "accelerate"],
    "offload": ["none", "cpu"], "batch_size": [1, 8], "input_len": [64], "output_len": [16], "dtype": "bfloat16",
    "load_format": "dummy", "layers": [4], "gpu_weights": ["25%", "1GiB"], "options": {"weight_codec": ["none"]},
    "request_lengths": ["lognormal:24,6,sigma=0.8"], "num_requests": 9, "in_flight": [2, "auto"], "request_rate": [1.5],
    "seed": 1, "sla": ["ttft:p99:<=:2s"], "rounds": 2, "machine": ["h100-80gb"],
    "repeats": 3, "tolerance": 0.02, "timeout_s": 60.0,
}  # fmt: skip
REQUEST: dict[str, Any] = {
    "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0.5, "top_p": 1,
             "seed": 3, "stop": ["x"], "n": 1, "logit_bias": {}},
}  # fmt: skip
OPTIONS = {
    "sweep": ["--batch-size", "--input-len", "--output-len", "--layers", "--repeats", "--timeout", "--gpu-weights",
              "-O", "--dtype", "-m", "--engine", "--requests", "--request-lengths", "--num-requests", "--in-flight",
              "--request-rate", "--seed", "--sla", "--rounds"],
    "plan": ["--batch-size", "--input-len", "--output-len", "--layers", "--gpus", "--set", "--gpu-weights",
             "--weights", "--machine", "-m", "--engine", "--offload", "--calibrate", "--sla",
             "--price", "--host-memory", "--prompts"],
    "best": ["--sla", "--demand", "--deadline", "--gpu-hour-usd", "--utilisation", "--spare",
             "--model", "--machine", "--objective"],
    "compare": ["--metric", "--fail-on-regression", "--across"],
    "run": ["--batch-size", "--output-len", "--temperature", "--top-p", "--seed", "--kv-cache-size", "--prompt-file",
            "--timeout", "-O", "--layers", "-m"],
    "batch": ["--batch-size", "--output-len", "--timeout", "-O", "-m"],
    "study reuse": ["--context", "--new-tokens", "--repeats", "--timeout", "-O", "-m"],
    "study accuracy": ["--samples", "--batch-size", "--input-len", "--output-len", "--prompt-file"],
    "export": ["--format", "--output"], "plot": ["--format"],
}  # fmt: skip
TYPED = (
    "0", "-1", "1e400", "nan", "inf", "-inf", "9" * 5000, "1-1000000000+1", "1-9999999999*2", "1,2,x", "1e400GB",
    ",", "", " ", "\udcff", "a" * 200_000, "1-5+0", "auto*999999", "0x10", "1_000", "٣", "5%", "1e309%", "nan%", "²",
    "h2d_bandwidth=1e400GB/s", "h2d_bandwidth=nan", "gpu_bytes=0", "host_bytes=-1", "gpus=99999999999999999999",
    "gpus=1e400", "weight_codec=", "=", "packed=" + "a" * 300, "ttft:p99:<=:1e400s", "ttft:p99:<=:0s",
    "output_tok_s:mean:>=:" + "9" * 400, "9e999tok/day", "9" * 400 + "tok/day", "9" * 400 + "h", "./" + "a" * 300,
    "h200=nan", "a/b", "/dev/zero", "/proc/self/mem", "/dev/stdin", ",".join(map(str, range(1, 2000))), *NASTY,
)  # fmt: skip


class Outcome(NamedTuple):
    """End of one trial: exit code, what was printed, and the CPU time of the verb."""

    kind: str
    seed: int
    words: list[str]
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """Reason why the trial did not hold; None if it did."""
        limit = DRAWING_S if self.words[0] in ("plot", "report") else SECONDS
        if self.code == 1 or "Internal error" in self.stderr:
            return f"internal: {self.stderr[-300:]}"
        if "Traceback" in self.stderr:
            return "a traceback"
        if self.code and not self.stderr and self.words[0] != "best":
            return f"exit code {self.code} without a word"
        if len(self.stderr) > 20_000:
            return f"{len(self.stderr):,} characters on stderr"
        if self.stdout + self.stderr != printable(self.stdout + self.stderr):
            return "a harmful character was printed"
        return f"{self.seconds:.1f} s" if self.seconds > limit else None


def run(words: list[str], stdin: bytes = b"", encoding: str = "utf-8") -> tuple[int, str, str, float]:
    """Run the `zinfer` console script in this process; return exit code, stdout, stderr and seconds of CPU time."""
    printed, errors, code = io.BytesIO(), io.BytesIO(), 0
    out, err = (io.TextIOWrapper(pipe, encoding=encoding, write_through=True) for pipe in (printed, errors))
    source = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with mock.patch.multiple(sys, argv=["zinfer", *words], stdin=source, stdout=out, stderr=err):
        began = time.process_time()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        seconds = time.process_time() - began
    stdout, stderr = (pipe.getvalue().decode(encoding, "replace") for pipe in (printed, errors))
    return code, stdout, stderr, seconds


def prepare(folder: Path) -> None:
    """Make `folder` that of a user whose machine was probed."""
    probed(folder)
    (folder / "engines").mkdir(exist_ok=True)


def _recipe(dice: Random) -> list[str]:
    content = toml(damaged(dice, RECIPE, dice.randrange(1, 4)))
    Path("sweeps/x.toml").write_bytes(torn(dice, content) if dice.random() < 0.4 else content)
    return dice.choice((["plan", "x"], ["plan", "x", "--kv-offload", "cpu"], ["sweep", "x", "--dry-run", "-O", "a=1"]))


def _engine(dice: Random) -> list[str]:
    tree = {"engine": "stream", "description": "d", "options": {"kv_offload": "cpu", "gpus": 4, "packed": "p"}}
    content = toml(damaged(dice, tree, dice.randrange(1, 3)))
    Path("engines/mine.toml").write_bytes(torn(dice, content) if dice.random() < 0.4 else content)
    return ["plan", "-m", "bloom-tiny", "--engine", "mine", "--machine", "h200"]


def _machine(dice: Random) -> list[str]:
    tree = {
        "name": "m", "source": "measured", "gpu_name": "g", "gpu_count": 1, "gpu_bytes": 80 << 30,
        "host_bytes": 500 << 30, "h2d_bandwidth": 5e10, "d2h_bandwidth": 5e10, "hbm_bandwidth": 3e12,
        "duplex_bandwidth": 4e10, "links_bandwidth": 9e10, "gather_bandwidth": 3e11,
        "host_bandwidth": 2e11, "attention_bandwidth": 1e11, "matmul_flops": 7e14,
        "grouped_attention_bandwidth": 1e11, "shared_attention_bandwidth": 8e10, "shared_h2d_bandwidth": 4e10,
        "note": "n", "sources": {"h2d_bandwidth": "s"}, "details": {"host": {"cores": 16}, "gpu": {"driver": "1"}},
    }  # fmt: skip
    content = json.dumps(damaged(dice, tree, dice.randrange(1, 3))).encode()
    Path("machine.json").write_bytes(torn(dice, content) if dice.random() < 0.3 else content)
    return ["plan", "-m", "opt-30b", "--machine", "machine.json", *dice.choice(([], ["--kv-offload", "cpu", "--json"]))]


def _sealed_again(dice: Random, line: bytes) -> bytes:
    """Return a record with other values and a right checksum: only its values can betray it."""
    fields = json.loads(line)
    fields.pop("checksum")
    for _ in range(9):
        try:
            return seal("", damaged(dice, fields, dice.randrange(1, 3)))
        except (ValueError, TypeError, OverflowError, RecursionError, UnicodeEncodeError):
            continue
    return line


def _records(dice: Random) -> list[str]:
    points: list[Measurement | RequestPoint] = [request_point(), *sweep()[::4]]
    points += [point(sweep()[2].case, timeline=traced(), gpu={"energy_j": 9.0, "throttle_reasons": []})]
    lines = [encode(Header(machine="h100", recipe={"model": ["m"], "batch_size": [1]})), *map(encode, points)]
    for nth in range(len(lines)):
        if dice.random() < 0.5:
            lines[nth] = _sealed_again(dice, lines[nth])
    content = b"".join(line + b"\n" for line in lines)
    Path("mine.jsonl").write_bytes(torn(dice, content) if dice.random() < 0.2 else content)
    Path("other.jsonl").write_bytes(b"".join(encode(point) + b"\n" for point in points))
    prices = ["--gpu-hour-usd", "2", "--demand", "2Mtok/day", "--sla", "ttft:p99:<=:9s"]
    return dice.choice(
        (
            ["best", "mine.jsonl"], ["best", "mine.jsonl", "--json", "--objective", "latency"],
            ["best", "mine.jsonl", *prices], ["compare", "mine.jsonl", "other.jsonl"],
            ["compare", "other.jsonl", "mine.jsonl", "--metric", "ttft_ms", "--across", "options"],
            ["export", "mine.jsonl", "--format", dice.choice(("csv", "json"))],
            ["export", "mine.jsonl", "--format", dice.choice(("csv", "json")), "--requests"],
            ["plan", "-m", "opt-30b", "--machine", "h200", "--calibrate", "mine.jsonl"],
        )
    )  # fmt: skip


def _drawn(dice: Random) -> list[str]:
    _records(dice)
    return _shown(dice, "mine.jsonl")


def _shown(dice: Random, results: str) -> list[str]:
    return dice.choice((["plot", results, "-o", "drawn"], ["report", results, "-o", "drawn.html"]))


def _studies(dice: Random) -> list[str]:
    reuse = reuse_run(kept_point(1024, 90.0, 50.0), kept_point(4096, 300.0, 60.0))
    folder = Path("studies")
    folder.mkdir(exist_ok=True)
    (folder / "s.jsonl").write_bytes(b"".join(encode(record) + b"\n" for record in sweep()[:3]))
    for run in (codec_run("a", "b"), accuracy_run(), reuse):
        line = seal(study.KIND, finite(run.model_dump()))
        content = (_sealed_again(dice, line) if dice.random() < 0.5 else line) + b"\n"
        if dice.random() < 0.3:
            content = json.dumps(damaged(dice, json.loads(run.model_dump_json()), 2)).encode()
        (folder / f"{run.study}.jsonl").write_bytes(torn(dice, content) if dice.random() < 0.2 else content)
    return _shown(dice, "studies")


def _options(dice: Random) -> list[str]:
    Path("a.jsonl").write_bytes(b"".join(encode(record) + b"\n" for record in sweep()[:6]))
    Path("prompts.txt").write_bytes(b"one\ntwo\n")
    verb = dice.choice(list(OPTIONS))
    begun = {
        "sweep": ["-m", "bloom-tiny", "--dry-run"], "plan": ["-m", "bloom-tiny", "--machine", "h200"],
        "best": ["a.jsonl"], "compare": ["a.jsonl", "a.jsonl"], "run": ["-m", "no-such-model", "-p", "x"],
        "batch": ["prompts.txt", "-o", "o.jsonl", "-m", "no-such-model"], "study reuse": ["-m", "no-such-model"],
        "study accuracy": ["-m", "no-such-model", "--kv-cache-dtype", "int8"], "export": ["a.jsonl"],
        "plot": ["a.jsonl"],
    }[verb]  # fmt: skip
    words = [*verb.split(), *begun]
    for option in dice.sample(OPTIONS[verb], min(len(OPTIONS[verb]), dice.randrange(1, 3))):
        words += [option, dice.choice(TYPED)]
    return [*words, dice.choice(TYPED)] if dice.random() < 0.1 else words


def _request_file(dice: Random) -> list[str]:
    lengths = [json.dumps(damaged(dice, {"input_len": 8, "output_len": 4}, dice.randrange(2))) for _ in range(4)]
    content = "\n".join(lengths).encode("utf-8", "surrogatepass")
    content = content if dice.random() < 0.5 else requests(dice.randrange(999))
    Path("requests.jsonl").write_bytes(torn(dice, content) if dice.random() < 0.3 else content)
    return ["sweep", "-m", "bloom-tiny", "--requests", "requests.jsonl", "--dry-run"]


def _prompts(dice: Random) -> list[str]:
    Path("prompts.txt").write_bytes(torn(dice, b"first prompt\nsecond\n\nthird\r\n"))
    return ["run", "-m", "no-such-model", "--prompt-file", "prompts.txt"]


KINDS: dict[str, Callable[[Random], list[str]]] = {
    "recipe": _recipe, "engine recipe": _engine, "machine.json": _machine, "records": _records, "options": _options,
    "prompts": _prompts, "request files": _request_file, "figures and reports": _drawn, "studies": _studies,
}  # fmt: skip
# kinds that draw no figure
QUICK = ("recipe", "engine recipe", "machine.json", "records", "options", "prompts", "request files")


def trial(kind: str, seed: int) -> Outcome:
    """Run one trial in the current folder, which `prepare` has prepared."""
    words = KINDS[kind](Random(f"{kind} {seed}"))
    first = Outcome(kind, seed, words, *run(words))
    if first.fault is None or first.seconds <= SECONDS:
        return first
    return Outcome(kind, seed, words, *run(words))  # the first one may have imported what a process imports once


def requests(seed: int) -> bytes:
    """Return a damaged file of batch requests."""
    dice = Random(f"requests {seed}")
    lines = []
    for nth in range(3):
        tree = damaged(dice, REQUEST | {"custom_id": f"r{nth}"}, dice.randrange(0, 3))
        line = json.dumps(tree, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
        lines.append(torn(dice, line) if dice.random() < 0.3 else line)
    return b"\n".join(lines)
