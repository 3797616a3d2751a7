"""Seconds of a pass: the plan's at first, then corrected by measured passes."""

from typing import NamedTuple

from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.generation import tuning
from zinfer.plan.bytes import Placement
from zinfer.plan.times import Timing


class PassLoad(NamedTuple):
    """Work of a pass: decoding rows in micro-batches, the positions that they read, and prompt tokens. Micro-batches in
    host memory share a forward pass, and count as one."""

    rows: int = 0
    positions: int = 0
    prompt_tokens: int = 0
    batches: int = 0
    prompts: int = 0  # micro-batches that compute prompts


class PassTimes:
    """Seconds of a pass: link, launches on the CPU, and computing, which overlap. If the plan knows no seconds, a pass
    takes `tokens` prompt tokens and its rows. With `joins` decode steps share a forward pass but for attention."""

    def __init__(
        self, placement: Placement, model: ModelSpec, machine: Machine, length: int = 256, joins: bool = False
    ) -> None:
        tuned = tuning.TUNED
        self.tokens, self.joins, self._warming = placement.pass_tokens, joins, tuned.warm_up
        self._recent: list[tuple[PassLoad, float]] = []
        self._prompt_s = self._row_s = self._position_s = self._read_s = self._unpack_s = self.link_s = 0.0
        self._launch_s = self._joined_s = 0.0
        timing = Timing(placement, model, machine, tuned.at_first)
        step, prefill = timing.step(1, length), timing.prefill(1, length)
        if step.seconds is None or prefill.seconds is None:
            return
        on_gpu = ("compute", "launch", "unpacking")
        self.link_s = max(seconds for bound, seconds in step.limits.items() if bound not in on_gpu)
        self._unpack_s = step.limits.get("unpacking", 0.0)
        self._prompt_s = prefill.limits["compute"] / length
        self._row_s = step.limits["compute"]
        if machine.hbm_bandwidth is not None:  # a forward pass reads the weights, and attention keys and values
            size = model.kv_bytes(1, length) * placement.kv_ratio * (1 - placement.kv_host_share) / length
            size = timing.attention_bytes(size)
            self._read_s = model.weight_bytes / machine.hbm_bandwidth
            # Kernels for short rows reach half of the bandwidth; of several GPUs each has its own rows.
            self._position_s = 2 * size / machine.hbm_bandwidth / placement.gpus
            self._launch_s = tuned.pass_s + tuned.launch_s * model.num_layers
            self._joined_s = tuned.joined_s * model.num_layers

    def _forwards(self, load: PassLoad) -> int:
        return load.prompts + (min(1, load.batches) if self.joins else load.batches)

    def launch_seconds(self, load: PassLoad) -> float:
        """Return the seconds in which the CPU launches a pass."""
        return self._launch_s * self._forwards(load) + (self._joined_s * load.batches if self.joins else 0.0)

    def compute_seconds(self, load: PassLoad) -> float:
        """Return the seconds in which the device computes a pass."""
        decode = self._row_s * load.rows + self._position_s * load.positions
        return self._unpack_s + self._read_s * self._forwards(load) + decode + self._prompt_s * load.prompt_tokens

    def work_seconds(self, load: PassLoad) -> float:
        """Return the seconds of a pass without the link's."""
        return max(self.launch_seconds(load), self.compute_seconds(load))

    def seconds(self, load: PassLoad) -> float:
        """Return the seconds of a pass."""
        return max(self.link_s, self.work_seconds(load))

    def room(self, load: PassLoad) -> int:
        """Return how many tokens more hide behind the link, next to `load`: of prompts, or drafts."""
        if not self._prompt_s:
            return self.tokens
        return max(0, int((self.link_s - self.compute_seconds(load)) / self._prompt_s))

    def tokens_in(self, seconds: float) -> int:
        """Return the prompt tokens computed in `seconds`; none if the plan does not know."""
        return int(seconds / self._prompt_s) if self._prompt_s else 0

    @property
    def max_batches(self) -> int:
        """Micro-batches whose launches leave the pass time for other work."""
        tuned, each = tuning.TUNED, self._joined_s if self.joins else max(self._launch_s, self._read_s)
        if not each:  # the plan does not know what one more micro-batch takes
            return tuned.few_batches
        return min(tuned.many_batches, max(2, int(tuned.batches_share * self.link_s / each)))

    @property
    def max_host_batches(self) -> int:
        """Maximum of micro-batches in host memory. They share a forward pass, and are slow to merge."""
        tuned, each = tuning.TUNED, self._joined_s
        return max(self.max_batches, int(tuned.batches_share * self.link_s / each)) if each else tuned.many_batches

    def observe(self, load: PassLoad, seconds: float) -> None:
        """Correct the seconds by a measured pass: by the latest passes' median ratio."""
        if self._warming:
            self._warming -= 1
            return
        if not self._prompt_s or seconds <= 0:
            return
        self._recent = [*self._recent[1 - tuning.TUNED.recent :], (load, seconds)]
        ranked = sorted(self._recent, key=lambda timed: timed[1] / self.seconds(timed[0]))
        load, seconds = ranked[len(ranked) // 2]
        work = self.work_seconds(load)
        if work < 0.5 * self.link_s:  # the link's seconds show
            self.link_s *= min(2.0, max(0.5, seconds / self.link_s)) ** 0.25
        elif work > self.link_s or seconds > tuning.TUNED.hidden * self.link_s:  # the work's show
            self._scale(load, min(2.0, max(0.5, seconds / work)) ** 0.5)

    def _scale(self, load: PassLoad, factor: float) -> None:
        """Scale the seconds that bound a pass with `load`: of launches, or of computing."""
        if self.launch_seconds(load) > self.compute_seconds(load):
            self._launch_s, self._joined_s = self._launch_s * factor, self._joined_s * factor
        else:
            self._prompt_s, self._row_s = self._prompt_s * factor, self._row_s * factor
            self._position_s, self._read_s = self._position_s * factor, self._read_s * factor
