"""Losses at many weight vectors: every method agrees with a plain loop, and early rejection loses nothing."""

import copy

import pytest
import torch
from helpers import assert_refused
from torch import nn
from torch.func import functional_call

from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.planes import WeightPlane, weight_tensors, weight_vector
from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron


class Skip(nn.Module):
    """The first layer is not the only one that reads the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + x)


class Stateful(nn.Module):
    """Batch norm and dropout, whose buffers must be used and left as they are, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(12, 2),
        )  # fmt: skip
        self.parts[1].running_mean += 0.3
        self.parts[1].running_var *= 2

    def forward(self, x):
        return self.parts(x)


CASES = {
    "two units": (lambda: MultiLayerPerceptron([2], image_size=1, num_classes=1, bias=False), (1,)),
    "one hidden layer": (lambda: MultiLayerPerceptron([5], image_size=3, num_classes=4), (1, 3, 3)),
    "two hidden layers": (lambda: MultiLayerPerceptron([5, 6], image_size=3, num_classes=2, activation="tanh"), (9,)),
    "linear": (lambda: MultiLayerPerceptron([], image_size=2, num_classes=3), (4,)),
    "LeNet": (lambda: LeNet5(num_classes=1, padding=0), (1, 28, 28)),
    "skip": (Skip, (3,)),
    "stateful": (Stateful, (1, 7, 7)),
    "residual": (lambda: CIFARResNet(width=2, num_classes=3, image_size=8), (3, 8, 8)),
}
PAIRS = [(name, method) for name in CASES if name != "residual" for method in ("affine", "vmap", "loop")]
PAIRS.remove(("skip", "affine"))
PAIRS += [("two units", "closed_form"), ("residual", "affine")]


def case(name: str, count: int = 70, dtype: torch.dtype = torch.float32, dimension: int = 2):
    """Return a network, inputs, targets, a plane through its weights and points near, and coefficients."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    network = make().to(dtype)
    inputs = torch.randn(count, *shape, dtype=dtype)
    targets = copy.deepcopy(network).eval()(inputs).detach()
    vector = weight_vector(network).double()
    points = vector + torch.cat([torch.zeros(1, len(vector)), 0.5 * torch.randn(dimension, len(vector))])
    return network, inputs, targets, WeightPlane.through(points), torch.randn(5, dimension, dtype=torch.float64)


def looped(network, inputs, targets, vectors, loss=None):
    """The definition, one weight vector after another."""
    network = copy.deepcopy(network).eval()
    found = []
    for vector in vectors.to(inputs.dtype):
        outputs = functional_call(network, weight_tensors(network, vector), (inputs,)).detach()
        found.append(((outputs - targets) ** 2).sum(1).double().mean() if loss is None else loss(outputs, targets))
    return torch.stack(found)


@pytest.mark.parametrize(("name", "method"), PAIRS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@pytest.mark.few(4)
def test_every_method_agrees_with_a_plain_loop(name, method, dtype, tolerance):
    network, inputs, targets, plane, coefficients = case(name, count=200 if name != "LeNet" else 10, dtype=dtype)
    before = copy.deepcopy(network.state_dict())
    surface = LossSurface(network, inputs, targets, method=method)
    vectors = plane.weights(coefficients)
    expected = looped(network, inputs, targets, vectors)
    for found in (surface.on(plane, coefficients), surface.at(vectors), surface.on(plane, coefficients)):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 1e-3)
    assert surface.method == method
    assert network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(("name", "method"), PAIRS)
@pytest.mark.long
def test_early_rejection_keeps_every_point_below_and_its_bits(name, method):
    network, inputs, targets, plane, coefficients = case(name, count=300 if name != "LeNet" else 130)
    coefficients = torch.cat([coefficients, torch.zeros(1, 2, dtype=torch.float64), coefficients / 10])
    surface = LossSurface(network, inputs, targets, method=method, chunk=4)
    whole = surface.on(plane, coefficients)
    # Also thresholds that are the values themselves, and their neighbours.
    for value in whole.tolist():
        for below in (value, torch.nextafter(torch.tensor(value).double(), torch.tensor(torch.inf).double()).item()):
            found = surface.on(plane, coefficients, below=below)
            assert torch.equal(found, torch.where(whole < below, whole, torch.inf))


@pytest.mark.parametrize("method", ["affine", "loop"])
def test_early_rejection_saves_work(method, monkeypatch):
    network, inputs, targets, plane, coefficients = case("stateful", count=300)
    surface = LossSurface(network, inputs, targets, method=method)
    seen = 0
    sums = LossSurface._sums

    def counted(self, outputs, targets, below=None):
        nonlocal seen
        seen += outputs.shape[0] * outputs.shape[1]
        return sums(self, outputs, targets, below)

    monkeypatch.setattr(LossSurface, "_sums", counted)
    surface.on(plane, coefficients, below=float(surface.on(plane, coefficients).max()) / 1e6)
    assert seen == 5 * 300 + 5 * 64


@pytest.mark.parametrize(("name", "method"), PAIRS)
@pytest.mark.few(4)
def test_cutting_at_multiples_of_the_chunk_changes_no_bit(name, method):
    network, inputs, targets, plane, _ = case(name, count=140 if name != "LeNet" else 8)
    coefficients = torch.randn(17, 2, dtype=torch.float64)
    surface = LossSurface(network, inputs, targets, method=method, chunk=4)
    whole = surface.on(plane, coefficients)
    parts = [surface.on(plane, coefficients[start : start + 8]) for start in (8, 0, 16)]
    assert torch.equal(torch.cat([parts[1], parts[0], parts[2]]), whole)
    again = LossSurface(network, inputs, targets, method=method, chunk=4)
    again.at(plane.weights(coefficients))
    again.on(WeightPlane.through(plane.points + 1), coefficients)  # another plane before
    assert torch.equal(again.on(plane, coefficients), whole)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("two units", "closed_form"),
        *((name, "affine") for name in ("one hidden layer", "LeNet", "stateful", "residual")),
    ],
)
def test_auto_follows_a_rule_where_there_is_one(name, expected):
    network, inputs, targets, _, _ = case(name, count=3)
    assert LossSurface(network, inputs, targets).method == expected


class Tied(nn.Module):
    """The first layer's weight is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 1, 3, padding=1), nn.Conv1d(1, 1, 3, padding=1)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.relu(self.first(x))).flatten(1)


def test_tied_weights_are_one_parameter():
    torch.manual_seed(0)
    network, inputs, targets = Tied().double(), torch.randn(5, 1, 4).double(), torch.randn(5, 4).double()
    assert_refused(LossSurface, network, inputs, targets, method="affine", says="parameters with several names")
    surface = LossSurface(network, inputs, targets)
    assert surface.method == "loop"
    vectors = torch.randn(3, 5, dtype=torch.float64)
    expected = looped(network, inputs, targets, vectors)
    torch.testing.assert_close(surface.at(vectors), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        LossSurface(network, inputs, targets, method="vmap").at(vectors), expected, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("count", [5, 200])
def test_the_closed_form_takes_any_targets_and_zero_inputs(count):
    network, inputs, _, plane, coefficients = case("two units", count=count, dtype=torch.float64)
    inputs[0] = 0.0
    targets = torch.randn(count, 1, dtype=torch.float64)
    found = LossSurface(network, inputs, targets).on(plane, coefficients)
    expected = looped(network, inputs, targets, plane.weights(coefficients))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    positive = LossSurface(network, inputs.abs(), targets)
    assert positive.method == "closed_form"
    expected = looped(network, inputs.abs(), targets, plane.weights(coefficients))
    torch.testing.assert_close(positive.on(plane, coefficients), expected, rtol=1e-12, atol=0)


def test_the_closed_form_does_not_cancel_near_the_target():
    network, inputs, targets, _, _ = case("two units", dtype=torch.float64)
    vector = weight_vector(network)
    surface = LossSurface(network, inputs, targets)
    assert surface.at(vector[None]).item() < 1e-30
    step = torch.tensor([0, 0, 1e-9, 1e-9], dtype=torch.float64)
    expected = looped(network, inputs, targets, (vector + step)[None])
    torch.testing.assert_close(surface.at((vector + step)[None]), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["affine", "vmap", "loop"])
@pytest.mark.parametrize("frozen", ["linear1.weight", "linear1.bias", "classifier.weight", "classifier.bias"])
def test_frozen_parameters_stay(method, frozen):
    network, inputs, targets, _, coefficients = case("one hidden layer", dtype=torch.float64)
    network.get_parameter(frozen).requires_grad_(False)
    size = len(weight_vector(network))
    plane = WeightPlane.through(torch.randn(3, size, dtype=torch.float64))
    found = LossSurface(network, inputs, targets, method=method)
    expected = looped(network, inputs, targets, plane.weights(coefficients))
    torch.testing.assert_close(found.on(plane, coefficients), expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(found.at(plane.weights(coefficients)), expected, rtol=1e-11, atol=0)


def cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.repeat(len(outputs)), reduction="none"
    ).view(outputs.shape[:2])  # fmt: skip


@pytest.mark.parametrize("method", ["affine", "vmap", "loop"])
def test_other_losses(method):
    network, inputs, _, plane, coefficients = case("one hidden layer", count=150, dtype=torch.float64)
    labels = torch.randint(4, (150,))
    surface = LossSurface(network, inputs, labels, loss=cross_entropy, method=method)
    vectors = plane.weights(coefficients)
    expected = looped(network, inputs, labels, vectors, nn.functional.cross_entropy)
    torch.testing.assert_close(surface.on(plane, coefficients), expected, rtol=1e-12, atol=0)
    below = expected.median().item()
    found = surface.on(plane, coefficients, below=below)
    assert torch.equal(found.isfinite(), expected < below)
    negative = LossSurface(network, inputs, labels, loss=lambda o, t: -cross_entropy(o, t), method=method)
    assert_refused(negative.on, plane, coefficients, below=1.0, says="below needs losses >= 0")


def test_the_precision_is_that_asked_for():
    network, inputs, targets, plane, coefficients = case("one hidden layer")
    vectors = plane.weights(coefficients)
    exact = looped(network.double(), inputs.double(), targets.double(), vectors)
    double = LossSurface(network.float(), inputs, targets, dtype=torch.float64)
    torch.testing.assert_close(double.on(plane, coefficients), exact, rtol=1e-12, atol=0)
    single = LossSurface(network, inputs, targets).on(plane, coefficients)
    assert 0 < (single / exact - 1).abs().max() < 1e-4
    assert network.linear1.weight.dtype == torch.float32


def test_losses_that_are_not_finite_are_infinite():
    network, inputs, targets, _, _ = case("two hidden layers")
    size = len(weight_vector(network))
    vectors = torch.zeros(3, size)
    vectors[0, -1], vectors[1, -1] = torch.nan, 1e30
    for method in ("affine", "vmap", "loop"):
        found = LossSurface(network, inputs, targets, method=method).at(vectors)
        assert found.isinf().tolist() == [True, True, False]


@pytest.mark.parametrize("shape", [(5, 4, 9, 11), (3, 2, 6, 6), (2, 3, 7, 6)])
@pytest.mark.parametrize("size", [2, 3])
def test_fast_pooling_is_max_pooling_to_the_bit(shape, size):
    from lightning_sym.landscape._first_layer import MaxPool

    x = torch.randn(shape)
    x[0, 0, 0, 0] = torch.nan
    torch.testing.assert_close(MaxPool(size)(x), nn.MaxPool2d(size)(x), rtol=0, atol=0, equal_nan=True)


def test_no_points_give_no_losses():
    network, inputs, targets, plane, _ = case("two units")
    assert LossSurface(network, inputs, targets).on(plane, torch.zeros(0, 2)).shape == (0,)
    network, inputs, targets, plane, _ = case("skip")
    assert LossSurface(network, inputs, targets).on(plane, torch.zeros(0, 2)).shape == (0,)
