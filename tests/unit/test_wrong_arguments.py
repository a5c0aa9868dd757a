"""Ordinary mistakes of functions that take any network and any data: a state dict, a data set, a network of tuples."""

import math
import pickle

import pytest
import torch
from helpers import assert_refused
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_sym._checks import UnfitInputsError
from lightning_sym.connectivity import CurveNetwork, average, barrier, curve_geometry, interpolate
from lightning_sym.connectivity.curves import Curve
from lightning_sym.curvature import (
    CurvatureOperator,
    Evidence,
    GaussianPrior,
    MatrixOperator,
    factors,
    input_jacobians,
    jacobian_rank,
    parameter_groups,
)
from lightning_sym.ensembles import log_probabilities
from lightning_sym.landscape import learning_coefficient, removable_units, surfaces, weight_vector
from lightning_sym.layers import EquivariantLinear
from lightning_sym.merging import Adapter, MergeConfig, merge_adapters, merge_tensors
from lightning_sym.networks import recalibrate_batch_norm
from lightning_sym.orbit import cross_layer_equalization, prune_by_magnitude
from lightning_sym.similarity import CKA, GroupProcrustes, SimilarityMatrix, features_of
from lightning_sym.stitching import FullMap, sinkhorn
from lightning_sym.symmetry import (
    activation_matching,
    local_dimension,
    parameter_distance,
    trace_symmetry,
    weight_matching,
)

X, Y = torch.randn(8, 3), torch.arange(8) % 2


class Tuples(nn.Sequential):
    def forward(self, x):
        return (super().forward(x),)


def coefficient(network, data):
    return learning_coefficient(network, data, chains=3, steps=8)


def geometry(network, data):
    return curve_geometry(Curve(torch.randn(2, 26 if isinstance(network, Tuples) else 8)), network, data, points=2)


ON_DATA = [
    lambda network, data: barrier(network, network, data),
    lambda network, data: CurvatureOperator(network, data, F.cross_entropy),
    lambda network, data: log_probabilities([network], data),
    lambda network, data: recalibrate_batch_norm(nn.Sequential(nn.BatchNorm1d(3), network), data),
    coefficient,
    factors,
    geometry,
]
ON_INPUTS = [
    input_jacobians,
    jacobian_rank,
    lambda network, x: features_of(network, [""], x),
    lambda network, x: removable_units(network, x[:2]),
    lambda network, x: surfaces(network, x)(weight_vector(network)),
]


@pytest.mark.parametrize("call", [*(lambda n, f=f: f(n, [(X, Y)]) for f in ON_DATA if f is not ON_DATA[3]),
                                  *(lambda n, f=f: f(n, X) for f in ON_INPUTS),
                                  GaussianPrior, weight_vector, lambda n: average([n, n])])  # fmt: skip
@pytest.mark.parametrize("network", [{}, nn.Linear], ids=["state dict", "class"])
def test_what_is_no_network_is_refused(call, network):
    with pytest.raises(TypeError, match=r"must be of type (\w+\[)?Module\]?, got (list of )?(dict|the class Linear)"):
        call(network)


@pytest.mark.parametrize("call", ON_DATA)
def test_a_data_set_is_no_list_of_batches(call):
    with pytest.raises(ValueError, match=r"TensorDataset\.$"):
        call(nn.Linear(3, 2), TensorDataset(X, Y))


def test_a_data_set_and_a_tensor_are_no_activations():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry = trace_symmetry(network, X)
    for data in (TensorDataset(X, Y), X):
        assert_refused(
            activation_matching, symmetry, network, network, data, says="must be a list or loader of batches"
        )


@pytest.mark.parametrize("call", [*(lambda n, f=f: f(n, [(X, Y)]) for f in ON_DATA if f is not ON_DATA[3]),
                                  *(lambda n, f=f: f(n, X) for f in ON_INPUTS if f is not ON_INPUTS[2])])  # fmt: skip
def test_a_network_that_returns_a_tuple_is_refused_in_a_sentence(call):
    with pytest.raises(ValueError, match="tuple"):
        call(Tuples(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


def test_outputs_without_an_axis_of_channels_are_one_number_for_each_input():
    network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    assert torch.equal(input_jacobians(network, X)[:, 0], network[0].weight.expand(8, 3))
    assert jacobian_rank(network, X).rank == 4


@pytest.mark.parametrize("call", [
    lambda network, data: barrier(network, nn.Linear(3, 1), data, loss=F.mse_loss),
    lambda network, data: CurvatureOperator(network, data, F.mse_loss)])  # fmt: skip
def test_targets_of_another_shape_are_not_compared_in_pairs(call):
    assert_refused(call, nn.Linear(3, 1), [(X, torch.randn(8))], says="[8, 1]")


@pytest.mark.parametrize("data", [(X, Y), [(X[:, :2], Y)]], ids=["two batches of inputs", "narrow"])
def test_inputs_that_a_network_does_not_take_are_named(data):
    a, b = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)), nn.Linear(3, 2)
    says = {"says": "does not run on inputs", "error": UnfitInputsError}
    assert_refused(activation_matching, trace_symmetry(a, X), a, a, data, **says)
    assert_refused(features_of, a, "0", *data, **says)
    if isinstance(data, list):
        assert_refused(barrier, b, b, data, **says)
        assert_refused(barrier, b, b, [(X, Y.numpy())], says="inputs and labels, got Tensor, ndarray.")


