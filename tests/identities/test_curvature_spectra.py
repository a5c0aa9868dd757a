"""Operators, eigenpairs, traces and densities against dense Hessians, closed forms and two other libraries."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from helpers import refused
from hessian_eigenthings import HessianOperator, supervised_loss
from hessian_eigenthings import lanczos as other_lanczos
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.curvature import (
    CurvatureError,
    CurvatureOperator,
    EmptyLoaderError,
    MatrixOperator,
    NonFiniteError,
    NotConvergedError,
    directional_curvature,
    lanczos,
    near_zero,
    smoothed,
    spectral_density,
    top_eigenpairs,
    top_eigenvalue,
    trace,
)
from lightning_sym.curvature.operators import curvlinops


class Landscape(nn.Module):
    """A loss of its parameters alone."""

    def __init__(self, value: Callable[[Tensor], Tensor], at: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(at, dtype=torch.float64))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.w).expand(len(x))


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def of_landscape(value: Callable[[Tensor], Tensor], *at: float) -> CurvatureOperator:
    return CurvatureOperator(Landscape(value, list(at)), (torch.zeros(4, 1), torch.zeros(4)), mean)


def toy(w: Tensor) -> Tensor:
    return 3 * w[0] ** 2 + 5 * w[1] ** 2


def small(activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 3)).double()


def samples(count: int = 50, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=generator).double(), torch.randint(classes, (count,), generator=generator)


def uneven(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 16, the last one smaller."""
    return list(zip(x.split(16), y.split(16), strict=True))


def loss_of(operator: CurvatureOperator, network: nn.Module, x: Tensor, y: Tensor, loss=F.cross_entropy):
    """Return the mean loss as a function of the vector of all parameters, and that vector."""

    def value(vector: Tensor) -> Tensor:
        return loss(functional_call(network, operator.split(vector), (x,)), y)

    return value, operator.flatten(dict(network.named_parameters()))


@pytest.fixture(scope="module")
def digits() -> tuple[CurvatureOperator, Tensor, Tensor]:
    """Return the Hessian of a trained network with 1,210 parameters, whole, and its eigenvalues."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images / 16).double()[:300]
    x, y = x - x.mean(0), torch.from_numpy(labels)[:300]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    operator = CurvatureOperator(network, (x, y), F.cross_entropy, columns=64)
    matrix = operator.matrix()
    return operator, matrix, torch.linalg.eigvalsh(matrix)


# ---- the loss, which may be no mean in later batches only


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens that have a label."""
    return F.cross_entropy(outputs.unflatten(1, (3, -1)), targets)


def labels(*values: int, count: int = 17, width: int = 0) -> Tensor:
    """Return labels that are 0, 1, 2 in turn, or rows of them, but for the last batches, which begin with others."""
    found = torch.arange(count) % 3
    found[11 : 11 + len(values)] = torch.tensor(values, dtype=torch.int64)
    return found if not width else found[:, None].expand(-1, width).clone()


def ragged() -> Tensor:
    """Return labels of two tokens, the second of which has none at three samples of a later batch."""
    found = labels(width=2)
    found[12:15, 1] = -100
    return found


WEIGHTS = torch.tensor([1.0, 1.0, 1.01], dtype=torch.float64)
IGNORING = {
    "label": (F.cross_entropy, labels(-100)),
    "labels of a whole batch": (F.cross_entropy, torch.cat([labels()[:10], torch.full((5,), -100), labels()[:2]])),
    "another label": (nn.CrossEntropyLoss(ignore_index=2), labels()),
    "tokens": (tokens, torch.cat([labels(width=2)[:15], torch.full((2, 2), -100)])),
    "negative log likelihood": (lambda f, y: F.nll_loss(f.log_softmax(1), y, ignore_index=-1), labels(-1, 0, -1)),
}
NO_MEANS = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), torch.cat([labels()[:10] % 2, labels()[:7]])),
    "class weights and smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), labels()),
    "tokens, some of which have no label": (tokens, ragged()),
    "sum in a later batch": (lambda f, y: F.cross_entropy(f, y) * (1 if (y < 2).any() else len(y)),
        torch.cat([labels()[:10], torch.full((7,), 2)])),
    "distance from the mean of the batch": (lambda f, y: ((f - f.mean(0)) * (y > 2)[:, None]).square().mean(),
        labels(3)),
    "the hardest half": (lambda f, y: F.cross_entropy(f, y, reduction="none").topk((len(y) + 1) // 2)[0].mean(),
        labels()),
}  # fmt: skip
MEANS = {
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), labels()),
    "soft labels": (F.cross_entropy, F.one_hot(labels(), 3).double() * 0.8 + 0.2 / 3),
    "squares": (F.mse_loss, F.one_hot(labels(), 3).double()),
    "binary": (F.binary_cross_entropy_with_logits, F.one_hot(labels(), 3).double()),
    "tokens that all have labels": (tokens, labels(width=2)),
    "huber": (lambda f, y: F.huber_loss(f, y), 5 * F.one_hot(labels(), 3).double()),
}


