"""Timing variants in turn, and writing down what came out; for the scripts beside this one."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_sym.zoo import versions

RESULTS = Path(__file__).parent / "results"
Runs = dict[str, Callable[[], Any]]


def timed(runs: Runs, rounds: int) -> list[dict[str, Any]]:
    """Time variants in turn, after a round that is not counted; return one row per variant."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    plain = seconds["plain"]
    rows = []
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, plain, strict=True)]
        rows.append(
            {
                "variant": name,
                "seconds_median": statistics.median(own),
                "seconds_min": min(own),
                "seconds_max": max(own),
                "ratio_to_plain_median": statistics.median(ratios),
                "ratio_to_plain_min": min(ratios),
                "ratio_to_plain_max": max(ratios),
            }
        )
    return rows


def result(title: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Put rows together, and print them."""
    print(table({"title": title, "rows": rows, **more}), flush=True)
    return {"title": title, "rows": rows, **more}


def table(found: dict[str, Any]) -> str:
    """Return one result as a Markdown table."""
    lines = [f"### {found['title']}", ""]
    lines += [found["note"], ""] if found.get("note") else []
    lines += ["| variant | median s | min to max | ratio to plain, by rounds |", "|---|---|---|---|"]
    for row in found["rows"]:
        ratios = [row[f"ratio_to_plain_{name}"] for name in ("median", "min", "max")]
        lines.append(
            f"| {row['variant']} | {row['seconds_median']:.3f} | {row['seconds_min']:.3f} to {row['seconds_max']:.3f} "
            f"| {ratios[0]:.2f}, {ratios[1]:.2f} to {ratios[2]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def write(name: str, results: list[dict[str, Any]], device: str, rounds: int) -> None:
    """Write all results to ``results/<name>-<device>.json`` and ``.md``."""
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if device == "cuda" else machine
    about = {"machine": machine, "rounds": rounds, "python": platform.python_version(), "versions": versions()}
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}-{device}"
    file.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    text = "\n".join(table(found) for found in results)
    file.with_suffix(".md").write_text(f"{machine}; torch {torch.__version__}; {rounds} rounds.\n\n{text}")
