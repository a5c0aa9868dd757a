"""Stitching, rotation, similarity and dissection: the symmetries of deep learning models."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from gelu_homogeneity import exchange_error, limit_of_slope
from torch import Tensor

from lightning_sym.networks import MyrtleCNN, Network, ResidualCNN, make_activation
from lightning_sym.stitching import CutNetwork, FixedMap, PlantedStitches, StitchedNetwork
from lightning_sym.symmetry import intertwiner_group
from published.core import (
    Claim,
    Quantity,
    Result,
    Run,
    Verdict,
    below,
    over_pairs,
    positive,
    rows,
    short,
    together,
    within,
)

MEMBERS = 6
RING = f"--model.pairs=[{','.join(f'[{a},{(a + 1) % MEMBERS}]' for a in range(MEMBERS))}]"
POINTS = "points of accuracy"


# ---- table 1 and theorem 4.2


_TABLE_1 = ("identity", "relu", "leaky_relu(0.1)", "polynomial(2)", "polynomial(3)", "sigmoid", "gaussian")
_UNITS, _ELEMENTS = 6, 20
_EXACT, _PLAIN = 1e-10, 1e-2  # relative errors: of identities in double precision, of other equations


def _others() -> dict[str, Tensor]:
    """Return changes of the units that only some of the groups have: a scale, a flip, a rotation of two."""
    scale, flip, rotation = (torch.eye(_UNITS, dtype=torch.float64) for _ in range(3))
    scale[0, 0], flip[0, 0] = 2.0, -1.0
    angle = torch.tensor(0.3, dtype=torch.float64)
    rotation[:2, :2] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    return {"scale": scale, "flip": flip, "rotation": rotation}


def _residual(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / left.abs().max())


def _groups(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(4000, _UNITS, generator=generator, dtype=torch.float64)
    inside, outside = [], []
    for name in _TABLE_1:
        activation, group = make_activation(name).double(), intertwiner_group(name)
        y = activation(x)
        elements = [group.sample(_UNITS, generator) for _ in range(_ELEMENTS)]
        inside.append(max(_residual(activation(a.apply(x)), group.phi(a).apply(y)) for a in elements))
        for matrix in _others().values():
            if not group.contains(matrix):
                moved = activation(x @ matrix.T)
                outside.append(_residual(moved, y @ torch.linalg.lstsq(y, moved).solution))
    found = [
        Quantity("error of passing through the activation", tuple(inside), "1", f"{len(inside)} activations"),
        Quantity(
            "error of the best matrix for others",
            tuple(outside),
            "1",
            "a scale, a flip and a rotation, where not in the group",
        ),
    ]
    networks: tuple[tuple[str, Network], ...] = (
        ("CNN", MyrtleCNN(4, image_size=16)),
        ("residual network", ResidualCNN((8, 16), (1, 1), image_size=16)),
    )
    for kind, network in networks:
        images = torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64)
        source = CutNetwork(network.double().eval(), example=images)
        planted = PlantedStitches(source, generator=generator)
        target = CutNetwork(planted.network, source.sites, example=images, like=source)
        errors: dict[str, list[float]] = {}
        for site in source.sites:
            inner = len(source.crossings(site)) > 1
            for ports, where in (("all", ""), ("branch", ", inside blocks, its branch only")):
                if ports == "all" or inner:
                    errors.setdefault(where, []).append(_stitching_error(source, target, planted, site, images, ports))
        found += [
            Quantity(f"error of the stitched {kind}{where}", tuple(values), "1", f"{len(values)} sites")
            for where, values in errors.items()
        ]
    return found


@torch.no_grad()
def _stitching_error(
    source: CutNetwork, target: CutNetwork, planted: PlantedStitches, site: str, images: Tensor, ports: Any
) -> float:
    """Return the error of a network that differs by a symmetry, above the stitching layer of theorem 4.2."""
    matrices = iter([matrix for matrix in planted.matrices(site) if matrix is not None])
    stitched = StitchedNetwork(
        source, target, site, family=lambda port: FixedMap(port, next(matrices)), ports=ports, batch_norm="frozen"
    )
    return _residual(source.network(images), stitched.double()(images))


def _vanishes(quantity: Quantity) -> Verdict:
    worst = max(quantity.values)
    return Verdict("agrees" if worst < _EXACT else "disagrees", f"{quantity.label}: at most {worst:.1g}")


def _remains(quantity: Quantity) -> Verdict:
    least = min(quantity.values)
    return Verdict("agrees" if least > _PLAIN else "disagrees", f"{quantity.label}: at least {short(least)}")


# ---- figure 17


_SCALES = (0.25, 0.5, 0.75, 2.0, 4.0, 100.0)


def _gelu(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    errors = dict(zip(_SCALES, exchange_error(_SCALES).tolist(), strict=True))
    return [
        *(
            Quantity(f"error of exchanging GELU and a scale, {t:g}", (error,), "1", "exact")
            for t, error in errors.items()
        ),
        Quantity("error over the scale, 100", (errors[100.0] / 100.0,), "1", "exact"),
        Quantity("distance of GELU from ReLU", (limit_of_slope(),), "1", "exact"),
    ]


def _slope(q: Mapping[str, Quantity]) -> Verdict:
    """Say whether the error over a large scale is the paper's slope, to its digits."""
    ours, paper = q["error over the scale, 100"].mean, 0.1267
    return Verdict("agrees" if abs(ours - paper) < 2e-3 else "disagrees", f"at t = 100: {ours:.4f}", f"{ours:.4f}")


