"""Byte sizes: what people write, what the engine counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * GIB),
        ("1.5m", 3 * MIB // 2),
        (".5KiB", KIB // 2),
        ("2 tib", 2 * TIB),
        ("3TB", 3 * 10**12),
        (4096, 4096),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1GiB",
        "0.2",
        "12 giga",
        True,
        1.5j,
        "9" * 400,
        -(10**400),
    ],
)
def test_anything_else_is_refused_by_the_name_of_its_flag(text: object) -> None:
    with pytest.raises(UsageError, match=r"^--host-mem: "):
        parse_bytes(text, "--host-mem")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5 * TIB, "5.00 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_smallest_multiple_not_below(size: int, multiple: int) -> None:
    rounded = round_up(size, multiple)
    assert rounded % multiple == 0 and size <= rounded < size + multiple


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.031234, "0.031 s"),
        (42.4, "42 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (86_399, "1 d 0 h"),
        (2 * 86_400 + 5 * 3600, "2 d 5 h"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
