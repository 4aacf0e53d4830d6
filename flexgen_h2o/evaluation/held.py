"""KV columns and bytes that a row holds."""

from __future__ import annotations

from flexgen_h2o.config import DTYPE_BYTES
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.llm import LLM
from flexgen_h2o.run_facts import column_bytes


def held_columns(eviction: Eviction, prompt_len: int, new_tokens: int, blocks: int) -> int:
    """Of all transformer blocks together, once a row has got so many new tokens; the newest has no column yet."""
    return sum(eviction.slots(prompt_len, new_tokens, block, blocks) for block in range(blocks))


def bytes_of_column(llm: LLM) -> int:
    """Of the keys and values of all kv-heads in one block, as the LLM's last run held them."""
    assert llm.policy is not None
    return column_bytes(llm.model.spec, llm.policy, DTYPE_BYTES[llm.dtype])[0]
