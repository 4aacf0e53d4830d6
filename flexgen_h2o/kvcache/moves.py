"""Compaction: rows that remain are moved over those that left."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.kvcache.view import PartView

Move = tuple[int, int]  # from sequence, to sequence


def plan_moves(leaving: Sequence[int], count: int) -> tuple[list[Move], list[int]]:
    """Fill the places of `leaving` (indices of `count` sequences) from the end.

    Returns the moves and, for each remaining place, the sequence that stands there now.
    """
    gone = set(leaving)
    order, moves = list(range(count)), []
    remaining = count - len(gone)
    donors = [i for i in range(count - 1, remaining - 1, -1) if i not in gone]
    for place, donor in zip(sorted(i for i in gone if i < remaining), donors, strict=True):
        moves.append((donor, place))
        order[place] = donor
    return moves, order[:remaining]


def order_after(moves: Sequence[Move], remaining: int) -> list[int]:
    """For each of the `remaining` places, the sequence that stands there after the moves."""
    came_from = {target: source for source, target in moves}
    return [came_from.get(place, place) for place in range(remaining)]


def move_rows(views: Sequence[PartView], moves: Sequence[Move], kv_heads: int) -> None:
    """Copy the `kv_heads` rows of each moved sequence, and their records, across parts where they are split."""
    for source, target in moves:
        done = 0
        while done < kv_heads:
            src_row, dst_row = source * kv_heads + done, target * kv_heads + done
            src = next(v for v in views if v.start <= src_row < v.end)
            dst = next(v for v in views if v.start <= dst_row < v.end)
            n = min(kv_heads - done, src.end - src_row, dst.end - dst_row)
            a, b = src_row - src.start, dst_row - dst.start
            for there, here in zip(dst.row_tensors(), src.row_tensors(), strict=True):
                there[b : b + n].copy_(here[a : a + n])
            done += n
