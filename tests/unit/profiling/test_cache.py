"""The kept profile: one file for each kind of machine and disk, written whole, ignored when it is of no use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexgen_h2o.errors import FlexgenError, UsageError
from flexgen_h2o.profiling.cache import cache_path, cached_profile, store
from flexgen_h2o.profiling.choose import profile_of_this_machine
from flexgen_h2o.profiling.machine import Machine, Neighbours, fingerprint_text, this_machine
from flexgen_h2o.profiling.nominal import NOMINAL
from flexgen_h2o.tiers.device import HostDevice
from tests.unit.test_profile import PROFILE

MACHINE = Machine("Intel(R) Xeon(R) CPU @ 2.20GHz", 2, 2**34, "", 0, "/dev/sda ext4 at /", 2**36)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_cpu: None) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flexgen_h2o"


def test_what_is_kept_is_found_again(cache: Path, tmp_path: Path) -> None:
    assert cached_profile("cpu", tmp_path) is None and not cache.exists()
    path = store(PROFILE, "cpu", tmp_path)
    assert path == cache_path("cpu", tmp_path) and list(cache.iterdir()) == [path]
    assert cached_profile("cpu", tmp_path) == PROFILE == cached_profile("auto", tmp_path)
    newer = replace(PROFILE, row_s=1.0)
    store(newer, "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path / "folder" / "to come") == newer  # on the same disk


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({**PROFILE.to_json(), "schema": 0})])
def test_broken_or_old_file_is_ignored(text: str, tmp_path: Path) -> None:
    store(PROFILE, "cpu", tmp_path).write_text(text)
    assert cached_profile("cpu", tmp_path) is None
    store(PROFILE, "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path) == PROFILE


def test_folder_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(FlexgenError, match="profile-"):
        store(PROFILE, "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path) is None


def test_half_written_file_is_never_seen(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(PROFILE, "cpu", tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(FlexgenError, match="No space left"):
        store(replace(PROFILE, row_s=1.0), "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path) == PROFILE and len(list(cache.iterdir())) == 1


def test_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_path("cpu", tmp_path).parent == tmp_path / ".cache" / "flexgen_h2o"


@pytest.mark.parametrize("base", ["~nosuchuser-at-all/x", "/" + 300 * "x", "/proc/1/no/folder", "/dev/null/x"])
def test_a_cache_folder_that_cannot_be_is_none(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    said: list[str] = []
    assert profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=False).machine == NOMINAL
    assert not said
    with pytest.raises(FlexgenError, match="profile-"):
        store(PROFILE, "cpu", tmp_path)


def test_nobody_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without a name, as containers have them."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cached_profile("cpu", tmp_path) is None
    with pytest.raises(FlexgenError, match="profile-"):
        store(PROFILE, "cpu", tmp_path)


def test_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--device"):
        cached_profile("cuda", tmp_path)


def test_another_machine_or_disk_has_another_file() -> None:
    kinds = [
        MACHINE, replace(MACHINE, cpu="AMD EPYC"), replace(MACHINE, cores=4), replace(MACHINE, card="Tesla T4"),
        replace(MACHINE, mount="/dev/sdb ext4 at /big"),
    ]  # fmt: skip
    assert len({fingerprint_text(machine) for machine in kinds}) == len(kinds)
    assert fingerprint_text(replace(MACHINE, disk_bytes=1)) == fingerprint_text(MACHINE)  # the disk fills up


def test_names_of_machines() -> None:
    assert MACHINE.short_name == "intel-xeon-2core"
    assert replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).short_name == "tesla-t4"
    assert "Tesla T4 with 15 GiB" in replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).description


def test_this_machine(tmp_path: Path) -> None:
    machine = this_machine(HostDevice(), tmp_path / "to" / "come")
    assert machine.cores > 0 and machine.host_bytes > 0 and machine.disk_bytes > 0 and machine.card == ""
    assert machine.cpu and " at /" in machine.mount
    assert this_machine(HostDevice(), Path("/")).mount.endswith(" at /")
    assert 0 <= Neighbours().share() <= 1
