"""Make a run's first line: the model, what is on disk, the batch, and how long it will take."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.units import counted, format_bytes, format_seconds, three_digits
from flexgen_h2o.engine.memory_plan import checkpoint_bytes
from flexgen_h2o.engine.report import NOT_MEASURED
from flexgen_h2o.planner.profile import NOMINAL

if TYPE_CHECKING:
    from flexgen_h2o.engine.sequence import Sequence
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.tiers.device import Device


def opening_line(llm: LLM, sequences: abc.Sequence[Sequence], num_prompts: int) -> str:
    """Return what will happen on the open engine.

    sequences: those that have been read so far.
    num_prompts: number of all prompts, which are assumed to be like those read.
    """
    policy = llm.policy
    assert policy is not None
    spec = llm.model.spec
    size = format_bytes(checkpoint_bytes(spec, DTYPE_BYTES[llm.dtype]))
    weights = _places("weights", policy.weight_shares, llm.device)
    cache = _places("KV cache", policy.cache_shares, llm.device)
    batch = min(policy.block_size, num_prompts)
    batches = "" if num_prompts == 1 else f" in batches of {batch}"
    about = (
        f"{llm.model.name}, {size} in {llm.dtype}; {weights}; {cache}; "
        f"{counted(num_prompts, 'prompt')}{batches}"
    )
    predicted = llm.predict_run(sequences)
    if predicted is None:
        return about
    seconds = format_seconds(predicted.total_s * num_prompts / len(sequences))
    speed = f"{three_digits(predicted.tokens_per_s)} tokens/s"
    if num_prompts > 1:
        alone = llm.predict_run(sequences[:1])
        assert alone is not None
        speed += f", one prompt alone {three_digits(alone.tokens_per_s)}"
    if llm.planner.profile.machine == NOMINAL:
        return (
            f"{about}; {seconds} ({speed}), if no answer ends early: may be several times off, "
            f"{NOT_MEASURED}"
        )
    doubt = llm.planner.doubt()
    about = f"{about}; about {seconds} ({speed}), if no answer ends early"
    return f"{about}; {doubt}" if doubt else about


def _places(what: str, shares: tuple[float, float, float], tier: Device) -> str:
    """Return where the shares on device, host and disk are: `weights 50% in RAM, 50% on disk`."""
    device, host, disk = shares
    if tier.is_host:
        host = device + host
        device = 0.0
    on_device = "in memory" if tier.card() is None else "on the GPU"
    named = ((device, on_device), (host, "in RAM"), (disk, "on disk"))
    found = [(share, place) for share, place in named if share]
    if len(found) == 1:
        return f"{what} {found[0][1]}"
    return f"{what} " + ", ".join(f"{share:.0%} {place}" for share, place in found)
