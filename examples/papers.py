"""Make and measure every published result in miniature, and write docs/results.md.

    python examples/papers.py --list
    python examples/papers.py --only rebasin-mlp
    python examples/papers.py --jobs 2

Each result runs a few shipped recipes with options, on data without download. It compares measurements with intervals
to the claims of its source. A result with a file in benchmarks/results/papers/ is skipped without ``--again``; if its
definition has new seeds, only these are run. Complete runs are kept, and interrupted ones resume from their last
epoch. With ``--full`` the sources' own recipes are run in the same way; the page has a column for them.
"""

import argparse
import difflib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from published import RESULTS
from published.core import Result, extend, file_of, lacks, make, save
from published.page import write


def chosen(names: list[str], full: bool) -> list[Result]:
    """Return the selected results.

    Raises:
        ValueError: If no result has a name, or it has no full version.
    """
    known = {result.name: result for result in RESULTS}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(close)}?" if close else "--list shows all."
            raise ValueError(f"No result is named {name!r}; {hint}")
        if full and not known[name].full:
            raise ValueError(f"{name} has no recipes of its source to be run in full; leave out --full.")
    return [known[name] for name in names or known if known[name].full or not full]


def listing(results: list[Result]) -> str:
    """Return a line for each result: whether it exists, its name and its title."""
    width = max(len(result.name) for result in results)
    marks = ["made" if file_of(result).is_file() else "-" for result in results]
    return "\n".join(f"{m:5}{r.name:{width}}  {r.title}" for m, r in zip(marks, results, strict=True))


def one(result: Result, folder: Path, full: bool, again: bool) -> bool:
    """Make a missing result, or its missing seeds; print an error if it fails, and return whether the result exists."""
    file = file_of(result, full=full)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if file.is_file() and not again:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not lacks(result, found, full=full):
                return True
            save(file, extend(result, folder, say, found, full=full))
        else:
            save(file, make(result, folder, say, full=full))
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        print(f"{result.name} was not made: {error}", file=sys.stderr, flush=True)
        return False
    print(f"{result.name}: {file}", flush=True)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Make the selected results, then the page; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the results, and make none")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these results; default: all")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="results in parallel, one thread each"
    )
    parser.add_argument("--full", action="store_true", help="the sources' own recipes, data and networks")
    parser.add_argument("--again", action="store_true", help="measure existing results again; runs are kept")
    parser.add_argument("--folder", type=Path, help="folder of all runs; default: runs/papers, or runs/papers-full")
    given = parser.parse_args(arguments)
    try:
        results = chosen(given.only, given.full)
        if given.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {given.jobs}.")
    except ValueError as error:
        print(f"papers.py: {error}", file=sys.stderr)
        return 2
    if given.list:
        print(listing(results))
        return 0
    folder = given.folder or Path("runs/papers-full" if given.full else "runs/papers")
    with ThreadPoolExecutor(given.jobs) as pool:
        there = list(pool.map(lambda result: one(result, folder, given.full, given.again), results))
    print(f"{sum(there)} of {len(there)} results exist; the page: {write()}")
    return 0 if all(there) else 1


if __name__ == "__main__":
    sys.exit(main())
