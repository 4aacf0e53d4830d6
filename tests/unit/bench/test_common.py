"""What benchmarks share: the JSON line that outlives a wrong --output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import common
from flexgen_h2o.core.errors import UsageError


def test_the_result_is_printed_also_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "result.json", tmp_path / "none" / "result.json"):
        with pytest.raises(UsageError, match=rf"--output {output}: cannot be written"):
            common.finish({"figure": 7}, output)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["figure"] == 7
    common.finish({"figure": 7}, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(capsys.readouterr().out)
