"""Bounds of recorded values: types of fields, and checks of what has no fields.

A line may be whole and sealed and still hold a time of 0 ms or a name of a million characters, made by hand or by a
faulty program. Records refuse such values, so that nothing behind them has to guard against them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from zinfer.core.case import MAX_NAME, Name

LARGEST = 10**18  # of any number
LONGEST = 20_000  # characters of any text: messages of errors are cut to less
ITEMS = 1_000_000  # of a list
DEPTH = 20  # of nested lists and objects
SHORTEST_MS, LONGEST_MS = 1e-4, 1e10  # a hundred ns, which no clock of Python resolves, and four months

Text = Annotated[str, Field(max_length=LONGEST)]
Ms = Annotated[float, Field(ge=SHORTEST_MS, le=LONGEST_MS)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=1e-9, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[int, Field(ge=1, le=LARGEST)]


def bounded(value: Any, depth: int = 0) -> Any:
    """Return a value of JSON. Raises ValueError for one that is too large, long or deep."""
    if isinstance(value, str):
        if len(value) > LONGEST:
            raise ValueError(f"a text of {len(value):,} characters")
    elif isinstance(value, int | float):
        if not -LARGEST <= value <= LARGEST:
            raise ValueError(f"{value!r:.40} is too large")
    elif isinstance(value, Mapping | list | tuple):
        if depth > DEPTH or len(value) > ITEMS:
            raise ValueError(f"{len(value):,} items, or too deep")
        entries = value if isinstance(value, Mapping) else {}
        if longest := max((len(str(key)) for key in entries if len(str(key)) > MAX_NAME), default=0):
            raise ValueError(f"a key of {longest:,} characters")
        for item in entries.values() if entries else value:
            bounded(item, depth + 1)
    return value


# Settings of an engine that a calibration computes with (`zinfer.analysis.calibrate`), and those that some need.
_COUNTED = frozenset({
    "slot_bytes", "buffer_bytes", "ring_depth", "kv_host_rows", "kv_threads", "expert_buffers", "expert_buffer_bytes",
    "experts_on_cpu_per_step", "cpu_expert_tokens", "linked_share", "unpacked_layers",
    "gpu_expert_layers",
})  # fmt: skip
_NEEDED = {"slot_bytes": ("ring_depth", "buffer_bytes"), "kv_host_rows": ("kv_attention",)}


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    for name in _COUNTED & settings.keys():
        value = settings[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}: {value!r:.40} is no count")
    for name, needs in _NEEDED.items():
        if name in settings and (lacks := [need for need in needs if need not in settings]):
            raise ValueError(f"{name} without {lacks[0]}")
    return settings


Bounded = Annotated[dict[str, Any], AfterValidator(bounded)]
EngineSettings = Annotated[Bounded, AfterValidator(_settings)]
Versions = dict[Name, Text]
