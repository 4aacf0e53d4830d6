"""Compile the kernels, or load what was compiled before, so that no sweep of a run waits for it.

Loops are compiled in a separate process, which leaves them on disk. numba and LLVM permanently keep
100 MB and more of the process that compiles, which no budget counts. Loading compiled loops takes
little memory.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.beside import WHOLE, SlotForm, WholeColumns
from flexgen_h2o.kernels.decode_step import FILLED, PLACE, StepSlots, attend_step
from flexgen_h2o.kernels.elementwise import (
    Rotation,
    add_weighted,
    clamped_gate,
    rms_norm,
    silu_gated,
)
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.prefill_attention import causal_attention_lse, column_sums
from flexgen_h2o.kernels.prompt_columns import PromptSlots, choose_kept, put_prompts
from flexgen_h2o.kernels.slots import (
    Pair,
    ScoreState,
    attend,
    get_last_slots,
    put_packed,
    put_slots,
)
from flexgen_h2o.kernels.workspace import warm_up_helpers

_LONGEST_S = 300.0
# The process that compiles imports only from where this process does.
_CODE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
function(*arguments)
"""


class _NotCompiledError(Exception):
    """Signal that a loop would have to be compiled."""


def compile_subprocess(function: Callable[..., object], *arguments: object) -> None:
    """Call function(*arguments) so that its loops are compiled; the result is not used.

    If some loops are not compiled yet, another process calls the function first. function: at
    module level; arguments: can be pickled. The call may end at any loop and begin again. If
    nothing can be cached on disk, or no process can be started, this process compiles.
    """
    from flexgen_h2o.kernels.jit import cache_folder

    if cache_folder() is not None and sys.executable:
        try:
            with _refusing_to_compile():
                function(*arguments)
            return
        except _NotCompiledError:
            _call_in_a_process(function, arguments)
    function(*arguments)


@contextmanager
def _refusing_to_compile() -> Iterator[None]:
    """Raise _NotCompiledError if this thread would compile; loops that are on disk are loaded."""
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
    print(
        "# compiling loops, once: up to half a minute, longer on a busy machine",
        file=sys.stderr,
        flush=True,
    )
    given = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    quiet = subprocess.DEVNULL
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-c", _CODE],
            input=given,
            stdout=quiet,
            stderr=quiet,
            timeout=_LONGEST_S,
            check=False,
        )


_ROWS = 1
_SLOTS = 4
_WIDTH = 64
_CARD_SLOTS = 16  # strides become multiples of 16, as in runs, and kernels are compiled for that


