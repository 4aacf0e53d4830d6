"""Operations on plain tensors, one per file: matrices in row parts, attention.

They know no models.
"""
