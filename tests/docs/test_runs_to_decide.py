"""The number of runs at which a claim is expected to be decided, and the seeds that are added to a result."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_refused
from scipy.stats import nct
from scipy.stats import t as student

from published import core
from published.core import Claim, Need, Quantity, Result, Run, below, effort, extend, no_more_than, positive, together
from published.core import within as inside
from published.page import refreshed
from published.power import POWER, chance_to_decide, fewest_runs

FOUND = refreshed()


def of_seeds(values, label="gain, row", unit="nats", **others):
    return Quantity(label, tuple(map(float, values)), unit, f"{len(values)} seeds", **others)


def scaled(count, mean, std, **others):
    """Return a quantity of so many seeds with exactly this mean and standard deviation."""
    values = np.linspace(-1, 1, count)
    return of_seeds(mean + std * values / values.std(ddof=1), **others)


# ---- the number


@pytest.mark.parametrize(("effect", "runs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_runs_are_those_of_tables_of_the_t_test(effect, runs):
    assert fewest_runs(2, effect, 1) == runs  # Cohen (1988), two-sided, 5 %, power 80 %
    assert fewest_runs(2, -7 * effect, 7) == runs  # below the range, at any scale


@pytest.mark.parametrize(("runs", "effect"), [(2, 1.0), (3, 2.0), (5, 0.0), (40, 0.3)])
def test_chance_is_that_of_noncentral_t(runs, effect):
    reach, shift = student.ppf(0.975, runs - 1), effect * math.sqrt(runs)
    expected = nct.sf(reach, runs - 1, shift) + nct.cdf(-reach, runs - 1, shift)
    assert chance_to_decide(runs, effect, 1) == pytest.approx(expected, abs=1e-4)


def test_resampled_networks_take_as_many_as_a_normal_interval():
    effect = 0.3  # (1.96 + 0.84) / 0.3, squared
    assert fewest_runs(6, effect, 1, known=True) == math.ceil(((1.959964 + 0.841621) / effect) ** 2)
    ring = tuple((a, (a + 1) % 6) for a in range(6))
    pairs = Quantity("gain", (1.0, -0.5, 0.9, 0.1, 1.2, -0.4), "nats", "6 pairs of 6 networks", ring)
    (need,) = positive(pairs).needs
    half = pairs.mean - pairs.interval[0]
    assert need == Need("", 6, math.ceil(6 * ((1 + 0.841621 / 1.959964) * half / pairs.mean) ** 2))


def test_four_of_five_experiments_of_that_size_decide(monkeypatch):
    draw, predict = np.random.default_rng(0), Quantity.decided_by
    for mean, std, rule in (
        (0.9, 2.0, positive),
        (-0.9, 2.0, positive),
        (0.4, 2.0, lambda q: inside(q, -math.inf, 1)),  # "no better by more than 1"
        (0.3, 1.0, lambda q: inside(q, -1, 1)),  # both ends
    ):
        monkeypatch.setattr(Quantity, "decided_by", predict)
        (need,) = rule(scaled(3, mean, std)).needs
        monkeypatch.setattr(Quantity, "decided_by", lambda *given: ())  # undecided experiments predict nothing further
        words = [rule(of_seeds(draw.normal(mean, std, need.total))).word for _ in range(1000)]
        decided = 1 - words.count("not decided") / len(words)
        assert abs(decided - POWER) < 0.04, (mean, need.total, decided)  # three standard errors


def test_margins_and_bounds_are_those_of_the_rule():
    new, old = of_seeds([3.0, 1.0, 2.3], "a, new"), of_seeds([1.2, 1.0, 0.6], "a, old")
    rows = no_more_than(new, old, 1.5).needs
    gap = new.less(old)
    expected = fewest_runs(3, gap.mean - 1.5, float(np.std(gap.values, ddof=1)))
    assert rows == (Need("new", 3, expected), Need("old", 3, expected))
    shares = of_seeds([93.0, 99.0, 92.0], "share, digit", "%")
    (one,) = inside(shares, 90, 100).needs  # no share is above 100: one end
    (two,) = inside(replace(shares, bounds=core.SIZE, unit="points"), 90, 100).needs
    assert one.total == fewest_runs(3, shares.mean - 90, float(np.std(shares.values, ddof=1))) <= two.total


# ---- claims


def test_a_claim_takes_what_its_largest_open_part_takes():
    easy, hard = scaled(3, 1, 1.2, label="gain, a"), scaled(3, 1, 4, label="gain, b")
    both = together(positive(easy), positive(hard), positive(scaled(3, 9, 1, label="gain, c")))
    needs = {need.row: need for need in both.needs}
    assert set(needs) == {"a", "b"}  # the decided part needs nothing
    assert needs["b"].total > needs["a"].total
    again = together(positive(easy), positive(replace(hard, rows=frozenset("a"))))
    assert again.needs == (Need("a", 3, needs["b"].total),)


def seeded(rows="ab", seeds=3, **others):
    runs = tuple(Run(f"{row}-{seed}", "none", (), seed) for row in rows for seed in range(seeds))

    def measure(folders):
        quantities = []
        for row in rows:
            own = sorted(int(name.rpartition("-")[2]) for name in folders if name.startswith(row))
            if own:
                quantities.append(Quantity(f"gain, {row}", tuple(map(float, own)), "nats", core_over(len(own))))
        return quantities

    claim = Claim("b is more", "none", lambda q: below(q["gain, a"], q["gain, b"]))
    return Result("seeded", "genni", "figure 1", "Seeded", measure, (claim,), runs, **others)


def core_over(count):
    return "one run" if count == 1 else f"{count} seeds"


def test_hours_are_of_the_rows_that_are_compared():
    verdict = below(scaled(3, 0, 1, label="gain, a"), of_seeds([1.0, 2.0, 0.1], "gain, b"))
    more = verdict.needs[0].total - 3
    assert len(verdict.needs) == 2
    # 120 minutes are of 12 runs: 10 for each; a further seed takes two of them
    said = effort(verdict, seeded("abcd"), 120)
    assert said == f"about {more} more runs ({core.short(more * 20 / 60, 2)} hours)"
    assert effort(verdict, seeded("abcd"), 1e5).startswith("out of reach: about ")
    assert effort(verdict, seeded("abcd"), 1).endswith("(below 0.1 hours)")
    networks = verdict._replace(needs=(Need("", 6, 10),))
    assert effort(networks, replace(seeded(), runs=seeded().runs[:1]), 36) == "about 4 more runs (0.40 hours)"
    assert effort(verdict._replace(needs=(Need("", 3, 4),)), seeded(), 1).startswith("about 1 more run (")
    assert effort(verdict._replace(needs=(Need("", 3, math.inf),)), seeded(), 1).startswith(
        "out of reach: over 1,000,0"
    )
    assert effort(verdict._replace(needs=(Need("", 3, 12345),)), seeded(), 0).startswith("about 13,000 more runs")
    assert effort(verdict._replace(needs=()), seeded(), 1) == ""


def test_every_open_claim_of_the_files_says_what_it_takes():
    for one in FOUND.values():
        for claim in one["claims"]:
            assert claim["effort"] or claim["verdict"] != "not decided", claim["says"]
            assert not claim["effort"] or claim["verdict"] != "agrees", claim["says"]


# ---- more seeds


def test_seeds_are_added_to_a_file_without_the_runs_it_has(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(core, "finish", lambda run, folder, say: called.append(run.name) or 2.0)
    monkeypatch.setattr(core, "versions", lambda: {"commit": "later"})
    before = core.make(seeded(seeds=2), tmp_path, print)
    assert [q["values"] for q in before["quantities"]] == [[0, 1], [0, 1]]
    called.clear()
    more = seeded(seeds=4)
    more = replace(more, runs=tuple(run for run in more.runs if run.name != "a-3"))
    found = extend(more, tmp_path, print, json.loads(json.dumps(before)))
    assert called == ["a-2", "b-2", "b-3"]
    assert [(q["values"], q["over"]) for q in found["quantities"]] == [
        ([0, 1, 2], "3 seeds"),
        ([0, 1, 2, 3], "4 seeds"),
    ]
    assert found["minutes"] == before["minutes"] + 6
    assert found["added"] == [{"runs": 3, "commit": "later"}]
    assert core.lacks(more, found) == []
    old = {key: value for key, value in before.items() if key != "runs"}
    assert [run.name for run in core.lacks(more, old)] == ["a-2", "b-2", "b-3"]  # by seeds, where there are no names
    paired = {**before, "quantities": [{**q, "over": "2 networks"} for q in before["quantities"]]}
    assert_refused(lambda: extend(more, tmp_path, print, paired), says="only seeds can be added")
    assert_refused(lambda: extend(seeded("abc", 2), tmp_path, print, before), says="--again")
