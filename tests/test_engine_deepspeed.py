"""Engine deepspeed, beyond the parity that test_parity.py checks: the parameters that it fetches, and the state that it
leaves behind."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests import Checkpoints, Patch, Spy
from tests.running import decode, prefill
from tests.test_parity import BATCHES, MACHINE, check_tokens, greedy, load, prompts, reference
from zinfer.checkpoint.resolve import from_directory, with_weights
from zinfer.core.case import Case, Offload, Workload
from zinfer.core.engine import conflict
from zinfer.core.model import Weights
from zinfer.engine import EngineError
from zinfer.engine.deepspeed import DeepSpeed
from zinfer.engine.deepspeed.world import modules_under_way, prepare
from zinfer.engine.state import ModelState
from zinfer.plan.planner import make_plan


@pytest.fixture
def bloom(checkpoint: Checkpoints) -> Any:
    return load("deepspeed", checkpoint("bloom"), "cpu")


@contextmanager
def unchanged() -> Iterator[None]:
    """Check that an engine leaves the process as it was."""
    before, linear = dict(os.environ), torch.nn.functional.linear
    yield
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert torch.nn.functional.linear is linear
    assert modules_under_way() == []


def test_a_layer_is_one_fetch_and_embeddings_none(bloom: Any, spy: Spy) -> None:
    from deepspeed.runtime.zero import partition_parameters

    names = {id(parameter): name for name, parameter in bloom._parameters.items()}
    greedy(bloom, (5, 3))  # DeepSpeed records its trace
    fetch = spy(partition_parameters, "_no_gather_coalesced")
    decode(bloom, torch.zeros(2, dtype=torch.long))
    fetches = [[names[id(parameter)] for parameter in call.args[0]] for call in fetch.mock_calls]
    layers = [[name for name in group if ".h." in name] for group in fetches]
    assert [len({name.split(".")[2] for name in group}) for group in layers] == [1, 1, 1]
    matrices = {name for name, parameter in bloom._parameters.items() if ".h." in name and len(parameter.ds_shape) > 1}
    assert sorted(name for group in layers for name in group) == sorted(matrices)  # each once, vectors stay
    assert bloom.effective().gpu_weight_bytes > bloom.plan.model.other_bytes


def test_weights_in_host_memory_are_one_arena_without_rounding(bloom: Any) -> None:
    """Host memory holds the offloaded weights one after the other: each block of its own would be a power of two."""
    arena = bloom._arena
    places = sorted(
        (parameter.ds_tensor.data_ptr() - arena.memory.data_ptr(), parameter.ds_tensor.nbytes)
        for name, parameter in bloom._parameters.items()
        if name in bloom._offloaded
    )
    assert places[0][0] == 0
    assert all(first + -(-size // 256) * 256 == then for (first, size), (then, _) in pairwise(places))
    assert arena.size == sum(-(-size // 256) * 256 for _, size in places)


def test_a_load_reads_the_weights_once(checkpoint: Checkpoints) -> None:
    """Weights are read once, embeddings too, though BLOOM is probed before."""
    with patch.object(ModelState, "load", autospec=True, side_effect=ModelState.load) as counted:
        load("deepspeed", checkpoint("bloom"), "cpu").close()
    counted.assert_called_once()


def _quantised(directory: Path, weights: Weights, offload: Offload, path: Path) -> Any:
    case = Case(
        model=str(directory), engine="deepspeed", offload=offload, weights=weights, dtype="bfloat16",
        workload=Workload(batch_size=2, input_len=9, output_len=4), load_format="safetensors",
    )  # fmt: skip
    spec = with_weights(from_directory(directory).with_dtype("bfloat16"), weights)
    return DeepSpeed(make_plan(case, spec, MACHINE, str(path)))


@pytest.mark.parametrize(("weights", "offload"), [("int4", "cpu"), ("int8", "none")])
def test_its_own_formats_compute_with_the_weights_that_they_hold(
    weights: Weights, offload: Offload, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Logits equal those of transformers with DeepSpeed's quantised weights. Its codes, scales and minima replace the
    weights."""
    from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

    directory = checkpoint("bloom")
    loaded = _quantised(directory, weights, offload, tmp_path)
    plan = loaded.plan
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    config = {"num_bits": 4 if weights == "int4" else 8, "group_size": 64, "group_dim": 1, "symmetric": False}
    for module in model.transformer.h.modules():
        if isinstance(module, torch.nn.Linear):
            exact, codes = module.weight.detach(), Quantizer(config).quantize(module.weight.detach())
            module.weight.data = DeQuantizer(config, torch.bfloat16).dequantize(*codes)
            assert not torch.equal(exact, module.weight)
    token_ids, mask = prompts((9, 9))
    nxt = torch.tensor([5, 6])
    with torch.no_grad():
        first, second = (model(ids).logits[:, -1] for ids in (token_ids, torch.cat([token_ids, nxt[:, None]], 1)))
    assert torch.equal(prefill(loaded, token_ids, mask, reserve=4), first)
    assert torch.allclose(decode(loaded, nxt), second, atol=0.05)
    effective = loaded.effective()
    if offload == "cpu":
        share = effective.host_weight_bytes / plan.model.streamed_bytes
        assert share == pytest.approx(plan.placement.wire_ratio, rel=0.06)
        assert effective.streamed_bytes_per_step == pytest.approx(plan.streamed_bytes, rel=0.06)
    loaded.close()


