"""Runs of all types, each in a process of its own."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext
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
    seconds: float
    family: str = ""
    padded: bool = True  # rows of several lengths share a micro-batch
    skipped: int = 0  # prompts left out for what transformers does with each alone
    tolerance: float = 0.0  # largest difference of logits allowed, as a share of their spread

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of the ways; a refused way does not count if the model is right with its weights streamed."""
        verdicts = [outcome.verdict for outcome in self.outcomes.values()]
        if "all" in self.outcomes:
            return self.outcomes["all"].verdict
        for bad in ("crash", "differs"):
            if bad in verdicts:
                return bad
        return "right" if all(self.outcomes[way].verdict == "right" for way in ("none", "cpu")) else "refused"


def run_all(subjects: Sequence[Subject], jobs: int, done: Callable[[Row], None]) -> list[Row]:
    """Compare `subjects`, `jobs` at a time; call `done` with each row; return the rows in order."""
    context = multiprocessing.get_context("fork")  # transformers is imported once
    waiting = list(enumerate(subjects))
    running: dict[Connection, _Child] = {}
    rows: dict[int, Row] = {}
    with TemporaryDirectory(prefix="zinfer-conformance-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, subject = waiting.pop(0)
                child = _Child(index, subject, context, Path(scratch) / str(index))
                running[child.end] = child
            for end in wait(list(running), timeout=1.0):
                running[end].receive()  # type: ignore[index]
            for end, child in list(running.items()):
                if child.finished():
                    del running[end]
                    rows[child.index] = child.row()
                    done(rows[child.index])
    return [rows[index] for index in range(len(subjects))]


class _Child:
    """Process that compares one subject, and the outcomes so far."""

    def __init__(self, index: int, subject: Subject, context: ForkContext, scratch: Path) -> None:
        self.index, self.subject, self.scratch = index, subject, scratch
        self.end, theirs = context.Pipe(duplex=False)
        self.outcomes: dict[str, Outcome] = {}
        self.family, self.notes, self.open = "", dict[str, list[str]](), True
        self.begun = time.monotonic()
        self.process = context.Process(target=_work, args=(subject, scratch, theirs))
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        try:
            name, outcome = self.end.recv()
            if name == "family":
                self.family = outcome[1]
            elif name in NOTES:
                self.notes.setdefault(name, []).append(outcome[1])
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
        if not self.notes:
            self.outcomes.setdefault("all", Outcome("cannot be compared", f"transformers: {why}"))
        if "all" not in self.outcomes:
            for name in WAYS:
                self.outcomes.setdefault(name, Outcome("crash", why))

    def row(self) -> Row:
        self.end.close()
        seconds, notes = time.monotonic() - self.begun, {name: self.notes.get(name, []) for name in NOTES}
        skipped, tolerance = sum(map(int, notes["skipped"])), max(map(float, notes["tolerance"]), default=0.0)
        return Row(self.subject, self.outcomes, seconds, self.family, not any(notes["padding"]), skipped, tolerance)


def _work(subject: Subject, scratch: Path, end: Connection) -> None:
    """Compare in the child process, without output; exit without cleaning up the interpreter."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    scratch.mkdir()
    try:
        compare(subject, scratch, lambda name, outcome: end.send((name, tuple(outcome))))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        end.close()
    os._exit(0)
