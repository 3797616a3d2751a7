"""Record of a campaign: what was tried, what held, for each class; and the table of docs/reliability.md."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tools import pages
from tools.campaign.lab import Result
from zinfer.core.value import Frozen, group_by
from zinfer.record.jsonl import read_lines
from zinfer.record.study import Start, parse_runs
from zinfer.system.host import cpu_model
from zinfer.worker.process import study_header

RECORD = Path("sweeps/results/reliability.jsonl")
FAULTS = 20  # faults that a record keeps for each class
TITLES = {
    "kill": "Killed, then started again",
    "disk-full": "The disk is full, at a random byte",
    "size-limit": "Files may not grow beyond a limit",
    "dev-full": "stdout is full",
    "read-only": "Folders become read-only",
    "vanish": "The folder vanishes",
    "io-error": "Reads and writes fail (EIO)",
    "sync": "Order of writes and syncs, for a power cut",
    "memory": "Host memory runs out",
    "two-jobs": "Two jobs on one file",
    "checkpoint": "Damaged checkpoints",
    "record": "Damaged records",
    "request": "Damaged requests",
    "recipe": "Damaged recipes",
    "machine": "Damaged machine.json",
    "option": "Damaged options",
    "kv": "Damaged kept KV caches",
    "packed": "Damaged packed layers",
    "escape": "Escape sequences in names and text",
    "kill-ranks": "`zinfer run --gpus 2`, a rank of it too, killed, then started again",
    "kill-cluster": "`zinfer sweep --cluster local`, a job of it too, killed, then started again",
    "kill-ray": "`zinfer batch --ray`, a shard of it too, killed, then started again",
    "serve-kill": "`zinfer serve` or its worker killed under a load",
    "serve-crowd": "`zinfer serve` among slow, idle, silent and lost clients",
    "weights": "Weights of a checkpoint changed under records, caches, packed layers or a server",
    "serve-greedy": "`zinfer serve` beside a client of costly requests",
}
COLUMNS = ("disturbance", "#cases", "#struck", "#held", "#failed")


class Row(Frozen):
    """Counts of one class; `blind`, in earlier records, are damages that no reader can tell from data."""

    name: str
    tried: int
    held: int
    struck: int
    skipped: int = 0
    blind: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


class Campaign(Start):
    """One campaign, in a file as `zinfer.record.study` writes them."""

    study: Literal["reliability"] = "reliability"
    device: str
    seed: int
    seconds: float
    planned: int = 0  # cases, those that were not begun or not ended included; 0 is not known
    rows: tuple[Row, ...]

    @property
    def left(self) -> int:
        """Number of planned cases that did not end in time."""
        return max(0, self.planned - sum(row.tried + row.skipped for row in self.rows))

    @classmethod
    def of(cls, results: Iterable[Result], seed: int, seconds: float, planned: int = 0) -> "Campaign":
        """Return the record of `results`, counted by class."""
        rows = []
        for name, every in group_by(results, lambda result: result.name).items():
            tried = [result for result in every if not (result.skipped and result.held)]
            faults = [f"{result.number}: {fault}" for result in tried for fault in result.faults[:3]]
            rows.append(
                Row(
                    name=name, tried=len(tried), held=sum(result.held for result in tried),
                    struck=sum(result.struck for result in tried), skipped=len(every) - len(tried),
                    seconds=sum(result.seconds for result in every), faults=tuple(faults[:FAULTS]),
                )
            )  # fmt: skip
        where = study_header("stream") | {"device": cpu_model()}  # no case sees a GPU
        return cls(seed=seed, seconds=round(seconds, 1), planned=planned, rows=tuple(rows), **where)

    def table(self) -> str:
        """Return the counts as text, a line for each class."""
        heads = ("class", "cases", "struck", "held", "failed", "skipped", "s")
        rows = [
            (row.name, row.tried, row.struck, row.held, row.tried - row.held, row.skipped, round(row.seconds))
            for row in self.rows
        ]
        total = ("all", *(sum(row[column] for row in rows) for column in range(1, 7)))  # type: ignore[misc]
        lines = [f"{line[0]:20}" + "".join(f"{cell!s:>9}" for cell in line[1:]) for line in (heads, *rows, total)]
        if self.left:
            lines.append(f"{self.left} of {self.planned} planned cases did not end")
        return "\n".join(lines)

    def cells(self) -> list[list[str]]:
        """Return the rows under `COLUMNS` for a page: commands killed one by one, the other classes by their title."""
        table = [
            [title(row.name), *(f"{number:,}" for number in (row.tried, row.struck, row.held, row.tried - row.held))]
            for row in self.rows
        ]
        sums = [sum(getattr(row, name) for row in self.rows) for name in ("tried", "struck", "held")]
        return [*table, ["**all**", *(f"{number:,}" for number in (*sums, sums[0] - sums[2]))]]


def last(path: Path) -> Campaign:
    """Return the last campaign in a file."""
    return Campaign.model_validate([*parse_runs(read_lines(path), path, "reliability")][-1][1])


def title(name: str) -> str:
    """Return what a class does, for readers."""
    if name in TITLES:
        return TITLES[name]
    kind, _, verb = name.partition("-")
    verb = f"study {verb}" if verb in ("accuracy", "reuse") else verb
    return f"`zinfer {verb}` killed, then started again" if kind == "kill" else f"{TITLES.get(kind, kind)}: {verb}"


def markdown(campaign: Campaign) -> str:
    """Return the table of a campaign in Markdown, with its seed."""
    where = f"{campaign.device}, {campaign.started_at[:10]}, zinfer {campaign.versions.get('zinfer', '')}"
    blind, skipped = (sum(getattr(row, name) for row in campaign.rows) for name in ("blind", "skipped"))
    left = f"{campaign.left:,} of {campaign.planned:,}"
    notes = {
        f"Seed {campaign.seed}; {campaign.seconds / 60:.0f} minutes; {where}.": 1,
        f"{blind:,} damaged inputs count as held though they gave another result: another value of a configuration, a"
        " recipe or a record with a valid checksum is as good as the first. Single changed bytes of weights, which only"
        " a checksum of all could tell, were not tried.": blind,
        f"The campaign was ended before {left} planned cases had ended.": campaign.left,
        f"{skipped:,} cases could not be tried on this machine.": skipped,
    }
    return f"{pages.markdown(COLUMNS, campaign.cells())}\n\n{' '.join(note for note, told in notes.items() if told)}"


def reliability() -> str:
    """Return the table of the last recorded campaign, for docs/reliability.md."""
    return markdown(last(RECORD))
