"""Training under a Gaussian prior: its strength, its gradient, its implicit step."""

import functools
import math

import pytest
import torch
from fits import Given, digits, fit, quiet_trainer
from helpers import assert_refused, one_in, refused
from pytorch_lightning import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_sym.curvature import EmptyLoaderError
from lightning_sym.curvature.prior import shrink
from lightning_sym.datamodules import Quadrant
from lightning_sym.networks import Network, RelaxedNetwork
from lightning_sym.tasks import EquivarianceTask


class Line(Network):
    """One linear map."""

    def __init__(self, inputs=3, num_classes=2):
        super().__init__()
        self.linear = nn.Linear(inputs, num_classes)

    def forward(self, x):
        return self.linear(x)


def sgd(lr=0.1, **settings):
    return functools.partial(torch.optim.SGD, lr=lr, **settings)


def adam(lr=0.01, **settings):
    return functools.partial(torch.optim.Adam, lr=lr, **settings)


def problem(likelihood="classification", samples=20):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, generator=generator)
    if likelihood == "classification":
        return x, (x[:, 0] > 0).long()
    return x, torch.randn(samples, 2, generator=generator)


def given(likelihood="classification", samples=20, **settings):
    return Given(*problem(likelihood, samples), 2, **settings)


def ones(task):
    """Set all weights of a :class:`Line` to 1, and return the task."""
    task.network.linear.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    return task


def weight_of(task):
    return task.network.linear.weight.detach()


def gradients(task, x, y):
    """Return the gradient of loss and prior together, however the prior acts in training."""
    loss = task._loss((x, y), task.train_metrics)
    strengths = task.prior.strengths()
    parameters = list(task.network.parameters())
    return [
        gradient + strengths[parameter] * parameter.detach()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)
    ]


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_loss_and_prior_are_the_negative_log_joint_over_n(likelihood):
    """For all data, times N (and over 2 sigma^2), their gradient is that of the tempered negative log joint."""
    x, y = problem(likelihood)
    network = Line().double()
    task = EquivarianceTask(network, likelihood, noise=0.7, temperature=1.5, prior_step="gradient")
    task.prior.samples = len(x)
    noise = 0.7 if likelihood == "regression" else 1.0
    precisions = {"linear.weight": math.log(3.0), "linear.bias": math.log(5.0)}
    task.prior.members[None].set(precisions, math.log(noise))
    weight, bias = network.parameters()
    outputs = network(x.double())
    if likelihood == "classification":
        misfit, factor = F.cross_entropy(outputs, y, reduction="sum"), len(x)
    else:
        misfit, factor = (outputs - y).square().sum() / (2 * noise**2), len(x) / (2 * noise**2)
    joint = misfit / 1.5 + (3 * weight.square().sum() + 5 * bias.square().sum()) / 2
    task.training_step((x.double(), y), 0).backward()
    task.on_before_optimizer_step(None)
    for parameter, exact in zip((weight, bias), torch.autograd.grad(joint, (weight, bias)), strict=True):
        torch.testing.assert_close(factor * parameter.grad / 1.5, exact, rtol=1e-12, atol=1e-12)
    assert_refused(task.prior.members[None].set, {"linear.weight": 0.0}, says="not those of this network")


def test_positions_and_lengthscales_have_no_prior():
    network = RelaxedNetwork(["sconv"], width=1, grid=8, in_channels=1, learn_positions=True, learn_lengthscale=True)
    named = set(EquivarianceTask(network).prior.log_precisions)
    left = {name for name, _ in network.named_parameters()} - named
    assert named
    assert left == {name for name, _ in network.named_parameters() if "positions" in name or "omega" in name}
    assert left


