"""Fit the profiles of known machines (policies/profiles) to recorded runs of FlexGen and H2O, and
show the errors.

    python scripts/fit_profile.py                 fit, and print errors: fitted, left out, development set
    python scripts/fit_profile.py --write DIR     the same, and write DIR/t4.json and DIR/a100-80.json
    python scripts/fit_profile.py --check         no fit: errors of the shipped profiles
    python scripts/fit_profile.py --check --runs FILE     ... over other runs in the same format

The last line of stdout is one JSON object. Exit code 2: an unusable runs file.
docs/developers/planner.md says more.
"""  # noqa: E501

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from card_model import CARDS, PARAMETERS, profile_of, source_of
from recorded_runs import QUANTITIES, Run, errors_of, predicted, predicted_quickly, read_runs

from flexgen_h2o.cli_common import run_cli
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.profile import HardwareProfile, read_profile, write_profile

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "policies" / "profiles"
PUBLISHED = ROOT / "scripts" / "data" / "published_runs.json"
DEVELOPMENT = ROOT / "scripts" / "data" / "development_runs.json"
# log units that a recorded number is off by itself: another day, another machine of the same kind
SPREAD = 0.05
STEP = 1e-3  # of a parameter, in its widths, for a derivative
MAX_ITERATIONS = 20
TOLERANCE = 1e-3
Array = np.ndarray[Any, np.dtype[np.float64]]


def main(argv: list[str] | None = None) -> int:
    """Exit code of the command line."""
    return run_cli("fit_profile", _body, argv)


def _body(argv: list[str] | None) -> int:
    parser = OneLineParser(prog="fit_profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="recorded runs (the 9 published ones)"
    )
    parser.add_argument(
        "--check", action="store_true", help="evaluate the shipped profiles, fit nothing"
    )
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the fitted profiles here")
    args = parser.parse_args(argv)
    if args.check and args.write:
        raise UsageError("--write: --check fits nothing that could be written")
    runs = read_runs(args.runs or PUBLISHED)
    development = () if args.runs else read_runs(DEVELOPMENT)
    summary = _check(runs, development) if args.check else _fit(args, runs, development)
    print(json.dumps(summary))
    return 0


def _check(runs: Sequence[Run], development: Sequence[Run]) -> dict[str, Any]:
    profiles = {name: _shipped(name) for name in {run.machine for run in (*runs, *development)}}
    summary = {"runs": report("Shipped profiles: recorded runs", evaluated(runs, profiles))}
    if development:
        summary["development"] = report(
            "Shipped profiles: development set, not fitted", evaluated(development, profiles)
        )
    return summary


def _shipped(machine: str) -> HardwareProfile:
    path = SHIPPED / f"{machine}.json"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise UsageError(
            f"machine: there is no profile of {machine!r} in {SHIPPED}, only of {names}"
        )
    return read_profile(path)


def _fit(
    args: argparse.Namespace, runs: Sequence[Run], development: Sequence[Run]
) -> dict[str, Any]:
    unknown = sorted({run.machine for run in runs} - set(CARDS))
    if unknown:
        raise UsageError(f"machine: {unknown[0]!r} is not one of {', '.join(CARDS)}")
    at = fitted(runs, np.zeros(len(PARAMETERS)))
    values = values_of(at)
    print_parameters(values)
    date = datetime.date.today().isoformat()
    profiles = {
        name: profile_of(card, values, date, source_of(len(runs))) for name, card in CARDS.items()
    }
    summary: dict[str, Any] = {"runs": report("Fitted runs", evaluated(runs, profiles))}
    without = [evaluated([run], profiles_without(runs, i, at))[0] for i, run in enumerate(runs)]
    summary["leave_one_out"] = report(
        "Leave one out: each run predicted by a fit to the others", without
    )
    if development:
        summary["development"] = report(
            "Development set, not fitted", evaluated(development, profiles)
        )
    if args.write:
        for name, profile in profiles.items():
            write_profile(args.write / f"{name}.json", profile)
            print(f"wrote {args.write / f'{name}.json'}")
    return {**summary, "parameters": values}


@dataclass(frozen=True)
class Evaluated:
    """A run, its predictions, and their errors: predicted over recorded, less one."""

    run: Run
    found: Mapping[str, float]
    errors: Mapping[str, float]


