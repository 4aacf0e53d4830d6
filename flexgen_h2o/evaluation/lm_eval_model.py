"""lm-eval's interface to a model, over an `LLM`: all requests of a type are one run of many rows.

It follows lm-eval 0.4.13's own Hugging Face backend (`HFLM`): texts are encoded, cut on the left
and cut at their stop strings in the same way. With the full cache log-likelihoods equal those of
HFLM. With eviction a continuation is decoded token by token, so that each token sees only the KV
entries that its row has kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text

from flexgen_h2o.cli_common import note
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import DECODE, PREFILL
from flexgen_h2o.core.units import SAMPLING_CHUNK
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.prompts import make_prompt
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import Sequence, with_params
from flexgen_h2o.engine.workload import base_of
from flexgen_h2o.evaluation.kvpress import FLAG, RATIO_OF, PressRun, kept_share, write_press_run
from flexgen_h2o.evaluation.rows import check_tokenizer
from flexgen_h2o.llm import LLM

NAME = "flexgen-h2o"  # name of this model in lm-eval
MAX_GEN_TOKS = 256  # most new tokens if a task does not say, as in HFLM
# Generation arguments of tasks, and their values that change nothing. Other values are errors,
# because they would change the text.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "use_cache": (True,),
    "early_stopping": (False,),
}

# Message about a task; it follows the name of the task.
ONE_TOKEN = (
    "each choice is one token long, so eviction and a compressed KV cache cannot change its "
    "scores; `evaluate lm-eval "
    "grid`, or `generate`, `run` and `score`, evict inside the context"
)

Tokens = tuple[int, ...]
# Log-likelihood of a continuation, and whether each of its tokens is the likeliest one.
Answer = tuple[float, bool]


@register_model(NAME)
class EngineLM(TemplateLM):
    """An open `LLM` as lm-eval's model.

    Finished rows go to lm-eval's cache (`--use_cache`) one by one. seed: random seed of tasks that
    sample. Raise UsageError if the model has no tokenizer.
    """

    # The instance that lm-eval's command line gets for NAME; set by `evaluate lm-eval` for its run.
    opened: ClassVar[EngineLM | None] = None

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        super().__init__()
        check_tokenizer(llm.model, ", which tasks need; give a folder with one")
        self.llm = llm
        self._seed = seed
        # Task of each request of `_loglikelihood_tokens`; set by `loglikelihood`.
        self._task_of: list[str | None] = []
        self._warned: set[str | None] = set()  # tasks that `_warn_of_single_tokens` has named
        self.tokenizer: Any = llm.model.tokenizer
        self.max_length = llm.model.spec.max_positions

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: object = None
    ) -> EngineLM:
        """Return the open model, as lm-eval asks for one.

        The arguments are for lm-eval's records and for tasks that make their own data.
        """
        if cls.opened is None:
            raise UsageError(
                f"{NAME}: give lm-eval an EngineLM(llm), or run `flexgen-h2o evaluate lm-eval`"
            )
        return cls.opened

    # Texts

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token that begins a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Return the token ids of a text.

        By default they have the tokenizer's special tokens, unless the text already begins with the
        first of these.
        """
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.llm.model.tokens_of(string, **given)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text in the model's chat template.

        The system message is left out if the template does not take one.
        """
        if not self.llm.model.has_chat_template:
            raise UsageError(
                f"--apply-chat-template: {self.llm.model.name} has no chat template; leave it out"
            )

        without_system = [message for message in chat_history if message["role"] != "system"]
        with suppress(ValueError):
            return self.llm.model.chat_text(chat_history, add_generation_prompt)
        try:
            return self.llm.model.chat_text(without_system, add_generation_prompt)
        except ValueError as error:
            raise UsageError(
                f"--apply-chat-template: the model's template refuses: {error}; leave it out"
            ) from error

    def get_model_info(self) -> dict[str, Any]:
        """Return facts about the model for lm-eval's results file."""
        return {
            "model_dtype": self.llm.dtype,
            "model_digests": self.llm.digests(),
            "eviction": self.llm.eviction.to_json(),
        }

    # Log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """Return lm-eval's answers.

        `_loglikelihood_tokens` gets the requests in this order but without their tasks, so these
        are kept here.
        """
        self._task_of = [request.task_name for request in requests]
        try:
            return list(super().loglikelihood(requests, disable_tqdm))
        finally:
            self._task_of = []

    def _loglikelihood_tokens(
        self, requests: abc.Sequence[tuple[Any, list[int], list[int]]], **kwargs: object
    ) -> list[Answer]:
        """Return the answer of each request.

        requests: (key in lm-eval's cache, token ids of the context, of the continuation).
        """
        self._warn_of_single_tokens([len(continuation) for _, _, continuation in requests])
        answers: list[Answer] = [(0.0, False)] * len(requests)

        def done(i: int, answer: Answer) -> None:
            answers[i] = answer
            self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)

        self._score([(context, continuation) for _, context, continuation in requests], done)
        return answers

    def _warn_of_single_tokens(self, lengths: abc.Sequence[int]) -> None:
        """Warn once per task if all of its continuations have one token. lengths: tokens of each
        continuation.

        Such a token is scored by the pass that reads the context, in which every KV entry is still
        there.
        """
        if self.score_mode == PREFILL:  # no entry is dropped or compressed
            return
        longest: dict[str | None, int] = {}
        for task, length in zip(self._task_of, lengths, strict=bool(self._task_of)):
            longest[task] = max(length, longest.get(task, 0))
        for task in longest:
            if longest[task] == 1 and task not in self._warned:
                self._warned.add(task)
                note("evaluate", f"{task or 'requests'}: {ONE_TOKEN}")

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts.

        A text is scored in windows of as many tokens as the model has positions.
        """
        pairs: list[tuple[list[int], list[int]]] = []
        owner: list[int] = []
        begins: list[int] = []  # index of each request's first window; its windows are adjacent
        for i, request in enumerate(requests):
            windows = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            found = [utils.make_disjoint_window(window) for window in windows]
            begins.append(len(pairs))
            pairs += found
            owner += [i] * len(found)
        begins.append(len(pairs))
        missing = Counter(owner)
        parts = [0.0] * len(pairs)
        totals = [0.0] * len(requests)

        def done(window: int, answer: Answer) -> None:
            parts[window] = answer[0]
            i = owner[window]
            missing[i] -= 1
            if not missing[i]:
                totals[i] = sum(parts[begins[i] : begins[i + 1]])
                self.cache_hook.add_partial("loglikelihood_rolling", requests[i].args, totals[i])

        self._score(pairs, done)
        return totals

    def _score(
        self,
        pairs: abc.Sequence[tuple[abc.Sequence[int], abc.Sequence[int]]],
        done: Callable[[int, Answer], None],
    ) -> None:
        """Score all pairs of context and continuation in one run.

        done: called with the index of each pair and its answer. Continuations of one context that
        differ only in their last token share a row: the row's last logits score all of them.
        """
        rows: dict[tuple[Tokens, Tokens], list[int]] = {}
        last: list[int] = []
        for i, (context, continuation) in enumerate(pairs):
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"request {i}: a continuation of {len(continuation)} tokens; "
                    f"{self.llm.model.name} takes 1 to "
                    f"{self.max_length}"
                )
            whole = (*context, *continuation)[-(self.max_length + 1) :]
            before = len(whole) - len(continuation)
            rows.setdefault((whole[:before], whole[before:-1]), []).append(i)
            last.append(whole[-1])
        if not rows:
            return
        self._say_cut(sum(len(c) + len(more) > self.max_length + 1 for c, more in pairs))
        asked = list(rows.values())
        mode = self.score_mode
        # How often logits of each row are still to come; the last time counts.
        steps = [1 if mode == PREFILL else len(path) + 1 for _, path in rows]
        tokens = [[last[i] for i in own] for own in asked]
        found: dict[int, list[Answer]] = {}  # answers of the rows that have ended

        def see(at: list[int], logits: torch.Tensor) -> None:
            """Score the last tokens of rows from the logits before them."""
            for row in at:
                steps[row] -= 1
            places = [place for place, row in enumerate(at) if not steps[row]]
            if places:
                own = logits if len(places) == len(at) else logits[places]
                ending = [at[place] for place in places]
                answers = logprobs_at(own, [tokens[row] for row in ending])
                found.update(zip(ending, answers, strict=True))

        def finished(completions: abc.Sequence[Sequence]) -> None:
            for one in completions:
                path = list(zip(one.token_ids, one.logprobs or (), strict=True))[:-1]
                total = sum(likely.logprob for _, likely in path)
                greedy = all(t == f.top[0][0] for t, f in path)
                for i, (logprob, likeliest) in zip(
                    asked[one.index], found.pop(one.index), strict=True
                ):
                    done(i, (total + logprob, greedy and likeliest))

        prompts = [self._prompt(i, context) for i, (context, _) in enumerate(rows)]
        for (_, path), own in zip(rows, asked, strict=True):
            self._prompt(own[0], (*path, *(last[i] for i in own)))
        scored = [
            SamplingParams(score=(*path, last[own[0]]), score_mode=mode)
            for (_, path), own in zip(rows, asked, strict=True)
        ]
        # Exact prediction of ragged blocks is not worth its time.
        self.llm.planner.job_rows = len(prompts)
        self.llm.run(with_params(prompts, scored), finished, Callbacks(see))

    @property
    def score_mode(self) -> str:
        """PREFILL if one pass over context and continuation scores as decode steps do, else DECODE.

        The two score the same if every KV entry stays and none is compressed.
        """
        policy = base_of(self.llm.asked_policy)
        keeps_all = (
            not self.llm.eviction.needs.record
            and not policy.compress_cache
            and policy.attn_sparsity == 1
        )
        return PREFILL if keeps_all else DECODE

    def _prompt(self, i: int, ids: abc.Sequence[int]) -> Sequence:
        """Return token ids as the prompt of request `i`.

        Raise UsageError for ids that the model does not have: its tokenizer may have more of them.
        """
        try:
            return make_prompt(i, ids, None, self.llm.model.spec.vocab_size)
        except UsageError as error:
            raise UsageError(
                f"request {i}: {error}; is the tokenizer that of {self.llm.model.name}?"
            ) from error

    def _say_cut(self, count: int) -> None:
        if count:
            note(
                "evaluate",
                f"{count} requests have more than {self.max_length} tokens: cut on the left",
            )

    # Texts that are generated

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return generated texts, each up to its first stop string or the end-of-sequence token."""
        texts = [""] * len(requests)
        prompts = []
        params = []
        cut = 0
        met: Counter[str] = Counter()  # how often a request came; a repeated one gets another seed
        for i, request in enumerate(requests):
            context, given = request.args
            key = json.dumps([context, given], sort_keys=True, default=str)
            params.append(self._sampling(given, f"{key}{met[key]}"))
            met[key] += 1
            ids = self.tok_encode(context) or [self.prefix_token_id]
            room = self.max_length - params[-1].max_tokens
            cut += len(ids) > room
            prompts.append(self._prompt(i, ids[-room:]))
        if not requests:
            return texts
        self._say_cut(cut)

        def finished(completions: abc.Sequence[Sequence]) -> None:
            for one in completions:
                context, given = requests[one.index].args
                texts[one.index] = self._text_of(one.token_ids, given)
                self.cache_hook.add_partial("generate_until", (context, given), texts[one.index])

        self.llm.planner.job_rows = len(prompts)
        self.llm.run(with_params(prompts, params), finished, refill=True)
        return texts

    def _sampling(self, given: Mapping[str, Any], key: str) -> SamplingParams:
        """Return the sampling that a task's generation arguments ask for.

        key: identifies the request; its seed is made of it. Raise UsageError naming --gen-kwargs.
        """
        asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), MAX_GEN_TOKS))
        draws = asked.pop("do_sample")
        most = asked.pop("max_gen_toks")
        stop = tuple(text for text in asked.pop("until") if text)
        temperature, top_p, top_k = (asked.pop(name, usual) for name, usual in _SAMPLED.items())
        for name, value in asked.items():
            if value is not None and value not in NEUTRAL.get(name, ()):
                raise UsageError(
                    f"--gen-kwargs {name}={value}: is not supported here; leave it out"
                )
        if most >= self.max_length:
            raise UsageError(
                f"--gen-kwargs max_gen_toks={most}: {self.llm.model.name} has {self.max_length} "
                "positions; give fewer"
            )
        digest = hashlib.blake2b(
            f"{self._seed}:{key}".encode("utf-8", "surrogatepass"), digest_size=8
        ).digest()
        try:
            return SamplingParams(
                most,
                temperature if draws else 0.0,
                top_p,
                top_k,
                int.from_bytes(digest, "little") >> 1,
                stop,
            )
        except UsageError as error:
            raise UsageError(f"--gen-kwargs {error}") from error

    # kvpress's layout

    def write_press(self, folder: Path, results: Mapping[str, Any], compression: str) -> None:
        """Write a folder in kvpress's layout for each task of `results` that generates text.

        A note names the other tasks. results: those of lm-eval, with samples. The question of a row
        is the last line of its prompt, without the words that begin the answer.
        """
        others = []
        for task, samples in results.get("samples", {}).items():
            config = results["configs"][task]
            if config["output_type"] != "generate_until":
                others.append(task)
                continue
            # One sample per question: lm-eval has one per question and filter.
            once = list({sample["doc_id"]: sample for sample in reversed(samples)}.values())[::-1]
            counts = results["n-samples"][task]
            # Only RULER's tasks have lengths; kvpress has them as its data_dir.
            sizes = {sample["doc"].get("max_length") for sample in once}
            settings = {
                "press_init_command": json.dumps(self.llm.eviction.to_json()),
                "dtype": self.llm.dtype,
                "compression_ratio_of": RATIO_OF,
                "compression": compression or None,
                "num_fewshot": results["n-shot"].get(task),
                "questions": len(once),
                "seed": self._seed,
                "generation": config.get("generation_kwargs"),
            }
            lengths = [self._lengths_of(*sample["arguments"][0]) for sample in once]
            # The policy as it was before it was fitted to the model's windows.
            asked = getattr(self.llm.eviction, "policy", self.llm.eviction)
            policy = base_of(self.llm.asked_policy)
            run = PressRun(
                task,
                self.llm.model.name,
                asked.name,
                round(1 - kept_share(asked, self.llm.model.spec, policy, lengths), 6),
                str(sizes.pop()) if len(sizes) == 1 and None not in sizes else "",
                counts["effective"] / counts["original"],
                settings,
            )
            rows = (
                {**_press_row(sample), "max_new_tokens": most}
                for sample, (_, most) in zip(once, lengths, strict=True)
            )
            found = {
                name: value
                for name, value in results["results"][task].items()
                if isinstance(value, int | float)
            }
            print(f"kvpress: {write_press_run(folder, run, rows, found)}")
        if others:
            note(
                "evaluate",
                f"{FLAG}: {', '.join(others)}: no text is generated, so there is no folder of it",
            )

    def _lengths_of(self, context: str, given: Mapping[str, Any]) -> tuple[int, int]:
        """Return the tokens of a prompt as it was run, and its most new tokens."""
        most = int(normalize_gen_kwargs(dict(given), MAX_GEN_TOKS)["max_gen_toks"])
        return min(max(1, len(self.tok_encode(context))), self.max_length - most), most

    def _text_of(self, ids: abc.Sequence[int], given: Mapping[str, Any]) -> str:
        end = self.eot_token_id
        until = normalize_gen_kwargs(dict(given))["until"]
        kept = list(ids[: ids.index(end)] if end in ids else ids)
        text = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        return str(postprocess_generated_text(text, [*until, self.tokenizer.decode(end)], None))


def _press_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of lm-eval as a row of kvpress's predictions."""
    prompt = sample["arguments"][0][0]
    prefix = str(sample["doc"].get("gen_prefix") or "").strip()
    begun = prompt.rstrip()
    question = begun.removesuffix(prefix) if prefix else begun
    predicted = sample["filtered_resps"][0]
    return {
        "question": question.strip().rpartition("\n")[2].strip(),
        "answer_prefix": prefix,
        "answer": sample["target"],
        "max_new_tokens": 0,
        "predicted_answer": predicted[0] if isinstance(predicted, list) else predicted,
    }


# Defaults of the sampling arguments.
_SAMPLED: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def logprobs_at(
    logits: torch.Tensor, tokens: abc.Sequence[abc.Sequence[int]]
) -> list[list[Answer]]:
    """Return (log-probability, is it the likeliest?) of tokens of each row.

    logits: (rows, vocab), any float dtype. tokens: token ids asked for of each row.
    """
    found: list[list[Answer]] = []
    height = max(1, SAMPLING_CHUNK // logits.shape[1])
    for start in range(0, len(tokens), height):
        scores = logits[start : start + height].float()
        own = tokens[start : start + height]
        sums = scores.logsumexp(-1)
        best = scores.argmax(-1).tolist()
        rows = torch.tensor([i for i, ids in enumerate(own) for _ in ids], device=logits.device)
        ids = torch.tensor([token for ids in own for token in ids], device=logits.device)
        values = iter((scores[rows, ids] - sums[rows]).tolist())
        found += [
            [(next(values), token == top) for token in ids]
            for ids, top in zip(own, best, strict=True)
        ]
    return found
