"""Figures measured between and around two small networks, compared with another implementation.

Curves, curvature, dimensions and learning coefficients of MLPs 64-32-10 on the 8x8 digits (1,297 to train, 500 to test,
each pixel centred), for several seeds; the reference figures are from one pair of networks and another implementation:

    python examples/landscape_figures.py --seeds 3

The networks differ from those of the reference, so that single figures differ like those of two seeds.
docs/theory/curves.md, spectra.md and learning_coefficients.md define the figures.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.connectivity import (
    Curve,
    CurveNetwork,
    CurveSummary,
    barrier,
    curve_barriers,
    curve_coefficients,
    curve_geometry,
)
from lightning_sym.curvature import (
    CurvatureOperator,
    MatrixOperator,
    near_zero,
    smoothed,
    spectral_density,
    top_eigenpairs,
    trace,
)
from lightning_sym.landscape import learning_coefficient, weight_vector
from lightning_sym.landscape.analytic import NormalCrossing, SquareSum, TwoRectifiedUnits, summed_squares

Pair = tuple[Tensor, Tensor]
Figures = dict[str, float]
PLACES = ("0", "1/4", "1/2", "3/4", "1")

# The figures of the other implementation, from one pair of networks.
REFERENCE: Figures = {
    "line: highest train loss": 0.267,
    "line: mean train loss": 0.112,
    "line: barrier": 0.259,
    "line: highest train error, %": 9.10,
    "line: highest test error, %": 10.0,
    "line: length": 23.61,
    "bezier: highest train loss": 0.0393,
    "bezier: mean train loss": 0.0251,
    "bezier: barrier": 0.0313,
    "bezier: highest train error, %": 0.15,
    "bezier: highest test error, %": 2.8,
    "bezier: length": 24.37,
    "chain: highest train loss": 0.0215,
    "chain: mean train loss": 0.0166,
    "chain: barrier": 0.0134,
    "chain: highest train error, %": 0.08,
    "chain: highest test error, %": 3.0,
    "chain: length": 25.82,
    "bezier, 3 bends: highest train loss": 0.0386,
    "bezier, 3 bends: mean train loss": 0.0235,
    "bezier, 3 bends: barrier": 0.0306,
    "bezier, 3 bends: length": 24.45,
    "norm of the ends": 17.0,
    "plane: height of the bend": 5.29,
    "plane: place of the bend along the line": 0.504,
    "tanh line: highest train loss": 0.207,
    "tanh line: barrier": 0.195,
    "tanh bezier: highest train loss": 0.0528,
    "tanh chain: highest train loss": 0.0305,
    "tanh bezier, 3 bends: highest train loss": 0.0520,
    "norm, middle of the line, interpolated: loss": 0.558,
    "norm, middle of the line, interpolated: error, %": 15.7,
    "norm, middle of the line, recalibrated: loss": 0.304,
    "norm, middle of the line, recalibrated: error, %": 10.4,
    "norm, quarter of the line, interpolated: loss": 0.088,
    "norm, quarter of the line, recalibrated: loss": 0.024,
    "trace": 1.552,
    "squared Frobenius norm": 0.0896,
    "hutchinson, 30 probes: error of the trace, %": 3.8,
    "hutchinson, 99 probes: error of the trace, %": 1.2,
    "hutch++, 30 probes: error of the trace, %": 6.3,
    "hutch++, 99 probes: error of the trace, %": 0.8,
    "xtrace, 30 probes: error of the trace, %": 2.8,
    "xtrace, 98 probes: error of the trace, %": 0.6,
    "density, 32 steps, 1 probe: L1 distance": 0.011,
    "density, 64 steps, 4 probes: L1 distance": 0.011,
    "density, 128 steps, 8 probes: L1 distance": 0.007,
    "power iteration to 1e-3: relative error": 1.7e-3,
    "power iteration to 1e-3: products": 28,
    "power iteration to 1e-6: relative error": 1.8e-6,
    "power iteration to 1e-6: products": 47,
    **dict(zip((f"largest eigenvalue at t = {t}" for t in PLACES), (0.168, 0.354, 0.473, 0.394, 0.178), strict=True)),
    "loss in the middle": 0.039,
    "straight product at t = 0": 0.0072,
    "straight product at t = 1/4": 0.0116,
    "straight product at t = 1/2": 0.0028,
    "detour product at t = 0": 0.0157,
    "detour product at t = 1/4": 0.0478,
    "detour product at t = 1/2": 0.0719,
    "tangent product at t = 0": 0.0014,
    "tangent product at t = 1/4": 0.0024,
    "tangent product at t = 1/2": 0.0028,
    "random product at t = 0": 0.0054,
    "random product at t = 1/4": 0.0111,
    "random product at t = 1/2": 0.0136,
    "second derivative along the tangent, t = 1/2": -0.0012,
    "gradient norm at the ends": 0.004,
    "gradient norm in the middle": 0.017,
    "deviation from the first identity": 1e-9,
    **dict(
        zip(
            (f"eigenvalues below {t:g} of the largest" for t in (1e-3, 1e-4, 1e-6, 1e-8, 1e-12)),
            (1757, 1509, 1038, 545, 305),
            strict=True,
        )
    ),
    "negative eigenvalues": 288,
    "most negative eigenvalue": -0.0022,
    **dict(zip((f"below 1e-3 of the largest at t = {t}" for t in PLACES), (1764, 1656, 1641, 1698, 1825), strict=True)),
    **dict(zip((f"below 1e-6 of the largest at t = {t}" for t in PLACES), (754, 604, 551, 634, 775), strict=True)),
    "exact zeros, of 3 constant pixels": 96,
    "coefficient: toy, step 1e-5": 1.0175,
    "coefficient: toy, step 2e-4": 1.7138,
    "coefficient: two ReLU, opposite signs": 0.993,
    "coefficient: two ReLU, same sign": 0.508,
    "coefficient: x^2": 0.530,
    "coefficient: x^2 y^2": 0.393,
    "coefficient: y^4": 0.248,
    "coefficient: x^2 y^4": 0.237,
    "coefficient: x^4 y^4": 0.170,
    "digits chains: reference loss": 0.0013,
    "digits chains, pull 1, step 1e-5: mean": 1.0,
    "digits chains, pull 1, step 3e-5: mean": 5.1,
    "digits chains, pull 1, step 1e-4: mean": 17.5,
    "digits chains, pull 1, step 3e-4: mean": 32.4,
    "digits chains, pull 1: last over second quarter, least": 1.6,
    "digits chains, pull 1: last over second quarter, most": 3.4,
    "digits chains, pull 100, step 3e-4: mean": 0.65,
    "digits chains, pull 100: n beta trace / 2 pull": 0.36,
    "digits chains, pull 100: n beta times largest eigenvalue": 7.6,
    "digits chains, pull 100: distance": 4.9,
}


def digits() -> tuple[Pair, Pair]:
    """Return training and test images and labels, every pixel centred by its mean over the training images."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(images / 16).double()[order], torch.from_numpy(labels).long()[order]
    x = x - x[:1297].mean(0)
    return (x[:1297], y[:1297]), (x[1297:], y[1297:])


