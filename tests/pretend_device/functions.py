"""Functions on networks, with the pretend GPU: what they find there has to be what they find on the CPU.

Every case is run with the network and its inputs on either side, and on different ones: inputs go to the network.

``python functions.py [name ...]`` prints a line for each and ends with 1 if one fails.
"""

import functools
import itertools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import device
import installation

if __name__ == "__main__" and not installation.real():
    installation.install()

import torch
from scenarios import explain, prepare, write_zoo
from torch import nn

from lightning_sym import connectivity, curvature, landscape, networks, symmetry
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.ensembles import ensemble_scores, log_probabilities
from lightning_sym.landscape.pruning import mean_loss
from lightning_sym.merging import merge
from lightning_sym.networks import MultiLayerPerceptron, Network
from lightning_sym.population import LoopPopulation, VmapPopulation
from lightning_sym.stitching import CutNetwork, PlantedStitches, StitchedNetwork
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks.losses import CrossEntropy, SquaredDistance
from lightning_sym.zoo import ModelZoo

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Of float32 results that are compared, relative to the largest number of a tensor; what is computed on either side is
# the same up to the order of sums, which a real GPU has of its own.
RELATIVE, ABSOLUTE = (1e-3, 1e-5) if installation.real() else (1e-5, 1e-6)
CASES = {}
DIFFERENCES = {}  # the largest of each case, in tolerances


def case(function):
    CASES[function.__name__] = function
    return function


# ---- networks and data


class Normed(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()),
        )
        self.classifier = nn.Linear(5, 3)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Dropping(Network):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(36, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x.flatten(1)))


def seeded(seed, make):
    torch.manual_seed(seed)
    return make()


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def small():
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))


def perceptron():
    return MultiLayerPerceptron(widths=(6, 5), image_size=6)


class Side:
    """Where networks and inputs are in one run of a case."""

    def __init__(self, network, inputs):
        self.network, self.inputs = network, inputs

    def net(self, make, seed=0):
        return seeded(seed, make).eval().to(self.network)

    @property
    def x(self):
        return seeded(10, lambda: torch.randn(24, 1, 6, 6)).to(self.inputs)

    @property
    def y(self):
        return seeded(11, lambda: torch.randint(3, (24,))).to(self.inputs)

    @property
    def few(self):
        return seeded(12, lambda: torch.randn(40, 2)).to(self.inputs)

    def outputs(self, network):
        return network(self.x.to(self.network))

    def traced(self, network, example=None):
        return trace_symmetry(network, (self.x if example is None else example).to(self.network))


