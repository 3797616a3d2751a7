"""Help, retired verbs, hub revisions, and exit codes for missing parts. Help is in the order of work."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from tests import Patch
from zinfer.checkpoint import hub
from zinfer.cli import GROUPS, VERBS, cli
from zinfer.core.errors import ENVIRONMENT


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


def test_the_revision_is_asked_of_the_hub(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cached_file = Mock(return_value=str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached_file)
    assert hub.config_of("owner/name@v2") == {}
    assert hub.config_of("owner/name") == {}
    assert [(*call.args, *call.kwargs.values()) for call in cached_file.mock_calls] == [
        ("owner/name", "config.json", "v2"), ("owner/name", "config.json", None)
    ]  # fmt: skip


def test_an_engine_without_its_packages_is_the_environments_fault(monkeypatch: Patch) -> None:
    from zinfer.engine import EngineError, kind

    monkeypatch.setattr("zinfer.engine.util.find_spec", lambda _name: None)
    with pytest.raises(EngineError, match="pip install") as caught:
        kind("stream")
    assert caught.value.exit_code == ENVIRONMENT
