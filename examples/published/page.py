"""Writes docs/results.md from the JSON files of all results: ``make results-page``."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sym.recipes import never_run, recipe_names, recipe_summary
from published import RESULTS
from published.core import ROOT, SOURCES, Result, file_of, judged, quantities_of, save

PAGE = ROOT / "docs" / "results.md"
Found = Mapping[str, Any]

_TOP = """# Published results in miniature

What a paper says, what comes out here, and whether the two agree. Made by `make results-page` from the files in
[benchmarks/results/papers](../benchmarks/results/papers), and these by runs; no number is typed by hand.

```bash
python examples/papers.py --list               # what there is
python examples/papers.py --only {example}  # one of them
python examples/papers.py --jobs 2             # all that are not there
python examples/papers.py --full               # the papers' own recipes: {needs}
```

Runs that are interrupted go on where they were. Brackets hold 95 % intervals of means: from resampled networks where
pairs share networks, Student's otherwise. *Agrees* and *disagrees* are said where the interval leaves no doubt (of
differences of the same networks or pairs, where two figures are compared), *not decided* where it does, *partly*
where a claim has several parts. Minutes are processor time of one core.
"""


def refreshed() -> dict[tuple[str, bool], dict[str, Any]]:
    """Return the content of all JSON files, with verdicts of today, by name and whether full."""
    found = {}
    for result in RESULTS:
        for full in (False, True):
            file = file_of(result, full=full)
            if file.is_file():
                found[result.name, full] = judged(result, json.loads(file.read_text(encoding="utf-8")))
    return found


def page(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return the text of the page."""
    needs = "; ".join(dict.fromkeys(result.needs for result in RESULTS if result.needs)) or "data and a GPU"
    parts = [_TOP.format(example=RESULTS[0].name, needs=needs), "\n", _summary(found)]
    for key, source in SOURCES.items():
        own = [result for result in RESULTS if result.source == key]
        if own:
            parts.append(f"\n## {source.authors} ({source.year})\n\n*{source.title}*, {source.where}.\n")
            parts += [_section(result, found) for result in own]
    return "".join([*parts, _never_run(found)])


def _never_run(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return the recipes that nobody has run to their end, each with the results that show its effect in miniature."""
    lines = [
        "\n## Recipes that nobody has run to their end\n\n"
        "They need data that have to be downloaded, and most of them a GPU. What their headers say is expected are the "
        "papers' figures. Tests run each of them for a batch of made-up images.\n\n",
        _row(["recipe", "what it does", "in miniature"]),
        _row(["---"] * 3),
    ]
    done = {recipe for (_, full), one in found.items() if full for recipe in one["recipes"]}
    for name in recipe_names():
        if never_run(name) and name not in done:
            own = [result for result in RESULTS if name in {run.recipe for run in result.full}]
            small = "; ".join(f"[{result.title}](#{_anchor(result.title)})" for result in own)
            lines.append(_row([f"[`{name}`](../recipes/{name}.yaml)", recipe_summary(name), small]))
    return "".join(lines)


def _summary(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return how many claims there are, by verdict, and a table of all results."""
    words = [claim["verdict"] for (_, full), one in found.items() if not full for claim in one["claims"]]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    minutes = sum(one["minutes"] for (_, full), one in found.items() if not full)
    head = f"Made so far: {len(words)} claims ({counts or 'none'}), in {minutes:.0f} minutes of one core.\n\n"
    table = ["| result | of | verdicts | minutes |\n|---|---|---|---|\n"]
    for result in RESULTS:
        source, one = SOURCES[result.source], found.get((result.name, False))
        verdicts = "not run" if one is None else ", ".join(claim["verdict"] for claim in one["claims"])
        time = "" if one is None else f"{one['minutes']:.1f}"
        name = f"[{result.title}](#{_anchor(result.title)})"
        table.append(f"| {name} | {source.authors} ({source.year}), {result.place} | {verdicts} | {time} |\n")
    return head + "".join(table)


def _anchor(title: str) -> str:
    """Return how GitHub names a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _section(result: Result, found: Mapping[tuple[str, bool], Found]) -> str:
    one, full = found.get((result.name, False)), found.get((result.name, True))
    columns = ["the source says", "as published", "here", *(["with its own recipe"] if result.full else [])]
    lines = [f"\n### {result.title}\n\n", _row(columns), _row(["---"] * len(columns))]
    for index, claim in enumerate(result.claims):
        cells = [claim.says, claim.paper, *(_verdict(run, index) for run in ((one, full) if result.full else (one,)))]
        lines.append(_row(cells))
    if one is not None:
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        lines.append(
            f"\n{result.place[:1].upper()}{result.place[1:]}. `{one['command']}`: {one['minutes']:.1f} minutes"
        )
        seeds = f", seeds {', '.join(map(str, one['seeds']))}" if one["seeds"] else ""
        lines.append(f" of one core{seeds}; {versions}.\n")
        lines.append(_quantities(one))
        lines.append(_constant_networks(result, one))
    if result.remark:
        lines.append(f"\n{result.remark}\n")
    return "".join(lines)


def _constant_networks(result: Result, one: Found) -> str:
    """Return a sentence about networks that are no better than one class for all inputs; empty if there are none."""
    chance = -math.inf if result.chance is None else result.chance
    runs = [found for found in quantities_of(one) if found.label.startswith("test accuracy") and found.unit == "%"]
    failed = {run.label.partition(", ")[2]: [value for value in run.values if value <= chance] for run in runs}
    values = [value for found in failed.values() for value in found]
    if not values:
        return ""
    total = sum(len(run.values) for run in runs)
    rows = "; ".join(f"{label}: {len(found)}" for label, found in failed.items() if found)
    return (
        f"\n**Constant networks: {len(values)} of {total}.** They are right as often as one class for all images "
        f"(accuracy {', '.join(sorted({f'{value:.4f}' for value in values}))} %), so their training failed ({rows}). "
        "Verdicts on these rows say nothing about the layers until the runs are repeated.\n"
    )


def _verdict(one: Found | None, index: int) -> str:
    if one is None:
        return "not run"
    claim = one["claims"][index]
    return f"**{claim['verdict']}**: {claim['reason']}"


def _quantities(one: Found) -> str:
    lines = ["\n<details><summary>all figures</summary>\n\n", _row(["what", "mean", "over"]), _row(["---"] * 3)]
    lines += [_row([quantity.label, str(quantity), quantity.over]) for quantity in quantities_of(one)]
    return "".join([*lines, "\n</details>\n"])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def write() -> Path:
    """Write verdicts into the JSON files, and the page; return where it is."""
    found = refreshed()
    for result in RESULTS:
        for full in (False, True):
            if (result.name, full) in found:
                save(file_of(result, full=full), found[result.name, full])
    save(PAGE, page(found))
    return PAGE


if __name__ == "__main__":
    write()
