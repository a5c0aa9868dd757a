"""Time variants in turn, and write the results; shared by the benchmark scripts."""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_sym.zoo import versions

PARTS = ("median", "min", "max")
RESULTS = Path(__file__).parent / "results"
Runs = dict[str, Callable[[], Any]]
Results = list[dict[str, Any]]
Parts = Mapping[str, Callable[[], Results]]
Parser = argparse.ArgumentParser


def timed(
    runs: Runs,
    rounds: int,
    work: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Results:
    """Time variants in turn, after an uncounted round; return one :func:`row` per variant.

    On a GPU a row also has ``peak_mib``, by how much the memory of tensors grows within a run of the uncounted round.

    Args:
        runs: The variants; one is called "plain".
        rounds: Number of counted rounds.
        work: Work of a variant relative to the plain one; default 1.
        clock: Function that returns seconds; ``time.process_time`` for processor time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, float] = {}
    on_gpu = torch.cuda.is_available()
    for number in range(-1, rounds):
        for name, run in runs.items():
            if on_gpu and number < 0:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            start = clock()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(clock() - start)
            elif on_gpu:
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    rows = [row(name, own, seconds["plain"], (work or {}).get(name, 1)) for name, own in seconds.items()]
    return [{**own, "peak_mib": peaks[own["variant"]]} if on_gpu else own for own in rows]


def row(variant: str, seconds: list[float], plain: list[float], work: float = 1) -> dict[str, Any]:
    """Return a variant's median, least and largest time, and its ratios to the plain reference, round by round.

    Args:
        variant: Name of the variant.
        seconds: Time of each round.
        plain: Times of the reference.
        work: Work of the variant relative to the reference; ratios are for equal work.
    """
    found: dict[str, Any] = {"variant": variant}
    ratios = [a / b / work for a, b in zip(seconds, plain, strict=True)]
    for name, values in (("seconds", seconds), ("ratio_to_plain", ratios)):
        found |= {f"{name}_median": statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return found


def result(title: str, rows: Results, **more: Any) -> dict[str, Any]:
    """Combine rows to a result, and print it."""
    print(table({"title": title, "rows": rows, **more}), flush=True)
    return {"title": title, "rows": rows, **more}


def table(found: dict[str, Any]) -> str:
    """Format a result as a Markdown table."""
    lines = [f"### {found['title']}", ""]
    lines += [found["note"], ""] if found.get("note") else []
    lines += ["| variant | median s | min to max | ratio to plain, by rounds |", "|---|---|---|---|"]
    for own in found["rows"]:
        seconds, ratios = ([own[f"{what}_{part}"] for part in PARTS] for what in ("seconds", "ratio_to_plain"))
        lines.append(
            f"| {own['variant']} | {seconds[0]:.3f} | {seconds[1]:.3f} to {seconds[2]:.3f} "
            f"| {ratios[0]:.3g}, {ratios[1]:.3g} to {ratios[2]:.3g} |"
        )
    return "\n".join(lines) + "\n"


def write(name: str, results: Results, device: str, rounds: int) -> None:
    """Write all results to ``results/<name>-<device>.json`` and ``.md``."""
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if device == "cuda" else machine
    load = [round(minutes, 1) for minutes in os.getloadavg()]  # over 1, 5 and 15 minutes, including this script
    about = {
        "machine": machine,
        "load": load,
        "rounds": rounds,
        "python": platform.python_version(),
        "versions": versions(),
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}-{device}"
    file.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    text = "\n".join(table(found) for found in results)
    file.with_suffix(".md").write_text(
        f"{machine}; torch {torch.__version__}; {rounds} rounds; load {load[-1]}.\n\n{text}"
    )


def parser(description: str | None, rounds: int, about_rounds: str = "after a first one that is not counted") -> Parser:
    """Return a parser of the options common to all scripts."""
    found = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    found.add_argument("--rounds", type=int, default=rounds, help=about_rounds)
    return found


def run(name: str, parts: Parts, only: list[str] | None, device: str, rounds: int) -> None:
    """Run the selected parts; write the results if these are all parts."""
    start = time.perf_counter()
    results = [found for part in only or parts for found in parts[part]()]
    if not only:
        write(name, results, device, rounds)
    print(f"{math.ceil(time.perf_counter() - start)} s")
