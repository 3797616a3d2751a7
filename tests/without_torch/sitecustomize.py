"""Refuse to import torch in this process. Python runs this module when it starts."""

import os
import sys
import traceback


class TorchImported(BaseException):
    """Import of torch in a run without torch. No ``except Exception`` hides it."""


def refuse_torch(event: str, args: tuple[object, ...]) -> None:
    """Raise `TorchImported` at an import of torch.

    The stack is appended to the file that ``ZINFER_TORCH_IMPORTS`` names: the test reads it, whatever becomes of the
    process.
    """
    if event != "import" or str(args[0]).partition(".")[0] != "torch":
        return
    if "torch" in sys.modules and sys.modules["torch"] is None:  # a test hides torch: this import fails by itself
        return
    if name := os.environ.get("ZINFER_TORCH_IMPORTS"):
        stack = (frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith("<frozen"))
        with open(name, "a") as log:
            log.write(f"process {' '.join(sys.orig_argv)[:200]!r} imports {args[0]}\n")
            log.writelines(traceback.format_list(list(stack)[-8:]))
    raise TorchImported("a run without torch imports it")


sys.addaudithook(refuse_torch)
