"""Similarities of representations: what changes them and what does not, and the formulas written out plainly.

The laws are those of docs/theory/similarity.md; second computations follow the definitions, one term at a time.
"""

import itertools
import math
from collections.abc import Callable

import cka
import ckatorch
import pytest
import torch
from helpers import measured
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes
from scipy.spatial import procrustes
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.shape import procrustes_disparity

from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym.similarity import CKA, GroupProcrustes, OrthogonalProcrustes
from lightning_sym.symmetry import intertwiner_group

LAW = settings(max_examples=15, deadline=None, derandomize=True)
EXACT = 1e-10  # of float64; a similarity near 1 is another matter, as the distance is a square root
SEEDS, SIZES = st.integers(0, 2**31), st.integers(1, 6)
SHAPE = st.tuples(st.integers(5, 12), SIZES, st.integers(1, 3), st.integers(1, 3))  # N, C, H, W
close = pytest.approx


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(seed: int, *shape: int) -> Tensor:
    return normal(seed, *shape).relu()


def mixed(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,njhw->nihw", matrix, x)


# What may be done to channels, of a network's features x with C channels.
CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "permutation": lambda x, g: x[:, torch.randperm(x.shape[1], generator=g)],
    "one scale": lambda x, g: 7.5 * x,
    "scales": lambda x, g: mixed(torch.randn(x.shape[1], generator=g, dtype=x.dtype).exp().diag(), x),
    "signs": lambda x, g: mixed(torch.tensor([-1.0, 1.0, -1.0] * 2, dtype=x.dtype)[: x.shape[1]].diag(), x),
    "rotation": lambda x, g: mixed(random_orthogonal(x.shape[1], g), x),
    "shift": lambda x, g: x + 0.5 + torch.rand(x.shape[1], 1, 1, generator=g, dtype=x.dtype),
}
ALL, MONOMIAL = set(CHANGES), {"permutation", "one scale", "scales", "signs"}
# Each measure, what does not change it, and by how much the rest changes the similarity of x with x at least.
MEASURES: dict[str, tuple[Callable[[], Metric], set[str], float]] = {
    "relu": (lambda: GroupProcrustes("relu"), MONOMIAL - {"signs"}, 0.09),
    "relu live": (lambda: GroupProcrustes("relu", live=True), MONOMIAL - {"signs"}, 0.09),
    "relu centred": (lambda: GroupProcrustes("relu", center=True), MONOMIAL - {"signs"} | {"shift"}, 0.09),
    "abs": (lambda: GroupProcrustes("abs"), MONOMIAL - {"signs"}, 0.09),
    "cubic": (lambda: GroupProcrustes("polynomial(3)"), MONOMIAL, 0.09),
    "tanh": (lambda: GroupProcrustes("tanh"), MONOMIAL - {"scales"}, 0.09),
    "gaussian": (lambda: GroupProcrustes("gaussian"), {"permutation", "one scale"}, 0.09),
    "gelu": (lambda: GroupProcrustes("gelu"), {"permutation", "one scale"}, 0.09),
    "sigmoid affine": (lambda: GroupProcrustes(intertwiner_group("sigmoid", affine=True)),
        MONOMIAL - {"scales"} | {"shift"}, 0.09),
    "identity": (lambda: GroupProcrustes("identity"), ALL - {"shift"}, 0.01),
    "orthogonal": (OrthogonalProcrustes, ALL - {"scales", "shift"}, 0.03),
    "orthogonal centred": (lambda: OrthogonalProcrustes(center=True), ALL - {"scales"}, 0.03),
    "linear": (CKA, ALL - {"scales"}, 0.01),
    "linear biased": (lambda: CKA(estimator="biased"), ALL - {"scales"}, 0.01),
    "linear minibatch": (lambda: CKA(estimator="minibatch"), ALL - {"scales"}, 0.01),
    "linear channel": (lambda: CKA(normalize="channel"), ALL - {"rotation"}, 1e-4),
    "max": (lambda: CKA("max"), ALL - {"rotation"}, 0.1),
    "max biased": (lambda: CKA("max", estimator="biased"), ALL - {"rotation"}, 0.05),
    "laplace": (lambda: CKA("laplace"), ALL - {"rotation"}, 0.01),
}  # fmt: skip
STREAMING = [name for name in MEASURES if "minibatch" not in name]


