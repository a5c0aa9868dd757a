"""Lines and means of networks, and barriers with closed forms."""

import functools
import math

import pytest
import torch
from helpers import assert_refused, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.connectivity import Barrier, Curve, average, barrier, curve_barriers, interpolate
from lightning_sym.connectivity.interpolation import curve_losses, output_change
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, recalibrate_batch_norm


class Everything(nn.Module):
    """Tied and frozen parameters, buffers of all kinds, several dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.brief = nn.Parameter(torch.randn(4, generator=generator).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(2, generator=generator, dtype=torch.complex64))
        self.register_buffer("scale", torch.randn(2, generator=generator, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("mask", torch.tensor([seed == 0, True]))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        with torch.no_grad():
            self.first.weight.normal_(generator=generator)
            self.norm.running_mean.normal_(generator=generator)
            self.norm.num_batches_tracked.fill_(seed)


def tensors(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def batch(count: int = 12, seed: int = 0, classes: int = 3, shape: tuple[int, ...] = (1, 4, 4)):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return images, torch.randint(classes, (count,), generator=generator)


def perceptron(seed: int) -> nn.Module:
    return MultiLayerPerceptron((5,), image_size=4, num_classes=3).fresh(seed).double()


def myrtle(seed: int) -> nn.Module:
    return MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3).fresh(seed).double()


# ---- lines


@pytest.mark.parametrize("t", [-0.5, 0.0, 0.3, 0.5, 0.9, 1.0, 2.0])
def test_values_are_on_the_line(t):
    a, b = Everything(0), Everything(1)
    result = tensors(interpolate(a, b, t))
    assert result.keys() == tensors(a).keys()
    for name, value in tensors(a).items():
        found, other = result[name], tensors(b)[name]
        assert found is not value
        assert (found.dtype, found.requires_grad, type(found)) == (value.dtype, value.requires_grad, type(value))
        if value.is_floating_point() or value.is_complex():
            torch.testing.assert_close(found, (1 - t) * value + t * other)
        else:
            assert torch.equal(found, value)


def test_ends_are_bitwise_the_networks():
    a, b = Everything(0), Everything(1)
    with torch.no_grad():  # what arithmetic would change
        a.frozen[0], b.frozen[0] = -0.0, 3e38
        a.scale[0], b.scale[0] = torch.nan, -0.0
        a.brief[0], b.brief[0] = 1e-40, torch.inf
    for t, end in ((0, a), (1, b)):
        for name, value in tensors(interpolate(a, b, t)).items():
            expected = tensors(end if value.is_floating_point() or value.is_complex() else a)[name]
            assert bits(value) == bits(expected), (t, name)


def test_the_networks_do_not_change_and_ties_stay():
    a, b = Everything(0), Everything(1)
    b.eval()
    before = [{name: bits(value) for name, value in tensors(network).items()} for network in (a, b)]
    result = interpolate(a, b, 0.5)
    assert [{name: bits(value) for name, value in tensors(network).items()} for network in (a, b)] == before
    assert result.second.weight is result.first.weight
    assert result.training
    assert not interpolate(b, a, 0.5).training
    assert type(result) is Everything


class Relu3(nn.Sequential):
    def __init__(self, *, out: int = 2, act: type[nn.Module] = nn.ReLU, bias: bool = True) -> None:
        super().__init__(nn.Linear(3, 3), act(), nn.Linear(3, out, bias=bias))


def untied() -> Everything:
    network = Everything(1)
    network.second.weight = nn.Parameter(network.first.weight.detach().clone())
    return network


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (Relu3(), Relu3(act=nn.Tanh), "the module '1' is a .*ReLU in the first and a .*Tanh in the second"),
        (Relu3(), nn.Linear(3, 2), "the whole network is a .*Relu3 in the first and a .*Linear in the second"),
        (Relu3(), Relu3(out=4), r"the parameter '2.weight' is of shape \[2, 3\] and dtype float32 in the first and of"),
        (Relu3(), Relu3(bias=False), "only the first has the parameter '2.bias'"),
        (Relu3(bias=False), Relu3(), "only the second has the parameter '2.bias'"),
        (Relu3(), Relu3().double(), "'0.weight' is of shape .* dtype float32 in the first and .* dtype float64"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU()), "only the second has the module '1'"),
        (Everything(0), untied(), "'second.weight' is of .*, tied to 'first.weight' in the first and of"),
        (nn.LazyLinear(2), nn.LazyLinear(2), "The parameter 'weight' is not initialised"),
    ],
)
def test_the_first_difference_is_named(a, b, message):
    for call in (lambda: interpolate(a, b, 0.5), lambda: average([a, a, b]), lambda: barrier(a, b, [])):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


# ---- means


def test_average():
    networks = [Everything(seed) for seed in range(3)]
    weights = [1.0, 2.0, 5.0]
    for given, share in ((weights, [0.125, 0.25, 0.625]), (None, [1 / 3] * 3)):
        result = tensors(average(networks, given))
        for name, value in tensors(networks[0]).items():
            if value.is_floating_point() or value.is_complex():
                each = [tensors(network)[name] for network in networks]
                wide = torch.complex128 if value.is_complex() else torch.float64
                expected = sum(w * tensor.to(wide) for w, tensor in zip(share, each, strict=True))
                torch.testing.assert_close(result[name], expected.to(value.dtype), atol=1e-7, rtol=0)
            else:
                assert torch.equal(result[name], value)


# ---- barriers


class Product(nn.Module):
    """The output u v, whatever the image: (u, v) and (-u, -v) are the same function, and between them is 0."""

    def __init__(self, u: float, v: float) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (u, v))

    def forward(self, x: Tensor) -> Tensor:
        return (self.u * self.v).expand(len(x))


def test_barrier_of_a_toy_in_closed_form():
    """Between (1, 1) and (-1, -1) the output is (1 - 2t)^2, and the loss to the target y is ((1 - 2t)^2 - y)^2."""
    data = [(torch.zeros(3), torch.full((3,), 1.0)), (torch.zeros(1), torch.full((1,), 3.0))]
    found = barrier(Product(1, 1), Product(-1, -1), data, points=11, loss=F.mse_loss)
    output = (1 - 2 * found.t) ** 2
    torch.testing.assert_close(found.t, torch.linspace(0, 1, 11, dtype=torch.float64))
    torch.testing.assert_close(found.loss, 0.75 * (output - 1) ** 2 + 0.25 * (output - 3) ** 2)
    # At the ends 0.25 * 4 = 1, in the middle 0.75 + 0.25 * 9 = 3.
    assert found.loss_ends == pytest.approx((1, 1))
    assert found.loss_barrier == pytest.approx(2)
    assert found.loss_barrier_mean == pytest.approx(2)
    assert found.samples == 4
    assert found.accuracy is found.accuracy_barrier is found.accuracy_barrier_mean is found.accuracy_ends is None
    assert not found.recalibrated


def test_both_definitions_where_the_ends_differ():
    """From (0, 0) to (1, 1) the output is t^2 and the loss to the target 1 is (t^2 - 1)^2, above the line 1 - t."""
    data = [(torch.zeros(1), torch.ones(1))]
    found = barrier(Product(0, 0), Product(1, 1), data, points=101, loss=F.mse_loss)
    t = found.t
    assert found.loss_ends == (1, 0)
    assert found.loss_barrier == pytest.approx(float(((t**2 - 1) ** 2 - (1 - t)).max()))
    assert found.loss_barrier > 0.1
    assert found.loss_barrier_mean == pytest.approx(0.5)  # the worse end itself
    # The other way round it is the same.
    back = barrier(Product(1, 1), Product(0, 0), data, points=101, loss=F.mse_loss)
    assert back.loss_barrier == pytest.approx(found.loss_barrier)


def test_every_sample_counts_once():
    """Against new networks at every point and all samples in one batch; sizes of batches differ."""
    a, b = perceptron(0), perceptron(1)
    images, labels = batch(50)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16)
    found = barrier(a, b, loader, points=7)
    for t, loss, accuracy in zip(found.t.tolist(), found.loss, found.accuracy, strict=True):
        outputs = interpolate(a, b, t).eval()(images)
        torch.testing.assert_close(loss, F.cross_entropy(outputs, labels).detach(), atol=1e-12, rtol=1e-12)
        assert accuracy.item() == pytest.approx((outputs.argmax(1) == labels).double().mean().item())
    assert found.samples == 50
    assert found.accuracy_barrier == pytest.approx(
        float(((1 - found.t) * found.accuracy[0] + found.t * found.accuracy[-1] - found.accuracy).max())
    )
    assert found.accuracy_barrier_mean == pytest.approx(float(found.accuracy[[0, -1]].mean() - found.accuracy.min()))
    assert found.accuracy_ends == (found.accuracy[0], found.accuracy[-1])
    assert isinstance(found, Barrier)


@pytest.mark.parametrize("separate", [False, True])
def test_statistics_are_measured_anew_at_every_point(separate):
    a, b = myrtle(0), myrtle(1)
    data = [batch(20, seed=seed, shape=(1, 8, 8)) for seed in range(2)]
    training = [batch(10, seed=seed, shape=(1, 8, 8))[0] for seed in range(5, 8)] if separate else None
    before = {name: bits(value) for network in (a, b) for name, value in tensors(network).items()}
    found = barrier(a, b, data, points=4, recalibration_data=training)
    assert found.recalibrated
    assert before == {name: bits(value) for network in (a, b) for name, value in tensors(network).items()}
    for t, loss in zip(found.t.tolist(), found.loss, strict=True):
        network = interpolate(a, b, t).eval()
        recalibrate_batch_norm(network, training or data)
        expected = sum(F.cross_entropy(network(images), labels) for images, labels in data) / 2
        torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-12)
    plain = barrier(a, b, data, points=4, recalibrate=False)
    assert not plain.recalibrated
    assert not torch.isclose(plain.loss, found.loss).any(), "the ends are recalibrated too"


def test_modes_and_gradients():
    """Evaluated in eval mode whatever the mode of the networks, without gradients."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3)) for _ in range(2)]
    a, b = (network.double() for network in networks)
    data = [batch()]
    found = barrier(a, b, data, points=3)
    torch.testing.assert_close(found.loss[0], F.cross_entropy(a.eval()(data[0][0]), data[0][1]).detach())
    assert b.training
    assert not found.loss.requires_grad
    assert all(parameter.grad is None for parameter in (*a.parameters(), *b.parameters()))


