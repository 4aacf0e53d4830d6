"""Running out of memory ends a door with one line that names the flag; an error of ours keeps its traceback."""

from __future__ import annotations

import pytest
import torch

from flexgen_h2o.cli_common import run_cli
from flexgen_h2o.core.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED


@pytest.mark.parametrize(
    ("error", "code", "flag"),
    [
        (MemoryError(), EXIT_FAILED, "--host-mem"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), EXIT_DOES_NOT_FIT, "--device-mem"),
    ],
)
def test_it_names_the_flag(error: BaseException, code: int, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(argv: list[str] | None) -> int:
        raise error

    assert run_cli("door", body, None) == code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("door: ") and flag in said[0]


def test_another_error_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    def body(argv: list[str] | None) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_cli("door", body, None)
