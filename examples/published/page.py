"""Writes docs/results.md, docs/papers.md and docs/results/ from the files of all results: ``make results-page``."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_sym.recipes import never_run, recipe_names
from published import RESULTS
from published.core import (
    ACCURACY,
    CORE_HOURS,
    ROOT,
    SOURCES,
    Claim,
    Quantity,
    Result,
    file_of,
    judged,
    quantities_of,
    save,
)
from published.exhibits import EXHIBITS
from published.power import POWER

DOCS = ROOT / "docs"
Found = Mapping[str, Any]
_HOLDS = {"agrees": "yes", "partly": "partly", "disagrees": "no", "not decided": "undecided"}

_TOP = """# Results

Published claims, tested in miniature. Made from [files of runs](../benchmarks/results/papers) by `make results-page`,
as are the pages of details, one per paper, and a list of all [figures and tables](papers.md). No number is typed by
hand.

```bash
python examples/papers.py --list              # list all results
python examples/papers.py --only {example}  # make one
python examples/papers.py --jobs 2            # make the missing ones
python examples/papers.py --full              # use the papers' recipes: {needs}
```

Interrupted runs resume. The rule: a part of a claim holds or not where a 95 % interval decides, of paired differences
where two figures are compared; "no better" and "as good" have a margin, which the claim states. A claim holds (*yes*)
if all of its parts do, and *partly* if some do. If none does, one decided part makes it *no*; else it is *undecided*.
Networks that have not learned are no evidence. "Ours" lists means; details have intervals.

A claim with open parts has a number of further runs (seeds, networks or pairs): with so many, the part that needs most
of them is decided with a probability of {power:.0f} %, if the true mean and spread are those observed (Student's
interval; one of resampled networks shrinks with the root of their number). From two or three runs this is rough. Hours
of one core are in proportion to those spent; above {hours:g} a claim is *out of reach*. A claim that got further runs
was looked at twice: up to 10 % of such decisions may be wrong, not 5 %.
"""
_PAPERS = """# Figures and tables

The figures and tables of the papers that this package follows (drawings left out), with their recipes, and whether they
were made here. Made by `make results-page` from the headers of the [recipes](recipes.md) and the [results](results.md).

- *yes*: with the paper's settings, to the end
- *in miniature*: to the end, with smaller networks, data or grids
- *not yet*: the recipe needs more than the machine had; tests run it for a batch of synthetic images
"""
_DETAILS = """
Brackets are 95 % intervals of means: from resampled networks where pairs share networks, Student's otherwise. Minutes
are processor time of one core. [All results](../results.md)
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


def pages(found: Mapping[tuple[str, bool], Found]) -> dict[Path, str]:
    """Return the text of all pages by their files: the summary, and the details of each source."""
    needs = "; ".join(dict.fromkeys(result.needs for result in RESULTS if result.needs)) or "data and a GPU"
    top = _TOP.format(example=RESULTS[0].name, needs=needs, power=100 * POWER, hours=CORE_HOURS)
    made = {DOCS / "results.md": "".join([top, _summary(found), _never_run(found)]), DOCS / "papers.md": _papers(found)}
    for key, source in SOURCES.items():
        own = [result for result in RESULTS if result.source == key]
        if own:
            head = f"# {source.authors} ({source.year})\n\n*{source.title}*, {source.where}.\n{_DETAILS}"
            made[DOCS / "results" / f"{key}.md"] = "".join([head, *(_section(result, found) for result in own)])
    return made


