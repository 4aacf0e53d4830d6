"""The settings of a run as frozen data: policy, budgets, policy files.

The module imports no torch, and its only I/O is JSON. Values are checked at once: constructing one
of these classes with a number out of range raises UsageError.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_object, write_result
from flexgen_h2o.core.packing import bits_of_kv
from flexgen_h2o.core.settings import check_settings, setting
from flexgen_h2o.core.units import check_int, parse_bytes

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
WIDE = "float64"  # a dtype that is read from checkpoints and never computed with
TIERS = ("device", "host", "disk")
# 5: cache_bits may be text such as "4/3"; 7: attn_sparsity drops what it does not read
POLICY_SCHEMA = 7
# The first schema that has a field. In a file of an older schema, the field has its default.
SINCE_SCHEMA = {
    "weight_bits": 2,
    "cache_bits": 2,
    "int8_compute": 2,
    "cache_window": 3,
    "expert_group": 4,
    "cache_rotation": 6,
}
BITS = (4, 8)  # bits of a compressed weight
CACHE_BITS = (8, 4, 3)  # bits per number of a compressed key or value
# Settings that need a switch, and the switch.
COMPRESSION_OF = {
    "weight_bits": "compress_weight",
    "cache_bits": "compress_cache",
    "cache_window": "compress_cache",
    "cache_rotation": "compress_cache",
}
MAX_ROWS = 2**16  # sequences of a block


@dataclass(frozen=True)
class Policy:
    """The whole offloading plan. Field names are FlexGen's. The search or the user's flags make it.

    Each field also has a help text, which the flag shows.
    """

    # Sequences of a micro-batch.
    gpu_batch_size: int = setting(4, "sequences of a micro-batch", low=1, high=2**20)
    # Micro-batches of a block.
    num_gpu_batches: int = setting(
        1, "micro-batches that share each read of a layer", low=1, high=2**20
    )
    # Percents of weights, KV cache and hidden states, each on device and host. The rest is on disk.
    percent: tuple[int, int, int, int, int, int] = setting(
        (100, 0, 100, 0, 100, 0),
        "weights, KV cache, hidden states on device and host; the rest is on disk",
        nargs=6,
        metavar=("WG", "WC", "CG", "CC", "HG", "HC"),
    )
    # Weights are held and moved in weight_bits per value, in groups.
    compress_weight: bool = setting(False, "hold weights in --weight-bits")
    # Keys and values are held and moved in cache_bits per value, in groups.
    compress_cache: bool = setting(False, "hold the KV cache in --kv-bits")
    weight_bits: int = setting(
        4, "weights in 8 or 4 bits", usual="as stored", low=4, choices=BITS, metavar="N"
    )
    # 3, 4 or 8; "4/3" means keys in 4 bits and values in 3.
    cache_bits: str | int = setting(
        4, "KV cache in 8, 4 or 3 bits; 4/3: keys in 4, values in 3", usual=16, metavar="N[/N]"
    )
    # The newest KV entries of a sequence that stay whole in a compressed cache: at most half of its
    # slots.
    cache_window: int = setting(
        16,
        "newest KV entries that --kv-bits leaves as they are, a multiple of 4",
        low=0,
        high=2**20,
    )
    # Keys and values are packed after a Hadamard transform, and keys are not smoothed. The room for
    # centres and ranges stays, unused.
    cache_rotation: bool = setting(
        False, "rotate keys and values, instead of smoothing keys, before --kv-bits packs them"
    )
    # Weights are in int8 with one scale per output channel, and products are computed in int8. With
    # compress_weight in 4 bits, weights are held and moved so, and become int8 once per block.
    int8_compute: bool = setting(
        False, "multiply matrices in int8; weights are held in 8 bits, or in --weight-bits 4"
    )
    cpu_cache_compute: bool = setting(False, "attend on the CPU to the KV cache that is in RAM")
    overlap: bool = setting(True, "move and compute at the same time")
    sep_layer: bool = setting(True, "attention and MLP are two steps of the schedule")
    expert_group: int = setting(
        0,
        "experts of a mixture that move as one piece; 0: chosen by the plan",
        low=0,
        high=2**16,
    )
    pin_weight: bool = setting(True, "pin what RAM holds, with a GPU")
    attn_sparsity: float = setting(
        1.0,
        "FlexGen's flag: attention adds up this share of the values, those with the largest "
        "probabilities; an "
        "experiment: saves no memory and little time",
        share=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_int("gpu_batch_size x num_gpu_batches", self.block_size, low=1, high=MAX_ROWS)
        object.__setattr__(self, "percent", check_percent(self.percent))
        object.__setattr__(self, "cache_bits", _check_cache_bits(self.cache_bits))
        if self.int8_compute and self.compress_weight and self.weight_bits == 8:
            raise UsageError(
                "int8_compute: holds weights in 8 bits already; leave weight_bits out, or give "
                "weight_bits 4"
            )
        if self.cache_window % 4:
            raise UsageError(f"cache_window: {self.cache_window} is not a multiple of 4")

    @property
    def weight_shares(self) -> tuple[float, float, float]:
        """Shares of the weights on device, host and disk. Their sum is 1."""
        return _shares(self.percent[0], self.percent[1])

    @property
    def cache_shares(self) -> tuple[float, float, float]:
        """Shares of the KV cache on device, host and disk."""
        return _shares(self.percent[2], self.percent[3])

    @property
    def hidden_shares(self) -> tuple[float, float, float]:
        """Shares of the hidden states on device, host and disk."""
        return _shares(self.percent[4], self.percent[5])

    @property
    def block_size(self) -> int:
        """Sequences of a full block."""
        return self.gpu_batch_size * self.num_gpu_batches

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON values."""
        return {**asdict(self), "percent": list(self.percent)}


