"""Loops that numba compiles. Import them where they run, because importing numba is slow."""
