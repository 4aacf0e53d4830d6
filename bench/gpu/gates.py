"""Gates that a card is to pass: each gate with what was found and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.kernels import GATED
from flexgen_h2o.planner.profile import NOMINAL

# of a block and micro-batch; a sweep's tokens are read back once
MAX_LAUNCHES = 12
MAX_SYNCS = 0.1
MIN_SHARE = 0.7  # of the bandwidth of a copy
MIN_BUSY = 0.9  # of the link, where weights on the host bind
MAX_ERROR = 0.15  # of a prediction
ON_HOST = "weights-on-host"  # the placement in which the link binds
Row = tuple[str, str, str, str]


def gates(runs: dict[str, Any], figures: dict[str, Any]) -> Iterator[Row]:
    """runs: of placements, by name; figures: of benchmarks, by name, as they wrote them."""
    launches = {name: found["counts"] for name, found in figures.items() if found.get("counts")}
    for name, counts in launches.items():
        yield _row(f"{name}: launches a block", counts["launches"], MAX_LAUNCHES)
        yield _row(f"{name}: waits a block", counts["syncs"], MAX_SYNCS)
    if not launches:
        yield _row("launches and waits a block", None, MAX_LAUNCHES)
    kernels = figures.get("kernels", {}).get("kernels", [])
    for kind in GATED:
        shares = [
            k["share_of_copy"]
            for k in kernels
            if k["kernel"].startswith(kind) and "share_of_copy" in k
        ]
        yield _row(
            f"{kind}: least share of a copy's bandwidth",
            min(shares, default=None),
            MIN_SHARE,
            False,
        )
    yield _row(
        "link: share of time in which it is busy", _link_share(runs, figures), MIN_BUSY, False
    )
    errors = [_error(run["report"]) for run in runs.values() if run["report"] is not None]
    known = [error for error in errors if error is not None]
    yield _row("prediction: largest error of a run", max(known, default=None), MAX_ERROR)


def _row(name: str, found: float | None, aim: float, is_most: bool = True) -> Row:
    sign = "at most" if is_most else "at least"
    if found is None:
        return name, "", f"{sign} {aim:g}", "not measured"
    return (
        name,
        f"{found:.2f}",
        f"{sign} {aim:g}",
        "met" if (found <= aim) == is_most or found == aim else "MISSED",
    )


def _link_share(runs: dict[str, Any], figures: dict[str, Any]) -> float | None:
    """Weights over the link's rate and a decode sweep's seconds, with all weights on the host."""
    rates = [found["rates"]["h2d"] for found in figures.values() if found.get("rates")]
    report = runs.get(ON_HOST, {}).get("report")
    if not rates or report is None:
        return None
    sweep = report["decode"]["seconds"] / max(1, report["gen_len"] - 1)
    return float(report["model_bytes"] / rates[-1] / sweep)


def _error(report: dict[str, Any]) -> float | None:
    """Return the error of the predicted seconds of a run; None where nothing was predicted, or by
    rates that nobody measured."""
    predicted = list(report["predicted"].values())
    is_guess = report["extra"].get("profile") == NOMINAL
    return (
        None
        if None in predicted or is_guess
        else abs(float(sum(predicted) / report["total"]["seconds"]) - 1)
    )
