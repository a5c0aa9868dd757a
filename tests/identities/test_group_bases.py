"""Linear maps that commute with finite groups (docs/theory/relaxed_layers.md, 1.9)."""

import functools
import itertools

import pytest
import torch
from helpers import assert_refused

from lightning_sym.layers import EquivariantLinear, GroupConv, GroupLift, GroupMax, grid_action, regular_action
from lightning_sym.layers.finite_groups import orbits
from lightning_sym.networks import RelaxedNetwork


def symmetric_group(points):
    """Return the multiplication table of all permutations of some points."""
    elements = list(itertools.permutations(range(points)))
    return [[elements.index(tuple(g[h[i]] for i in range(points))) for h in elements] for g in elements]


S3 = symmetric_group(3)
ACTIONS = {  # of inputs and outputs
    "c4": (grid_action("c4", 4), grid_action("c4", 2)),
    "c4 with a centre": (grid_action("c4", 3), grid_action("c4", 3)),
    "d4": (grid_action("d4", 4), grid_action("d4", 2)),
    "d4 with a centre": (grid_action("d4", 3), grid_action("d4", 1)),
    "S3 on itself": (regular_action(S3), regular_action(S3)),
    "S3 to three points": (regular_action(S3), torch.tensor(list(itertools.permutations(range(3))))),
}


def moved(x, permutation):
    """Return features after a permutation of their points: the value at p is now at ``permutation[p]``."""
    return torch.zeros_like(x).index_copy(2, permutation, x)


@pytest.mark.parametrize("name", ACTIONS)
def test_layers_commute_with_their_group(name):
    before, after = ACTIONS[name]
    torch.manual_seed(0)
    layer = EquivariantLinear(2, 3, before, after).double()
    layer.bias.data.normal_()
    x = torch.randn(5, 2, before.shape[1], dtype=torch.float64)
    y = layer(x)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(layer(moved(x, one)), moved(y, other), rtol=0, atol=1e-13)
    # A permutation outside of the group is noticed.
    wrong = torch.arange(before.shape[1]).roll(1)
    if not (before == wrong).all(1).any():
        assert (layer(moved(x, wrong)) - y).abs().max() > 1e-3


@pytest.mark.parametrize("name", ACTIONS)
def test_the_basis_is_complete(name):
    """Its size is that of the null space of all conditions, and Burnside's count of the orbits."""
    before, after = ACTIONS[name]
    basis = torch.nn.functional.one_hot(orbits(after, before)).movedim(-1, 0).double()
    conditions = []
    for one, other in zip(before, after, strict=True):
        left, right = (torch.eye(len(to)).double()[to].mT.contiguous() for to in (other, one))
        torch.testing.assert_close(left @ basis, basis @ right, rtol=0, atol=0)
        conditions.append(
            torch.kron(left, torch.eye(len(right))) - torch.kron(torch.eye(len(left)), right.mT.contiguous())
        )
    rank = int(torch.linalg.matrix_rank(torch.cat(conditions)))
    assert len(basis) == basis[0].numel() - rank
    fixed = [(action == torch.arange(action.shape[1])).sum(1) for action in (before, after)]
    assert len(basis) == int((fixed[0] * fixed[1]).sum()) // len(before)


def test_on_its_own_elements_it_is_the_convolution_of_a_group_that_does_not_commute():
    table = torch.tensor(S3)
    assert not torch.equal(table, table.mT)
    inverse = (table == (table == torch.arange(6)).all(1).nonzero()).nonzero()[:, 1]
    layer = EquivariantLinear(1, 1, regular_action(S3)).double()
    x = torch.randn(1, 1, 6, dtype=torch.float64)
    matrix = layer.matrix()[0, :, 0]
    filter_ = matrix[int((table == torch.arange(6)).all(1).nonzero())]  # from the identity's row
    expected = torch.stack([sum(filter_[table[inverse[g], h]] * x[0, 0, h] for h in range(6)) for g in range(6)])
    torch.testing.assert_close(layer(x)[0, 0], expected, rtol=1e-12, atol=1e-12)


CORNERS = grid_action("d4", 2)  # of a square, which tell all elements apart
D4 = [[CORNERS.tolist().index(one[other].tolist()) for other in CORNERS] for one in CORNERS]


def acted(x, element, size):
    """Return features on a group of the plane after an element g: all maps are moved, and the one at h goes to g h."""
    maps = torch.rot90(x.mT if element >= 4 else x, element % 4, (2, 3))
    if size == 1:  # images
        return maps
    maps = maps.unflatten(1, (size, -1))
    return torch.zeros_like(maps).index_copy(1, torch.tensor(D4[element][:size]), maps).flatten(1, 2)


