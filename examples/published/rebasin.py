"""Are networks the same up to permutation: barriers before and after matching, canonical forms."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_sym.landscape import weight_vector
from lightning_sym.networks import LeNet5, MultiLayerPerceptron, MyrtleCNN
from lightning_sym.symmetry import Symmetry, canonicalize, local_dimension, orbit_distance, trace_symmetry
from published.core import Claim, Quantity, Result, Run, Verdict, Word, below, over_pairs, rows, short, together, within

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


_SMALL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP": (lambda: MultiLayerPerceptron(widths=(16, 16), in_channels=1, image_size=8), 8),
    "LeNet": (LeNet5, 28),
    "CNN with batch norm": (lambda: MyrtleCNN(width=4, in_channels=1), 32),
}
_ELEMENTS = _NETWORKS = 20
_NEARBY = 1e-3  # of the norm
_JUMP = 2  # canonical forms farther apart than the weights by this factor are not close


def _network(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a network with random weights, biases and gains, in double precision."""
    torch.manual_seed(seed)
    network = make().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def _canonical(symmetry: Symmetry, network: nn.Module) -> Tensor:
    return weight_vector(canonicalize(symmetry, network).network).detach()


def _canonical_forms(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = []
    for name, (make, side) in _SMALL.items():
        networks = [_network(make, seed) for seed in range(_NETWORKS)]
        symmetry = trace_symmetry(networks[0], torch.randn(2, 1, side, side, dtype=torch.float64))
        forms = [_canonical(symmetry, network) for network in networks]
        size = float(forms[0].norm())
        generator = torch.Generator().manual_seed(0)
        moved = [symmetry.act(symmetry.sample(generator), networks[0]) for _ in range(_ELEMENTS)]
        same = tuple(float((_canonical(symmetry, one) - forms[0]).norm()) / size for one in moved)
        other = tuple(
            min(float((form - forms[b]).norm()) for b in range(_NETWORKS) if b != a) / size
            for a, form in enumerate(forms)
        )
        found += [
            Quantity(f"{name}: relative distance of the forms of one function", same, "1", f"{_ELEMENTS} elements"),
            Quantity(f"{name}: the same to the nearest other network's", other, "1", f"{_NETWORKS} networks"),
        ]
    make, side = _SMALL["MLP"]
    networks = [_network(make, seed) for seed in range(_NETWORKS)]
    symmetry = trace_symmetry(networks[0], torch.randn(2, 1, side, side, dtype=torch.float64))
    jumps, distances = [], []
    for network in networks:
        near = _network(make, 0)
        step = torch.randn_like(weight_vector(network).detach())
        step *= _NEARBY * weight_vector(network).detach().norm() / step.norm()
        nn.utils.vector_to_parameters(weight_vector(network).detach() + step, near.parameters())
        jump = (_canonical(symmetry, near) - _canonical(symmetry, network)).norm()
        jumps.append(float(jump / step.norm()))
        distances.append(orbit_distance(symmetry, network, near).upper / float(step.norm()))
    inputs = torch.randn(400, 1, side, side, dtype=torch.float64)
    free = [float(local_dimension(symmetry, network, inputs).nullity) for network in networks[:5]]
    over = f"{_NETWORKS} MLPs, each moved by {_NEARBY:g} of its norm"
    return [
        *found,
        Quantity("distance of canonical forms over that of the weights", tuple(jumps), "1", over),
        Quantity("distance between the orbits over that of the weights", tuple(distances), "1", over),
        Quantity("dimension of the set of equivalent MLPs, by rank", tuple(free), "1", "5 MLPs"),
        Quantity("dimension of the MLP's group", (float(symmetry.dimension),), "1", "exact"),
    ]


def _decides(q: Mapping[str, Quantity]) -> Verdict:
    verdicts = []
    for name in _SMALL:
        same = q[f"{name}: relative distance of the forms of one function"]
        other = q[f"{name}: the same to the nearest other network's"]
        word = "agrees" if max(same.values) < 1e-9 < min(other.values) else "disagrees"
        verdicts.append(
            Verdict(
                word,
                f"{name}: at most {max(same.values):.1g} over {same.over}, at least {min(other.values):.2g} between "
                f"{other.over}",
            )
        )
    return together(*verdicts)


def _close(q: Mapping[str, Quantity]) -> Verdict:
    """Count: a mean says nothing where few forms jump far and the others not at all."""
    jumps = q["distance of canonical forms over that of the weights"]
    far = [value for value in jumps.values if value > _JUMP]
    word: Word = "agrees" if not far else "disagrees" if len(far) == len(jumps.values) else "partly"
    reason = f"{len(far)} of {jumps.over} have forms more than {_JUMP} times as far apart as their weights"
    median = sorted(jumps.values)[len(jumps.values) // 2]
    ours = f"{len(far)} of {len(jumps.values)} jump"
    return Verdict(word, f"{reason} (at most {short(max(jumps.values))} times; median {short(median)})", ours)


def _dimension(q: Mapping[str, Quantity]) -> Verdict:
    free, group = q["dimension of the set of equivalent MLPs, by rank"], q["dimension of the MLP's group"]
    equal = sum(value == group.mean for value in free.values)
    word = "agrees" if equal == len(free.values) else "partly" if equal else "disagrees"
    more = "" if equal == len(free.values) else f"; more by up to {max(free.values) - group.mean:g} elsewhere"
    return Verdict(word, f"{group} for the group, and by the rank of the Jacobian of {equal} of {free.over}{more}")


def _match(name: str, zoo: str) -> Run:
    return Run(name, "matching/mnist5k_mlp", (f"--model.zoo={{{zoo}}}/zoo", "--model.methods=[weights]"))


RESULTS = (
    Result(
        "canonical-forms",
        "notebook",
        "partial identification",
        "Canonical representatives",
        _canonical_forms,
        (
            Claim(
                "One could choose a canonical point of each class (and so decide whether two are equal).",
                "a question",
                _decides,
            ),
            Claim(
                "Classes are many copies of one continuous set of known dimension.",
                "a hunch",
                _dimension,
            ),
            Claim(
                "Close weights have close canonical versions.",
                "a wish",
                _close,
            ),
            Claim(
                "The distance of classes is at most that of their points.",
                "",
                lambda q: within(q["distance between the orbits over that of the weights"], 0, 1.001),
            ),
        ),
        sizes=("distance", "MLP:", "LeNet:", "CNN with batch norm:"),
        remark=(
            "Random weights in double precision. Canonical forms sort units, so close weights may sort "
            "differently; `orbit_distance` is continuous ([theory](theory/canonical.md), 4)."
        ),
    ),
    Result(
        "rebasin-mlp",
        "git-re-basin",
        "figure 2, MLP on MNIST",
        "Linear paths between MLPs before and after matching",
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
        remark="3 x 512 units as in the paper; 3,600 training digits.",
    ),
    Result(
        "rebasin-width",
        "git-re-basin",
        "section 5.3 and figure 4",
        "Barriers after matching and width",
        _width,
        (
            Claim(
                "The barrier after matching falls with width.",
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
        remark="Widths of an MLP (paper: VGG-16 and ResNet-20).",
    ),
    Result(
        "repair-cnn",
        "repair",
        "figure 1",
        "Matched CNNs with recalibrated batch norms",
        _cnns,
        (
            Claim(
                "Recalibration removes 60 to 100 % of the barrier between matched networks.",
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
                "Matching over the whole group lowers the barrier of transformers.",
                "",
                lambda q: together(
                    below(q["train loss barrier, whole group, by weights"], q["train loss barrier, as trained"]),
                    below(
                        q["train loss barrier, whole group, by descent on the orbit"],
                        q["train loss barrier, as trained"],
                    ),
                ),
            ),
            Claim(
                "Permutations alone lower it.",
                "",
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
        remark=(
            "Ainsworth et al. match no transformers; heads, matrices inside them and the residual stream's "
            "basis are ours ([theory](theory/matching.md), 1.3 and 1.6)."
        ),
    ),
)
