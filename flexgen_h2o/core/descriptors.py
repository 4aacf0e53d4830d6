"""Limits on open file descriptors of the process (`ulimit -n`), and how many it has open."""

from __future__ import annotations

import os
import resource

UNLIMITED = 2**20  # number that stands for no limit


def descriptor_limits() -> tuple[int, int]:
    """Return the soft limit, which applies, and the hard one, to which a process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def raise_descriptor_limit(needed: int) -> int:
    """Raise the soft limit to `needed`, at most to the hard one, and return the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(needed, _finite(hard))
    if _finite(soft) >= wanted:
        return _finite(soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def descriptors_in_use() -> int:
    """Return the number of open descriptors; 0 on a system that does not show it."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit
