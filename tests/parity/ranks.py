"""A rank of a pipeline for tests: many small runs in one set of processes, which take time to
meet."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.engine.distributed import Pipeline, join_pipeline, leave
from flexgen_h2o.kvcache.eviction import Full, make_eviction


@dataclass(frozen=True)
class Run:
    """folder: of the model. eviction: a policy with its settings. stand_in: with a device tier
    of its own.

    in_flight: None takes as many as ranks.
    """

    folder: str
    prompts: list[list[int]]
    max_tokens: int
    policy: dict[str, Any]
    eviction: str = "full"
    stand_in: bool = False
    in_flight: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    def do(self, pipeline: Pipeline | None, offload_dir: str) -> dict[str, Any]:
        """The tokens and the report; None as a pipeline runs all layers in this process."""
        budget = MemoryBudget("64MiB" if self.stand_in else None, "64MiB", "64MiB")
        policy = Policy(**{**self.policy, "percent": tuple(self.policy["percent"])})
        eviction = Full() if self.eviction == "full" else make_eviction(self.eviction)
        with LLM(self.folder, policy, eviction, "cpu", "float32", budget, offload_dir) as llm:
            if pipeline is not None:
                llm.join(dataclasses.replace(pipeline, in_flight=self.in_flight or pipeline.ranks))
            out = llm.generate(
                self.prompts, SamplingParams(max_tokens=self.max_tokens, **self.sampling)
            )
            assert llm.report is not None
            return {"tokens": [one.token_ids for one in out], "report": llm.report.to_json()}


def main(runs: str, answers: str) -> int:
    """runs: a JSON file, a list of `Run` as objects. answers: what rank 0 writes, tokens and report
    of each run."""
    torch.set_num_threads(1)
    pipeline = join_pipeline(None)
    with tempfile.TemporaryDirectory() as offload_dir:
        found = [Run(**run).do(pipeline, offload_dir) for run in json.loads(Path(runs).read_text())]
    if pipeline.is_first:
        Path(answers).write_text(json.dumps(found))
    return leave(0)
