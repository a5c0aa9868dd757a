"""The rotation problem of word embeddings: which similarities of words does training determine?

A skip-gram model has a vector u for each word and a vector c for each context word. It predicts contexts by the softmax
of u · c, so that any invertible matrix A may act by u -> A u, c -> A⁻ᵀ c. Cosines between word vectors are preserved by
orthogonal matrices only. So training does not determine them, as Carrington, Bharath and Preston (2019),
arXiv:1911.02656, point out:

    python examples/word_embeddings.py

trains embeddings of 200 words of Python's manual, which comes with Python (``pydoc_data.topics``), from two seeds, with
and without weight decay. Decay leaves orthogonal matrices only, and makes the Gram matrices of both kinds of vectors
equal, as the canonical form does. Rows of the table, with a column for each decay (``word_embeddings.csv`` has rows for
the decays):

loss                   mean loss of the two networks, without decay
gram_difference        relative difference of the Gram matrices of word and context vectors
neighbours_moved       share of the ten nearest words that are still the nearest ten after a random invertible matrix
neighbours_canonical   the same, with both brought to their canonical forms
distance_trained       relative distance of the weights of the two seeds
distance_canonical     of their canonical forms
distance_aligned       of the first and the second, which is aligned to it by an invertible matrix
neighbours_trained     share of nearest words that the two seeds have in common
neighbours_both        the same, of their canonical forms

``word_embeddings.png`` shows the absolute cosines between the dimensions of the two seeds.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_sym.figures import HeatMap, similarity_maps
from lightning_sym.reports import ResultTable
from lightning_sym.symmetry import Symmetry, canonicalize, parameter_distance, trace_symmetry, weight_matching

WORDS, DIMENSIONS, WINDOW, NEAREST = 200, 8, 4, 10
DECAYS = (0.0, 1e-4)
Couple = tuple[nn.Module, nn.Module]


class SkipGram(nn.Module):
    """Predict the words around a word."""

    def __init__(self, words: int, dimensions: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, dimensions)
        self.context = nn.Linear(dimensions, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of all context words. Shape ``[N, words]``.

        Args:
            words: Indices. Shape ``[N]``, int64.
        """
        logits: Tensor = self.context(self.word(words))
        return logits


