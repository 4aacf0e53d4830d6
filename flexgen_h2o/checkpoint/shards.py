"""Writes the tensors of a model as a safetensors folder, piece by piece. Knows tensors by name and shape only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from flexgen_h2o import interrupts
from flexgen_h2o.checkpoint.file_writer import FileWriter, reserve
from flexgen_h2o.checkpoint.safetensors_format import SINGLE_NAME, Entry, header, shard_name, write_index
from flexgen_h2o.config import ModelSpec, TensorSpec

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Shard:
    """One file to write: its header (bytes) and its tensors in the order of their data."""

    name: str
    head: bytes
    tensors: tuple[TensorSpec, ...]
    nbytes: int  # of the whole file


def tensors_of(spec: ModelSpec) -> list[TensorSpec]:
    """All tensors of a model, those of a layer side by side, tied ones once."""
    return list({t.name: t for unit in spec.layers(sep_layer=False).units for t in unit.tensors}.values())


def plan_shards(
    tensors: Iterable[TensorSpec], entry_of: Callable[[TensorSpec], Entry], metadata: Mapping[str, str] | None = None
) -> list[Shard]:
    """Files of at most SHARD_BYTES (one tensor may exceed it), a layer's tensors side by side."""
    groups: list[list[TensorSpec]] = [[]]
    room = SHARD_BYTES
    for tensor in tensors:
        nbytes = entry_of(tensor).nbytes
        if nbytes > room and groups[-1]:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(tensor)
        room -= nbytes
    shards = []
    for i, group in enumerate(groups):
        entries = [entry_of(t) for t in group]
        name = SINGLE_NAME if len(groups) == 1 else shard_name(i, len(groups))
        head = header(entries, dict(metadata or {}))
        shards.append(Shard(name, head, tuple(group), len(head) + sum(e.nbytes for e in entries)))
    return shards


def write_shards(
    folder: Path, shards: list[Shard], pieces: Callable[[TensorSpec], Iterator[memoryview]], title: str, progress: bool
) -> None:
    """Fill `folder`: all files' space is taken first. pieces: a tensor's bytes in order. progress: a bar on stderr.

    Raises OSError (ENOSPC) when the disk is full.
    """
    for shard in shards:
        reserve(folder / shard.name, shard.nbytes)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        write_index(folder, weight_map, sum(shard.nbytes - len(shard.head) for shard in shards))
    nbytes = sum(shard.nbytes for shard in shards)
    with tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, file=sys.stderr, disable=not progress) as bar:
        for shard in shards:
            _fill(folder / shard.name, shard, pieces, bar.update)


def _fill(
    path: Path, shard: Shard, pieces: Callable[[TensorSpec], Iterator[memoryview]], advance: Callable[[int], object]
) -> None:
    with FileWriter(path) as file:
        file.write(shard.head)
        advance(len(shard.head))
        for tensor in shard.tensors:
            for piece in pieces(tensor):
                interrupts.check()
                file.write(piece)
                advance(piece.nbytes)
