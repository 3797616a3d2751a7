"""Damaged inputs: checkpoints, records, requests, recipes, machines, options, kept KV caches, packed layers; and names
and texts that try to steer the terminal or a page.

A damaged input is refused in a line, or it gives what the undamaged one gives. Where another value is as good as the
first (a rope base in config.json, a time in a record that is sealed again, a letter of a prompt), the result may
differ; such cases are counted as blind.
"""

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from xml.etree import ElementTree

from tools.campaign import judge
from tools.campaign.kills import normal
from tools.campaign.lab import Lab, Result, Room
from tools.campaign.subject import Ended
from tools.campaign.verbs import ON_MODEL, VERBS, answers, points, requests
from tools.damage import damage_field, damage_json, damage_safetensors, damage_text, read_header, write_header
from zinfer.record.jsonl import seal, unseal

LIMIT_S = 30.0  # after which a command hangs on its input
CODES = (0, 3, 4)


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


def _request(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    verb = VERBS["batch"]
    path = room.work / "requests.jsonl"
    lines = requests(24).splitlines()
    spoilt: set[int] = set()
    messages = []
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(lines))
        spoilt.add(at)
        way = dice.choice(("field", "field", "bytes", "again"))
        if way == "field":
            damaged, what = damage_field(dice, json.loads(requests(24).splitlines()[at]))
            lines[at] = json.dumps(damaged)
        elif way == "bytes":
            (room.work / "line").write_text(lines[at])
            what = damage_text(dice, room.work / "line")
            lines[at] = (room.work / "line").read_bytes().decode("latin-1").replace("\n", " ").replace("\r", " ")
            (room.work / "line").unlink()
        else:
            what, other = "the id of another line", dice.randrange(len(lines))
            spoilt.add(other)
            lines[at] = lines[other]
        messages.append(f"line {at}: {what}")
    path.write_bytes(b"\n".join(line.encode("latin-1", "replace") for line in lines) + b"\n")
    room.tale.append(f"  {messages}")
    result.struck += 1
    ended = room.run(verb.words, seconds=LIMIT_S)
    result.faults += judge.words(ended)
    if ended.code in CODES:
        wanted: dict[str, list[str]] = normal(lab, verb).outcome
        actual = answers(room.work / "out.jsonl")
        whole = {f"r{at}" for at in range(24) if at not in spoilt}
        result.faults += judge.equal(
            {name: actual.get(name) for name in whole}, {name: wanted[name] for name in whole}, "answers of other lines"
        )
    else:
        result.faults += judge.refusal(ended)
    result.faults = [f"{'; '.join(messages)}: {fault}" for fault in result.faults]


def _damage_toml(dice: random.Random, path: Path) -> str:
    """Damage a recipe: a value of another kind or size, or its bytes."""
    if dice.random() < 0.3:
        return damage_text(dice, path)
    lines = path.read_text().splitlines()
    at = dice.randrange(len(lines))
    key = lines[at].partition(" = ")[0]
    value = dice.choice(
        ("0", "-1", "1e400", "9" * 5000, '""', "[]", "{}", "true", "nan", "inf", '["\\u001b[2J"]', "[1, -1]",
         "1979-05-27",
         "[[1]]", '"' + "x" * 70_000 + '"', "[" + "1," * 10_000 + "]", "[" * 5000 + "]" * 5000, '["bloom-177b"]',
         '["../../etc/passwd"]', "[1.5]", '["stream", "warp"]', "[9223372036854775807]", '["1-1000000000+1"]')
    )  # fmt: skip
    lines[at] = f"{key} = {value}"
    if dice.random() < 0.2:
        lines.insert(at, dice.choice(("unknown = 1", f"{key} = 1", "[options]", "[[model]]", "options = 3")))
    path.write_text("\n".join(lines) + "\n")
    return f"{key} = {value[:40]}"


