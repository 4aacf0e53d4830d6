"""List the other names of flags, and the flags of other programs with what to do instead.

The programs are FlexGen's and H2O's scripts, vLLM, llama.cpp and Hugging Face transformers. Names
have hyphens here; underscores are accepted too.
"""

from __future__ import annotations

_LENGTH = ("--max-new-tokens", "--max-output-tokens", "--n-predict", "--predict", "--length", "-n")
# Flag that help shows -> other names with exactly the same meaning. A command with the flag accepts
# them too. The first ones are those in messages, files and fields of parsed arguments.
SAME = {
    "--max-tokens": ("--gen-len", *_LENGTH),
    "--gen-len": ("--max-tokens", *_LENGTH),
    "--ram": ("--host-mem",),
    "--gpu-mem": ("--device-mem",),
    "--plan": ("--policy",),
    "--kv-size": ("--kv-bytes",),
    "--kv-bits": ("--cache-bits",),
    "--kv-rotation": ("--cache-rotation",),
    "--micro-batch": ("--gpu-batch-size",),
    "--micro-batches": ("--num-gpu-batches",),
    "--hh-ratio": ("--heavy-ratio",),
    "--hh-size": ("--heavy-hitter-size",),
    "--temperature": ("--temp",),
    "--top-k": ("--k",),
    "--stop": ("--reverse-prompt",),
    "--model-type": ("--model-arch",),
    "--model": ("--model-name", "--model-name-or-path"),
    "--dtype": ("--torch-dtype",),
    "--system": ("--system-prompt",),
    "--no-thinking": ("--disable-thinking", "--no-think", "--no-reasoning"),
    "--chat-template-kwargs": ("--default-chat-template-kwargs",),
    "--input": ("--input-file", "--input-path"),
    "--turns": ("--input-path",),
    "--output": ("--output-file", "--output-path"),
    "--save-plan": ("--output", "-o"),
    "--report": ("--json",),
}


# Switches, and the flags that set them too: a message names the one that was given.
SWITCHED_BY = {
    "--compress-weight": ("--weight-bits",),
    "--compress-cache": ("--kv-bits", "--kv-size"),
}


def shown_name(flag: str) -> str:
    """Return the name of a flag that help shows: `--host-mem` -> `--ram`."""
    return next((name for name, others in SAME.items() if flag in others), flag)


_H2O = "give --hh-ratio R, or --eviction h2o"
_PIPELINE = "torchrun and --pipeline do that here (docs/how-to/several-processes.md)"
_THREADS = "set OMP_NUM_THREADS=N in the environment"
_LAYERS = "layers are placed by --ram and --gpu-mem, or by --percent"
_CONTEXT = "the length is that of each prompt with --max-tokens; leave it out"
_BATCH = "the batch is chosen by the plan; give --micro-batch and --micro-batches to set it"
_KV_BITS = "give --kv-bits 8, 4 or 3"
_WEIGHT_BITS = (
    "give --weight-bits 8 or 4; a GPTQ, AWQ, FP8 or MXFP4 checkpoint is read as it is, "
    "without a flag"
)
_NO_EFFECT = "nothing here needs it; leave it out"
_NOT_DRAWN = "answers are greedy unless --temperature is above 0; leave it out"
_NOT_THERE = "nothing like it is supported yet; leave it out"
_OF_LINES = "give {} in each line of a .jsonl file"
_EMBEDDINGS = "texts are generated, and no embeddings; sentence-transformers makes them"
_ADAPTER = (
    "adapters are not read; merge it into its base model (merge_and_unload of peft), and give the "
    "folder that this makes as MODEL"
)
_THINKING = "models think if their chat template says so; --no-thinking switches it off"
_TEMPLATE = "the model's chat template is used; --no-chat sends texts as they are"

