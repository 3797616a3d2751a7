"""Model references, turned into a `ModelSpec`.

The shape of a model is measured on the `transformers` model that its configuration describes, built without memory
(`zinfer.checkpoint.architecture`); the catalogue holds the shapes of its models.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

from zinfer.checkpoint import gguf, hub, quantization, quantized_tensors
from zinfer.checkpoint.headers import DTYPE_NAMES, Checkpoint, CheckpointError, is_ignored_tensor, unsupported_kind
from zinfer.core.errors import did_you_mean, environment_error
from zinfer.core.model import LAYER_INDEX, Dtype, LayerSpec, ModelError, ModelSpec, Shape, Weights, text_config
from zinfer.system import atomic
from zinfer.system.documents import read_bytes
from zinfer.system.host import cache_folder


def resolve(
    reference: str, dtype: Dtype | None = None, layers: int | None = None, weights: Weights = "as-released"
) -> ModelSpec:
    """Return the model of a reference, its layers in the format `weights`.

    A reference is a name or a hub id of the catalogue (`catalogue_name`), a checkpoint folder, a config.json, or
    another Hugging Face hub id. Raises ModelError, in one line, for anything else.
    """
    if not reference:
        raise ModelError("--model is empty; `zinfer plan --list models` lists the catalogue")
    path = Path(reference).expanduser()
    if (name := catalogue_name(reference)) is not None:
        spec = from_catalogue(name)
    elif os.path.isdir(path) or (path.suffix in (".json", gguf.SUFFIX) and os.path.isfile(path)):  # a name may be long
        spec = from_directory(path).model_copy(update={"name": reference})
    elif os.path.exists(path):
        is_file = f"{reference} is a file: --model takes the folder that holds config.json and the safetensors"
        raise ModelError(unsupported_kind(path) or is_file)
    elif reference.startswith((".", "/", "~")):
        raise ModelError(f"no such folder: {reference}")
    elif re.fullmatch(hub.REFERENCE, reference):
        try:
            spec = from_hub(reference)
        except ModelError as error:
            raise error.converted(ModelError, _near(reference)) from None
    else:
        hint = _near(reference) or "; `zinfer plan --list models` lists the catalogue"
        raise ModelError(f"no model {reference[:200]!r}: not in the catalogue, not a folder, not a hub id{hint}")
    if dtype is not None:
        spec = spec.with_dtype(dtype)
    if layers is not None:
        spec = spec.slice(layers)
        if spec.directory is None:  # layers may differ in the share that is quantised
            spec = _with_stored_ratio(spec)
    return with_weights(spec, weights)


def with_weights(spec: ModelSpec, weights: Weights) -> ModelSpec:
    """Return the model with weights, and `config`, in another format. Raises ModelError."""
    if weights == "as-released":
        return spec
    if quantization.settings_of(spec.config) is not None or spec.stored_ratio < 1:
        raise ModelError(f"{spec.name} is released quantised: --weights {weights} is for models in 16 or 32 bits")
    config = spec.config | {"quantization_config": quantization.scheme(weights)}
    spec = _with_stored_ratio(spec.model_copy(update={"config": config, "weights": weights}))
    if spec.stored_ratio == 1:
        raise ModelError(f"{spec.name} has no matrix that --weights {weights} makes smaller: leave the option out")
    return spec


def as_released(spec: ModelSpec) -> ModelSpec:
    """Return the model that `with_weights` was given."""
    if spec.weights == "as-released":
        return spec
    config = {key: value for key, value in spec.config.items() if key != "quantization_config"}
    return spec.model_copy(
        update={"config": config, "stored_ratio": 1.0, "fp8_ratio": 0.0, "routed_ratio": None, "weights": "as-released"}
    )


def catalogue_names() -> tuple[str, ...]:
    """Return the names that `--model` takes without a download."""
    return tuple(_catalogue())


def catalogue_name(reference: str) -> str | None:
    """Return the catalogue's name for a reference in any case; files come first."""
    if reference in _catalogue():
        return reference
    name = _references().get(reference.casefold())
    return None if name is None or os.path.exists(reference) else name