@pytest.mark.parametrize("name", MEASURES)
@given(seed=SEEDS, shape=SHAPE, other=SIZES)
@LAW
@pytest.mark.long
def test_similarity_is_symmetric_in_range_and_1_with_itself(name, seed, shape, other):
    metric = MEASURES[name][0]()
    n, channels, h, w = shape
    for draw in (normal, lambda *arguments: normal(*arguments).abs()):
        x, y = draw(seed, *shape), draw(seed + 1, n, other, h, w)
        value = measured(metric, x, y)
        assert (value.dtype, value.ndim) == (torch.float64, 0)
        assert float(measured(metric, y, x)) == close(float(value), abs=EXACT)
        least = -1 if isinstance(metric, CKA) and name != "linear biased" else 0
        if "orthogonal" in name or (draw is not normal and name == "relu" and other == channels):
            least = 1 - math.sqrt(1 / 2)
        assert least - EXACT <= float(value) <= 1 + EXACT
        assert float(measured(metric, x, x)) == close(1, abs=EXACT)


@pytest.mark.parametrize("name", MEASURES)
@given(seed=SEEDS, shape=SHAPE, other=SIZES)
@LAW
@pytest.mark.long
def test_similarity_does_not_change_under_its_group_on_either_side(name, seed, shape, other):
    make, kept, _ = MEASURES[name]
    n, _, h, w = shape
    x, y = normal(seed, *shape), normal(seed + 1, n, other, h, w)
    source, metric = torch.Generator().manual_seed(seed), make()
    value = float(measured(metric, x, y))
    for change in kept:
        # A rotation of all channels of one network and another one of the other's.
        moved = [CHANGES[change](features, source) for features in (x, y)]
        assert float(measured(metric, *moved)) == close(value, abs=EXACT), change
        assert float(measured(metric, x, moved[1])) == close(value, abs=EXACT), change


@pytest.mark.parametrize("name", MEASURES)
def test_similarity_notices_what_is_outside_of_its_group(name):
    make, kept, least = MEASURES[name]
    source, metric, x = torch.Generator().manual_seed(1), make(), positive(0, 60, 6, 4, 4)
    for change in ALL - kept:
        assert float(measured(metric, x, CHANGES[change](x, source))) < 1 - least, change


@pytest.mark.few(6, "laplace")
@pytest.mark.parametrize("name", STREAMING)
@given(seed=SEEDS, shape=SHAPE, other=SIZES, cuts=st.sets(st.integers(1, 4)))
@LAW
def test_chunks_are_one_batch(name, seed, shape, other, cuts):
    metric = MEASURES[name][0]()
    x, y = normal(seed, *shape), normal(seed + 1, shape[0], other, *shape[2:])
    assert float(measured(metric, x, y, sorted(cuts))) == close(float(measured(metric, x, y)), abs=EXACT)


# ---- Procrustes


def test_dead_channels_and_padding_have_the_published_effect():
    values: dict[str, list[float]] = {"alive": [], "dead": [], "dead live": [], "padded": []}
    alive = torch.arange(12)[:, None, None] < 6
    paper, live = GroupProcrustes("relu"), GroupProcrustes("relu", live=True)
    for seed in range(20):
        x, y = positive(2 * seed, 60, 12, 5, 5), positive(2 * seed + 1, 60, 12, 5, 5)
        values["alive"].append(float(measured(paper, x, y)))
        values["dead"].append(float(measured(paper, x * alive, y * alive)))
        values["dead live"].append(float(measured(live, x * alive, y * alive.flip(0))))
        assert live.live_channels == (6, 6)
        for metric in (paper, live):  # where all are alive the two agree
            assert float(measured(metric, x[:, :6], y[:, 6:])) == close(values["dead live"][-1], abs=EXACT)
        padded = torch.cat([x, torch.zeros_like(x[:, :4])], 1)
        values["padded"].append(float(measured(paper, padded, y)))
        assert float(measured(live, padded, y)) == close(values["alive"][-1], abs=EXACT)
        faint = torch.where(alive, x, 1e-9 * x)  # below 1e-7 of the largest norm counts as dead, above does not
        assert float(measured(paper, faint, faint.roll(1, 0))) == close(
            float(measured(paper, x * alive, (x * alive).roll(1, 0))), abs=EXACT
        )
        measured(live, torch.where(alive, x, 1e-5 * x), y * alive)
        assert live.live_channels == (12, 6)
    means = {name: sum(found) / len(found) for name, found in values.items()}
    assert means == close({"alive": 0.427, "dead": 0.593, "dead live": 0.425, "padded": 0.504}, abs=2e-3)
    dead = torch.zeros(5, 3, 2, 2)
    with pytest.warns(UserWarning, match="all channels of x and of y are zero"):
        assert measured(paper, dead, dead) == 1


