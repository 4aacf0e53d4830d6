"""Durable batch jobs: each line of a JSONL file gets one row in the output
(docs/reference/jobs.md).
"""
