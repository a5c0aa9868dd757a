"""The small benchmark of measures: its scores rank as they should, its data are what they claim, and it runs."""

import itertools
import sys

import numpy as np
import pytest
import torch
from helpers import example, read_csv, read_rows
from scipy.spatial.distance import jensenshannon

pytestmark = pytest.mark.long

module = example("similarity_tests")

GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
DRAWS = 400


def random_table(source, size):
    table = np.triu(source.random((size, size)), 1)
    return table + table.T


# ---- scores


def same_group(groups):
    return (np.subtract.outer(groups, groups) == 0).astype(float)


def distance(size):
    return np.abs(np.subtract.outer(np.arange(size), np.arange(size))).astype(float)


def ranked(similarities):
    return {"spearman": module.correlation(similarities, np.arange(len(similarities)))}


def separated(table):
    return module.separation(table, GROUPS)


@pytest.mark.parametrize(
    ("score", "perfect", "expected"),
    [
        pytest.param(ranked, -(np.arange(20.0) ** 3), {"spearman": 1}, id="correlation"),
        pytest.param(separated, same_group(GROUPS), {"auprc": 1, "conformity": 1}, id="separation"),
        pytest.param(module.monotonicity, -distance(6), {"spearman": 1, "conformity": 1}, id="monotonicity"),
    ],
)
def test_an_exact_measure_scores_one_the_reverse_least_a_constant_and_a_random_one_chance(score, perfect, expected):
    assert score(perfect) == pytest.approx(expected)
    least = {"spearman": -1, "conformity": 0}
    assert {name: value for name, value in score(-perfect).items() if name in least} == pytest.approx(
        {name: value for name, value in least.items() if name in expected}
    )
    # Of 9 networks in 3 groups, a group has 3 pairs, and shares 18 with the others.
    chance = {"spearman": 0.0, "conformity": 0.5, "auprc": module.chance_area(3, 18)}
    tied = {**chance, "auprc": 3 / 21}  # average precision takes all that are tied together
    assert score(0 * perfect) == pytest.approx({name: tied[name] for name in expected})
    source = np.random.default_rng(0)
    draw = (lambda: source.random(20)) if perfect.ndim == 1 else lambda: random_table(source, len(perfect))
    drawn = [score(draw()) for _ in range(DRAWS)]
    for name in expected:
        values = np.array([one[name] for one in drawn])
        assert values.mean() == pytest.approx(chance[name], abs=4 * values.std() / DRAWS**0.5)
        assert values.std() > 0.03