def best_by_trying(x: Tensor, y: Tensor, *, scales: bool, signs: bool, live: bool) -> float:
    """Return definition 5.2 with the maximum over all permutations (and signs) of the padded channels."""
    rows, size = [], max(x.shape[1], y.shape[1])
    for features in (x, y):
        flat = torch.zeros(size, features[:, 0].numel(), dtype=torch.float64)
        flat[: features.shape[1]] = features.movedim(1, 0).flatten(1)
        norms = flat.norm(dim=1, keepdim=True) if scales else flat.norm() / math.sqrt(size)
        rows.append(torch.where(flat != 0, flat / norms, 0.0))
    masses = [float(row.square().sum()) for row in rows]
    products = rows[0] @ rows[1].T
    products = products.abs() if signs else products
    best = max(float(products[range(size), order].sum()) for order in itertools.permutations(range(size)))
    distance = math.sqrt(max(sum(masses) - 2 * best, 0.0))
    return 1 - distance / (sum(map(math.sqrt, masses)) if live else 2 * math.sqrt(size))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("name", "scales", "signs"),
    [("relu", True, False), ("cubic", True, True), ("tanh", False, True), ("gelu", False, False)],
)
@given(seed=SEEDS, sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)), dead=st.booleans())
@LAW
def test_the_best_assignment_is_that_of_all_permutations(name, scales, signs, live, seed, sizes, dead):
    x, y = (normal(seed + k, 6, size, 2, 1) for k, size in enumerate(sizes))
    if dead and sizes[0] > 1:
        x[:, 0] = 0
    metric = GroupProcrustes({"cubic": "polynomial(3)"}.get(name, name), live=live)
    tried = best_by_trying(x, y, scales=scales, signs=signs, live=live)
    assert float(measured(metric, x, y)) == close(tried, abs=EXACT)


@pytest.mark.parametrize(("first", "second"), [((4, 4), (2, 2)), ((2, 3), (4, 3)), ((4, 2), (2, 4)), ((6, 2), (2, 1))])
@pytest.mark.parametrize("name", ["relu", "relu centred", "orthogonal", "identity"])
def test_the_coarser_grid_is_repeated(name, first, second):
    x, y = positive(0, 7, 3, *first), positive(1, 7, 4, *second)
    grid = [max(sides) for sides in zip(first, second, strict=True)]
    wide = [torch.nn.functional.interpolate(each, grid, mode="nearest") for each in (x, y)]
    metric = MEASURES[name][0]()
    assert float(measured(metric, x, y, [3])) == close(float(measured(metric, *wide)), abs=EXACT)


@given(seed=SEEDS, shape=SHAPE)
@LAW
def test_orthogonal_procrustes_agrees_with_torchmetrics_and_scipy(seed, shape):
    x, y = normal(seed, *shape), normal(seed, *shape) + normal(seed + 1, *shape) + 2
    rows = [each.movedim(1, 3).flatten(0, 2) for each in (x, y)]
    value = float(measured(OrthogonalProcrustes(center=True), x, y))
    cosine = 1 - 2 * (1 - value) ** 2  # d^2 = 2 - 2 cosine; what is left by the best scale is 1 - cosine^2
    assert 1 - cosine**2 == close(float(procrustes_disparity(rows[0][None], rows[1][None])), abs=EXACT)
    assert 1 - cosine**2 == close(procrustes(*(row.numpy() for row in rows))[2], abs=EXACT)
    centred = [row - row.mean(0) for row in rows]
    unit = [(row / row.norm()).numpy() for row in centred]
    assert cosine == close(orthogonal_procrustes(*unit)[1], abs=EXACT)
    unit = [(row / row.norm()).numpy() for row in rows]
    value = float(measured(OrthogonalProcrustes(), x, y))
    assert 1 - 2 * (1 - value) ** 2 == close(orthogonal_procrustes(*unit)[1], abs=EXACT)


# ---- centred kernel alignment


def plain_kernel(x: Tensor, kernel: str, *, scale: bool, bandwidth: float | None = None) -> Tensor:
    """Return the kernel by its formula, after the centring of channels and, if asked for, division by their norms."""
    x = x - x.mean((0, 2, 3), keepdim=True)
    if scale:
        norms = x.square().sum((0, 2, 3), keepdim=True).sqrt()
        x = x / torch.where(norms > 0, norms, 1.0)
    products = (x[:, None] * x[None]).sum((3, 4))  # n, m, c
    if kernel == "linear":
        return products.sum(2)
    if kernel == "max":
        return products.amax(2)
    distances = (x[:, None] - x[None]).square().sum((3, 4)).sqrt().sum(2)
    return torch.exp(-distances / (bandwidth or distances[*torch.triu_indices(len(x), len(x), 1)].quantile(0.5)))


