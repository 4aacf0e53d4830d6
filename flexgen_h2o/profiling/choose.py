"""The profile that plans for this machine are made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flexgen_h2o.errors import FlexgenError
from flexgen_h2o.profile import HardwareProfile
from flexgen_h2o.profiling.cache import cache_path, cached_profile, store
from flexgen_h2o.profiling.measure import measure
from flexgen_h2o.profiling.nominal import nominal_profile
from flexgen_h2o.tiers.device import open_device


def profile_of_this_machine(
    device: str, offload_dir: Path, progress: Callable[[str], None], measure_missing: bool
) -> HardwareProfile:
    """The cached profile; where there is none, one that is measured and cached now, or nominal speeds.

    device: `auto`, `cpu` or `cuda`.
    """
    found = cached_profile(device, offload_dir)
    if found is not None:
        return found
    kept = cache_path(device, offload_dir)
    if os.path.exists(kept):  # False where it cannot even be looked for
        progress(f"the profile that is kept in {kept} cannot be used: broken, or of another version")
    if not measure_missing:
        return nominal_profile(open_device(device, separate_budget=False).is_host)
    progress("this machine has no profile yet: measuring it once, which takes one to two minutes")
    profile = measure(device, offload_dir, progress)
    try:
        store(profile, device, offload_dir)
    except FlexgenError as error:  # a home that cannot be written to: this run has what it needs
        progress(f"not kept for later: {error}")
    return profile
