"""Kernels of recorded passes in the place of models' own code: norms, rotary positions, routers, products.

A decode step of a row or two spends as long on the launches of such small work as on reading a matrix, even in a CUDA
graph. Whether a module or function computes what a kernel does is found by what it gives for random weights and states,
not by its name. Others stay as they are. Weights are looked up in each call: a layer that is streamed moves them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import PreTrainedModel

from zinfer.engine.triton_check import alike

MAX_ULPS = 4  # units in the last place by which another order of the same sum may change a value of a norm
MAX_SIZE = 1 << 15  # values of a row of a norm: a program has them in registers
MAX_EXPERTS, MAX_CHOSEN = 1024, 32  # a program has the scores of a token's experts in registers
MAX_TOKENS = 2  # the kernel has the products of all tokens in registers; more of them are work for tensor cores
TYPES = torch.float32, torch.float16, torch.bfloat16  # of products
ROTATION = "apply_rotary_pos_emb"  # name of the function in the modules of transformers

Place = tuple[dict[str, Any], str, Callable[..., Any]]  # namespace, name in it, and the function to put there


@contextmanager
def replaced(places: Sequence[Place]) -> Iterator[None]:
    """Have names stand for other functions within the ``with`` block."""
    before = [scope.get(name) for scope, name, _ in places]
    for scope, name, function in places:
        scope[name] = function
    try:
        yield
    finally:
        for (scope, name, _), own in zip(places, before, strict=True):
            if own is None:
                del scope[name]
            else:
                scope[name] = own


class Kernels:
    """Modules or functions of a model, and kernels that compute the same."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def fused(self) -> AbstractContextManager[None]:
        """Compute by the kernels within the ``with`` block."""
        return replaced(self.places)

    def _find(
        self, modules: Iterable[nn.Module], kind_of: Callable[[nn.Module], Any], kernel: Callable[..., object]
    ) -> None:
        """Have `kernel` compute the modules for which `kind_of` is not None; it gets that with the module."""
        kinds = dict[tuple[object, ...], Any]()
        for module in modules:
            tensors = [(name, each.shape, each.dtype) for name, each in module.named_parameters()]
            key = type(module), _eps(module), getattr(module, "top_k", None), *tensors
            if key not in kinds:
                kinds[key] = kind_of(module)
            if kinds[key] is not None and "forward" not in vars(module):
                self.places.append((vars(module), "forward", partial(kernel, module, kinds[key])))


class Norms(Kernels):
    """RMS norms of a model, by one kernel instead of models' seven."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        self._find(model.modules(), partial(_rounds_first, dtype=model.dtype, device=device), _norm)


def _norm(module: Any, after: bool, states: Tensor) -> Tensor:
    from zinfer.engine.stream.step_kernels import normed

    return normed(states, module.weight, _eps(module), after)


def _eps(module: nn.Module) -> float:
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if isinstance(value, float)), 0.0)


def _rounds_first(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Tell whether an RMS norm rounds before it multiplies by the weight. None for what is no RMS norm."""
    from zinfer.engine.stream.step_kernels import normed

    tensors, dice = dict(module.named_parameters()) | dict(module.named_buffers()), torch.Generator().manual_seed(0)
    weight = tensors.get("weight")
    if _eps(module) <= 0 or weight is None or len(tensors) > 1 or weight.dim() != 1 or len(weight) > MAX_SIZE:
        return None
    states = (4 * torch.randn((2, 1, len(weight)), generator=dice)).to(device, dtype)
    weight = (1 + torch.randn(len(weight), generator=dice) / 2).to(device, weight.dtype)
    errors = dict[bool, float]()
    try:
        with torch.no_grad():
            expected = functional_call(module, {"weight": weight}, (states,))
            for after in (True, False):
                result = normed(states, weight, _eps(module), after)
                if (result.shape, result.dtype) == (expected.shape, expected.dtype):
                    errors[after] = float(((result - expected).abs() / expected.abs().clamp(min=1e-6)).max())
    except Exception:  # no norm of one tensor
        return None
    best = min(errors, key=errors.__getitem__, default=None)
    return best if best is not None and errors[best] <= MAX_ULPS * torch.finfo(dtype).eps else None


class Routers(Kernels):
    """Routers of a model whose choice a kernel makes, behind their matrix.

    A router scores experts, chooses those with the largest scores, and weighs them by a softmax over all scores or over
    theirs. Others, with sigmoids or groups of experts, stay. Of equal scores the kernel takes the first expert's;
    torch.topk promises no order. Of scores so close that a softmax over all rounds them to one share, it takes the
    larger.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        self._find(model.modules(), partial(_weights_of, dtype=model.dtype, device=device), _route)


def _route(module: Any, kind: tuple[bool, torch.dtype], states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a router does: the experts' scores, the weights of those chosen, and their numbers."""
    from zinfer.engine.stream.step_kernels import route

    scores = linear(states.reshape(-1, module.weight.shape[1]), module.weight, getattr(module, "bias", None))
    return scores, *route(scores, module.top_k, *kind)


