"""Objectives, rounding and pruning refuse arguments that they cannot mean, in one sentence."""

import pytest
import torch
from torch import nn

from lightning_sym.orbit import (
    OBJECTIVES,
    awq,
    minimize_on_orbit,
    objective_named,
    prune_by_magnitude,
    prune_by_wanda,
    quantization_error,
    round_by_gptq,
    round_to_nearest,
    smooth_quant,
)
from lightning_sym.symmetry import trace_symmetry

LAYER = nn.Linear(4, 3)
RELU = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
SYMMETRY = trace_symmetry(RELU, torch.ones(2, 4).double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantization_error(1), "bits must be an integer >= 2, got 1"),
        (lambda: quantization_error(2.5), "bits must be an integer >= 2, got 2.5"),
        (lambda: quantization_error(4, "row"), 'granularity must be "tensor" or "channel"'),
        (lambda: quantization_error(4, activations=1), "activations must be an integer >= 2"),
        (lambda: quantization_error(kind="weights"), 'kind must be "output" or "range"'),
        (lambda: quantization_error(activations=8, kind="range"), "leave activations out"),
        (lambda: objective_named("sparsity", fraction=1.0), r"fraction must be a number in \[0, 1\), got 1.0"),
        (lambda: objective_named("sparsity", fraction=-0.1), r"fraction must be a number in \[0, 1\), got -0.1"),
        (lambda: objective_named("sparsity", kind="l2"), 'kind must be "output" or "l1"'),
        (lambda: objective_named("weight_norm", p=0), "p must be a number > 0, got 0"),
        (lambda: objective_named("weight_nrm"), "Did you mean 'weight_norm'"),
        (lambda: objective_named("sparsity", fracton=0.5), "Did you mean 'fraction'"),
        (lambda: objective_named("gradient_norm", loss="crossentropy"), "Did you mean 'cross_entropy'"),
        (lambda: objective_named("sharpness", kind="largest"), 'kind must be "trace" or "top"'),
        (lambda: objective_named("sharpness", kind="top", probes=3), "leave these out"),
        (lambda: objective_named("sharpness", probes=0), "probes must be an integer >= 1"),
        (lambda: round_to_nearest(LAYER, 1), "bits must be an integer >= 2, got 1"),
        (lambda: round_to_nearest(LAYER, 4, "row"), "granularity"),
        (lambda: round_by_gptq(LAYER, 1, data=torch.ones(2, 4)), "bits must be an integer >= 2, got 1"),
        (lambda: round_by_gptq(LAYER, 4, "row", data=torch.ones(2, 4)), "granularity"),
        (lambda: round_by_gptq(LAYER, 4, data=None), "data are missing"),
        (lambda: prune_by_wanda(LAYER, torch.ones(2, 4), 0.5, keep=["bias"]), "matrix to keep 'bias'"),
        (lambda: prune_by_magnitude(LAYER, 0.5, keep=["wieght"]), "Did you mean 'weight'"),
        (lambda: round_to_nearest(LAYER, 4, activations=8, data=[]), "data hold no batch"),
        (lambda: prune_by_magnitude(LAYER, 1.0), "fraction"),
        (lambda: prune_by_magnitude(LAYER, 0.5, scope="layer"), 'scope must be "tensor" or "global"'),
        (lambda: prune_by_wanda(LAYER, torch.randn(2, 4), 1.5), "fraction"),
        (lambda: prune_by_wanda(LAYER, None, 0.5), "data are missing"),
        (lambda: prune_by_wanda(LAYER, [], 0.5), "data hold no batch"),
        *(
            (lambda use=use, data=data: use(data), message)
            for data, message in {
                torch.full((2, 4), torch.nan): "inputs of a linear map of the network are not finite on the data",
                torch.full((2, 4), torch.inf): "inputs of a linear map of the network are not finite on the data",
                torch.ones(0, 4): "data hold a batch without samples",
                torch.ones(2, 3): "the network does not run on inputs float",
            }.items()
            for use in (
                lambda data: round_by_gptq(LAYER, 4, data=data),
                lambda data: round_to_nearest(LAYER, 4, activations=4, data=data),
                lambda data: prune_by_wanda(LAYER, data, 0.5),
                lambda data: awq(SYMMETRY, RELU, data),
                lambda data: smooth_quant(SYMMETRY, RELU, data),
            )
        ),
        (lambda: round_by_gptq(RELU, 4, data=torch.full((2, 4), 1e200, dtype=torch.double)), "exceed float64"),
        *(
            (
                lambda own=own: minimize_on_orbit(SYMMETRY, RELU, own, data=(torch.ones(2, 4), torch.tensor([0, 5]))),
                "loss cannot be computed",
            )
            for own in (objective_named("gradient_norm"), objective_named("sharpness"))
        ),
        (lambda: prune_by_wanda(LAYER, [torch.ones(5, 4), torch.arange(5)], 0.5), r"pass a tuple, data=\(inputs"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_objectives_on_data_ask_for_these():
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 4).double())
    for name in ("gradient_norm", "sharpness", "quantization_error", "sparsity", "path_norm"):
        with pytest.raises(ValueError, match="needs data"):
            minimize_on_orbit(symmetry, network, objective_named(name))
    for name in ("gradient_norm", "sharpness"):
        with pytest.raises(ValueError, match="no targets"):
            minimize_on_orbit(symmetry, network, objective_named(name), data=torch.randn(2, 4).double())
    with pytest.raises(ValueError, match="alpha must be a number in"):
        smooth_quant(symmetry, network, torch.randn(2, 4), alpha=2)
    with pytest.raises(ValueError, match="data are missing"):
        smooth_quant(symmetry, network, None)