# ---- stitching


FULL, GROUP = "any matrix", "permutation with scales"
MAPS = {"full": FULL, "rank(4)": "rank 4", "rank(2)": "rank 2", "rank(1)": "rank 1"}


def _zoo(name: str, *options: str, recipe: str = "zoo/mnist5k") -> Run:
    return Run(name, recipe, (f"--model.members={MEMBERS}", *options))


def _stitch(name: str, zoo: str, maps: Sequence[str], *options: str) -> Run:
    given = (f"--model.zoo={{{zoo}}}/zoo", RING, f"--model.maps=[{','.join(maps)}]")
    return Run(name, "stitching/mnist5k", (*given, *options))


def _beside(zoo: str, *options: str, what: str = "") -> Run:
    """Return a run that stitches the members of one zoo among several by two families."""
    return _stitch(zoo.replace("zoo", "stitch") + what, zoo, ("full", "group(euclidean)"), *options)


def _narrow_residual(activation: str) -> tuple[str, ...]:
    return (
        "--model.network=lightning_sym.networks.ResidualCNN",
        "--model.network.widths=[16,32]",
        "--model.network.depths=[2,2]",
        f"--model.network.activation={activation}",
    )


SITES = ("activation", *(f"blocks.{number}.activation2" for number in range(4)))  # outside of the four blocks
MYRTLE = _zoo("zoo-myrtle")
WIDTHS = {4: "zoo-myrtle-4", 8: "zoo-myrtle-8", 16: MYRTLE.name}
SLOPES = {"0": "zoo-residual", "0.5": "zoo-leaky-5", "0.9": "zoo-leaky-9"}
RESIDUAL = _zoo(SLOPES["0"], *_narrow_residual("relu"))
STITCH_MYRTLE = _stitch("stitch-myrtle", MYRTLE.name, (*MAPS, "group(euclidean)"))
FULL_MYRTLE = Run("zoo-myrtle", "zoo/cifar10_myrtle")
FULL_RESIDUAL = Run("zoo-resnet20", "zoo/cifar10_resnet20")
_FULL_SLOPES = {"0.5": "zoo-leaky-resnet20-5", "0.9": "zoo-leaky-resnet20-9"}
GPU = "CIFAR-10 and a GPU"


def _penalties(run: Path, **where: object) -> list[dict[str, Any]]:
    """Return the rows of a stitching run, with recalibrated statistics where there are any."""
    found = [row for row in rows(run, "penalties", **where) if row["batch_norm"] != "as is"]
    if stopped := [row["stopped"] for row in found if row["penalty"] is None]:
        raise ValueError(f"{run} has maps that were stopped: {stopped[0]}")
    names = {row["family"]: MAPS.get(row["family"], row["family"]) for row in found}
    names |= {name: GROUP for name in names if name.startswith("group")}  # however they are projected
    return [{**row, "first": row["lower"], "second": row["upper"], "family": names[row["family"]]} for row in found]


def _by_family(
    found: Iterable[Mapping[str, Any]], label: str, column: str = "penalty", unit: str = POINTS, factor: float = 100.0
) -> list[Quantity]:
    """Return a column for each family, as means over the sites of a pair."""
    groups: dict[str, dict[tuple[int, int], list[float]]] = {}
    for row in found:
        groups.setdefault(row["family"], {}).setdefault((row["first"], row["second"]), []).append(row[column])
    return [
        over_pairs(
            label.format(family),
            unit,
            [{"first": a, "second": b, "mean": fmean(values)} for (a, b), values in own.items()],
            "mean",
            factor=factor,
        )
        for family, own in groups.items()
    ]


