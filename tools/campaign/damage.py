"""Damaged checkpoints, records and packed layers.

A damaged input is refused in a line, or it gives what the undamaged one gives. Where another value is as good as the
first (a rope base in config.json, a time in a record that is sealed again), the result may differ; such cases are
counted as blind. `tests/fuzz_documents.py` damages requests, recipes, machines and options without processes.
"""

import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Collection

from tools.campaign import judge
from tools.campaign.kills import normal
from tools.campaign.lab import Lab, Result, Room
from tools.campaign.subject import Ended
from tools.campaign.verbs import ON_MODEL, VERBS, points
from tools.damage import damage_field, damage_json, damage_safetensors, damage_text, read_header, write_header
from zinfer.record.jsonl import seal, unseal

LIMIT_S = 30.0  # after which a command hangs on its input


def _judged(result: Result, ended: Ended, same: bool, blind: bool) -> None:
    """Judge a command on a damaged input: refused in a line, the same result, or one that cannot be told."""
    result.faults += judge.words(ended)
    if ended.code is None:
        result.faults.append(f"no end within {ended.seconds:.0f} s")
    elif ended.code == 0:
        if same:
            return
        if blind:
            result.blind += 1
        else:
            result.faults.append("another result without a word")
    else:
        result.faults += judge.refusal(ended)


