"""What an eviction policy is: it says how many columns a row keeps, what it needs measured, and ranks columns.

The engine does the rest: slots, protection of sinks and recent columns, which column leaves, tiers. No policy imports
torch before it computes, so that command lines know all their names at once.
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
# What is recorded of a slot (kvcache/slots.SlotMetadata), in the order of its bytes.
POSITIONS, SCORES, NORMS, RANKS = "positions", "scores", "norms", "ranks"


@dataclass(frozen=True)
class RowBudget:
    """Columns that a row keeps in one layer: the first `sinks`, the `recent` newest, and `heavy` others by rank."""

    sinks: int
    heavy: int
    recent: int

    @property
    def columns(self) -> int:
        return self.sinks + self.heavy + self.recent


class KeyScores(Protocol):
    """Scores columns by their keys and by the queries of their row's prompt, without attention.

    Queries and keys come with their rotary embeddings.
    """

    @property
    def interval(self) -> int:
        """Every how many decode steps columns are scored; in every step if fewer recent columns are protected."""

    @property
    def numbers(self) -> int:
        """How many fp32 numbers are kept of a prompt's queries, for each sequence and kv-head."""

    def query_sums(self, queries: torch.Tensor, first: int) -> torch.Tensor:
        """Return (b, heads, any) fp32 sums over m of queries (b, heads, m, d) at positions first, first + 1, ..."""

    def of_prompt(self, sums: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
        """Return what is kept of `count` queries, (b, kv_heads, numbers) fp32. sums: of `query_sums`."""

    def scores(
        self, keys: torch.Tensor, queries: torch.Tensor, newest: torch.Tensor, may_leave: torch.Tensor
    ) -> torch.Tensor:
        """Return (rows, n) fp32: the columns with the lowest leave first.

        keys: (rows, n, d) of any dtype, in any order. queries: (rows, numbers), of `of_prompt`. newest: (rows,) ints,
        the positions of the newest columns. may_leave: (rows, n) bool; scores of other columns are not read.
        """


@dataclass(frozen=True)
class Needs:
    """What the engine keeps and computes for a policy.

    record: what is kept of each slot, of POSITIONS, SCORES, NORMS and RANKS in this order; () for a policy that drops
    nothing. With RANKS keys are kept before their rotary embeddings, and each is turned by its rank when it is read.
    query_rows: the last rows of a prompt whose column sums are wanted; None for all. In a decode step a slot's score
    becomes decay x score + gain x the probability that it received, summed over the query heads of its kv-head. even:
    the gain is multiplied by columns held / columns seen so far, since a query that attends to fewer columns gives more
    to each. ranks_by_score: `rank` gives the scores themselves, so the decode kernel can find the column that leaves;
    with per_query it gives them over the number of queries that saw the column, which the kernel can do too.

    value_range: NORMS are the largest less the smallest number of a value, not its L2 norm.

    by_keys: makes the scores in place of attention, which then gives none (`gain` is 0).
    """

    record: tuple[str, ...] = ()
    query_rows: int | None = 0
    decay: float = 1.0
    gain: float = 1.0
    even: bool = False
    ranks_by_score: bool = True
    per_query: bool = False
    value_range: bool = False
    by_keys: KeyScores | None = None

    def __post_init__(self) -> None:
        if self.record and self.ranks_by_score and SCORES not in self.record:
            raise ValueError("ranks_by_score: record has no SCORES; set it to False and give a `rank`")

    @property
    def in_one_launch(self) -> bool:
        """Does a card's launch of decode attention keep what is recorded, and find the column that leaves?"""
        if self.by_keys is not None:
            return False
        return not self.record or (self.ranks_by_score and set(self.record) == {POSITIONS, SCORES})


@dataclass(frozen=True)
class RowRecord:
    """What is kept of a row besides its columns, where attention runs. names: of each slot (`Needs.record`); nothing
    for the full cache. query_numbers: of the prompt's queries, fp32, for each kv-head (`KeyScores.numbers`)."""

    names: tuple[str, ...] = ()
    query_numbers: int = 0

    def __bool__(self) -> bool:
        return bool(self.names)


NO_RECORD = RowRecord()


def record_of(eviction: Eviction) -> RowRecord:
    """What a policy keeps of each row."""
    needs = eviction.needs
    query_numbers = 0 if needs.by_keys is None else needs.by_keys.numbers
    return RowRecord(needs.record, query_numbers)


@dataclass(frozen=True)
class Columns:
    """What a policy knows of the columns of `b` sequences when it ranks them.

    positions: (b, kv_heads, n) int32; newest: (b,) int64, the position of the newest column; scores, norms
    (`value_sizes`): (b, kv_heads, n) fp32 where the policy's record has them; heavy: (b,) int64, of the rows' budgets;
    block: the transformer block. may_leave: (b, kv_heads, n) bool, False for sinks, recent columns and slots that are
    not filled, whose other entries are arbitrary; ranks of such columns are not read.
    """

    block: int
    positions: torch.Tensor
    may_leave: torch.Tensor
    newest: torch.Tensor
    heavy: torch.Tensor
    scores: torch.Tensor | None = None
    norms: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        """(b, kv_heads, n) fp32: how many queries saw each column, its own among them."""
        return (self.newest.view(-1, 1, 1) + 1 - self.positions).float()


def value_sizes(needs: Needs, values: torch.Tensor) -> torch.Tensor:
    """What NORMS are of values (..., d): (...) fp32."""
    values = values.float()
    return values.amax(dim=-1) - values.amin(dim=-1) if needs.value_range else values.norm(dim=-1)


def best_of(rank: torch.Tensor, columns: Columns, count: torch.Tensor) -> torch.Tensor:
    """(b, kv_heads, n) bool: those that may leave and are among the `count` ((b,) int64) that rank highest, or equal
    to the last of them."""
    rank = rank.masked_fill(~columns.may_leave, float("-inf"))
    count = count.view(-1, 1, 1).expand(*rank.shape[:2], 1)
    best_first = rank.sort(dim=-1, descending=True).values
    last = best_first.gather(-1, (count - 1).clamp(0, rank.shape[-1] - 1))
    return (count > 0) & (rank >= last)


_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # xxHash's 32-bit primes: large, odd, of mixed bits
_MASK = 0xFFFFFFFF


def pseudo_random(columns: Columns, seed: int) -> torch.Tensor:
    """(b, kv_heads, n) int64 in [0, 2**24): a hash of seed, block, kv-head and position."""
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
    """Decides which KV columns a row keeps, for each sequence and kv-head separately."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        """What a row of `prompt_len` tokens that grows by at most `gen_len` keeps in transformer block `block`."""

    def slots(self, prompt_len: int, gen_len: int, block: int) -> int:
        """Slots that such a row needs to grow by `gen_len` tokens.

        The newest token's column is never read again, so it needs none.
        """

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        """The scores that a prompt's columns start with.

        sums: (b, kv_heads, n) fp32, the column sums over `query_rows` rows: `needs.query_rows` or, in a shorter
        prompt, all. Asked only where the record has scores. Returns the shape of `sums`.
        """

    def rank(self, columns: Columns) -> torch.Tensor:
        """(b, kv_heads, n) fp32: columns with the lowest leave first, of equal ones the oldest."""

    def to_json(self) -> dict[str, Any]: ...


DEFAULT_RATIO = 0.1


@dataclass(frozen=True)
class Evicting(EvictionSettings):
    """A policy that drops columns; its settings, and those that it adds, are checked when it is made.

    kv_sizes: what columns take, which kv_bytes is counted in: of the model and its compression (`with_sizes`).
    """

    kv_sizes: KVSizes | None = None
    name: ClassVar[str] = ""

    @cached_property  # asked several times in each layer of each step
    def needs(self) -> Needs:
        found = self.measures
        record = (*found.record, RANKS) if self.positions == ROLLING else found.record
        return replace(found, record=record)

    @property
    def measures(self) -> Needs:
        """What the policy itself needs, wherever positions come from."""
        raise NotImplementedError

    def split(self, heavy: int, recent: int) -> RowBudget:
        """How the policy uses heavy + recent columns."""
        return RowBudget(0, heavy, recent)

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        if self.kv_budget is None and self.kv_bytes is None:
            heavy = self._count("heavy", prompt_len)
            recent = self._count("recent", prompt_len)
        else:
            columns = self._columns_of(prompt_len + gen_len)
            heavy = columns // 2
            recent = columns - heavy
        return self.split(heavy, recent) if self.protect is None else self._protecting(heavy, recent, prompt_len)

    def _columns_of(self, tokens: int) -> int:
        """Columns of a row of so many tokens, prompt and new ones, by kv_budget or kv_bytes."""
        if self.kv_bytes is None:
            return max(1, int((self.kv_budget or 0.0) * tokens))
        if self.kv_sizes is None:
            raise UsageError("kv_bytes: is a share of a model's KV cache; give the policy to an LLM")
        columns = _sized_columns(self.kv_sizes, self.kv_bytes, tokens)
        if columns < 1:
            raise UsageError(
                f"--kv-bytes {self.kv_bytes}: leaves no KV entry of a prompt and answer of {tokens} tokens in all; "
                "give a larger share"
            )
        return columns

    def _protecting(self, heavy: int, recent: int, prompt_len: int) -> RowBudget:
        """The same number of columns, the protected ones among them; UsageError where nothing is left for new ones."""
        protected = min(prompt_len, prompt_len if self.protect == PROMPT else int(self.protect or 0))
        columns = heavy + recent
        if (left := columns - protected) < 1:
            flag = "--kv-bytes" if self.kv_bytes else "--kv-budget" if self.kv_budget else "--hh-ratio or --hh-size"
            raise UsageError(
                f"--protect {self.protect}: protects {protected} KV entries of a prompt of {prompt_len} tokens, and "
                f"a sequence keeps {columns} in all; give a larger {flag}, or protect fewer"
            )
        own = self.split(heavy * left // columns, left - heavy * left // columns)
        sinks = max(0, own.sinks - protected)  # those that the policy sets aside are protected already
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
        """The settings as they are used: defaults filled in, each share a ratio or a size, or kv_budget alone."""
        kinds = ("heavy", "recent") if self.kv_budget is None and self.kv_bytes is None else ()
        shares = {f"{kind}_{what}": value for kind in kinds for what, value in [self._share(kind)]}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}
        settings = {k: v for k, v in given.items() if v is not None and (k, v) != ("positions", ORIGINAL)}
        return {"name": self.name, **settings, **shares}

    def _share(self, kind: str) -> tuple[str, int | float]:
        """("size", columns) or ("ratio", of the prompt)."""
        ratio, size = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_size")
        if ratio is None and size is None and kind == "recent":
            ratio, size = self.heavy_ratio, self.heavy_size
        if size is not None:
            return "size", size
        return "ratio", DEFAULT_RATIO if ratio is None else ratio

    def _count(self, kind: str, prompt_len: int) -> int:
        what, value = self._share(kind)
        return min(int(value), EVERYTHING) if what == "size" else max(1, int(value * prompt_len))


@lru_cache(maxsize=4096)
def _sized_columns(sizes: KVSizes, share: float, tokens: int) -> int:
    """The most columns of a row whose slots take `share` of the bytes that `tokens` columns have in bf16; 0 where there
    is no room for one. A slot more is a newcomer's, but none is the last token's."""
    most = share * tokens * 4 * sizes.width

    def nbytes(columns: int) -> int:
        return sizes.nbytes(max(1, min(columns + 1, tokens - 1)))

    return bisect_right(range(1, tokens + 1), most, key=nbytes)


def with_sizes(eviction: Eviction, sizes: KVSizes) -> Eviction:
    """The policy with what columns take, where it counts bytes."""
    return replace(eviction, kv_sizes=sizes) if isinstance(eviction, Evicting) and eviction.kv_bytes else eviction


def is_rolling(eviction: Eviction) -> bool:
    """Whether a column's position is its rank among the columns that its row holds."""
    return RANKS in eviction.needs.record


def most_new_tokens(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> int:
    """New tokens that a prompt of so many tokens may grow by: with original positions as long as there are some, with
    rolling ones as long as its columns are no more than there are positions.

    The newest token needs no position of its own, so a prompt that fills all positions still gets one.
    """
    if not is_rolling(eviction):
        return min(asked, spec.max_positions - prompt_len + 1)

    def is_too_much(new: int) -> bool:
        columns = (eviction.slots(prompt_len, new, block) for block in range(spec.num_blocks))
        return max(columns) > spec.max_positions

    return max(1, bisect_left(range(1, asked + 1), True, key=is_too_much))


def check_budgets(eviction: Eviction, spec: ModelSpec, prompt_len: int, asked: int) -> None:
    """UsageError where the policy leaves a row of so few or so many tokens no column: it is that row's fault alone."""
    new = most_new_tokens(eviction, spec, prompt_len, asked)
    for block in range(spec.num_blocks):
        eviction.budget(prompt_len, new, block)


@dataclass(frozen=True)
class OfOther:
    """`policy`, but for how many columns it keeps in a transformer block."""

    policy: Eviction

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return self.policy.prompt_scores(sums, query_rows)

    def rank(self, columns: Columns) -> torch.Tensor:
        return self.policy.rank(columns)

    def to_json(self) -> dict[str, Any]:
        return self.policy.to_json()
