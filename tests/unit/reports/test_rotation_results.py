"""Rows, means, intervals and differences of rotated networks, from plain numbers."""

import numpy as np
import pytest

from lightning_sym.reports.rotation import resampled_interval, rotation_results, rotation_rows, rotation_summary

KINDS = {"group": 2, "orthogonal": 2, "none": 1, "undo": 2}  # repeats
NETWORKS = [
    {"name": f"{member}/{site}/{kind}/{repeat}", "member": member, "site": site, "kind": kind, "repeat": repeat,
     "epoch": 1}
    for member in (0, 2) for site in ("a", "b") for kind, repeats in KINDS.items() for repeat in range(repeats)
]  # fmt: skip


def evaluations(seed=0, splits=("test", "val")):
    found = {}
    for split in splits:
        penalties = np.random.default_rng(seed).uniform(0, 0.2, len(NETWORKS))
        member = [0.9 - 0.1 * network["member"] for network in NETWORKS]
        accuracy = [whole - penalty for whole, penalty in zip(member, penalties.tolist(), strict=True)]
        found[split] = {
            "accuracy": accuracy, "loss": accuracy, "penalty": penalties.tolist(), "member_accuracy": member,
        }  # fmt: skip
    return found


def results(networks, found, stopped=None):
    about, numbers = {"seed": 0}, {"test_penalty/group": 0.1}
    return rotation_results(
        networks, found, stopped or {}, title="Net", about=about, numbers=numbers, headline="test_penalty/group"
    )  # fmt: skip


def test_rows_hold_what_was_evaluated_on_each_split():
    found = evaluations(splits=("test",))
    found["test"]["penalty"][3] = float("nan")
    rows = rotation_rows(NETWORKS, found, {3: "why"})
    assert [(row["member"], row["site"], row["kind"], row["repeat"]) for row in rows] == [
        (one["member"], one["site"], one["kind"], one["repeat"]) for one in NETWORKS
    ]
    for index, row in enumerate(rows):
        assert row["val_penalty"] is row["val_accuracy"] is row["member_val_accuracy"] is None  # no such split
        assert row["test_accuracy"] == found["test"]["accuracy"][index]
        assert row["member_test_accuracy"] == 0.9 - 0.1 * row["member"]
    assert (rows[3]["test_penalty"], rows[3]["stopped"]) == (None, "why")


def test_the_summary_agrees_with_the_rows():
    rows = rotation_rows(NETWORKS, evaluations(), {})
    summary = rotation_summary(rows)
    assert [(row["site"], row["kind"]) for row in summary] == [(site, kind) for site in "ab" for kind in KINDS]
    for row in summary:
        own = [r for r in rows if (r["site"], r["kind"]) == (row["site"], row["kind"])]
        values = np.array([[r["test_penalty"] for r in own if r["member"] == member] for member in (0, 2)])
        assert row["penalty"] == pytest.approx(values.mean(), abs=1e-12)
        assert row["val_penalty"] == pytest.approx(np.mean([r["val_penalty"] for r in own]), abs=1e-12)
        assert (row["members"], row["networks"]) == (2, values.size)
        spread = None if row["kind"] == "none" else pytest.approx(np.sqrt(values.var(1, ddof=1).mean()), abs=1e-12)
        assert row["std"] == spread
        assert (row["interval_over"], row["low"], row["high"]) == ("", None, None)  # resamples of two say nothing
        if row["kind"] == "group":
            group = values.mean(1)
        above = None if row["kind"] == "group" else pytest.approx((values.mean(1) - group).mean(), abs=1e-12)
        assert row["above_group"] == above
        assert row["above_group_low"] is None


def test_the_interval_of_a_mean():
    assert resampled_interval([]) == (None, None, "")
    assert (
        resampled_interval([[0.5]])
        == resampled_interval([[0.5, 0.1]])
        == resampled_interval([[0.5], [0.1]])
        == (None, None, "")
    )
    assert resampled_interval([[0.5], [0.1], [0.3]])[2] == "members"
    assert resampled_interval([[0.5, 0.1, 0.3]])[2] == "repeats"
    low, high, over = resampled_interval([list(np.random.default_rng(1).normal(size=400))])
    assert over == "repeats"
    # Of 400 standard normal numbers the mean is known to 1.96 / 20.
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
