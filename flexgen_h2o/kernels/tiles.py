"""How large the pieces of an n x n matrix are that exist at a time."""

from __future__ import annotations

from flexgen_h2o.limits import SCORE_TILE_BYTES

TILE_ROWS = 256  # query rows; fewer where a tile of so many is over TILE_BYTES for each thread
LEAST_TILE_ROWS = 16  # fewer make matrix products slow
TILE_BYTES = SCORE_TILE_BYTES  # of all products that exist at a time
REFERENCE_ROWS = 32  # query rows where all heads of all prompts are worked on at once
