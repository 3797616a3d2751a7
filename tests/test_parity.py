"""Parity: every engine gives exactly the greedy tokens of `transformers.generate`, wherever the weights are."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import Checkpoints
from tests.checkpoints import ARCHITECTURES, VOCAB_SIZE
from tests.grid import covering
from tests.running import decode, prefill
from tools.steered import steered
from zinfer import engine
from zinfer.checkpoint import resolve
from zinfer.core.case import Case, LoadFormat, Offload, Option, Workload
from zinfer.core.engine import draft_model
from zinfer.core.machine import Machine
from zinfer.core.model import Dtype, ModelSpec
from zinfer.engine import base
from zinfer.engine.base import Engine
from zinfer.plan.planner import Plan, make_plan

OUTPUT_LEN = 12
BATCHES = ((9, 5, 7), (4, 6))  # prompt lengths of two batches, which one engine runs after the other
MACHINE = Machine(name="test", source="measured", host_bytes=8 << 30, nvme_bytes=8 << 30)
OFFLOADS: dict[str, tuple[Offload, ...]] = {
    "stream": ("none", "cpu", "nvme"),
    "accelerate": ("none", "cpu", "nvme"),
    "deepspeed": ("none", "cpu"),
}
COMPARED = tuple((name, offload) for name, offloads in OFFLOADS.items() for offload in offloads)


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random prompts of these lengths, left-padded: token ids and mask, ``[B, max length]`` each."""
    generator = torch.Generator().manual_seed(sum(lengths))
    token_ids = torch.randint(4, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
    return token_ids * mask, mask


@cache
def reference(directory: Path) -> list[Tensor]:
    """Return the tokens that `transformers.generate` adds to each batch, ``[B, OUTPUT_LEN]``."""
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for token_ids, mask in map(prompts, BATCHES):
        whole.generation_config.eos_token_id = None
        output = whole.generate(token_ids, attention_mask=mask, max_new_tokens=OUTPUT_LEN, do_sample=False)
        outputs.append(output[:, token_ids.shape[1] :])
    return outputs


def plan_of(
    model: Path | ModelSpec,
    name: str = "stream",
    offload: Offload = "cpu",
    nvme_path: Path | None = None,
    dtype: Dtype = "float32",
    *,
    sizes: tuple[int, int, int] = (3, 9, OUTPUT_LEN),
    machine: Machine = MACHINE,
    load_format: LoadFormat = "safetensors",
    gpu_weights: str | None = None,
    **options: Option,
) -> Plan:
    """Plan a load of a checkpoint folder, or of a model. `sizes` are rows, prompt tokens and output tokens."""
    spec = resolve.from_directory(model).with_dtype(dtype) if isinstance(model, Path) else model
    case = Case(
        model=str(model) if isinstance(model, Path) else model.name, engine=name, offload=offload, dtype=spec.dtype,
        load_format=load_format, weights=spec.weights,
        workload=Workload(batch_size=sizes[0], input_len=sizes[1], output_len=sizes[2]), gpu_weights=gpu_weights,
        options=tuple(sorted(options.items())),
    )  # fmt: skip
    if (draft := draft_model(name, case.options)) is not None:
        spec = spec.model_copy(update={"draft": resolve.from_directory(Path(draft)).with_dtype(dtype)})
    return make_plan(case, spec, machine, None if nvme_path is None else str(nvme_path))


def load(
    name: str, model: Any, *place: Any, device_rows: int | None = None, tokens: int | None = None, **options: Any
) -> Engine:
    """Load what `plan_of` plans; `device_rows` and `tokens` as in `steered`."""
    plan = plan_of(model, name, *place, **options)
    return base.load(engine.kind(name).target).start(steered(plan, device_rows, tokens))


def check_tokens(loaded: Engine, directory: Path) -> None:
    """Compare the greedy tokens of two batches with the reference."""
    for lengths, expected in zip(BATCHES, reference(directory), strict=True):
        assert torch.equal(greedy(loaded, lengths), expected)


def greedy(loaded: Engine, lengths: tuple[int, ...], count: int = OUTPUT_LEN) -> Tensor:
    """Return the greedy tokens of one batch, ``[B, count]``, on the CPU."""
    token_ids, mask = prompts(lengths)
    tokens = [prefill(loaded, token_ids, mask, reserve=count).argmax(-1)]
    while len(tokens) < count:
        tokens.append(decode(loaded, tokens[-1]).argmax(-1))
    return torch.stack(tokens, dim=1).cpu()


def check(loaded: Engine, directory: Path, offload: Offload) -> None:
    """Compare two batches with the reference. Also check that the engine streams the bytes that `offload` promises."""
    check_tokens(loaded, directory)
    spec, effective = loaded.plan.model, loaded.effective()
    tiers = effective.gpu_weight_bytes, effective.host_weight_bytes, effective.nvme_weight_bytes
    assert sum(tiers) >= spec.weight_bytes
    assert (effective.streamed_bytes_per_step > 0) == (offload != "none")
    keeps = effective.settings.get("host_layers", 0) > 0  # of the layers on disk
    assert (tiers[1] > 0, tiers[2] > 0) == (offload == "cpu" or keeps, offload == "nvme")
    if offload != "none":
        assert 0.95 * spec.streamed_bytes <= effective.streamed_bytes_per_step <= spec.weight_bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reference_is_worth_comparing_with(architecture: str, checkpoint: Checkpoints) -> None:
    for output in reference(checkpoint(architecture)):
        assert len(output.unique()) >= 6
        assert len({tuple(row.tolist()) for row in output}) == len(output)


@pytest.mark.parametrize(("compared", "architecture"), covering([*COMPARED], [*ARCHITECTURES]))
def test_greedy_tokens_are_those_of_transformers(
    compared: tuple[str, Offload], architecture: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    name, offload = compared
    loaded = load(name, checkpoint(architecture), offload, tmp_path)
    check(loaded, checkpoint(architecture), offload)
    loaded.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # it compiles DeepSpeed's file I/O first
@pytest.mark.parametrize("architecture", ["bloom", "mixtral"])
def test_deepspeed_from_files(architecture: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("async_io cannot be built here: libaio-dev is missing")
    directory = checkpoint(architecture, hidden_size=512)  # smaller tensors stay in host memory
    loaded = load("deepspeed", directory, "nvme", tmp_path)
    check_tokens(loaded, directory)
    effective = loaded.effective()
    loaded.close()
    assert 0 < effective.nvme_weight_bytes <= effective.streamed_bytes_per_step
    assert not list(tmp_path.iterdir())


def test_every_offload_is_compared() -> None:
    claimed = {(name, offload) for name in OFFLOADS for offload in engine.kind(name).offloads}
    assert claimed == {*COMPARED, ("deepspeed", "nvme")}
