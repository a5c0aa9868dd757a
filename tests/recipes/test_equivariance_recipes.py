"""The recipes that learn equivariances: sizes, settings and data of the paper, and a short run of each."""

import math

import pytest
import torch
from commands import QUIET, succeed
from helpers import one_in

from lightning_sym.callbacks import MarginalLikelihood
from lightning_sym.datamodules import CIFAR10DataModule, LabelledImages, MNISTDataModule
from lightning_sym.datamodules._downloaded import DownloadedDataModule
from lightning_sym.recipes import recipe_names, recipe_path

pytestmark = pytest.mark.long

NAMES = [name for name in recipe_names() if name.startswith("equivariance/")]
PAPERS = [name for name in NAMES if not name.startswith(("equivariance/digits_", "equivariance/mnist5k_"))]
P4 = "equivariance/rotated_cifar10_p4"

# Numbers of parameters: docs/theory/relaxed_layers.md, 3.
COUNTS = {
    "cifar10_fc": 133_635_690,
    "cifar10_conv": 338_770,
    "cifar10_fc_conv": 133_865_010,
    "cifar10_ffc": 1_542_625,
    "cifar10_ffc_conv": 1_771_945,
    "cifar10_sfc": 831_820,
    "cifar10_sconv": 237_050,
    "cifar10_sfc_sconv": 959_420,
    "cifar10_sfc_lengthscales": 831_820 + 8 * 2,  # two length scales in each of eight blocks
    "cifar10_sconv_lengthscales": 237_050 + 8,
    "cifar10_sfc_sconv_lengthscales": 959_420 + 8 * 3,
    "mnist_digit": 1_730_805,
    "mnist_quadrant": 1_750_035,
    "mnist_multigroup": 1_105_843,
    "translated_mnist_multigroup": 1_105_843,
    "rotated_mnist_multigroup": 1_105_843,
    "cifar10_multigroup": 1_237_527,
    "rotated_cifar10_multigroup": 1_237_527,
    "rotated_cifar10_p4": 1_025_380,
}


@pytest.fixture
def noise(monkeypatch):
    """Noise in place of the images of CIFAR-10 and MNIST, fifty or sixty to train on."""

    def load(self):
        generator = torch.Generator().manual_seed(0)

        def labelled(count):
            images = torch.randint(256, (count, *self.source_shape), generator=generator, dtype=torch.uint8)
            return LabelledImages(images, torch.arange(count) % 10)

        return labelled(60 if isinstance(self, MNISTDataModule) else 50), labelled(10)

    monkeypatch.setattr(DownloadedDataModule, "prepare_data", lambda self: None)
    monkeypatch.setattr(DownloadedDataModule, "load", load)
    for kind in (CIFAR10DataModule, MNISTDataModule):
        monkeypatch.setattr(kind, "source_sizes", None)


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_sizes_schedule_and_data_fit_each_other_and_one_override_is_map(name, built):
    with torch.device("meta"):  # sizes without memory
        succeed("fit", "--config", name, "--trainer.callbacks.burn_in=null", *QUIET)
        logits = built.model.network(torch.zeros(2, *built.data.input_shape))
        scheduler = built.model.lr_scheduler(built.model.optimizer([torch.nn.Parameter(torch.zeros(1))]))
    assert logits.shape == (2, built.data.num_classes)
    images = round(built.data.source_sizes[0] * (1 - built.data.hparams.val_fraction))
    steps = images // built.data.hparams.batch_size if built.model.lr_scheduler_interval == "step" else 1
    assert scheduler.T_max == built.trainer.max_epochs * steps
    (learner,) = (one for one in built.trainer.callbacks if isinstance(one, MarginalLikelihood))
    assert learner.burn_in is None
    assert ("--trainer.callbacks.burn_in=null" in recipe_path(name).read_text()) == (name != P4)  # which is MAP anyway
    if name in PAPERS:
        assert parameters(built.model.network) == COUNTS[name.removeprefix("equivariance/")]
        assert images == 50_000
        assert built.data.input_shape[1:] == (32, 32)
        assert learner.samples is None  # exact
        for transform in built.data.transforms:
            seeds = [getattr(transform, f"{split}_seed", None) for split in ("train", "test")]
            assert seeds == {"Quadrant": [1001, 1000], "Resized": [None, None]}.get(type(transform).__name__, [1, 0])


@pytest.mark.filterwarnings("ignore:.*never occur in the training data")
@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("name", one_in(4, PAPERS))
def test_recipes_of_the_paper_run(name, monkeypatch):
    learners = []
    update = MarginalLikelihood.on_train_epoch_end

    def updated(self, *args):
        update(self, *args)
        learners.append(self)

    monkeypatch.setattr(MarginalLikelihood, "on_train_epoch_end", updated)
    succeed(
        *("fit", "--config", name, *QUIET, "--trainer.fast_dev_run=true", "--model.network.width=1"),
        *("--data.batch_size=10", "--data.transforms+=Resized", "--data.transforms.size=8"),
        *("--trainer.callbacks.burn_in=1", "--trainer.callbacks.every_n_epochs=1"),
    )
    (learner,) = learners
    record = learner.records[0]  # of the one curvature pass
    assert record["epoch"] == 1
    assert record["samples"] == 50
    assert math.isfinite(record["log_marginal_likelihood"])
    assert len({path["precision"] for path in record["paths"].values()}) > 1  # all were 1
    assert all(0 <= path["normalised"] <= 1 for path in record["paths"].values())
