"""Durable batch jobs: one row of output per line of a JSONL file (docs/reference/jobs.md)."""
