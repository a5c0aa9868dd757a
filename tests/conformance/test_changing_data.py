"""Data that change between products with the Hessian, and networks that draw in eval mode, are found in every entry."""

import warnings

import pytest
import torch
from fits import Given, fit
from helpers import assert_refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sym.callbacks import CurvatureMonitor, LearningCoefficient, SpectrumReport
from lightning_sym.connectivity import Curve, curve_geometry
from lightning_sym.curvature import sharpness_modulo_symmetry
from lightning_sym.landscape import weight_vector
from lightning_sym.networks import Network
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import ZooTask


class Small(Network):
    """A network, perhaps with dropout that eval mode does not turn off."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 3))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return F.dropout(outputs, 0.5, training=True) if self.noise else outputs


class Augmented(Dataset):
    """Images with noise on them."""

    def __init__(self, pairs: TensorDataset) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int):
        image, label = self.pairs[index]
        return image + 0.1 * torch.randn_like(image), label


class Changing(Given):
    """A datamodule that says that its data are fixed, and they are not."""

    def __init__(self, how: str) -> None:
        source = torch.Generator().manual_seed(0)
        images, labels = torch.randn(24, 1, 3, 3, generator=source), torch.randint(3, (24,), generator=source)
        super().__init__(images, labels, classes=3, size=8)
        self.how = how

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*(tensor[None] for tensor in self.pairs.tensors)))  # one row per member

    def curvature_dataloader(self) -> DataLoader:
        data = Augmented(self.pairs) if self.how == "augmented" else self.pairs
        return DataLoader(data, 8, shuffle=self.how == "shuffled")


def callback(kind, **settings):
    def enter(how: str) -> None:
        fit(ZooTask(Small(how == "dropout"), members=1, keep="last"), Changing(how), kind(**settings))

    return enter


def geometry(how: str) -> None:
    curve = Curve(torch.stack([weight_vector(Small().fresh(seed)) for seed in range(3)]).double())
    curve_geometry(curve, Small(how == "dropout"), Changing(how), points=2, max_parameters=0)


def sharpness(how: str) -> None:
    symmetry = trace_symmetry(Small(), torch.zeros(2, 1, 3, 3))
    sharpness_modulo_symmetry(symmetry, Small(how == "dropout"), Changing(how), F.cross_entropy, probes=2)


ENTRIES = {
    "monitor": callback(CurvatureMonitor, probes=2),
    "report": callback(SpectrumReport, steps=2, probes=1, trace_probes=2),
    "learning coefficient": callback(LearningCoefficient, chains=3, steps=8),
    "geometry": geometry,
    "sharpness": sharpness,
}


@pytest.mark.parametrize("how", ["shuffled", "augmented", "dropout"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.few(5, "monitor-dropout", "learning coefficient-dropout", "geometry-shuffled", "geometry-dropout")
def test_what_changes_is_found(tmp_path, monkeypatch, entry, how):
    monkeypatch.chdir(tmp_path)
    says = (
        "the outputs of the network change from run to run"
        if how == "dropout"
        else ["changed between two passes", "shuffling", "augmentation"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_refused(ENTRIES[entry], how, says=says)
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.few(5, "report", "learning coefficient")
def test_what_does_not_change_is_measured(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ENTRIES[entry]("not at all")
