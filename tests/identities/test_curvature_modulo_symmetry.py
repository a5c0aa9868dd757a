"""Curvature across the orbit is the same for all its members, whose own curvatures are orders of magnitude apart."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import assert_refused, one_in, refused
from orbit_laws import assert_tangents_change_no_output
from scipy import sparse
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional as F

from lightning_sym.curvature import (
    ComplementOperator,
    CurvatureOperator,
    MatrixOperator,
    canonical_operator,
    directional_curvature,
    lanczos,
    near_zero,
    sharpness_modulo_symmetry,
    spectral_density,
    top_eigenpairs,
    trace,
)
from lightning_sym.symmetry import canonicalize, local_dimension, orbit_tangents, trace_symmetry

pytestmark = pytest.mark.long


def shallow(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 3))


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.1), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))


def normed() -> nn.Sequential:
    conv = nn.Conv2d(1, 4, 2)
    return nn.Sequential(
        nn.Unflatten(1, (1, 5, 1)), nn.ZeroPad2d((0, 1, 0, 0)), conv, nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, (2, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def grouped() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5, 1)), nn.Conv2d(1, 4, (2, 1)), nn.ReLU(), nn.Conv2d(4, 4, (2, 1), groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


# The network, the dimension of its orbit, and how many generators move running statistics.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "relu": (shallow, 8, 0),
    "deep": (deep, 13, 0),
    "batch norm": (normed, 16, 8),
    "grouped": (grouped, 8, 0),
    "tanh": (lambda: shallow(nn.Tanh), 0, 0),
    "sigmoid": (lambda: shallow(nn.Sigmoid), 0, 0),
}


def prepared(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a network in float64 with random weights and statistics, and data."""
    torch.manual_seed(3)
    network = CASES[name][0]().double()
    x, y = torch.randn(60, 5).double(), torch.randint(3, (60,))
    network.train()
    network(x)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.7)
    return network.eval(), (x, y)


@pytest.mark.parametrize("name", CASES)
def test_outputs_do_not_change_along_tangents_and_the_dimension_is_that_of_the_orbit(name: str) -> None:
    network, (x, _) = prepared(name)
    _, dimension, statistics = CASES[name]
    found = assert_tangents_change_no_output(trace_symmetry(network, x), network, x, 1e-12)
    assert (found.generators, found.statistics, found.rank) == (dimension, statistics, dimension - statistics)
    vectors = torch.randn(len(found.complement()), 3).double()
    basis = found.complement()
    torch.testing.assert_close(found.across(vectors), basis @ (basis.T @ vectors), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.along(vectors) + found.across(vectors), vectors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["relu", "deep", "grouped"])
def test_the_balanced_member_lies_in_the_complement(name: str) -> None:
    network, (x, _) = prepared(name)
    symmetry = trace_symmetry(network, x)
    for member, least in ((network, 1e-2), (canonicalize(symmetry, network).network, 0.0)):
        weights = torch.cat([p.detach().flatten() for p in member.parameters()])
        along = float(orbit_tangents(symmetry, member).along(weights).norm() / weights.norm())
        assert along > least if least else along < 1e-10


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", one_in(3, CASES))
def test_sharpness_modulo_symmetry_is_the_same_for_all_members_of_an_orbit(name: str, kind: str) -> None:
    network, data = prepared(name)
    symmetry = trace_symmetry(network, data[0])
    settings = {"kind": kind, "probes": 8, "columns": 64}
    first = sharpness_modulo_symmetry(symmetry, network, data, F.cross_entropy, **settings)
    element = symmetry.sample(torch.Generator().manual_seed(0), scale=4.0)
    moved = sharpness_modulo_symmetry(symmetry, symmetry.act(element, network), data, F.cross_entropy, **settings)
    for one, two in ((first.modulo, moved.modulo), (first.balanced, moved.balanced)):
        for measure in ("top_eigenvalue", "trace", "norm"):
            assert math.isclose(one.value(measure), two.value(measure), rel_tol=1e-8), measure
    ratio = moved.raw.top_eigenvalue / first.raw.top_eigenvalue
    if symmetry.scales:
        assert ratio > 100
        assert moved.gauge_share("top_eigenvalue") == 1 - moved.modulo.top_eigenvalue / moved.raw.top_eigenvalue > 0.9
    elif name == "tanh":
        assert ratio == pytest.approx(1, rel=1e-8)
        assert first.gauge_share("top_eigenvalue") == pytest.approx(0, abs=1e-8)