def batches(data: Pair, generator: torch.Generator, epochs: int) -> Iterator[Pair]:
    """Yield batches of 64, reshuffled in every epoch."""
    for _ in range(epochs):
        for index in torch.randperm(len(data[0]), generator=generator).split(64):
            yield data[0][index], data[1][index]


def falling(optimizer: torch.optim.Optimizer, data: Pair, epochs: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule of Garipov et al. (2018): constant for half, then linear to 1 % at 90 %, constant again."""
    steps = epochs * -(-len(data[0]) // 64)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - 0.99 * min(max((step / steps - 0.5) / 0.4, 0.0), 1.0)
    )


def trained(make: Callable[[], nn.Module], data: Pair, seed: int, epochs: int, decay: float = 1e-4) -> nn.Module:
    """Train a network by SGD with momentum 0.9 and a learning rate falling from 0.1, in double precision."""
    torch.manual_seed(seed)
    network = make().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    schedule = falling(optimizer, data, epochs)
    for x, y in batches(data, torch.Generator().manual_seed(seed), epochs):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def curved(ends: list[nn.Module], data: Pair, kind: str, bends: int, epochs: int) -> Curve:
    """Train a curve between two networks with the same schedule, at one random point per batch."""
    network = CurveNetwork(ends[0], ends[1], bends, decay=1e-4)
    optimizer = torch.optim.SGD([network.bends], lr=0.1, momentum=0.9)
    schedule, generator = falling(optimizer, data, epochs), torch.Generator().manual_seed(7)
    for x, y in batches(data, generator, epochs):
        place = torch.rand((), generator=generator, dtype=torch.float64)
        network.coefficients.copy_(curve_coefficients(kind, bends + 2, place))
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        schedule.step()
    return network.curve(network.state_dict(), kind)


def perceptron(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Return a network 64-32-10."""
    return nn.Sequential(nn.Linear(64, 32), activation(), nn.Linear(32, 10))


def normed() -> nn.Module:
    """Return a network with two batch norms."""
    parts = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(32, 10))


