"""Training under a Gaussian prior: its term, its gradient, its implicit step."""

import functools
import math

import pytest
import torch
from pytorch_lightning import LightningDataModule, Trainer
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sym.curvature import EmptyLoaderError
from lightning_sym.datamodules import DigitsDataModule, Quadrant
from lightning_sym.networks import MultiLayerPerceptron, Network, RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Line(Network):
    """One linear map."""

    def __init__(self, inputs: int = 3, num_classes: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, num_classes)

    def forward(self, x):
        return self.linear(x)


class Given(LightningDataModule):
    """Tensors as data; all of them are a batch."""

    def __init__(self, x, y, classes=None, repeats=1):
        super().__init__()
        self.pairs = TensorDataset(x, y)
        self.repeats = repeats
        if classes:
            self.num_classes = classes

    def train_dataloader(self):
        return DataLoader(ConcatDataset([self.pairs] * self.repeats), len(self.pairs))

    def curvature_dataloader(self):
        return DataLoader(self.pairs, 7)

    def test_dataloader(self):
        return DataLoader(self.pairs, 5)


def trainer(folder, epochs=1, **settings):
    return Trainer(
        **{
            "accelerator": "cpu", "max_epochs": epochs, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder, **settings,
        }
    )  # fmt: skip


def sgd(lr=0.1, **settings):
    return functools.partial(torch.optim.SGD, lr=lr, **settings)