def test_restriction_has_the_spectrum_of_the_dense_one() -> None:
    network, data = prepared("deep")
    symmetry = trace_symmetry(network, data[0])
    whole, across, notes = canonical_operator(symmetry, network, data, F.cross_entropy)
    assert notes == ()
    restricted = torch.linalg.eigvalsh(across.matrix())
    assert len(restricted) == across.dimension == whole.size - 13
    columns = across @ torch.eye(whole.size).double()
    everything = torch.linalg.eigvalsh((columns + columns.T) / 2)
    expected = torch.cat([restricted, torch.zeros(13)]).double().sort().values
    torch.testing.assert_close(everything, expected, rtol=0, atol=1e-10)
    assert float((whole.matrix() - columns).norm()) > 1e-3  # away from critical points tangents are no null vectors


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_zeros_along_the_orbit_are_no_eigenvalues(sign: int) -> None:
    """Where the restriction is definite a zero would be seen: as an extreme, in a count, as a mass of the density."""
    network, (x, y) = prepared("relu")
    data = x, F.one_hot(y, 3).double()
    symmetry = trace_symmetry(network, x)
    whole, across, _ = canonical_operator(
        symmetry, network, data, lambda outputs, targets: sign * F.mse_loss(outputs, targets), kind="gauss_newton",
        columns=64,
    )  # fmt: skip
    expected = torch.linalg.eigvalsh(across.matrix())
    dense = MatrixOperator(whole.matrix())  # faster
    dense.names = whole.names
    across = ComplementOperator(dense, across.tangents)
    smallest = float(expected.abs().min())
    assert float((sign * expected).min()) > 0
    for count, basis in ((3, None), (3, 40), (across.dimension, None)):
        for which, values in (("largest", expected.flip(0)), ("smallest", expected)):
            pairs = top_eigenpairs(across, count, which=which, basis=basis, tolerance=1e-6)
            torch.testing.assert_close(pairs.values, values[:count], rtol=0, atol=1e-6 * float(expected.abs().max()))
            assert float(across.tangents.along(pairs.vectors).abs().max()) < 1e-10
    total = float(expected.sum())
    estimate, density = trace(across, 64), spectral_density(across, 40, 8)
    assert abs(estimate.value - total) < 5 * estimate.standard_error
    assert estimate.squared_norm == pytest.approx(float(expected.square().sum()), rel=0.5)
    traces = density.size * (density.weights * density.nodes).sum(1)
    assert abs(float(traces.mean()) - total) < 5 * float(traces.std()) / math.sqrt(8)
    assert density.size == across.dimension
    everything = top_eigenpairs(across, across.dimension).values
    assert near_zero(everything, [0.1 * smallest]).absolute == {0.1 * smallest: 0}
    for tangent in torch.from_numpy(across.tangents.vectors.toarray()).T[:1]:
        mixed = tangent + torch.randn(across.size).double()
        inside = across.inside(mixed)
        (curvature,) = directional_curvature(across, {"mixed": mixed}).values()
        assert curvature[1] == pytest.approx(float(inside @ (across @ inside) / (inside @ inside)), rel=1e-10)
        assert_refused(directional_curvature, across, {"tangent": tangent}, says="'tangent' is orthogonal")
    assert_refused(top_eigenpairs, across, across.dimension + 1, says=f"at most {across.dimension}")
    assert_refused(lanczos, across, torch.ones(across.size, 1), across.dimension + 1, says=f"{across.dimension} eigen")


def test_an_orbit_that_is_everything_leaves_no_eigenvalue() -> None:
    network, data = prepared("relu")
    names = [name for name, _ in network.named_parameters()]
    whole = CurvatureOperator(network, data, F.cross_entropy, parameters=names)
    tangents = orbit_tangents(trace_symmetry(network, data[0]), network)
    everything = dataclasses.replace(
        tangents, vectors=sparse.identity(whole.size, format="csr"), rank=whole.size, _inverse=np.eye(whole.size)
    )
    across = ComplementOperator(whole, everything)
    assert across.matrix().shape == (0, 0)
    assert trace(across, 4).value == pytest.approx(0, abs=1e-12)
    assert_refused(top_eigenpairs, across, says="at most 0")
    assert_refused(spectral_density, across, says="no eigenvalues")


def test_gauss_newton_loses_nothing_but_zeros() -> None:
    network, data = prepared("relu")
    symmetry = trace_symmetry(network, data[0])
    whole, across, _ = canonical_operator(symmetry, network, data, F.cross_entropy, kind="gauss_newton")
    torch.testing.assert_close(across @ torch.eye(whole.size).double(), whole.matrix(), rtol=0, atol=1e-12)


def test_spectra_and_ranks_under_rescaling_and_permutation() -> None:
    network, data = prepared("relu")
    symmetry = trace_symmetry(network, data[0])
    rescaled, permuted = symmetry.identity(), symmetry.sample(torch.Generator().manual_seed(0), scale=0.0)
    rescaled.log_scale[:] = torch.linspace(-1, 1, symmetry.scales)
    assert not torch.equal(permuted.permutation, rescaled.permutation)

    def facts(member: nn.Module) -> tuple[Tensor, Tensor, int]:
        spectrum = torch.linalg.eigvalsh(CurvatureOperator(member, data, F.cross_entropy).matrix())
        inputs = torch.stack([jacrev(lambda x: member(x[None])[0])(x) for x in data[0]])
        return spectrum, inputs, local_dimension(symmetry, member, data[0]).rank

    spectrum, inputs, rank = facts(network)
    for element, same in ((rescaled, False), (permuted, True)):
        other, jacobians, other_rank = facts(symmetry.act(element, network))
        torch.testing.assert_close(jacobians, inputs, rtol=0, atol=1e-10)
        assert other_rank == rank
        assert bool((other - spectrum).abs().max() < 1e-10) == same


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()


def of_some_parameters() -> ComplementOperator:
    network, data = prepared("relu")
    tangents = orbit_tangents(trace_symmetry(network, data[0]), network)
    return ComplementOperator(CurvatureOperator(network, data, F.cross_entropy, parameters=["0.weight"]), tangents)


@pytest.mark.parametrize(
    "refusal",
    [refused(lambda: orbit_tangents(trace_symmetry(linear(), torch.zeros(2, 5).double()), linear()), says="invertible"),
        refused(of_some_parameters, says="all parameters")],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(refusal: Callable[[], None]) -> None:
    refusal()
