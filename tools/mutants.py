"""Mutants of the core: one fault each, planted into a copy of zinfer, that named tests must catch.

A mutant replaces a piece of source that occurs once. Run with ``make mutants``; a mutant whose piece has changed fails
the ordinary tests, so that whoever changes the source renews the mutant.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import PATIENCE_S, environment

ROOT = Path(__file__).parents[1]
COPIED = ("zinfer", "tests", "tools")  # all else of the checkout is linked
FAILED = 1  # exit code of pytest if a test failed; others mean that the tests did not run


class Mutant(NamedTuple):
    """One fault: in `file`, `before` becomes `after`; one of `tests` must fail then."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Change the file below `root`. Raises LookupError if it does not hold `before` exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.before)) != 1:
            raise LookupError(
                f"mutant no longer applies: {self.name}: {self.file} holds {self.before!r} {count} times, not once; "
                "renew it in tools/mutants.py"
            )
        path.write_text(text.replace(self.before, self.after))


MUTANTS = (
    Mutant(
        "an API key that only begins right is taken",
        "zinfer/job/serve/app.py",
        "hmac.compare_digest(key.strip(), self._key)",
        "self._key.startswith(key.strip())",
        ("tests/test_serve_limits.py::test_only_the_whole_key_is_accepted",),
    ),
    Mutant(
        "TTFT ends before the GPU has computed the token",
        "zinfer/worker/measure.py",
        "reserve=reserve, past=past)\n    synchronize(loop.engine.device)\n",
        "reserve=reserve, past=past)\n",
        ("tests/test_measure.py::test_work_counts_where_it_was_asked_for",),
    ),
    Mutant(
        "a reused prefix includes the last token",
        "zinfer/generation/prefix_cache.py",
        "in self._match(tokens[:-1]))",
        "in self._match(tokens))",
        ("tests/test_shelf.py::test_the_last_token_is_always_computed",),
    ),
    Mutant(
        "a ring buffer is read before its copy has arrived",
        "zinfer/engine/stream/weights/ring.py",
        "        self._arrived[number].wait()  # rule 1\n",
        "",
        ("tests/test_ring.py::test_no_buffer_is_read_early_or_overwritten_late",),
    ),
    Mutant(
        "the codec's kernel gives the second of two escapes the exponent of the first one",
        "zinfer/engine/stream/weights/decode.py",
        "    shift += (escaped & 1) * 8\n",
        "    shift += (escaped & 0) * 8\n",
        ("tests/test_codec.py::test_the_kernel_returns_every_bit",),
    ),
    Mutant(
        "a row ends one token early",
        "zinfer/generation/scheduler.py",
        "        elif sequence.left == 0:\n",
        "        elif sequence.left <= 1:\n",
        ("tests/test_generate.py::test_texts_are_those_of_transformers_in_any_batch",),
    ),
    Mutant(
        "a rollback forgets one position too few",
        "zinfer/engine/cache.py",
        "        self.slots.rollback(length)\n",
        "        self.slots.rollback(length + 1)\n",
        ("tests/test_passes.py::test_rejected_drafts_leave_nothing_behind",),
    ),
    Mutant(
        "the nucleus lacks the token that reaches top_p",
        "zinfer/generation/sampling.py",
        "kept.cumsum(-1) - kept >= column(",
        "kept.cumsum(-1) >= column(",
        ("tests/test_sampling.py::test_the_nucleus_is_the_fewest_tokens_that_reach_top_p",),
    ),
    Mutant(
        "the checksum of a record is not compared",
        "zinfer/record/jsonl.py",
        "        if member[1] == _checksum(line[: member.start()], line[member.end() :]):\n",
        "        if member[1]:\n",
        ("tests/test_store.py::test_every_flipped_bit_is_detected",),
    ),
    Mutant(
        "a resumed sweep skips points that crashed",
        "zinfer/job/sweep.py",
        "        if point.status in FINAL:\n            recorded",
        "        if point.status:\n            recorded",
        ("tests/test_sweep.py::test_resume_measures_only_what_is_missing",),
    ),
    Mutant(
        "the times of a pass add up where they overlap",
        "zinfer/plan/times.py",
        "return Times(seconds=limits[bound_by],",
        "return Times(seconds=sum(limits.values()),",
        ("tests/test_cost.py::test_a_step_at_full_offload_takes_all_weights_over_the_link",),
    ),
    Mutant(
        "a change within the noise counts",
        "zinfer/analysis/compare.py",
        "        if abs(self.delta) <= self.noise:\n",
        "        if abs(self.delta) < 0:\n",
        ("tests/test_compare.py::test_verdicts",),
    ),
)


def copy_into(folder: Path) -> None:
    """Copy the checkout into `folder`, whose sources may be changed."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)


def run_tests(folder: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run `tests` of the copy in `folder`; return the exit code of pytest and its output."""
    words: Sequence[str] = (sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests)
    settings = environment(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del settings[name]  # of a run that starts this one
    done = subprocess.run(
        words, cwd=folder, env=settings, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.returncode, done.stdout + done.stderr
