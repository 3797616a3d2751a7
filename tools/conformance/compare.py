"""Comparison of one type in every way: zinfer's logits against those of `transformers.generate` on each row alone.

Every row is decoded with the tokens that transformers adds to it. So the logits of all steps are compared, and a token
whose lead is small hides nothing.
"""

import json
import re
import shutil
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tools.conformance.reference import LENGTHS, OUTPUT_LEN, CannotCompare, Monotonous, Reference, reference
from tools.conformance.rows import come_and_go, side_by_side
from tools.conformance.small import GAINS, CannotBuild, Subject, family, save, small_model
from tools.steered import steered
from zinfer import engine
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.source import find
from zinfer.commands import pack
from zinfer.core.case import Case, Offload, Option, Workload
from zinfer.core.machine import Machine
from zinfer.core.model import ModelError
from zinfer.engine import EngineError, base
from zinfer.plan.planner import make_plan

MACHINE = Machine(name="conformance", source="measured", host_bytes=8 << 30, nvme_bytes=8 << 30)

REFUSALS = (ModelError, CheckpointError, EngineError, click.ClickException)
Verdict = Literal["right", "refused", "differs", "crash", "cannot be built", "cannot be compared", "does not apply"]


class Way(NamedTuple):
    """One way to run the checkpoint: the prompts as one batch, or with `rows` as rows that come and go."""

    says: str
    offload: Offload = "cpu"
    options: dict[str, Option] = {}  # noqa: RUF012
    prefill_tokens: int | None = None  # prompt tokens in one forward pass at most
    packed: bool = False
    rounded: bool = False  # the quantised copy that `zinfer pack --weights int8` makes
    experts: bool = False  # for mixtures of experts alone
    rows: bool = False
    drafts: bool = False  # some of them wrong
    kept: bool = False  # with keys and values of earlier prompts
    device_rows: int | None = None  # rows with their KV cache on the device
    gpu_weights: str | None = None  # share of the layers that lie on the device alone
    engine: str = "stream"  # others are for a sample of the types


_BY_CPU: dict[str, Option] = {"kv_offload": "cpu", "kv_attention": "cpu"}
_MIXED = Way("", options=_BY_CPU | {"kv_offload": "auto"}, rows=True, device_rows=3)
_SOME = "some {}with their KV cache in host memory, to which the CPU attends"
WAYS: dict[str, Way] = {
    "none": Way("weights on the device", offload="none"),
    "cpu": Way("weights streamed from host memory"),
    "rows": Way("streamed, prompts prefilled row by row", prefill_tokens=1),
    "kept": Way("streamed, but for half of the layers, which lie on the device alone", gpu_weights="50%"),
    "packed": Way("streamed from packed layers", options={"weight_codec": "lossless"}, packed=True),
    "kv-cpu": Way("streamed, KV cache in host memory, the CPU attends", options=_BY_CPU),
    "kv-link": Way("streamed, KV cache in host memory, over the link", options=_BY_CPU | {"kv_attention": "gpu"}),
    "int8": Way("streamed from a copy with weights in int8", rounded=True),
    "experts": Way("streamed, experts on demand", options={"experts": "on-demand"}, experts=True),
    "requests": Way("streamed, requests that come and go", rows=True),
    "mixed": _MIXED._replace(says=f"requests that come and go, {_SOME.format('')}"),
    "drafts": Way("requests that come and go, several tokens a pass by drafts", rows=True, drafts=True),
    "mixed-d": _MIXED._replace(says=f"drafts, {_SOME.format('rows ')}", drafts=True),
    "reused": Way("requests that come and go, and reuse the kept beginnings of earlier prompts", rows=True, kept=True),
    "accelerate": Way("requests that come and go, on engine accelerate", rows=True, engine="accelerate"),
    "deepspeed": Way("requests that come and go, on engine deepspeed", rows=True, engine="deepspeed"),
}
# Types of different families that are compared on the other engines, too.
SAMPLE = {
    "bart", "bloom", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3_text", "gpt2", "gpt_oss", "llama", "mamba2",
    "minimax", "mixtral", "qwen3_next", "recurrent_gemma", "zamba2",
}  # fmt: skip
# Notes on a type: its family, prompts left out, the largest difference of logits allowed, and why its rows must be of
# one length in a micro-batch, if they must.
NOTES = ("family", "skipped", "tolerance", "padding")


class Outcome(NamedTuple):
    """Outcome of one way, or of a whole type."""

    verdict: Verdict
    why: str = ""


DOES_NOT_APPLY = Outcome("does not apply")
Tell = Callable[[str, Outcome], None]


def compare(subject: Subject, scratch: Path, tell: Tell) -> None:
    """Build `subject`, run it in all `WAYS`, and `tell` the outcomes.

    A type that cannot be built or compared has one outcome, named ``all``. `tell` also gets `NOTES` on the type.
    """
    directory = scratch / subject.type
    try:
        model_class, reference = _saved(subject, directory, tell)
    except CannotBuild as error:
        return tell("all", Outcome("cannot be built", _clean(error, scratch)))
    except CannotCompare as error:
        return tell("all", Outcome("cannot be compared", _clean(error, scratch)))
    except Exception as error:
        return tell("all", Outcome("cannot be compared", f"transformers: {_clean(error, scratch)} {_place(error)}"))
    _note(reference, tell)
    mixture = False
    with suppress(*REFUSALS):  # the ways will tell
        mixture = find(str(directory), "float32", None, "safetensors").spec.num_experts > 1
    for name, way in WAYS.items():
        applies = (mixture or not way.experts) and (way.engine == "stream" or subject.name in SAMPLE)
        outcome = _outcome(way, directory, model_class, reference, scratch, tell) if applies else DOES_NOT_APPLY
        tell(name, outcome)


