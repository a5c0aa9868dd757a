"""Compare figures of GENNI with exact ones: searches, planes and the connected components of an equivalence class."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch

from lightning_sym.landscape import WeightPlane, weight_vector
from lightning_sym.landscape.two_unit import TwoUnitClass, distance, slopes
from lightning_sym.networks import MultiLayerPerceptron
from published.core import Claim, Quantity, Result, Run, Verdict, Word, rows, short, within

SEARCHES = "3 searches"
_ZERO = 1e-30  # J, of rounding errors in double precision


PLANES = 200


def _paper(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found, loops, finer, epsilon = [], [], [], []
    for run in runs.values():
        candidates = rows(run, "candidates")
        found.append(float(sum(row["found"] for row in candidates)))
        (coarse,), (fine,) = (rows(run, "sets", grid="search-3d", refined=refined) for refined in (False, True))
        loops.append(float(json.loads(coarse["betti"])[1]))
        finer.append(float(json.loads(fine["betti"])[1]))
        epsilon.append(coarse["epsilon_over_J0"])
    return [
        Quantity("candidates that are found when the search ends", tuple(found), "1", SEARCHES),
        Quantity("loops of the 3D set, the paper's grid", tuple(loops), "1", SEARCHES),
        Quantity("loops of the 3D set, half the spacing", tuple(finer), "1", SEARCHES),
        Quantity("epsilon over the J of the zero function", tuple(epsilon), "1", SEARCHES),
        *_exact(),
    ]


def _exact() -> Sequence[Quantity]:
    """Compute facts about the class of the paper's teacher by theory, J on a path, and slices by random planes."""
    network = MultiLayerPerceptron([2], bias=False, image_size=1, num_classes=1).fresh(10)
    teacher = weight_vector(network).detach().double()
    inner, outer = teacher[:2], teacher[2:]  # both input weights are negative
    exact = TwoUnitClass(slopes(teacher))
    share, outputs = outer[0] * inner[0], (outer * inner).sum()  # the units' shares of the one slope
    # Both input weights keep their sign, and the shares their sum, while the units change places.
    t = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    moving = inner.abs() ** (1 - t) * inner.flip(0).abs() ** t * inner.sign()
    first = share + t[:, 0] * (outputs - 2 * share)
    path = torch.cat([moving, torch.stack([first, outputs - first], 1) / moving], 1)
    generator, holes = torch.Generator().manual_seed(0), []
    for _ in range(PLANES):
        others = 0.5 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
        a, b, c = -others[:, 0].abs(), -others[:, 1].abs(), others[:, 2]
        points = torch.stack([a, b, c, (outputs - c * a) / b], 1)
        quadric = exact.quadric(WeightPlane.through(torch.cat([teacher[None], points]), tolerance=1e-9))
        holes.append(float(quadric.sheets == 1 and quadric.centre_inside and quadric.throat != quadric.level))
    planes = f"{PLANES} planes through the teacher and 3 random points of its class"
    return [
        Quantity("components of the exact class", (float(exact.components),), "1", "theory"),
        Quantity("dimension of the exact class", (float(exact.dimension),), "1", "theory"),
        Quantity(
            "J on a path that exchanges the units",
            tuple(distance(path, exact.target, exact.moments).tolist()),
            "1",
            f"{len(path)} points",
        ),
        Quantity("planes that cut the exact class in a surface with a throat", (100 * fmean(holes),), "%", planes),
    ]


def _joined(q: Mapping[str, Quantity]) -> Verdict:
    """Say whether the class is one piece: by theory, and on a path from the teacher to its image."""
    components, path = q["components of the exact class"], q["J on a path that exchanges the units"]
    word: Word = "agrees" if components.mean == 1 and max(path.values) < _ZERO else "disagrees"
    dimension = q["dimension of the exact class"].mean
    reason = f"the class has {components.mean:g} component, of dimension {dimension:g}"
    return Verdict(word, f"{reason}; J at most {max(path.values):.1g} on a path that exchanges the units")


