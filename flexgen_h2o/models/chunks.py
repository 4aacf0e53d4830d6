"""Runs of tokens short enough that a layer's wide activations stay small."""

from __future__ import annotations

from collections.abc import Iterator

TOKEN_CHUNK = 1024


def token_chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """[start, end) runs of at most TOKEN_CHUNK tokens."""
    for start in range(0, tokens, TOKEN_CHUNK):
        yield start, min(start + TOKEN_CHUNK, tokens)
