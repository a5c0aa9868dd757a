"""Families of stitching maps: what all of them promise, the linear ones, names and ports."""

import copy

import pytest
import safetensors.torch
import torch
from helpers import assert_refused, refused
from torch import nn
from torch.func import functional_call

from lightning_sym.stitching import (
    STITCHING_MAPS,
    AssignmentMap,
    FeatureMoments,
    FixedMap,
    FullMap,
    GroupMap,
    IdentityMap,
    LassoMap,
    LeastSquaresMap,
    LowRankMap,
    OrthogonalMap,
    Port,
    ProcrustesMap,
    SoftSortMap,
    StitchingMap,
    stitching_map,
)
from lightning_sym.symmetry import INTERTWINER_GROUPS

NAMES = [
    "full",
    "rank(2)",
    "lasso(0.01)",
    "group",
    "group(euclidean)",
    "softsort",
    "orthogonal",
    "identity",
    "least_squares",
    "assignment",
    "procrustes",
]
TRAINED = NAMES[:7]
FITTED = NAMES[8:]
RECTANGULAR = ["full", "rank(2)", "lasso(0.01)", "least_squares"]
WIDTH = 5
RELU = Port(WIDTH, WIDTH, group=INTERTWINER_GROUPS["relu"])
TANH = Port(WIDTH, WIDTH, group=INTERTWINER_GROUPS["tanh"])
GELU = Port(WIDTH, WIDTH)
MATRIX = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def some_moments(port=RELU):
    moments = FeatureMoments(port.in_channels, port.out_channels)
    moments.update(torch.rand(40, port.in_channels), torch.rand(40, port.out_channels))
    return moments


def made(name, port=RELU, dtype=torch.float64):
    """Return a map that can be used, its parameters off their start."""
    stitch = stitching_map(name)(port).to(dtype)
    if stitch.fitted:
        stitch.init_from_moments(some_moments(port))
    with torch.no_grad():
        for parameter in stitch.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return stitch


def widths(name):
    return [RELU, Port(5, 3), Port(3, 5)] if name in RECTANGULAR else [RELU]


# ---- every family


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_matrix_along_any_axis(name, mode):
    for base in widths(name):
        for shape, axis in [((2, -1), 1), ((2, -1, 4, 3), 1), ((2, -1, 4, 3), -3), ((2, 6, -1), -1), ((2, -1, 6), 1)]:
            port = Port(base.in_channels, base.out_channels, axis=axis, group=INTERTWINER_GROUPS["relu"])
            stitch = made(name, port)
            stitch.mode = mode
            x = torch.randn([port.in_channels if size < 0 else size for size in shape], dtype=torch.float64)
            expected = torch.tensordot(stitch.matrix(), x, dims=([1], [axis])).movedim(0, axis)
            torch.testing.assert_close(stitch(x), expected, rtol=0, atol=1e-12)
            assert stitch.matrix().shape == (port.out_channels, port.in_channels)


@pytest.mark.parametrize("name", NAMES)
def test_the_mode_is_explicit(name):
    stitch = made(name)
    assert stitch.eval().mode == "soft"
    stitch.mode = "hard"
    assert stitch.train().mode == "hard"
    with pytest.raises(ValueError, match="Unknown mode of a stitching map 'eval'; expected one of: soft, hard"):
        stitch.mode = "eval"
    assert stitch.mode == "hard"


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_in_soft_mode(name):
    stitch = made(name)
    names, values = zip(*stitch.named_parameters(), strict=True)
    x = torch.randn(2, WIDTH, 2, 2, dtype=torch.float64, requires_grad=True)

    def call(x, *parameters):
        return functional_call(stitch, dict(zip(names, parameters, strict=True)), (x,))

    leaves = [value.detach().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(call, [x, *leaves])
    stitch.matrix().sum().backward()
    assert all(parameter.grad is not None for parameter in stitch.parameters())


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_and_single_precision(name, mode):
    stitch = made(name, dtype=torch.float32)
    stitch.mode = mode
    x = torch.randn(3, WIDTH, 2, 2)
    exact, matrix = stitch(x), stitch.matrix()
    with torch.autocast("cpu", torch.bfloat16):
        y, half = stitch(x), stitch(x.bfloat16())
        assert torch.equal(stitch.matrix(), matrix), "matrices are not computed in half precision"
        loss = y.float().sum() + half.float().sum() + stitch.regularization()
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)  # bfloat16 has 8 bits
    if loss.requires_grad:
        loss.backward()
    outside = copy.deepcopy(stitch)
    outside.project()
    with torch.autocast("cpu", torch.bfloat16):
        stitch.project()
        stitch.refresh()
    assert all(torch.equal(a, b) for a, b in zip(stitch.parameters(), outside.parameters(), strict=True))


