"""Six tests of similarity measures with known answers, on small networks trained for them.

A small version of ReSi (Klabunde et al. 2024, arXiv:2408.00531), trained and measured in minutes on one core:

    python examples/similarity_tests.py

The networks are fully connected, with five hidden layers of 64 units. They are trained on 600 of scikit-learn's digits.
The other 1,197 are test digits, and measures compare last hidden layers on 500 of those. The tests:

accuracy    Do similar networks, among 20, have similar accuracies? Spearman's correlation over pairs.
output      Do they have similar predictions (mean Jensen-Shannon divergence of class probabilities)? The same score.
labels      Groups of networks were trained with 0, 25, 50, 75 and 100 % of the labels replaced by random ones. Are
            networks of one group more similar than those of different groups? Area under the precision-recall curve.
shortcut    The same for a pixel that reveals the label of as many training images, and is random on all others.
noise       The same for networks trained with as much Gaussian noise on the images.
layers      Are close layers of a network more similar than distant ones? Spearman's correlation.

1 is perfect in all tests; chance is the mean score of random numbers. The tests are repeated with other networks and
digits. ± precedes half of the 95 % interval for the mean over these repetitions (Student's t). A star marks intervals
entirely above chance: the measure passes.

The folder gets ``scores.csv`` (each repetition; also ReSi's other scores, and the last test for untrained networks),
``networks.csv`` (accuracies, which show whether the networks learned their task) and ``scores.png``.
"""

import argparse
import io
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pytorch_lightning import Trainer
from scipy import stats
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch.nn.functional import one_hot
from torchmetrics import Metric

from lightning_sym.datamodules import DigitsDataModule, LabelledImages
from lightning_sym.networks import MultiLayerPerceptron, Network
from lightning_sym.reports import ResultTable
from lightning_sym.similarity import (
    CKA,
    Features,
    GroupProcrustes,
    Link,
    OrthogonalProcrustes,
    PopulationSimilarity,
    SimilarityMatrix,
    features_of,
)
from lightning_sym.tasks import ZooTask

Values = NDArray[np.float64]
Row = dict[str, Any]

# By test: its score in the table.
TESTS = {
    "accuracy": "spearman",
    "output": "spearman",
    "labels": "auprc",
    "shortcut": "auprc",
    "noise": "auprc",
    "layers": "spearman",
}
_SHOWN = {"spearman": "correlation", "auprc": "area"}
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)  # levels of labels, shortcut and noise, with a group of networks for each
NOISE = 2.0  # standard deviation at level 1, in units of normalised pixels
LAYERS = [f"activation{number}" for number in range(1, 6)]
IMAGES = 500
TRAINING, ALL = 600, 1797


# ---- the measures


class RandomNumbers(Metric):
    """The control: a similarity independent of the networks."""

    full_state_update = False

    def update(self, x: Tensor | Features, y: Tensor | Features) -> None:
        """Ignore the batch."""

    def compute(self) -> Tensor:
        """Return a random number in [0, 1)."""
        return torch.rand((), dtype=torch.float64)


class Measure(NamedTuple):
    """A measure of similarity, and the group of transformations of units under which it is invariant."""

    group: str
    title: str
    make: Callable[[], Metric]


_SCALED = "permutations and scales, the group of ReLU"
_ROTATED = "rotations"
MEASURES = (
    Measure("permutations", "Procrustes", partial(GroupProcrustes, "sigmoid")),
    Measure(_SCALED, "Procrustes", partial(GroupProcrustes, "relu")),
    Measure(_SCALED, "Procrustes, live", partial(GroupProcrustes, "relu", live=True)),
    Measure(_SCALED, "centred Procrustes", partial(GroupProcrustes, "relu", center=True)),
    Measure(_SCALED, "max CKA", partial(CKA, "max")),
    Measure(_SCALED, "Laplace CKA", partial(CKA, "laplace")),
    Measure(_SCALED, "scaled linear CKA", partial(CKA, "linear", normalize="channel")),
    Measure(_ROTATED, "Procrustes", OrthogonalProcrustes),
    Measure(_ROTATED, "centred Procrustes", partial(OrthogonalProcrustes, center=True)),
    Measure(_ROTATED, "linear CKA", partial(CKA, "linear")),
    Measure("invertible maps", "Procrustes", partial(GroupProcrustes, "identity")),
    Measure("everything", "random numbers", RandomNumbers),
)


# ---- the networks


