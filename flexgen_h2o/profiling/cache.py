"""The measured profile of this machine, kept for later runs in the user's cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flexgen_h2o.errors import UsageError
from flexgen_h2o.paths import user_cache_dir
from flexgen_h2o.profile import HardwareProfile, read_profile, write_profile
from flexgen_h2o.profiling.machine import fingerprint_text, this_machine
from flexgen_h2o.tiers.device import open_device


def cache_path(device: str, offload_dir: Path) -> Path:
    """Where the profile of this machine with `device` and the disk of `offload_dir` is kept; one of each kind.

    Raises UsageError for a device that is not there.
    """
    machine = this_machine(open_device(device, separate_budget=False), offload_dir)
    digest = hashlib.sha256(fingerprint_text(machine).encode()).hexdigest()[:16]
    return user_cache_dir() / f"profile-{digest}.json"


def cached_profile(device: str, offload_dir: Path) -> HardwareProfile | None:
    """None where none was measured, and where the file is broken or of another version.

    Raises UsageError for a device that is not there.
    """
    path = cache_path(device, offload_dir)
    try:
        return read_profile(path)
    except UsageError:
        return None


def store(profile: HardwareProfile, device: str, offload_dir: Path) -> Path:
    """Keep the profile; whoever reads meanwhile sees the old file or the new one. Raises FlexgenError."""
    path = cache_path(device, offload_dir)
    write_profile(path, profile)
    return path
