"""FlexGen on a processor: its tokens against transformers'."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.bench.test_throughput_sweep import OPT_TINY, ROOT, request

PEERS = Path(os.environ.get("FLEXGEN_PEERS", Path.home() / ".cache/flexgen_h2o/peers"))
VENV = PEERS / "flexgen"
GENERATE = """
import json, sys
from pathlib import Path
sys.path[:0] = ["bench/baselines"]
from systems import run_flexgen as cpu
from contract import Meter, Request
asked = Request("disk", Path(sys.argv[1]), 8, 6, 4, None, "fp32", Path(sys.argv[2]), 1)
for changed in json.loads(sys.argv[3]):
    print(json.dumps(cpu.generate(asked, Meter(0), cpu.choose(asked) | changed).tolist()))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (VENV / "installed.txt").exists(),
    reason="needs FlexGen's own environment: bash bench/baselines/setup.sh flexgen",
)
def test_its_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    settings = [
        {"weights_in_ram": 100},
        {"weights_in_ram": 50, "micro_batches": 2},
        {"weights_in_ram": 30, "sep_layer": 0},
        {"weights_in_ram": 0, "kv_on_disk": 1, "micro_batches": 2},
    ]
    words = ["-c", GENERATE, str(OPT_TINY), str(tmp_path), json.dumps(settings)]
    command = [str(VENV / "bin/python"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(OPT_TINY, dtype=torch.float32)
    asked = request(tmp_path, prompt_len=8)
    ids = torch.tensor(asked.prompts())
    want = model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(lines) == len(settings)
    assert all(json.loads(line) == want.tolist() for line in lines)
