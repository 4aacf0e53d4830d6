"""A profile as text: every figure is there, aligned, and without exponents."""

from __future__ import annotations

import re
from dataclasses import fields

from flexgen_h2o.hardware import RATES, SECONDS, SHARES, table
from flexgen_h2o.planner.profile import HardwareProfile
from tests.unit.test_profile import PROFILE


def test_shows_every_figure() -> None:
    figures = {f.name for f in fields(HardwareProfile) if f.type == "float"}
    assert figures == {*RATES, *SECONDS, *SHARES}
    text = table(PROFILE)
    for what in (*RATES.values(), *SECONDS.values(), *SHARES.values()):
        assert what in text
    assert "a guess" in text and "16.00 GiB" in text and "bfloat16" in text
    assert not re.search(r"\de[+-]?\d", text)


def test_rates_are_in_gigabytes_and_times_in_microseconds() -> None:
    lines = [" ".join(line.split()) for line in table(PROFILE).splitlines()]
    assert "disk, write 2.00" in lines and "copy between host and device 2.00" in lines
    assert "disk read beside compute 0.900" in lines and "1024 to 512 3.00 4.00" in lines
    assert (
        "times faster, blocked 1: 1.10 32: 1.40" in lines
        and "times faster, int8 1: 2.10 32: 1.90" in lines
    )
    assert "times faster, int8 from int4 1: 1.20 16: 1.50" in lines