def _by_layer(found: Iterable[Mapping[str, Any]], label: str, **about: Any) -> list[Quantity]:
    """Return the same for each site of a CNN, numbered as its activations are."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        groups.setdefault(str(row["place"]).removeprefix("activation"), []).append(row)
    return [each for layer in sorted(groups) for each in _by_family(groups[layer], f"{label}, layer {layer}", **about)]


def _each(q: Mapping[str, Quantity], lower: str, upper: str, layers: Sequence[int] = (1, 2, 3, 4)) -> Verdict:
    """Say whether one figure is below another at every layer that was measured, by intervals of the differences."""
    known = [layer for layer in layers if f"{lower}, layer {layer}" in q]
    gaps = [q[f"{upper}, layer {layer}"].less(q[f"{lower}, layer {layer}"]) for layer in known]
    figures = ", ".join(str(replace(gap, unit="1")) for gap in gaps)
    unit = "" if gaps[0].unit == "1" else f" {gaps[0].unit}"
    at = f"layers {', '.join(map(str, known))}" if len(known) > 1 else f"layer {known[0]}"
    reason = f"{upper} less {lower}, {at}: {figures}{unit} over {gaps[0].over}"
    ours = f"differences {', '.join(short(gap.mean) for gap in gaps)}{unit}"
    return together(*(positive(gap)._replace(reason=reason, ours=ours) for gap in gaps))


def _families(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    return _by_layer(_penalties(runs["stitch-myrtle"]), "{}")


def _few_points(q: Mapping[str, Quantity]) -> Verdict:
    """Say whether the group loses less than ten points at all layers but one."""
    found = [quantity for label, quantity in q.items() if label.startswith(GROUP)]
    ends = [quantity.interval or (quantity.mean, quantity.mean) for quantity in found]
    low, high = (sum(end[side] > 10 for end in ends) for side in (0, 1))
    word = "agrees" if high <= 1 else "disagrees" if low > 1 else "not decided"
    figures = ", ".join(str(replace(each, unit="1")) for each in found)
    reason = f"layers 1 to {len(found)}: {figures} {found[0].unit} over {found[0].over}"
    needs = together(*(within(each, -math.inf, 10) for each in found)).needs if word == "not decided" else ()
    return Verdict(word, reason, f"{', '.join(short(each.mean) for each in found)} {found[0].unit}", needs)


LASSO = ("lasso(0.001)", "lasso(0.01)", "lasso(0.1)")


def _sparse(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = _penalties(runs["stitch-lasso"])
    return [
        *_by_layer(found, "penalty of {}"),
        *_by_layer(found, "sparsity of {}", column="sparsity", unit="1", factor=1.0),
    ]


def _inside_and_outside(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    quantities = []
    for run, ports in (("stitch-residual", "branch only"), ("stitch-residual-ports", "skip connection too")):
        found = _penalties(runs[run])
        inner = [row for row in found if row["place"].endswith("activation1") and row["place"].startswith("blocks.")]
        outer = [row for row in found if row not in inner]
        quantities += [
            *_by_family(inner, f"{{}} inside blocks, {ports}"),
            *(_by_family(outer, "{} outside blocks") if ports == "branch only" else ()),
        ]
    return quantities


def _slopes(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    zoos, stitches = ([run for name, run in runs.items() if name.startswith(kind)] for kind in ("zoo-", "stitch-"))
    quantities = []
    for slope, zoo, stitch in zip(SLOPES, zoos, stitches, strict=True):
        quantities += _by_family(_penalties(stitch), f"{{}}, slope {slope}")
        members = sorted(rows(zoo, "members"), key=lambda row: row["member"])
        accuracies = tuple(100 * row["test_accuracy"] for row in members)
        quantities.append(Quantity(f"test accuracy, slope {slope}", accuracies, "%", f"{len(members)} networks"))
    by_label = {quantity.label: quantity for quantity in quantities}
    for slope in SLOPES:
        excess = by_label[f"{GROUP}, slope {slope}"].less(by_label[f"{FULL}, slope {slope}"])
        quantities.append(replace(excess, label=f"{GROUP} less {FULL}, slope {slope}"))
    return quantities


def _wider(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = {width: _penalties(runs[zoo.replace("zoo", "stitch")]) for width, zoo in WIDTHS.items()}
    both = {width: [row for row in own if row["family"] in (FULL, GROUP)] for width, own in found.items()}
    return [quantity for width, own in both.items() for quantity in _by_family(own, f"{{}}, width {width}")]


STITCHING = (
    Result(
        "stitching-families",
        "intertwiners",
        "section 4, figure 1",
        "Stitching maps of several families",
        _families,
        (
            Claim(
                "At every layer the penalty grows from full matrices to permutations with scales to rank 1.",
                "read off a figure: 1.2, 1.7, 2.5, 2.5; 8.3, 7.4, 16.5, 5.8; 42.2, 53.4, 57.1, 62.1 points",
                lambda q: together(_each(q, FULL, GROUP), _each(q, GROUP, "rank 1")),
            ),
            Claim(
                (
                    "Permutations with scales have lower penalties than matrices of rank 2 and 4, with fewer degrees "
                    "of freedom."
                ),
                "read off a figure: 21.1, 28.1, 40.5, 31.4 (rank 2); 8.7, 13.7, 26.5, 16.1 points (rank 4)",
                lambda q: together(_each(q, GROUP, "rank 2"), _each(q, GROUP, "rank 4")),
            ),
            Claim(
                "The penalty of permutations with scales is below 10 points at all layers but one.",
                "section 4; read off a figure: 8.3, 7.4, 16.5, 5.8",
                _few_points,
            ),
        ),
        (MYRTLE, STITCH_MYRTLE),
        (FULL_MYRTLE, Run("stitch-myrtle", "stitching/cifar10_myrtle", ("--model.zoo={zoo-myrtle}/zoo",))),
        needs=GPU,
        remark=(
            "Width 16 (paper 64), digits (CIFAR-10), 2 epochs of larger steps, batch norms recalibrated for "
            "all families, Euclidean projection of the group map ([theory](theory/stitching.md), 2.3). Rank "
            "4 is a larger part of 16 to 128 channels than of 64 to 512."
        ),
    ),
    Result(
        "stitching-lasso",
        "intertwiners",
        "appendix D.6, figure 15",
        "Sparse stitching maps",
        _sparse,
        (
            Claim(
                "A stronger lasso makes maps sparser and penalties larger.",
                "a figure, strength 0.001 and 0.1: sparsity 0.22 and 0.77, 0.49 and 0.88, 0.73 and 1.0; 1.3 and 4.1, "
                "1.9 and 11.5, 3 and 66 points",
                lambda q: together(
                    _each(q, f"sparsity of {LASSO[0]}", f"sparsity of {LASSO[-1]}"),
                    _each(q, f"penalty of {LASSO[0]}", f"penalty of {LASSO[-1]}"),
                ),
            ),
            Claim(
                "At the first and third layer no lasso map is as sparse as a permutation.",
                "a figure: 0.77 and 0.98, 0.88 and 1.0",
                lambda q: _each(q, f"sparsity of {LASSO[-1]}", f"sparsity of {GROUP}", (1, 3)),
            ),
        ),
        (
            MYRTLE,
            _stitch(
                "stitch-lasso",
                MYRTLE.name,
                (*LASSO, "group(euclidean)"),
                "--model.sites=[activation1,activation3,activation4]",
                # Steps as long as the paper's, about, if summed; the last ones are so short that entries come to 0.
                "--trainer.max_epochs=3",
                "--trainer.gradient_clip_val=20",
                "--model.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR",
                "--model.lr_scheduler.gamma=0.1",
            ),
        ),
        (FULL_MYRTLE, Run("stitch-lasso", "stitching/cifar10_myrtle_lasso", ("--model.zoo={zoo-myrtle}/zoo",))),
        needs=GPU,
        remark=(
            "Networks and pairs as before, 3 epochs. Sparsity is the share of entries of at most 0.001; a "
            "permutation of 16, 64 and 128 channels has 0.94, 0.98 and 0.99."
        ),
    ),
    Result(
        "stitching-residual",
        "intertwiners",
        "section 4, figure 6, appendix E.9",
        "Stitching inside and outside residual blocks",
        _inside_and_outside,
        (
            Claim(
                "Penalties of full matrices are larger inside residual blocks than at their ends.",
                "a figure, ResNet-20: up to 21 points, inside the eighth block",
                lambda q: below(q[f"{FULL} outside blocks"], q[f"{FULL} inside blocks, branch only"]),
            ),
            Claim(
                "So are penalties of permutations with scales.",
                "a figure: up to 64 points inside; 13, 17, 24, 34, 31, 35, 38, 38, 24, 5 outside",
                lambda q: below(q[f"{GROUP} outside blocks"], q[f"{GROUP} inside blocks, branch only"]),
            ),
            Claim(
                "The unmapped skip connection is the cause: a map on it lowers the penalty.",
                "appendix E.9, not measured",
                lambda q: together(
                    *(
                        below(q[f"{maps} inside blocks, skip connection too"], q[f"{maps} inside blocks, branch only"])
                        for maps in (FULL, GROUP)
                    )
                ),
            ),
        ),
        (
            RESIDUAL,
            _beside(RESIDUAL.name, "--model.ports=branch"),
            _beside(
                RESIDUAL.name,
                f"--model.sites=[{','.join(f'blocks.{number}.activation1' for number in range(4))}]",
                what="-ports",
            ),
        ),
        (
            FULL_RESIDUAL,
            Run("stitch-residual", "stitching/cifar10_resnet20", ("--model.zoo={zoo-resnet20}/zoo",)),
            Run(
                "stitch-residual-ports",
                "stitching/cifar10_resnet20",
                ("--model.zoo={zoo-resnet20}/zoo", "--model.ports=all"),
            ),
        ),
        needs=GPU,
        remark="Four blocks of width 16, 16, 32, 32; means over four cuts inside and five outside.",
    ),
    Result(
        "stitching-leaky",
        "intertwiners",
        "appendix D.3, table 3 and figure 8",
        "Stitching with leaky ReLU",
        _slopes,
        (
            Claim(
                (
                    "The excess penalty of permutations with scales over full matrices grows as the activation "
                    "approaches the identity."
                ),
                "asked there; no readable number",
                lambda q: together(
                    *(
                        below(q[f"{GROUP} less {FULL}, slope {a}"], q[f"{GROUP} less {FULL}, slope {b}"])
                        for a, b in (("0", "0.5"), ("0.5", "0.9"))
                    )
                ),
            ),
            Claim(
                "Accuracy falls as the activation approaches the identity.",
                "table 3; no readable number",
                lambda q: together(
                    *(
                        below(q[f"test accuracy, slope {b}"], q[f"test accuracy, slope {a}"])
                        for a, b in (("0", "0.5"), ("0.5", "0.9"))
                    )
                ),
            ),
        ),
        (
            RESIDUAL,
            *(_zoo(SLOPES[slope], *_narrow_residual(f"leaky_relu({slope})")) for slope in ("0.5", "0.9")),
            *(_beside(zoo, f"--model.sites=[{','.join(SITES)}]", what="-ends") for zoo in SLOPES.values()),
        ),
        (
            FULL_RESIDUAL,
            *(
                Run(name, "zoo/cifar10_leaky_resnet20", (f"--model.network.activation=leaky_relu({slope})",))
                for slope, name in _FULL_SLOPES.items()
            ),
            *(
                Run(f"stitch-{name}", "stitching/leaky_resnet20", (f"--model.zoo={{{name}}}/zoo",))
                for name in (FULL_RESIDUAL.name, *_FULL_SLOPES.values())
            ),
        ),
        needs=GPU,
        remark="Networks are paired by initial weights across slopes; means over five cuts outside blocks.",
    ),
    Result(
        "stitching-width",
        "intertwiners",
        "section 4 and table 4 (wide networks)",
        "Stitching and width",
        _wider,
        (
            Claim(
                "Penalties of permutations with scales fall with width.",
                "",
                lambda q: together(
                    *(
                        below(q[f"{GROUP}, width {wide}"], q[f"{GROUP}, width {narrow}"])
                        for narrow, wide in ((4, 8), (8, 16))
                    )
                ),
            ),
            Claim(
                "Penalties of full matrices fall with width.",
                "",
                lambda q: together(
                    *(
                        below(q[f"{FULL}, width {wide}"], q[f"{FULL}, width {narrow}"])
                        for narrow, wide in ((4, 8), (8, 16))
                    )
                ),
            ),
        ),
        (
            *(_zoo(WIDTHS[width], f"--model.network.width={width}") for width in (4, 8)),
            MYRTLE,
            STITCH_MYRTLE,
            *(_beside(WIDTHS[width]) for width in (4, 8)),
        ),
        remark="Myrtle CNNs with 4, 8 and 16 channels in the first convolution; means over four cuts.",
    ),
)


# ---- rotation


KINDS = {"group": "element of the group", "orthogonal": "rotation", "none": "nothing", "undo": "element undone by hand"}


def _rotated(runs: Mapping[str, Path], name: str) -> Sequence[Quantity]:
    found = rows(runs[name], "penalties")
    sites = list(dict.fromkeys(row["site"] for row in found))
    quantities = []
    for kind in dict.fromkeys(row["kind"] for row in found):
        for layer, site in enumerate(sites, 1):
            own: dict[int, list[float]] = {}
            for row in found:
                if (row["kind"], row["site"]) == (kind, site):
                    own.setdefault(row["member"], []).append(100 * row["test_penalty"])
            values = tuple(fmean(own[member]) for member in sorted(own))
            draws = max(map(len, own.values()))
            over = f"{len(own)} networks" + (f", means of {draws} draws" if draws > 1 else "")
            quantities.append(Quantity(f"{KINDS[kind]}, layer {layer}", values, POINTS, over))
    return quantities


def _undone(q: Mapping[str, Quantity]) -> Verdict:
    """Say whether accuracies come back to within one test image, which rounding may decide."""
    found = [quantity for label, quantity in q.items() if label.startswith(KINDS["undo"])]
    worst = max(abs(value) for quantity in found for value in quantity.values)
    return Verdict("agrees" if worst <= 0.1 + 1e-9 else "disagrees", f"at most {short(worst)} points at any layer")


def _rotation(name: str, zoo: Run, *options: str) -> tuple[Run, Run]:
    return zoo, Run(name, "rotation/mnist5k", (f"--model.zoo={{{zoo.name}}}/zoo", *options))


_GROUP_BELOW = Claim(
    "At every layer, retrained top layers undo a group element better than a rotation.",
    "read off the figure: 0.0 and 0.7, 1.7 and 4.6, 1.3 and 8.3 points",
    lambda q: _each(q, KINDS["group"], KINDS["orthogonal"]),
)

ROTATION = (
    Result(
        "rotation-lenet",
        "intertwiners",
        "section 3.3, figure 4",
        "Rotation test on LeNets",
        lambda runs: _rotated(runs, "rotation-lenet"),
        (
            _GROUP_BELOW,
            Claim("An element of the group can be undone exactly.", "proposition 3.4", _undone),
        ),
        _rotation("rotation-lenet", _zoo("zoo-lenets", recipe="zoo/mnist5k_lenet")),
        remark=(
            "Two draws for each of six networks, 8 epochs (paper: ten draws of one network, 50 epochs). The "
            "third layer is fully connected."
        ),
    ),
    Result(
        "rotation-myrtle",
        "intertwiners",
        "section 3.3, figure 4",
        "Rotation test on CNNs without normalisation",
        lambda runs: _rotated(runs, "rotation-myrtle"),
        (_GROUP_BELOW,),
        _rotation(
            "rotation-myrtle",
            _zoo(
                "zoo-plain",
                "--model.network.width=8",
                "--model.network.batch_norm=false",
                "--trainer.max_epochs=10",
                "--model.lr_scheduler.init_args.T_max=10",
            ),
            "--model.kinds=[group,orthogonal]",
            "--model.repeats=1",
        ),
        remark="Myrtle CNNs of width 8 (paper: one of width 64); one draw for each of six networks, 8 epochs.",
    ),
)


# ---- similarity


MEASURES = {
    "group": "Procrustes up to permutations and scales",
    "group_live": "live Procrustes up to permutations and scales",
    "orthogonal": "Procrustes up to rotations",
    "cka_dot": "dot CKA",
    "cka_max": "max CKA",
}
_SETTINGS = {
    "group": "{group: relu}",
    "group_live": "{measure: group, group: relu, live: true}",
    "orthogonal": "{}",
    "cka_dot": "{measure: cka_linear, normalize: channel}",
    "cka_max": "{}",
}


UNTRAINED = ", untrained"


def _compare(name: str, zoo: str, measures: Sequence[str]) -> Run:
    given = "{" + ", ".join(f"{measure}: {_SETTINGS[measure]}" for measure in measures) + "}"
    # Features of all networks on all images would take 6 GB.
    options = (f"--model.zoo={{{zoo}}}/zoo", f"--model.measures={given}", "--trainer.limit_train_batches=4")
    return Run(name, "similarity/mnist5k", options)


def _similarities(run: Path, what: str = "") -> list[Quantity]:
    found = [row for row in rows(run, "pairs") if row["first_layer"] == row["second_layer"]]
    return [
        over_pairs(
            f"{MEASURES[measure]}{name}{what}, layer {layer.removeprefix('activation')}",
            "1",
            [row for row in found if (row["measure"], row["first_layer"]) == (measure, layer)],
            kind,
        )
        for measure in dict.fromkeys(row["measure"] for row in found)
        for kind, name in (("similarity", ""), ("untrained", UNTRAINED))
        for layer in dict.fromkeys(row["first_layer"] for row in found)
    ]


GROWING, CONSTANT = ", widths that double", ", constant width"
ADDED = "gain by training in "


def _two_widths(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    quantities = []
    for run, what in {"similarity-growing": GROWING, "similarity-constant": CONSTANT}.items():
        found = {quantity.label: quantity for quantity in _similarities(runs[run], what)}
        quantities += [quantity for label, quantity in found.items() if UNTRAINED not in label]
        for label in found:
            if label.startswith((MEASURES["group"], MEASURES["orthogonal"])) and UNTRAINED not in label:
                added = found[label].less(found[label.replace(what, UNTRAINED + what)])
                quantities.append(replace(added, label=f"{ADDED}{label}"))
    return quantities


_WIDE = _zoo("zoo-myrtle-constant", "--model.network.width=32", "--model.network.constant_width=true")
_NARROW = _zoo(WIDTHS[4], "--model.network.width=4")
_PROCRUSTES = ("group", "group_live", "orthogonal")
_CONSTANT_512 = ("--model.network.width=512", "--model.network.constant_width=true")
_FULL_SIMILAR = "similarity/cifar10_myrtle"

SIMILARITY = (
    Result(
        "similarity-layers",
        "intertwiners",
        "section 5, table 2 and figure 5",
        "Similarity up to permutations and up to rotations",
        lambda runs: _similarities(runs["similarity-myrtle"]),
        (
            Claim(
                "Similarity is lower up to permutations with scales than up to rotations.",
                "table 2: 0.62 and 0.77, 0.51 and 0.57, 0.44 and 0.51, 0.49 and 0.58",
                lambda q: _each(q, MEASURES["group"], MEASURES["orthogonal"]),
            ),
            Claim(
                "Similarity is lower by the unit-wise max kernel than by the dot kernel.",
                "a figure: 0.84 and 0.98, 0.61 and 0.97, 0.45 and 0.92, 0.43 and 0.93",
                lambda q: _each(q, MEASURES["cka_max"], MEASURES["cka_dot"]),
            ),
            Claim(
                "By the max kernel, similarity falls with depth.",
                "a figure: 0.84, 0.61, 0.45, 0.43",
                lambda q: together(
                    *(
                        below(q[f"{MEASURES['cka_max']}, layer {n + 1}"], q[f"{MEASURES['cka_max']}, layer {n}"])
                        for n in (1, 2, 3)
                    )
                ),
            ),
            Claim(
                "Training raises similarity up to permutations with scales.",
                "",
                lambda q: _each(q, MEASURES["group"] + UNTRAINED, MEASURES["group"]),
            ),
        ),
        (MYRTLE, _compare("similarity-myrtle", MYRTLE.name, ("group", "orthogonal", "cka_dot", "cka_max"))),
        (FULL_MYRTLE, Run("similarity-myrtle", _FULL_SIMILAR, ("--model.zoo={zoo-myrtle}/zoo",))),
        needs=GPU,
        remark="All pairs of six networks of width 16, on 400 test digits.",
    ),
    Result(
        "similarity-width",
        "intertwiners",
        "section 5, tables 2 and 4, figure 16",
        "Similarity and width",
        _two_widths,
        (
            Claim(
                "Wider layers are more similar, up to permutations with scales.",
                "tables 2 and 4: 0.62 and 0.82, 0.51 and 0.76, 0.44 and 0.57, 0.49 and 0.50",
                lambda q: _each(q, MEASURES["group"] + GROWING, MEASURES["group"] + CONSTANT),
            ),
            Claim(
                "Wider layers are more similar, up to rotations.",
                "tables 2 and 4: 0.77 and 0.85, 0.57 and 0.67, 0.51 and 0.54, 0.58 and 0.61",
                lambda q: _each(q, MEASURES["orthogonal"] + GROWING, MEASURES["orthogonal"] + CONSTANT),
            ),
            Claim(
                "Training adds more similarity up to permutations with scales in wider layers.",
                "",
                lambda q: _each(q, *(f"{ADDED}{MEASURES['group']}{what}" for what in (GROWING, CONSTANT))),
            ),
            Claim(
                (
                    "At constant width, layers 2 and 3 are more similar up to permutations with scales than up to "
                    "rotations."
                ),
                "table 4: 0.76 and 0.67, 0.57 and 0.54",
                lambda q: _each(q, MEASURES["orthogonal"] + CONSTANT, MEASURES["group"] + CONSTANT, (2, 3)),
            ),
        ),
        (
            _NARROW,
            _WIDE,
            _compare("similarity-growing", _NARROW.name, _PROCRUSTES),
            _compare("similarity-constant", _WIDE.name, _PROCRUSTES),
        ),
        (
            FULL_MYRTLE,
            Run("zoo-myrtle-512", "zoo/cifar10_myrtle", _CONSTANT_512),
            *(
                Run(f"similarity-{kind}", _FULL_SIMILAR, (f"--model.zoo={{{zoo}}}/zoo",))
                for kind, zoo in (("growing", "zoo-myrtle"), ("constant", "zoo-myrtle-512"))
            ),
        ),
        needs=GPU,
        remark=(
            "Widths 4, 8, 16, 32 and four times 32 (paper: 64 to 512 and four times 512), on 400 test "
            "digits. Dead channels raise the measure up to permutations with scales "
            "([theory](theory/similarity.md), 1.3); *live* figures exclude them."
        ),
    ),
)


# ---- dissection


CONCEPTS = {"relu": "ReLU", "linear sums": "no ReLU after sums"}


def _alphas(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = rows(runs["dissection"], "bases", basis="rotation", network="trained")
    quantities = []
    for zoo, name in CONCEPTS.items():
        for column, label, unit in (
            ("interpretable", "interpretable units", "units"),
            ("distinct", "distinct concepts", "concepts"),
            ("kurtosis", "kurtosis", "1"),
        ):
            own, end = (
                [
                    float(row[column])
                    for row in sorted(found, key=lambda row: row["member"])
                    if (row["zoo"], row["alpha"]) == (zoo, alpha)
                ]
                for alpha in (0.0, 1.0)
            )
            fall = [before - after for before, after in zip(own, end, strict=True)]
            over = f"{len(own)} networks, a rotation each"
            quantities.append(Quantity(f"{label}, {name}", tuple(own), unit, over))
            quantities.append(Quantity(f"fall of {label}, {name}", tuple(fall), unit, over))
    return quantities


def _no_fall(q: Mapping[str, Quantity]) -> Verdict:
    """Say whether it falls less without ReLU than with it, and not for sure."""
    with_relu, without = (q[f"fall of interpretable units, {name}"] for name in CONCEPTS.values())
    falls, less = positive(without), below(without, with_relu)
    return Verdict("disagrees", falls.reason, falls.ours) if falls.word == "agrees" else less


DISSECTION = (
    Result(
        "dissection-alpha",
        "intertwiners",
        "section 6, figure 3",
        "Interpretable units with and without ReLU",
        _alphas,
        (
            Claim(
                "With ReLU, fewer units are interpretable in a random basis than in the network's basis.",
                "a figure, no number (ResNet-50 on Broden)",
                lambda q: positive(q["fall of interpretable units, ReLU"]),
            ),
            Claim(
                "Without ReLU on residual outputs their number does not fall.",
                "a figure, no number",
                _no_fall,
            ),
            Claim(
                "Only with ReLU are activations more peaked in the network's basis.",
                "",
                lambda q: together(
                    positive(q["fall of kurtosis, ReLU"]),
                    below(q[f"fall of kurtosis, {CONCEPTS['linear sums']}"], q["fall of kurtosis, ReLU"]),
                ),
            ),
        ),
        (
            _zoo("zoo-concepts-relu", recipe="zoo/concepts_relu"),
            _zoo("zoo-concepts-sums", recipe="zoo/concepts_linear_sums"),
            Run(
                "dissection",
                "dissection/concepts",
                (
                    "--requires=null",
                    "--model.zoos={relu: {zoo-concepts-relu}/zoo, linear sums: {zoo-concepts-sums}/zoo}",
                    "--model.alphas=[0,1]",
                ),
            ),
        ),
        remark=(
            "Small residual networks on images with known concepts ([guide](dissection.md)); the paper has a "
            "ResNet-50 on ImageNet and Broden. Kurtosis is the median over units."
        ),
    ),
)

RESULTS = (
    Result(
        "intertwiner-groups",
        "intertwiners",
        "table 1, proposition 3.4, theorem 4.2 and appendix E.9",
        "Intertwiner groups of activations",
        _groups,
        (
            Claim(
                "Each activation of table 1 commutes with its group.",
                "table 1",
                lambda q: _vanishes(q["error of passing through the activation"]),
            ),
            Claim(
                "It commutes with nothing else.",
                "table 1",
                lambda q: _remains(q["error of the best matrix for others"]),
            ),
            Claim(
                "Networks that differ by a group element are stitched without loss.",
                "theorem 4.2",
                lambda q: together(
                    *(_vanishes(q[f"error of the stitched {kind}"]) for kind in ("CNN", "residual network"))
                ),
            ),
            Claim(
                "Inside residual blocks this fails if only the branch has a map.",
                "appendix E.9",
                lambda q: _remains(q["error of the stitched residual network, inside blocks, its branch only"]),
            ),
        ),
        remark=(
            "Random weights and elements in double precision. Matrices outside a group are a scale, a flip "
            "and a rotation of two units."
        ),
        sizes=("",),
        as_published=True,
    ),
    Result(
        "gelu-homogeneity",
        "intertwiners",
        "figure 17, appendix E.2.1",
        "The error of exchanging GELU and a scale",
        _gelu,
        (
            Claim(
                "GELU is close to homogeneous, but not homogeneous.",
                "a figure",
                lambda q: _remains(q["error of exchanging GELU and a scale, 0.5"]),
            ),
            Claim("The error is asymptotically linear in the scale, with this slope.", "0.1267", _slope),
        ),
        remark=(
            "`python examples/gelu_homogeneity.py` draws the figure. The root-mean-square error for a standard normal "
            "input is integrated; the paper samples it."
        ),
        sizes=("",),
        as_published=True,
    ),
    *STITCHING,
    *ROTATION,
    *SIMILARITY,
    *DISSECTION,
)
