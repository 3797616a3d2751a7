"""Planner of a load: what fits, where it goes, and how long it takes, before anything runs.

Each workload is planned once. A `Plan` is a value, which a worker gets as JSON; `Plan.planner` goes on from it there.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from math import inf
from typing import Any

from zinfer.core.case import Case, Workload
from zinfer.core.engine import ENGINES, MAX_DRAFTS, Offload, Option, conflict, is_server
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.units import gb
from zinfer.core.value import Frozen
from zinfer.plan import search
from zinfer.plan.bytes import Bytes, Placement, Sizes, Tiers
from zinfer.plan.placement import CAUTIOUS, MEMOISED, TUNING, Placer
from zinfer.plan.times import LIMITS, Efficiency, Times, Timing, kind, may_compute_experts, shipped

SHARES, FINER = range(10, 101, 10), 5  # percent of the weights that stay, tried by `searched`; and next to the best
PROMISING = 0.8  # rate over the best one of the ways of experts, from which on shares of one are tried
CANDIDATES = 3  # ways whose best batch is searched, by their rates at two batches
WORTH = 1.03  # rate of a better share over that of the search for each batch, which serves every batch


class Drafting(Frozen):
    """Gain of the number of drafts that gives the highest rate."""

    acceptance: float  # chance that a draft is right if those before it were
    drafts: int  # of each row in a pass
    tokens_a_pass: float  # of each row
    pass_s: float
    drafting_s: float  # seconds of drafting before the pass


class Plan(Frozen):
    """A case on a machine, before anything runs; `placement` is obeyed, limits have none of its margin."""

    case: Case
    model: ModelSpec
    machine: Machine
    placement: Placement
    gpu: Bytes
    host: Bytes
    nvme: Bytes
    prefill_s: float | None = None
    step_s: float | None = None
    bound_by: str | None = None
    max_batch_size: int = 0  # largest batch by memory; 0 if not even one sequence fits
    streamed_bytes: int = 0  # bytes over all links in each pass
    resident_bytes: int = 0  # layer weights that stay on the GPU though the rest is offloaded
    error: float | None = None  # error of the throughput, as a share; None: these are limits, not predictions
    efficiency: Efficiency | None = None  # the engine's distance from the limits; None: the figures are the limits
    nvme_path: str | None = None  # folder for the files of offload `nvme`
    why_not: str | None = None  # reason why this load cannot run on this machine; None if it can
    drafting: Drafting | None = None  # gain of drafts; None where they were not counted

    @property
    def fits(self) -> bool:
        """True if the load can run on this machine, with some batch."""
        return self.why_not is None

    @property
    def holds(self) -> bool:
        """True if the load can run and this batch fits."""
        return self.fits and self.case.workload.batch_size <= self.max_batch_size

    @property
    def bounds(self) -> tuple[str, ...]:
        """Limits of the throughput: the step's bottleneck, and KV capacity if the batch is the largest that fits."""
        full = 0 < self.max_batch_size <= self.case.workload.batch_size
        return (*([self.bound_by] if self.bound_by else []), *(["KV capacity"] if full else []))

    @property
    def output_tok_s(self) -> float | None:
        """Output tokens a second of the whole batch, prefill included."""
        return tok_s(self.case.workload, self.e2e_s)

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens a second of the prefill."""
        workload = self.case.workload
        return workload.batch_size * workload.input_len / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens a second of the decode steps."""
        return self.case.workload.batch_size / self.step_s if self.step_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds of prefill and of a step for each further token."""
        return e2e_s(self.case.workload, self.prefill_s, self.step_s)

    @property
    def expected_tok_s(self) -> float | None:
        """Output tokens a second that its engine makes; None if unknown."""
        return tok_s(self.case.workload, e2e_s(self.case.workload, *self.expected()))

    def expected(self) -> tuple[float | None, float | None]:
        """Return the seconds of prefill and step that its engine takes; None if unknown."""
        if self.efficiency is not None:
            return self.prefill_s, self.step_s
        timing = Timing(self.placement, self.model, self.machine, shipped().get(self.case.engine, Efficiency()))
        prefill, step = times_of(timing, self.case.workload)
        return prefill.seconds, step.seconds

    def planner(self) -> "Planner":
        """Return the planner of this load, for other workloads."""
        return Planner(self.case, self.model, self.machine, self.efficiency, self.nvme_path, self)


class Planner:
    """Plans of one load on a machine; without `efficiency` times are the physical limits."""

    def __init__(
        self,
        case: Case,
        model: ModelSpec,
        machine: Machine,
        efficiency: Efficiency | None = None,
        nvme_path: str | None = None,
        given: Plan | None = None,
    ) -> None:
        self.case, self.model, self.machine = case, model, machine
        self.efficiency, self.nvme_path = efficiency, nvme_path
        self.placer = Placer(case, model, machine, efficiency)
        margin = self.placer.margin
        self._cautious_placer = self.placer if margin is efficiency else Placer(case, model, machine, margin)
        self._given, self._at_peak = given, machine.at_peak()
        self._plan = lru_cache(MEMOISED)(self._make_plan)
        self._largest = lru_cache(MEMOISED)(self._find_largest)
        self._why_not = lru_cache(MEMOISED)(self._find_why_not)
        self._times = lru_cache(MEMOISED)(self._find_times)

    @property
    def plan(self) -> Plan:
        """Plan of the case's own workload."""
        return self.at(self.case.workload)

    def at(self, workload: Workload) -> Plan:
        """Plan a workload of this load."""
        return self._given_for(workload) or self._plan(workload)

    def placement(self, workload: Workload) -> Placement:
        """Return the placement that the engine obeys."""
        given = self._given_for(workload)
        return given.placement if given else self._cautious_placer.choose(workload)

    def _given_for(self, workload: Workload) -> Plan | None:
        given = self._given
        return given if given is not None and given.case.workload == workload else None

    def tiers(self, workload: Workload) -> Tiers:
        """Return the bytes by tier, as in `Plan`."""
        return self.placer.tiers(self._figured(workload), workload)

    def rate(self, workload: Workload) -> float | None:
        """Return `Plan.output_tok_s` without making the plan."""
        prefill, step = self._times(workload)
        return tok_s(workload, e2e_s(workload, prefill.seconds, step.seconds))

    def max_batch(self, workload: Workload) -> int:
        """Return the largest batch of the workload's lengths that memory holds; 0 if none."""
        given = self._given
        if given is not None and workload.with_batch(given.case.workload.batch_size) == given.case.workload:
            return given.max_batch_size
        return self._largest(workload.input_len, workload.output_len)

    def fits(self, workload: Workload) -> bool:
        """Tell whether memory holds a workload."""
        cautious = self.efficiency is not None and self.efficiency.memory >= CAUTIOUS.memory
        room = self.machine.device_bytes * (1.0 if cautious else TUNING.max_device_share)
        placement, placer = self.placer.bare(workload), self.placer
        tiers = placer.tiers(placement, workload)
        fine = placer.device_bytes(tiers) <= room
        if placer.options.kv_place == "auto" and not fine:  # rows may have come until the GPU was full
            counted = placer.tiers(placement, workload, placer.margin)
            fine = placer.device_bytes(counted) <= self.machine.device_bytes
        return fine and placer.host_fits(tiers)

    def best(self, workload: Workload) -> Plan:
        """Plan the batch size with the highest predicted throughput; batch 1 if nothing fits, or no time is known."""
        return self.at(workload.with_batch(self.best_size(workload)))

    def within(self, workload: Workload, keeps: Callable[[Plan], bool]) -> list[Plan]:
        """Plan powers of two, the best batch, and the edges of `keeps`."""
        plans = {(best := self.best(workload)).case.workload.batch_size: best}

        def keeps_batch(size: int) -> bool:
            plans[size] = self.at(workload.with_batch(size))
            return keeps(plans[size])

        search.boundaries(keeps_batch, self.max_batch(workload))
        return [plans[size] for size in sorted(plans)]

    def shortages(self, workload: Workload) -> list[str]:
        """List the memory that the load lacks even at batch 1: the bytes needed on each tier, and those there are."""
        machine, single = self.machine, workload.with_batch(1)
        tiers = self.placer.tiers(self.placer.bare(single), single)
        gpu, host, nvme = (tier.total for tier in tiers)
        short = []
        if not machine.gpu_count:
            host += gpu
        elif gpu > machine.gpu_bytes:
            short.append(f"{gb(gpu)} of GPU memory ({machine.name} has {gb(machine.gpu_bytes)})")
        if machine.host_bytes is not None and host > TUNING.max_host_share * machine.host_bytes:
            short.append(f"{gb(host)} of host memory ({machine.name} has {gb(machine.host_bytes)})")
        if machine.nvme_bytes is not None and nvme > machine.nvme_bytes:
            short.append(f"{gb(nvme)} of disk at --nvme-path ({gb(machine.nvme_bytes)} are free)")
        return short

    def draft(self, workload: Workload) -> Plan | None:
        """Plan the draft model, all of it on the GPU; None without one."""
        if (model := self.model.draft) is None:
            return None
        fields = {name: getattr(self.case, name) for name in ("engine", "load_format", "allow_nan")}
        options = tuple(option for option in self.case.options if option[0] == "cuda_graphs")
        case = Case(model=model.name, dtype=model.dtype, offload="none", workload=workload, options=options, **fields)
        return Planner(case, model, self.machine)._make_plan(workload, self.max_batch(workload))

    def with_drafts(self, plan: Plan, acceptance: float) -> Plan:
        """Return `plan` with the gain of drafts of this acceptance; `step_s` becomes that of a token."""
        workload, placement = plan.case.workload, self._figured(plan.case.workload)
        best, draft_s = plan, 0.0
        if (drafter := self.draft(workload)) is not None:
            draft_s = (drafter.step_s if self.efficiency is None else drafter.expected()[1]) or inf
        for drafts in range(MAX_DRAFTS + 1):
            _, step = self._find_times(workload, drafts)
            if step.seconds is None or draft_s == inf:
                return plan
            tokens = sum(acceptance**position for position in range(drafts + 1))
            token_s = (step.seconds + drafts * draft_s) / tokens
            if not drafts or token_s < (best.step_s or 0.0):
                times = {"pass_s": step.seconds, "drafting_s": drafts * draft_s, "tokens_a_pass": tokens}
                drafting = Drafting(acceptance=acceptance, drafts=drafts, **times)
                wire = Sizes(placement, self.model).wire(workload.batch_size * (1 + drafts))
                fields = {"step_s": token_s, "bound_by": step.bound_by, "drafting": drafting, "streamed_bytes": wire}
                best = plan.model_copy(update=fields)
        return best

    def with_option(self, name: str, value: Option) -> "Planner":
        """Return the planner of this load with another engine option."""
        return self._with(options=tuple(sorted((dict(self.case.options) | {name: value}).items())))

    def searched(self, workload: Workload, rows: int | None = None, exact: bool = False) -> "Planner":
        """Return the planner of the fastest experts and share. `exact`: of `rows` rows, not at most."""
        if self.case.offload != "cpu" or not self.placer.transport.leaves_host:
            return self
        count = rows if exact else None

        def rate(other: Planner, *sizes: int) -> float:
            """Return the best rate at `sizes`, larger ones cut to what fits."""
            limit = count or min(other.max_batch(workload), rows or search.LARGEST_BATCH)
            if not limit or other.shortages(workload) or (count and not other.fits(workload.with_batch(count))):
                return 0.0
            return max(other.rate(workload.with_batch(min(each, limit))) or 0.0 for each in sizes)

        def best_rate(other: Planner) -> float:
            return rate(other, count or other.best_size(workload, rows))

        size = count or self.best_size(workload, rows)
        ends = (size,) if exact else (size, rows or search.LARGEST_BATCH)
        trusted = may_compute_experts(self.machine, self.model)
        experts = [way for way in self.placer.other_experts if trusted or way != "cpu"]
        ways = [self, *(self.with_option("experts", way) for way in experts)]
        if self.case.gpu_weights == "auto":
            enough = PROMISING * max(rate(way, *ends) for way in ways)
            # A share leaves host memory, which may be short of room for all.
            for way in [way for way in ways if rate(way, *ends) >= enough or way.shortages(workload)]:
                fixed = {share: way._with(gpu_weights=f"{share}%") for share in SHARES}
                share = max(fixed, key=lambda share: rate(fixed[share], *ends))
                near = (share + step for step in (-FINER, FINER) if share + step <= 100)
                ways += [*fixed.values(), *(way._with(gpu_weights=f"{share}%") for share in near)]
        best = max(sorted(ways, key=lambda planner: -rate(planner, *ends))[:CANDIDATES], key=best_rate)
        return best if best_rate(best) > WORTH * best_rate(self) else self

    def best_size(self, workload: Workload, rows: int | None = None) -> int:
        """Return the best batch size by predicted throughput, at most `rows`."""
        limit = min(self.max_batch(workload), rows or search.LARGEST_BATCH)
        return search.best_batch(lambda size: self.rate(workload.with_batch(size)) or 0.0, limit)

    def _with(self, **fields: Any) -> "Planner":
        case = self.case.model_copy(update=fields)
        return Planner(case, self.model, self.machine, self.efficiency, self.nvme_path)

    @cached_property
    def cautious(self) -> "Planner":
        """Planner of the same load that leaves the margin of `CAUTIOUS`."""
        return Planner(self.case, self.model, self.machine, CAUTIOUS)

    @cached_property
    def limits(self) -> "Planner":
        """Planner of the same load at the physical limits."""
        return self if self.efficiency is None else Planner(self.case, self.model, self.machine)

    def _figured(self, workload: Workload) -> Placement:
        """Return the placement that figures are of: the one that is obeyed; for limits, the one without a margin."""
        return (self.placer if self.efficiency is None else self._cautious_placer).choose(workload)

    def _find_times(self, workload: Workload, drafts: int = 0) -> tuple[Times, Times]:
        placement = self._figured(workload)
        if self.efficiency is not None:
            return times_of(Timing(placement, self.model, self.machine, self.efficiency), workload, drafts)
        # The ring may be full when a batch begins, and again when its prefill ends.
        full = placement.ring_depth * Sizes(placement, self.model).chunk
        return times_of(Timing(placement, self.model, self._at_peak, LIMITS), workload, drafts, full)

    def _make_plan(self, workload: Workload, max_batch: int | None = None) -> Plan:
        placement, (prefill, step) = self._figured(workload), self._times(workload)
        efficiency, sizes = self.efficiency, Sizes(placement, self.model)
        errors = dict(efficiency.errors) if efficiency is not None else {}
        return Plan(
            case=self.case.model_copy(update={"workload": workload}),
            model=self.model,
            machine=self.machine,
            placement=self.placement(workload),
            **self.tiers(workload)._asdict(),
            prefill_s=prefill.seconds,
            step_s=step.seconds,
            bound_by=step.bound_by,
            max_batch_size=self.max_batch(workload) if max_batch is None else max_batch,
            streamed_bytes=sizes.wire(workload.batch_size),
            resident_bytes=sizes.resident,
            error=errors.get(kind(placement, self.model, self.machine)),
            efficiency=efficiency,
            nvme_path=self.nvme_path,
            why_not=self._why_not(workload.input_len, workload.output_len),
        )

    def _find_largest(self, input_len: int, output_len: int) -> int:
        workload = Workload(batch_size=1, input_len=input_len, output_len=output_len)
        return search.largest(lambda batch_size: self.fits(workload.with_batch(batch_size)), search.LARGEST_BATCH)

    def _find_why_not(self, input_len: int, output_len: int) -> str | None:
        """Return the refusal in one line: the memory that is short, and settings that would work instead."""
        case, workload = self.case, Workload(batch_size=1, input_len=input_len, output_len=output_len)
        if contradiction := conflict(case.engine, case.options, case.offload, case.weights, case.gpu_weights):
            return contradiction
        if is_server(case.engine):  # it decides by itself
            return None
        if self.placer.options.kv_offload == "cpu" and not self.model.attends_by_name:
            return f"{case.model} computes attention itself: its KV cache stays on the GPU, take --kv-offload none"
        if not (shortages := self.shortages(workload)):
            return None
        model, ways = self.model, self._remedies(workload)
        cut = f" ({model.num_layers} of {model.total_layers} layers)" if model.num_layers < model.total_layers else ""
        needs = f"{case.model}{cut} with {case.engine}, offload {case.offload}, needs {' and '.join(shortages)}"
        return f"{needs}. What would work: {'; '.join(ways)}."

    def _remedies(self, workload: Workload) -> list[str]:
        """Return settings that need less memory, as they are typed."""
        case, model = self.case, self.model
        choices: list[Offload] = ["none", "cpu"]

        def fits(layers: int = model.num_layers, **fields: Any) -> bool:
            other = Planner(case.model_copy(update=fields), model.slice(layers), self.machine)
            return not other.shortages(workload)

        ways = [f"--offload {offload}" for offload in choices if fits(offload=offload)]
        if not ways and self.placer.transport.leaves_host:
            shares = (f"{share}%" for share in range(5, 100, 5))
            share = next((share for share in shares if fits(offload="cpu", gpu_weights=share)), None)
            ways += [] if share is None else [f"--offload cpu --gpu-weights {share}"]
        for offload in sorted(choices, key=lambda choice: choice != case.offload) if not ways else ():
            layers = search.largest(partial(fits, offload=offload), model.num_layers - 1)
            if layers:
                ways.append(f"--offload {offload} --layers {layers}, a slice of the {model.total_layers} layers")
                break
        engine = next(name for name, kind in ENGINES.items() if "nvme" in kind.offloads and "nvme" not in kind.builds)
        if case.offload != "nvme" and fits(offload="nvme", engine=engine):
            disk = f"with {gb(model.weight_bytes)} free there"
            ways.append(f"--engine {engine} --offload nvme --nvme-path DIR, {disk}")
        ways.append(f"another machine: `zinfer plan --model {case.model} --machine all` ranks those of the catalogue")
        return ways


def make_plan(
    case: Case, model: ModelSpec, machine: Machine, nvme_path: str | None = None, efficiency: Efficiency | None = None
) -> Plan:
    """Plan one case by itself."""
    return Planner(case, model, machine, efficiency, nvme_path).plan


def times_of(timing: Timing, workload: Workload, drafts: int = 0, full: int = 0) -> tuple[Times, Times]:
    """Return the times of prefill and step; a full ring saves `full` bytes."""
    ready = full // max(1, workload.output_len - 1)
    prefill = timing.prefill(workload.batch_size, workload.input_len, full)
    return prefill, timing.step(workload.batch_size, workload.mean_context, ready, drafts)


def e2e_s(workload: Workload, prefill_s: float | None, step_s: float | None) -> float | None:
    """Return the seconds of prefill and of all further tokens."""
    return None if prefill_s is None or step_s is None else prefill_s + step_s * (workload.output_len - 1)


def tok_s(workload: Workload, seconds: float | None) -> float | None:
    """Return the output tokens a second of a batch that takes `seconds`."""
    return workload.batch_size * workload.output_len / seconds if seconds else None
