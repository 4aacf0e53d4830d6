"""Benchmarks, run as modules: `python -m bench.engine.roofline`. One claim a module; results are
under `results/`."""

import os

# Before torch is imported: idle OpenMP workers sleep, as in the package's command lines.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
