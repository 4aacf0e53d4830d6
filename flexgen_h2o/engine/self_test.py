"""A short test whether a KV cache in few bits changes this model's answers.

Its text comes with this module. One run has two sequences of the same tokens. The first is all
prompt, so its attention reads keys and values as they are. The second takes the last tokens in
decode steps. So its attention reads them packed, except for the newest ones, as in any run.
"""

from __future__ import annotations

from collections import abc

import torch

from flexgen_h2o.core.settings import DECODE, MAX_LOGPROBS, PREFILL, SamplingParams
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.models.load import Model

MAX_TOKENS = 256  # tokens of the text that are used
MIN_TOKENS = 128
STEPS = 64  # tokens that the packed sequence takes in decode steps, all in one pass
# Nats per token. SmolLM2-135M has .004 with 4 bits, .009 with 4/3, .021 with 3.
MAX_KL = 0.1
PACKED = 1  # the index of the packed sequence
PASSES = 3  # the most passes over the weights
# Seconds of a decode step of one sequence in a transformer block, without reading weights.
BLOCK_STEP_S = 0.001
JOB_OVER_TEST = 50  # jobs that take less than so many times the test's time run without it

TEXT = """\
The mill stood where the river bends, a little below the old stone bridge. Every morning before six the miller \
opened the gate, and the water came down the channel and turned the wheel. In dry summers there was too little of \
it, so he ground at night, when nobody upstream let the meadows drink. His daughter Anna kept the books. She wrote \
down who brought grain, how many sacks there were, and what each farmer owed: one part in sixteen was the price, and \
it had been the same in her grandfather's time.

In the spring of 1871 the river rose for nine days. On the third day it carried away the fences, and on the fifth it \
took the lower wheel. The miller moved the flour to the loft and sent for the carpenter, who lived eleven miles away \
in Northfield. "I can build you a new wheel," the carpenter said when he had seen the damage, "but I need oak, and \
oak must dry. Come back to me in August." The miller shook his head. "My neighbours cannot eat in August what they \
need in May."

So Anna asked the smith whether iron would do. He had made plates for the railway, and he drew a wheel with twenty- \
four buckets, each as wide as a man's arm is long. It cost more than the mill earned in a year. The village paid a \
third of it, because a village without bread is not a village for long, and the rest was to be returned in flour. \
The iron wheel turned for the first time on the second of June. It was louder than the old one, and it needed less \
water. Years later, when people asked Anna why the mill had survived the flood, she opened the book at that page and \
showed them the names of all who had paid.
"""  # noqa: E501


def tokens_of_test(model: Model) -> list[int]:
    """Return the token ids of the test text, as many as the model has positions for.

    Return [] if there are too few, if there is no tokenizer, or if the weights are random.
    """
    if model.tokenizer is None or model.random:
        return []
    ids = model.encode_prefix(TEXT, MAX_TOKENS)[: min(MAX_TOKENS, model.spec.max_positions)]
    return ids if len(ids) >= MIN_TOKENS else []


def sequences_of_test(ids: abc.Sequence[int]) -> list[Sequence]:
    """Return the two sequences of the test, the one with whole keys and values first."""
    before = tuple(ids[:-STEPS])
    after = tuple(ids[-STEPS:])
    whole = SamplingParams(score=after, score_mode=PREFILL, logprobs=MAX_LOGPROBS)
    packed = SamplingParams(score=after, score_mode=DECODE)
    return [
        Sequence(0, before, params=whole),
        Sequence(PACKED, before, params=packed),
    ]


def likeliest_divergence(whole: TokenLogprobs, logits: torch.Tensor) -> float:
    """Return KL(whole || packed) in nats over the likeliest tokens of `whole` and, as one event,
    all others.

    It is at most the divergence over all tokens.

    logits: (vocab,) of the packed sequence, any float dtype.
    """
    packed = logits.double().log_softmax(dim=-1).cpu()
    ids = torch.tensor([token for token, _ in whole.top], device="cpu")
    p = torch.tensor([logprob for _, logprob in whole.top], dtype=torch.float64, device="cpu")
    q = packed[ids]
    p_others = (1 - p.exp().sum()).clamp_min(1e-12)
    q_others = (1 - q.exp().sum()).clamp_min(1e-12)
    found = (p.exp() * (p - q)).sum() + p_others * (p_others / q_others).log()
    return max(0.0, found.item())


def warning_of(bits: tuple[int, int], kl: float) -> str:
    """Return the line for the user.

    bits: (of keys, of values).
    kl: mean divergence in nats, a lower bound.
    """
    keys, values = bits
    asked = str(keys) if keys == values else f"{keys}/{values}"
    better = 4 if min(bits) < 4 else 8
    return (
        f"warning: with --kv-bits {asked} the next token's probabilities differ from the whole KV "
        "cache's by KL "
        f"{kl:.2f} or more on a test text (more than {MAX_KL:g}); use --kv-bits {better}, or "
        "measure: "
        "flexgen-h2o evaluate frontier"
    )
