"""Mutants of the core are caught and still apply (slow)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants import FAILED, MUTANTS, ROOT, Mutant, copy_into, run_tests


def names(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "-")


@pytest.mark.parametrize("mutant", MUTANTS, ids=names)
def test_a_mutant_still_applies(mutant: Mutant, tmp_path: Path) -> None:
    """If this fails, the source that the mutant changes has changed: renew the mutant in tools/mutants.py."""
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.plant(tmp_path)
    compile((tmp_path / mutant.file).read_text(), mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), f"{test} is gone"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Copy of the checkout in which all tests of mutants pass."""
    folder = tmp_path_factory.mktemp("copy")
    copy_into(folder)
    code, output = run_tests(folder, [test for mutant in MUTANTS for test in mutant.tests])
    assert code == 0, output
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("mutant", MUTANTS, ids=names)
def test_a_mutant_is_caught(mutant: Mutant, copy: Path) -> None:
    path = copy / mutant.file
    before = path.read_text()
    try:
        mutant.plant(copy)
        code, output = run_tests(copy, mutant.tests)
    finally:
        path.write_text(before)
    assert code == FAILED, f"not caught (exit code {code}):\n{output}"
