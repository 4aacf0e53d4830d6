"""Host memory for big reusable buffers, and the ledger that keeps every tier within its budget."""

from __future__ import annotations

import mmap
from collections import defaultdict

import torch

from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.limits import PAGE
from flexgen_h2o.units import advice, format_bytes, round_up

HUGE_PAGE = 2 * 2**20


def host_buffer(nbytes: int) -> torch.Tensor:
    """A uint8 tensor of `nbytes` in host memory, every page touched.

    Large buffers are aligned to huge pages and ask for them: O_DIRECT into huge pages reads about twice
    as fast as into 4 KiB pages, because the device sees whole requests (docs/benchmarks/offloading.md, "Huge pages").
    """
    size = max(1, nbytes)
    align = HUGE_PAGE if size >= HUGE_PAGE else PAGE
    memory = mmap.mmap(-1, round_up(size, PAGE) + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if align == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # transparent huge pages are off: slower reads, same bytes
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % align
    buffer = whole[start : start + nbytes]
    buffer.zero_()
    return buffer


class Ledger:
    """Bytes charged to each tier against its budget, with the peak of each."""

    def __init__(self, budgets: dict[str, int | None]) -> None:
        self.budgets = budgets
        self.used: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)

    def charge(self, tier: str, nbytes: int, what: str) -> None:
        """Count `nbytes` as held; DoesNotFitError, and nothing counted, when the tier's budget would be exceeded."""
        budget = self.budgets.get(tier)
        if budget is not None and self.used[tier] + nbytes > budget:
            over = self.used[tier] + nbytes - budget
            raise DoesNotFitError(
                f"{what} needs {format_bytes(nbytes)} on the {tier} tier: {format_bytes(over)} over the budget of "
                f"{format_bytes(budget)}; {advice(tier, budget, budget + over)} or move shares with --percent"
            )
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def release(self, tier: str, nbytes: int) -> None:
        self.used[tier] -= nbytes
