"""Which eviction policy the flags ask for, and what they must not say."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flexgen_h2o import flags as engine_flags
from flexgen_h2o.kvcache.eviction import (
    H2O,
    POLICIES,
    Eviction,
    Full,
    H2ONorm,
    Local,
    SnapKV,
    Tova,
)
from flexgen_h2o.kvcache.eviction.mixes import table_for
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.synonyms import shown_name


def parser() -> OneLineParser:
    made = OneLineParser()
    engine_flags.add_engine_flags(made)
    engine_flags.add_eviction_flags(made)
    return made


def parse(flags: str) -> Eviction:
    args = parser().parse_args(shlex.split(flags))
    return engine_flags.eviction_of(args, engine_flags.policy_of(args)[0])


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ("", Full()),
        ("--eviction full", Full()),
        ("--hh-ratio 0.1", H2O(heavy_ratio=0.1)),
        ("--hh-size 0 --recent-size 16", H2O(heavy_size=0, recent_size=16)),
        (
            "--eviction h2o-norm --hh-ratio 0.3 --recent-size 9",
            H2ONorm(heavy_ratio=0.3, recent_size=9),
        ),
        ("--eviction local --recent-size 64", Local(recent_size=64)),
        ("--eviction snapkv --hh-all no", SnapKV(while_decoding=False)),
        (
            "--eviction h2o-norm:grace=8,sinks=2 --hh-size 8",
            H2ONorm(heavy_size=8, grace=8, sinks=2),
        ),
        ("--positions original", Full()),
        ("--protect none --eviction full", Full()),  # the defaults, typed out, ask for nothing
        ("--positions rolling", H2O(positions="rolling")),
        ("--eviction tova:positions=rolling", Tova(positions="rolling")),
        ("--hh-ratio 0.1 --attn-sparsity 1", H2O(heavy_ratio=0.1)),  # 1 is all of it
    ],
)
def test_flags_to_policy(flags: str, policy: Eviction) -> None:
    found = parse(flags)
    assert found == policy and type(found) is type(policy)


MIXES = (  # least share, eviction, bits, window, KL
    (0.01, "h2o-norm:grace=8", 16, 16, 0.3),
    (0.1, "tova", "4/3", 0, 0.1),
    (0.5, "local", 8, 16, 0.0),
)
TABLE = {
    "schema": 2,
    "model": "m",
    "mixes": [
        dict(zip(("least", "eviction", "cache_bits", "cache_window"), mix, strict=False))
        | {"kl": {"value": mix[-1]}}
        for mix in MIXES
    ],
    "small_losses": [{"settings": {}, "kl": {"value": 0.0}}],
}


@pytest.fixture
def of_own_table(tmp_path: Path) -> list[str]:
    """Flags of a model that has a table of its own."""
    path = tmp_path / "kv-size" / "some--model.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TABLE))
    return ["--model", "some/model", "--offload-dir", str(tmp_path)]


@pytest.mark.parametrize(
    ("flags", "name", "bits", "window"),
    [
        ("--kv-bytes 0.6", "local", 8, 16),
        ("--kv-bytes 0.2", "tova", "4/3", 0),
        ("--kv-bytes 0.1 --cache-window 4", "tova", "4/3", 4),
        ("--kv-bytes 0.1 --cache-bits 4/3", "tova", "4/3", 16),
        ("--kv-bytes 0.1 --eviction local", "local", None, None),
        ("--kv-bytes 0.001", "h2o-norm", None, None),
        ("--kv-budget 0.1", "h2o", None, None),
    ],
)
def test_a_share_of_the_bytes_chooses_by_the_models_table(
    of_own_table: list[str], flags: str, name: str, bits: int | str | None, window: int | None
) -> None:
    args = parser().parse_args([*of_own_table, *flags.split()])
    policy, _ = engine_flags.policy_of(args)
    assert engine_flags.eviction_of(args, policy).name == name
    assert policy.compress_cache == (bits is not None)
    if bits is not None:
        assert (policy.cache_bits, policy.cache_window) == (bits, window)


@pytest.mark.parametrize("share", ["1", "0.2", "0.01"])
def test_a_model_without_a_table_takes_the_shipped_one(share: str) -> None:
    args = parser().parse_args(["--model", "some/model", "--kv-bytes", share])
    policy, _ = engine_flags.policy_of(args)
    mix = table_for().mix_of(float(share))
    assert (policy.cache_bits, policy.cache_window) == (mix.cache_bits, mix.cache_window)
    assert engine_flags.eviction_of(args, policy).name == mix.eviction.partition(":")[0]


def test_help_names_every_policy_and_needs_no_torch() -> None:
    code = (
        "import sys; from flexgen_h2o import batch, cache, evaluate, flex_opt, hardware, "
        "policy_search\n"
        "for command in (batch, policy_search, flex_opt): command.main(['--help-all'])\n"
        "evaluate.main(['text', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done
    said = " ".join(done.stdout.split())
    assert said.count(f"which KV entries stay: {', '.join(POLICIES)} (") == 4
    assert all(shown_name(flag) in said for flag in engine_flags.EVICTION_FLAGS.values())
