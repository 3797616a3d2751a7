"""Help, retired verbs, hub revisions, and exit codes for missing parts. Help is in the order of work."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.results import case, point
from zinfer.checkpoint import hub
from zinfer.checkpoint.resolve import catalogue_names
from zinfer.cli import GROUPS, VERBS, cli
from zinfer.core.errors import ENVIRONMENT, did_you_mean
from zinfer.core.model import ModelError
from zinfer.core.units import counted
from zinfer.record.store import Store


def test_verbs_stand_in_the_order_of_work() -> None:
    text = CliRunner().invoke(cli, ["--help"]).stdout
    assert list(VERBS)[:8] == ["probe", "sweep", "plot", "best", "report", "plan", "run", "batch"]
    places = [text.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)
    assert all(f"{title}:" in text for title in GROUPS)
    assert len(VERBS) == 15


def test_the_catalogue_is_listed_by_plan() -> None:
    listed = CliRunner().invoke(cli, ["plan", "--list", "models", "bloom-176b"])
    assert "176.25 B" in listed.stdout
    wrong = CliRunner().invoke(cli, ["plan", "--list", "model"])
    assert wrong.exit_code == 2


def test_torchrun_is_told_how_several_gpus_are_asked_for() -> None:
    done = CliRunner().invoke(cli, ["run"], env={"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"})
    assert done.exit_code == 2
    assert "zinfer run --gpus 2" in done.output


def test_words_that_are_nearly_known() -> None:
    assert did_you_mean("swep", VERBS) == "; did you mean 'sweep'?"
    assert "'bloom-176b'" in did_you_mean("bloom176b", catalogue_names())
    assert did_you_mean("xyzzy", VERBS) == ""


def test_a_revision_is_part_of_the_reference() -> None:
    assert hub.split("owner/name@v1.0") == ("owner/name", "v1.0")
    assert hub.split("owner/name") == ("owner/name", None)


def test_the_revision_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    (tmp_path / "config.json").write_text("{}")

    def cached_file(repo_id: str, file: str, revision: str | None = None) -> str:
        asked.append((repo_id, file, revision))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached_file)
    assert hub.config_of("owner/name@v2") == {}
    assert hub.config_of("owner/name") == {}
    assert asked == [("owner/name", "config.json", "v2"), ("owner/name", "config.json", None)]


def test_a_hub_out_of_reach_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    with pytest.raises(ModelError) as caught:
        hub.config_of("owner/name")
    assert caught.value.exit_code == ENVIRONMENT


def test_an_engine_without_its_packages_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from zinfer.engine import EngineError, kind

    monkeypatch.setattr("zinfer.engine.util.find_spec", lambda _name: None)
    with pytest.raises(EngineError, match="pip install") as caught:
        kind("stream")
    assert caught.value.exit_code == ENVIRONMENT


def test_export_refuses_a_format_that_it_does_not_write(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.jsonl") as store:
        store.append(point(case(1)))
    done = CliRunner().invoke(cli, ["export", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "x.xlsx")])
    assert done.exit_code == 2
    assert ".csv" in done.stderr
    assert not (tmp_path / "x.xlsx").exists()
    forced = CliRunner().invoke(
        cli, ["export", str(tmp_path / "a.jsonl"), "--format", "csv", "-o", str(tmp_path / "x.xlsx")]
    )
    assert forced.exit_code == 0


def test_one_is_no_plural() -> None:
    assert [counted(number, "a") for number in (0, 1, 2, 1200)] == ["0 as", "1 a", "2 as", "1,200 as"]