@pytest.mark.parametrize(
    ("likelihood", "momentum"),
    one_in(3, [("classification", 0.0), ("regression", 0.0), ("classification", 0.9), ("regression", 0.9)]),
)
@pytest.mark.few(2)
def test_the_implicit_step_has_the_same_solution(tmp_path, likelihood, momentum):
    """At the end of either training, the gradient of the negative log joint is 0, with momentum too."""
    found = []
    for step in ("implicit", "gradient"):
        torch.manual_seed(0)
        settings = {"precision": 4.0, "noise": 0.8, "prior_step": step, "optimizer": sgd(momentum=momentum)}
        task = EquivarianceTask(Line(), likelihood, **settings)
        fit(task, given(likelihood, repeats=150), folder=tmp_path, max_epochs=4)
        assert max(float(gradient.abs().max()) for gradient in gradients(task, *problem(likelihood))) < 1e-4
        found.append(weight_of(task))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert found[0].abs().max() > 0.05


ADAMS = {
    "adam": adam(0.02, foreach=False),
    "foreach": adam(0.02, foreach=True),
    "fused": adam(0.02, fused=True),
    "amsgrad": adam(0.02, amsgrad=True, betas=(0.9, 0.99)),
    "adamw": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.02), weight_decay=0.0, foreach=False),
}


@pytest.mark.parametrize("name", one_in(3, ADAMS))
@pytest.mark.few(2)
def test_adam_with_implicit_steps_solves_ridge_regression(name):
    x, y = (tensor.double() for tensor in problem("regression"))
    task = EquivarianceTask(Line().double(), "regression", precision=4.0, noise=0.8, optimizer=ADAMS[name])
    assert task.prior.implicit
    optimizer = task.configure_optimizers()
    task.prior.start([optimizer], Given(x, y))
    for step in range(2000):  # the learning rate goes to 0, without which Adam never rests
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0 + 0.02 * (1 - step / 2000) ** 2
        optimizer.zero_grad()
        task.training_step((x, y), 0).backward()
        optimizer.step()
    inputs = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()  # the bias has the same prior
    exact = torch.linalg.solve(inputs.T @ inputs + 0.8**2 * 4 * torch.eye(4).double(), inputs.T @ y).T
    found = torch.cat([task.network.linear.weight, task.network.linear.bias[:, None]], dim=1).detach()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)
    assert exact.abs().max() > 0.05


