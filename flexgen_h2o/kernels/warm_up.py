"""Loops are compiled in a process of their own, which leaves them on disk.

numba and LLVM keep 100 MB and more of the process that compiles for good, which no budget knows of; loading what was
compiled takes little.

Compile the kernels, or load what was compiled before, so that no sweep of a run waits for it.
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

from flexgen_h2o.core.packing import INT8, Packing, SlotPacking
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.elementwise import Rotation, rms_norm, silu_gated
from flexgen_h2o.kernels.int8 import Int8Rows, multiply_each, rescale
from flexgen_h2o.kernels.int8_blocked import BITS, blank_int8_rows, requantise_rows
from flexgen_h2o.kernels.packed import pack_columns, unpack_rows
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.slots import ScoreState, attend_packed, attend_scored, get_last_slots, put_slots
from flexgen_h2o.kernels.workspace import Workspace

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
    from flexgen_h2o.kernels.jit import is_kept

    if is_kept() and sys.executable:
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
    device: torch.device, dtype: torch.dtype, scored: bool, packing: SlotPacking | None = None,
    weights: Packing | None = None, rolling: bool = False, rotary: bool = False, to_int8: bool = False,
) -> None:  # fmt: skip
    """Run decode attention once on zeros; where columns are `scored`, prompts' scores as well.

    packing: of the KV slots, weights: of matrices, where these are packed; to_int8: these become int8 rows. rolling:
    with keys that are turned as they are read. rotary: the model has rotary embeddings; with them come RMS norms and
    gated MLPs.

    A few seconds the first time on a machine, in a process of their own, then some tenths of one.
    """
    compile_subprocess(_call_all, device, dtype, scored, packing, weights, rolling, rotary, to_int8)


def _call_all(
    device: torch.device, dtype: torch.dtype, scored: bool, packing: SlotPacking | None, weights: Packing | None,
    rolling: bool, rotary: bool, to_int8: bool,
) -> None:  # fmt: skip
    columns = torch.zeros(1, _ROWS, _SLOTS, _WIDTH, dtype=dtype, device=device)
    q = columns[0, :, :1].contiguous()
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
    if packing is None:
        attend_scored(q, columns, columns, filled, 1.0, state)
    else:
        wide = columns.new_zeros(*columns.shape[:-1], packing.width)
        packed = pack_columns(wide, packing)
        attend_packed(wide[0, :, :1], packed, packed, filled, 1.0, packing, state)
    if rotary:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotate((columns[0],), victims)
        rms_norm(columns[0, 0], columns[0, 0, 0], 1.0, columns[0, 0].clone())
        silu_gated(columns[0, 0], columns[0, 0])
    if rolling:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotated(columns[0], positions)
    _, lse = causal_attention_lse(columns, columns, columns, 1.0)
    if scored:
        column_sums(columns, columns, lse, 1.0)
    if weights is not None:
        rows = torch.zeros(_ROWS, weights.row_bytes(_WIDTH), dtype=torch.uint8, device=device)
        out = torch.empty(_ROWS, _WIDTH, dtype=dtype, device=device)
        if weights.by_row:
            _multiply(rows, out)
        elif to_int8:
            _requantise(device)
            _multiply(torch.zeros(_ROWS, INT8.row_bytes(_WIDTH), dtype=torch.uint8, device=device), out)
        else:
            unpack_rows(rows, weights.bits, out)


def _requantise(device: torch.device) -> None:
    """Packed rows into int8 rows, blocked ones where there are such, and in order."""
    packed, memory = (
        torch.zeros(BLOCK_ROWS, packing.row_bytes(_WIDTH), dtype=torch.uint8, device=device)
        for packing in (Packing(BITS), INT8)
    )
    for parts in (blank_int8_rows(memory), (memory,)):
        requantise_rows(packed, 0, parts, _WIDTH)


def _multiply(packed: torch.Tensor, x: torch.Tensor) -> None:
    """A product in int8 with packed rows, and what follows one with blocked rows."""
    sizes = dict.fromkeys(("int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums"), _WIDTH)
    room = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=x.device)
    out, scales = x[:, : len(packed)].clone(), torch.zeros(len(packed), device=x.device)
    multiply_each(x, [([Int8Rows(packed, _WIDTH, Workspace(room, sizes, x.dtype))], None, out)])
    rescale(out.float(), scales, scales, None, out, adds=False)