def test_divergences_are_those_of_scipy():
    probabilities = torch.rand(4, 6, 10, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    expected = [
        [(jensenshannon(a, b, axis=-1) ** 2).mean() for b in probabilities.numpy()] for a in probabilities.numpy()
    ]
    np.testing.assert_allclose(module.divergences(probabilities), expected, atol=1e-12)


# ---- measures


def changes():
    """Return, by group, an element that acts on the channels of features, from the smallest group to the largest."""
    source = torch.Generator().manual_seed(1)
    permutation = torch.eye(6)[torch.randperm(6, generator=source)].double()
    matrix = torch.randn(6, 6, generator=source, dtype=torch.float64)
    return {
        "permutations": permutation,
        "permutations and scales": permutation * torch.tensor([0.2, 1, 3, 0.5, 2, 1.5]).double(),
        "rotations": torch.linalg.qr(matrix)[0],
        "invertible maps": matrix,
    }


@pytest.mark.parametrize("measure", module.MEASURES[:-1], ids=lambda measure: f"{measure.group}-{measure.title}")
def test_a_measure_is_up_to_its_group_and_not_up_to_the_others(measure):
    group = measure.group.split(",")[0]
    x = torch.rand(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similar = {}
    for name, matrix in changes().items():
        metric = measure.make()
        metric.update(x, x @ matrix)
        similar[name] = float(metric.compute())
    inside = set(similar) if group == "invertible maps" else {"permutations", group}
    assert {name for name, value in similar.items() if value > 1 - 1e-6} == inside


# ---- data and networks


def parts(**settings):
    data = module.DigitsVariant(**settings)
    return data.split_tensors("train"), data.split_tensors("test")


def test_random_labels_are_those_of_training_only_and_fewer_are_part_of_more():
    (images, labels), (_, tested) = parts()
    wrong = []
    for level in module.LEVELS[1:]:
        (same, own), (_, own_tested) = parts(random_labels=level)
        assert torch.equal(same, images)
        assert torch.equal(own_tested, tested)
        wrong.append(own != labels)
        assert float(wrong[-1].double().mean()) == pytest.approx(0.9 * level, abs=0.06)
    assert all(bool((more >= fewer).all()) for fewer, more in itertools.pairwise(wrong))


def test_a_shortcut_tells_the_label_in_training_only():
    edge = torch.tensor([0, 8, 16, 24, 32, 40, 48, 56, 31, 39])
    shown = {}
    for level in module.LEVELS:
        (images, labels), (tests, test_labels) = parts(shortcut=level)
        right = images.flatten(1).gather(1, edge[labels][:, None]) == 255
        assert float(right.double().mean()) == pytest.approx(level + (1 - level) / 10, abs=0.04)
        told = tests.flatten(1).gather(1, edge[test_labels][:, None]) == 255
        assert float(told.double().mean()) == pytest.approx(0.1, abs=0.03)
        assert bool((tests.flatten(1)[:, edge] == 255).any(1).all())
        shown[level] = tests
    assert all(torch.equal(one, shown[0.0]) for one in shown.values())  # all groups are compared on the same images


# ---- what is shown


def rows(values):
    names = ("seed", "test", "score", "group", "measure", "value", "chance")
    return [
        dict(zip(names, (seed, test, score, m.group, m.title, value, 0.1), strict=True))
        for m in module.MEASURES
        for test, score in module.TESTS.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5, 0.6, 0.7], "0.60±.25*"),  # 4.303 * 0.1 / sqrt(3)
        ([0.2, 0.3, 0.4], "0.30±.25"),
        ([-0.9, 0.9], "0.00±11.4"),
        ([0.9], "0.90"),
    ],
)
def test_a_measure_passes_where_the_whole_interval_is_above_chance(values, text):
    table = module.summarize(rows(values))
    (cell,) = {cell.text.strip() for own in table.values() for cell in own.values()}
    assert cell == text
    lines = module.text_table(table).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count(text) for line in lines) == len(module.MEASURES) * len(module.TESTS)


def test_run_writes_table_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "MEASURES", module.MEASURES[-3:])
    text = module.run(tmp_path / "here", seeds=1, members=2, epochs=1)
    assert "up to invertible maps" in text
    assert "seed 0: " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        *("scores.csv", "scores.json", "networks.csv", "networks.json", "scores.png")
    }
    found = read_rows(tmp_path / "here" / "scores")
    assert {row["test"] for row in found} == {*module.TESTS, "layers, untrained"}
    assert all(np.isfinite(row["value"]) for row in found)
    assert len(read_csv(tmp_path / "here" / "networks.csv")) == 1 + 3 * len(module.LEVELS)


@pytest.mark.parametrize(("option", "least"), [("seeds", 1), ("members", 2), ("epochs", 1)])
def test_too_few_are_refused_before_anything_is_trained(option, least, monkeypatch, capsys):
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("something was trained"))
    monkeypatch.setattr(sys, "argv", ["similarity_tests", f"--{option}", str(least - 1)])
    with pytest.raises(SystemExit):
        module.main()
    assert f"--{option} must be at least {least}, got {least - 1}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_measures_pass_and_random_numbers_do_not(tmp_path):
    module.run(tmp_path, seeds=1)
    found = {(row["group"], row["measure"], row["test"], row["score"]): row for row in read_rows(tmp_path / "scores")}
    linear, control = ("rotations", "linear CKA"), ("everything", "random numbers")
    assert found[*linear, "layers", "spearman"]["value"] > 0.95
    assert found[*linear, "labels", "auprc"]["value"] > 0.8
    assert all(abs(row["value"] - row["chance"]) < 0.2 for key, row in found.items() if key[:2] == control)
    networks = {(row["test"], row["level"]): row for row in read_rows(tmp_path / "networks")}
    assert networks["labels", 1.0]["train_accuracy"] > 0.9  # random labels were learned by heart
    assert networks["shortcut", 1.0]["test_accuracy"] < networks["shortcut", 0.0]["test_accuracy"] - 0.3
