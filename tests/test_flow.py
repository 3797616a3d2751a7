"""Order of imports, and the cost of starting the command line."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PATIENCE_S

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "zinfer").rglob("*.py"))
}

# The rooms of the house, a floor a line: a module imports only from its own room and from floors below.
FLOORS = (
    {"zinfer.__main__"},
    {"zinfer.cli"},
    {"zinfer.api"},
    {"zinfer.commands"},
    {"zinfer.job"},
    {"zinfer.worker"},
    {"zinfer.generation"},
    {"zinfer.engine"},
    {"zinfer.report"},
    {"zinfer.analysis"},
    {"zinfer.plan", "zinfer.record"},
    {"zinfer.checkpoint"},
    {"zinfer.system"},
    {"zinfer.core"},
)
RUNS, READS = (
    {"zinfer.engine", "zinfer.generation", "zinfer.worker", "zinfer.job"},
    {"zinfer.report", "zinfer.analysis"},
)


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def may_import(importer: str, other: str) -> bool:
    """Tell whether a module of room `one` may import from room `other`."""
    if importer == other or other == "zinfer":
        return True
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    across = (importer in READS and other in RUNS) or (importer in RUNS and other in READS)
    return floor[importer] < floor[other] and not across


def imports(path: Path) -> set[str]:
    """Return our modules that `path` imports, and other packages."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {
                name if (name := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return modules


def test_imports_lead_downstairs() -> None:
    arrows = {
        (module, other)
        for module, path in MODULES.items()
        for other in imports(path)
        if module != "zinfer" and other.split(".")[0] == "zinfer" and not may_import(room(module), room(other))
    }
    assert arrows == set()
    assert {room(module) for module in MODULES} - {"zinfer"} == set().union(*FLOORS)


def test_no_module_imports_itself_through_others() -> None:
    arrows = {module: {other for other in imports(path) if other in MODULES} for module, path in MODULES.items()}
    arrows = {module: others - {module} for module, others in arrows.items()}
    while ends := {module for module, others in arrows.items() if not others & arrows.keys()}:
        arrows = {module: others for module, others in arrows.items() if module not in ends}
    assert not arrows, "these import each other in a circle, or modules that do"


def test_the_architecture_describes_every_room_in_its_order() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    described = [[f"zinfer.{name}" for name in re.findall(r"`(\w+)", cell)] for cell in table]
    assert {name for names in described for name in names} == {"zinfer.catalog"}.union(*FLOORS)
    floors = [number for names in described for number, floor in enumerate(FLOORS) if floor & set(names)]
    assert floors == sorted(floors)


def test_engines_do_not_know_each_other() -> None:
    kinds = {"accelerate", "deepspeed", "server", "stream", "tensorrt"}
    for module, path in MODULES.items():
        parts = module.split(".")
        if len(parts) > 2 and parts[1] == "engine" and parts[2] in kinds:
            others = {name.split(".")[2] for name in imports(path) if name.startswith("zinfer.engine.")}
            assert not others & (kinds - {parts[2]}), module


def test_streamed_weights_know_neither_experts_nor_attention() -> None:
    stream, below = "zinfer.engine.stream.", ("weights", "trace")
    weights = {module: imports(path) for module, path in MODULES.items() if module.startswith(f"{stream}weights")}
    arrows = {(module, other) for module, others in weights.items() for other in others if other.startswith(stream)}
    assert {other.removeprefix(stream).split(".")[0] for _, other in arrows} == set(below)


def test_the_clock_stands_in_one_place() -> None:
    clocks = {module for module, path in MODULES.items() if "perf_counter" in path.read_text()}
    assert clocks <= {"zinfer.worker.measure", "zinfer.worker.probe", "zinfer.engine.stream.trace"}


@pytest.mark.long
def test_torch_is_never_imported_by_what_the_core_install_runs(tmp_path: Path) -> None:
    core = ["plan", "plot", "report", "best", "catalogue", "compare", "export", "batch", "study", "run", "serve"]
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['matplotlib.pyplot'] = None\n"
        "import zinfer.job.sweep, zinfer.system.local, zinfer.checkpoint.source, zinfer.job.batch.run\n"
        "import zinfer.job.serve.server\n"
        + "".join(f"import zinfer.commands.{verb}\n" for verb in core)
        + "from click.testing import CliRunner\n"
        "from zinfer.cli import cli\n"
        "result = CliRunner().invoke(cli, ['plan', '-m', 'bloom-176b', '--machine', 'h100-80gb,gh200-96gb'])\n"
        "assert result.exit_code == 0, result.output\n"
        "words = ['plan', 'bloom-176b-machines', '--calibrate', 'sweeps/results/nvidia-h200'], \\\n"
        "    ['export', '--format', 'json'], \\\n"
        "    ['plot', 'sweeps/results/nvidia-h200', '--format', 'svg', '-o', sys.argv[1]], \\\n"
        "    ['best', '--machine', 'all', '--objective', 'cost', '--gpu-hour-usd', '2'], \\\n"
        "    ['report', 'sweeps/results/nvidia-h100-80gb-hbm3/bloom-7b1.jsonl', '-o', sys.argv[1] + '/r.html']\n"
        "for line in words:\n"
        "    result = CliRunner().invoke(cli, line)\n"
        "    assert result.exit_code == 0, (line, result.output, result.exception)\n"
        "result = CliRunner().invoke(cli, ['plan', '--list', 'models'])\n"
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
