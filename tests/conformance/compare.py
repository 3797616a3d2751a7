"""Comparison of one type in every way: zinfer's greedy tokens against those of `transformers.generate`."""

import json
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tests.conformance.rows import come_and_go
from tests.conformance.sizes import FIRST_TOKEN, VOCAB_SIZE
from tests.conformance.small import GAINS, CannotBuild, Subject, family, save, small_model
from tests.running import decode, prefill
from tests.steered import steered
from zinfer import engine
from zinfer.commands import pack
from zinfer.engine import EngineError, base
from zinfer.plan.plan import make_plan
from zinfer.spec.case import Case, Offload, Option, Workload
from zinfer.spec.checkpoint import CheckpointError
from zinfer.spec.machine import Machine
from zinfer.spec.model import ModelError
from zinfer.spec.source import find

LENGTHS, OUTPUT_LEN = (9, 5, 7), 12  # tokens in the left-padded rows, and added; together more than two sliding windows
ONE_LENGTH = (9, 9, 9)  # for models whose `generate` itself gives padded rows other tokens than each has alone
SEEDS = 8  # prompts that are tried until no token is a close call
MARGIN = 1e-3  # lead of the largest logit over their spread; another order of summation then gives the same token
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
    here: int | None = None  # rows with their KV cache on the device
    gpu_weights: str | None = None  # share of the layers that lie on the device alone


WAYS: dict[str, Way] = {
    "none": Way("weights on the device", offload="none"),
    "cpu": Way("weights streamed from host memory"),
    "rows": Way("streamed, prompts prefilled row by row", prefill_tokens=1),
    "kept": Way("streamed, but for half of the layers, which lie on the device alone", gpu_weights="50%"),
    "packed": Way("streamed from packed layers", options={"weight_codec": "lossless"}, packed=True),
    "kv-cpu": Way(
        "streamed, KV cache in host memory, the CPU attends", options={"kv_offload": "cpu", "kv_attention": "cpu"}
    ),
    "kv-link": Way(
        "streamed, KV cache in host memory, over the link", options={"kv_offload": "cpu", "kv_attention": "gpu"}
    ),
    "int8": Way("streamed from a copy with weights in int8", rounded=True),
    "experts": Way("streamed, experts on demand", options={"experts": "on-demand"}, experts=True),
    "requests": Way("streamed, requests that come and go", rows=True),
    "mixed": Way(
        "requests that come and go, some with their KV cache in host memory, to which the CPU attends",
        options={"kv_offload": "auto", "kv_attention": "cpu"},
        rows=True,
        here=3,
    ),
    "drafts": Way("requests that come and go, several tokens a pass by drafts", rows=True, drafts=True),
    "mixed-d": Way(
        "drafts, some rows with their KV cache in host memory, to which the CPU attends",
        options={"kv_offload": "auto", "kv_attention": "cpu"},
        rows=True,
        drafts=True,
        here=3,
    ),
}


class Outcome(NamedTuple):
    """Outcome of one way, or of a whole type."""

    verdict: Verdict
    why: str = ""


Tell = Callable[[str, Outcome], None]


class Reference(NamedTuple):
    """Prompts, left-padded, ``[B, max length]``, their mask, and the tokens that follow, ``[B, OUTPUT_LEN]``."""

    token_ids: Tensor
    mask: Tensor
    tokens: Tensor


class CannotCompare(ValueError):
    """Raised for a model whose own `generate` is no reference."""


class TakesPaddingError(RuntimeError):
    """Raised where prompts of several lengths are taken, though padding changes the text."""


class Monotonous(CannotCompare):
    """Raised for a model that hardly depends on its prompt; other weights may help."""


