"""TensorRT networks and the engine around them, with the real library.

Without a GPU an engine cannot run, so the network definition is read back and evaluated with torch (`tests.walker`),
with the engine's own prefill, decode and KV cache around it.
"""

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import Checkpoints, Patch, walker
from tests.inline import MACHINE
from tests.running import decode, error, prefill
from tools import install_tensorrt
from zinfer.checkpoint.architecture import empty_model
from zinfer.checkpoint.resolve import resolve
from zinfer.core.case import Case, Workload
from zinfer.core.errors import ENVIRONMENT
from zinfer.core.model import ModelSpec
from zinfer.core.units import gb
from zinfer.engine import EngineError
from zinfer.engine.base import Work
from zinfer.engine.state import ModelState
from zinfer.engine.tensorrt import Executor, TensorRT, planfile
from zinfer.engine.tensorrt.build import build, plan_key
from zinfer.engine.tensorrt.library import Library, Messages, find_library
from zinfer.engine.tensorrt.network import make_network
from zinfer.plan.planner import Plan, make_plan
from zinfer.worker.session import not_as_asked

ARCHITECTURES = ("bloom", "llama", "qwen2", "mistral")
MAX_BATCH, MAX_LEN = 4, 32


@pytest.fixture(scope="module")
def library() -> Library:
    return find_library()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build_here(library: Library, spec: ModelSpec) -> planfile.PlanFile:
    key = plan_key(library, str(spec.directory), spec, "safetensors", None, MAX_BATCH, MAX_LEN)
    return build(library, key, spec, planfile.PLANS / f"{key.stem}.plan")


