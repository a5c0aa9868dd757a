"""Rows, means and headline of stitched networks, from plain numbers."""

from pathlib import Path
from statistics import mean, stdev

import pytest
from helpers import printed

from lightning_sym._tags import details
from lightning_sym.reports.stitching import differs_by_number, stitching_results, stitching_rows, stitching_summary


def network(lower, upper, site, family, batch_norm=False, target_site=None):
    target_site = target_site or site
    return {
        "name": f"pair-{lower}-{upper}/{site}/{family}", "lower": lower, "upper": upper, "site": site,
        "target_site": target_site, "place": site if site == target_site else f"{site}-{target_site}",
        "family": family, "trained": family != "identity", "batch_norm": batch_norm, "ports": 1, "dimension": 4,
        "sparsity": 0.5, "epoch": 0, "val_accuracy": 0.9, "val_loss": 0.3,
    }  # fmt: skip


def evaluation(penalties):
    return {"accuracy": [0.9 - p for p in penalties], "loss": [0.1 + p for p in penalties], "penalty": penalties}


def results(networks, evaluations, stopped=None, **settings):
    return stitching_results(networks, evaluations, stopped or {}, title="Net, 2 pairs", about={"seed": 0}, **settings)


NETWORKS = [network(0, 1, "a", "full", True), network(0, 1, "b", "full"), network(1, 2, "a", "full", True),
            network(1, 2, "b", "full"), network(0, 1, "a", "identity", True)]  # fmt: skip
EVALUATIONS = {"as is": evaluation([0.3, 0.02, 0.5, 0.04, 0.6]), "recalibrated": evaluation([0.1, 9, 0.2, 9, 0.5])}


def test_rows_are_those_of_networks_and_kinds_of_statistics():
    rows = stitching_rows(NETWORKS, EVALUATIONS, {2: "its training loss is not finite"})
    # Without batch norm above the cut there is nothing to measure anew: one row, two elsewhere.
    assert [row["batch_norm"] for row in rows] == ["as is", "none", "as is", "none", "as is", *["recalibrated"] * 3]
    assert [row["penalty"] for row in rows] == [0.3, 0.02, None, 0.04, 0.6, 0.1, None, 0.5]
    assert rows[2]["stopped"] == "its training loss is not finite"
    assert rows[2]["accuracy"] is rows[2]["loss"] is None
    assert "name" not in rows[0]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"full": 0.3, "rank(4)": 0.1, "group": 0.2}, ["full loses 20.0 more than rank(4), which it contains: not "]),
        ({"full": 0.305, "rank(4)": 0.3}, []),  # by chance
        ({"rank(4)": 0.5, "rank(2)": 0.1, "group": 0.01}, ["rank(4) loses 40.0 more than rank(2)"]),
        ({"rank(1)": 0.5, "rank(2)": 0.1, "group": 0.01, "identity": 0.0}, []),  # none contains another one
        ({"full": 0.3, "identity": 0.0}, []),  # what is not trained is no family
    ],
)
def test_a_family_that_loses_more_than_one_it_contains_was_not_trained_to_the_end(losses, said):
    networks = [network(0, 1, site, family) for site in "ab" for family in losses]
    found = results(networks, {"as is": evaluation([*losses.values()] * 2)}, epochs=4)
    notes = [note for note in found.notes if "which it contains" in note]
    assert len(notes) == len(said)
    for note, start in zip(notes, said, strict=True):
        assert note.startswith(start)
        assert note.endswith("more epochs: --trainer.max_epochs 8")


def test_means_are_over_pairs_that_were_not_stopped():
    rows = stitching_rows(NETWORKS, EVALUATIONS, {})
    summary = {(row["place"], row["family"], row["batch_norm"]): row for row in stitching_summary(rows)}
    for key, row in summary.items():
        values = [r["penalty"] for r in rows if (r["place"], r["family"], r["batch_norm"]) == key]
        assert row["penalty"] == pytest.approx(mean(values))
        assert row["pairs"] == len(values)
        assert row["penalty_std"] == (pytest.approx(stdev(values)) if len(values) > 1 else None)
    interval = summary["a", "full", "as is"]
    assert interval["penalty_low"] <= interval["penalty"] <= interval["penalty_high"]
    none = stitching_summary(stitching_rows(NETWORKS[:1], EVALUATIONS, {0: "why"}))[0]
    assert (none["penalty"], none["pairs"], none["note"]) == (None, 0, "all pairs were stopped")


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2), (2, 0), (0, 0)], [(0, 1), (1, 2), (2, 0)]])
def test_members_of_two_zoos_have_a_spread_and_no_interval(pairs):
    """Equal numbers are different models, so are different ones."""
    networks = [network(*pair, "a", "identity") for pair in pairs]
    values = [0.1, 0.3, 0.2, 0.6][: len(pairs)]
    (row,) = stitching_summary(stitching_rows(networks, {"as is": evaluation(values)}, {}), two_zoos=True)
    assert row["penalty_std"] == pytest.approx(stdev(values))
    assert row["penalty_low"] is row["penalty_high"] is None
    assert row["note"] == "no interval: a zoo stitched to another one"


