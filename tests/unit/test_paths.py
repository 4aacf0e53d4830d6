"""Paths that no file could have are refused by name; all others come back, `~` expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import usable_path


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usable_path("~/x y/\u00fc", "--json") == tmp_path / "x y" / "\u00fc"


@pytest.mark.parametrize("text", ["~nosuchuser-at-all/x", "a" * 5000, "b" * 300, "nul\0byte"])
def test_what_cannot_be_a_path(text: str) -> None:
    with pytest.raises(UsageError, match=r"--offload-dir .*not a usable path"):
        usable_path(text, "--offload-dir")
