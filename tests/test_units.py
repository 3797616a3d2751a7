"""Quantities and their units, read and written."""

import pytest

from zinfer.core.units import duration, gb, gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("200GB/s", 200_000_000_000), ("2tib", 2 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 GX", "-1GB", "1,5GB"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_sizes_and_times_are_shown_with_their_unit() -> None:
    assert gb(352_494_542_848) == "352.5 GB"
    assert gb(1_500_000) == "1.5 MB"
    assert gib(79 << 30) == "79.0 GiB"
    assert [duration(s) for s in (0.0123, 6.414, 200, 7500)] == ["12.3 ms", "6.41 s", "3 min 20 s", "2 h 05 min"]
