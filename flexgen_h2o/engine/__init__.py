"""Runs a policy: resources, weights, hidden states, requests, the executor and what it reports."""