def convolution(kind, group, kernel_size=3):
    torch.manual_seed(0)
    layer = GroupConv(2, 3, kind, kernel_size, group).double()
    for name, parameter in layer.named_parameters():
        if "bias" in name or name == "rotation_weight":
            parameter.data.normal_()
    return layer


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize("kind", ["lifting", "full", "pointwise", "separable", "depthwise_separable"])
def test_convolutions_of_the_plane_commute_with_turns_reflections_and_shifts(kind, group):
    layer = convolution(kind, group)
    size = layer.order
    x = torch.randn(3, 2 if kind == "lifting" else 2 * size, 4, 5, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (3, 3 * size, 4, 5)
    for element in range(size):
        moved_x = acted(x, element, 1 if kind == "lifting" else size).roll((1, 2), (2, 3))
        expected = acted(y, element, size).roll((1, 2), (2, 3))
        torch.testing.assert_close(layer(moved_x), expected, rtol=0, atol=1e-12)
    if group == "p4" and kind == "lifting":  # a reflection is none of its elements
        assert (layer(x.mT) - y.mT).abs().max() > 0.1


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_at_one_point_they_are_the_convolutions_of_a_finite_group_given_by_its_table(group):
    layer = convolution("full", group, kernel_size=1)
    size = layer.order
    table = [row[:size] for row in D4[:size]]
    linear = EquivariantLinear(2, 3, regular_action(table)).double()
    linear.weight.data = layer.weight.data.view(3, size, 2).mT
    linear.bias.data = layer.bias.data[:, None]
    x = torch.randn(5, 2 * size, 1, 1, dtype=torch.float64)
    expected = linear(x.view(5, size, 2).mT).mT.reshape(5, -1, 1, 1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gconv", "gconv_full", "gconv_separable", "gconv_depthwise_separable"])
def test_networks_on_p4m_are_invariant_to_reflections_too(kind):
    torch.manual_seed(0)
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    for group in ("p4", "p4m"):
        network = RelaxedNetwork([kind], width=2, grid=8, in_channels=1, group=group).double()
        for parameter in network.parameters():  # constant v would make the filters of p4 symmetric
            parameter.data += torch.randn_like(parameter) / parameter[0].numel() ** 0.5 / 2
        logits = network(images)
        assert 1e-4 < logits.std(0).max() < 10
        turned = torch.rot90(images, 1, (2, 3)).roll((3, 1), (2, 3))
        torch.testing.assert_close(network(turned), logits, rtol=0, atol=1e-12)
        mirrored = (network(turned.flip(3)) - logits).abs().max()
        assert mirrored < 1e-12 if group == "p4m" else mirrored > 1e-4


def test_maps_of_a_larger_group_are_among_those_of_a_smaller_one():
    small, large = orbits(grid_action("c4", 4), grid_action("c4", 4)), orbits(*[grid_action("d4", 4)] * 2)
    assert (int(small.max()), int(large.max())) == (16 * 16 // 4 - 1, (16 * 16 + 2 * 4 * 4) // 8 - 1)
    for orbit in range(int(small.max()) + 1):
        assert len(large[small == orbit].unique()) == 1


@pytest.mark.parametrize("paths", [["c4"], ["d4"]])
def test_networks_of_such_paths_are_invariant(paths):
    torch.manual_seed(0)
    network = RelaxedNetwork(paths, width=2, grid=8, in_channels=1).double()
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    logits = network(images)
    for turns in range(1, 4):
        torch.testing.assert_close(network(torch.rot90(images, turns, (2, 3))), logits, rtol=1e-11, atol=1e-11)
    mirrored = (network(images.flip(3)) - logits).abs().max()
    assert mirrored < 1e-11 if paths == ["d4"] else mirrored > 1e-4
    assert (network(images.roll(1, 3)) - logits).abs().max() > 1e-4


def test_what_is_no_group_is_refused():
    loop = [[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]]  # not associative
    for table in ([], [[0, 1]], [[0, 0], [1, 1]], [[1, 0], [1, 0]], loop):
        assert_refused(regular_action, table, says="multiplication table")
    assert_refused(grid_action, "c4", (2, 3), says="square")
    assert_refused(grid_action, "c3", 2, says="c4")
    assert_refused(EquivariantLinear, 1, 1, [[0, 1, 2], [1, 2, 0]], says="a product of two elements is missing")
    assert_refused(EquivariantLinear, 1, 1, [[0, 0]], says="permutations")
    assert_refused(EquivariantLinear, 1, 1, grid_action("c4", 2), [[0]], says="1 elements of the group, but action 4")
    assert_refused(EquivariantLinear, 1, 1, grid_action("c4", 2), out_grid=3, says="4 points of out_action")
    assert_refused(EquivariantLinear(2, 1, [[0]]), torch.zeros(1, 2, 2), says="with 1 points")
    assert_refused(RelaxedNetwork, ["gconv", "d4"], says="use either")
    for kind in (GroupLift, GroupMax, RelaxedNetwork, functools.partial(GroupConv, 2, 3)):
        assert_refused(kind, group="p6", says="p4m")
