"""SimilarityMonitor: what it measures; test_training_monitors.py has what all monitors share."""

import json

import fits
import numpy as np
import pytest
import torch
from experiments import Validated
from fits import Poison
from helpers import Program, assert_refused, dead_charts, of, read_csv, read_rows, write_zoo
from matplotlib.image import imread
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sym.callbacks import SimilarityMonitor
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.similarity_monitor import SimilarityMeter
from lightning_sym.similarity import CKA, GroupProcrustes, features_of
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import ZooTask

ROUNDING = 1e-4  # of a distance, the root of a difference of float32
SITES = ["activation1", "activation2"]


def plain(network: nn.Module | None = None) -> Validated:
    torch.manual_seed(1)
    return Validated(sequential() if network is None else network, lr=0.5)


def sequential() -> nn.Sequential:
    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6), nn.Tanh()
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(6, 10))


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(8, 6), image_size=8)


def zoo(**changes) -> ZooTask:
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    return ZooTask(**{"network": perceptron(), "members": 3, "optimizer": adam, "keep": "last", **changes})


def digits(**changes):
    return fits.digits(**{"val_fraction": 0.3, **changes})


def fit(path, task, *callbacks, data=None, **changes):
    return fits.fit(task, digits() if data is None else data, *callbacks, folder=path, **{"max_epochs": 2, **changes})


def rows(path, **wanted):
    found = read_rows(path / "results" / "similarity")
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def validation_images(count=200):
    data = digits()
    return data.normalize(data.split_tensors("val").images[:count])


# ---- what is measured


def test_values_are_those_of_the_metrics(tmp_path):
    """The last point, from the trained and the initial members and a reference, one pair at a time."""
    reference = perceptron().fresh(77)
    monitor = SimilarityMonitor(["group", "cka_linear"], reference=reference)
    task, logger = zoo(), MetricsCSV(tmp_path)
    fit(tmp_path, task, monitor, logger=logger)
    now, starts = {}, {number: perceptron().fresh(number) for number in task.numbers}
    for number in task.numbers:
        now[number] = perceptron()
        now[number].load_state_dict(task.population.member_state(number))
    symmetry = trace_symmetry(reference, torch.zeros(2, 1, 8, 8))
    metrics = {"group": lambda site: GroupProcrustes.at(symmetry, site), "cka_linear": lambda _: CKA("linear")}
    compared = {
        "start": [(now[n], starts[n]) for n in now],
        "reference": [(now[n], reference) for n in now],
        "members": [(now[a], now[b]) for a, b in ((0, 1), (0, 2), (1, 2))],
    }
    last = read_csv(tmp_path / "metrics.csv")[-1]
    assert dead_charts(SimilarityMonitor().charts, last) == []
    for name, pairs in compared.items():
        for measure, make in metrics.items():
            for site in SITES:
                expected = []
                for pair in pairs:
                    metric = make(site)
                    metric.update(*(features_of(network, [site], validation_images())[site] for network in pair))
                    expected.append(float(metric.compute()))
                found = rows(tmp_path, **{"with": name, "measure": measure, "site": site, "epoch": 2.0})
                assert [row["similarity"] for row in found] == pytest.approx(expected, abs=1e-6)
                mean = pytest.approx(np.mean(expected), abs=1e-6)
                assert float(last[f"details/similarity/{name}/{measure}/{site}"]) == mean


def test_a_network_begins_as_its_start_and_moves_away(tmp_path):
    fit(tmp_path, plain(), SimilarityMonitor(every_n_epochs=2), max_epochs=5)
    assert {row["with"] for row in rows(tmp_path)} == {"start"}
    for measure in ("group", "cka_linear"):
        for site in ("3", "6"):  # the activations
            found = rows(tmp_path, measure=measure, site=site)
            assert [row["epoch"] for row in found] == [0, 2, 4, 5]
            assert found[0]["similarity"] == pytest.approx(1, abs=ROUNDING)
            assert found[-1]["similarity"] < 0.99


def test_members_on_one_orbit_are_the_same(tmp_path):
    network = perceptron()
    symmetry = trace_symmetry(network, torch.zeros(2, 1, 8, 8))
    meter = SimilarityMeter(network, validation_images())
    states = {0: network.state_dict(), 1: symmetry.act(symmetry.sample(), network).state_dict()}
    values = meter.values(states, states)["members"]
    assert values.shape == (1, 2, 2)
    assert values[0, 0].tolist() == pytest.approx([1, 1], abs=ROUNDING)  # group; linear CKA sees scales
    assert float(values[0, 1].max()) < 0.999


@pytest.mark.drawn
def test_diverged_members_are_left_out(tmp_path):
    with pytest.warns(UserWarning, match="Member 1 was stopped"):
        fit(tmp_path, zoo(), SimilarityMonitor(), Poison(1, 3), logger=(logger := MetricsCSV(tmp_path)))
    del logger
    last = rows(tmp_path, epoch=2.0, site="activation1", measure="group")
    known = {(row["with"], row["first"], row["second"]): row["similarity"] is not None for row in last}
    assert known == {
        **{("start", number, None): number != 1 for number in range(3)},
        **{("members", *pair): 1 not in pair for pair in ((0, 1), (0, 2), (1, 2))},
    }
    assert read_csv(tmp_path / "metrics.csv")[-1]["details/similarity/members/group/activation1"]


