"""Write random weights at the true shapes of models, which the other steps then find: minutes of a
disk's time.

    python -m bench.gpu.weights facebook/opt-6.7b --offload-dir DIR --output weights.json

What is there already is kept.
"""

from __future__ import annotations

import sys
import time

from bench import common
from bench.common import GB
from flexgen_h2o.llm import RANDOM_DTYPE, RANDOM_WEIGHTS_SEED
from flexgen_h2o.models.load import find_checkpoint, find_model


def main() -> None:
    parser = common.weights_parser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="hub id of a built-in shape, or a folder")
    add("--dtype", default=RANDOM_DTYPE)
    args = parser.parse_args()
    written = {}
    for name in args.models:
        start = time.perf_counter()
        found = find_checkpoint(
            find_model(name, args.path), args.dtype, args.offload_dir, RANDOM_WEIGHTS_SEED, False
        )
        nbytes = sum(path.stat().st_size for path in found.folder.glob("*.safetensors"))
        written[name] = {"bytes": nbytes, "seconds": time.perf_counter() - start}
    common.table(
        "Weights",
        [(name, f"{w['bytes'] / GB:.1f} GB, {w['seconds']:.0f} s") for name, w in written.items()],
    )
    common.finish({"benchmark": "gpu_weights", "written": written}, args.output)


if __name__ == "__main__":
    sys.exit(common.door(main))