def is_wanted(wanted: str | None, model: str) -> bool:
    """Tell whether the model of a record is `wanted`: a name, a hub id, or None for all."""
    canonical = wanted and catalogue_name(wanted)
    return wanted in (None, model, Path(model).name) or (canonical is not None and canonical == catalogue_name(model))


@cache
def _references() -> dict[str, str]:
    """Return the catalogue's names by name and hub id in small letters."""
    ids = {entry["hub_id"].casefold(): name for name, entry in _catalogue().items() if "hub_id" in entry}
    return ids | {name.casefold(): name for name in _catalogue()}


def _near(reference: str) -> str:
    """Return the end of a message about an unknown model."""
    return did_you_mean(reference.partition("@")[0].rpartition("/")[2].casefold(), catalogue_names())


def from_catalogue(name: str) -> ModelSpec:
    """Return the catalogue's entry `name`. Raises KeyError if there is none."""
    entry = _catalogue()[name]
    config = deepcopy(entry["config"]) | dict.fromkeys(entry.get("nulls", ()))
    counted = dict(_shapes()[name])
    kinds = [LayerSpec(**kind) for kind in counted.pop("kinds")]
    layers = tuple(layer for kind, times in counted.pop("order") for layer in [kinds[kind]] * times)
    shape = Shape(num_layers=len(layers), layers=layers, **counted)
    return _with_stored_ratio(_spec(name, config, shape, dtype=entry["dtype"], hub_id=entry.get("hub_id")))


@cache
def _catalogue() -> dict[str, Any]:
    with (files("zinfer") / "catalog" / "models.toml").open("rb") as file:
        return tomllib.load(file)


@cache
def _shapes() -> dict[str, Any]:
    """Return the shapes of the catalogue, their layers as `kinds` and `order`."""
    shapes: dict[str, Any] = json.loads((files("zinfer") / "catalog" / "shapes.json").read_text())
    return shapes


def from_directory(path: Path) -> ModelSpec:
    """Return the spec of a checkpoint folder or a config.json, from headers. Raises ModelError."""
    name = str(path)
    _require_torch(name)
    try:
        checkpoint = Checkpoint.open(path, bare=True)
        config = checkpoint.config
        quantized = quantized_tensors.quantized_weights(checkpoint.tensors, config, dtype_of(config))
        stored = quantized_tensors.without_codes(checkpoint.tensors, *quantized)
    except CheckpointError as error:
        raise error.converted(ModelError) from None
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    if not stored:
        return from_config(name, config, dtype=_supported(name, dtype_of(config)))
    weights = {tensor: info for tensor, info in stored.items() if not is_ignored_tensor(tensor)}
    largest = max(weights.values(), key=lambda info: info.nbytes)
    dtype = _supported(name, dtype_of(config, DTYPE_NAMES.get(largest.dtype, largest.dtype)))
    is_gguf = bool(checkpoint.architecture)
    spec = _measured(name, config, directory=str(checkpoint.sources[0]) if is_gguf else name, dtype=dtype)
    present, every = {_layer(tensor) for tensor in weights} - {None}, range(spec.num_layers)
    if missing := [layer for layer in every if present and layer not in present]:
        raise ModelError(f"{name}: no weights of decoder layer {missing[0]} of {spec.num_layers}")
    if stored == checkpoint.tensors:
        return spec
    inside = {t: i for t, i in checkpoint.tensors.items() if _layer(t) in every and not is_ignored_tensor(t)}
    inside = inside or dict(checkpoint.tensors)  # layers of other names
    fp8 = sum(info.nbytes for tensor, info in inside.items() if tensor in stored and info.dtype == quantization.FP8)
    sizes = {tensor: info.nbytes * gguf.HELD.get(info.dtype, 1) for tensor, info in inside.items()}
    form, held = sum(info.nbytes * gguf.FORMS.get(info.dtype, 1) for info in inside.values()), sum(sizes.values())
    experts = sum(size for tensor, size in sizes.items() if ".experts." in tensor or "_exps." in tensor)
    fields = {
        "stored_ratio": min(1.0, held / spec.streamed_bytes),
        "fp8_ratio": fp8 / spec.streamed_bytes,
        "form_ratio": max(1.0, form / held),
        "routed_ratio": min(1.0, experts / spec.routed_bytes) if experts and spec.routed_bytes else None,
    }
    return spec.model_copy(update=fields)


