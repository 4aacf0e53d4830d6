"""The rows: figures and tables of the papers, the command here that makes each, and small inputs
for the quick ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

NOT_MEASURED = "**not measured yet**"
TABLE = r"^\|"  # lines of Markdown tables


@dataclass(frozen=True)
class Row:
    """A figure or a table. quick: shell command on the test model, $WORK being a folder with
    `write_inputs`'s files.

    full: the same at the paper's size. needs: what has to be had for that. plan: flags of
    policy_search that say what it costs, machine: where. measured: with models that can be had
    here. keep: which lines of standard output are the main figures. real: shell command for a small
    real model on two cores, "" if there is nothing to compare with the paper: $MODEL is its folder
    or name, $ARTICLES the file of --articles, $WORK a folder that stays and has `write_texts`'s
    files. Its figures are $WORK/NAME.json, or several $WORK/NAME-SUFFIX.json.
    """

    name: str
    paper: str
    shows: str
    quick: str
    full: str
    needs: str
    plan: str = ""
    machine: str = "t4"
    measured: str = NOT_MEASURED
    keep: str = TABLE
    real: str = ""


TINY = "--model opt-tiny"
FLEX = "python -m flexgen_h2o.flex_opt"
EVALUATE = "python -m flexgen_h2o.evaluate"
SPEED = r"^(prefill|decode|total) latency|peak"
# Of the real rows: as many tokens as the shortest news articles have.
TEXTS = (
    '--prompts "$WORK/prompts.jsonl" --num-prompts 16 --prompt-len 384 --gen-len 64 '
    "--gpu-batch-size 16"
)
_30B = "--model facebook/opt-30b"
_6B = "--model facebook/opt-6.7b"

# A task of four choices for lm-eval, as docs/reference/lm-eval.md has it.
TASK = """task: methods
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: {choices}
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""

