"""Laws of the exact theory of one-input ReLU networks, for any weights and moments."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from two_unit_class import class_dimension, optimal_path, strata

from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.landscape.two_unit import Moments, TwoUnitClass, distance, slopes

LAW = settings(max_examples=60, deadline=None, derandomize=True)
EXACT = 1e-12

seeds = st.integers(0, 2**40)
units = st.integers(2, 6)
sides = st.sampled_from([1, -1])


def gaussian(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(seed):
    return Moments.of(gaussian(seed, 200))


def same_sign_class(seed, side):
    slope = float(gaussian(seed, 1))
    return TwoUnitClass((slope, 0.0) if side > 0 else (0.0, slope), moments_of(seed))


def random_plane(seed, dimension, centre=None):
    centre = gaussian(seed, 4) if centre is None else centre
    return WeightPlane.through(torch.cat([centre[None], centre + gaussian(seed + 1, dimension, 4)]))


@given(seed=seeds, count=units)
@LAW
def test_distance_and_gradient_are_those_of_the_network_on_a_sample(seed, count):
    inputs, target = gaussian(seed, 300), gaussian(seed + 1, 2 * count)
    weights = gaussian(seed + 2, 7, 2 * count)
    weights[0, 0] = 0  # where the ReLU has slope 0
    weights.requires_grad_()

    def outputs(w):
        return (w[..., count:, None] * (w[..., :count, None] * inputs).relu()).sum(-2)

    expected = (outputs(weights) - outputs(target)).square().mean(-1)
    (gradient,) = torch.autograd.grad(expected.sum(), weights)
    moments = Moments.of(inputs)
    scale = float(expected.detach().max())
    torch.testing.assert_close(distance(weights, target, moments), expected, rtol=EXACT, atol=EXACT * scale)
    (closed,) = torch.autograd.grad(distance(weights, target, moments).sum(), weights)
    torch.testing.assert_close(closed, gradient, rtol=EXACT, atol=EXACT * scale)


@given(seed=seeds, count=units)
@LAW
def test_distance_is_invariant_under_rescaling_and_permuting_units(seed, count):
    generator = torch.Generator().manual_seed(seed)
    weights, target = gaussian(seed + 1, 2 * count), gaussian(seed + 2, 2)
    factors = gaussian(seed + 3, count).exp()
    order = torch.randperm(count, generator=generator)
    moved = torch.cat([(weights[:count] * factors)[order], (weights[count:] / factors)[order]])
    values = [distance(w, target, moments_of(seed)) for w in (weights, moved)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)


@given(seed=seeds, side=sides)
@LAW
def test_no_weights_of_the_wrong_signs_beat_the_zero_function(seed, side):
    same_sign = same_sign_class(seed, side)
    weights = gaussian(seed + 1, 500, 4)
    weights[:, :2] = -side * weights[:, :2].abs()
    values = distance(weights, same_sign.target, same_sign.moments)
    assert float(values.min()) >= same_sign.zero_distance * (1 - EXACT)
    assert (-side, -side) not in {stratum.signs for stratum in strata(same_sign)}


@given(seed=seeds)
@LAW
def test_the_form_of_a_three_plane_has_eigenvalues_minus_one_s_one(seed):
    plane = random_plane(seed, 3)
    quadric = TwoUnitClass((0.7, 0.0)).quadric(plane)
    # by the normal of the plane, as the form has trace 0 in R^4
    normal = torch.linalg.svd(plane.basis.T).Vh[3]
    s = float(-2 * (normal[:2] @ normal[2:]))
    torch.testing.assert_close(quadric.eigenvalues, torch.tensor([-1, s, 1], dtype=torch.float64), rtol=0, atol=EXACT)
    assert -1 <= quadric.s <= 1


@given(seed=seeds, side=sides)
@LAW
def test_the_quadric_is_the_class_inside_the_plane(seed, side):
    same_sign = same_sign_class(seed, side)
    plane = random_plane(seed, 3)
    quadric = same_sign.quadric(plane)
    coefficients = 2 * gaussian(seed + 2, 400, 3)
    weights = plane.weights(coefficients)
    field = (weights[:, :2] * weights[:, 2:]).sum(1) - quadric.level
    inside = (side * weights[:, :2] >= 0).all(1)
    # where the quadric holds, J is the square of the field, and the field the sum of squares along the axes
    values = distance(weights, same_sign.target, same_sign.moments)
    torch.testing.assert_close(quadric.moment * field[inside].square(), values[inside], rtol=1e-9, atol=EXACT)
    y = (coefficients - quadric.centre) @ quadric.axes
    normal_form = quadric.throat + (y.square() * quadric.eigenvalues).sum(-1) / 2
    scale = float(y.square().max()) + abs(quadric.throat)
    torch.testing.assert_close(field + quadric.level, normal_form, rtol=0, atol=1e-12 * scale)
    residuals = same_sign.residuals(plane, coefficients)
    torch.testing.assert_close(residuals, slopes(weights) - same_sign.target, rtol=0, atol=EXACT)


@given(seed=seeds, by_slopes=st.booleans())
@LAW
def test_the_optimal_path_joins_the_two_components_at_the_barrier(seed, by_slopes):
    weights = gaussian(seed, 4)
    weights[1] = -weights[0].sign() * weights[1].abs()
    mixed = TwoUnitClass(slopes(weights) if by_slopes else weights, moments_of(seed))
    path = optimal_path(mixed, 20)
    weights = path[0] if by_slopes else weights
    torch.testing.assert_close(path[0], weights)
    torch.testing.assert_close(path[-1], weights[[1, 0, 3, 2]])
    assert {tuple(ends) for ends in path[[0, -1], :2].sign().tolist()} == {stratum.signs for stratum in strata(mixed)}
    assert bool(mixed.contains(path[[0, -1]]).all())
    values = distance(path, mixed.target, mixed.moments)
    assert abs(float(values.max()) - mixed.barrier) <= EXACT * max(mixed.barrier, mixed.zero_distance)


@given(seed=seeds, positive=st.integers(0, 5), negative=st.integers(0, 5))
@LAW
def test_the_class_dimension_is_the_nullity_of_the_outputs(seed, positive, negative):
    count = positive + negative
    weights, x = 0.1 + gaussian(seed, 2 * count).abs(), gaussian(seed + 2, 50)
    weights[positive:count] *= -1

    def outputs(w):
        return (w[count:, None] * (w[:count, None] * x).relu()).sum(0)

    jacobian = torch.autograd.functional.jacobian(outputs, weights) if count else torch.zeros(1, 1)
    assert class_dimension(positive, negative) == 2 * count - int(torch.linalg.matrix_rank(jacobian))


@given(seed=seeds, slope=st.sampled_from([(0.5, 0.3), (-0.5, 0.3), (0.5, 0.0), (0.0, -0.5), (0.0, 0.0)]))
@LAW
def test_strata_partition_the_class(seed, slope):
    """Members of each stratum, built from its conditions, are contained and recognised; the wrong signs never are."""
    found = TwoUnitClass(slope)
    p, q = slope
    magnitude = gaussian(seed, 4).abs().tolist()
    free = gaussian(seed + 1, 2).tolist()
    for stratum in strata(found):
        inputs = [s * m for s, m in zip(stratum.signs, magnitude, strict=False)]
        outputs = list(free)
        for side, value in ((1, p), (-1, q)):
            mine = [unit for unit in (0, 1) if stratum.signs[unit] == side]
            if mine:
                others = sum(outputs[unit] * abs(inputs[unit]) for unit in mine[1:])
                outputs[mine[0]] = (value - others) / abs(inputs[mine[0]])
            else:
                assert value == 0  # no stratum where a slope that is not 0 has no unit
        weights = torch.tensor([*inputs, *outputs], dtype=torch.float64)
        assert bool(found.contains(weights))
    assert max(stratum.dimension for stratum in strata(found)) == found.dimension
    signs = {stratum.signs for stratum in strata(found)}
    assert len(signs) == len(strata(found))
    for a in (-1, 0, 1):
        for b in (-1, 0, 1):
            if (a, b) not in signs:
                weights = torch.tensor([a * magnitude[0], b * magnitude[1], *free], dtype=torch.float64)
                assert not bool(found.contains(weights))
