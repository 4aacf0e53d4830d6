"""Train a small model of a family: what train_tiny_opt.py, train_tiny_llama.py and
train_yardstick.py share.

Data: the source text of Python's own standard library (every machine has it), mixed with
synthetic rows: key-value pairs stated early and asked for later, and for the yardsticks stretches
that are copied and chains of pairs that are followed, so that columns far back in the KV cache
matter and an eviction policy that drops them is seen to lose.

Everything is seeded; the data depends only on the Python version. Writes a Hugging Face folder
(config, safetensors in bf16, byte-level BPE tokenizer, model card) at every evaluation, so an
interrupted run leaves a model too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from flexgen_h2o.evaluation.rows import (
    draw_pairs,
    is_held_out,
    read_text,
    statement,
    stdlib_files,
    stretch,
)

BOS = "<s>"
PAD = "<pad>"
EOS = "</s>"
UNK = "<unk>"
RECALL_SHARE = 0.30
EVAL_ROWS = 64
RUNS_NAME = "training_runs.json"


BuildModel = Callable[[argparse.Namespace], PreTrainedModel]
# Of `length` token ids, with the places of those that can be known: rng, tokenizer, code, length.
TaskRow = Callable[[random.Random, Tokenizer, torch.Tensor, int], tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Recipe:
    """What one script trains.

    name: of the model. family: how the card calls it, with its article. purpose: the card's words
    on what it is for. script: the file that trains it. short, long: (rows, tokens) of a step on
    short rows and on the full context. build: a model with random weights, from the parsed options.
    tasks: what synthetic rows are of, in equal shares; None: recall alone.
    """

    name: str
    family: str
    purpose: str
    script: str
    short: tuple[int, int]
    long: tuple[int, int]
    build: BuildModel
    tasks: Mapping[str, TaskRow] | None = None

    @property
    def context(self) -> int:
        return self.long[1]


@dataclass(frozen=True)
class Corpus:
    """Token ids of the standard library, split by file into training and held-out streams."""

    train: torch.Tensor  # (n,) int64
    held_out: torch.Tensor  # (m,) int64
    files: int


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; digits stay single so that recall values always split alike."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, PAD, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_corpus(tokenizer: Tokenizer, files: list[Path]) -> Corpus:
    eos = tokenizer.token_to_id(EOS)
    streams: dict[bool, list[int]] = {False: [], True: []}
    for path in files:
        streams[is_held_out(path)].extend([*tokenizer.encode(read_text(path)).ids, eos])
    return Corpus(torch.tensor(streams[False]), torch.tensor(streams[True]), len(files))


def recall_row(
    rng: random.Random, tokenizer: Tokenizer, code: torch.Tensor, length: int
) -> tuple[list[int], list[int]]:
    """Pairs, then a stretch of code, then the same pairs asked for in another order; again until
    the row is full.

    Returns `length` token ids and the positions of the answer digits that were asked for; each
    digit is a token.
    """
    ids = [tokenizer.token_to_id(BOS)]
    answers: list[int] = []
    while len(ids) < length:
        pairs = draw_pairs(rng, rng.randint(2, 16))
        for pair in pairs:
            ids.extend(tokenizer.encode(statement(pair)).ids)
        filler = rng.choice([0, 0, rng.randint(16, 64), rng.randint(64, length // 2)])
        ids.extend(stretch(rng, code, filler))
        ids.extend(tokenizer.encode("\n").ids)
        rng.shuffle(pairs)
        for name, number in pairs:
            ids.extend(tokenizer.encode(f"ask {name} = {number}\n").ids)
            answers.extend([len(ids) - 3, len(ids) - 2])  # two digits, then the newline
    return ids[:length], [place for place in answers if place < length]


def copy_row(
    rng: random.Random, tokenizer: Tokenizer, code: torch.Tensor, length: int
) -> tuple[list[int], list[int]]:
    """A named stretch of code, other code, and the stretch once more behind its name; again until
    the row is full.

    What can be known is the copy but for its first tokens.
    """
    ids = [tokenizer.token_to_id(BOS)]
    known = list[int]()
    while len(ids) < length:
        ((name, _),) = draw_pairs(rng, 1)
        part = stretch(rng, code, rng.randint(12, 48))
        ids += [*tokenizer.encode(f"\nkeep {name}\n").ids, *part]
        ids += stretch(
            rng, code, rng.choice([rng.randint(16, 64), rng.randint(64, max(65, length // 2))])
        )
        ids += tokenizer.encode(f"\ncopy {name}\n").ids
        known += range(len(ids) + 2, len(ids) + len(part))
        ids += part
    return ids[:length], [place for place in known if place < length]


def hops_row(
    rng: random.Random, tokenizer: Tokenizer, code: torch.Tensor, length: int
) -> tuple[list[int], list[int]]:
    """Chains of two to four names that end in a number, link by link between code; then they are
    followed.

    `let qf = ra`, ..., `let ra = 37`, ..., `follow qf = ra = 37`. What can be known is all behind
    the first name.
    """
    ids = [tokenizer.token_to_id(BOS)]
    known = list[int]()
    while len(ids) < length:
        chains = []
        for _ in range(rng.randint(1, 3)):
            pairs = draw_pairs(rng, rng.randint(2, 4))
            names = [name for name, _ in pairs]
            chains.append([*names, pairs[-1][1]])
        links = [link for chain in chains for link in pairwise(chain)]
        rng.shuffle(links)
        for link in links:
            ids += tokenizer.encode(statement(link)).ids
            ids += stretch(
                rng, code, rng.choice([0, rng.randint(8, 48), rng.randint(8, max(9, length // 8))])
            )
            ids += tokenizer.encode("\n").ids
        for chain in chains:
            ids += tokenizer.encode(f"follow {chain[0]}").ids
            answer = tokenizer.encode("".join(f" = {name}" for name in chain[1:])).ids
            known += range(len(ids), len(ids) + len(answer))
            ids += [*answer, *tokenizer.encode("\n").ids]
    return ids[:length], [place for place in known if place < length]


TASKS: Mapping[str, TaskRow] = {"recall": recall_row, "copy": copy_row, "hops": hops_row}
IN_WORDS = {
    "recall": "`let qf = 37` lines, a stretch of code, then `ask qf = 37` in another order",
    "copy": "`keep qf` and a stretch of code, other code, then `copy qf` and the stretch again",
    "hops": "`let qf = ra` lines between code, then `follow qf = ra = 37`",
}


class Batches:
    """Seeded batches: code rows beginning with BOS, and `RECALL_SHARE` of synthetic rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        code: torch.Tensor,
        seed: int,
        tasks: Sequence[TaskRow] = (recall_row,),
    ):
        self.tokenizer = tokenizer
        self.code = code
        self.tasks = tasks
        self.rng = random.Random(seed)
        self.bos = tokenizer.token_to_id(BOS)

    def code_row(self, length: int) -> list[int]:
        start = self.rng.randrange(len(self.code) - length)
        return [self.bos, *self.code[start : start + length - 1].tolist()]

    def next(self, rows: int, length: int) -> torch.Tensor:
        made = []
        for _ in range(rows):
            if self.rng.random() < RECALL_SHARE:
                task = self.tasks[0] if len(self.tasks) == 1 else self.rng.choice(self.tasks)
                made.append(task(self.rng, self.tokenizer, self.code, length)[0])
            else:
                made.append(self.code_row(length))
        return torch.tensor(made)