def test_formats_that_it_does_not_have_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"groups of 64: model.layers.0.mlp.down_proj.weight has 96 inputs"):
        _quantised(checkpoint("llama"), "int4", "cpu", tmp_path)
    message = conflict("deepspeed", (), "cpu", "fp8")
    assert message == "--weights fp8 is for stream: engine deepspeed takes int4, int8"
    assert conflict("deepspeed", (), "cpu", "int4") is None


@pytest.mark.slow
def test_the_example_settings_are_those_of_the_example(checkpoint: Checkpoints) -> None:
    directory = checkpoint("opt")
    loaded = load("deepspeed", directory, "cpu", tuned=False)
    assert torch.equal(greedy(loaded, BATCHES[0]), reference(directory)[0])
    effective = loaded.effective()
    assert effective.host_weight_bytes == loaded.plan.model.weight_bytes
    assert effective.settings["stage3_prefetch_bucket_size"] == 2 * 64 * 64
    assert effective.settings["stage3_max_live_parameters"] == 2 * 64 * 64
    assert effective.settings["stage3_param_persistence_threshold"] == 64


@pytest.mark.parametrize("fetches", [0, 2, 5, 9])
def test_a_failed_forward_pass_does_not_spoil_the_next(
    bloom: Any, fetches: int, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    from deepspeed.runtime.zero import partition_parameters

    handle, left = partition_parameters.NoGatherCoalescedHandle, fetches

    def out_of_memory(parameters: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("no room for a prefetch")
        return handle(parameters)

    monkeypatch.setattr(partition_parameters, "NoGatherCoalescedHandle", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        greedy(bloom, BATCHES[0])
    monkeypatch.undo()
    check_tokens(bloom, checkpoint("bloom"))


def test_nothing_is_left_behind(checkpoint: Checkpoints, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    with unchanged():
        loaded: Any = load("deepspeed", checkpoint("llama"), "cpu")
        parameters = list(loaded._parameters.values())
        greedy(loaded, (4, 2))
        loaded.close()
        loaded.close()
    assert all(parameter.numel() == parameter.ds_tensor.numel() == 0 for parameter in parameters)
    assert capfd.readouterr().out == ""


def test_a_type_that_deepspeed_does_not_compute_in_is_refused_before_anything_is_read(
    checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    monkeypatch.setattr("zinfer.engine.deepspeed.ModelState", lambda *_: pytest.fail("weights were read"))
    with (
        unchanged(),
        pytest.raises(EngineError, match=r"does not compute in float16 .* --dtype float32 or bfloat16$"),
    ):
        load("deepspeed", checkpoint("llama"), "cpu", dtype="float16")


def test_a_refusal_of_deepspeed_is_an_engine_error(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    monkeypatch.setattr("deepspeed.initialize", Mock(side_effect=NotImplementedError("not this one")))
    with unchanged(), pytest.raises(EngineError, match=r"DeepSpeed cannot run .*: not this one"):
        load("deepspeed", checkpoint("llama"), "cpu")


@pytest.mark.parametrize(
    "where",
    [
        "deepspeed.init_distributed",  # the process group is there, DeepSpeed has not seen it
        "zinfer.engine.deepspeed.ModelState",
        "deepspeed.zero.Init",  # a parameter is no ZeRO parameter yet
        "zinfer.engine.state.Entry.put",  # all are
        "deepspeed.runtime.engine.DeepSpeedEngine._configure_distributed_model",
        "zinfer.engine.deepspeed.DeepSpeed._ready",  # all is there
    ],
)
def test_a_constructor_that_fails_half_way_leaves_nothing_behind(
    where: str, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    with unchanged(), monkeypatch.context() as context, pytest.raises(OSError, match="half-way"):  # noqa: PT012
        context.setattr(where, Mock(side_effect=OSError("half-way")))
        load("deepspeed", checkpoint("llama"), "cpu")
    after = load("deepspeed", checkpoint("llama"), "cpu")
    assert torch.equal(greedy(after, BATCHES[0]), reference(checkpoint("llama"))[0])


def test_a_second_one_in_the_process_is_refused(bloom: Any, checkpoint: Checkpoints) -> None:
    with pytest.raises(EngineError, match="engine deepspeed is alone in its process"):
        load("deepspeed", checkpoint("llama"), "cpu")
    assert torch.equal(greedy(bloom, BATCHES[0]), reference(checkpoint("bloom"))[0])


def test_a_lock_of_a_compiler_is_named(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    lock, stages = tmp_path / "async_io" / "lock", list[str]()
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with ExitStack() as undo:
        prepare(torch.device("cpu"), undo, lambda stage, _share: stages.append(stage))
    assert len(stages) == 1
    assert str(lock) in stages[0]


def test_everything_is_released_though_closing_fails_half_way(checkpoint: Checkpoints, monkeypatch: Patch) -> None:
    with unchanged(), pytest.raises(ZeroDivisionError):  # noqa: PT012
        loaded: Any = load("deepspeed", checkpoint("llama"), "cpu")
        monkeypatch.setattr(loaded._engine, "destroy", lambda: 1 / 0)
        loaded.close()


def test_nvme_says_what_it_lacks(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: Patch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_args, **_kwargs: False)
    with unchanged(), pytest.raises(EngineError, match="libaio-dev"):
        load("deepspeed", checkpoint("llama"), "nvme", tmp_path)
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_args, **_kwargs: True)
    with unchanged(), pytest.raises(EngineError, match="--nvme-path"):
        load("deepspeed", checkpoint("llama"), "nvme", tmp_path / "nowhere")
