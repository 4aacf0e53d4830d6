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
# An sdist of the working folder, unpacked, and a wheel of that; says where the wheel is.
BUILD = """
import os, shutil, sys
from setuptools import build_meta
target = sys.argv[1]  # which setuptools changes
shutil.unpack_archive(os.path.join(target, build_meta.build_sdist(target)), "unpacked")
os.chdir(os.path.join("unpacked", *os.listdir("unpacked")))
print(build_meta.build_wheel(target))
"""


def run(*argv: str, folder: Path, path: Path | None = None) -> str:
    """What a Python process says, with the package of `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_and_shipped_files_come_with_the_wheel(tmp_path: Path) -> None:
    source, site = tmp_path / "copy", tmp_path / "site"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    wheel = run("-c", BUILD, str(tmp_path), folder=source).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as packed:
        packed.extractall(site)
    wanted = {path.relative_to(ROOT) for path in (ROOT / "flexgen_h2o").rglob("*.py")}
    for folder in ("assets", "serving/static"):
        wanted |= {path.relative_to(ROOT) for path in (ROOT / "flexgen_h2o" / folder).rglob("*")}
    wanted |= {"flexgen_h2o" / path.relative_to(ROOT) for path in (ROOT / "policies").rglob("*.json")}
    assert len(wanted) > 100
    assert wanted <= {path.relative_to(site) for path in site.rglob("*")}
    assert "t4" in run("-m", "flexgen_h2o.hardware", "--show", "t4", folder=tmp_path, path=site)
