"""DeepSpeed on several GPUs of a host.

All ranks gather each weight in each forward pass, so all must run as many: one with fewer rows runs idle passes
besides. A pass that fails in one rank ends all processes.
"""

from collections.abc import Sequence

from torch import Tensor

from zinfer.core.progress import Progress
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.engine.deepspeed import DeepSpeed
from zinfer.engine.team import Member, PassResult, RankWork, Team, TeamBatch
from zinfer.plan.planner import Plan

Share = tuple[RankWork | None, int]  # part of a work that a rank computes, and every rank's passes


class DeepSpeedMember(Member[DeepSpeed]):
    """A rank's `DeepSpeed`."""

    def load(self, plan: Plan, progress: Progress) -> DeepSpeed:
        try:
            return DeepSpeed(plan, progress, self.group)
        except BaseException as error:  # an EngineError is alike in all ranks; those end with their leader
            if self.group.rank == 0 or isinstance(error, EngineError | EOFError):
                raise
            with self.group.undivided():
                raise

    def close(self) -> None:
        self.engine.close()  # needs the others' company until then
        self.group.leave()

    def forward(self, works: Sequence[Share]) -> PassResult:
        """Run each work's forward passes, and idle ones up to their number."""
        logits: list[Tensor] = []
        with self.group.undivided():
            for work, passes in works:
                before = self.engine.calls
                if work is not None:
                    logits += self.engine.forward(self.works([work]))
                while self.engine.calls < before + passes:
                    self.engine.idle_pass()
        return PassResult(logits)


class DeepSpeedTeam(Team[DeepSpeed]):
    """Engine `deepspeed` on several GPUs."""

    member = DeepSpeedMember

    def orders(self, works: Sequence[Work[TeamBatch]]) -> list[list[Share]]:
        shares: list[list[Share]] = [[] for _ in range(self._group.size)]
        for work in works:
            count = work.token_ids.shape[1]
            self._engine.check_chunk(work.batch, count)
            max_rows = max(len(work.batch.rows_of(rank)) for rank in work.batch.lengths)
            passes = self._engine.passes_of(max_rows, count)
            for share, computed in zip(shares, super().orders([work]), strict=True):
                share.append((computed[0] if computed else None, passes))
        return shares
