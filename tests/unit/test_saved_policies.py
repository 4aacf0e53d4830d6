"""The policies that come with the project are what the recorded commands find."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from flexgen_h2o import policy_search
from flexgen_h2o.core.config import SavedPolicy, read_policy

FOLDER = Path(__file__).resolve().parents[2] / "policies"
FILES = sorted(path for path in FOLDER.glob("*/*.json") if path.parent.name != "profiles")
NAMES = [f"{path.parent.name}/{path.stem}" for path in FILES]
QUICK = {"opt-6.7b/build-2core"}  # the others: some seconds each
MADE_BY = "python -m flexgen_h2o.policy_search "


def remade(saved: SavedPolicy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SavedPolicy:
    """What the file's command writes today."""
    assert saved.command is not None and saved.command.startswith(MADE_BY)
    words = shlex.split(saved.command.removeprefix(MADE_BY))
    target = FOLDER.parent / words[words.index("--output") + 1]
    monkeypatch.chdir(folder)
    (folder / target.relative_to(FOLDER.parent)).parent.mkdir(parents=True)
    assert policy_search.main(words) == 0
    return read_policy(folder / target.relative_to(FOLDER.parent))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=n, marks=[] if n in QUICK else [pytest.mark.slow])
        for p, n in zip(FILES, NAMES, strict=True)
    ],
)
def test_the_command_finds_the_saved_policy(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_policy(path)
    found = remade(saved, tmp_path, monkeypatch)
    assert found.policy == saved.policy
    assert found.predicted is not None and saved.predicted is not None
    assert found.predicted["tokens_per_s"] == pytest.approx(
        saved.predicted["tokens_per_s"], rel=1e-6
    )
    assert (found.model, found.workload, found.profile) == (
        saved.model,
        saved.workload,
        saved.profile,
    )
    assert "flexgen-h2o generate" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["opt-30b/t4-h2o20", "opt-175b/a100-80", "gpt-oss-120b/a100-80"])
def test_a_saved_policy_costs_what_its_file_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without looking for it again."""
    saved = read_policy(FOLDER / f"{name}.json")
    assert saved.command is not None and saved.predicted is not None
    words = shlex.split(saved.command.removeprefix(MADE_BY).partition(" --output")[0])
    assert policy_search.main([*words, "--policy", str(FOLDER / f"{name}.json"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["tokens_per_s"] == pytest.approx(saved.predicted["tokens_per_s"], rel=1e-6)
    assert predicted["peak_bytes"] == saved.predicted["peak_bytes"]


def test_a_file_names_its_own_path_and_profile() -> None:
    for path in FILES:
        body = json.loads(path.read_text())
        assert f"--output policies/{path.parent.name}/{path.name}" in body["command"]
        assert path.stem.removesuffix("-h2o20") == body["profile"]
        assert ("--hh-ratio 0.1" in body["command"]) == path.stem.endswith("-h2o20")
