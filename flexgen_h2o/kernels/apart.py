"""Loops are compiled in a process of their own, which leaves them on disk.

numba and LLVM keep 100 MB and more of the process that compiles for good, which no budget knows of; loading what was
compiled takes little.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LONGEST_S = 300.0
# The process that compiles imports from where this one does, and from nowhere else.
_CODE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
function(*arguments)
"""


class _NotCompiledError(Exception):
    """A loop would have to be compiled."""


def compiled_apart(function: Callable[..., object], *arguments: object) -> None:
    """Call function(*arguments), whose result nobody wants, so that its loops are compiled.

    Where some are not yet, another process calls it first. function: of a module; arguments: can be pickled. The call
    may end at any loop and begin anew. Where nothing can be kept on disk, or no process started, this one compiles.
    """
    from flexgen_h2o.kernels.jit import is_kept

    if is_kept() and sys.executable:
        try:
            with _refusing_to_compile():
                function(*arguments)
            return
        except _NotCompiledError:
            _call_in_a_process(function, arguments)
    function(*arguments)


@contextmanager
def _refusing_to_compile() -> Iterator[None]:
    """_NotCompiledError where this thread would compile; loops that are on disk are loaded."""
    from numba.core import event

    thread = threading.get_ident()

    class Refusal(event.Listener):
        def on_start(self, _event: Any) -> None:
            if threading.get_ident() == thread:
                raise _NotCompiledError

        def on_end(self, _event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Refusal()):
        yield


def _call_in_a_process(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    given = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    quiet = subprocess.DEVNULL
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-c", _CODE], input=given, stdout=quiet, stderr=quiet, timeout=_LONGEST_S, check=False
        )
