"""Curves of low loss, their tangents, the functions along them, ensembles and pruning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from published.core import Claim, Quantity, Result, Run, below, over_pairs, positive, rows, together, within
from published.rebasin import CNNS, MLPS

DIGITS = Run("zoo-digits", "zoo/digits_mlp", ("--model.members=10",))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    return f"--model.pairs=[{','.join(f'[{a},{b}]' for a, b in pairs)}]"


def _curves(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    run = runs["curves-mlps"]
    found = [
        over_pairs(f"{split} loss barrier, {name}", "nats", rows(run, "curves", path=path, split=split), "loss_barrier")
        for split in ("train", "test")
        for path, name in (("line", "straight line"), ("bezier", "Bezier curve"), ("matched", "line after matching"))
    ]
    lowest = [
        over_pairs(
            f"lowest test accuracy, {name}",
            "%",
            rows(run, "curves", path=path, split="test"),
            "accuracy_lowest",
            factor=100,
        )
        for path, name in (("line", "straight line"), ("bezier", "Bezier curve"))
    ]
    return [*found, *lowest]


def _geometry(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    run = runs["geometry-digits"]
    found = []
    names = {"tangent": "the tangent", "detour": "the detour", "straight": "the straight line", "random": "noise"}

    def inner(pair: tuple[int, int], column: str) -> float:
        points = rows(run, "geometry", first=pair[0], second=pair[1], kind="bezier")
        return fmean(row[column] for row in points if 0 < row["t"] < 1 and row[column] is not None)

    over = f"{len(PAIRS)} pairs of {2 * len(PAIRS)} networks, points inside the curve"
    for direction, name in names.items():
        values = tuple(inner(pair, f"{direction}_norm") for pair in PAIRS)
        found.append(Quantity(f"norm of the Hessian times {name}", values, "nats", over))
    gradients = tuple(inner(pair, "gradient_norm") for pair in PAIRS)
    found.append(Quantity("norm of the gradient along the curve", gradients, "nats", over))
    for column, label in (
        ("cosine_to_start", "cosine of the Jacobians by the input of both ends"),
        ("probe_from_start", "accuracy at the end of a probe of Jacobians from the start"),
        ("probe_here", "accuracy at the end of a probe of Jacobians from there"),
    ):
        ends = [rows(run, "geometry", first=a, second=b, kind="bezier", t=1.0)[0][column] for a, b in PAIRS]
        found.append(Quantity(label, tuple(ends), "1", f"{len(PAIRS)} pairs"))
    return found


def _unlike(q: Mapping[str, Quantity]) -> Quantity:
    cosine = q["cosine of the Jacobians by the input of both ends"]
    return Quantity(f"1 - {cosine.label}", tuple(1 - value for value in cosine.values), cosine.unit, cosine.over)


def _pruning(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = rows(runs["pruning-digits"], "summary")
    over = f"{len(found)} networks"

    def column(label: str, values: Sequence[float], unit: str = "% of test data") -> Quantity:
        return Quantity(label, tuple(values), unit, over)

    return [
        column("share of units that are left", [row["units"] / row["units_before"] for row in found], "1"),
        column("train loss over its bound", [row["loss"] / row["threshold"] for row in found], "1"),
        column("test error before", [100 * row["test_error_before"] for row in found]),
        column("test error after", [100 * row["test_error"] for row in found]),
        column("test error of twins pruned by magnitude", [100 * row["magnitude_test_error"] for row in found]),
    ]


def _ensembles(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    run, found = runs["fge-cnns"], []
    for kind, label in (
        ("starts", "where training began"),
        ("snapshots", "ensemble of snapshots"),
        ("averages", "mean of the snapshots' weights"),
    ):
        own = rows(run, "ensembles", kind=kind)
        values = tuple(row["loss"] for row in sorted(own, key=lambda row: row["ensemble"]))
        found.append(Quantity(f"test loss, {label}", values, "nats", f"{len(values)} networks"))
    snapshots = rows(run, "ensembles", kind="snapshots")
    alone = tuple(row["mean_loss"] for row in sorted(snapshots, key=lambda row: row["ensemble"]))
    return [*found, Quantity("test loss, a snapshot alone", alone, "nats", f"{len(alone)} networks")]


RESULTS = (
    Result(
        "rashomon-curves",
        "rashomon",
        "procedure, first figure (after Garipov et al. 2018)",
        "A curve of low loss between two networks",
        _curves,
        (
            Claim(
                "A simple curve connects two trained networks along the ridge; the linear path does not.",
                "a figure, no number",
                lambda q: together(
                    below(q["train loss barrier, Bezier curve"], q["train loss barrier, straight line"]),
                    below(q["test loss barrier, Bezier curve"], q["test loss barrier, straight line"]),
                ),
            ),
        ),
        (
            MLPS,
            Run(
                "curves-mlps",
                "curve/mnist5k_mlp",
                (
                    "--model.zoo={zoo-mlps}/zoo",
                    _pairs(((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))),
                    "--model.kinds=[bezier]",
                ),
            ),
        ),
        (
            Run("zoo-resnet20", "zoo/cifar10_resnet20"),
            Run("curves-resnet20", "curve/cifar10_resnet20", ("--model.zoo={zoo-resnet20}/zoo",)),
        ),
        needs="CIFAR-10 and a GPU",
    ),
    Result(
        "rashomon-geometry",
        "rashomon",
        "procedure, local data along the curve",
        "The Hessian and the function along a curve",
        _geometry,
        (
            Claim(
                "The Hessian product is smaller with the tangent than with other directions of the plane.",
                "a figure, no number",
                lambda q: together(
                    below(q["norm of the Hessian times the tangent"], q["norm of the Hessian times the detour"]),
                    below(q["norm of the Hessian times the tangent"], q["norm of the Hessian times the straight line"]),
                ),
            ),
            Claim(
                "It is not zero.",
                "a figure, no number",
                lambda q: positive(q["norm of the Hessian times the tangent"]),
            ),
            Claim(
                "Functions differ along the curve: irrelevant parameters do not explain the ridge.",
                "implied, no number",
                lambda q: together(
                    positive(_unlike(q)),
                    below(
                        q["accuracy at the end of a probe of Jacobians from the start"],
                        q["accuracy at the end of a probe of Jacobians from there"],
                    ),
                ),
            ),
        ),
        (
            DIGITS,
            Run(
                "geometry-digits",
                "curve/digits_geometry",
                (
                    "--model.zoo={zoo-digits}/zoo",
                    _pairs(PAIRS),
                    "--model.kinds=[bezier]",
                    f"--trainer.callbacks.pairs={len(PAIRS)}",
                ),
            ),
        ),
    ),
    Result(
        "rashomon-pruning",
        "rashomon",
        "theory, the loop of three steps",
        "Pruning within the set of good networks",
        _pruning,
        (
            Claim(
                "Repeated walks among weights of low loss allow removing units at still low loss.",
                "a proposal, no number",
                lambda q: together(
                    within(q["share of units that are left"], 0, 1), within(q["train loss over its bound"], 0, 1)
                ),
            ),
            Claim(
                "The result is better than magnitude pruning to the same widths.",
                "implied, no number",
                lambda q: below(q["test error after"], q["test error of twins pruned by magnitude"]),
            ),
        ),
        (
            DIGITS,
            Run(
                "pruning-digits",
                "pruning/mnist5k_mlp",
                ("--data=DigitsDataModule", "--model.zoo={zoo-digits}/zoo", "--model.members=[0,1,2,3,4]"),
            ),
        ),
        sizes=("train loss over", "share"),
    ),
    Result(
        "ensembles-fge",
        "mode-connectivity",
        "section 4 and table 1",
        "Fast geometric ensembles",
        _ensembles,
        (
            Claim(
                "A snapshot ensemble of one cyclical training is better than a single network.",
                "table 1, test errors on CIFAR; no losses",
                lambda q: together(
                    below(q["test loss, ensemble of snapshots"], q["test loss, a snapshot alone"]),
                    below(q["test loss, ensemble of snapshots"], q["test loss, where training began"]),
                ),
            ),
            Claim(
                "The weight average of snapshots is better than the start (Izmailov et al. 2018, SWA).",
                "table 1 there, test accuracies on CIFAR; no losses",
                lambda q: below(q["test loss, mean of the snapshots' weights"], q["test loss, where training began"]),
            ),
        ),
        (
            CNNS,
            Run("fge-cnns", "ensembles/mnist5k_cnn", ("--model.initial={zoo-cnns}/zoo", "--model.members=5")),
        ),
    ),
)
