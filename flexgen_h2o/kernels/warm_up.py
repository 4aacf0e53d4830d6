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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

# Operators register themselves when they are imported.
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import elementwise, hadamard, triton  # noqa: F401
from flexgen_h2o.kernels.decode_step import FILLED, PLACE, StepSlots, attend_step
from flexgen_h2o.kernels.ops import OPERATORS, Layers
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.prefill_attention import add_tile, causal_attention_lse, column_sums
from flexgen_h2o.kernels.prompt_columns import PromptSlots, choose_kept, put_prompts
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns
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


_SLOTS = 16  # strides become multiples of 16, as in runs, and kernels are compiled for that


def warm_up(
    device: torch.device,
    dtype: torch.dtype,
    scored: bool,
    packing: KVPacking | None = None,
    rolling: bool = False,
    rotary: bool = False,
    weights: Callable[[torch.device, torch.dtype], None] | None = None,
) -> None:
    """Run the loops of a model's layers once on zeros, for `compile_subprocess`.

    A loop is compiled for all sizes. scored, packing, rolling: as in Layers. rotary: the model has
    rotary embeddings. weights: calls the loops, or the kernels, of a weight format.

    The first call on a machine takes a few seconds, later calls some tenths of a second.
    """
    warm_up_helpers()
    width = 64 if packing is None else packing.keys.width
    layers = Layers(
        device,
        dtype,
        width=width,
        pairs=width // 2 if rotary else 0,
        scored=scored,
        packing=packing,
        rolling=rolling,
    )
    if layers.is_on_cpu:
        _call_operators(layers)
    if weights is not None:
        weights(device, dtype)


def warm_up_card(layers: Layers) -> None:
    """Launch the kernels of a model's layers on a card once, on zeros.

    Triton compiles each kernel for the model's sizes, and keeps it on disk.
    """
    if triton.supports(layers.zeros(1)):  # other cards have only torch operations
        _call_operators(layers)


def _call_operators(layers: Layers) -> None:
    for operator in OPERATORS:
        for args in operator.calls(layers):
            operator(*args)


def _prompts(layers: Layers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries, and the keys or values, of a prompt of one token."""
    q = layers.zeros(1, 1, layers.heads, layers.width)
    k = layers.zeros(1, 1, layers.kv_heads, layers.width)
    return q.transpose(1, 2), k.transpose(1, 2)


@causal_attention_lse.example
def _attention_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    q, k = _prompts(layers)
    yield q, k, k, 1.0


@column_sums.example
def _sums_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.scored:
        q, k = _prompts(layers)
        yield q, k, layers.zeros(1, layers.heads, 1, dtype=torch.float32), 1.0


@add_tile.example
def _tile_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.scored:
        products = layers.zeros(1, 1, 1, 1)
        sums = layers.zeros(1, 1, dtype=torch.float32)
        yield products, sums.unsqueeze(2), 1.0, sums, 0


@choose_kept.example
def _choose_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.scored:
        yield layers.zeros(1, layers.kv_heads, 2, dtype=torch.float32), 0, 2, 1


@put_slots.example
@get_last_slots.example
def _slot_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    whole = layers.zeros(1, 1, _SLOTS, layers.width)
    column = layers.zeros(1, 1, layers.width)
    yield (whole, whole), layers.zeros(1, 1, dtype=torch.int64), (column, column)


@put_packed.example
def _packed_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    if layers.packing is not None:
        areas, form = _stored(layers)
        column = layers.zeros(layers.kv_heads, layers.width)
        slots = layers.zeros(layers.kv_heads, dtype=torch.int64)
        yield areas, slots, (column, column), form, slots - 1


@attend.example
def _attend_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    areas, form = _stored(layers)
    rows = layers.kv_heads
    scores = layers.zeros(rows, _SLOTS, dtype=torch.float32)
    single = layers.zeros(rows, dtype=torch.int32)
    gains = layers.zeros(rows, dtype=torch.float32)
    state = ScoreState(scores, scores.int(), single, single, 1.0, gains, single.clone())
    yield layers.zeros(rows, 1, layers.width), *areas, single + _SLOTS, 1.0, state, form


@put_prompts.example
def _put_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    k = layers.zeros(1, 1, layers.kv_heads, layers.width)
    kept = layers.zeros(1, layers.kv_heads, 1, dtype=torch.int64)
    scores = layers.zeros(1, layers.kv_heads, 1, dtype=torch.float32) if layers.scored else None
    slots = _step_slots(layers)
    prompts = PromptSlots(slots.keys, slots.values, 0, slots.form, 0, slots.positions, slots.scores)
    for smooths in (True, False) if layers.packing is not None else (True,):
        yield k, k, kept, scores, replace(prompts, smooths=smooths)


@attend_step.example
def _step_calls(layers: Layers) -> Iterator[tuple[Any, ...]]:
    q, k = (layers.zeros(1, heads, layers.width) for heads in (layers.heads, layers.kv_heads))
    slots = _step_slots(layers)
    lse = layers.zeros(layers.kv_heads, layers.heads // layers.kv_heads, dtype=torch.float32)
    mixed = q.view(layers.kv_heads, -1, layers.width)
    for kind in layers.before:
        before = (None, (None, lse), (mixed, lse))[kind]
        yield q, k, k, replace(slots, before=before), 1.0, torch.empty_like(q)


def _step_slots(layers: Layers) -> StepSlots:
    """Return the slots of a sequence with one filled slot."""
    areas, form = _stored(layers)
    state = layers.zeros(7, 1, dtype=torch.int32)
    state[FILLED] = 1
    state[PLACE] = -1
    taken = layers.zeros(layers.kv_heads, dtype=torch.int64)
    slots = StepSlots(*areas, 0, layers.kv_heads, state, taken, form=form)
    if not layers.scored:
        return slots
    scores = layers.zeros(layers.kv_heads, _SLOTS, dtype=torch.float32)
    return replace(
        slots,
        scores=scores,
        positions=scores.int(),
        victims=scores[:, 0].int(),
        per_query=layers.per_query,
    )


def _stored(layers: Layers) -> tuple[Pair, SlotForm]:
    """Return zeros as stored keys and values, and their SlotForm."""
    rows = layers.kv_heads
    slots = layers.zeros(1, rows, _SLOTS, layers.width)
    packing = layers.packing
    if packing is None:
        return (slots, slots), WHOLE
    ranges = slots.new_ones(rows, layers.width, dtype=torch.bfloat16)
    none = slots[0, :, :0]
    whole = WholeColumns(ranges, ranges, none, none, layers.zeros(rows, 0, dtype=torch.int32))
    areas = pack_columns(slots, packing.keys), pack_columns(slots, packing.values)
    return areas, SlotForm(packing, whole)
