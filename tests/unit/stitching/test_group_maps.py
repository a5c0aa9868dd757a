"""Maps that follow the intertwiner group: relaxed, rounded, and never stale."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import refused
from torch import nn

from lightning_sym.stitching import AssignmentMap, GroupMap, Port, SoftSortMap, nearest_permutation, stitching_map
from lightning_sym.symmetry import INTERTWINER_GROUPS

WIDTH = 5
RELU = Port(WIDTH, WIDTH, group=INTERTWINER_GROUPS["relu"])
TANH = Port(WIDTH, WIDTH, group=INTERTWINER_GROUPS["tanh"])
GELU = Port(WIDTH, WIDTH)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ---- the group


@pytest.mark.parametrize("projection", ["sinkhorn", "euclidean"])
@pytest.mark.parametrize("port", [RELU, TANH, GELU])
def test_group_start_and_projection(port, projection):
    stitch = GroupMap(port, projection=projection)
    ones = torch.ones(WIDTH)
    norm = stitch.weights.norm()
    assert 1 <= norm < 1.4
    assert stitch.regularization().item() == pytest.approx(-0.1 * norm.item())
    assert (stitch.scale is None) == (port is GELU)
    if stitch.scale is not None:
        assert torch.equal(stitch.scale.detach(), ones)
    optimizer = torch.optim.SGD(stitch.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (stitch(torch.randn(8, WIDTH)).square().mean() + stitch.regularization()).backward()
        optimizer.step()
        stitch.project()
        for axis in (0, 1):
            torch.testing.assert_close(stitch.weights.sum(axis).detach(), ones, rtol=0, atol=1e-5)
        assert (stitch.weights >= 0).all()


def test_scales_follow_the_port():
    values = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    cases = [
        (RELU, [0.0, 0.0, 0.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.5, 2.0]),
        (TANH, [-1.0, -0.5, 0.0, 0.5, 1.0], [-1.0, -1.0, 1.0, 1.0, 1.0]),
        (Port(WIDTH, WIDTH, group=INTERTWINER_GROUPS["dropout"]), values.tolist(), values.tolist()),
    ]
    for port, projected, hard in cases:
        stitch = GroupMap(port)
        with torch.no_grad():
            stitch.scale.copy_(values)
            stitch.weights.copy_(torch.eye(WIDTH))
        stitch.project()
        torch.testing.assert_close(stitch.matrix().diag().detach(), torch.tensor(projected))
        stitch.mode = "hard"
        torch.testing.assert_close(stitch.matrix().diag().detach(), torch.tensor(hard))
        torch.testing.assert_close(stitch(torch.eye(WIDTH)).diag().detach(), torch.tensor(hard))


def test_what_is_held_and_what_decays():
    relu, tanh, gelu = GroupMap(RELU), GroupMap(TANH), GroupMap(GELU)
    assert relu.held_parameters() == [relu.scale]
    assert [id(p) for p in relu.undecayed_parameters()] == [id(relu.weights)]
    assert tanh.held_parameters() == gelu.held_parameters() == []
    for name in ("full", "softsort", "orthogonal", "rank(1)"):
        assert stitching_map(name)(RELU).undecayed_parameters() == []


def test_without_permutations_only_scales_are_there():
    stitch = GroupMap(Port(3, 3, group=replace(INTERTWINER_GROUPS["relu"], permutations=False), axis=-1)).double()
    assert [name for name, _ in stitch.named_parameters()] == ["scale"]
    with torch.no_grad():
        stitch.scale.copy_(torch.tensor([1.0, 2.0, -3.0]))
    stitch.project()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    for mode in ("soft", "hard"):
        stitch.mode = mode
        assert torch.equal(stitch.matrix().detach(), torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64).diag())
        torch.testing.assert_close(stitch(x), x @ stitch.matrix())
    assert stitch.regularization() == 0
    assert stitch.undecayed_parameters() == []
    trivial = GroupMap(Port(3, 3, group=replace(INTERTWINER_GROUPS["gelu"], permutations=False)))
    assert not list(trivial.parameters())
    assert torch.equal(trivial.matrix(), torch.eye(3))


def test_the_hard_map_is_the_nearest_permutation_with_its_scales():
    stitch = GroupMap(RELU).double()
    with torch.no_grad():
        stitch.scale.add_(0.1 * torch.rand(WIDTH))
    stitch.mode = "hard"
    p = nearest_permutation(stitch.weights)
    assert torch.equal(stitch.assignment, p)
    expected = torch.eye(WIDTH, dtype=torch.float64)[p] * stitch.scale
    assert torch.equal(stitch.matrix(), expected)
    assert stitch.sparsity() == pytest.approx(1 - 1 / WIDTH)
    stitch(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
    assert stitch.scale.grad is not None
    assert stitch.weights.grad is None


def shifted(stitch, by):
    """Return the matrix of a cyclic permutation in the map's dtype."""
    return torch.eye(WIDTH, dtype=stitch.weights.dtype).roll(by, 1)


