"""Benchmarks of predictions and searched policies."""
