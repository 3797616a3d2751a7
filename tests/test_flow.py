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
VALUES = {"zinfer.spec.value", "zinfer.spec.units", "zinfer.record.stats", "zinfer"}
SHAPES = VALUES | {"zinfer.spec.model", "zinfer.spec.machine", "zinfer.spec.checkpoint", "zinfer.spec.hub"}
TYPES = SHAPES | {"zinfer.plan.cost", "zinfer.plan.plan", "zinfer.record.measurement"}
READERS = TYPES | {
    "zinfer.plan.search", "zinfer.record.store", "zinfer.analysis.rates", "zinfer.analysis.group", "zinfer.report.plot.style", "zinfer.report.plot.figures", "zinfer.report",
    "zinfer.analysis.calibrate", "zinfer.plan.published", "zinfer.analysis.economics", "zinfer.analysis.sla", "zinfer.analysis.timeline", "zinfer.report.plot.timeline",
    "zinfer.record.codec", "zinfer.record.accuracy", "zinfer.record.prefix_reuse", "zinfer.report.plot.prefix_reuse",
}  # fmt: skip
ALLOWED = {
    "zinfer.spec.value": set(),
    "zinfer.spec.units": set(),
    "zinfer.record.stats": set(),
    "zinfer.spec.model": SHAPES | {"zinfer.spec.formula", "zinfer.spec.architecture"},
    "zinfer.spec.formula": {"zinfer.spec.model"},
    "zinfer.spec.checkpoint": VALUES,
    "zinfer.spec.machine": VALUES,
    "zinfer.record.codec": VALUES,
    "zinfer.record.accuracy": TYPES,
    "zinfer.plan.cost": SHAPES,
    "zinfer.generation.radix_tree": set(),
    "zinfer.generation.detokenizer": SHAPES,
    "zinfer.record.prefix_reuse": TYPES,
    "zinfer.report.plot.prefix_reuse": READERS,
    "zinfer.plan.plan": SHAPES | {"zinfer.plan.cost"},
    "zinfer.plan.search": SHAPES | {"zinfer.plan.cost", "zinfer.plan.plan"},
    "zinfer.record.measurement": TYPES,
    "zinfer.plan.published": SHAPES | {"zinfer.plan.cost", "zinfer.plan.plan"},
    "zinfer.analysis.timeline": TYPES,
    "zinfer.record.jsonl": set(),
    "zinfer.job.batch.openai": {"zinfer.record.jsonl"},
    "zinfer.job.batch.packing": SHAPES | {"zinfer.plan.cost", "zinfer.plan.plan", "zinfer.plan.search"},
    "zinfer.job.batch.intake": {"zinfer.job.batch.openai", "zinfer.job.batch.packing"},
    "zinfer.job.batch.ledger": {"zinfer.job.batch.openai", "zinfer.record.jsonl"},
    "zinfer.record.store": TYPES | {"zinfer.record.jsonl"},
    "zinfer.analysis.rates": READERS,
    "zinfer.analysis.group": READERS,
    "zinfer.report.plot.style": READERS,
    "zinfer.report.plot.timeline": READERS,
    "zinfer.report.plot.figures": READERS,
    "zinfer.analysis.calibrate": READERS,
    "zinfer.analysis.compare": READERS,
    "zinfer.analysis.best": READERS,
    "zinfer.analysis.economics": TYPES,
    "zinfer.analysis.sla": TYPES | {"zinfer.analysis.economics"},
    "zinfer.record.export": READERS,
}
REPORT = {module for module in MODULES if module.split(".")[:2] == ["zinfer", "report"]}
ALLOWED |= {module: READERS | REPORT | {"zinfer.analysis.compare"} for module in REPORT}


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
        assert not ours & {
            "zinfer.record.store",
            "zinfer.job.sweep",
            "zinfer.analysis.rates",
            "zinfer.worker.measure",
            "zinfer.worker.process",
        }, module


def test_the_clock_stands_in_one_place() -> None:
    clocks = {module for module, path in MODULES.items() if "perf_counter" in path.read_text()}
    assert clocks <= {"zinfer.worker.measure", "zinfer.worker.probe", "zinfer.engine.stream.trace"}


def test_torch_is_never_imported_by_what_the_core_install_runs(tmp_path: Path) -> None:
    core = ["plan", "plot", "report", "best", "models", "compare", "export", "batch", "reuse", "run"]
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import zinfer.job.sweep, zinfer.spec.local, zinfer.spec.source, zinfer.job.batch.run\n"
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
