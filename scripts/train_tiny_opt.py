"""Train the small OPT that the package ships (`--model opt-tiny`).

    python scripts/train_tiny_opt.py --output FOLDER
    python scripts/train_tiny_opt.py --output flexgen_h2o/assets/opt-tiny --init-from FOLDER --steps 600 \\
        --peak-rate 1e-3 --short-share 0 --seed 1

made the shipped model: a first run mostly on short rows, and a second one on rows of the full
context.

Data: the source text of Python's own standard library (every machine has it), mixed with
key-value pairs stated early and asked for later, so that KV entries far back matter and an eviction
policy that drops them is seen to lose. Everything is seeded; the data depends only on the Python
version. Writes a Hugging Face folder (config, safetensors in bf16, byte-level BPE tokenizer, model
card) at every evaluation, so an interrupted run leaves a model too.
"""  # noqa: E501

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import copy
import json
import math
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

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
SCRIPT = Path(__file__).name
CONTEXT = 1024
# Rows and tokens of a step: cheap rows first, then the full context so that every position is
# trained.
SHORT = (12, 384)
LONG = (5, CONTEXT)


# Of `length` token ids, with the places of those that can be known: rng, tokenizer, code, length.


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


class Batches:
    """Seeded batches: code rows beginning with BOS, and `RECALL_SHARE` of synthetic rows."""

    def __init__(self, tokenizer: Tokenizer, code: torch.Tensor, seed: int):
        self.tokenizer = tokenizer
        self.code = code
        self.rng = random.Random(seed)
        self.bos = tokenizer.token_to_id(BOS)

    def code_row(self, length: int) -> list[int]:
        start = self.rng.randrange(len(self.code) - length)
        return [self.bos, *self.code[start : start + length - 1].tolist()]

    def next(self, rows: int, length: int) -> torch.Tensor:
        made = []
        for _ in range(rows):
            if self.rng.random() < RECALL_SHARE:
                made.append(recall_row(self.rng, self.tokenizer, self.code, length)[0])
            else:
                made.append(self.code_row(length))
        return torch.tensor(made)


