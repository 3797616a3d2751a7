"""Weights from a checkpoint, refused when it is damaged, and random ones that behave like weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import ARCHITECTURES
from zinfer import model
from zinfer.architecture import decoder_layers, empty_model
from zinfer.checkpoint import CheckpointError
from zinfer.engine.weights import dummy, install, weights
from zinfer.model import ModelError, ModelSpec

CPU = torch.device("cpu")


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> ModelSpec:
    """A llama checkpoint of several shards that a test may damage; the spec is that of the undamaged one."""
    return model.from_directory(Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama")))


def shards(spec: ModelSpec) -> list[Path]:
    found = sorted(Path(str(spec.directory)).glob("*.safetensors"))
    assert len(found) > 1
    return found


def index(spec: ModelSpec) -> Path:
    return Path(str(spec.directory)) / "model.safetensors.index.json"


def read(spec: ModelSpec) -> dict[str, Tensor]:
    """All weights, as an engine reads them."""
    return {name: tensor.clone() for name, tensor in weights(empty_model(spec), spec, "safetensors", CPU)}


def refused(spec: ModelSpec, mention: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(spec)
    assert mention in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_comes_once_with_its_shape(architecture: str, checkpoint: Callable[..., Path]) -> None:
    spec = model.from_directory(checkpoint(architecture))
    empty = empty_model(spec)
    shapes = [(name, tensor.shape) for name, tensor in weights(empty, spec, "safetensors", CPU)]
    assert sorted(shapes) == sorted((name, parameter.shape) for name, parameter in empty.named_parameters())
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_missing_shard_is_named(copy: ModelSpec) -> None:
    shard = shards(copy)[1]
    shard.unlink()
    refused(copy, f"{shard.name} is missing")


def test_a_cut_shard_is_named(copy: ModelSpec) -> None:
    shard = shards(copy)[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    refused(copy, f"{shard.name} is cut off")


def test_an_oversized_shard_is_named(copy: ModelSpec) -> None:
    shard = shards(copy)[0]
    shard.write_bytes(shard.read_bytes() + b"\0" * 8)
    refused(copy, f"{shard.name} is longer")


def test_a_weight_map_may_not_leave_the_folder(copy: ModelSpec) -> None:
    content = json.loads(index(copy).read_text())
    shutil.copy(shards(copy)[0], index(copy).parent.parent / "outside.safetensors")
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../outside.safetensors")
    index(copy).write_text(json.dumps(content))
    refused(copy, "'../outside.safetensors'")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(copy: ModelSpec) -> None:
    tensors = {name: tensor for shard in shards(copy) for name, tensor in load_file(shard).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    for file in (*shards(copy), index(copy)):
        file.unlink()
    save_file(tensors, index(copy).with_name("model.safetensors"))
    refused(copy, "lacks 1 tensors, model.layers.1.mlp.up_proj.weight")


def test_a_tensor_of_another_shape_is_refused(copy: ModelSpec) -> None:
    shard = shards(copy)[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, shard)
    refused(copy, "does not fit a llama model")


def test_a_model_without_a_checkpoint_says_what_to_do() -> None:
    spec = model.from_catalogue(model.catalogue_names()[0])
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        next(iter(weights(empty_model(spec.slice(1)), spec.slice(1), "safetensors", CPU)))


def test_an_unknown_architecture_is_one_line() -> None:
    spec = model.from_catalogue(model.catalogue_names()[0])
    with pytest.raises(ModelError, match="perceptron"):
        empty_model(spec.model_copy(update={"architecture": "perceptron"}))


def test_dummy_weights_are_drawn_as_a_fresh_model_is(checkpoint: Callable[..., Path]) -> None:
    empty = empty_model(model.from_directory(checkpoint("llama")))
    empty.config.initializer_range = 0.02
    drawn = {name: tensor.clone() for name, tensor in dummy(empty, CPU)}
    again = {name: tensor.clone() for name, tensor in dummy(empty, CPU)}
    assert list(drawn) == [name for name, _ in empty.named_parameters()]
    for name, tensor in drawn.items():
        assert torch.equal(tensor, again[name])
        assert len(tensor.unique()) > tensor.numel() / 2
        assert abs(float(tensor.mean()) - ("norm" in name)) < 0.02
        assert 0.015 < float(tensor.std()) < 0.025
    first, second = (drawn[f"model.layers.{index}.mlp.up_proj.weight"] for index in (0, 1))
    assert not torch.equal(first, second)


def test_install_keeps_tied_weights_tied(checkpoint: Callable[..., Path]) -> None:
    empty = empty_model(model.from_directory(checkpoint("qwen2")))
    name = "model.embed_tokens.weight"
    new = torch.nn.Parameter(torch.ones(empty.get_parameter(name).shape), requires_grad=False)
    install(empty, {name: new})
    assert empty.get_input_embeddings().weight is new
    assert empty.get_output_embeddings().weight is new
    assert decoder_layers(empty)[1][0].mlp.up_proj.weight.is_meta
