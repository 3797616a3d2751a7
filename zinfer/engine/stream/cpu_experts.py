"""CPU experts: of the experts that a router chose and that the link would have to bring, the CPU computes a share where
they lie, in host memory.

The link brings an expert at its own rate, and the CPU reads one at that of host memory, both at once. So of the experts
that are neither on the device nor on their way, the CPU gets as many as make the longer of two times the shortest: the
link's for all that it still has to bring for a layer, and its own. The rates are those of the experts themselves:
measured on a few of them at load, and on all of them in each pass. What the CPU does costs the link some of its rate,
since both read the same memory: hence the link has two rates, alone and beside the CPU.

The device computes its experts with the model's own function, which sees no others: the places of the CPU's experts
among those chosen are given to an expert that is there, with a weight of 0. The CPU computes its own after the device
was given its work, with torch's products of few rows on the stored weights, and adds the token's weighted sum. It does
so on the thread that leads the pass, as the CPU's attention does, so the two never run at once and share its threads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from zinfer.core.case import Option
from zinfer.core.errors import one_line
from zinfer.engine.stream.expert_images import Experts, Key, LayerImages, stored_expert
from zinfer.engine.stream.few_experts import activated, matrix_names, unknown
from zinfer.engine.stream.trace import clock
from zinfer.engine.transfer import fetched, landed
from zinfer.engine.triton_check import trouble

FADING = 0.9  # weight of what was measured before the latest experts
GAIN = 0.95  # with `auto` the CPU computes where that takes at most this share of the link's time alone
TRIAL = 512  # calls of layers after which one is computed in the other way, so that both keep being measured

Matrix = tuple[Tensor, Tensor | None]  # with its bias
Computed = Callable[..., Tensor]


def _unknown(experts: Experts) -> str | None:
    """Return the reason why it is not known how a module of experts computes; None if it is."""
    module = experts.module
    if (why_not := unknown(module)) is not None:
        return why_not
    biases = [f"{name}_bias" for name in matrix_names(module) if getattr(module, "has_bias", False)]
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    if names != {*matrix_names(module), *biases} or len(names) != len(experts.weights):
        return f"{type(module).__name__} has other weights than two matrices and their biases"
    return None


class Rate:
    """Running average of bytes a second."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        self._bytes, self._seconds = FADING * self._bytes + size, FADING * self._seconds + seconds

    @property
    def bandwidth(self) -> float:
        """Bytes a second; 0 if nothing was measured."""
        return self._bytes / self._seconds if self._seconds else 0.0


@dataclass(frozen=True)
class Rates:
    """Rates at which experts cross the link and at which the CPU computes them, as they were measured."""

    alone: Rate = field(default_factory=Rate)  # of the link while the CPU computes no expert
    beside: Rate = field(default_factory=Rate)  # of the link while it does
    cpu: Rate = field(default_factory=Rate)

    @property
    def known(self) -> bool:
        """True once link and CPU were measured; without a GPU no link is."""
        return bool(self.alone.bandwidth and self.cpu.bandwidth)

    def seconds(self, count: int, asked: int, size: int, besides: int) -> float:
        """Return the time for `asked` experts of `size` bytes, `count` of them on the CPU and the others over the link,
        which brings `besides` other bytes for a layer."""
        link = (count and self.beside.bandwidth) or self.alone.bandwidth
        crossing = besides + (asked - count) * size
        return max(crossing / link if crossing else 0.0, count * size / self.cpu.bandwidth if count else 0.0)

    def settings(self) -> dict[str, Option]:
        """Return the rates in bytes a second, by the names that they have in a record."""
        names = {"expert_link_bandwidth": self.alone, "expert_link_bandwidth_beside_cpu": self.beside}
        return {name: round(rate.bandwidth) for name, rate in (names | {"expert_cpu_bandwidth": self.cpu}).items()}

    def best(self, asked: int, size: int, besides: int) -> int:
        """Return how many of `asked` experts the CPU computes in the shortest time: the least such number, all if a
        rate is not known."""
        if not self.known:
            return asked
        return min(range(asked + 1), key=lambda count: self.seconds(count, asked, size, besides))


class CpuExperts:
    """The CPU's share of the experts of a model, whose `images`, by layer, are in `source` (uint8, host memory). Unless
    `always`, the CPU computes only where the rates promise a gain."""

    def __init__(
        self,
        source: Tensor,
        images: Mapping[int, LayerImages],
        experts: Mapping[int, Experts],
        device: torch.device,
        always: bool,
    ) -> None:
        self.rates = Rates()
        self._source, self._images, self._experts = source, images, experts
        self._device, self._always = device, always
        self._stored: dict[Key, Sequence[Matrix]] = {}  # of experts that were computed
        self._calls = 0  # since the last trial
        self._uses = False

    def cannot(self) -> str | None:
        """Return the reason why the CPU cannot compute the experts; None if it can."""
        if any(one.coded for one in self._images.values()):
            return "they are coded in host memory, which weight_codec=none avoids"
        if self._device.type == "cuda" and (why := trouble()) is not None:
            return f"without a Triton kernel its results would wait behind the weights: {why}"
        if (why := next(filter(None, map(_unknown, self._experts.values())), None)) is not None:
            return why
        try:
            self._trial((next(iter(self._images)), 0))
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"their computation fails on the CPU: {one_line(error)[:120]}"
        return None

    @property
    def status(self) -> str:
        """State of the CPU's share: ``on``, or why the CPU computes no expert at the moment."""
        return "on" if self._uses or self._always else "waits: the link alone is as fast"

    def offer(self, layer: int, *given: object) -> "Call | None":
        """Return a call of a layer's experts, `given` hidden states ``[T, H]``, the numbers of the chosen experts and
        their weights, ``[T, K]`` each; None if the CPU does not compute calls of this kind."""
        if len(given) != 3:
            return None
        states, chosen, weights = given
        if not (isinstance(states, Tensor) and isinstance(chosen, Tensor) and isinstance(weights, Tensor)):
            return None
        alike = states.dim() == chosen.dim() == 2 and chosen.shape == weights.shape and len(chosen) == len(states)
        stored = next(iter(self._images[layer].blocks.values())).dtype
        return Call(self, layer, states, chosen, weights) if alike and states.dtype == stored else None

    def share(self, asked: int, size: int, besides: int, most: int) -> int:
        """Return how many of `asked` experts of `size` bytes the CPU computes now, `most` at most; the link brings the
        others, and `besides` bytes for a layer."""
        found = self.rates.best(asked, size, besides)
        if found and self.rates.known and not self._always:
            alone, shared = (self.rates.seconds(count, asked, size, besides) for count in (0, found))
            found = found if shared <= GAIN * alone else 0
        self._uses = found > 0
        self._calls += 1
        if self._calls >= TRIAL:
            self._calls = 0
            found = 0 if found else 1
        return min(found, most)

    def product(self, key: Key, states: Tensor) -> Tensor:
        """Return what an expert makes of `states`, ``[n, H]``, on the CPU."""
        module = self._experts[key[0]].module
        (up, up_bias), (down, down_bias) = self._weights(key)
        transposed = bool(module.is_transposed)
        inner = activated(module, _multiplied(states, up, up_bias, transposed))
        return _multiplied(inner, down, down_bias, transposed)

    def measure(self, keys: Sequence[Key]) -> None:
        """Measure the CPU's rate with the experts `keys` and one token."""
        self._trial(keys[0])  # what is made at the first call is not measured
        begin = clock()
        for key in keys:
            self._trial(key)
        self.rates.cpu.add(sum(self.size(key) for key in keys), clock() - begin)

    def size(self, key: Key) -> int:
        """Return the bytes of an expert."""
        return self._images[key[0]].experts[key[1]].size

    def count(self, layer: int) -> int:
        """Return the number of experts of a layer."""
        return len(self._images[layer].experts)

    def close(self) -> None:
        self._source = torch.empty(0, dtype=torch.uint8)
        self._stored, self._experts, self._images = {}, {}, {}

    def _weights(self, key: Key) -> Sequence[Matrix]:
        """Return an expert's two matrices, each with its bias, as they lie in host memory."""
        found = self._stored.get(key)
        if found is None:
            stored = stored_expert(self._images[key[0]], key[1], self._source)
            own = {name.rpartition(".")[2]: tensor for name, tensor in stored.items()}
            names = matrix_names(self._experts[key[0]].module)
            found = self._stored[key] = [(own[name], own.get(f"{name}_bias")) for name in names]
        return found

    def _trial(self, key: Key) -> None:
        """Compute an expert for a token of zeros."""
        matrix, _ = self._weights(key)[0]
        columns = matrix.shape[0 if self._experts[key[0]].module.is_transposed else 1]
        self.product(key, torch.zeros((1, columns), dtype=matrix.dtype))


