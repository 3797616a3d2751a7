"""The state of a model: every parameter and persistent buffer, where it comes from, and an account of all of it.

A load is refused before a byte of a weight is read unless the checkpoint and the model agree: every entry of the
model's state is stored exactly once (tied ones under any of their names), and every stored tensor belongs to an entry
or is one that `transformers` itself ignores. Types are those that `transformers` would load: the model's, but float32
where it says so (router biases, gates, sinks).

A checkpoint's tensors pass through `transformers`' own conversion (names differ between versions, Mixtral's experts are
stored one by one and used fused), a decoder layer at a time. While one layer is used, many threads read the next, so
that a load takes as long as the slower of both; the peak of host memory is two layers.
"""

import inspect
import re
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from zinfer.engine.base import Progress, silent
from zinfer.engine.read import DTYPES, Group, empty_tensor, groups_mapped, groups_read
from zinfer.spec.architecture import decoder_layers, empty_model
from zinfer.spec.case import LoadFormat
from zinfer.spec.checkpoint import Checkpoint, CheckpointError, TensorInfo
from zinfer.spec.model import ModelSpec

logging.disable_progress_bar()

Place = tuple[nn.Module, str]  # a module and the name of one of its parameters or buffers
COMPARED_BYTES = 64 << 20  # of two stored copies of a tied weight that are compared at a time


@dataclass(frozen=True)
class Entry:
    """A parameter or persistent buffer of a model; one that several modules share is one entry."""

    names: tuple[str, ...]  # in the model's state; several where it is tied
    places: tuple[Place, ...]  # where modules hold it, in the order of `names`
    tensor: Tensor  # shape and type; a parameter lies on the meta device, a buffer has its initial value
    layer: int | None  # the decoder layer that alone uses it; None: outside the layers, or shared between some

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        module, leaf = self.places[0]
        return leaf in module._parameters

    def put(self, tensor: Tensor) -> Tensor:
        """Have every module that uses the entry hold `tensor`; returns it as they hold it."""
        held = tensor
        if self.is_parameter and not isinstance(tensor, nn.Parameter):
            held = nn.Parameter(tensor, requires_grad=False)
        for module, leaf in self.places:
            _table(module, leaf)[leaf] = held
        return held


