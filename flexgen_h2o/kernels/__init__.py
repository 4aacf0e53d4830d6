"""One operation a file: matrices in row parts, attention. Plain tensors in and out; nothing here knows a model."""
