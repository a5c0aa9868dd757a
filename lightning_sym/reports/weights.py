"""How well a metric of networks is predicted from their weights, by arm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sym._tags import details
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Column, Report, Row, RunResults

CONSTANT = "constant"
_SAMPLES = 2000
_TAU = next(iter(details({"tau/{arm}": 0.0})))  # a page of TensorBoard holds 30 curves
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """Predictions of one arm for the networks of the test split.

    Attributes:
        arm: Name of the arm.
        values: Predictions of all repeats. Shape ``[R, N]``.
        moved: Predictions for random points of the orbits of the same networks. Shape ``[R, N]``.
    """

    arm: str
    values: _Floats
    moved: _Floats


def _interval_cell(name: str) -> Callable[[Row], str]:
    """Return a function that prints a score above its interval."""
    keys = name, f"{name}_low", f"{name}_high"

    def text(row: Row) -> str:
        if row[name] is None:
            return "-"
        value, low, high = (format(own, "z.2f" if abs(own) < 100 else ".0e") for own in (row[key] for key in keys))
        return f"{value}\n{low}, {high}"

    return text


REPORT = Report(
    {
        "summary": "predictions from weights: one row per arm",
        "repeats": "predictions from weights: one row per arm and repeat",
        "predictions": "predictions from weights: one row per arm and network of the test split",
    },
    [
        Column("arm", "the features", "arm"),
        Column("r2", "1 - squared error / variance, mean over repeats", "R²", _interval_cell("r2"), number="r2/{arm}"),
        Column("tau", "Kendall's tau-b of predictions and targets, mean over repeats", "tau", _interval_cell("tau"),
               number=_TAU),
        Column("moved", "R² for random points of the orbits of the same networks", "R², moved", _interval_cell("moved"),
               number="r2_moved/{arm}"),
        Column("gain", "R² minus that of raw weights", "R² over raw", _interval_cell("gain")),
        Column("error", "mean absolute error of the metric"),
        Column("r2_low, r2_high, tau_low, tau_high, moved_low, moved_high, gain_low, gain_high",
               "95 % interval: bootstrap over networks of the test split and repeats"),
        Column("repeat", "number of the repeat"),
        Column("target, predicted, lowest, highest", "the metric, mean, lowest and highest prediction over repeats"),
    ],
    {
        "predicted": Chart(
            [
                Panel(
                    [
                        Marks("predicted", x="target", kind="dots", label="network", table="predictions",
                              look={"alpha": 0.6, "ms": 5}),
                        Marks("diagonal", x="target", label="perfect", table="predictions",
                              look={"color": "#7f7f7f", "lw": 1, "ls": "--"}),
                    ],
                    "{arm}: R² {score:z.2f}",
                    xlabel="true",
                    ylabel="predicted",
                    by=["arm"],
                )
            ],
            "{title} from weights",
            columns=3,
            share="xy",
        ),
        "r2": Chart(
            [
                Panel(
                    [
                        Marks("value", x="arm", group=["weights"], kind="error", error=[("low", "high")],
                              spans=["95 % interval over test networks"], table="scores", look={"ls": ""}),
                    ],
                    "values below -1 are in summary.csv only",
                    ylabel="R² on test networks",
                    levels={"mean of the training data": 0.0},
                    bottom=-1.0,
                    top=1.0,
                )
            ],
            "{title} from weights",
            size=(6.4, 3.2),
        ),
    },
    title="{title} from weights",
    headline="r2/canonical",
    places={"picture": "predicted.png", "scores": "r2.png", "table": "summary.csv"},
)  # fmt: skip


def weight_regression_results(
    found: Sequence[Predictions],
    targets: _Floats,
    mean: float,
    *,
    title: str,
    about: Mapping[str, Any],
) -> RunResults:
    """Report predictions of a metric from weights.

    Args:
        found: Predictions of each arm.
        targets: Metrics of the networks of the test split. Shape ``[N]``.
        mean: Mean metric of the training split, the prediction of the constant baseline.
        title: For tables and figures.
        about: Everything needed to make the tables again.

    Raises:
        ValueError: If all targets are equal.
    """
    if targets.min() == targets.max():
        raise ValueError(
            f"R² needs networks of different metrics, and all {len(targets)} of the test split have {targets[0]:.4g}; "
            "use a larger test split, or a zoo of networks that differ."
        )
    constant = np.full((1, len(targets)), mean)
    arms = [*found, Predictions(CONSTANT, constant, constant)]
    summary = summary_rows(arms, targets)
    scores = {row["arm"]: row["r2"] for row in summary}
    predictions = [
        {
            "arm": one.arm,
            "network": index,
            "target": target,
            "predicted": float(own.mean()),
            "lowest": float(own.min()),
            "highest": float(own.max()),
            "diagonal": target,
            "score": scores[one.arm],
        }
        for one in arms
        for index, (target, own) in enumerate(zip(targets.tolist(), one.values.T, strict=True))
    ]
    repeats = [
        {"arm": one.arm, "repeat": repeat, **{name: float(values[repeat]) for name, values in own.items()}}
        for one in arms
        for own in [_scores(one, targets, np.ones((1, len(targets))))]
        for own in [{name: values[0] for name, values in own.items()}]
        for repeat in range(len(one.values))
    ]
    bars = [
        {"arm": row["arm"], "weights": name, "value": row[key], "low": row[f"{key}_low"], "high": row[f"{key}_high"]}
        for row in summary
        for key, name in (("r2", "as trained"), ("moved", "moved along the orbit"))
    ]
    rows = {"summary": summary, "repeats": repeats, "predictions": predictions, "scores": bars}
    notes = ["means over repeats, with 95 % intervals of a bootstrap over test networks and repeats"]
    return REPORT.results(rows, title=title, about=about, notes=notes)


def summary_rows(arms: Sequence[Predictions], targets: _Floats) -> list[dict[str, Any]]:
    """Return a row for each arm, with percentile intervals.

    All arms share the resampled networks, so that differences between arms have intervals of pairs.

    Args:
        arms: Predictions of each arm.
        targets: Metrics of the networks. Shape ``[N]``.
    """
    source = np.random.default_rng(0)
    count = len(targets)
    networks = source.multinomial(count, np.full(count, 1 / count), size=_SAMPLES).astype(np.float64)
    rows, means, spreads = [], {}, {}
    for one in arms:
        repeats = len(one.values)
        chosen = source.multinomial(repeats, np.full(repeats, 1 / repeats), size=_SAMPLES) / repeats
        whole = _scores(one, targets, np.ones((1, count)))
        means[one.arm] = {name: float(values.mean()) for name, values in whole.items()}
        spreads[one.arm] = {n: (values * chosen).sum(1) for n, values in _scores(one, targets, networks).items()}
    for one in arms:
        row: dict[str, Any] = {"arm": one.arm, **means[one.arm]}
        drawn = dict(spreads[one.arm])
        row |= dict.fromkeys(("gain", "gain_low", "gain_high"))
        if "raw" in means and one.arm != "raw":
            row["gain"] = row["r2"] - means["raw"]["r2"]
            drawn["gain"] = drawn["r2"] - spreads["raw"]["r2"]
        for name, values in drawn.items():
            if name != "error":
                low, high = np.nanquantile(values, [0.025, 0.975])  # resamples of one network have no R²
                row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
        rows.append(row)
    return rows


def _scores(one: Predictions, targets: _Floats, counts: _Floats) -> dict[str, _Floats]:
    """Return the scores of each repeat on resampled networks; counts ``[S, N]``, scores ``[S, R]``."""
    return {
        "r2": weighted_r2(one.values, targets, counts),
        "tau": weighted_tau(one.values, targets, counts),
        "moved": weighted_r2(one.moved, targets, counts),
        "error": counts @ np.abs(one.values - targets).T / counts.sum(1, keepdims=True),
    }


def weighted_r2(predictions: _Floats, targets: _Floats, counts: _Floats) -> _Floats:
    """Return the coefficient of determination of predictions for networks that are counted several times.

    Args:
        predictions: Shape ``[R, N]``.
        targets: Shape ``[N]``.
        counts: How often each network counts. Shape ``[S, N]``.

    Returns:
        One minus the sum of squared errors over that of deviations from the mean target. Shape ``[S, R]``; NaN where
        all targets are equal.
    """
    errors = counts @ ((predictions - targets) ** 2).T
    centred = targets - targets.mean()  # against cancellation
    total = counts @ centred**2 - (counts @ centred) ** 2 / counts.sum(1)
    lowest, highest = (np.where(counts > 0, targets, end) for end in (np.inf, -np.inf))
    total[lowest.min(1) == highest.max(1)] = np.nan
    result: _Floats = 1 - errors / total[:, None]
    return result


def weighted_tau(predictions: _Floats, targets: _Floats, counts: _Floats) -> _Floats:
    r"""Return Kendall's :math:`\tau_b` of predictions and targets for networks that are counted several times.

    Copies of a network are ties. Constant predictions have 0.

    Args:
        predictions: Shape ``[R, N]``.
        targets: Shape ``[N]``.
        counts: How often each network counts. Shape ``[S, N]``.

    Returns:
        Shape ``[S, R]``.

    Note:
        ``O(S R N^2)`` time and ``O(N^2)`` memory.
    """

    def pairs(a: _Floats, b: _Floats) -> _Floats:
        result: _Floats = ((counts @ (a * b)) * counts).sum(1)
        return result

    target = np.sign(targets[:, None] - targets)
    columns = []
    for own in predictions:
        order = np.sign(own[:, None] - own)
        norm = np.sqrt(pairs(order, order) * pairs(target, target))
        columns.append(np.divide(pairs(order, target), norm, out=np.zeros_like(norm), where=norm > 0))
    return np.stack(columns, 1)
