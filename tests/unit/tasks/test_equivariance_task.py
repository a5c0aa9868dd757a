"""Training under a Gaussian prior: its term, its gradient, its implicit step."""

import functools
import math

import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_sym.curvature import EmptyLoaderError
from lightning_sym.curvature.prior import shrink
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
    """Tensors as data; all of them are a batch, if no size is given."""

    def __init__(self, x, y, classes=None, repeats=1, size=None):
        super().__init__()
        self.pairs = TensorDataset(x, y)
        self.size = size or len(x)
        self.repeats = repeats
        if classes:
            self.num_classes = classes

    def train_dataloader(self):
        return DataLoader(ConcatDataset([self.pairs] * self.repeats), self.size)

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
    task.prior.samples = len(x)
    task.prior.set({"linear.weight": math.log(3.0), "linear.bias": math.log(5.0)}, math.log(0.7))
    noise = 0.7
    weight, bias = network.linear.weight, network.linear.bias
    scatter = (3 * weight.square().sum() + 5 * bias.square().sum()) / 2
    outputs = network(x.double())
    if likelihood == "classification":
        fit, factor = nn.functional.cross_entropy(outputs, y, reduction="sum"), len(x)
    else:
        fit, factor = (outputs - y).square().sum() / (2 * noise**2), len(x) / (2 * noise**2)
    joint = fit / 1.5 + scatter  # tempered
    loss = task._loss((x.double(), y), task.train_metrics) + task.prior.energy()
    torch.testing.assert_close(factor * loss / 1.5, joint, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(factor * loss / 1.5, [weight, bias], retain_graph=True)
    for mine, exact in zip(found, torch.autograd.grad(joint, [weight, bias]), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


def test_positions_and_lengthscales_have_no_prior():
    network = RelaxedNetwork(["sconv"], width=1, grid=8, in_channels=1, learn_positions=True, learn_lengthscale=True)
    named = set(EquivarianceTask(network).prior.log_precisions)
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
            task._loss((x, y), task.train_metrics) + task.prior.energy(), list(network.parameters())
        )
        assert max(float(g.abs().max()) for g in gradient) < 1e-4
        found.append(network.linear.weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
    assert found[0].abs().max() > 0.05


ADAMS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.02, foreach=False),
    "foreach": functools.partial(torch.optim.Adam, lr=0.02, foreach=True),
    "fused": functools.partial(torch.optim.Adam, lr=0.02, fused=True),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.02, amsgrad=True, betas=(0.9, 0.99)),
    "adamw": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.02), weight_decay=0.0, foreach=False),
}


@pytest.mark.parametrize("name", ADAMS)
def test_adam_with_implicit_steps_solves_ridge_regression(name):
    x, y = (tensor.double() for tensor in problem("regression"))
    task = EquivarianceTask(Line().double(), "regression", precision=4.0, noise=0.8, optimizer=ADAMS[name])
    assert task.prior.implicit
    optimizer = task.configure_optimizers()
    task.prior.start([optimizer], Given(x, y))  # as when a fit starts
    for step in range(2000):  # the learning rate goes to 0, without which Adam never rests
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0 + 0.02 * (1 - step / 2000) ** 2
        optimizer.zero_grad()
        task.training_step((x, y), 0).backward()
        optimizer.step()
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()  # the bias has the same prior
    exact = torch.linalg.solve(ones.T @ ones + 0.8**2 * 4 * torch.eye(4).double(), ones.T @ y).T
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
        shrink(optimizer, {id(weight): 5.0})
        metric = (used / (1 - second**step)).sqrt() + eps
        expected = alone.detach() / (1 + 0.02 * 5.0 / metric)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=0)
        alone.data.copy_(weight.data)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor([3.0])])