def _note(reference: Reference, tell: Tell) -> None:
    tell("skipped", Outcome("right", str(reference.skipped)))
    tell("tolerance", Outcome("right", f"{reference.tolerance:.1e}"))


def _saved(subject: Subject, directory: Path, tell: Tell) -> tuple[type[PreTrainedModel], Reference]:
    """Save the first model that is worth comparing in `directory`; return its class and its `reference`."""
    for gain in GAINS:
        shutil.rmtree(directory, ignore_errors=True)
        model = small_model(subject, gain)
        tell("family", Outcome("right", family(model)))
        save(model, directory)
        try:
            return type(model), reference(type(model), directory)
        except Monotonous as error:
            why = error
    raise why


def _outcome(
    way: Way, directory: Path, model_class: type[PreTrainedModel], expected: Reference, scratch: Path, tell: Tell
) -> Outcome:
    try:
        if way.rounded:
            directory, plain = rounded(directory, scratch)
            expected = reference(model_class, plain)
            _note(expected, tell)
        errors, padding = run(way, directory, expected, scratch)
    except REFUSALS as error:
        return Outcome("refused", _clean(error, scratch))
    except CannotCompare:
        return DOES_NOT_APPLY
    except Exception as error:
        return Outcome("crash", f"{_clean(error, scratch)} {_place(error)}")
    tell("padding", Outcome("right", padding))
    if errors is None:
        return DOES_NOT_APPLY
    wrong = ~(errors < expected.tolerance)
    if not bool(wrong.any()):
        return Outcome("right")
    step = int(wrong.any(0).nonzero()[0])
    summary = f"{int((~wrong).sum())} of {wrong.numel()} logits equal, all of the first {step} steps"
    return Outcome("differs", f"{summary}; rows {wrong.any(1).nonzero()[:, 0].tolist()} by {float(errors.max()):.2g}")


def _clean(error: BaseException, scratch: Path) -> str:
    """Return an error's message in one line, without paths."""
    text = error.message if isinstance(error, click.ClickException) else str(error)
    expected = isinstance(error, (*REFUSALS, CannotBuild, CannotCompare))
    line = " ".join(text.split()).replace(f"{scratch}/", "")[:400]
    return line if expected else f"{type(error).__name__}: {line}"


def _place(error: BaseException) -> str:
    """Return the place of an error: the last lines in known packages that its traceback passes through."""
    known = re.compile(r".*/((?:zinfer|transformers|torch|tests|tools)/.*)")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{match[1]}:{frame.lineno}" for frame in frames if (match := known.search(frame.filename))]
    ours = [frame for frame in lines if frame.startswith("zinfer/")]
    return f"[{' < '.join(dict.fromkeys([*lines[-1:], *ours[-1:]]))}]"


def rounded(directory: Path, scratch: Path) -> tuple[Path, Path]:
    """Copy a checkpoint twice: in int8, and as the same numbers. Return both."""
    copy, plain = scratch / "int8", scratch / "plain"
    _pack(directory, copy, "--weights", "int8")
    shutil.copytree(copy, plain)
    for file in plain.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            scale, weight = tensors.pop(name), name.removesuffix("_scale")
            tensors[weight] = tensors[weight].float() * scale
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        part.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    return copy, plain


def _pack(directory: Path, folder: Path, *more: str) -> str:
    words = ["--model", str(directory), "--dtype", "fp32", "--output", str(folder), *more]
    pack.command.main(words, standalone_mode=False)
    return str(folder)


def run(way: Way, directory: Path, reference: Reference, scratch: Path) -> tuple[Tensor | None, str]:
    """Return the errors of zinfer's logits, ``[rows, OUTPUT_LEN]``. None if the way does not apply. The text says why
    rows cannot be padded, if they cannot."""
    options = way.options | ({"packed": _pack(directory, scratch / "packed")} if way.packed else {})
    source = find(str(directory), "float32", None, "safetensors")
    rows = 2 * len(LENGTHS) if way.rows else len(LENGTHS)
    load = Workload(batch_size=rows, input_len=max(LENGTHS), output_len=OUTPUT_LEN)
    how: dict[str, Any] = {"engine": way.engine, "offload": way.offload, "gpu_weights": way.gpu_weights}
    how |= {"dtype": "float32", "load_format": "safetensors", "options": tuple(sorted(options.items()))}
    case = Case(model=str(directory), workload=load, **how)
    plan = steered(make_plan(case, source.spec, MACHINE, None), way.device_rows, way.prefill_tokens)
    with closing(base.load(engine.kind(way.engine).target)(plan)) as running:
        padding = running.cannot_pad() or ""
        if not way.rows:
            return side_by_side(running, reference), padding
        return come_and_go(running, reference, way.drafts, way.kept), padding