def evaluated(runs: Sequence[Run], profiles: Mapping[str, HardwareProfile]) -> list[Evaluated]:
    results = []
    for run in runs:
        found = predicted(run, profiles[run.machine])
        results.append(Evaluated(run, found, errors_of(run, found)))
    return results


def values_of(at: Array) -> dict[str, float]:
    """Parameter values at a point that is measured in their widths from what was expected; three
    digits."""
    return {name: float(f"{value:.3g}") for name, value in _exact_values(at).items()}


def _exact_values(at: Array) -> dict[str, float]:
    return {
        p.name: min(max(p.expected * math.exp(x * p.width), p.low), p.high)
        for p, x in zip(PARAMETERS, at, strict=True)
    }


def fitted(runs: Sequence[Run], start: Array) -> Array:
    """The point where the squares of the runs' errors (in SPREADs) and of the parameters' distances
    from what was expected (in their widths) are least: Levenberg and Marquardt's method with
    derivatives by differences."""
    at = start
    damping = 1e-3
    misses = _misses(at, runs)
    for _ in range(MAX_ITERATIONS):
        columns = [(_misses(at + STEP * axis, runs) - misses) / STEP for axis in np.eye(len(at))]
        slopes = np.stack(columns, axis=1)
        gained = 0.0
        while damping < 1e6:
            step = np.linalg.solve(
                slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ misses
            )
            there = _misses(at + step, runs)
            gained = float(misses @ misses - there @ there)
            if gained > 0:
                break
            damping *= 10
        if gained <= 0:
            break
        at = at + step
        misses = there
        damping = damping / 10
        if gained < TOLERANCE * float(misses @ misses):
            break
    return at


def _misses(at: Array, runs: Sequence[Run]) -> Array:
    """Return what is to be made small. Of a run with both phases recorded the phases count, else
    tokens a second."""
    values = _exact_values(at)
    profiles = {name: profile_of(card, values) for name, card in CARDS.items()}
    found = []
    for run in runs:
        guess = predicted_quickly(run, profiles[run.machine])
        phases: list[str] = [name for name in ("prefill_s", "decode_s") if name in run.recorded]
        found += [
            math.log(guess[name] / run.recorded[name]) / SPREAD
            for name in phases or ["tokens_per_s"]
        ]
    return np.array([*found, *at])


def profiles_without(
    runs: Sequence[Run], left_out: int, start: Array
) -> dict[str, HardwareProfile]:
    """Profiles fitted to all runs but one."""
    values = values_of(fitted([*runs[:left_out], *runs[left_out + 1 :]], start))
    return {name: profile_of(card, values) for name, card in CARDS.items()}


def print_parameters(values: Mapping[str, float]) -> None:
    print(f"{'parameter':<18}{'expected':>10}{'fitted':>10}  what")
    for p in PARAMETERS:
        print(f"{p.name:<18}{p.expected:>10.4g}{values[p.name]:>10.4g}  {p.meaning}")


def report(title: str, results: Sequence[Evaluated]) -> dict[str, float]:
    """Print a table; the median and worst size of an error, over all quantities and over tokens a
    second alone."""
    print(f"\n{title}\n{'run':<62}" + "".join(f"{name + ' (error)':>28}" for name in QUANTITIES))
    for result in results:
        cells = [_cell(result, name) for name in QUANTITIES]
        print(f"{result.run.name:<62}" + "".join(f"{cell:>28}" for cell in cells))
    sizes = [abs(error) for result in results for error in result.errors.values()]
    rates = [abs(result.errors["tokens_per_s"]) for result in results]
    found = {
        "median": statistics.median(sizes),
        "worst": max(sizes),
        "tokens_per_s_median": statistics.median(rates),
        "tokens_per_s_worst": max(rates),
        "quantities": len(sizes),
    }
    print(
        f"median {found['median']:.1%}, worst {found['worst']:.1%} of {len(sizes)} recorded "
        "numbers; "
        f"tokens/s alone: median {found['tokens_per_s_median']:.1%}, worst "
        f"{found['tokens_per_s_worst']:.1%}"
    )
    return {name: round(value, 4) for name, value in found.items()}


def _cell(result: Evaluated, name: str) -> str:
    """predicted / recorded, and the error."""
    found = result.found[name]
    recorded = result.run.recorded.get(name)
    if recorded is None:
        return f"{found:.4g} / -"
    return f"{found:.4g} / {recorded:.4g} {result.errors[name]:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
