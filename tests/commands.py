"""The command line, called in this process, for the tests of recipes and of what the documentation says."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import torch

from lightning_sym.cli import main
from lightning_sym.networks import MultiLayerPerceptron

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
# A small task on small data, given on the command line alone.
SMALL = (
    *("--model=lightning_sym.tasks.ZooTask", "--model.members=2"),
    *("--model.network=MultiLayerPerceptron", "--model.network.widths=[8]"),
    *("--data=DigitsDataModule", "--data.max_samples=64"),
)

# The options that name a small network, the network, and inputs of it.
MLP = (
    *("--network=MultiLayerPerceptron", "--network.widths=[12,12]"),
    *("--network.in_channels=1", "--network.image_size=8"),
)
X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def perceptron(seed: int = 0) -> MultiLayerPerceptron:
    """Return the network of the options ``MLP``, with weights of a seed."""
    torch.manual_seed(seed)
    return MultiLayerPerceptron(widths=(12, 12), in_channels=1, image_size=8).eval()


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


def succeed(*args: object) -> Result:
    """Run a command that must end well."""
    result = call(*args)
    assert result.status == 0, result.err
    return result