def compare(subject: Subject, scratch: Path, tell: Tell) -> None:
    """Build `subject` in the empty folder `scratch`, run it in all `WAYS`, and `tell` the outcome of each.

    A type that cannot be built or compared has one outcome, named ``all``. Otherwise `tell` also gets the type's family
    under the name ``family``, and an outcome ``reference`` once the reference exists.
    """
    directory = scratch / subject.type
    try:
        model_class, known = _saved(subject, directory, tell)
    except CannotBuild as error:
        return tell("all", Outcome("cannot be built", _clean(error, scratch)))
    except CannotCompare as error:
        return tell("all", Outcome("cannot be compared", _clean(error, scratch)))
    except Exception as error:
        return tell("all", Outcome("cannot be compared", f"transformers: {_clean(error, scratch)} {_place(error)}"))
    tell("reference", Outcome("right", "" if not known.mask.all() else "one length"))
    mixture = False
    with suppress(*REFUSALS):  # the ways will tell
        mixture = find(str(directory), "float32", None, "safetensors").spec.num_experts > 1
    for name, way in WAYS.items():
        if way.experts and not mixture:
            tell(name, Outcome("does not apply"))
        else:
            tell(name, _outcome(way, directory, model_class, known, scratch))


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


def _outcome(way: Way, directory: Path, model_class: type[PreTrainedModel], known: Reference, scratch: Path) -> Outcome:
    try:
        if way.rounded:
            directory, plain = rounded(directory, scratch)
            known = reference(model_class, plain)
        expected = known.tokens
        found = run(way, directory, known, scratch)
    except REFUSALS as error:
        return Outcome("refused", _clean(error, scratch))
    except TakesPaddingError as error:
        return Outcome("differs", str(error))
    except CannotCompare:
        return Outcome("does not apply")
    except Exception as error:
        return Outcome("crash", f"{_clean(error, scratch)} {_place(error)}")
    if torch.equal(found, expected):
        return Outcome("right")
    equal = found == expected
    step = int((~equal).any(0).nonzero()[0])
    return Outcome("differs", f"{int(equal.sum())} of {equal.numel()} tokens equal, all of the first {step}")


def _clean(error: BaseException, scratch: Path) -> str:
    """Return the message of an error in one line, without this machine's paths."""
    text = error.message if isinstance(error, click.ClickException) else str(error)
    own = isinstance(error, (*REFUSALS, CannotBuild, CannotCompare))
    line = " ".join(text.split()).replace(f"{scratch}/", "")[:400]
    return line if own else f"{type(error).__name__}: {line}"


def _place(error: BaseException) -> str:
    """Return the place of an error: the last lines in known packages that its traceback passes through."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = ("zinfer/", "transformers/", "torch/", "tests/")
    told = [
        f"{frame.filename[at:]}:{frame.lineno}"
        for frame in frames
        for at in (max(frame.filename.rfind(f"/{package}") for package in packages) + 1,)
        if at
    ]
    ours = [place for place in told if place.startswith("zinfer/")]
    return f"[{' < '.join(dict.fromkeys([*told[-1:], *ours[-1:]]))}]"


def prompts(seed: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return random prompts, left-padded: token ids and mask, ``[B, max length]`` each."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(FIRST_TOKEN, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return token_ids * mask, mask


def reference(model_class: type[PreTrainedModel], directory: Path) -> Reference:
    """Return prompts with the tokens that `transformers.generate` adds, the same ones together as alone. The prompts
    are of one length if those of padded rows are not.

    Raises CannotCompare if these are no usable reference.
    """
    model, info = model_class.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise CannotCompare(f"transformers does not load {sorted(info['missing_keys'])[0]}, which it has saved itself")
    model.eval().generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=OUTPUT_LEN, min_new_tokens=OUTPUT_LEN, pad_token_id=0, use_cache=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    why = ""
    for lengths, seed in product((LENGTHS, ONE_LENGTH), range(SEEDS)):
        token_ids, mask = prompts(seed, lengths)
        output = model.generate(input_ids=token_ids, attention_mask=mask)
        tokens, logits = output.sequences[:, token_ids.shape[1] :], torch.stack(output.logits, dim=1).float()
        if not bool(torch.isfinite(logits.max(-1).values).all()) or bool(logits.isnan().any()):
            raise CannotCompare("transformers generates NaN")
        top = logits.topk(2, dim=-1).values
        if tokens.shape != (len(lengths), OUTPUT_LEN) or not torch.equal(tokens, logits.argmax(-1)):
            why = "transformers generates other tokens than the largest logits are of"
        elif len({tuple(row.tolist()) for row in tokens}) < len(tokens) or len(tokens.unique()) < 6:
            why = "transformers generates the same tokens whatever the prompt"
        elif float((top[..., 0] - top[..., 1]).min()) < MARGIN * float(logits.std()):
            why = f"with each of {SEEDS} prompts, some token is a close call"
        elif not torch.equal(tokens, _alone(model, token_ids, mask)):
            why = "transformers gives a prompt other tokens in a batch than alone"
        else:
            return Reference(token_ids, mask, tokens)
    raise Monotonous(why)


def _alone(model: PreTrainedModel, token_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens that `transformers.generate` adds to each prompt alone, ``[B, OUTPUT_LEN]``."""
    rows = [row[seen.bool()][None] for row, seen in zip(token_ids, mask, strict=True)]
    return torch.cat([
        model.generate(input_ids=row, attention_mask=torch.ones_like(row)).sequences[:, row.shape[1] :] for row in rows
    ])  # fmt: skip


