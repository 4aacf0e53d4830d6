"""Compile the kernels, or load what was compiled before, so that no sweep of a run waits for it.

Loops are compiled in a process of their own, which leaves them on disk: numba and LLVM keep 100 MB and more of the
process that compiles for good, which no budget knows of; loading what was compiled takes little.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels.beside import WHOLE, SlotForm, WholeColumns
from flexgen_h2o.kernels.elementwise import Rotation, add_weighted, clamped_gate, rms_norm, silu_gated
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.select import Selection, add_to_sketch, attend_selected, empty_sketch, fill_sketch
from flexgen_h2o.kernels.slots import Pair, ScoreState, attend, get_last_slots, put_packed, put_slots

_LONGEST_S = 300.0
# The process that compiles imports from where this one does, and from nowhere else.
_CODE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
function(*arguments)
"""


class _NotCompiledError(Exception):
    """A loop would have to be compiled."""


def compile_subprocess(function: Callable[..., object], *arguments: object) -> None:
    """Call function(*arguments), whose result nobody wants, so that its loops are compiled.

    Where some are not yet, another process calls it first. function: of a module; arguments: can be pickled. The call
    may end at any loop and begin anew. Where nothing can be kept on disk, or no process started, this one compiles.
    """
    from flexgen_h2o.kernels.jit import kept_in

    if kept_in() is not None and sys.executable:
        try:
            with _refusing_to_compile():
                function(*arguments)
            return
        except _NotCompiledError:
            _call_in_a_process(function, arguments)
    function(*arguments)


@contextmanager
def _refusing_to_compile() -> Iterator[None]:
    """_NotCompiledError where this thread would compile; loops that are on disk are loaded."""
    from numba.core import event

    thread = threading.get_ident()

    class Refusal(event.Listener):
        def on_start(self, _event: Any) -> None:
            if threading.get_ident() == thread:
                raise _NotCompiledError

        def on_end(self, _event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Refusal()):
        yield


def _call_in_a_process(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    given = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    quiet = subprocess.DEVNULL
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-c", _CODE], input=given, stdout=quiet, stderr=quiet, timeout=_LONGEST_S, check=False
        )


_ROWS, _SLOTS, _WIDTH = 1, 4, 64


def warm_up(
    device: torch.device, dtype: torch.dtype, scored: bool, packing: KVPacking | None = None, rolling: bool = False,
    rotary: bool = False, weights: Callable[[torch.device, torch.dtype], None] | None = None,
) -> None:  # fmt: skip
    """Run decode attention once on zeros (by `compile_subprocess`); where columns are `scored`, prompts' scores too.

    packing: of the KV slots. rolling: with keys that are turned as they are read. rotary: the model has rotary
    embeddings; with them come RMS norms and gated MLPs. weights: calls what a format of weights needs.

    A few seconds the first time on a machine, then some tenths of one.
    """
    columns = torch.zeros(1, _ROWS, _SLOTS, _WIDTH, dtype=dtype, device=device)
    whole, single = ((_ROWS, _SLOTS), (_ROWS,))
    positions, oldest, newest, victims = (
        torch.zeros(size, dtype=torch.int32, device=device) for size in (whole, single, single, single)
    )
    scores, gains = torch.zeros(whole, device=device), torch.ones(single, device=device)
    state = ScoreState(scores, positions, oldest, newest, 1.0, gains, victims)
    filled = victims.new_full(single, _SLOTS)
    first, column = torch.zeros(_ROWS, 1, dtype=torch.int64, device=device), columns[0, :, :1].clone()
    put_slots((columns, columns), first, (column, column))
    get_last_slots((columns, columns), first, (column, column))
    stored, form, q = _stored(packing, dtype, device)
    if packing is not None:
        put_packed(stored, first[:, 0], (q[:, 0], q[:, 0]), form, first[:, 0] - 1)
    attend(q, *stored, filled, 1.0, state, form)
    if rotary:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotate((columns[0],), victims)
        rms_norm(columns[0, 0], columns[0, 0, 0], 1.0, columns[0, 0].clone())
        silu_gated(columns[0, 0], columns[0, 0])
        clamped_gate(columns[0, 0], 1.0, 1.0, columns[0, 0, :, ::2].clone(memory_format=torch.contiguous_format))
        no_rows = torch.zeros(len(columns[0, 0]))
        add_weighted(columns[0, 0], no_rows.int(), no_rows, columns[0, 0].clone())
    if rolling:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotated(columns[0], positions)
    _, lse = causal_attention_lse(columns, columns, columns, 1.0)
    if scored:
        column_sums(columns, columns, lse, 1.0)
    if weights is not None:
        weights(device, dtype)


def _stored(packing: KVPacking | None, dtype: torch.dtype, device: torch.device) -> tuple[Pair, SlotForm, torch.Tensor]:
    """Keys and values in slots, of zeros, as they are or packed, what is beside them, and a query."""
    width = _WIDTH if packing is None else packing.width
    slots = torch.zeros(1, _ROWS, _SLOTS, width, dtype=dtype, device=device)
    q, none = slots[0, :, :1].contiguous(), slots[0, :, :0]
    if packing is None:
        return (slots, slots), WHOLE, q
    ranges, slots_of_none = q.new_ones(_ROWS, width, dtype=torch.bfloat16), q.new_zeros(_ROWS, 0, dtype=torch.int32)
    form = SlotForm(packing, None, WholeColumns(ranges, ranges, none, none, slots_of_none))
    return (pack_columns(slots, packing.keys), pack_columns(slots, packing.values)), form, q


def warm_up_selection(device: torch.device, dtype: torch.dtype, packing: KVPacking | None = None) -> None:
    """The same for attention that reads some of the columns."""
    stored, form, q = _stored(packing, dtype, device)
    slot = torch.zeros(_ROWS, dtype=torch.int64, device=device)
    sketch, filled = empty_sketch(_ROWS, _SLOTS, q.shape[2], device), slot.int() + _SLOTS
    fill_sketch(sketch, q, q)
    add_to_sketch(sketch, slot, q[:, 0], q[:, 0])
    attend_selected(q, *stored, filled, 1.0, Selection(sketch, filled), form)
