"""Model state: weights from a checkpoint, refused when it is damaged, and random weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import Checkpoints, Patch
from tests.checkpoints import save_config
from tests.test_parity import BATCHES, COMPARED, check_tokens, greedy, load
from zinfer.checkpoint import resolve
from zinfer.checkpoint.architecture import empty_model
from zinfer.checkpoint.headers import CheckpointError
from zinfer.checkpoint.source import revision_of
from zinfer.core.case import Offload
from zinfer.core.model import Dtype, ModelSpec
from zinfer.engine import EngineError
from zinfer.engine.state import ModelState, by_layer
from zinfer.engine.stream.weights import codec, packed

CPU = torch.device("cpu")


@pytest.fixture
def copy(checkpoint: Checkpoints, tmp_path: Path) -> ModelSpec:
    """Copy a llama checkpoint of several shards, which a test may damage; the spec is that of the undamaged one."""
    return resolve.from_directory(Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama")))


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def read(spec: ModelSpec) -> dict[str, Tensor]:
    """Return all weights, read as an engine reads them."""
    return {name: tensor.clone() for name, tensor in ModelState(spec, "safetensors").load(CPU)}


def refused(spec: ModelSpec, mention: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(spec)
    assert mention in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("bytes_more", "what"), [(None, "missing"), (-8, "damaged or cut off"), (8, "damaged")])
def test_a_damaged_shard_is_named(bytes_more: int | None, what: str, copy: ModelSpec) -> None:
    _, shard, *_ = sorted(Path(str(copy.directory)).glob("*.safetensors"))
    if bytes_more is None:
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size + bytes_more)
    refused(copy, f"{shard.name} is {what}")


def test_a_model_without_a_checkpoint_says_what_to_do() -> None:
    spec = resolve.from_catalogue(resolve.catalogue_names()[0])
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        ModelState(spec.slice(1), "safetensors")


def test_dummy_weights_are_drawn_as_a_fresh_model_is(checkpoint: Checkpoints) -> None:
    state = ModelState(resolve.from_directory(checkpoint("llama")), "dummy")
    state.model.config.initializer_range = 0.02
    drawn, again = ({name: tensor.clone() for name, tensor in state.load(CPU)} for _ in range(2))
    assert sorted(drawn) == sorted(name for name, _ in state.model.named_parameters())
    for name, tensor in drawn.items():
        assert torch.equal(tensor, again[name])
        assert len(tensor.unique()) > tensor.numel() / 2
        assert abs(float(tensor.mean()) - ("norm" in name)) < 0.02
        assert 0.015 < float(tensor.std()) < 0.025
    first, second = (drawn[f"model.layers.{index}.mlp.up_proj.weight"] for index in (0, 1))
    assert not torch.equal(first, second)


def test_tied_weights_stay_tied(checkpoint: Checkpoints) -> None:
    state = ModelState(resolve.from_directory(checkpoint("qwen2")), "safetensors")
    entry = state.entries["model.embed_tokens.weight"]
    assert set(entry.names) == {"model.embed_tokens.weight", "lm_head.weight"}
    new = entry.put(torch.ones(entry.tensor.shape))
    assert state.model.get_input_embeddings().weight is new
    assert state.model.get_output_embeddings().weight is new
    assert state.layers[0].get_parameter("mlp.up_proj.weight").is_meta


GLM: dict[str, object] = {
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a mixture with a persistent buffer in 5 of 6 layers. Its values differ between layers."""
    return save_config(tmp_path_factory.mktemp("glm"), "glm4_moe", **GLM)


