"""Runs of all types, each in a process of its own."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from tools.conformance.compare import NOTES, WAYS, Outcome, Verdict, compare
from tools.conformance.small import Subject

LIMIT_S = 900.0  # time limit of one type


class Row(NamedTuple):
    """Result of a type: one outcome for each way, or one for all if the type could not be run."""

    subject: Subject
    outcomes: dict[str, Outcome]
    family: str = ""
    padded: bool = True  # rows of several lengths share a micro-batch
    skipped: int = 0  # prompts left out for what transformers does with each alone
    tolerance: float = 0.0  # largest difference of logits allowed, as a share of their spread

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of the ways; a refused way does not count if the model is right with its weights streamed."""
        verdicts = {name: outcome.verdict for name, outcome in self.outcomes.items()}
        if "all" in verdicts:
            return verdicts["all"]
        bad: tuple[Verdict, ...] = ("crash", "differs")
        good: Verdict = "right" if verdicts["none"] == verdicts["cpu"] == "right" else "refused"
        return next((verdict for verdict in bad if verdict in verdicts.values()), good)


def run_all(subjects: Sequence[Subject], jobs: int, done: Callable[[Row], None]) -> list[Row]:
    """Compare `subjects`, `jobs` at a time; call `done` with each row; return the rows in order."""
    waiting, running, rows = [*subjects], list[_Child](), dict[Subject, Row]()
    with TemporaryDirectory(prefix="zinfer-conformance-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Child(waiting.pop(0), Path(scratch)))
            ready = wait([child.end for child in running], timeout=1.0)
            for child in [*running]:
                if child.end in ready:
                    child.receive()
                if child.finished():
                    running.remove(child)
                    rows[child.subject] = child.row()
                    done(rows[child.subject])
    return [rows[subject] for subject in subjects]


class _Child:
    """Process that compares one subject, and the outcomes so far."""

    def __init__(self, subject: Subject, scratch: Path) -> None:
        context = multiprocessing.get_context("fork")  # transformers is imported once
        self.subject = subject
        self.end, theirs = context.Pipe(duplex=False)
        self.outcomes: dict[str, Outcome] = {}
        self.notes: dict[str, list[str]] = {name: [] for name in NOTES}
        self.open, self.begun = True, time.monotonic()
        self.process = context.Process(target=_work, args=(subject, scratch / subject.name, theirs))
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            name, outcome = self.end.recv()
            if name in NOTES:
                self.notes[name].append(outcome[1])
            else:
                self.outcomes[name] = Outcome(*outcome)
        except EOFError:
            self.open = False

    def finished(self) -> bool:
        if self.open and time.monotonic() - self.begun > LIMIT_S:
            self.process.kill()
            self._fill(f"nothing for {LIMIT_S:.0f} seconds")
            self.open = False
        if not self.open:
            self.process.join()
            self._fill(f"the process ended with {self.process.exitcode}")
        return not self.open

    def _fill(self, why: str) -> None:
        """Record a crash for the current way and all later ones. Or for transformers, if there is no reference yet."""
        if not self.notes["tolerance"]:
            self.outcomes.setdefault("all", Outcome("cannot be compared", f"transformers: {why}"))
        if "all" not in self.outcomes:
            self.outcomes = {name: Outcome("crash", why) for name in WAYS} | self.outcomes

    def row(self) -> Row:
        self.end.close()
        families, skipped, tolerances, paddings = (self.notes[name] for name in NOTES)
        numbers = sum(map(int, skipped)), max(map(float, tolerances), default=0.0)
        return Row(self.subject, self.outcomes, "".join(families[-1:]), not any(paddings), *numbers)


def _work(subject: Subject, scratch: Path, end: Connection) -> None:
    """Compare in the child process, without output; exit without cleaning up the interpreter."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    torch.set_num_threads(1)
    scratch.mkdir()
    try:
        compare(subject, scratch, lambda name, outcome: end.send((name, tuple(outcome))))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        end.close()
    os._exit(0)
