"""SymmetryTeleportation: functions stay, gradients grow, the optimiser's state moves along, arms are compared."""

import copy
import functools
import math

import pytest
import torch
from fits import Interrupt, digits, fit, saving
from helpers import assert_same, read_csv, read_rows
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from lightning_sym.callbacks import SymmetryTeleportation, TeleportationReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.orbit import Objective
from lightning_sym.orbit.teleportation import Teleportation
from lightning_sym.reports.teleportation import teleportation_results
from lightning_sym.symmetry import balance, trace_symmetry
from lightning_sym.tasks import TeleportationTask, ZooTask

ARMS = ["plain", "ascent", "descent", "random"]
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network():
    return MultiLayerPerceptron(widths=(8, 6), image_size=8)


class Watch(Callback):
    """Keeps outputs and gradients of all members at the start of an epoch, and the momenta."""

    def __init__(self, epoch):
        self.epoch, self.outputs, self.gradients, self.momenta = epoch, {}, {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch != self.epoch or batch_idx:
            return
        data = trainer.datamodule
        images, labels = (torch.cat(parts) for parts in zip(*data.curvature_dataloader(), strict=True))
        for number in pl_module.numbers:
            own = pl_module.population.network(number)
            outputs = own(images.to(next(own.parameters()).dtype))
            loss = nn.functional.cross_entropy(outputs, labels)
            found = torch.autograd.grad(loss, list(own.parameters()))
            self.outputs[number], self.gradients[number] = outputs.detach(), [one.detach() for one in found]
            state = trainer.optimizers[0].state
            self.momenta[number] = [copy.deepcopy(state.get(p, {}).get("momentum_buffer")) for p in own.parameters()]


def moves(**settings):
    own = {"images": 10**6, "max_steps": 4, **settings}
    return [SymmetryTeleportation([1], arm=way, way=way, **own) for way in ARMS[1:]]


def run(callbacks, **settings):
    task = TeleportationTask(network(), arms=ARMS, rates=[0.1], seeds=2, optimizer=MOMENTUM)
    watch = Watch(1)
    fit(task, digits(), *callbacks, watch, max_epochs=2, precision="64-true", **settings)
    return task, watch


def test_functions_stay_and_gradients_grow_fall_or_change():
    task, watch = run(moves())
    squares = {n: sum(float(g.square().sum()) for g in own) for n, own in watch.gradients.items()}
    for number in task.numbers:
        plain = task.seed_of(number) * len(ARMS)
        torch.testing.assert_close(watch.outputs[number], watch.outputs[plain], rtol=1e-10, atol=1e-10)
        arm = task.arm_of(number)
        assert (arm == "plain") == (squares[number] == squares[plain])
        assert arm != "ascent" or squares[number] > 1.05 * squares[plain]
        assert arm != "descent" or squares[number] < squares[plain]


def test_reset_empties_the_state():
    _, watch = run(moves(reset_state=True))
    kept = [own is not None for momenta in watch.momenta.values() for own in momenta]
    assert sum(kept) == len(kept) // 4  # of the arm that does not move


def test_members_of_one_seed_begin_alike_and_see_the_same_data():
    task, watch = run([])
    for number in task.numbers:
        assert torch.equal(watch.outputs[number], watch.outputs[task.seed_of(number) * len(ARMS)])
    assert not torch.equal(watch.outputs[0], watch.outputs[len(ARMS)])


def test_each_learning_rate_is_used():
    task = TeleportationTask(network(), arms=["a"], rates=[0.1, 0.01], optimizer=MOMENTUM)
    assert {"arms": ["a"], "rates": [0.1, 0.01]}.items() <= task.identity().items()
    fit(task, max_epochs=1)
    for number, rate in enumerate([0.1, 0.01]):
        alone = ZooTask(network(), 1, optimizer=functools.partial(MOMENTUM, lr=rate), keep="last")
        fit(alone, max_epochs=1)
        assert_same(task.kept[number]["state"], alone.kept[0]["state"])


def test_random_elements_move_the_chosen_factors_by_the_budget():
    own = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3))
    symmetry = trace_symmetry(own, torch.randn(2, 4))

    def drawn(seed, budget=1.0, factors="all"):
        found = Teleportation("random", factors=factors, budget=budget).found(symmetry, own, None, seed=seed)
        assert math.isnan(found.before)
        assert found.seconds > 0
        return found.element

    moved = {"all": {"log_scale", "dense", "shift"}, "scales": {"log_scale"}, "cells": {"dense"}}
    for factors, names in moved.items():
        element = drawn(0, factors=factors)
        parts = {one.name for one in symmetry.factors if not one.is_identity(element.parts[one.name])}
        assert parts == names
    one, two = drawn(0).log_scale, drawn(0, 2.0).log_scale
    torch.testing.assert_close(2 * one, two)
    assert not torch.equal(one, drawn(1).log_scale)


def test_each_member_moves_by_its_own_element_at_each_epoch(monkeypatch):
    elements, found = [], Teleportation.found

    def watched(*arguments, **keywords):
        result = found(*arguments, **keywords)
        elements.append(result.element.log_scale)
        return result

    monkeypatch.setattr(Teleportation, "found", watched)
    for _ in range(2):
        fit(ZooTask(network(), 2), digits(), SymmetryTeleportation([0, 1], "random"), max_epochs=2)
    assert len(elements) == 8
    assert all(torch.equal(one, two) for one, two in zip(elements[:4], elements[4:], strict=True))
    assert len({float(one[0]) for one in elements}) == 4


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(("optimizer", "rate"), [(None, 0.1), (MOMENTUM, 0.05), (ADAM, 0.01)])
def test_training_on_canonical_weights_forgets_the_point_of_the_orbit(optimizer, rate):
    """Balanced weights and state are the same after a move to any other point, with momenta and second moments."""
    arms = ["free", "canonical", "elsewhere"]
    task = TeleportationTask(network(), arms=arms, rates=[rate], optimizer=optimizer)
    moves = [
        SymmetryTeleportation([0, 1], "random", factors="scales", arm="elsewhere"),
        *(SymmetryTeleportation(way="balance", every_n_steps=1, arm=arm) for arm in arms[1:]),
    ]
    fit(task, digits(), *moves, max_epochs=3, precision="64-true")
    free, canonical, elsewhere = (task.kept[number]["state"] for number in range(3))
    for key, value in canonical.items():
        torch.testing.assert_close(elsewhere[key], value, rtol=1e-6, atol=1e-9)
        assert not torch.allclose(free[key], value, rtol=1e-3, atol=1e-4)


class Steps(SymmetryTeleportation):
    """Keeps the steps of all moves."""

    def __init__(self, **settings):
        super().__init__(way="balance", **settings)
        self.steps = []

    def _networks(self, pl_module):
        self.steps.append(pl_module.trainer.global_step)
        return super()._networks(pl_module)


@pytest.mark.parametrize("batches", [1, 2])
def test_networks_move_once_each_number_of_steps_also_if_resumed(tmp_path, batches):
    def trained(moves, *more, **settings):
        task = ZooTask(network(), 1, optimizer=MOMENTUM, keep="last")
        settings = {"max_epochs": 3, "accumulate_grad_batches": batches, **settings}
        fit(task, digits(), moves, *more, **settings)
        return task

    whole, first, second = (Steps(every_n_steps=3) for _ in range(3))
    task = trained(whole)
    count = task.trainer.global_step
    assert whole.steps == list(range(0, count, 3))
    with pytest.raises(RuntimeError, match="interrupted"):
        trained(first, Interrupt("1 1"), saving(tmp_path))
    again = trained(second, ckpt_path=tmp_path / "last.ckpt")
    assert first.steps == whole.steps[: len(first.steps)]
    assert second.steps == [step for step in whole.steps if step >= count // 3]  # those after the first epoch
    assert_same(task.kept[0]["state"], again.kept[0]["state"])


def test_moves_are_logged_at_the_trainers_multiples_of_steps(tmp_path):
    moves = SymmetryTeleportation(way="balance", every_n_steps=2)
    settings = {"max_epochs": 3, "log_every_n_steps": 3, "logger": MetricsCSV(tmp_path)}
    fit(ZooTask(network(), 1), digits(), moves, **settings)
    names = [f"teleportation/objective_{end}" for end in ("after", "before")]
    rows = [row for row in read_csv(tmp_path / "metrics.csv") if row.get(names[0])]
    assert [int(row["step"]) for row in rows] == [0, 5, 11]  # moves before the steps 0, 6 and 12
    assert all(float(row[names[0]]) < float(row[names[1]]) for row in rows)


@pytest.mark.filterwarnings("ignore:.*was stopped in epoch")
@pytest.mark.parametrize("way", ["balance", "ascent"])
def test_a_member_with_weights_that_overflowed_does_not_end_the_others(way):
    class Overflowed(ZooTask):
        def make_member(self, number):
            member = super().make_member(number)
            if number == 1:
                torch.nn.init.constant_(next(member.parameters()), math.inf)
            return member

    task = Overflowed(network(), 2, optimizer=MOMENTUM, keep="last")
    fit(task, digits(), SymmetryTeleportation(way=way, every_n_steps=1), max_steps=3)
    alone = ZooTask(network(), 1, optimizer=MOMENTUM, keep="last")
    fit(alone, digits(), SymmetryTeleportation(way=way, every_n_steps=1), max_steps=3)
    assert [*task.stopped] == [1]
    assert_same(task.population.member_state(0), alone.population.member_state(0))


def test_balanced_weights_keep_the_function_and_have_equal_norms():
    task, watch = run([SymmetryTeleportation([1], "balance", arm="ascent")])
    for number in task.numbers:
        plain = task.seed_of(number) * len(ARMS)
        torch.testing.assert_close(watch.outputs[number], watch.outputs[plain], rtol=1e-10, atol=1e-10)
    symmetry = trace_symmetry(network(), torch.randn(2, 1, 8, 8))
    own = symmetry.act(symmetry.sample(scale=1.0), network().double())
    move = Teleportation("balance").found(symmetry, own, None)
    moved = symmetry.act(move.element, own)
    for one in balance(symmetry, moved).values():
        torch.testing.assert_close(one.incoming, one.outgoing, rtol=1e-9, atol=0)
    norms = [sum(float(w.detach().square().sum()) for w in each.parameters()) for each in (own, moved)]
    assert [move.before, move.after] == pytest.approx(norms, rel=1e-12)


def test_matrices_balance_only_where_no_state_must_follow():
    own = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    symmetry = trace_symmetry(own, torch.randn(2, 4))
    own, optimizer = own.double(), torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)

    def moved(**settings):
        element = Teleportation("balance", **settings).found(symmetry, own, None, optimizer).element
        return {one.name for one in symmetry.factors if not one.is_identity(element.parts[one.name])}

    assert "dense" in moved()
    own(torch.randn(2, 4).double()).sum().backward()
    optimizer.step()
    assert moved() == {"log_scale"}
    assert "dense" in moved(reset_state=True)
    with pytest.raises(ValueError, match="cannot move under cells"):
        moved(factors="cells")


