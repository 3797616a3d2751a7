"""`zinfer doctor`: what is installed, what the machine offers, and which engines that is enough for."""

from typing import Any, NamedTuple

import click

# distribution -> the pip extra that brings it; the empty extra is zinfer itself
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
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt-rtx",
}


LOCKS = "; CUDA's page-locking is not bound by it"


class Row(NamedTuple):
    """One line of the report: what was looked at, what was found, and what to do if that is not enough."""

    group: str
    name: str
    found: str
    advice: str = ""


@click.command("doctor", short_help="Check what is installed and what this machine can run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Check what is installed and which engines can run here. The exit code is 5 when none can."""
    import json

    from rich.markup import escape
    from rich.table import Table

    from zinfer.commands.out import console
    from zinfer.spec.errors import ENVIRONMENT

    engines = engine_rows()
    rows = [*package_rows(), *machine_rows(), *engines]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        table = Table("", "found", "what to do")
        for index, row in enumerate(rows):
            last = index + 1 == len(rows) or rows[index + 1].group != row.group
            table.add_row(row.name, escape(row.found), escape(row.advice), end_section=last)
        console().print(table)
    if all(row.advice for row in engines):
        raise SystemExit(ENVIRONMENT)


def package_rows() -> list[Row]:
    """Python, zinfer and every package that some verb or engine uses, with its version."""
    import platform

    from zinfer.spec.host import metadata_version

    rows = [
        Row("package", "python", platform.python_version()),
        Row("package", "zinfer", metadata_version("zinfer") or "not installed"),
    ]
    for package, extra in PACKAGES.items():
        version = metadata_version(package)
        advice = "" if version else f"pip install 'zinfer[{extra}]'" if extra else "pip install zinfer"
        rows.append(Row("package", package, version or "missing", advice))
    return rows


def machine_rows() -> list[Row]:
    """The GPU, the memory that may be used and page-locked, and the disk here."""
    import resource
    import shutil
    from pathlib import Path

    from zinfer.spec.host import available_bytes, gpus, host_bytes, memory_limit
    from zinfer.spec.units import gib

    devices: list[dict[str, Any]] = gpus()
    gpu, advice = "none", "the CPU stands in for it"
    if devices:
        gpu, advice = f"{len(devices)} x {devices[0].get('name')}, driver {devices[0].get('driver', 'unknown')}", ""
    elif Path("/dev/nvidiactl").exists():
        gpu, advice = "none for torch", "there is a driver: install a torch with CUDA, and see CUDA_VISIBLE_DEVICES"
    lock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    why = "the control group's limit" if memory_limit() == host_bytes() else "all there is"
    return [
        Row("machine", "GPU", gpu, advice),
        Row("machine", "host memory", f"{gib(host_bytes())}, {why}; {gib(available_bytes())} of it free"),
        # NVIDIA's driver pins pages itself and asks no limit (os-mlock.c of open-gpu-kernel-modules); mlock, by which
        # DeepSpeed locks the buffers of offload nvme, and io_uring do.
        Row("machine", "memlock limit", ("none" if lock == resource.RLIM_INFINITY else gib(lock, 3)) + LOCKS),
        Row("machine", "free disk", gib(shutil.disk_usage(".").free)),
        _compiler_row(),
    ]


def _compiler_row() -> Row:
    """What compiles the launch of a GPU's kernels, the CPU's attention to a KV cache, and DeepSpeed's file I/O."""
    import shutil

    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    advice = "" if found else "install one (gcc): `stream` cannot unpack weights without it, and --kv-offload is slow"
    return Row("machine", "C compiler", found or "none", advice)


def engine_rows() -> list[Row]:
    """Every engine: whether it can run here, and if not, why not."""
    from zinfer.engine import ENGINES, EngineError, kind, load

    rows = []
    for name in ENGINES:
        try:
            offloads = sorted(kind(name).offloads)
            unable = load(ENGINES[name].target).unable()  # an installed package may still fail to import
            found = "cannot run" if unable else f"can run; offload {', '.join(offloads)}"
            rows.append(Row("engine", name, found, unable or ""))
        except (EngineError, ImportError) as error:
            rows.append(Row("engine", name, "cannot run", " ".join(str(error).split())[:200] or type(error).__name__))
    return rows
