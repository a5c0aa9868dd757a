"""``lightning-sym compare``: compare the final metrics of several runs.

This module reads the options and the files of the runs without importing torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_sym._runs import FinishedRun, find_runs
from lightning_sym._text import unknown
from lightning_sym.cli.given import listed, read_own

USAGE = (
    "usage: lightning-sym compare RUN RUN [RUN ...] [--metrics PATTERNS] [--table NAME] [--ignore OPTIONS] "
    "[--out FOLDER] [--figures FORMAT] [--figure_size SIZE]"
)
NEEDS = "lightning_sym.reports"  # imports PyTorch
HELP = f"""{USAGE}

Prints the settings that differ between runs, and the final metrics of each run. Runs that differ by seed only form a
group, with its mean and 95 % interval. A star marks a significant difference from the first group.

  RUN RUN ...          folders of runs that have ended, or a folder that holds some (of a sweep)
  --metrics PATTERNS   names of numbers, separated by commas: --metrics 'test/*,val/loss'; also last logged values and
                       columns of a table. Default: the final numbers of the runs' reports
  --table NAME         compare the rows of results/NAME.csv
  --ignore OPTIONS     settings that make no difference, as seeds make none, by patterns: --ignore model.zoo
  --out FOLDER         write comparison.csv, comparison.json (with the value of each run) and comparison.png there
  --figures FORMAT     also write comparison.pdf (pdf) or comparison.svg (svg)
  --figure_size SIZE   make the figure as wide as a column of a paper (column) or as a page (page)"""
_OPTIONS = ("metrics", "table", "ignore", "out", "figures", "figure_size")
_CHOICES = {"figures": ("png", "pdf", "svg"), "figure_size": ("column", "page")}


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        places: Folders of runs, or of several.
        metrics: Patterns of names.
        table: Whose rows are compared.
        ignore: Patterns of options.
        out: Folder of the files.
        figures: Format of the figure, beside PNG.
        figure_size: Width of the figure; None as drawn.
        runs: The runs; by :func:`look`, like ``left_out``.
        left_out: Reasons for leaving runs out.
    """

    places: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    table: str | None = None
    ignore: tuple[str, ...] = ()
    out: Path | None = None
    figures: str = "png"
    figure_size: str | None = None
    runs: tuple[FinishedRun, ...] = ()
    left_out: tuple[str, ...] = ()


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is not known or has no value, or there is no run.
    """
    given, places = read_own("compare", args, _OPTIONS)
    for name, value in given.items():
        if value in (None, "", [], {}):
            raise ValueError(f"--{name} has no value.")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(unknown(f"value of --{name}", value, _CHOICES[name]))
    if not places:
        raise ValueError("Expected the folders of two or more runs, got none.")
    return Asked(
        tuple(places),
        listed(given, "metrics"),
        None if "table" not in given else str(given["table"]).removesuffix(".csv").removesuffix(".json"),
        listed(given, "ignore"),
        None if "out" not in given else Path(str(given["out"])),
        str(given.get("figures", "png")),
        None if "figure_size" not in given else str(given["figure_size"]),
    )


def look(asked: Asked) -> Asked:
    """Find the runs, and the reasons for leaving others out.

    Raises:
        ValueError: If one is not there or has not ended, there are not two, or the folder of the files is a file.
    """
    runs, left_out = find_runs(asked.places)
    if len(runs) < 2:
        alone = f"{runs[0].folder} alone" if runs else "none"
        raise ValueError(
            f"Expected two or more runs that have ended, got {alone}; several seeds of one setting will do."
            f"{''.join(' ' + note[:1].upper() + note[1:] for note in left_out[:1])}"
        )
    if asked.out is not None and asked.out.is_file():
        raise ValueError(f"{asked.out} is a file; --out takes a folder.")
    return replace(asked, runs=tuple(runs), left_out=tuple(left_out))


def run(asked: Asked) -> None:
    """Compare runs, print the comparison, and write it.

    Args:
        asked: As :func:`look` returns it.

    Raises:
        ValueError: If the runs have nothing in common.
        OSError: If a file cannot be written.
    """
    from rich.console import Console

    from lightning_sym.figures import write_figure
    from lightning_sym.reports.comparison import compare_runs

    found = compare_runs(asked.runs, metrics=asked.metrics, table=asked.table, ignore=asked.ignore)
    console = Console(width=80)
    found.show(console)
    for note in asked.left_out:
        console.print(f"  {note}", highlight=False, markup=False)
    if asked.out is None:
        return
    found.table.write(asked.out)
    picture = asked.out / "comparison.png"
    for file in write_figure(found.figure(), picture, asked.figures, asked.figure_size):  # type: ignore[arg-type]
        console.print(f"  picture {file}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  table   {asked.out / 'comparison.csv'}", highlight=False, markup=False, soft_wrap=True)
