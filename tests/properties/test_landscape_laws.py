"""Laws of curves, spectra and learning coefficients, against the formulas written out anew, in odd cases too."""

import copy
import functools
import math

import pytest
import torch
from helpers import assert_refused, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.connectivity import Curve, CurveNetwork, CurveSummary, curve_coefficients, curve_geometry
from lightning_sym.curvature import (
    CurvatureOperator,
    EmptyLoaderError,
    MatrixOperator,
    NonFiniteError,
    NotConvergedError,
    lanczos,
    near_zero,
    spectral_density,
    top_eigenpairs,
    trace,
)
from lightning_sym.landscape import learning_coefficient, weight_vector
from lightning_sym.landscape.analytic import reduced_rank_coefficient
from lightning_sym.landscape.langevin import METHODS, expected_energy
from lightning_sym.landscape.loss_on_data import LossOnData

KINDS = ("bezier", "chain")
laws = settings(max_examples=25, deadline=None, derandomize=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Odd(nn.Module):
    """Tied, frozen and transposed weights, and buffers that are complex, integer and minus infinity."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.last.weight = nn.Parameter(torch.randn(3, 2).T)
        self.second.bias.requires_grad_(False).zero_()
        self.register_buffer("phases", torch.tensor([1 + 2j, 2 - 1j]))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()[:, self.order]
        return self.last(hidden) * self.phases.abs().sum() + self.phases.imag + self.mask.exp()


def odd(seed: int = 0) -> nn.Module:
    return Odd(seed).double()


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.cat([part.flatten() for part in found])


def dense(network: nn.Module, x: Tensor, y: Tensor, loss) -> tuple[Tensor, Tensor]:
    """Return gradient and Hessian by two backward passes for each row, without functional calls."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    slope = gradients(loss(network(x), y), parameters)
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in slope]
    return slope.detach(), torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def gauss_newton(network: nn.Module, x: Tensor, y: Tensor, loss) -> Tensor:
    parameters = [p for p in network.parameters() if p.requires_grad]
    total = torch.zeros(())
    for one, target in zip(x.split(1), y.split(1), strict=True):
        outputs = network(one)
        rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in outputs.flatten()]
        jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
        inner = torch.autograd.functional.hessian(lambda o, t=target: loss(o, t), outputs.detach())
        total = total + jacobian.T @ inner.reshape(len(jacobian), -1) @ jacobian / len(x)
    return total


# ---- curves


def casteljau(points: Tensor, t: float) -> Tensor:
    while len(points) > 1:
        points = (1 - t) * points[:-1] + t * points[1:]
    return points[0]


def along_chain(points: Tensor, t: float) -> Tensor:
    place = t * (len(points) - 1)
    segment = min(int(place), len(points) - 2)
    return points[segment] + (place - segment) * (points[segment + 1] - points[segment])


@laws
@given(st.integers(2, 6), st.floats(0, 1), st.integers(0, 50), st.sampled_from([torch.float32, torch.float64]))
def test_curves_are_those_of_de_casteljau_and_of_straight_lines(count, t, seed, dtype):
    points = normal(count, 7, seed=seed).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for kind, expected in (("bezier", casteljau), ("chain", along_chain)):
        torch.testing.assert_close(Curve(points, kind)(t), expected(points, t), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_a_chain_meets_its_bends_and_goes_on_along_the_line_behind(count):
    curve = Curve(normal(count, 4), "chain")
    t = torch.arange(count, dtype=torch.float64) / (count - 1)
    torch.testing.assert_close(curve(t), curve.points, rtol=0, atol=1e-14)
    lines = (count - 1) * curve.points.diff(dim=0)
    torch.testing.assert_close(curve.tangent(t), torch.cat([lines, lines[-1:]]), rtol=0, atol=1e-13)
    assert not curve.second_derivative(t).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("t", [0.0, 1 / 3, 0.4, 1.0])
@pytest.mark.parametrize("bends", [1, 2, 3])
@pytest.mark.few(9)
def test_a_network_on_a_curve_is_each_of_its_tensors_on_it(kind, decay, t, bends):
    """Also of a network with all that is odd; its gradient is that of the point, times the coefficient."""
    start, end, x, y = odd(0), odd(1), normal(5, 3), torch.tensor([0, 1, 1, 0, 1])
    network = CurveNetwork(start, end, bends, decay)
    with torch.no_grad():
        network.bends += normal(*network.bends.shape)
    coefficients = curve_coefficients(kind, bends + 2, torch.tensor(t).double())
    network.coefficients.copy_(coefficients)
    control = torch.cat([network.ends[:1], network.bends.detach(), network.ends[1:]])
    plain = copy.deepcopy(start)
    moving = [p for p in plain.parameters() if p.requires_grad]
    offset = 0
    with torch.no_grad():
        for parameter in moving:  # one number at a time, in the order of its indices
            for place in torch.cartesian_prod(*map(torch.arange, parameter.shape)).reshape(-1, parameter.ndim):
                parameter[tuple(place)] = sum(c * w for c, w in zip(coefficients, control[:, offset], strict=True))
                offset += 1
    assert offset == network.bends.shape[1]
    torch.testing.assert_close(network(x), plain(x), rtol=1e-12, atol=1e-12)
    penalty = decay / 2 * sum(p.square().sum() for p in moving)
    slope = gradients(F.cross_entropy(plain(x), y) + penalty, moving)
    (found,) = torch.autograd.grad(F.cross_entropy(network(x), y), network.bends)
    torch.testing.assert_close(found, coefficients[1:-1, None] * slope, rtol=1e-10, atol=1e-12)
    assert torch.equal(network.network.phases, start.phases)


@laws
@given(st.integers(2, 12), st.integers(0, 50))
def test_summaries_are_sums(count, seed):
    values, steps = normal(count, seed=seed), normal(count - 1, seed=seed + 1).abs()
    found = CurveSummary.of(values, steps)
    parts = [(float(values[i]) + float(values[i + 1])) / 2 * float(steps[i]) for i in range(count - 1)]
    assert found.integral == pytest.approx(sum(parts) / float(steps.sum()), rel=1e-10, abs=1e-12)
    assert found.mean == pytest.approx(sum(values.tolist()) / count, rel=1e-10, abs=1e-12)
    ends = (found.start, found.end, found.lowest, found.highest)
    assert ends == (float(values[0]), float(values[-1]), min(values.tolist()), max(values.tolist()))
    assert CurveSummary.of(values, 3 * steps).integral == pytest.approx(found.integral, rel=1e-10, abs=1e-12)


def test_a_curve_between_equal_ends():
    """As of a network and another that is moved onto it."""
    ends = normal(1, 5).repeat(2, 1)
    line = Curve.straight(*ends)
    assert (line.length(), float(line.tangent(0.3).norm())) == (pytest.approx(0, abs=1e-12), 0)
    assert CurveSummary.of(torch.tensor([1.0, 2.0, 1.0]), torch.zeros(2)).integral == 1.5
    loop = Curve(torch.cat([ends[:1], normal(1, 5, seed=1), ends[1:]]), "chain")
    assert loop.length(2) == pytest.approx(2 * float((loop.points[1] - ends[0]).norm()))
    assert_refused(loop.plane, says="span no plane")
    network = CurveNetwork(odd(), odd())
    assert torch.equal(network.bends[0], network.ends[0])


# ---- operators


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("sizes", [[1, 6, 2], [9], [0, 8, 1]], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
@pytest.mark.few(4)
def test_matrices_are_those_of_two_backward_passes(kind, sizes, loss):
    """Of an odd network, for batches of all sizes, of indices and of numbers as targets."""
    network, x = odd(), normal(9, 3, seed=2)
    y = torch.arange(9) % 2 if loss is F.cross_entropy else normal(9, 2, seed=4)
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    operator = CurvatureOperator(network, batches, loss, kind=kind, dtype=torch.float64)
    slope, hessian = dense(network, x, y, loss)
    expected = hessian if kind == "hessian" else gauss_newton(network, x, y, loss)
    torch.testing.assert_close(operator.matrix(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator @ slope, expected @ slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.gradient_and_loss()[0], slope, rtol=1e-10, atol=1e-12)
    split = operator.split(operator.flatten(dict(network.named_parameters())))
    assert all(torch.equal(part, dict(network.named_parameters())[name]) for name, part in split.items())


def test_single_precision_is_near_double():
    network, x, y = Odd(), normal(9, 3).float(), torch.arange(9) % 2
    found = CurvatureOperator(network, (x, y), F.cross_entropy).matrix()
    expected = dense(copy.deepcopy(network).double(), x.double(), y, F.cross_entropy)[1]
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("count", [1, 2])
def test_one_weight_and_one_sample(count):
    network, x = nn.Linear(1, 1, bias=False).double(), normal(count, 1, seed=5)
    operator = CurvatureOperator(network, (x, normal(count, 1)), F.mse_loss)
    exact = 2 * float(x.square().mean())
    assert top_eigenpairs(operator).values.tolist() == pytest.approx([exact])
    assert trace(operator, 2).value == pytest.approx(exact)
    assert spectral_density(operator).nodes.unique().tolist() == pytest.approx([exact])
    assert operator.matrix().tolist() == [[pytest.approx(exact)]]


@pytest.mark.parametrize(("activation", "nullity"), [(nn.ReLU, 8), (nn.LeakyReLU, 8), (nn.Tanh, 0), (nn.GELU, 0)])
def test_nullity_of_a_layer_is_the_number_of_its_scalings(activation, nullity):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 3)).double()
    x = 1.5 * normal(2000, 5)
    operator = CurvatureOperator(network, (x, x[:, :3]), F.mse_loss, kind="gauss_newton")
    found = near_zero(torch.linalg.eigvalsh(operator.matrix()), [1e-12])
    assert found.relative[1e-12] == nullity
    linear = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    operator = CurvatureOperator(linear, (x, x[:, :3]), F.mse_loss, kind="gauss_newton")
    assert near_zero(torch.linalg.eigvalsh(operator.matrix()), [1e-12]).relative[1e-12] == 21


# ---- eigenvalues


@st.composite
def spectra(draw) -> Tensor:
    """Return spectra with zeros, copies, clusters and both signs, of 1 to 90 eigenvalues."""
    values = draw(st.lists(st.sampled_from([0.0, -3.0, -1e-9, 1e-3, 1.0, 1.0 + 1e-6, 7.5]), min_size=1, max_size=9))
    size = draw(st.integers(len(values), 90))
    spread = normal(size, seed=size) * draw(st.sampled_from([0.0, 1e-8, 1.0]))
    spread[: len(values)] = 0
    return draw(st.sampled_from([1.0, 1e-6, 1e6])) * (torch.tensor(values).double().repeat(size)[:size] + spread)


def rotated(values: Tensor) -> MatrixOperator:
    basis = torch.linalg.qr(normal(len(values), len(values), seed=7))[0]
    matrix = basis @ values.diag() @ basis.T
    return MatrixOperator((matrix + matrix.T) / 2)


@laws
@given(spectra(), st.data())
def test_eigenpairs_are_eigenpairs_or_an_error(values, data):
    operator, size = rotated(values), len(values)
    k = data.draw(st.one_of(st.just(1), st.just(size), st.integers(1, size)))
    which = data.draw(st.sampled_from(["largest", "smallest", "magnitude"]))
    try:
        found = top_eigenpairs(operator, k, which=which, tolerance=1e-8)
    except NotConvergedError:
        assert size > 64  # none is for a matrix that is decomposed whole
        return
    scale = float(values.abs().max())
    matrix, tolerance = operator.matrix, 1e-7 * scale + 1e-300
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(k).double(), rtol=0, atol=1e-9)
    residuals = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert residuals.max() <= tolerance
    assert (found.values[:, None] - values).abs().min(1).values.max() <= tolerance
    order = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[which].argsort()
    expected = values[order]
    assert abs(abs(float(found.values[0])) - abs(float(expected[0]))) <= tolerance
    if size <= 64 or k == size:  # with all copies
        error = found.values.abs() - expected[:k].abs() if which == "magnitude" else found.values - expected[:k]
        assert error.abs().max() <= tolerance


@laws
@given(spectra(), st.integers(1, 12), st.integers(0, 9))
def test_lanczos_is_a_gauss_quadrature(values, steps, seed):
    steps = min(steps, len(values))
    values = values / (values.abs().max() or 1)
    q = normal(len(values), 2, seed=seed)
    found = lanczos(rotated(values), q, steps)
    matrix, q = rotated(values).matrix, q / q.norm(dim=0)
    assert found.nodes.min() >= values.min() - 1e-9
    assert found.nodes.max() <= values.max() + 1e-9
    power = q
    for order in range(2 * steps):
        moments = (found.weights * found.nodes**order).sum(1)
        torch.testing.assert_close(moments, (q * power).sum(0), rtol=1e-9, atol=1e-9)
        power = matrix @ power


@laws
@given(spectra(), st.integers(1, 100))
def test_densities_have_integral_one(values, steps):
    density = spectral_density(rotated(values), steps, 2)
    grid = density.grid(20_001)
    assert density.width > 0
    # Of the narrowest Gaussians of the rule, 1 / 37 of a 99th of the range, a point falls on each.
    assert float(torch.trapezoid(density.at(grid), grid)) == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(density.weights.sum(1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)


@laws
@given(spectra())
def test_probes_of_random_signs(values):
    exact = trace(MatrixOperator(values.diag()), 3)
    assert exact.value == pytest.approx(float(values.sum()), rel=1e-10, abs=1e-12)
    assert exact.squared_norm == pytest.approx(float(values.square().sum()), rel=1e-10)
    assert exact.standard_error <= 1e-10 * float(values.abs().sum())
    matrix = rotated(values).matrix
    found = trace(MatrixOperator(matrix), 400)
    squared = float(matrix.square().sum())
    error = math.sqrt(2 * max(squared - float(matrix.diagonal().square().sum()), 0) / 400)
    assert abs(found.value - float(values.sum())) <= 5 * error + 1e-9 * float(values.abs().sum())


@laws
@given(spectra(), st.sampled_from([1e-3, 0.5, 40.0]))
def test_counts_near_zero(values, factor):
    tolerances = (1e-1, 1e-5, 1e-10)
    found, scaled = near_zero(values, tolerances), near_zero(factor * values, tolerances)
    largest = max(abs(v) for v in values.tolist())
    for t in tolerances:
        assert found.relative[t] == sum(abs(v) <= t * largest for v in values.tolist())
        assert found.absolute[t] == sum(abs(v) < t for v in values.tolist())
    assert found.negative == sum(v < -1e-12 * largest for v in values.tolist())
    assert (scaled.below_gap, scaled.gap) == pytest.approx((found.below_gap, found.gap), abs=1e-9)
    if not values.any():
        assert set(found.relative.values()) == {len(values)}


# ---- learning coefficients


class Landscape(nn.Module):
    """Outputs that are a function of three weights."""

    def __init__(self, value) -> None:
        super().__init__()
        self.w, self.value = nn.Parameter(torch.zeros(3, dtype=torch.float64)), value

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.w).expand(len(x))


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def chains(value, **changes):
    data = [(torch.zeros(9, 1), torch.zeros(9))]
    return learning_coefficient(Landscape(value), data, mean, **{"chains": 40, "steps": 400, **changes})


def flat(w: Tensor) -> Tensor:
    return 0 * w.sum()


def saddle(w: Tensor) -> Tensor:
    return w[0] ** 2 - 4 * w[1] ** 2


def bowl(w: Tensor) -> Tensor:
    return (w**2).sum()


@pytest.mark.parametrize(
    ("value", "changes", "says"),
    [
        (flat, {}, "the loss is the same wherever the chains went"),
        (flat, {"localisation": 0.0, "step": 0.1}, "the loss is the same wherever the chains went"),
        (saddle, {}, "a loss below that of the weights they began at"),
        (saddle, {"localisation": 0.0}, ""),
        (lambda w: -bowl(w), {}, ""),
        (bowl, {"steps": 8, "burn_in": 7}, "8 draws, 7 of them burn-in, are too few"),
        (bowl, {"steps": 8, "batch_size": 4}, "1 draws, 1 of them burn-in, are too few"),
        (bowl, {"steps": 60, "batch_size": 4}, "6 draws, 3 of them burn-in, are too few"),
    ],
    ids=["flat", "flat, free", "saddle", "saddle, free", "maximum", "one draw", "batches, none", "batches, few"],
)
def test_where_there_is_no_learning_coefficient_the_reason_is_given(value, changes, says):
    found = chains(value, **changes)
    assert (found.estimate, found.standard_error) == (None, None)
    assert says in found.refusal
    assert found.refusal.endswith(".")
    assert found.refusal.count(". ") == 0
    assert "nan" not in found.refusal