def rounded(directory: Path, scratch: Path) -> tuple[Path, Path]:
    """Make a copy of a checkpoint with weights in int8, and another with the same weights as numbers; return both."""
    copy, plain = scratch / "int8", scratch / "plain"
    words = ["--model", str(directory), "--dtype", "fp32", "--weights", "int8", "--output", str(copy)]
    pack.command.main(words, standalone_mode=False)
    shutil.copytree(copy, plain)
    for file in plain.glob("*.safetensors"):
        tensors = load_file(file)
        scales = {
            name.removesuffix("_scale"): tensors.pop(name) for name in [*tensors] if name.endswith("weight_scale")
        }
        tensors |= {name: tensors[name].float() * scale for name, scale in scales.items()}
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    for one in (config, *(each for each in config.values() if isinstance(each, dict))):
        one.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    return copy, plain


@contextmanager
def loaded(way: Way, directory: Path, scratch: Path) -> Iterator[Any]:
    """Load the checkpoint in `directory` into the stream engine, in the given `way`."""
    options = dict(way.options)
    if way.packed:
        folder = scratch / "packed"
        arguments = ["--model", str(directory), "--dtype", "fp32", "--output", str(folder)]
        pack.command.main(arguments, standalone_mode=False)
        options["packed"] = str(folder)
    source = find(str(directory), "float32", None, "safetensors")
    rows = 2 * len(LENGTHS) if way.rows else len(LENGTHS)
    case = Case(
        model=str(directory),
        engine="stream",
        offload=way.offload,
        workload=Workload(batch_size=rows, input_len=max(LENGTHS), output_len=OUTPUT_LEN),
        dtype="float32",
        load_format="safetensors",
        gpu_weights=way.gpu_weights,
        options=tuple(sorted(options.items())),
    )
    plan = make_plan(case, source.spec, MACHINE, None)
    running = base.load(engine.kind("stream").target)(steered(plan, way.here, way.prefill_tokens))
    try:
        yield running
    finally:
        running.close()


def _takes_padding(running: Any) -> bool:
    """Tell whether an engine admits prompts of several lengths."""
    try:
        running.retire(running.admit(prompts(0, LENGTHS)[1], max(LENGTHS) + OUTPUT_LEN))
    except EngineError as error:
        return "padding" not in str(error)
    return True


def run(way: Way, directory: Path, known: Reference, scratch: Path) -> Tensor:
    """Return zinfer's greedy tokens, ``[B, OUTPUT_LEN]``."""
    token_ids, mask, expected = known
    with loaded(way, directory, scratch) as running:
        if mask.all() and _takes_padding(running):
            raise TakesPaddingError("padding changes the text, and padded prompts are not refused")
        if way.rows:
            prompts = [row[seen.bool()].tolist() for row, seen in zip(token_ids, mask, strict=True)]
            return come_and_go(running, prompts, expected, way.drafts)
        tokens = [prefill(running, token_ids, mask, reserve=OUTPUT_LEN).argmax(-1)]
        while len(tokens) < OUTPUT_LEN:
            tokens.append(decode(running, tokens[-1]).argmax(-1))
        return torch.stack(tokens, dim=1).cpu()