class DigitsVariant(DigitsDataModule):
    """600 digits for training and 1,197 for testing, by ``data_seed``; one batch is 32.

    Args:
        random_labels: Fraction of the training labels to replace by random ones.
        shortcut: Fraction of the training images on which a bright pixel at the edge reveals the label; on the others,
            and on all test images, the pixel belongs to a random class. None: no such pixel.
        data_seed: Seed of the split and of the replacements. A larger fraction includes the replacements of a smaller.
    """

    source_sizes = (TRAINING, ALL - TRAINING)

    def __init__(self, random_labels: float = 0.0, shortcut: float | None = None, data_seed: int = 0) -> None:
        super().__init__(val_fraction=0.0, data_seed=data_seed)
        self.random_labels, self.shortcut = random_labels, shortcut

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return the training and test parts."""
        draws = torch.Generator().manual_seed(self.hparams["data_seed"])
        images, labels = map(torch.cat, zip(*super().load(), strict=True))
        order = torch.randperm(ALL, generator=draws)
        chance, told = torch.rand(2, ALL, generator=draws)
        random_labels, others = torch.randint(10, (2, ALL), generator=draws)
        images, labels = images[order], labels[order]
        training = torch.arange(ALL) < TRAINING
        if self.shortcut is not None:
            shown = torch.where(training & (told < self.shortcut), labels, others)
            edge = torch.tensor([0, 8, 16, 24, 32, 40, 48, 56, 31, 39])  # of 8 x 8 pixels; digits hardly reach there
            images = images.flatten(1).index_put((torch.arange(ALL), edge[shown]), images.new_tensor(255))
            images = images.view(-1, *self.source_shape)
        labels = torch.where(training & (chance < self.random_labels), random_labels, labels)
        return LabelledImages(images[training], labels[training]), LabelledImages(images[~training], labels[~training])


class NoisyZoo(ZooTask):
    """A zoo trained on images with Gaussian noise, drawn for each member and step.

    Args:
        noise: Standard deviation, in units of normalised pixels, >= 0.
        settings: Settings of a ``ZooTask``.
    """

    def __init__(self, *, noise: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.noise = noise

    def training_batch(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return the batch with noise. Images ``[M, B, 1, 8, 8]``."""
        images, labels = batch
        if not self.noise:
            return batch
        sources = [self.step_generator("noise", number, batch_idx) for number in self.member_seeds]
        drawn = torch.stack([torch.randn(images.shape[1:], generator=source) for source in sources])
        return images + self.noise * drawn.to(images), labels


class Population(NamedTuple):
    """Trained networks, their accuracies, and their predictions for test images.

    Attributes:
        networks: The ``M`` networks.
        accuracies: On the training set, with its possibly random labels, and on the test set. ``[2, M]``.
        probabilities: Class probabilities of all test images. Shape ``[M, N, 10]``, float64.
        inputs: Normalised images for the measures.
    """

    networks: list[Network]
    accuracies: Tensor
    probabilities: Tensor
    inputs: Tensor

    def features(self, layers: Sequence[str]) -> list[dict[str, Features]]:
        """Return the outputs of the layers of each network."""
        return [
            {name: Features(values) for name, values in features_of(network, layers, self.inputs).items()}
            for network in self.networks
        ]


def train(data: DigitsVariant, members: int, first: int, epochs: int, noise: float = 0.0) -> Population:
    """Train networks in one fit.

    Args:
        data: Training and test data.
        members: Number of networks.
        first: Index of the first network, which determines initial weights and order of the data.
        epochs: Number of epochs.
        noise: Standard deviation of the noise on the images.
    """
    task = NoisyZoo(
        noise=noise,
        network=MultiLayerPerceptron(widths=[64] * len(LAYERS), image_size=8),
        members=members,
        seed=first,
        execution="vmap",
        optimizer=partial(torch.optim.Adam, lr=0.002),
        keep="last",
    )
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(task, data)
    networks = [task.network.fresh(number) for number in task.numbers]
    for number, network in zip(task.numbers, networks, strict=True):
        network.load_state_dict(task.population.member_state(number))
    (train_inputs, train_labels), (inputs, labels) = (
        (data.normalize(images), labels) for images, labels in map(data.split_tensors, ("train", "test"))
    )
    with torch.no_grad():
        fitted, logits = (torch.stack([one(images) for one in networks]) for images in (train_inputs, inputs))
    correct = fitted.argmax(-1) == train_labels, logits.argmax(-1) == labels
    accuracies = torch.stack([one.double().mean(1) for one in correct])
    return Population(networks, accuracies, logits.double().softmax(-1), inputs[:IMAGES])


# ---- the scores


