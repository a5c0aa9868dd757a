"""The example of word embeddings: its pairs are counted rightly, and its table shows the rotation problem."""

import sys

import pytest
import torch
from helpers import example, read_rows

from lightning_sym.symmetry import trace_symmetry

module = example("word_embeddings")


def test_pairs_are_counted_in_both_directions_within_the_window():
    text = ["a", "b", "a", "c", "a", "x", "b"]
    words, pairs = module.pair_frequencies(text, words=3, window=2)
    assert words == ["a", "b", "c"]
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for i, j in [(i, j) for i in range(len(text)) for j in range(len(text)) if 0 < abs(i - j) <= 2]:
        if text[i] in words and text[j] in words:
            counts[words.index(text[i]), words.index(text[j])] += 1
    torch.testing.assert_close(pairs, counts / counts.sum(), rtol=1e-15, atol=0)


def test_neighbours_have_the_largest_cosines():
    network = module.SkipGram(4, 2).double()
    with torch.no_grad():
        network.word.weight.copy_(torch.tensor([[1.0, 0.0], [9.0, 1.0], [0.0, 1.0], [-1.0, 0.1]]))
    assert module.neighbours(network, 1).flatten().tolist() == [1, 0, 1, 2]
    one = module.SkipGram(30, 2)
    assert module.shared(one, one) == 1
    assert module.shared(one, module.SkipGram(30, 2)) < 0.9


@pytest.mark.long
def test_decay_determines_the_vectors_up_to_rotations_and_canonical_forms_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["word_embeddings.py", "--out", str(tmp_path)])
    module.main()
    assert "invertible matrices, on word.weight[1], context.weight[1]" in capsys.readouterr().out
    assert (tmp_path / "word_embeddings.png").stat().st_size > 10_000
    free, decayed = read_rows(tmp_path / "word_embeddings")
    assert free["gram_difference"] > 0.05
    assert decayed["gram_difference"] < 0.001  # a property of every minimum
    for row, share in ((free, 1), (decayed, 5)):  # without decay, training ends at other points on other machines
        assert row["neighbours_moved"] < 0.9
        assert row["neighbours_canonical"] == 1  # a property of the form
        assert row["distance_aligned"] <= row["distance_canonical"] + 1e-9 < row["distance_trained"] / share
    assert decayed["distance_canonical"] < 0.1
    assert decayed["neighbours_both"] > 0.9


def test_decay_is_least_where_gram_matrices_are_equal():
    """The objective with decay has a smaller value at the canonical form than at any other point of the orbit."""
    network = module.SkipGram(20, 3).double()
    symmetry = trace_symmetry(network, torch.arange(3))
    assert symmetry.dimension == 9
    form = module.canonicalize(symmetry, network).network
    one, two = (weight.T @ weight for weight in (form.word.weight, form.context.weight))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)

    def squares(own):
        return sum(float(weight.detach().square().sum()) for weight in own.parameters())

    for seed in range(5):
        other = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), form)
        assert squares(form) < squares(other)
        torch.testing.assert_close(other(torch.arange(20)), form(torch.arange(20)))
