"""Interrupting a run, and comparing what two runs left behind; for the tests beside this file."""

import torch
from pytorch_lightning import Callback


class Interrupt(Callback):
    """Stops a run before a step, named as ``"<epoch> <step within it>"``, or at its ``"end"``, before reports."""

    def __init__(self, place: str) -> None:
        self.place = place

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if self.place == f"{trainer.current_epoch} {batch_idx}":
            raise RuntimeError("interrupted")

    def on_train_end(self, trainer, task):
        if self.place == "end":
            raise RuntimeError("interrupted")


def assert_same(a: object, b: object, where: str = "") -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for one, two in zip(a, b, strict=True):
            assert_same(one, two, where)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b or (a != a and b != b), where  # NaN where nothing was trained
