"""Sizes that are measured in a second."""

from flexgen_h2o.core.units import MIB
from flexgen_h2o.planner.measure.bench import Sizes

TINY = Sizes(
    figure_s=0.002,
    longest_s=0.05,
    disk_bytes=8 * MIB,
    disk_s=0.1,
    link_bytes=MIB,
    memory_bytes=MIB,
    weight_bytes=MIB,
    widths=(64, 128),
    hidden=(64,),
    heads=(64,),
    rows=(1, 8),
    prompt_tokens=64,
    prompt_lengths=(16, 32),
    prompt_width=128,
    cache_bytes=MIB,
    head_widths=(64,),
    slots=32,
    block=(64, 128),
    logits=(4, 512),
    steps=6,
    step_rows=(2, 4),
    step_width=64,
    step_prompt=32,
    beside_s=0.05,
)
