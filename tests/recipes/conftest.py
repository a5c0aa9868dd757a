"""A folder of its own for each test of the command line, a finished run, and runs that are built only."""

import contextlib
import re
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from commands import QUIET, succeed
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.loggers.logger import DummyLogger
from torch.utils.tensorboard import SummaryWriter

from lightning_sym.cli.loggers import MetricsCSV


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_SYM_TRACEBACK", raising=False)


@pytest.fixture(scope="session", autouse=True)
def _plain_tags():
    """Check the names of all numbers that any test here logs; of a trial, too, whose logger keeps none of them."""

    def checked(log):
        def log_metrics(self, metrics, *args, **kwargs):
            odd = [name for name in metrics if not re.fullmatch(r"[a-z0-9_./-]+", name)]
            assert not odd, f"{odd} are logged; put names together by lightning_sym._tags.tag"
            return log(self, metrics, *args, **kwargs)

        return log_metrics

    def plot(self, tag, *args, **kwargs):
        assert re.fullmatch(r"[a-z0-9_./-]+", tag), f"{tag} is logged"
        return scalar(self, tag, *args, **kwargs)

    scalar = SummaryWriter.add_scalar
    with pytest.MonkeyPatch.context() as patch:
        for logger in (MetricsCSV, DummyLogger):
            patch.setattr(logger, "log_metrics", checked(logger.log_metrics))
        patch.setattr(SummaryWriter, "add_scalar", plot)
        yield


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a digits zoo with three members after two epochs; not to be written into."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    with contextlib.chdir(folder.parent):
        result = succeed(
            *("fit", "--config", "zoo/digits_mlp", "--run_dir", folder),
            *("--model.members=3", "--trainer.max_epochs=2", *QUIET),
        )
    (folder / "terminal.txt").write_text(result.out)
    return folder


@dataclass
class Built:
    """What the last command built; nothing is run."""

    trainer: Trainer | None = None
    model: Any = None
    data: Any = None


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """Keep commands from running, and hold what they built."""
    seen = Built()

    def keep(
        trainer: Trainer, model: LightningModule, datamodule: LightningDataModule | None = None, **_: object
    ) -> None:
        seen.trainer, seen.model, seen.data = trainer, model, datamodule

    monkeypatch.setattr("lightning_sym.cli.lightning.make", lambda *_: None)  # what a recipe requires
    for command in ("fit", "validate", "test", "predict"):
        # With the signature of the real one, from which the command line takes its options.
        real = getattr(Trainer, command)
        monkeypatch.setattr(Trainer, command, wraps(real)(lambda *args, **kwargs: keep(*args, **kwargs)))
    return seen