def test_other_arguments_of_another_kind_are_named():
    a, b = nn.Linear(3, 2), nn.Linear(4, 2)
    assert_refused(average, None, says="networks must be a list of networks, got a NoneType")
    assert_refused(average, [a, a], 0.5, says="of type Sequence[float] | None, got float", error=TypeError)
    assert_refused(merge_tensors, "linear", a.state_dict(), says="tensors must be a list of tensors, got a OrderedDict")
    adapter = Adapter({}, {})
    assert_refused(merge_adapters, adapter, says="adapters must be a list of adapters, got a Adapter")
    assert_refused(merge_adapters, ["folder"], says="Sequence[Adapter], got list of str", error=TypeError)
    assert_refused(adapter.matched, adapter, gauge="free")
    assert_refused(parameter_distance, a, b, says="weight has shape [2, 3] in a, and b has shape [2, 4]")
    assert_refused(weight_matching, a, a, a, says="symmetry of weight_matching must be of type", error=TypeError)
    embedding = nn.Embedding(5, 3)
    assert_refused(trace_symmetry, embedding, torch.tensor([7]), says="ids below its vocabulary size")


def test_arguments_of_another_type_are_named_and_what_a_function_raises_itself_stays():
    a = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry = trace_symmetry(a, X)
    for call, says in [
        (lambda: interpolate(a, a, "half"), "t of interpolate must be of type float, got str"),
        (lambda: local_dimension(a, symmetry), "symmetry of local_dimension must be of type Symmetry, got Sequential"),
        (lambda: symmetry.check(a, X, samples="2"), "samples of Symmetry.check must be of type int, got str"),
        (lambda: CurveNetwork(a, {}), "end of CurveNetwork must be of type Module, got dict"),
        (lambda: Curve.straight([0.0], X[0]), "start of Curve.straight must be of type Tensor, got list"),
        (lambda: GroupProcrustes(nn.ReLU()), "group of GroupProcrustes must be of type ChannelGroup |"),
        (lambda: GroupProcrustes.at(a, "0"), "symmetry of GroupProcrustes.at must be of type Symmetry, got Sequential"),
        (lambda: SimilarityMatrix(CKA(), ["0"]).update(X, X), "first of SimilarityMatrix.update must be of type"),
        (lambda: FullMap(None), "port of FullMap must be of type Port, got NoneType"),
        (lambda: EquivariantLinear(1, 1, "c4"), "action of EquivariantLinear must be of type Tensor |"),
    ]:
        assert_refused(call, says=says, error=TypeError)
    assert_refused(interpolate, a, a, math.nan, says="t must be finite, got nan")
    assert pickle.loads(pickle.dumps(interpolate)) is interpolate

    def fails(outputs, targets):
        raise AttributeError("of the user's loss")

    assert_refused(barrier, a, a, [(X, Y)], loss=fails, says="of the user's loss", error=AttributeError)


@pytest.mark.parametrize(("call", "name"), [
    (lambda x: GroupProcrustes("relu").update(x, x), "x of GroupProcrustes.update"),
    (lambda x: sinkhorn(x[:3]), "matrix of sinkhorn"),
    (lambda x: MatrixOperator(x[:3]), "matrix of MatrixOperator"),
    (lambda x: barrier(nn.Linear(3, 2), nn.Linear(3, 2), [(x, Y)]), "data of barrier"),
    (lambda x: jacobian_rank(nn.Linear(3, 2, device=x.device), X), "network of jacobian_rank"),
    (lambda x: merge_tensors("ties", [{"a": x}], base={"a": x}, density=0.5), "tensors of merge_tensors"),
])  # fmt: skip
def test_tensors_without_values_are_named(call, name):
    assert_refused(call, X.to("meta"), says=f"{name} has tensors on the meta device, which hold no values")


def test_numbers_that_are_not_finite_and_networks_of_others_are_refused():
    a = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    symmetry, found = trace_symmetry(a, X), factors(a, [(X, Y)])
    wide = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert_refused(Evidence.of, wide, found, parameter_groups(a), says="'0.weight' has another size in the factors")
    assert_refused(local_dimension, symmetry, a, X * math.nan, says="The Jacobian is not finite")
    assert_refused(local_dimension, symmetry, a, X[:, :2], says="does not run on inputs", error=UnfitInputsError)
    assert_refused(jacobian_rank, a.requires_grad_(False), X, says="no trainable parameters")
    nn.init.constant_(a[0].weight, math.nan)
    for call in (lambda: average([a, a]), lambda: prune_by_magnitude(a, 0.5), lambda: input_jacobians(a, X),
                 lambda: cross_layer_equalization(symmetry, a)):  # fmt: skip
        assert_refused(call, says="not finite")
    assert_refused(MergeConfig.read, "missing.yml", says="there is no file missing.yml", error=FileNotFoundError)