def of_labels(loss, y: Tensor, kind="hessian") -> tuple[CurvatureOperator, nn.Module, Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6 if y.shape[1:] == (2,) else 3)).double()
    x, _ = samples(len(y))
    batches = list(zip(x.split(5), y.split(5), strict=True))
    return CurvatureOperator(network, batches, loss, kind=kind), network, x


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", IGNORING | MEANS)
@pytest.mark.few(6, "label-gauss_newton", "labels of a whole batch-hessian")
def test_samples_that_the_loss_ignores_do_not_count(name, kind) -> None:
    loss, y = (IGNORING | MEANS)[name]
    operator, network, x = of_labels(loss, y, kind)
    each = torch.stack([loss(network(row[None]), label[None]) for row, label in zip(x, y, strict=True)]).detach()
    assert operator.samples == int((~each.isnan()).sum()) == (len(y) if name in MEANS else operator.samples)
    counted = [(row[None], label[None]) for row, label, own in zip(x, y, each, strict=True) if not own.isnan()]
    expected = sum(CurvatureOperator(network, pair, loss, kind=kind, check=False).matrix() for pair in counted)
    torch.testing.assert_close(operator.matrix(), expected / len(counted), rtol=1e-9, atol=1e-12)
    assert operator.gradient_and_loss()[1] == pytest.approx(float(each.nanmean()), rel=1e-10)
    if kind == "hessian":
        value, w = loss_of(operator, network, x, y, loss)
        torch.testing.assert_close(operator.matrix(), hessian(value)(w), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_is_refused_in_whichever_batch(name) -> None:
    loss, y = NO_MEANS[name]
    with pytest.raises(ValueError, match="with equal weights") as error:
        of_labels(loss, y)
    assert str(error.value).count(". ") == 0


ALONE = {
    "sum over 5": lambda f, y: F.cross_entropy(f, y, reduction="sum") / 5,
    "sum": lambda f, y: F.cross_entropy(f, y, reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "tokens": lambda f, y: (own := F.cross_entropy(f, y, reduction="none")).sum() / (1 + (y > 0).sum()) + own.mean(),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ALONE)
def test_a_loss_that_is_no_mean_is_refused_where_no_batch_shows_it(name, size) -> None:
    y = torch.arange(3).repeat_interleave(size)
    x, _ = samples(len(y))
    data = list(zip(x.split(size), y.split(size), strict=True))  # one sample each, or all of one class
    with pytest.raises(ValueError, match="with equal weights"):
        CurvatureOperator(small(), data, ALONE[name])
    if "sum" in name:
        with pytest.raises(ValueError, match="with equal weights"):
            CurvatureOperator(small(), data[:1], ALONE[name])


def test_samples_of_other_shapes_are_compared_among_themselves() -> None:
    x = torch.randn(40, 5, dtype=torch.float64)
    lengths = [2] * 20 + [3] * 20  # of what the loss sees
    network = nn.Sequential(nn.Linear(5, 3)).double()
    data = [(row[:1].expand(1, n, 5), torch.full((1, n), n - 2)) for row, n in zip(x.split(1), lengths, strict=True)]
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64))
    each = [lambda f, y: F.cross_entropy(f.mT, y), lambda f, y: weighted(f.mT, y)]
    for loss in each:
        assert CurvatureOperator(network, data, loss).samples == 40
    data[30][1][:, 0] = 0
    with pytest.raises(ValueError, match="with equal weights"):
        CurvatureOperator(network, data, each[1])


@pytest.mark.parametrize("name", IGNORING | MEANS)
@pytest.mark.few(6, "labels of a whole batch")
def test_a_mean_is_accepted_in_batches_of_one_sample(name) -> None:
    loss, y = (IGNORING | MEANS)[name]
    whole, network, x = of_labels(loss, y)
    alone = CurvatureOperator(network, list(zip(x.split(1), y.split(1), strict=True)), loss)
    assert alone.samples == whole.samples
    vector = torch.ones(whole.size)
    torch.testing.assert_close(alone @ vector, whole @ vector, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("loss", [nn.MultiMarginLoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.HuberLoss()])
def test_targets_that_a_loss_does_not_take_are_refused_in_a_sentence(loss) -> None:
    x, y = samples(6)
    fitting = y if isinstance(loss, (nn.MultiMarginLoss, nn.CrossEntropyLoss)) else F.one_hot(y, 3).double()
    CurvatureOperator(small(), (x, fitting), loss)
    other_type = fitting.double() if fitting is y else fitting.long()
    for targets in [other_type] if isinstance(loss, nn.HuberLoss) else [other_type, y + 7, y[:, None]]:
        with pytest.raises(
            ValueError, match=r"loss cannot be computed for outputs of shape \[6, 3\] and targets"
        ) as error:
            CurvatureOperator(small(), (x, targets), loss)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_a_loss_without_second_derivative_is_refused_in_a_sentence(kind) -> None:
    operator = CurvatureOperator(small(), samples(6), nn.MultiMarginLoss(), kind=kind)
    with pytest.raises(ValueError, match="torch has no second derivative"):
        operator @ torch.ones(operator.size)


# ---- products


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_products_are_those_of_curvlinops_column_by_column(kind) -> None:
    network, (x, y) = small(), samples()
    operator = CurvatureOperator(network, uneven(x, y), F.cross_entropy, kind=kind)
    theirs = getattr(curvlinops(), f"{'Hessian' if kind == 'hessian' else 'GGN'}LinearOperator")(
        network, nn.CrossEntropyLoss(), list(network.parameters()), uneven(x, y), check_deterministic=False
    )
    columns = torch.randn(operator.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.stack([(theirs @ column).detach() for column in columns.T], 1)
    torch.testing.assert_close(operator @ columns, expected, rtol=1e-10, atol=1e-14)


class Square(torch.autograd.Function):
    """A function of the older style, which torch.func cannot run."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return 2 * slope * ctx.saved_tensors[0]


class WrongForward(torch.autograd.Function):
    """A function with a correct reverse derivative and a wrong forward one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return 2 * slope * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, speed: Tensor) -> Tensor:
        return 3 * speed * ctx.saved_tensors[0]


class SquareOnce(Square):
    """The same, marked as having no second derivative."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope: Tensor) -> Tensor:
        return 2 * slope * ctx.saved_tensors[0]


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x.flatten(1))))


class LastStep(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.last = kind(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0][:, -1])


def attend(x: Tensor) -> Tensor:
    """Causal attention over two rows of three channels; queries, keys and values are equal."""
    x = x.view(-1, 1, 2, 3)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True).flatten(1)


def interpolate(x: Tensor) -> Tensor:
    """Sample a fixed image at learned places."""
    image = torch.arange(16.0, dtype=x.dtype).cos().view(1, 1, 4, 4).expand(len(x), -1, -1, -1)
    return F.grid_sample(image, 0.3 * x.view(-1, 3, 1, 2), align_corners=False).flatten(1).repeat(1, 2)


def convolved(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv2d(1, 4, 2), *parts, nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))


# Networks, and whether torch lacks the forward derivative of their outputs, or has a wrong one.
ALL_NETWORKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "group norm": (lambda: convolved(nn.GroupNorm(2, 4)), False),
    "layer norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
        False,
    ),
    "instance norm": (lambda: convolved(nn.InstanceNorm2d(4, affine=True)), False),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), nn.Flatten(), nn.Linear(12, 3)
        ),
        False,
    ),
    "wrong forward derivative": (lambda: Between(WrongForward.apply), True),
    "LSTM": (lambda: LastStep(nn.LSTM), False),
    "GRU": (lambda: LastStep(nn.GRU), False),
    "attention": (lambda: Between(attend), False),
    "mish": (lambda: Between(F.mish), False),
    "grid sample": (lambda: Between(interpolate), True),
    "weight norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)), nn.Tanh()),
        False,
    ),
    "checkpointed": (
        lambda: Between(lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)),
        True,
    ),
    "own function": (lambda: Between(Square.apply), True),
}


def flat_gradient(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    slopes = torch.autograd.grad(F.cross_entropy(network(x), y), list(network.parameters()))
    return torch.cat([slope.flatten() for slope in slopes])


def dense_hessian(network: nn.Module, x: Tensor, y: Tensor, step: float = 1e-4) -> Tensor:
    """Return the Hessian by central differences of gradients, of fourth order, without any second derivative."""
    columns = []
    for parameter in network.parameters():
        for entry in parameter.data.view(-1):
            kept, total = entry.clone(), 0
            for place, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                entry.copy_(kept + place * step)
                total = total + weight * flat_gradient(network, x, y) / (12 * step)
            entry.copy_(kept)
            columns.append(total)
    return torch.stack(columns, 1)


def dense_gauss_newton(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the Gauss-Newton matrix from rows of the Jacobian, each a gradient."""
    parameters, outputs = list(network.parameters()), network(x)
    rows = [torch.autograd.grad(one, parameters, retain_graph=True) for one in outputs.flatten()]
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    size = outputs.numel()
    second = hessian(lambda own: F.cross_entropy(own, y))(outputs.detach()).reshape(size, size)
    return jacobian.T @ second @ jacobian


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ALL_NETWORKS)
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.few(4, "gauss_newton-wrong forward derivative", "gauss_newton-weight norm", "gauss_newton-own function")
def test_products_are_exact_whichever_derivatives_torch_lacks(name: str, kind) -> None:
    torch.manual_seed(0)
    make, lacking = ALL_NETWORKS[name]
    network = make().double()
    x, y = torch.randn(10, 3, 4, dtype=torch.float64), torch.randint(3, (10,))
    operator = CurvatureOperator(network, uneven(x, y), F.cross_entropy, kind=kind, columns=32)
    assert operator.fallback == ""
    found = operator.matrix()
    expected = (dense_hessian if kind == "hessian" else dense_gauss_newton)(network, x, y)
    assert (found - expected).norm() < 1e-9 * expected.norm()
    assert bool(operator.fallback) is (lacking and kind == "gauss_newton")


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_products_of_recurrent_networks_in_single_precision_are_those_in_double(kind) -> None:
    torch.manual_seed(0)
    network, x, y = LastStep(nn.LSTM), torch.randn(10, 3, 4), torch.randint(3, (10,))
    found = CurvatureOperator(network, (x, y), F.cross_entropy, kind=kind, columns=32)
    exact = CurvatureOperator(network, (x, y), F.cross_entropy, kind=kind, columns=32, dtype=torch.float64).matrix()
    assert (found.matrix() - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("columns", [1, 32])
def test_functions_without_second_derivative_are_refused_where_autograd_would_omit_them(kind, columns: int) -> None:
    data = torch.randn(10, 3, 4, dtype=torch.float64), torch.arange(10) % 3
    operator = CurvatureOperator(Between(SquareOnce.apply).double(), data, F.cross_entropy, kind=kind, columns=columns)
    with pytest.raises(ValueError, match=r"torch has no second derivative.*once_differentiable"):
        operator.matrix()


def test_the_hessian_at_interpolation_is_the_gauss_newton_matrix() -> None:
    network, (x, _) = small(), samples(20)
    exact = network(x).detach()
    both = [CurvatureOperator(network, (x, exact), F.mse_loss, kind=kind) for kind in ("hessian", "gauss_newton")]
    assert (both[0].matrix() - both[1].matrix()).norm() < 1e-8 * both[1].matrix().norm()


def test_named_parameters_alone_are_the_variables() -> None:
    network, (x, y) = small(), samples()
    whole = CurvatureOperator(network, (x, y), F.cross_entropy)
    part = CurvatureOperator(network, (x, y), F.cross_entropy, parameters=["2.weight"])
    places = whole.split(torch.arange(whole.size))["2.weight"].flatten()
    torch.testing.assert_close(part.matrix(), whole.matrix()[places][:, places], rtol=1e-10, atol=1e-14)
    network[0].requires_grad_(False)
    assert CurvatureOperator(network, (x, y), F.cross_entropy).names == ["2.weight", "2.bias"]


def test_network_gradients_modes_and_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    x, y = samples()
    network[0].weight.grad = torch.ones(8, 5)
    network[1].eval()
    before, modes = copy.deepcopy(network.state_dict()), [module.training for module in network.modules()]
    loader = DataLoader(TensorDataset(x, y), batch_size=20)  # draws a seed whenever it begins
    state = torch.get_rng_state()
    operator = CurvatureOperator(network, loader, F.cross_entropy)
    top_eigenpairs(operator, 2), trace(operator, 4), spectral_density(operator, 5, 2), operator.gradient_and_loss()
    trace(operator, 24, method="xtrace")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(network[0].weight.grad, torch.ones(8, 5))
    assert all(p.grad is None for name, p in network.named_parameters() if name != "0.weight")
    assert operator @ torch.ones(operator.size) is not None
    assert all(p.grad is None for p in operator.network.parameters())


def test_directions_are_brought_to_length_one() -> None:
    operator = of_landscape(toy, 0.3, -0.2, 1.7)
    ones = {"x": torch.tensor([7.0, 0, 0]), "diagonal": torch.ones(3)}
    found = directional_curvature(operator, ones)
    assert found["x"] == pytest.approx((6, 6), rel=1e-12)
    assert found["diagonal"] == pytest.approx((math.sqrt(136 / 3), 16 / 3), rel=1e-12)


# ---- spectra


def test_a_loss_without_curvature_has_zero_products() -> None:
    operator = of_landscape(lambda w: w.sum(), 1.0, 2.0)
    assert torch.equal(operator @ torch.ones(2), torch.zeros(2))
    assert torch.equal(operator.matrix(), torch.zeros(2, 2).double())


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_top_eigenpairs_are_those_of_the_dense_hessian(digits, which: str) -> None:
    operator, matrix, eigenvalues = digits
    order = {"largest": eigenvalues.flip(0), "smallest": eigenvalues}.get(which)
    expected = eigenvalues[eigenvalues.abs().argsort(descending=True)] if order is None else order
    pairs = top_eigenpairs(operator, 5, which=which, tolerance=1e-7)
    torch.testing.assert_close(pairs.values, expected[:5], rtol=1e-6, atol=1e-9)
    residuals = (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=1e-3, atol=1e-12)
    assert pairs.residuals.max() <= 1e-7 * eigenvalues.abs().max()
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(5).double(), rtol=0, atol=1e-10)


