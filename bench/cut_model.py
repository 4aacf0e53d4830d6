"""A public shape with fewer transformer blocks: all blocks are alike, and a whole model takes hours to prefill here."""

from __future__ import annotations

import json
from pathlib import Path

from flexgen_h2o.errors import UsageError
from flexgen_h2o.models import built_in_spec


def cut_model(model: str, layers: int, offload_dir: Path) -> Path:
    """A folder with the config of a built-in shape but `layers` transformer blocks; weights are made at random."""
    built_in = built_in_spec(model)
    if built_in is None:
        raise UsageError(f"--model {model}: name one of the built-in shapes")
    folder = offload_dir / "cut" / f"{model.split('/')[-1]}-{layers}-layers"
    folder.mkdir(parents=True, exist_ok=True)
    config = {**built_in[1], "model_type": built_in[0].family, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
