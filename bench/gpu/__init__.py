"""The GPU suite: tests, kernels and placements. Started by
scripts/gpu_suite.sh."""
