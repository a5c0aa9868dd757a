"""The report of rotations counts every image once, on one process and on two."""

import functools

import pytest
import torch
from fits import digits
from helpers import randomize_statistics, read_csv, write_zoo

from lightning_sym.callbacks import RotationReport
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import RotationTask

pytestmark = pytest.mark.ddp

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
KINDS = ["group", "orthogonal", "undo"]


def scenarios(run):
    networks = [randomize_statistics(MyrtleCNN(2, in_channels=1, image_size=8).fresh(n), n) for n in range(2)]
    zoo = str(write_zoo(run.folder / "zoo", networks, digits()))
    for processes in (2, 1):
        task = RotationTask(zoo, sites=["activation2"], kinds=KINDS, repeats=1, optimizer=SGD)
        task.on_train_batch_start = lambda *_, task=task: task.population.eval() and None  # statistics of all images
        # 1 x 24 images see what 2 x 12 see, and 81 are no multiple of either.
        data = digits(batch_size=24 // processes, max_samples=81)
        run.fit(f"{processes}", task, data, RotationReport(), processes=processes)


def test_every_image_counts_once_in_a_report_of_several_processes(runs):
    one, two = (read_csv(runs / f"{n}" / "results" / "penalties.csv") for n in (1, 2))
    assert len(one) == 2 * len(KINDS)
    for a, b in zip(one, two, strict=True):
        for name in ("val_loss", "test_loss", "member_val_accuracy", "member_test_accuracy"):
            assert float(b[name]) == pytest.approx(float(a[name]), rel=1e-4), name
