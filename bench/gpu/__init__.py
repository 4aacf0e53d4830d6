"""The GPU suite: tests, placements, the paper's table and MiniKV's grid. Started by
scripts/gpu_suite.sh."""