def _recipe(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    words = (("sweep", "recipe.toml", "--dry-run"), ("plan", "recipe.toml"))[number % 2]
    what = _damage_toml(dice, room.work / "recipe.toml")
    room.tale.append(f"  {what}")
    result.struck += 1
    ended = room.run(words, seconds=LIMIT_S)
    _judged(result, ended, False, True)
    result.faults += judge.escapes(ended.output)
    result.faults = [f"{words[0]}, {what}: {fault}" for fault in result.faults]


def _machine(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    (path,) = (room.work / "sweeps").rglob("machine.json")
    what = damage_json(dice, path)
    verb = VERBS[("plan", "run", "plan")[number % 3]]
    room.tale.append(f"  {what}")
    result.struck += 1
    ended = room.run(verb.words, seconds=LIMIT_S)
    _judged(result, ended, verb.outcome(room, ended) == normal(lab, verb).outcome, True)
    result.faults = [f"{verb.name}, {what}: {fault}" for fault in result.faults]


VALUES = (
    "", " ", "0", "-1", "1e400", "1e400GB", "9" * 5000, "nan", "inf", "1-1000000000+1", "1-4*2", "1,2,,3", ",", "١٢",
    "½",
    "\x1b[2J", "$(reboot)", "%s%n", "a" * 70_000, "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "50%", "101%",
    "1e18", "0x10", "none,none", "auto,auto", "KEY=VALUE", "gpus=-1", "gpus=99999999999",
    "packed=/dev/zero",
    "weight_codec=\x00x", "--", "-", "‮", "\udcff", "h2d_bandwidth=0", "h2d_bandwidth=1e-300", "ttft:p99:<=:2s",
    "ttft:p99:<=:-2s", "99999999999999999999h", "2Mtok/day", "1e999tok",
)  # fmt: skip


def _option(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    """Give one option of a command an impossible value."""
    import click

    from zinfer.cli import cli

    name = dice.choice(
        ("sweep", "plan", "run", "batch", "best", "plot", "report", "export", "reuse", "accuracy", "pack")
    )
    command: click.Command | None = cli
    for word in VERBS[name].words[:2]:
        command = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else command
    assert command is not None
    choice = [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]
    option, value = dice.choice(choice), dice.choice(VALUES).replace("\0", "")
    words = [*VERBS[name].words, option.opts[0], value]
    if name == "sweep":
        words.append("--dry-run")
    room.tale.append(f"  {option.opts[0]} {value[:60]!r}")
    result.struck += 1
    ended = room.run(words, seconds=LIMIT_S, stdin=VERBS[name].stdin)
    result.faults += judge.words(ended) + judge.code(ended)
    result.faults += judge.escapes(ended.stderr)
    if ended.code in (2, 5) and not ended.stderr.strip():
        result.faults.append("refused without a word")
    result.faults = [f"{name} {option.opts[0]} {value[:40]!r}: {fault}" for fault in result.faults]


def _kept(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    """Damage a kept conversation: the answers are those of an undisturbed one, computed again if need be."""
    verb = VERBS["chat"]
    shutil.copytree(lab.root / "kept", room.root / "drive", dirs_exist_ok=True)
    path = dice.choice(sorted(path for path in (room.root / "drive").rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    way = dice.choice(("flip", "flip", "cut", "empty", "header", "other", "longer", "folder"))
    if way == "flip":
        content[at] ^= 1 << dice.randrange(8)
    elif way == "cut":
        del content[at:]
    elif way == "empty":
        content.clear()
    elif way == "header":
        at = dice.randrange(min(len(content), 8 + struct.unpack("<Q", content[:8])[0]))
        content[at] = dice.randrange(256)
    elif way == "longer":
        content += bytes(64)
    if way == "folder":
        path.unlink()
        path.mkdir()
    elif way == "other":
        others = [sibling for sibling in sorted(path.parent.iterdir()) if sibling != path and sibling.is_file()]
        shutil.copy(dice.choice(others), path) if others else None
    else:
        path.write_bytes(content)
    what = f"{path.name}: {way} at {at}"
    room.tale.append(f"  {what}")
    result.struck += 1
    ended = room.run(verb.words, stdin=verb.stdin, seconds=LIMIT_S)
    result.faults += judge.words(ended)
    if ended.code != 0:
        result.faults.append(f"a damaged cache ends the conversation with {ended.code}: {ended.last_line[:200]}")
    result.faults += judge.equal(verb.outcome(room, ended), normal(lab, verb).outcome, "answers")
    result.faults = [f"{what}: {fault}" for fault in result.faults]


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


HOSTILE = (
    "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x9b31m", "\u202egnp.exe", "<img src=x onerror=alert(1)>", "![x](http://x)",
    "$$\\frac{", "</svg><script>", "a\nb", "a\rb", "|||", "`x`", "[red]x[/red]", "\ufffe", "%s", "{0}", "\x08\x08\x08",
    "&lt;",
)  # fmt: skip


def _escape(lab: Lab, number: int, room: Room, dice: random.Random, result: Result) -> None:
    """Give a name or text that would steer the terminal."""
    text = dice.choice(HOSTILE)
    target = ("results", "folder", "recipe", "prompt", "token", "requests", "machine")[number % 7]
    room.tale.append(f"  {text!r} in {target}")
    result.struck += 1
    terminal = dice.random() < 0.5
    words: tuple[str, ...] = ("best", "results.jsonl")
    if target == "results":
        path = room.work / "results.jsonl"
        lines = []
        field = dice.choice(("model", "machine", "error"))
        for line in path.read_bytes().splitlines():
            name, fields = unseal(line)
            if field == "model" and "case" in fields:
                fields["case"]["model"] = f"m{text}"
            elif field != "error" or name == "point":
                fields[field if field != "model" else "machine"] = f"h{text}"
            lines.append(seal(name, fields))
        path.write_bytes(b"\n".join(lines) + b"\n")
        words = dice.choice(
            (words, ("report", "results.jsonl", "-o", "reports/page.html"),
             ("export", "results.jsonl", "--format", "md"),
             ("plot", "results.jsonl", "--format", "svg", "--figure", "throughput", "-o", "figures"))
        )  # fmt: skip
    elif target == "folder":
        name = "m" + text.replace("/", "_").replace("\0", "")
        shutil.copytree(lab.model, room.work / name)
        words = dice.choice(
            (
                ("plan", "-m", f"./{name}", "--batch-size", "1"),
                ("run", "-m", f"./{name}", "-p", "x", "--output-len", "2"),
            )
        )
    elif target == "recipe":
        path = room.work / "recipe.toml"
        path.write_text(f"description = {json.dumps(text)}\n" + path.read_text().replace("bloom-tiny", "bloom-tiny"))
        if dice.random() < 0.5:
            path.write_text(path.read_text().replace('"bloom-tiny"', json.dumps(f"no{text}")))
        words = ("plan", "recipe.toml")
    elif target == "prompt":
        words = ("run", *ON_MODEL, "--offload", "none", "-p", text, "--output-len", "4", "--ignore-eos")
    elif target == "token":
        shutil.copytree(lab.model, room.work / "model")
        path = room.work / "model" / "tokenizer.json"
        document = json.loads(path.read_text())
        vocabulary = document["model"]["vocab"]
        document["model"]["vocab"] = {
            (f"{text}{number}" if number >= 40 else word): number for word, number in vocabulary.items()
        }
        path.write_text(json.dumps(document))
        words = ("run", "-m", "model", "--offload", "none", "-p", "!", "--output-len", "8", "--ignore-eos")
    elif target == "requests":
        asked: list[dict[str, object]] = [
            {"custom_id": text, "body": {"prompt": text, "max_tokens": 2}},
            {"custom_id": f"{text}2", "body": {"prompt": text, text: 1}},
        ]
        sent = [json.dumps({"method": "POST", "url": "/v1/completions", **request}) for request in asked]
        (room.work / "requests.jsonl").write_text("\n".join(sent) + "\n")
        words = VERBS["batch"].words
    else:
        (path,) = (room.work / "sweeps").rglob("machine.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"name": f"h{text}", "note": text, "gpu_name": text}))
        words = VERBS["plan"].words
    ended = room.run(words, terminal=terminal, seconds=LIMIT_S)
    result.faults += judge.words(ended) + judge.code(ended)
    data = not terminal and words[0] in ("run", "export")  # what goes into a pipe is data
    result.faults += judge.escapes(ended.stderr + ("" if data else ended.stdout), terminal)
    result.faults += pages(room.work)
    result.faults = [f"{words[0]}, {text!r} in {target}: {fault}" for fault in result.faults]


def pages(folder: Path) -> list[str]:
    """Judge pages and figures: XML that can be parsed, and no markup that somebody brought along."""
    faults = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".svg":
            try:
                ElementTree.parse(path)
            except ElementTree.ParseError as error:
                faults.append(f"{path.name} is no XML: {error}")
        elif path.suffix in (".html", ".md") and path.is_file():
            content = path.read_text(errors="replace")
            hostile = ("<img src=x", "<script>alert", "</svg><script", "\x1b", "\x9b", "\u202e")
            faults += [f"{path.name} holds {markup!r}" for markup in hostile if markup in content]
            if path.suffix == ".md" and re.search(r"(?<!\\)!\[x\]\(http://x\)", content):
                faults.append(f"{path.name} holds a picture of somebody else")
    return faults


def furnish(lab: Lab, names: Collection[str]) -> None:
    """Make the conversation and packed layers that `names` damage. Raises RuntimeError if the results cannot be resumed
    as they are.
    """
    if "record" in names:
        with Room(lab, "resumed") as room:
            words = [word if word != "r.jsonl" else "results.jsonl" for word in VERBS["sweep"].words]
            ended = room.run([*words, "--resume"])
            if ended.code != 0:
                raise RuntimeError(f"undisturbed results cannot be resumed: {ended.code} {ended.output[-2000:]}")
    if "kv" in names:
        with Room(lab, "kept") as room:
            room.run(VERBS["chat"].words, stdin=VERBS["chat"].stdin)
            shutil.copytree(room.root / "drive", lab.root / "kept")
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


INSIDE: dict[str, Inside] = {
    "checkpoint": _checkpoint, "record": _record, "request": _request, "recipe": _recipe, "machine": _machine,
    "option": _option, "kv": _kept, "packed": _packed, "escape": _escape,
}  # fmt: skip
USES = {"checkpoint": ("run",), "record": ("best", "plot", "report", "export", "compare", "sweep"),
        "request": ("batch",), "machine": ("plan", "run"), "kv": ("chat",)}  # fmt: skip
CLASSES = {name: _case(name, inside) for name, inside in INSIDE.items()}