def optimizers(model: OPTForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
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


def loss_of(model: OPTForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )


@torch.no_grad()
def evaluate(model: OPTForCausalLM, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, float]:
    """Held-out nats a token at full context, and greedy accuracy on recall answers by distance."""
    model.eval()
    bos = tokenizer.token_to_id(BOS)
    length = CONTEXT
    stride = (len(corpus.held_out) - length) // EVAL_ROWS
    rows = [
        [bos, *corpus.held_out[i * stride : i * stride + length - 1].tolist()]
        for i in range(EVAL_ROWS)
    ]
    losses = torch.cat(
        [loss_of(model, torch.tensor(rows[i : i + 8])).view(8, -1) for i in range(0, EVAL_ROWS, 8)]
    )
    recall_accuracy = accuracy(model, tokenizer, corpus.held_out, length)
    model.train()
    short = SHORT[1]
    return {
        "unigram_nats_per_token": round(unigram_nats(corpus), 4),
        "held_out_nats_per_token": round(losses.mean().item(), 4),
        f"held_out_nats_first_{short}": round(losses[:, : short - 1].mean().item(), 4),
        "recall_digit_accuracy": recall_accuracy,
    }


def accuracy(model: OPTForCausalLM, tokenizer: Tokenizer, code: torch.Tensor, length: int) -> float:
    """Share of the tokens that can be known which are the likeliest, of 32 rows."""
    rng = random.Random(7)
    right = 0
    asked = 0
    for _ in range(32):
        ids, answers = recall_row(rng, tokenizer, code, length)
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


def model_card(runs: list[dict[str, object]]) -> str:
    facts = "\n".join(
        f"| {key} | " + " | ".join(str(run.get(key, "")) for run in runs) + " |" for key in runs[-1]
    )
    head = (
        "| | "
        + " | ".join(f"run {i + 1}" for i in range(len(runs)))
        + " |\n|"
        + "---|" * (len(runs) + 1)
    )
    return f"""---
license: apache-2.0
tags: [opt, tiny, test-fixture]
---
# opt-tiny

A small OPT trained by `scripts/{SCRIPT}` for `flexgen_h2o`: embedded default, parity fixture and
quality yardstick. It continues Python source plausibly and nothing else; do not use it for real work.

Data: the source files of Python's standard library (the Python Software Foundation licence covers the source; the
model holds statistics of it), {RECALL_SHARE:.0%} of rows are synthetic recall rows: `let qf = 37` lines, a stretch of
code, then `ask qf = 37` in another order. One file in 40 is held out by a hash of its name.

{head}
{facts}

`recall_digit_accuracy` is the share of answer digits that greedy decoding gets right (chance: 0.1).
`unigram_nats_per_token` is what a held-out token costs whoever knows only how often each token is.
"""  # noqa: E501


def save(
    model: OPTForCausalLM,
    tokenizer: Tokenizer,
    output: Path,
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
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(output)
    (output / "README.md").write_text(model_card(runs))
    (output / RUNS_NAME).write_text(json.dumps(runs, indent=2) + "\n")
    (output / "model.safetensors").chmod(0o644)


def start(
    args: argparse.Namespace, files: list[Path]
) -> tuple[Tokenizer, OPTForCausalLM, list[dict[str, object]]]:
    """A new model and tokenizer, or those of --init-from with the runs that made them."""
    if args.init_from is None:
        tokenizer = train_tokenizer(
            [read_text(p) for p in files if not is_held_out(p)], args.vocab_size
        )
        return tokenizer, build_model(args), []
    tokenizer = Tokenizer.from_file(str(args.init_from / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        []
    )  # rows get their BOS here, not from the tokenizer
    model = OPTForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    return tokenizer, model.train(), json.loads((args.init_from / RUNS_NAME).read_text())


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    files = stdlib_files()
    tokenizer, model, runs = start(args, files)
    corpus = build_corpus(tokenizer, files)
    print(f"{corpus.files} files, {len(corpus.train)} + {len(corpus.held_out)} tokens", flush=True)
    params = sum(p.numel() for p in model.parameters())
    setting = {
        "parameters": params,
        "width": args.width,
        "layers": args.layers,
        "heads": args.heads,
        "context": CONTEXT,
        "vocabulary": args.vocab_size,
        "steps": args.steps,
        "seed": args.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": f"`python scripts/{SCRIPT} {' '.join(sys.argv[1:])}`",
    }
    optims = optimizers(model, args.peak_rate)
    batches = Batches(tokenizer, corpus.train, args.seed)
    base_rates = [o.param_groups[0]["lr"] for o in optims]
    began = time.time()
    tokens = 0
    window = []
    for step in range(args.steps):
        ids = batches.next(*(SHORT if step < args.short_share * args.steps else LONG))
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
            result = {**evaluate(model, tokenizer, corpus), **seen}
            save(model, tokenizer, args.output, [*runs, {**setting, **result}])
            print(json.dumps(result), flush=True)


def train_step(
    model: OPTForCausalLM, optims: list[torch.optim.Optimizer], ids: torch.Tensor
) -> float:
    """One step of all optimizers on the rows `ids`; the mean loss before it, nats a token."""
    loss = loss_of(model, ids).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optim in optims:
        optim.step()
        optim.zero_grad(set_to_none=True)
    return loss.item()


def build_model(args: argparse.Namespace) -> OPTForCausalLM:
    config = OPTConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        ffn_dim=4 * args.width,
        num_attention_heads=args.heads,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=args.width,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        do_layer_norm_before=True,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return OPTForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("flexgen_h2o/assets/opt-tiny"), help="folder to write")
    add("--steps", type=int, default=2800)
    add("--init-from", type=Path, help="go on from this folder, which an earlier run has written")
    add("--peak-rate", type=float, default=2e-3, help="learning rate between warm-up and decay")
    add("--short-share", type=float, default=0.7, help="share of the steps on short rows")
    for name, usual in {"layers": 6, "width": 256, "heads": 8, "vocab-size": 2048}.items():
        add(f"--{name}", type=int, default=usual)
    add("--threads", type=int, default=os.cpu_count())
    add("--seed", type=int, default=0)
    add("--report-every", type=int, default=25)
    add("--eval-every", type=int, default=400)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