def store(directory: Path, tensors: dict[str, Tensor]) -> ModelSpec:
    """Replace the checkpoint's tensors by `tensors`; return its spec."""
    for file in (*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return resolve.from_directory(directory)


# An engine without offload loads as it does with it, but for `stream`.
WAYS = [pytest.param(*way, marks=[pytest.mark.slow] * (way[1] != "cpu" and way[0] != "stream")) for way in COMPARED]


@pytest.mark.parametrize(("name", "offload"), WAYS)
def test_persistent_buffers_keep_their_layers_values(name: str, offload: Offload, glm: Path, tmp_path: Path) -> None:
    check_tokens(load(name, glm, offload, tmp_path), glm)


def test_packed_layers_hold_persistent_buffers(glm: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(codec, "MIN_NUMEL", 0)
    spec = resolve.from_directory(glm).with_dtype("bfloat16")
    packed.write(spec, revision_of(spec, "safetensors"), tmp_path / "packed", CPU)
    texts = []
    packs: dict[str, Any] = {"weight_codec": "lossless", "packed": str(tmp_path / "packed")}
    for options in (packs, {"weight_codec": "none"}):
        loaded = load("stream", glm, "cpu", tmp_path, "bfloat16", **options)
        texts.append(torch.cat([greedy(loaded, lengths).flatten() for lengths in BATCHES]))
        loaded.close()
    assert torch.equal(*texts)


def test_layers_without_a_buffer_are_not_those_of_the_model(glm: Path, tmp_path: Path) -> None:
    spec = resolve.from_directory(glm)
    folder = tmp_path / "packed"
    packed.write(spec, revision_of(spec, "safetensors"), folder, CPU)
    index = json.loads((folder / packed.INDEX).read_text())
    del index["layers"][4]["blocks"]["mlp.gate.e_score_correction_bias"]
    (folder / packed.INDEX).write_text(packed._Index.model_validate(index).signed().model_dump_json())
    with pytest.raises(EngineError, match=r"layer 4.* pack it again"):
        load("stream", glm, "cpu", weight_codec="lossless", packed=str(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_entries_that_transformers_keeps_in_float32_are_loaded_so(dtype: Dtype, glm: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(glm, dtype=getattr(torch, dtype)).state_dict()
    ours = read(resolve.from_directory(glm).with_dtype(dtype))
    assert torch.float32 in {tensor.dtype for tensor in ours.values()}
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: theirs[name].dtype for name in ours}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("name", "offload"), WAYS)
def test_float32_entries_of_16_bit_models_are_right(name: str, offload: Offload, glm: Path, tmp_path: Path) -> None:
    loaded: Any = load(name, glm, offload, tmp_path, "bfloat16")
    bias = "2.mlp.gate.e_score_correction_bias"
    buffer = next(buffer for path, buffer in loaded.model.named_buffers() if path.endswith(bias))
    assert buffer.dtype == torch.float32
    assert len(greedy(loaded, BATCHES[0]).unique()) > 1
    if offload == "none" or name != "stream":  # elsewhere it is a view of the slot
        assert torch.equal(buffer.cpu(), stored(glm)[f"model.layers.{bias}"])


def test_weights_that_decoder_layers_share_are_theirs_wherever_they_are(tmp_path: Path) -> None:
    shape = {
        "num_hidden_layers": 7, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4,
        "n_mamba_heads": 2, "num_key_value_heads": 4, "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
    }  # fmt: skip
    directory = save_config(tmp_path / "zamba", "zamba", **shape)
    state = ModelState(resolve.from_directory(directory), "safetensors")
    shared = [entry for entry in state.entries.values() if len(entry.names) > 1 and f"{state.stack}." in entry.name]
    assert shared
    assert all(entry.layer is None for entry in shared)
    for offload in ("none", "cpu"):
        check_tokens(load("stream", directory, offload, tmp_path), directory)


UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        (lambda _: {UP: None}, f"lacks {UP}"),
        (lambda up: {UP: up[:, :-1].contiguous()}, "does not fit a llama model"),
        (lambda up: {UP: up.to(torch.float8_e4m3fn)}, f"stores {UP} as F8_E4M3"),
        (lambda up: {UP: up.to(torch.int8)}, "codes of quantised weights have scales"),
        (lambda _: {BIAS: torch.ones(64)}, f"stores {BIAS}, which a llama model of this configuration does not have"),
        (lambda up: {UP.removeprefix("model."): up + 1}, f"stores {UP} twice"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    change: Callable[[Tensor], dict[str, Tensor | None]], mention: str, copy: ModelSpec
) -> None:
    tensors = stored(directory := Path(str(copy.directory)))
    changed = tensors | change(tensors[UP])
    refused(store(directory, {n: t for n, t in changed.items() if t is not None}), mention)


def test_tensors_that_transformers_ignores_are_ignored(copy: ModelSpec) -> None:
    whole = stored(directory := Path(str(copy.directory)))
    spec = store(directory, whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert read(spec).keys() == whole.keys()


def test_a_slice_leaves_the_other_layers_alone(copy: ModelSpec) -> None:
    assert [*read(copy.slice(2))] == [name for name in read(copy) if "layers.2." not in name]
    refused(copy.model_copy(update={"num_layers": 2, "total_layers": 2, "config": copy.slice(2).config}), "layers.2.")


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_tied_head_of_other_values_is_kept_apart(change: float, checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen2"), tmp_path / "qwen2"))
    tensors = stored(directory)
    head = tensors["model.embed_tokens.weight"] * (1 + change)
    spec = store(directory, tensors | {"lm_head.weight": head})
    assert ("lm_head.weight" in read(spec)) == (change != 0)
    loaded = load("stream", directory, "cpu")
    assert torch.equal(loaded.model.get_output_embeddings().weight, head)  # type: ignore[attr-defined]
    check_tokens(loaded, directory)


def test_float32_entries_of_shared_modules_stay_their_own(glm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that occurs twice is cast once, without replaced entries. A reader that skips a layer gets the next."""
    state = ModelState(resolve.from_directory(glm), "safetensors")
    assert [index for index, _ in by_layer(state, state.load(CPU))] == [None, *range(6)]
    empty = empty_model(spec := resolve.from_directory(glm).with_dtype("bfloat16"))
    for name in ("again", "and_again"):  # the same modules under further names
        empty.model.add_module(name, empty.model.layers)
    monkeypatch.setattr("zinfer.engine.state.empty_model", lambda _spec: empty)
    entries = ModelState(spec, "dummy").entries
    biases = [entry for name, entry in entries.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 5
    assert all(entry.tensor.dtype == torch.float32 and len(entry.places) == 3 for entry in biases)
    assert len({id(module._buffers[leaf]) for entry in biases for module, leaf in entry.places}) == 5
