"""What every task with several networks must be, whatever its members are; ours, and two of the tests."""

import copy
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import HalfBlindTask
from fits import Interrupt, Poison, descended, digits, fit, quiet_trainer, saving
from helpers import assert_refused, assert_same, one_in, randomize_statistics, read_csv, write_zoo
from pytorch_lightning import Callback
from torch import Tensor, nn

from lightning_sym._tags import MOST_CURVES, is_detail
from lightning_sym.callbacks import BatchNormRecalibration, MergingReport, SymmetryTeleportation
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule, Resized
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.tasks import (
    CurveTask,
    EquivalenceTask,
    FineTuneTask,
    MatchingTask,
    PopulationTask,
    RashomonPruning,
    RotationTask,
    StitchingTask,
    TeleportationTask,
    WeightRegressionTask,
    ZooTask,
)
from lightning_sym.tasks._stopping import Divergence

pytestmark = [
    pytest.mark.usefixtures("unproven"),
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
]

# SGD, as Adam's first steps are the signs of gradients, which rounding decides where they are 0.
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
# Sums in float32 in another order, through some steps of SGD.
ROUNDING = {"atol": 2e-5, "rtol": 1e-4}


class Restless(Network):
    """A small network with batch norm and dropout."""

    def __init__(self, dropout: float = 0.3, batch_norm: bool = True) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear1 = nn.Linear(64, 8)
        self.norm1 = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.activation1 = nn.ReLU()
        self.dropout1 = nn.Dropout(dropout)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(6,), image_size=8)


def curves(zoo: Path, **settings: Any) -> CurveTask:
    own = {"decay": 1e-3, "optimizer": functools.partial(SGD, weight_decay=0.0)}
    return CurveTask(str(zoo.parent / "perceptrons"), **{**own, **settings})


def stitching(zoo: Path, **settings: Any) -> StitchingTask:
    own = {
        "sites": ["activation2", "activation4"],
        "pairs": [[0, 1], [1, 0]],
        "maps": ["full", "group", "lasso", "assignment"],
        "head_start": 0.5,
        "optimizer": SGD,
    }
    return StitchingTask(str(zoo), **{**own, **settings})


def rotation(zoo: Path, **settings: Any) -> RotationTask:
    own = {"sites": ["activation2"], "kinds": ["group", "orthogonal", "undo"], "repeats": 1, "optimizer": SGD}
    return RotationTask(str(zoo), **{**own, **settings})


def matching(zoo: Path, **settings: Any) -> MatchingTask:
    return MatchingTask(str(zoo.parent / "perceptrons"), **{"optimizer": SGD, **settings})


def fine_tuning(zoo: Path, **settings: Any) -> FineTuneTask:
    own = {"tasks": [0, 1], "members": 4, "optimizer": SGD}
    return FineTuneTask(perceptron(), str(zoo.parent / "perceptrons"), **{**own, **settings})


def teleporting(zoo: Path, **settings: Any) -> TeleportationTask:
    own = {"arms": ["plain"], "rates": [0.1, 0.05], "seeds": 2, "optimizer": SGD}
    return TeleportationTask(perceptron(), **{**own, **settings})


def pruning(zoo: Path, **settings: Any) -> RashomonPruning:
    slow = functools.partial(SGD, lr=0.005)  # the networks are trained: larger steps would enlarge what is rounded
    own = {"steps": 4, "fraction": 0.0, "tries": 9, "epsilon": 0.01, "magnitude": False, "optimizer": slow}
    return RashomonPruning(str(zoo.parent / "trained"), **{**own, **settings})


def search(**settings: Any) -> EquivalenceTask:
    own = {"members": 3, "teacher": 5, "optimizer": SGD, "stop_when_found": False, "execution": "loop"}
    return EquivalenceTask(perceptron(), **{**own, **settings})


class DigitsAsWeights(WeightRegressionTask):
    """Reads the 64 pixels of a digit as the weights of a network with 64 of them, and its class as their metric."""

    def evaluation_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = batch
        weights = images.flatten(-3) / (255 if images.dtype == torch.uint8 else 1)
        return torch.stack([weights, weights.sort(-1).values], -2), labels[..., None] / 10


def weight_regression(zoo: Path, **settings: Any) -> WeightRegressionTask:
    own = {"members": 5, "hidden": 4, "optimizer": functools.partial(SGD, lr=0.005)}
    return DigitsAsWeights(str(zoo.parent / "tiny"), **{**own, **settings})


@dataclass
class Case:
    """A task under test.

    Attributes:
        make: Returns it, given the zoo and settings.
        alone: Settings with which it has one member only.
        number: That member's number when it is alone.
        together: That member's number among all.
        vmap: Whether it runs vectorised.
        smooth: Settings without what depends on the batch or on draws, such as batch norm and dropout; None: it has it.
        processes: On how many it is tried, by strategy.
    """

    make: Callable[..., PopulationTask]
    alone: dict[str, Any]
    number: int
    together: int
    vmap: bool = True
    smooth: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=lambda: {"ddp_fork": 2, "ddp_members_fork": 3})


def restless(zoo: Path, network: Network | None = None, **settings: Any) -> ZooTask:
    return ZooTask(network or Restless(), **{"members": 3, "optimizer": SGD, **settings})


MEMBER = {"members": 1, "seed": 1}
CASES = {
    "zoo": Case(
        restless,
        MEMBER,
        1,
        1,
        smooth={"network": Restless(0.0, batch_norm=False)},
        processes={"ddp_fork": 3, "ddp_members_fork": 2},
    ),
    "half-blind": Case(lambda zoo, **s: HalfBlindTask(**{"members": 3, "optimizer": SGD, **s}), MEMBER, 1, 1),
    "curve": Case(curves, {"pairs": [[0, 2]], "kinds": ["chain"]}, 0, 3, processes={"ddp_fork": 3}),
    "search": Case(lambda zoo, **s: search(**s), {"members": 1}, 0, 0, processes={"ddp_members_fork": 2}),
    "stitching": Case(
        stitching,
        {"pairs": [[1, 0]], "sites": ["activation4"], "maps": ["group"]},
        0,
        13,
        vmap=False,
        smooth={"batch_norm": "frozen"},
        processes={"ddp_fork": 2},
    ),
    "fine-tuning": Case(fine_tuning, MEMBER, 1, 1),
    "weight-regression": Case(weight_regression, MEMBER, 1, 1, vmap=False, smooth={"arms": ["raw", "statistics"]}),
    "matching": Case(matching, {"pairs": [[0, 2]]}, 0, 1, vmap=False, processes={"ddp_fork": 2}),
    "pruning": Case(pruning, {"members": [1]}, 0, 1, vmap=False, processes={"ddp_fork": 3}),
    "teleportation": Case(
        teleporting, {"rates": [0.05], "seeds": 1}, 0, 1, vmap=False, processes={"ddp_fork": 2, "ddp_members_fork": 2}
    ),
    "rotation": Case(rotation, {"kinds": ["orthogonal"], "members": [0]}, 0, 1, vmap=False, processes={"ddp_fork": 2}),
}
descending = functools.partial(matching, methods=["orbit_descent", "soft_maps"])
# What is tried where state may be lost: in runs that are resumed, or on several processes.
RESUMED = {
    **CASES,
    "zoo, vectorised": Case(functools.partial(restless, execution="vmap", keep="best"), MEMBER, 1, 1, processes={}),
    "zoo, mixed": Case(
        functools.partial(restless, mixup=0.8, cutmix=1.0, mixing_epochs=2),
        MEMBER,
        1,
        1,
        processes={"ddp_members_fork": 2},
    ),
    "matching, descending": Case(descending, {"pairs": [[0, 2]]}, 0, 1, processes={"ddp_fork": 2}),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
vectorised = pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.vmap], ids=[name for name, case in CASES.items() if case.vmap]
)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Path:
    """Return a zoo of two small CNNs with batch norms, beside ``perceptrons``, three without; and ``trained``."""
    folder = tmp_path_factory.mktemp("population")
    write_zoo(folder / "perceptrons", [perceptron().fresh(n) for n in range(3)], digits())
    tiny = MultiLayerPerceptron(widths=(2,), image_size=4)  # with 64 weights
    write_zoo(folder / "tiny", [tiny.fresh(0)], DigitsDataModule(transforms=[Resized(4)]))
    write_zoo(folder / "trained", [trained(n) for n in range(3)], digits())
    networks = [randomize_statistics(MyrtleCNN(2, in_channels=1, image_size=8).fresh(n), n) for n in range(2)]
    return write_zoo(folder / "zoo", networks, digits())


