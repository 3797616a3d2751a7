"""Tests of README and docs: figures come from records, commands are understood, links and names exist."""

import ast
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache

import click
import pytest

from tests import found, mentions, readme
from tests.readme import PAGES, RESULTS, ROOT
from zinfer.cli import VERBS, cli
from zinfer.core.engine import ENGINES
from zinfer.job.shard import Shard

WRITTEN = (*PAGES, "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
TEXTS = {
    page: (ROOT / page).read_text() for page in (*WRITTEN, "plots/README.md", "sweeps/README.md", "engines/README.md")
}
README, QUOTING = TEXTS["README.md"], "docs/results.md"
TEXT = RESULTS / "nvidia-h100-80gb-hbm3" / "text"
CODE = ROOT / "zinfer"


def test_pages_are_those_that_make_readme_writes(capsys: pytest.CaptureFixture[str]) -> None:
    status = readme.cog("--check", "--diff")
    assert status == 0, f"run `make readme`\n{capsys.readouterr().out}"


@pytest.mark.parametrize("title", readme.FIGURES)
def test_paragraphs_quote_the_figures_of_the_records(title: str) -> None:
    """The ratios in a paragraph are these and no others."""
    figures = readme.FIGURES[title]()
    text = " ".join(TEXTS[QUOTING].split(f"**{title}", 1)[1].split("\n\n", 1)[0].split())
    assert found(figures, text) == figures
    assert set(re.findall(r"[\d.]+x\b", text)) == {figure for figure in figures if figure.endswith("x")}


def test_a_fact_is_found_whole_and_in_its_place() -> None:
    assert found(["1.5x", "30"], "1.5x, batch 30.") == ["1.5x", "30"]
    assert found(["30"], "130, 300, 30.5, 30,000, 2.30 and v30") == []
    assert found(["2.0x", "1.5x"], "1.5x and 2.0x") == ["2.0x"]
    assert mentions("a\nbatch 8: 2 s (100%)", "batch 8", "2 s", "100%")
    assert not mentions("batch 8\n2 s", "batch 8", "2 s")


def test_the_table_of_engines_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", README, flags=re.MULTILINE)
    assert {name: set(offloads.split(", ")) for name, offloads in rows} == {
        name: set(kind.offloads) for name, kind in ENGINES.items()
    }


def test_every_engine_wrote_the_same_text() -> None:
    """The checksums are those of the original outputs; the repository keeps one of several equal outputs."""
    lines = [line.split() for line in (TEXT / "md5sums").read_text().splitlines()]
    sums = {name: md5 for md5, name in lines}
    for dtype in ("float32", "bfloat16"):
        kept = (TEXT / f"{dtype}.json").read_bytes()
        own = {name: md5 for name, md5 in sums.items() if name.endswith(f"-{dtype}.json")}
        assert {name.split("-")[0] for name in own} == {"stream", "deepspeed", "accelerate"}
        assert set(own.values()) == {hashlib.md5(kept).hexdigest()}
        assert all(output["output_ids"] for output in json.loads(kept))


@pytest.mark.parametrize("page", TEXTS)
def test_linked_files_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", " ".join(TEXTS[page].split()))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_page_is_linked_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([^)#]+)\)", README))
    assert {*WRITTEN} - {"README.md"} <= links


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def by_hand(page: str) -> str:
    """Return the text of a page without code, and without what cog writes."""
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|```.*?```", "", TEXTS[page], flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


CONVENTIONS = {"0 ms", "95%", "100%"}  # of definitions
MEASURED = re.compile(r"\d[\d.,]*(?: ± [\d.]+)?(?:x\b|%| (?:tok/s|GB/s|ms)\b)")


@pytest.mark.parametrize("page", WRITTEN)
def test_measured_numbers_stand_in_tables_or_in_tested_paragraphs(page: str) -> None:
    """Rates and ratios outside them would go stale unseen. A paragraph with numbers of others says that they are."""
    loose = {}
    figures = tuple(readme.FIGURES) if page == QUOTING else ()
    for part in by_hand(page).split("\n\n"):
        tested = part.strip().removeprefix("**").startswith(figures)
        numbers = set(MEASURED.findall(part)) - CONVENTIONS
        if numbers and not tested and "ublished by others" not in part:
            loose[" ".join(part.split())[:60]] = numbers
    assert loose == {}


