"""Are networks the same up to the order of their units: barriers before and after matching, canonical forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from published.core import Claim, Quantity, Result, Run, below, over_pairs, rows, together, within

MLPS = Run("zoo-mlps", "zoo/mnist5k_mlp", ("--model.members=4",))  # six pairs
CNNS = Run("zoo-cnns", "zoo/mnist5k", ("--model.members=5",))
VITS = Run("zoo-vits", "zoo/digits_vit", ("--model.members=4",))
NARROW = {
    width: Run(
        f"zoo-mlps-{width}",
        "zoo/mnist5k_mlp",
        ("--model.members=4", f"--model.network.widths=[{width},{width},{width}]"),
    )
    for width in (32, 128)
}
METHODS = {"unmatched": "as trained", "weights": "weights matched"}


def _barriers(run: Path, what: str = "", methods: Mapping[str, str] = METHODS, **where: object) -> list[Quantity]:
    return [
        over_pairs(
            f"{split} loss barrier, {name}{what}",
            "nats",
            rows(run, "barriers", method=method, split=split, **where),
            "loss_barrier",
        )
        for split in ("train", "test")
        for method, name in methods.items()
    ]


def _mlps(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    return _barriers(runs["match-mlps"])


def _width(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    widths = {**{width: f"match-mlps-{width}" for width in NARROW}, 512: "match-mlps"}
    return [quantity for width, name in widths.items() for quantity in _barriers(runs[name], f", width {width}")]


def _cnns(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = [
        quantity
        for kind, name in (("as is", ""), ("recalibrated", ", statistics anew"))
        for quantity in _barriers(runs["match-cnns"], name, batch_norm=kind)
    ]
    by_label = {quantity.label: quantity for quantity in found}
    for split in ("train", "test"):
        stale, anew = (by_label[f"{split} loss barrier, weights matched{end}"] for end in ("", ", statistics anew"))
        shares = tuple(100 * (1 - b / a) for a, b in zip(stale.values, anew.values, strict=True))
        found.append(Quantity(f"share of the {split} barrier taken away", shares, "%", anew.over, anew.pairs))
    return found


TRANSFORMERS = {
    "unmatched": "as trained",
    "permutations": "permutations",
    "weights": "whole group, by weights",
    "orbit_descent": "whole group, by descent on the orbit",
}


def _vits(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    return _barriers(runs["match-vits"], "", TRANSFORMERS)


def _match(name: str, zoo: str) -> Run:
    return Run(name, "matching/mnist5k_mlp", (f"--model.zoo={{{zoo}}}/zoo", "--model.methods=[weights]"))


RESULTS = (
    Result(
        "rebasin-mlp",
        "git-re-basin",
        "figure 2, MLP on MNIST",
        "Lines between MLPs on digits before and after matching",
        _mlps,
        (
            Claim(
                "Matching the units by their weights lowers the barrier between MLPs on MNIST.",
                "a figure, no number",
                lambda q: together(
                    below(q["train loss barrier, weights matched"], q["train loss barrier, as trained"]),
                    below(q["test loss barrier, weights matched"], q["test loss barrier, as trained"]),
                ),
            ),
        ),
        (MLPS, _match("match-mlps", "zoo-mlps")),
        remark="3 x 512 units as in the paper, trained on 3,600 digits.",
    ),
    Result(
        "rebasin-width",
        "git-re-basin",
        "section 5.3 and figure 4",
        "Barriers after matching, against width",
        _width,
        (
            Claim(
                "The wider the networks, the lower the barrier that is left after matching.",
                "a figure, no number",
                lambda q: together(
                    *(
                        below(
                            q[f"train loss barrier, weights matched, width {wide}"],
                            q[f"train loss barrier, weights matched, width {narrow}"],
                        )
                        for narrow, wide in ((32, 128), (128, 512))
                    )
                ),
            ),
        ),
        (
            *NARROW.values(),
            MLPS,
            *(_match(f"match-mlps-{width}", f"zoo-mlps-{width}") for width in NARROW),
            _match("match-mlps", "zoo-mlps"),
        ),
        remark="The paper multiplies the widths of VGG-16 and ResNet-20; here it is those of an MLP.",
    ),
    Result(
        "repair-cnn",
        "repair",
        "figure 1",
        "CNNs with batch norm, matched, with statistics measured anew",
        _cnns,
        (
            Claim(
                "Statistics measured anew between matched networks take 60 to 100 % of the barrier away.",
                "abstract: 60 to 100 %",
                lambda q: together(
                    within(q["share of the train barrier taken away"], 60, 100),
                    within(q["share of the test barrier taken away"], 60, 100),
                ),
            ),
            Claim(
                "Matching lowers the barrier of networks with batch norm.",
                "a figure, no number",
                lambda q: together(
                    below(q["train loss barrier, weights matched"], q["train loss barrier, as trained"]),
                    below(
                        q["train loss barrier, weights matched, statistics anew"],
                        q["train loss barrier, as trained, statistics anew"],
                    ),
                ),
            ),
        ),
        (
            CNNS,
            Run(
                "match-cnns",
                "matching/mnist5k_cnn",
                (
                    "--model.zoo={zoo-cnns}/zoo",
                    "--model.pairs=[[0,1],[1,2],[2,3],[3,4],[4,0]]",
                    "--model.methods=[weights]",
                ),
            ),
        ),
    ),
    Result(
        "rebasin-vit",
        "git-re-basin",
        "the method of section 3, on transformers",
        "Matching small vision transformers",
        _vits,
        (
            Claim(
                "What matching does for MLPs it does for transformers, if the whole group is used.",
                "not done there",
                lambda q: together(
                    below(q["train loss barrier, whole group, by weights"], q["train loss barrier, as trained"]),
                    below(
                        q["train loss barrier, whole group, by descent on the orbit"],
                        q["train loss barrier, as trained"],
                    ),
                ),
            ),
            Claim(
                "Permutations alone lower the barrier of transformers, too.",
                "not done there",
                lambda q: below(q["train loss barrier, permutations"], q["train loss barrier, as trained"]),
            ),
        ),
        (
            VITS,
            Run(
                "match-vits",
                "matching/mnist5k_vit",
                (
                    "--data=DigitsDataModule",
                    "--model.zoo={zoo-vits}/zoo",
                    "--model.methods=[permutations,weights,orbit_descent]",
                ),
            ),
        ),
        remark="Ainsworth et al. match no transformers; heads, matrices inside of them and the residual stream's basis "
        "are ours ([guide](matching.md#transformers)).",
    ),
)
