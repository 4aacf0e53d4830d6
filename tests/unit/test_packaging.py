"""What is said in several places: versions, pins, files. Each has one place, and the others follow
it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flexgen_h2o
from flexgen_h2o import cli
from flexgen_h2o.core import files, libraries
from flexgen_h2o.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def literals() -> dict[str, object]:
    body = ast.parse(text_of("setup.py")).body
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign)
    }  # type: ignore[attr-defined]


def pins() -> list[Requirement]:
    lines = (
        line
        for line in text_of("constraints.txt").splitlines()
        if line and not line.startswith("#")
    )
    return [Requirement(line) for line in lines]


def pinned(name: str) -> list[tuple[str, str]]:
    """(==version, marker) of a package in constraints.txt."""
    return sorted(
        (str(pin.specifier), str(pin.marker or ""))
        for pin in pins()
        if pin.name.lower() == name.lower()
    )


def test_the_version_has_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexgen-h2o {flexgen_h2o.__version__}\n"
    assert 'attr = "flexgen_h2o.__version__"' in text_of("pyproject.toml")
    assert f"\nversion: {flexgen_h2o.__version__}\n" in text_of("CITATION.cff")
    assert f"\n## [{flexgen_h2o.__version__}]" in text_of("CHANGELOG.md")


def test_what_is_tested_is_what_ci_installs() -> None:
    """The extra `tested`, the Dockerfile and the docs say the versions of constraints.txt; the
    bounds let them in."""
    core = literals()["CORE"]
    extras = literals()["EXTRAS"]
    assert isinstance(core, list) and isinstance(extras, dict)
    tested = [Requirement(line) for line in extras["tested"]]
    for name in ("torch", "transformers"):
        said = sorted(
            (str(one.specifier), str(one.marker or "")) for one in tested if one.name == name
        )
        assert said == pinned(name)
        for version, _ in said:
            assert f"{name} {version.removeprefix('==')}" in text_of("docs/reference/files.md")
    for wanted in map(Requirement, [*core, *(line for lines in extras.values() for line in lines)]):
        for version, _ in pinned(wanted.name):
            assert wanted.specifier.contains(version.removeprefix("==")) or wanted in tested, wanted
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", text_of("Dockerfile")):
        assert (f"=={version}", "") in pinned(name), name


def test_bounds_let_in_what_was_tried_of_libraries_whose_insides_are_used() -> None:
    parts = literals()
    wanted = [*parts["CORE"], *(line for lines in parts["EXTRAS"].values() for line in lines)]  # type: ignore[attr-defined,misc]
    for one in libraries.LIBRARIES:
        bounds = [
            asked.specifier
            for asked in map(Requirement, wanted)
            if asked.name.lower() == one.name.lower() and "==" not in str(asked.specifier)
        ]
        assert bounds, one.name
        for bound in bounds:
            assert bound.contains(one.oldest) and bound.contains(one.newest), one.name
        for version, _ in pinned(one.name):
            assert bound.contains(version.removeprefix("=="))


@pytest.mark.parametrize("version", ["0.0.1", "99.0", "99.0.dev3"])
@pytest.mark.parametrize("name", [one.name for one in libraries.LIBRARIES])
def test_an_untried_version_passes_its_self_test_or_is_refused(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def works() -> bool:
        asked.append(True)
        return True

    def raises() -> bool:
        raise KeyError("changed")

    libraries.check_library.cache_clear()
    monkeypatch.setattr(libraries.metadata, "version", lambda _: version)
    for _ in range(2):
        libraries.check_library(name, works)
    assert asked == [True]  # once per process
    for broken in (None, raises, lambda: False):
        with pytest.raises(UsageError, match=rf"^{name} {version}: .*pip install '{name}=="):
            libraries.check_library(name, broken)
    monkeypatch.setattr(libraries.metadata, "version", lambda _: libraries.library(name).newest)
    libraries.check_library(name, raises)


def test_shipped_policies_are_found_beside_a_checkout_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.policies_folder() == ROOT / "policies"
    installed = tmp_path / "site" / "flexgen_h2o"
    (installed / "policies").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(installed / "core" / "files.py"))
    assert files.policies_folder() == installed / "policies"