def correlation(similarities: Values, differences: Values) -> float:
    """Return Spearman's correlation of dissimilarity with differences: 1 if all are in order, 0 by chance.

    Args:
        similarities: Similarities of pairs. Shape ``[P]``.
        differences: Differences of the same pairs. Shape ``[P]``.

    Returns:
        The correlation; 0 if all similarities or all differences are equal.
    """
    if np.ptp(similarities) == 0 or np.ptp(differences) == 0:
        return 0.0
    return float(stats.spearmanr(-similarities, differences).statistic)


def separation(table: Values, groups: Sequence[int]) -> dict[str, float]:
    """Score how well similarities separate pairs within a group from pairs across groups.

    As in ReSi, each group is compared with the pairs that contain one of its members, and scores are averaged.

    Args:
        table: Similarities, symmetric. Shape ``[M, M]``.
        groups: Group of each network; two or more networks each.

    Returns:
        ``auprc``, the area under the precision-recall curve (average precision); and ``conformity``, the fraction of
        comparisons in which the pair of the group is more similar, where ties count one half.
    """
    belongs = np.asarray(groups)
    areas, shares = [], []
    for group in np.unique(belongs):
        own = belongs == group
        inside, across = table[np.ix_(own, own)][np.triu_indices(own.sum(), 1)], table[np.ix_(own, ~own)].ravel()
        truth = np.repeat([1, 0], [len(inside), len(across)])
        areas.append(average_precision_score(truth, np.concatenate([inside, across])))
        gaps = np.subtract.outer(inside, across)
        shares.append(np.mean((np.sign(gaps) + 1) / 2))
    return {"auprc": float(np.mean(areas)), "conformity": float(np.mean(shares))}


def monotonicity(table: Values) -> dict[str, float]:
    """Score how well the similarities of a network's layers follow their distance.

    Args:
        table: Similarities, symmetric. Shape ``[L, L]``, for 3 layers or more in their order.

    Returns:
        ``spearman``, the mean over layers of the correlation of dissimilarity with distance, upwards and downwards;
        and ``conformity``, the fraction of triples in which the closer of two layers is more similar to a third one
        below or above both, where ties count one half.
    """
    layers = np.arange(len(table))
    correlations, gaps = [], []
    for layer in layers:
        for others in (layers[layer + 1 :], layers[:layer][::-1]):  # the closest first
            similarities = table[layer, others]
            if len(others) > 1:
                correlations.append(correlation(similarities, np.abs(others - layer)))
            gaps += [near - far for near, far in itertools.combinations(similarities, 2)]
    return {"spearman": float(np.mean(correlations)), "conformity": float(np.mean((np.sign(gaps) + 1) / 2))}


def chance_area(inside: int, across: int) -> float:
    """Return the mean average precision of random orders.

    Position k holds a pair of the group with probability ``p = inside / all``. Then
    ``1 + (k - 1)(inside - 1)/(all - 1)`` of the first k are such pairs on average. Average precision is the sum of
    these fractions over k, divided by ``inside``.

    Args:
        inside: Number of pairs of one group, >= 1.
        across: Number of the other pairs.
    """
    every = inside + across
    places = np.arange(1, every + 1)
    return float(np.mean((1 + (places - 1) * (inside - 1) / max(1, every - 1)) / places))


def divergences(probabilities: Tensor) -> Values:
    """Return the mean Jensen-Shannon divergence of all pairs of networks, in nats. Shape ``[M, M]``.

    Args:
        probabilities: Shape ``[M, N, classes]``, float64.
    """

    def entropy(p: Tensor) -> Tensor:
        return torch.special.entr(p).sum(-1).mean(-1)

    own = entropy(probabilities)
    mixed = torch.stack([entropy((probabilities + one) / 2) for one in probabilities])
    return (mixed - (own[:, None] + own) / 2).numpy()


# ---- the tests


def similarities(make: Callable[[], Metric], features: Sequence[Mapping[str, Features]]) -> Values:
    """Return the similarities of all pairs of networks, for a single layer. ``[M, M]``; the diagonal is 1."""
    (layer,) = features[0]
    pairs = list(itertools.combinations(range(len(features)), 2))
    metric = PopulationSimilarity(make(), [layer], [layer], [Link(str(a), str(b)) for a, b in pairs])
    metric.update({str(number): own for number, own in enumerate(features)})
    table = np.eye(len(features))
    for (a, b), value in zip(pairs, metric.compute().flatten().tolist(), strict=True):
        table[a, b] = table[b, a] = value
    return table


def layer_similarities(make: Callable[[], Metric], features: Mapping[str, Features]) -> Values:
    """Return the similarities of all layers of one network. Shape ``[L, L]``."""
    matrix = SimilarityMatrix(make(), list(features))
    matrix.update(features, features)
    table = matrix.compute().numpy()
    return np.triu(table) + np.triu(table, 1).T


