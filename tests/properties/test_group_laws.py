import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.symmetry import INTERTWINER_GROUPS, GroupElement, intertwiner_group, measure

LAW = settings(max_examples=60, deadline=None, derandomize=True)
TIGHT = 1e-10  # of matrices whose entries are up to about e^4

SIGMA = {
    "relu": torch.relu,
    "relu_squared": lambda x: x.relu() ** 2,
    "abs": torch.abs,
    "polynomial(2)": torch.square,
    "polynomial(3)": lambda x: x**3,
    "gaussian": lambda x: torch.exp(-x * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "identity": lambda x: x,
}
sizes = st.integers(1, 8)
names = st.sampled_from(sorted(SIGMA))
seeds = st.integers(0, 2**40)


def draw(name, size, seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [INTERTWINER_GROUPS[name].sample(size, generator) for _ in range(count)]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=TIGHT, atol=TIGHT)


def same(a, b):
    assert (a.dense is None) == (b.dense is None)
    assert torch.equal(a.permutation, b.permutation)
    close(a.matrix(), b.matrix())


@LAW
@given(names, sizes, seeds)
def test_a_group(name, size, seed):
    group = INTERTWINER_GROUPS[name]
    a, b, c = draw(name, size, seed, 3)
    one = GroupElement.identity(size)
    same((a @ b) @ c, a @ (b @ c))
    close((a @ one).matrix(), a.matrix())
    close((one @ a).matrix(), a.matrix())
    eye = torch.eye(size, dtype=torch.float64)
    close((a @ a.inverse()).matrix(), eye)
    close((a.inverse() @ a).matrix(), eye)
    close((a @ b).matrix(), a.matrix() @ b.matrix())
    same((a @ b).inverse(), b.inverse() @ a.inverse())
    assert all(group.contains(e) and group.contains(e.matrix()) for e in (one, a, a @ b, a.inverse()))
    x = torch.randn(3, size, dtype=torch.float64)
    close(a.apply(b.apply(x)), (a @ b).apply(x))
    close(a.apply(x.T, 0), a.matrix() @ x.T)
    if a.dense is None or size > 1:  # a dense matrix of one entry is a scale
        same(GroupElement.from_matrix(a.matrix()), a)


@LAW
@given(names, sizes, seeds)
def test_phi_is_a_homomorphism_and_intertwines(name, size, seed):
    group, sigma = INTERTWINER_GROUPS[name], SIGMA[name]
    a, b = draw(name, size, seed, 2)
    same(group.phi(a @ b), group.phi(a) @ group.phi(b))
    same(group.phi(a.inverse()), group.phi(a).inverse())
    close(group.phi(GroupElement.identity(size)).matrix(), torch.eye(size, dtype=torch.float64))
    x = torch.randn(20, size, dtype=torch.float64)
    close(sigma(a.apply(x)), group.phi(a).apply(sigma(x)))


@LAW
@given(sizes, seeds)
def test_affine_intertwiners_compose(size, seed):
    group = intertwiner_group("sigmoid", affine=True)
    generator = torch.Generator().manual_seed(seed)
    a, b = (group.sample(size, generator) for _ in range(2))
    # sigma(A B x) = phi(A) (phi(B) sigma(x) + c_B) + c_A
    close(group.shift(a @ b), group.phi(a).apply(group.shift(b)) + group.shift(a))
    x = torch.randn(20, size, dtype=torch.float64)
    close(torch.sigmoid(a.apply(x)), group.phi(a).apply(torch.sigmoid(x)) + group.shift(a))


@LAW
@given(sizes, seeds)
def test_permuted_and_scaled_matrices_compose_with_dense_ones(size, seed):
    generator = torch.Generator().manual_seed(seed)
    a = INTERTWINER_GROUPS["abs"].sample(size, generator)
    b = INTERTWINER_GROUPS["identity"].sample(size, generator)
    close((a @ b).matrix(), a.matrix() @ b.matrix())
    close((b @ a).matrix(), b.matrix() @ a.matrix())
    assert INTERTWINER_GROUPS["identity"].contains(a @ b)


@LAW
@given(st.floats(0.1, 10), st.floats(-10, 10), st.floats(-10, 10), st.floats(1e-3, 1e3))
def test_powers_with_any_slopes_are_measured_rightly(power, left, right, unit):
    """unit * (right * x^power for x > 0, left * |x|^power for x < 0)."""
    left, right = round(left), round(right)
    if left == right == 0:
        return
    group = measure(lambda x: unit * torch.where(x > 0, right, left) * x.abs() ** power)
    assert group.positive_scales
    assert abs(group.exponent - power) < 1e-11
    assert group.signs == (abs(left) == abs(right))
    assert group.even == (left == right)
    assert not group.doubtful
