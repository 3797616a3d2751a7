"""Tests of README and docs: tables are those of the records, commands are understood, links and names exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

from tests import invoke
from tests.results import case, point
from tools import pages
from tools.pages import Entry, Workload
from zinfer.cli import VERBS, cli
from zinfer.core.engine import ENGINES
from zinfer.job.recipe import make_sweep
from zinfer.job.shard import Shard
from zinfer.job.sweep import header_of
from zinfer.record.store import Header

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
WRITTEN = (*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
TEXTS = {
    page: (ROOT / page).read_text() for page in (*WRITTEN, "plots/README.md", "sweeps/README.md", "engines/README.md")
}
CODE = ROOT / "zinfer"


@pytest.mark.long
def test_pages_are_those_that_make_readme_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status = pages.cog("--check", "--diff")
    assert status == 0, f"run `make readme`\n{capsys.readouterr().out}"


def rated(*starts: str, engine: str = "stream", step_s: float = 1.0) -> Entry:
    return Entry(tuple(point(case(8, engine), step_s, started_at=start) for start in starts))


@pytest.mark.parametrize(
    ("ours", "theirs", "given"),
    [
        (["02"], ["03"], True),  # one start of the sweep
        (["02"], ["12"], False),  # two
        (["02", "22"], ["12", "32"], True),  # in turn
        (["02", "12"], ["22", "32"], False),  # one after the other
        (["12"], ["02", "22"], False),  # one load has no turns
    ],
)
def test_ratios_come_from_one_run(ours: list[str], theirs: list[str], given: bool) -> None:
    first, other = rated(*ours), rated(*theirs, engine="deepspeed", step_s=2.0)
    work = Workload((first, other), ("01", "11", "21", "31"))
    decode, output = work.ratios(other)
    assert decode.startswith(("2.0", "1.9")) is given
    assert (" to " in output) is (given and len(ours) > 1), "the range over several loads"
    assert work.ratios(first) == ("", "")


def test_a_lossy_setting_is_marked_and_never_wins() -> None:
    fast = Entry((point(case(64, options=(("kv_cache_dtype", "int8"),)), 0.5),))
    exact = rated("02")
    work = Workload((fast, exact), ())
    assert work.best is exact
    assert "(lossy)" in next(pages.tables([("h100/sweep", work)]))


def test_the_header_of_a_sweep_has_its_description() -> None:
    sweep = make_sweep({"model": "bloom-tiny", "description": "Why it is measured."}, "here")
    assert header_of(sweep, "h100", []).description == "Why it is measured."
    assert Header(machine="h100").description == "", "as in records of earlier versions"


@pytest.mark.long
def test_figures_in_git_tell_of_the_points_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in pages.FIGURES:
        record, _, figure = name.rpartition("-")
        if "/reuse-" in name:
            record, figure = f"{name.split('/')[0]}/reuse", "reuse"
        file = pages.RESULTS / f"{record}.{'json' if figure == 'reuse' else 'jsonl'}"
        assert invoke("plot", file, "-o", tmp_path, "--format", "svg").exit_code == 0
        drawn, kept = (ElementTree.parse(folder / f"{name}.svg").getroot() for folder in (tmp_path, ROOT / "plots"))
        assert [part.text for part in drawn[:2]] == [part.text for part in kept[:2]], "make plots"


@pytest.mark.parametrize("page", TEXTS)
def test_linked_files_and_headings_exist_and_every_page_is_linked_from_the_readme(page: str) -> None:
    files = re.findall(r"\]\(([^)#]+)\)", " ".join(TEXTS[page].split()))
    assert [file for file in files if not (ROOT / page).parent.joinpath(file).exists()] == []
    assert page != "README.md" or {*WRITTEN} - {"README.md"} <= {*files}
    for file, heading in re.findall(r"\]\(([^)#]*\.md|)#([^)]+)\)", TEXTS[page]):
        text = (ROOT / page).parent.joinpath(file).read_text() if file else TEXTS[page]
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, file


def test_pages_are_few_and_short() -> None:
    """Hold the manual to twelve pages, each read in one sitting; what is generated does not count."""
    assert len(TEXTS["README.md"].splitlines()) <= 150
    assert len(PAGES) <= 13, "README and twelve pages in docs/"
    for page in (*PAGES, "CONTRIBUTING.md"):
        written = re.sub(r"(?<=\]\]\] -->\n).*?(?=<!-- \[\[\[end)", "", TEXTS[page], flags=re.DOTALL)
        most = 100 if page in ("docs/architecture.md", "docs/how-it-works.md") else 150
        assert len(written.splitlines()) <= most, page


def shell_lines(text: str) -> list[str]:
    """Return the ``zinfer ..`` lines of a page's code blocks."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.startswith("zinfer ")]


