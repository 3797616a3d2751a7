"""Recipes: every one in the repository loads as a command would load it, and every folder holds what its README
says."""

from pathlib import Path

import pytest

from zinfer import engine
from zinfer.commands.options import locate
from zinfer.job.recipe import RecipeError, engine_recipe, make_sweep, read_toml
from zinfer.record.store import read
from zinfer.spec import resolve
from zinfer.spec.machine import load as load_machine

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_sweep_recipes_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = make_sweep(read_toml(path), str(path))
    loads = list(sweep.loads())
    assert loads
    assert sweep.description
    for load in loads:
        spec = resolve.resolve(load.model, load.dtype, load.layers)
        assert load.case("dummy", spec.dtype, *next(sweep.lengths())).model == load.model
        assert load.offload in engine.kind(load.engine).offloads


@pytest.mark.parametrize("path", sorted((ROOT / "engines").glob("*.toml")), ids=lambda path: path.stem)
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


def test_an_engine_without_budgets_refuses_one() -> None:
    load = next(make_sweep({"model": "m", "engine": "deepspeed", "offload": "cpu", "gpu_weights": "50%"}, "").loads())
    with pytest.raises(engine.EngineError, match=r"--gpu-weights .*tensorrt.*deepspeed"):
        locate(load)


@pytest.mark.parametrize("folder", ["engines", "sweeps", "plots"])
def test_folders_say_what_they_hold(folder: str) -> None:
    assert (ROOT / folder / "README.md").stat().st_size > 200
    assert len(list((ROOT / folder).iterdir())) > 1


def test_committed_records_are_whole_and_their_machines_are_described() -> None:
    files = sorted((ROOT / "sweeps" / "results").rglob("*.jsonl"))
    for path in files:
        records = read(path)
        assert not records.damaged
        assert records.points
        assert load_machine(path.parent / "machine.json").source == "measured"
        assert all(point.machine == load_machine(path.parent).name for point in records.points)
