"""Progress on stderr while a sweep or a load runs. A moving line on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from time import monotonic
from typing import Any, Self

from rich.progress import BarColumn, Progress, RenderableColumn, TextColumn
from rich.text import Text

from zinfer.analysis.requests import share_within
from zinfer.commands.out import PlainConsole, wrapped
from zinfer.core.case import Case
from zinfer.core.progress import NOTE
from zinfer.core.units import duration, figures, gb, milliseconds
from zinfer.job.batch.run import BatchProgress
from zinfer.job.forecast import Outlook
from zinfer.job.signals import Interrupted
from zinfer.job.sweep import Events
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Measurement
from zinfer.record.requests import RequestKey, RequestPoint
from zinfer.worker import process

LINE_S = 60.0  # seconds between lines on a long stage, where there is no terminal
MIN_SHARE, MIN_S = 0.02, 3.0  # share and seconds of a stage from which on its remaining time shows


class Watch:
    """Progress on stderr. Without a terminal finished items, and long stages, are lines."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.console = PlainConsole(file=sys.stderr, highlight=False, soft_wrap=True)
        self._clock, self._began = clock, clock()
        self._stage, self._stage_began, self._share, self._spoke = "", self._began, 0.0, self._began
        self._outlook: Outlook | None = None
        self._left_at, self._prefix = self._began, ""
        self._has_link = True  # False on a machine without a GPU, once a load is announced
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(16), RenderableColumn(self))
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __rich__(self) -> Text:
        """Return the clock of the moving line; rich's own stops at the end of the first stage."""
        return Text(self.times(), style="progress.elapsed")

    def __exit__(self, *_error: object) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Stop the moving line; lines from `message` are still printed."""
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def interruptible(self, kept: str) -> Iterator[None]:
        """Say what an interrupt keeps, and end with its code."""
        try:
            yield
        except Interrupted as interrupt:
            self.message(f"interrupted; {kept}")
            raise SystemExit(128 + interrupt.signal) from None

    def message(self, text: str) -> None:
        """Print a line that stays."""
        self._spoke = self._clock()
        self.console.print(wrapped(text, self.console.file), markup=False)

    def progress(self, what: str, share: float) -> None:
        """Show the stage and its share done, or print a note."""
        if what.startswith(NOTE):
            self.message(what.removeprefix(NOTE))
            return
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._counted()}{self._prefix}{what}", completed=share)
        now = self._clock()
        if what != self._stage or share < self._share:
            self._stage, self._stage_began = what, now
        self._share = share
        if self._bar is None and now - max(self._spoke, self._stage_began) >= LINE_S:
            self.message(f"{self._counted()}{self._prefix}{what} {share:.0%}, {self.times()}")

    def times(self) -> str:
        """Return the time since the start, and the time left."""
        now = self._clock()
        seconds = round(now - self._began)
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        left = None if self._outlook is None else self._outlook.seconds_left
        if left is not None:
            left = max(0.0, left - (now - self._left_at))
        elif self._outlook is None and self._share >= MIN_SHARE and now - self._stage_began >= MIN_S:
            left = (now - self._stage_began) * (1 - self._share) / self._share
        return clock if left is None else f"{clock}, about {duration(max(1, round(left)))} left"

    def _counted(self) -> str:
        if self._outlook is None:
            return ""
        done, points = self._outlook.done, self._outlook.points
        return f"[{min(done + 1, points)}/{'' if self._outlook.exact else '~'}{points}] "

    def outlook(self, outlook: Outlook) -> None:
        """Take a sweep's points done of all, and its time left."""
        self._outlook, self._left_at = outlook, self._clock()

    def trying(self, key: Case | RequestKey) -> None:
        """Take the point under way; its label precedes the progress that follows."""
        case, loop = (key.case, key.requests.loop) if isinstance(key, RequestKey) else (key, None)
        self._prefix = f"{case.label()} {loop or f'batch {case.workload.batch_size}'}: "

    def loading(self, plan: Plan) -> None:
        """Announce a load; its label precedes the progress that follows."""
        self._has_link = plan.machine.gpu_count > 0
        if self._outlook is None:
            self._prefix = f"{plan.case.label()}: "
        kind = "GGUF" if str(plan.model.directory).endswith(".gguf") else plan.case.load_format
        weights = f"{gb(plan.model.stored_bytes)}, {kind}"
        self.message(f"loading {plan.case.model} ({weights}) with {plan.case.label()}")

    def loaded(self, size: int, seconds: float) -> None:
        """Print the bytes of the loaded weights, the seconds, and their rate."""
        self.message(f"loaded {gb(size)} in {duration(seconds)}: {gb(size / max(seconds, 1e-3), 2)}/s")

    def workers(self, target: str, timeout_s: float, debug: bool, revision: str = "") -> Callable[[], process.Worker]:
        """Return a factory of workers whose progress is printed. Its arguments are `Worker`'s."""
        shown: dict[str, Any] = {"on_progress": self.progress, "on_loaded": self.loaded}
        return partial(process.Worker, target, timeout_s=timeout_s, debug=bool(debug), revision=revision, **shown)

    def point(self, point: Measurement, resumed: bool) -> None:
        """Print a line about a finished point. `resumed` marks a point from a record."""
        workload = point.case.workload
        tail: str = "fits" if point.status == "ok" else point.status
        if point.output_tok_s is not None and point.tpot_ms is not None:
            times = f"TTFT {milliseconds(point.mean_ttft_ms)}  TPOT {milliseconds(point.tpot_ms)}"
            tail = "" if point.status == "ok" else f"{point.status}: "
            tail += f"{point.output_tok_s:10.2f} tok/s  {times}{self._link(point.link_share)}"
            planned = [milliseconds(ms) for key in ("ttft_ms", "step_ms") if (ms := point.predicted.get(key))]
            tail += f"  (planned {', '.join(planned)})" * bool(planned)
        elif point.error:
            tail += f" ({point.error})"
        lengths = f"{workload.input_len}/{workload.output_len}  batch {workload.batch_size:<6}"
        self._finished(f"{point.case.label():24} {lengths}{tail}", resumed)

    def requests(self, point: RequestPoint, resumed: bool) -> None:
        """Print a line about a finished load of requests. `resumed` marks a load from a record."""
        tail = point.status + (f" ({point.error})" if point.error else "")
        if point.output_tok_s is not None:
            times = {"TTFT": point.summary("ttft_ms"), "TPOT": point.summary("tpot_ms")}
            words = [f"{name} p99 {milliseconds(value.p99)}" for name, value in times.items() if value is not None]
            tail = f"{point.output_tok_s:10.2f} tok/s  {'  '.join(words)}{self._link(point.link_busy)}"
            tail += "" if (good := share_within(point)) is None else f"  {good:.0%} keep the service levels"
        head = f"{point.case.label():24} {point.requests.requests:,} requests, {point.requests.loop:<16}"
        self._finished(head + tail, resumed)

    def _link(self, share: float | None) -> str:
        return "" if share is None or not self._has_link else f"  link {share:.0%}"

    def _finished(self, line: str, resumed: bool) -> None:
        self.message(self._counted() + line + "  [recorded]" * resumed)

    def rows(self, batch: BatchProgress) -> None:
        """Show the progress of a batch job."""
        rate, left = batch.rate, batch.seconds_left
        what = f"{batch.ended:,} of {batch.rows:,} rows"
        if rate is not None and left is not None:
            what += f", {batch.running:,} running, {batch.waiting:,} waiting, {batch.passes:,} passes"
            what += f", {figures(rate)} tok/s, {batch.padding:.0%} padding, {duration(left)} left"
        self.progress(what, batch.ended / max(1, batch.rows))

    def events(self) -> Events:
        """Return the callbacks for a sweep that print to this watch."""
        return Events(**{each.name: getattr(self, each.name) for each in fields(Events)})