def _weights_of(module: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[bool, torch.dtype] | None:
    """Return whether weights are shares of all experts, and their type. None for what is no such router."""
    tensors, dice = dict(module.named_parameters()) | dict(module.named_buffers()), torch.Generator().manual_seed(0)
    count, weight = getattr(module, "top_k", None), tensors.get("weight")
    if not isinstance(count, int) or weight is None or weight.dim() != 2 or not tensors.keys() <= {"weight", "bias"}:
        return None
    if not 0 < count <= MAX_CHOSEN or not count <= len(weight) <= MAX_EXPERTS:
        return None
    drawn = {
        name: (torch.randn(each.shape, generator=dice) / each.shape[-1] ** 0.5).to(device, each.dtype)
        for name, each in module.named_parameters()
    }
    states = torch.randn((8, weight.shape[1]), generator=dice).to(device, dtype)
    errors = dict[tuple[bool, torch.dtype], float]()
    try:
        with torch.no_grad():
            scores, weights, numbers = functional_call(module, drawn, (states,))
            for kind in ((False, weights.dtype), (True, weights.dtype)):
                with replaced([(vars(module), "forward", partial(_route, module, kind))]):
                    result, shares, chosen = functional_call(module, drawn, (states,))
                equal = torch.equal(result.gather(1, chosen), scores.gather(1, numbers))  # equal scores in any order
                if equal and result.dtype == scores.dtype and alike(shares, weights):
                    errors[kind] = float((shares - weights).norm())
    except Exception:  # no router of states alone
        return None
    return min(errors, key=errors.__getitem__, default=None)


class Rotations(Kernels):
    """Functions that turn queries and keys, by one kernel instead of ten."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__()
        for name in sorted({type(module).__module__ for module in model.modules()}):
            scope = vars(sys.modules[name])
            function = scope.get(ROTATION)
            if callable(function) and (forms := _forms(function, model.dtype, device)):
                self.places.append((scope, ROTATION, partial(_rotate, function, forms)))


def _rotate(function: Callable[..., Any], forms: frozenset[int], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 4 or not _turns(forms, *args):
        return function(*args, **kwargs)
    from zinfer.engine.stream.step_kernels import rotate

    return rotate(*args)


def _turns(forms: frozenset[int], query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tell whether the kernel serves a call. `forms` are parts of a head that may have angles."""
    if query.dim() != 4 or keys.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    rows, _, count, size = query.shape
    same = (keys.shape[0], *keys.shape[2:]) == (rows, count, size) and cos.shape[:2] == (rows, count)
    part, rest = divmod(size, cos.shape[2])
    dense = all(tensor.stride(-1) == 1 for tensor in (query, keys, cos, sin))
    one_type = query.dtype == keys.dtype == cos.dtype == sin.dtype and query.is_floating_point()
    return same and not rest and part in forms and dense and one_type


def _forms(function: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Return the forms that the kernel serves: 1 if all of a head has angles, 2 if they are those of both halves."""
    from zinfer.engine.stream.step_kernels import rotate

    dice, forms = torch.Generator().manual_seed(0), set[int]()
    query, keys = (torch.randn((2, 3, heads, 32), generator=dice).to(device, dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn((2, 3, 16), generator=dice).to(device)
    for part, turn in (1, torch.cat((angles, angles), -1)), (2, angles):
        cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
        try:
            expected, result = function(query, keys, cos, sin), rotate(query, keys, cos, sin)
        except Exception:  # a function of other arguments
            continue
        if all(a.shape == b.shape and alike(a, b) for a, b in zip(result, expected, strict=True)):
            forms.add(part)
    return frozenset(forms)


class Linears(Kernels):
    """Matrices of decoder layers, and the kernel that multiplies few tokens.

    A model calls its matrices one by one. Which of them follow each other with the same states shows when a pass runs:
    from the second pass on, the first of them computes all.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
        places = [(vars(each), "forward", partial(self._multiply, each)) for each in modules]
        self.places = [place for place in places if "forward" not in place[0]]
        self._followers = dict[nn.Linear, list[nn.Linear]]()  # of a module: those called next with the same states
        self._states: Tensor | None = None  # of the last call
        self._first: nn.Linear | None = None  # module that was called with them first
        self._results = dict[nn.Linear, Tensor]()  # of modules that follow

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Multiply by the kernel within the ``with`` block."""
        try:
            with super().fused():
                yield
        finally:
            self._states = self._first = None
            self._results.clear()

    def _multiply(self, module: nn.Linear, states: Tensor) -> Tensor:
        if self._first is not None and states is self._states:
            followers = self._followers.setdefault(self._first, [])
            if module not in followers:
                followers.append(module)
            if (result := self._results.pop(module, None)) is not None:
                return result
        else:
            self._states, self._first = states, module
            self._results.clear()
        if not _multiplies(module, states):
            return linear(states, module.weight, module.bias)
        from zinfer.engine.stream.step_kernels import MAX_FUSED, products

        others = self._followers.get(module, ()) if module is self._first else ()
        fused = [module, *(each for each in others if _form(each) == _form(module))][:MAX_FUSED]
        flat = states.reshape(-1, states.shape[-1])
        results = products(flat, [each.weight for each in fused], [each.bias for each in fused])
        shaped = [result.view(*states.shape[:-1], -1) for result in results]
        self._results.update(zip(fused[1:], shaped[1:], strict=True))
        return shaped[0]


def _form(module: nn.Linear) -> list[tuple[object, ...] | None]:
    """Return what matrices of one launch have in common."""
    tensors = module.weight, module.bias
    return [None if each is None else (type(each), each.dtype, each.device, each.is_contiguous()) for each in tensors]


def _multiplies(module: nn.Linear, states: Tensor) -> bool:
    """Tell whether the kernel multiplies `states` ``[.., K]`` with a matrix: few tokens, plain contiguous weights."""
    plain = [(kind, states.dtype, states.device, True) for kind in (Tensor, nn.Parameter)]
    few = 0 < states.numel() <= MAX_TOKENS * states.shape[-1]
    return few and states.dtype in TYPES and all(each is None or each in plain for each in _form(module))
