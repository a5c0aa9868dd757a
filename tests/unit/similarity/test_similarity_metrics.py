"""Similarity metrics as metrics: refusals, values that do not exist, precision, copies, and matrices of layers."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from helpers import assert_refused, measured, refused
from torch import nn
from torchmetrics import MeanSquaredError

from lightning_sym import _distributed
from lightning_sym._distributed import wide_device
from lightning_sym.similarity import (
    CKA,
    GroupProcrustes,
    OrthogonalProcrustes,
    SimilarityMatrix,
    features_of,
    gram,
)
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.group.channels import ChannelGroup

torch.set_num_threads(1)
EXACT = 1e-10
METRICS = {
    "relu": partial(GroupProcrustes, "relu"),
    "tanh live": partial(GroupProcrustes, "tanh", live=True, center=True),
    "identity": partial(GroupProcrustes, "identity"),
    "orthogonal": OrthogonalProcrustes,
    "linear": CKA,
    "max biased": partial(CKA, "max", estimator="biased"),
    "laplace": partial(CKA, "laplace"),
    "minibatch": partial(CKA, estimator="minibatch"),
}


def features(*channels, n=12, side=2, seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(n, c, side, side, generator=source, dtype=torch.float64).relu() for c in channels]


X, Y = features(4, 3)
SAME = features(4)[0][:1].expand(12, -1, -1, -1) + 0.1
NETWORK = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
SYMMETRY = trace_symmetry(NETWORK, torch.randn(2, 5))


# ---- refusals


@pytest.mark.parametrize(
    "refusal",
    [
        refused(GroupProcrustes, "rellu", says="rellu"),
        refused(GroupProcrustes.at, SYMMETRY, "7", says="7"),
        refused(CKA, kernel="rbf"),
        refused(gram, X.flatten(2), "rbf", says="Unknown kernel 'rbf'"),
        refused(gram, X.flatten(2), "laplace", -1.0, says="bandwidth must be a number > 0"),
        refused(gram, X.flatten(2) * math.nan, "linear", says="floating and finite"),
        refused(gram, X.flatten(1), "linear", says="of shape [N, C, positions]"),
        refused(CKA, estimator="best"),
        refused(CKA, normalize="batch"),
        refused(CKA, bandwidth=0.0),
        refused(CKA, bandwidth=math.nan),
        refused(CKA, "max", estimator="minibatch", says='normalize="none"'),
        refused(SimilarityMatrix, CKA(), [], says="no layers"),
        refused(SimilarityMatrix, [[CKA()], [CKA()]], ["a", "b"], says="2 rows of 2"),
        refused(SimilarityMatrix(CKA(), ["a", "b"]).update, {"a": X}, {"a": X, "b": X}, says="b"),
        refused(features_of, NETWORK, ["3"], torch.rand(2, 5), says="3"),
        refused(features_of, NETWORK, ["1-2"], torch.rand(2, 5), says="1-2"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(refusal):
    refusal()


@pytest.mark.parametrize("name", METRICS)
def test_features_that_do_not_fit_are_refused(name):
    metric = METRICS[name]()
    for x, y, says, error in [
        (X, Y[:5], ("12", "5"), ValueError),
        (X.long(), Y, "int64", TypeError),
        (X, torch.where(Y > 1, math.nan, Y), "finite", ValueError),
        (X, Y / 0, "finite", ValueError),
        (X[:, 0, 0, 0], Y, "samples", ValueError),
    ]:
        assert_refused(metric.update, x, y, says=says, error=error)
    assert float(measured(metric, X, Y)) == float(measured(METRICS[name](), X, Y)), "a refusal leaves no trace"


@pytest.mark.parametrize("name", METRICS)
def test_another_number_of_channels_is_refused_when_it_comes(name):
    metric = METRICS[name]()
    metric.update(X, Y)
    assert_refused(metric.update, X, X, says=("3", "4"))


@pytest.mark.parametrize(
    ("metric", "x", "y", "says"),
    [
        (GroupProcrustes("relu"), X, features(3, side=3)[0], "grids"),
        (GroupProcrustes(ChannelGroup.orthogonal(5)), X, X, ("4", "5")),
        (GroupProcrustes(SYMMETRY.channels("1"), SYMMETRY.channels("2")), X.new_ones(4, 8), X.new_ones(4, 3), "kinds"),
    ],
)
def test_groups_and_grids_that_do_not_fit_are_refused(metric, x, y, says):
    assert_refused(measured, metric, x, y, says=says)


# ---- values that do not exist


@pytest.mark.parametrize(
    ("metric", "x", "y", "reason"),
    [
        (GroupProcrustes("relu", live=True), 0 * X, 0 * Y, "all channels of both networks are zero"),
        (GroupProcrustes("tanh", live=True, center=True), 0 * X + 2, 0 * Y + 1, "all channels of both"),
        (CKA(), X[:3], Y[:3], "needs 4 samples, got 3"),
        (CKA(estimator="biased"), X[:1], Y[:1], "needs 2 samples, got 1"),
        (CKA(estimator="minibatch"), X[:3], Y[:3], "4 samples"),
        (CKA(), X, 0 * Y + 0.1, "y.*same for all inputs"),
        (CKA(estimator="biased"), 0 * X + 0.1, Y, "x.*same for all inputs"),
        # Different positions, the same for each input: what is left of them in U-centred kernels is rounding.
        (CKA(), SAME, Y, "x.*same for all inputs"),
        (CKA(estimator="biased"), SAME, Y, "x.*same for all inputs"),
        (CKA("max"), SAME, Y, "x.*same for all inputs"),
        (CKA("laplace"), SAME, Y, "x.*same for all inputs"),
        (CKA(estimator="minibatch"), SAME, Y, "x.*same for all inputs"),
        # More samples than features, of which no kernel is made.
        (CKA(), X.repeat(4, 1, 1, 1), 0 * Y.repeat(4, 1, 1, 1) + 0.1, "y.*same for all inputs"),
        (CKA(estimator="biased"), SAME.float().repeat(4, 1, 1, 1), Y.repeat(4, 1, 1, 1), "x.*same for all inputs"),
        # What differs is the rounding of other batches.
        (CKA(), (SAME * (1 + 1e-7 * X)).float(), Y.float(), "x.*same for all inputs"),
        (CKA("laplace"), X, 0 * Y, "y.*same for all inputs"),
        (CKA(estimator="minibatch"), 0 * X, Y, "x.*same for all inputs"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:all channels of [xy] are zero")  # which comes before, of each network
def test_a_value_that_does_not_exist_is_nan_and_says_why(metric, x, y, reason):
    with pytest.warns(UserWarning, match=reason):
        assert measured(metric, x, y).isnan()
    assert measured(metric, X, Y).isfinite()  # and is forgotten


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")  # torchmetrics' own
def test_no_data_give_nan_and_say_so(name):
    with pytest.warns(UserWarning, match="no similarity: .*(no features were given|samples)"):
        assert METRICS[name]().compute().isnan()


@pytest.mark.parametrize(("metric", "x", "value"), [
    (GroupProcrustes("relu"), 0 * X, 1.0), (GroupProcrustes("relu"), X, 0.5),
    (GroupProcrustes("relu", live=True), X, 0.0),
])  # fmt: skip
def test_dead_networks_have_the_value_of_the_formula_and_their_counts(metric, x, value):
    """With y = 0, d^2 = L_X: 1 - d / (2 sqrt C) is 1 or 1/2, and 1 - d / (sqrt L_X + sqrt L_Y) is 0."""
    with pytest.warns(UserWarning, match="all channels of (x and of )?y are zero") as caught:
        assert float(measured(metric, x, 0 * X)) == pytest.approx(value, abs=EXACT)
    assert len(caught) == 1
    assert metric.live_channels == (int(x.any()) * 4, 0)


@pytest.mark.parametrize("offset", [1e2, 1e4])
@pytest.mark.parametrize("name", ["relu", "identity", "orthogonal", "linear"])
def test_large_means_cost_centred_measures_few_digits(name, offset):
    x, y = torch.randn(2, 200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    metric = {
        "linear": CKA,
        "orthogonal": lambda: OrthogonalProcrustes(center=True),
    }.get(name, lambda: GroupProcrustes(name, center=True))()
    value = float(measured(metric, x, y))
    assert float(measured(metric, x + offset, y)) == pytest.approx(value, abs=EXACT)
    assert float(measured(metric, x + offset, x + offset)) == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("estimator", ["unbiased", "biased", "minibatch"])
@pytest.mark.parametrize("n", [20, 100])  # fewer and more than there are features
def test_means_of_positions_cost_linear_cka_few_digits_in_single_precision(estimator, n):
    (x, y), means = features(6, 4, n=n, side=3), 100 * features(6, side=3, seed=1)[0][:1]
    value = float(measured(CKA(estimator=estimator), x, y))
    assert float(measured(CKA(estimator=estimator), (x + means).float(), y.float())) == pytest.approx(value, abs=1e-5)


# ---- precision and devices' types


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 5e-3)])
def test_lower_precisions_are_near_double(name, dtype, tolerance):
    x, y = (each.to(dtype) for each in features(6, 4, n=40))
    value = measured(METRICS[name](), x, y)
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(float(measured(METRICS[name](), x.double(), y.double())), abs=tolerance)


@pytest.mark.parametrize("name", METRICS)
def test_states_stay_on_the_cpu_where_a_device_has_no_float64(name, monkeypatch):
    """Which is MPS; the meta device stands for it, whose numbers cannot be read."""
    assert wide_device(torch.device("mps")) == torch.device("cpu")
    wide = _distributed.wide
    monkeypatch.setattr(_distributed, "wide", lambda device: torch.float32 if device.type == "meta" else wide(device))
    metric = SimilarityMatrix(METRICS[name](), ["a"]).to("meta")
    metric.update({"a": X}, {"a": Y})
    assert float(metric.compute()) == pytest.approx(float(measured(METRICS[name](), X, Y)), abs=EXACT)


# ---- as a metric


@pytest.mark.parametrize("name", METRICS)
def test_metrics_accumulate_and_can_be_copied_at_any_time(name):
    halves = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    metric = METRICS[name]()
    expected = float(measured(metric, X, Y, [6]))
    metric.reset()
    assert float(metric(*halves[0])) == pytest.approx(float(measured(METRICS[name](), *halves[0])), abs=EXACT)
    copies = [metric, metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
    for each in copies:
        assert float(each(*halves[1])) == pytest.approx(float(measured(METRICS[name](), *halves[1])), abs=EXACT)
        assert float(each.compute()) == pytest.approx(expected, abs=EXACT)
        assert each.higher_is_better
    metric.reset()
    for half in halves:  # values in between do not end it
        metric.update(*half)
        metric.compute()
    assert float(metric.compute()) == pytest.approx(expected, abs=EXACT)
    metric.reset()
    others = features(2, 5)  # other shapes are fine after a reset
    assert float(measured(metric, *others)) == pytest.approx(float(measured(METRICS[name](), *others)), abs=EXACT)


@pytest.mark.parametrize("name", METRICS)
def test_the_axis_of_the_channels_can_be_another(name):
    metric = METRICS[name](**({"axes": (3, 3)} if isinstance(METRICS[name](), CKA) else {"axis": 3}))
    value = float(measured(metric, X.movedim(1, 3), Y.movedim(1, 3)))
    assert value == pytest.approx(float(measured(METRICS[name](), X, Y)), abs=EXACT)


# ---- matrices of layers


@pytest.mark.parametrize("name", METRICS)
def test_a_matrix_is_the_loop_over_pairs(name):
    first = dict(zip("abc", features(4, 3, 5, seed=1), strict=True))
    second = dict(zip("de", features(2, 6, seed=2), strict=True)) | {"more": X}
    matrix = SimilarityMatrix(METRICS[name](), "abc", "de")
    for _ in range(2):
        for batch in (slice(0, 6), slice(6, 12)):
            matrix.update(*({key: value[batch] for key, value in layers.items()} for layers in (first, second)))
        loop = [[float(measured(METRICS[name](), first[i], second[j], [6])) for j in "de"] for i in "abc"]
        for each in (matrix, pickle.loads(pickle.dumps(matrix))):
            torch.testing.assert_close(each.compute(), torch.tensor(loop, dtype=torch.float64), atol=EXACT, rtol=0)
        matrix.reset()


@pytest.mark.parametrize("name", ["relu", "tanh live", "identity", "orthogonal"])
def test_layers_of_several_grids_and_precisions_are_the_loop_over_pairs(name):
    sizes = [(3, 4), (2, 4), (5, 2), (2, 1), (4, 2)]
    one, two = ([features(c, side=side, seed=7 * i + j)[0] for j, (c, side) in enumerate(sizes)] for i in (0, 1))
    two[1], names = two[1].float(), list("abcde")
    matrix = SimilarityMatrix(METRICS[name](), names)
    for batch in (slice(0, 5), slice(5, 12)):
        matrix.update(*({key: value[batch] for key, value in zip(names, each, strict=True)} for each in (one, two)))
    loop = [[float(measured(METRICS[name](), x, y, [5])) for y in two] for x in one]
    torch.testing.assert_close(matrix.compute(), torch.tensor(loop, dtype=torch.float64), atol=EXACT, rtol=0)


def test_pairs_may_have_metrics_of_their_own_and_others_than_ours():
    layers = {"0": torch.rand(9, 8), "1": torch.rand(9, 8)}
    rows = [[GroupProcrustes.at(SYMMETRY, "1"), CKA()], [OrthogonalProcrustes(), MeanSquaredError()]]
    matrix = SimilarityMatrix(rows, ["0", "1"])
    matrix.update(layers, layers)
    loop = [[float(measured(rows[i][j], layers[str(i)], layers[str(j)])) for j in (0, 1)] for i in (0, 1)]
    torch.testing.assert_close(matrix.compute(), torch.tensor(loop, dtype=torch.float64), atol=1e-6, rtol=0)


# ---- features by name


class Silent(nn.Module):
    """Puts out no tensor."""

    def forward(self, x):
        return x.shape


class Twice(nn.Module):
    """Calls one layer twice, changes its output in place, and puts out a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.pair = nn.Linear(4, 4), nn.Dropout(0.5), nn.LSTM(4, 4)
        self.unused, self.none = nn.Linear(4, 4), Silent()

    def forward(self, x):
        self.none(x)
        y = self.drop(self.layer(x))
        y = self.layer(y).mul_(2)
        return self.pair(y)[0]


