import copy
import functools
import math

import pytest
import torch
from helpers import assert_refused, refused
from torch import nn
from torch.nn import functional as F

from lightning_sym.networks import Gaussian, IdentityActivation, Polynomial
from lightning_sym.symmetry import INTERTWINER_GROUPS, GroupElement, IntertwinerGroup, intertwiner_group, measure

N = 6
EXACT = 1e-12
KINDS = {
    "perm": IntertwinerGroup("", False, False),
    "odd": IntertwinerGroup("", False, True),
    "even": IntertwinerGroup("", False, True, even=True),
    "positive": IntertwinerGroup("", True, False),
    "abs": IntertwinerGroup("", True, True, even=True),
    "dense": IntertwinerGroup("", True, True, dense=True),
}
FUNCTIONS = {
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": nn.PReLU(),
    "relu_squared": lambda x: x.relu() ** 2,
    "identity": lambda x: x,
    "polynomial(2)": lambda x: x**2,
    "polynomial(3)": lambda x: x**3,
    "gaussian": lambda x: torch.exp(-x * x),
    **{name: getattr(torch, name) for name in ("abs", "cos", "sin", "erf", "atan", "tanh", "sigmoid")},
    **{name: getattr(F, name) for name in ("softsign", "hardtanh", "softshrink", "hardshrink", "tanhshrink")},
    **{name: getattr(F, name) for name in ("logsigmoid", "gelu", "silu", "softplus", "elu", "celu", "selu", "mish")},
    **{name: getattr(F, name) for name in ("relu6", "hardswish", "hardsigmoid")},
}
ON_CHANNELS = {"avg_pool", "interpolate", "max_pool", "dropout", "alpha_dropout"}