# Flags that are not accepted, and what to do instead.
ADVICE = {
    # earlier versions of this program
    "--mass-steps": "the attention on evicted entries is not measured any more; leave it out",
    "--free-run": "evaluate frontier follows the model's own answers; leave it out",
    "--speed": "evaluate frontier measures tokens/s",
    "--depths": "recall asks for facts at fixed depths; leave it out",
    # FlexGen and H2O
    "--hh-long-seq": "prompts of any length are taken without it; leave it out",
    "--sample-num": "give a file with as many prompts",
    "--input-path": "give --input FILE; flex-opt has --prompts FILE",
    "--output-path": "give --output FILE",
    "--dry-run": "only commands that run a model have it; leave it out",
    "--model-arch": "the model's config says it; leave it out",
    "--model-type": "the model's config says it; leave it out",
    "--cache-dir": "give --path",
    "--enable-small-cache": _H2O,
    "--enable-h2o-cache": _H2O,
    "--enable-h2o-generation": _H2O,
    "--enable-position-rolling": "give --positions rolling",
    "--heavy-ratio": "give --hh-ratio",
    "--heavy-hitter-size": "give --hh-size",
    "--num-heavy-hitter-tokens": "give --hh-size",
    "--num-window-length": "give --recent-size, which the heavy columns are not in",
    "--start-size": "give --eviction local:sinks=N",
    "--length": "give --max-tokens",
    "--no-cuda": "give --device cpu",
    "--fp16": "give --dtype float16",
    "--bf16": "give --dtype bfloat16",
    "--gbs": "give --gpu-batch-size",
    "--num-gb": "give --num-gpu-batches",
    **dict.fromkeys(
        ("--cpu-mem", "--memory", "--mem", "--max-ram", "--ram-limit"),
        "give --ram SIZE, such as 8GiB",
    ),
    "--nvme-mem": "give --disk-mem",
    "--pad-to-seq-len": "nothing is padded; leave it out",
    **dict.fromkeys(
        (
            "--head-ip",
            "--rank",
            "--local-rank",
            "--world-size",
            "--use-mpi",
            "--comm-device",
            "--async-comm",
        ),
        _PIPELINE,
    ),
    # vLLM
    "--tensor-parallel-size": _PIPELINE,
    "--pipeline-parallel-size": _PIPELINE,
    "--gpu-memory-utilization": "give --gpu-mem SIZE, such as 14GiB",
    "--cpu-offload-gb": "give --ram SIZE and --gpu-mem SIZE; the plan says what is offloaded",
    "--swap-space": "give --ram SIZE",
    "--max-num-seqs": _BATCH,
    "--max-num-batched-tokens": _BATCH,
    "--quantization": _WEIGHT_BITS,
    "--kv-cache-dtype": _KV_BITS,
    "--enforce-eager": _NO_EFFECT,
    "--enable-prefix-caching": "what prompts begin with is computed once anyway; leave it out",
    "--trust-remote-code": "code of a model is never run; leave it out",
    "--download-dir": "give --path FOLDER with the checkpoint in it",
    "--load-format": "safetensors are read in place, and --random-weights needs no checkpoint; "
    "leave it out",
    "--tokenizer": "the tokenizer is that of the model's folder; leave it out",
    "--chat-template": _TEMPLATE,
    "--served-model-name": "the server's name of the model is MODEL; leave it out",
    "--guided-decoding-backend": _NOT_THERE,
    "--speculative-config": _NOT_THERE,
    "--speculative-model": _NOT_THERE,
    **dict.fromkeys(
        (
            "--lora",
            "--loras",
            "--lora-modules",
            "--enable-lora",
            "--lora-path",
            "--lora-adapter",
            "--lora-weights",
            "--lora-scaled",
            "--max-loras",
            "--max-lora-rank",
            "--adapter",
            "--adapters",
            "--adapter-path",
            "--adapter-name-or-path",
            "--peft",
            "--peft-model",
            "--peft-path",
        ),
        _ADAPTER,
    ),
    **dict.fromkeys(
        ("--repeat-penalty", "--repetition-penalty"), _OF_LINES.format("repetition_penalty")
    ),
    **dict.fromkeys(("--thinking", "--think", "--enable-thinking", "--reasoning"), _THINKING),
    "--reasoning-budget": "give --no-thinking to switch thinking off; it has no limit of its own",
    "--reasoning-parser": "channels of gpt-oss are split without it; leave it out",
    "--reasoning-effort": 'give --chat-template-kwargs \'{"reasoning_effort": "low"}\'',
    "--input-json": "give --input FILE.jsonl",
    "--url": "each line of the file names its endpoint; leave it out",
    # llama.cpp
    "--ctx-size": _CONTEXT,
    "-c": _CONTEXT,
    "--threads": _THREADS,
    "-t": _THREADS,
    "--gpu-layers": _LAYERS,
    "--n-gpu-layers": _LAYERS,
    "-ngl": _LAYERS,
    "--n-cpu-moe": _LAYERS,
    "--cpu-moe": _LAYERS,
    "--override-tensor": _LAYERS,
    "-ot": _LAYERS,
    "--batch-size": _BATCH,
    "-b": _BATCH,
    "--ubatch-size": _BATCH,
    "-ub": _BATCH,
    "--parallel": _BATCH,
    "-np": _BATCH,
    "--cache-type-k": _KV_BITS,
    "-ctk": _KV_BITS,
    "--cache-type-v": _KV_BITS,
    "-ctv": _KV_BITS,
    "--file": "give --input FILE",
    "-f": "give --input FILE",
    "--hf-repo": "give the hub id as MODEL",
    "-hf": "give the hub id as MODEL",
    "--hf-file": "GGUF is not read; give a folder or hub id with safetensors, or convert it "
    "(docs/reference/not-supported.md, GGUF)",
    "--mlock": _NO_EFFECT,
    "--no-mmap": _NO_EFFECT,
    "--flash-attn": _NO_EFFECT,
    "-fa": _NO_EFFECT,
    "--conversation": "flexgen-h2o chat MODEL holds a conversation",
    "-cnv": "flexgen-h2o chat MODEL holds a conversation",
    "-no-cnv": "give --no-chat",
    "--jinja": _TEMPLATE,
    **dict.fromkeys(
        ("--embedding", "--embeddings", "--pooling", "--rerank", "--reranking"), _EMBEDDINGS
    ),
    **dict.fromkeys(("--grammar", "--grammar-file", "--json-schema"), _NOT_THERE),
    "--model-draft": _NOT_THERE,
    "-md": _NOT_THERE,
    "--min-p": _NOT_THERE,
    # transformers
    "--load-in-4bit": "give --weight-bits 4",
    "--load-in-8bit": "give --weight-bits 8",
    "--device-map": _LAYERS,
    "--max-memory": "give --ram SIZE, and --gpu-mem SIZE if there is a GPU",
    "--offload-folder": "give --offload-dir FOLDER",
    "--do-sample": _NOT_DRAWN,
    "--num-beams": _NOT_THERE,
    "--max-length": _CONTEXT,
    "--attn-implementation": _NO_EFFECT,
    "--low-cpu-mem-usage": _NO_EFFECT,
}

# Verbs of other programs, and earlier ones of this one.
VERBS = {
    "completion": "generate",
    "infer": "generate",
    "inference": "generate",
    "prompt": "generate",
    "server": "serve",
    "eval": "evaluate",
    "benchmark": "bench",
    "info": "doctor",
    "download": "cache",
    "pull": "cache",
    "list": "cache",
    "rm": "cache",
}