def test_all_directions_of_a_bowl_count_without_localisation():
    found = chains(bowl, chains=600, steps=800, localisation=0.0, inverse_temperature=1e3)
    assert found.estimate == pytest.approx(1.5, abs=4 * found.standard_error)
    assert found.regular(2 * torch.ones(3)) == pytest.approx(1.5)


@pytest.mark.parametrize("execution", ["vmap", "loop"])
@pytest.mark.parametrize("block_size", [2, 5, 100])
@pytest.mark.long
def test_losses_of_chains_are_those_of_the_network(execution, block_size):
    network, x = odd(), normal(9, 3)
    y = torch.softmax(normal(9, 2), 1)  # probabilities as targets
    before = {name: value.clone() for name, value in network.state_dict().items()}
    split = [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])]
    loss = functools.partial(F.cross_entropy, label_smoothing=0.1)
    function = LossOnData(network, split, loss, dtype=torch.float64, block_size=block_size, execution=execution)
    vectors = weight_vector(network) + normal(2, len(weight_vector(network)), seed=1)
    slopes, values = function.gradients(vectors)
    for vector, slope, value in zip(vectors, slopes, values, strict=True):
        plain = copy.deepcopy(network)
        Curve(torch.stack([vector, vector])).writer(plain)(0)
        expected, hessian = dense(plain, x, y, loss)
        assert float(value) == pytest.approx(float(loss(plain(x), y).detach()), rel=1e-12)
        torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-12)
        top = float(torch.linalg.eigvalsh(hessian)[-1])
        assert float(function.largest_curvatures(vector[None])) == pytest.approx(top, rel=1e-8)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@laws
@given(*[st.integers(1, 9)] * 3, st.integers(0, 9))
def test_laws_of_reduced_rank_regression(inputs, hidden, outputs, rank):
    rank = min(rank, inputs, hidden, outputs)
    found = reduced_rank_coefficient(inputs, hidden, outputs, rank)
    assert found == reduced_rank_coefficient(outputs, hidden, inputs, rank)
    # At most half of what is to be learned, in the map and in its factors, and half of the regular directions at least.
    assert rank * (inputs + outputs - rank) / 2 <= found <= min(inputs * outputs, hidden * (inputs + outputs)) / 2
    full = min(inputs, outputs)
    if hidden <= full:
        assert reduced_rank_coefficient(inputs, hidden, outputs, hidden) == hidden * (inputs + outputs - hidden) / 2
    if rank:
        assert reduced_rank_coefficient(inputs, hidden, outputs, rank - 1) <= found


@pytest.mark.parametrize(("eigenvalues", "step"), [([10.0], 4e-4), ([10.0, -1.0], 1e-5)], ids=["unstable", "saddle"])
def test_what_has_no_stationary_law_has_no_energy(eigenvalues, step):
    for method in METHODS:
        assert expected_energy(torch.tensor(eigenvalues), 1e3, 0.0, step, method) == math.inf
    assert math.isfinite(expected_energy(torch.tensor([10.0, -1e-15, 0.0]), 1e3, 0.0, 1e-5))


# ---- networks of other kinds


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * torch.ones(4, dtype=x.dtype)
        return self.last(self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.last = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


@pytest.mark.parametrize("make", [Attention, Recurrent])
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_curvature_of_attention_and_recurrence(make, kind):
    network, x, y = make().double(), normal(6, 3), torch.arange(6) % 2
    operator = CurvatureOperator(network, (x, y), F.cross_entropy, kind=kind)
    fast = torch.backends.mha.get_fastpath_enabled()
    products = operator.matrix()
    assert torch.backends.mha.get_fastpath_enabled() == fast
    v, step = normal(operator.size), 1e-5
    torch.testing.assert_close(products @ v, operator @ v, rtol=1e-9, atol=1e-12)
    if kind == "gauss_newton":
        assert torch.linalg.eigvalsh(products)[0] > -1e-10
        return

    def slope(shift: float) -> Tensor:
        moved = copy.deepcopy(network)
        weights = weight_vector(network) + shift * v
        Curve(torch.stack([weights, weights])).writer(moved)(0)
        return CurvatureOperator(moved, (x, y), F.cross_entropy).gradient_and_loss()[0]

    difference = (slope(step) - slope(-step)) / (2 * step)
    assert (products @ v - difference).norm() < 1e-6 * difference.norm()


@pytest.mark.parametrize(("make", "execution"), [(Attention, "vmap"), (Attention, "loop"), (Recurrent, "loop")])
def test_chains_of_attention_and_recurrence(make, execution):
    data = [(normal(6, 3), torch.arange(6) % 2)]
    found = learning_coefficient(make().double(), data, chains=3, steps=8, execution=execution)
    assert found.losses.isfinite().all()
    assert found.curvature > 0


# ---- what is refused

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
IGNORED = torch.tensor([0, -100, 1, 1])
HIDDEN = torch.cat([Y, IGNORED[1:2], Y.repeat(19)[1:]])  # not among the 32 samples that are tried in any case


def operator_of(data=(X, Y), loss=F.cross_entropy, network=None) -> CurvatureOperator:
    return CurvatureOperator(Odd() if network is None else network, data, loss)


def chains_of(data=(X, Y), loss=F.cross_entropy, network=None):
    network = Odd() if network is None else network
    return learning_coefficient(network, [data], loss, chains=3, steps=8, inverse_temperature=1.0)


def ranking(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compare samples with each other, so that it is a mean over pairs."""
    return (outputs[:, None] - outputs[None]).square().mean() + outputs.square().mean()


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


def complex_network() -> nn.Module:
    return nn.Linear(3, 2, dtype=torch.complex128)


def infinite(value: float, name: str) -> nn.Module:
    network = Odd()
    network.get_buffer(name).fill_(value)
    return network


@pytest.mark.parametrize(
    "refusal",
    [
        refused(operator_of, loss=WEIGHTED, says="without class weights"),
        refused(operator_of, data=(torch.arange(12.0).view(4, 3), Y), loss=ranking, says="mean over samples"),
        refused(operator_of, data=(X / 0, Y), says="outputs are not finite", error=NonFiniteError),
        refused(operator_of, network=infinite(math.inf, "mask"), says="'mask'", error=NonFiniteError),
        refused(operator_of, network=infinite(math.nan, "mask"), says="'mask'", error=NonFiniteError),
        refused(operator_of, data=[(X[:1], torch.tensor(1))], says="got Tensor, a tensor without rows"),
        refused(operator_of, data=(X, Y[:2]), says="a row for each of the 4 inputs"),
        refused(lambda: operator_of() @ torch.zeros(20, 0), says="[20, 0]"),
        refused(chains_of, loss=WEIGHTED, says="without class weights"),
        refused(chains_of, data=(X, IGNORED), says="ignored labels"),
        refused(chains_of, data=(X.repeat(20, 1), HIDDEN), says="ignored labels"),
        refused(chains_of, data=(X, normal(4, 2)), says="indices or probabilities"),
        refused(chains_of, data=(X, normal(4)), says="indices or probabilities"),
        refused(chains_of, network=Noisy(3, 2), data=(X + 1, Y), says="dropout"),
        refused(chains_of, network=Recurrent(), says="use execution='loop'"),
        refused(chains_of, network=complex_network(), says="'weight' is complex"),
        refused(operator_of, network=complex_network(), says="'weight' is complex"),
        refused(lambda: CurveNetwork(complex_network(), complex_network()), says="'weight' is complex"),
        refused(
            lambda: curve_geometry(Curve(normal(2, 8)), nn.Linear(3, 2), []), says="no samples", error=EmptyLoaderError
        ),
        refused(chains_of, data=(X, Y[:2]), says="as many samples, got [2, 4]"),
        refused(lambda: chains(lambda w: -bowl(w), localisation=0.0), says="no curvature above 0"),
        refused(Curve.straight, torch.zeros(3), torch.zeros(4), says="of one shape and dtype"),
        refused(Curve.straight, torch.zeros(3), torch.zeros(3).double(), says="of one shape and dtype"),
        refused(Curve(torch.zeros(2, 3)).steps, torch.zeros(1), says="[T], T >= 2"),
        refused(Curve(torch.zeros(2, 3)), math.nan, says="t must be in [0, 1]"),
    ],
)
def test_bad_input_is_refused(refusal):
    refusal()
