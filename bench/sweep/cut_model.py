"""A public shape with fewer transformer blocks: all blocks are alike, and a whole model takes hours
to prefill here.

Writes a folder with the config alone; what runs it makes random weights. It serves as a cell's
model in the sweep.

    python -m bench.sweep.cut_model --model facebook/opt-1.3b --layers 4 --output FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.common import door, writing
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.parser import OneLineParser


def main() -> None:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="hub id of a built-in shape")
    add("--layers", type=positive, required=True, help="transformer blocks of the cut model")
    add("--output", type=Path, required=True, metavar="FOLDER", help="gets config.json")
    args = parser.parse_args()
    with writing("--output", args.output, "give another"):
        write_cut(args.model, args.layers, args.output)
    print(args.output)


def cut_model(model: str, layers: int, offload_dir: Path) -> Path:
    """The folder below `offload_dir` that `write_cut` has written."""
    folder = offload_dir / "cut" / f"{model.split('/')[-1]}-{layers}-layers"
    write_cut(model, layers, folder)
    return folder


def write_cut(model: str, layers: int, folder: Path) -> None:
    """Write the config of a built-in shape with `layers` transformer blocks. UsageError: `model` is
    none."""
    built_in = built_in_spec(model)
    if built_in is None:
        raise UsageError(f"--model {model}: name one of the built-in shapes")
    folder.mkdir(parents=True, exist_ok=True)
    config = {**built_in[1], "model_type": built_in[0].family, "num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config, default=str))


if __name__ == "__main__":
    sys.exit(door(main))
