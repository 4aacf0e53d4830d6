"""Machines that are put together of named parts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIB
from flexgen_h2o.planner.parts import CARDS, find_hardware
from flexgen_h2o.planner.profile import (
    SHIPPED,
    HardwareProfile,
    profile_from_json,
    read_profile,
    write_profile,
)

LIKE = "like=build-2core"


def machine(text: str) -> HardwareProfile:
    return find_hardware(text, lambda: None)


def shipped(name: str) -> HardwareProfile:
    return read_profile(SHIPPED / f"{name}.json")


@pytest.mark.parametrize("name", ["t4", "a100-80"])
def test_a_card_with_a_profile_gets_that_profile_s_rates(name: str) -> None:
    found = machine(f"gpu={name},{LIKE},ram-gbps=1000")
    known = shipped(name)
    for field in ("device_memory_bytes_per_s", "h2d_bytes_per_s", "device_mem_bytes"):
        assert getattr(found, field) == pytest.approx(getattr(known, field)), field
    rates = found.rates("float16")
    of_known = known.rates("float16")
    for rows in (1, 8, 100, 1024):
        want = of_known.matmul_rate(rows, 4096, 4096)
        assert rates.matmul_rate(rows, 4096, 4096) == pytest.approx(want, rel=0.01), rows
    attention = rates.device_attention_bytes_per_s.at(128)
    assert attention == pytest.approx(of_known.device_attention_bytes_per_s.at(128))


@pytest.mark.parametrize("name", CARDS)
def test_every_card_is_a_whole_profile(name: str) -> None:
    found = machine(f"gpu={name},{LIKE}")
    assert profile_from_json(found.to_json()).machine == found.machine
    assert found.is_nominal and not found.device_is_host
    assert ("bfloat16" in found.compute) == CARDS[name].has_bfloat16
    assert found.device_memory_bytes_per_s < CARDS[name].gbps * 1e9


def test_more_cores_multiply_faster_as_far_as_ram_delivers() -> None:
    known = shipped("build-2core")
    same = machine(f"cores=2,{LIKE}")
    wide = machine(f"cores=16,ram-gbps=500,{LIKE}")
    slow = machine(f"cores=16,ram-gbps=50,{LIKE}")
    for dtype in known.compute:
        many = known.rates(dtype).matmul_rate(1024, 4096, 4096)
        assert same.rates(dtype).matmul_rate(1024, 4096, 4096) == pytest.approx(many)
        assert wide.rates(dtype).matmul_rate(1024, 4096, 4096) == pytest.approx(8 * many)
        one = slow.rates(dtype).matmul_rate(1, 4096, 4096)
        assert one < wide.rates(dtype).matmul_rate(1, 4096, 4096)
        itemsize = 4 if dtype == "float32" else 2
        assert one == pytest.approx(2 / itemsize * slow.host_memory_bytes_per_s, rel=0.01)
    assert slow.host_memory_bytes_per_s < 50e9


def test_parts_say_what_they_say_and_the_rest_is_this_machine_s(tmp_path: Path) -> None:
    here = replace(shipped("build-2core"), machine="here", host_mem_bytes=5 * GIB)
    found = find_hardware("disk-gbps=7, disk=1TB", lambda: here)
    assert (found.host_mem_bytes, found.disk_mem_bytes) == (5 * GIB, 10**12)
    assert 6e9 < found.disk_read_bytes_per_s < 7e9
    assert "here" in found.source
    assert found.compute == here.compute
    link = machine(f"gpu=l4,pcie-gbps=4,{LIKE}")
    assert link.h2d_bytes_per_s < 4e9 < machine(f"gpu=l4,{LIKE}").h2d_bytes_per_s
    write_profile(tmp_path / "a=b.json", here)  # a file's name may look like a part
    assert find_hardware(tmp_path / "a=b.json", lambda: None) == here
    assert math.isclose(machine(f"ram=3GiB,{LIKE}").host_mem_bytes, 3 * GIB)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu=rtx-1", "gpu: 'rtx-1' is not one of none, t4"),
        ("cpu=epyc", "is no part; .* gpu, cores, ram"),
        ("gpu=t4,cores", "'cores' is no part"),
        ("gpu=t4,gpu=l4", "gpu is there twice"),
        ("cores=0", "cores: '0' is not a number"),
        ("cores=nan", "cores: 'nan' is not a number"),
        ("ram=lots", "ram: .*is not a size"),
        ("disk-gbps=-1", "disk-gbps: '-1'"),
        ("ram=1GiB,like=none", "like none: no such file"),
        ("gpu=none,like=t4", "measured with its GPU"),
    ],
)
def test_a_part_that_is_not_understood_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        machine(text)
    assert str(caught.value).startswith("--hardware ")
