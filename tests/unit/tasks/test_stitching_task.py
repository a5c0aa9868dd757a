"""StitchingTask: maps do not interact, halves stay as they are, and what cannot be stitched is refused."""

import functools
import warnings
from collections.abc import Callable

import fits
import pytest
import torch
from fits import quiet_trainer
from helpers import assert_refused, assert_same, randomize_statistics, write_zoo
from jsonargparse import ArgumentParser
from pytorch_lightning import Callback, Trainer
from torch import nn

from lightning_sym._tags import tag
from lightning_sym.callbacks import BatchNormRecalibration
from lightning_sym.datamodules import Resized
from lightning_sym.networks import CIFARResNet, MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.stitching import CutNetwork, GroupMap, Port, StitchingMap
from lightning_sym.tasks import RotationTask, StitchingTask
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")


digits = functools.partial(fits.digits, batch_size=50, max_samples=300)
make_trainer = functools.partial(quiet_trainer, max_epochs=2, num_sanity_val_steps=0)


def fit(task, data=None, **changes) -> Trainer:
    return fits.fit(task, data or digits(), **{"max_epochs": 2, "num_sanity_val_steps": 0, **changes})


def sgd(**changes):
    return functools.partial(torch.optim.SGD, **{"lr": 0.1, **changes})


def zoo_of(path, make, data=None, count=3):
    return write_zoo(
        path, [randomize_statistics(make().fresh(number), number) for number in range(count)], data or digits()
    )


@pytest.fixture(scope="module")
def norm_zoo(tmp_path_factory):
    """Three small CNNs with batch norms."""
    return zoo_of(tmp_path_factory.mktemp("norms"), lambda: MyrtleCNN(2, in_channels=1, image_size=8))


@pytest.fixture(scope="module")
def residual_zoo(tmp_path_factory):
    return zoo_of(tmp_path_factory.mktemp("residual"), lambda: CIFARResNet(20, width=2, in_channels=1), count=2)


def maps_of(task) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {k: v.detach().clone() for k, v in branch.maps.state_dict().items()}
        for name, branch in zip(task.names, task.branches, strict=True)
    }


# ---- maps do not interact


SITES = ["activation2", "activation4"]


def test_the_halves_and_the_members_stay_as_they_are(norm_zoo):
    task = StitchingTask(str(norm_zoo), pairs=[[0, 1], [1, 2]], sites=SITES, maps=["full", "group"], optimizer=sgd())
    fit(task, callbacks=[BatchNormRecalibration()])
    zoo = ModelZoo.open(norm_zoo)
    for number in range(3):
        state = zoo.state(number)
        assert_same(state, task.members[str(number)].state_dict())
    for index, branch in enumerate(task.branches):
        upper = zoo.state(task.stitches[index].pair[1])
        assert all(torch.equal(p, upper[name]) for name, p in branch.upper.named_parameters())
        assert not any(p.requires_grad for p in branch.upper.parameters())
        assert all(p.grad is None for p in branch.upper.parameters())
        # Of batch norm they have statistics of their own.
        if branch.batch_norms():
            assert any(not torch.equal(b, upper[name]) for name, b in branch.upper.named_buffers())
    pointers = [m.running_mean.data_ptr() for branch in task.branches for m in branch.batch_norms().values()]
    assert len(pointers) == len(set(pointers))


