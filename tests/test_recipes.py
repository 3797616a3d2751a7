"""Recipes: every one in the repository loads as a command would load it, and every folder holds what its README
says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import PATIENCE_S
from zinfer import engine
from zinfer.checkpoint import resolve
from zinfer.commands.options import locate
from zinfer.core.engine import OptionError
from zinfer.job.recipe import RecipeError, engine_recipe, make_sweep, read_toml, sweep_recipe

ROOT = Path(__file__).parents[1]
WHEEL = "zinfer", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"
SHIPPED = ROOT / "zinfer" / "catalog"
ENGINE_RECIPES = [path for path in sorted((SHIPPED / "engines").glob("*.toml")) if "command" not in read_toml(path)]


@pytest.mark.parametrize("path", sorted((SHIPPED / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_sweep_recipes_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = make_sweep(read_toml(path), str(path))
    loads = list(sweep.loads())
    assert loads
    assert sweep.description
    for load in loads:
        spec = resolve.resolve(load.model, load.dtype, load.layers)
        assert load.case("dummy", spec.dtype, *next(sweep.lengths(), (512, 32))).model == load.model
        assert load.offload in engine.kind(load.engine).offloads


def test_recipes_are_files_of_the_package() -> None:
    """A link out of the package would break in a copy."""
    assert not [path for path in SHIPPED.rglob("*") if path.is_symlink()]
    assert {path.parent.name for path in SHIPPED.rglob("*/*.toml")} == {"sweeps", "engines"}
    assert not [*ROOT.glob("sweeps/*.toml"), *ROOT.glob("engines/*.toml")], "these would hide the package's own"


@pytest.mark.parametrize("path", ENGINE_RECIPES, ids=lambda path: path.stem)
def test_engine_recipes_load_and_differ_from_the_defaults(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = engine_recipe(path.stem)
    defaults = engine.kind(recipe.engine).defaults
    assert recipe.description
    assert recipe.options or path.stem == recipe.engine
    for key, value in recipe.options.items():
        assert key in defaults
        assert value != defaults[key]


def test_budgets_are_an_axis_of_what_is_offloaded() -> None:
    fields = {"model": "m", "engine": "tensorrt", "offload": ["none", "cpu"], "gpu_weights": ["0%", "40GiB", "auto"]}
    loads = [(load.offload, load.gpu_weights) for load in make_sweep(fields, "here").loads()]
    assert loads == [("none", None), ("cpu", "0%"), ("cpu", "40GiB"), ("cpu", "auto")]
    for wrong in ("110%", "much", "-1GiB", ""):
        with pytest.raises(RecipeError, match="gpu_weights"):
            make_sweep({"model": "m", "gpu_weights": wrong}, "here")


def test_an_engine_without_budgets_is_measured_once_beside_others() -> None:
    fields = {"model": "m", "engine": ["stream", "deepspeed"], "offload": "cpu", "gpu_weights": ["0%", "70%"]}
    loads = [(load.engine, load.gpu_weights) for load in make_sweep(fields, "here").loads()]
    assert loads == [("stream", "0%"), ("stream", "70%"), ("deepspeed", None)]


def test_options_go_to_the_engines_that_have_them() -> None:
    """One of the engines has an option that the other lacks."""
    fields = {"model": "m", "engine": ["stream", "llama-server"], "offload": "none"}
    options = {"file": ["a.gguf"], "cuda_graphs": ["auto", "off"]}
    loads = [(load.engine, load.options) for load in make_sweep(fields | {"options": options}, "here").loads()]
    assert loads == [("stream", ()), ("stream", (("cuda_graphs", "off"),)), ("llama-server", (("file", "a.gguf"),))]
    with pytest.raises(OptionError, match="engine stream has no option 'files'"):
        list(make_sweep(fields | {"options": {"files": ["a.gguf"]}}, "here").loads())


def test_an_engine_without_budgets_refuses_one() -> None:
    load = next(make_sweep({"model": "m", "engine": "deepspeed", "offload": "cpu", "gpu_weights": "50%"}, "").loads())
    with pytest.raises(engine.EngineError, match=r"--gpu-weights .*tensorrt.*deepspeed"):
        locate(load)


def test_recipes_are_found_outside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_sweep(read_toml(sweep_recipe("demo")), "demo").model == ("bloom-tiny",)
    for path in (SHIPPED / "sweeps").glob("*.toml"):
        assert sweep_recipe(path.stem) == path
    for path in ENGINE_RECIPES:
        assert engine_recipe(path.stem).options == read_toml(path).get("options", {})
    Path("sweeps").mkdir()
    Path("sweeps/demo.toml").write_text('model = "opt-30b"\n')
    Path("engines").mkdir()
    Path("engines/mine.toml").write_text('engine = "stream"\n')
    assert sweep_recipe("demo") == Path("sweeps/demo.toml"), "the current directory comes first"
    assert engine_recipe("mine").engine == "stream"
    with pytest.raises(RecipeError, match=r"no recipe 'nothing'; choose from .*demo"):
        sweep_recipe("nothing")


def test_a_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """Install a built wheel; it has all files, and plans, reads recipes and names the best."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in tracked.split("\0") if name.split("/")[0] in WHEEL]
    for name in names:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist"), str(tmp_path / "source")]
    subprocess.run(build, check=True, timeout=PATIENCE_S)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(tmp_path / "installed"), str(wheel)]
    subprocess.run(install, check=True, timeout=PATIENCE_S)
    left_out = {name for name in names if name.startswith("zinfer/") and not (tmp_path / "installed" / name).exists()}
    assert not left_out, "package_data in setup.cfg says what a wheel has besides modules"
    (tmp_path / "empty").mkdir()
    for words, expected in (
        (["-c", "import zinfer; print(zinfer.__file__)"], str(tmp_path / "installed")),
        (["-m", "zinfer", "plan", "-m", "opt-30b", "--machine", "h100-80gb", "--calibrate"], "opt-30b"),
        (["-m", "zinfer", "plan", "bloom-176b-slice", "--machine", "h100-80gb"], "bloom-176b"),
        (["-m", "zinfer", "sweep", "demo", "--dry-run"], "bloom-tiny deepspeed cpu 32/8 batch 32"),
        (["-m", "zinfer", "best", str(ROOT / "sweeps/results/demo.record")], "Best of bloom-tiny"),
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "empty", check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "HOME": str(tmp_path)},
        )  # fmt: skip
        assert expected in done.stdout, words


def test_git_ignores_what_a_user_measures_and_draws() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    paths = ["sweeps/results/cpu-mine/demo.jsonl", "plots/cpu-mine/report.html", "plots/all/report.md"]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == paths
