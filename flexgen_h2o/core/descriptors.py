"""How many descriptors the process may have open, which `ulimit -n` says, and how many it has."""

from __future__ import annotations

import os
import resource

UNLIMITED = 2**20  # what is taken for no limit


def descriptor_limits() -> tuple[int, int]:
    """Return the soft limit, which counts, and the hard one, up to which a process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def raise_descriptor_limit(needed: int) -> int:
    """Raise the soft limit to `needed`, as far as the hard one lets, and return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(needed, _finite(hard))
    if _finite(soft) >= wanted:
        return _finite(soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def descriptors_in_use() -> int:
    """Return how many are open; 0 on a system that does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit
