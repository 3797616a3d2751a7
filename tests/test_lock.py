"""Locked requirements: what `make` and CI install is pinned, hashed, and what setup.cfg asks for."""

import re
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
NAMES = ("build", "run", "dev", "judges")
EXTRAS = {"run": ("engines",), "dev": ("engines", "tensorrt-rtx", "dev"), "judges": ("engines", "judges", "ray")}
MACHINES = [
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine, "python_version": version,
     "python_full_version": f"{version}.1", "platform_python_implementation": "CPython", "extra": ""}
    for machine in ("x86_64", "aarch64")
    for version in ("3.11", "3.12", "3.13")
]  # fmt: skip


class Locked(NamedTuple):
    """One block of a lock: the requirement, and its hashes."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonical(self.requirement.name)

    @property
    def version(self) -> str:
        return next(iter(self.requirement.specifier)).version


def parse(text: str) -> list[Locked]:
    """Return the blocks of a lock. Raises ValueError for a line that is neither a requirement, a hash nor a comment."""
    requirements = []
    for block in re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).strip()):
        first, *rest = (line.strip().removesuffix("\\").strip() for line in block.splitlines())
        if not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in rest):
            raise ValueError(block)
        requirements.append(Locked(Requirement(first), tuple(rest)))
    return requirements


def lock(name: str) -> list[Locked]:
    return parse((FOLDER / f"{name}.txt").read_text())


def versions(name: str, machine: dict[str, str]) -> dict[str, str]:
    """Return the package versions that pip would install from a lock. `machine` holds the environment markers."""
    pinned: dict[str, str] = {}
    for requirement in lock(name):
        if requirement.requirement.marker is None or requirement.requirement.marker.evaluate(machine):
            assert requirement.name not in pinned, f"{requirement.name} twice"
            pinned[requirement.name] = requirement.version
    return pinned


def asked(*extras: str) -> list[Requirement]:
    """Return what setup.cfg requires, itself and for `extras`."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = [config["options"]["install_requires"], *(config["options.extras_require"][extra] for extra in extras)]
    return [Requirement(line) for text in lines for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert "://" not in text, "a lock names no index"
    for requirement in lock(name):
        assert re.fullmatch(r"==[\w.!+]+", str(requirement.requirement.specifier)), requirement
        assert requirement.hashes, requirement
        assert requirement.requirement.url is None
    for machine in MACHINES:
        assert versions(name, machine)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_is_what_setup_cfg_asks_for(name: str) -> None:
    """If this fails, run `make lock`."""
    for machine in MACHINES:
        pinned = versions(name, machine)
        for requirement in asked(*EXTRAS[name]):
            version = pinned.get(canonical(requirement.name))
            assert version is not None, f"{requirement} is not in requirements/{name}.txt"
            assert requirement.specifier.contains(version, prereleases=True), (requirement, version)


def test_locks_agree() -> None:
    for machine in MACHINES:
        run, dev, judges, build = (versions(name, machine) for name in ("run", "dev", "judges", "build"))
        assert run.items() <= dev.items()
        assert run.items() <= judges.items()
        assert {name: version for name, version in dev.items() if name in judges}.items() <= judges.items()
        assert build["setuptools"] == dev["setuptools"]


@pytest.mark.parametrize(("name", "gone"), [("run", "|triton"), ("dev", "")])
def test_a_build_for_cpus_lacks_what_cuda_alone_needs(name: str, gone: str, tmp_path: Path) -> None:
    """The recipes of the Makefile drop torch, NVIDIA's libraries, and nothing else."""
    words = ["make", "--silent", "--always-make", "--dry-run", f"--file={ROOT / 'Makefile'}", "TORCH=cpu", "setup"]
    recipe = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = [line for line in recipe.splitlines() if line.endswith(f"requirements/{name}.txt >.venv/{name}.txt")]
    (tmp_path / "requirements").symlink_to(FOLDER)
    (tmp_path / ".venv").mkdir()
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True)
    left = {requirement.name: requirement for requirement in parse((tmp_path / ".venv" / f"{name}.txt").read_text())}
    dropped = {requirement.name for requirement in lock(name)} - left.keys()
    assert {"torch", "cuda-toolkit", "nvidia-cublas"} < dropped
    assert all(re.match(r"torch$|cuda-|nvidia-" + (r"|triton$" if gone else ""), package) for package in dropped), (
        dropped
    )
    assert {"nvidia-ml-py", "numpy", "sympy", "networkx", "filelock", "fsspec", "jinja2"} < left.keys()
    assert ("triton" in left) is not gone.startswith("|")
    version = versions("run", MACHINES[0])["torch"]
    assert "--no-deps --index-url https://download.pytorch.org/whl/cpu" in recipe
    (torch,) = re.findall(r'whl/cpu (".*")', recipe)
    shown = subprocess.run(["/bin/sh", "-c", f"echo {torch}"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == f"torch=={version}\n"