def test_a_step_runs_each_lower_part_once_and_only_upper_parts(norm_zoo):
    calls: dict[str, int] = {}

    class Counting(StitchingTask):
        def build(self):
            super().build()
            for key, cut in self.lowers.items():
                cut.lower.register_forward_hook(functools.partial(self.count, f"lower {key}"))
            for index, branch in enumerate(self.branches):
                branch.upper.register_forward_hook(functools.partial(self.count, f"upper {index}"))
            for key, network in self.members.items():
                network.register_forward_hook(functools.partial(self.count, f"member {key}"))

        def count(self, name, *_):
            calls[name] = calls.get(name, 0) + 1

    task = Counting(str(norm_zoo), pairs=[[0, 1], [0, 2], [1, 2]], maps=["full", "group"])
    fit(task, max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    assert calls == {"lower 0": 3, "lower 1": 3, **{f"upper {i}": 3 for i in range(24)}}


class Record(Callback):
    """Keeps a parameter after every step."""

    def __init__(self, name):
        self.name, self.found = name, []

    def on_train_batch_end(self, trainer, task, *args):
        self.found.append(dict(task.branches[0].maps.named_parameters())[self.name].detach().clone())


@pytest.mark.parametrize(
    ("head_start", "steps", "held"),
    [
        (0.5, {"max_epochs": 4, "limit_train_batches": 2}, 4),
        *((share, {"max_epochs": -1, "max_steps": 8}, held) for share, held in ((0.0, 0), (1.0, 8), (0.5, 4))),
    ],
)
@pytest.mark.few(3)
def test_scales_stay_at_one_in_the_head_start(matching_zoo, head_start, steps, held):
    """Of the epochs, or of the steps if epochs have no end."""
    settings = {"maps": ["group"], "head_start": head_start, "optimizer": sgd(momentum=0.9, weight_decay=0.1)}
    task = StitchingTask(str(matching_zoo), pairs=[[0, 2]], sites=["activation1"], **settings)
    scale, weights = Record("0.scale"), Record("0.weights")
    fit(task, callbacks=[scale, weights], **steps)
    assert [torch.equal(found, torch.ones(12)) for found in scale.found] == [step < held for step in range(8)]
    assert not torch.equal(weights.found[0], weights.found[1])


class Counted(GroupMap):
    projections = 0

    def project(self):
        type(self).projections += 1
        super().project()


def test_maps_are_projected_after_real_steps_only(matching_zoo):
    Counted.projections = 0
    task = StitchingTask(str(matching_zoo), pairs=[[0, 1]], sites=["activation1"], maps=[Counted])
    trainer = fit(task, max_epochs=1, accumulate_grad_batches=2)
    assert Counted.projections == trainer.global_step == 3
    assert trainer.num_training_batches in (5, 6)
    assert task.names == ["pair-0-1/activation1/Counted"]
    weights = task.branches[0].stitching_maps[0].weights
    torch.testing.assert_close(weights.sum(0), torch.ones(12))
    assert (weights >= 0).all()


# ---- what diverges


class Jumps(GroupMap):
    """Its gradient is infinite, so that its weights are soon not finite, with a loss that is."""

    def regularization(self):
        return (self.weights.sum() * 0).sqrt()


@pytest.mark.parametrize("bad", [Jumps, functools.partial(Jumps, projection="euclidean")])
@pytest.mark.parametrize("val_fraction", [0.1, 0.0])
@pytest.mark.long
def test_one_that_diverges_stops_and_the_others_go_on(norm_zoo, bad, val_fraction):
    def run(maps):
        task = StitchingTask(str(norm_zoo), pairs=[[0, 1]], sites=["activation2"], maps=maps, optimizer=sgd())
        data = digits(val_fraction=val_fraction)
        trainer = make_trainer(gradient_clip_val=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(task, data)
            (tested,) = trainer.test(task, data, verbose=False)
        return task, [str(w.message) for w in caught], tested

    task, said, tested = run(["full", bad, "group"])
    alone, _, tested_alone = run(["full", "group"])
    assert list(task.stopped) == [1]
    assert ["Jumps" in text for text in said if "was stopped" in text] == [True]
    found, expected = maps_of(task), maps_of(alone)
    assert_same({name: found[name] for name in alone.names}, expected)
    assert tested["test_penalty/full"] == tested_alone["test_penalty/full"]
    assert not any("Jumps" in name for name in tested)


# ---- what is kept and tested


class Validation(Callback):
    """Every map's validation accuracy and loss, by epoch."""

    def __init__(self):
        self.found = []

    def on_validation_end(self, trainer, task):
        self.found.append(maps_of(task))


def test_the_best_epoch_is_kept_and_tested_and_the_current_weights_come_back(norm_zoo):
    task = StitchingTask(
        str(norm_zoo), pairs=[[0, 1]], sites=["activation2"], maps=["full", "group"], optimizer=sgd(lr=1.0)
    )
    seen = []
    log = task._log_epoch
    task._log_epoch = lambda split, metric: seen.append((split, log(split, metric))) or seen[-1][1]
    weights = Validation()
    data = digits()
    trainer = make_trainer(max_epochs=5, callbacks=[weights])
    trainer.fit(task, data)
    for index, name in enumerate(task.names):
        scores = [(metrics["accuracy"][index], -metrics["loss"][index]) for split, metrics in seen if split == "val"]
        best = max(range(5), key=lambda epoch: (scores[epoch], -epoch))
        kept = task.kept[index]
        assert kept["epoch"] == best
        assert kept["metrics"] == {"accuracy": scores[best][0], "loss": -scores[best][1]}
        for key, value in weights.found[best][name].items():
            assert torch.equal(kept["state"][f"maps.{key}"], value)
    before = [task.population.member_state(i) for i in task.numbers]
    # The test has the kept weights: put them in by hand, and look.
    tested = trainer.test(task, data, verbose=False)[0]
    for i in task.numbers:
        assert_same(before[i], task.population.member_state(i))
        task.population.set_member_state(i, task.kept[i]["state"])
    images, labels = data.split_tensors("test")
    images = data.normalize(images)
    task.kept = {}
    for index, branch in enumerate(task.branches):
        branch.eval().set_mode("hard")
        accuracy = float((branch(images).argmax(1) == labels).double().mean())
        clean = [float((task.members[k](images).argmax(1) == labels).double().mean()) for k in ("0", "1")]
        family = task.stitches[index].family
        assert tested[tag("test_penalty", family)] == pytest.approx(sum(clean) / 2 - accuracy, abs=1e-6)
        assert tested[f"test_penalty/activation2/{family}"] == tested[tag("test_penalty", family)]


# ---- settings


def test_maps_may_start_from_features(matching_zoo):
    task = StitchingTask(
        str(matching_zoo), pairs=[[0, 1]], maps=["full", "group", "rank(4)"], init="features", optimizer=sgd(lr=1e-4)
    )
    trainer = fit(task, max_epochs=1, limit_train_batches=1)
    assert float(trainer.callback_metrics["penalty/group"]) == 0
    assert float(trainer.callback_metrics["train/loss"]) > 0


def test_every_site_with_every_site(matching_zoo, norm_zoo):
    task = StitchingTask(str(matching_zoo), pairs=[[0, 2]], sites="any", maps=["full", "group", "identity"])
    fit(task, max_epochs=1)
    places = {stitch.place for stitch in task.stitches}
    assert places == {"activation1", "activation1-activation2", "activation2-activation1", "activation2"}
    assert "group" not in {s.family for s in task.stitches if s.site != s.target_site}
    assert set(task.left_out) == {
        f"{place}/{family}"
        for place in ("activation1-activation2", "activation2-activation1")
        for family in ("group", "identity")
    }
    assert all("needs equal widths" in reason for reason in task.left_out.values())
    task = StitchingTask(str(norm_zoo), pairs=[[0, 1]], sites="any", maps=["full"], resize=True)
    fit(task, fast_dev_run=True)
    # Downwards in resolution only: 8x8 twice, 4x4, 2x2.
    assert len(task.stitches) == 4 + 4 + 2 + 1
    assert len(task.left_out) == 5
    assert all("positions" in reason for reason in task.left_out.values())


def test_upper_parts_of_another_zoo(matching_zoo, norm_zoo):
    task = StitchingTask(
        str(norm_zoo),
        target_zoo=str(matching_zoo),
        pairs=[[0, 0], [1, 2]],
        sites=[["activation4", "activation1"]],
        maps=["full"],
    )
    assert_refused(fit, task, says="cannot become one of shape")
    other = StitchingTask(str(matching_zoo), target_zoo=str(matching_zoo), pairs=[[0, 0]], maps=["identity"])
    trainer = fit(other, max_epochs=1)
    assert float(trainer.callback_metrics["penalty/identity"]) == 0
    assert set(other.members) == {"0", "target-0"}


def test_upper_parts_of_another_architecture(norm_zoo, tmp_path):
    zoo_of(tmp_path, lambda: CIFARResNet(20, width=2, in_channels=1), count=1)
    task = StitchingTask(
        str(norm_zoo),
        target_zoo=str(tmp_path),
        pairs="all",
        sites=[["activation1", "activation"], ["activation3", "blocks.3.activation2"]],
        maps=["full"],
        resize=True,
        batch_norm="frozen",
    )
    data = digits(max_samples=100)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(task, data)
    assert task.pairs == [(0, 0), (1, 0), (2, 0)]
    assert [str(stitch) for stitch in task.stitches[:2]] == [
        "pair-0-0/activation1-activation/full",
        "pair-0-0/activation3-blocks.3.activation2/full",
    ]
    with pytest.raises(ValueError, match=r"MyrtleCNN and CIFARResNet have different sites; give pairs of them as"):
        fit(StitchingTask(str(norm_zoo), target_zoo=str(tmp_path)), data)


def test_only_untrained_maps(norm_zoo):
    task = StitchingTask(str(norm_zoo), pairs=[[0, 1]], maps=["identity", "assignment"])
    trainer = fit(task, max_epochs=1, callbacks=[BatchNormRecalibration(images=100)])
    assert "penalty/assignment" in trainer.callback_metrics
    assert "train/loss" not in trainer.callback_metrics
    (tested,) = trainer.test(task, digits(), verbose=False)
    assert "test_penalty/identity" in tested


def test_channels_last_is_the_same_up_to_rounding(norm_zoo):
    found = []
    for channels_last in (False, True):
        task = StitchingTask(
            str(norm_zoo), pairs=[[0, 1]], maps=["full", "group"], optimizer=sgd(), channels_last=channels_last
        )
        fit(task, max_epochs=1)
        found.append(maps_of(task))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)  # float32


class Doubled(StitchingMap):
    """A family of a user."""

    def __init__(self, port: Port, factor: float = 2.0) -> None:
        super().__init__(port)
        self.weight = nn.Parameter(torch.eye(port.out_channels, port.in_channels))
        self.factor = factor

    def matrix(self):
        return self.factor * self.weight


def test_a_family_of_one_s_own(matching_zoo):
    half = functools.partial(Doubled, factor=0.5)
    task = StitchingTask(str(matching_zoo), pairs=[[0, 1]], maps=["full", Doubled, half])
    trainer = fit(task, max_epochs=1)
    assert list(task.families) == ["full", "Doubled", "Doubled(factor=0.5)"]
    assert tag("penalty", "Doubled") in trainer.callback_metrics
    assert tag("penalty", "Doubled(factor=0.5)") in trainer.callback_metrics

    def wrong(port):
        return nn.Linear(port.in_channels, port.out_channels)

    assert_refused(lambda: fit(StitchingTask(str(matching_zoo), maps=[wrong])), says="A family must", error=TypeError)
    with pytest.raises(NotImplementedError, match="Doubled cannot start from moments of features"):
        fit(StitchingTask(str(matching_zoo), maps=[Doubled], init="features"))


def test_families_from_yaml_have_the_name_that_they_have_in_python(matching_zoo):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--maps", type=list[str | Callable[[Port], StitchingMap]])
    doubled = f"{Doubled.__module__}.Doubled"
    given = [
        "full",
        {"class_path": doubled},
        {"class_path": doubled, "init_args": {"factor": 0.5}},
        {"class_path": "lightning_sym.stitching.FullMap"},
        {"class_path": "lightning_sym.stitching.GroupMap", "init_args": {"projection": "euclidean"}},
    ]
    maps = parser.instantiate_classes(parser.parse_object({"maps": given})).maps
    names = list(StitchingTask(str(matching_zoo), maps=maps).families)
    assert names == ["full", "Doubled", "Doubled(factor=0.5)", "FullMap", "GroupMap(projection=euclidean)"]
    with pytest.raises(ValueError, match="maps must be different, got 'Doubled' twice"):
        StitchingTask(str(matching_zoo), maps=[Doubled, functools.partial(Doubled, factor=2.0)])


def test_pairs_are_drawn_by_seed(matching_zoo):
    drawn = []
    for seed in (0, 0, 1, 2, 3):
        task = StitchingTask(str(matching_zoo), pairs=4, maps=["identity"], seed=seed)
        fit(task, fast_dev_run=True)
        assert len(set(task.pairs)) == 4
        assert all(a != b for a, b in task.pairs)
        drawn.append(task.pairs)
    assert drawn[0] == drawn[1]
    assert len({tuple(pairs) for pairs in drawn}) > 1
    task = StitchingTask(str(matching_zoo), maps=["identity"])
    fit(task, fast_dev_run=True)
    assert task.pairs == [(0, 1), (0, 2), (1, 2)]
    assert_refused(lambda: fit(StitchingTask(str(matching_zoo), pairs=7)), says="has 6 ordered pairs, and 7 are asked")


def test_skip_connections_have_maps_of_their_own(residual_zoo):
    sites = ["activation", "blocks.0.activation1", "blocks.3.activation1"]
    for ports, counts in (("all", [1, 2, 2]), ("branch", [1, 1, 1])):
        task = StitchingTask(str(residual_zoo), sites=sites, maps=["full"], ports=ports)
        fit(task, fast_dev_run=True)
        assert [len(branch.maps) for branch in task.branches] == counts
    task = StitchingTask(str(residual_zoo), sites=[["activation", "blocks.0.activation1"]], maps=["full"])
    assert_refused(fit, task, says=("2 values cross the top network's cut", "but only 1 the bottom network's"))


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": [[0, 7]]}, r"No member 7 in .*; it has members 0-2; pairs, .* names it: say --model.pairs all"),
        ({"sites": ["activation3"]}, r"Unknown site 'activation3'; .*activation1, activation2"),
        ({"sites": ["head"]}, r"Unknown site 'head'; .*activation1, activation2"),  # after the last
        ({"sites": []}, 'sites must be "all", "any", a list of names or a list of pairs'),
        ({"sites": "some"}, 'sites must be "all", "any", a list of names or a list of pairs'),
        ({"sites": ["activation1", "activation1"]}, "sites must be different"),
        ({"sites": [["activation1"]]}, r"sites must be names or pairs of names, got \['activation1'\]"),
        ({"sites": [["activation1", "activation2"]], "maps": ["group"]}, "GroupMap needs equal widths, got 12 .* 10"),
        ({"sites": [["activation1", "activation2"]], "maps": ["identity"]}, "Nothing can be stitched: IdentityMap"),
        ({"maps": ["rank(11)"]}, "rank of LowRankMap must be an integer from 1 to 10"),
    ],
)
def test_what_does_not_fit_the_zoo_is_refused(matching_zoo, settings, message):
    with pytest.raises(ValueError, match=message):
        fit(StitchingTask(str(matching_zoo), **settings))


