"""A folder of its own for each test of the command line, a finished run, and runs that are built only."""

import contextlib
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from commands import QUIET, succeed
from pytorch_lightning import LightningDataModule, LightningModule, Trainer


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_SYM_TRACEBACK", raising=False)


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
