"""The engine, which runs a policy: resources, weights, requests, executor and report."""