def _check_cache_bits(value: object) -> int | str:
    """Return one number if keys and values have the same bits, otherwise "KEYS/VALUES".

    Raise UsageError for other values.
    """
    try:
        found = (
            bits_of_kv(value)
            if isinstance(value, str | int) and not isinstance(value, bool)
            else ()
        )
    except ValueError:
        found = ()
    if not found or not set(found) <= set(CACHE_BITS):
        raise UsageError(
            f"cache_bits: {value!r:.60} is not one of {', '.join(map(str, CACHE_BITS))}, nor two "
            "of them for keys and "
            "values, as 4/3"
        )
    keys, values = found
    return keys if keys == values else f"{keys}/{values}"


def without_unused_bits(policy: Policy) -> Policy:
    """Return the policy with settings at their defaults if their switch (COMPRESSION_OF) is off."""
    return replace(policy, **{bits: getattr(Policy, bits) for bits in _unused_bits(policy)})


def check_bits_used(policy: Policy) -> Policy:
    """Return the policy. Raise UsageError if a setting is not at its default and its switch is off.

    An example is `weight_bits` if weights are not compressed. It means nothing for a policy that is
    to run. Only a search accepts it: there it gives the bits that the search may use.
    """
    for bits in _unused_bits(policy):
        if getattr(policy, bits) != getattr(Policy, bits):
            raise UsageError(
                f"{bits}: {getattr(policy, bits)} goes with {COMPRESSION_OF[bits]}, which is off; "
                "give both"
            )
    return policy


