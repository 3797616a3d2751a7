"""`zinfer doctor`: check packages, hardware, and which engines can run with them."""

from typing import Any, NamedTuple

import click

# distribution -> the pip extra that installs it; empty: zinfer itself does
PACKAGES = {
    "click": "",
    "pydantic": "",
    "rich": "",
    "matplotlib": "",
    "nvidia-ml-py": "",
    "torch": "engines",
    "transformers": "engines",
    "accelerate": "engines",
    "deepspeed": "engines",
    "safetensors": "engines",
    "huggingface_hub": "engines",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus-client": "serve",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
}


class Finding(NamedTuple):
    """Line of the report: subject, finding, and advice."""

    group: str
    name: str
    found: str
    advice: str = ""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Check packages, hardware and which engines can run here. The exit code is 5 if no engine can."""
    import json

    from zinfer.commands.out import console, table
    from zinfer.core.errors import ENVIRONMENT

    engines = engine_rows()
    rows = [*package_rows(), *machine_rows(), *engines]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        ends = [nth for nth, row in enumerate(rows[:-1]) if rows[nth + 1].group != row.group]
        cells = [(row.name, row.found, row.advice) for row in rows]
        console().print(table("", ("", "found", "what to do"), cells, ends=ends))
    if all(row.advice for row in engines):
        raise SystemExit(ENVIRONMENT)


def package_rows() -> list[Finding]:
    """Return rows on the versions of Python, zinfer and packages."""
    import platform

    from zinfer.system.host import package_version

    rows = [
        Finding("package", "python", platform.python_version()),
        Finding("package", "zinfer", package_version("zinfer") or "not installed"),
    ]
    for package, extra in PACKAGES.items():
        version = package_version(package)
        advice = "" if version else f"pip install 'zinfer[{extra}]'" if extra else "pip install zinfer"
        rows.append(Finding("package", package, version or "missing", advice))
    return rows


def machine_rows() -> list[Finding]:
    """Return rows on GPU, memory, disk and compilers."""
    import resource
    import shutil
    from pathlib import Path

    from zinfer.core.units import gib
    from zinfer.system.host import available_bytes, gpus, host_bytes, memory_limit

    devices: list[dict[str, Any]] = gpus()
    gpu, advice = "none", "the CPU is used instead"
    if devices:
        gpu, advice = f"{len(devices)} x {devices[0].get('name')}, driver {devices[0].get('driver', 'unknown')}", ""
    elif Path("/dev/nvidiactl").exists():
        gpu, advice = "none for torch", "a driver is installed: install torch with CUDA, and check CUDA_VISIBLE_DEVICES"
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    # NVIDIA's driver pins pages itself and ignores the limit (os-mlock.c of open-gpu-kernel-modules). It applies to
    # io_uring and to mlock, with which DeepSpeed locks the buffers of offload nvme.
    locks = "; does not limit CUDA's page-locking" if devices else ""
    usable = host_bytes()
    why = "the control group's limit" if usable == memory_limit() else "all of it"
    return [
        Finding("machine", "GPU", gpu, advice),
        Finding("machine", "host memory", f"{gib(usable)}, {why}; {gib(available_bytes())} of it free"),
        Finding("machine", "memlock limit", ("none" if lock == resource.RLIM_INFINITY else gib(lock, 3)) + locks),
        Finding("machine", "free disk", gib(shutil.disk_usage(".").free)),
        _compiler_row(),
        _async_io_row(),
    ]


def _compiler_row() -> Finding:
    """Return the row on the C compiler, for Triton and CPU attention."""
    import shutil

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    advice = "" if compiler else "install gcc: without it `stream` cannot unpack weights and --kv-offload is slow"
    return Finding("machine", "C compiler", compiler or "none", advice)


def _async_io_row() -> Finding:
    """Return the row on libaio and C++, for DeepSpeed's offload `nvme`."""
    import os
    import shutil
    from ctypes.util import find_library
    from pathlib import Path

    folders = [*os.environ.get("CPATH", "").split(":"), "/usr/include", "/usr/local/include"]
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    parts = {
        "libaio": find_library("aio"),
        "libaio.h": next(
            (str(file) for folder in folders if folder and (file := Path(folder, "libaio.h")).is_file()), None
        ),
        "C++ compiler": compiler,
    }
    lacking = [name for name, text in parts.items() if text is None]
    text = ", ".join(f"no {name}" for name in lacking) or ", ".join(str(text) for text in parts.values())
    means = "DeepSpeed cannot offload to NVMe (--engine deepspeed --offload nvme); all else runs"
    advice = f"apt install libaio-dev g++; without it {means}" if lacking else ""
    return Finding("machine", "libaio", text, advice)


def engine_rows() -> list[Finding]:
    """Return each engine's offloads, or why it cannot run."""
    from zinfer.core.engine import ENGINES
    from zinfer.engine import EngineError, kind

    rows = []
    for name in ENGINES:
        try:
            offloads = sorted(kind(name).offloads)
            from zinfer.engine import base

            unable = base.load(ENGINES[name].target).unable()  # an installed package may still fail to import
            finding = "cannot run" if unable else f"can run; offload {', '.join(offloads)}"
            rows.append(Finding("engine", name, finding, unable or ""))
        except (EngineError, ImportError) as error:
            rows.append(
                Finding("engine", name, "cannot run", " ".join(str(error).split())[:200] or type(error).__name__)
            )
    return rows
