"""How much of a model's quality is left when KV columns are dropped, measured through the engine itself."""
