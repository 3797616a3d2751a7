"""Commands under test, on tiny models in float32 on the CPU."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tools.campaign.lab import Lab, Room, Verb, contents
from tools.campaign.subject import Ended
from zinfer.core.machine import Machine
from zinfer.job.sweep import FINAL
from zinfer.record import study
from zinfer.record.store import StoreError, read
from zinfer.system.host import slug

ON_MODEL = ("-m", "MODEL", "--dtype", "float32")
SWEEP = (
    "sweep", *ON_MODEL, "--offload", "none,cpu", "--batch-size", "1,2,3", "--input-len", "8", "--output-len", "4",
    "--repeats", "1", "-o", "r.jsonl",
)  # fmt: skip
TURNS = "Hello there\nAnd again\nthird\n"
PAGE = "reports/page"


def requests(count: int, seed: int = 0) -> str:
    """Return `count` lines of a batch job: short ones and long ones, greedy and sampled."""
    lines = []
    for number in range(count):
        body = {"prompt": "abcdefghij"[: number % 7 + 1] * (1 + number % 3), "max_tokens": 3 + 5 * number % 29}
        body |= {"temperature": 0.0 if number % 2 else 0.8, "seed": number + seed}
        lines.append({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _sweep(room: Room, _ended: Ended) -> Counter[str]:
    """Return how often each point was measured."""
    path = room.work / "r.jsonl"
    points = [point for point in read(path).points if point.status in FINAL] if path.is_file() else []
    return Counter(f"{point.case.label()} batch {point.case.workload.batch_size}: {point.status}" for point in points)


def _batch(room: Room, _ended: Ended) -> dict[str, list[str]]:
    """Return the texts that a batch output has for each id."""
    path, texts = room.work / "out.jsonl", defaultdict[str, list[str]](list)
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            body = record["response"]["body"]
            choices = [choice.get("text") for choice in body["choices"]]
            texts[record["custom_id"]].append(json.dumps([choices, body["usage"], record["error"]]))
        except (ValueError, TypeError, KeyError):
            texts["a line that is no answer"].append(repr(line[:80]))
    return dict(texts)


def _texts(_room: Room, ended: Ended) -> Any:
    """Token ids of `zinfer run`, or of each line of a conversation."""
    texts = [ended.stdout] if ended.stdout.startswith("[") else ended.stdout.splitlines()
    try:
        answers = [json.loads(text) for text in texts]
        return [answer["output_ids"] for answer in (answers[0] if ended.stdout.startswith("[") else answers)]
    except (ValueError, TypeError, KeyError):
        return f"no JSON: {ended.stdout[:200]}"


def _stdout(_room: Room, ended: Ended) -> str:
    return ended.stdout


def _files(pattern: str) -> Callable[[Room, Ended], dict[str, bytes]]:
    return lambda room, _ended: contents(room.work, pattern)


def _machine(room: Room, _ended: Ended) -> list[str]:
    """Names of the figures that a probe measured."""
    path = room.work / "probed.json"
    try:
        return sorted(name for name, value in json.loads(path.read_bytes()).items() if value is not None)
    except (OSError, ValueError) as error:
        return [f"no machine: {error}"]


def is_machine(content: bytes) -> bool:
    try:
        return bool(Machine.model_validate_json(content).source)
    except ValueError:
        return False


def _reuse(room: Room, _ended: Ended) -> Any:
    """Number of contexts of the last run that were measured."""
    try:
        points = study.last(room.work / "reuse.jsonl", "reuse").of(study.Reload)
    except StoreError as error:
        return str(error)
    return [[bool(point.recompute_ms), point.same_token] for point in points]


def _accuracy(room: Room, _ended: Ended) -> Any:
    """Deviations of the last run, to six digits."""
    try:
        rows = study.last(room.work / "accuracy.jsonl", "accuracy").of(study.Deviation)
    except StoreError as error:
        return str(error)
    return [[row.case.label(), row.along, row.rows, f"{row.error:.6g}", f"{row.kl:.6g}"] for row in rows]


DAMAGED = "*.damaged"
VERBS = {
    verb.name: verb
    for verb in (
        Verb("probe", ("probe", "--quick", "--force", "--nvme-path", "DRIVE", "-o", "probed.json"), _machine,
             at_once=("probed.json",), good=is_machine),
        Verb("sweep", SWEEP, _sweep, again=("--resume",), grows=("r.jsonl",), keeps=(DAMAGED,), chain=4),
        Verb("run", ("run", *ON_MODEL, "--offload", "none", "-p", "Hello", "-p", "abc", "--output-len", "24",
                     "--ignore-eos", "--json"), _texts),
        Verb("run-nvme", ("run", *ON_MODEL, "--engine", "accelerate", "--offload", "nvme", "--nvme-path", "DRIVE", "-p",
                          "Hello", "--output-len", "8", "--ignore-eos", "--json"), _texts),
        Verb("batch", ("batch", "requests.jsonl", "-o", "out.jsonl", *ON_MODEL, "--offload", "none", "--batch-size",
                       "4"), _batch, grows=("out.jsonl",), chain=4, keeps=(DAMAGED,)),
        Verb("chat", ("run", *ON_MODEL, "--offload", "none", "--chat", "--json", "--output-len", "16", "--ignore-eos"),
             _texts, stdin=TURNS),
        Verb("pack", ("pack", *ON_MODEL), _files("engines/packed/**/*"), at_once=("engines/packed/*/*",)),
        Verb("plot", ("plot", "results.jsonl", "--format", "svg", "-o", "figures", "--figure", "throughput,latency"),
             _files("figures/**/*"), at_once=("figures/**/*.svg",), replaces=True),
        Verb("report", ("report", "results.jsonl", "-o", f"{PAGE}.html"), _files("reports/*"),
             at_once=("reports/*",), replaces=True),
        Verb("export", ("export", "results.jsonl", "-o", "table.csv"), _files("table.csv"),
             at_once=("table.csv",), replaces=True),
        Verb("reuse", ("study", "reuse", *ON_MODEL, "--offload", "cpu", "--context", "16,32", "--new-tokens", "4",
                       "--repeats", "1", "-o", "reuse.jsonl"), _reuse,
             grows=("reuse.jsonl",), keeps=(DAMAGED,)),
        Verb("accuracy", ("study", "accuracy", *ON_MODEL, "--offload", "cpu", "--kv-cache-dtype", "int8",
                          "--input-len", "16", "--output-len", "4", "--samples", "2", "--batch-size", "2",
                          "--prompt-file", "book.txt", "-o", "accuracy.jsonl"), _accuracy, grows=("accuracy.jsonl",),
             keeps=(DAMAGED,)),
        Verb("plan", ("plan", *ON_MODEL, "--batch-size", "1,2"), _stdout),
        Verb("best", ("best", "results.jsonl"), _stdout),
        Verb("ranks", ("run", *ON_MODEL, "--gpus", "2", "--offload", "cpu", "-p", "Hello", "-p", "abc", "--output-len",
                       "24", "--ignore-eos", "--json"), _texts),
        Verb("compare", ("compare", "before.jsonl", "results.jsonl"), _stdout),
    )
}  # fmt: skip


def furnish(lab: Lab) -> None:
    """Make the model and the user's folder."""
    from tests.checkpoints import save_checkpoint

    save_checkpoint("llama", lab.model, 32)
    bench = lab.bench
    machine = Machine(
        name=slug(), source="measured", host_bytes=8 << 30, h2d_bandwidth=8e9, d2h_bandwidth=8e9, hbm_bandwidth=16e9,
        host_bandwidth=16e9, attention_bandwidth=4e9, matmul_flops=1e11, nvme_bandwidth=1e9, nvme_bytes=64 << 30,
    )  # fmt: skip
    home = bench / "sweeps" / "results" / slug()
    home.mkdir(parents=True)
    (home / "machine.json").write_text(machine.model_dump_json())
    (bench / "requests.jsonl").write_text(requests(24))
    (bench / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 30)
    with Room(lab, "furnish") as room:
        ended = room.run([word if word != "r.jsonl" else "results.jsonl" for word in SWEEP])
        if ended.code != 0:
            raise RuntimeError(f"no results to work with: {ended.output}")
        for name in ("results.jsonl", "before.jsonl"):
            shutil.copy(room.work / "results.jsonl", bench / name)
        room.run(VERBS["probe"].words)  # which compiles what attends on the CPU, once for all
        if (cache := room.root / "home" / ".cache").is_dir():
            shutil.copytree(cache, lab.root / "cache")
