"""The one direction of imports, and what the command line may cost to start."""

import ast
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests import PATIENCE_S

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "zinfer").rglob("*.py"))
}

# What a module may import of ours, at its top or anywhere inside: the arrows of the design, never backwards.
VALUES = {"zinfer.frozen", "zinfer.units", "zinfer.spread", "zinfer"}
SHAPES = VALUES | {"zinfer.model", "zinfer.machine", "zinfer.checkpoint", "zinfer.hub"}
TYPES = SHAPES | {"zinfer.cost", "zinfer.plan", "zinfer.record"}
READERS = TYPES | {
    "zinfer.choice", "zinfer.store", "zinfer.analysis", "zinfer.group", "zinfer.chart", "zinfer.plot", "zinfer.report",
    "zinfer.calibrate", "zinfer.published", "zinfer.economics", "zinfer.sla", "zinfer.timeline", "zinfer.gantt",
    "zinfer.lossless", "zinfer.accuracy", "zinfer.reuse", "zinfer.reuse_plot",
}  # fmt: skip
ALLOWED = {
    "zinfer.frozen": set(),
    "zinfer.units": set(),
    "zinfer.spread": set(),
    "zinfer.model": SHAPES | {"zinfer.formula", "zinfer.architecture"},
    "zinfer.formula": {"zinfer.model"},
    "zinfer.checkpoint": VALUES,
    "zinfer.machine": VALUES,
    "zinfer.lossless": VALUES,
    "zinfer.accuracy": TYPES,
    "zinfer.cost": SHAPES,
    "zinfer.prefix": set(),
    "zinfer.dialogue": SHAPES,
    "zinfer.reuse": TYPES,
    "zinfer.reuse_plot": READERS,
    "zinfer.plan": SHAPES | {"zinfer.cost"},
    "zinfer.choice": SHAPES | {"zinfer.cost", "zinfer.plan"},
    "zinfer.record": TYPES,
    "zinfer.published": SHAPES | {"zinfer.cost", "zinfer.plan"},
    "zinfer.timeline": TYPES,
    "zinfer.lines": set(),
    "zinfer.batch": {"zinfer.lines"},
    "zinfer.packing": SHAPES | {"zinfer.cost", "zinfer.plan", "zinfer.choice"},
    "zinfer.intake": {"zinfer.batch", "zinfer.packing"},
    "zinfer.ledger": {"zinfer.batch", "zinfer.lines"},
    "zinfer.store": TYPES | {"zinfer.lines"},
    "zinfer.analysis": READERS,
    "zinfer.group": READERS,
    "zinfer.chart": READERS,
    "zinfer.gantt": READERS,
    "zinfer.plot": READERS,
    "zinfer.calibrate": READERS,
    "zinfer.compare": READERS,
    "zinfer.decide": READERS,
    "zinfer.economics": TYPES,
    "zinfer.sla": TYPES | {"zinfer.economics"},
    "zinfer.export": READERS,
}
REPORT = {module for module in MODULES if module.split(".")[:2] == ["zinfer", "report"]}
ALLOWED |= {module: READERS | REPORT | {"zinfer.compare"} for module in REPORT}


def imports(path: Path) -> set[str]:
    """Modules of ours that `path` imports, wherever the import stands, and packages of others, for their names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return found


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_values_and_readers_look_only_upstream(module: str) -> None:
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "zinfer"}
    assert ours <= ALLOWED[module], f"{module} imports {sorted(ours - ALLOWED[module])}"


def test_engines_know_neither_the_store_nor_the_sweep_nor_each_other() -> None:
    for module, path in MODULES.items():
        if not module.startswith("zinfer.engine."):
            continue
        ours = {name for name in imports(path) if name.split(".")[0] == "zinfer"}
        assert not ours & {"zinfer.store", "zinfer.sweep", "zinfer.analysis", "zinfer.measure", "zinfer.worker"}, module


def test_the_clock_stands_in_one_place() -> None:
    clocks = {module for module, path in MODULES.items() if "perf_counter" in path.read_text()}
    assert clocks <= {"zinfer.measure", "zinfer.probe", "zinfer.engine.stream.trace"}


def test_torch_is_never_imported_by_what_the_core_install_runs(tmp_path: Path) -> None:
    core = ["plan", "plot", "report", "best", "models", "compare", "export", "batch", "reuse", "run"]
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import zinfer.sweep, zinfer.here, zinfer.source, zinfer.job\n"
        + "".join(f"import zinfer.commands.{verb}\n" for verb in core)
        + "from click.testing import CliRunner\n"
        "from zinfer.cli import cli\n"
        "result = CliRunner().invoke(cli, ['plan', '-m', 'bloom-176b', '--machine', 'h100-80gb,gh200-96gb'])\n"
        "assert result.exit_code == 0, result.output\n"
        "words = ['plan', 'bloom-176b-machines', '--calibrate', 'sweeps/results'], ['export', '--format', 'md'], \\\n"
        "    ['best', '--objective', 'cost', '--gpu-hour-usd', '2'], ['report', '-o', sys.argv[1] + '/r.html']\n"
        "for line in words:\n"
        "    result = CliRunner().invoke(cli, line)\n"
        "    assert result.exit_code == 0, (line, result.output, result.exception)\n"
        "result = CliRunner().invoke(cli, ['models'])\n"
        "assert result.exit_code == 0, result.output\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=ROOT, timeout=PATIENCE_S)


def test_help_starts_light() -> None:
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom zinfer.cli import cli\n"
        "assert 'sweep' in CliRunner().invoke(cli, ['--help']).output\n"
        "heavy = {'torch', 'pydantic', 'matplotlib', 'numpy', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=PATIENCE_S)


@pytest.mark.slow
def test_help_costs_little_more_than_click() -> None:
    def seconds(*command: str) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        return median(times)

    assert seconds("-m", "zinfer.cli", "--help") <= 3.5 * seconds("-c", "import click")


def test_modules_stay_readable() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert median(lengths.values()) < 150