def optimizers(model: PreTrainedModel, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over 2%, flat until 55%, then linear to zero."""
    share = step / steps
    return min(1.0, share / 0.02, max(0.0, (1 - share) / 0.45))


def loss_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus, recipe: Recipe
) -> dict[str, float]:
    """Held-out nats a token at full context, and greedy accuracy on recall answers by distance."""
    model.eval()
    bos = tokenizer.token_to_id(BOS)
    length = recipe.context
    stride = (len(corpus.held_out) - length) // EVAL_ROWS
    rows = [
        [bos, *corpus.held_out[i * stride : i * stride + length - 1].tolist()]
        for i in range(EVAL_ROWS)
    ]
    losses = torch.cat(
        [loss_of(model, torch.tensor(rows[i : i + 8])).view(8, -1) for i in range(0, EVAL_ROWS, 8)]
    )
    found = {
        "recall_digit_accuracy": accuracy(model, tokenizer, corpus.held_out, length, recall_row)
    }
    for name, task in (recipe.tasks or {}).items():
        for tokens in (512, 1024, 2048):
            found[f"{name}_accuracy_at_{tokens}"] = accuracy(
                model, tokenizer, corpus.held_out, tokens, task
            )
    model.train()
    short = recipe.short[1]
    return {
        "unigram_nats_per_token": round(unigram_nats(corpus), 4),
        "held_out_nats_per_token": round(losses.mean().item(), 4),
        f"held_out_nats_first_{short}": round(losses[:, : short - 1].mean().item(), 4),
        **found,
    }


def accuracy(
    model: PreTrainedModel, tokenizer: Tokenizer, code: torch.Tensor, length: int, task: TaskRow
) -> float:
    """Share of the tokens that can be known which are the likeliest, of 32 rows."""
    rng = random.Random(7)
    right = 0
    asked = 0
    for _ in range(32):
        ids, answers = task(rng, tokenizer, code, length)
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        guess = logits.argmax(-1)
        right += sum(int(guess[p - 1]) == ids[p] for p in answers if p > 0)
        asked += len(answers)
    return round(right / asked, 4)


def unigram_nats(corpus: Corpus) -> float:
    """Nats a held-out token costs whoever knows only how often each token is in the training text
    (plus one each)."""
    counts = torch.bincount(corpus.train, minlength=int(corpus.held_out.max()) + 1).double() + 1
    return float(-(counts / counts.sum()).log()[corpus.held_out].mean())


def model_card(recipe: Recipe, runs: list[dict[str, object]]) -> str:
    facts = "\n".join(
        f"| {key} | " + " | ".join(str(run.get(key, "")) for run in runs) + " |" for key in runs[-1]
    )
    head = (
        "| | "
        + " | ".join(f"run {i + 1}" for i in range(len(runs)))
        + " |\n|"
        + "---|" * (len(runs) + 1)
    )
    tasks = "; ".join(f"{name} ({IN_WORDS[name]})" for name in recipe.tasks or ("recall",))
    return f"""---
license: apache-2.0
tags: [{recipe.name.partition("-")[0]}, tiny, test-fixture]
---
# {recipe.name}

A small {recipe.family} trained by `scripts/{recipe.script}` for `flexgen_h2o`: {recipe.purpose}. It continues Python
source plausibly and nothing else; do not use it for real work.

Data: the source files of Python's standard library (the Python Software Foundation licence covers the source; the
model holds statistics of it). {RECALL_SHARE:.0%} of rows are synthetic: {tasks}.
One file in 40 is held out by a hash of its name.