def test_features_are_those_of_calls_and_the_network_is_as_it_was():
    network, x = Twice(), torch.rand(3, 4)
    network.layer.eval()
    network.drop.train()
    modes = [module.training for module in network.modules()]
    found = features_of(network, ["layer", "layer-2", "drop"], x)
    assert found.keys() == {"layer", "layer-2", "drop"}
    torch.testing.assert_close(found["layer"], network.layer(x))
    torch.testing.assert_close(found["drop"], found["layer"])  # in evaluation mode
    torch.testing.assert_close(found["layer-2"], network.layer(network.layer(x)))  # before it was doubled
    assert not any(value.requires_grad for value in found.values())
    for wrong in ("layer-3", "unused", "layr", "none"):
        assert_refused(features_of, network, [wrong], x, says=wrong)
    assert [module.training for module in network.modules()] == modes
    assert not any(module._forward_hooks for module in network.modules())
    torch.testing.assert_close(features_of(network, ["pair"], x)["pair"], network.eval()(x))  # of a tuple the first
    taps = SYMMETRY.taps.values()
    torch.testing.assert_close(features_of(NETWORK, taps, torch.ones(2, 5))["2"], NETWORK(torch.ones(2, 5)))


@pytest.mark.parametrize("kernel", ["linear", "max", "laplace"])
@pytest.mark.parametrize(
    ("estimator", "normalize"),
    [("unbiased", "none"), ("unbiased", "channel"), ("biased", "channel"), ("minibatch", "none")],
)
def test_alignments_do_not_depend_on_the_scale_of_the_numbers(kernel, estimator, normalize):
    x, y = torch.randn(2, 40, 5, 2)
    y = x @ torch.tensor([[1.0, 0.5], [-0.5, 1.0]]) + y

    def aligned(one, two):
        metric = CKA(kernel, estimator=estimator, normalize=normalize)
        metric.update(one, two)
        return float(metric.compute())

    expected = aligned(x, y)
    for scale in (1e-30, 1e-12, 1e12, 1e30):
        assert aligned(scale * x, scale * y) == pytest.approx(expected, abs=1e-6), scale
        assert aligned(scale * x, y) == pytest.approx(expected, abs=1e-6), scale
        assert aligned(scale * x.double(), scale * y.double()) == pytest.approx(expected, abs=1e-6), scale
    if normalize == "channel":  # one of the channels alone
        factors = torch.tensor([1.0, 1e-30, 1.0, 1e8, 1.0])[:, None]
        assert aligned(factors * x, y) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("metric", [CKA, OrthogonalProcrustes, lambda: GroupProcrustes("relu")])
