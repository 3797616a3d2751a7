"""Bytes of a placement: what each tier stores, what crosses the link in a pass, and what waits in buffers.

Sources: offload and residency as in FlexGen (arXiv:2303.06865), section 4.3, without its CPU-compute terms.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log
from typing import Literal, NamedTuple

from pydantic import Field

from zinfer.core.case import Workload
from zinfer.core.engine import CHUNK_BYTES, PREFILL_TOKENS, chunk_factor
from zinfer.core.machine import Machine
from zinfer.core.model import ModelSpec
from zinfer.core.value import Frozen

EAGER = frozenset({"bloom"})  # ALiBi: transformers has no fused attention kernel for it


@dataclass(frozen=True)
class Allowances:
    """Tuned numbers of memory besides weights and KV cache, and of passes."""

    context_bytes: int = 600 << 20  # CUDA context, cuBLAS workspaces and kernels, as the driver reports them
    process_bytes: int = 2 << 30  # a Python process with torch and CUDA loaded
    # Host memory of coded weights is touched ahead while plenty is free: `zinfer.engine.pinned.AHEAD`, and a factor.
    ahead_bytes: int = 8 << 30
    plenty: int = 4
    draft_moves: float = 1.25  # room for rows of a draft's KV cache that move between micro-batches
    draft_positions: int = 256  # room for positions that were rolled back and are not compacted yet
    # Passes of a prefill in blocks have so many hidden values (2,048 tokens of BLOOM-176B), and tokens, at least.
    block_values: int = 2048 * 14336
    block_tokens: int = 2048
    whole_share: float = 0.9  # a pass that touches this share of evenly chosen experts brings all, without waiting


ALLOWANCES = Allowances()


class Bytes(Frozen):
    """Bytes on one tier, by their use."""

    weights: int = 0
    kv_cache: int = 0
    buffers: int = 0  # layer buffers that streamed weights, or a streamed KV cache, arrive in
    activations: int = 0
    overhead: int = 0  # contexts, the process itself

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.buffers + self.activations + self.overhead


class Tiers(NamedTuple):
    """Bytes on GPU (of several the fullest), host and NVMe."""

    gpu: Bytes
    host: Bytes
    nvme: Bytes


class Placement(Frozen):
    """Place of weights, KV cache and buffers, and how they move: all that an engine does, and nothing else."""

    tier: Literal["gpu", "host", "nvme"] = "gpu"  # tier of the weights that are not resident
    gpus: int = Field(default=1, ge=1)  # GPUs, each with its own link, and with its part of resident layers and of rows
    resident_bytes: int = 0  # bytes of layers that stay, on all GPUs together, besides the weights outside the layers
    resident_layers: tuple[int, ...] = ()  # numbers of whole layers that stay; spread so that the link never idles
    unpacked_layers: tuple[int, ...] = ()  # those of them that are kept unpacked, though their weights stream coded
    moved: bool = False  # layers that stay lie nowhere else: not in host memory, nor on disk
    held_bytes: int = 0  # bytes of layers that host memory keeps, if the weights are on disk
    host_layers: tuple[int, ...] = ()  # numbers of these layers, spread among layers read from disk
    disk_ring_bytes: int = 0  # host memory that layers from disk arrive in, as they lie there; 0: two layers decoded
    codec: Literal["none", "lossless"] = "none"  # code of streamed weights on the wire
    kept_ratio: float = 1.0  # bytes of a streamed weight at rest over those of the model's dtype: 1 unless coded
    form_ratio: float = 1.0  # bytes of resident codes as kernels read them over those at rest
    wire_ratio: float = 1.0  # bytes that cross the link over those of the model's dtype: lossless 0.67, int4 0.26
    expert_ratio: float = 1.0  # bytes of an expert that the CPU reads over those of the model's dtype
    # Numbers of layers whose routed experts stay, too, if the CPU computes those of the others; see `cpu_tokens`.
    expert_layers: tuple[int, ...] = ()
    layer_buffers: float = 2.0  # layers' worth of GPU memory that streamed weights pass through
    kv_host_share: float = 0.0  # share of the sequences with their KV cache in host memory, read at every step
    kv_on_cpu: bool = False  # the CPU attends to that cache, so that it never crosses the link
    kv_cpu_share: float = Field(default=1.0, gt=0, le=1)  # share of the CPU's cores, and of their rate, that attends
    kv_buffers: int = 0  # ring buffers that a KV cache on the link adds to; 0: it takes two whole layers' worth
    ring_depth: int = 0  # buffers between link and layer buffer; 0 without a ring
    layer_chunks: int = 1  # chunks that a layer crosses the link in, besides experts on demand
    experts: Literal["all", "on-demand"] = "all"  # routed experts that cross the link in a step
    whole_tokens: int = 0  # tokens in a pass from which on it brings all experts, since it needs nearly all
    layer_experts: int = 0  # routed experts of a layer that come on demand; 0 if all come with their layer
    expert_buffers: int = 0  # buffers between link and layer buffer for single experts
    cached_experts: int = 0  # buffers in addition, for experts that stay
    linked_share: float = 0.0  # share of these passes' experts that the link brings beside the CPU
    cpu_tokens: int = 0  # tokens of a pass up to which the CPU computes experts on demand, so that none comes
    kv_ratio: float = 1.0  # bytes of the KV cache over those in the model's type
    resident_others: bool = True  # embeddings, head and final norm stay on the GPU
    # Each of several GPUs keeps its part of them only, and gathers them when it needs them; a part of a layer is copied
    # when the layer before is complete.
    divided: bool = False
    also_streamed: int = 0  # bytes that a pass fetches in addition to the layers
    overlapped: bool = True  # copies run during compute
    eager: bool = False  # attention keeps all scores in memory, and activations are computed kernel by kernel
    blocks: bool = False  # prefill passes go through the layers together, and the weights cross once for all
    pass_tokens: int = PREFILL_TOKENS  # maximum prompt tokens in one forward pass of several sequences
    dequantised_bytes: int = 0  # GPU memory that a pass reads and writes where torch's operations unpack weights
    from_codes: bool = False  # quantised layers that stay are multiplied from their codes in passes of few tokens
    graphs: bool = False  # decode steps are launched as CUDA graphs: a layer's launch costs nothing
    pinned: bool = True  # weights in host memory are page-locked

    @property
    def holds_layer(self) -> bool:
        """True if the ring and its expert buffers hold a whole layer."""
        return self.ring_depth >= self.layer_chunks and self.expert_buffers >= self.layer_experts

    def rows(self, batch_size: int) -> int:
        """Return the rows of a batch on the GPU with most."""
        return -(-batch_size // self.gpus)

    def prefill_rows(self, batch_size: int, input_len: int) -> int:
        """Return the rows of one GPU that a forward pass prefills."""
        return min(batch_size, max(1, self.pass_tokens // input_len))

    def host_rows(self, batch_size: int) -> int:
        """Return the last rows, whose KV cache is in host memory."""
        return round(self.kv_host_share * batch_size)

    def chooses(self, tokens: int | None) -> bool:
        """Tell whether a pass of `tokens` tokens (None: a long one) brings only the experts that its routers choose."""
        few = self.experts == "on-demand" and tokens is not None and tokens < self.whole_tokens
        return few and not self.computes(tokens)

    def computes(self, tokens: int | None) -> bool:
        """Tell whether the CPU computes the experts of such a pass."""
        return tokens is not None and tokens <= self.cpu_tokens

    def from_disk(self, wire: int) -> int:
        """Return the part of a pass's `wire` bytes that comes from disk."""
        return max(0, wire - round(self.held_bytes * self.wire_ratio)) if self.tier == "nvme" else 0


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model in a placement. A pass has `tokens` tokens; None stands for a long one, such as a prefill."""

    placement: Placement
    model: ModelSpec

    @property
    def resident(self) -> int:
        """Bytes of layers that stay on the GPUs though the others stream."""
        return min(self.placement.resident_bytes, self.model.streamed_bytes)

    @property
    def stays(self) -> int:
        """Bytes of all layers on the GPUs."""
        return self.model.streamed_bytes if self.placement.tier == "gpu" else self.resident

    @cached_property
    def kept_unpacked(self) -> int:
        """Bytes of resident layers that no pass has to unpack."""
        layers = self.model.layers
        return sum(layers[index].parameters for index in self.placement.unpacked_layers) * self.model.dtype_bytes

    @property
    def cached_share(self) -> float:
        """Share of the routed experts that the GPU keeps."""
        missing = min(self.model.streamed_bytes - self.resident, self.model.routed_bytes)
        return 1 - missing / max(1, self.model.routed_bytes)

    def wire(self, tokens: int | None = None) -> int:
        """Return the weight bytes that a pass moves over the links: of experts on demand, those not cached."""
        if self.placement.tier == "gpu":
            return 0
        streamed = self.model.streamed_bytes - self.resident
        computes, chooses = self.placement.computes(tokens), self.placement.chooses(tokens)
        if computes or chooses:
            streamed -= min(streamed, self.model.routed_bytes)
        if tokens is not None and chooses:
            missed = 1 - self.model.hits(self.cached_share, tokens)
            streamed += round(self.model.routed_bytes * self.model.touched_share(tokens) * missed)
        return round((streamed + self.placement.also_streamed) * self.placement.wire_ratio)

    @cached_property
    def resident_experts(self) -> int:
        """Bytes of the experts of `Placement.expert_layers`."""
        layers = self.model.layers
        return sum(layers[index].expert_parameters for index in self.placement.expert_layers) * self.model.dtype_bytes

    def touched(self, tokens: int | None) -> float:
        """Return the bytes of experts, unpacked, that the CPU computes with; 0 if the GPU does."""
        away = self.model.routed_bytes - self.resident_experts
        return away * self.model.touched_share(tokens or 1) if self.placement.computes(tokens) else 0.0

    @property
    def reads_codes(self) -> bool:
        """True if passes multiply resident quantised layers from codes."""
        return self.placement.from_codes and self.placement.experts != "on-demand"

    @property
    def code_layers(self) -> int:
        """Number of layers whose experts are multiplied from codes."""
        layers = self.model.num_layers if self.reads_codes else len(self.placement.expert_layers)
        return layers if self.model.num_experts and self.placement.from_codes else 0

    @property
    def at_rest(self) -> tuple[float, float]:
        """Bytes at rest over those of the model's dtype: of routed experts, and of all else in layers."""
        placement, model = self.placement, self.model
        if placement.experts == "all" or not placement.cpu_tokens:
            return placement.kept_ratio, placement.kept_ratio
        others, ratio = model.streamed_bytes - model.routed_bytes, placement.expert_ratio  # experts lie as released
        rest = (placement.kept_ratio * model.streamed_bytes - ratio * model.routed_bytes) / max(1, others)
        return ratio, min(1.0, max(0.0, rest))

    def stored(self, weights: int, experts: int) -> int:
        """Return the bytes at rest of `weights`. Among them are `experts` bytes of experts."""
        routed, others = self.at_rest
        return round(experts * routed + (weights - experts) * others)

    def unpacked(self, tokens: int | None = None) -> int:
        """Return the bytes, unpacked, that a pass writes into the layer buffer: all but layers computed in place."""
        placement, model = self.placement, self.model
        if not placement.ring_depth:
            return 0
        layers, experts = model.streamed_bytes, 0
        if placement.experts == "on-demand":
            touched = model.touched_share(tokens) if tokens is not None and placement.chooses(tokens) else 1.0
            touched *= not placement.computes(tokens)
            layers -= model.routed_bytes
            experts = round((model.routed_bytes - self.resident_experts) * touched)
        coded, others = placement.wire_ratio < 1 and not self.reads_codes, self.stays - self.resident_experts
        in_place = self.kept_unpacked if coded else 0 if placement.gpus > 1 else min(others, layers)
        return layers - in_place + experts

    @property
    def chunk(self) -> int:
        """Bytes of a chunk, which one copy brings into a ring buffer."""
        model = self.model
        size = model.dense_layer_bytes if self.placement.experts == "on-demand" else model.layer_bytes
        return round(min(largest_chunk(model, size, self.placement.gpus), size) * self.placement.wire_ratio)

    def ring_buffer(self, rows: int, input_len: int, length: int) -> int:
        """Return the bytes of a ring buffer, for chunks and KV cache."""
        if not self.placement.kv_host_share or self.placement.kv_on_cpu:
            return self.chunk
        kv = self.model.largest_kv_layer_bytes(self.placement.prefill_rows(rows, input_len), length)
        return max(self.chunk, round(kv * self.placement.kv_ratio))

    def host_kv(self, batch_size: int, length: int) -> int:
        """Return the bytes of KV cache in host memory: the keys of indexers stay on the device."""
        kv = self.model.kv_bytes(batch_size, length) - self.model.index_bytes(batch_size, length)
        return round(round(kv * self.placement.kv_ratio) * self.placement.kv_host_share)

    def activations(self, model: ModelSpec, rows: int, length: int) -> int:
        """Return the peak bytes of one layer's prefill of `rows` prompts.

        These are hidden states (of each block), the widest intermediate twice (and a gate), for each expert of a token,
        and eager attention scores: three times in the weights' type, softmax in float32.
        """
        prompts = self.placement.prefill_rows(rows, length)
        tokens = at_once = prompts * length
        ffn = model.ffn_matrices * model.ffn_size
        if model.num_experts:  # grouped: a row for each expert of a token, and a gate next to its operand
            ffn = model.experts_per_token * (ffn + model.ffn_size + model.hidden_size)
        elif self.placement.blocks:
            at_once = min(tokens, self.placement.pass_tokens)
        attention = 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        widest = max(at_once * ffn, tokens * attention)
        flat = (tokens * 4 * model.hidden_size + widest) * model.dtype_bytes
        scores = prompts * model.num_heads * length**2 * (model.dtype_bytes * 3 + 4) if self.placement.eager else 0
        waiting = (rows - prompts) * length * model.hidden_size * model.dtype_bytes if self.placement.blocks else 0
        return flat + scores + waiting + rows * model.vocab_size * (model.dtype_bytes + 4)

    def tiers(
        self, workload: Workload, machine: Machine | None = None, working_factor: float = 1.0, reads: bool = False
    ) -> Tiers:
        """Count the peak bytes on GPU, host and NVMe; by default of an endless machine.

        Without a GPU the host carries what counts as `gpu`. Buffers and activations are taken times `working_factor`. A
        load that `reads` a checkpoint has two buffers for it.
        """
        placement, model, host_bytes = self.placement, self.model, None if machine is None else machine.host_bytes
        batch_size, input_len, length = workload.batch_size, workload.input_len, workload.total_len
        others, resident = model.other_bytes, self.stays
        offloaded = model.streamed_bytes if placement.tier != "gpu" else 0
        coded = placement.kept_ratio < 1 or offloaded
        streams = offloaded > resident or (coded and placement.ring_depth)  # the ring is there even if all stay
        buffers = round(placement.layer_buffers * model.layer_bytes) if streams else 0
        host_kv, rows = self.host_kv(batch_size, length), placement.rows(batch_size)
        if host_kv and not placement.kv_on_cpu and placement.kv_buffers:
            buffers += placement.kv_buffers * (self.ring_buffer(rows, input_len, length) - self.chunk)
        elif host_kv and not placement.kv_on_cpu:
            kv = model.largest_kv_layer_bytes(rows, length)
            buffers += 2 * round(kv * placement.kv_ratio * placement.kv_host_share)
        working = self.activations(model, rows, input_len)
        if model.draft is not None:  # all of it is on the GPU, or on the first one
            others += model.draft.weight_bytes
            working += self.activations(model.draft, batch_size, input_len)
        extra = round((working_factor - 1) * (buffers + working))
        resident_others = others if placement.resident_others else 0
        if placement.divided:  # a part, and a copy of the whole while it is used
            buffers, resident_others = buffers + resident_others, resident_others // placement.gpus
        kv = round(model.kv_bytes(rows, length) * placement.kv_ratio) - self.host_kv(rows, length)
        unpacked, experts = self.kept_unpacked, self.resident_experts
        if placement.experts != "all" and not placement.expert_layers:  # they come after all else in layers
            experts = max(0, self.resident - (model.streamed_bytes - model.routed_bytes))
        kept = round(self.stored(resident - unpacked, experts) * placement.form_ratio) + unpacked
        gpu = Bytes(
            weights=kept // placement.gpus + resident_others,
            kv_cache=kv + draft_kv_bytes(model, batch_size, length),
            buffers=buffers,
            activations=working + extra,
            overhead=ALLOWANCES.context_bytes if machine is None or machine.gpu_count else 0,
        )
        outside = offloaded - (resident if placement.moved else 0)
        on_host = {"host": outside, "nvme": min(placement.held_bytes, outside)}.get(placement.tier, 0)
        on_disk = placement.tier == "nvme"
        stored_on_host = self.stored(on_host, min(on_host, model.routed_bytes - (experts if placement.moved else 0)))
        # What a load touches ahead, and reads with, is free again when the KV cache comes.
        layer = round(model.layer_bytes * model.stored_ratio)
        reads = reads and (host_bytes is None or ALLOWANCES.plenty * max(layer, others) <= host_bytes)  # else mapped
        reading = layer + max(layer, others) if reads else 0  # the weights outside the layers are read first
        plenty = host_bytes is None or host_bytes - stored_on_host >= ALLOWANCES.plenty * ALLOWANCES.ahead_bytes
        ahead = plenty and placement.tier == "host" and placement.ring_depth
        touched = min(on_host - stored_on_host, ALLOWANCES.ahead_bytes // 2) if ahead else 0
        loading = max(0, touched + reading - host_kv)
        host = Bytes(
            weights=stored_on_host + (0 if placement.resident_others else others),
            kv_cache=host_kv,
            buffers=(placement.disk_ring_bytes or 2 * model.layer_bytes if on_disk else 0) + loading,
            overhead=ALLOWANCES.process_bytes * placement.gpus,
        )
        at_rest = placement.kept_ratio if placement.disk_ring_bytes else 1.0
        return Tiers(gpu, host, Bytes(weights=round(outside * at_rest) if on_disk else 0))


def draft_kv_bytes(model: ModelSpec, batch_size: int, length: int) -> int:
    """Return the KV cache bytes of the draft model, gaps included; 0 without one."""
    positions = round(ALLOWANCES.draft_moves * length) + ALLOWANCES.draft_positions
    return 0 if model.draft is None else model.draft.kv_bytes(batch_size, positions)


def largest_chunk(model: ModelSpec, layer_bytes: int, gpus: int) -> int:
    """Return the maximum bytes, unpacked, of one copy by all GPUs together."""
    return CHUNK_BYTES * chunk_factor(8 * model.dtype_bytes * model.stored_ratio, layer_bytes, gpus)


def whole_tokens(model: ModelSpec, share: float = ALLOWANCES.whole_share) -> int:
    """Return the minimum tokens that touch a share of the experts."""
    missed = 1 - model.touched_share(1)
    return 1 if missed <= 0 else max(1, ceil(log(1 - share) / log(missed)))


def block_tokens(model: ModelSpec) -> int:
    """Return the prompt tokens of a forward pass in blocks."""
    return min(PREFILL_TOKENS, max(ALLOWANCES.block_tokens, ALLOWANCES.block_values // model.hidden_size))
