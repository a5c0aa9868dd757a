"""A branch is the trunk until it leaves; one run makes a table and a figure."""

import torch
from pytorch_lightning import Trainer

from branches.callbacks import BranchDistance
from branches.report import BranchReport
from branches.task import BranchTask
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron


def test_a_branch_is_the_trunk_until_it_leaves(tmp_path):
    network = MultiLayerPerceptron([8], image_size=8)
    task = BranchTask(network, leave=(0, 1, 2), execution="vmap")
    report = BranchReport(points=3)
    trainer = Trainer(
        max_epochs=2,
        callbacks=[BranchDistance(), report],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
    )
    trainer.fit(task, DigitsDataModule(max_samples=200))
    first, second, last = report.results.tables[0].rows
    assert first["distance"] > second["distance"] > 0
    assert last["distance"] == last["loss_barrier"] == 0
    assert len(list(tmp_path.rglob("branches.png"))) == 1
    assert torch.isfinite(trainer.callback_metrics["distance/left-after-00"])