def commands() -> list[str]:
    """Return each ``zinfer ..`` of the code blocks, and of the text and tables if words follow the verb."""
    found = []
    for text in TEXTS.values():
        text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", text, flags=re.DOTALL)
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        inline = re.findall(r"`(zinfer [a-z]+ [^`]*)`", " ".join(text.split()))
        found += [line for line in [*blocks.splitlines(), *inline] if line.startswith("zinfer ")]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_pages_are_understood(line: str) -> None:
    verb, *words = shlex.split(line, comments=True)[1:]
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    for sign in (">", "<"):
        words = words[: words.index(sign)] if sign in words else words
    command.make_parser(click.Context(command, info_name=verb)).parse_args(words)


def texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a document of YAML."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(item)


def test_documents_of_the_pages_run_commands_that_are_understood() -> None:
    """Each shard of a document is one of as many as the document starts."""
    yaml = pytest.importorskip("yaml")
    blocks = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/cluster.md"], flags=re.DOTALL)
    documents = [yaml.safe_load(block) for block in blocks]
    (shards, merge), node = documents[0]["spec"]["replicatedJobs"], documents[1]
    own = shards["template"]["spec"]
    assert own["completions"] == own["parallelism"]
    assert merge["dependsOn"] == [{"name": shards["name"], "status": "Complete"}]
    for part, total in ((shards, own["completions"]), (merge, None), (node, node["num_nodes"])):
        lines = [line.strip() for text in texts_in(part) for line in text.splitlines()]
        (words,) = [shlex.split(line.removesuffix("||")) for line in lines if line.startswith("zinfer batch")]
        for number in range(total or 1):
            known = {"$((JOB_COMPLETION_INDEX + 1))": number + 1, "$((SKYPILOT_NODE_RANK + 1))": number + 1,
                     "$SKYPILOT_NUM_NODES": total}  # fmt: skip
            told = " ".join(words)
            for name, value in known.items():
                told = told.replace(name, str(value))
            command = cli.get_command(click.Context(cli), "batch")
            assert command is not None
            given, *_ = command.make_parser(click.Context(command)).parse_args(shlex.split(told)[2:])
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
def names_by_module() -> dict[str, dict[str, set[str]]]:
    """Return the top-level names of each module of ``zinfer`` (without that prefix), and the attributes of classes."""
    found = {}
    for path in CODE.rglob("*.py"):
        module = ".".join(path.relative_to(CODE).with_suffix("").parts).removesuffix(".__init__")
        found[module] = _names(ast.parse(path.read_text()).body)
    return found


def _names(body: list[ast.stmt]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for node in body:
        match node:
            case ast.ClassDef():
                names[node.name] = set(_names(node.body))
            case ast.FunctionDef():
                names[node.name] = set()
            case ast.Assign():
                names |= {name.id: set() for target in node.targets for name in ast.walk(target)
                          if isinstance(name, ast.Name)}  # fmt: skip
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = set()
    return names


def exists(name: str) -> bool:
    """Tell whether `name` is a file, a module, a name in a module, or one that some module or class defines.

    Files are named from the repository's root or from ``zinfer``; modules from ``zinfer``.
    """
    if "/" in name or name.endswith((".py", ".c", ".toml")):
        return (ROOT / name).exists() or (CODE / name).exists()
    modules = names_by_module()
    first, *rest = name.split(".")
    if not rest:
        return first in modules or any(
            first in names or any(first in own for own in names.values()) for names in modules.values()
        )
    if name in modules:
        return True
    owner, _, last = name.rpartition(".")
    if owner in modules:
        return last in modules[owner]
    module, _, owner = owner.rpartition(".")
    places = [modules[module]] if module in modules else [] if module else modules.values()
    return any(last in names.get(owner, ()) for names in places)


@pytest.mark.parametrize("page", WRITTEN)
def test_names_of_code_on_a_page_exist(page: str) -> None:
    words = set(re.findall(r"`([A-Za-z_][\w./]*)`", TEXTS[page])) - {*ENGINES, "transformers", "config.json"}
    if page != "docs/architecture.md":  # other pages' words in backticks are also of the command line
        words = {word for word in words if re.match(r"(zinfer|tests|engines|sweeps|plots|docs)/|Engine\b", word)}
        words = {word for word in words if not re.search("[A-Z]{4}", word)}  # stands for any name
        words -= {"engines/plans", "tests/campaign"}
    assert page not in ("docs/architecture.md", "CONTRIBUTING.md") or words
    assert {word for word in words if not exists(word)} == set()


@pytest.mark.parametrize(
    "name", ["engine/base.py", "engine.base.Engine.forward", "Engine.admit", "Plan.placement", "core.engine.settle"]
)
def test_a_name_that_exists_is_found(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize(
    "name", ["engine/basis.py", "engine.base.Engine.decode", "Engine.prefill", "plan.Plan.at", "core.engine.unsettle"]
)
def test_a_name_that_does_not_exist_is_missed(name: str) -> None:
    assert not exists(name)