def vectors(network):
    """Return three weight vectors: the network's, and two near it."""
    own = landscape.weight_vector(network).detach().double()
    noise = torch.randn(3, len(own), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return own + torch.tensor([0.0, 1.0, 1.0])[:, None].to(own) * noise.to(own)


# ---- symmetry


@case
def tracing(side):
    found = [trace_symmetry(side.net(make), side.x) for make in (Normed, dense)]
    return [(one.dimension, one.units) for one in found]


@case
def checking(side):
    network = side.net(Normed)
    with mock.patch.object(symmetry.completeness, "MOST_PARAMETERS", 100):
        nullity = side.traced(side.net(small), side.few).nullity
    return [side.traced(network).check(network, side.x) < 1e-10, nullity]


def traced_networks(side):
    """Yield two kinds of networks with their symmetry."""
    for make in (Normed, dense):
        network = side.net(make)
        yield network, side.traced(network)


def pair(side):
    """Return the symmetry of two networks, and the two."""
    a, b = side.net(Normed), side.net(Normed, 1)
    return side.traced(a), a, b


@case
def acting(side):
    found = []
    for network, group in traced_networks(side):
        element = group.sample(torch.Generator().manual_seed(0), scale=0.3)
        group.act_on(element, dict(network.state_dict()))
        nothing = group.compose(group.inverse(element), element)
        found += [side.outputs(group.act(one, network)) for one in (element, nothing)]
        found += list(group.act(element, network).parameters())
    return found


@case
def canonical_forms(side):
    found = []
    for network, group in traced_networks(side):
        symmetry.balance(group, network)
        found += list(symmetry.canonicalize(group, network).network.parameters())
    return found


@case
def matching_by_weights(side):
    group, a, b = pair(side)
    found = [
        symmetry.weight_matching(group, a, b, restarts=2, refine=True),
        symmetry.weight_matching(group, a, b, device=GPU),
        symmetry.weight_matching(group, a, b, device="cpu"),
        symmetry.weight_matching(group, a, b.to(side.inputs)),
    ]
    return [match.distance_after for match in found]


@case
def matching_by_activations(side):
    group, a, b = pair(side)
    moments = symmetry.ActivationMoments(group, a, b)
    moments.update(side.x)
    found = [symmetry.activation_matching(group, a, b, data) for data in (moments, [side.x, (side.x, side.y)])]
    return [match.distance_after for match in found]


@case
def merging(side):
    group, *networks = pair(side)
    merged = [
        merge(group, networks),
        merge(group, networks, align="activations", batches=[(side.x, side.y)]),
    ]
    return [side.outputs(one.network) for one in merged]


@case
def distances_of_orbits(side):
    a, b = side.net(dense), side.net(dense, 1)
    return [symmetry.orbit_distance(side.traced(a), a, b).upper, symmetry.parameter_distance(a, b.to(side.inputs))]


@case
def interpolation(side):
    a, b = side.net(Normed), side.net(Normed, 1)
    found = connectivity.barrier(a, b, [(side.x, side.y)], points=5)
    between = connectivity.interpolate(a, b, 0.5), connectivity.average([a, b])
    return [found.loss, found.accuracy, *map(side.outputs, between)]


@case
def along_a_curve(side):
    network = side.net(Normed).double()
    points = torch.stack([landscape.weight_vector(side.net(Normed, seed)) for seed in range(3)]).double()
    x, data = side.x.double(), [(side.x.double(), side.y)]
    shape = connectivity.curve_geometry(
        connectivity.Curve(points.to(side.inputs)), network, data, points=2, inputs=x, probes=2, max_parameters=0
    )
    numbers = [(p.loss, p.spectrum.trace, *p.spectrum.eigenvalues, *p.directions.values()) for p in shape.points]
    gradient, _ = curvature.CurvatureOperator(network, data, nn.functional.cross_entropy).gradient_and_loss()
    own = curvature.input_jacobians(network, x), curvature.jacobian_rank(network, x).rank
    return [numbers, shape.cosine, shape.cka, gradient, *own]


@case
def ensembles(side):
    networks = [side.net(Normed), side.net(Normed, 1)]
    predicted, labels = log_probabilities(networks, [(side.x, side.y)], recalibration_data=[side.x])
    scores = ensemble_scores(predicted, labels)
    return [predicted, scores.together.loss, scores.ambiguity, scores.divergences]


@case
def curves(side):
    a, b = side.net(Normed), side.net(Normed, 1)
    curve = connectivity.Curve.straight(*map(landscape.weight_vector, (a, b)), 1)
    found = connectivity.curve_barriers(curve, a, {"train": [(side.x, side.y)]}, points=5)["train"]
    again = connectivity.curve_losses(a, curve.writer(a), [0.5], [(side.x, side.y)])
    network = connectivity.CurveNetwork(a, b)
    return [found.loss, again.loss, curve(0.3), curve.tangent(0.3), curve.steps(found.t), side.outputs(network)]


@case
def local_dimensions(side):
    found = []
    for make, x in ((small, side.few), (dense, side.x)):
        network = side.net(make).double()
        group = side.traced(network, x.double())
        found += [symmetry.local_dimension(group, network, x, training=training) for training in (False, True)]
    return [(one.rank, one.dead, one.always_on) for one in found]


# ---- networks, stitching, populations


@case
def recalibration(side):
    found = []
    for exact in (False, True):
        network = side.net(Normed)
        networks.recalibrate_batch_norm(network, [(side.x, side.y), side.x], exact=exact)
        found += [*network.buffers(), side.outputs(network)]
    return found


@case
def fresh_networks(side):
    with side.network:
        return list(perceptron().fresh(3).parameters())


@case
def stitches(side):
    cut = CutNetwork(side.net(perceptron), example=side.x)
    planted = PlantedStitches(cut, generator=torch.Generator().manual_seed(0))
    other = CutNetwork(planted.network, example=side.x, like=cut)
    site = cut.sites[0]
    stitched = StitchedNetwork(cut, other, site, family="full").to(side.network)
    values = [*cut.values(side.x)[site], *other.values(side.x)[site]]
    return [*values, *(matrix for matrix in planted.matrices(site) if matrix is not None), len(stitched.maps)]


@case
def populations(side):
    x, y = side.x.to(side.network), side.y.to(side.network)  # as Lightning brings batches
    found = []
    for kind in (LoopPopulation, VmapPopulation):
        members = kind(perceptron(), [0, 1]).to(side.network)
        step = members.step(torch.stack([x, x]), torch.stack([y, y]), CrossEntropy(0.1), skip=frozenset([1]))
        found += [step.losses, step.outputs, *members.without(step.gradients, step.losses > 0)]
        found += [members(x), members(x, skip=frozenset([0]))]
        members.set_member_state(0, {name: value.cpu() for name, value in members.member_state(1).items()})
        found += members.step(x, members(x)[0].detach(), SquaredDistance(), shared=True).gradients
    return found


@case
def dropout(side):
    """It depends on the step, and leaves the caller's random numbers alone."""
    x, y = side.x.to(side.network), side.y.to(side.network)
    for kind in (LoopPopulation, VmapPopulation):
        members = kind(Dropping(), [0, 1]).to(side.network)
        states = (torch.get_rng_state, torch.cuda.get_rng_state)[: 1 + (GPU.type == "cuda")]
        before = [state() for state in states]
        losses = [
            members.step(torch.stack([x, x]), torch.stack([y, y]), CrossEntropy(), draw=draw).losses
            for draw in (0, 1, 0)
        ]
        assert torch.equal(losses[0], losses[2]), "the same step has other masks"
        assert not torch.equal(losses[0], losses[1]), "all steps have the same masks"
        assert all(map(torch.equal, before, (state() for state in states)))
    return []


@case
def zoos(side):
    with tempfile.TemporaryDirectory() as folder:
        write_zoo(Path(folder), [side.net(perceptron)], DigitsDataModule())
        return [side.outputs(ModelZoo.open(folder).load(0).to(side.network))]


@case
def normalisation(side):
    data = DigitsDataModule(max_samples=40)
    return [data.normalize(data.split_tensors("train").images.to(side.inputs))]


# ---- curvature


def curvatures(side, **options):
    found = []
    targets = seeded(13, lambda: torch.randn(24, 3)).to(side.inputs)
    for likelihood, y in (("classification", side.y), ("regression", targets)):
        network = side.net(dense)
        batches = [(side.x[:12], y[:12]), (side.x[12:], y[12:])]
        groups = curvature.parameter_groups(network)
        if options.get("samples"):
            options["generator"] = torch.Generator().manual_seed(3)
        factors = curvature.factors(network, batches, likelihood, **options)
        evidence = curvature.Evidence.of(network, factors, groups)
        zeros = torch.zeros(len(groups.names), dtype=torch.float64)
        evidence.effective_parameters(zeros), evidence.terms(zeros)
        found += [evidence.log_marginal_likelihood(zeros), evidence.gradients(zeros)[0], evidence.fixed_point(zeros)]
    return found


CASES |= {
    "curvature_autograd": curvatures,
    "curvature_autograd_samples": functools.partial(curvatures, samples=1),
    "curvature_backpack": functools.partial(curvatures, engine="backpack"),
    "curvature_backpack_samples": functools.partial(curvatures, engine="backpack", samples=1),
}


@case
def curvature_of_convolutions(side):
    def convolutional():
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))

    found = []
    for engine in ("autograd", "backpack"):
        factors = curvature.factors(side.net(convolutional), [(side.x, side.y)], engine=engine)
        found += [block.out_factor for block in factors.blocks.values()]
    return found


