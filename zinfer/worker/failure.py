"""Status and one-line error message for an exception of loading or running."""

import os

from zinfer.record.measurement import Status
from zinfer.spec.errors import one_line
from zinfer.spec.value import Frozen


class TaskFailure(Frozen):
    """The answer of a task that failed: its status, one line that says why, and where it ended."""

    status: Status
    error: str
    stage: str = ""


def failure_of(error: BaseException, stage: str) -> TaskFailure:
    """Return the failure that a record keeps of an exception; with --debug, stderr gets its traceback."""
    if os.environ.get("ZINFER_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    return TaskFailure(status=status_of(error), error=one_line(error), stage=stage)


def status_of(error: BaseException) -> Status:
    """Return the status for an exception of loading or measuring."""
    from zinfer.engine import EngineError
    from zinfer.generation.sampling import NotFiniteError
    from zinfer.spec.checkpoint import CheckpointError
    from zinfer.spec.documents import DocumentError
    from zinfer.spec.engine import OptionError
    from zinfer.spec.model import ModelError

    text = str(error).lower()
    names = {base.__name__ for base in type(error).__mro__}
    if "OutOfMemoryError" in names or ("cuda" in text and "out of memory" in text) or "alloc_failed" in text:
        return "oom_gpu"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return "oom_host"
    if isinstance(error, NotFiniteError):
        return "nan_output"
    if isinstance(error, ModelError | EngineError | OptionError | NotImplementedError):
        return "unsupported"
    if isinstance(error, CheckpointError | DocumentError | OSError):
        return "io_error"
    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    return "crashed"
