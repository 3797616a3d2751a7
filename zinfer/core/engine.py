"""Engines and their options, as data that needs no torch.

A case names an engine and the options in which it differs from the defaults, which `resolve_options` validates once.
Records may hold options of older versions: `read_options` and `plan_options`, which serve planning, leave them out;
`parse_options`, which serves an engine, refuses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, StrictBool, ValidationError
from pydantic.fields import FieldInfo

from zinfer.core.errors import ZinferError, did_you_mean
from zinfer.core.model import Weights
from zinfer.core.units import parse_share
from zinfer.core.value import Frozen

Offload = Literal["none", "cpu", "nvme"]
Option = Annotated[str, Field(max_length=4096)] | int | float | bool
Options = tuple[tuple[str, Option], ...]  # name and value, sorted by name

Codec = Literal["auto", "none", "lossless"]
KVOffload = Literal["none", "cpu", "auto"]
KVAttention = Literal["auto", "gpu", "cpu"]
KVCacheDtype = Literal["auto", "bf16", "int8"]
Experts = Literal["auto", "all", "on-demand", "cpu"]
# Prompt tokens in one forward pass. A pass streams every weight (2 bytes a parameter) and computes 2 FLOPs a parameter
# and token, so compute hides the link from FLOPs / bandwidth tokens on: 8,300 on an H100 behind PCIe 5, whatever the
# model. More tokens at once only take memory, of which the KV cache of a larger batch makes better use.
PREFILL_TOKENS = 8192
Count = Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
MAX_DRAFTS = 16  # drafts of a row in one pass


def _share(text: str) -> str:
    """Return `text` if it is ``auto``, a share or a size. Raises ValueError."""
    parse_share(text, 0)
    return text


def _percentage(text: str) -> str:
    """Return `text` if it is ``auto`` or a percentage. Raises ValueError."""
    if text != "auto" and not text.endswith("%"):
        raise ValueError(f"{text} is no percentage")
    return _share(text)


Share = Annotated[str, AfterValidator(_share)]
Percentage = Annotated[str, AfterValidator(_percentage)]

Model = TypeVar("Model", bound=Frozen)


class OptionError(ZinferError):
    """An unknown option, a wrong value, or values that contradict each other."""


CHUNK_BYTES = 128 << 20  # bytes of a layer that cross the link in one copy, unpacked
LARGE_LAYER = 3 << 30  # bytes of a layer, unpacked, beyond which it is cut into fewer chunks
MIN_CHUNKS = 8  # of a layer, where several GPUs would have it in larger ones
LINKED_BYTES = 256 << 20  # of experts that the link brings while the CPU computes others, at most
KEPT_BUFFERS = 3  # ring buffers of several GPUs for layers that stay: one unpacked, one gathered, one to spare


def chunk_factor(bits: float, layer_bytes: int = 0, gpus: int = 1) -> int:
    """Return how many times `CHUNK_BYTES` cross the link in one copy. Each costs launches."""
    alone = 4 if bits <= 5 else 2 if layer_bytes > LARGE_LAYER else 1
    # Several GPUs, which also launch a gather of a chunk's parts, take as many, or fewer for `MIN_CHUNKS` of a layer.
    return max(alone, min(gpus, layer_bytes // (MIN_CHUNKS * CHUNK_BYTES)))


class Transport(Frozen):
    """Transport of an engine: where weights are kept, how they move. Plans are made from this."""

    fetch_unit: Literal["two layers", "layer", "matrix", "chunks"] = "two layers"  # at a time; chunks: through a ring
    overlapped: bool = True  # copies run on a second stream
    blocks: bool = False  # prompts pass a layer in blocks while its weights are there, so that they cross the link once
    coded_at_rest: bool = False  # weights that cross the link coded lie coded in host memory and on the GPU, too
    from_codes: bool = False  # quantised layers that stay on the GPU are multiplied from their codes
    outside_passes: int = 0  # times a pass that weights outside the layers cross the link, where they are offloaded
    divided: bool = False  # of several GPUs each has a part of all weights, and gathers a copy of what it computes with
    graphs: bool = False  # decode steps in which no weight crosses the link are launched as CUDA graphs
    shares_memory: bool = False  # gives free GPU memory away, to rows, buffers and layers, and so leaves a margin
    placed_once: bool = False  # a load chooses the layers that stay, the first ones; host memory has the others alone
    leaves_host: bool = False  # layers that stay with every batch leave host memory
    fuses: frozenset[str] = frozenset()  # architectures whose attention it fuses, which transformers computes eagerly


_SEVERAL_GPUS = "weights come over several links with offload cpu"


class EngineOptions(Frozen):
    """Settings of an engine; fields are options and their help."""

    def transport(self) -> Transport:
        """Return how an engine with these settings moves weights."""
        return Transport()

    def conflict(self, _offload: Offload) -> str | None:
        """Return why these settings contradict each other or the offload."""
        return None


def _described(default: Option, text: str, **settings: Any) -> Any:
    return Field(default, description=text, **settings)


class StreamOptions(EngineOptions):
    """Options of `stream`."""

    weight_codec: Codec = _described("auto", "Code of weights on the link; auto: the faster.")
    packed: str = _described(
        "auto", "Folder of `zinfer pack`; auto: if there is one.", title="FOLDER", coerce_numbers_to_str=True
    )
    kv_offload: KVOffload = _described(
        "auto", "Sequences with their KV cache in host memory: none, all (cpu), or as many as is fastest."
    )
    kv_attention: KVAttention = _described(
        "auto", "The device that attends to a KV cache in host memory; auto: the faster."
    )
    kv_cache_dtype: KVCacheDtype = _described("auto", "Type of the KV cache; auto: that of the weights.")
    cuda_graphs: Literal["auto", "off"] = _described(
        "auto", "Decode steps as CUDA graphs; auto: where they can be recorded."
    )
    draft: str = _described(
        "none",
        "Tokens guessed ahead, verified by one pass: as in the text before (ngram), or by a small MODEL.",
        title="ngram|MODEL",
        min_length=1,
        coerce_numbers_to_str=True,
    )
    experts: Experts = _described(
        "auto",
        "Routed experts that cross the link in short passes; cpu: few, the CPU computes the rest; auto: fastest.",
    )
    link_experts: Percentage = _described(
        "auto",
        "Experts that the link brings while the CPU computes the others; auto: so that both take as long.",
        title="50%",
    )
    host_weights: Share = _described(
        "auto", "Weights in host memory with offload nvme: a size, or 40%; auto: all that fit.", title="SIZE"
    )
    experts_kernel: Literal["auto", "off"] = _described(
        "auto", "Routed experts in passes of few tokens by an own kernel; auto: where Triton runs."
    )
    gpus: Count = _described(1, "GPUs that share weights and rows, with offload cpu.")

    def transport(self) -> Transport:
        graphs = self.cuda_graphs == "auto"
        return Transport(
            fetch_unit="chunks", blocks=True, coded_at_rest=True, shares_memory=True, graphs=graphs,
            from_codes=True, leaves_host=True, fuses=frozenset({"bloom"}),
        )  # fmt: skip

    @property
    def draft_model(self) -> str | None:
        """Name of the model that drafts, if any."""
        return None if self.draft in ("none", "ngram") else self.draft

    def conflict(self, offload: Offload) -> str | None:
        on_demand, in_host = self.experts in ("on-demand", "cpu"), self.kv_offload == "cpu"
        experts = f"experts={self.experts}"
        clashes = (
            (self.host_weights != "auto" and offload != "nvme", f"host_weights={self.host_weights}",
             f"offload {offload}: it is the part of the weights that host memory keeps with offload nvme"),
            (on_demand and offload == "nvme", experts,
             "offload nvme: layers come from disk with all of their experts; choose from auto, all"),
            (self.gpus > 1 and offload != "cpu", f"gpus={self.gpus}", f"offload {offload}: {_SEVERAL_GPUS}"),
            (on_demand and self.gpus > 1, experts,
             f"gpus={self.gpus}: experts of a router's choice come to one GPU; choose from auto, all"),
            (on_demand and offload == "none", experts,
             "offload none: experts cross the link only with offload cpu; choose from auto, all"),
            (on_demand and self.packed != "auto", experts,
             f"packed={self.packed}: packed layers hold their experts in one piece; choose from auto, all"),
            (in_host and self.kv_cache_dtype == "int8" and self.kv_attention == "gpu", "kv_attention=gpu",
             f"kv_cache_dtype=int8 and kv_offload={self.kv_offload}: the CPU attends to 8 bits in host memory; choose "
             "from auto, cpu"),
            (offload == "none" and self.kv_attention == "gpu", "kv_attention=gpu",
             "offload none: it brings the KV cache along with streamed weights, so it needs offload cpu; choose from "
             "auto, cpu"),
        )  # fmt: skip
        return next((f"{option} does not go with {reason}" for clash, option, reason in clashes if clash), None)


class DeepSpeedOptions(EngineOptions):
    """Options of `deepspeed`."""

    pin_memory: StrictBool = _described(True, "Weights in page-locked host memory.")
    tuned: StrictBool = _described(True, "Settings tuned for decode; false: those of DeepSpeed's own example.")
    gpus: Count = _described(1, "GPUs: they share rows, and ZeRO divides every weight; with offload cpu.")

    def conflict(self, offload: Offload) -> str | None:
        if self.gpus == 1 or offload == "cpu":
            return None
        return f"gpus={self.gpus} does not go with offload {offload}: {_SEVERAL_GPUS}"

    def transport(self) -> Transport:
        # Embeddings that are offloaded, too, are fetched for both of their uses.
        return Transport(fetch_unit="layer", outside_passes=0 if self.tuned else 2, divided=True)


class AccelerateOptions(EngineOptions):
    """Options of `accelerate`."""

    pin_memory: StrictBool = _described(True, "Weights in page-locked host memory.")

    def transport(self) -> Transport:
        return Transport(fetch_unit="matrix", overlapped=False, placed_once=True)


class TensorRTOptions(EngineOptions):
    """Options of `tensorrt`."""

    plan: str = _described(
        "auto", "Plan of `zinfer pack`; auto: one that serves.", title="FILE", coerce_numbers_to_str=True
    )


class ServerOptions(EngineOptions):
    """Options of a server, which a preset (``engines/<name>.toml``) describes."""

    args: str = _described("", "More arguments of the server's command.", title="TEXT", coerce_numbers_to_str=True)
    file: str = _described("", "What the server loads instead of the folder, such as a GGUF.", title="FILE")
    url: str = _described("", "Address of a server that runs already: http://HOST:PORT.", title="URL")
    ready_s: Count = _described(900, "Seconds until it must be ready.")


class PlanOptions(Frozen):
    """All options that change a plan. Any engine may be planned with them, even if it cannot run so."""

    weight_codec: Codec = "none"
    gpus: Count = 1
    pin_memory: StrictBool = True
    kv_offload: KVOffload = "none"
    kv_attention: KVAttention = "gpu"
    kv_cache_dtype: Literal["auto", "bf16", "int8", "fp8"] = "auto"  # the last in old records alone
    experts: Experts = "all"
    link_experts: Percentage = Field("auto", title="50%")
    host_weights: Share = Field("auto", title="SIZE")

    @property
    def kv_quantized(self) -> bool:
        return self.kv_cache_dtype in ("int8", "fp8")

    @property
    def kv_place(self) -> KVOffload:
        """`kv_offload`; ``none`` if host memory cannot hold this type."""
        link_only = self.kv_cache_dtype == "int8" and self.kv_attention == "gpu"
        return "none" if self.kv_offload == "auto" and (self.kv_cache_dtype == "fp8" or link_only) else self.kv_offload


@dataclass(frozen=True)
class EngineKind:
    """An engine as the rest of zinfer knows it."""

    target: str  # module:Class
    offloads: frozenset[Offload]
    requires: tuple[str, ...]  # import names, checked before anything is loaded; "a|b" is either
    options: type[EngineOptions] = EngineOptions
    gpu_weights: bool = False  # part of the offloaded weights can stay on the GPU
    only_as_released: str | None = None  # reason why it takes no other format of weights; None if it does
    # Formats of its own, instead of ours: bytes over those of 16 bits, and bytes read and written to unpack a weight.
    native_formats: Mapping[Weights, float] = field(default_factory=dict)
    unpack_traffic: Mapping[Weights, int] = field(default_factory=dict)
    extra: str = "engines"  # pip extra that installs `requires`
    builds: Mapping[Offload, str] = field(default_factory=dict)  # system packages that an offload is built with

    def makes(self, weights: Weights) -> bool:
        """Tell whether it gives weights this format, other than as released."""
        return weights in self.native_formats if self.native_formats else self.only_as_released is None

    @property
    def defaults(self) -> dict[str, Option]:
        """Option name to default value."""
        return self.options().model_dump()


_GROUPS_OF_64 = 2 / 64  # a scale and a minimum of 16 bits for 64 weights
_TRANSFORMERS = ("torch", "transformers", "accelerate", "safetensors")

ENGINES: dict[str, EngineKind] = {
    "stream": EngineKind(
        "zinfer.engine.stream.engine:Stream",
        offloads=frozenset({"none", "cpu", "nvme"}),
        requires=(*_TRANSFORMERS, "greenlet"),
        options=StreamOptions,
        gpu_weights=True,
    ),
    "deepspeed": EngineKind(
        "zinfer.engine.deepspeed:DeepSpeed",
        offloads=frozenset({"none", "cpu", "nvme"}),
        requires=(*_TRANSFORMERS, "deepspeed"),
        options=DeepSpeedOptions,
        native_formats={"int4": _GROUPS_OF_64 + 4 / 16, "int8": _GROUPS_OF_64 + 8 / 16},
        # In torch's operations: zeros 2, a copy into them 3, scales 4, minima 4. Of int4, two times before: a half of
        # each byte is taken by itself (1) and written to every other byte (1.5).
        unpack_traffic={"int4": 18, "int8": 13},
        builds={"nvme": "libaio-dev"},
    ),
    "accelerate": EngineKind(
        "zinfer.engine.accelerate:Accelerate",
        offloads=frozenset({"none", "cpu", "nvme"}),
        requires=_TRANSFORMERS,
        options=AccelerateOptions,
        gpu_weights=True,
        only_as_released="its hooks move plain tensors",
    ),
    "tensorrt": EngineKind(
        "zinfer.engine.tensorrt:TensorRT",
        offloads=frozenset({"none", "cpu"}),
        requires=(*_TRANSFORMERS, "tensorrt|tensorrt_rtx"),
        options=TensorRTOptions,
        gpu_weights=True,
        only_as_released="its plan files hold weights in the type that they compute in, 16 bits",
        extra="engines,tensorrt",
    ),
}


def values(field_info: FieldInfo) -> list[str]:
    """Return the texts of the values that an option takes."""
    if field_info.title is not None:  # any text
        return [text for text in (str(field_info.default), *field_info.title.split("|")) if text]
    if field_info.annotation in (bool, int):
        return ["true", "false"] if field_info.annotation is bool else ["N"]
    return [str(value) for value in get_args(field_info.annotation)]  # of a Literal


def resolve_options(engine: str, given: Mapping[str, Option], planning: bool = False) -> Options:
    """Return the `given` options that differ from the defaults, sorted. Raises OptionError."""
    kind = _options(engine)
    fields = {**(PlanOptions.model_fields if planning else {}), **kind.model_fields}
    options: dict[str, Option] = {}
    for name, value in given.items():
        if name not in fields:
            names = f"its options: {', '.join(fields) or 'none'}"
            raise OptionError(f"engine {engine} has no option {name[:60]!r}{did_you_mean(name, fields)}; {names}")
        model = kind if name in kind.model_fields else PlanOptions
        try:
            options[name] = getattr(model.model_validate({name: value}), name)
        except ValidationError:
            texts = ["a whole number of at least 1" if text == "N" else text for text in values(fields[name])]
            choices = f"choose from {', '.join(texts)}" if len(texts) > 1 else f"write {texts[0]}"
            raise OptionError(f"{name}={option_text(value)}: {choices}") from None
    return without_defaults(engine, tuple(options.items()))


def has_option(engine: str, name: str, planning: bool = False) -> bool:
    """Tell whether an engine has an option; `planning` as in `resolve_options`."""
    return name in _options(engine).model_fields or (planning and name in PlanOptions.model_fields)


def option_text(value: object) -> str:
    """Return `value` as it is typed, at most 60 characters of it."""
    return str(value).lower() if isinstance(value, bool) else str(value)[:60]


def without_defaults(engine: str, options: Options) -> Options:
    """Return `options` that differ from the defaults, sorted by name."""
    default = {name: (type(field.default), field.default) for name, field in _options(engine).model_fields.items()}
    return tuple(
        sorted((name, value) for name, value in dict(options).items() if default.get(name) != (type(value), value))
    )


def parse_options(engine: str, options: Options, offload: Offload) -> Any:
    """Return the typed options of an engine that is about to run. Raises OptionError, also for a conflict."""
    if is_server(engine):
        return read_options(engine, options)
    settings = _options(engine).model_validate(dict(resolve_options(engine, dict(options))))
    if (why_not := settings.conflict(offload)) is not None:
        raise OptionError(why_not)
    return settings


@cache
def read_options(engine: str, options: Options) -> EngineOptions:
    """Return the typed options of a recorded case, without unknown ones."""
    return _lenient(_options(engine), dict(options))


@cache
def plan_options(engine: str, options: Options) -> PlanOptions:
    """Return the options of a case that change its plan."""
    fields = _options(engine).model_fields
    defaults = {name: field.default for name, field in fields.items() if name in PlanOptions.model_fields}
    return _lenient(PlanOptions, defaults | dict(options))


def draft_of(options: Options) -> str:
    """Return the option `draft` of a case."""
    return str(dict(options).get("draft", "none"))


def draft_model(engine: str, options: Options) -> str | None:
    """Return the name of a case's drafting model, if any."""
    return getattr(read_options(engine, options), "draft_model", None)


