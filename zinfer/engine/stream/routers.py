"""Guesses of the experts that the next layer's router will choose.

A layer changes the hidden states little, so the next layer's router, applied to the states that this layer's router
gets, chooses many of the experts that it will choose (Eliseev and Mazur, 2023, arXiv:2312.17238). The states are those
before this layer's norm; they go through the next layer's norm first.

No code for architectures is needed. In the first call of each layer, hooks see which module's output holds the indices
that the experts are given: the router; and which module's output the router is given: the norm. Copies of both stay on
the device. A model whose layers compute the choice in another way gets no guesses.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

NO_ROUTER = "no module of a layer chooses its experts by their hidden states alone"


class _Values(NamedTuple):
    """Values of a tensor in memory, whatever their shape. Equal ones are the same unless memory was reused."""

    address: int
    size: int
    dtype: torch.dtype


class _Call(NamedTuple):
    """A call of a module within a layer, without its tensors."""

    module: nn.Module
    given: _Values | None  # None if it was given other things than one tensor
    dims: int  # number of dimensions of what it was given
    output: tuple[_Values | None, ...]
    several: bool  # True if the output is a tuple


class _Router(NamedTuple):
    """Copies of a layer's router and the norm before it. `place` is that of the indices in the router's output, None if
    it has no others, and `dims` the number of dimensions of the states that it takes."""

    norm: nn.Module | None
    gate: nn.Module
    place: int | None
    dims: int


class Routers:
    """Routers of the layers that have routed experts."""

    def __init__(self) -> None:
        self.why_not: str | None = None  # the reason why there are no guesses
        self._routers: dict[int, _Router] = {}
        self._following: dict[int, int] = {}  # layer -> the next one with routed experts
        self._states: dict[int, Tensor] = {}  # what the norm of a layer was given, in its call under way
        self._calls: dict[int, list[_Call]] = {}
        self._hooks: dict[int, list[RemovableHandle]] = {}
        self._last: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        pairs = [(router.norm, router.gate) for router in self._routers.values()]
        modules = [module for pair in pairs for module in pair if module is not None]
        return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))

    def attach(self, number: int, layer: nn.Module, experts: nn.Module) -> None:
        """Watch the first call of `layer`; attach layers in order."""
        if self._last is not None:
            self._following[self._last] = number
        self._last = number
        calls = self._calls[number] = []
        inside = set(experts.modules())

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            alone = given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None
            several = isinstance(output, tuple | list)
            values = tuple(map(_values, output if several else (output,)))
            calls.append(_Call(module, _values(alone), 0 if alone is None else alone.dim(), values, several))

        others = [module for module in layer.modules() if module not in inside and module is not layer]
        self._hooks[number] = [module.register_forward_hook(after, with_kwargs=True) for module in others]

    def see(self, number: int, chosen: Tensor) -> None:
        """Find the router of a layer, whose experts are about to compute."""
        calls, wanted = self._calls.pop(number, None), _values(chosen)
        if calls is None:
            return
        for hook in self._hooks.pop(number):
            hook.remove()
        gate = next((call for call in reversed(calls) if wanted in call.output), None)
        if gate is None or gate.given is None or not gate.given.dtype.is_floating_point:
            self.why_not = NO_ROUTER
            return
        before = reversed(calls[: calls.index(gate)])
        norm = next((call.module for call in before if call.given is not None and gate.given in call.output), None)
        place = gate.output.index(wanted) if gate.several else None
        self._routers[number] = _Router(None if norm is None else _copy(norm), _copy(gate.module), place, gate.dims)

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[number] = next(iter((*args, *kwargs.values())))

        (norm or gate.module).register_forward_pre_hook(keep, with_kwargs=True)

    def take_states(self, number: int) -> Tensor | None:
        """Return and drop the states that went into a layer's norm."""
        return self._states.pop(number, None)

    def guess(self, number: int, states: Tensor) -> tuple[int, Tensor] | None:
        """Return the next layer's number and guessed experts, ``[T, K]``, or None. `states` went into the norm of layer
        `number`."""
        current, following = self._routers.get(number), self._following.get(number)
        router = None if following is None else self._routers.get(following)
        if following is None or router is None or current is None or (router.norm is None) != (current.norm is None):
            return None
        states = states if router.norm is None else router.norm(states)
        output = router.gate(states.reshape(-1, states.shape[-1]) if router.dims == 2 else states)
        return following, output if router.place is None else output[router.place]

    def close(self) -> None:
        for hook in (hook for hooks in self._hooks.values() for hook in hooks):
            hook.remove()
        for kept in (self._routers, self._states, self._calls, self._hooks):
            kept.clear()


def _values(value: Any) -> _Values | None:
    return _Values(value.data_ptr(), value.numel(), value.dtype) if isinstance(value, Tensor) else None


def _copy(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().clone(), False) for parameter in module.parameters()
    }
    memo |= {id(buffer): buffer.clone() for buffer in module.buffers()}  # else the whole layer buffer would be copied
    copied = deepcopy(module, memo)
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied
