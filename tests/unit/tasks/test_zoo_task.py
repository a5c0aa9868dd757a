"""ZooTask: every member is the one that would have been trained alone."""

import functools
import math
import warnings

import fits
import pytest
import torch
from helpers import assert_same
from jsonargparse import ArgumentParser
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchvision.transforms import v2

from lightning_sym.datamodules import TensorDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.population import LoopPopulation
from lightning_sym.tasks import CrossEntropy, ZooTask
from lightning_sym.tasks.metrics import PopulationClassification
from lightning_sym.tasks.zoo import mixed, own_shares

BATCH = 16


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(12,), image_size=8)


def frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)


def myrtle() -> MyrtleCNN:
    return MyrtleCNN(width=2, in_channels=1, image_size=8)


digits = functools.partial(fits.digits, shift=1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def wild(parameters):
    return torch.optim.Adam(parameters, lr=0.3)


def cosine(optimizer):
    return CosineAnnealingLR(optimizer, T_max=3)


def trainer(folder, epochs: int = 3, **changes) -> Trainer:
    return fits.quiet_trainer(folder=folder, max_epochs=epochs, **changes)


def fit(tmp_path, task: ZooTask, data=None, **changes) -> ZooTask:
    trainer(tmp_path, **changes).fit(task, data or digits())
    return task


def plain_loop(network: Network, number: int, epochs: int = 3, **data_settings) -> list[dict[str, Tensor]]:
    """Train one network in plain PyTorch; return its state after each epoch."""
    data = digits(**data_settings)
    data.setup()
    loader = data._loader("train", batch_size=BATCH, seeds=number, shift=1, drop_last=True)
    member = network.fresh(number)
    optimizer = torch.optim.Adam(member.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    states = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(member(images), labels).backward()
            optimizer.step()
        scheduler.step()
        states.append({name: value.clone() for name, value in member.state_dict().items()})
    return states


# ---- the identity


@pytest.mark.parametrize("make", [perceptron, myrtle])
def test_members_are_bitwise_those_of_a_plain_loop(tmp_path, make):
    zoo = fit(tmp_path, ZooTask(make(), members=4, seed=3, optimizer=adam, lr_scheduler=cosine))
    assert sorted(zoo.kept) == [3, 4, 5, 6]
    for number in (3, 5, 6):
        states = plain_loop(make(), number)
        assert_same(zoo.population.member_state(number), states[-1])
        assert_same(zoo.kept[number]["state"], states[zoo.kept[number]["epoch"]])
    assert str(zoo.kept[3]["state"]) != str(zoo.kept[4]["state"])


def test_random_layers_draw_anew_while_gradients_accumulate(tmp_path, monkeypatch):
    draws = []
    original = LoopPopulation.step

    def step(self, *args, **kwargs):
        draws.append(kwargs["draw"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LoopPopulation, "step", step)
    fit(tmp_path, ZooTask(perceptron(), members=1), accumulate_grad_batches=2, epochs=2)
    assert len(draws) == 10
    assert len(set(draws)) == 10


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_weight_decay_on_weights_only(tmp_path, execution):
    def decay(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def run(optimizer, **changes):
        task = ZooTask(myrtle(), members=2, optimizer=optimizer, execution=execution, keep="last", **changes)
        return fit(tmp_path, task, epochs=1, limit_train_batches=1).kept[0]["state"]

    none, every, weights = run(plain), run(decay), run(decay, weight_decay_on="weights")
    assert torch.equal(weights["classifier.bias"], none["classifier.bias"])
    assert not torch.equal(every["classifier.bias"], none["classifier.bias"])
    for name in ("classifier.weight", "norm1.weight"):
        assert torch.equal(weights[name], every[name])
        assert not torch.equal(weights[name], none[name])


# ---- metrics


@torch.no_grad()
def naive(network: Network, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and mean cross-entropy, one image after another."""
    right, loss = 0, 0.0
    for image, label in zip(images, labels, strict=True):
        logits = network(image[None])[0].double()
        right += int(logits.argmax() == label)
        loss -= float(logits[label] - logits.exp().sum().log())
    return right / len(labels), loss / len(labels)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_metrics_are_those_of_a_naive_computation(tmp_path, execution):
    data = digits(eval_batch_size=27)  # does not divide the number of images
    task = ZooTask(myrtle(), members=2, optimizer=adam, execution=execution, keep="last")
    run = trainer(tmp_path)
    run.fit(task, data)
    logged = run.callback_metrics
    splits = task.split_metrics(data)
    networks = [myrtle() for _ in range(2)]
    for number, network in enumerate(networks):
        network.load_state_dict(task.kept[number]["state"])
        network.eval()
        for split in ("train", "val", "test"):
            images, labels = data.split_tensors(split)
            accuracy, loss = naive(network, data.normalize(images), labels)
            assert float(splits[split]["accuracy"][number]) == accuracy
            assert float(splits[split]["loss"][number]) == pytest.approx(loss, abs=1e-5)
            if split == "val":
                assert task.history["val/accuracy"][-1][number] == accuracy
                assert task.history["val/loss"][-1][number] == pytest.approx(loss, abs=1e-5)
    values = task.history["val/accuracy"][-1]
    assert float(logged["val/accuracy"]) == pytest.approx(sum(values) / 2)
    assert float(logged["val/accuracy/min"]) == pytest.approx(min(values))
    assert float(logged["val/accuracy/max"]) == pytest.approx(max(values))

    images, labels = data.split_tensors("test")
    confusion = torch.zeros(10, 10, dtype=torch.float64)
    for network in networks:
        for label, guess in zip(labels, network(data.normalize(images)).argmax(1), strict=True):
            confusion[label, guess] += 1
    expected = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(splits["test"]["confusion"], expected, atol=1e-12, rtol=0)


def test_training_metrics_are_those_of_the_steps(tmp_path):
    seen = []

    class Watching(ZooTask):
        def training_step(self, batch, batch_idx):
            images, labels = batch
            logits = [self.population.members[f"{n:04d}"](images[n]).detach() for n in range(2)]
            seen.append(
                [
                    (int((out.argmax(1) == labels[n]).sum()), float(nn.functional.cross_entropy(out, labels[n])))
                    for n, out in enumerate(logits)
                ]
            )
            return super().training_step(batch, batch_idx)

    task = fit(tmp_path, Watching(perceptron(), members=2), epochs=1)
    for number in range(2):
        right = sum(step[number][0] for step in seen)
        assert task.history["train/accuracy"][0][number] == right / (BATCH * len(seen))
        mean = sum(step[number][1] for step in seen) / len(seen)
        assert task.history["train/loss"][0][number] == pytest.approx(mean, rel=1e-6)


def test_members_that_saw_nothing_have_no_metrics():
    metric = PopulationClassification(3, 2)
    metric.update(torch.tensor([2, 0]), torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([1]))
    found = metric.compute()
    assert found["accuracy"].isnan().tolist() == [False, True, False]
    assert found["accuracy"][[0, 2]].tolist() == [1.0, 0.0]
    assert found["loss"].isnan().tolist() == [False, True, False]
    assert found["loss"][2].item() == pytest.approx(math.log(1 + math.e))
    assert found["confusion"].tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_metrics_of_members_are_those_of_torchmetrics():
    """Two batches of unequal size; a rank with two of three members; a class that does not occur."""
    random = torch.Generator().manual_seed(0)
    metric, rows = PopulationClassification(3, 5), torch.tensor([2, 0])
    accuracies = [MulticlassAccuracy(5, average="micro") for _ in rows]
    confusion = MulticlassConfusionMatrix(5, normalize=None)
    for size in (7, 30):
        outputs, labels = torch.randn(2, size, 5, generator=random), torch.randint(4, (size,), generator=random)
        metric.update(rows, outputs, labels)
        for own, logits in zip(accuracies, outputs, strict=True):
            own.update(logits, labels)
            confusion.update(logits, labels)
    found, counts = metric.compute(), confusion.compute().double()
    theirs = torch.stack([own.compute() for own in accuracies]).double()
    torch.testing.assert_close(found["accuracy"][rows], theirs, atol=1e-7, rtol=0)  # they divide in float32
    assert counts.sum() == 2 * 37
    assert torch.equal(found["confusion"], counts / counts.sum(1, keepdim=True).clamp(min=1))


def test_networks_may_have_more_outputs_than_the_data_have_classes_but_not_fewer():
    metric, labels = PopulationClassification(1, 2), torch.tensor([0, 1, 1])
    metric.update(torch.tensor([0]), torch.eye(4)[[0, 1, 3]][None], labels)
    assert metric.compute()["confusion"].tolist() == [[1.0, 0.0], [0.0, 0.5]]
    for outputs, says in ((torch.zeros(1, 3, 1), "has 1 outputs, and the data"), ({}, "the network returns a dict")):
        with pytest.raises(ValueError, match=says):
            metric.update(torch.tensor([0]), outputs, labels)


def test_frozen_networks_are_noticed(tmp_path):
    with pytest.warns(UserWarning, match="so that nothing is trained"):
        fit(tmp_path, ZooTask(Network.wrap(frozen), members=1), epochs=1)


# ---- which weights are kept


def test_validate_evaluates_the_kept_weights(tmp_path):
    task = fit(tmp_path, ZooTask(perceptron(), members=3, optimizer=wild), epochs=6)
    kept = [task.kept[number]["metrics"]["accuracy"] for number in range(3)]
    last = task.history["val/accuracy"][-1]
    assert kept != last, "every member was best at the end: the test shows nothing"
    (found,) = trainer(tmp_path).validate(task, digits(), verbose=False)
    assert found["val/accuracy"] == pytest.approx(sum(kept) / 3)


def test_history_says_when_it_was_validated(tmp_path):
    task = ZooTask(perceptron(), members=1)
    trainer(tmp_path, epochs=4, check_val_every_n_epoch=2).fit(task, digits())
    assert task.history_epochs["val"] == [2, 4]
    assert task.kept[0]["epochs"] in (2, 4)
    task = ZooTask(perceptron(), members=1)
    trainer(tmp_path, epochs=2, val_check_interval=0.4).fit(task, digits())  # after 2 and 4 of 5 steps
    assert task.history_epochs["val"] == pytest.approx([0.4, 0.8, 1.4, 1.8])
    assert task.history_epochs["train"] == [1, 2]


def test_a_period_that_is_not_the_length_of_the_run_is_said(tmp_path):
    task = ZooTask(perceptron(), lr_scheduler=cosine)
    with pytest.warns(UserWarning, match="lowest after 3 epochs .* ends after 2 .* set lr_scheduler.T_max to 2"):
        fit(tmp_path, task, epochs=2)


def test_a_cycle_is_as_long_as_the_run_or_refused_before_training(tmp_path):
    def scheduler(**settings):
        cycle = functools.partial(OneCycleLR, max_lr=0.01, **settings)
        task = ZooTask(perceptron(), members=1, lr_scheduler=cycle, lr_scheduler_interval="step")
        return fit(tmp_path, task, epochs=2).lr_schedulers()

    found = scheduler()
    assert found.total_steps == found.last_epoch == 10
    with pytest.raises(ValueError, match=r"after 6 steps .* training takes 10; set model.lr_scheduler.total_steps"):
        scheduler(total_steps=6)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([(0.5, 1.0), (0.6, 2.0), (0.4, 0.1)], [0, 1, 1]),
        ([(0.5, 1.0), (0.5, 0.9), (0.5, 0.95)], [0, 1, 1]),
        ([(0.5, 1.0), (0.5, 1.0)], [0, 0]),
        ([(0.0, 5.0), (0.0, 4.0), (0.1, 9.0)], [0, 1, 2]),
    ],
    ids=["accuracy", "loss breaks a tie", "the earlier of equals", "from 0"],
)
def test_rule_of_the_best_weights(monkeypatch, metrics, expected):
    task = ZooTask(perceptron(), members=1)
    task.population = LoopPopulation(perceptron(), [0])
    monkeypatch.setattr("lightning_sym.tasks._kept_weights.epochs_trained", lambda task: 0)
    kept = []
    for epoch, (accuracy, loss) in enumerate(metrics):
        monkeypatch.setattr(ZooTask, "current_epoch", epoch)
        task.keep_weights({"accuracy": [accuracy], "loss": [loss]})
        kept.append(task.kept[0]["epoch"])
    assert kept == expected


# ---- members that diverge


def hot(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def test_means_and_confusion_are_of_the_members_that_go_on(tmp_path):
    data = digits()
    run, task = trainer(tmp_path, callbacks=[fits.Poison(2, 0)]), ZooTask(perceptron(), members=2, seed=1)
    with pytest.warns(UserWarning, match="Member 2 was stopped"):
        run.fit(task, data)
    assert float(run.callback_metrics["val/accuracy"]) == pytest.approx(task.history["val/accuracy"][-1][0])
    alone = fit(tmp_path, ZooTask(perceptron(), members=1, seed=1), data)
    found, expected = task.split_metrics(data)["test"], alone.split_metrics(data)["test"]
    assert torch.equal(found["confusion"], expected["confusion"])
    assert found["accuracy"][0] == expected["accuracy"][0]
    assert found["accuracy"][1].isnan()


def test_validation_loss_that_is_not_finite_stops_the_member(tmp_path):
    class Breaking(ZooTask):
        def on_validation_epoch_start(self):
            if self.current_epoch == 1 and not self.trainer.sanity_checking:
                with torch.no_grad():
                    self.population.member_parameters(0)[0].fill_(math.nan)

    task = Breaking(perceptron(), members=2)
    with pytest.warns(UserWarning, match="Member 0 was stopped in epoch 1, step 10: its validation loss is not finite"):
        fit(tmp_path, task)
    assert list(task.stopped) == [0]


# ---- testing, predicting, checkpoints


# ---- data that do not fit


@pytest.mark.parametrize("settings", [{"val_fraction": 0.0}, {}], ids=["no split", "no batches"])
def test_best_without_validation_is_refused(tmp_path, settings):
    limit = {} if settings else {"limit_val_batches": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lightning: no val_dataloader
        with pytest.raises(ValueError, match=r'keep="best" needs validation data.*; set val_fraction above 0, or keep'):
            fit(tmp_path, ZooTask(perceptron(), members=1), digits(**settings), **limit)


def test_batches_of_one_network_are_refused(tmp_path):
    message = r"Expected one batch per member, of shape \[2, B, \.\.\.\], got \[4, 1, 8, 8\]; the datamodule has"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, ZooTask(perceptron(), members=2), fits.Theirs())


# ---- losses of one's own


class Brightness(ZooTask):
    """Tell how bright an image is."""

    def evaluation_batch(self, batch):
        images, _ = batch
        return images, images.flatten(-3).mean(-1, keepdim=True)


def one_output() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(12,), image_size=8, num_classes=1)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_a_loss_of_ones_own_is_trained_logged_and_decides_what_is_kept(tmp_path, execution):
    task = Brightness(one_output(), members=2, loss=nn.functional.mse_loss, execution=execution, optimizer=wild)
    run = trainer(tmp_path, epochs=4)
    run.fit(task, digits())
    assert set(task.history) == {"train/loss", "val/loss"}
    for number in (0, 1):
        curve = [row[number] for row in task.history["val/loss"]]
        assert task.kept[number]["epoch"] == curve.index(min(curve))
        assert task.kept[number]["metrics"] == {"loss": min(curve)}
    inputs, targets = task.evaluation_batch((digits().normalize(digits().split_tensors("test").images), None))
    network = one_output()
    network.load_state_dict(task.kept[1]["state"])
    expected = float((network(inputs) - targets).detach().square().mean())
    assert float(task.split_metrics(digits())["test"]["loss"][1]) == pytest.approx(expected, rel=1e-5)
    (outputs,) = run.predict(task, digits())
    torch.testing.assert_close(outputs[1], network(inputs).detach())


def test_an_overridden_loss_is_that_of_all_members(tmp_path):
    class Absolute(Brightness):
        def loss(self, outputs, targets):
            return (outputs - targets).abs().mean()

    by_method = fit(tmp_path, Absolute(one_output(), members=2, optimizer=adam))
    by_argument = fit(tmp_path, Brightness(one_output(), members=2, optimizer=adam, loss=nn.functional.l1_loss))
    assert by_method.history == by_argument.history
    assert not by_method.classifies


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_classifiers_with_a_loss_of_their_own_have_accuracies(tmp_path, execution):
    class Focused(ZooTask):
        classifies = True

    def focal(outputs, targets):
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return ((1 - losses.neg().exp()) * losses).mean()

    task = fit(tmp_path, Focused(perceptron(), members=2, loss=focal, execution=execution))
    assert set(task.history) == {"train/accuracy", "val/accuracy", "train/loss", "val/loss"}
    found = task.split_metrics(digits())["test"]
    assert found["confusion"].shape == (10, 10)
    images, labels = digits().split_tensors("test")
    network = perceptron()
    network.load_state_dict(task.kept[1]["state"])
    expected = nn.functional.cross_entropy(network(digits().normalize(images)), labels).detach()
    assert float(found["loss"][1]) == pytest.approx(float(expected), rel=1e-5)


def test_a_checkpoint_of_another_loss_is_refused(tmp_path):
    run = trainer(tmp_path, epochs=1)
    run.fit(Brightness(one_output(), members=1, loss=nn.functional.mse_loss), digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = Brightness(one_output(), members=1, loss=nn.functional.l1_loss)
    with pytest.raises(ValueError, match="The checkpoint has loss mse_loss and this run has l1_loss"):
        trainer(tmp_path).fit(other, digits(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.functional.mse_loss, "mse_loss"),
        (functools.partial(nn.functional.huber_loss, delta=2.0), "huber_loss(delta=2.0)"),
        (functools.partial(max, 2.0), "max(argument 0=2.0)"),
        (nn.SmoothL1Loss(beta=0.5), "SmoothL1Loss(reduction='mean', beta=0.5)"),
        (CrossEntropy(0.1), "CrossEntropy(label_smoothing=0.1)"),
    ],
)
def test_the_loss_and_its_settings_are_recorded(loss, name):
    task = ZooTask(one_output(), members=1, loss=loss)
    assert task.hparams["loss_name"] == name
    assert task.identity()["loss"] == name


@pytest.mark.parametrize(
    "written", ["torch.nn.functional.mse_loss", {"class_path": "torch.nn.MSELoss", "init_args": {"reduction": "sum"}}]
)
def test_losses_from_yaml(written):
    parser = ArgumentParser()
    parser.add_class_arguments(ZooTask, "zoo", fail_untyped=False)
    path = "lightning_sym.networks.MultiLayerPerceptron"
    network = {"class_path": path, "init_args": {"widths": [4], "image_size": 8}}
    task = parser.instantiate_classes(parser.parse_object({"zoo": {"network": network, "loss": written}})).zoo
    a, b = torch.ones(3, 2), torch.zeros(3, 2)
    assert float(task.loss(a, b)) == (1.0 if isinstance(written, str) else 6.0)


# ---- mixtures of inputs


@pytest.mark.parametrize("kind", [v2.MixUp, v2.CutMix])
def test_mixtures_are_those_of_torchvision(kind):
    """With the same draws: the share, and the rectangle where it is read off."""
    images, labels = torch.rand(2, 5, 3, 8, 6, dtype=torch.float64), torch.randint(10, (2, 5))
    for seed in range(20):
        randoms = [torch.Generator().manual_seed(2 * seed + row) for row in range(2)]
        settings = (0.8, 0.0) if kind is v2.MixUp else (0.0, 1.0)
        shares = [own_shares(*settings, images.shape[2:], random) for random in randoms]
        found, targets = mixed(images, labels, shares, 10)
        for row, share in enumerate(shares):
            own = labels[row]
            given = {"labels": own, "batch_size": 5, "lam": float(share.mean())}
            if kind is v2.CutMix:
                rows, columns = (share == 0).any(1).nonzero(), (share == 0).any(0).nonzero()
                some = bool(len(rows))
                box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if some else [0] * 4
                given |= {"box": tuple(map(int, box)), "lam_adjusted": float(share.double().mean())}
            reference = kind(num_classes=10)
            torch.testing.assert_close(found[row], reference.transform(images[row], given), atol=1e-7, rtol=0)
            expected = reference.transform(own, given).double()
            torch.testing.assert_close(targets[row], expected, atol=1e-7, rtol=0)


def test_shares_have_their_distributions():
    random = torch.Generator().manual_seed(0)
    uniform = torch.stack([own_shares(1.0, 0.0, (8, 8), random) for _ in range(2000)])
    assert float((uniform < 0.25).float().mean()) == pytest.approx(0.25, abs=0.04)
    narrow = torch.stack([own_shares(100.0, 0.0, (8, 8), random) for _ in range(200)])
    assert float((narrow - 0.5).abs().max()) < 0.2
    both = [own_shares(1.0, 1.0, (8, 8), random).ndim for _ in range(1000)]
    assert sum(both) / 2 == pytest.approx(500, abs=60)
    with pytest.raises(ValueError, match="cutmix cuts rectangles from images"):
        own_shares(0.0, 1.0, (8,), random)
    least = torch.stack([own_shares(0.01, 0.0, (8, 8), random) for _ in range(2000)])
    assert float(((least > 1e-6) & (least < 1 - 1e-6)).float().mean()) == pytest.approx(0.129, abs=0.03)


class Reader(nn.Sequential):
    """A classifier of three tokens."""

    def __init__(self):
        super().__init__(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 5))


def test_what_cannot_be_mixed_is_refused(tmp_path):
    tokens = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0))
    data = TensorDataModule((tokens, tokens[:, 0]), batch_size=4)
    reader = Network.wrap(Reader)
    with pytest.raises(ValueError, match=r"mix floating inputs, got torch.int64, as of tokens; set both to 0"):
        fit(tmp_path, ZooTask(reader, members=1, mixup=0.5), data)
    few = MultiLayerPerceptron(widths=(12,), image_size=8, num_classes=12)
    for execution in ("loop", "vmap"):
        with pytest.raises(ValueError, match=r"outputs of shape .*16, 12\], .* the same number of classes"):
            fit(tmp_path, ZooTask(few, members=1, mixup=0.5, execution=execution))
    loaders = digits()
    loaders.setup()
    batches = loaders._loader("train", batch_size=BATCH, seeds=[0])
    with pytest.raises(ValueError, match="the data have no num_classes"):
        trainer(tmp_path).fit(ZooTask(perceptron(), members=1, mixup=0.5, keep="last"), batches)


def test_mixing_is_that_of_each_member_and_ends(tmp_path):
    """Loop and vmap agree, and a member is the one that is trained alone."""
    seen = {}

    class Recorded(ZooTask):
        def training_batch(self, batch, batch_idx):
            inputs, targets = super().training_batch(batch, batch_idx)
            seen.setdefault(self.current_epoch, []).append(targets)
            return inputs, targets

    mixing = {"mixup": 0.8, "cutmix": 1.0, "mixing_epochs": 2, "optimizer": adam}
    loop, vmap = (
        fit(tmp_path / kind, ZooTask(perceptron(), members=2, execution=kind, label_smoothing=0.1, **mixing))
        for kind in ("loop", "vmap")
    )
    alone = fit(tmp_path / "alone", Recorded(perceptron(), members=1, seed=1, label_smoothing=0.1, **mixing))
    assert_same(loop.population.member_state(1), alone.population.member_state(1))
    for number in range(2):
        mine, theirs = (task.population.member_state(number) for task in (loop, vmap))
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    assert [seen[epoch][0].is_floating_point() for epoch in range(3)] == [True, True, False]
    probabilities = torch.cat(seen[0] + seen[1], dim=1)
    torch.testing.assert_close(probabilities.sum(2), torch.ones(probabilities.shape[:2]))
    assert 0.2 < float((probabilities.amax(2) < 1).float().mean()) < 1  # neighbours may have the same label


def test_a_checkpoint_of_other_mixtures_is_refused(tmp_path):
    run = trainer(tmp_path, epochs=1)
    run.fit(ZooTask(perceptron(), members=1, mixup=0.8), digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    for other in ({}, {"mixup": 0.8, "mixing_epochs": 1}, {"cutmix": 0.8}):
        with pytest.raises(ValueError, match="of mixtures"):
            trainer(tmp_path).fit(
                ZooTask(perceptron(), members=1, **other), digits(), ckpt_path=tmp_path / "a.ckpt", weights_only=True
            )


def test_kept_weights_are_the_evaluated_ones_and_of_an_untrained_zoo_the_first(tmp_path):
    task = fit(tmp_path / "trained", ZooTask(perceptron(), members=2, optimizer=wild))
    with task.evaluating():
        for number, state in task.kept_states().items():
            assert_same(state, task.population.member_state(number))
    untrained = fit(tmp_path / "untrained", ZooTask(perceptron(), members=2), epochs=0)
    assert_same(untrained.kept_states()[1], perceptron().fresh(1).state_dict())


def test_a_setting_that_only_one_side_has_is_refused(tmp_path):
    class Noisy(ZooTask):
        noise = 0.0

        def identity(self):
            return super().identity() | ({"noise": self.noise} if self.noise else {})

    for saved, mine, says in ((0.5, 0.0, "noise 0.5 and this run has none"), (0.0, 0.5, "noise none and this run has")):
        made, other = (Noisy(perceptron(), members=1) for _ in range(2))
        made.noise, other.noise = saved, mine
        run = trainer(tmp_path, epochs=1)
        run.fit(made, digits())
        run.save_checkpoint(tmp_path / "a.ckpt")
        with pytest.raises(ValueError, match=says):
            trainer(tmp_path).fit(other, digits(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": torch.optim.SGD}, "has optimizer Adam and this run has SGD; use the settings"),
        ({"optimizer": wild}, "has lr 0.01 and this run has 0.3"),
        ({"lr_scheduler": cosine}, "has lr_scheduler none and this run has CosineAnnealingLR"),
        ({"max_epochs": 1}, "The checkpoint is of epoch 2 and max_epochs is 1; raise it to at least 2"),
        ({"batch_size": 64}, r"The checkpoint has batch_size \d+ and this run has 64; use the settings"),
    ],
)
def test_training_is_not_resumed_with_another_optimizer_other_batches_or_fewer_epochs(changes, says, tmp_path):
    run = trainer(tmp_path, epochs=2)
    run.fit(ZooTask(perceptron(), members=1, optimizer=adam), digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    settings = {"optimizer": adam, **changes}
    epochs = settings.pop("max_epochs", 3)
    data = digits(**{name: settings.pop(name) for name in ("batch_size",) if name in settings})
    task = ZooTask(perceptron(), members=1, **settings)
    with pytest.raises(ValueError, match=says):
        trainer(tmp_path, epochs).fit(task, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    trainer(tmp_path).test(task, digits(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