def trained(number: int) -> Network:
    """Return a network after 30 steps on all digits, so that not all units can go for nothing."""
    network = MultiLayerPerceptron(widths=(10,), image_size=8).fresh(number)
    return descended(network, digits(), steps=30, lr=0.02)


def state(task: PopulationTask, number: int) -> dict[str, Tensor]:
    return task.population.member_state(number)


def assert_same_member(a: PopulationTask, b: PopulationTask, number: int, other: int) -> None:
    """Check that a member has the same current weights, the same kept ones and the same curves, bit for bit."""
    assert_same(state(a, number), state(b, other))
    assert_same(a.kept.get(number), b.kept.get(other))
    for name in a.history:
        column, there = a.numbers.index(number), b.numbers.index(other)
        mine, theirs = ([row[i] for row in h[name]] for h, i in ((a.history, column), (b.history, there)))
        assert repr(mine) == repr(theirs), name  # NaN is not equal to itself


def assert_close_members(a: PopulationTask, b: PopulationTask) -> None:
    for number in a.numbers:
        torch.testing.assert_close(state(a, number), state(b, number), **ROUNDING)


# ---- one process


@every
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.few(6, "32-true-fine-tuning", "64-true-stitching", "64-true-rotation")
def test_a_member_is_bitwise_the_one_that_is_trained_alone(case, zoo, precision):
    """With gradients that are clipped, for each member by itself."""
    algorithm = "norm" if precision == "32-true" else "value"
    options = {"max_epochs": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm, "precision": precision}
    together, alone = case.make(zoo), case.make(zoo, **case.alone)
    fit(together, **options)
    fit(alone, **options)
    assert len(together.numbers) >= 2
    assert {str(parameter.dtype) for parameter in together.population.parameters()} == {f"torch.float{precision[:2]}"}
    assert_same_member(together, alone, case.together, case.number)
    free = case.make(zoo, **case.alone)
    fit(free, **{**options, "gradient_clip_val": None})
    assert str(state(free, case.number)) != str(state(alone, case.number)), "nothing was clipped"


@vectorised
def test_loop_and_vmap_agree(case, zoo):
    loop, vmap = (case.make(zoo, execution=execution, **case.smooth) for execution in ("loop", "vmap"))
    for task in (loop, vmap):
        fit(task, max_epochs=2)
    assert_close_members(loop, vmap)


@every
@pytest.mark.long
def test_accumulated_batches_are_one_large_batch(case, zoo):
    """Two batches of 16 and one of 32 see the same images, so that the same step is taken."""
    small, large = (case.make(zoo, **case.smooth) for _ in range(2))
    if isinstance(small, CurveTask):
        pytest.skip("every batch is at another place of the curve")
    if isinstance(small, HalfBlindTask):
        small.step_generator = large.step_generator = lambda *_: torch.Generator().manual_seed(0)
    for module in (small, large):
        freeze_statistics(module)
    fit(small, digits(max_samples=64), max_epochs=2, accumulate_grad_batches=2)
    fit(large, digits(max_samples=64, batch_size=32), max_epochs=2)
    assert small.trainer.global_step == large.trainer.global_step == 4
    assert_close_members(small, large)


def freeze_statistics(task: PopulationTask) -> None:
    """Have batch norms that are trained use their statistics."""
    if isinstance(task, RotationTask):
        task.on_train_batch_start = lambda *_: task.population.eval() and None
    if isinstance(task, HalfBlindTask):
        task.training_batch = lambda batch, batch_idx: task.evaluation_batch(batch)


@pytest.fixture(scope="module")
def well(zoo):
    """Return runs in which no member diverges, by the name of the case and by execution."""

    @functools.cache
    def run(name: str, execution: str) -> PopulationTask:
        task = CASES[name].make(zoo, **({"execution": "vmap"} if execution == "vmap" else {}))
        fit(task, max_epochs=3)
        return task

    return run


