"""A sequence: a prompt, what is asked of it, and what has been generated for it.

A prompt travels in this one object from where it is read to where its answer is written. Readers of
prompts make it, a run fills it, and `LLM.generate` returns it.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import SamplingParams

if TYPE_CHECKING:
    from flexgen_h2o.engine.conversation import Conversation
    from flexgen_h2o.engine.decoding import StopCriteria
    from flexgen_h2o.engine.penalties import Penalties
    from flexgen_h2o.engine.sampling import Logprobs, TokenLogprobs

# Codes of sequences that have no answer through no fault of theirs: their logits are not finite, or
# there was an exception that no check foresaw.
CODE_NOT_FINITE = "not_finite"
CODE_INTERNAL = "internal_error"
DEFAULTS = SamplingParams()
# Bytes of a sequence besides its tokens and texts: the objects of a request and its parameters.
SEQUENCE_BYTES = 2048
# Bytes of one of `stop_token_ids`: an object, in a tuple and in a set.
_STOP_BYTES = 100
# Bytes of an entry of `Logprobs`, and of each of its likeliest tokens.
_ENTRY_BYTES = 12
_TOP_BYTES = 8


@dataclass(eq=False)
class Scoring:
    """The tokens that a sequence is given, and the log-probabilities that are kept of them.

    `scheduler.begin` makes it for `score`, `prompt_logprobs` and teacher forcing.
    """

    # Prompt tokens that are prefilled. `Sequence.prompt_ids` may be more or fewer.
    fed_ids: abc.Sequence[int]
    # The first tokens that the sequence takes, whatever the logits.
    given: tuple[int, ...] = ()
    # How many last tokens of `fed_ids` get log-probabilities in `logprobs`.
    scored: int = 0
    # How many of the likeliest tokens get into each entry of `logprobs`.
    top: int = 0
    # The same for tokens behind the prompt, given ones included. None: no log-probabilities.
    top_behind: int | None = None
    # (prompt tokens, new tokens) from which the KV budget is computed. None: the sequence's own.
    budget_of: tuple[int, int] | None = None
    # One entry for each scored token. `score_prompts` appends them.
    logprobs: Logprobs | list[TokenLogprobs] = field(default_factory=list)


@dataclass(eq=False)
class Sequence:
    """One prompt of a run, and its answer.

    Two sequences are equal only if they are the same object.
    """

    # Its place in the input.
    index: int
    # Token ids of the prompt; of a job's request an array, in 4 bytes per token.
    prompt_ids: abc.Sequence[int]
    # The text of the prompt; None if it was given as token ids.
    prompt: str | None = None
    # What is asked of it.
    params: SamplingParams = DEFAULTS
    # With the seed of `params`, decides its random numbers. It is `index` if sequences share a
    # seed; `with_params` sets it.
    random_stream: int = 0
    # Gives all its tokens and says when it is done, in place of `params`. Whoever sets it also sets
    # `max_new` and `max_tokens_per_sweep`.
    source: Conversation | None = None
    # The tokens that it takes, whatever the logits. `scheduler.forced_sequences` sets them for
    # teacher forcing, and `max_tokens_per_sweep`.
    forced: tuple[int, ...] = ()

    # `scheduler.begin` sets the next ones at the start of a run.

    # The most tokens that `token_ids` may grow to, at least 1.
    max_new: int = 0
    # The most tokens of the sequence in one decode sweep, if they are known beforehand.
    max_tokens_per_sweep: int = 1
    # What changes the logits before the sequence's own tokens are chosen.
    penalties: Penalties | None = None
    # None for nearly all sequences.
    scoring: Scoring | None = None
    # What ends it; `Decoding` sets it.
    criteria: StopCriteria | None = None

    # The run sets the next ones.

    # The generated tokens: an array while the sequence runs, with given tokens first.
    token_ids: abc.MutableSequence[int] = field(default_factory=list)
    # The generated text once the sequence is done; None without a tokenizer.
    text: str | None = None
    # None while the sequence runs; then "stop", "length" or "error".
    finish_reason: str | None = None
    # One entry for each of `token_ids`; None if they are not asked for.
    logprobs: Logprobs | list[TokenLogprobs] | None = None
    # One entry for each token of the prompt, None for the first, if asked for.
    prompt_logprobs: abc.Sequence[TokenLogprobs | None] | None = None
    # Why there is no answer, in runs that continue without it (`Callbacks.isolates_errors`).
    error: str | None = None
    # CODE_NOT_FINITE or CODE_INTERNAL; "" without an error.
    error_code: str = ""

    def fail(self, code: str, reason: str) -> None:
        """Record that the sequence has no answer. The first reason stays."""
        if self.error is None:
            self.error = reason
            self.error_code = code

    def clear(self) -> None:
        """Forget what was generated."""
        self.token_ids = array("i")
        self.text = None
        self.finish_reason = None
        self.logprobs = None
        self.prompt_logprobs = None
        self.error = None
        self.error_code = ""
        self.criteria = None

    def release(self) -> None:
        """Forget prompt and answer, when the answer is written. `finish_reason` stays."""
        reason = self.finish_reason
        self.clear()
        self.finish_reason = reason
        self.prompt_ids = ()
        self.prompt = None
        self.params = DEFAULTS
        self.scoring = None
        self.penalties = None

    @property
    def most_bytes(self) -> int:
        """The bytes of RAM that the sequence may need until its answer is written.

        `max_new` must be set.
        """
        params = self.params
        texts = sum(map(sys.getsizeof, (self.prompt, *params.stop)))
        stops = _STOP_BYTES * len(params.stop_token_ids)
        new = max(self.max_new, len(self.given))
        numbers = 4 if self.penalties is None else 12
        found = numbers * (len(self.prompt_ids) + new) + texts + stops + SEQUENCE_BYTES
        if self.top_logprobs is not None:
            found += new * (_ENTRY_BYTES + _TOP_BYTES * self.top_logprobs)
        if params.prompt_logprobs is not None:
            scored = len(self.prompt_ids)
            found += scored * (_ENTRY_BYTES + _TOP_BYTES * params.prompt_logprobs)
        return found

    # While it runs

    @property
    def fed_ids(self) -> abc.Sequence[int]:
        """The prompt tokens that are prefilled."""
        return self.prompt_ids if self.scoring is None else self.scoring.fed_ids

    @property
    def given(self) -> tuple[int, ...]:
        """The first tokens that the sequence takes, whatever the logits."""
        return () if self.scoring is None else self.scoring.given

    @property
    def scored(self) -> int:
        """The number of last prompt tokens whose log-probabilities are kept."""
        return 0 if self.scoring is None else self.scoring.scored

    @property
    def top_logprobs(self) -> int | None:
        """The number of likeliest tokens in each entry of `logprobs`. None: no `logprobs`."""
        return self.params.logprobs if self.scoring is None else self.scoring.top_behind

    @property
    def asked(self) -> int:
        """The most new tokens that the user asked for. Sequences are sorted by it."""
        return self.params.max_tokens if self.params.score is None else 1

    @property
    def length(self) -> int:
        """The number of tokens up to now."""
        return len(self.fed_ids) + len(self.token_ids)

    @property
    def size(self) -> tuple[int, int]:
        """The pair (prompt tokens, most new tokens) from which the KV budget is computed."""
        own = None if self.scoring is None else self.scoring.budget_of
        return own or (len(self.fed_ids), self.max_new)

    @property
    def generated_ids(self) -> abc.Sequence[int]:
        """The generated tokens, without those that were given."""
        return self.token_ids[len(self.given) :]

    @property
    def before(self) -> abc.Sequence[int]:
        """The tokens in front of the generated ones: the prompt and the given tokens."""
        return (*self.fed_ids, *self.given) if self.given else self.fed_ids

    @property
    def answered(self) -> int:
        """The number of generated tokens that were asked for; 0 after an error."""
        return 0 if self.error is not None else min(len(self.generated_ids), self.asked)

    # When it is done

    @property
    def logprob(self) -> float:
        """The log-probability of all of token_ids.

        Raises UsageError if no `logprobs` were asked for.
        """
        return math.fsum(one.logprob for one in self._logprobs_of("logprob", 0))

    @property
    def is_greedy(self) -> bool:
        """Return whether each of token_ids was the likeliest token.

        Raises UsageError if not even one likeliest token was asked for.
        """
        found = self._logprobs_of("is_greedy", 1)
        return all(one.top[0][0] == token for token, one in zip(self.token_ids, found, strict=True))

    def _logprobs_of(self, name: str, least: int) -> abc.Sequence[TokenLogprobs]:
        found: abc.Sequence[TokenLogprobs] = self.logprobs or []
        if len(found) < len(self.token_ids) or not all(len(one.top) >= least for one in found):
            raise UsageError(
                f"{name}: the result has none; ask for SamplingParams(logprobs={least}) or more"
            )
        return found


# The name under which the package shows a finished sequence.
Completion = Sequence
Some = TypeVar("Some", bound=Sequence)


def with_params(
    sequences: abc.Sequence[Some], params: SamplingParams | abc.Sequence[SamplingParams]
) -> abc.Sequence[Some]:
    """Set what is asked of sequences, and return them.

    params: one for all, so that they draw from one seed by their index; or one for each, so that
        each draws from its own seed alone.

    Raise UsageError if their number is wrong.
    """
    if isinstance(params, SamplingParams):
        for sequence in sequences:
            sequence.params = params
            sequence.random_stream = sequence.index
        return sequences
    if len(params) != len(sequences):
        raise UsageError(f"params: {len(params)} for {len(sequences)} prompts; give one for each")
    for sequence, own in zip(sequences, params, strict=True):
        sequence.params = own
        sequence.random_stream = 0
    return sequences
