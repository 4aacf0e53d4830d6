"""Import numba, or raise a UsageError that names the setting that keeps loops from being compiled.

Settings are environment variables, or lines of a `.numba_config.yaml` in the working folder.
"""

from __future__ import annotations

from flexgen_h2o.core.errors import UsageError, first_line

try:
    import numba
except ValueError as error:
    raise UsageError(
        f"NUMBA_NUM_THREADS: numba refuses its value ({first_line(error).rstrip('.')}); unset it, "
        "in the environment "
        "and in .numba_config.yaml"
    ) from error
if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise UsageError(
        "NUMBA_DISABLE_JIT: keeps loops from being compiled, and they run no other way; unset it, "
        "in the environment "
        "and in .numba_config.yaml"
    )

__all__ = ["numba"]