@case
def posteriors(side):
    posterior = curvature.to_laplace(side.net(dense), [(side.x, side.y)])
    assert posterior.sample(2).device == side.network
    return [posterior(side.x.to(side.network)), posterior.log_marginal_likelihood()]


@case
def spectra(side):
    found = []
    for kind in ("hessian", "gauss_newton"):
        batches = [(side.x[:12], side.y[:12]), (side.x[12:], side.y[12:])]
        operator = curvature.CurvatureOperator(
            side.net(dense), batches, nn.functional.cross_entropy, kind=kind, dtype=torch.float64
        )
        pairs, density = curvature.top_eigenpairs(operator, 2), curvature.spectral_density(operator, 6, 2)
        estimates = [curvature.trace(operator, 8, method=method).value for method in ("hutchinson", "xtrace")]
        found += [pairs.values, density.nodes, density.weights, torch.tensor(estimates)]
        found += [operator.gradient_and_loss()[0], operator.matrix(), operator @ torch.ones(operator.size)]
    return found


@case
def spectra_modulo_symmetry(side):
    network, loss = side.net(dense), nn.functional.cross_entropy
    group = symmetry.trace_symmetry(network, side.x)
    _, across, _ = curvature.canonical_operator(group, network, (side.x, side.y), loss)
    found = curvature.sharpness_modulo_symmetry(group, network, (side.x, side.y), loss, probes=4)
    numbers = [float(value) for row in found.rows() for name, value in row.items() if name != "measure"]
    return [across.matrix(), torch.tensor(numbers)]


