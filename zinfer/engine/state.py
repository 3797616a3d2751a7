"""State of a model: every parameter and persistent buffer, accounted for.

A load is refused, before any weight is read, unless checkpoint and model agree: every entry is stored exactly once
(tied entries under any of their names), and no stored tensor is left over that would change the text. What the model
computes itself (masks, tables of positions) is left out; other parts, such as a reward model's head, with a line.
Tensors pass through `transformers`' conversion, a decoder layer at a time, while threads read the next.
"""

import inspect
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import core_model_loading as conversion
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from zinfer.checkpoint import gguf_names, quantization, quantized_tensors
from zinfer.checkpoint.architecture import building, decoder_layers, empty_model, merges_experts
from zinfer.checkpoint.configuration import without_code
from zinfer.checkpoint.headers import HEAD, TABLE, Checkpoint, CheckpointError, TensorInfo
from zinfer.core.case import LoadFormat
from zinfer.core.model import ModelSpec, text_config
from zinfer.core.progress import Progress, note, silent
from zinfer.engine import read as reads
from zinfer.engine.quantization.dequantize import Codes, canonical, dequantize
from zinfer.engine.quantization.loading import CodedMatrix, coded_entries, random_entry, rounded_entry
from zinfer.engine.read import Group, Visit

logging.disable_progress_bar()

Loaded = Tensor | tuple[Codes, ...]  # an entry, or the quantised matrices whose rows it consists of
Place = tuple[nn.Module, str]  # a module and the name of one of its parameters or buffers
ADAPTER = re.compile(r"(?:^|\.)(?:lora_|ia3_|adapters?\.|base_model\.|modules_to_save\.)")  # parts of names
AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # layers that predict several tokens
COMPARED_BYTES = 64 << 20  # bytes compared at a time, of two stored copies of a tied weight


@dataclass(frozen=True)
class Entry:
    """Parameter or persistent buffer of a model. Modules that share one have the same entry."""

    names: tuple[str, ...]  # names in the model's state; several for a tied entry
    places: tuple[Place, ...]  # the modules that hold it, in the order of `names`
    tensor: Tensor  # shape and type; a parameter lies on the meta device, a buffer has its initial value
    layer: int | None  # the decoder layer that alone uses it; None: outside the layers, or shared between layers

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        module, leaf = self.places[0]
        return leaf in module._parameters

    def put(self, tensor: Tensor) -> Tensor:
        """Put `tensor` into all modules that use the entry. Returns it as they hold it."""
        if self.is_parameter and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        for module, leaf in self.places:
            _table(module, leaf)[leaf] = tensor
        return tensor