def test_eigenvalues_agree_with_hessian_eigenthings(digits) -> None:
    operator, _, _ = digits
    theirs = HessianOperator(operator.network, list(operator._data), supervised_loss(F.cross_entropy))
    # Without reorthogonalize=True, which is not its default here, copies of the largest one would come first.
    found = other_lanczos(theirs, k=3, max_iter=60, tol=1e-8, which="LA", seed=0, reorthogonalize=True)
    ours = top_eigenpairs(operator, 3, tolerance=1e-8).values
    torch.testing.assert_close(found.eigenvalues.double().sort(descending=True).values, ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize("basis", [12, 60])
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_restarts_reach_the_ends_of_a_dense_spectrum(basis: int, which: str) -> None:
    matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).double()
    matrix = matrix + matrix.T
    eigenvalues = torch.linalg.eigvalsh(matrix)
    pairs = top_eigenpairs(MatrixOperator(matrix), 3, which=which, basis=basis, tolerance=1e-8)
    expected = eigenvalues[:3] if which == "smallest" else eigenvalues.flip(0)[:3]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-9, atol=0)


def test_copies_of_eigenvalues_are_found_where_the_krylov_space_ends() -> None:
    matrix = torch.diag(torch.tensor([2.0, 2.0, 2.0, 1.0, *[0.0] * 46])).double()
    assert top_eigenpairs(MatrixOperator(matrix), 4).values.tolist() == pytest.approx([2, 2, 2, 1], abs=1e-10)
    zero = top_eigenpairs(MatrixOperator(torch.zeros(100, 100)), 3)
    assert zero.values.tolist() == [0, 0, 0]


def test_lanczos_gives_no_copies(digits) -> None:
    operator, _, eigenvalues = digits
    q = torch.randn(operator.size, 1, generator=torch.Generator().manual_seed(5)).double()
    nodes = lanczos(operator, q, 80).nodes[0]
    assert int((nodes > eigenvalues[-1] - 1e-6).sum()) == 1  # five without reorthogonalisation


def test_density_has_integral_one_and_is_near_the_dense_one_with_the_same_smoothing(digits) -> None:
    operator, matrix, eigenvalues = digits
    density = spectral_density(operator, 64, 4)
    grid = density.grid(4096)
    found, dense = density.at(grid), smoothed(eigenvalues, grid, density.width)
    assert float(torch.trapezoid(found, grid)) == pytest.approx(1, abs=1e-3)
    assert float(torch.trapezoid((found - dense).abs(), grid)) < 0.05
    traces = operator.size * (density.weights * density.nodes).sum(1)
    assert abs(float(traces.mean() - matrix.trace())) < 4 * float(traces.std()) / 2
    assert float(torch.trapezoid(grid * found, grid)) * operator.size == pytest.approx(float(traces.mean()), rel=1e-3)
    assert density.low >= eigenvalues[0] - 1e-9
    assert density.high == pytest.approx(float(eigenvalues[-1]), rel=1e-6)


def test_hutchinson_is_within_four_standard_errors(digits) -> None:
    operator, matrix, _ = digits
    found = trace(operator, 99)
    squared = float(matrix.square().sum())
    error = math.sqrt(2 * (squared - float(matrix.diagonal().square().sum())) / 99)
    assert abs(found.value - float(matrix.trace())) < 4 * error
    assert 0.6 * error < found.standard_error < 1.6 * error
    assert found.squared_norm == pytest.approx(squared, rel=0.3)


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_other_estimators_come_with_standard_errors(digits, method: str) -> None:
    _, matrix, _ = digits
    found = trace(MatrixOperator(matrix), 120, method=method)
    assert found.products == 120
    assert 0 < found.standard_error < 0.1 * found.value
    assert abs(found.value - float(matrix.trace())) < 6 * found.standard_error


def xtrace_by_definition(matrix: Tensor, signs: Tensor) -> float:
    """Return the mean over signs of the estimate from the range of the products with all others (arXiv:2301.07825)."""
    found, products = [], matrix @ signs
    for number in range(signs.shape[1]):
        others = torch.arange(signs.shape[1]) != number
        basis, sizes, _ = torch.linalg.svd(products[:, others], full_matrices=False)
        basis = basis[:, sizes > 1e-12 * products.abs().max()]
        rest = signs[:, number] - basis @ (basis.T @ signs[:, number])
        found.append(float((basis.T @ matrix @ basis).trace() + rest @ matrix @ rest))
    return sum(found) / len(found)


def low_rank(size: int, rank: int) -> Tensor:
    factors = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(size + rank))
    return factors @ factors.T


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(30, 30, dtype=torch.float64),
        torch.ones(30, 30, dtype=torch.float64),
        torch.diag(torch.tensor([6.0, 10.0, 1.0] + 27 * [0.0], dtype=torch.float64)),
        torch.block_diag(torch.ones(3, 3), torch.zeros(27, 27)).double(),
        low_rank(30, 3),
        low_rank(8, 8),
        -low_rank(40, 40),
        1e-200 * low_rank(30, 30),
    ],
    ids=["zero", "ones", "diagonal", "block", "low rank", "signs that repeat", "negative", "tiny"],
)
def test_xtrace_is_that_of_its_definition_at_any_rank(matrix: Tensor) -> None:
    """Where products depend on each other, curvlinops inverts a singular matrix; of the tiny one it returns 0.57."""
    for count, seed in ((1, 0), (2, 1), (3, 2), (3, 3), (6, 4), (12, 5)):
        if 2 * count >= len(matrix):
            continue
        source, again = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        found = trace(MatrixOperator(matrix), 4 * count, method="xtrace", repeats=2, generator=source)
        signs = [(2 * torch.randint(2, (count, len(matrix)), generator=again) - 1).T.double() for _ in range(2)]
        expected = sum(xtrace_by_definition(matrix, one) for one in signs) / 2
        assert found.value == pytest.approx(expected, rel=1e-9, abs=1e-12 * float(matrix.abs().sum()))


@pytest.mark.parametrize("method", ["hutch++", "xtrace", "hutchinson"])
def test_intervals_of_traces_cover_at_their_level(method: str) -> None:
    """With 4 repeats a normal interval, 1.96 standard errors, covers in 85 % of runs."""
    basis = torch.linalg.qr(torch.randn(60, 60, generator=torch.Generator().manual_seed(0)).double())[0]
    matrix = (basis / torch.arange(1, 61)) @ basis.T
    covered = normal = 0
    for seed in range(200):
        found = trace(MatrixOperator(matrix), 48, method=method, generator=torch.Generator().manual_seed(seed))
        low, high = found.interval()
        assert low + high == pytest.approx(2 * found.value)
        covered += low <= float(matrix.trace()) <= high
        normal += abs(found.value - float(matrix.trace())) <= 1.96 * found.standard_error
    assert 0.9 <= covered / 200 <= 0.99
    assert (normal < 0.9 * 200) == (method != "hutchinson")
    assert found.degrees_of_freedom == (47 if method == "hutchinson" else 3)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, lambda outputs, targets: (outputs - targets[:, None]).sin().mean()],
    ids=["cross entropy", "one that curves down"],
)
@pytest.mark.long
def test_traces_by_samples_are_within_four_standard_errors(loss, kind) -> None:
    network, (x, y) = small(), samples()
    operator = CurvatureOperator(network, uneven(x, y), loss, kind=kind)
    exact = float(operator.matrix().trace())
    errors = []
    for seed in range(10):
        found = trace(operator, 8, method="per_sample", generator=torch.Generator().manual_seed(seed))
        assert abs(found.value - exact) < 4 * found.standard_error
        assert 7 <= found.degrees_of_freedom <= 7 * (len(x) + 1)
        errors.append((found.value - exact) / found.standard_error)
    assert 0.6 < torch.tensor(errors).square().mean().sqrt() < 1.6


def test_traces_by_samples_of_a_trained_network_have_a_small_error(digits) -> None:
    operator, matrix, _ = digits
    found = trace(operator, 4, method="per_sample")
    assert found.standard_error < 0.3 * math.sqrt(99 / 4) * trace(operator, 99).standard_error
    assert abs(found.value - float(matrix.trace())) < 5 * found.standard_error


def test_traces_by_samples_are_exact_for_one_output_of_a_network_linear_in_each_layer() -> None:
    (x, y), network = samples(), nn.Linear(5, 1).double()
    operator = CurvatureOperator(network, (x, y[:, None].double()), F.mse_loss)
    found = trace(operator, 2, method="per_sample")
    assert found.value == pytest.approx(float(operator.matrix().trace()), rel=1e-12)
    assert found.interval() == (found.value, found.value)
    assert found.standard_error < 1e-12


def test_a_hessian_is_the_gauss_newton_matrix_and_the_rest() -> None:
    network, data = small(), uneven(*samples())
    whole, gauss = (
        CurvatureOperator(network, data, F.cross_entropy, kind=kind) for kind in ("hessian", "gauss_newton")
    )
    for operator in (whole, gauss):
        torch.testing.assert_close(operator.residual().matrix(), whole.matrix() - gauss.matrix(), rtol=0, atol=1e-12)


# ---- what they say of networks


def test_nullity_at_interpolation_of_random_targets_is_what_equations_leave() -> None:
    """The example of docs/theory/spectra.md, 5: 1,210 parameters, 20 samples of 10 targets."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 64).double(), torch.randn(20, 10).double()
    network = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    gauss = CurvatureOperator(network, (inputs, targets), F.mse_loss, kind="gauss_newton")
    w = gauss.flatten(dict(network.named_parameters()))

    def residual(vector: Tensor) -> Tensor:
        return (functional_call(network, gauss.split(vector), (inputs,)) - targets).flatten()

    damping, value = 1e-2, residual(w)
    for _ in range(60):  # Levenberg-Marquardt
        jacobian = jacrev(residual)(w)
        step = jacobian.T @ torch.linalg.solve(jacobian @ jacobian.T + damping * torch.eye(200).double(), value)
        if residual(w - step).norm() < value.norm():
            w, damping = w - step, damping / 10
            value = residual(w)
        else:
            damping *= 10
    assert value.square().mean() < 1e-24
    network.load_state_dict(gauss.split(w))
    matrix = CurvatureOperator(network, (inputs, targets), F.mse_loss).matrix()
    found = near_zero(torch.linalg.eigvalsh(matrix), [1e-9])
    assert found.relative[1e-9] == found.below_gap == gauss.size - 200 == 1010
    assert found.gap > 5


# ---- what is refused

ONE = (torch.zeros(4, 5), torch.tensor([0, 1, 2, 0]))


class Shuffled:
    """Batches in another order each time."""

    def __iter__(self):
        order = torch.randperm(50)
        x, y = samples()
        return iter(uneven(x[order], y[order]))


def broken() -> nn.Module:
    network = small()
    nn.init.constant_(network[2].bias, float("nan"))
    return network


def frozen() -> nn.Module:
    return small().requires_grad_(False)


def operator_of(**settings) -> CurvatureOperator:
    return CurvatureOperator(**({"network": small(), "data": ONE, "loss": F.cross_entropy} | settings))


def huge() -> CurvatureOperator:
    """Return the operator of a network whose Hessian would need more memory than can be addressed."""
    landscape = Landscape(lambda w: w[0], [0.0])
    landscape.w = nn.Parameter(torch.zeros(10**7))
    return CurvatureOperator(landscape, (torch.zeros(4, 1), torch.zeros(4)), mean)


class Mixing(nn.Linear):
    """Takes the mean over its batch off."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


MATRIX = MatrixOperator(torch.diag(torch.arange(100.0)))


