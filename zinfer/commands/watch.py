"""Progress on stderr while a sweep or a load runs: a moving line on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zinfer.commands.out import PlainConsole
from zinfer.job.batch.run import Standing
from zinfer.job.sweep import Events
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Measurement
from zinfer.spec.progress import NOTE
from zinfer.spec.units import duration, figures, gb


class Watch:
    """Progress on stderr. Without a terminal only finished items are printed, a line each."""

    def __init__(self) -> None:
        self.console = PlainConsole(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(24), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Stop the moving line; lines from `say` are still printed."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False)

    def progress(self, what: str, share: float) -> None:
        """Show the current activity and the share of it that is done, 0 to 1; a note is printed and stays."""
        if what.startswith(NOTE):
            self.say(what.removeprefix(NOTE))
            return
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._prefix}{what}", completed=share)

    _prefix = ""

    def loading(self, plan: Plan) -> None:
        """Announce a load; its label precedes the progress that follows."""
        self._prefix = f"{plan.case.label()}: "
        weights = f"{gb(plan.model.weight_bytes)}, {plan.case.load_format}"
        self.say(f"loading {plan.case.model} ({weights}) with {plan.case.label()}")

    def loaded(self, size: int, seconds: float) -> None:
        """Print the size of the loaded weights in bytes, the time, and their rate."""
        self.say(f"loaded {gb(size)} in {duration(seconds)}: {gb(size / max(seconds, 1e-3), 2)}/s")

    def point(self, point: Measurement, resumed: bool) -> None:
        """Print a line about a finished point; `resumed` marks one that comes from a record."""
        workload = point.case.workload
        head = f"{point.case.label():24} {workload.input_len}/{workload.output_len}  batch {workload.batch_size:<6}"
        if point.output_tok_s is not None and point.tpot_ms is not None:
            ttft = sum(point.ttft_ms) / len(point.ttft_ms)
            tail = (
                f"{point.output_tok_s:10.2f} tok/s  TTFT {duration(ttft / 1e3)}  TPOT {duration(point.tpot_ms / 1e3)}"
            )
            if point.link_share is not None:
                tail += f"  link {point.link_share:.0%}"
            tail = tail if point.status == "ok" else f"{point.status}: {tail}"
        else:
            fits = "fits" if point.status == "ok" else point.status
            tail = fits + (f" ({point.error})" if point.error else "")
        self.say(head + tail + ("  [recorded]" if resumed else ""))

    def rows(self, standing: Standing) -> None:
        """Show the progress of a batch job."""
        rate, left = standing.rate, standing.seconds_left
        what = f"{standing.ended:,} of {standing.rows:,} rows"
        if rate is not None and left is not None:
            what += f", {figures(rate)} tok/s, {duration(left)} left"
        self.progress(what, standing.ended / max(1, standing.rows))

    def events(self) -> Events:
        """Return the callbacks for a sweep that print to this watch."""
        return Events(point=self.point, loading=self.loading, loaded=self.loaded, progress=self.progress)
