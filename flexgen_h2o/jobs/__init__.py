"""Durable batch jobs: lines of a JSONL file in, one row out for each, whatever happens (docs/reference/jobs.md)."""
