"""The interface of eviction policies, and what they have in common.

A column is one KV entry: the key and the value of one token in one layer and kv-head. A row is the
columns of one sequence and kv-head. A policy says how many columns a row keeps and what the engine
must measure, and it ranks columns. The engine does the rest: slots, protection of sinks and recent
columns, the choice of the column that leaves, and tiers.

No policy imports torch before it computes, so that command lines can list all policies quickly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ORIGINAL, PROMPT, ROLLING, EvictionSettings

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.core.model import ModelSpec
    from flexgen_h2o.core.packing import KVSizes

EVERYTHING = 2**30  # more columns than any row has
# The tensors that may be recorded of slots (KVPart in kvcache/part.py), in the order of
# their bytes.
POSITIONS = "positions"
SCORES = "scores"
RANKS = "ranks"


@dataclass(frozen=True)
class RowBudget:
    """The numbers of columns that a row keeps in one layer. `Eviction.budget` makes it."""

    sinks: int  # first columns of the sequence, which never leave
    heavy: int  # other columns, those that rank highest
    recent: int  # newest columns, which do not leave while they are recent

    @property
    def columns(self) -> int:
        """All columns that the row keeps."""
        return self.sinks + self.heavy + self.recent


@dataclass(frozen=True)
class Needs:
    """The measurements and records that the engine makes for a policy.

    Each policy sets them. In a decode step a slot's score becomes decay x score + gain x p. Here p
    is the attention probability that the slot received, summed over the query heads of its kv-head.
    """

    # Tensors recorded of slots: some of POSITIONS, SCORES and RANKS, in this order. () for a
    # policy that drops nothing. With RANKS, keys are stored before their rotary embeddings, and
    # each key is rotated by its rank when it is read.
    record: tuple[str, ...] = ()
    # Number of last query rows of a prompt whose attention is summed per column; None: all rows.
    query_rows: int | None = 0
    decay: float = 1.0  # factor of the old score in each decode step
    gain: float = 1.0  # factor of the probability that is added
    # Multiply the gain by columns held / columns seen so far. A query that attends to fewer columns
    # gives more to each of them.
    even: bool = False
    # `rank` returns the scores, so the column with the lowest score leaves. The decode kernel can
    # then find it.
    ranks_by_score: bool = True
    # With ranks_by_score: `rank` returns the scores divided by the number of queries that saw the
    # column. The decode kernel can do this too.
    per_query: bool = False

    def __post_init__(self) -> None:
        if self.record and self.ranks_by_score and SCORES not in self.record:
            raise ValueError(
                "ranks_by_score: record has no SCORES; set it to False and give a `rank`"
            )

    @property
    def in_one_launch(self) -> bool:
        """Whether one GPU launch can do decode attention, update the record and choose victims."""
        return not self.record or (self.ranks_by_score and set(self.record) == {POSITIONS, SCORES})


@dataclass(frozen=True)
class Columns:
    """The columns of `b` sequences, as a policy sees them when it ranks them.

    kvcache/prefill.py and kvcache/decode.py make it.

    For slots that are not filled, all entries except may_leave are arbitrary.
    """

    block: int  # the transformer block
    positions: torch.Tensor  # (b, kv_heads, n) int32: positions of the columns
    # (b, kv_heads, n) bool: False for sinks, recent columns and slots that are not filled. Ranks of
    # such columns are not read.
    may_leave: torch.Tensor
    newest: torch.Tensor  # (b,) int64: position of the newest column
    scores: torch.Tensor | None = None  # (b, kv_heads, n) fp32; None if not in the record

    def seen(self) -> torch.Tensor:
        """Return the number of queries that saw each column, (b, kv_heads, n) fp32.

        The query of the column's own token is included.
        """
        return (self.newest.view(-1, 1, 1) + 1 - self.positions).float()


_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # xxHash's 32-bit primes: large, odd, of mixed bits
_MASK = 0xFFFFFFFF


def pseudo_random(columns: Columns, seed: int) -> torch.Tensor:
    """Return a hash of seed, block, kv-head and position, (b, kv_heads, n) int64 in [0, 2**24)."""
    import torch

    positions = columns.positions.long()
    heads = torch.arange(positions.shape[1], device=positions.device).view(1, -1, 1)
    block = (columns.block + seed * 65537 + 1) * _ODD[2] & _MASK
    mixed = (positions + 1) * _ODD[0] + (heads + 1) * _ODD[1] + block
    for shift in (15, 13, 16):
        mixed = mixed & _MASK
        mixed = (mixed ^ (mixed >> shift)) * _ODD[1]
    return (mixed & _MASK) >> 8


class Eviction(Protocol):
    """An eviction policy: it decides which KV columns each sequence and kv-head keeps."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        """Return the columns that a row keeps in transformer block `block`.

        prompt_len: tokens of the prompt. gen_len: most new tokens.
        """

    def slots(self, prompt_len: int, gen_len: int, block: int) -> int:
        """Return the slots that a row needs to grow by `gen_len` tokens in block `block`.

        The last new token's column is never read, so it needs no slot.
        """

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        """Return the scores that a prompt's columns start with, in the shape of `sums`.

        It is called only if the record has SCORES.

        sums: (b, kv_heads, n) fp32, the attention that each column received from the last
            `query_rows` query rows.
        query_rows: `needs.query_rows`, or all rows of a shorter prompt.
        """

    def rank(self, columns: Columns) -> torch.Tensor:
        """Return ranks (b, kv_heads, n) fp32.

        Columns with the lowest ranks leave first; among equal ranks, the oldest column leaves.
        """

    def to_json(self) -> dict[str, Any]: ...


DEFAULT_RATIO = 0.1


@dataclass(frozen=True)
class Evicting(EvictionSettings):
    """A policy that drops columns, with its settings.

    Each policy is a subclass and may add settings. All settings are checked when it is made.
    """

    # Bytes of columns for the model and its compression, which the setting kv_bytes needs. Set by
    # `with_sizes`.
    kv_sizes: KVSizes | None = None
    name: ClassVar[str] = ""

    @cached_property  # read several times in each layer of each step
    def needs(self) -> Needs:
        """Measurements and records for the policy: `measures`, and RANKS with rolling positions."""
        found = self.measures
        record = (*found.record, RANKS) if self.positions == ROLLING else found.record
        return replace(found, record=record)

    @property
    def measures(self) -> Needs:
        """Needs of the policy itself, which do not depend on original or rolling positions."""
        raise NotImplementedError

    def split(self, heavy: int, recent: int) -> RowBudget:
        """Return how the policy divides its heavy + recent columns."""
        return RowBudget(0, heavy, recent)

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        if self.kv_budget is None and self.kv_bytes is None:
            heavy = self._count("heavy", prompt_len)
            recent = self._count("recent", prompt_len)
        else:
            columns = self._columns_of(prompt_len + gen_len)
            heavy = columns // 2
            recent = columns - heavy
        return (
            self.split(heavy, recent)
            if self.protect is None
            else self._protecting(heavy, recent, prompt_len)
        )

    def _columns_of(self, tokens: int) -> int:
        """Return the columns that kv_budget or kv_bytes allows a row.

        tokens: prompt and new tokens together.
        """
        if self.kv_bytes is None:
            return max(1, int((self.kv_budget or 0.0) * tokens))
        if self.kv_sizes is None:
            raise UsageError(
                "kv_bytes: is a share of a model's KV cache; give the policy to an LLM"
            )
        columns = _sized_columns(self.kv_sizes, self.kv_bytes, tokens)
        if columns < 1:
            raise UsageError(
                f"--kv-bytes {self.kv_bytes}: leaves no KV entry of a prompt and answer of "
                f"{tokens} tokens in all; "
                "give a larger share"
            )
        return columns

    def _protecting(self, heavy: int, recent: int, prompt_len: int) -> RowBudget:
        """Return a budget of heavy + recent columns in all, which includes the protected ones.

        Raise UsageError if no column is left for new tokens.
        """
        protected = min(
            prompt_len, prompt_len if self.protect == PROMPT else int(self.protect or 0)
        )
        columns = heavy + recent
        if (left := columns - protected) < 1:
            flag = (
                "--kv-bytes"
                if self.kv_bytes
                else "--kv-budget"
                if self.kv_budget
                else "--hh-ratio or --hh-size"
            )
            raise UsageError(
                f"--protect {self.protect}: protects {protected} KV entries of a prompt of "
                f"{prompt_len} tokens, and "
                f"a sequence keeps {columns} in all; give a larger {flag}, or protect fewer"
            )
        own = self.split(heavy * left // columns, left - heavy * left // columns)
        sinks = max(0, own.sinks - protected)  # The policy's own sinks may be protected already.
        return RowBudget(protected + sinks, own.heavy + own.sinks - sinks, own.recent)

    def slots(self, prompt_len: int, gen_len: int, block: int) -> int:
        columns = self.budget(prompt_len, gen_len, block).columns
        grown = min(columns, prompt_len) + gen_len - 1
        return max(1, min(columns + 1, grown) if self.while_decoding else grown)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores

    def to_json(self) -> dict[str, Any]:
        """Return the settings with their defaults filled in.

        Heavy and recent shares are ratios or sizes. They are left out with kv_budget or kv_bytes.
        """
        kinds = ("heavy", "recent") if self.kv_budget is None and self.kv_bytes is None else ()
        shares = {f"{kind}_{what}": value for kind in kinds for what, value in [self._share(kind)]}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}
        settings = {
            k: v for k, v in given.items() if v is not None and (k, v) != ("positions", ORIGINAL)
        }
        return {"name": self.name, **settings, **shares}

    def _share(self, kind: str) -> tuple[str, int | float]:
        """Return ("size", columns) or ("ratio", share of the prompt) for "heavy" or "recent"."""
        ratio = getattr(self, f"{kind}_ratio")
        size = getattr(self, f"{kind}_size")
        if ratio is None and size is None and kind == "recent":
            ratio = self.heavy_ratio
            size = self.heavy_size
        if size is not None:
            return "size", size
        return "ratio", DEFAULT_RATIO if ratio is None else ratio

    def _count(self, kind: str, prompt_len: int) -> int:
        """Return the "heavy" or "recent" columns of a prompt."""
        what, value = self._share(kind)
        return min(int(value), EVERYTHING) if what == "size" else max(1, int(value * prompt_len))


@lru_cache(maxsize=4096)
def _sized_columns(sizes: KVSizes, share: float, tokens: int) -> int:
    """Return the most columns that fit in `share` of the bytes that `tokens` columns take in bf16.

    Return 0 if there is no room for one column. One more slot counts, for the column that enters.
    The last token never needs a slot.
    """
    most = share * tokens * 4 * sizes.width

    def nbytes(columns: int) -> int:
        return sizes.nbytes(max(1, min(columns + 1, tokens - 1)))

    return bisect_right(range(1, tokens + 1), most, key=nbytes)


def with_sizes(eviction: Eviction, sizes: KVSizes) -> Eviction:
    """Return the policy with `kv_sizes` set, if its budget is kv_bytes; else the policy itself."""
    return (
        replace(eviction, kv_sizes=sizes)
        if isinstance(eviction, Evicting) and eviction.kv_bytes
        else eviction
    )


def is_rolling(eviction: Eviction) -> bool:
    """Return whether a column's position is its rank among the columns that its row holds."""
    return RANKS in eviction.needs.record


def most_new_tokens(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> int:
    """Return how many of the `asked` new tokens a prompt of `prompt_len` tokens may get.

    With original positions, the limit is the model's positions. With rolling positions, the row's
    columns must not exceed the model's positions.

    The last new token needs no position of its own. So a prompt that fills all positions still gets
    one new token.
    """
    if not is_rolling(eviction):
        return min(asked, spec.max_positions - prompt_len + 1)

    def is_too_much(new: int) -> bool:
        columns = (eviction.slots(prompt_len, new, block) for block in range(spec.num_blocks))
        return max(columns) > spec.max_positions

    return max(1, bisect_left(range(1, asked + 1), True, key=is_too_much))


def check_budgets(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> None:
    """Raise UsageError if the policy leaves no column to a row of this length in some block.

    Other rows are not affected.
    """
    new = most_new_tokens(eviction, spec, prompt_len, asked)
    for block in range(spec.num_blocks):
        eviction.budget(prompt_len, new, block)