ROWS = (
    Row(
        "attention",
        "H2O, section 3, Figure 2",
        "attention is sparse, accumulated scores follow a power law and co-occurrence, removing "
        "heavy hitters hurts",
        f"{EVALUATE} attention {TINY} --num-prompts 16 --prompt-len 192 --gen-len 32 "
        "--gpu-batch-size 8",
        f"{EVALUATE} attention {_6B} --prompts wikitext.jsonl --prompt-len 1024 --gen-len 128 "
        "--plot attention.png",
        "OPT-6.7B; WikiText-103 as JSONL with `prompt`",
        f"{_6B} --prompt-len 1024 --gen-len 128 --num-prompts 448",
        measured="[papers](../../docs/lab/papers.md#attention)",
        real=f'{EVALUATE} attention --model "$MODEL" {TEXTS} --json "$WORK/attention.json"',
    ),
    Row(
        "tasks",
        "H2O, section 5.1, Figures 4 and 8",
        "accuracy of six tasks by KV budget: full cache, local, H2O",
        f"{EVALUATE} lm-eval grid {TINY} --include-path $WORK/tasks --tasks methods --num-fewshot "
        "2 --policies full "
        "local:sinks=0 h2o --kv-budget 0.5 0.2 --output-dir $WORK/grid --gpu-batch-size 16",
        f"{EVALUATE} lm-eval grid {_30B} --tasks h2o-paper --num-fewshot 5 --policies full "
        "local:sinks=0 h2o "
        "--kv-budget 0.8 0.6 0.4 0.2 0.1 0.04 --output-dir grid --plot grid.png --download",
        "OPT-30B, LLaMA-7B or GPT-NeoX-20B; data sets of the six tasks",
        f"{_30B} --prompt-len 384 --gen-len 8 --num-prompts 8000 --hh-ratio 0.1",
        keep=r"^\|",
    ),
    Row(
        "fidelity",
        "H2O, sections 5.1 and 5.3 (budgets, ablations)",
        "H2O against local, random and later policies at 50, 20 and 10%: KL, flips, NLL, recall",
        f"{EVALUATE} fidelity {TINY} --num-prompts 6 --recall-prompts 5 --prompt-len 192 --gen-len "
        "16 --policies "
        "local:sinks=0 local random h2o h2o-norm snapkv --budgets 0.5 0.2 --resamples 200 "
        "--gpu-batch-size 16",
        f"{EVALUATE} fidelity {_30B} --dtype bfloat16 --prompts wikitext.jsonl --num-prompts 64 "
        "--gpu-batch-size 16 "
        "--policies local:sinks=0 local random h2o h2o-norm snapkv --budgets 0.5 0.2 0.1 0.04",
        "OPT-30B; text as JSONL",
        f"{_30B} --prompt-len 256 --gen-len 96 --num-prompts 1408",
        measured="[papers](../../docs/lab/papers.md#fidelity)",
        real=f'{EVALUATE} fidelity --model "$MODEL" {TEXTS} --policies random '
        "local:sinks=0 local h2o "
        '--budgets 0.5 0.2 --json "$WORK/fidelity.json"',
    ),
    Row(
        "summaries",
        "H2O, section 5.1 (HELM's XSUM and CNN/DailyMail); llama-recipes' table",
        "ROUGE by KV size: full, local, H2O",
        f"{EVALUATE} summarize {TINY} --input $WORK/articles.jsonl --output-dir $WORK/summaries "
        "--policies full "
        "local:sinks=0 local h2o --hh-size 16 32 --greedy --gen-len 24 --gpu-batch-size 8",
        f"{EVALUATE} summarize --model meta-llama/Llama-2-7b-hf --input xsum.jsonl --output-dir "
        "xsum --policies full "
        "local:sinks=0 local h2o --hh-size 32 64 128 256 512 --sample-num 1000 --plot xsum.png",
        "LLaMA-2-7B; h2o_hf's `xsum_0shot.jsonl` or `cnn_dailymail.jsonl` (`article`, "
        "`summary_gt`)",
        "--model meta-llama/Llama-2-7b-hf --prompt-len 600 --gen-len 64 --num-prompts 1000 "
        "--hh-size 128 "
        "--recent-size 128",
        measured="[papers](../../docs/lab/papers.md#summaries)",
        real=f'{EVALUATE} summarize --model "$MODEL" --input "$ARTICLES" --sample-num 60 '
        "--output-dir "
        '"$WORK/summaries" --policies full local:sinks=0 local h2o --hh-size 32 64 128 256 '
        "--greedy "
        '--json "$WORK/summaries.json"',
    ),
    Row(
        "helm",
        "H2O, section 5.1; FlexGen (HELM)",
        "HELM's requests as a durable job, answers as its import takes them",
        f"python -m flexgen_h2o.batch {TINY} --input $WORK/helm.jsonl --output "
        "$WORK/helm-answers.jsonl --hh-ratio 0.1 "
        "&& cat $WORK/helm-answers.jsonl",
        f"python -m flexgen_h2o.batch {_30B} --input xsum_opt.jsonl --output answers.jsonl "
        "--hh-ratio 0.1",
        "OPT-30B; request lines of HELM (`evaluate helm export`)",
        f"{_30B} --prompt-len 1800 --gen-len 64 --num-prompts 1000 --hh-ratio 0.1",
        measured="1,000 articles through opt-tiny: [speed notes](../../docs/lab/speed-notes.md)",
        keep=r'"result"',
    ),
    Row(
        "streaming",
        "H2O, section 5.3 (texts of any length)",
        "perplexity by window of a text longer than the cache, with H2O and a full cache",
        f"{EVALUATE} streaming {TINY} --text README.md --stream-len 512 --streams 2 --policies "
        "full h2o local "
        "local:sinks=0 --hh-size 64 --recent-size 64 --gpu-batch-size 4",
        f"{EVALUATE} streaming --model meta-llama/Llama-2-7b-hf --text pg19.txt --policies h2o "
        "h2o-norm local "
        "local:sinks=0 --hh-size 1024 --recent-size 1024 --positions rolling",
        "LLaMA-2-7B; a long text",
        "--model meta-llama/Llama-2-7b-hf --prompt-len 1 --gen-len 4000 --num-prompts 8 --hh-size "
        "1024 --recent-size "
        "1024",
        "a100-80",
        "[papers](../../docs/lab/papers.md#streaming)",
        real='for policy in h2o local; do\nname="$WORK/streaming-$policy.json"; [ -s "$name" ] || '
        f'{EVALUATE} streaming --model "$MODEL" --text "$WORK/long.txt" --streams 1 --stream-len '
        "20000 --policies "
        '$policy --hh-size 256 --recent-size 256 --positions rolling --json "$name" || exit\ndone',
    ),
    Row(
        "throughput-t4",
        "H2O, section 5.2 (generation throughput on a T4)",
        "tokens/s with the full cache and with 20% of the prompt's KV entries, 512 + 32 and 1,024 "
        "+ 32 tokens",
        f"for kept in '' '--hh-ratio 0.1'; do {FLEX} {TINY} --prompt-len 512 --gen-len 32 "
        "--gpu-batch-size 8 "
        "--num-gpu-batches 1 --percent 100 0 100 0 100 0 --no-log --verbose 1 $kept || exit; done",
        "for len in 512 1024; do\n"
        f"{FLEX} {_30B} --prompt-len $len --gen-len 32 --policy policies/opt-30b/t4.json --device "
        "cuda\n"
        f"{FLEX} {_30B} --prompt-len $len --gen-len 32 --policy policies/opt-30b/t4-h2o20.json "
        "--hh-ratio 0.1 "
        "--device cuda\ndone",
        "OPT-30B, or `--path _DUMMY_`; a card with 16 GB, 208 GB of RAM",
        f"{_30B} --prompt-len 512 --gen-len 32 --num-prompts 728 --hh-ratio 0.1",
        measured="on two cores: [speed notes](../../docs/lab/speed-notes.md); on a card "
        + NOT_MEASURED,
        keep=SPEED,
    ),
    Row(
        "throughput-a100",
        "H2O, section 5.2 (throughput and latency on an A100)",
        "tokens/s and latency of long prompts and answers, all on the card",
        f"for kept in '' '--hh-ratio 0.1'; do {FLEX} {TINY} --prompt-len 256 --gen-len 256 "
        "--gpu-batch-size 4 "
        "--num-gpu-batches 1 --percent 100 0 100 0 100 0 --no-log --verbose 1 $kept || exit; done",
        f"for kept in '' '--hh-ratio 0.1'; do\n{FLEX} {_6B} --prompt-len 1024 --gen-len 1024 "
        "--gpu-batch-size 24 "
        "--num-gpu-batches 1 --percent 100 0 100 0 100 0 --device cuda $kept\ndone",
        "OPT-6.7B, or `--path _DUMMY_`; a card with 80 GB. OPT has 2,048 positions: the paper's "
        "longer rows left "
        "them out",
        f"{_6B} --prompt-len 1024 --gen-len 1024 --num-prompts 24 --hh-ratio 0.1",
        "a100-80",
        keep=SPEED,
    ),
    Row(
        "h2o-4bit",
        "H2O, section 5.3 (with quantisation)",
        "H2O with KV in 4 bits: what each loses, and both",
        f"{EVALUATE} fidelity {TINY} --num-prompts 6 --recall-prompts 0 --prompt-len 128 --gen-len "
        "16 --policies h2o "
        "--budgets 0.5 0.2 --resamples 200 --kv-bits 4 --gpu-batch-size 8",
        "for kept in '' '--kv-bits 4' '--kv-budget 0.2' '--kv-budget 0.2 --kv-bits 4'; "
        f"do\n{EVALUATE} lm-eval {_30B} "
        "--tasks copa,openbookqa,piqa --num-fewshot 5 --download $kept\ndone",
        "OPT-30B; data sets",
        f"{_30B} --prompt-len 384 --gen-len 8 --num-prompts 4000 --hh-ratio 0.1 --compress-cache",
        measured="[papers](../../docs/lab/papers.md#h2o-4bit)",
        real=f'{EVALUATE} fidelity --model "$MODEL" {TEXTS} --policies h2o '
        "--budgets 0.2 --kv-bits 4 "
        '--json "$WORK/h2o-4bit.json"',
    ),
    Row(
        "texts",
        "H2O, appendix (texts with full cache, local and H2O)",
        "one's own prompts, full cache and H2O one below the other",
        f"{EVALUATE} text {TINY} --prompt 'def area(self):' --hh-size 8 --recent-size 8 --gen-len "
        "32",
        f"{EVALUATE} text --model huggyllama/llama-7b --prompts p.txt --hh-ratio 0.1 "
        "--recent-ratio 0.1",
        "LLaMA-7B (its shape is LLaMA-2-7B's)",
        "--model meta-llama/Llama-2-7b-hf --prompt-len 128 --gen-len 64 --num-prompts 8",
        measured="nothing to measure: texts are to be read",
        keep=r"\S",
    ),
    Row(
        "memory-speed",
        "MiniKV, memory and latency by batch and length",
        "peak memory and tokens/s by batch, prompt, output and policy",
        "for cell in 128,8,none,1,1 512,8,none,8,8; do python -m bench.sweep --cell "
        "facebook/opt-125m,$cell --systems "
        "ours-full ours-h2o:0.25 --repeats 0 --quiet-wait 0 --name ${cell%%,*} --results "
        "$WORK/memory-speed || exit; "
        "done",
        "for rows in 1 2 4 8 16 32; do\nbash bench/throughput_sweep.sh --cell "
        "meta-llama/Llama-2-7b-hf,2048,1024,none,$rows,$rows --systems ours-full ours-h2o:0.25 "
        "ours-h2o-4bit:0.25 "
        "--device cuda --name memory-speed-$rows\ndone",
        "LLaMA-2-7B, or `--path _DUMMY_`; a card with 80 GB",
        "--model meta-llama/Llama-2-7b-hf --prompt-len 2048 --gen-len 1024 --num-prompts 32 "
        "--hh-ratio 0.25",
        "a100-80",
    ),
    Row(
        "ruler",
        "MiniKV's and kvpress's kind of table (long prompts)",
        "RULER-type tasks by policy and budget, full cache beside",
        f"{EVALUATE} frontier {TINY} --prompts scripts/code_prompts.txt --continuation greedy "
        "--prompt-len 256 "
        "--gen-len 8 --tasks niah --num-questions 4 --policies local:sinks=0 h2o h2o-norm "
        "--kv-budget 0.2 --no-answers",
        f"{EVALUATE} frontier --model meta-llama/Llama-3.1-8B --prompts wikitext.jsonl "
        "--prompt-len 4096 --tasks niah "
        "niah-multikey vt cwe fwe --num-questions 100 --policies local:sinks=0 h2o h2o-norm snapkv "
        "--kv-budget 0.5 0.2",
        "Llama-3.1-8B; LongBench itself is not read here",
        "--model meta-llama/Llama-3.1-8B --prompt-len 4096 --gen-len 128 --num-prompts 2500 "
        "--hh-ratio 0.1",
        "a100-80",
        "[papers](../../docs/lab/papers.md#ruler)",
        real=f'{EVALUATE} frontier --model "$MODEL" --prompts "$WORK/prompts.jsonl" --num-prompts '
        "4 --prompt-len 384 "
        "--gen-len 16 --tasks niah niah-multikey --num-questions 20 --policies local:sinks=0 h2o "
        "--kv-budget 0.5 0.2 "
        '--no-answers --json "$WORK/ruler.json"',
    ),
    Row(
        "flexgen-throughput",
        "FlexGen, Table 2 and Figure 1",
        "generation throughput of models that do not fit the card",
        f"for len in 128 256; do {FLEX} {TINY} --prompt-len $len --gen-len 16 --gpu-batch-size 4 "
        "--num-gpu-batches 2 "
        "--percent 0 50 0 50 0 100 --no-log --verbose 1 || exit; done",
        f"for size in 6.7b 30b 175b; do for len in 256 512 1024; do\n{FLEX} --model "
        "facebook/opt-$size --prompt-len "
        "$len --gen-len 32 --policy policies/opt-$size/t4.json --device cuda\ndone; done",
        "OPT-175B, or `--path _DUMMY_`; a card with 16 GB, 208 GB of RAM, 1.5 TB of disk",
        "--model facebook/opt-175b --prompt-len 512 --gen-len 32 --num-prompts 256",
        measured="shapes up to OPT-30B on two cores: [Results](../../docs/results.md)",
        keep=SPEED,
    ),
    Row(
        "policy-search",
        "FlexGen, section 4 (policy search by linear program)",
        "placement and batch sizes, with predicted time, memory and what binds",
        "python -m flexgen_h2o.policy_search --model facebook/opt-30b --hardware t4 --prompt-len "
        "512 --gen-len 32 "
        "--num-prompts 144",
        "python -m flexgen_h2o.policy_search --model facebook/opt-175b --hardware t4 --prompt-len "
        "512 --gen-len 32 "
        "--num-prompts 256",
        "nothing: a config is enough, and these are built in",
        "--model facebook/opt-175b --prompt-len 512 --gen-len 32 --num-prompts 256",
        measured="against recorded runs: [planner.md](../results/notes/planner.md)",
        keep=r"\S",
    ),
    Row(
        "ablation",
        "FlexGen, Table 4 (ablation)",
        "without overlap, and other placements: what each is worth",
        f"for overlap in true false; do {FLEX} {TINY} --prompt-len 128 --gen-len 8 "
        "--gpu-batch-size 4 "
        "--num-gpu-batches 2 --percent 0 0 0 50 0 100 --overlap $overlap --no-log --verbose 1 || "
        "exit; done",
        "for how in '--percent 100 0 100 0 100 0' '--percent 0 0 100 0 100 0' '--percent 0 0 100 0 "
        "100 0 --overlap "
        f"false'; do\n{FLEX} --model facebook/opt-1.3b --path _DUMMY_ --prompt-len 8 --gen-len 9 "
        "--gpu-batch-size 256 "
        "--num-gpu-batches 1 $how\ndone",
        "nothing: weights are random",
        f"{_30B} --prompt-len 512 --gen-len 32 --num-prompts 144",
        measured="[speed notes](../../docs/lab/speed-notes.md)",
        keep=SPEED,
    ),
    Row(
        "breakdown",
        "FlexGen, execution time breakdown",
        "seconds of loads, stores and compute, a layer and a batch",
        f"{FLEX} {TINY} --prompt-len 128 --gen-len 4 --gpu-batch-size 4 --num-gpu-batches 2 "
        "--percent 0 50 0 50 0 100 "
        "--debug-mode breakdown --no-log --verbose 0",
        f"{FLEX} {_30B} --prompt-len 512 --gen-len 8 --policy policies/opt-30b/t4.json "
        "--debug-mode breakdown "
        "--device cuda",
        "OPT-30B, or `--path _DUMMY_`",
        f"{_30B} --prompt-len 512 --gen-len 8 --num-prompts 144",
        keep=r"(load|store|compute)_|#",
    ),
    Row(
        "compression",
        "FlexGen, Table 5 (4 bits, and sparse attention)",
        "what weights and KV in 4 bits cost",
        f"{EVALUATE} fidelity {TINY} --num-prompts 6 --recall-prompts 0 --prompt-len 128 --gen-len "
        "16 --policies h2o "
        "--budgets 0.5 --resamples 200 --weight-bits 4 --kv-bits 4 --gpu-batch-size 8",
        "for bits in '--weight-bits 4' '--kv-bits 4' '--weight-bits 4 --kv-bits 4' "
        "'--attn-sparsity 10%'; do\n"
        f"{EVALUATE} fidelity {_30B} --dtype bfloat16 --prompts wikitext.jsonl --num-prompts 64 "
        "--policies h2o "
        "--budgets 0.2 $bits\ndone",
        "OPT-30B; WikiText or LAMBADA as JSONL",
        f"{_30B} --prompt-len 256 --gen-len 96 --num-prompts 128 --compress-weight "
        "--compress-cache",
        measured="[papers](../../docs/lab/papers.md#compression)",
        real=f'{EVALUATE} fidelity --model "$MODEL" {TEXTS} --policies h2o '
        "--budgets 0.2 "
        '--weight-bits 4 --kv-bits 4 --json "$WORK/compression.json"',
    ),
    Row(
        "pipeline",
        "FlexGen, Table 3 (several machines)",
        "one model in one process and in several, each with its share of the layers",
        "export OMP_NUM_THREADS=1; for start in '' '-m torch.distributed.run --nproc-per-node 2'; "
        "do python $start -m "
        "flexgen_h2o.flex_opt --model opt-tiny ${start:+--pipeline} --prompt-len 64 --gen-len 8 "
        "--percent 100 0 100 0 "
        "100 0 --gpu-batch-size 4 --num-gpu-batches 1 --no-log --verbose 1 || exit; done",
        "for start in python 'torchrun --nnodes 4 --nproc-per-node 1'; do\n"
        f"$start -m flexgen_h2o.flex_opt {_30B} --prompt-len 512 --gen-len 32 --percent 100 0 0 "
        "100 100 0 "
        "--gpu-batch-size 32 --num-gpu-batches 4 --device cuda\ndone  # torchrun: on each machine, "
        "with --pipeline",
        "OPT-30B; four machines",
        f"{_30B} --prompt-len 512 --gen-len 32 --num-prompts 512",
        keep=SPEED,
    ),
    Row(
        "wrangling",
        "FlexGen (data wrangling)",
        "entity matching, error detection and imputation",
        f"{EVALUATE} data-wrangling {TINY} --data-dir $WORK/Restaurant --output-dir "
        "$WORK/wrangling --k 1 "
        "--gpu-batch-size 4",
        f"{EVALUATE} data-wrangling {_30B} --data-dir datasets/data_imputation/Restaurant --k 10 "
        "--do-test",
        "OPT-30B; the folders of HazyResearch/fm_data_tasks",
        f"{_30B} --prompt-len 744 --gen-len 3 --num-prompts 86",
        keep=r"\S",
    ),
    Row(
        "complete",
        "FlexGen, apps (completion)",
        "own prompts, several at once",
        f"python -m flexgen_h2o.cli complete {TINY} 'def area(self):' 'import os' --gen-len 16",
        f"python -m flexgen_h2o.cli complete {_6B} 'Paris is the capital city of' --gen-len 32",
        "OPT-6.7B",
        f"{_6B} --prompt-len 16 --gen-len 32 --num-prompts 2",
        measured="nothing to measure: texts are to be read",
        keep=r"\S",
    ),
    Row(
        "chat",
        "FlexGen, apps (chatbot); H2O (own prompts)",
        "a conversation in streaming text, with H2O",
        "printf 'import os\\ndef area(self):\\n' | python -m flexgen_h2o.cli chat --model opt-tiny "
        "--hh-size 32 "
        "--recent-size 32 "
        "--gen-len 16",
        "python -m flexgen_h2o.cli chat --model meta-llama/Llama-2-7b-chat-hf --hh-size 1024 "
        "--recent-size 1024 "
        "--positions rolling",
        "LLaMA-2-7B-chat",
        "--model meta-llama/Llama-2-7b-chat-hf --prompt-len 128 --gen-len 128 --num-prompts 1 "
        "--hh-size 1024 "
        "--recent-size 1024",
        measured="nothing to measure: texts are to be read",
        keep=r"\S",
    ),
    Row(
        "peers",
        "FlexGen, Table 2; H2O, section 5.2 (other systems)",
        "tokens/s of Accelerate, Hugging Face and ours, each at its best batch",
        "python -m bench.sweep --cell facebook/opt-125m,16,4,none,2,2 --systems ours-full "
        "ours-h2o:0.1 --repeats 1 "
        "--quiet-wait 0 --results $WORK/sweep",
        "bash bench/throughput_sweep.sh --cell facebook/opt-30b,512,32,16GiB,4,256",
        "installed peers (`bench/baselines`); weights are random",
        f"{_30B} --prompt-len 512 --gen-len 32 --num-prompts 256",
        measured="[papers](../../docs/lab/papers.md#peers), [Results](../../docs/results.md)",
        real="for round in 1 2 3; do for system in hf:sdpa ours:full ours:h2o:0.1; do\n"
        'name="$WORK/peers-${system/:/-}-$round.json"; [ -s "$name" ] || python '
        "bench/baselines/run.py ${system%%:*} "
        '--variant ${system#*:} --model-dir "$MODEL" --prompt-len 512 --gen-len 64 --rows 16 '
        "--offload-dir "
        '"$WORK/offload" > "$name" || exit\ndone; done',
    ),
)


