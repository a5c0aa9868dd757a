"""CurveGeometry: its numbers are those of `curve_geometry`, and files, figure and loggers hold them."""

import functools
import json

import pytest
import torch
from fits import digits, fit
from helpers import printed, read_csv, read_rows
from matplotlib.image import imread

from lightning_sym.callbacks import CurveGeometry
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.connectivity import Curve, curve_geometry
from lightning_sym.connectivity.geometry import DIRECTIONS
from lightning_sym.landscape import weight_vector
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.curve_geometry import CurveOf, curve_geometry_results
from lightning_sym.tasks import CurveTask

quick = functools.partial(CurveGeometry, points=3, images=60, jacobian_images=8, probes=4, density_steps=4)


@pytest.fixture(scope="module")
def run(matching_zoo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("geometry")
    task, report = CurveTask(str(matching_zoo), pairs=[[0, 2], [0, 1]]), quick(max_parameters=100)
    fit(task, digits(max_samples=300), report, folder=folder, logger=MetricsCSV(folder), limit_train_batches=4)
    return folder, task, report


@pytest.mark.long
def test_files_and_loggers_of_a_geometry(run):
    folder, _, report = run
    names = ("geometry", "geometry_density", "geometry_jacobians", "numbers")
    tables = [f"{name}.{kind}" for name in names for kind in ("csv", "json")]
    figures = [f"geometry-0-2-{kind}.png" for kind in ("bezier", "chain")]
    assert {file.name for file in (folder / "results").iterdir()} == {*tables, *figures}
    assert imread(folder / "results" / figures[0]).std() > 0.01
    about = json.loads((folder / "results" / "geometry.json").read_text())
    assert about["images"] == {"0-2 bezier": 60, "0-2 chain": 60}
    assert {"units", "versions", "seeds", "members", "architecture", "zoo", "data"} <= set(about)
    logged = [row for row in read_csv(folder / "metrics.csv") if row["details/geometry/pair-0-2/chain/trace/max"]]
    rows = [row for row in about["rows"] if row["kind"] == "chain"]
    largest = float(logged[-1]["details/geometry/pair-0-2/chain/trace/max"])
    assert largest == pytest.approx(max(row["trace"] for row in rows))
    said = printed(lambda console: console.print(report.results.shown))
    assert "…" not in said  # nothing is cut off at 80 columns
    assert "detour" in said
    assert "both identities hold at every point" in report.results.notes[0]
    assert "linear probe on those of the start is right for" in report.results.notes[1]


def test_the_numbers_are_those_of_curve_geometry(run):
    folder, task, _ = run
    data = digits(max_samples=300)
    images, labels = data.split_tensors("train")
    inputs = data.normalize(images[:60])
    (curve,) = [curve for name, curve in task.curves.items() if str(name) == "pair-0-2/bezier"]
    network = task.member(0)
    expected = curve_geometry(
        curve, network, (inputs, labels[:60]), points=3, inputs=inputs[:8], probes=4, max_parameters=100
    )
    rows = [row for row in read_rows(folder / "results" / "geometry") if row["kind"] == "bezier"]
    probes = curve_geometry(
        curve, network, (inputs, labels[:60]), points=3, inputs=inputs[:8], labels=labels[:8], max_parameters=0
    ).probe
    assert [row["probe_from_start"] for row in rows] == probes[0].tolist()
    assert [row["probe_here"] for row in rows] == probes.diagonal().tolist()
    for row, point in zip(rows, expected.points, strict=True):
        for name in DIRECTIONS:
            assert (row[f"{name}_norm"], row[f"{name}_curvature"]) == pytest.approx(point.directions[name])
        for name in ("t", "loss", "gradient_norm", "speed"):
            assert row[name] == pytest.approx(getattr(point, name))
        assert row["eigenvalue_1"] == pytest.approx(point.spectrum.eigenvalues[0])
        assert (row["rank"], row["nullity"]) == (point.jacobian.rank, point.jacobian.nullity)
        assert row["gradient_identity"] < 1e-6
        assert row["curvature_identity"] < 1e-6
        assert row["orbit_dimension"] == task.symmetry.dimension == 22
    density = [row for row in read_rows(folder / "results" / "geometry_density") if row["kind"] == "bezier"]
    first = [row for row in density if row["t"] == 0]
    places, heights = (torch.tensor([row[name] for row in first]) for name in ("eigenvalue", "density"))
    assert float(torch.trapezoid(heights, places)) == pytest.approx(1, abs=1e-3)


def test_small_networks_have_counts_and_what_does_not_hold_is_said():
    networks = [MultiLayerPerceptron(widths=[2], image_size=2, num_classes=3).fresh(n).double() for n in (0, 1)]
    data = torch.randn(20, 1, 2, 2, dtype=torch.float64), torch.randint(3, (20,))
    line = Curve.straight(*map(weight_vector, networks), bends=1)
    shape = curve_geometry(line, networks[0], data, points=3)
    results = curve_geometry_results({CurveOf(0, 1, "chain"): shape}, title="test", about={})
    (near,) = [table for table in results.tables if table.name == "geometry_near_zero"]
    counts = {row["tolerance"]: row["relative"] for row in near.rows if row["t"] == 0.5}
    assert counts == shape.points[1].spectrum.near_zero.relative
    (figure,) = [figure for _, figure in results.figures]
    titles = [axes.get_title() for axes in figure.axes]
    assert "eigenvalues near zero" in titles
    assert len(figure.axes) == 8
    assert results.tables[0].rows[0]["detour_norm"] is None  # of a straight line
    first = shape.points[0]
    broken = first.gradient_identity._replace(deviation=0.5)
    wrong = type(shape)((type(first)(**{**vars(first), "gradient_identity": broken}),), *list(vars(shape).values())[1:])
    results = curve_geometry_results({CurveOf(0, 1, "chain"): wrong}, title="test", about={})
    assert "do not hold" in results.notes[0]
    assert curve_geometry_results({}, title="test", about={}).notes
