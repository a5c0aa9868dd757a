"""What the landscape refuses: one line for each call, with the words that name the argument."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import assert_refused
from torch import nn
from two_unit_class import optimal_path

from lightning_sym.landscape import (
    FunctionScale,
    Grid,
    LossSurface,
    TwoUnitClass,
    WeightPlane,
    betti_numbers,
    components,
    describe_set,
    evaluate_grid,
    independent,
    joining_levels,
    orbit_distances,
    resolution,
    sample_sgld,
    surfaces,
    umap_embedding,
    volume_exponent,
    walk_level_set,
    weight_tensors,
)
from lightning_sym.landscape.two_unit import Moments, slopes, target_slopes
from lightning_sym.networks import MultiLayerPerceptron

NAN, INF = math.nan, math.inf
SAME_SIGN, MIXED = (0.86, 0.0), (0.56, 0.3)
TWO = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False).double()
nn.utils.vector_to_parameters(torch.tensor([0.8, -0.6, 0.7, 0.5]).double(), TWO.parameters())
LINE = torch.linspace(-2, 2, 21).double()[:, None, None, None]
SPACE = WeightPlane.through(torch.cat([torch.zeros(1, 4), torch.eye(4)[:3]]).double())
PLANE = WeightPlane.through(SPACE.points[:3])
RINGS = (np.hypot(np.linspace(-1, 1, 41)[:, None], np.linspace(-1, 1, 41)) - 0.5) ** 2
AROUND = surfaces(TWO, LINE)(torch.ones(4))
STEPS, UNIT = np.linspace(0, 1, 100), FunctionScale(1.0, 1.0)


def surface(network=TWO, **options):
    return LossSurface(network, **{"inputs": LINE, "targets": LINE.flatten(1), **options})


def line_of(weight):
    network = copy.deepcopy(TWO)
    nn.utils.vector_to_parameters(torch.full((4,), weight).double(), network.parameters())
    return network


def walk(network=TWO, inputs=LINE, **options):
    return walk_level_set(network, inputs, **{"steps": 1, "step_size": 0.1, **options})


def chains(network=TWO, **options):
    return sample_sgld(network, LINE, **{"chains": 2, "steps": 5, "burn_in": 0, "inverse_temperature": 1e4, **options})


def embedded(rows=9, width=3, value=0.0, **options):
    return umap_embedding(np.full((rows, 3), value), np.zeros((1, width)), seed=0, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(FunctionScale.of, torch.ones(bad)), r"outputs must have shape \[N, K\]") for bad in (3, (0, 3))),
        (lambda: FunctionScale.of(torch.tensor([[INF]])), "outputs must be finite"),
        (lambda: FunctionScale(-1.0, 0.0), "J0 must be .* got -1"),
        (lambda: resolution(RINGS, 0.0, 0.1), "spacing must be a number > 0"),
        (lambda: resolution(RINGS, 0.1, NAN), "epsilon must be a number > 0"),
        (lambda: volume_exponent(STEPS, 0.5), r"at least 10 of the 100 points below epsilon = 0\.05, but 5 are"),
        (lambda: volume_exponent(STEPS, 0.5, steps=1), "steps must be an integer >= 2"),
        (lambda: volume_exponent(STEPS, 0.5, samples=99), "samples must be an integer >= 100, got 99"),
        (lambda: volume_exponent(STEPS, 0.5, 0.0), "decades must be a number > 0"),
        (lambda: volume_exponent([NAN], 0.5), "must not be NaN"),
        (lambda: components(RINGS), "inside must be bool, got float64"),
        (lambda: components(RINGS < 1, "faces"), "Unknown connectivity 'faces'.*Did you mean 'face'"),
        (lambda: betti_numbers(np.array(True)), "at least one axis"),
        (lambda: joining_levels(RINGS, [(0, 0), (0, 41)]), r"cell \(0, 41\) is not a cell of the grid of shape \[41"),
        (lambda: joining_levels(RINGS, [(-1, 0)]), r"cell \(-1, 0\)"),
        (lambda: joining_levels(np.full(3, NAN), [(0,)]), "must not be NaN"),
        (lambda: describe_set(np.full((3, 3), NAN), 0.1, 0.1, UNIT), "at least one J and no NaN"),
        (lambda: Grid(0, 5, 1.0), "dimension of a grid must be an integer >= 1"),
        *((partial(Grid, 2, bad, 1.0), "points of a grid must be an integer >= 2") for bad in (1, 5.0)),
        *((partial(Grid, 2, 5, bad), "bound of a grid") for bad in (0.0, (1.0, 2.0), NAN)),
        (lambda: Grid(2, 5, 1.0).coefficients(3, 26), "0 <= start <= stop <= 25, got 3 and 26"),
        (lambda: Grid(3, 6, 1.0).index_of(torch.zeros(2)), r"must have shape \[..., 3\]"),
        (lambda: evaluate_grid(AROUND, PLANE, Grid(3, 4, 1.0)), "3 axes and the plane 2"),
        (lambda: AROUND.on(PLANE, torch.zeros(5, 3)), r"coefficients must be a floating tensor \[G, 2\], got"),
        (lambda: AROUND.on(WeightPlane.through(torch.eye(3)), torch.zeros(5, 2)), "space of 3 weights,"),
        (lambda: AROUND.at(torch.zeros(5, 4).long()), r"vectors must be a floating tensor \[G, 4\],"),
        (lambda: surface(method="afine"), "Did you mean 'affine'"),
        (lambda: surface(nn.Linear(1, 1), targets=LINE, method="closed_form"), "needs a MultiLayerPerceptron"),
        (lambda: surface(loss="mse"), "loss must be 'squared_distance' or a function"),
        (lambda: surface(loss=lambda o, t: o.sum()), r"loss must return the loss of each input, \[G, N\]"),
        (lambda: surface(loss=lambda o, t: o @ o), r"loss must return the loss of each input, \[G, N\].*got an error"),
        (lambda: surface(chunk=0), "chunk must be an integer >= 1"),
        (lambda: surface(dtype=torch.long), "dtype must be a floating dtype"),
        (lambda: surface(nn.Linear(1, 1)), r"shape of the outputs, \[21, 1, 1, 1\]"),
        (lambda: surface(targets=torch.zeros(21, 2)), r"shape of the outputs, \[21, 1\]"),
        (lambda: surface(targets=torch.zeros(3, 1)), "21 inputs and 3 targets"),
        (lambda: surface(inputs=LINE[:0]), "at least one input"),
        (lambda: surface(inputs=LINE * NAN), "inputs holds numbers that are not finite"),
        (lambda: WeightPlane.through(torch.eye(4)[:, :2]), "4 points need 3 dimensions, .* has only 2 parameters"),
        *((partial(WeightPlane.through, torch.ones(bad)), "at least two weight vectors") for bad in ((1, 4), 4)),
        (lambda: WeightPlane.through(torch.ones(3, 4).long()), "floating"),
        (lambda: WeightPlane.through(torch.tensor([[1.0, 2.0], [INF, 0.0]])), "Point 1 has weights that are not"),
        (lambda: WeightPlane.through(torch.eye(4)[:3], tolerance=0), "tolerance must be in"),
        *(
            (partial(of, torch.zeros(5, 3)), r"must have shape \[..., 4\]")
            for of in (PLANE.coordinates, PLANE.residual)
        ),
        (lambda: PLANE.weights(torch.zeros(5, 3)), r"must have shape \[..., 2\]"),
        (lambda: independent(torch.zeros(3)), "floating tensor of shape"),
        (lambda: weight_tensors(TWO, torch.zeros(3)), r"vectors must have shape \[..., 4\]"),
        (lambda: orbit_distances(TWO, torch.zeros(2, 3), torch.zeros(4), LINE), "must have 4 entries"),
        (lambda: orbit_distances(TWO, torch.full((2, 4), NAN), torch.zeros(4), LINE), "not finite"),
        (lambda: walk(network=line_of(NAN)), "the walk cannot begin: J is nan"),
        (lambda: walk(direction=torch.tensor([0.7, 0.0, 0.8, 0.0])), "no part along the class"),
        (lambda: walk(direction=torch.ones(3)), "direction must have shape"),
        (lambda: walk(direction="randon"), "Unknown direction 'randon'"),
        (lambda: walk(inputs=LINE[:0]), "at least one input"),
        *((partial(walk, **{name: 0}), f"{name} must be") for name in ("steps", "step_size", "tolerance")),
        (lambda: chains(chains=0), "chains must be"),
        (lambda: chains(inverse_temperature=-1.0), "inverse_temperature must be"),
        (lambda: chains(step=0.0), "step must be a number > 0"),
        (lambda: chains(network=line_of(0.0)), "no curvature at the start"),  # both units dead
        (lambda: embedded(width=2), r"shapes \[k, m\] and \[q, m\], got \[9, 3\] and \[1, 2\]"),
        (lambda: embedded(value=NAN), "must be finite"),
        (lambda: embedded(rows=2), "at least 4 points, got 3"),
        (lambda: embedded(most=0), "most must be an integer >= 1"),
        *((partial(Moments.of, torch.tensor(bad)), "inputs of both signs") for bad in ([1.0] * 4, [1.0, -1.0, NAN])),
        (lambda: slopes(torch.zeros(3)), "as many output weights"),
        *((partial(of, bad), "finite slopes") for of, bad in ((target_slopes, [0.1] * 3), (TwoUnitClass, (NAN, 1.0)))),
        (lambda: TwoUnitClass(torch.ones(6)), "6 numbers"),
        (lambda: optimal_path(TwoUnitClass(SAME_SIGN)), "only mixed classes"),
        (lambda: optimal_path(TwoUnitClass(MIXED), start=torch.ones(4)), "start must be a member"),
        (lambda: TwoUnitClass(MIXED).quadric(SPACE), "same-sign classes"),
        (lambda: TwoUnitClass(SAME_SIGN).quadric(PLANE), r"dimension 3 in R\^4"),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_walks_and_chains_that_fail_on_the_way_say_why():
    with pytest.raises(RuntimeError, match="full rank 3, so the class is a point"):
        walk_level_set(nn.Linear(3, 1, bias=False), torch.randn(9, 3), steps=1, step_size=0.1)
    with pytest.raises(RuntimeError, match="could not be corrected"):
        walk(tolerance=1e-300, inputs=LINE.abs().sqrt() * LINE.sign() / 3)  # rounding keeps J above 1e-300
    assert_refused(chains, steps=500, step=1.0, says="left the finite numbers at step", error=FloatingPointError)
