"""`zinfer doctor`: check packages, hardware, and which engines can run with them."""

import ctypes.util
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

import click

from zinfer import engine
from zinfer.commands.out import Table, console
from zinfer.commands.verb import Verb
from zinfer.core.engine import ENGINES
from zinfer.core.errors import ENVIRONMENT, error_line
from zinfer.core.units import gib
from zinfer.engine.server import preset
from zinfer.system import host

# distributions by the pip extra that installs them; empty: zinfer itself does
PACKAGES = {
    **dict.fromkeys(("click", "pydantic", "rich", "matplotlib", "nvidia-ml-py"), ""),
    **dict.fromkeys(("torch", "transformers", "accelerate", "deepspeed", "safetensors", "huggingface_hub"), "engines"),
    "humming-kernels": "kernels",
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus-client"), "serve"),
    "llguidance": "structured",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
}


class Finding(NamedTuple):
    """Line of the report: subject, finding, and advice."""

    name: str
    finding: str
    advice: str = ""


@click.command("doctor", cls=Verb)
def command() -> None:
    """Check packages, hardware and which engines can run here. The exit code is 5 if no engine can."""
    engines = engine_rows()
    rows = [*package_rows(), *machine_rows(), *engines]
    servers = [(name, server) for name in preset.presets() if (server := preset.read(name)) is not None]
    rows += [Finding(name, server.ask_version() or "not installed") for name, server in servers]
    console().print(Table("", ("", "found", "what to do"), rows))
    if all(row.advice for row in engines):
        raise SystemExit(ENVIRONMENT)


def package_rows() -> list[Finding]:
    """Return rows on the versions of Python, zinfer and packages."""
    rows = [Finding("python", platform.python_version())]
    rows.append(Finding("zinfer", host.package_version("zinfer") or "not installed"))
    for package, extra in PACKAGES.items():
        version = host.package_version(package)
        advice = "" if version else f"pip install 'zinfer[{extra}]'" if extra else "pip install zinfer"
        rows.append(Finding(package, version or "missing", advice))
    return rows


def machine_rows() -> list[Finding]:
    """Return rows on GPU, memory, disk and compilers."""
    devices, usable = host.gpus(), host.host_bytes()
    gpu, advice = "none", "the CPU is used instead"
    if devices:
        gpu, advice = f"{len(devices)} x {devices[0].get('name')}, driver {devices[0].get('driver', 'unknown')}", ""
    elif Path("/dev/nvidiactl").exists():
        gpu, advice = "none for torch", "a driver is installed: install torch with CUDA, and check CUDA_VISIBLE_DEVICES"
    why = "the control group's limit" if usable == host.memory_limit() else "all of it"
    compiler = _first("cc", "gcc", "clang")
    needed = "" if compiler else "install gcc: without it `stream` cannot unpack weights and --kv-offload is slow"
    folders = [*filter(None, os.environ.get("CPATH", "").split(":")), "/usr/include", "/usr/local/include"]
    async_io = {
        "libaio": ctypes.util.find_library("aio"),
        "libaio.h": next((path for folder in folders if (path := Path(folder, "libaio.h")).is_file()), None),
        "C++ compiler": _first("c++", "g++", "clang++"),
    }
    lacking = ", ".join(f"no {name}" for name, part in async_io.items() if part is None)
    means = "DeepSpeed cannot offload to NVMe (--engine deepspeed --offload nvme); all else runs"
    return [
        Finding("GPU", gpu, advice),
        Finding("host memory", f"{gib(usable)}, {why}; {gib(host.available_bytes())} of it free"),
        Finding("free disk", gib(shutil.disk_usage(".").free)),
        Finding("C compiler", compiler or "none", needed),
        Finding(
            "libaio",
            lacking or ", ".join(map(str, async_io.values())),
            f"apt install libaio-dev g++; without it {means}" * bool(lacking),
        ),
    ]


def _first(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def engine_rows() -> list[Finding]:
    """Return each engine's offloads, or why it cannot run."""
    rows = []
    for name in ENGINES:
        try:
            offloads = sorted(engine.kind(name).offloads)
            from zinfer.engine import base

            unable = base.load(ENGINES[name].target).unable()  # an installed package may still fail to import
            finding = "cannot run" if unable else f"can run; offload {', '.join(offloads)}"
            rows.append(Finding(name, finding, unable or ""))
        except (engine.EngineError, ImportError) as error:
            rows.append(Finding(name, "cannot run", error_line(error)))
    return rows
