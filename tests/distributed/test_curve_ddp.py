"""Two processes report on curves, and on their planes, what one does; the training is in ``conformance``."""

import functools

import pytest
import torch
from fits import digits
from helpers import assert_same, read_csv, write_zoo

from lightning_sym.callbacks import CurveReport
from lightning_sym.connectivity import load_curve
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import CurveTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Nothing is trained, so that statistics of batches, which are of other images on two processes, change no curve.
STILL = functools.partial(torch.optim.SGD, lr=0.0)


def scenarios(run, matching_zoo):
    zoo = write_zoo(
        run.folder / "zoo", [MyrtleCNN(2, in_channels=1, image_size=8).fresh(n) for n in range(2)], digits()
    )

    def fit(processes):
        data = digits(batch_size=16 // processes, max_samples=81)  # 81 images: not divisible by 2
        report = CurveReport(points=3, plane_points=3, plane_images=81, matching="activations")
        task = CurveTask(str(matching_zoo), pairs=[[0, 2]], decay=1e-3, matched="activations")
        run.fit(f"perceptrons {processes}", task, data, report, processes=processes, max_epochs=2)
        # The same number of batches of the same images: 2 x 40 are 1 x 40 and 1 x 40.
        data = digits(batch_size=16 // processes, eval_batch_size=40, max_samples=80)
        task = CurveTask(str(zoo), optimizer=STILL, recalibration_batches=2 // processes)
        report = CurveReport(points=3, planes=0, matching=None)
        run.fit(f"normed {processes}", task, data, report, processes=processes)

    fit(2)
    message = "CurveTask shares out the data, not its members; use --trainer.strategy ddp instead of ddp_members."
    placed = CurveTask(str(matching_zoo), pairs=[[0, 2]])
    run.fit("placed", placed, digits(), processes=2, strategy="ddp_members_fork", fails=message)
    fit(1)


@pytest.mark.parametrize("name", ["perceptrons", "normed"])
def test_two_processes_report_what_one_does(name, runs):
    one, two = (runs / f"{name} {processes}" / "results" for processes in (1, 2))
    for table in ("curves", "points", *(["planes"] if name == "perceptrons" else [])):
        rows, others = (read_csv(folder / f"{table}.csv") for folder in (one, two))
        assert len(rows) == len(others) > 0
        for a, b in zip(rows, others, strict=True):
            for column, value in a.items():
                try:
                    assert float(b[column]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), (table, column)
                except ValueError:
                    assert b[column] == value


def test_curves_are_not_placed_on_processes(runs):
    assert not (runs / "placed" / "last.ckpt").exists()  # the sentence is checked where it is said


def test_two_processes_train_the_same_curves_between_matched_ends(runs):
    one, two = (load_curve(runs / f"perceptrons {n}" / "results" / "curve-0-2-bezier.safetensors") for n in (1, 2))
    assert_same(one.points[0], two.points[0])
    torch.testing.assert_close(one.points, two.points, atol=2e-5, rtol=1e-4)
