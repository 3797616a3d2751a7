"""Engine `server`: another program serves the model, and zinfer measures it from outside."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zinfer.core.case import Workload
from zinfer.core.engine import ServerOptions
from zinfer.core.progress import Progress, silent
from zinfer.engine import EngineError
from zinfer.engine.base import Engine, MicroBatch, Work
from zinfer.engine.kv_snapshot import RowsPast
from zinfer.engine.server.preset import Preset, read
from zinfer.engine.server.process import Address, MemoryWatch, ServerDied, ServerProcess, free_port, wait_ready
from zinfer.plan.planner import Plan

_NO_PASSES = "a server runs its own passes: `zinfer sweep` measures it, run, batch and serve are for other engines"


class Server(Engine[MicroBatch]):
    """Server of a preset, restarted where a workload needs other arguments."""

    options: ServerOptions

    def __init__(self, plan: Plan, progress: Progress = silent) -> None:
        super().__init__(plan, progress)
        case, server = plan.case, read(plan.case.engine)
        if server is None:
            raise EngineError(f"no preset of {case.engine}")
        if (why_not := server.why_not(case)) is not None:
            raise EngineError(why_not)
        self.preset: Preset = server
        self.command: tuple[str, ...] = ()
        self.version = server.ask_version()
        self._server: ServerProcess | None = None
        self._port = free_port()
        self._memory = MemoryWatch()
        self.address: Address
        self.model = ""
        try:
            self.prepare(case.workload)
        except BaseException:
            self.close()
            raise

    def prepare(self, workload: Workload) -> None:
        """Have a ready server for `workload`. Raises EngineError, OptionError, ServerDied."""
        case = self.plan.case
        if self.options.url:
            self.address = Address.of(self.options.url)
        else:
            address = Address(*self._port.getsockname())
            words = self.preset.command_line(case, self.plan.model, workload, address.port)
            if self._server is not None and self._server.alive and tuple(words) == self.command:
                return
            self._end()
            self.command, self.address = tuple(words), address
            if not self.preset.installed:
                raise EngineError(f"{self.preset.program} is not installed: {case.engine} needs it")
            self._server = ServerProcess(words, self.preset.env)
            self._memory.pid = self._server.pid
        try:
            wait_ready(self.address, self.preset.ready, self.options.ready_s, self._server, self.progress)
            status, body = self.address.get("/v1/models")
            try:
                self.model = str(json.loads(body)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise EngineError(f"{case.engine} names no model: /v1/models has status {status}") from None
        except BaseException:  # the next point starts it anew
            self._end()
            raise

    def broken(self, error: Exception) -> Exception:
        """Return the error of a broken connection: the server's death, if it died."""
        if self._server is None:
            return ServerDied(f"{self.address.host}:{self.address.port} does not answer: {error}")
        return self._server.died("closed a connection" if self._server.alive else "ended")

    def described(self) -> dict[str, Any]:
        command = shlex.join(self.command) if self.command else self.options.url
        return {"command": f"{command} # {self.version}" if self.version else command}

    def admit(self, attention_mask: Tensor, capacity: int, past: RowsPast | None = None) -> MicroBatch:
        raise EngineError(_NO_PASSES)

    def forward(self, works: Sequence[Work[MicroBatch]]) -> list[Tensor]:
        raise EngineError(_NO_PASSES)

    def retire(self, batch: MicroBatch, rows: Sequence[int] | None = None) -> None:
        raise EngineError(_NO_PASSES)

    def effective(self) -> Any:
        """Return None: a server's weights cannot be counted from outside."""
        return None

    def reset_peak(self) -> None:
        self._memory.reset()

    def device_memory(self) -> tuple[int, int] | None:
        return None if self.options.url else self._memory.gpu

    def host_memory(self) -> Any:
        """Return the peak of the server's memory, in bytes. None for one that another started."""
        return None if self.options.url else self._memory.host_peak

    def close(self) -> None:
        self._end()
        self._memory.close()
        self._port.close()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