def warm_up(
    device: torch.device,
    dtype: torch.dtype,
    scored: bool,
    packing: KVPacking | None = None,
    rolling: bool = False,
    rotary: bool = False,
    weights: Callable[[torch.device, torch.dtype], None] | None = None,
) -> None:
    """Run the kernels of a model's layers once on zeros, for `compile_subprocess`.

    scored: columns have scores, so prompts' scores are computed too. packing: packing of the KV
    slots. rolling: keys are rotated when they are read. rotary: the model has rotary embeddings,
    and with them RMS norms and gated MLPs. weights: calls the kernels of a weight format.

    The first call on a machine takes a few seconds, later calls some tenths of a second.
    """
    warm_up_helpers()
    columns = torch.zeros(1, _ROWS, _SLOTS, _WIDTH, dtype=dtype, device=device)
    whole = (_ROWS, _SLOTS)
    single = (_ROWS,)
    positions, oldest, newest, victims = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (whole, single, single, single)
    )
    scores = torch.zeros(whole, device=device, dtype=torch.float32)
    gains = torch.ones(single, device=device, dtype=torch.float32)
    state = ScoreState(scores, positions, oldest, newest, 1.0, gains, victims)
    filled = victims.new_full(single, _SLOTS)
    first = torch.zeros(_ROWS, 1, dtype=torch.int64, device=device)
    column = columns[0, :, :1].clone()
    put_slots((columns, columns), first, (column, column))
    get_last_slots((columns, columns), first, (column, column))
    stored, form, q = _stored(packing, dtype, device)
    if packing is not None:
        put_packed(stored, first[:, 0], (q[:, 0], q[:, 0]), form, first[:, 0] - 1)
        hadamard(q)
    attend(q, *stored, filled, 1.0, state, form)
    if rotary:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotate((columns[0],), victims)
        rms_norm(columns[0, 0], columns[0, 0, 0], 1.0, columns[0, 0].clone())
        silu_gated(columns[0, 0], columns[0, 0])
        clamped_gate(
            columns[0, 0],
            1.0,
            1.0,
            columns[0, 0, :, ::2].clone(memory_format=torch.contiguous_format),
        )
        no_rows = torch.zeros(len(columns[0, 0]), device=columns.device, dtype=torch.float32)
        add_weighted(columns[0, 0], no_rows.int(), no_rows, columns[0, 0].clone())
    if rolling:
        Rotation(gains.expand(_WIDTH // 2), 1.0).rotated(columns[0], positions)
    _, lse = causal_attention_lse(columns, columns, columns, 1.0)
    if scored:
        column_sums(columns, columns, lse, 1.0)
    if weights is not None:
        weights(device, dtype)


def warm_up_card(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int],
    scored: bool,
    per_query: bool = False,
    packing: KVPacking | None = None,
    before: Sequence[int] = (0,),
) -> None:
    """Launch a model's kernels on a card once, on zeros.

    Triton compiles each kernel for the model's sizes, and keeps it on disk.

    sizes: hidden, heads, kv-heads, numbers of a head, and pairs of rotary embeddings, which come
    with RMS norms and gated MLPs (0: none). scored: columns have scores. per_query: scores are
    compared over the number of queries that saw their columns. before: what queries attend to in
    front of slots (StepSlots.before): 0 nothing, 1 a sink without values, 2 a prefix with values.
    """
    hidden, heads, kv_heads, width, pairs = sizes
    zeros = partial(torch.zeros, device=device)
    q, k, v = (zeros(1, count, width, dtype=dtype) for count in (heads, kv_heads, kv_heads))
    # `warm_up` compiles a CPU's loops, for all sizes; torch's operations need no compiling
    if not triton.supports(q):
        return
    queries, keys, values = (t.unsqueeze(0).transpose(1, 2) for t in (q, k, v))
    _, lse = causal_attention_lse(queries, keys, values, 1.0)
    if scored:
        column_sums(queries, keys, lse, 1.0)
    areas, form, _ = _stored(packing, dtype, device, (kv_heads, _CARD_SLOTS, width))
    state = zeros(7, 1, dtype=torch.int32)
    state[FILLED] = 1
    state[PLACE] = -1
    slots = StepSlots(*areas, 0, kv_heads, state, zeros(kv_heads, dtype=torch.int64), form=form)
    if scored:
        scores = zeros(kv_heads, _CARD_SLOTS)
        positions = scores.int()
        victims = scores[:, 0].int()
        slots = replace(
            slots, scores=scores, positions=positions, victims=victims, per_query=per_query
        )
        choose_kept(zeros(1, kv_heads, 2), 0, 2, 1)
    of_prompts = PromptSlots(*areas, 0, form, 0, slots.positions, slots.scores)
    kept = zeros(1, kv_heads, 1, dtype=torch.int64)
    of_token = zeros(1, kv_heads, 1) if scored else None
    for smooths in (True, False) if packing is not None else (True,):
        put_prompts(
            k.unsqueeze(0), v.unsqueeze(0), kept, of_token, replace(of_prompts, smooths=smooths)
        )
    lse = zeros(kv_heads, heads // kv_heads)
    mixed = q.view(kv_heads, -1, width)
    for kind in before:
        given = (None, (None, lse), (mixed, lse))[kind]
        attend_step(q, k, v, replace(slots, before=given), 1.0, torch.empty_like(q))
    if packing is not None:
        hadamard(k)
    if pairs:
        Rotation(zeros(pairs), 1.0).rotate((q, k), zeros(1, dtype=torch.int64))
        for x in (zeros(1, hidden, dtype=dtype), q):
            rms_norm(x, x.view(-1)[: x.shape[-1]], 1.0, torch.empty_like(x))
        silu_gated(zeros(1, hidden, dtype=dtype), zeros(1, hidden, dtype=dtype))


def _stored(
    packing: KVPacking | None,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int, int] = (_ROWS, _SLOTS, _WIDTH),
) -> tuple[Pair, SlotForm, torch.Tensor]:
    """Return zeros as stored keys and values (plain or packed), their SlotForm, and a query.

    shape: rows, slots, and numbers if nothing is packed.
    """
    rows = shape[0]
    width = shape[2] if packing is None else packing.width
    slots = torch.zeros(1, *shape[:2], width, dtype=dtype, device=device)
    q = slots[0, :, :1].contiguous()
    none = slots[0, :, :0]
    if packing is None:
        return (slots, slots), WHOLE, q
    ranges = q.new_ones(rows, width, dtype=torch.bfloat16)
    slots_of_none = q.new_zeros(rows, 0, dtype=torch.int32)
    form = SlotForm(packing, WholeColumns(ranges, ranges, none, none, slots_of_none))
    return (pack_columns(slots, packing.keys), pack_columns(slots, packing.values)), form, q