def test_path_norms_refuse_networks_that_are_not_of_relu():
    for between in (nn.Tanh(), nn.LayerNorm(3), nn.BatchNorm1d(3)):
        network = nn.Sequential(nn.Linear(4, 3), between, nn.Linear(3, 2)).double()
        symmetry = trace_symmetry(network, torch.randn(2, 4).double())
        with pytest.raises(ValueError, match="path norms are of linear maps and ReLU"):
            minimize_on_orbit(symmetry, network, objective_named("path_norm"), data=torch.randn(2, 4).double())


def test_every_objective_is_built_from_its_defaults():
    for name, build in OBJECTIVES.items():
        assert type(build()) is type(objective_named(name))


@pytest.mark.parametrize("targets", [torch.arange(5), torch.rand(5).double(), torch.arange(5)[:, None]])
def test_inputs_and_targets_in_a_list_are_no_batches(targets):
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    inputs = torch.randn(5, 4).double()
    symmetry = trace_symmetry(network, inputs)
    for objective in (quantization_error(3), objective_named("path_norm"), objective_named("sharpness")):
        with pytest.raises(ValueError, match=r"pass a tuple, data=\(inputs, targets\)"):
            minimize_on_orbit(symmetry, network, objective, data=[inputs, targets], max_steps=0)
    for data in ((inputs, targets), [inputs, 2 * inputs], [inputs, inputs[:1]]):
        minimize_on_orbit(symmetry, network, quantization_error(3), data=data, max_steps=0)


def test_batches_of_tokens_are_batches():
    tokens = torch.arange(10).view(5, 2) % 7
    network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    assert round_by_gptq(network, 3, data=[tokens, tokens.flip(0)])[1].weight.unique().numel() <= 7


def test_data_are_converted_to_the_precision_of_the_network():
    inputs = torch.randn(9, 4)
    for use in (
        lambda data: round_by_gptq(RELU, 3, data=data),
        lambda data: round_to_nearest(RELU, 3, activations=3, data=data),
        lambda data: prune_by_wanda(RELU, data, 0.5),
    ):
        pairs = zip(use(inputs).parameters(), use(inputs.double()).parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