def test_sites_of_other_resolution_are_refused(norm_zoo):
    sites = [["activation1", "activation3"]]
    assert_refused(lambda: fit(StitchingTask(str(norm_zoo), sites=sites, maps=["full"])), says="has 4x4; set")
    with pytest.raises(ValueError, match=r"has 4x4 positions and .* has 8x8; choose sites with whole multiples"):
        fit(StitchingTask(str(norm_zoo), sites=[sites[0][::-1]], maps=["full"], resize=True))


def test_zoos_and_data_of_different_input_are_refused(matching_zoo, tmp_path):
    small = digits(transforms=[Resized(4)])
    zoo_of(tmp_path / "small", lambda: MultiLayerPerceptron([12, 10], image_size=4), small)
    task = StitchingTask(str(matching_zoo), target_zoo=str(tmp_path / "small"))
    assert_refused(fit, task, says=("have input_shape [1, 8, 8] and those of", "/small [1, 4, 4]; stitch zoos that"))
    assert_refused(lambda: fit(StitchingTask(str(matching_zoo)), small), says="trained with input_shape [1, 8, 8], and")


def test_other_datamodules_will_do_for_trained_maps(matching_zoo):
    fit(StitchingTask(str(matching_zoo), maps=["full", "group"]), fits.Theirs())
    task = StitchingTask(str(matching_zoo), maps=["full", "assignment"])
    says = "assignment is fitted to features of the training data and needs a datamodule of lightning_sym"
    assert_refused(fit, task, fits.Theirs(), says=says)


