"""Base classes of values and of what is closed; groups of values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Frozen(BaseModel):
    """Immutable value: equal by content, hashable, strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def __copy__(self) -> Self:
        """Copy without values computed from fields, which `model_copy` may change."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class Closing(ABC):
    """Base of context managers that call `close` at the end."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources that are held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a validation as ``field: fault (not value)``."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, fault["loc"]))
    given = "" if isinstance(fault["input"], dict | list) else f" (not {str(fault['input'])[:60]!r})"
    return f"{field + ': ' if field else ''}{fault['msg'].removeprefix('Value error, ')}{given}"
