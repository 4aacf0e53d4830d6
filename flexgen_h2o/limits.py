"""Sizes that the engine takes and the planner counts: one place, so that they cannot drift apart."""

from __future__ import annotations

PAGE = 4096  # bytes; alignment of O_DIRECT reads and writes
ALIGN = 64  # bytes; alignment of tensors that are packed side by side
TRANSFER_CHUNK = 4 * 2**20  # bytes of one disk request
READ_THREADS, WRITE_THREADS = 2, 1
STAGING_BYTES = TRANSFER_CHUNK + 2 * PAGE  # of one disk thread: a chunk and its ragged ends
SAMPLING_CHUNK = 2**19  # logits whose probabilities are worked out at a time
SCORE_TILE_BYTES = 4 * 2**20  # of an n x n matrix that exist at a time: what both cores' caches hold
MASK_ROWS = 256  # queries at a time, where they are the last of a prompt and need a mask
SPARSE_CHUNK = 2**22  # values gathered at a time by --attn-sparsity
PACKED_CHUNK = 2**22  # values of the KV cache that are unpacked at a time where they are not read packed
TOKEN_CHUNK = 1024  # tokens whose wide activations exist at a time
NORM_CHUNK = 128  # rows that an RMS norm holds in fp32 at a time
ROTARY_CHUNK = 256  # tokens whose queries and keys are rotated at a time
ROLLING_CHUNK = 2**20  # numbers of keys in slots that are rotated by their ranks at a time
GIVEN_CHUNK = 64  # tokens of a row, known beforehand, that one decode sweep takes
ROW_BLOCK = 16  # matrices are split over tiers at multiples of this many rows
WRITE_BACK_STEPS = 16  # decode steps whose columns wait in RAM before a disk unit of the KV cache is written back
SEGMENT_SLOTS = 64  # at most; KV slots that are read and written as one area
UNPACK_CHUNK = 2**20  # packed weights that torch operations unpack at a time
PACK_CHUNK = 2**20  # weights that are packed at a time
INT8_TILE = 2**21  # sums of int8 products that exist at a time
INT8_BLOCK_ROWS = INT8_TILE // 128  # of a blocked int8 matrix: so many that 128 tokens are multiplied at a time
BLOCK_CHUNK = 32 * 2**20  # bytes of a matrix that are brought into oneDNN's blocked layout, and multiplied, at a time
BLOCK_ROWS = 64  # rows and columns of what is blocked are multiples of this: other sizes would be padded
