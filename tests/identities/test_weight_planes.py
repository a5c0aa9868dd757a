"""Planes of weight space: the basis is Gram-Schmidt's, coefficients are isometric, dependence is found."""

import pytest
import torch
from helpers import assert_refused

from lightning_sym.landscape.planes import WeightPlane, independent, weight_tensors, weight_vector
from lightning_sym.networks import LeNet5, MultiLayerPerceptron

EXACT = {"rtol": 0, "atol": 1e-10}


def points(count: int, size: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + spread * torch.randn(count, size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("dimension", "size"), [(1, 1), (2, 4), (4, 4), (4, 2410), (7, 50)])
def test_the_basis_is_that_of_a_qr_decomposition_with_a_positive_diagonal(dimension, size):
    given = points(dimension + 1, size)
    plane = WeightPlane.through(given)
    q, r = torch.linalg.qr((given[1:] - given[0]).T)
    signs = r.diagonal().sign()
    torch.testing.assert_close(plane.basis, q * signs, **EXACT)
    torch.testing.assert_close(plane.basis.T @ plane.basis, torch.eye(dimension, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(plane.coordinates(given[1:]), (signs[:, None] * r).T, **EXACT)
    assert (plane.coordinates(given[1:]).diagonal() > 0).all()
    assert plane.residual(given).max() < 1e-10
    assert plane.dimension == dimension


def test_nearly_parallel_differences_still_give_an_orthonormal_basis():
    given = points(4, 1000)
    given[2] = given[0] + 2 * (given[1] - given[0]) + 3e-3 * (given[2] - given[0])
    plane = WeightPlane.through(given)
    torch.testing.assert_close(plane.basis.T @ plane.basis, torch.eye(3, dtype=torch.float64), **EXACT)
    assert plane.residual(given).max() < 1e-10


def test_distances_of_weights_are_those_of_coefficients():
    plane = WeightPlane.through(points(4, 300))
    coefficients = points(20, 3, seed=1)
    weights = plane.weights(coefficients)
    torch.testing.assert_close(torch.cdist(weights, weights), torch.cdist(coefficients, coefficients), **EXACT)
    torch.testing.assert_close(plane.coordinates(weights), coefficients, **EXACT)


def test_a_vector_outside_has_its_distance_as_residual():
    plane = WeightPlane.through(points(3, 5))
    outside = points(1, 5, seed=2)[0]
    normal = outside - plane.weights(plane.coordinates(outside))
    torch.testing.assert_close(plane.residual(outside), normal.norm(), **EXACT)
    assert normal.norm() > 0.1
    assert (plane.basis.T @ normal).abs().max() < 1e-10


@pytest.mark.parametrize("size", [4, 2410])
def test_dependent_points_are_rejected(size):
    given = points(4, size)
    given[2] = given[0] + 0.5 * (given[1] - given[0])
    assert independent(given[1:] - given[0]) == [0, 2]
    assert_refused(WeightPlane.through, given, says="Point 2 lies in the plane of the points before")
    given[2] = given[0] + 0.5 * (given[3] - given[0])
    assert independent(given[1:] - given[0]) == [0, 1]
    assert_refused(WeightPlane.through, given, says="Point 3 ")


def test_independence_is_relative_to_a_vectors_own_length_and_to_the_tolerance():
    differences = torch.tensor([[1.0, 0.0], [1e-9, 1e-9], [0.0, 0.0], [torch.nan, 1.0]])
    assert independent(differences) == [0, 1]
    slight = torch.tensor([[1.0, 0.0], [1.0, 1e-2]])
    assert independent(slight) == [0, 1]
    assert independent(slight, tolerance=0.1) == [0]
    assert independent(torch.eye(3).repeat(2, 1)) == [0, 1, 2]


def test_float32_points_are_kept_exactly_and_not_shared():
    given = points(3, 4).float()
    plane = WeightPlane.through(given)
    kept = plane.points.clone()
    given += 1
    assert torch.equal(plane.points, kept)
    assert torch.equal(plane.centre, kept[0])


def test_a_weight_vector_is_the_trainable_parameters_in_order():
    network = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)
    a, b, c, d = weight_vector(network).tolist()
    x = torch.tensor([[2.0], [-3.0]])
    expected = c * torch.relu(a * x) + d * torch.relu(b * x)
    torch.testing.assert_close(network(x).detach(), expected)
    network.linear1.weight.requires_grad_(False)
    assert weight_vector(network).tolist() == [c, d]
    vector = weight_vector(network)
    vector += 1
    assert weight_vector(network).tolist() == [c, d]
    network.requires_grad_(False)
    assert_refused(weight_vector, network, says="no trainable parameters")


def test_weight_tensors_invert_weight_vector_for_many_vectors():
    network = LeNet5(num_classes=1, padding=0)
    vector = weight_vector(network)
    assert len(vector) == 43661
    for name, tensor in weight_tensors(network, torch.stack([vector, 2 * vector])[None]).items():
        parameter = network.get_parameter(name)
        assert tensor.shape == (1, 2, *parameter.shape)
        assert torch.equal(tensor[0, 0], parameter)
        assert torch.equal(tensor[0, 1], 2 * parameter)
    assert_refused(weight_tensors, network, torch.zeros(3), says="43661")
