"""EquivalenceReport: what its tables, grids and pictures hold, what it notes, and what it refuses before the search."""

import functools
import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fits import fit as fit_task
from helpers import assert_refused, read_csv, write_zoo
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from safetensors.torch import load_file
from scipy import ndimage
from torch import nn

from lightning_sym.callbacks import EquivalenceReport, PlaneGrid
from lightning_sym.datamodules import DigitsDataModule, GaussianInputsDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.tasks import EquivalenceTask

MIXED = [0.8, -0.6, 0.7, 0.5]  # slopes 0.56 and 0.30
SAME_SIGN = [0.8, 0.6, 0.7, 0.5]  # slopes 0.86 and 0
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
# Everything is found at the first check.
LENIENT = {"tolerance": 1e6, "held_out": 1e6}

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*is constant or nearly so")]


def two_unit():
    return MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)


def gaussian(**options):
    settings = {"samples": 512, "batch_size": 128, "eval_batch_size": 300, "val_samples": 512}
    return GaussianInputsDataModule(**{**settings, **options})


def search(network=None, **options):
    settings = {"members": 24, "points": 3, "teacher": MIXED, "optimizer": ADAM, "tolerance": 1e-6}
    return EquivalenceTask(network or two_unit(), **{**settings, **options})


def fit(folder, task, plane, data=None, **options):
    settings = {"max_epochs": 200, "precision": "64-true", **options}
    return fit_task(task, data or gaussian(), plane, folder=folder, **settings)


def table(folder, name):
    return read_csv(folder / "results" / f"{name}.csv")


def notes(plane):
    return " ".join(plane.results.notes)


def first_inputs(data, count=500):
    return torch.cat([batch[0] for batch in data.curvature_dataloader()])[:count].double()


def by_hand(weights, x):
    """Return J of weights ``[..., 4]`` from the formula of the network."""
    x = x.flatten()

    def outputs(theta):
        a, b, c, d = theta.unbind(-1)
        return c[..., None] * (a[..., None] * x).relu() + d[..., None] * (b[..., None] * x).relu()

    teacher = outputs(torch.tensor(MIXED).double())  # as numbers of single precision, which the network's are
    return (outputs(weights) - teacher).square().mean(-1)


@pytest.fixture
def plain_figures(monkeypatch):
    """Keep what figures are made of, and draw none."""
    calls = {}

    def instead(name):
        return lambda *args, **settings: calls.setdefault(name, []).append((args, SimpleNamespace(**settings)))

    for name in ("loss_surface", "log_contour", "point_set", "isosurface", "betti_curve", "embedding"):
        monkeypatch.setattr(f"lightning_sym.figures.{name}", instead(name))
    for name in ("search_curves", "planes_beside"):
        monkeypatch.setattr(f"lightning_sym.figures.{name}", instead(name))
    monkeypatch.setattr("lightning_sym.callbacks.publishing.publish_figure", lambda *_: None)
    return calls


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A search for two ReLU units with planes of all dimensions."""
    folder = tmp_path_factory.mktemp("found")
    task, data = search(points=5, members=40), gaussian()
    grids = [PlaneGrid(1, 31), PlaneGrid(2, 21, bound=2.0), PlaneGrid(3, 15, refine=True), PlaneGrid(4, 7, 1.5)]
    plane = EquivalenceReport(grids, epsilon=0.05)
    trainer = fit(folder, task, plane, data, logger=TensorBoardLogger(folder, name="", version=""))
    return SimpleNamespace(folder=folder, task=task, plane=plane, data=data, trainer=trainer)


# ---- what is in the files
def test_points_have_their_coordinates_and_distances(found):
    rows, points = table(found.folder, "points"), found.task.found_points()
    assert [row["point"] for row in rows] == [point.name for point in points]
    assert len(rows) == 5
    held_out = torch.cat([batch[0] for batch in found.data.val_dataloader()]).double()
    stored = load_file(found.folder / "results" / "found.safetensors")
    teacher = torch.tensor(MIXED).double()
    for index, (row, point) in enumerate(zip(rows, points, strict=True)):
        assert float(row["J"]) == point.loss
        assert torch.equal(stored[f"point-{point.name.replace(' ', '-')}"], point.weights)
        assert float(row["held_out_J"]) == pytest.approx(float(by_hand(point.weights, held_out)), rel=1e-6)
        assert float(row["distance"]) == pytest.approx(float((point.weights - teacher).norm()), rel=1e-6)
        assert row["orbit_distance_is"] == "exact"
        assert float(row["orbit_distance"]) < 0.01  # a mixed class is one orbit
        assert row["verdict"] == "equivalent"
        for m in range(1, 5):
            coordinates = json.loads(row[f"coefficients_search-{m}d"])
            assert len(coordinates) == m
            residual = float(row[f"residual_search-{m}d"])
            offset = point.weights - stored[f"centre-search-{m}d"]
            assert residual**2 + np.square(coordinates).sum() == pytest.approx(float(offset.square().sum()), abs=1e-9)
            if index <= m:
                assert not np.any(np.round(coordinates[index:], 9))
                assert residual < 1e-9
            if index == m:
                assert coordinates[m - 1] > 0
            if index > m:
                assert residual > 1e-3


def test_sets_are_what_the_grids_hold(found):
    rows = table(found.folder, "sets")
    assert [(row["grid"], row["points"], row["refined"]) for row in rows] == [
        ("search-1d", "31", "False"),
        ("search-2d", "21", "False"),
        ("search-3d", "15", "False"),
        ("search-3d", "29", "True"),
        ("search-4d", "7", "False"),
    ]
    x = first_inputs(found.data)
    zero = float(by_hand(torch.zeros(4).double(), x))
    for row in rows:
        assert float(row["epsilon"]) == pytest.approx(0.05 * zero, rel=1e-9)
        assert float(row["epsilon_over_J0"]) == pytest.approx(0.05, rel=1e-9)
        if row["refined"] == "True":
            continue
        grid = load_file(found.folder / "results" / f"grid-{row['grid']}.safetensors")
        inside = grid["J"].numpy() < float(row["epsilon"])
        assert inside.any()
        assert float(row["fraction"]) == inside.mean()
        assert float(row["smallest_J"]) == float(grid["J"].min())
        assert int(row["pieces_face"]) == ndimage.label(inside)[1]
        assert int(row["pieces_full"]) == ndimage.label(inside, np.ones((3,) * inside.ndim))[1]
        assert json.loads(row["betti"])[0] == int(row["pieces_full"])
        assert float(row["bound"]) == float(grid["axis"][-1])
        assert float(row["spacing"]) == pytest.approx(float(grid["axis"][1] - grid["axis"][0]), rel=1e-9)
    about = json.loads((found.folder / "results" / "sets.json").read_text())
    assert about["J0"] == pytest.approx(zero, rel=1e-9)
    assert about["exact"]["kind"] == "mixed"
    assert about["exact"]["components"] == 2
    assert about["data"] == json.loads(json.dumps(found.data.identity()))


def test_candidates_are_what_the_search_says(found):
    rows, outcomes = table(found.folder, "candidates"), found.task.all_outcomes()
    zero = found.task.scales["sample"].zero
    assert [int(row["candidate"]) for row in rows] == list(outcomes)
    for row, entry in zip(rows, outcomes.values(), strict=True):
        assert row["found"] == str(entry["found"])
        assert (row["outcome"] == "found") == entry["found"]
        assert float(row["J"]) == entry["loss"]
        assert float(row["J_over_J0"]) == pytest.approx(entry["loss"] / zero)
        assert int(row["steps"]) == entry["steps"] == found.trainer.global_step
        steps = [row[f"steps_below_{level:g}_J0"] for level in found.task.milestones]
        assert [int(step) if step else -1 for step in steps] == entry["milestones"]
        assert row["input_signs"] == "".join("+" if weight > 0 else "-" for weight in entry["weights"][:2])
    text = notes(found.plane)
    assert f"{len(found.task.found)} of 40 candidates met the demands of the search" in text


def test_tensorboard_has_figures_mesh_and_numbers(found):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(found.folder), size_guidance={"images": 0, "tensors": 0}).Reload()
    # Of a figure with several panels each is a picture of its own: search/1, search/2.
    images = {tag.removeprefix("figures/EquivalenceReport/").partition("/")[0] for tag in events.Tags()["images"]}
    assert images == {path.stem for path in (found.folder / "results").glob("*.png")}
    meshes = [tag for tag in events.Tags()["tensors"] if tag.startswith("EquivalenceReport/search-3d")]
    assert any("VERTEX" in tag for tag in meshes)
    assert any("FACE" in tag for tag in meshes)
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    rows = {row["grid"]: row for row in table(found.folder, "sets") if row["refined"] == "False"}
    assert last["fraction/search-2d"] == pytest.approx(float(rows["search-2d"]["fraction"]))
    assert last["pieces/search-3d"] == float(rows["search-3d"]["pieces_full"])
    assert last["r/highest_kept"] == pytest.approx(max(float(row["R"]) for row in table(found.folder, "points")))


# ---- exact theory beside the pictures


def test_the_exact_class_of_two_units_is_drawn(tmp_path, plain_figures):
    fit(tmp_path, search(**LENIENT), EquivalenceReport([PlaneGrid(2, 9)]), max_epochs=1)
    ((args, settings),) = plain_figures["log_contour"]
    stored = load_file(tmp_path / "results" / "found.safetensors")
    places = torch.cartesian_prod(*[torch.as_tensor(args[1])] * 2)
    a, b, c, d = (stored["centre-search-2d"] + places @ stored["basis-search-2d"].T).T
    slopes = c * a.relu() + d * b.relu(), c * (-a).relu() + d * (-b).relu()
    for (_, field), slope, target in zip(settings.overlay, slopes, (0.56, 0.30), strict=True):
        np.testing.assert_allclose(field.ravel(), (slope - target).numpy(), atol=1e-7)  # of single precision
    ((_, marks), *_) = plain_figures["betti_curve"]
    assert marks is not None


def test_one_slope_is_drawn_where_the_other_is_right(tmp_path, plain_figures):
    task = search(teacher=SAME_SIGN, points=4, **LENIENT)
    fit(tmp_path, task, EquivalenceReport([PlaneGrid(2, 9), PlaneGrid(3, 5)]), max_epochs=1)
    ((_, settings),) = plain_figures["log_contour"]
    ((name, field),) = settings.overlay
    assert name == "exact class"
    ((_, solid),) = plain_figures["isosurface"]
    stored = load_file(tmp_path / "results" / "found.safetensors")
    for m, values in ((2, field), (3, solid.overlay_field)):
        axis = load_file(tmp_path / "results" / f"grid-search-{m}d.safetensors")["axis"]
        weights = stored[f"centre-search-{m}d"] + torch.cartesian_prod(*[axis] * m) @ stored[f"basis-search-{m}d"].T
        a, b, c, d = weights.T
        there = (c * (-a).relu() + d * (-b).relu()).abs() <= 1e-12
        assert there.any()
        assert not there.all()
        expected = torch.where(there, c * a.relu() + d * b.relu() - 0.86, math.nan)
        np.testing.assert_allclose(np.ravel(values), expected.numpy(), atol=1e-7)


def test_other_networks_have_no_exact_class(tmp_path, plain_figures):
    network = MultiLayerPerceptron(widths=[3], in_channels=2, image_size=1, num_classes=1)
    fit(tmp_path, search(network, teacher=0, **LENIENT), EquivalenceReport([PlaneGrid(2, 3)]), gaussian(shape=[2]),
        max_epochs=1)  # fmt: skip
    assert plain_figures["log_contour"][0][1].overlay == []
    assert "input_signs" not in table(tmp_path, "candidates")[0]
    assert "exact" not in json.loads((tmp_path / "results" / "sets.json").read_text())


# ---- what planes go through


def test_planes_through_the_orbit_and_mixed_ones(tmp_path, plain_figures):
    network, data = MultiLayerPerceptron(widths=[6], image_size=8), DigitsDataModule(max_samples=80, batch_size=20)
    task = search(network, teacher=0, members=3, **LENIENT)
    plane = EquivalenceReport([PlaneGrid(2, 5)], through=["search", "orbit", "mixed", "orbit"], inputs=30)
    fit(tmp_path, task, plane, data, max_epochs=1, precision="32-true")
    assert [row["grid"] for row in table(tmp_path, "sets")] == ["search-2d", "orbit-2d", "mixed-2d"]
    rows = {row["point"]: row for row in table(tmp_path, "points")}
    names = [point.name for point in task.found_points()]
    assert set(rows) == {*names, "teacher", "orbit 1", "orbit 2"}
    for name in ("teacher", "orbit 1", "orbit 2"):
        assert float(rows[name]["R"]) < 1e-9
        assert rows[name]["orbit_distance_is"] == "exact"
        assert float(rows[name]["orbit_distance"]) < 1e-5
        assert float(rows[name]["residual_orbit-2d"]) < 1e-6
        assert rows[name]["steps"] == ""
        assert name == "teacher" or float(rows[name]["distance"]) > 0.1
    orbit = load_file(tmp_path / "results" / "grid-orbit-2d.safetensors")["J"]
    assert float(orbit[2, 2]) < 1e-30  # the teacher
    # The centre of the mixed plane is the best found point, then come an image and another found point.
    for name, coordinates in ((names[0], 0), ("orbit 1", 1), (names[1], 2)):
        assert np.count_nonzero(json.loads(rows[name]["coefficients_mixed-2d"])) == coordinates
        assert float(rows[name]["residual_mixed-2d"]) < 1e-6
    assert len(plain_figures["planes_beside"]) == 1


# ---- too little, too much


def test_with_too_few_points_there_are_the_pictures_that_can_be_drawn(tmp_path, plain_figures):
    task = search(points=4, members=8)
    plane = EquivalenceReport([PlaneGrid(1, 5), PlaneGrid(2, 5), PlaneGrid(3, 5)])
    fit(tmp_path, task, plane, max_epochs=150, check_val_every_n_epoch=50)
    count = len(task.found_points())
    assert 2 <= count < 4, "choose another seed"
    assert [row["grid"] for row in table(tmp_path, "sets")] == [f"search-{m}d" for m in range(1, count)]
    text = notes(plane)
    assert f"no 3D grid through search points: it needs 4, and there are {count}" in text
    lowest = min(entry["loss"] for entry in task.all_outcomes().values() if not entry["found"])
    assert f"{lowest:.2g}" in text
    assert "raise members" in text
    assert "tolerance" in text


def test_nothing_found(tmp_path, plain_figures):
    task, plane = search(points=2, members=1), EquivalenceReport([PlaneGrid(1, 5)])
    fit(tmp_path, task, plane, max_epochs=1, logger=CSVLogger(tmp_path, "", ""))
    assert (tmp_path / "results" / "points.csv").read_text().strip() == ""
    assert len(table(tmp_path, "candidates")) == 1
    assert "it needs 2, and there are 0" in notes(plane)


@pytest.mark.parametrize("unit", ["J0", "J"])
def test_an_epsilon_beyond_the_bound_is_warned_of(tmp_path, plain_figures, unit):
    task, plane = search(**LENIENT), EquivalenceReport([PlaneGrid(2, 5)], epsilon=1.0, epsilon_unit=unit)
    fit(tmp_path, task, plane, max_epochs=1)
    x = first_inputs(gaussian())
    zero = float(by_hand(torch.zeros(4).double(), x))
    epsilon = zero if unit == "J0" else 1.0
    (row,) = table(tmp_path, "sets")
    assert float(row["epsilon"]) == pytest.approx(epsilon)
    sentence = f"epsilon = {epsilon:.3g} is {epsilon / zero:.3g} times J0"
    assert sentence in row["warnings"]
    assert sentence in notes(plane)
    for name in ("loss_surface", "log_contour"):
        assert sentence in plain_figures[name][0][1].warning


# ---- refused before the search


def line(dimension=1, **settings):
    return EquivalenceReport([PlaneGrid(dimension, 3)], **settings)


def frozen_later(**settings):
    network = two_unit()
    network.linear1.weight.requires_grad_(False)
    return search(network, points=2, **settings)


def alone(network):
    return search(network, teacher=0, members=1)


MYRTLE = {"width": 2, "in_channels": 1, "image_size": 8, "num_classes": 1}
LINEAR = {"in_channels": 3, "image_size": 1, "num_classes": 1}
SMALL = {"shape": [1, 8, 8], "samples": 8, "batch_size": 4, "val_samples": 4}


@pytest.mark.parametrize(
    ("task", "plane", "says", "data"),
    [
        (search, lambda: line(5, through=["orbit"]), ["dimension 5 does not fit into the 4 weights", "at most 4"], {}),
        (search, EquivalenceReport,
         "dimension 3 goes through 4 points, and the search looks for 3; set points of the task to 4", {}),
        (lambda: search(points=6), lambda: EquivalenceReport([]),
         "6 independent points do not fit into the 4 weights", {}),
        *((functools.partial(frozen_later, teacher=teacher, execution=execution), lambda: EquivalenceReport([]),
           "frozen, or freed, after its construction", {}) for teacher in (0, MIXED) for execution in ("loop", "vmap")),
        (lambda: alone(MyrtleCNN(**MYRTLE)), lambda: line(through=["search", "mixed"]),
         "moves running statistics of batch norms", SMALL),
        (lambda: alone(MultiLayerPerceptron([], **LINEAR)), lambda: line(through=["orbit"]),
         "no symmetry that moves it", {"shape": [3]}),
        (search, lambda: line(inputs=1), "constant on the 1 inputs of the grids; raise inputs", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_before_the_search(tmp_path, task, plane, says, data):
    made = task()
    assert_refused(lambda: fit(tmp_path, made, plane(), gaussian(**data), max_epochs=2), says=says)
    assert made.checks == []  # no search yet
    assert not (tmp_path / "results").exists()


def test_umap_that_is_not_installed_is_said_before_the_search(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    plane = EquivalenceReport([PlaneGrid(2, 3, umap=True)])
    says = 'umap-learn: pip install "lightning_sym[umap]"'
    assert_refused(lambda: fit(tmp_path, search(), plane, max_epochs=2), error=ImportError, says=says)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_seconds": 0.0}, r"25\^1 = 25 points need about .* s .*limit_seconds=None"),
        ({"limit_bytes": 100}, r"25\^1 = 25 points need about .*GiB.*limit_bytes=None"),
    ],
)
def test_grids_beyond_a_limit_are_left_out_and_said(tmp_path, settings, message):
    plane = EquivalenceReport([PlaneGrid(1, 25)], **settings)
    fit(tmp_path, search(**LENIENT), plane, max_epochs=1)
    assert [note for note in plane.results.notes if re.search(f"no search-1d grid: {message}", note)]
    assert not [path.name for path in tmp_path.rglob("*grid*")]
    assert list(tmp_path.rglob("candidates.csv"))


# ---- runs of all kinds


def test_training_that_ends_between_two_checks(tmp_path, plain_figures):
    task = search(points=2, members=2)
    fit(tmp_path, task, EquivalenceReport([PlaneGrid(1, 3)]), max_steps=6, check_val_every_n_epoch=10)
    assert {row["steps"] for row in table(tmp_path, "candidates")} == {"6"}


def test_a_round_that_has_not_begun_is_not_counted(tmp_path, plain_figures):
    task = search(points=2, members=2, round_steps=4, max_rounds=3)
    fit(tmp_path, task, EquivalenceReport([]), max_epochs=2)
    assert {(row["round"], row["steps"]) for row in table(tmp_path, "candidates")} == {("0", "4"), ("1", "4")}


class Odd(Network):
    """Batch norm and dropout, tied weights, and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 1)
        self.last.bias.requires_grad = False

    def forward(self, x):
        x = self.dropout(self.activation(self.norm(self.first(x))))
        return self.last(self.second(x))


