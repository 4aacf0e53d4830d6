"""What scripts/quickstart.sh prints after its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import quickstart_run

ROOT = Path(__file__).resolve().parents[2]


def test_the_toy_answers_and_all_is_summed_up(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert quickstart_run.main("opt-tiny") == 0
    out = capfd.readouterr().out
    prompts = quickstart_run.TOY_PROMPTS.read_text().splitlines()
    assert all(f"\n{prompt}" in out for prompt in prompts)
    for beginning in ("RAM    ", "Time   ", "  flexgen-h2o generate opt-tiny -p "):
        assert f"\n{beginning}" in out
    assert [path.name for path in tmp_path.iterdir()] in ([], ["flexgen_h2o_offload_dir"])