def score_predictions(make: Callable[[], Metric], population: Population) -> dict[tuple[str, str], float]:
    """Return the scores of the tests accuracy and output, by test and score."""
    places = np.triu_indices(len(population.networks), 1)
    values = similarities(make, population.features(LAYERS[-1:]))[places]
    accuracies = population.accuracies[1].numpy()
    predicted = one_hot(population.probabilities.argmax(-1), 10).double()
    disagreement = 1 - torch.einsum("ank,bnk->ab", predicted, predicted).numpy() / predicted.shape[1]
    differences = {
        ("accuracy", "spearman"): np.abs(np.subtract.outer(accuracies, accuracies)),
        ("output", "spearman"): divergences(population.probabilities),
        ("output", "spearman of disagreement"): disagreement,
    }
    return {name: correlation(values, table[places]) for name, table in differences.items()}


def score_groups(test: str, make: Callable[[], Metric], groups: Sequence[Population]) -> dict[tuple[str, str], float]:
    """Return the scores of a test with differently trained groups of networks."""
    features = [own for group in groups for own in group.features(LAYERS[-1:])]
    belongs = [number for number, group in enumerate(groups) for _ in group.networks]
    return {(test, name): value for name, value in separation(similarities(make, features), belongs).items()}


def score_layers(
    test: str, make: Callable[[], Metric], networks: Sequence[Mapping[str, Features]]
) -> dict[tuple[str, str], float]:
    """Return the scores of the test of layers, means over networks."""
    scores = [monotonicity(layer_similarities(make, own)) for own in networks]
    return {(test, name): float(np.mean([one[name] for one in scores])) for name in scores[0]}


def repetition(seed: int, members: int, epochs: int) -> tuple[list[Row], list[Row]]:
    """Train all networks of one repetition and run all tests of all measures.

    Args:
        seed: Seed of the networks and the split of the digits.
        members: Networks per group; the first two tests have four times as many.
        epochs: Number of epochs.

    Returns:
        A row for each score, and one for each group of networks.
    """
    torch.manual_seed(seed)  # for the control's numbers
    numbers = itertools.count(1000 * seed, 4 * members)  # all networks have different initial weights

    def variant(test: str, level: float) -> Population:
        data = DigitsVariant(level if test == "labels" else 0.0, level if test == "shortcut" else None, seed)
        return train(data, members, next(numbers), epochs, NOISE * level if test == "noise" else 0.0)

    plain = train(DigitsVariant(data_seed=seed), 4 * members, next(numbers), epochs)
    designs = {test: [variant(test, level) for level in LEVELS] for test in ("labels", "shortcut", "noise")}
    trained = plain.features(LAYERS)
    first = next(numbers)
    fresh = [network.fresh(first + place) for place, network in enumerate(plain.networks)]
    untrained = plain._replace(networks=fresh).features(LAYERS)
    rows = []
    for measure in MEASURES:
        scores = score_predictions(measure.make, plain)
        for test, groups in designs.items():
            scores |= score_groups(test, measure.make, groups)
        scores |= score_layers("layers", measure.make, trained)
        scores |= score_layers("layers, untrained", measure.make, untrained)
        for (test, name), value in scores.items():
            about = {"seed": seed, "test": test, "score": name, "group": measure.group, "measure": measure.title}
            rows.append({**about, "value": value, "chance": chance(name, members)})
    populations = [("accuracy, output, layers", None, plain)]
    populations += [(test, level, one) for test, own in designs.items() for level, one in zip(LEVELS, own, strict=True)]
    accuracies = [
        {
            "seed": seed,
            "test": test,
            "level": level,
            "networks": len(one.networks),
            "train_accuracy": float(one.accuracies[0].mean()),
            "test_accuracy": float(one.accuracies[1].mean()),
            "test_accuracy_std": float(one.accuracies[1].std()),
        }
        for test, level, one in populations
    ]
    return rows, accuracies


