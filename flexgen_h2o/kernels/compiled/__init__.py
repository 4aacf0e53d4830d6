"""Loops that numba compiles; imported where they run, since importing numba takes seconds."""
