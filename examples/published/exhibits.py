"""The figures and tables of the sources, each with its recipes, results and whether it was made here."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from lightning_sym.recipes import never_run, recipe_header, recipe_names, recipe_path
from published import RESULTS
from published.core import SOURCES, Result


@dataclass(frozen=True)
class Exhibit:
    """A figure or table of a source.

    Recipes and results belong to it if they name its place: the header of a recipe after the source's arXiv number,
    :attr:`Result.place <published.core.Result.place>` of a result.

    Attributes:
        source: Key of :data:`published.core.SOURCES`.
        place: ``"figure 3"``, or words of the source if it has no number.
        shows: Its content.
        describes: The class of ``lightning_sym`` that it describes, or ``"methods"``; empty for experiments.
    """

    source: str
    place: str
    shows: str
    describes: str = ""

    @property
    def results(self) -> list[Result]:
        """The results that name its place."""
        return [one for one in RESULTS if one.source == self.source and _names(one.place, self.place)]

    @property
    def recipes(self) -> list[str]:
        """The recipes that name its place, and those of its results that have the source's settings; no zoos."""
        runs = [run for one in self.results for run in (one.runs if one.as_published else one.full)]
        full = {run.recipe for run in runs if not run.recipe.startswith("zoo/")}
        return [
            name
            for name, source in recipe_sources().items()
            if name in full or _names(part_about(self.source, source), self.place)
        ]

    def made(self, found: Collection[tuple[str, bool]]) -> str:
        """Return whether it was made here.

        Args:
            found: Names of the measured results, each with whether it is the one with the source's recipes.
        """
        if self.describes:
            return "nothing to run"
        results, recipes = self.results, self.recipes
        if any((one.name, bool(one.full)) in found for one in results if one.full or one.as_published):
            return "yes"
        if any((one.name, False) in found for one in results) or any(not never_run(name) for name in recipes):
            return "in miniature"
        return f"not yet: needs {_needs(recipes[0])}" if recipes else "no recipe"


@cache  # each figure and table asks for all recipes
def recipe_sources() -> dict[str, str]:
    """Return the source in the header of each recipe, by recipe."""
    return {name: recipe_header(name)["source"] for name in recipe_names()}


def places(text: str) -> set[str]:
    """Return the figures and tables that a text names, also in enumerations: ``"tables 2 and 4, figures 4 to 6"``."""
    found = set()
    for kind, numbers in re.findall(r"\b(figure|table)s? (\d+(?:(?:, | and | to )\d+)*)", text.lower()):
        last = 0
        for joined, number in re.findall(r"(to )?(\d+)", numbers):
            found |= {f"{kind} {n}" for n in range(last + 1 if joined else int(number), int(number) + 1)}
            last = int(number)
    return found


def _names(text: str, place: str) -> bool:
    """Test whether a text names a place."""
    return place in places(text) or (not place[-1].isdigit() and place in text)


def part_about(source: str, text: str) -> str:
    """Return the part of a recipe's source line that is about one source: up to the next arXiv number or semicolon."""
    key = "Rashomon manifold" if source == "rashomon" else SOURCES[source].where
    return re.split(r"arXiv|;", text.partition(key)[2])[0]


def _needs(recipe: str) -> str:
    """Return the missing requirements of a recipe: its data and its hardware."""
    match = re.search(r"lightning_sym\.datamodules\.(\w+)DataModule", recipe_path(recipe).read_text(encoding="utf-8"))
    data = "" if match is None or match[1] == "GaussianInputs" else match[1].replace("CIFAR10", "CIFAR-10") + " and "
    return f"{data}{re.split('[;,]', recipe_header(recipe)['hardware'])[0]}"


_GENNI = (
    ("figure 1", "two ReLU units: J on a plane, as a surface and contours"),
    ("figure 2", "two ReLU units: equivalent weights in 3D"),
    ("figure 3", "two ReLU units: UMAP of the 3D and the 4D set"),
    ("figure 4", "LeNet: J on a plane, as a surface and contours"),
    ("figure 5", "LeNet: equivalent weights in 3D"),
    ("figure 6", "LeNet: UMAP of the 3D and the 4D set"),
    ("table 1", "settings for LeNet"),
    ("table 2", "settings for two ReLU units"),
)
_INTERTWINERS = (
    ("table 1", "intertwiner groups of activations"),
    ("table 2", "Procrustes similarity of Myrtle CNNs"),
    ("table 3", "accuracy of ResNet-20s with leaky ReLU"),
    ("table 4", "Procrustes similarity of Myrtle CNNs of constant width"),
    ("figure 1", "stitching penalties of Myrtle CNNs"),
    ("figure 2", "CKA of ResNet-20s"),
    ("figure 3", "interpretable units of ResNet-50, the same without ReLU on residual outputs, and ConvNeXt"),
    ("figure 4", "rotation penalties of Myrtle CNNs"),
    ("figure 5", "CKA of Myrtle CNNs"),
    ("figure 6", "stitching penalties of ResNet-20s"),
    ("figure 7", "stitching penalties of ResNet-18s"),
    ("figure 8", "stitching penalties of ResNet-20s with leaky ReLU"),
    ("figure 9", "Procrustes similarity of ResNet-20s"),
    ("figure 10", "Procrustes similarity of ResNet-18s"),
    ("figure 11", "CKA of ResNet-18s"),
    ("figure 12", "stitching penalties of compact transformers"),
    ("figure 13", "stitching penalties with cross-validated alpha"),
    ("figure 14", "the chosen alphas"),
    ("figure 15", "sparsity and penalty of lasso maps"),
    ("figure 16", "CKA of Myrtle CNNs of constant width"),
    ("figure 17", "GELU and scaled GELU, and the error of exchanging them"),
    ("figure 18", "interpretable units by category"),
    ("figure 19", "interpretable units inside residual blocks"),
    ("figure 20", "concepts of ResNet-50's units"),
    ("figure 21", "best units of ResNet-50, with images"),
    ("figure 22", "concepts of the units without ReLU on residual outputs"),
    ("figure 23", "best units without ReLU on residual outputs, with images"),
    ("figure 24", "concepts of ConvNeXt's units"),
    ("figure 25", "best units of ConvNeXt, with images"),
    ("figure 26", "Myrtle CNN", "networks.MyrtleCNN"),
    ("figure 27", "ResNet-20", "networks.CIFARResNet"),
    ("figure 28", "ResNet-18", "networks.CIFARResNet18"),
)
_RASHOMON = (
    ("first figure", "a Bezier curve of low loss between two PreResNet-20s, and the loss in its plane"),
    ("local data", "Jacobians and Hessian products along the curve"),
    ("density graph", "density of the Hessian's eigenvalues"),
)
_EQUIVARIANCE = (
    ("table 1", "digit and quadrant: accuracy of FC, CONV and F-FC+CONV"),
    ("table 2", "CIFAR-10: accuracy and evidence of eleven models"),
    ("table 3", "three symmetries on five data sets"),
    ("table 4", "precisions and effective parameters of FC+CONV, by layer"),
    ("table 5", "properties of other methods", "methods"),
    ("table 6", "the network", "networks.RelaxedNetwork"),
    ("table 7", "group convolutions on rotated CIFAR-10"),
    ("figure 3", "selected paths, by layer"),
)
EXHIBITS = tuple(
    Exhibit(source, *row)
    for source, rows in (
        ("genni", _GENNI),
        ("intertwiners", _INTERTWINERS),
        ("rashomon", _RASHOMON),
        ("equivariance", _EQUIVARIANCE),
    )
    for row in rows
)