# ---- landscapes


def surface(side, make, x, **options):
    network = side.net(make)
    return network, landscape.LossSurface(network, x, network(x.to(side.network)).detach().to(side.inputs), **options)


@case
def surfaces_of_loss(side):
    found = []
    for make, x in ((dense, side.x), (small, side.few), (Normed, side.x)):
        for method in ("auto", "loop", "vmap"):
            network, losses = surface(side, make, x, method=method)
            points = vectors(network)
            found += [losses.at(points), losses.at(points.to(side.inputs))]
    return found


@case
def grids(side):
    found = []
    for make, x in ((dense, side.x), (small, side.few), (Normed, side.x)):
        network, losses = surface(side, make, x, dtype=torch.float64)
        for below, place in itertools.product((None, 0.5), (side.network, side.inputs)):
            plane = landscape.WeightPlane.through(vectors(network).to(place))
            grid = landscape.Grid(dimension=2, bound=1.0, points=5)
            with tempfile.TemporaryDirectory() as folder:
                found.append(landscape.evaluate_grid(losses, plane, grid, below=below, partial=f"{folder}/part"))
            found.append(losses.on(plane, torch.zeros(2, 2, dtype=torch.float64, device=side.inputs)))
            vector = vectors(network)[0].to(place)
            found += [plane.residual(vector), plane.coordinates(vector)]
    return found


@case
def walks(side):
    network = side.net(small)
    walk = functools.partial(landscape.walk_level_set, network, side.few, steps=3, step_size=0.05)
    found = [walk(), walk(direction="random"), walk(direction=torch.ones(9, device=side.inputs))]
    return [tensor for one in found for tensor in (one.losses < one.tolerance, one.vectors)]


@case
def chains(side):
    """Chains of one seed are the same on every device."""
    network = side.net(small)
    chain = functools.partial(landscape.sample_sgld, network, side.few, chains=3, steps=5, burn_in=2)
    found = [chain(inverse_temperature=1e3), chain(inverse_temperature=1.5e3, step=1e-5)]
    return [tensor for one in found for tensor in (one.losses, one.vectors, one.curvature)]


@case
def pruning(side):
    network = side.net(perceptron)
    settings = landscape.PruningSettings(epsilon=0.3, steps=3, fraction=0.3, tries=1)
    found = landscape.rashomon_pruning(network, side.x, side.y, settings=settings)
    units = landscape.removable_units(network, side.x)
    step_by_step = landscape.Pruning(
        units,
        settings,
        evaluate=lambda candidate: mean_loss(candidate, [(side.x, side.y)], nn.functional.cross_entropy)[0],
        batches=lambda: [(side.x, side.y)],
    )
    step_by_step.start(network)
    return found.loss, list(found.widths.values()), list(units.sizes.values()), step_by_step.reference


