"""Lays a checkpoint out anew, at random, in ways that transformers loads: names, ties, shards,
dtypes, stacks.

The numbers may become others, by rounding. What transformers makes of the same files is the
reference.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.parity.reference import stored_tensors

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
}
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


@dataclass
class Layout:
    """A checkpoint in the making. said: what was done to it, for a failing test."""

    tensors: Tensors
    config: dict[str, object]
    prefix: str
    table: str
    heads: tuple[str, ...]
    said: list[str] = field(default_factory=list)


def layout_of(model: PreTrainedModel) -> Layout:
    """As transformers itself would save the model."""
    tensors = {name: value.detach().clone() for name, value in stored_tensors(model).items()}
    config = model.config.to_dict()
    prefix = model.base_model_prefix
    [table] = [
        name for name in tensors if name.endswith(("embed_tokens.weight", "embed_in.weight"))
    ]
    heads = ("lm_head.weight", "embed_out.weight") if prefix == "gpt_neox" else ("lm_head.weight",)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return Layout(tensors, config, prefix, table, heads)


def stack_experts(rng: random.Random, made: Layout, model: PreTrainedModel) -> None:
    """As transformers holds them in memory, in some blocks."""
    held = dict(model.named_parameters())
    for base in sorted({found[1] for name in made.tensors if (found := EXPERT.match(name))}):
        if rng.random() < 0.5:
            continue
        made.said.append(f"stacks in {base}")
        for name in [name for name in made.tensors if name.startswith(f"{base}.")]:
            del made.tensors[name]
        for kind in ("gate_up_proj", "down_proj"):
            value = held[f"{base.replace('.block_sparse_moe.', '.mlp.')}.{kind}"]
            made.tensors[f"{base}.{kind}"] = value.detach().clone()


def rename_mixtral(rng: random.Random, made: Layout) -> None:
    if made.config["model_type"] == "mixtral" and rng.random() < 0.5:
        made.said.append("mlp for block_sparse_moe")
        made.tensors = {
            name.replace(".block_sparse_moe.", ".mlp."): value
            for name, value in made.tensors.items()
        }


def round_numbers(rng: random.Random, made: Layout) -> None:
    """Any dtype for any tensor, or one for all."""
    one = rng.choice((None, *DTYPES))
    made.said.append(f"dtype {one}")
    made.tensors = {
        name: value.to(one or rng.choice(DTYPES)) for name, value in made.tensors.items()
    }


def untie(rng: random.Random, made: Layout) -> None:
    """A tied table under other names, twice, or with a head that differs from it."""
    if not made.config.get("tie_word_embeddings"):
        if len(made.heads) > 1:  # either name of the head
            [own] = [name for name in made.heads if name in made.tensors]
            made.tensors[rng.choice(made.heads)] = made.tensors.pop(own)
        return
    head = rng.choice(made.heads)
    table = made.tensors[made.table]
    way = rng.choice(("table", "head", "both", "wider head", "wider table", "another head"))
    made.said.append(way)
    if way == "head":
        del made.tensors[made.table]
    wider = rng.choice(WIDER.get(table.dtype, (torch.float64,)))
    if way == "wider table":
        made.tensors[made.table] = table.to(wider, copy=True)
    if way != "table":
        made.tensors[head] = table.to(wider, copy=True) if way == "wider head" else table.clone()
    if way == "another head":
        made.tensors[head][rng.randrange(len(table))] += 0.5


def change_prefixes(rng: random.Random, made: Layout) -> None:
    """Each name with the base model's prefix, without it, or with it once more; the same way for
    all, or not.

    Experts of a block go the same way: transformers stacks them in the order of their names, and
    would mix them up.
    """
    ways: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(f"{made.prefix}."),
        lambda name: (
            f"{made.prefix}.{name}" if name != "embed_out.weight" else name
        ),  # which transformers renames first
    )
    one = rng.choice((None, *ways))
    made.said.append("mixed prefixes" if one is None else f"prefixes {ways.index(one)}")
    of_blocks = {
        base: rng.choice(ways)
        for base in sorted({name.partition(".experts.")[0] for name in made.tensors})
    }
    made.tensors = {
        (one or of_blocks[name.partition(".experts.")[0]])(name): value
        for name, value in made.tensors.items()
    }


def add_unused(rng: random.Random, made: Layout) -> None:
    if rng.random() < 0.3:
        made.said.append("unused")
        made.tensors["not.of.the.model.weight"] = torch.ones(3, 2)
        made.tensors[f"{made.prefix}.layers.99.self_attn.q_proj.weight"] = torch.ones(
            4, dtype=torch.int32
        )


def _is_named_twice(weight_map: dict[str, str], name: str) -> bool:
    """Does the index list the file of `name` once more? transformers opens no file that it does not
    list."""
    return list(weight_map.values()).count(weight_map[name]) > 1


def save(rng: random.Random, made: Layout, folder: Path) -> None:
    """In one file or in several, as safetensors or .bin, with an index that is right, or wrong in
    parts."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(made.config))
    is_safe = rng.random() < 0.8
    end, base = (".safetensors", "model") if is_safe else (".bin", "pytorch_model")
    names = list(made.tensors)
    count = rng.choice((1, 1, 2, 3, 5))
    files: list[Tensors] = [{} for _ in range(count)]
    for name in names:
        rng.choice(files)[name] = made.tensors[name]
    files = [one for one in files if one]
    made.said.append(f"{len(files)} files {end}")
    if rng.random() < 0.3 and len(files) > 1:
        made.said.append(
            "twice"
        )  # another state of it in an earlier file, which the last one replaces
        name = rng.choice(list(files[-1]))
        files[0][name] = files[-1][name].clone() + 1
    shards = [f"{base}-{i + 1:05d}-of-{len(files):05d}{end}" for i in range(len(files))]
    weight_map = {name: shard for shard, one in zip(shards, files, strict=True) for name in one}
    for name in names:
        way = rng.random() if rng.random() < 0.5 else 1.0
        if not _is_named_twice(weight_map, name):
            continue
        if way < 0.1:
            weight_map[name] = rng.choice(shards)  # wrong
        elif way < 0.2:
            del weight_map[name]  # not listed
    if rng.random() < 0.3:
        shard = rng.choice(shards)
        for name in (*made.heads, "listed.and.nowhere"):
            if name not in weight_map or _is_named_twice(weight_map, name):
                weight_map[name] = shard
    if len(shards) == 1 and rng.random() < 0.7:
        shards = [f"{base}{end}"]
    else:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / f"{base}{end}.index.json").write_text(json.dumps(index))
    for shard, one in zip(shards, files, strict=True):
        whole = {name: value.contiguous() for name, value in one.items()}
        if is_safe:
            save_file(whole, folder / shard, metadata=rng.choice((None, {"format": "pt"})))
        else:
            torch.save(whole, folder / shard, _use_new_zipfile_serialization=rng.random() < 0.7)


def lay_out(rng: random.Random, model: PreTrainedModel, folder: Path) -> Layout:
    made = layout_of(model)
    stack_experts(rng, made, model)
    rename_mixtral(rng, made)
    round_numbers(rng, made)
    untie(rng, made)
    change_prefixes(rng, made)
    add_unused(rng, made)
    save(rng, made, folder)
    return made
