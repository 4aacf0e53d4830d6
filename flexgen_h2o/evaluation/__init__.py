"""Measurements of a model's quality when KV entries are dropped, made with the engine itself."""
