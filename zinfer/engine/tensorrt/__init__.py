"""The `tensorrt` engine: a plan that `zinfer build` made, its weights streamed by the library itself.

The library keeps as many bytes of weights on the GPU as its budget allows and copies the rest for every pass. Offload
`none` sets the budget to all of them, `cpu` to what ``--gpu-weights`` says, or to what the library thinks best.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zinfer.engine import EngineError
from zinfer.engine.base import Engine, Progress, silent
from zinfer.engine.kv_snapshot import KVSnapshot
from zinfer.engine.tensorrt import planfile
from zinfer.engine.tensorrt.build import plan_key
from zinfer.engine.tensorrt.cache import Cache, make_cache
from zinfer.engine.tensorrt.execute import DECODE, PREFILL, Executor, shortfall
from zinfer.engine.tensorrt.library import find_library
from zinfer.plan.plan import Plan
from zinfer.record.measurement import Effective


class TensorRT(Engine):
    """Runs the plan that serves the case; raises EngineError, with the command that builds one, where there is none."""

    _executor: Executor | None = None
    _cache: Cache | None = None

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        self._library = find_library(str(self.options["library"]))
        self.file = self._find_plan()
        try:
            self._executor = self._make_executor()
        except BaseException:
            self.close()
            raise

    @classmethod
    def unable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no GPU; `zinfer build` can build its plans here all the same, with TensorRT-RTX"
        return find_library().why_not(torch.cuda.get_device_capability())

    def _find_plan(self) -> planfile.PlanFile:
        case, spec = self.plan.case, self.plan.model
        workload = case.workload
        key = plan_key(
            self._library, case.model, spec, case.load_format, case.layers, workload.batch_size, workload.total_len
        )
        return planfile.find(key, str(self.options["plan"]))

    def _make_executor(self) -> Executor:
        if self.device.type != "cuda":
            raise EngineError(f"engine tensorrt runs on a GPU, and there is none here to run {self.file.path}")
        case = self.plan.case
        return Executor(self._library, self.file, case.gpu_weights, case.offload != "none", self.progress)

    @torch.inference_mode()
    def prefill(
        self, token_ids: Tensor, attention_mask: Tensor, reserve: int = 0, past: Sequence[KVSnapshot] = ()
    ) -> Tensor:
        if past:
            raise EngineError(self.cannot_keep() or "")
        self.release()
        batch_size, length = token_ids.shape
        self._check_shapes(batch_size, length + reserve)
        token_ids, real = token_ids.to(self.device), attention_mask.to(self.device).bool()
        self._mask = torch.ones((batch_size, length + reserve), dtype=torch.bool, device=self.device)
        self._mask[:, :length] = real
        self._key_positions = (self._mask.cumsum(-1) - 1).clamp(min=0).int()
        key = self.file.key
        self._cache = make_cache(key.cache, self.plan.model, batch_size, length + reserve, key.max_seq_len, self.device)
        self._length = 0
        at_once = self.file.prefill_rows
        slices = [slice(start, min(start + at_once, batch_size)) for start in range(0, batch_size, at_once)]
        logits = torch.cat([self._run(PREFILL, token_ids[rows], rows) for rows in slices])
        self._length = length
        return logits

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        if self._cache is None:
            raise RuntimeError("decode() before prefill()")
        if self._length == self._mask.shape[1]:
            raise IndexError(f"the KV cache holds {self._length} tokens a sequence, and one more was decoded")
        logits = self._run(DECODE, token_ids[:, None], slice(0, len(token_ids)))
        self._length += 1
        return logits

    def _run(self, profile: int, token_ids: Tensor, rows: slice) -> Tensor:
        """A pass over the next tokens ``[b, S]`` of `rows`; the last one's logits ``[b, V]``."""
        assert self._executor is not None
        assert self._cache is not None
        (count, new), past = token_ids.shape, self._length
        total = past + new
        index = torch.arange(total, dtype=torch.int32, device=self.device)
        key_positions = self._key_positions[rows, :total]
        inputs, outputs = self._cache.bind(rows, past, new)
        inputs |= {
            "token_ids": token_ids.int().contiguous(),
            "positions": key_positions[:, past:].contiguous(),
            "key_positions": key_positions.contiguous(),
            "mask": self._mask[rows, :total].contiguous(),
            "keys": index,
            "ends": index[past:] + 1,
            "last": torch.full((1,), new - 1, dtype=torch.int32, device=self.device),
        }
        dtype = getattr(torch, self.plan.model.dtype)
        logits = torch.empty((count, self.plan.model.vocab_size), dtype=dtype, device=self.device)
        wanted = {name: tensor for name, tensor in inputs.items() if name in self._executor.inputs}
        self._executor.run(profile, wanted, outputs | {"logits": logits})
        self._cache.keep()
        return logits

    def _check_shapes(self, batch_size: int, length: int) -> None:
        key = self.file.key
        if batch_size > key.max_batch_size:
            raise EngineError(
                f"batch {batch_size} is more than the {key.max_batch_size} that {self.file.path.name} was built for: "
                + planfile.build_command(key.model_copy(update={"max_batch_size": batch_size}))
            )
        if length > key.max_seq_len:
            raise EngineError(
                f"{length} tokens a sequence are more than the {key.max_seq_len} that {self.file.path.name} was built "
                "for: " + planfile.build_command(key.model_copy(update={"max_seq_len": length}))
            )

    def effective(self) -> Effective:
        assert self._executor is not None
        executor, weight_bytes = self._executor, self.file.weight_bytes
        return Effective(
            gpu_weight_bytes=weight_bytes - executor.streamable + executor.budget,
            host_weight_bytes=executor.streamable,  # the library holds all of them there, whatever the budget
            streamed_bytes_per_step=executor.streamable - executor.budget,
            shortfall=shortfall(
                executor.asked,
                executor.budget,
                executor.streamable,
                allowed=weight_bytes - executor.streamable + executor.budget + executor.scratch,
                taken=executor.taken,
            ),
            settings={
                "library": f"{self._library.name} {self._library.version}",
                "plan": self.file.path.name,
                "kv_cache": self.file.key.cache,
                "streamable_bytes": executor.streamable,
                "budget_bytes": executor.budget,
                "scratch_bytes": executor.scratch,
                "library_gpu_bytes": executor.taken,
            },
        )

    def release(self) -> None:
        self._cache = None

    def close(self) -> None:
        self.release()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
