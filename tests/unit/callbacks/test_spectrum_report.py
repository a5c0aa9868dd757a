"""SpectrumReport: the numbers in its tables are those of the functions, its figures show them."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from fits import digits, fit
from helpers import read_csv, read_rows
from matplotlib.image import imread
from torch import Tensor, nn

from lightning_sym.callbacks import SpectrumReport, spectrum_report
from lightning_sym.curvature import CurvatureOperator, sharpness_modulo_symmetry
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.spectra import REPORT
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import ZooTask


@pytest.mark.drawn
def test_tables_hold_what_the_functions_find(tmp_path) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), 2, optimizer=sgd)
    data, report = digits(), SpectrumReport(steps=6, probes=2, trace_probes=4)
    fit(task, data, report, folder=tmp_path)
    rows = read_rows(tmp_path / "results" / "sharpness")
    assert [(row["member"], row["measure"]) for row in rows] == [
        (member, measure) for member in (0, 1) for measure in ("top_eigenvalue", "trace", "norm")
    ]
    network = task.network.fresh(1)
    network.load_state_dict(task.kept[1]["state"])
    batches = list(data.curvature_dataloader())
    symmetry = trace_symmetry(network, batches[0][0][:2])
    loss = nn.functional.cross_entropy
    found = sharpness_modulo_symmetry(symmetry, network, batches, loss, probes=4, tolerance=1e-4)
    for row, expected in zip(rows[3:], found.rows(), strict=True):
        for name in ("raw", "balanced", "modulo_symmetry", "gauge_share"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6)
    nodes = read_csv(tmp_path / "results" / "spectrum.csv")
    assert len(nodes) == 2 * 2 * 6
    assert sum(float(row["weight"]) for row in nodes) == pytest.approx(4)
    assert all(imread(tmp_path / "results" / f"{name}.png").std() > 0.05 for name in ("spectrum", "sharpness"))


def test_a_share_that_rounds_to_zero_has_no_sign() -> None:
    (share,) = (column for column in REPORT.columns if column.name == "gauge_share")
    assert [share.cell({"gauge_share": value}) for value in (-0.004, 0.126, -0.5, None)] == [
        "0 %",
        "13 %",
        "-50 %",
        "-",
    ]


@pytest.mark.filterwarnings("ignore:SpectrumReport makes")
def test_more_than_a_minute_of_work_is_announced(tmp_path, monkeypatch) -> None:
    clock = itertools.accumulate([0, 1000, 3])  # the first product loads code
    spent = [next(clock)]

    class Slow(CurvatureOperator):
        def __matmul__(self, vectors: Tensor) -> Tensor:
            spent.append(next(clock))
            return super().__matmul__(vectors)

    monkeypatch.setattr(spectrum_report, "time", SimpleNamespace(perf_counter=lambda: spent[-1]))
    monkeypatch.setattr(spectrum_report, "CurvatureOperator", Slow)
    task = ZooTask(MultiLayerPerceptron(widths=(6,), image_size=8), 2)
    with pytest.warns(
        UserWarning, match="about 156 products with Hessians of 80 inputs, in roughly 8 min .*train_batches=2"
    ):
        fit(task, digits(), SpectrumReport(steps=6, probes=1, trace_probes=4, train_batches=1), folder=tmp_path)
