"""Presets: how a server is started and asked, as data (``engines/<name>.toml``). Their names are engines."""

import shlex
import shutil
import string
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zinfer.core.case import Case, Workload, resident_bytes
from zinfer.core.engine import OptionError, ServerOptions, read_options
from zinfer.core.model import ModelSpec
from zinfer.core.value import Frozen
from zinfer.system import documents

FOLDER = Path("engines")
GIB = 1 << 30
VERSION_S = 60  # for a command to print its version
PLACEHOLDERS = {
    "model": "checkpoint folder, or option `file`",
    "port": "free port on 127.0.0.1",
    "python": "zinfer's own Python",
    "load_format": "auto, or dummy for random weights",
    "dtype": "type of the weights: bfloat16, float16 or float32",
    "context": "tokens of a prompt with its answer",
    "batch": "requests at a time",
    "tokens": "context x batch",
    "host_gib": "weights off the GPU, in GiB",
    "host_layers": "layers off the GPU",
    "gpu_layers": "layers on the GPU",
    "offload": "arguments of the offload, then those of option `args`",
}
_SHARES = {"host_gib", "host_layers", "gpu_layers"}


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def _template(template: str) -> str:
    if unknown := _fields(template) - PLACEHOLDERS.keys():
        raise ValueError(f"no placeholder {{{min(unknown)}}}; there are {', '.join(PLACEHOLDERS)}")
    shlex.split(template)
    return template


Template = Annotated[str, Field(max_length=4000), AfterValidator(_template)]


class Preset(Frozen):
    """Preset of a server: how it is started and asked. Templates have the placeholders of `PLACEHOLDERS`."""

    description: str = Field(max_length=4000)
    command: Template
    offload: dict[Literal["none", "cpu"], Template] = Field(min_length=1)  # arguments of each offload that it has
    version: str = ""  # command that prints its version
    ready: str = "/health"  # answers with status 200 once the model is loaded
    body: dict[str, Any] = Field(default_factory=dict)  # parameters of each request beside those of OpenAI's API
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def program(self) -> str:
        """First word of the command."""
        return shlex.split(self.command)[0].format(python=sys.executable)

    @property
    def installed(self) -> bool:
        return shutil.which(self.program) is not None

    def ask_version(self) -> str:
        """Return what the command `version` prints, a line; empty if it prints none."""
        words = [word.format(python=sys.executable) for word in shlex.split(self.version)]
        with suppress(OSError, subprocess.SubprocessError, IndexError):
            printed = subprocess.run(words, capture_output=True, text=True, timeout=VERSION_S, check=True)
            return (printed.stdout or printed.stderr).strip().splitlines()[0][:200]
        return ""

    def arguments(self, case: Case) -> str:
        return {str(offload): template for offload, template in self.offload.items()}[case.offload]

    def why_not(self, case: Case) -> str | None:
        """Return why this server cannot run `case`."""
        server, keeps = case.engine, _fields(f"{self.command} {self.arguments(case)}") & _SHARES
        if case.layers is not None:
            return f"--layers is for zinfer's engines: {server} runs whole models"
        if case.gpu_weights is not None and not keeps:
            return f"--gpu-weights {case.gpu_weights}: the preset of {server} has no placeholder for a share"
        return None

    def command_line(self, case: Case, model: ModelSpec, workload: Workload, port: int) -> list[str]:
        """Return the words that start the server for `workload`. Raises OptionError."""
        settings = read_options(case.engine, case.options)
        assert isinstance(settings, ServerOptions)
        streamed = round(model.streamed_bytes * model.stored_ratio)
        kept = streamed if case.offload == "none" else resident_bytes(case.gpu_weights, streamed)
        gpu_layers = model.num_layers * kept // streamed
        file = settings.file or model.directory
        dummy = case.load_format == "dummy" and "load_format" in _fields(self.command)
        if file is None and dummy and Path(case.model).is_dir():
            file = case.model  # a folder without weights: the server makes them
        if file is None and "model" in _fields(self.command):
            raise OptionError(f"{case.engine} needs a checkpoint on disk: give --model FOLDER, or -O file=FILE")
        values: dict[str, Any] = {
            "model": file,
            "port": port,
            "python": sys.executable,
            "load_format": "dummy" if case.load_format == "dummy" else "auto",
            "dtype": model.dtype,
            "context": workload.total_len,
            "batch": workload.batch_size,
            "tokens": workload.total_len * workload.batch_size,
            "host_gib": f"{(streamed - kept) / GIB:.2f}",
            "host_layers": model.num_layers - gpu_layers,
            "gpu_layers": gpu_layers,
        }
        try:
            more = shlex.split(settings.args)
        except ValueError as error:
            raise OptionError(f"args={settings.args[:60]}: {error}") from None
        words = []
        for word in shlex.split(self.command):
            if word == "{offload}":
                arguments = shlex.split(self.arguments(case))
                words += [*(argument.format(**values) for argument in arguments), *more]
            else:
                words.append(word.format(**values))
        return words


def presets() -> dict[str, Path]:
    """Return the files of presets by name: the current directory's, else ours."""
    return {name: path for name, path in documents.catalogue(FOLDER).items() if "command" in documents.read_toml(path)}


def read(name: str) -> Preset | None:
    """Return the preset of an engine, or None. Raises DocumentError for a faulty one."""
    path = documents.catalogue(FOLDER).get(name)
    fields = {} if path is None else documents.read_toml(path)
    return documents.validate(Preset, fields, path) if "command" in fields else None
