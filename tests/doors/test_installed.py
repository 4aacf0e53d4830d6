"""The package as pip installs it: a wheel built from its sdist, run away from the checkout. CI
installs one anyway."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flexgen_h2o

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[2]
# An sdist of the working folder, unpacked, and a wheel of that; says where the wheel is.
BUILD = """
import os, shutil, sys
from setuptools import build_meta
target = sys.argv[1]  # which setuptools changes
shutil.unpack_archive(os.path.join(target, build_meta.build_sdist(target)), "unpacked")
os.chdir(os.path.join("unpacked", *os.listdir("unpacked")))
print(build_meta.build_wheel(target))
"""
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist")


def run(*argv: str, folder: Path, path: Path | None = None) -> str:
    """What a Python process says, with the package of `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # 15 s, and CI builds one too
def test_package_and_shipped_files_come_with_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "copy"
    site = tmp_path / "site"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)
    wheel = run("-c", BUILD, str(tmp_path), folder=source).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as packed:
        packed.extractall(site)
    wanted = {path.relative_to(ROOT) for path in (ROOT / "flexgen_h2o").rglob("*.py")}
    for folder in ("assets", "serving/static"):
        wanted |= {path.relative_to(ROOT) for path in (ROOT / "flexgen_h2o" / folder).rglob("*")}
    wanted |= {
        "flexgen_h2o" / path.relative_to(ROOT) for path in (ROOT / "policies").rglob("*.json")
    }
    assert len(wanted) > 100
    assert wanted <= {path.relative_to(site) for path in site.rglob("*")}
    assert {path.parts[0] for path in (p.relative_to(site) for p in site.rglob("*"))} == {
        "flexgen_h2o",
        f"flexgen_h2o-{flexgen_h2o.__version__}.dist-info",
    }
    assert "t4" in run("-m", "flexgen_h2o.hardware", "--show", "t4", folder=tmp_path, path=site)
    plan = ("plan", "--model", "facebook/opt-125m", "--hardware", "t4", "--num-prompts", "8")
    assert "machine: t4" in run("-m", "flexgen_h2o.cli", *plan, folder=tmp_path, path=site)
    [unpacked] = (source / "unpacked").iterdir()
    for name in ("tests", "docs", "scripts", "bench"):  # from which the tests can be run
        there = {
            path.relative_to(ROOT)
            for path in (ROOT / name).rglob("*")
            if path.suffix in (".py", ".md", ".sh")
        }
        assert there <= {path.relative_to(unpacked) for path in unpacked.rglob("*")}
