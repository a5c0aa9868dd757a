"""Groups of runs that differ by seed only: means, intervals and differences do not depend on how runs are given."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_refused, printed, too_small
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from lightning_sym._runs import FinishedRun
from lightning_sym._statistics import student_interval
from lightning_sym.reports import ResultTable
from lightning_sym.reports.comparison import compare_runs, difference_interval


def run(name, numbers, width=8, seed=0, **more):
    chosen = {"model.network.widths": f"[{width}]", "model.seed": str(seed), **more.pop("options", {})}
    fields = {"logged": {}, "units": {"loss": "nats"}, **more}
    return FinishedRun(name, Path("runs") / name, chosen, numbers, **fields)


values = st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: round(value, 6))
seeds = st.lists(values, min_size=1, max_size=5, unique=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(seeds, min_size=2, max_size=3), st.data())
def test_groups_by_seed_have_students_interval_in_any_order_of_the_runs(groups, data):
    runs = [
        run(f"w{width}-{seed}", {"loss": value}, width, seed)
        for width, own in enumerate(groups)
        for seed, value in enumerate(own)
    ]
    rows = compare_runs(runs).table.rows
    for own, row in zip(groups, rows, strict=True):
        assert row["runs"] == len(own)
        assert row["mean"] == pytest.approx(np.mean(own))
        if len(own) > 1:
            assert (row["low"], row["high"]) == pytest.approx(student_interval(own), rel=1e-9, abs=1e-9)
        else:
            assert row["low"] is row["high"] is row["std"] is None
    same = ("runs", "mean", "std", "low", "high")
    moved = {row["group"]: row for row in compare_runs(data.draw(st.permutations(runs))).table.rows}
    assert {name: [row[key] for key in same] for name, row in moved.items()} == {
        row["group"]: [row[key] for key in same] for row in rows
    }


@settings(max_examples=25, deadline=None, derandomize=True)
@given(*[st.lists(values, min_size=2, max_size=6, unique=True)] * 2)
def test_differences_have_welchs_interval(a, b):
    low, high = difference_interval(a, b)
    expected = ttest_ind(a, b, equal_var=False).confidence_interval()
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-6)
    assert difference_interval(b, a) == pytest.approx((-high, -low), rel=1e-9, abs=1e-12)
    assert difference_interval([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0)


def test_what_intervals_decide_is_marked():
    runs = [
        run(f"{name}{n}", {"loss": of_all + 0.01 * n, "same": n % 2 + 0.1 * of_all * n}, width, n)
        for name, width, of_all in (("narrow", 2, 1), ("wide", 9, 2))
        for n in (0, 1, 2)
    ]
    found = compare_runs(runs)
    rows = {(row["number"], row["group"]): row for row in found.table.rows}
    assert [rows[name, "wide"]["decided"] for name in ("loss", "same")] == [True, False]
    assert rows["loss", "wide"]["difference"] == pytest.approx(1)
    text = printed(found.show)
    for said in ("model.network.widths [2] [9]", "model.seed 0-2 0-2", "2.0100 *", "loss: nats"):
        assert said in text
    assert "1.0100 *" not in text
    assert found.settings == {"model.network.widths": ["[2]", "[9]"], "model.seed": ["0-2", "0-2"]}
    (panel, other) = found.figure().axes
    assert (panel.get_title(), other.get_title()) == ("loss", "same")
    assert not too_small(found.figure())
    assert [label.get_text() for label in panel.get_yticklabels()] == ["narrow", "wide"]


def test_runs_that_repeat_one_another_count_once():
    """A seed that a task does not use leaves the same numbers; time may differ."""
    logged = [{"val/loss": 0.25, "time/epoch_s": second} for second in (1.0, 2.0)]
    runs = [run(f"a{n}", {"loss": 0.5}, seed=n, logged=logged[n]) for n in (0, 1)]
    found = compare_runs([*runs, run("a2", {"loss": 0.75}, seed=2)])
    assert [row["runs"] for row in found.table.rows] == [2]
    assert any("a1 repeats a0" in note for note in found.notes)
    assert set(found.table.about["values"]) == {"a0", "a2"}


def test_a_run_that_a_mean_leaves_out_is_named():
    """Seeds that diverged have no number at the end; the mean of the others says nothing about them."""
    lost = {"loss": math.nan}
    runs = [run("a0", {"loss": 0.5}), run("a1", lost, seed=1), run("a2", lost, seed=2), run("b0", {"loss": 1.0}, 9)]
    found = compare_runs(runs)
    assert [row["runs"] for row in found.table.rows] == [1, 1]
    for name in ("a1", "a2"):  # which do not repeat one another
        assert f"{name} has no finite loss: means of a leave this run out there" in found.notes
    assert not any("repeats" in note for note in found.notes)


def test_a_table_without_rows_is_named(tmp_path):
    for name, rows in (("a", []), ("b", [{"k": 1, "v": 2.0}])):
        ResultTable("t", "", rows).write(tmp_path / name / "results")
    found = [dataclasses.replace(run(name, {}, seed=n), folder=tmp_path / name) for n, name in enumerate("ab")]
    assert_refused(compare_runs, found, table="t", says=["The table t of", "a has no rows; choose another one"])


def test_names_with_brackets_are_printed_as_they_are():
    options = {"model.note": "[/tmp]"}
    found = compare_runs([run("run[red]", {"a[b]": 1.0}), run("x[i]", {"a[b]": 2.0}, width=9, options=options)])
    found = dataclasses.replace(found, settings={"model.note": ["[/tmp]", "[i]y"]})
    text = printed(found.show)
    for name in ("run[red]", "x[i]", "a[b]", "[/tmp]", "[i]y"):
        assert name in text


def test_members_of_two_runs_that_are_the_same_networks_are_named():
    runs = [run(f"a{n}", {"loss": float(n)}, seed=n, members=frozenset(range(n, n + 3))) for n in (0, 1)]
    assert any("a0 and a1 have members 1-2 in common" in note for note in compare_runs(runs).notes)
    apart = [run(f"a{n}", {"loss": float(n)}, seed=n, members=frozenset({n})) for n in (0, 1)]
    assert not any("in common" in note for note in compare_runs(apart).notes)


def test_patterns_choose_numbers_and_ignored_settings_make_no_group():
    options = [{"model.zoo": f"runs/{n}/zoo", "model.network": kind} for n, kind in enumerate(("Net", "Net", "Other"))]
    numbers = {"test/loss": 0.1, "details/test/loss/a": 0.2}
    runs = [
        run(f"r{n}", {name: value + n for name, value in numbers.items()}, options=own, logged={"val/loss": 0.3 + n})
        for n, own in enumerate(options)
    ]

    def names(**chosen):
        return list(dict.fromkeys(row["number"] for row in compare_runs(runs, **chosen).table.rows))

    assert names() == ["test/loss"]
    assert names(metrics=["*loss*"]) == ["test/loss", "details/test/loss/a", "val/loss"]
    assert names(metrics=["val/*"]) == ["val/loss"]
    assert [len(group.runs) for group in compare_runs(runs).groups] == [1, 1, 1]
    together = compare_runs(runs, ignore=["model.zoo"])
    assert [(group.name, len(group.runs)) for group in together.groups] == [("r", 2), ("r2", 1)]
    assert list(together.settings) == ["model.network"]


def test_only_common_numbers_are_compared_and_the_others_are_said():
    a, b = run("a", {"loss": 1.0, "penalty": 2.0}), run("b", {"loss": 1.5, "barrier": 0.5}, width=9)
    found = compare_runs([a, b])
    assert {row["number"] for row in found.table.rows} == {"loss"}
    assert "in one group only, and left out: penalty, barrier" in found.notes
    with pytest.raises(ValueError, match=r"no number in common: .*a has penalty; .*b has barrier"):
        compare_runs([run("a", {"penalty": 2.0}), run("b", {"barrier": 0.5}, width=9)])
    assert_refused(compare_runs, [a], says=("two or more runs that have ended, got ", "a alone"))
