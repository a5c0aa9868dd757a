"""What a run would cost: sums over its parts, and the plain model of several devices."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.reports.costs import Network, RunCosts, Times, cost_table, sharing_table


def costs(**changes):
    """Return a run of 4 members whose parts take 1, 2, 4, ... seconds."""
    return RunCosts(
        **{
            "start": Times(1.0, 0.5),
            "step": Times(2.0, 1.0),
            "steps": 10,
            "epochs": 3,
            "validation": Times(4.0, 2.0),
            "validations": 2,
            "epoch": Times(8.0, 4.0),
            "after": Times(16.0, 8.0),
            "periodic": {"MarginalLikelihood": (Times(32.0, 16.0), 2)},
            "gradients": 1000,
            "members": 4,
            **changes,
        }
    )


def test_a_run_is_the_sum_of_its_parts():
    total = 1 + 2 * 30 + 4 * 2 + 8 * 3 + 32 * 2 + 16
    assert costs().total == Times(total, total / 2)
    table = cost_table(costs(validations=0), "a run")
    assert [row["part"] for row in table.rows] == [
        *("start", "training step", "rest of an epoch", "MarginalLikelihood", "after training", "all")
    ]
    assert table.rows[-1]["wall"] == sum(row["wall"] for row in table.rows[:-1]) == total - 8
    assert Times.mean([Times(1, 2), Times(3, 6)]) == Times(2, 4)
    assert Times.mean([]) == Times(0, 0)


def test_several_devices_share_steps_or_members():
    one, ddp, members = sharing_table(costs(), 4, Network(bandwidth=1000.0, latency=0.0)).rows
    fixed = 1 + 8 * 3 + 16
    # Three steps of an epoch each; 1,500 of 1,000 bytes are sent after each, in 1.5 seconds.
    assert ddp["sent"] == 9 * 1500
    assert ddp["seconds"] == pytest.approx(fixed + 9 * (2 + 1.5) + (4 * 2 + 32 * 2) / 4)
    assert members["seconds"] == pytest.approx(fixed + (60 + 8 + 64) / 4, abs=1)
    assert members["sent"] == 750  # the weights of the members that others have
    assert one["seconds"] / ddp["seconds"] == ddp["speedup"]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 64), st.integers(1, 20), st.integers(1, 50))
def test_more_devices_never_pay_for_less_than_their_share(devices, members, steps):
    free = Network(bandwidth=math.inf, latency=0.0)
    own = costs(members=members, steps=steps)
    rows = sharing_table(own, devices, free).rows
    assert len(rows) == (3 if members > 1 else 2)
    for row in rows[1:]:
        assert 1 - 1e-9 <= row["speedup"] <= devices + 1e-9
    alone = sharing_table(own, 1, free).rows
    assert all(row["seconds"] == pytest.approx(own.total.wall) and row["sent"] == 0 for row in alone)
