"""Benchmarks of batch jobs."""
