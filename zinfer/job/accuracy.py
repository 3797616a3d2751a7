"""Runs a reference and what is compared with it, one load after the other, each in a process of its own.

Every sample makes two rows: one that follows the reference's own greedy tokens, and one that follows the text. The
reference is also held against itself, with its first batch in two halves: what floating point alone does to it when
other kernels, or the same in another order, compute it. A deviation below that says nothing. (Where it is 0, kernels do
not depend on the batch. Whatever a setting changes still makes 16-bit values round elsewhere: in float32 little but its
own part remains.)
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from zinfer.job import lead
from zinfer.job.lead import NoAnswer, Recorded, Row
from zinfer.plan.plan import Plan
from zinfer.record.accuracy import AccuracyError, Along, Deviation, Failed, Position
from zinfer.spec.case import Case
from zinfer.spec.units import gb
from zinfer.worker.process import Worker, WorkerDied


@dataclass(frozen=True)
class Found:
    """What came of it: the text's length in tokens, the type of the reference's logits, and each setting."""

    tokens: int
    logits_dtype: str
    deviations: tuple[Deviation, ...]
    failed: tuple[Failed, ...]


@dataclass(frozen=True)
class Comparison:
    """What `run` needs: the plans, at the batch size to run with, the text and how many samples to take of it; and who
    makes a worker, and is told of a load."""

    reference: Plan
    settings: Sequence[Plan]
    text: str
    samples: int
    make_worker: Callable[[], Worker]
    loading: Callable[[Plan], None] = lambda _plan: None

    def run(self) -> Found:
        """Raises NoAnswer where the reference fails, AccuracyError for a text that is too short, or where the disk has
        no room for the reference's logits."""
        spec, load = self.reference.model, self.reference.case.workload
        size, cut = load.batch_size, load.input_len
        failed = []
        with tempfile.TemporaryDirectory(prefix="zinfer-") as folder:
            needed = 2 * self.samples * load.output_len * spec.vocab_size * spec.dtype_bytes
            if needed > shutil.disk_usage(folder).free:
                raise AccuracyError(
                    f"the reference's logits take {gb(needed)}, which {folder} has no room for: take fewer --samples, "
                    "or set TMPDIR to a folder with more"
                )
            with self._worker() as worker:
                pieces, tokens, ends = self._cut(worker)
                self._load(worker, self.reference)
                rows = [row for one in pieces for row in (Row(one[:cut], None), Row(one[:cut], one[cut:]))]
                recorded = [
                    lead.record(worker, rows[start : start + size], load.output_len, f"{folder}/{start}", ends)
                    for start in range(0, len(rows), size)
                ]
                deviations = self._noise(worker, recorded[0])
            for plan in self.settings:
                try:
                    with self._worker() as worker:
                        self._load(worker, plan)
                        found = [lead.compare(worker, batch) for batch in recorded]
                    deviations += _deviations(plan.case, recorded, found)
                except NoAnswer as error:
                    failed.append(Failed(case=plan.case, status=error.status, error=str(error)))
        return Found(tokens, recorded[0].file["dtype"], tuple(deviations), tuple(failed))

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        worker = self.make_worker()
        try:
            yield worker
        except WorkerDied as death:
            raise NoAnswer(death.status, str(death)) from None
        except KeyboardInterrupt:
            worker.kill()
            raise
        finally:
            worker.close()

    def _cut(self, worker: Worker) -> tuple[list[list[int]], int, frozenset[int]]:
        """The samples, how many tokens the text has, and those after which a row's own text is over."""
        spec, length = self.reference.model, self.reference.case.workload.total_len
        model = spec.model_dump(mode="json")
        answer = lead.ask(worker, "windows", model=model, text=self.text, count=self.samples, length=length)
        if answer["pieces"] is None:
            raise AccuracyError(
                f"the text has {answer['tokens']:,} tokens, too few for {self.samples} samples of {length}: "
                "give a longer --prompt-file, or fewer --samples"
            )
        return answer["pieces"], answer["tokens"], frozenset(answer["ends"])

    def _load(self, worker: Worker, plan: Plan) -> None:
        self.loading(plan)
        refused = worker.load(plan)
        if refused is not None:
            raise NoAnswer(refused.status, f"loading failed: {refused.error}")

    def _noise(self, worker: Worker, batch: Recorded) -> list[Deviation]:
        """The reference beside itself, with half the rows of `batch` at a time."""
        half = (len(batch.rows) + 1) // 2
        if half == len(batch.rows):
            return []
        return _deviations(self.reference.case.with_batch(half), [batch], [lead.compare(worker, batch, half)])


def _deviations(case: Case, batches: Sequence[Recorded], found: Sequence[list[list[Position]]]) -> list[Deviation]:
    kinds: dict[Along, list[list[Position]]] = {}
    for batch, rows in zip(batches, found, strict=True):
        for row, length, positions in zip(batch.rows, batch.lengths, rows, strict=True):
            kinds.setdefault(row.along, []).append(positions[:length])
    return [Deviation.of(case, along, rows) for along, rows in kinds.items()]
