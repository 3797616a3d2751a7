"""Base class of the values that zinfer passes around, stores and reads back."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable value: equal by content, strict about unknown keys, usable as part of a record's key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