@pytest.mark.parametrize(
    "refusal",
    [
        refused(operator_of, data=iter([ONE]), says="gone through again"),
        refused(operator_of, data=[], says="no samples", error=EmptyLoaderError),
        refused(operator_of, network=broken(), says="2.bias", error=NonFiniteError),
        refused(operator_of, network=frozen(), says="requires gradients"),
        refused(operator_of, loss=nn.CrossEntropyLoss(reduction="sum"), says="reduction='sum'"),
        refused(operator_of, loss=lambda a, b: F.cross_entropy(a, b, reduction="sum"), says="divide sums"),
        refused(operator_of, loss=lambda a, b: F.cross_entropy(a, b, reduction="none"), says="one number"),
        refused(operator_of, parameters=["0.wieght"], says="0.weight"),
        refused(operator_of, parameters=[], says="at least one"),
        refused(operator_of, kind="fisher", says="gauss_newton"),
        refused(operator_of().matrix, max_parameters=10, says=["75 parameters", "max_parameters"]),
        refused(
            lambda: huge().matrix(max_parameters=10**7), says=["10000000 parameters needs 1.49e+06 GiB", "top_eig"]
        ),
        refused(lambda: operator_of() @ torch.ones(3), says="[75]"),
        refused(MatrixOperator, torch.ones(2, 3), says="[P, P]"),
        refused(MatrixOperator, torch.triu(torch.ones(3, 3)), says="symmetric"),
        refused(top_eigenpairs, MATRIX, k=101),
        refused(top_eigenpairs, MATRIX, which="LM", says="largest"),
        refused(top_eigenpairs, MATRIX, 3, max_products=8, says="8 products", error=NotConvergedError),
        refused(top_eigenpairs, MATRIX, tolerance=1e-12, says="float64", error=NotConvergedError),
        refused(trace, MATRIX, 30, method="xtrace", repeats=30, says="repeats"),
        refused(trace, MATRIX, method="hutch", says="hutch++"),
        refused(trace(MATRIX, 2).interval, 1.0, says="level"),
        refused(trace, MATRIX, method="per_sample", says="MatrixOperator"),
        refused(
            lambda: trace(operator_of(network=Mixing(), data=samples()), method="per_sample"), says="mixes the samples"
        ),
        refused(lanczos, MATRIX, torch.zeros(100, 1), 3, says="other than zero"),
        refused(lanczos, MATRIX, torch.ones(100, 1), 101, says="101"),
        refused(directional_curvature, MATRIX, {"step": torch.zeros(100)}, says="'step'"),
        refused(near_zero, torch.tensor([float("nan")]), says="finite"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(refusal: Callable[[], None]) -> None:
    refusal()


def test_data_that_change_pass_unseen_only_where_the_check_is_off() -> None:
    operator = CurvatureOperator(small(), Shuffled(), F.cross_entropy, check=False)
    assert (operator @ torch.ones(operator.size)).isfinite().all()


def of_known(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of squares over all targets, of which those that are missing count 0."""
    return torch.where(targets.isfinite(), outputs - targets.nan_to_num(), 0).square().mean()


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_targets_that_are_missing_do_not_change_and_are_seen_to_change(missing: float) -> None:
    x, classes = samples()
    y = F.one_hot(classes, 3).double()
    y[::7, 1] = missing
    y[5] = -missing
    operator = CurvatureOperator(small(), uneven(x, y), of_known, kind="gauss_newton")
    rest = CurvatureOperator(small(), uneven(x, y), of_known, kind="gauss_newton", check=False)
    torch.testing.assert_close(operator.matrix(), rest.matrix(), rtol=0, atol=0)
    batches = uneven(x, y.clone())
    operator = CurvatureOperator(small(), batches, of_known)
    for batch, other in zip(batches, uneven(x, y.nan_to_num(0.0, 0.0, 0.0)), strict=True):
        batch[1].copy_(other[1])
    with pytest.raises(ValueError, match="the data changed between two passes"):
        operator @ torch.ones(operator.size)


@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-5])
def test_top_eigenvalue_has_the_error_that_was_asked_for(digits, error: float) -> None:
    whole, _, eigenvalues = digits
    ((x, y),) = whole.batches()
    # One batch, an eighth of which is searched first, and several.
    for data in ((x, y), list(zip(x.split(100), y.split(100), strict=True))):
        operator = CurvatureOperator(whole.network, data, F.cross_entropy)
        found = top_eigenvalue(operator, error=error)
        assert abs(found.value / float(eigenvalues[-1]) - 1) <= error
        assert 0 < found.error <= error
        assert found.products == operator.products < top_eigenpairs(operator, tolerance=1e-4).products


def test_a_gap_ends_the_search_for_the_top_eigenvalue() -> None:
    values = torch.linspace(-1, 1, 400, dtype=torch.float64)
    products = []
    for top in (10.0, 1.2):
        values[-1] = top
        found = top_eigenvalue(MatrixOperator(values.diag()), error=1e-4)
        assert found.value == pytest.approx(top, rel=1e-4)
        products.append(found.products)
    assert products[0] < products[1]
    zero = top_eigenvalue(MatrixOperator(torch.zeros(100, 100)))
    assert (zero.value, zero.error) == (0.0, 0.0)
    assert top_eigenvalue(MatrixOperator(-torch.eye(3)), error=1e-6).value == pytest.approx(-1)
    with pytest.raises(NotConvergedError, match="3 products"):
        top_eigenvalue(MatrixOperator(values.diag()), error=1e-8, max_products=3)


def test_targets_that_are_all_nan_or_ignored_are_no_missing_samples():
    x, loss = torch.randn(6, 3), nn.functional
    for of, y in ((loss.mse_loss, torch.full((6, 2), torch.nan)), (loss.cross_entropy, torch.full((6,), -100))):
        with pytest.raises(CurvatureError, match="the loss of every sample is NaN, as of targets that it ignores"):
            CurvatureOperator(nn.Linear(3, 2), (x, y), of)
