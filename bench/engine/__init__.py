"""Benchmarks of runs: transfers, memory, eviction, compression."""