def branching() -> nn.Module:
    return Program(lambda net, x: net.act(net.linear(x.flatten(1) if x.sum() > 0 else -x.flatten(1))),
                   {"linear": of(nn.Linear, 64, 10), "act": of(nn.ReLU)})  # fmt: skip


def test_a_reference_from_a_zoo_or_a_checkpoint_is_the_network(tmp_path):
    network = perceptron().fresh(5)
    folder = write_zoo(tmp_path / "zoo", [perceptron(), network], digits())
    torch.save({"state_dict": {f"network.{name}": t for name, t in network.state_dict().items()}}, tmp_path / "a.ckpt")
    references = {"module": network, "zoo": str(folder), "checkpoint": str(tmp_path / "a.ckpt")}
    for name, reference in references.items():
        fit(tmp_path / name, plain(perceptron().fresh(3)), SimilarityMonitor(reference=reference, reference_member=1))
    expected = rows(tmp_path / "module", **{"with": "reference"})
    assert len(expected) == 3 * 2 * 2
    assert rows(tmp_path / "zoo", **{"with": "reference"}) == expected
    assert rows(tmp_path / "checkpoint", **{"with": "reference"}) == expected


def test_images_of_a_dataloader_are_the_first_ones(tmp_path):
    """Whatever the batches are."""
    images, labels = digits().split_tensors("val")
    data = TensorDataset(validation_images(len(images)), labels)
    task = plain(perceptron().fresh(3))
    trainer = fits.quiet_trainer(SimilarityMonitor(images=20), folder=tmp_path, max_epochs=1)
    trainer.fit(task, DataLoader(data, 8), DataLoader(data, 3, shuffle=True))
    fit(tmp_path / "datamodule", plain(perceptron().fresh(3)), SimilarityMonitor(images=20), max_epochs=1)
    first, other = (rows(path, epoch=0.0) for path in (tmp_path, tmp_path / "datamodule"))
    assert len(first) == 4
    assert [row["similarity"] for row in first] == pytest.approx([row["similarity"] for row in other], abs=ROUNDING)
    assert json.loads((tmp_path / "results" / "similarity.json").read_text())["images"] == 20


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(1, 8, 8), 0)] * 8)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.flatten(1))))


@pytest.mark.parametrize(
    ("monitor", "task", "data", "error", "says"),
    [
        ({"sites": ["conv"]}, zoo, digits, ValueError, "conv"),
        ({"sites": ["act"], "measures": ["group"]}, lambda: plain(branching()), digits, ValueError,
         "the measure group compares up to the network's own symmetry, and"),
        ({}, lambda: plain(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), digits, ValueError, "name the sites"),
        ({}, lambda: plain(Functional()), digits, ValueError, "modules such as 'first', 'second'"),
        ({"reference": "nowhere"}, zoo, digits, FileNotFoundError, "There is no reference nowhere; expected a zoo's"),
        ({"reference": MultiLayerPerceptron(widths=(4,), image_size=8)}, zoo, digits, ValueError,
         "the reference has 1 sites, activation1, and there are 2"),
        ({}, zoo, lambda: digits(val_fraction=0.0), ValueError, "compares networks on validation data"),
        ({}, plain, lambda: DataLoader(Endless(), 4), ValueError, "validation data, but there are none"),
    ],
)  # fmt: skip
def test_errors_before_training(tmp_path, monitor, task, data, error, says):
    assert_refused(lambda: fit(tmp_path, task(), SimilarityMonitor(**monitor), data=data()), says=says, error=error)


def test_validation_data_that_cannot_be_indexed_are_refused(tmp_path):
    trainer = fits.quiet_trainer(SimilarityMonitor(), folder=tmp_path, num_sanity_val_steps=0)
    loaders = DataLoader(Endless(), 4), DataLoader(Endless(), 4)
    says = "with an indexable dataset, but the validation data are a DataLoader"
    assert_refused(lambda: trainer.fit(plain(), *loaders), says=says, error=TypeError)


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    torch.save({"state_dict": {"network.0.weight": torch.zeros(3)}}, tmp_path / "a.ckpt")
    monitor = SimilarityMonitor(reference=str(tmp_path / "a.ckpt"))
    assert_refused(lambda: fit(tmp_path, plain(), monitor), says=["a.ckpt do not fit Sequential", "Missing key"])


# ---- what is left behind


@pytest.mark.drawn
def test_files_and_figure(tmp_path):
    fit(tmp_path, zoo(), SimilarityMonitor({"mine": {"measure": "cka_max"}}, prefix="watched"))
    about = json.loads((tmp_path / "results" / "watched.json").read_text())
    assert about["measures"] == {"mine": {"measure": "cka_max"}}
    assert len(read_csv(tmp_path / "results" / "watched.csv")) == 3 * 2 * (3 + 3)
    assert float(imread(tmp_path / "results" / "watched.png")[..., :3].std()) > 0.05
