"""Accuracy study: run a reference and the settings that are compared with it, each load in a process of its own.

Every sample makes two rows: one follows the reference's own greedy tokens, the other the text. The reference is also
compared with itself, with its first batch in two halves: deviations below that mean nothing.
"""

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zinfer.checkpoint.headers import Checkpoint
from zinfer.core.case import Case
from zinfer.core.model import ModelSpec
from zinfer.core.units import gb
from zinfer.generation.tokenizer_process import TokenizerProcess, windows
from zinfer.job.driver import Driver
from zinfer.job.signals import Interrupted
from zinfer.plan.planner import Plan
from zinfer.record.study import Along, Deviation, Failed, Position, StudyError
from zinfer.system import documents, scratch
from zinfer.worker.process import Client, WorkerError
from zinfer.worker.tasks import LogitsCompare, LogitsRecord, LogitsRecorded


class AccuracyRow(NamedTuple):
    """Prompt, and the tokens that follow it, None for greedy ones."""

    prompt: list[int]
    tokens: list[int] | None


class Recorded(NamedTuple):
    """Batch of rows that the reference ran, with their tokens and logits."""

    rows: Sequence[AccuracyRow]
    lengths: list[int]  # of the tokens, up to the one that ended the row's own text, if one did
    logits: LogitsRecorded


def record(worker: Client, rows: Sequence[AccuracyRow], steps: int, file: str, ends: frozenset[int]) -> Recorded:
    """Run `rows` through the reference for `steps` tokens; store logits. `ends` end a row's own text."""
    prompts, given = [row.prompt for row in rows], [row.tokens for row in rows]
    logits = worker.ask(LogitsRecord(prompts=prompts, tokens=given, steps=steps, file=file))
    lengths = [
        next((i + 1 for i, token in enumerate(tokens) if row.tokens is None and token in ends), steps)
        for row, tokens in zip(rows, logits.tokens, strict=True)
    ]
    return Recorded(rows, lengths, logits)


def compare_logits(worker: Client, batch: Recorded, size: int | None = None) -> list[list[Position]]:
    """Compare the setting with the logits of `batch`, `size` rows at once; return each row's positions."""
    size, positions = size or len(batch.rows), list[list[Position]]()
    for first in range(0, len(batch.rows), size):
        prompts = [row.prompt for row in batch.rows[first : first + size]]
        compared = worker.ask(LogitsCompare(prompts=prompts, first=first, logits=batch.logits))
        positions += compared
    return positions


@dataclass
class AccuracyStudy:
    """Study to run: the plans to compare, at their batch size, and the text with the number of its samples. `loading`
    is called before each load. `rows` grows while it runs."""

    reference: Plan
    settings: Sequence[Plan]
    text: str
    samples: int
    make_worker: Callable[[], Client]
    loading: Callable[[Plan], object] = lambda _plan: None
    tokens: int = 0  # of the text
    logits_dtype: str = ""
    rows: list[Deviation | Failed] = field(default_factory=list)

    def run(self) -> None:
        """Run the reference, then every setting; failed and cancelled ones become rows, too. Raises WorkerError if the
        reference fails, StudyError for too short a text or too full a disk, Interrupted."""
        spec, load = self.reference.model, self.reference.case.workload
        with scratch.folder(Path(tempfile.gettempdir()), "logits") as temporary:
            folder = temporary.path
            needed = 2 * self.samples * load.output_len * spec.vocab_size * spec.dtype_bytes
            if needed > shutil.disk_usage(folder).free:
                full = f"the reference's logits take {gb(needed)}, which {folder} has no room for"
                raise StudyError(f"{full}: take fewer --samples, or set TMPDIR to a folder with more")
            batches, ends = self._batches()
            with self._worker(self.reference) as worker:
                files = [f"{folder}/{number}" for number in range(len(batches))]
                recorded = [
                    record(worker, batch, load.output_len, file, ends)
                    for batch, file in zip(batches, files, strict=True)
                ]
                self.logits_dtype = recorded[0].logits.dtype
                half = (len(batches[0]) + 1) // 2
                noise = compare_logits(worker, recorded[0], half) if half < len(batches[0]) else []
            if noise:
                self.rows += _deviations(self.reference.case.with_batch(half), recorded[:1], [noise])
            for number, plan in enumerate(self.settings):
                try:
                    with self._worker(plan) as worker:
                        positions = [compare_logits(worker, batch) for batch in recorded]
                    self.rows += _deviations(plan.case, recorded, positions)
                except WorkerError as error:
                    self.rows.append(Failed(case=plan.case, status=error.status, error=str(error)))
                except Interrupted as interrupt:
                    for rest in self.settings[number:]:
                        self.rows.append(Failed(case=rest.case, status="cancelled", error=interrupt.name))
                    raise

    @contextmanager
    def _worker(self, plan: Plan) -> Iterator[Client]:
        with Driver(self.make_worker, self.loading) as driver:
            driver.load(plan)
            with driver.lend() as worker:
                yield worker

    def _batches(self) -> tuple[list[list[AccuracyRow]], frozenset[int]]:
        """Return the rows of each batch, and the end tokens."""
        load = self.reference.case.workload
        cut, size = load.input_len, load.batch_size
        with TokenizerProcess(self.reference.model) as tokenizer:
            samples, self.tokens = windows(tokenizer, self.text, self.samples, load.total_len)
            ends = frozenset(tokenizer.facts.ends)
        rows = [AccuracyRow(chunk[:cut], tokens) for chunk in samples for tokens in (None, chunk[cut:])]
        return [rows[start : start + size] for start in range(0, len(rows), size)], ends


def _deviations(case: Case, batches: Sequence[Recorded], positions: Sequence[list[list[Position]]]) -> list[Deviation]:
    kinds: dict[Along, list[list[Position]]] = {}
    for batch, rows in zip(batches, positions, strict=True):
        for row, length, of_row in zip(batch.rows, batch.lengths, rows, strict=True):
            along: Along = "own" if row.tokens is None else "text"
            kinds.setdefault(along, []).append(of_row[:length])
    return [Deviation.of(case, along, rows) for along, rows in kinds.items()]


def text_of(name: str) -> tuple[str, str]:
    """Return name and content of a prompt file or the default text. Raises StudyError if unreadable."""
    if name == "default":
        from pydoc_data.topics import topics

        return f"the manual of Python {platform.python_version()}", "\n".join(topics[key] for key in sorted(topics))
    try:
        return Path(name).name, documents.decode(documents.read_bytes(Path(name)), name)
    except FileNotFoundError:
        raise StudyError(f"--prompt-file {name} cannot be read: No such file or directory") from None


def describe(spec: ModelSpec) -> str:
    """Return the description of the model: its shape, and the origin that its safetensors metadata states."""
    shape = (
        f"{spec.architecture}, {spec.parameters / 1e6:,.0f} million weights, {spec.num_layers} layers, "
        f"{spec.num_heads} heads of {spec.head_dim}, {spec.num_kv_heads} of keys and values"
    )
    if spec.directory is None:
        return f"{shape}; random weights"
    if spec.directory.endswith(".gguf"):
        return shape
    from safetensors import safe_open

    with safe_open(next(iter(Checkpoint.open(Path(spec.directory)).tensors.values())).file, framework="np") as file:
        origin = (file.metadata() or {}).get("source")
    return f"{shape}; {origin}" if origin else shape