def chance(score: str, members: int) -> float:
    """Return the mean score of random numbers, for groups of so many members."""
    if score == "auprc":
        return chance_area(members * (members - 1) // 2, members * members * (len(LEVELS) - 1))
    return 0.5 if score == "conformity" else 0.0


# ---- the output


class Cell(NamedTuple):
    """A score over repetitions: mean, half of its 95 % interval (NaN for one repetition), and chance."""

    mean: float
    half: float
    chance: float

    @property
    def passes(self) -> bool:
        """Whether the whole interval is above chance; never for one repetition."""
        return self.mean - self.half > self.chance

    @property
    def text(self) -> str:
        """The score in at most ten characters."""
        half = "" if np.isnan(self.half) else "±" + f"{self.half:.2f}"[1:] if self.half < 0.995 else f"±{self.half:.1f}"
        return f"{self.mean:.2f}{half}{'*' if self.passes else ' '}"


def summarize(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Cell]]:
    """Return the cells of the table, by group and measure, then by test."""
    table: dict[tuple[str, str], dict[str, Cell]] = {}
    for measure in MEASURES:
        for test, score in TESTS.items():
            wanted = (measure.group, measure.title, test, score)
            own = [row for row in rows if (row["group"], row["measure"], row["test"], row["score"]) == wanted]
            values = np.array([row["value"] for row in own])
            half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.nan
            cell = Cell(float(values.mean()), float(half), own[0]["chance"])
            table.setdefault((measure.group, measure.title), {})[test] = cell
    return table


def text_table(table: Mapping[tuple[str, str], Mapping[str, Cell]]) -> str:
    """Return the table as text, at most 80 characters wide."""
    lines = [" " * 20 + "".join(f"{test:>9} " for test in TESTS)]
    for group, rows in itertools.groupby(table.items(), key=lambda item: item[0][0]):
        lines.append(f"up to {group}")
        for (_, title), cells in rows:
            lines.append(f" {title:19}" + "".join(f"{cell.text:>10}" for cell in cells.values()))
    first = next(iter(table.values()))
    lines.append(f"{'chance':20}" + "".join(f"{cell.chance:>9.2f} " for cell in first.values()))
    return "\n".join(line.rstrip() for line in lines)


def picture(table: Mapping[tuple[str, str], Mapping[str, Cell]]) -> Figure:
    """Draw the table: white is chance, dark blue is perfect, red is below chance; passing scores are bold."""
    cells = [list(row.values()) for row in table.values()]
    shares = np.array([[(cell.mean - cell.chance) / (1 - cell.chance) for cell in row] for row in cells])
    figure = Figure(figsize=(8.5, 0.42 * len(cells) + 1.4), layout="constrained", dpi=120)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for row, column in np.ndindex(shares.shape):
        cell, strong = cells[row][column], abs(shares[row, column]) > 0.6
        look = {"color": "white" if strong else "#1b1b1b", "weight": "bold" if cell.passes else "normal"}
        axes.text(column, row, cell.text.strip(" *"), ha="center", va="center", fontsize=8, **look)
    groups = [group for group, _ in table]
    for place in range(1, len(groups)):
        if groups[place] != groups[place - 1]:
            axes.axhline(place - 0.5, color="#1b1b1b", lw=1)
    names = [f"{title}, up to {group.split(',')[0]}" for group, title in table]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(range(len(TESTS)), [f"{test}\n{_SHOWN[score]}" for test, score in TESTS.items()], fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("from chance (0) to perfect (1); bold: passes", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def run(folder: Path, seeds: int = 3, members: int = 5, epochs: int = 80) -> str:
    """Run all tests, write the results to the folder, and return the table as text.

    Args:
        folder: Folder for the results; created if it does not exist.
        seeds: Number of repetitions, >= 1.
        members: Networks per group, >= 2.
        epochs: Number of epochs, >= 1.
    """
    rows: list[Row] = []
    networks: list[Row] = []
    for seed in range(seeds):
        start = time.process_time()
        own_rows, own_networks = repetition(seed, members, epochs)
        rows += own_rows
        networks += own_networks
        print(f"seed {seed}: {time.process_time() - start:.0f} s of CPU time", flush=True)
    table = summarize(rows)
    about = {"seeds": seeds, "members": members, "epochs": epochs}
    ResultTable("scores", "scores of measures in tests", rows, about=about).write(folder)
    ResultTable("networks", "accuracies of groups of networks", networks, about=about).write(folder)
    image = io.BytesIO()
    picture(table).savefig(image, format="png")
    (folder / "scores.png").write_bytes(image.getvalue())
    return text_table(table)


def main() -> None:
    """Run all tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/similarity-tests"))
    parser.add_argument("--seeds", type=int, default=3, help="repetitions")
    parser.add_argument("--members", type=int, default=5, help="networks per group; accuracy has 4 times as many")
    parser.add_argument("--epochs", type=int, default=80, help="number of training epochs")
    options = parser.parse_args()
    for name, least in {"seeds": 1, "members": 2, "epochs": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    print(run(options.folder, options.seeds, options.members, options.epochs))
    print(options.folder / "scores.csv", options.folder / "scores.png")


if __name__ == "__main__":
    main()