def network_of(library: Library, spec: ModelSpec, tensors: dict[str, Tensor]) -> Any:
    """Return the library's network of a model, and its `Net`."""
    messages = Messages(library.module)
    network = library.module.Builder(messages.logger).create_network(1)
    net = make_network(library, network, empty_model(spec), spec, tensors, MAX_LEN)
    assert messages.errors == []
    return network, net


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the weights of the layers."""
    state = ModelState(spec, "safetensors")
    loaded = state.load(torch.device("cpu"))
    return {name: tensor.clone() for name, tensor in loaded if state.entries[name].layer is not None}


def case_plan(spec: ModelSpec, batch_size: int = 1) -> Plan:
    workload = Workload(batch_size=batch_size, input_len=8, output_len=8)
    case = Case(
        model=str(spec.directory), engine="tensorrt", offload="cpu", workload=workload, dtype=spec.dtype,
        load_format="safetensors",
    )  # fmt: skip
    return make_plan(case, spec, MACHINE)


class Walking:
    """Substitute for the executor: evaluates the network definition that the plan was built from."""

    streamable, budget, asked, scratch, taken = 1000, 250, 250, 10, 500

    def __init__(self, library: Library, spec: ModelSpec) -> None:
        self.trt, self.passes = library.module, list[tuple[int, int]]()
        self.network, self.net = network_of(library, spec, weights_of(spec))

    def run(self, profile: int, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        assert all(tensor.is_contiguous() for tensor in [*inputs.values(), *outputs.values()])
        self.passes.append((profile, len(inputs["hidden"])))
        results = walker.evaluate(self.trt, self.network, inputs)
        assert set(results) == set(outputs)
        for name, tensor in outputs.items():
            tensor.copy_(results[name])

    def shortfall(self, weight_bytes: int) -> str | None:
        return Executor.shortfall(self, weight_bytes)  # type: ignore[arg-type]

    def close(self) -> None: ...


class WalkingTensorRT(TensorRT):
    """Engine with `Walking` in place of the part that needs a GPU."""

    def _make_executor(self) -> Walking:  # type: ignore[override]
        return Walking(self._library, self.plan.model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_networks_give_the_logits_of_transformers(architecture: str, library: Library, checkpoint: Checkpoints) -> None:
    spec = resolve(str(checkpoint(architecture)), None, None)
    file = build_here(library, spec)
    planfile.finish(file.path, file.key, prefill_rows=2, weight_bytes=spec.weight_bytes)  # prefill in two passes
    engine = WalkingTensorRT(case_plan(spec))
    reference = AutoModelForCausalLM.from_pretrained(spec.directory, dtype=torch.float32).eval()
    token_ids = torch.randint(4, spec.vocab_size, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(token_ids)
    mask[0, :3] = mask[2, :5] = 0
    past, ids, logits = None, token_ids, prefill(engine, token_ids, mask, reserve=6)
    for step in range(7):
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        kept = {"use_cache": True, "past_key_values": past} | (positions if architecture != "bloom" else {})
        with torch.inference_mode():
            expected = reference(input_ids=ids, attention_mask=mask, **kept)
        torch.testing.assert_close(logits, expected.logits[:, -1], rtol=1e-4, atol=1e-4)
        assert expected.logits[:, -1].std() > 0.05, "logits that are all alike would compare equal"
        past, token = expected.past_key_values, logits.argmax(-1)
        ids, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits = decode(engine, token) if step < 6 else logits
    with pytest.raises(IndexError):
        decode(engine, token)
    assert engine._executor.passes == [(0, 2), (0, 1)] + [(1, 3)] * 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("architecture", ["bloom", "llama"])
def test_rows_move_go_on_from_chunks_and_forget(architecture: str, library: Library, checkpoint: Checkpoints) -> None:
    spec = resolve(str(checkpoint(architecture)), None, None)
    build_here(library, spec)
    engine = WalkingTensorRT(case_plan(spec))
    token_ids = torch.randint(4, spec.vocab_size, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(spec.directory, dtype=torch.float32).eval()
        expected = reference(input_ids=token_ids).logits
    first, second = (engine.admit(torch.ones(1, length), 20) for length in (8, 5))
    engine.forward([Work(first, token_ids[:, :3]), Work(second, token_ids[:, :5])])
    (logits,) = engine.forward([Work(first, token_ids[:, 3:8], keep=5)])
    torch.testing.assert_close(logits, expected[:, 3:8], rtol=1e-4, atol=1e-4)
    both = engine.move_rows([(first, [0]), (second, [0])], 20)
    drafts = torch.stack([token_ids[0, 8:11], token_ids[0, 5:8]])
    (logits,) = engine.forward([Work(both, drafts, keep=3)])
    torch.testing.assert_close(logits[0], expected[0, 8:11], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], expected[0, 5:8], rtol=1e-4, atol=1e-4)
    engine.rollback(both, torch.tensor([9, 11]))
    (logits,) = engine.forward([Work(both, torch.stack([token_ids[0, 9:10], token_ids[0, 8:9]]))])
    torch.testing.assert_close(logits[:, 0], torch.stack([expected[0, 9], expected[0, 8]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("bloom", "bfloat16"),
        pytest.param("llama", "float16", marks=pytest.mark.slow),
        pytest.param("qwen2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_library_builds_what_users_build(
    architecture: str, dtype: str, library: Library, checkpoint: Checkpoints, monkeypatch: Patch
) -> None:
    spec = resolve(str(checkpoint(architecture)), dtype, None)  # type: ignore[arg-type]
    file = build_here(library, spec)
    file.check()
    assert file.size > file.weight_bytes == spec.streamed_bytes
    assert planfile.find(file.key) == file
    assert sorted(path.suffix for path in planfile.PLANS.iterdir()) == [".json", ".plan", ".timings"]
    timings = next(planfile.PLANS.glob("*.timings"))
    timings.write_bytes(b"damaged")
    monkeypatch.setattr(Library, "writes_streams", False)  # as before TensorRT 10.8
    build(library, file.key, spec, file.path, level=0)
    assert timings.read_bytes() != b"damaged"
    again = planfile.read(file.path)
    again.check()
    assert again.size > spec.streamed_bytes
    assert again.level == 0 != file.level


def test_the_plan_has_the_layers_and_nothing_else(library: Library, checkpoint: Checkpoints) -> None:
    spec = resolve(str(checkpoint("bloom")), None, None)
    tensors = weights_of(spec)
    assert sum(tensor.nbytes for tensor in tensors.values()) == spec.streamed_bytes
    network, net = network_of(library, spec, tensors)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    constants = [layer for layer in layers if layer.type == library.module.LayerType.CONSTANT]
    assert {layer.name for layer in constants} >= set(tensors)
    # What streams besides the weights is less than a row of the embedding table.
    held = sum(part.nbytes for part in net._held if isinstance(part, Tensor))
    assert held - spec.streamed_bytes < spec.hidden_size * spec.dtype_bytes + 100 * spec.num_layers


def test_every_parameter_has_its_place(library: Library, checkpoint: Checkpoints) -> None:
    spec = resolve(str(checkpoint("llama")), None, None)
    tensors, more = weights_of(spec), "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(EngineError, match=f"does not use: {re.escape(more)}"):
        network_of(library, spec, tensors | {more: torch.ones(16)})
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(EngineError, match=r"needs the parameter model\.layers\.1\.mlp\.up_proj\.weight"):
        network_of(library, spec, tensors)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("opt", {}, "no TensorRT network for opt models; there is"),
        ("llama", {"max_position_embeddings": 31}, r"--max-seq-len 32 .* 31 positions"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("llama", {"attention_bias": True}, None),
        ("mistral", {"sliding_window": 16}, "a sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, None),
    ],
)
def test_variants_are_followed_or_refused(
    architecture: str, changes: dict[str, object], message: str | None, library: Library, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    from tests.checkpoints import ARCHITECTURES as SETTINGS

    settings = SETTINGS[architecture] | {"hidden_size": 64, "vocab_size": 100, "word_embed_proj_dim": 64} | changes
    config = AutoConfig.for_model(architecture, **settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path / "model")
    spec = resolve(str(tmp_path / "model"), None, None)
    if message is None:
        assert build_here(library, spec).size > spec.streamed_bytes
        return
    with pytest.raises(EngineError, match=message):
        build_here(library, spec)


def test_shapes_beyond_the_plan_name_the_command_that_helps(library: Library, checkpoint: Checkpoints) -> None:
    spec = resolve(str(checkpoint("bloom")), None, None)
    build_here(library, spec)
    engine: Any = WalkingTensorRT(case_plan(spec))
    ids = torch.full((5, 4), 9)
    with pytest.raises(EngineError, match=r"max_batch_size 5 .* --max-batch-size 5 --max-seq-len 32"):
        prefill(engine, ids, torch.ones_like(ids), reserve=4)
    with pytest.raises(EngineError, match=r"max_seq_len 33 .* --max-batch-size 4 --max-seq-len 33"):
        prefill(engine, ids[:1], torch.ones_like(ids[:1]), reserve=29)
    effective = engine.effective()
    assert (effective.streamed_bytes_per_step, effective.settings["budget_bytes"]) == (750, 250)
    assert effective.gpu_weight_bytes == spec.weight_bytes - 750
    engine._executor.streamable = spec.streamed_bytes + 1408  # the library may count what it adds
    engine._executor.budget = 0
    assert engine.effective().gpu_weight_bytes == spec.other_bytes
    engine._executor.streamable = 1000
    for gpu_weights, budget, fine in (("0%", 0, True), ("25%", 1000, False), ("25%", 250, True), ("auto", 1000, True)):
        engine._executor.budget = engine._executor.asked = budget
        case = engine.plan.case.model_copy(update={"gpu_weights": gpu_weights})
        assert (not_as_asked(case, engine.effective()) is None) == fine
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    ("asked", "budget", "taken", "reported"),  # where all is resident there is nothing to miss
    [(40, 40, 60, None), (40, 50, 60, 50), (40, 40, 3 << 30, 3 << 30), (100, 100, 3 << 30, None)],
)
def test_a_budget_that_is_not_honoured_is_reported(asked: int, budget: int, taken: int, reported: int | None) -> None:
    executor: Any = SimpleNamespace(asked=asked, budget=budget, streamable=100, scratch=20, taken=taken)
    reason = Executor.shortfall(executor, 100)
    assert (reason is None) == (reported is None)
    if reported is not None:
        assert gb(reported) in str(reason)


@pytest.mark.parametrize(
    ("capability", "runs"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), False), ((12, 0), True)]
)
def test_rtx_names_the_gpus_it_does_not_run_on(library: Library, capability: tuple[int, int], runs: bool) -> None:
    why = Library(library.module, "tensorrt-rtx", "1.0").why_not(capability)
    assert (why is None) == runs
    assert Library(library.module, "tensorrt", "10.9").why_not(capability) is None
    if not runs:
        assert "pip install 'zinfer[tensorrt]'" in str(why)


def test_a_library_that_cannot_build_for_a_gpu_names_the_file(
    library: Library, tmp_path: Path, monkeypatch: Patch
) -> None:
    proper = Library(library.module, "tensorrt", "10.15.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvinfer_builder_resource_ptx.so.10.15.1").touch()
    assert "libnvinfer_builder_resource_sm90.so" in str(proper.why_no_build((9, 0)))
    assert Library(library.module, "tensorrt-rtx", "1.7").why_no_build((9, 0)) is None
    for name in ("libnvinfer_builder_resource_sm90.so.10.15.1", "libnvinfer_builder_resource.so.10.6.0"):
        (tmp_path / name).touch()
        assert proper.why_no_build((9, 0)) is None
        (tmp_path / name).unlink()


def test_the_installer_makes_a_package_of_a_jar(tmp_path: Path) -> None:
    jar = tmp_path / "redist.jar"
    with ZipFile(jar, "w") as archive:
        for name in (*install_tensorrt.LIBRARIES, install_tensorrt.RESOURCE, "libnvinfer_vc_plugin.so.10"):
            archive.writestr(f"org/bytedeco/tensorrt/linux-x86_64/{name}", name)
    with pytest.raises(SystemExit, match="is not the jar of"):
        install_tensorrt.check(jar)
    wheel = install_tensorrt.make_wheel(jar, tmp_path)
    command = "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)
    subprocess.run([sys.executable, "-m", *command], check=True)
    folder = tmp_path / "site" / "tensorrt_libs"
    assert {path.name for path in folder.glob("*.so*")} == {*install_tensorrt.LIBRARIES, install_tensorrt.RESOURCE}
    assert (folder / "libnvinfer.so.10").read_text() == "libnvinfer.so.10"
    assert [found.version for found in distributions(path=[str(tmp_path / "site")])] == ["10.6.0"]


def test_a_missing_library_is_one_message_with_the_line_that_installs_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        EngineError, match=r"pip install 'zinfer\[tensorrt\]' or pip install 'zinfer\[tensorrt-rtx\]'"
    ) as missing:
        find_library()
    assert missing.value.exit_code == ENVIRONMENT


def test_a_missing_file_of_kernels_has_a_remedy(library: Library) -> None:
    messages = Messages(library.module)
    messages.errors.append("Unable to load library: libnvinfer_builder_resource.so.10.6.0")
    assert "LD_LIBRARY_PATH" in str(messages.failure("it could not build a.plan"))
    messages.errors[:] = ["no such layer"]
    assert "LD_LIBRARY_PATH" not in str(messages.failure("it could not build a.plan"))


def test_a_library_without_a_budget_is_too_old(library: Library, monkeypatch: Patch) -> None:
    old = SimpleNamespace(ICudaEngine=object, __version__="10.0.0", __spec__="found")
    monkeypatch.setitem(sys.modules, library.name.replace("-", "_"), old)
    with pytest.raises(EngineError, match=r"10\.0\.0 is too old: pip install -U 'zinfer\["):
        find_library()


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["bloom", "llama", "qwen2"])
def test_on_a_gpu_the_tokens_are_those_of_transformers(architecture: str, checkpoint: Checkpoints) -> None:
    library = _library_for_this_gpu()
    spec = resolve(str(checkpoint(architecture)), "float16", None)
    build_here(library, spec)
    engine = TensorRT(case_plan(spec))
    reference = AutoModelForCausalLM.from_pretrained(spec.directory, dtype=torch.float16).cuda().eval()
    token_ids = torch.randint(4, spec.vocab_size, (3, 7), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones_like(token_ids)
    mask[0, :3] = 0
    expected = reference.generate(token_ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    tokens = [prefill(engine, token_ids, mask, reserve=8).argmax(-1)]
    for _ in range(7):
        tokens.append(decode(engine, tokens[-1]).argmax(-1))
    assert torch.equal(torch.stack(tokens, 1), expected[:, 7:])
    batch = engine.admit(torch.ones_like(token_ids), 8)
    engine.forward([Work(batch, token_ids[:, :3])])
    (logits,) = engine.forward([Work(batch, token_ids[:, 3:], keep=4)])
    whole = reference.float()(token_ids).logits[:, 3:]
    assert error(logits, whole) < 0.02  # in fp16
    engine.close()


@pytest.mark.gpu
def test_on_a_gpu_the_budget_decides_what_is_resident(tmp_path: Path) -> None:
    from transformers import AutoConfig

    library = _library_for_this_gpu()
    config = AutoConfig.for_model("bloom", n_layer=8, n_head=16, hidden_size=4096, vocab_size=1000)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(tmp_path / "model")
    spec = resolve(str(tmp_path / "model"), None, None)
    build_here(library, spec)
    taken = {}
    for budget in ("0%", "50%", "100%"):
        plan = case_plan(spec)
        plan = plan.model_copy(update={"case": plan.case.model_copy(update={"gpu_weights": budget})})
        engine = TensorRT(plan)
        effective = engine.effective()
        assert effective.shortfall is None
        counted = effective.gpu_weight_bytes + effective.streamed_bytes_per_step
        assert counted == pytest.approx(spec.weight_bytes, rel=0.01)
        taken[budget] = effective.settings["library_gpu_bytes"]
        engine.close()
    assert taken["50%"] - taken["0%"] > 0.4 * spec.weight_bytes
    assert taken["100%"] - taken["50%"] > 0.3 * spec.weight_bytes


def _library_for_this_gpu() -> Library:
    try:
        library = find_library()
    except EngineError as error:
        pytest.skip(str(error))
    if why := library.why_not(torch.cuda.get_device_capability()):
        pytest.skip(why)
    return library