class Call:
    """A call of the experts of a layer, of which the CPU computes some: those that it takes."""

    def __init__(self, cpu: CpuExperts, layer: int, states: Tensor, chosen: Tensor, weights: Tensor) -> None:
        self.taken: Sequence[int] = ()  # numbers of the experts that the CPU computes
        self._cpu, self._layer = cpu, layer
        self._states, self._chosen, self._weights = states, chosen, weights
        self._table = self._own = torch.empty(0)  # on the host: the chosen experts, and which of them the CPU computes
        self._on_host: Sequence[Tensor] = ()  # states and weights
        self._begin = 0.0  # time at which the choice was known: what the device is given first delays the CPU

    def take(self, numbers: Sequence[int], table: Tensor) -> None:
        """Compute the experts `numbers` on the CPU; `table` are the chosen ones on the host, ``[T, K]``."""
        self.taken, self._table, self._begin = numbers, table, clock()
        self._own = torch.isin(table, torch.tensor(numbers, dtype=table.dtype))

    def fetch(self) -> None:
        """Copy states and weights to the host. The device has been given nothing behind the router yet, so the wait is
        that for the copies."""
        self._on_host = fetched(self._states, self._weights)

    def on_device(self, computed: Computed) -> Tensor | None:
        """Have the device compute the experts that the CPU does not, by `computed`, the layer's function; None if there
        are none."""
        there = ~self._own & (self._table >= 0) & (self._table < self._cpu.count(self._layer))
        if not there.any():
            return None
        # The place of an expert of the CPU gets one that the token chose besides, or any with states of zero, if the
        # token has none: what is computed is a number, so a weight of 0 makes it nothing.
        first = torch.where(there.any(-1), there.int().argmax(-1), -1)
        some = self._table[there][0]
        stand_in = torch.where(first >= 0, self._table.gather(1, first.clamp(min=0)[:, None])[:, 0], some)
        table = landed(torch.where(self._own, stand_in[:, None], self._table), self._chosen.device)
        moved = table != self._chosen
        states = self._states
        if bool((first < 0).any()):
            states = states.masked_fill(moved.all(-1, keepdim=True), 0)
        return computed(states, table, self._weights.masked_fill(moved, 0))

    def on_cpu(self) -> Tensor:
        """Return the weighted sums of the CPU's experts, float32 ``[T, H]``, on the device."""
        states, weights = self._on_host
        found = torch.zeros(states.shape, dtype=torch.float32)
        for number in self.taken:
            rows, places = (self._table == number).nonzero(as_tuple=True)
            made = self._cpu.product((self._layer, number), states[rows])
            found.index_add_(0, rows, made.float() * weights[rows, places, None].float())
        size = sum(self._cpu.size((self._layer, number)) for number in self.taken)
        self._cpu.rates.cpu.add(size, clock() - self._begin)
        return landed(found, self._states.device)

    def together(self, on_device: Tensor | None, on_cpu: Tensor) -> Tensor:
        """Return the sums of all chosen experts, ``[T, H]``."""
        total = on_cpu if on_device is None else on_device.float() + on_cpu
        return total.to(self._states.dtype)


def _multiplied(states: Tensor, matrix: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the products of `states` and a matrix, ``[rows, columns]`` or transposed, rounded where `transformers`
    rounds: before the bias is added."""
    if transposed:
        found = states @ matrix
    elif len(states) == 1 and matrix.dtype == torch.bfloat16:  # faster than a product with a matrix of one row
        found = torch.mv(matrix, states[0])[None]
    else:
        found = linear(states, matrix)
    return found if bias is None else found.add_(bias)
