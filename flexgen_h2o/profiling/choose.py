"""The profile that plans for this machine are made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flexgen_h2o.errors import DoesNotFitError, FlexgenError
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.profiling.cache import cache_path, cached_profile, store
from flexgen_h2o.profiling.measure import measure, measure_again, parts_of
from flexgen_h2o.profiling.nominal import nominal_profile
from flexgen_h2o.tiers.device import open_device

AGAIN_S = 5.0  # of a run's start, for what a busy machine disturbed


def profile_of_this_machine(
    device: str, offload_dir: Path, progress: Callable[[str], None], measure_missing: bool
) -> HardwareProfile:
    """The cached profile; where there is none, one that is measured and cached now, or nominal speeds.

    device: `auto`, `cpu` or `cuda`. measure_missing: also what a busy machine disturbed, some seconds of it.
    """
    found = cached_profile(device, offload_dir)
    if found is not None:
        return calmer(found, device, offload_dir, progress) if measure_missing and found.was_disturbed else found
    kept = cache_path(device, offload_dir)
    if os.path.exists(kept):  # False where it cannot even be looked for
        progress(f"the profile that is kept in {kept} cannot be used: broken, or of another version")
    if not measure_missing:
        return nominal_profile(open_device(device, separate_budget=False).is_host)
    progress("this machine has no profile yet: measuring it once, which takes one to two minutes")
    return _kept(measure(device, offload_dir, progress), device, offload_dir, progress)


def calmer(
    profile: HardwareProfile, device: str, offload_dir: Path, progress: Callable[[str], None]
) -> HardwareProfile:
    """This machine's profile, of which some seconds are spent on what other processes disturbed, if it is quiet now.

    What is still of a busy machine is said, and measured again another time. Takes up to 1 GiB of memory.
    """
    try:
        found = measure_again(profile, device, offload_dir, progress, AGAIN_S)
    except DoesNotFitError:  # a disk without room for it
        found = profile
    if found.was_disturbed:
        parts = ", ".join(found.busy_parts(parts_of(found.compute)))
        progress(f"predictions come from a profile measured on a busy machine; when it is quiet, again: {parts}")
    return found if found is profile else _kept(found, device, offload_dir, progress)


def _kept(profile: HardwareProfile, device: str, offload_dir: Path, progress: Callable[[str], None]) -> HardwareProfile:
    try:
        store(profile, device, offload_dir)
    except FlexgenError as error:  # a home that cannot be written to: this run has what it needs
        progress(f"not kept for later: {error}")
    return profile