def _spoil_checkpoint(lab: Lab, room: Room, dice: random.Random, result: Result) -> tuple[str, bool]:
    """Damage a file of the room's checkpoint; return the damage, and whether it may be another good model."""
    folder = room.work / "model"
    shutil.copytree(lab.model, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    shards = [path for path in files if path.suffix == ".safetensors"]
    texts = [path for path in files if path.suffix == ".json"]
    kind = dice.choice(("json", "json", "json", "header", "header", "nan", "missing", "swap", "text", "kind"))
    if kind == "json":
        path = dice.choice(texts)
        index = path.name.endswith("index.json")
        return f"{path.name}: {damage_json(dice, path)}", not index
    if kind == "text":
        path = dice.choice(texts)
        return f"{path.name}: {damage_text(dice, path)}", not path.name.endswith("index.json")
    path = dice.choice(shards)
    if kind == "header":
        return f"{path.name}: {damage_safetensors(dice, path)}", False
    if kind == "nan":
        header, data = read_header(path)
        name = dice.choice([name for name in header if name != "__metadata__"])
        start, end = header[name]["data_offsets"]
        at = start + 4 * dice.randrange((end - start) // 4)
        value = dice.choice((float("nan"), float("inf"), float("-inf")))
        write_header(path, header, data[:at] + struct.pack("<f", value) + data[at + 4 :])
        return f"{path.name}: {value} in {name}", False
    if kind == "missing":
        path = dice.choice(files)
        path.unlink()
        return f"{path.name} is missing", path.suffix != ".safetensors" and "index" not in path.name
    if kind == "swap" and len(shards) > 1:
        first, other = dice.sample(shards, 2)
        first.rename(folder / "third")
        other.rename(first)
        (folder / "third").rename(other)
        return f"{first.name} and {other.name} exchanged", False
    path = dice.choice(files)
    path.unlink()
    what = dice.choice(("folder", "fifo", "link to itself", "link to a device"))
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if what == "link to itself" else "/dev/zero")
    return f"{path.name} is a {what}", path.suffix != ".safetensors" and "index" not in path.name


def _checkpoint(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    verb = VERBS["run"]
    what, blind = _spoil_checkpoint(lab, room, dice, result)
    room.tale.append(f"  {what}")
    result.struck += 1
    words = [word if word != "MODEL" else "model" for word in verb.words]
    ended = room.run(words, seconds=LIMIT_S)
    _judged(result, ended, verb.outcome(room, ended) == normal(lab, verb).outcome, blind)
    result.faults = [f"{what}: {fault}" for fault in result.faults]


STALE = "a value changed under its checksum"


def _spoil_record(room: Room, dice: random.Random, stale: bool) -> tuple[str, bool]:
    """Damage the file of results: bytes, lines, values with a checksum that is right again, or, if `stale`, is not."""
    path = room.work / "results.jsonl"
    lines = path.read_bytes().splitlines()
    kind = dice.choice(("sealed", "sealed", "sealed", "bytes", "line twice", "line lost", "order", "foreign", "other"))
    at = dice.randrange(len(lines))
    if stale:  # as believable as before
        at = dice.choice([number for number, line in enumerate(lines) if b'"ttft_ms":[' in line])
        digits = re.search(rb'"ttft_ms":\[(\d)', lines[at])
        assert digits is not None
        other = bytes([dice.choice([digit for digit in b"123456789" if digit != digits[1][0]])])
        lines[at] = lines[at][: digits.start(1)] + other + lines[at][digits.end(1) :]
        path.write_bytes(b"\n".join(lines) + b"\n")
        return f"line {at + 1}: {STALE}", False
    if kind == "sealed":
        name, fields = unseal(lines[at])
        try:
            damaged, what = damage_field(dice, fields)
            lines[at] = seal(name, damaged)
        except (ValueError, TypeError):  # what JSON does not have
            return "nothing", True
        path.write_bytes(b"\n".join(lines) + b"\n")
        return f"line {at}, sealed again: {what}", True
    if kind == "bytes":
        return damage_text(dice, path), False
    if kind == "line twice":
        lines.insert(dice.randrange(len(lines)), lines[at])
    elif kind == "line lost":
        del lines[at]  # which looks like a sweep that was not finished
    elif kind == "order":
        dice.shuffle(lines)
    elif kind == "foreign":
        lines.insert(at, dice.choice((b"{}", b"null", b"\x1b[2J", b"{" * 100_000, b'{"kind":"point"}', b"9" * 5000)))
    else:
        content = dice.choice((b"", b"\n", b"\0" * 4096, bytes(dice.randrange(256) for _ in range(300))))
        path.write_bytes(content)
        return "other content", False
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{kind} {at}", kind in ("line lost", "order", "line twice")


def _record(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    name = ("best", "plot", "report", "export", "compare", "resume")[number % 6]
    what, blind = _spoil_record(room, dice, number // 6 % 3 == 0)  # for each command
    room.tale.append(f"  {what}")
    result.struck += 1
    if name == "resume":
        _resumed(lab, room, what, result)
    else:
        verb = VERBS[name]
        ended = room.run(verb.words, seconds=LIMIT_S)
        output = ended.stderr + "".join(path.read_text() for path in room.work.glob("reports/*.html"))
        stale = STALE in what
        warned = "left out" in output.lower() and (not stale or what.partition(":")[0] in _lines(output))
        same = verb.outcome(room, ended) == normal(lab, verb).outcome and not stale
        _judged(result, ended, same, blind or warned)
    result.faults = [f"{name}, {what}: {fault}" for fault in result.faults]


def _lines(text: str) -> set[str]:
    """Return the damaged lines that were named, as ``line 3``."""
    return {f"line {number}" for number in re.findall(r"results\.jsonl(?::|, line )(\d+)\b", text)}


def _resumed(lab: Lab, room: Room, what: str, result: Result) -> None:
    """Resume a sweep with damaged results: no line is lost, and what is not believed is measured again."""
    verb, path = VERBS["sweep"], room.work / "results.jsonl"
    before = path.read_bytes().splitlines()
    words = [word if word != "r.jsonl" else path.name for word in verb.words]
    ended = room.run([*words, "--resume"], seconds=LIMIT_S)
    result.faults += judge.words(ended) + (judge.refusal(ended) if ended.code not in (0, 3) else [])
    after, damaged = path.read_bytes().splitlines(), path.with_name(f"{path.name}.damaged")
    kept_aside = damaged.read_bytes().splitlines() if damaged.is_file() else []
    expected = {*after, *kept_aside}
    if lost := [line for line in before if line.strip() and line not in expected]:
        result.faults.append(f"{len(lost)} lines are gone, and not in {damaged.name}")
    if STALE in what:
        if ended.code != 0:
            result.faults.append(f"the resume ends with {ended.code}: {ended.last_line[:300]}")
        if before[int(re.findall(r"\d+", what)[0]) - 1] not in kept_aside:
            result.faults.append(f"the line counts, and is not in {damaged.name}")
        result.faults += judge.equal(dict(points(path)), normal(lab, verb).outcome, "points after the resume")


PACKED_RUN = (
    "run", *ON_MODEL, "--offload", "cpu", "-O", "weight_codec=lossless", "-O", "packed=packed", "-p", "Hello",
    "--output-len", "8", "--ignore-eos", "--json",
)  # fmt: skip


def _packed(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    """Damage a file of packed layers: refused, or the text is that of the checkpoint."""
    shutil.copytree(lab.root / "packed", room.work / "packed")
    path = dice.choice(sorted(path for path in (room.work / "packed").rglob("*") if path.is_file()))
    if path.suffix == ".json":
        what = f"{path.name}: {damage_json(dice, path)}"
    else:
        content = bytearray(path.read_bytes())
        at = dice.randrange(len(content))
        if dice.random() < 0.6:
            content[at] ^= 1 << dice.randrange(8)
            what = f"{path.name}: flip at {at}"
        else:
            del content[at:]
            what = f"{path.name}: cut at {at}"
        path.write_bytes(content)
    room.tale.append(f"  {what}")
    result.struck += 1
    ended = room.run(PACKED_RUN, seconds=LIMIT_S)
    _judged(result, ended, VERBS["run"].outcome(room, ended) == lab.notes["packed"], False)
    result.faults = [f"{what}: {fault}" for fault in result.faults]


def furnish(lab: Lab, names: Collection[str]) -> None:
    """Make the packed layers that `names` damage. Raises RuntimeError if the results cannot be resumed
    as they are.
    """
    if "record" in names:
        with Room(lab, "resumed") as room:
            words = [word if word != "r.jsonl" else "results.jsonl" for word in VERBS["sweep"].words]
            ended = room.run([*words, "--resume"])
            if ended.code != 0:
                raise RuntimeError(f"undisturbed results cannot be resumed: {ended.code} {ended.output[-2000:]}")
    if "packed" in names:
        with Room(lab, "packed") as room:
            room.run((*VERBS["pack"].words, "-o", "packed"))
            lab.notes["packed"] = VERBS["run"].outcome(room, room.run(PACKED_RUN))
            shutil.copytree(room.work / "packed", lab.root / "packed")


Inside = Callable[[Lab, int, Room, random.Random, Result], None]


def _case(name: str, inside: Inside) -> Callable[[Lab, int, bool], Result]:
    def case(lab: Lab, number: int, keep: bool = False) -> Result:
        result = Result(name, number)
        with Room(lab, name, keep) as room:
            inside(lab, number, room, lab.dice(name, number), result)
            result.faults += judge.processes(room.reap())
            result.tale = room.tale
        return result

    return case


INSIDE: dict[str, Inside] = {"checkpoint": _checkpoint, "record": _record, "packed": _packed}
USES = {
    "checkpoint": ("run",),
    "record": ("best", "plot", "report", "export", "compare", "sweep"),
}
CLASSES = {name: _case(name, inside) for name, inside in INSIDE.items()}