class ModelState:
    """The entries of the model that `spec` describes, as `load_format` gives them.

    `model` has its parameters on the meta device and its buffers on the CPU until whoever loads it puts tensors in
    their place. Raises ModelError where transformers cannot build the model, and CheckpointError, in one line and
    before weights are read, where the checkpoint does not account for all of its state.
    """

    def __init__(self, spec: ModelSpec, load_format: LoadFormat, model: PreTrainedModel | None = None) -> None:
        self.spec = spec
        self.model = empty_model(spec) if model is None else model
        self.stack, self.layers = decoder_layers(self.model)
        _keep_types(self.model, getattr(torch, spec.dtype))
        self._checkpoint: _Stored | None = None
        if load_format != "dummy":
            if spec.directory is None:
                raise CheckpointError(f"{spec.name} has no local checkpoint; use --load-format dummy or give a folder")
            self._checkpoint = _Stored(Checkpoint.open(Path(spec.directory)), self)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every entry by its first name, parameters first, in the order of the model's modules."""
        found: dict[int, list[tuple[str, Place, Tensor]]] = defaultdict(list)
        for kind in ("_parameters", "_buffers"):
            for path, module in self.model.named_modules(remove_duplicate=False):
                for leaf, tensor in getattr(module, kind).items():
                    if tensor is not None and leaf not in module._non_persistent_buffers_set:
                        found[id(tensor)].append((f"{path}.{leaf}" if path else leaf, (module, leaf), tensor))
        entries = {}
        for held in found.values():
            names = tuple(name for name, _, _ in held)
            layers = {self._layer_of(name) for name in names}
            alone = layers.pop() if len(layers) == 1 else None
            entries[names[0]] = Entry(names, tuple(place for _, place, _ in held), held[0][2], alone)
        return entries

    def _layer_of(self, name: str) -> int | None:
        prefix = f"{self.stack}."
        return int(name.removeprefix(prefix).split(".", 1)[0]) if name.startswith(prefix) else None

    def of_layer(self, index: int) -> dict[str, Entry]:
        """The entries that decoder layer `index` alone uses, by their names within the layer."""
        start = len(f"{self.stack}.{index}.")
        return {entry.name[start:]: entry for entry in self.entries.values() if entry.layer == index}

    @property
    def outside(self) -> dict[str, Entry]:
        """The entries outside the decoder layers and those that several layers share, by name."""
        return {name: entry for name, entry in self.entries.items() if entry.layer is None}

    def load(
        self, device: torch.device, progress: Progress = silent, mapped: bool = False, layers: bool = True
    ) -> Generator[tuple[str, Tensor]]:
        """Every entry's tensor once, by the entry's name, those outside the layers first; with ``layers=False`` these
        only.

        A tensor is a loan until the next one is asked for, and the model has to stay as it is until the last; who
        stops before that closes the generator, which reads ahead. With `mapped`, tensors of a checkpoint may be kept:
        they are views of its files, and read when they are used. Raises CheckpointError for tensors that cannot be
        converted, and at the end unless all came.
        """
        missing = set(self.entries if layers else self.outside)
        total = sum(self.entries[name].tensor.numel() for name in missing)
        done = 0
        source = self._dummy(device, layers) if self._checkpoint is None else self._checkpoint.read(mapped, layers)
        with closing(source) as tensors:
            for name, tensor in tensors:
                if name not in missing:
                    raise CheckpointError(f"{self.spec.directory}: {name} came twice")
                missing.remove(name)
                yield name, tensor
                done += tensor.numel()
                progress("loading weights", done / total)
        if missing:
            raise CheckpointError(f"{self.spec.directory}: {_some(missing)} did not come")

    def _dummy(self, device: torch.device, layers: bool) -> Generator[tuple[str, Tensor]]:
        """Normally distributed parameters at the scale of a fresh initialisation, made on `device`; buffers keep their
        initial values.

        Matrices and biases have the configuration's `initializer_range` as standard deviation, norm scales the same
        around one. Seeded by name: every engine and every run gets the same model. Never constants, which compress,
        and multiply, unlike real weights.
        """
        std = getattr(self.model.config.get_text_config(), "initializer_range", None) or 0.02
        modules = self.model.named_modules()
        norms = {f"{name}.weight" for name, module in modules if "norm" in type(module).__name__.lower()}
        generator = torch.Generator(device)
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].layer is not None):
            if not layers and entry.layer is not None:
                return
            if not entry.is_parameter:
                yield name, entry.tensor.to(device, copy=True)
                continue
            generator.manual_seed(zlib.crc32(name.encode()))
            tensor = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device=device)
            yield name, tensor.normal_(1.0 if name in norms else 0.0, std, generator=generator)


def by_layer(
    state: ModelState, loaded: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[int | None, Iterator[tuple[str, Tensor]]]]:
    """Group the tensors of `loaded` by decoder layer: its number, and its tensors by their names within it; None and
    whole names for what lies outside the layers. Tensors are loans until the next one, in either iterator."""
    ahead = next(loaded, None)

    def group(layer: int | None) -> Iterator[tuple[str, Tensor]]:
        nonlocal ahead
        start = 0 if layer is None else len(f"{state.stack}.{layer}.")
        while ahead is not None and state.entries[ahead[0]].layer == layer:
            name, tensor = ahead
            yield name[start:], tensor
            ahead = next(loaded, None)

    while ahead is not None:
        layer = state.entries[ahead[0]].layer
        tensors = group(layer)
        yield layer, tensors
        for _ in tensors:  # what was not wanted
            pass