def _finds(q: Mapping[str, Quantity]) -> Verdict:
    found = q["candidates that are found when the search ends"]
    word: Word = "agrees" if min(found.values) > 0 else "disagrees"
    return Verdict(word, f"at least {min(found.values):g} of 16 candidates in each of {found.over}")


def _holes(q: Mapping[str, Quantity]) -> Verdict:
    """Judge by the exact class, as loops that are counted on a grid are mostly the grid's."""
    planes = q["planes that cut the exact class in a surface with a throat"]
    coarse, fine = q["loops of the 3D set, the paper's grid"], q["loops of the 3D set, half the spacing"]
    word: Word = "agrees" if planes.mean > 0 else "disagrees"
    reason = f"a throat in {planes} of {planes.over}"
    return Verdict(word, f"{reason}; {coarse.label}: {coarse}; {fine.label}: {fine}", f"a throat in {planes} of planes")


def _mixed(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    run = runs["genni-mixed"]
    points = {row["point"]: row for row in rows(run, "points")}
    (coarse,), (fine,) = (rows(run, "sets", grid="search-3d", refined=refined) for refined in (False, True))
    barrier = json.loads((run / "results" / "sets.json").read_text())["exact"]["barrier"]
    levels = [level for row in json.loads(fine["joining"]) for level in row if level is not None]
    found = [row["orbit_distance"] for row in points.values() if row["steps"] is not None]
    one = "one search, 4 points; theory is exact"
    return [
        Quantity("pieces of the set", (float(fine["pieces_full"]),), "1", one),
        Quantity("pieces of the set, coarser grid", (float(coarse["pieces_full"]),), "1", one),
        Quantity("epsilon of the set over the exact barrier", (fine["epsilon"] / barrier,), "1", one),
        Quantity("J at which all points are in one piece, over the exact barrier", (max(levels) / barrier,), "1", one),
        Quantity("distance of found weights to the teacher's orbit", tuple(found), "1", f"{len(found)} found points"),
    ]


def _intersect(q: Mapping[str, Quantity]) -> Verdict:
    pieces, level = q["pieces of the set"], q["J at which all points are in one piece, over the exact barrier"]
    reason = f"{short(pieces.mean)} pieces, joined from J = {short(level.mean)} times the exact barrier on"
    return Verdict("disagrees" if pieces.mean > 1 and level.mean > 0.9 else "agrees", reason)


def _lenet_paper(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found = rows(runs["genni-lenet-paper"], "candidates")
    return [Quantity("R = J / V on held-out inputs", tuple(row["R"] for row in found), "1", f"{len(found)} candidates")]


def _lenet_digits(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    run = runs["genni-lenet-digits"]
    candidates = rows(run, "candidates")
    points = [row for row in rows(run, "points") if row["steps"] is not None]
    (plane,) = rows(run, "sets", grid="search-2d", refined=False)
    constant = plane["epsilon"] / plane["epsilon_over_V"]
    joining = json.loads(plane["joining"])
    levels = [joining[a][b] for a in range(len(joining)) for b in range(a) if joining[a][b] is not None]
    return [
        Quantity(
            "share of candidates that are found",
            (sum(row["found"] for row in candidates) / len(candidates),),
            "1",
            f"{len(candidates)} candidates",
        ),
        Quantity("R = J / V on held-out digits", tuple(row["R"] for row in points), "1", f"{len(points)} found points"),
        Quantity("epsilon of the plane over V", (plane["epsilon_over_V"],), "1", "one plane"),
        Quantity(
            "J / V between two found points in the plane",
            tuple(level / constant for level in levels),
            "1",
            f"{len(levels)} pairs of 3 points of one plane",
        ),
    ]


def _between(q: Mapping[str, Quantity]) -> Verdict:
    levels, epsilon = q["J / V between two found points in the plane"], q["epsilon of the plane over V"]
    word = "disagrees" if min(levels.values) > epsilon.mean else "agrees"
    lowest = f"lowest {short(min(levels.values))}"
    return Verdict(word, f"to pass between two of them J rises to {levels} V ({lowest}), epsilon is {epsilon} V")


RESULTS = (
    Result(
        "genni-paper",
        "genni",
        "figures 1 and 2, section B.2 and table 2",
        "Two ReLU units, with the paper's settings",
        _paper,
        (
            Claim(
                "Gradient descent from random starts finds other weights with the same function.",
                "figure 1: three found points",
                _finds,
            ),
            Claim(
                "The set of equivalent weights in 3D has a hole not explained by permutations and scalings.",
                "figure 2b, no number",
                _holes,
            ),
            Claim("The two surfaces, one per permutation of the units, intersect.", "figure 2, no number", _joined),
            Claim(
                "Weights with J below 0.0025 belong to the class (hence not the zero function).",
                "figure 2: epsilon = 0.0025",
                lambda q: within(q["epsilon over the J of the zero function"], 0, 1),
            ),
        ),
        tuple(Run(f"genni-paper-{seed}", "equivalence/two_relu_paper", (f"--model.seed={seed}",)) for seed in range(3)),
        sizes=("",),
        as_published=True,
        remark=(
            "Teacher: the paper's seed 10, whose slopes have one sign, so that its class is known exactly "
            "([theory](theory/equivalence.md), 5.3). The three searches differ by their starts."
        ),
    ),
    Result(
        "genni-mixed",
        "genni",
        "section 4 and figure 2",
        "Two ReLU units whose class is known exactly",
        _mixed,
        (
            Claim(
                "With a teacher of two slopes there are two surfaces, one per permutation of the units.",
                "",
                lambda q: within(q["pieces of the set"], 2, 2),
            ),
            Claim("They intersect, as for the paper's teacher.", "", _intersect),
            Claim(
                "The search finds images under permutations and scalings.",
                "section 4, no number",
                lambda q: within(q["distance of found weights to the teacher's orbit"], 0, 1e-3),
            ),
        ),
        (Run("genni-mixed", "equivalence/two_relu_mixed"),),
        remark=(
            "Not the paper's teacher: this one has two slopes. Its class, and the J that separates the two sheets, "
            "have closed forms ([theory](theory/equivalence.md), 5.2). The recipe's search finds points on both."
        ),
        sizes=("",),
    ),
    Result(
        "genni-lenet-paper",
        "genni",
        "appendix D and table 1",
        "LeNet with the paper's settings",
        _lenet_paper,
        (
            Claim(
                "The search finds equivalent LeNet weights (hence better than the best constant, R < 1).",
                "appendix D, figures",
                lambda q: within(q["R = J / V on held-out inputs"], 0, 1),
            ),
        ),
        (Run("genni-lenet-paper", "equivalence/lenet_paper", ("--trainer.callbacks.grids=[]",)),),
        remark="No ReLU on the output; 1,000 steps.",
        as_published=True,
        sizes=("",),
    ),
    Result(
        "genni-lenet-digits",
        "genni",
        "section 4 and appendix D",
        "LeNet on real digits",
        _lenet_digits,
        (
            Claim(
                "The search finds LeNet weights that are equivalent on held-out inputs.",
                "appendix D, figures",
                lambda q: within(q["R = J / V on held-out digits"], 0, 0.05),
            ),
            Claim(
                "The set of equivalent LeNets is connected (here: in a plane, for a trained teacher).",
                "section 4, no number",
                _between,
            ),
        ),
        (
            Run("zoo-lenet", "zoo/mnist5k_lenet", ("--model.members=1",)),
            Run("genni-lenet-digits", "equivalence/lenet_mnist5k", ("--model.zoo={zoo-lenet}/zoo",)),
        ),
        remark=(
            "Teacher and inputs are ours. R = 0.05 is the recipe's epsilon. Connectedness is judged in the "
            "plane through three found points, as in the paper."
        ),
        sizes=("",),
    ),
)
