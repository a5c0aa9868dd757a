"""BatchNormRecalibration: what it measures, when, and that it leaves no trace."""

import copy
import functools
from collections.abc import Sequence

import pytest
import torch
from fits import Interrupt, quiet_trainer, saving
from helpers import assert_refused
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint, WeightAveraging
from torch import Tensor, nn

from lightning_sym.callbacks import BatchNormRecalibration, RecalibrationTargets
from lightning_sym.datamodules import DigitsDataModule, TensorLoader
from lightning_sym.networks import MultiLayerPerceptron, float_average, recalibrate_batch_norm
from lightning_sym.tasks import MatchingTask, ZooTask

# Sums of float32 in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Normed(LightningModule):
    """A small convolutional network with two batch norms, a dropout, and notes on what evaluations saw."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
        )
        self.head = nn.Linear(5, 10)
        self.lr = lr
        self.seen: list[tuple[str, dict[str, Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).relu().mean((2, 3)))

    def note(self, where: str) -> None:
        self.seen.append((where, statistics(self)))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.note("val")
        self.log("val/loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.note("val end")

    def test_step(self, batch, batch_idx):
        self.note("test")

    def predict_step(self, batch, batch_idx):
        self.note("predict")
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def found(self, where: str) -> list[dict[str, Tensor]]:
        return [values for name, values in self.seen if name == where]


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def digits(**changes) -> DigitsDataModule:
    return DigitsDataModule(**{"batch_size": 16, "eval_batch_size": 40, "max_samples": 90, "shift": 1, **changes})


def trainer(path, *callbacks: Callback, **changes):
    return quiet_trainer(*callbacks, folder=path, **changes)


def images(data: DigitsDataModule) -> Tensor:
    return data.normalize(data.split_tensors("train").images)


def one_pass(task: Normed, batches: Sequence[Tensor], **settings) -> dict[str, Tensor]:
    """Return what is measured on batches; see ``unit/networks/test_batch_norm.py`` for whether that is right."""
    features = copy.deepcopy(task.features)
    recalibrate_batch_norm(features, batches, **settings)
    return {f"features.{name}": buffer for name, buffer in features.named_buffers()}


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


# ---- what is measured


SPREAD = [place * 90 // 20 for place in range(20)]


@pytest.mark.parametrize(
    ("settings", "places", "size"),
    [
        ({}, range(80), 40),  # the last 10 are left out
        ({"batch_size": 45}, range(90), 45),
        ({"batch_size": 30}, range(90), 30),
        ({"batch_size": 500}, range(90), 90),  # the only one
        ({"batch_size": 7, "exact": True}, range(90), 7),
        ({"batch_size": 10, "images": 20}, SPREAD, 10),
        ({"batch_size": 10, "images": 20, "exact": True}, SPREAD, 10),
    ],
    ids=str,
)
def test_statistics_are_means_over_batches_or_exact(tmp_path, settings, places, size):
    task, data = Normed(), digits()
    trainer(tmp_path, BatchNormRecalibration(**settings)).validate(task, data, verbose=False)
    expected = one_pass(task, images(data)[list(places)].split(size), exact=settings.get("exact", False))
    for found in (*task.found("val"), *task.found("val end")):
        check(found, expected)
    assert len(task.found("val")) == 3


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_precision_and_transfer_hooks_are_those_of_evaluation(tmp_path):
    class Scaled(Normed):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert batch[0].dtype == torch.float64
            return [3 * batch[0] + 1, batch[1]]

    task, data = Scaled(), digits()
    callback = BatchNormRecalibration(exact=True)
    trainer(tmp_path, callback, precision="64-true").predict(task, data, return_predictions=False)
    check(task.found("predict")[0], one_pass(task, (3 * images(data).double() + 1).split(40), exact=True))


@pytest.mark.parametrize(
    ("images", "synchronised", "settings", "length", "last"),
    [
        (None, False, {}, 4, 20),  # 90 and 60 images in batches of 20
        (None, True, {}, 3, 20),
        (None, True, {"exact": True}, 5, 10),
        (25, False, {"batch_size": 12}, 1, 12),  # 15 and 10
        (25, False, {"batch_size": 16}, 1, 15),  # no process has a full batch
        (25, True, {"batch_size": 12}, 1, 12),  # the other process has no full batch, and both are needed
        (25, True, {"batch_size": 4}, 2, 4),
    ],
)
def test_processes_agree_on_batches(tmp_path, monkeypatch, images, synchronised, settings, length, last):
    """SyncBatchNorm needs as many batches on every process, and works on accelerators only."""
    module = "lightning_sym.callbacks.batch_norm_recalibration.gathered"
    monkeypatch.setattr(module, lambda share: [share, 60])
    callback = BatchNormRecalibration(**{"images": images, "batch_size": 20, **settings})
    found = []

    class Asking(Callback):
        def on_test_start(self, trainer, task):
            norm = nn.SyncBatchNorm(1) if synchronised else nn.BatchNorm2d(1)
            batches = callback._batches(trainer, task, [nn.Sequential(norm)])
            found.extend(len(x) for x, _ in batches)

    trainer(tmp_path, Asking()).test(Normed(), digits(), verbose=False)
    assert (len(found), found[-1]) == (length, last)


# ---- what is left afterwards


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize("exact", [False, True])
def test_everything_is_put_back_bitwise(tmp_path, what, exact):
    task, data = Normed(), digits()
    task.features[0].weight.requires_grad_(False)
    task.features[5].eval()
    task.train_modes = [module.training for module in task.modules()]
    with torch.no_grad():
        for buffer in task.buffers():
            buffer.copy_(torch.randint(1, 9, buffer.shape))
    before = {name: value.clone() for name, value in task.state_dict().items()}
    state = torch.get_rng_state()
    getattr(trainer(tmp_path, BatchNormRecalibration(exact=exact)), what)(task, datamodule=data)
    assert equal(task.state_dict(), before)
    assert not equal(task.seen[0][1], statistics(task))
    assert [module.training for module in task.modules()] == task.train_modes
    assert torch.equal(torch.get_rng_state(), state)


def test_training_is_bitwise_the_same(tmp_path):
    results = []
    for callbacks in ([], [BatchNormRecalibration()], [BatchNormRecalibration(exact=True, batch_size=25)]):
        task = Normed()
        trainer(tmp_path, *callbacks, max_epochs=2, val_check_interval=2).fit(task, digits())
        results.append(task.state_dict())
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.parametrize("where", ["val step", "interrupt", "second target"])
@pytest.mark.parametrize("keep", [False, True])
def test_an_error_puts_everything_back(tmp_path, where, keep):
    class Failing(Normed):
        def validation_step(self, batch, batch_idx):
            if where != "second target":
                raise (KeyboardInterrupt if where == "interrupt" else RuntimeError)("stop")

        def recalibration_targets(self):
            yield self, None
            if where == "second target":
                yield nn.Sequential(nn.BatchNorm2d(7)), None

    task = Failing()
    before = statistics(task)
    with pytest.raises((RuntimeError, ValueError, SystemExit)):
        trainer(tmp_path, BatchNormRecalibration(keep=keep)).validate(task, digits())
    assert equal(statistics(task), before) == (not keep or where == "second target")


# ---- when


def test_statistics_change_only_between_the_hooks(tmp_path):
    changed: list[str] = []

    def look(hook, trainer, module):
        """Note at which hooks the statistics are not those of training: five batches in each epoch."""
        tracked = int(module.features[1].num_batches_tracked)
        if tracked != (0 if trainer.sanity_checking else 5 * (trainer.current_epoch + 1)):
            changed.append(hook)

    hooks = [f"on_validation_{when}" for when in ("start", "epoch_start", "epoch_end", "end")]
    order = LambdaCallback(**{hook: functools.partial(look, hook) for hook in hooks})
    trainer(tmp_path, BatchNormRecalibration(), order, max_epochs=2).fit(Normed(), digits())
    assert changed == ["on_validation_epoch_start", "on_validation_epoch_end"] * 2


# ---- targets


class Choosing(Normed):
    """Says what is measured by a function of itself."""

    def __init__(self, choose=lambda task: [(task, None)]) -> None:
        super().__init__()
        self.choose = choose

    def recalibration_targets(self):
        return self.choose(self)


def test_targets_of_the_task(tmp_path):
    """Two frozen networks, of the second of which one batch norm is measured."""
    task, data = Choosing(lambda task: [(task.other, ["2"]), (task.features, iter(["1"]))]), digits()
    task.other = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert isinstance(task, RecalibrationTargets)
    assert not isinstance(Normed(), RecalibrationTargets)
    before = statistics(task)
    trainer(tmp_path, BatchNormRecalibration(exact=True)).validate(task, data, verbose=False)
    found = task.found("val")[0]
    measured = {name.rpartition(".")[0] for name in found if not torch.equal(found[name], before[name])}
    assert measured == {"other.2", "features.1"}
    expected = one_pass(task, [images(data)], exact=True)
    for name in ("features.1.running_mean", "features.1.running_var"):
        torch.testing.assert_close(found[name], expected[name], **CLOSE)
    assert equal(statistics(task), before)


@pytest.mark.parametrize("exact", [False, True])
def test_targets_may_depend_on_exactness(tmp_path, exact):
    class Telling(Normed):
        def recalibration_targets(self, exact=None):
            self.told = exact
            return [(self.features, None)]

    task = Telling()
    trainer(tmp_path, BatchNormRecalibration(exact=exact)).validate(task, digits(), verbose=False)
    assert task.told is exact


@pytest.mark.parametrize("targets", [[], [(nn.Linear(2, 2), None)]], ids=["none", "without"])
def test_no_batch_norm_is_said_once(tmp_path, monkeypatch, targets):
    task = Choosing(lambda task: targets)
    messages: list[str] = []
    monkeypatch.setattr("lightning_sym.callbacks.batch_norm_recalibration.rank_zero_info", messages.append)
    trainer(tmp_path, BatchNormRecalibration(), max_epochs=3).fit(task, digits())
    assert messages == ["BatchNormRecalibration does nothing: Choosing has no batch norm with running statistics."]
    assert len(task.found("val end")) == 4


# ---- for other callbacks


def test_context_manager_and_pairs_nest(tmp_path):
    callback, inside = BatchNormRecalibration(images=45, batch_size=45), BatchNormRecalibration(exact=True)
    task, data = Choosing(), digits()
    results = {}

    class Asking(Callback):
        def on_train_end(self, trainer, module):
            before = statistics(module)
            with inside.recalibrated(trainer, module) as measured:
                assert measured
                exact = statistics(module)
                with callback.recalibrated(trainer, module):
                    results["mean"] = statistics(module)
                assert equal(statistics(module), exact)
                chosen, module.choose = module.choose, lambda task: []
                with inside.recalibrated(trainer, module) as measured:
                    assert measured is False
                assert equal(statistics(module), exact)  # what was measured before is not put back too early
                module.choose = chosen
            assert equal(statistics(module), before)
            with pytest.raises(RuntimeError, match="inside"), callback.recalibrated(trainer, module):
                raise RuntimeError("inside")
            assert equal(statistics(module), before)
            assert callback.recalibrate(trainer, module)
            assert callback.recalibrate(trainer, module)
            for _ in range(3):  # once more than needed
                callback.restore(module)
            assert equal(statistics(module), before)
            results["exact"] = exact

    trainer(tmp_path, Asking()).fit(task, data)
    x = images(data)
    check(results["mean"], one_pass(task, [x[::2]]))
    check(results["exact"], one_pass(task, x.split(40), exact=True))


# ---- checkpoints


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("after_validation", [False, True])
@pytest.mark.few(4)
def test_checkpoint_and_resume(tmp_path, keep, after_validation):
    def fit(path, *callbacks, ckpt_path=None):
        task = Normed()
        task.features[3].p = 0.0  # Lightning does not resume random numbers
        saving = ModelCheckpoint(
            path, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1,
            save_on_train_epoch_end=not after_validation,
        )  # fmt: skip
        # The recalibration comes last in the list; Lightning puts ModelCheckpoint behind it all the same.
        callbacks = [saving, *callbacks, BatchNormRecalibration(keep=keep)]
        run = trainer(path, *callbacks, max_epochs=4)
        run.fit(task, digits(), ckpt_path=ckpt_path, weights_only=True)
        return task

    whole = fit(tmp_path / "whole")
    assert_refused(lambda: fit(tmp_path / "part", Interrupt("2 0")), says="interrupted", error=RuntimeError)
    resumed = fit(tmp_path / "resumed", ckpt_path=tmp_path / "part" / "1.ckpt")
    assert equal(whole.state_dict(), resumed.state_dict())
    for one, two in zip(whole.found("val")[-3:], resumed.found("val")[-3:], strict=True):
        assert equal(one, two)

    saved = torch.load(tmp_path / "whole" / "3.ckpt", weights_only=True)["state_dict"]
    assert equal(saved, whole.state_dict())
    measured = whole.found("val")[-1]
    assert all(torch.equal(saved[name], measured[name]) for name in measured) == keep
    tracked = int(saved["features.1.num_batches_tracked"])
    # Of training: 5 batches in each of 4 epochs; measured: 2 batches.
    assert tracked == (2 if keep else 20)


def test_averaged_weights_keep_their_statistics(tmp_path):
    plain = Normed()
    trainer(tmp_path, max_epochs=2).fit(plain, digits())
    task, data = Normed(), digits()
    callbacks = [saving(tmp_path, save_on_train_epoch_end=False), WeightAveraging(avg_fn=float_average)]
    trainer(tmp_path, *callbacks, BatchNormRecalibration(keep=True), max_epochs=2).fit(task, data)
    check(statistics(task), one_pass(task, images(data)[:80].split(40)))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert equal(saved["state_dict"], task.state_dict())
    assert equal(saved["current_model_state"], plain.state_dict())


# ---- errors


class Empty(DigitsDataModule):
    def curvature_dataloader(self):
        x, y = self.split_tensors("train")
        return TensorLoader(x, y, batch_size=4, mean=self.mean, std=self.std, rank=0, world_size=1000)


class Formless(Normed):
    forward = LightningModule.forward

    def validation_step(self, batch, batch_idx):
        pass


def test_a_task_without_statistics_needs_no_forward(tmp_path):
    task = Formless()
    task.features = nn.BatchNorm2d(1, track_running_stats=False)
    trainer(tmp_path, BatchNormRecalibration()).validate(task, digits(), verbose=False)


ZOO = MultiLayerPerceptron(widths=(8, 6), image_size=8)


@pytest.mark.parametrize(
    ("task", "callbacks", "data", "error", "says"),
    [
        (Normed, [{}], Empty(max_samples=90, batch_size=16), ValueError, "needs training data, but"),
        (Normed, [{}], None, TypeError, "needs a datamodule of lightning_sym.datamodules"),
        (Formless, [{}], digits(), ValueError, "Formless with inputs, but it has no forward method; define forward"),
        (lambda: Choosing(lambda task: [(task.features, ["1", "4"])]), [{}], digits(), ValueError, "batch norm '4'"),
        (lambda: ZooTask(ZOO, members=2), [{}], digits(), TypeError, "ZooTask evaluates the members of a population"),
        (Normed, [WeightAveraging, {}], digits(), ValueError,
         "keep=False) cannot restore statistics that WeightAveraging has swapped"),
        (Normed, [{"keep": True}, WeightAveraging], digits(), ValueError, "precedes WeightAveraging and would"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(tmp_path, task, callbacks, data, error, says):
    made = [BatchNormRecalibration(**one) if isinstance(one, dict) else one() for one in callbacks]
    run = trainer(tmp_path, *made, num_sanity_val_steps=0)
    loader = digits().test_dataloader()
    arguments = {"datamodule": data} if data else {"train_dataloaders": loader, "val_dataloaders": loader}
    assert_refused(lambda: run.fit(task(), **arguments), error=error, says=says)
    assert not isinstance(MatchingTask, RecalibrationTargets)
