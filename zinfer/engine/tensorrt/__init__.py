"""Engine `tensorrt`: runs a plan of `zinfer pack`; the library streams.

The library keeps as many bytes of weights on the GPU as its budget allows and copies the rest in every pass. Offload
`none` sets the budget to all weights; `cpu` (weights in host memory) sets it to ``--gpu-weights``, or to the library's
own choice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinfer.core.engine import TensorRTOptions
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work, check_works
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.tensorrt import planfile
from zinfer.engine.tensorrt.attention import Cache
from zinfer.engine.tensorrt.build import plan_key
from zinfer.engine.tensorrt.execute import DECODE, PREFILL, Executor
from zinfer.engine.tensorrt.library import find_library
from zinfer.plan.planner import Plan
from zinfer.record.measurement import Effective


class TensorRTBatch(MicroBatch):
    """Micro-batch of the `tensorrt` engine. `mask` ``[B, capacity]`` is False at padding."""

    def __init__(self, mask: Tensor, capacity: int, cache: Cache) -> None:
        super().__init__(mask.shape[0], mask.shape[1], capacity)
        self.cache: Cache | None = cache
        self.mask = torch.ones((self.batch_size, capacity), dtype=torch.bool, device=mask.device)
        self.mask[:, : self.prompt_len] = mask.bool()
        self.key_positions = (self.mask.cumsum(-1) - 1).clamp(min=0).int()


class TensorRT(Engine[TensorRTBatch]):
    """Engine that runs the plan which serves the case. Raises EngineError, with a remedy, where there is none."""

    options: TensorRTOptions
    _executor: Executor | None = None

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        self._library = find_library()
        self.file = self._find_plan()
        try:
            self._executor = self._make_executor()
        except BaseException:
            self.close()
            raise

    @classmethod
    def unable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no GPU; `zinfer pack --engine tensorrt` can still build plans here, with TensorRT-RTX"
        return find_library().why_not(torch.cuda.get_device_capability())

    def _find_plan(self) -> planfile.PlanFile:
        case, load = self.plan.case, self.plan.case.workload
        shape = case.layers, load.batch_size, load.total_len
        key = plan_key(self._library, case.model, self.plan.model, case.load_format, *shape)
        file = planfile.find(key, self.options.plan)
        if file.allow_nan and not case.allow_nan:
            raise EngineError(f"{file.path} was built with --allow-nan: add it here, or build the plan again without")
        return file

    def _make_executor(self) -> Executor:
        if self.device.type != "cuda":
            raise EngineError(f"engine tensorrt needs a GPU to run {self.file.path}, and this machine has none")
        case = self.plan.case
        return Executor(self._library, self.file, case.gpu_weights, case.offload != "none", self.progress)

    @torch.inference_mode()
    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> TensorRTBatch:
        if past is not None:
            raise EngineError(self.cannot_snapshot() or "")
        mask, key = attention_mask.to(self.device), self.file.key
        for name, asked in (("max_batch_size", len(mask)), ("max_seq_len", capacity)):
            if asked > (built := getattr(key, name)):
                command = planfile.build_command(key.model_copy(update={name: asked}))
                raise EngineError(f"{name} {asked} is more than the {built} of {self.file.path.name}. Build: {command}")
        cache = Cache(self.plan.model, len(mask), key.max_seq_len, self.device)
        self.batches.append(batch := TensorRTBatch(mask, capacity, cache))
        return batch

    @torch.inference_mode()
    def forward(self, works: Sequence[Work[TensorRTBatch]]) -> list[Tensor]:
        check_works(works, self.batches)
        return [self._pass(work) for work in works]

    def _pass(self, work: Work[TensorRTBatch]) -> Tensor:
        batch, token_ids, keep = work
        count = token_ids.shape[1]
        first = batch.length == 0 and count == batch.prompt_len
        if keep != 1 or not (first or (batch.length and count == 1)):
            raise EngineError(self.cannot_chunk() or "")
        token_ids = token_ids.to(self.device)
        at_once = min(batch.batch_size, self.file.prefill_rows) if first else batch.batch_size
        parts = [slice(row, min(row + at_once, batch.batch_size)) for row in range(0, batch.batch_size, at_once)]
        logits = torch.cat([self._run(PREFILL if first else DECODE, batch, token_ids, rows) for rows in parts])
        batch.length += count
        return logits[:, None]

    def _run(self, profile: int, batch: TensorRTBatch, token_ids: Tensor, rows: slice) -> Tensor:
        """Compute the next tokens of `rows`; return the logits ``[b, V]``."""
        assert self._executor is not None
        assert batch.cache is not None
        token_ids = token_ids[rows]
        (count, new), past = token_ids.shape, batch.length
        total = past + new
        index = torch.arange(total, dtype=torch.int32, device=self.device)
        key_positions = batch.key_positions[rows, :total]
        inputs, outputs = batch.cache.bind(rows, past)
        inputs |= {
            "token_ids": token_ids.int().contiguous(),
            "positions": key_positions[:, past:].contiguous(),
            "key_positions": key_positions.contiguous(),
            "mask": batch.mask[rows, :total].contiguous(),
            "keys": index,
            "ends": index[past:] + 1,
            "last": torch.full((1,), new - 1, dtype=torch.int32, device=self.device),
        }
        dtype = getattr(torch, self.plan.model.dtype)
        logits = torch.empty((count, self.plan.model.vocab_size), dtype=dtype, device=self.device)
        wanted = {name: tensor for name, tensor in inputs.items() if name in self._executor.inputs}
        self._executor.run(profile, wanted, outputs | {"logits": logits})
        return logits

    def cannot_score(self) -> str | None:
        return f"engine {self.plan.case.engine} returns the logits of the last position only"

    def retire(self, batch: TensorRTBatch, rows: Sequence[int] | None = None) -> None:
        kept = [] if rows is None else sorted(set(range(batch.batch_size)) - set(rows))
        if batch.cache is None or not kept:
            self.discard(batch)
            batch.cache = None
        elif len(kept) < batch.batch_size:
            index = torch.tensor(kept, device=self.device)
            batch.cache.keep_rows(index)
            batch.mask, batch.key_positions = batch.mask[index], batch.key_positions[index]
            batch.batch_size = len(kept)

    def effective(self) -> Effective:
        assert self._executor is not None
        executor, weight_bytes = self._executor, self.file.weight_bytes
        return Effective(
            gpu_weight_bytes=weight_bytes - executor.streamable + executor.budget,
            host_weight_bytes=executor.streamable,  # the library keeps all in host memory, whatever the budget
            streamed_bytes_per_step=executor.streamable - executor.budget,
            shortfall=executor.shortfall(weight_bytes),
            settings={
                "library": f"{self._library.name} {self._library.version}",
                "plan": self.file.path.name,
                "streamable_bytes": executor.streamable,
                "budget_bytes": executor.budget,
                "scratch_bytes": executor.scratch,
                "library_gpu_bytes": executor.taken,
            },
        )

    def close(self) -> None:
        self.clear()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