class ModelState:
    """Entries of the model that `spec` describes, loaded as `load_format` says.

    `model` has its parameters on the meta device and its buffers on the CPU until the engine puts tensors in their
    place. Raises ModelError where transformers cannot build the model, and CheckpointError, in one line and before
    weights are read, where the checkpoint does not account for all of its state.

    Quantised entries have random codes with load format "dummy", and are rounded where `spec.weights` names another
    format than the checkpoint's. Weights with NaN or infinity are refused while they are read, unless `allow_nan`.
    `visits` get all bytes that are read, as in `read_groups`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        load_format: LoadFormat,
        allow_nan: bool = False,
        visits: Iterable[Visit] = (),
    ) -> None:
        self.spec = spec
        self.model = empty_model(spec)
        self.stack, self.layers = decoder_layers(self.model)
        _keep_types(self.model, getattr(torch, spec.dtype))
        self._checkpoint: _Stored | None = None
        if load_format != "dummy":
            if spec.directory is None:
                raise CheckpointError(f"{spec.name} has no local checkpoint; use --load-format dummy or give a folder")
            self._checkpoint = _Stored(Checkpoint.open(Path(spec.directory)), self, allow_nan, visits)
        self._coded: dict[str, tuple[CodedMatrix, ...]] = {}
        if quantization.settings_of(spec.config) and (load_format == "dummy" or spec.weights != "as-released"):
            self._coded = coded_entries(self.model, self.stack, self.layers, spec)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """All entries by their first name, in the order of the modules. Parameters come first."""
        by_tensor: dict[int, list[tuple[str, Place, Tensor]]] = defaultdict(list)
        for kind in ("_parameters", "_buffers"):
            for path, module in self.model.named_modules(remove_duplicate=False):
                for leaf, tensor in getattr(module, kind).items():
                    if tensor is not None and leaf not in module._non_persistent_buffers_set:
                        by_tensor[id(tensor)].append((f"{path}.{leaf}" if path else leaf, (module, leaf), tensor))
        entries = {}
        for uses in by_tensor.values():
            names, places, tensors = zip(*uses, strict=True)
            layers = {self._layer_of(name) for name in names}
            entries[names[0]] = Entry(names, places, tensors[0], layers.pop() if len(layers) == 1 else None)
        return entries

    def with_own_model(self) -> "ModelState":
        """Return a state with a model of its own, to load from. Conversion puts tensors into the model for
        a moment, which must not be the one that computes."""
        state = copy(self)
        state.model = deepcopy(self.model)
        state.stack, state.layers = decoder_layers(state.model)
        vars(state).pop("entries", None)
        if self._checkpoint is not None:
            state._checkpoint = self._checkpoint.of(state)
        return state

    def _layer_of(self, name: str) -> int | None:
        prefix = f"{self.stack}."
        return int(name.removeprefix(prefix).split(".", 1)[0]) if name.startswith(prefix) else None

    def of_layer(self, index: int) -> dict[str, Entry]:
        """Return the entries of decoder layer `index` alone, by name within it."""
        start = len(f"{self.stack}.{index}.")
        return {entry.name[start:]: entry for entry in self.entries.values() if entry.layer == index}

    def stored_rows(self) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors that make up the rows of entries. They are one, or one for each expert."""
        return {} if self._checkpoint is None else self._checkpoint.in_rows

    @property
    def outside(self) -> dict[str, Entry]:
        """Entries outside the decoder layers, or shared by several, by name."""
        return {name: entry for name, entry in self.entries.items() if entry.layer is None}

    def load(
        self, device: torch.device, progress: Progress = silent, layers: bool = True, stored: bool = False
    ) -> Generator[tuple[str, Any]]:
        """Yield (name, tensor) of every entry once.

        Entries outside the layers come first, or alone if not `layers`. If `stored`, quantised ones come as `Codes`, in
        the order of their rows. A tensor is valid until the next one is requested, and the model must not change until
        the last one. A caller that stops early has to close the generator, which reads ahead. Raises CheckpointError
        for tensors that cannot be converted, and at the end if an entry did not come.
        """
        missing = set(self.entries if layers else self.outside)
        total = sum(self.entries[name].tensor.numel() for name in missing)
        done, checkpoint = 0, self._checkpoint
        for line in checkpoint.notes() if checkpoint is not None else ():
            note(progress, line)
        read = self._dummy(device, layers, stored) if checkpoint is None else checkpoint.read(layers, stored, device)
        with closing(read) as tensors:
            for name, tensor in tensors:
                if name not in missing:
                    raise CheckpointError(f"{self.spec.directory}: {name} came twice")
                missing.remove(name)
                matrices = self._coded.get(name)
                if checkpoint is None or matrices is None or not isinstance(tensor, Tensor):
                    yield name, tensor
                else:  # it gets a format of zinfer
                    yield name, rounded_entry(name, tensor.to(device), matrices, self.spec.weights, stored)
                done += self.entries[name].tensor.numel()
                progress("loading weights", done / total)
        if missing:
            raise CheckpointError(f"{self.spec.directory}: {_some(missing)} did not come")

    def _dummy(self, device: torch.device, layers: bool, stored: bool) -> Generator[tuple[str, Loaded]]:
        """Yield random parameters at the scale of a fresh initialisation.

        They are normally distributed, and made on `device`. The standard deviation is the configuration's
        `initializer_range`; the mean is zero, for norm scales one. Quantised entries get codes and scales that make
        such weights, in the type that they are stored in. Buffers keep their initial values. The seed is the name:
        every engine and every run gets the same model. Constants would compress, and multiply, unlike real weights.
        """
        std = getattr(self.model.config.get_text_config(), "initializer_range", None) or 0.02
        modules = self.model.named_modules()
        norms = {f"{name}.weight" for name, module in modules if "norm" in type(module).__name__.lower()}
        generator = torch.Generator(device)
        chosen = self.entries if layers else self.outside
        # Layer by layer, each in one block with its buffers.
        for name, entry in sorted(chosen.items(), key=lambda item: -1 if item[1].layer is None else item[1].layer):
            if not entry.is_parameter:
                yield name, entry.tensor.to(device, copy=True)
            elif (matrices := self._coded.get(name)) is not None:
                yield name, random_entry(entry.tensor, matrices, std, stored, generator)
            else:
                generator.manual_seed(zlib.crc32(name.encode()))
                tensor = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, device=device)
                yield name, tensor.normal_(1.0 if name in norms else 0.0, std, generator=generator)


