"""Mutants of the core are caught and still apply (slow)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants import FAILED, MUTANTS, ROOT, Mutant, copy_into, run_tests

SOURCE = "def total(values):\n    return sum(values)\n"
TEST = "from zinfer.sums import total\n\ndef test_total():\n    assert total([1, 2]) == 3\n"


def names(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "-")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    for name, text in (("zinfer/sums.py", SOURCE), ("zinfer/__init__.py", ""), ("tests/test_sums.py", TEST)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


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


@pytest.mark.parametrize(("before", "count"), [("min(values)", 0), ("values", 2)])
def test_a_mutant_whose_source_has_changed_fails_loudly(example: Path, before: str, count: int) -> None:
    mutant = Mutant("m", "zinfer/sums.py", before, "0", ("tests/test_sums.py::test_total",))
    with pytest.raises(LookupError, match=f"mutant no longer applies: m: .* {count} times"):
        mutant.plant(example)
    assert (example / mutant.file).read_text() == SOURCE


@pytest.mark.long
def test_the_copy_is_what_is_tested(example: Path) -> None:
    tests = ("tests/test_sums.py::test_total",)
    assert run_tests(example, tests)[0] == 0
    Mutant("m", "zinfer/sums.py", "sum(values)", "max(values)", tests).plant(example)
    code, output = run_tests(example, tests)
    assert code == FAILED, output
    code, output = run_tests(example, ("tests/test_sums.py::test_gone",))
    assert code not in (0, FAILED), output


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