# ---- the figures


def paths(ends: list[nn.Module], curves: dict[str, Curve], train: Pair, test: Pair, prefix: str = "") -> Figures:
    """Return heights of linear paths and curves, at 61 points."""
    found: Figures = {}
    for name, curve in curves.items():
        own = curve_barriers(curve, ends[0], {"train": [train], "test": [test]})
        loss = CurveSummary.of(own["train"].loss, curve.steps(own["train"].t))
        errors = {split: 100 * (1 - float(each.accuracy.min())) for split, each in own.items()}
        found |= {
            f"{prefix}{name}: highest train loss": loss.highest,
            f"{prefix}{name}: mean train loss": loss.mean,
            f"{prefix}{name}: barrier": own["train"].loss_barrier,
            f"{prefix}{name}: highest train error, %": errors["train"],
            f"{prefix}{name}: highest test error, %": errors["test"],
            f"{prefix}{name}: length": curve.length(),
        }
    return found


def lines_and_curves(ends: list[nn.Module], data: Pair, epochs: int) -> dict[str, Curve]:
    """Return the linear path and three curves between two networks, by name."""
    return {
        "line": Curve.straight(*map(weight_vector, ends)),
        "bezier": curved(ends, data, "bezier", 1, epochs),
        "chain": curved(ends, data, "chain", 1, epochs),
        "bezier, 3 bends": curved(ends, data, "bezier", 3, epochs),
    }


def statistics(ends: list[nn.Module], data: Pair) -> Figures:
    """Return loss and error on the path between networks with batch norms, with and without recalibration."""
    found: Figures = {}
    for word, recalibrate in (("interpolated", False), ("recalibrated", True)):
        along = barrier(*ends, [data], points=5, recalibrate=recalibrate)
        for place, index in (("middle", 2), ("quarter", 1)):
            found[f"norm, {place} of the line, {word}: loss"] = float(along.loss[index])
            found[f"norm, {place} of the line, {word}: error, %"] = 100 * (1 - float(along.accuracy[index]))
    return found


def geometry(network: nn.Module, curve: Curve, data: Pair) -> Figures:
    """Return figures of the Hessian at five points of a curve, with all its eigenvalues."""
    shape = curve_geometry(curve, network, data)
    found: Figures = {}
    for place, point in zip(PLACES, shape.points, strict=True):
        found[f"largest eigenvalue at t = {place}"] = point.spectrum.eigenvalues[0]
        for direction, (norm, _) in point.directions.items():
            found[f"{direction} product at t = {place}"] = norm
        near = point.spectrum.near_zero
        assert near is not None
        for tolerance, text in ((1e-3, "1e-3"), (1e-6, "1e-6")):
            found[f"below {text} of the largest at t = {place}"] = near.relative[tolerance]
    start, middle = shape.points[0], shape.points[2]
    return found | {
        "loss in the middle": middle.loss,
        "second derivative along the tangent, t = 1/2": middle.directions["tangent"][1],
        "gradient norm at the ends": start.gradient_norm,
        "gradient norm in the middle": middle.gradient_norm,
        "deviation from the first identity": max(point.gradient_identity.deviation for point in shape.points),
    }