@pytest.fixture(scope="module")
def odd_zoo(tmp_path_factory):
    members = [Odd().fresh(number) for number in range(2)]
    for member in members:
        for _ in range(20):
            member(torch.randn(50, 4) * 2 + 1)  # running statistics
    return write_zoo(tmp_path_factory.mktemp("odd") / "zoo", members, gaussian(shape=[4]))


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_odd_networks_of_a_zoo_compute_as_in_evaluation_with_the_teachers_buffers(
    tmp_path, odd_zoo, execution, plain_figures
):
    data = gaussian(shape=[4])
    task = EquivalenceTask(
        None, zoo=str(odd_zoo), member=1, allow=[__name__], members=3, points=3, execution=execution, optimizer=ADAM,
        **LENIENT,
    )  # fmt: skip
    fit(tmp_path, task, EquivalenceReport([PlaneGrid(2, 3)]), data, max_epochs=2, min_epochs=2)
    teacher = Odd().double().eval()
    teacher.load_state_dict(load_file(next(odd_zoo.glob("**/*0001*.safetensors"))))
    frozen = {name for name, value in teacher.named_parameters() if not value.requires_grad}
    buffers = dict(teacher.named_buffers())
    assert not torch.equal(buffers["norm.running_mean"], torch.zeros(4).double())
    x = first_inputs(data, 512)
    for slot in task.slots:
        state = task.population.member_state(slot)
        for name in [*buffers, *frozen]:
            assert torch.equal(state[name], teacher.state_dict()[name]), name
        assert not torch.equal(state["first.weight"], teacher.first.weight)
        assert torch.equal(state["first.weight"], state["second.weight"])
        candidate = Odd().double().eval()
        candidate.load_state_dict(state)
        expected = float((candidate(x) - teacher(x)).square().mean().detach())
        assert task.all_outcomes()[task.number(slot)]["loss"] == pytest.approx(expected, rel=1e-6)
    # What is stored is enough to compute J again.
    stored = load_file(tmp_path / "results" / "found.safetensors")
    grid = load_file(tmp_path / "results" / "grid-search-2d.safetensors")
    candidate = Odd().double().eval()
    candidate.load_state_dict(teacher.state_dict())
    trainable = [value for value in candidate.parameters() if value.requires_grad]
    assert len(stored["teacher"]) == sum(value.numel() for value in trainable)
    corner = stored["centre-search-2d"] + stored["basis-search-2d"] @ grid["axis"][[0, 2]]
    torch.nn.utils.vector_to_parameters(corner, trainable)
    expected = float((candidate(x[:500]) - teacher(x[:500])).square().mean().detach())
    assert float(grid["J"][0, 2]) == pytest.approx(expected, rel=1e-9)