def test_the_count_of_steps_may_be_a_tensor_or_a_number(step):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.Adam([weight], lr=0.5, betas=(0.9, 0.5), eps=0.0)
    optimizer.state[weight] = {"step": step, "exp_avg": torch.ones(2), "exp_avg_sq": torch.full((2,), 3.5)}
    shrink(optimizer, {id(weight): torch.tensor([4.0, 0.0])})
    torch.testing.assert_close(weight.detach(), torch.tensor([0.5, 1.0]))  # 3.5 / (1 - 0.5^3) = 4, and 0.5 * 4 / 2 = 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_skipped_does_not_shrink(kind, fused):
    """As a gradient scaler skips it when a gradient is not finite; fused steps are called nevertheless."""
    task = EquivarianceTask(Line(), precision=100.0, optimizer=functools.partial(kind, lr=0.1, fused=fused))
    optimizer = task.configure_optimizers()
    task.prior.start([optimizer], Given(*problem("classification", 10)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight, bias = task.network.linear.weight, task.network.linear.bias
    for infinite in (True, False):
        before = weight.detach().clone()
        optimizer.zero_grad()
        loss = (weight * 1.0).sum() + bias.sum()
        scaler.scale(loss).backward()
        if infinite:
            bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) == infinite
    # ... and what gets no gradient stays as it is.
    before = weight.detach().clone()
    optimizer.zero_grad()
    bias.sum().backward()
    optimizer.step()
    assert torch.equal(weight, before)


OPTIMIZERS = {
    "sgd": sgd(0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "fused": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", [1e9, 1e17])
def test_the_implicit_step_is_stable_for_every_precision(tmp_path, name, precision):
    x, y = problem("classification", 60)
    largest = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, task, *_):
            if trainer.current_epoch > 10:
                values = [float(p.detach().abs().max()) for p in task.network.parameters()]
                assert all(p.isfinite().all() for p in task.network.parameters()) or task.prior.step == "gradient"
                largest[task.prior.step] = max(*values, largest.get(task.prior.step, 0.0))

    for step in ("implicit", "gradient"):
        task = EquivarianceTask(Line(), precision=precision, prior_step=step, optimizer=OPTIMIZERS[name])
        trainer(tmp_path, 20, callbacks=[Watch()]).fit(task, Given(x, y, classes=2, size=20))
    assert largest["implicit"] < 1e-6
    # What the implicit step is for: SGD explodes, and Adam swings about 0 by its learning rate.
    assert not largest["gradient"] < 0.002


def test_auto_is_implicit_where_the_metric_is_known():
    class Mine(torch.optim.SGD):
        """May do anything."""

    for kind in (torch.optim.SGD, torch.optim.Adam, functools.partial(torch.optim.AdamW, weight_decay=0.0)):
        assert EquivarianceTask(Line(), optimizer=kind).prior.implicit
        assert not EquivarianceTask(Line(), optimizer=kind, prior_step="gradient").prior.implicit
    assert EquivarianceTask(Line()).prior.implicit
    for kind in (torch.optim.RMSprop, torch.optim.NAdam, Mine):
        assert not EquivarianceTask(Line(), optimizer=kind).prior.implicit
        with pytest.raises(ValueError, match=r"implicit is for torch\.optim\.SGD, Adam and AdamW, got"):
            EquivarianceTask(Line(), optimizer=kind, prior_step="implicit")


class Own(EquivarianceTask):
    """Makes its optimizer itself."""

    def configure_optimizers(self):
        return self.own(self.network.parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_the_prior_acts_with_the_optimizer_of_a_subclass(tmp_path, kind):
    x, y = problem("classification")
    found = []
    optimizer = functools.partial(kind, lr=0.1)
    for task in (Own(Line(), precision=50.0), EquivarianceTask(Line(), precision=50.0, optimizer=optimizer)):
        task.own = optimizer
        task.network.linear.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        trainer(tmp_path, 20).fit(task, Given(x, y, classes=2))
        assert task.prior.implicit == (kind is torch.optim.SGD)
        found.append(task.network.linear.weight.detach())
    assert torch.equal(*found)
    assert found[0].abs().max() < 0.5
    task = Own(Line())
    task.own = functools.partial(kind, lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=f"{kind.__name__} decays weights"):
        trainer(tmp_path).fit(task, Given(x, y, classes=2))


def test_a_second_fit_takes_the_implicit_step_once(tmp_path):
    x, y = problem("classification")
    task = EquivarianceTask(Line(), precision=50.0, optimizer=sgd())
    for _ in range(2):
        task.network.linear.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        trainer(tmp_path).fit(task, Given(x, y, classes=2))
    weight = torch.ones(2, 3, requires_grad=True)
    nn.functional.cross_entropy(x @ weight.T + 1, y).backward()
    expected = (weight - 0.1 * weight.grad).detach() / (1 + 0.1 * 50 / 20)
    torch.testing.assert_close(task.network.linear.weight.detach(), expected)


@pytest.mark.parametrize("step", ["implicit", "gradient"])
@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), functools.partial(torch.optim.Adam, lr=0.01)])
def test_the_prior_counts_once_where_gradients_accumulate(tmp_path, step, optimizer):
    x, y = problem("classification", 40)
    found = []
    for size, batches in ((40, 1), (20, 2)):
        torch.manual_seed(0)
        task = EquivarianceTask(Line(), precision=20.0, prior_step=step, optimizer=optimizer)
        trainer(tmp_path, 10, accumulate_grad_batches=batches).fit(task, Given(x, y, classes=2, size=size))
        found.append(task.network.linear.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_the_mode_of_every_module(tmp_path):
    x, y = problem("classification")
    task = EquivarianceTask(Line())
    trainer(tmp_path).fit(task, Given(x, y, classes=2))
    task.train()
    task.network.linear.eval()
    task.evaluate(Given(x, y).test_dataloader())
    assert task.network.training
    assert not task.network.linear.training


def test_accuracy_and_loss_are_those_of_the_split(tmp_path):
    data = DigitsDataModule(batch_size=20, max_samples=61, transforms=[Quadrant("digit")])
    task = EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1))
    run = trainer(tmp_path)
    run.fit(task, data)
    assert task.prior.samples == 61
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
    task.prior.set({"linear.weight": 1 / 3, "linear.bias": -2.0}, 0.1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = EquivarianceTask.load_from_checkpoint(tmp_path / "a.ckpt", network=Line(), weights_only=True)
    assert again.prior.log_precisions == {"linear.weight": 1 / 3, "linear.bias": -2.0}
    assert again.prior.log_noise == 0.1


def test_metrics_of_half_an_epoch_are_for_a_resumed_run_alone(tmp_path):
    x, y = problem("classification")

    class Save(Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    first = Given(x, y, classes=2, size=10)
    trainer(tmp_path, callbacks=[Save()]).fit(EquivarianceTask(Line()), first)
    assert torch.load(tmp_path / "half.ckpt", weights_only=True)["prior"]["train_sums"]["count"] == 10
    loaded = EquivarianceTask.load_from_checkpoint(tmp_path / "half.ckpt", network=Line(), weights_only=True)
    tested = EquivarianceTask(Line())
    trainer(tmp_path).test(tested, first, ckpt_path=tmp_path / "half.ckpt", verbose=False, weights_only=True)
    resumed = EquivarianceTask(Line())
    for task in (loaded, tested):
        assert task.train_metrics.count == 0
    seen = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, task):
            seen.append(int(task.train_metrics.count))

    run = trainer(tmp_path, callbacks=[Count()])
    run.fit(resumed, first, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert seen == [20]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": 0.0}, "precision must be a finite number > 0"),
        ({"noise": -1.0}, "noise must be a finite number > 0"),
        ({"temperature": math.inf}, "temperature must be a finite number > 0"),
        ({"likelihood": "poisson"}, "likelihood"),
        ({"prior_step": "exact"}, "prior_step"),
        ({"optimizer": torch.optim.AdamW}, "AdamW decays weights"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        EquivarianceTask(Line(), **settings)


def test_what_the_data_must_be(tmp_path):
    x, y = problem("classification")
    with pytest.raises(ValueError, match=r"which start\(\) counts"):
        EquivarianceTask(Line()).prior.energy()
    with pytest.raises(ValueError, match="needs a datamodule with curvature_dataloader"):
        trainer(tmp_path).fit(EquivarianceTask(Line()), DataLoader(TensorDataset(x, y), 5))
    with pytest.raises(ValueError, match=r"Regression targets must have the shape of the outputs, \[20, 2\]"):
        trainer(tmp_path).fit(EquivarianceTask(Line(), "regression"), Given(x, torch.randn(20, 1)))
    with pytest.warns(UserWarning, match=r"1 of 3 classes never occur in the training data \(2\)"):
        trainer(tmp_path).fit(EquivarianceTask(Line(num_classes=3)), Given(x, y, classes=3))

    with pytest.raises(ValueError, match="Labels must be class indices >= 0, got -1; look at the training data"):
        trainer(tmp_path).fit(EquivarianceTask(Line()), Given(x, y - 1))
    for kind in (torch.int32, torch.uint8):
        trainer(tmp_path).fit(EquivarianceTask(Line()), Given(x, y.to(kind), classes=2))

    class Empty(Given):
        def curvature_dataloader(self):
            return []

    with pytest.raises(EmptyLoaderError, match="There are no training data"):
        trainer(tmp_path).fit(EquivarianceTask(Line()), Empty(x, y))


def test_other_parameters_are_refused():
    task = EquivarianceTask(MultiLayerPerceptron(widths=(3,), image_size=8))
    with pytest.raises(ValueError, match="not those of this network"):
        task.prior.set({"linear.weight": 0.0})