def power_iteration(matrix: Tensor, tolerance: float, seed: int) -> tuple[float, int]:
    """Return an eigenvalue, and the number of products until two consecutive estimates agree: PyHessian's rule."""
    vector = torch.randn(len(matrix), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    products, value, before = 0, 0.0, math.inf
    while abs(value - before) / (abs(value) + 1e-6) >= tolerance:
        vector = vector / vector.norm()
        image = matrix @ vector
        products, before, value, vector = products + 1, value, float(vector @ image), image
    return value, products


def spectrum(network: nn.Module, data: Pair, seed: int) -> Figures:
    """Return counts of small eigenvalues, and errors of estimates relative to the whole Hessian."""
    operator = CurvatureOperator(network, data, F.cross_entropy, columns=128)
    matrix = operator.matrix()
    values = torch.linalg.eigvalsh(matrix)
    exact, top = float(values.sum()), float(values[-1])
    near = near_zero(values, (1e-3, 1e-4, 1e-6, 1e-8, 1e-12))
    found: Figures = {f"eigenvalues below {t:g} of the largest": count for t, count in near.relative.items()}
    found |= {"negative eigenvalues": near.negative, "most negative eigenvalue": float(values[0])}
    found |= {"trace": exact, "squared Frobenius norm": float(matrix.square().sum())}
    found["exact zeros, of 3 constant pixels"] = int((matrix.abs().amax(0) == 0).sum())
    dense = MatrixOperator(matrix)
    for method, counts in (("hutchinson", (30, 99)), ("hutch++", (30, 99)), ("xtrace", (30, 98))):
        for probes in counts:
            # Several runs give the standard error; each run has the number of products of a single one.
            runs = 1 if method == "hutchinson" else 2
            errors = []
            for number in range(8):
                generator = torch.Generator().manual_seed(1000 * seed + number)
                estimate = trace(dense, runs * probes, method=method, repeats=2, generator=generator).value
                errors.append((estimate / exact - 1) * math.sqrt(runs))
            rms = math.sqrt(math.fsum(error**2 for error in errors) / len(errors))
            found[f"{method}, {probes} probes: error of the trace, %"] = 100 * rms
    for steps, probes in ((32, 1), (64, 4), (128, 8)):
        density = spectral_density(dense, steps, probes)
        grid = density.grid(4096)
        distance = (density.at(grid) - smoothed(values, grid, density.width)).abs()
        words = f"{steps} steps, {probes} probe{'s' if probes > 1 else ''}"
        found[f"density, {words}: L1 distance"] = float(torch.trapezoid(distance, grid))
    for tolerance, text in ((1e-3, "1e-3"), (1e-6, "1e-6")):
        value, products = power_iteration(matrix, tolerance, seed)
        found[f"power iteration to {text}: relative error"] = abs(value / top - 1)
        found[f"power iteration to {text}: products"] = products
        pairs = top_eigenpairs(dense, 1, tolerance=tolerance)
        found[f"Lanczos to {text}: relative error"] = abs(float(pairs.values[0]) / top - 1)
        found[f"Lanczos to {text}: products"] = pairs.products
    return found


def coefficients(seed: int, steps: int) -> Figures:
    """Return learning coefficients of landscapes with known values."""
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def measured(network: nn.Module, chains: int, steps: int, **settings: float) -> float:
        network = network.double()
        data = [(inputs, network(inputs).detach())]
        found = learning_coefficient(network, data, summed_squares, chains=chains, steps=steps, seed=seed, **settings)
        return float(found.chain_means.mean())

    cold = {"inverse_temperature": 1e3, "localisation": 1.0}
    found = {
        f"coefficient: toy, step {text}": measured(
            SquareSum(3.0, 5.0, 0.0), 200, 4 * steps, step=step, method="sgld", **cold
        )
        for step, text in ((1e-5, "1e-5"), (2e-4, "2e-4"))
    }
    for name, sign in (("opposite signs", -1), ("same sign", 1)):
        network = TwoRectifiedUnits((0.8, 0.6 * sign), (0.7, 0.5))
        settings = {"inverse_temperature": 1e4, "localisation": 100.0, "step": 5e-6, "method": "sgld"}
        found[f"coefficient: two ReLU, {name}"] = measured(network, 200, 2 * steps, **settings)
    crossings = {"x^2": (1, 0), "x^2 y^2": (1, 1), "y^4": (0, 2), "x^2 y^4": (1, 2), "x^4 y^4": (2, 2)}
    for name, powers in crossings.items():
        found[f"coefficient: {name}"] = measured(NormalCrossing(*powers), 400, 3 * steps, **cold)
    return found


def digits_chains(data: Pair, seed: int, epochs: int, steps: int) -> Figures:
    """Return figures of chains for a network on digits, where none is stationary without localisation."""
    network = trained(perceptron, data, seed, 2 * epochs, decay=0.0)
    operator = CurvatureOperator(network, data, F.cross_entropy, columns=64)
    heat = len(data[0]) / math.log(len(data[0]))
    top = float(top_eigenpairs(operator, 1).values[0])
    found: Figures = {"digits chains: reference loss": operator.gradient_and_loss()[1]}
    ratios = []
    for pull, rates in ((1.0, (1e-5, 3e-5, 1e-4, 3e-4)), (100.0, (3e-4,))):
        for rate in rates:
            chains = learning_coefficient(
                network.float(),
                [(data[0].float(), data[1])],
                chains=3,
                steps=steps,
                localisation=pull,
                step=rate,
                method="sgld",
                seed=seed,
            )
            text = {1e-5: "1e-5", 3e-5: "3e-5", 1e-4: "1e-4", 3e-4: "3e-4"}[rate]
            found[f"digits chains, pull {pull:g}, step {text}: mean"] = float(chains.chain_means.mean())
            ratios += [chains.ratio[0]] if pull == 1 else []
            refused = chains.estimate is None
            found[f"digits chains, pull {pull:g}, step {text}: refused"] = float(refused)
    return found | {
        "digits chains, pull 1: last over second quarter, least": min(ratios),
        "digits chains, pull 1: last over second quarter, most": max(ratios),
        "digits chains, pull 100: n beta trace / 2 pull": heat * trace(operator, 50).value / 200,
        "digits chains, pull 100: n beta times largest eigenvalue": heat * top,
        "digits chains, pull 100: distance": float(chains.distances[len(chains.distances) // 2 :].mean()),
    }


def figures(seed: int, epochs: int = 60, steps: int = 1500) -> Figures:
    """Return all figures of one seed.

    Args:
        seed: Seed of two networks of each kind, and of chains and probes. >= 0.
        epochs: Epochs of all training. >= 1.
        steps: A unit for the lengths of chains. >= 8.
    """
    train, test = digits()
    pairs = {
        name: [trained(make, train, 2 * seed + number, epochs) for number in (0, 1)]
        for name, make in {"relu": perceptron, "tanh": lambda: perceptron(nn.Tanh), "norm": normed}.items()
    }
    curves = lines_and_curves(pairs["relu"], train, epochs)
    found = paths(pairs["relu"], curves, train, test)
    plane = curves["bezier"].plane()
    bend = plane.coordinates(plane.points)[2]
    found["norm of the ends"] = float(torch.stack([weight_vector(each).norm() for each in pairs["relu"]]).mean())
    found["plane: height of the bend"] = float(bend[1])
    found["plane: place of the bend along the line"] = float(bend[0]) / curves["line"].length()
    found |= paths(pairs["tanh"], lines_and_curves(pairs["tanh"], train, epochs), train, test, "tanh ")
    found |= statistics(pairs["norm"], train)
    found |= geometry(pairs["relu"][0], curves["bezier"], train)
    found |= spectrum(pairs["relu"][0], train, seed)
    found |= coefficients(seed, steps)
    return found | digits_chains(train, seed, epochs, steps)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    begin = time.process_time()
    measured = [figures(seed, options.epochs, options.steps) for seed in range(options.seeds)]
    table = Table("figure", "other implementation", "mean here", "lowest", "highest")
    for name in measured[0]:
        values = [each[name] for each in measured]
        numbers = [math.fsum(values) / len(values), min(values), max(values)]
        table.add_row(name, f"{REFERENCE[name]:.4g}" if name in REFERENCE else "", *(f"{n:.4g}" for n in numbers))
    Console(width=110).print(table)
    print(f"{time.process_time() - begin:.0f} s of processor time")


if __name__ == "__main__":
    main()