def _summary(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return the number of the sources' claims by verdict with a table of them, and the same of ours."""
    minutes = sum(one["minutes"] for (_, full), one in found.items() if not full)
    lines = [f"\nAll of it takes {minutes:.0f} minutes of one core.\n"]
    for title, ours in (("Claims of the sources", False), ("Our questions beside them", True)):
        columns = ["paper", "claim", *([] if ours else ["published"]), "ours", "holds?"]
        words, rows = [], [_row(columns), _row(["-"] * len(columns))]
        for result in RESULTS:
            one, source = found.get((result.name, False)), SOURCES[result.source]
            link = f"[{source.authors} {source.year}]({_place(result)})"
            for index, claim in _claims(result, ours):
                made = {"ours": "", "verdict": "", "effort": ""} if one is None else one["claims"][index]
                words.append(_HOLDS.get(made["verdict"], "not run"))
                more = f": {made['effort']}" if made["effort"] else ""
                rows.append(_row([link, claim.says, *([] if ours else [claim.paper]), made["ours"], words[-1] + more]))
        counts = ", ".join(f"{words.count(word)} {word}" for word in (*_HOLDS.values(), "not run") if word in words)
        lines += [f"\n## {title}\n\n{len(words)} claims: {counts or 'none'}. {_open(found, ours)}\n\n", *rows]
    return "".join(lines)


def _open(found: Mapping[tuple[str, bool], Found], ours: bool) -> str:
    """Return the number of claims with open parts, and of those out of reach."""
    efforts = [
        found[result.name, False]["claims"][index]["effort"]
        for result in RESULTS
        if (result.name, False) in found
        for index, _ in _claims(result, ours)
    ]
    open_ = [effort for effort in efforts if effort]
    far = sum(effort.startswith("out of reach") for effort in open_)
    return f"{len(open_)} of them have open parts, {far} out of reach."


def _claims(result: Result, ours: bool) -> list[tuple[int, Claim]]:
    """Return the claims that the source makes, or does not make, with their numbers."""
    return [(index, claim) for index, claim in enumerate(result.claims) if ours == (not claim.paper)]


def _never_run(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return the recipes without a complete run, each with the results that show its effect in miniature."""
    lines = [
        "\n## Recipes without a complete run\n\n"
        "They need downloaded data, most of them a GPU, and quote the papers' figures as expected. Tests run each for "
        "a batch of synthetic images.\n\n",
        _row(["recipe", "in miniature"]),
        _row(["-"] * 2),
    ]
    done = {recipe for (_, full), one in found.items() if full for recipe in one["recipes"]}
    for name in recipe_names():
        if never_run(name) and name not in done:
            own = [result for result in RESULTS if name in {run.recipe for run in result.full}]
            small = "; ".join(f"[{result.title}]({_place(result)})" for result in own)
            lines.append(_row([f"[`{name}`](../recipes/{name}.yaml)", small]))
    return "".join(lines)


def _papers(found: Mapping[tuple[str, bool], Found]) -> str:
    """Return the page of all figures and tables, with the results that are about none of them at its end."""
    words = [exhibit.made(found) for exhibit in EXHIBITS]
    brief = [word.partition(":")[0] for word in words]
    counts = ", ".join(f"{brief.count(word)} {word}" for word in sorted(set(brief), key=brief.index))
    lines = [_PAPERS, f"\n{len(EXHIBITS)} figures and tables: {counts}.\n"]
    columns = ["place", "content", "recipe", "results", "made here"]
    shown = set()
    for source in dict.fromkeys(exhibit.source for exhibit in EXHIBITS):
        lines += [f"\n## {SOURCES[source].authors} ({SOURCES[source].year})\n\n", _row(columns), _row(["-"] * 5)]
        for exhibit, made in zip(EXHIBITS, words, strict=True):
            if exhibit.source == source:
                shown |= {result.name for result in exhibit.results}
                recipes = ", ".join(f"[`{name}`](../recipes/{name}.yaml)" for name in exhibit.recipes)
                code = f"`{exhibit.describes}`" if "." in exhibit.describes else ""
                own = ", ".join(f"[{result.name}]({_place(result)})" for result in exhibit.results)
                lines.append(_row([exhibit.place, exhibit.shows, recipes or code, own, made]))
    lines += ["\n## Results about other parts of the sources\n\n", _row(["source", "place", "result"]), _row(["-"] * 3)]
    for result in RESULTS:
        if result.name not in shown:
            own_source = SOURCES[result.source]
            lines.append(
                _row([f"{own_source.authors} {own_source.year}", result.place, f"[{result.title}]({_place(result)})"])
            )
    return "".join(lines)


def _place(result: Result) -> str:
    """Return the address of a result's details, seen from the summary."""
    return f"results/{result.source}.md#{_anchor(result.title)}"


def _anchor(title: str) -> str:
    """Return GitHub's anchor of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _section(result: Result, found: Mapping[tuple[str, bool], Found]) -> str:
    one, full = found.get((result.name, False)), found.get((result.name, True))
    lines = [
        f"\n## {result.title}\n\n{result.place[:1].upper()}{result.place[1:]}. {_deeper(result.remark)}".rstrip(),
        "\n",
    ]
    for ours in (False, True):
        claims = _claims(result, ours)
        columns = ["our question" if ours else "claim", *([] if ours else ["published"]), "ours"]
        columns += ["with the paper's recipe"] if full is not None else []
        lines += ["\n", _row(columns), _row(["-"] * len(columns))] if claims else []
        for index, claim in claims:
            verdicts = (_verdict(run, index) for run in ((one, full) if full else (one,)))
            lines.append(_row([claim.says, *([] if ours else [claim.paper]), *verdicts]))
    if one is not None:
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        seeds = f", seeds {', '.join(map(str, one['seeds']))}" if one["seeds"] else ""
        lines.append(f"\n`{one['command']}`: {one['minutes']:.1f} minutes{seeds}; {versions}{_added(one)}.\n")
        lines.append(_figures(quantities_of(result, one)))
        lines.append(_constant_networks(result, one))
    return "".join(lines)


def _added(one: Found) -> str:
    """Return the versions that added runs to a file."""
    return "".join(f"; {added['runs']} runs were added by commit {added['commit']}" for added in one.get("added", []))


def _deeper(text: str) -> str:
    """Return Markdown with links relative to docs/ rewritten for a folder below it."""
    return re.sub(r"\]\((?!https?:|#)", "](../", text)


def _constant_networks(result: Result, one: Found) -> str:
    """Return a sentence about networks that are no better than one class for all inputs; empty if there are none."""
    runs = [found for found in quantities_of(result, one) if found.label.startswith(ACCURACY)]
    failed = {run.label.removeprefix(ACCURACY): run.failed for run in runs if run.failed}
    if not failed:
        return ""
    total, rows = sum(len(run.values) for run in runs), "; ".join(f"{label}: {n}" for label, n in failed.items())
    return (
        f"\n**Constant networks: {sum(failed.values())} of {total}.** They predict one class for all images, so their "
        f"training failed ({rows}). No claim is judged by these rows.\n"
    )


def _verdict(one: Found | None, index: int) -> str:
    if one is None:
        return "not run"
    claim = one["claims"][index]
    more = f", {claim['effort']}" if claim["effort"] else ""
    return f"**{_HOLDS[claim['verdict']]}**{more}: {claim['reason']}"


def _figures(quantities: Sequence[Quantity]) -> str:
    """Return all figures: labels ``"column, row"`` as matrices of the columns that share most of their rows."""
    lines = ["\n<details><summary>all figures</summary>\n"]
    over = len({quantity.over for quantity in quantities}) > 1
    if not over:
        lines.append(f"\nOver {quantities[0].over}.\n")
    columns: dict[str, dict[str, Quantity]] = {}
    for quantity in quantities:
        column, _, row = quantity.label.partition(", ")
        columns.setdefault(column, {})[row] = quantity
    groups: list[dict[str, dict[str, Quantity]]] = []
    for name, cells in columns.items():
        for group in groups:
            rows = {row for other in group.values() for row in other}
            if len(rows & cells.keys()) * 2 >= len(rows | cells.keys()):
                group[name] = cells
                break
        else:
            groups.append({name: cells})
    for group in groups:
        lines += ["\n", *_matrix(group, over)]
    return "".join([*lines, "\n</details>\n"])


def _matrix(columns: Mapping[str, Mapping[str, Quantity]], with_over: bool) -> list[str]:
    """Return a table with a row for each row, or for each column if they have a single row or several units."""
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    if len(rows) == 1 or any(len({(q.unit, q.over) for q in column.values()}) > 1 for column in columns.values()):
        found = [quantity for column in columns.values() for quantity in column.values()]
        body = [_row([_head(q.label, q, with_over), _plain(q)]) for q in found]
        return [_row(["figure", "mean"]), _row(["-"] * 2), *body]
    heads = [_head(name, next(iter(column.values())), with_over) for name, column in columns.items()]
    lines = [_row(["", *heads]), _row(["-"] * (len(heads) + 1))]
    for row in rows:
        cells = (column.get(row) for column in columns.values())
        lines.append(_row([row, *("" if cell is None else _plain(cell) for cell in cells)]))
    return lines


def _head(name: str, quantity: Quantity, with_over: bool) -> str:
    unit = "" if quantity.unit == "1" else f", {quantity.unit}"
    return f"{name}{unit}{f' ({quantity.over})' if with_over else ''}"


def _plain(quantity: Quantity) -> str:
    """Return a mean with its interval, without the unit."""
    return str(replace(quantity, unit="1"))


def _row(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cell.replace('|', chr(92) + '|') for cell in cells)}|\n"


def write() -> Path:
    """Write verdicts into the JSON files, and the pages; return where the summary is."""
    found = refreshed()
    for result in RESULTS:
        for full in (False, True):
            if (result.name, full) in found:
                save(file_of(result, full=full), found[result.name, full])
    made = pages(found)
    for file, text in made.items():
        file.parent.mkdir(exist_ok=True)
        save(file, text)
    return next(iter(made))


if __name__ == "__main__":
    write()