@pytest.mark.parametrize("how", ["safetensors", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_round_trip(name, how, tmp_path):
    stitch = made(name)
    stitch.mode = "hard"
    if how == "safetensors":
        safetensors.torch.save_file(stitch.state_dict(), tmp_path / "state")
        state = safetensors.torch.load_file(tmp_path / "state")
    else:
        torch.save(stitch.state_dict(), tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
    again = stitching_map(name)(RELU).double()
    again.load_state_dict(state)
    for mode in ("soft", "hard"):
        stitch.mode = again.mode = mode
        assert torch.equal(stitch.matrix(), again.matrix())
    assert torch.equal(copy.deepcopy(stitch).matrix(), stitch.matrix())


@pytest.mark.parametrize("name", NAMES)
def test_common_behaviour(name):
    stitch = made(name)
    assert stitch.regularization().shape == ()
    assert stitch.regularization().dtype == torch.float64
    assert 0 <= stitch.sparsity() <= 1
    assert isinstance(stitch.dimension(), int)
    trained = {id(parameter) for parameter in stitch.parameters()}
    assert {id(p) for p in [*stitch.held_parameters(), *stitch.undecayed_parameters()]} <= trained
    assert type(stitch).__name__ in repr(stitch)
    assert all(buffer.device.type == "meta" for buffer in copy.deepcopy(stitch).to("meta").buffers())
    assert_refused(stitch, torch.zeros(2, 4, dtype=torch.float64), says="expects 5 channels along axis 1, got features")
    assert_refused(stitch, torch.zeros(5, dtype=torch.float64), says="expects 5 channels along axis 1")
    assert_refused(stitch.sparsity, -1, says="threshold must be >= 0, got -1")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECTANGULAR])
def test_square_families_say_so(name):
    assert_refused(lambda: stitching_map(name)(Port(5, 3)), says="Map needs equal widths, got 5 channels in and 3 out;")


@pytest.mark.parametrize("name", FITTED)
def test_fitted_maps_must_be_fitted(name):
    stitch = stitching_map(name)(RELU)
    assert stitch.fitted
    assert not list(stitch.parameters())
    for use in (stitch.matrix, stitch.sparsity, lambda: stitch(torch.zeros(2, WIDTH))):
        assert_refused(use, says="is not fitted yet; call init_from_moments", error=RuntimeError)
    fresh = stitching_map(name)(RELU)
    stitch.init_from_moments(some_moments())
    stitch.load_state_dict(fresh.state_dict())
    assert_refused(stitch.matrix, says="is not fitted yet", error=RuntimeError)


def test_a_family_without_a_start_says_so_and_the_identity_needs_none():
    IdentityMap(RELU).init_from_moments(some_moments())
    with pytest.raises(NotImplementedError, match="Doubling cannot start from moments"):
        Doubling(RELU).init_from_moments(some_moments())


# ---- a family of one's own


class Doubling(StitchingMap):
    """One gain for all channels."""

    needs_equal_widths = True

    def __init__(self, port, start=2.0):
        super().__init__(port)
        self.gain = nn.Parameter(torch.tensor(start))

    def matrix(self):
        return self.gain * torch.eye(self.port.in_channels, device=self.gain.device)


def test_a_family_of_ones_own():
    stitch = Doubling(Port(3, 3, axis=-1))
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(stitch(x), 2 * x)
    assert stitch.dimension() == 1
    assert stitch.sparsity() == pytest.approx(2 / 3)
    stitch.project()
    stitch.refresh()
    assert stitch.regularization() == 0
    assert_refused(lambda: Doubling(Port(3, 2)), says="Doubling needs equal widths")


# ---- dimensions


def test_dimensions():
    port, oblong = Port(64, 64, group=INTERTWINER_GROUPS["relu"]), Port(8, 5)
    expected = {
        "full": 64**2,
        "lasso(0.01)": 64**2,
        "rank(1)": 127,
        "rank(2)": 252,
        "rank(4)": 496,
        "group": 64,
        "softsort": 128,
        "orthogonal": 64 * 63 // 2,
        "identity": 0,
        "least_squares": 64**2,
        "assignment": 64,
        "procrustes": 64 * 63 // 2,
    }
    assert {name: stitching_map(name)(port).dimension() for name in expected} == expected
    assert (FullMap(oblong).dimension(), LowRankMap(oblong, 2).dimension()) == (40, 22)
    for still in (Port(8, 8), Port(8, 8, group=INTERTWINER_GROUPS["tanh"])):
        assert GroupMap(still).dimension() == AssignmentMap(still).dimension() == 0
        assert SoftSortMap(still).dimension() == 8
    assert LeastSquaresMap(oblong).dimension() == 40
    assert ProcrustesMap(Port(1, 1)).dimension() == 0


# ---- linear families


def test_the_full_map_starts_as_a_convolution():
    torch.manual_seed(7)
    weight = FullMap(Port(6, 4)).weight
    torch.manual_seed(7)
    assert torch.equal(weight, nn.Conv2d(6, 4, 1, bias=False).weight[:, :, 0, 0])


def test_lasso():
    stitch = LassoMap(Port(2, 2), penalty=0.5)
    with torch.no_grad():
        stitch.weight.copy_(torch.tensor([[1.0, -2.0], [5e-5, -3e-4]]))
    assert stitch.regularization().item() == pytest.approx(0.5 * 3.00035)
    assert torch.equal(stitch.matrix(), stitch.weight)
    stitch.mode = "hard"
    assert torch.equal(stitch.matrix() == 0, torch.tensor([[False, False], [True, False]]))
    assert stitch.sparsity() == 0.5


def test_low_rank_never_forms_the_product(monkeypatch):
    stitch = LowRankMap(Port(6, 4), 2)
    monkeypatch.setattr(stitch, "matrix", None)
    assert stitch(torch.randn(2, 6, 3, 3)).shape == (2, 4, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_orthogonal(dtype):
    eye = torch.eye(WIDTH, dtype=dtype)
    assert torch.equal(OrthogonalMap(RELU).to(dtype).matrix(), eye)
    stitch = made("orthogonal", dtype=dtype)
    stitch.init_from_moments(some_moments())
    with torch.no_grad():
        stitch.skew.normal_()
    matrix = stitch.matrix().detach()
    torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=20 * torch.finfo(dtype).eps)
    assert not torch.allclose(matrix, stitch.base)
    alone = OrthogonalMap(Port(1, 1))
    assert torch.equal(alone(torch.ones(2, 1)), torch.ones(2, 1))


# ---- a matrix that is given


def test_nothing_is_trained_and_the_matrix_is_kept():
    given = MATRIX.clone()
    fixed = FixedMap(Port(3, 2), given)
    given.zero_()
    assert list(fixed.parameters()) == []
    assert fixed.dimension() == 0
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(FixedMap(Port(3, 2, axis=-1), MATRIX)(x), x @ MATRIX.T)
    fixed.project()
    for mode in ("soft", "hard"):
        fixed.mode = mode
        assert torch.equal(fixed.matrix(), MATRIX)
    other = FixedMap(Port(3, 2), torch.ones(2, 3))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(copy.deepcopy(other).double().matrix(), MATRIX.double())


# ---- names and ports


def test_names():
    assert Port(3, 3) == Port(3, 3, axis=1, group=INTERTWINER_GROUPS["gelu"])
    assert type(stitching_map(" group ( euclidean ) ")(RELU)) is GroupMap
    assert stitching_map("group(euclidean)")(RELU).projection == "euclidean"
    assert stitching_map("group")(RELU).projection == "sinkhorn"
    assert (stitching_map("group(1e-3)")(RELU).projection, stitching_map("group(1e-3)")(RELU).alpha) == (
        "sinkhorn",
        1e-3,
    )
    assert stitching_map("group(euclidean)")(RELU).alpha == 0.1
    both = stitching_map("group(euclidean, 0.5)")(RELU)
    assert (both.projection, both.alpha) == ("euclidean", 0.5)
    assert stitching_map("rank(3)")(RELU).rank == 3
    assert stitching_map("lasso(1e-3)")(RELU).penalty == 1e-3
    assert stitching_map("lasso")(RELU).penalty == 0.01
    for name in STITCHING_MAPS:
        if name != "rank":
            assert type(stitching_map(name)(RELU)) is STITCHING_MAPS[name]


@pytest.mark.parametrize(
    "refusal",
    [
        refused(stitching_map, "rank", says="rank needs an integer >= 1, as in rank(1), got 'rank'"),
        *(refused(stitching_map, f"rank({bad})", says="rank needs an integer >= 1") for bad in ("0", "1.5")),
        *(refused(stitching_map, f"lasso({bad})", says="penalty of lasso must be") for bad in ("-1", "much", "")),
        *(
            refused(stitching_map, f"group(euclidean,{bad})", says="alpha of group must be")
            for bad in ("-1", "", "much")
        ),
        *(refused(stitching_map, f"group({bad})", says="alpha of group must be") for bad in ("-1", "nan", "1e400")),
        refused(stitching_map, "group(euclid)", says=("Unknown projection of group 'euclid'", "mean 'euclidean'")),
        *(refused(stitching_map, bad, says=f"Unknown stitching map {bad!r}") for bad in ("", 3)),
        refused(Port, 3, 0, says="out_channels of a port must be an integer >= 1, got 0"),
        refused(Port, 2.0, 3, says="in_channels of a port must be an integer >= 1, got 2.0"),
        refused(Port, 3, 3, axis="1"),
        refused(LassoMap, RELU, -1, says="penalty of LassoMap must be a number >= 0, got -1"),
        *(refused(LowRankMap, Port(6, 4), bad, says="rank of LowRankMap must be") for bad in (0, 5, True, 1.0)),
        *(
            refused(FixedMap, Port(3, 2), bad, says="FixedMap must have finite floating numbers and the")
            for bad in (MATRIX.T, MATRIX.long(), MATRIX / 0, MATRIX[None])
        ),
    ],
)
def test_what_stitching_maps_refuse(refusal):
    refusal()
