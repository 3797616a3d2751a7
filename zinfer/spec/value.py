"""The base of every value that zinfer passes around, writes down and reads back."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value: equal by content, strict about unknown keys, and safe to use as part of a record's key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