def manual() -> list[str]:
    """Return the words of Python's manual, as far as ``help()`` has it, in lower case."""
    return re.findall("[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())


def pair_frequencies(text: Sequence[str], words: int = WORDS, window: int = WINDOW) -> tuple[list[str], Tensor]:
    """Count how often the most frequent words occur near one another.

    Args:
        text: All words, in order.
        words: Number of words that are kept.
        window: Largest distance between two words of a pair.

    Returns:
        The words, and the frequencies of pairs of word and context word, which add up to 1. Shape ``[words, words]``,
        float64, symmetric.
    """
    vocabulary = [word for word, _ in Counter(text).most_common(words)]
    index = {word: number for number, word in enumerate(vocabulary)}
    numbers = torch.tensor([index.get(word, -1) for word in text])
    counts = torch.zeros(len(vocabulary), len(vocabulary), dtype=torch.float64)
    for apart in range(1, window + 1):
        known = (numbers[:-apart] >= 0) & (numbers[apart:] >= 0)
        pairs = numbers[:-apart][known], numbers[apart:][known]
        counts.index_put_(pairs, torch.ones(len(pairs[0]), dtype=counts.dtype), accumulate=True)
    return vocabulary, (counts + counts.T) / (2 * counts.sum())


def train(pairs: Tensor, seed: int, decay: float, *, dimensions: int = DIMENSIONS, steps: int = 500) -> SkipGram:
    """Minimise the loss on all pairs by L-BFGS, in float64.

    Args:
        pairs: Frequencies of pairs. Shape ``[V, V]``.
        seed: Seed of the initial weights.
        decay: Factor of the squared norm of all weights in the objective, >= 0.
        dimensions: Of the vectors.
        steps: Most steps.
    """
    network, generator = SkipGram(len(pairs), dimensions).double(), torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    optimizer = torch.optim.LBFGS(
        network.parameters(),
        max_iter=steps,
        max_eval=2 * steps,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss(network, pairs) + decay * sum(weight.square().sum() for weight in network.parameters())
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return network


def loss(network: SkipGram, pairs: Tensor) -> Tensor:
    """Return the cross-entropy of context words, in nats."""
    return -(pairs * torch.log_softmax(network(torch.arange(len(pairs))), 1)).sum()


def vectors_of(network: nn.Module) -> Tensor:
    """Return the word vectors. Shape ``[V, d]``."""
    return network.get_parameter("word.weight").detach()


def neighbours(network: nn.Module, count: int = NEAREST) -> Tensor:
    """Return the words with the largest cosines to each word, without itself. Shape ``[V, count]``, int64."""
    vectors = nn.functional.normalize(vectors_of(network), dim=1)
    return (vectors @ vectors.T).fill_diagonal_(-2).topk(count, 1).indices


def shared(one: nn.Module, two: nn.Module) -> float:
    """Return the share of nearest words that two networks have in common, from 0 to 1."""
    a, b = neighbours(one), neighbours(two)
    return float((a[:, :, None] == b[:, None, :]).any(2).double().mean())


def compared(symmetry: Symmetry, pairs: Tensor, decay: float) -> tuple[dict[str, Any], list[Couple]]:
    """Train two networks and compare them.

    Returns:
        The row of the table, and the two networks as trained, in canonical form and aligned.
    """
    one, two = (train(pairs, seed, decay) for seed in (0, 1))
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), one)
    forms = [canonicalize(symmetry, network).network for network in (one, two, moved)]
    aligned = weight_matching(symmetry, one, two).network
    size = float(torch.cat([weight.detach().flatten() for weight in one.parameters()]).norm())
    grams = [weight.detach().T @ weight.detach() for weight in (one.word.weight, one.context.weight)]
    couples: list[Couple] = [(one, two), (forms[0], forms[1]), (one, aligned)]
    distances = [parameter_distance(a, b) / size for a, b in couples]
    with torch.no_grad():
        losses = [float(loss(network, pairs)) for network in (one, two)]
    return {
        "decay": decay,
        "loss": sum(losses) / 2,
        "gram_difference": float((grams[0] - grams[1]).norm() / grams[0].norm()),
        "neighbours_moved": shared(one, moved),
        "neighbours_canonical": shared(forms[0], forms[2]),
        **dict(zip(("distance_trained", "distance_canonical", "distance_aligned"), distances, strict=True)),
        "neighbours_trained": shared(one, two),
        "neighbours_both": shared(forms[0], forms[1]),
    }, couples


def cosines(one: nn.Module, two: nn.Module) -> Tensor:
    """Return the absolute cosines between the dimensions of two networks' word vectors. Shape ``[d, d]``."""
    a, b = (nn.functional.normalize(vectors_of(network), dim=0) for network in (one, two))
    return (a.T @ b).abs()


def picture(couples: Sequence[Couple]) -> Figure:
    """Draw the cosines between the dimensions of two networks as trained, in canonical form, and aligned."""
    names = ("as trained", "canonical forms", "aligned")
    values = {name: cosines(*couple).numpy() for name, couple in zip(names, couples, strict=True)}
    dimensions = [str(number + 1) for number in range(len(values[names[0]]))]
    return similarity_maps([HeatMap("|cosine|", values)], dict.fromkeys(names, (dimensions, dimensions)))


def main() -> None:
    """Write the table and the picture."""
    parser = argparse.ArgumentParser(description="Compare word embeddings up to invertible matrices.")
    parser.add_argument("--out", type=Path, default=Path("runs/word-embeddings"), help="folder of table and picture")
    out = parser.parse_args().out
    _, pairs = pair_frequencies(manual())
    symmetry = trace_symmetry(SkipGram(len(pairs), DIMENSIONS).double(), torch.arange(3))
    print(symmetry)
    found = [compared(symmetry, pairs, decay) for decay in DECAYS]
    rows = [row for row, _ in found]
    for name in rows[0]:
        print(f"{name:22}" + "".join(f"{row[name]:10.4g}" for row in rows))
    out.mkdir(parents=True, exist_ok=True)
    ResultTable("word_embeddings", "two seeds with and without weight decay", rows).write(out)
    picture(found[-1][1]).savefig(out / "word_embeddings.png", dpi=150)


if __name__ == "__main__":
    main()