def test_features_that_are_none_are_refused(metric):
    for values, says in (
        (np.zeros((5, 3)), "x must be a floating tensor that is dense, got a ndarray"),
        ([1.0], "got a list"),
        (torch.zeros(5, 3).to_sparse(), "sparse_coo"),
        (torch.zeros(5, 3) * 1j, "complex64"),
    ):
        assert_refused(metric().update, values, values, says=says, error=TypeError)
    for shape in ((0, 3), (5, 0), (5, 3, 0)):
        says = f"x must hold at least one sample and one channel, got shape {list(shape)}"
        assert_refused(metric().update, torch.zeros(shape), torch.zeros(shape), says=says)
    huge = 1e80 * torch.randn(9, 3, dtype=torch.float64)
    if metric is CKA:
        aligned = CKA()
        aligned.update(huge, huge)
        assert_refused(aligned.compute, says="are too large for products of their kernels; divide them by that")


@pytest.mark.parametrize("metric", [CKA, OrthogonalProcrustes, lambda: GroupProcrustes("relu")])
def test_similarity_ignores_the_scale_or_refuses_it(metric):
    x, y = torch.randn(2, 60, 4, dtype=torch.float64)

    def aligned(scale):
        compared = metric()
        compared.update(scale * x, scale * y)
        return float(compared.compute())

    for scale in (1e-42, 1e-60, 1e60):
        assert aligned(scale) == pytest.approx(aligned(1.0), abs=1e-9)
    for scale, word in ((1e-200, "small"), (1e200, "large")):
        with pytest.raises(ValueError, match=rf"of up to \de[+-]\d+.* too {word} for .*; divide them by that"):
            aligned(scale)


def test_the_kernel_of_one_sample_is_1():
    assert gram(X[:1].flatten(2), "laplace").tolist() == [[1.0]]
