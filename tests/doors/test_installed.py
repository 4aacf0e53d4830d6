"""The package as pip installs it: built from its sdist, and run away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "constraints.txt", "flexgen_h2o", "policies")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """An `sdist` or `wheel` of the sources in a folder."""
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip would unpack the wheel into."""
    work = tmp_path_factory.mktemp("wheel")
    (work / "copy").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, work / "copy" / name)
    shutil.unpack_archive(build("sdist", work / "copy", work), work / "unpacked")
    (source,) = (work / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", source, work)) as wheel:
        wheel.extractall(work / "site")
    return work / "site"


def test_shipped_profiles_and_policies_come_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    shipped = {path.relative_to(ROOT) for path in (ROOT / "policies").rglob("*.json")}
    assert shipped
    assert shipped <= {path.relative_to(installed / "flexgen_h2o") for path in installed.rglob("*.json")}
    command = [sys.executable, "-m", "flexgen_h2o.policy_search", "--model", "facebook/opt-125m", "--hardware", "t4",
               "--prompt-len", "64", "--gen-len", "8", "--num-prompts", "8"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "machine: t4" in done.stdout