@case
def learning_coefficients(side):
    """The same chains on every device, with steps that depend on curvatures found there, and minibatches."""
    network = side.net(dense)
    data = [(side.x, side.x.flatten(1)[:, :3])]
    settings = {"chains": 3, "steps": 44, "dtype": torch.float64}
    found = [
        landscape.learning_coefficient(network, data, nn.functional.mse_loss, **settings, **changes)
        for changes in ({}, {"method": "sgld", "batch_size": 2, "block_size": 3}, {"execution": "loop"})
    ]
    return [tensor for one in found for tensor in (one.losses, one.distances, one.step, one.farthest_curvature)]


@case
def quotients(side):
    network = side.net(small)
    points = vectors(network)
    points[1, :2] = 3 * points[1, 2:4]  # collinear units, which are merged
    example = side.few[:2]
    traced = side.traced(network, example)
    found = [
        *(landscape.canonical_vectors(network, points, example, symmetry=known) for known in (None, traced)),
        *(
            landscape.orbit_distances(network, points, points[0], example, symmetry=known).distances
            for known in (None, traced)
        ),
    ]
    return [*found, landscape.FunctionScale.of(network(side.few.to(side.network)).detach()).zero]


@case
def functions_of_two_units(side):
    def wide(values):
        return torch.tensor(values, dtype=torch.float64, device=side.network)

    target, moments = wide([0.8, -0.6, 0.7, 0.5]), landscape.Moments.of(side.few[:, 0])
    weights = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(side.network)
    known = landscape.TwoUnitClass(target, moments)
    measured = landscape.two_unit.distance(weights, target, moments)
    return [measured, known.contains(weights), known.barrier]


@case
def stacks(side):
    losses = landscape.surfaces(side.net(small), side.few, dtype=torch.float64)
    points = vectors(side.net(small))
    plane, grid = landscape.WeightPlane.through(points), landscape.Grid(dimension=2, bound=1.0, points=3)
    return [landscape.evaluate_grid(losses(point), plane, grid) for point in points.to(side.inputs)]


# ---- all of them


def flat(value):
    """Return all numbers of a result, float64, on the CPU."""
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().double().flatten()]
    if isinstance(value, (list, tuple)):
        return [part for one in value for part in flat(one)]
    return [torch.tensor([float(value)], dtype=torch.float64)]


def attempt(name):
    """Run a case on all sides; return by side what went wrong."""
    failed, expected = {}, None
    for network, inputs in itertools.product((CPU, GPU), repeat=2):
        try:
            found = flat(CASES[name](Side(network, inputs)))
            expected = found if expected is None else expected  # the CPU's alone
            assert len(found) == len(expected), f"{len(found)} results, {len(expected)} on the CPU"
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                largest = float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 0.0
                allowed = ABSOLUTE + RELATIVE * largest
                if one.shape == other.shape and one.numel():
                    difference = float((one - other).abs().nan_to_num(0.0, 0.0).max()) / allowed
                    DIFFERENCES[name] = max(DIFFERENCES.get(name, 0.0), difference)
                torch.testing.assert_close(
                    one, other, rtol=0, atol=allowed, msg=lambda text, number=number: f"result {number}: {text}"
                )
        except Exception as error:
            failed[f"network on {network.type}, inputs on {inputs.type}"] = error
    return failed


def main(names):
    prepare()
    bad = False
    for name in names or CASES:
        failed = attempt(name)
        for side, error in failed.items():
            print(f"{name}: FAIL, {side}: {explain(error)}", flush=True)
        if not failed:
            print(f"{name}: ok", flush=True)
        bad = bad or bool(failed)
    if device.SUSPICIONS:
        print("copies: FAIL,", dict(device.SUSPICIONS))
    return bad or bool(device.SUSPICIONS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