def plain_hsic(k: Tensor, other: Tensor, *, unbiased: bool) -> Tensor:
    n, ones = len(k), torch.ones(len(k), dtype=torch.float64)
    if not unbiased:
        h = torch.eye(n) - torch.ones(n, n, dtype=torch.float64) / n
        return (k @ h @ other @ h).trace() / (n - 1) ** 2
    k, other = (each - each.diagonal().diag() for each in (k, other))
    middle = (ones @ k @ ones) * (ones @ other @ ones) / ((n - 1) * (n - 2))
    return ((k @ other).trace() + middle - 2 / (n - 2) * (ones @ k @ other @ ones)) / (n * (n - 3))


def plain_cka(pairs: list[tuple[Tensor, Tensor]], *, unbiased: bool) -> float:
    """Return the alignment of kernels; of several batches, from sums of each criterion."""
    xy, xx, yy = (
        sum(plain_hsic(pair[i], pair[j], unbiased=unbiased) for pair in pairs) for i, j in ((0, 1), (0, 0), (1, 1))
    )
    return float(xy / (xx * yy).sqrt())


KERNELS = [("linear", "none"), ("linear", "channel"), ("max", "none"), ("max", "channel"), ("laplace", "channel")]


@pytest.mark.parametrize("estimator", ["unbiased", "biased"])
@pytest.mark.parametrize(("kernel", "normalize"), KERNELS)
# Fewer and more numbers per sample than samples; the number of pairs is odd, so that there is one median distance.
@given(seed=SEEDS, n=st.sampled_from([6, 7, 10, 22]), other=SIZES, bandwidth=st.sampled_from([None, 0.7]))
@LAW
def test_cka_is_that_of_the_formulas(kernel, normalize, estimator, seed, n, other, bandwidth):
    # Each position has a mean of its own, and one channel is dead.
    x = normal(seed, n, 2, 2, 1) + normal(seed + 2, 1, 2, 2, 1)
    y = x[:, :1].square() + normal(seed + 1, n, other, 2, 1)
    x[:, 1] *= seed % 2
    metric = CKA(kernel, estimator=estimator, normalize=normalize, bandwidth=bandwidth)
    kernels = tuple(plain_kernel(z, kernel, scale=normalize == "channel", bandwidth=bandwidth) for z in (x, y))
    value = float(measured(metric, x, y, [2]))
    assert value == close(plain_cka([kernels], unbiased=estimator == "unbiased"), abs=EXACT)


@pytest.mark.parametrize("kernel", ["linear", "max", "laplace"])
@given(seed=SEEDS, other=SIZES)
@LAW
def test_minibatch_cka_sums_the_criteria_of_full_batches(kernel, seed, other):
    x, y = normal(seed, 21, 2, 2, 1) + 1, normal(seed + 1, 21, other, 2, 1).square()
    metric = CKA(kernel, estimator="minibatch", normalize="none", bandwidth=0.5)
    kernels = [
        tuple(plain_kernel(z, kernel, scale=False, bandwidth=0.5) for z in pair)
        for pair in zip(x.split(7), y.split(7), strict=True)
    ]
    value = float(measured(metric, x, y, [7, 14]))
    assert value == close(plain_cka(kernels, unbiased=True), abs=EXACT)
    for rest in (3, 5):  # fewer than 4, fewer than in the first batch
        metric.update(x[:rest], y[:rest])
    assert float(metric.compute()) == close(value, abs=EXACT)


@given(seed=SEEDS, n=st.integers(5, 30), sizes=st.tuples(SIZES, SIZES), side=st.integers(1, 2))
@LAW
def test_linear_cka_agrees_with_ckatorch_and_pytorch_cka(seed, n, sizes, side):
    offset = normal(seed + 2, 1, 1, side, side)
    x = normal(seed, n, sizes[0], side, side) + offset
    y = x[:, :1] ** 2 + normal(seed + 1, n, sizes[1], side, side)
    flat = x.flatten(1), y.flatten(1)
    for estimator in ("unbiased", "biased"):
        judge = float(ckatorch.cka_base(*flat, unbiased=estimator == "unbiased"))
        assert float(measured(CKA(estimator=estimator), x, y, [1])) == close(judge, abs=EXACT)
    # This one has no negative values.
    assert max(float(measured(CKA(), x, y)), 0) == close(float(cka.cka_from_features(*flat)), abs=EXACT)
