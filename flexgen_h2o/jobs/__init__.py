"""Durable batch jobs: lines of a JSONL file in, one row out for each, whatever happens in between (docs/jobs.md)."""