@pytest.mark.parametrize("write", ["data", "copy_", "optimizer", "replace", "dtype"])
def test_the_assignment_is_never_stale(write):
    stitch = GroupMap(RELU)
    with torch.no_grad():
        stitch.weights.copy_(shifted(stitch, 1))
    stitch.mode = "hard"
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(stitch(x), x.roll(-1, 1))
    target = shifted(stitch, 2)
    if write == "data":
        stitch.weights.data.copy_(target)
    elif write == "copy_":
        with torch.no_grad():
            stitch.weights.copy_(target)
    elif write == "optimizer":
        stitch.weights.grad = stitch.weights.detach() - target
        torch.optim.SGD([stitch.weights], lr=1.0).step()
    elif write == "replace":
        stitch.weights = nn.Parameter(target)
    else:
        stitch.double().weights.data.copy_(target)
        x = x.double()
    torch.testing.assert_close(stitch(x), x.roll(-2, 1))
    torch.testing.assert_close(stitch.matrix().detach(), shifted(stitch, 2))


def test_a_stale_assignment_in_a_checkpoint_is_recomputed():
    trained, stitch = GroupMap(RELU), GroupMap(RELU)
    with torch.no_grad():
        trained.weights.copy_(shifted(trained, 2))
        stitch.weights.copy_(shifted(stitch, 2))
    stitch.mode = "hard"
    expected = stitch.assignment.clone()
    state = trained.state_dict()  # never rounded: the assignment in it is where it started
    assert not torch.equal(state["assignment"], expected)
    stitch.load_state_dict(state)  # the weights are what they were
    assert torch.equal(stitch.assignment, expected)
    stitch.mode = "soft"
    stitch.load_state_dict(state)
    stitch.mode = "hard"
    assert torch.equal(stitch.assignment, expected)


# ---- SoftSort


def test_soft_sort():
    stitch = SoftSortMap(RELU).double()
    assert stitch.tau == 1 / WIDTH
    assert SoftSortMap(RELU, tau=0.3).tau == 0.3
    assert (stitch.scores.abs() <= 1).all()
    rows = stitch.matrix().sum(1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    soft = stitch.matrix().argmax(1)
    with torch.no_grad():
        stitch.log_scale.normal_()
    stitch.mode = "hard"
    hard = stitch.matrix()
    assert torch.equal(hard.argmax(1), soft)
    assert (hard != 0).sum() == WIDTH
    torch.testing.assert_close(hard.sum(0), stitch.log_scale.exp())
    with torch.no_grad():
        stitch.scores.zero_()  # ties: still a permutation
    torch.testing.assert_close(stitch.matrix(), stitch.log_scale.exp().diag())
    assert SoftSortMap(GELU).log_scale is None


# ---- what is refused

ALL_MATRICES = Port(3, 3, group=INTERTWINER_GROUPS["identity"])
NO_PERMUTATIONS = Port(3, 3, group=replace(INTERTWINER_GROUPS["gelu"], permutations=False))


@pytest.mark.parametrize(
    "refusal",
    [
        refused(GroupMap, ALL_MATRICES, says="all invertible matrices; use FullMap"),
        refused(AssignmentMap, ALL_MATRICES, says="all invertible matrices; use LeastSquaresMap"),
        refused(SoftSortMap, ALL_MATRICES, says="all invertible matrices; use FullMap"),
        refused(SoftSortMap, NO_PERMUTATIONS, says="needs a port with permutations; use"),
        refused(SoftSortMap, RELU, 0, says="tau of SoftSortMap must be a number > 0, got 0"),
        refused(GroupMap, RELU, projection="euclid"),
        refused(GroupMap, RELU, alpha=math.nan),
    ],
)
def test_what_group_maps_refuse(refusal):
    refusal()


def test_weights_that_are_not_finite_are_not_rounded():
    stitch = GroupMap(RELU)
    with torch.no_grad():
        stitch.weights.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        stitch.mode = "hard"
