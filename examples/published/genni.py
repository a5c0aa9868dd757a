"""Compare figures of GENNI with exact ones: searches, planes and the connected components of an equivalence class."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from published.core import Claim, Quantity, Result, Run, Verdict, positive, rows, short, within

SEARCHES = "3 searches"


def _paper(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    found, loops, finer, epsilon = [], [], [], []
    for run in runs.values():
        candidates = rows(run, "candidates")
        found.append(sum(row["found"] for row in candidates) / len(candidates))
        (coarse,), (fine,) = (rows(run, "sets", grid="search-3d", refined=refined) for refined in (False, True))
        loops.append(float(json.loads(coarse["betti"])[1]))
        finer.append(float(json.loads(fine["betti"])[1]))
        epsilon.append(coarse["epsilon_over_J0"])
    return [
        Quantity("share of candidates that are found", tuple(found), "1", f"{SEARCHES} of 16 candidates"),
        Quantity("loops of the 3D set, the paper's grid", tuple(loops), "1", SEARCHES),
        Quantity("loops of the 3D set, half the spacing", tuple(finer), "1", SEARCHES),
        Quantity("epsilon over the J of the zero function", tuple(epsilon), "1", SEARCHES),
    ]


def _holes(q: Mapping[str, Quantity]) -> Verdict:
    coarse, fine = q["loops of the 3D set, the paper's grid"], q["loops of the 3D set, half the spacing"]
    reason, ours = f"{coarse.label}: {coarse}; {fine.label}: {fine}", f"{coarse.brief}; {fine.brief}"
    if not any(coarse.values):
        return Verdict("not decided", f"no loops on the paper's grid; {reason}", ours)
    if any(fine.values):
        return Verdict("agrees" if min(fine.values) > 0 else "not decided", reason, ours)
    return Verdict("disagrees", f"{reason}: the loops are the grid's", ours)


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
        "figures 1 and 2, section B.2",
        "Two ReLU units, with the paper's settings",
        _paper,
        (
            Claim(
                "Gradient descent from random starts finds other weights with the same function.",
                "figure 1: three found points",
                lambda q: positive(q["share of candidates that are found"]),
            ),
            Claim(
                "The set of equivalent weights in 3D has a hole not explained by permutations and scalings.",
                "figure 2b, no number",
                _holes,
            ),
            Claim(
                "Weights with J below 0.0025 belong to the class (hence not the zero function).",
                "figure 2: epsilon = 0.0025",
                lambda q: within(q["epsilon over the J of the zero function"], 0, 1),
            ),
        ),
        tuple(Run(f"genni-paper-{seed}", "equivalence/two_relu_paper", (f"--model.seed={seed}",)) for seed in range(3)),
        remark="Teacher: the paper's seed 10. The three searches differ by their starts.",
    ),
    Result(
        "genni-mixed",
        "genni",
        "section 4 and figure 2",
        "Two ReLU units whose class is known exactly",
        _mixed,
        (
            Claim(
                "There are two surfaces, one per permutation of the units.",
                "figure 2: two",
                lambda q: within(q["pieces of the set"], 2, 2),
            ),
            Claim("The two surfaces intersect.", "figure 2, no number", _intersect),
            Claim(
                "The search finds images under permutations and scalings.",
                "section 4, no number",
                lambda q: within(q["distance of found weights to the teacher's orbit"], 0, 1e-3),
            ),
        ),
        (Run("genni-mixed", "equivalence/two_relu_mixed"),),
        remark=(
            "The teacher has two slopes. Its class, and the J that separates the two sheets, have closed "
            "forms ([theory](theory/equivalence.md), 5.2). The recipe's search finds points on both."
        ),
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
            Claim("The set of equivalent LeNets is connected.", "section 4, no number", _between),
        ),
        (
            Run("zoo-lenet", "zoo/mnist5k_lenet", ("--model.members=1",)),
            Run("genni-lenet-digits", "equivalence/lenet_mnist5k", ("--model.zoo={zoo-lenet}/zoo",)),
        ),
        remark=(
            "Teacher and inputs are ours. R = 0.05 is the recipe's epsilon. Connectedness is judged in the "
            "plane through three found points, as in the paper."
        ),
    ),
)
