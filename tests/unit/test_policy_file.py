"""Policy files: what is written reads back, and every damaged field is named with its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import POLICY_SCHEMA, Policy, SavedPolicy, read_policy, write_policy
from flexgen_h2o.core.errors import UsageError

pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
policies = st.builds(
    Policy,
    gpu_batch_size=st.integers(1, 2**8),
    num_gpu_batches=st.integers(1, 2**8),
    percent=st.tuples(pairs, pairs, pairs).map(lambda three: sum(three, ())),
    **{
        name: st.booleans()
        for name in ("compress_weight", "cpu_cache_compute", "overlap", "sep_layer", "pin_weight")
    },
    attn_sparsity=st.floats(0, 1, exclude_min=True),
    compress_cache=st.just(True),
    cache_bits=st.sampled_from([3, "4/3"]),
    cache_rotation=st.booleans(),
)


@given(policies)
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, policy: Policy
) -> None:
    path = tmp_path_factory.mktemp("policy") / "p.json"
    saved = SavedPolicy(
        policy, "m", {"prompt_len": 3}, "here", {"tokens_per_s": 1.5}, "python -m x"
    )
    write_policy(path, saved)
    assert read_policy(path) == saved


# A field of a good file that is changed, or taken out with None, and what the message also names.
DAMAGE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"overlap": None}, "overlap"),
    ({"gbs": 4}, "gbs"),
    ({"schema": 8}, "8"),
    ({"schema": None}, "None"),
    ({"percent": [90, 20, 0, 0, 0, 0]}, "90"),
    ({"percent": [1, 2]}, "percent"),
    ({"gpu_batch_size": 4.5}, "gpu_batch_size"),
    ({"gpu_batch_size": 2**9, "num_gpu_batches": 2**9}, "num_gpu_batches"),
    ({"workload": "x"}, "workload"),
    ({"model": 5}, "model"),
    ({"cache_bits": 8}, "compress_cache"),
    ({"int8_compute": True, "compress_weight": True, "weight_bits": 8}, "int8_compute"),
)


@pytest.mark.parametrize(("changes", "named"), DAMAGE, ids=str)
def test_a_bad_field_is_named_with_its_file(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = tmp_path / "p.json"
    body = {"schema": POLICY_SCHEMA, **Policy().to_json(), **changes}
    path.write_text(json.dumps({k: v for k, v in body.items() if v is not None}))
    with pytest.raises(UsageError, match=named) as caught:
        read_policy(path)
    assert str(caught.value).startswith(f"--policy {path}: ")


def test_files_of_older_schemas_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    body = Policy(8).to_json()
    for schema, lacks in (
        (5, "cache_rotation"),
        (3, "expert_group"),
        (2, "cache_window"),
        (1, "weight_bits cache_bits int8_compute"),
    ):
        for name in lacks.split():
            del body[name]
        path.write_text(json.dumps({"schema": schema, **body}))
        assert read_policy(path).policy == Policy(8)