def by_layer(
    state: ModelState, loaded: Iterable[tuple[str, Loaded]]
) -> Iterator[tuple[int | None, Iterator[tuple[str, Loaded]]]]:
    """Group loaded tensors by decoder layer: its number, and named tensors. Entries outside the layers come with None
    and with their whole names. A tensor is valid until the next request to either iterator."""
    for layer, group in groupby(loaded, lambda item: state.entries[item[0]].layer):
        start = 0 if layer is None else len(f"{state.stack}.{layer}.")
        yield layer, ((name[start:], tensor) for name, tensor in group)


def _keep_types(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what `transformers` keeps in float32."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, group_to_glob, _ = conversion.build_glob_alternation(list(plan))
    # Tied tensors stay tied. Replaced tensors are kept until the end: a new tensor must not get the id of an old one.
    changed: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                match = pattern.search(f"{path}.{leaf}")
                if tensor is None or match is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in changed:
                    new = tensor.to(plan[group_to_glob[match.lastgroup]])
                    is_new_parameter = new is not tensor and isinstance(tensor, nn.Parameter)
                    changed[id(tensor)] = tensor, nn.Parameter(new, requires_grad=False) if is_new_parameter else new
                table[leaf] = changed[id(tensor)][1]


class _Stored:
    """Checkpoint that is checked against a model's state, and converted into it."""

    def __init__(self, checkpoint: Checkpoint, state: ModelState, allow_nan: bool, visits: Iterable[Visit]) -> None:
        self._state, spec = state, state.spec
        self._directory = state.spec.directory
        if checkpoint.architecture:
            checkpoint, self._quantized = gguf_names.named(checkpoint, state.model, spec.total_layers, spec.dtype)
            left_out = set[str]()
        else:
            found = quantized_tensors.quantized_weights(checkpoint.tensors, checkpoint.config, spec.dtype)
            self._quantized, left_out = found
        self._checkpoint = checkpoint
        self._visits: list[Visit] = [*visits, *([] if allow_nan else [partial(reads.check_finite, checkpoint)])]
        # Tensors as an unquantised checkpoint names them.
        self._tensors = quantized_tensors.without_codes(checkpoint.tensors, self._quantized, left_out)
        self._around = _around(checkpoint.config, state.model)
        self._mapping = [*self._around, *get_model_conversion_mapping(state.model)]
        for rule in self._mapping:
            if getattr(rule, "force_cpu", False):  # all are converted on the CPU, or without data on the meta device
                rule.force_cpu = False
        sources = self._sources()
        self._untie(sources)
        self._names = {name: entry for entry in state.entries.values() for name in entry.names}
        groups: dict[int, list[str]] = defaultdict(list)
        for target, stored in sources.items():
            layer = self._names[target].layer
            groups[-1 if layer is None else layer] += stored
        # Entries whose stored numbers may be too large for their type: conversion makes infinities of these.
        self._narrowed = {
            self._names[target].name
            for target, stored in sources.items()
            if not allow_nan and any(self._may_overflow(name, self._names[target].tensor.dtype) for name in stored)
        }
        self._groups: list[tuple[bool, Group]] = [(index >= 0, tuple(groups[index])) for index in sorted(groups)]
        self._account()

    def _may_overflow(self, name: str, dtype: torch.dtype) -> bool:
        """Tell whether a weight may hold numbers that are infinite as `dtype`."""
        if name in self._quantized:  # products of codes and scales
            return True
        stored = reads.DTYPES[self._tensors[name].dtype]
        return dtype.is_floating_point and stored.is_floating_point and torch.finfo(stored).max > torch.finfo(dtype).max

    def _sources(self) -> dict[str, list[str]]:
        """Return the stored tensors of each entry, by its name in transformers. Raises CheckpointError."""
        model = self._state.model
        wanted = {name: entry for entry in self._state.entries.values() for name in entry.names}
        meta = {name: entry.tensor for name, entry in wanted.items()}
        renamings = [rule for rule in self._mapping if isinstance(rule, conversion.WeightRenaming)]
        converters = [rule for rule in self._mapping if isinstance(rule, conversion.WeightConverter)]
        sources: dict[str, list[str]] = defaultdict(list)
        patterns = dict[str, str]()  # stored name -> pattern of the conversion that takes it
        whole: dict[str, str] = {}  # target name -> stored name, of tensors that need no conversion
        unknown: dict[str, str] = {}  # target name that transformers gives -> stored name
        for name, info in self._tensors.items():
            prefix = model.base_model_prefix
            target, converter = conversion.rename_source_key(name, renamings, converters, prefix, meta)
            if target not in meta and name in meta:
                target, converter = conversion.rename_source_key(name, [], [], prefix, meta)
            if target not in meta:
                unknown[target] = name
                continue
            if converter is not None:
                patterns[name] = converter
            elif whole.setdefault(target, name) != name:
                raise CheckpointError(f"{self._directory} stores {target} twice: as {whole[target]} and {name}")
            _check_kind(self._directory, name, info, target, meta[target])
            sources[target].append(name)
        self.left_out = self._surplus(
            {target: name for target, name in unknown.items() if not self._is_sliced_away(target)}
        )
        self.in_rows = {
            target: order
            for target, stored in sources.items()
            if wanted[target].layer is not None and (order := _row_order(stored, patterns, converters)) is not None
        }
        return sources

    def _is_sliced_away(self, target: str) -> bool:
        """Tell whether `target` is in a layer that a slice leaves out."""
        (owner, rest), spec = self._owner(target), self._state.spec
        return owner is self._state.layers and rest[0].isdigit() and spec.num_layers <= int(rest[0]) < spec.total_layers

    def _surplus(self, unknown: Mapping[str, str]) -> list[str]:
        """Return the stored names of targets to leave out with a line. Others are left out without one: what
        transformers ignores, what the model computes itself, and parts of a larger model around it (a vision tower).
        Raises CheckpointError for tensors that would change the text."""
        model = self._state.model
        keys = SimpleNamespace(missing_keys=set[str](), unexpected_keys=set(unknown))
        model._adjust_missing_and_unexpected_keys(keys)
        prefix = f"{model.base_model_prefix}."
        buffers = {name for name, _ in model.named_buffers()}
        left = {
            name
            for name in keys.unexpected_keys
            if not {name, prefix + name} & buffers and not self._is_table(name, self._tensors[unknown[name]].shape)
        }
        if self._around:  # other parts of the model around it
            left = {name for name in left if self._owner(name)[0] not in (model, model.base_model)}
        if adapter := [unknown[target] for target in left if ADAPTER.search(target)]:
            raise CheckpointError(
                f"{self._directory} stores {_some(adapter)}, of an adapter: merge it into the weights first "
                "(merge_and_unload of peft)"
            )
        if belong := [unknown[target] for target in left if self._belongs(target)]:
            raise CheckpointError(
                f"{self._directory} stores {_some(belong)}, which a {self._state.spec.architecture} model of this "
                "configuration does not have: config.json and the weights do not belong together"
            )
        return sorted(unknown[target] for target in left)

    def _is_table(self, target: str, shape: tuple[int, ...]) -> bool:
        """Tell whether the model computes `target`, a mask or position table."""
        if TABLE.search(target) is None or self._owner(target)[0]._parameters:
            return False
        if target.endswith("masked_bias"):
            return prod(shape) == 1
        return not target.endswith(".bias") or (len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3])

    def _belongs(self, target: str) -> bool:
        """Tell whether `target` belongs to a module of the model. Other heads do not."""
        owner, rest = self._owner(target)
        if len(rest) == 1:
            return True
        if owner is self._state.layers and rest[0].isdigit():
            text, depth = text_config(self._checkpoint.config), self._state.spec.total_layers
            return not depth <= int(rest[0]) < depth + max((text.get(key) or 0 for key in AHEAD), default=0)
        if owner is self._state.model:  # outside the base model, if names tell which tensors are inside
            inside = f"{self._state.model.base_model_prefix}."
            return HEAD.match(target) is None and not any(name.startswith(inside) for name in self._tensors)
        return True

    def _owner(self, target: str) -> tuple[nn.Module, list[str]]:
        """Return the innermost module of a name, and the rest of it. Names may lack the base model."""
        model, parts = self._state.model, target.split(".")
        module, rest = cast("nn.Module", model), parts
        if parts[0] not in model._modules and parts[0] in model.base_model._modules:
            module = model.base_model
        while len(rest) > 1 and isinstance(inner := module._modules.get(rest[0]), nn.Module):
            module, rest = inner, rest[1:]
        return module, rest

    def _untie(self, sources: Mapping[str, list[str]]) -> None:
        """Untie names that are stored with different values, as in transformers."""
        for entry in list(self._state.entries.values()):
            stored = [name for name in entry.names if name in sources]
            if len(stored) < 2:
                continue
            if any(len(sources[name]) != 1 for name in stored):
                raise CheckpointError(f"{self._directory} stores the tied {entry.name} several times, in parts")
            tensors = self._tensors
            first = tensors[sources[stored[0]][0]]
            coded = {name for name in stored if sources[name][0] in self._quantized}
            for name in stored[1:]:
                if coded & {name, stored[0]} or not _equal_bytes(first, tensors[sources[name][0]]):
                    (module, leaf), tensor = entry.places[entry.names.index(name)], entry.tensor
                    module._parameters[leaf] = nn.Parameter(torch.empty_like(tensor), requires_grad=False)
        self._state.__dict__.pop("entries", None)

    def _account(self) -> None:
        """Check the checkpoint: convert it without its data. Raises CheckpointError."""
        missing = set(self._state.entries)
        for _, group in self._groups:
            content = self._dequantized(group, lambda name: reads.empty_tensor(name, self._checkpoint.tensors[name]))
            missing -= {name for name, _ in self._converted(content, torch.device("meta"))}
        keys = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set[str]())
        self._state.model._adjust_missing_and_unexpected_keys(keys)
        entries = self._state.entries
        # A buffer that transformers does not miss has the value that the model computed for it.
        self._initial = sorted(name for name in missing - keys.missing_keys if not entries[name].is_parameter)
        missing -= set(self._initial)
        if missing:
            raise CheckpointError(f"{self._directory} lacks {_some(missing)}")

    def of(self, state: ModelState) -> "_Stored":
        stored = copy(self)
        stored._state = state
        return stored

    def notes(self) -> Iterator[str]:
        """Yield lines for the user on what is not read."""
        if self.left_out:
            architecture = self._state.spec.architecture
            yield f"left out {_some(self.left_out)} of {self._directory}: no part of a {architecture} model"
        yield from self._checkpoint.notes()

    def read(self, layers: bool, stored: bool, device: torch.device) -> Generator[tuple[str, Loaded]]:
        """Yield (name, tensor) of the entries. Entries outside the layers come first. All are on the CPU, but for codes
        (`stored`): a GPU puts them in order sooner."""
        for name in self._initial:
            if layers or self._state.entries[name].layer is None:
                yield name, self._state.entries[name].tensor
        groups = [group for inside, group in self._groups if layers or not inside]
        quantized = {name: tuple(weight.parts.values()) for name, weight in self._quantized.items()}
        parts = [tuple(part for name in group for part in quantized.get(name, (name,))) for group in groups]
        with closing(reads.read_groups(self._checkpoint, parts, self._visits)) as contents:
            for group, tensors in zip(groups, contents, strict=True):
                yielded = set[str]()
                for target, order in self.in_rows.items() if stored else ():
                    entry = self._names[target]
                    if order[0] not in group or not self._quantized.keys() >= set(order):
                        continue
                    if (codes := self._codes(order, tensors, entry.tensor.dtype, device)) is not None:
                        yielded.update(order)
                        yield entry.name, codes
                content = self._dequantized([name for name in group if name not in yielded], tensors.__getitem__)
                for name, tensor in self._converted(content, torch.device("cpu")):
                    if name in self._narrowed and (number := reads.first_not_finite(tensor)) is not None:
                        raise reads.not_finite(f"{self._directory}: {name} as {str(tensor.dtype)[6:]}", number)
                    yield name, tensor

    def _codes(
        self, names: Iterable[str], stored: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> tuple[Codes, ...] | None:
        """Return quantised weights of an entry as stored. None if one of them cannot cross the link so."""
        weights = []
        for name in names:
            weight = self._quantized[name]
            if not weight.in_whole_bytes:  # dequantised, where each value is checked
                return None
            parts = {role: stored[part] for role, part in weight.parts.items()}
            weights.append(canonical(weight, parts, device))
            if not weights[-1].fit(dtype):
                return None
        return tuple(weights)

    def _dequantized(self, names: Iterable[str], stored: Callable[[str], Any]) -> dict[str, Any]:
        """Return weights by name, made of `stored` tensors."""
        weights = {name: stored(name) for name in names if name not in self._quantized}
        for name in names:
            if (weight := self._quantized.get(name)) is not None:
                weights[name] = dequantize(weight, {role: stored(part) for role, part in weight.parts.items()})
        return weights

    def _converted(self, content: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Convert stored tensors as transformers does: yield (name, tensor). The model is left as it was."""
        model, spec = self._state.model, self._state.spec
        settings = LoadStateDictConfig(
            dtype=getattr(torch, spec.dtype), device_map={"": device}, weight_mapping=self._mapping
        )
        parameters = inspect.signature(conversion.convert_and_load_state_dict_in_model).parameters
        # transformers < 5.5 has a tensor-parallel plan as a required argument.
        extra = {"tp_plan": None} if "tp_plan" in parameters else {}
        places = [(entry.name, *place) for entry in self._state.entries.values() for place in entry.places]
        before = [_table(module, leaf)[leaf] for _, module, leaf in places]
        try:
            info = conversion.convert_and_load_state_dict_in_model(model, content, load_config=settings, **extra)[0]
        finally:
            made: dict[str, Tensor] = {}
            for (name, module, leaf), original in zip(places, before, strict=True):
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


def _row_order(
    stored: Iterable[str], patterns: Mapping[str, str], converters: Iterable[conversion.WeightConverter]
) -> tuple[str, ...] | None:
    """Return the tensors of an entry in the order of its rows. None if it is not made of rows."""
    names = list(stored)
    if len(names) == 1 and names[0] not in patterns:
        return tuple(names)
    used = {patterns.get(name) for name in names}
    rule = next((rule for rule in converters if used <= set(rule.source_patterns)), None)
    if rule is None or not merges_experts(rule):
        return None
    matrices = dict[tuple[int, int], str]()
    for name in names:
        number = re.search(re.escape(patterns[name]).replace(r"\*", r"(\d+)") + "$", name)
        if number is None or number.lastindex != 1:
            return None
        matrices[int(number[1]), rule.source_patterns.index(patterns[name])] = name
    parts = len(rule.source_patterns)
    every = [divmod(matrix, parts) for matrix in range(len(names))]
    return tuple(matrices[key] for key in every) if sorted(matrices) == every and len(names) % parts == 0 else None


def _around(config: Mapping[str, Any], text: PreTrainedModel) -> list[conversion.WeightRenaming]:
    """Return renamings of tensors of a multimodal model to its part `text`. `config` names the model, if any."""
    parts = {type(module): f"{path}." if path else "" for path, module in text.named_modules()}
    wanted = [type(text), *([type(text.get_decoder())] if hasattr(text, "get_decoder") else [])]
    for name in config.get("architectures") or ():
        make: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if PreTrainedModel not in getattr(make, "__mro__", ()) or make is type(text):
            continue
        try:
            with building(), init_empty_weights(include_buffers=True):
                model = make(make.config_class.from_dict(without_code(config, name)))
        except Exception:  # any error of its constructor: this model says nothing about these tensors
            continue
        for kind in wanted:  # the text model with its head, or without
            paths = [path for path, module in model.named_modules() if path and type(module) is kind]
            if len(paths) == 1:
                # First the whole model's names of the text model's tensors, then the names that the text model gives.
                rules = [
                    rule for rule in get_model_conversion_mapping(model) if isinstance(rule, conversion.WeightRenaming)
                ]
                return [*rules, conversion.WeightRenaming(f"^{re.escape(paths[0])}\\.", parts[kind])]
    return []


def _table(module: nn.Module, leaf: str) -> dict[str, Any]:
    """Return the module's table, of parameters or of buffers, that holds `leaf`."""
    return module._parameters if leaf in module._parameters else module._buffers


def _check_kind(directory: str | None, name: str, info: TensorInfo, target: str, tensor: Tensor) -> None:
    """Raise CheckpointError for numbers of another kind than the model's."""

    def kind(dtype: torch.dtype) -> tuple[bool, ...]:
        floating = dtype.is_floating_point
        return floating, floating and dtype.itemsize == 1, dtype == torch.bool, dtype.is_complex

    if info.dtype not in reads.DTYPES or kind(reads.DTYPES[info.dtype]) != kind(tensor.dtype):
        raise CheckpointError(
            f"{directory} stores {name} as {info.dtype}, and the model's {target} is {str(tensor.dtype)[6:]}: codes "
            "of quantised weights have scales beside them, and a quantization_config in config.json"
        )


def _equal_bytes(info: TensorInfo, other: TensorInfo) -> bool:
    """Tell whether two stored tensors are the same to the bit."""
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return False
    with info.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(info.start)
        second.seek(other.start)
        sizes = (min(COMPARED_BYTES, info.end - begin) for begin in range(info.start, info.end, COMPARED_BYTES))
        return all(first.read(size) == second.read(size) for size in sizes)


def _some(names: Iterable[str]) -> str:
    """Return up to three of `names`, and the number of others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
