"""Status and one-line error message for an exception of loading or running."""

import os
import traceback

from zinfer.checkpoint.headers import CheckpointError
from zinfer.core.engine import OptionError
from zinfer.core.errors import ENVIRONMENT, INTERNAL, NotFiniteError, ZinferError, error_line, is_out_of_memory
from zinfer.core.model import ModelError
from zinfer.engine import EngineError
from zinfer.record.measurement import Status
from zinfer.system.documents import DocumentError

_STATUSES: dict[Status, tuple[type[BaseException], ...]] = {
    "nan_output": (NotFiniteError,),
    "unsupported": (ModelError, EngineError, OptionError, NotImplementedError),
    "io_error": (CheckpointError, DocumentError, OSError),
    "cancelled": (KeyboardInterrupt,),
}


def failure_of(error: BaseException) -> tuple[Status, str, int]:
    """Return status, line and exit code; with --debug, stderr gets the traceback."""
    if os.environ.get("ZINFER_DEBUG") == "1":
        traceback.print_exception(error)
    status, text = status_of(error), error_line(error)
    if status == "oom_host" and not ("memory" in text and isinstance(error, MemoryError)):
        text = f"host memory ran out ({text})"
    exit_code = INTERNAL if status == "crashed" else ENVIRONMENT
    if isinstance(error, ZinferError) and not isinstance(error, EngineError):  # the same engine may run elsewhere
        exit_code = error.exit_code
    return status, text, exit_code


def status_of(error: BaseException) -> Status:
    """Return the status for an exception of loading or measuring."""
    text = str(error).lower()
    names = {base.__name__ for base in type(error).__mro__}
    if "OutOfMemoryError" in names or ("cuda" in text and "out of memory" in text) or "alloc_failed" in text:
        return "oom_gpu"
    if is_out_of_memory(error):
        return "oom_host"
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), "crashed")