@pytest.mark.parametrize(
    ("name", "execution", "interval"),
    one_in(2, itertools.product(CASES, ["loop", "vmap"], [None, 3, "now"])),
)
@pytest.mark.long
def test_a_member_that_diverges_stops_and_the_others_go_on(name, zoo, well, execution, interval, monkeypatch):
    """Losses are looked at in every step, or late, as on an accelerator: every third step, or where something asks."""
    case = CASES[name]
    if execution == "vmap" and not case.vmap:
        pytest.skip("it runs in a loop only")
    hurt, well = case.make(zoo, **({"execution": "vmap"} if execution == "vmap" else {})), well(name, execution)
    if interval != "now":
        monkeypatch.setattr(Divergence, "due", property(lambda self: len(self._notes) == interval))
    with pytest.warns(UserWarning, match=f"{well.member_title(1)} was stopped") as caught:
        fit(hurt, None, Poison(), max_epochs=3)
    assert [str(w.message).partition(" was ")[2] for w in caught if "was stopped" in str(w.message)] == [
        "stopped in epoch 1, step 7: its training loss is not finite. The others go on."
    ]
    assert hurt.stopped == {1: {"epoch": 1, "step": 7, "reason": "its training loss is not finite"}}
    for number in (0, 2):
        assert_same_member(hurt, well, number, number)
    assert all(math.isnan(row[1]) for rows in hurt.history.values() for row in rows[1:])
    if 1 in hurt.kept:  # what was kept before
        assert_same(hurt.kept[1], well.kept[1] if well.kept[1]["epoch"] == 0 else hurt.kept[1])
        assert hurt.kept[1]["epoch"] == 0


@pytest.mark.filterwarnings("ignore:.* was stopped")
@every
@pytest.mark.few(4)
def test_a_run_of_which_all_members_were_stopped_ends_with_an_error(case, zoo):
    task = case.make(zoo, **case.alone)
    with pytest.raises(ValueError, match=r"All .* were stopped, as their losses are not finite; lower the learning"):
        fit(task, None, Poison(case.number), max_epochs=3)


@pytest.fixture(scope="module")
def whole(zoo, tmp_path_factory):
    """Return uninterrupted runs by the name of the case: folder and task."""

    @functools.cache
    def run(name: str, val_fraction: float) -> tuple[Path, PopulationTask]:
        folder, task = tmp_path_factory.mktemp("whole"), RESUMED[name].make(zoo)
        resumable(task, folder, val_fraction)
        return folder, task

    return run