def test_the_headline_is_the_mean_over_trained_maps_with_the_best_statistics():
    found = results(NETWORKS, EVALUATIONS)
    # Places a and b; the identity is not trained.
    assert found.numbers[found.headline] == pytest.approx(mean([0.15, 0.03]))
    of_places = {"test_penalty/a/full": 0.15, "test_penalty/b/full": 0.03, "test_penalty/a/identity": 0.5}
    assert found.numbers == pytest.approx({"test_penalty": 0.09, **details(of_places)})
    assert [table.name for table in found.tables] == ["penalties", "summary"]
    assert found.tables[1].about == {"seed": 0}
    text = printed(lambda console: found.show(console, Path("there"), Path("run")))
    for word in ("recalibrated", "identity *", "15.0 ± 7.1", "Net, 2 pairs", "picture there/penalties.png"):
        assert word in text


def test_the_best_map_on_validation_data_is_chosen_for_each_pair_and_site():
    families = ["full", "group(0.1)", "group(10)", "group(euclidean,1)", "group(euclidean,2)"]
    networks = [network(*pair, site, family) for pair in [(0, 1), (1, 2)] for site in "ab" for family in families]
    penalties = [index / 100 for index in range(len(networks))]
    accuracies = iter([0.5, 0.9, 0.8, 0.7, 0.7, 0.5, 0.9, 0.9, 0.1, 0.2] * 2)
    losses = iter([0.1, 0.3, 0.2, 0.5, 0.4, 0.1, 0.3, 0.2, 0.1, 0.1] * 2)
    for one in networks:
        one["val_accuracy"], one["val_loss"] = next(accuracies), next(losses)
    # At b, equal accuracies: the lower loss. The Euclidean one of the last network was stopped: the other one is left.
    found = results(networks, {"as is": evaluation(penalties)}, {19: "why"}, choose=["group", "group(euclidean)"])
    table, summary, choices = found.tables
    chosen = {(row["lower"], row["place"], row["family"]): row for row in table.rows if row["chosen"]}
    expected = {
        (0, "a", "group(chosen)"): 1, (0, "b", "group(chosen)"): 7, (1, "a", "group(chosen)"): 11,
        (1, "b", "group(chosen)"): 17, (0, "a", "group(euclidean,chosen)"): 4, (0, "b", "group(euclidean,chosen)"): 9,
        (1, "a", "group(euclidean,chosen)"): 14, (1, "b", "group(euclidean,chosen)"): 18,
    }  # fmt: skip
    assert {key: (row["chosen"], row["penalty"]) for key, row in chosen.items()} == {
        key: (networks[index]["family"], penalties[index]) for key, index in expected.items()
    }
    means = {(row["place"], row["family"]): row["penalty"] for row in summary.rows}
    assert means["b", "group(chosen)"] == pytest.approx((0.07 + 0.17) / 2)
    counts = {(row["place"], row["chosen"]): (row["pairs"], row["share"]) for row in choices.rows}
    assert counts["a", "group(0.1)"] == counts["b", "group(10)"] == (2, 1.0)
    assert counts["a", "group(10)"] == counts["b", "group(0.1)"] == (0, 0.0)
    assert counts["b", "group(euclidean,1)"] == counts["b", "group(euclidean,2)"] == (1, 0.5)
    # The chosen maps stand for those they were chosen from.
    shown = ["full", "group(chosen)", "group(euclidean,chosen)"]
    assert found.numbers["test_penalty"] == pytest.approx(mean([means[site, name] for site in "ab" for name in shown]))
    assert [name for name, _ in found.figures] == ["penalties", "choices"]
    assert found.places["choices"] == "choices.png"


def test_of_maps_that_were_never_validated_none_is_chosen_and_all_are_drawn():
    networks = [network(0, 1, "a", family) for family in ("full", "rank(1)", "rank(2)")]
    for one in networks:
        one["val_accuracy"] = one["val_loss"] = None
    found = results(networks, {"as is": evaluation([0.1, 0.2, 0.3])}, choose=["rank"])
    assert [table.name for table in found.tables] == ["penalties", "summary"]
    assert found.numbers["test_penalty"] == pytest.approx(0.2)
    assert "no rank map was validated, so none was chosen" in found.notes


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("group(1e-05)", "group"),
        ("group(euclidean,0.1)", "group(euclidean)"),
        ("group(euclidean, 1E-3)", "group(euclidean)"),
        ("group( 1_0 )", "group"),
        ("rank(4)", "rank"),
        ("lasso(0)", "lasso"),
    ],
)
def test_families_that_differ_by_a_number(family, base):
    assert differs_by_number(family, base)
    assert not differs_by_number(base, base)
    assert not differs_by_number(family, family)
    assert not differs_by_number(f"{base}(chosen)", base)
