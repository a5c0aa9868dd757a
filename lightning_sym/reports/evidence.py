"""Layers under priors learned by evidence: the paper's table of effective parameters, and its curves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import ResultTable, Row, RunResults, text_table

Number = int | None  # of a member; None for the only network of a task

TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")
_SIGNS = dict(zip(TERMS, (-1, -1, 1, 1), strict=True))
_DRAWN: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("log_likelihood", "fit: -log likelihood", {"color": "#2f6690", "lw": 1.4}),
    ("log_determinant", "½ log determinant ratio", {"color": "#c8553d", "lw": 1.4}),
    ("scatter", "scatter: ½ Σ δ‖θ‖²", {"color": "#d9a441", "lw": 1.4}),
    ("log_marginal_likelihood", "sum: -L / N", {"color": "#1b1b1b", "lw": 2.0}),
)
_FAMILIES = {"fc": "#c8553d", "conv": "#2f6690", "gconv": "#588b5a"}  # of paths, the same colors everywhere
SHARES = Chart(
    [
        Panel(
            [
                Marks("relative", "epoch", ["path"], "area", lambda row: row["path"].upper(),
                      looks={name.upper(): {"color": color} for name, color in _FAMILIES.items()})
            ],
            "{layer}", "epoch", "relative effective parameters", ["layer"], bottom=0, top=1, whole=True,
        )
    ],
    size=(3.0, 2.0), legend="beside", share="xy",
)  # fmt: skip
OF_PATHS = ("precision", "mean_square", "effective", "normalised", "relative")
UNITS = {
    "precision": "of the Gaussian prior; the geometric mean over tensors if they have several",
    "mean_square": "mean squared weight",
    "effective": "number of parameters that the data determine, 0 to parameters",
    "normalised": "effective / parameters",
    "relative": "normalised over the sum of those of all paths of the layer, 0 to 1",
    "member": "number in the zoo",
    "type": "of a layer: the path with the largest relative number",
    "evidence": "nats per training datum: log marginal likelihood = log likelihood - log determinant - scatter",
    "log_marginal_likelihood": "nats per training datum",
    "noise": "standard deviation of the noise of a regression, in units of the targets as they are trained on",
    "loss": "of the test split: cross-entropy in nats, or squared error summed over outputs",
    "accuracy": "of the test split: fraction, 0 to 1",
    "seconds": "of a curvature pass, its eigenvalues and the steps of the precisions",
}
_MOST_ROWS = 40  # of the printed table of a zoo


def evidence_results(
    records: Sequence[Row],
    last: Mapping[Number, Row],
    tested: Mapping[Number, Mapping[str, float]],
    *,
    network: str,
    architecture: Any,
    members: int | None,
    updated: bool,
    about: Mapping[str, Any],
    keep: str = "last",
) -> RunResults:
    """Report the evidence and the effective parameters of layers and paths.

    Args:
        records: A mapping for each update and network: ``epoch``, ``member`` if there are several, the four terms of
            the evidence per datum, ``seconds``, and ``paths``: by path ``layer``, ``parameters`` and the entries of
            ``OF_PATHS``.
        last: The last record of each network that was not stopped, by number.
        tested: Test scores of each network: ``loss`` and maybe ``accuracy``.
        network: Name of the architecture.
        architecture: All facts about it.
        members: Number of networks; None for the only one of a task.
        updated: Whether precisions were ever updated; otherwise the table on the terminal notes it.
        about: Everything else needed to make the tables again.
        keep: Which weights the tested networks have: of their ``"best"`` epoch, or of the ``"last"``, which all else
            is of.
    """
    names = next(iter(tested.values()), {})
    test = {name: _mean([values[name] for values in tested.values()]) for name in names}
    title = network if members is None else f"{members} {network}, mean over members"
    if "accuracy" in test:
        title += f", test accuracy {100 * test['accuracy']:.1f} %"
    terms = {number: _without_paths(record) for number, record in last.items()}
    types = {number: layer_types(record) for number, record in last.items()}
    about = {
        "architecture": architecture,
        "test": by_member(tested, members) or {},
        "evidence": by_member(terms, members),
        "types": by_member(types, members) or {},
        **about,
    }
    what = "a network trained under a prior learned by its Laplace marginal likelihood"
    curves = list(map(_without_paths, records))
    picture = "relative_effective_parameters.png" if records and _relaxed(records[-1]) else "evidence.png"
    return RunResults(
        [
            ResultTable("layers", what, layer_rows(last), UNITS, about),
            ResultTable("evidence", "the log marginal likelihood during training", curves, UNITS, about),
        ],
        _figures(records, title) if records else (),
        numbers={f"final/test_{name}": value for name, value in test.items()},
        headline=next((f"final/test_{name}" for name in ("accuracy", "loss") if name in test), None),
        shown=_shown(last, several=members is not None, updated=updated),
        notes=[
            *_notes(records, list(last.values()), test, "" if members is None else "mean over members: "),
            *(
                ["layers and evidence are of the last epoch's weights, the test split of those kept (best)"]
                * (keep == "best")
            ),
            *_descent(records),
        ],
        places={**({"picture": picture} if records else {}), "table": "layers.csv", "updates": "evidence.csv"},
    )


def layer_rows(last: Mapping[Number, Row]) -> list[dict[str, Any]]:
    """Return a row for each network, layer and path; arguments as for :func:`evidence_results`."""
    return [
        {
            **({} if number is None else {"member": number}),
            "layer": values["layer"],
            "path": _within(path, values["layer"]),
            **{name: values[name] for name in ("parameters", *OF_PATHS)},
            "type": layer_types(record).get(values["layer"], ""),
        }
        for number, record in last.items()
        for path, values in record["paths"].items()
    ]


def layer_types(record: Row) -> dict[str, str]:
    """Return the path with the largest relative number for each layer with several, of one record."""
    return {
        layer: max(paths, key=lambda path: float(paths[path]["relative"])) for layer, paths in _relaxed(record).items()
    }


def by_member(values: Mapping[Number, Any], members: int | None) -> Any:
    """Return values by the names of members; that of the only network if there are none, None without it."""
    if members is None:
        return values.get(None)
    return {member_name(number): value for number, value in values.items()}


def member_name(number: Number) -> str:
    """Return the name of a member in tags and checkpoints; empty for the only network of a task."""
    return "" if number is None else f"member-{number:04d}"


def _without_paths(record: Row) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "paths"}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _figures(records: Sequence[Row], title: str) -> Iterator[tuple[str, Figure]]:
    shares = [
        {"epoch": record["epoch"], "layer": layer, "path": path, "relative": values["relative"]}
        for record in records
        for layer, paths in _relaxed(record).items()
        for path, values in paths.items()
    ]
    yield from SHARES.named("relative_effective_parameters", shares, title)
    terms = [{"epoch": row["epoch"], **{n: sign * row[n] for n, sign in _SIGNS.items()}} for row in records]
    log = "y" if min(row[name] for row in terms for name in _SIGNS) > 0 else ""  # not of every regression
    marks = [Marks(name, "epoch", label=label, look=look) for name, label, look in _DRAWN]
    chart = Chart([Panel(marks, "", "epoch", "nats per training datum", log=log, whole=True)])
    yield from chart.named("evidence", terms, title)


def _notes(records: Sequence[Row], last: Sequence[Row], test: Mapping[str, float], of: str) -> list[str]:
    """Summarise test scores, evidence and the cost of a curvature pass."""
    notes = []
    if "accuracy" in test:
        notes.append(f"{of}test accuracy {100 * test['accuracy']:.2f} %, loss {test['loss']:.4g}")
    elif test:
        notes.append(f"{of}test loss {test['loss']:.4g}")
    if last:
        means = (f"{sign * _mean([record[name] for record in last]):.4g}" for name, sign in _SIGNS.items())
        total, fit, determinant, scatter = means
        noise = [record["noise"] for record in last if "noise" in record]
        seconds = _mean([record["seconds"] for record in records])
        notes += [
            f"{of}-log marginal likelihood / N: {total} = {fit} (fit) + {determinant} (log determinant) + {scatter} "
            "(scatter)",
            *([f"{of}standard deviation of the noise: {_mean(noise):.4g}"] if noise else []),
            f"{len(records)} curvature {'pass' if len(records) == 1 else 'passes'} of {seconds:.2f} s",
        ]
    return notes


def _descent(records: Sequence[Row]) -> list[str]:
    """Warn if the evidence is worse at the end than after the first update."""
    if not records:
        return []
    epochs = sorted(record["epoch"] for record in records)
    first, last = ([record for record in records if record["epoch"] == end] for end in (epochs[0], epochs[-1]))
    before, after = (_mean([record["log_marginal_likelihood"] for record in found]) for found in (first, last))
    if after >= before - 1e-3 * abs(before):
        return []
    return [
        f"-log marginal likelihood / N rose from {-before:.4g} after epoch {epochs[0]} to {-after:.4g}: training "
        "between updates does not see the log determinant (docs/equivariance.md, The schedule)"
    ]


def _shown(last: Mapping[Number, Row], *, several: bool, updated: bool) -> Table:
    """Return the numbers of all layers, or of all paths where layers have several."""
    relaxed = any(_relaxed(record) for record in last.values())
    first = [*(["member"] if several else []), "layer", *(["path"] if relaxed else [])]
    headings = ("prec.", "w²", "norm.", "rel.") if relaxed else ("precision", "mean square", "normalised")
    lines = [
        ([str(number)] if several else []) + cells
        for number, record in last.items()
        for cells in (_relaxed_cells(record) if relaxed else _ordinary_cells(record))
    ]
    shown = lines[:_MOST_ROWS] if several else lines
    title = "Layers by their effective parameters" + ("" if updated else "; precisions were not updated")
    table = text_table(title, [*first, *headings], shown, whole=first, names=len(first), compact=True)
    captions = ["norm. is effective parameters by all of the path, rel. its share in the layer, * the layer's type"]
    captions = captions if relaxed else ["normalised: effective parameters by all of the layer"]
    captions += [f"{len(lines) - len(shown)} more rows in layers.csv"] if len(shown) < len(lines) else []
    table.caption = "; ".join(captions) or None
    return table


def _relaxed(record: Row) -> dict[str, dict[str, Row]]:
    """Return the numbers of layers with several paths: by layer, then by the path's name within it."""
    layers: dict[str, dict[str, Row]] = {}
    for path, values in record["paths"].items():
        layers.setdefault(values["layer"], {})[_within(path, values["layer"])] = values
    return {layer: paths for layer, paths in layers.items() if len(paths) > 1}


def _relaxed_cells(record: Row) -> Iterator[list[str]]:
    """Yield a row for each path of each layer with several; the first names the layer, a star marks its type."""
    types = layer_types(record)
    for layer, found in _relaxed(record).items():
        for place, (path, values) in enumerate(found.items()):
            name = "" if place else layer or "network"
            star = "*" if path == types[layer] else " "
            yield [name, path, *_numbers(values), f"{values['relative']:.3f}{star}"]


def _ordinary_cells(record: Row) -> Iterator[list[str]]:
    """Yield the printed row of each layer."""
    for values in record["paths"].values():
        yield [values["layer"] or "network", *_numbers(values)]


def _numbers(values: Row) -> list[str]:
    return [short(values[name]) for name in ("precision", "mean_square", "normalised")]


def _within(path: str, layer: str) -> str:
    """Return the name of a path within its layer: empty where the layer is the path."""
    return "" if path == layer else path.removeprefix(f"{layer}.")


def short(value: float) -> str:
    """Return one or two digits, in at most five characters, for a table of 80 columns: 8e-3, 0.079, 3.1, 280, 3e7."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 99.5 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
