"""Runs of tokens short enough that a layer's wide activations stay small."""

from __future__ import annotations

from collections.abc import Iterator

from flexgen_h2o.limits import TOKEN_CHUNK


def token_chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """[start, end) runs of at most TOKEN_CHUNK tokens."""
    for start in range(0, tokens, TOKEN_CHUNK):
        yield start, min(start + TOKEN_CHUNK, tokens)