def inline_commands(text: str) -> list[str]:
    """Return each ``zinfer VERB ..`` of a page's prose and tables."""
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`(zinfer [a-z]+ [^`]*)`", " ".join(text.split()))


def parsed(verb: str, *words: str) -> dict[str, Any]:
    """Return the options of a command as its parser understands them."""
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return dict(command.make_parser(click.Context(command, info_name=verb)).parse_args([*words])[0])


@pytest.mark.parametrize(
    "line", {line: 0 for text in TEXTS.values() for line in (*shell_lines(text), *inline_commands(text))}
)
def test_commands_of_the_pages_are_understood(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    for sign in (">", "<"):
        words = words[: words.index(sign)] if sign in words else words
    parsed(*words)


def texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a document of YAML."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(item)


def test_documents_of_the_pages_run_commands_that_are_understood() -> None:
    """A document's shard count equals the number of shards it starts."""
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/cluster.md"], flags=re.DOTALL)
    documents = [yaml.safe_load(block) for block in blocks]
    (shards, merge), node = documents[0]["spec"]["replicatedJobs"], documents[1]
    spec = shards["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert merge["dependsOn"] == [{"name": shards["name"], "status": "Complete"}]
    for part, total in ((shards, spec["completions"]), (merge, None), (node, node["num_nodes"])):
        lines = [line.strip() for text in texts_in(part) for line in text.splitlines()]
        (words,) = [shlex.split(line.removesuffix("||")) for line in lines if line.startswith("zinfer batch")]
        for number in range(total or 1):
            values = {"$((JOB_COMPLETION_INDEX + 1))": number + 1, "$((SKYPILOT_NODE_RANK + 1))": number + 1,
                     "$SKYPILOT_NUM_NODES": total}  # fmt: skip
            joined = " ".join(words)
            for name, value in values.items():
                joined = joined.replace(name, str(value))
            given = parsed(*shlex.split(joined)[1:])
            assert (given.get("merge") or False) is (total is None)
            assert given.get("shard") == (None if total is None else str(Shard(number + 1, total)))


def test_the_pages_show_every_verb() -> None:
    shown = "".join(TEXTS[page] for page in PAGES)
    assert {verb for verb in VERBS if f"zinfer {verb}" not in shown} == set()


@pytest.mark.parametrize("page", WRITTEN)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    lines = re.findall(r"(?:`|^)make ([a-z ]+)", TEXTS[page], flags=re.MULTILINE)
    named = {word for line in lines for word in re.split(r"  | ", line.split("   ")[0])} - {""}
    assert named - targets == set()


@cache
def names_of_code() -> set[str]:
    """Return modules of ``zinfer`` and their names, alone and behind an owner."""
    names = set[str]()
    for path in CODE.rglob("*.py"):
        module = ".".join(path.relative_to(CODE).with_suffix("").parts).removesuffix(".__init__")
        names.add(module)
        owner = ""
        for inner, *found in re.findall(r"^( {4}|)(?:(?:class|def) (\w+)|(\w+)(?::| =))", path.read_text(), flags=re.M):
            name = "".join(found)
            owner = owner if inner else name
            names |= {name, f"{module}.{name}", f"{owner}.{name}", f"{module}.{owner}.{name}"}
    return names | {name.rpartition(".")[2] for name in names}


def exists(name: str) -> bool:
    """Tell whether `name` is a file or a name of code."""
    if "/" in name or name.endswith((".py", ".c", ".toml")):
        return (ROOT / name).exists() or (CODE / name).exists()
    return name in names_of_code()


@pytest.mark.parametrize("page", WRITTEN)
def test_names_of_code_on_a_page_exist(page: str) -> None:
    words = set(re.findall(r"`([A-Za-z_][\w./]*)`", TEXTS[page])) - {*ENGINES, "transformers", "config.json"}
    if page != "docs/architecture.md":  # other pages' words in backticks are also of the command line
        words = {word for word in words if re.match(r"(zinfer|tests|engines|sweeps|plots|docs)/|Engine\b", word)}
        words = {word for word in words if not re.search("[A-Z]{4}", word)}  # stands for any name
        words -= {"engines/plans", "tools/campaign"}
    assert page not in ("docs/architecture.md", "CONTRIBUTING.md") or words
    assert {word for word in words if not exists(word)} == set()
