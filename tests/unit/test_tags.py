"""Names of logged numbers: of few characters, and no two names are one."""

import re
from itertools import combinations

import pytest

from lightning_sym._tags import tag
from lightning_sym.stitching import STITCHING_MAPS

NAMES = [
    *("full", "rank(1)", "rank(4)", "rank(14)", "lasso(0.01)", "lasso(0.1)", "group", "group(euclidean)", "rank-4"),
    *("rank_4", "rank.4", "rank4", "Rank(4)", "rank (4)", "rank( 4)", "rank[4]", "rank{4}", "rank(4", "rank4)"),
    *("f(a,b)", "f(a)(b)", "f(a-b)", "f(-1)", "f(1)", "block1.conv", "block1_conv", "Block1.conv", "block1.Conv"),
    *("a b", "a  b", "a-b", "a--b", "-a-b", "a b ", "é", "è", "", "-", " ", "日本", "group(euclidean) 2", "member-3"),
    *("left-arm", "left arm", "_a", ".a", "a.", "a_", "member-0003", "pair-0-1", "x=1", "x~1", "conv1 (2)", "conv1-2"),
    *("Wq", "wq", "WQ", "rank--4", "Doubled(factor=0.5)", "doubled(factor=0.5)"),
]


def test_no_two_names_are_one_tag():
    tags = {name: tag(name) for name in NAMES}
    for one, two in combinations(NAMES, 2):
        assert tags[one] != tags[two], (one, two)
        assert tag("a", one) != tag("a", two)
    for name, made in tags.items():
        assert re.fullmatch(r"[a-z0-9_./-]+", made), name
        assert made in tag("penalty", name, "mean")


@pytest.mark.parametrize(
    ("names", "made"),
    [
        (("penalty", "rank(4)"), "penalty/rank--4"),
        (("penalty", "activation1", "group(euclidean)"), "penalty/activation1/group--euclidean"),
        (("precision", "block1.fc.theta1"), "precision/block1.fc.theta1"),
        (("pair-0-1/blocks.0/lasso(0.01)", "val_loss"), "pair-0-1/blocks.0/lasso--0.01/val_loss"),
        (("val", "member-0003"), "val/member-0003"),
    ],
)
def test_names_are_recognised(names, made):
    assert tag(*names) == made


@pytest.mark.parametrize("name", [*STITCHING_MAPS, "rank(4)", "group(euclidean)", "Wq", "conv1 (2)"])
@pytest.mark.parametrize("run", ["stitching-mnist5k", "runs (2)/a"])
def test_tensorboard_finds_the_run_of_a_curve(name, run):
    """By this expression, in TensorBoard's ``runScale.ts``; where it finds another, the chart is empty."""
    curve = f"{tag('penalty', name)} ({run})"
    assert re.search(r"\((.*)\)$", curve)[1] == run