class Dropping(Network):
    """Has dropout after its site."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.flatten, self.first, self.activation = nn.Flatten(), nn.Linear(64, width), nn.ReLU()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(width, 10)

    def forward(self, x):
        return self.last(self.drop(self.activation(self.first(self.flatten(x)))))


def test_dropout_of_trained_upper_parts_depends_on_the_branch_only(tmp_path):
    zoo_of(tmp_path, Dropping, count=1)

    def run(kinds):
        task = RotationTask(str(tmp_path), kinds=kinds, repeats=1, optimizer=sgd(), allow=[__name__])
        fit(task)
        return [task.population.member_state(index)["upper.last.weight"] for index in task.numbers]

    together, alone = run(["none", "group"]), run(["group"])
    assert torch.equal(alone[0], together[1])
    assert not torch.equal(together[0], together[1])


class WithShift(Network):
    """Reads a buffer of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.flatten, self.first, self.activation = nn.Flatten(), nn.Linear(64, width), nn.ReLU()
        self.last = nn.Linear(width, 10)
        self.register_buffer("below", torch.rand(64))
        self.register_buffer("above", torch.rand(10))

    def forward(self, x):
        return self.last(self.activation(self.first(self.flatten(x) + self.below))) + self.above


def test_buffers_of_the_networks_follow_the_precision(tmp_path):
    zoo_of(tmp_path, WithShift, count=2)
    task = StitchingTask(str(tmp_path), maps=["full", "assignment"], allow=[__name__.partition(".")[0]])
    fit(task, max_epochs=1, precision="64-true")
    assert isinstance(task.lowers["0"], CutNetwork)
    assert task(torch.rand(2, 1, 8, 8, dtype=torch.float64)).dtype == torch.float64