def problem(likelihood, samples=20):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, generator=generator)
    if likelihood == "classification":
        return x, (x[:, 0] > 0).long()
    return x, torch.randn(samples, 2, generator=generator)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_prior_is_the_negative_log_joint_over_n(likelihood):
    """The training loss of all data, times N (and over 2 sigma^2), is the negative log joint up to a constant."""
    x, y = problem(likelihood)
    network = Line().double()
    task = EquivarianceTask(network, likelihood, noise=0.7, temperature=1.5, prior_step="gradient")
    task.samples = len(x)
    task.set_prior({"linear.weight": math.log(3.0), "linear.bias": math.log(5.0)}, math.log(0.7))
    noise = 0.7
    weight, bias = network.linear.weight, network.linear.bias
    scatter = (3 * weight.square().sum() + 5 * bias.square().sum()) / 2
    outputs = network(x.double())
    if likelihood == "classification":
        fit, factor = nn.functional.cross_entropy(outputs, y, reduction="sum"), len(x)
    else:
        fit, factor = (outputs - y).square().sum() / (2 * noise**2), len(x) / (2 * noise**2)
    joint = fit / 1.5 + scatter  # tempered
    loss = task._loss((x.double(), y), task.train_metrics) + task.prior_term()
    torch.testing.assert_close(factor * loss / 1.5, joint, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(factor * loss / 1.5, [weight, bias], retain_graph=True)
    for mine, exact in zip(found, torch.autograd.grad(joint, [weight, bias]), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


def test_positions_and_lengthscales_have_no_prior():
    network = RelaxedNetwork(["sconv"], width=1, grid=8, in_channels=1, learn_positions=True, learn_lengthscale=True)
    named = set(EquivarianceTask(network).log_precisions)
    left = {name for name, _ in network.named_parameters()} - named
    assert named
    assert left == {name for name, _ in network.named_parameters() if "positions" in name or "omega" in name}
    assert left


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_implicit_step_has_the_same_solution(tmp_path, likelihood, momentum):
    """At the end of either training, the gradient of the negative log joint is 0, with momentum too."""
    x, y = problem(likelihood)
    found = []
    for step in ("implicit", "gradient"):
        torch.manual_seed(0)
        task = EquivarianceTask(
            Line(), likelihood, precision=4.0, noise=0.8, prior_step=step, optimizer=sgd(momentum=momentum)
        )
        trainer(tmp_path, 4).fit(task, Given(x, y, classes=2, repeats=150))
        network = task.network
        gradient = torch.autograd.grad(
            task._loss((x, y), task.train_metrics) + task.prior_term(), list(network.parameters())
        )
        assert max(float(g.abs().max()) for g in gradient) < 1e-4
        found.append(network.linear.weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
    assert found[0].abs().max() > 0.05


def test_the_implicit_step_is_stable_for_every_precision(tmp_path):
    x, y = problem("classification")
    norms = {}
    for step in ("implicit", "gradient"):
        task = EquivarianceTask(Line(), precision=1e9, prior_step=step, optimizer=sgd(0.05, momentum=0.9))
        trainer(tmp_path, 20).fit(task, Given(x, y, classes=2))
        norms[step] = float(task.network.linear.weight.detach().norm())
    assert norms["implicit"] < 1e-6
    assert not norms["gradient"] < 1  # infinite or NaN: what the implicit step is for
    task = EquivarianceTask(Line(), precision=1e9)  # Adam bounds its steps by itself
    trainer(tmp_path, 20).fit(task, Given(x, y, classes=2))
    assert task.network.linear.weight.isfinite().all()


def test_auto_is_implicit_for_sgd_only():
    assert EquivarianceTask(Line(), optimizer=sgd()).implicit
    assert not EquivarianceTask(Line()).implicit
    assert not EquivarianceTask(Line(), optimizer=sgd(), prior_step="gradient").implicit


def test_accuracy_and_loss_are_those_of_the_split(tmp_path):
    data = DigitsDataModule(batch_size=20, max_samples=61, transforms=[Quadrant("digit")])
    task = EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1))
    run = trainer(tmp_path)
    run.fit(task, data)
    assert task.samples == 61
    (tested,) = run.test(task, data, verbose=False)
    images, labels = data.split_tensors("test")
    with torch.no_grad():
        outputs = task.network(data.normalize(images))
    assert tested["test/accuracy"] == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
    assert tested["test/loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), rel=1e-5)
    found = task.evaluate(data.test_dataloader())
    assert found["accuracy"] == pytest.approx(tested["test/accuracy"])
    predicted = torch.cat(run.predict(task, data))
    torch.testing.assert_close(predicted, outputs.softmax(1))


def test_regression_sums_over_outputs(tmp_path):
    x, y = problem("regression")
    task = EquivarianceTask(Line(), "regression")
    run = trainer(tmp_path)
    run.fit(task, Given(x, y))
    (tested,) = run.test(task, Given(x, y), verbose=False)
    error = (task.network(x).detach() - y).square().sum(1).mean()
    assert tested == {"test/loss": pytest.approx(float(error), rel=1e-6)}
    assert "train/accuracy" not in run.callback_metrics


def test_a_checkpoint_holds_the_prior(tmp_path):
    x, y = problem("regression")
    task = EquivarianceTask(Line(), "regression")
    run = trainer(tmp_path)
    run.fit(task, Given(x, y))
    task.set_prior({"linear.weight": 1 / 3, "linear.bias": -2.0}, 0.1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = EquivarianceTask.load_from_checkpoint(tmp_path / "a.ckpt", network=Line(), weights_only=True)
    assert again.log_precisions == {"linear.weight": 1 / 3, "linear.bias": -2.0}
    assert again.log_noise == 0.1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": 0.0}, "precision must be a finite number > 0"),
        ({"noise": -1.0}, "noise must be a finite number > 0"),
        ({"temperature": math.inf}, "temperature must be a finite number > 0"),
        ({"likelihood": "poisson"}, "likelihood"),
        ({"prior_step": "exact"}, "prior_step"),
        ({"prior_step": "implicit"}, r"implicit is for torch.optim.SGD, got Adam"),
        ({"optimizer": torch.optim.AdamW}, "AdamW decays weights"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        EquivarianceTask(Line(), **settings)


def test_what_the_data_must_be(tmp_path):
    x, y = problem("classification")
    with pytest.raises(ValueError, match="counted when a fit starts"):
        EquivarianceTask(Line()).prior_term()
    with pytest.raises(ValueError, match="needs a datamodule with curvature_dataloader"):
        trainer(tmp_path).fit(EquivarianceTask(Line()), DataLoader(TensorDataset(x, y), 5))
    with pytest.raises(ValueError, match=r"Regression targets must have the shape of the outputs, \[20, 2\]"):
        trainer(tmp_path).fit(EquivarianceTask(Line(), "regression"), Given(x, torch.randn(20, 1)))
    with pytest.warns(UserWarning, match=r"1 of 3 classes never occur in the training data \(2\)"):
        trainer(tmp_path).fit(EquivarianceTask(Line(num_classes=3)), Given(x, y, classes=3))

    class Empty(Given):
        def curvature_dataloader(self):
            return []

    with pytest.raises(EmptyLoaderError, match="There are no training data"):
        trainer(tmp_path).fit(EquivarianceTask(Line()), Empty(x, y))


def test_other_parameters_are_refused():
    task = EquivarianceTask(MultiLayerPerceptron(widths=(3,), image_size=8))
    with pytest.raises(ValueError, match="not those of this network"):
        task.set_prior({"linear.weight": 0.0})
