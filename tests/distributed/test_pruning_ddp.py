"""Two processes prune what one prunes, to the end and with twins, also where one of the runs was interrupted."""

import functools

import pytest
import torch
from fits import Interrupt, descended, digits, saving
from helpers import read_rows, write_zoo

from lightning_sym.callbacks import PruningReport
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import RashomonPruning

pytestmark = [
    pytest.mark.long,
    pytest.mark.ddp,
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
]
# Adam's first steps are the signs of gradients, which rounding decides where they are 0.
SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def trained(number):
    """Return a network after 30 steps on all digits, so that not all units can go for nothing."""
    network = MultiLayerPerceptron(widths=(10,), image_size=8).fresh(number)
    return descended(network, digits(max_samples=81), steps=30, lr=0.02)


def scenarios(run, trained_zoo):
    def fit(name, *callbacks, processes=2, **settings):
        task = RashomonPruning(str(trained_zoo), epsilon=[0.05, 0.5], steps=4, fraction=0.3, tries=2, optimizer=SGD)
        data = digits(batch_size=24 // processes, max_samples=81)
        middle = saving(run.folder / name, "middle", every_n_train_steps=1)
        report = PruningReport(run.folder / name / "results")
        settings |= {"processes": processes, "max_epochs": 400, "limit_val_batches": 0}
        run.fit(name, task, data, *callbacks, report, middle, **settings)

    fit("2")
    fit("part", Interrupt("3 1"), fails="RuntimeError: interrupted")
    fit("resumed", ckpt_path=run.folder / "part" / "middle.ckpt")
    fit("1", processes=1)


@pytest.fixture(scope="module")
def trained_zoo(tmp_path_factory):
    return write_zoo(tmp_path_factory.mktemp("pruning") / "zoo", [trained(0)], digits(max_samples=81))


@pytest.mark.parametrize("name", ["2", "resumed"])
@pytest.mark.parametrize("table", ["summary", "steps", "magnitude", "widths"])
def test_tables_are_those_of_one_process(name, table, runs):
    one, other = (read_rows(runs / folder / "results" / table) for folder in ("1", name))
    assert len(one) == len(other) > 1
    for expected, found in zip(one, other, strict=True):
        # Sums in float32 in another order, through some dozens of steps of SGD; what was removed is the same.
        assert found == {
            key: pytest.approx(value, abs=2e-4, rel=2e-3) if isinstance(value, float) else value
            for key, value in expected.items()
        }


def test_units_were_removed_after_walks_and_twins_followed(runs):
    steps, summary = (read_rows(runs / "1" / "results" / table) for table in ("steps", "summary"))
    assert any(row["walked"] and row["removed"] for row in steps)
    assert all(row["units"] < 10 and row["magnitude_loss"] is not None and row["finished"] for row in summary)