class Plain(LightningModule):
    """A task of a user, without a datamodule."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("objective", ["gradient_norm", "weight_norm", "quantization_error"])
def test_any_module_with_a_network_moves_by_any_objective(objective):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    task = Plain()
    before, inputs = copy.deepcopy(task.net), torch.randn(5, 4)
    moved = SymmetryTeleportation([0], objective=objective, network="net")
    fit(task, torch.utils.data.DataLoader(data, batch_size=8), moved, max_epochs=1)
    assert not torch.equal(task.net[0].weight, before[0].weight)
    torch.testing.assert_close(task.net(inputs), before(inputs))


class Recorded(Objective):
    """The norm of the weights, which keeps the numbers of images of its batches."""

    reads_data = True

    def __init__(self):
        self.sizes = set()

    def __call__(self, view, batch=None):
        inputs, targets = batch
        self.sizes.add((len(inputs), len(targets)))
        return sum(own.square().sum() for own in view.values())


@pytest.mark.parametrize(("images", "count"), [(16, 16), (20, 20), (1000, 80)])
def test_named_members_move_by_the_first_images(images, count):
    objective = Recorded()
    own = SymmetryTeleportation([0], "descent", objective, images=images, max_steps=1, members=[1, 7])
    task = ZooTask(network(), 2, optimizer=functools.partial(torch.optim.SGD, lr=0.0), keep="last")
    fit(task, digits(), own, max_epochs=1)
    assert objective.sizes == {(count, count)}
    for number, moving in enumerate([False, True]):
        start = task.make_member(number).state_dict()
        assert moving != torch.equal(task.kept[number]["state"]["linear1.weight"], start["linear1.weight"])
        norms = [
            sum(float(one.square().sum()) for one in state.values()) for state in (task.kept[number]["state"], start)
        ]
        assert norms[0] < norms[1] - 0.1 if moving else norms[0] == norms[1]


class Two(Plain):
    """A task of two networks, each with its optimiser."""

    def __init__(self, split):
        super().__init__()
        self.split, self.automatic_optimization = split, False
        self.other = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        nn.functional.cross_entropy(self.net(inputs) + self.other(inputs), targets).backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        mine = [[*self.other.parameters(), *self.net[2].parameters()], [*self.net[0].parameters()]]
        mine = mine if self.split else [[*self.other.parameters()], [*self.net.parameters()]]
        return [torch.optim.SGD(own, lr=0.01, momentum=0.9) for own in mine]


class AtRest(SymmetryTeleportation):
    """Keeps the momenta before and after a move, and the element."""

    def _moved(self, trainer, network, data, number):
        def momenta():
            return [trainer.optimizers[1].state[own]["momentum_buffer"].clone() for own in network.parameters()]

        self.before = momenta()
        found = super()._moved(trainer, network, data, number)
        self.after, self.scales = momenta(), found.element.parts["log_scale"].float().exp()
        return found


def test_the_state_of_the_networks_own_optimiser_moves():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    moves = AtRest([1], network="net")
    fit(Two(split=False), loader, moves, max_epochs=2)
    assert float((moves.scales - 1).abs().max()) > 0.01
    torch.testing.assert_close(moves.after[1], moves.before[1] / moves.scales)
    with pytest.raises(ValueError, match="2 optimisers train the network"):
        fit(Two(split=True), loader, SymmetryTeleportation([0], network="net"), max_epochs=1)


def test_the_report_names_the_best_rate_of_each_arm(tmp_path):
    task = TeleportationTask(network(), arms=["plain", "ascent"], rates=[1e-6, 0.1], seeds=2)
    log = CSVLogger(tmp_path, name="", version="log")
    fit(task, digits(), moves()[0], TeleportationReport(), folder=tmp_path, max_epochs=2, logger=log)
    logged = read_csv(tmp_path / "log" / "metrics.csv")
    name = "teleportation/ascent/objective"
    (moved,) = (row for row in logged if row.get(f"{name}_before"))
    assert int(moved["step"]) == 4  # the last of the epoch before
    assert 0 < float(moved[f"{name}_before"]) < float(moved[f"{name}_after"])
    assert float(moved["teleportation/ascent/seconds"]) > 0
    summary = read_rows(tmp_path / "log" / "results" / "summary")
    assert [(row["arm"], row["rate"]) for row in summary] == [("plain", 0.1), ("ascent", 0.1)]
    rows = read_rows(tmp_path / "log" / "results" / "runs")
    for row in summary:
        own = [one["loss"] for one in rows if (one["arm"], one["rate"]) == (row["arm"], row["rate"])]
        assert row["loss"] == pytest.approx(sum(own) / len(own))


def test_changes_are_taken_seed_by_seed_at_the_best_rates():
    losses = {"plain": {0.1: (4.0, 1.0), 1.0: (8.0, 8.0)}, "other": {0.1: (9.0, 9.0), 1.0: (1.0, 1.0)}}
    runs = [
        {"arm": arm, "rate": rate, "seed": seed, "loss": loss, "accuracy": 1 / (1 + loss)}
        for arm, rates in losses.items()
        for rate, own in rates.items()
        for seed, loss in enumerate(own)
    ]
    results = teleportation_results(runs, [], title="", about={})
    plain, other = results.tables[0].rows
    assert plain["loss_change"] is None
    assert other["loss_change"] == pytest.approx(0.5 - 1)  # the geometric mean of 1/4 and 1
    assert other["accuracy_change"] == pytest.approx((1 / 2 - 1 / 5 + 0) / 2)
    half = 12.706204736 * math.log(4) / 2  # Student's, of one degree of freedom
    middle = math.log(0.5)
    assert math.log1p(other["loss_change_low"]) == pytest.approx(middle - half)
    assert math.log1p(other["loss_change_high"]) == pytest.approx(middle + half)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SymmetryTeleportation([-1]), "epochs"),
        (lambda: SymmetryTeleportation([1], way="up"), 'way must be "ascent"'),
        (lambda: SymmetryTeleportation([1], every_n_steps=2), r"either epochs or every_n_steps, got \[1\] and 2"),
        (lambda: SymmetryTeleportation(every_n_steps=0), "every_n_steps must be"),
        (lambda: SymmetryTeleportation([1], budget=0), "budget"),
        (lambda: SymmetryTeleportation([1], objective="gradient_nrm"), "gradient_norm"),
        (lambda: TeleportationTask(network(), arms=["a", "a"], rates=[0.1]), "arms must be a list of different"),
        (lambda: TeleportationTask(network(), arms=["a"], rates=[-0.1]), "rates must be a number > 0"),
        (lambda: TeleportationTask(network(), arms=["a"], rates=[]), "rates must be a list of different"),
        (lambda: TeleportationTask(network(), arms=["a"], rates=[0.1], seeds=0), "seeds must be"),
        (lambda: SymmetryTeleportation([1], images=0), "images must be"),
        (lambda: SymmetryTeleportation([1], max_steps=0), "max_steps must be"),
        (lambda: fit(ZooTask(network(), 1), None, SymmetryTeleportation([0], arm="a"), max_epochs=1), "names an arm"),
        (
            lambda: fit(ZooTask(network(), 2, execution="vmap"), None, SymmetryTeleportation([5]), max_epochs=1),
            'execution="loop"',
        ),
        (
            lambda: fit(ZooTask(network(), 1), None, SymmetryTeleportation([0], factors="cells"), max_epochs=1),
            "Unknown factor",
        ),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_epochs_are_a_list():
    with pytest.raises(TypeError, match=r"as \[1\]"):
        SymmetryTeleportation(1)


def test_means_and_members_are_logged_and_nothing_that_was_not_computed(tmp_path):
    logger = MetricsCSV(tmp_path)
    task = TeleportationTask(network(), arms=["plain", "to the top", "random"], rates=[0.1], seeds=2)
    callbacks = [
        SymmetryTeleportation([0], arm="to the top", images=20, max_steps=2),
        SymmetryTeleportation([0], "random", arm="random"),
    ]
    fit(task, digits(), *callbacks, max_epochs=1, logger=logger)
    (row,) = [one for one in read_csv(tmp_path / "metrics.csv") if one.get("teleportation/random/seconds")]
    (other,) = [one for one in read_csv(tmp_path / "metrics.csv") if one.get("teleportation/to_the_top/seconds")]
    assert not any("random/objective" in name for name in row)
    for name in ("objective_before", "objective_after"):
        members = [float(other[f"details/teleportation/to_the_top/{name}/member-{n:04d}"]) for n in (1, 4)]
        assert float(other[f"teleportation/to_the_top/{name}"]) == pytest.approx(sum(members) / 2)