@pytest.mark.parametrize("name", ADAMS)
def test_the_implicit_step_of_adam_is_its_formula(name):
    """After two steps with different gradients, against torch's definition written out."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = ADAMS[name]([weight])
    alone = nn.Parameter(weight.detach().clone())
    other = ADAMS[name]([alone])
    second, eps = optimizer.defaults["betas"][1], optimizer.defaults["eps"]
    moment = largest = torch.zeros(3)
    for step, gradient in enumerate(([4.0, 0.5, -1.0], [0.1, 0.2, 0.3]), start=1):
        g = torch.tensor(gradient)
        weight.grad, alone.grad = g.clone(), g.clone()
        optimizer.step()
        other.step()
        moment = second * moment + (1 - second) * g.square()
        largest = torch.maximum(largest, moment)
        used = largest if optimizer.defaults["amsgrad"] else moment
        shrink(optimizer, {weight: 5.0})
        metric = (used / (1 - second**step)).sqrt() + eps
        expected = alone.detach() / (1 + 0.02 * 5.0 / metric)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=0)
        alone.data.copy_(weight.data)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_skipped_does_not_shrink(kind, fused):
    """As a gradient scaler skips it when a gradient is not finite; fused steps are called nevertheless."""
    task = EquivarianceTask(Line(), precision=100.0, optimizer=functools.partial(kind, lr=0.1, fused=fused))
    optimizer = task.configure_optimizers()
    task.prior.start([optimizer], given(samples=10))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight, bias = task.network.linear.weight, task.network.linear.bias
    for infinite in (True, False):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(weight.sum() + bias.sum()).backward()
        if infinite:
            bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == infinite
    before = weight.detach().clone()  # what gets no gradient stays as it is
    optimizer.zero_grad()
    bias.sum().backward()
    optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("optimizer", [sgd(0.05, momentum=0.9), adam(), adam(fused=True)])
@pytest.mark.parametrize("precision", [1e9, 1e17])
@pytest.mark.few(4)
def test_the_implicit_step_is_stable_for_every_precision(tmp_path, optimizer, precision):
    largest = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, task, *_):
            if trainer.current_epoch > 10:
                values = [float(p.detach().abs().max()) for p in task.network.parameters()]
                assert all(p.isfinite().all() for p in task.network.parameters()) or not task.prior.implicit
                largest[task.prior.implicit] = max(*values, largest.get(task.prior.implicit, 0.0))

    for step in ("implicit", "gradient"):
        task = EquivarianceTask(Line(), precision=precision, prior_step=step, optimizer=optimizer)
        fit(task, given(samples=60, size=20), Watch(), folder=tmp_path, max_epochs=20)
    assert largest[True] < 1e-6
    # What the implicit step is for: SGD explodes, and Adam swings about 0 by its learning rate.
    assert not largest[False] < 0.002


class Subclass(torch.optim.SGD):
    """May do anything."""


def test_auto_is_implicit_where_the_metric_is_known():
    known = (None, torch.optim.SGD, torch.optim.Adam, functools.partial(torch.optim.AdamW, weight_decay=0.0))
    for kind in known:
        assert EquivarianceTask(Line(), optimizer=kind).prior.implicit
        assert not EquivarianceTask(Line(), optimizer=kind, prior_step="gradient").prior.implicit
    for kind in (torch.optim.RMSprop, torch.optim.NAdam, Subclass):
        assert not EquivarianceTask(Line(), optimizer=kind).prior.implicit
        assert_refused(EquivarianceTask, Line(), optimizer=kind, prior_step="implicit", says="implicit is for")


class Own(EquivarianceTask):
    """Makes its optimizer itself."""

    def configure_optimizers(self):
        return self.own(self.network.parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_the_prior_acts_with_the_optimizer_of_a_subclass(tmp_path, kind):
    found = []
    optimizer = functools.partial(kind, lr=0.1)
    for task in (Own(Line(), precision=50.0), EquivarianceTask(Line(), precision=50.0, optimizer=optimizer)):
        task.own = optimizer
        fit(ones(task), given(), folder=tmp_path, max_epochs=20)
        assert task.prior.implicit == (kind is torch.optim.SGD)
        found.append(weight_of(task))
    assert torch.equal(*found)
    assert found[0].abs().max() < 0.5
    task = Own(Line())
    task.own = functools.partial(kind, lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=f"{kind.__name__} decays weights"):
        fit(task, given(), folder=tmp_path)


def test_a_second_fit_takes_the_implicit_step_once(tmp_path):
    x, y = problem()
    task = EquivarianceTask(Line(), precision=50.0, optimizer=sgd())
    for _ in range(2):
        fit(ones(task), given(), folder=tmp_path)
    weight = torch.ones(2, 3, requires_grad=True)
    F.cross_entropy(x @ weight.T + 1, y).backward()
    expected = (weight - 0.1 * weight.grad).detach() / (1 + 0.1 * 50 / 20)
    torch.testing.assert_close(weight_of(task), expected)


@pytest.mark.parametrize("step", ["implicit", "gradient"])
@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adam()])
def test_the_prior_counts_once_where_gradients_accumulate(tmp_path, step, optimizer):
    found = []
    for size, batches in ((40, 1), (20, 2)):
        torch.manual_seed(0)
        task = EquivarianceTask(Line(), precision=20.0, prior_step=step, optimizer=optimizer)
        data = given(samples=40, size=size)
        fit(task, data, folder=tmp_path, max_epochs=10, accumulate_grad_batches=batches)
        found.append(weight_of(task))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_accuracy_and_loss_are_those_of_the_split(tmp_path):
    data = digits(batch_size=20, max_samples=61, transforms=[Quadrant("digit")])
    task = EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1))
    run = fit(task, data, folder=tmp_path)
    assert task.prior.samples == 61
    (tested,) = run.test(task, data, verbose=False)
    images, labels = data.split_tensors("test")
    with torch.no_grad():
        outputs = task.network(data.normalize(images))
    assert tested["test/accuracy"] == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
    assert tested["test/loss"] == pytest.approx(float(F.cross_entropy(outputs, labels)), rel=1e-5)
    assert task.evaluate(data.test_dataloader())["accuracy"] == pytest.approx(tested["test/accuracy"])
    torch.testing.assert_close(torch.cat(run.predict(task, data)), outputs.softmax(1))


def test_a_regression_sums_over_outputs_and_its_checkpoint_holds_the_prior(tmp_path):
    x, y = problem("regression")
    task = EquivarianceTask(Line(), "regression")
    run = fit(task, given("regression"), folder=tmp_path)
    (tested,) = run.test(task, given("regression"), verbose=False)
    error = (task.network(x).detach() - y).square().sum(1).mean()
    assert tested == {"test/loss": pytest.approx(float(error), rel=1e-6)}
    assert "train/accuracy" not in run.callback_metrics
    precisions = {"linear.weight": 1 / 3, "linear.bias": -2.0}
    task.prior.members[None].set(precisions, 0.1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = EquivarianceTask.load_from_checkpoint(tmp_path / "a.ckpt", network=Line(), weights_only=True)
    assert again.prior.log_precisions == precisions
    assert again.prior.log_noise == 0.1
    content = torch.load(tmp_path / "a.ckpt")
    content["state_dict"]["network.linear.bias"][0] = torch.nan
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a\.ckpt has values that are not finite in network\.linear\.bias: training"):
        EquivarianceTask.load_from_checkpoint(tmp_path / "a.ckpt", network=Line(), weights_only=True)


def test_metrics_of_half_an_epoch_are_for_a_resumed_run_alone(tmp_path):
    half = tmp_path / "half.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(half)

    data = given(size=10)
    fit(EquivarianceTask(Line()), data, Save(), folder=tmp_path)
    assert torch.load(half, weights_only=True)["prior"]["train_sums"]["count"] == 10
    loaded = EquivarianceTask.load_from_checkpoint(half, network=Line(), weights_only=True)
    tested = EquivarianceTask(Line())
    quiet_trainer(folder=tmp_path).test(tested, data, ckpt_path=half, verbose=False, weights_only=True)
    for task in (loaded, tested):
        assert task.train_metrics.count == 0
    seen = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, task):
            seen.append(int(task.train_metrics.count))

    fit(EquivarianceTask(Line()), data, Count(), folder=tmp_path, ckpt_path=half)
    assert seen == [20]


make = functools.partial(EquivarianceTask, Line())


class Empty(Given):
    """Has nothing to count."""

    def curvature_dataloader(self):
        return []


@pytest.mark.parametrize(
    "refusal",
    [
        refused(fit, make(), DataLoader(given().pairs, 5), says="needs a datamodule with curvature_dataloader"),
        refused(
            fit, make("regression"), Given(problem()[0], torch.randn(20, 1)), says="the shape of the outputs, [20, 2]"
        ),
        refused(
            fit, make(), Given(problem()[0], problem()[1] - 1, 2), says="Labels must be class indices >= 0, got -1;"
        ),
        refused(fit, make(), Empty(*problem(), 2), says="There are no training data", error=EmptyLoaderError),
    ],
)
def test_what_the_data_must_be(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal()


def test_labels_may_be_integers_of_any_kind(tmp_path):
    x, y = problem()
    for kind in (torch.int32, torch.uint8):
        fit(make(), Given(x, y.to(kind), 2), folder=tmp_path)