def test_accuracy_with_another_loss_and_without_classes():
    a, b = perceptron(0), perceptron(1)
    images, labels = batch()
    smooth = barrier(a, b, [(images, labels)], points=3, loss=lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1))
    assert smooth.accuracy is not None
    targets = F.one_hot(labels, 3).double()
    assert barrier(a, b, [(images, targets)], points=3).accuracy is None
    assert barrier(a, b, [(images, labels), (images, targets)], points=3).accuracy is None


WEIGHTS = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)


@pytest.mark.parametrize("unequal", ["class weights", "ignored label", "sum"])
def test_a_loss_that_depends_on_the_batches_is_named(unequal):
    a, b = perceptron(0), perceptron(1)
    images, labels = batch(50)
    if unequal == "ignored label":
        labels[33] = -100
    options = {"class weights": {"weight": WEIGHTS}, "sum": {"reduction": "sum"}}.get(unequal, {})
    loss = functools.partial(F.cross_entropy, **options)
    with pytest.warns(UserWarning, match="batches of other sizes would be another number: loss must be the mean over"):
        found = [
            barrier(a, b, list(zip(images.split(size), labels.split(size), strict=True)), points=2,
                    loss=lambda outputs, labels: loss(outputs, labels)).loss[0]
            for size in (50, 8)
        ]  # fmt: skip
    assert abs(found[0] - found[1]) > 1e-6


LOSSES = {
    "default": (None, {}),
    "module": (nn.CrossEntropyLoss(ignore_index=1), {"ignore_index": 1}),
    "smoothed": (functools.partial(F.cross_entropy, label_smoothing=0.1), {"label_smoothing": 0.1}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_labels_do_not_count(name):
    """Neither in the loss nor in the accuracy, whatever the batches are: also where one has no other labels."""
    loss, options = LOSSES[name]
    a, b = perceptron(0), perceptron(1)
    images, labels = batch(50)
    ignored = options.get("ignore_index", -100)
    labels[[3, 17, 18]] = labels[40:] = ignored
    data = list(zip(images.split(8), labels.split(8), strict=True))
    found = barrier(a, b, data, points=2, loss=loss)  # a warning of unequal weights would fail
    outputs = a.eval()(images)
    torch.testing.assert_close(found.loss[0], F.cross_entropy(outputs, labels, **options).detach(), rtol=1e-10, atol=0)
    counted = labels != ignored
    assert found.accuracy[0] == pytest.approx(float((outputs.argmax(1) == labels)[counted].double().mean()))
    assert found.samples == 50


def test_padded_sequences_count_by_their_labels():
    torch.manual_seed(0)
    network = nn.Conv1d(4, 3, 1).double()
    inputs, labels = torch.randn(9, 4, 5).double(), torch.randint(3, (9, 5))
    labels[2:, 3:] = labels[7] = -100
    data = list(zip(inputs.split(4), labels.split(4), strict=True))
    expected = F.cross_entropy(network(inputs), labels).detach()
    torch.testing.assert_close(barrier(network, network, data, points=2).loss[0], expected, rtol=1e-12, atol=0)


def test_data_without_labels_are_named():
    ignored = [(batch(8)[0], torch.full((8,), -100))]
    assert_refused(barrier, perceptron(0), perceptron(1), ignored, says="batches in which all labels are ignored")


def test_curve_of_another_kind():
    """A parabola through weight space, in a scratch network."""
    scratch = Product(1, 1)

    def place(s: float) -> None:
        with torch.no_grad():
            scratch.u.fill_(s)
            scratch.v.fill_(s * s)

    curve = curve_losses(scratch, place, [0.0, 1.0, 2.0], [(torch.zeros(1), torch.ones(1))], loss=F.mse_loss)
    assert curve.loss.tolist() == [1, 0, 49]
    assert scratch.training
    assert scratch.u == 2
    assert_refused(curve_losses, scratch, place, [], [], says="at least one point")


def test_networks_in_half_precision():
    a, b = perceptron(0).bfloat16(), perceptron(1).bfloat16()
    images, labels = batch()
    found = barrier(a, b, [(images, labels)], points=5)  # inputs are converted
    assert output_change(a, b, [(images, labels)]) == output_change(a, b, [(images.bfloat16(), labels)]) > 0
    exact = barrier(a.double(), b.double(), [(images.bfloat16().double(), labels)], points=5)
    torch.testing.assert_close(found.loss, exact.loss, atol=0.03, rtol=0.03)


def test_the_relative_change_of_zero_outputs():
    network = perceptron(0)
    zero = nn.init.zeros_(network.classifier.weight), nn.init.zeros_(network.classifier.bias)
    assert not zero[0].any()
    assert output_change(network, network, [batch()]) == 0
    assert output_change(network, perceptron(1), [batch()]) == math.inf


@pytest.mark.parametrize("recalibrate", [False, True])
def test_loss_that_is_not_finite_names_the_point(recalibrate):
    make = myrtle if recalibrate else perceptron
    shape = (1, 8, 8) if recalibrate else (1, 4, 4)
    a, b = make(0), make(1)
    with torch.no_grad():
        next(b.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"t = 0\.25"):  # at t = 0 the weights are those of a
        barrier(a, b, [batch(shape=shape)], points=5)


def refused_barrier(says, make=perceptron, **settings):
    return refused(lambda: barrier(make(0), make(1), **{"data": [batch()], **settings}), says=says)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(interpolate, nn.ReLU(), nn.ReLU(), math.nan, says="t must be finite, got nan"),
        refused(interpolate, nn.ReLU(), nn.ReLU(), math.inf, says="t must be finite, got inf"),
        refused(average, [], says="at least one network"),
        refused(average, [nn.ReLU()], [1, 2], says="one number for each of 1 networks, got 2"),
        refused(average, [nn.ReLU()] * 2, [1, -1], says="a sum other than 0"),
        refused(average, [nn.ReLU()] * 2, [1, math.nan], says="must be finite"),
        refused(average, [{}, {}], says="Sequence[Module], got list of dict", error=TypeError),
        refused_barrier("data has no samples", data=[]),
        refused_barrier("data has no samples", data=[batch(0)]),
        refused_barrier("data is read once for every point, and this iterator", data=iter([batch()])),
        refused_barrier("data must be a list or loader of batches, got int", data=3),
        refused_barrier("inputs and labels, got Tensor.", data=batch()),
        refused_barrier("recalibration_data is read once for every point", recalibration_data=iter([])),
        refused_barrier("At t =", myrtle, data=[batch(shape=(1, 8, 8))], recalibration_data=[]),
        refused_barrier("points must be an integer >= 2, got 1", points=1),
        refused_barrier("points must be an integer >= 2", points=2.5),
        refused_barrier("needs batch norms with running statistics", recalibrate=True),
        refused_barrier("recalibrate must be True, False or 'auto', got 'yes'", recalibrate="yes"),
        refused_barrier("one number, got shape [12]", loss=lambda x, y: F.cross_entropy(x, y, reduction="none")),
    ],
)
def test_refused_arguments(refusal):
    refusal()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_networks_on_two_devices():
    data = [batch(20, shape=(1, 8, 8))]
    expected = barrier(myrtle(0), myrtle(1), data, points=3)
    found = barrier(myrtle(0).cuda(), myrtle(1), data, points=3)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-10, rtol=1e-10)
    assert torch.equal(found.accuracy, expected.accuracy)


# ---- data of a user


def uneven(count, *, shuffle=False, drop_last=False):
    """Return a loader of 22 samples, the last of which are another number."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 3), torch.arange(22) % 4)
    return DataLoader(data, count, shuffle=shuffle, drop_last=drop_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_have_more_than_two_digits(dtype):
    a, b = (nn.Linear(3, 4).to(dtype) for _ in range(2))
    x, y = torch.randn(16, 3).to(dtype), torch.arange(16) % 4
    found = barrier(a, b, [(x[:5], y[:5]), (x[5:], y[5:])], points=2)  # a warning of unequal weights would fail
    for network, loss in zip((a, b), found.loss, strict=True):
        expected = F.cross_entropy(network(x).double(), y)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)


def test_data_that_change_from_point_to_point_are_noticed():
    a, b = nn.Linear(3, 4), nn.Linear(3, 4)
    with pytest.warns(UserWarning, match="data change from point to point"):
        barrier(a, b, uneven(4, shuffle=True, drop_last=True), points=3)
    barrier(a, b, uneven(4, shuffle=True), points=3)


def test_a_short_last_batch_has_no_part_in_statistics():
    """Of 22 samples in batches of 7 the last one is alone, which torch refuses; in batches of 10 there are two."""
    nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    for count in (7, 10):
        found = barrier(*nets, uneven(count), points=3)
        whole = barrier(*nets, uneven(count), points=3, recalibration_data=uneven(count, drop_last=True))
        torch.testing.assert_close(found.loss, whole.loss, rtol=0, atol=0)


def test_without_splits_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="splits must have at least one split, got none"):
        curve_barriers(Curve(torch.zeros(2, 16)), nn.Linear(3, 4), {})