def conflict(
    engine: str, options: Options, offload: Offload, weights: Weights = "as-released", gpu_weights: str | None = None
) -> str | None:
    """Return why options, offload, format and part of the weights contradict."""
    kind = ENGINES.get(engine)
    if weights != "as-released" and kind is None:
        return f"--weights {weights} is for zinfer's engines: {engine} reads checkpoints as they are"
    if weights != "as-released" and kind is not None and not kind.makes(weights):
        able = ", ".join(name for name, other in ENGINES.items() if other.makes(weights))
        takes = f"has no packed weights ({kind.only_as_released})"
        if kind.native_formats:
            takes = f"takes {', '.join(kind.native_formats)}"
        return f"--weights {weights} is for {able}: engine {engine} {takes}"
    settings = read_options(engine, options)
    if gpu_weights == "auto" and offload != "none" and settings.transport().placed_once:
        fixed = f"engine {engine} places its weights once, when it loads them: give a share (25%) or a size (40GiB)"
        return f"--gpu-weights auto is decided for each batch, and {fixed}"
    return settings.conflict(offload)


def is_server(engine: str) -> bool:
    """Tell whether an engine is a server, which a preset describes."""
    return engine not in ENGINES


def _options(engine: str) -> type[EngineOptions]:
    return ServerOptions if is_server(engine) else ENGINES[engine].options


def _lenient(model: type[Model], given: dict[str, Any]) -> Model:
    fields = {name: value for name, value in given.items() if name in model.model_fields}
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        wrong = {str(fault["loc"][0]) for fault in error.errors()}
        return model.model_validate({name: value for name, value in fields.items() if name not in wrong})