def write_texts(work: Path, articles: Path | None, pages: list[Path]) -> None:
    """Prompts and one long text of English prose for the real rows: of --articles, else of
    documentation pages."""
    if articles is None:
        texts = [page.read_text() for page in pages]
    else:
        records = map(json.loads, filter(str.strip, articles.read_text().splitlines()))
        texts = [
            record["article"].removeprefix("###\nArticle: ").rpartition("\n\n")[0]
            for record in records
        ]
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    for name, text in (("prompts.jsonl", prompts), ("long.txt", "\n\n".join(texts))):
        path = work / name
        if not path.exists() or path.read_text() != text:  # another row's process may be reading it
            path.write_text(text)


def write_inputs(work: Path) -> None:
    """Small inputs of our own, in the formats of the data that cannot be had here."""
    article = (
        "###\nArticle: The {0} opened on Monday. It has {1} rooms.\n\nSummarize the above "
        "article in 1 sentence.\n"
    )
    facts = [("museum", 12), ("school", 30), ("library", 7), ("station", 3)]
    stop = {
        "stop": ["###"],
        "temperature": 0.3,
        "max_tokens": 16,
        "n": 1,
        "top_p": 1,
        "logprobs": 1,
    }
    articles = [
        {"article": article.format(*f), "summary_gt": f"A {f[0]} opened.", **stop} for f in facts
    ]
    asked = {
        "request_type": "language-model-inference",
        "model": "together/opt-66b",
        "best_of": 1,
        "echo": False,
    }
    helm = [
        {"scenario": "xsum", "request": {"prompt": a["article"], **asked, **stop}} for a in articles
    ]
    for name, records in (("articles", articles), ("helm", helm)):
        (work / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    tasks = work / "tasks"
    tasks.mkdir(exist_ok=True)
    names = ("close", "read", "write", "flush")
    choices = [
        {"text": f"def {name}(self):\n    self.file", "answer": i % 4}
        for i, name in enumerate(names * 2)
    ]
    (tasks / "methods.jsonl").write_text("".join(json.dumps(record) + "\n" for record in choices))
    (tasks / "methods.yaml").write_text(
        TASK.format(data=tasks / "methods.jsonl", choices=[f".{n}()" for n in names])
    )
    folder = work / "Restaurant"
    folder.mkdir(exist_ok=True)
    rows = (
        "arts,12 main st.,denver,grill",
        "bistro,3 elm st.,new york,french",
        "ritz,160 e. 64th st.,new york,",
    )
    for name, chosen in (("train", rows[:2]), ("valid", rows[2:]), ("test", rows[1:2])):
        (folder / f"{name}.csv").write_text("\n".join(["name,addr,city,type", *chosen]) + "\n")


if __name__ == "__main__":  # `reproduce.sh --list`, on any Python 3: this file imports no package
    print("\n".join(f"{row.name:20} {row.paper}: {row.shows}" for row in ROWS))