def _layer(tensor: str) -> int | None:
    match = LAYER_INDEX.search(tensor)
    return int(match[1]) if match else None


def from_hub(hub_id: str) -> ModelSpec:
    """Return the spec of a hub's model from its config.json alone. Raises ModelError."""
    config = hub.config_of(hub_id)
    dtype = dtype_of(config)
    return from_config(hub_id, config, dtype=dtype if dtype in get_args(Dtype) else "bfloat16", hub_id=hub_id)


def from_config(name: str, config: Mapping[str, Any], **others: Any) -> ModelSpec:
    """Return the spec of the model that `config` describes. Raises ModelError."""
    return _with_stored_ratio(_measured(name, config, **others))


def _measured(name: str, config: Mapping[str, Any], **others: Any) -> ModelSpec:
    """Return the spec of a configuration, measured by `transformers`. Raises ModelError, with `name` in it."""
    if not config.get("model_type"):
        raise ModelError(
            f"{name}: config.json has no model_type, so it is no configuration of transformers: take the model's "
            "version for transformers"
        )
    _require_torch(name)
    made_of = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + version("transformers").encode())
    for room, module in (("checkpoint", "architecture.py"), ("core", "model.py")):
        made_of.update((files(f"zinfer.{room}") / module).read_bytes())
    file = cache_folder() / f"shape-{made_of.hexdigest()[:24]}.json"
    try:
        shape = Shape.model_validate_json(read_bytes(file))
    except (OSError, ValueError):
        from zinfer.checkpoint.architecture import measure

        shape = measure(name, config)
        with suppress(OSError):  # without the file it is measured again next time
            atomic.write(file, shape.model_dump_json())
    return _spec(name, config, shape, **others)


def _require_torch(name: str) -> None:
    if not all(map(find_spec, ("torch", "transformers", "accelerate"))):
        needs = "needs torch and transformers: pip install 'zinfer[engines]'"
        raise environment_error(ModelError(f"{name}: a model that is not in the catalogue {needs}"))


def _spec(name: str, config: Mapping[str, Any], shape: Shape, **others: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture=config.get("model_type", ""),
        total_layers=shape.num_layers,
        **dict(shape),
        config=deepcopy(dict(config)),
        **others,
    )


def _with_stored_ratio(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the ratios of the format that its `config` names. Raises ModelError for an unknown format."""
    try:
        stored, fp8, routed = quantized_tensors.stored_ratios(spec.layers, spec.stack, spec.config, spec.dtype)
    except ModelError as error:
        raise ModelError(f"{spec.name}: {error}") from None
    return spec.model_copy(update={"stored_ratio": stored, "fp8_ratio": fp8, "routed_ratio": routed})


def dtype_of(config: Mapping[str, Any], default: str = "bfloat16") -> str:
    """Return the type of the weights that `config` names."""
    named = (part.get(key) for part in (config, text_config(config)) for key in ("dtype", "torch_dtype"))
    return next((str(dtype).removeprefix("torch.") for dtype in named if dtype), default)


def _supported(name: str, dtype: str) -> Dtype:
    if dtype not in get_args(Dtype):
        raise ModelError(f"{name}: weights of type {dtype} are not supported; use one of {', '.join(get_args(Dtype))}")
    return cast(Dtype, dtype)