def resumable(task: PopulationTask, folder: Path, val_fraction: float, *callbacks: Callback, **options: Any) -> None:
    data = digits(val_fraction=val_fraction)
    checkpoint = saving(folder, every_n_train_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Lightning: no val_dataloader
        recalibration = [BatchNormRecalibration(images=40)] if isinstance(task, StitchingTask) else []
        fit(task, data, *callbacks, *recalibration, checkpoint, folder=folder, max_epochs=2, **options)


# An epoch has 5 steps, and every third step is saved.
@pytest.mark.parametrize(("name", "place"), one_in(3, itertools.product(RESUMED, ["0 3", "1 0", "1 3", "end"])))
@pytest.mark.few(6, "search-end", "matching-1 3", "pruning-1 0", "zoo, mixed-end")
def test_resumed_is_uninterrupted(name, place, whole, zoo, tmp_path):
    val_fraction = 0.0 if place == "1 0" and name in ("half-blind", "stitching", "matching", "rotation") else 0.1
    folder, expected = whole(name, val_fraction)
    with pytest.raises(RuntimeError, match="interrupted"):
        resumable(RESUMED[name].make(zoo), tmp_path / "first", val_fraction, Interrupt(place))
    task = RESUMED[name].make(zoo)
    resumable(task, tmp_path / "second", val_fraction, ckpt_path=tmp_path / "first" / "last.ckpt")
    for number in task.numbers:
        assert_same_member(task, expected, number, number)
    assert task.stopped == expected.stopped
    if place != "end":  # then no training was left, nor a checkpoint to write
        one, two = (torch.load(path / "last.ckpt", weights_only=True) for path in (folder, tmp_path / "second"))
        for part in ("state_dict", "optimizer_states"):
            assert_same(one[part], two[part])
        assert repr(one["population"]) == repr(two["population"])


@every
@pytest.mark.few(3, "curve", "fine-tuning", "pruning")
def test_a_checkpoint_of_other_members_is_refused(case, zoo, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit(case.make(zoo), None, saving(tmp_path), folder=tmp_path, limit_train_batches=1)
    with pytest.raises(
        ValueError, match=r"The checkpoint has \w+ .* and this run has .*; use the settings that it was"
    ):
        fit(case.make(zoo, **case.alone), ckpt_path=tmp_path / "last.ckpt")
    assert_refused(lambda: case.make(zoo).on_load_checkpoint({}), says="holds no population: it was not written by a")


@pytest.mark.parametrize("name", [name for name in RESUMED if name != "half-blind"])
@pytest.mark.few(4)
def test_a_task_comes_back_from_its_checkpoint_without_running_code(name, zoo, tmp_path):
    make = functools.partial(RESUMED[name].make, zoo, **({"network": perceptron()} if "zoo" in name else {}))
    task, other = make(), make()
    trainer = fit(task)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = type(task).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.identity() == task.identity()
    for number in task.numbers:
        assert_same_member(again, task, number, number)
    if task.kept:  # otherwise a search has found nothing to test
        expected = trainer.test(task, digits(), verbose=False)
        assert quiet_trainer().test(again, digits(), verbose=False) == expected
        settings = {"ckpt_path": tmp_path / "a.ckpt", "weights_only": True, "verbose": False}
        assert quiet_trainer().test(other, digits(), **settings) == expected


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_weights_that_are_not_finite_are_refused_unless_their_member_was_stopped(execution, tmp_path):
    fit(task := ZooTask(perceptron(), members=2, execution=execution)).save_checkpoint(tmp_path / "a.ckpt")
    whole, load = torch.load(tmp_path / "a.ckpt"), functools.partial(ZooTask.load_from_checkpoint, tmp_path / "b.ckpt")
    current, kept, stopped = copy.deepcopy(whole), copy.deepcopy(whole), copy.deepcopy(whole)
    weight = next(name for name in whole["state_dict"] if name.startswith("population.members.") and "1." in name)
    for content in (current, stopped):
        content["state_dict"][weight].view(-1)[0] = math.nan
    next(iter(kept["population"]["kept"][1]["state"].values())).view(-1)[0] = math.inf
    stopped["population"]["stopped"][int(weight.split(".")[2])] = {"epoch": 0, "step": 0, "reason": "its loss is nan"}
    for content, says in ((current, ", weights of Member "), (kept, ", kept weights of Member 1")):
        torch.save(content, tmp_path / "b.ckpt")
        with pytest.raises(ValueError, match=f"not finite in .*{says}.*: training diverged; choose another"):
            load()
        assert load(finite=False).numbers == task.numbers
    torch.save(stopped, tmp_path / "b.ckpt")
    assert len(load().stopped) == 1


@every
@pytest.mark.few(6)
def test_testing_evaluates_the_kept_weights_and_gives_the_current_ones_back(case, zoo):
    task = case.make(zoo)
    fit(task, max_epochs=1)
    if not task.kept:
        pytest.skip("a search keeps what is found, and tests that")
    before = {number: state(task, number) for number in task.numbers}
    with torch.no_grad():
        for parameter in task.population.parameters():
            parameter.mul_(0.5)
    halved = {number: state(task, number) for number in task.numbers}
    seen: list[dict[int, Any]] = []
    task.on_test_epoch_start = lambda: seen.append({number: state(task, number) for number in task.numbers})
    quiet_trainer().test(task, digits(), verbose=False)
    assert_same(seen[0], {number: task.kept[number]["state"] for number in task.numbers})
    assert_same({number: state(task, number) for number in task.numbers}, halved)
    assert str(before) != str(halved)


@every
@pytest.mark.long
def test_bf16_trains_weights_in_float32(case, zoo):
    task, exact = case.make(zoo), case.make(zoo)
    fit(task, precision="bf16-mixed")
    fit(exact)
    found, expected = state(task, case.together), state(exact, case.together)
    assert {parameter.dtype for parameter in task.population.parameters()} == {torch.float32}
    assert all(value.isfinite().all() for value in found.values())
    assert any(not torch.equal(value, expected[name]) for name, value in found.items())
    assert not task.stopped


@every
@pytest.mark.few(6)
def test_fast_dev_run_trains_and_validates_once(case, zoo, tmp_path):
    task = case.make(zoo)
    fit(task, folder=tmp_path, fast_dev_run=True)
    assert task.trainer.global_step == 1
    assert not list(tmp_path.iterdir())


@every
@pytest.mark.few(6, "curve", "matching")
def test_what_concerns_one_member_is_logged_as_a_detail_and_the_rest_fits_on_a_page(case, zoo, tmp_path):
    task = case.make(zoo)
    fit(task, folder=tmp_path, logger=MetricsCSV(tmp_path), max_epochs=2)
    tags = set().union(*(row.keys() for row in read_csv(tmp_path / "metrics.csv"))) - {"step", "epoch"}
    above = {tag for tag in tags if not is_detail(tag)}
    assert 0 < len(above) <= MOST_CURVES
    assert not [tag for tag in above if re.search(r"(member|pair|candidate|repeat)-\d", tag)]
    assert task.shown in above  # what the progress bar shows, and stands beside the hyperparameters
    assert tags > above  # the details are there, too
    assert {tag for tag in above if tag in task.trainer.callback_metrics} == above  # all can be monitored


@every
def test_one_gradient_scale_for_all_members_is_refused(case, zoo):
    run = quiet_trainer()
    run.strategy.precision_plugin.precision = "16-mixed"  # Lightning itself needs a GPU for the real one
    assert_refused(lambda: run.fit(case.make(zoo), digits()), says="precision 16-mixed ties the members together")


# ---- one, two and three processes


def scenarios(run, population_zoo):
    placed = [(name, strategy, count) for name, case in RESUMED.items() for strategy, count in case.processes.items()]
    # One process comes last: a process that has taken gradients cannot fork.
    for name, strategy, processes in [*placed, *((name, strategy, 1) for name, strategy, _ in placed)]:
        settings = RESUMED[name].smooth if strategy == "ddp_fork" else {}
        task = frozen(RESUMED[name].make(population_zoo, **settings), strategy)
        # 1 x 24 images see what 2 x 12 and 3 x 8 see.
        data = digits(batch_size=24 // processes if strategy == "ddp_fork" else 24, max_samples=81)
        settings = {"processes": processes, "strategy": strategy, "max_epochs": 2}
        run.fit(f"{name} {strategy} {processes}", task, data, *beside(name), **settings)


def beside(name: str) -> list[Callback]:
    """Return the callbacks that change or compare the networks of a task."""
    moves = [
        SymmetryTeleportation([1], images=50, max_steps=2),
        SymmetryTeleportation(every_n_steps=2, way="balance"),
    ]
    return {"fine-tuning": [MergingReport()], "teleportation": moves}.get(name, [])


def frozen(task: PopulationTask, strategy: str) -> PopulationTask:
    """Take away what depends on how a batch is shared out: noise, statistics of the batch."""
    if strategy == "ddp_fork":
        freeze_statistics(task)
    return task


@pytest.fixture(scope="module")
def population_zoo(zoo) -> Path:
    return zoo


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("name", "strategy"), [(name, strategy) for name, case in RESUMED.items() for strategy in case.processes]
)
@pytest.mark.long
def test_several_processes_are_one(name, strategy, runs):
    """Two or three; members that are shared out are bitwise those of one process."""
    counts = (1, RESUMED[name].processes[strategy])
    one, several = (torch.load(runs / f"{name} {strategy} {n}" / "last.ckpt", weights_only=True) for n in counts)
    exact = strategy == "ddp_members_fork"
    assert one["state_dict"].keys() == several["state_dict"].keys()
    for part in ("state_dict", "kept", "history", "train_sums"):
        a, b = (found[part] if part == "state_dict" else found["population"][part] for found in (one, several))
        if exact and part != "train_sums":
            assert_same_unordered(a, b)
        else:
            torch.testing.assert_close(as_tensors(a), as_tensors(b), equal_nan=True, **ROUNDING)


@pytest.mark.long
@pytest.mark.ddp
@pytest.mark.parametrize(("strategy", "count"), CASES["fine-tuning"].processes.items())
def test_networks_merged_by_several_processes_are_those_of_one(strategy, count, runs):
    one, several = (read_csv(runs / f"fine-tuning {strategy} {n}" / "results" / "accuracies.csv") for n in (1, count))
    assert len(one) > 100
    for a, b in zip(one, several, strict=True):
        # Sums in another order may change the class of one of 81 digits.
        most = 1 / 81 if strategy == "ddp_fork" else 0
        assert float(b.pop("accuracy")) == pytest.approx(float(a.pop("accuracy")), abs=most + 1e-9)
        assert a == b


def assert_same_unordered(a: Any, b: Any) -> None:
    assert repr(a if isinstance(a, Tensor | list) else sorted(a.items())) == repr(
        b if isinstance(b, Tensor | list) else sorted(b.items())
    )


def as_tensors(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: as_tensors(value) for key, value in found.items()}
    return found if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
