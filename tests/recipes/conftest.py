"""The command line, called in this process, from a folder of its own."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import LightningDataModule, LightningModule, Trainer

from lightning_sym.cli import main

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@dataclass
class Result:
    """What a command returned and printed."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what was wrong."""
        first, *others = self.err.splitlines()
        assert first.startswith("lightning-sym: error: ")
        # What follows is the usage (status 2) or how to see the traceback (status 1), and nothing else.
        assert len(others) == 1, self.err
        assert others[0].startswith({1: "(LIGHTNING_SYM_TRACEBACK", 2: "usage: "}[self.status])
        return first.removeprefix("lightning-sym: error: ")


def call(*args: object) -> Result:
    """Run a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(arg) for arg in args])
    return Result(status, out.getvalue(), err.getvalue())


@pytest.fixture(name="call")
def _call() -> Callable[..., Result]:
    return call


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_SYM_TRACEBACK", raising=False)


@pytest.fixture
def quiet() -> list[str]:
    return QUIET


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run folder of a digits zoo with three members after two epochs; not to be written into."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    back = Path.cwd()
    os.chdir(folder.parent)
    try:
        result = call(
            *("fit", "--config", "zoo/digits_mlp", "--run_dir", folder),
            *("--model.members=3", "--trainer.max_epochs=2", *QUIET),
        )
    finally:
        os.chdir(back)
    assert result.status == 0, result.err
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
