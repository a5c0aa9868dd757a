"""Are networks the same up to the order of their units: barriers before and after matching, canonical forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from published.core import Claim, Quantity, Result, Run, below, over_pairs, rows

MLPS = Run("zoo-mlps", "zoo/mnist5k_mlp", ("--model.members=4",))  # six pairs


def _barriers(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    return [
        over_pairs(
            f"{split} loss barrier, {name}",
            "nats",
            rows(runs["match-mlps"], "barriers", method=method, split=split),
            "loss_barrier",
        )
        for split in ("train", "test")
        for method, name in (("unmatched", "as trained"), ("weights", "weights matched"))
    ]


RESULTS = (
    Result(
        "rebasin-mlp",
        "git-re-basin",
        "figure 2, left, and section 5.1",
        "Lines between MLPs on digits before and after matching",
        _barriers,
        (
            Claim(
                "Matching the units by their weights lowers the barrier between MLPs on MNIST.",
                "a figure, no number",
                lambda q: below(q["test loss barrier, weights matched"], q["test loss barrier, as trained"]),
            ),
        ),
        (
            MLPS,
            Run("match-mlps", "matching/mnist5k_mlp", ("--model.zoo={zoo-mlps}/zoo", "--model.methods=[weights]")),
        ),
    ),
)
