"""Record of a conformance run, and the tables made from it."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.conformance.run import Row

RECORD = Path("sweeps/results/conformance.json")
WRAPPER = "+wrapper"
REASON = 200  # characters of a reason that the page shows
FAMILIES = ("Dense", "Mixtures of experts", "Recurrent and hybrid")
LEFT = {  # verdicts besides "right" -> their title on the page
    "refused": "Refused",
    "differs": "Wrong",
    "crash": "Crash",
    "cannot be compared": "Not comparable: transformers itself gives no text to compare with",
    "cannot be built": "Not built: transformers makes no small model of it here",
}


def to_json(rows: Iterable["Row"], ways: dict[str, str]) -> dict[str, Any]:
    """Return the record: versions, ways, and for each type its family, verdict, and the outcome of each way."""
    from zinfer import __version__

    document = {
        row.subject.name: {name: getattr(row, name) for name in ("family", "verdict", "padded", "skipped", "tolerance")}
        | {
            "ways": {way: outcome.verdict for way, outcome in row.outcomes.items()},
            "why": {way: outcome.why for way, outcome in row.outcomes.items() if outcome.why},
        }
        for row in rows
    }
    versions = {"zinfer": __version__} | {name: version(name).split("+")[0] for name in ("torch", "transformers")}
    return {"versions": versions, "ways": ways, "types": document}


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def read(path: Path = RECORD) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def counts(record: dict[str, Any], wrapper: bool = False) -> Counter[str]:
    """Return the number of types, or of wrappers, with each verdict."""
    return Counter(entry["verdict"] for name, entry in record["types"].items() if name.endswith(WRAPPER) is wrapper)


def summary(record: dict[str, Any]) -> str:
    """Return one sentence with the counts."""
    types, wrappers = counts(record), counts(record, wrapper=True)
    return (
        f"{types['right']} of the {types.total()} types of causal language models that transformers "
        f"{record['versions']['transformers']} knows give the text of `generate` on each prompt alone; "
        f"{types['refused']} are refused in one line, {types['differs'] + types['crash']} are wrong or crash. "
        f"{wrappers['right']} of {wrappers.total()} multimodal models that contain such a type do so, too."
    )


def table(record: dict[str, Any]) -> str:
    """Return the generated part of ``docs/models.md``."""
    right, partly, left = (defaultdict[str, list[str]](list) for _ in range(3))
    for name, entry in sorted(record["types"].items()):
        verdict, wrapper = entry["verdict"], name.endswith(WRAPPER)
        shown = f"`{name.removesuffix(WRAPPER)}`{' (wrapper)' * wrapper}"
        if verdict != "right":
            why = next(entry["why"][way] for way, outcome in entry["ways"].items() if outcome == verdict)
            left[verdict].append(f"| {shown} | {_cell(why)} |")
            continue
        right["Inside multimodal models" if wrapper else entry["family"]].append(shown)
        if not entry.get("padded", True):
            partly["padding: rows of one length share a micro-batch, other rows run beside them"].append(shown)
        if refused := [record["ways"][way] for way, outcome in entry["ways"].items() if outcome == "refused"]:
            partly["; ".join(refused)].append(shown)
    lines = ["", summary(record), "", "| | |", "|---|---|"]
    families = [family for family in (*FAMILIES, "Inside multimodal models") if right[family]]
    lines += [f"| {family} ({len(right[family])}) | {', '.join(right[family])} |" for family in families]
    if partly:
        lines += ["", "These types are right, but refused in some ways:", "", "| refused | types |", "|---|---|"]
        lines += [f"| {ways} | {', '.join(names)} |" for ways, names in sorted(partly.items())]
    for verdict, title in LEFT.items():
        if left[verdict]:
            lines += ["", f"### {title}", "", "| type | why |", "|---|---|", *left[verdict]]
    return "\n".join([*lines, ""])


def _cell(why: str) -> str:
    """Return a reason as a table cell, cut if it is long."""
    short = why if len(why) <= REASON else why[: why.rfind(" ", 0, REASON)] + " .."
    return short.replace("|", "/").replace("<", "&lt;")


def model_tables() -> str:
    """Return the tables of docs/models.md."""
    return table(read())