def _unused_bits(policy: Policy) -> list[str]:
    """Return the names of settings whose switch is off."""
    return [bits for bits, switch in COMPRESSION_OF.items() if not getattr(policy, switch)]


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes that each tier may hold, given as text such as `16GiB` or as whole numbers.

    None stands for what is free, less a margin. On a CPU, `device` left out means that the device
    *is* host memory (two tiers). If it is given, a device tier of ordinary memory with that budget
    stands in for a card (three tiers).
    """

    device: int | None = setting(None, "most GPU memory to use, such as 15GiB (what is free)")
    host: int | None = setting(None, "most RAM for weights, KV cache and buffers (what is free)")
    disk: int | None = setting(None, "most disk space in --offload-dir (what is free)")

    def __init__(
        self,
        device: str | int | None = None,
        host: str | int | None = None,
        disk: str | int | None = None,
    ) -> None:
        for tier, size in (("device", device), ("host", host), ("disk", disk)):
            object.__setattr__(
                self, tier, None if size is None else parse_bytes(size, f"--{tier}-mem")
            )


@dataclass(frozen=True)
class SavedPolicy:
    """A policy file. Fields besides the policy are free-form and kept as they are."""

    policy: Policy
    # What the policy was found for.
    model: str | None = None
    workload: dict[str, Any] | None = None
    profile: str | None = None
    predicted: dict[str, Any] | None = None
    # The command that found the policy.
    command: str | None = None


ABOUT = tuple(f.name for f in fields(SavedPolicy) if f.name != "policy")


def _shares(first: int, second: int) -> tuple[float, float, float]:
    """Return the shares on device, host and disk from the percents on device and host."""
    return first / 100, second / 100, (100 - first - second) / 100


def check_percent(values: object) -> tuple[int, int, int, int, int, int]:
    """Return six whole numbers WG WC CG CC HG HC as a tuple. Raise UsageError for other values.

    Each pair is at most 100 together, and the rest is on disk.
    """
    if not isinstance(values, tuple | list) or len(values) != 6:
        raise UsageError(
            f"percent: six whole numbers WG WC CG CC HG HC are needed, not {values!r:.60}"
        )
    six = tuple(check_int("percent", v, 0, 100) for v in values)
    for what, first, second in zip(
        ("weights", "cache", "hidden"), six[::2], six[1::2], strict=True
    ):
        if first + second > 100:
            raise UsageError(f"percent: {what} on device and host are {first} + {second} > 100")
    return six  # type: ignore[return-value]


def write_policy(path: Path, saved: SavedPolicy) -> None:
    """Write a policy file (docs/reference/files.md), whole or not at all.

    Raise FlexgenError, which names --output and the file, if it cannot be written.
    """
    about = {name: getattr(saved, name) for name in ABOUT}
    write_result(path, {"schema": POLICY_SCHEMA, **saved.policy.to_json(), **about}, "--output")


def read_policy(path: Path) -> SavedPolicy:
    """Read and validate a policy file.

    Raise UsageError, which names the file and the field, if a field is unknown, missing or bad.
    """
    if not path.exists():
        way = "name one that `flexgen-h2o plan --save-plan FILE` wrote, or auto"
        raise UsageError(f"--policy {path}: No such file; {way}")
    body = read_object(path, f"--policy {path}")
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= POLICY_SCHEMA:
        raise UsageError(
            f"--policy {path}: schema is {schema!r}, this version reads 1 to {POLICY_SCHEMA}; make "
            "the plan again"
        )
    names = [f.name for f in fields(Policy) if SINCE_SCHEMA.get(f.name, 1) <= schema]
    unknown = sorted(set(body) - {*names, *ABOUT, "schema"})
    missing = sorted(set(names) - set(body))
    if unknown or missing:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        raise UsageError(f"--policy {path}: {problem}")
    try:
        policy = check_bits_used(Policy(**{name: body[name] for name in names}))
    except UsageError as error:
        raise UsageError(f"--policy {path}: {error}") from error
    if schema < POLICY_SCHEMA and policy.attn_sparsity < 1:
        raise UsageError(
            f"--policy {path}: attn_sparsity is {policy.attn_sparsity}, which meant something else "
            "in the version that wrote the file; make the plan again"
        )
    for key in ABOUT:
        kind, name = (dict, "an object") if key in ("workload", "predicted") else (str, "a text")
        if not isinstance(body.get(key), kind | None):
            raise UsageError(
                f"--policy {path}: {key} is {body[key]!r:.60}, and must be {name} or null"
            )
    return SavedPolicy(policy, **{key: body.get(key) for key in ABOUT})