# min_B |sigma(A X) - B sigma(X)| / |sigma(A X)| outside of the group, from another implementation; None: accepted.
RESIDUALS = {
    "relu": (None, 0.35, 0.13),
    "leaky_relu": (None, 0.34, 0.12),
    "abs": (None, None, 0.15),
    "polynomial(2)": (None, None, 0.18),
    "polynomial(3)": (None, None, 0.19),
    "relu_squared": (None, 0.39, 0.18),
    "tanh": (0.074, None, 0.13),
    "sigmoid": (0.051, 0.16, 0.047),
    "gaussian": (0.12, None, 0.22),
    "gelu": (0.042, 0.37, 0.14),
    "silu": (0.070, 0.37, 0.14),
    "softplus": (0.074, 0.26, 0.078),
    "elu": (0.092, 0.28, 0.098),
    "selu": (0.13, 0.17, 0.078),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def probes():
    scale, flip, rotation = (torch.eye(N, dtype=torch.float64) for _ in range(3))
    scale[0, 0], flip[0, 0] = 2, -1
    c, s = math.cos(0.3), math.sin(0.3)
    rotation[:2, :2] = torch.tensor([[c, -s], [s, c]])
    return scale, flip, rotation


def error(a, b):
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("name", RESIDUALS)
def test_what_is_in_the_group_and_what_is_not(name):
    sigma, group = FUNCTIONS[name], INTERTWINER_GROUPS[name]
    x = 1.5 * normal(N, 4000)
    for a, printed in zip(probes(), RESIDUALS[name], strict=True):
        image = sigma(a @ x)
        b = torch.linalg.lstsq(sigma(x).T, image.T).solution.T
        residual = float((image - b @ sigma(x)).norm() / image.norm())
        assert group.contains(a) == (printed is None)
        if printed is None:
            assert residual < 1e-12
        else:
            assert residual > 1e-2
            assert residual == pytest.approx(printed, rel=0.05)  # two printed digits, other random numbers


def test_the_table_covers_what_the_tests_cover():
    assert set(FUNCTIONS) | ON_CHANNELS == set(INTERTWINER_GROUPS)
    with pytest.raises(TypeError):
        INTERTWINER_GROUPS["mine"] = KINDS["perm"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_measuring_finds_the_row_of_the_table(name):
    group = measure(FUNCTIONS[name])
    assert group == INTERTWINER_GROUPS[name]
    assert hash(group) == hash(INTERTWINER_GROUPS[name])
    assert group.measured
    assert group.residual < EXACT
    assert group.margin > 0.1
    assert not group.doubtful
    affine = measure(FUNCTIONS[name], affine=True)
    assert affine == intertwiner_group(name, affine=True)
    assert affine.offset == (1.0 if name in ("sigmoid", "hardsigmoid") else 0.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_phi_is_sigma_of_the_matrix_times_the_inverse_of_sigma_of_the_unit(name):
    sigma, group = FUNCTIONS[name], INTERTWINER_GROUPS[name]
    if name == "prelu":
        sigma = nn.PReLU(dtype=torch.float64).requires_grad_(False)
    unit = sigma(torch.eye(N, dtype=torch.float64))
    for seed in range(5):
        element = group.sample(N, generator(seed))
        a, b = element.matrix(), group.phi(element).matrix()
        assert group.contains(element)
        assert group.contains(a)
        if abs(torch.linalg.det(unit)) > 1e-8:
            torch.testing.assert_close(sigma(a) @ torch.linalg.inv(unit), b, atol=EXACT, rtol=EXACT)
        x = 1.5 * normal(N, 500, seed=seed)
        assert error(sigma(a @ x), b @ sigma(x)) < EXACT
        assert error(sigma(element.apply(x, 0)), group.phi(element).apply(sigma(x), 0)) < EXACT
        assert not group.shift(element).any()


MODULES = {
    "positive": [nn.ReLU(inplace=True), nn.LeakyReLU(0.3), nn.RReLU(), nn.PReLU(), nn.PReLU(5), nn.Threshold(0, 0),
        nn.ELU(0.0), nn.MaxPool2d(2), nn.AdaptiveMaxPool1d(1), nn.Sequential(nn.ReLU(), nn.Dropout())],
    "dense": [nn.LeakyReLU(1), nn.RReLU(1, 1), nn.Softshrink(0), Polynomial(1), IdentityActivation(), nn.Identity(),
        nn.AvgPool3d(2), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=2, mode="bilinear")],
    "abs": [nn.LeakyReLU(-1.0)],
    "perm": [nn.Threshold(0.1, 0), nn.Threshold(20, 0), nn.Hardtanh(-1, 2), nn.Hardtanh(0, 1), nn.ReLU6(), nn.ELU(),
        nn.CELU(2.0), nn.SELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Softplus(),
        nn.Softplus(beta=5), nn.Sigmoid(), nn.LogSigmoid(), nn.Hardsigmoid(), nn.Hardswish(), nn.AlphaDropout()],
    # nn.Hardshrink(2.0): sigma(1) = sigma(0): sigma(I) is singular
    "odd": [nn.Hardtanh(), nn.Hardtanh(-3, 3), nn.Hardshrink(), nn.Hardshrink(2.0), nn.Softshrink(),
        nn.Tanhshrink(), nn.Tanh(), nn.Softsign()],
    "even": [Gaussian()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "expected"), [(given, kind) for kind, all_of in MODULES.items() for given in all_of], ids=str
)
def test_modules(module, expected):
    before = copy.deepcopy(module.state_dict()), module.training, torch.get_rng_state()
    group = intertwiner_group(module)
    assert group == KINDS[expected]
    assert not group.doubtful
    assert str(module.state_dict()) == str(before[0])
    assert module.training == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_more_modules():
    dropout = intertwiner_group(nn.Dropout2d())
    assert (dropout.positive_scales, dropout.signs, dropout.dense) == (True, True, False)
    for degree in (2, 3, 7, 50):
        group = intertwiner_group(Polynomial(degree))
        assert (group.exponent, group.even) == (degree, degree % 2 == 0)
        assert measure(Polynomial(degree)) == group
    assert intertwiner_group(Polynomial(1000)).exponent == 1000


NAMES_AND_FUNCTIONS = {
    "positive": ["relu", "max_pool2d", torch.relu, F.relu, torch.Tensor.relu, torch.relu_, F.max_pool2d,
        lambda x: 1e-9 * x.relu()],
    "abs": [" leaky_relu(-1)"],
    "dense": ["polynomial(1)", "adaptive_avg_pool2d", functools.partial(F.leaky_relu, negative_slope=1.0),
        lambda x: -3 * x],
    "perm": ["swish", F.gelu, torch.expm1, functools.partial(F.hardtanh, min_val=-2.0), lambda x: x + 1,
        lambda x: x.exp() / (1 + x.exp())],
    # lambda x: x * (2 + torch.sin(2 * math.pi * x.abs().clamp_min(1e-99).log2())): t = 2 alone holds
    "odd": [torch.sin, torch.sinh, torch.tan, torch.asinh, lambda x: x - torch.sin(x),
        lambda x: x * (2 + torch.sin(2 * math.pi * x.abs().clamp_min(1e-99).log2()))],
    "even": [lambda x: torch.log(torch.cosh(x))],
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "expected"), [(given, kind) for kind, all_of in NAMES_AND_FUNCTIONS.items() for given in all_of]
)
def test_names_and_functions(function, expected):
    assert intertwiner_group(function) == KINDS[expected]


def test_numbers_that_are_measured():
    power = measure(lambda x: x.relu() ** 2.5)
    assert (power.exponent, power.margin) == (2.5, 1.0)
    sign = measure(torch.sign)
    assert (sign.positive_scales, sign.exponent, sign.signs, sign.even) == (True, 0.0, True, False)
    odd_power = measure(lambda x: x.sign() * x.abs() ** (1 / math.e))
    assert odd_power.exponent == pytest.approx(1 / math.e, abs=1e-13)
    erfc = measure(torch.erfc, affine=True)
    assert (erfc.signs, erfc.offset) == (True, 2.0)
    assert measure(torch.relu, name="mine").name == "mine"
    assert measure(nn.CELU(2.0)).name == "CELU(alpha=2.0)"


def test_doubt_is_on_the_safe_side_and_said():
    nearly = measure(functools.partial(F.leaky_relu, negative_slope=1 - 1e-6))
    assert nearly == KINDS["positive"]
    assert nearly.doubtful
    assert nearly.margin == pytest.approx(1e-6, rel=0.1)
    rounded = measure(lambda x: (x.float().relu() ** 1.5).double())  # float32 inside
    assert rounded == KINDS["perm"]
    assert rounded.doubtful
    # An identity that a kink breaks only at very small or very large numbers.
    assert measure(nn.Softshrink(1e-8)) == measure(nn.Hardtanh(-1e9, 1e9)) == KINDS["odd"]


def test_a_subclass_counts_for_what_it_computes():
    class Renamed(nn.ReLU):
        pass

    class Changed(nn.ReLU):
        def forward(self, x):
            return torch.tanh(x)

    assert intertwiner_group(Renamed()) == KINDS["positive"]
    assert not intertwiner_group(Renamed()).measured
    assert intertwiner_group(Changed()) == KINDS["odd"]


def test_modules_are_measured_past_their_hooks():
    module, seen = nn.Softplus(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    measure(module)
    assert not seen


counter = iter(range(1000))


@pytest.mark.parametrize(
    ("activation", "kind", "message"),
    [
        ("rellu", ValueError, "Did you mean 'relu'"),
        ("polynomial(0)", ValueError, "polynomial needs an integer degree >= 1"),
        (3, TypeError, "function from tensor to tensor, got int"),
        (None, TypeError, "got NoneType"),
        (nn.ReLU, TypeError, "got the class ReLU; pass an instance"),
        (nn.LeakyReLU(math.nan), ValueError, "slope of LeakyReLU must be finite"),
        (lambda x: 0 * x + 3, ValueError, r"constant \(3\)"),
        (nn.Softmax(1), ValueError, "does not act elementwise"),
        (lambda x: F.softmax(x, 0), ValueError, "does not act elementwise"),
        (lambda x: x - x.mean(), ValueError, "does not act elementwise"),
        (lambda x: x / x.abs().max(), ValueError, "does not act elementwise"),
        (lambda x: x.flip(-1), ValueError, "does not act elementwise"),
        (lambda x: x.cumsum(0), ValueError, "does not act elementwise"),
        (nn.LayerNorm(16), ValueError, "raised RuntimeError .* an activation takes any shape"),
        (nn.Linear(3, 3), ValueError, "raised RuntimeError"),
        (nn.GLU(), ValueError, r"made shape \[16, 8\] out of \[16, 16\]"),
        (lambda x: x.sum(), ValueError, r"made shape \[\]"),
        (lambda x: F.dropout(x), ValueError, "gave two answers .* random or keeps state"),
        (lambda x: x + next(counter), ValueError, "gave two answers"),
        (lambda x: (x, x), TypeError, "returned tuple"),
        (lambda x: x > 0, TypeError, "returned torch.bool for torch.float64"),
        (lambda x: x.float(), TypeError, "returned torch.float32"),
        (torch.sqrt, ValueError, "sqrt is not finite at x = -"),
        (torch.log, ValueError, "log is not finite at x"),
        (torch.reciprocal, ValueError, "not finite at x = 0"),
        (lambda: 0, ValueError, "raised TypeError"),
    ],
)
def test_what_cannot_be_an_activation(activation, kind, message):
    with pytest.raises(kind, match=message) as caught:
        intertwiner_group(activation)
    assert "\n" not in str(caught.value)


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    assert_refused(measure, lambda x: x * torch.rand_like(x), says="two answers")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["sigmoid", "hardsigmoid"])
def test_affine_signs_change_the_weights_but_not_the_network(name):
    sigma, group = FUNCTIONS[name], intertwiner_group(name, affine=True)
    assert not intertwiner_group(name).signs
    w1, b1, w2, b2, x = normal(8, 5), normal(8, seed=1), normal(3, 8, seed=2), normal(3, seed=3), normal(40, 5, seed=4)
    element = group.sample(8, generator(1))
    assert (element.scale < 0).any()
    phi, shift = group.phi(element), group.shift(element)
    torch.testing.assert_close(
        sigma(element.apply(x @ w1.T + b1)), phi.apply(sigma(x @ w1.T + b1)) + shift, atol=1e-14, rtol=0
    )
    w1_, b1_ = element.apply(w1, 0), element.apply(b1, 0)
    w2_ = w2 @ phi.inverse().matrix()
    b2_ = b2 - w2_ @ shift
    before, after = sigma(x @ w1.T + b1) @ w2.T + b2, sigma(x @ w1_.T + b1_) @ w2_.T + b2_
    torch.testing.assert_close(after, before, atol=1e-13, rtol=0)
    # The closed form of docs/theory/intertwiners.md, 1.4, without the permutation.
    s = torch.tensor([1, -1, -1, 1, 1, -1, 1, -1], dtype=torch.float64)
    after = sigma(x @ (s[:, None] * w1).T + s * b1) @ (w2 * s).T + b2 + w2 @ (1 - s) / 2
    torch.testing.assert_close(after, before, atol=1e-13, rtol=0)


def test_gated_linear_units():
    gate, up, down, x = normal(7, 4), normal(7, 4, seed=1), normal(3, 7, seed=2), normal(4, 50, seed=3)
    permutation = INTERTWINER_GROUPS["silu"].sample(7, generator(4))
    scales = INTERTWINER_GROUPS["dropout"].sample(7, generator(5))  # permutations with non-zero scales
    scaled = GroupElement(permutation.permutation, scales.scale)
    before = down @ (F.silu(gate @ x) * (up @ x))
    after = (down @ scaled.inverse().matrix()) @ (F.silu(permutation.apply(gate, 0) @ x) * (scaled.apply(up, 0) @ x))
    assert error(after, before) < 1e-13


def test_dimensions_of_the_groups():
    sizes = {"identity": N * N, "avg_pool": N * N, "relu": N, "max_pool": N, "polynomial(3)": N, "tanh": 0, "gelu": 0}
    assert {name: INTERTWINER_GROUPS[name].dimension(N) for name in sizes} == sizes


def test_samples():
    tanh, relu, identity, gelu = (INTERTWINER_GROUPS[name] for name in ("tanh", "relu", "identity", "gelu"))
    assert set(tanh.sample(100, generator()).scale.tolist()) == {-1.0, 1.0}
    assert (gelu.sample(100, generator()).scale == 1).all()
    scale = relu.sample(4000, generator(), scale=0.5).scale
    assert (scale > 0).all()
    assert float(scale.log().std()) == pytest.approx(0.5, rel=0.05)
    assert (relu.sample(5, generator(), scale=0).scale == 1).all()
    assert relu.sample(5, generator(), dtype=torch.float32).scale.dtype == torch.float32
    assert torch.equal(relu.sample(5, generator(3)).matrix(), relu.sample(5, generator(3)).matrix())
    dense = identity.sample(5, generator())
    assert dense.dense is not None
    assert identity.contains(dense)
    assert not relu.contains(dense)
    assert {bool(torch.linalg.det(identity.sample(3, generator(k)).matrix()) > 0) for k in range(9)} == {True, False}


def test_membership_of_matrices():
    relu, tanh, identity = (INTERTWINER_GROUPS[name] for name in ("relu", "tanh", "identity"))
    wide = torch.diag(torch.tensor([1e-9, 1.0, 1e9], dtype=torch.float64))
    assert relu.contains(wide)
    assert identity.contains(wide)
    assert not tanh.contains(wide)
    assert not relu.contains(-wide)
    assert not relu.contains(torch.zeros(2, 2))
    assert not identity.contains(torch.ones(2, 2))
    assert not identity.contains(torch.full((2, 2), math.nan))
    assert not relu.contains(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    nearly = torch.eye(3) + 1e-3
    assert not relu.contains(nearly)
    assert relu.contains(nearly, tolerance=1e-2)
    assert tanh.contains(nearly, tolerance=1e-2)


RELU, EYE, P, D = INTERTWINER_GROUPS["relu"], torch.eye(2), torch.tensor([1, 0]), torch.ones(2)
SWAP = GroupElement(P, D)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(RELU.sample, size, generator(), says="size must be an integer >= 1") for size in (0, -1, 2.0, True)),
        *(refused(RELU.sample, 2, generator(), s, says="scale must be >= 0") for s in (-1.0, math.inf, math.nan)),
        refused(RELU.contains, torch.zeros(2, 3), says="must be square"),
        refused(RELU.contains, torch.eye(2, dtype=torch.int64), says="must be floating", error=TypeError),
        refused(RELU.contains, [1], says="GroupElement or a matrix, got list", error=TypeError),
        refused(RELU.contains, EYE, -1.0, says="tolerance must be >= 0"),
        refused(RELU.phi, GroupElement(P, -D), says="not in the"),
        refused(GroupElement, P.int(), D, says="int64", error=TypeError),
        refused(GroupElement, P, P, says="floating", error=TypeError),
        refused(GroupElement, P, torch.ones(3), says="got [2] and [3]"),
        refused(GroupElement, torch.tensor([1, 1]), D, says="each of 0 to 1 once"),
        refused(GroupElement, P, torch.tensor([1.0, 0.0]), says="non-zero"),
        refused(GroupElement, P, torch.tensor([1.0, math.inf]), says="finite"),
        refused(GroupElement, P, D, EYE, says="from_matrix"),
        refused(GroupElement, P, D, torch.eye(3), says="dense must have shape [2, 2]"),
        refused(GroupElement, torch.arange(2), D, torch.full((2, 2), math.nan), says="dense must be finite"),
        refused(GroupElement.from_matrix, torch.ones(2, 2), says="not invertible"),
        refused(GroupElement.from_matrix, torch.full((2, 2), math.inf), says="finite"),
        refused(SWAP.compose, GroupElement.identity(3, dtype=torch.float32), says="one size can be composed,"),
        refused(SWAP.compose, GroupElement.identity(2), says="one dtype"),
        refused(lambda: SWAP @ 3, says="unsupported operand", error=TypeError),
        refused(SWAP.apply, torch.ones(2, 3), says="size 2 acts on an axis of that size, got 3"),
        refused(SWAP.apply, torch.ones(2, 2), 2, says="dim must be an axis"),
        refused(SWAP.apply, P, says="floating", error=TypeError),
        refused(IntertwinerGroup, "x", True, False, dense=True, says="dense"),
        refused(IntertwinerGroup, "x", False, False, exponent=2.0, says="exponent"),
        refused(IntertwinerGroup, "x", True, False, exponent=math.nan, says="finite"),
        refused(IntertwinerGroup, "x", False, False, even=True, says="even"),
        refused(IntertwinerGroup, "x", False, False, offset=1.0, says="offset"),
    ],
)
def test_refused_arguments(refusal):
    refusal()


def test_apply_keeps_the_dtype_and_any_axis():
    element = INTERTWINER_GROUPS["abs"].sample(4, generator())
    dense = INTERTWINER_GROUPS["identity"].sample(4, generator())
    x = torch.randn(2, 4, 3, 4, generator=generator())
    for a in (element, dense):
        for dim in (1, 3, -1, -3):
            y = a.apply(x, dim)
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            expected = (a.matrix() @ x.double().movedim(dim, -2)).movedim(-2, dim)
            torch.testing.assert_close(y, expected.float())
        assert a.to(dtype=torch.float32).matrix().dtype == torch.float32