{head}
{facts}

`recall_digit_accuracy` is the share of answer digits that greedy decoding gets right (chance: 0.1).
`unigram_nats_per_token` is what a held-out token costs whoever knows only how often each token is.
"""  # noqa: E501


def save(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    output: Path,
    recipe: Recipe,
    runs: list[dict[str, object]],
) -> None:
    """Write the Hugging Face folder. The saved tokenizer puts BOS first, as every training row
    begins with it."""
    output.mkdir(parents=True, exist_ok=True)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(output)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=recipe.context,
    )
    fast.save_pretrained(output)
    (output / "README.md").write_text(model_card(recipe, runs))
    (output / RUNS_NAME).write_text(json.dumps(runs, indent=2) + "\n")
    (output / "model.safetensors").chmod(0o644)


def start(
    recipe: Recipe, args: argparse.Namespace, files: list[Path]
) -> tuple[Tokenizer, PreTrainedModel, list[dict[str, object]]]:
    """A new model and tokenizer, or those of --init-from with the runs that made them."""
    if args.init_from is None:
        tokenizer = train_tokenizer(
            [read_text(p) for p in files if not is_held_out(p)], args.vocab_size
        )
        return tokenizer, recipe.build(args), []
    tokenizer = Tokenizer.from_file(str(args.init_from / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        []
    )  # rows get their BOS here, not from the tokenizer
    model = AutoModelForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    lengthen(model, recipe.context)
    return tokenizer, model.train(), json.loads((args.init_from / RUNS_NAME).read_text())


@torch.no_grad()
def lengthen(model: PreTrainedModel, positions: int) -> None:
    """Room for so many positions: where they are learned, the table is repeated, as neighbours stay
    neighbours so."""
    known = model.config.max_position_embeddings
    model.config.max_position_embeddings = max(known, positions)
    if positions <= known or model.config.model_type != "opt":
        return
    table = model.model.decoder.embed_positions
    offset = table.weight.shape[0] - known
    rows = [table.weight[:offset], *(table.weight[offset:] for _ in range(-(-positions // known)))]
    table.weight = torch.nn.Parameter(torch.cat(rows)[: offset + positions].clone())
    table.num_embeddings = offset + positions


def train(recipe: Recipe, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    files = stdlib_files()
    tokenizer, model, runs = start(recipe, args, files)
    corpus = build_corpus(tokenizer, files)
    print(f"{corpus.files} files, {len(corpus.train)} + {len(corpus.held_out)} tokens", flush=True)
    params = sum(p.numel() for p in model.parameters())
    setting = {
        "parameters": params,
        "width": args.width,
        "layers": args.layers,
        "heads": args.heads,
        "context": recipe.context,
        "vocabulary": args.vocab_size,
        "steps": args.steps,
        "seed": args.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": f"`python scripts/{recipe.script} {' '.join(sys.argv[1:])}`",
    }
    tasks = list((recipe.tasks or {"recall": recall_row}).values())
    optims = optimizers(model, args.peak_rate)
    batches = Batches(tokenizer, corpus.train, args.seed, tasks)
    base_rates = [o.param_groups[0]["lr"] for o in optims]
    began = time.time()
    tokens = 0
    window = []
    for step in range(args.steps):
        ids = batches.next(*(recipe.short if step < args.short_share * args.steps else recipe.long))
        for optim, rate in zip(optims, base_rates, strict=True):
            optim.param_groups[0]["lr"] = rate * learning_rate_scale(step + 1, args.steps)
        window.append(train_step(model, optims, ids))
        tokens += ids.numel()
        if not math.isfinite(window[-1]):
            sys.exit(f"loss is {window[-1]} at step {step}: lower the learning rate")
        if (step + 1) % args.report_every == 0:
            rate = tokens / (time.time() - began)
            mean = sum(window) / len(window)
            print(f"step {step + 1}/{args.steps} loss {mean:.4f} {rate:.0f} tokens/s", flush=True)
            window.clear()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            seen = {"step": step + 1, "tokens_seen": tokens, "seconds": round(time.time() - began)}
            result = {**evaluate(model, tokenizer, corpus, recipe), **seen}
            save(model, tokenizer, args.output, recipe, [*runs, {**setting, **result}])
            print(json.dumps(result), flush=True)


def train_step(
    model: PreTrainedModel, optims: list[torch.optim.Optimizer], ids: torch.Tensor
) -> float:
    """One step of all optimizers on the rows `ids`; the mean loss before it, nats a token."""
    loss = loss_of(model, ids).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optim in optims:
        optim.step()
        optim.zero_grad(set_to_none=True)
    return loss.item()


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all scripts have; each sets its own defaults."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, help="the folder to write")
    made.add_argument("--steps", type=int)
    made.add_argument(
        "--init-from", type=Path, help="go on from this folder, which an earlier run has written"
    )
    made.add_argument(
        "--peak-rate", type=float, default=2e-3, help="learning rate between warm-up and decay"
    )
    made.add_argument("--short-share", type=float, help="share of the steps on short rows")
    made.add_argument("--layers", type=int)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--heads", type=int, default=8)
    made.add_argument("--vocab-size", type=int, default=2048)
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--report-every", type=int, default=25)
    made.add_argument("--eval-every", type=int, default=400)
    return made