def _keep_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the meta parameters and the buffers of `model` that `transformers` keeps in float32 that type."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, group_to_glob, _ = build_glob_alternation(list(plan))
    # Tied ones stay tied. What is replaced is kept as well: its identity must not pass to a new tensor meanwhile.
    changed: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                match = pattern.search(f"{path}.{leaf}")
                if tensor is None or match is None or not tensor.is_floating_point():
                    continue
                wanted = plan[group_to_glob[match.lastgroup]]
                if id(tensor) not in changed and tensor.dtype != wanted:
                    cast = tensor.to(wanted)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    changed[id(tensor)] = tensor, nn.Parameter(cast, requires_grad=False) if is_parameter else cast
                if id(tensor) in changed:
                    held[leaf] = changed[id(tensor)][1]


class _Stored:
    """A checkpoint held against a model's state, and the way of its tensors into that."""

    def __init__(self, checkpoint: Checkpoint, state: ModelState) -> None:
        self._checkpoint, self._state = checkpoint, state
        self._directory = state.spec.directory
        self._around = _Around.of(checkpoint.config, state.model)
        self._mapping = get_model_conversion_mapping(state.model)
        if self._around is not None:
            self._mapping = [*self._around.renamings, *self._mapping]
        for rule in self._mapping:
            if getattr(rule, "force_cpu", False):  # that is where all are converted, unless they have no data
                rule.force_cpu = False
        sources = self._sources()
        self._untie(sources)
        self._names = {name: entry for entry in state.entries.values() for name in entry.names}
        self._slots = [
            (module, leaf, _table(module, leaf)[leaf], entry.name)
            for entry in state.entries.values()
            for module, leaf in entry.places
        ]
        groups: dict[int, list[str]] = defaultdict(list)
        for target, stored in sources.items():
            layer = self._names[target].layer
            groups[-1 if layer is None else layer] += stored
        self._groups: list[tuple[bool, Group]] = [(index >= 0, tuple(groups[index])) for index in sorted(groups)]
        self._account()

    def _sources(self) -> dict[str, list[str]]:
        """The stored tensors that make each entry, by the (first) name of the model's state that transformers gives
        them. Raises CheckpointError for tensors that belong nowhere, twice to one entry, or to one of another kind."""
        model, spec = self._state.model, self._state.spec
        wanted = {name: entry for entry in self._state.entries.values() for name in entry.names}
        meta = {name: entry.tensor for name, entry in wanted.items()}
        renamings = [rule for rule in self._mapping if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self._mapping if isinstance(rule, WeightConverter)]
        sources: dict[str, list[str]] = defaultdict(list)
        whole: dict[str, str] = {}  # stored without conversion: by the target's name
        unknown: dict[str, str] = {}  # stored name, by what transformers makes of it
        for name, info in self._checkpoint.tensors.items():
            prefix = model.base_model_prefix
            target, converter = rename_source_key(name, renamings, converters, prefix, meta)
            if target not in meta and name in meta:
                target, converter = rename_source_key(name, [], [], prefix, meta)
            if target not in meta:
                unknown[target] = name
                continue
            if converter is None and target in whole:
                raise CheckpointError(f"{self._directory} stores {target} twice: as {whole[target]} and {name}")
            if converter is None:
                whole[target] = name
            _same_kind(self._directory, name, info, target, meta[target])
            sources[target].append(name)
        unknown = {target: name for target, name in unknown.items() if not self._is_sliced_away(target)}
        if unknown and (left := self._not_ignorable(unknown)):
            raise CheckpointError(
                f"{self._directory} stores {_some(left)}, which a {spec.architecture} model of this configuration does "
                "not have: config.json and the weights do not belong together"
            )
        return sources

    def _is_sliced_away(self, target: str) -> bool:
        """Tell whether `target` belongs to a decoder layer that a slice of the model leaves out."""
        stack, prefix = self._state.stack, f"{self._state.model.base_model_prefix}."
        match = re.match(rf"(?:{re.escape(stack)}|{re.escape(stack.removeprefix(prefix))})\.(\d+)\.", target)
        return match is not None and self._state.spec.num_layers <= int(match[1]) < self._state.spec.total_layers

    def _not_ignorable(self, unknown: Mapping[str, str]) -> list[str]:
        """The stored names of those `unknown` targets that transformers does not ignore, that are no buffer which the
        model computes itself, and no part of a larger model around it (a vision tower, say)."""
        model = self._state.model
        found = SimpleNamespace(missing_keys=set[str](), unexpected_keys=set(unknown))
        model._adjust_missing_and_unexpected_keys(found)
        prefix = f"{model.base_model_prefix}."
        buffers = {name for name, _ in model.named_buffers()}
        left = {name for name in found.unexpected_keys if not {name, prefix + name} & buffers}
        if left and self._around is not None:
            left -= self._around.elsewhere({target: unknown[target] for target in left})
        return sorted(unknown[target] for target in left)

    def _untie(self, sources: Mapping[str, list[str]]) -> None:
        """Give names that the configuration ties, but under which the checkpoint stores different values, an entry
        each, as transformers does."""
        for entry in list(self._state.entries.values()):
            stored = [name for name in entry.names if name in sources]
            if len(stored) < 2:
                continue
            if any(len(sources[name]) != 1 for name in stored):
                raise CheckpointError(f"{self._directory} stores the tied {entry.name} several times, in parts")
            tensors = self._checkpoint.tensors
            first = tensors[sources[stored[0]][0]]
            for name in stored[1:]:
                if not _equal_bytes(first, tensors[sources[name][0]]):
                    (module, leaf), tensor = entry.places[entry.names.index(name)], entry.tensor
                    module._parameters[leaf] = nn.Parameter(torch.empty_like(tensor), requires_grad=False)
        self._state.__dict__.pop("entries", None)

    def _account(self) -> None:
        """Convert the checkpoint without its data. Raises CheckpointError where shapes do not fit, conversions fail, or
        entries are missing."""
        missing = set(self._state.entries)
        for _, group in self._groups:
            content = {name: empty_tensor(name, self._checkpoint.tensors[name]) for name in group}
            missing -= {name for name, _ in self._converted(content, torch.device("meta"))}
        needed = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set[str]())
        self._state.model._adjust_missing_and_unexpected_keys(needed)
        entries = self._state.entries
        # A buffer that transformers does not miss has the value that the model computed for it.
        self._initial = sorted(name for name in missing - needed.missing_keys if not entries[name].is_parameter)
        missing -= set(self._initial)
        if missing:
            raise CheckpointError(f"{self._directory} lacks {_some(missing)}")

    def read(self, mapped: bool, layers: bool) -> Generator[tuple[str, Tensor]]:
        """The entries' tensors, on the CPU, in the types of the entries; those outside the layers first."""
        for name in self._initial:
            if layers or self._state.entries[name].layer is None:
                yield name, self._state.entries[name].tensor
        groups = [group for inside, group in self._groups if layers or not inside]
        with closing((groups_mapped if mapped else groups_read)(self._checkpoint, groups)) as contents:
            for content in contents:
                yield from self._converted(content, torch.device("cpu"))

    def _converted(self, content: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Convert stored tensors as transformers does: the tensors of entries, by the entries' names; of a tied entry
        the first. The model is left as it was. Raises CheckpointError for shapes and conversions that fail."""
        model, spec = self._state.model, self._state.spec
        load_config = LoadStateDictConfig(
            dtype=getattr(torch, spec.dtype), device_map={"": device}, weight_mapping=self._mapping
        )
        parameters = inspect.signature(convert_and_load_state_dict_in_model).parameters
        # transformers < 5.5 has a tensor-parallel plan as a required argument.
        extra = {"tp_plan": None} if "tp_plan" in parameters else {}
        try:
            info = convert_and_load_state_dict_in_model(
                model=model, state_dict=content, load_config=load_config, **extra
            )[0]
        finally:
            made: dict[str, Tensor] = {}
            for module, leaf, original, name in self._slots:
                value = _table(module, leaf)[leaf]
                if value is not original:
                    _table(module, leaf)[leaf] = original
                    if value is not None:
                        made.setdefault(name, value.data)
        trouble = [*info.conversion_errors.values(), *info.mismatched_keys]
        if trouble:
            reason = " ".join(str(trouble[0]).split())[:300]
            raise CheckpointError(f"{self._directory} does not fit a {spec.architecture} model: {reason}")
        yield from made.items()


class _Around:
    """The multimodal model that a checkpoint is of, of which only the text model is used."""

    def __init__(self, model: PreTrainedModel, path: str, own: str) -> None:
        self._model, self._inside = model, f"{path}."
        self._rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
        # Names that the whole model gives to tensors of the text model, and then those which this has for them alone.
        self.renamings = [*self._rules, WeightRenaming(f"^{re.escape(self._inside)}", own)]

    @classmethod
    def of(cls, config: Mapping[str, Any], text: PreTrainedModel) -> "_Around | None":
        """The model that the `architectures` of a checkpoint's `config` name, if `text` is only a part of it."""
        parts = {type(module): f"{path}." if path else "" for path, module in text.named_modules()}
        wanted = [type(text), *([type(text.get_decoder())] if hasattr(text, "get_decoder") else [])]
        for name in config.get("architectures") or ():
            make: Any = getattr(transformers, name, None) if isinstance(name, str) else None
            if PreTrainedModel not in getattr(make, "__mro__", ()) or make is type(text):
                continue
            try:
                with init_empty_weights(include_buffers=True):
                    model = make(make.config_class.from_dict(dict(config)))
            except Exception:  # whatever its constructor raises, it tells nothing of these tensors
                continue
            for kind in wanted:  # the text model with its head, or without
                paths = [path for path, module in model.named_modules() if path and type(module) is kind]
                if len(paths) == 1:
                    return cls(model, paths[0], parts[kind])
        return None

    def elsewhere(self, unknown: Mapping[str, str]) -> set[str]:
        """Those `unknown` targets, with their stored names, that are entries of the other parts of the model."""
        entries = self._model.state_dict(keep_vars=True)
        converters = [rule for rule in get_model_conversion_mapping(self._model) if isinstance(rule, WeightConverter)]
        found = set()
        for target, stored in unknown.items():
            own = rename_source_key(stored, self._rules, converters, self._model.base_model_prefix, entries)[0]
            if own in entries and not own.startswith(self._inside):
                found.add(target)
        return found


def _table(module: nn.Module, leaf: str) -> dict[str, Any]:
    """The module's own table, of parameters or of buffers, that holds `leaf`."""
    return module._parameters if leaf in module._parameters else module._buffers


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point" if dtype.itemsize > 1 else "8-bit floating point"
    return "boolean" if dtype == torch.bool else "complex" if dtype.is_complex else "integer"


def _same_kind(directory: str | None, name: str, info: TensorInfo, target: str, tensor: Tensor) -> None:
    """Raise CheckpointError for stored numbers that mean something else than those of the model: 8-bit codes without
    their scales, say."""
    if info.dtype in DTYPES and _kind(DTYPES[info.dtype]) == _kind(tensor.dtype):
        return
    raise CheckpointError(
        f"{directory} stores {name} as {info.dtype}, and the model's {target} is {str(tensor.dtype)[6:]}: quantised "
        "weights are not read; use the unquantised checkpoint"
    )


def _equal_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two stored tensors are the same to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    size = one.end - one.start
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for done in range(0, size, COMPARED_BYTES):
            count = min(COMPARED_BYTES, size - done)
            if first.read(count) != second.read(count):
                return False
    return True


def _some(names: Iterable[str]) -> str:
    """A few of `names`, in a line."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
