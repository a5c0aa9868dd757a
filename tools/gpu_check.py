"""Check tasks, callbacks and functions on one GPU, and measure them, in a few minutes.

    python tools/gpu_check.py                       # all parts, at most 420 seconds
    python tools/gpu_check.py --only numbers half   # some parts
    python tools/gpu_check.py --device cpu --budget 60
    python tools/gpu_check.py --page                # only write the last run into docs/performance.md

Parts, in this order; the first three at the same time, the others alone on the machine:

    numbers       every task, callback and function of tests/pretend_device on the GPU and on the CPU; resumed fits
    distributed   fits in a process group of one process: NCCL
    half          fits in mixed precision, bf16-mixed
    zoo           an epoch of zoos relative to a bare loop
    curvature     F-FC relative to two einsums, passes of KFAC to training
    stitching     a step of stitched networks relative to a handwritten one
    matching      weight matching relative to NumPy
    tracing       the tracer relative to torch.export
    compiled      steps of a zoo with and without torch.compile

The results files, ``--out`` with ``.json`` and ``.md``, are written after each
check, so that nothing is lost if the process is killed. A failed check has the end of its traceback there. Without
enough time left, a part is listed as not run. The exit status is 1 if a check failed or a part was not run.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "gpu-check"
PAGE = ROOT / "docs" / "performance.md"
TOGETHER = ("numbers", "distributed", "half")
# Seconds a part is given at most, and seconds that have to be left for it to be begun.
ALONE = {
    "zoo": (80, 25),
    "curvature": (60, 20),
    "stitching": (45, 15),
    "matching": (50, 20),
    "tracing": (45, 15),
    "compiled": (80, 25),
}
LONGEST_TOGETHER = 240
BROKEN = 3  # exit status after an error that makes the device unusable
TRIES = 12  # new processes after broken ones
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"


@dataclass
class Process:
    """A process that runs a part, or shares one with others."""

    part: str
    folder: Path
    number: int
    device: str
    only: str = ""
    seen: int = 0  # lines that were read
    current: str = ""  # the check that has begun
    handle: Any = field(init=False)

    def __post_init__(self) -> None:
        """Start it."""
        claims = self.folder / f"{self.part}-claims"
        claims.mkdir(exist_ok=True)
        script = Path(__file__).with_name("gpu_check_parts.py")
        command = [sys.executable, *map(str, (script, self.part, self.device, self.lines, claims, self.only))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if self.part in ALONE:
            environment.pop("OMP_NUM_THREADS")
        if self.device == "pretend":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.said = self.folder / f"{self.part}-{self.number}.txt"
        with self.said.open("wb") as said:
            self.handle = subprocess.Popen(command, stdout=said, stderr=said, env=environment, cwd=ROOT)

    @property
    def lines(self) -> Path:
        """The file with its reports."""
        return self.folder / f"{self.part}-{self.number}.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that are new."""
        text = self.lines.read_text(encoding="utf-8") if self.lines.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        new, self.seen = [json.loads(line) for line in whole[self.seen :]], len(whole)
        for line in new:
            self.current = line.get("begun", "" if "check" in line else self.current)
        return new

    def tail(self) -> str:
        """Return the end of its output."""
        return self.said.read_text(encoding="utf-8", errors="replace")[-1500:]


class Check:
    """Runs parts and keeps the results file up to date.

    Args:
        out: The results files, without ending.
        device: ``"cuda"``, ``"cpu"``, or ``"pretend"``: the device of ``tests/pretend_device``.
        budget: Seconds for all.
        jobs: Processes at the same time.
        only: Expression that the names of checks have to match, default all; measurements are not selected by it.
    """

    def __init__(self, out: Path, device: str, budget: float, jobs: int, only: str = "") -> None:
        self.out, self.device, self.budget, self.jobs, self.only = out, device, budget, jobs, only
        self.start = time.monotonic()
        self.found: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "on": device,
            "about": {},
            "budget": budget,
            "seconds": 0.0,
            "parts": {},
        }

    def left(self) -> float:
        """Return the seconds left."""
        return self.budget - (time.monotonic() - self.start)

    def limit(self, longest: float) -> float:
        """Return the seconds of a part: at most ``longest`` on a GPU, all that are left elsewhere."""
        return min(longest if self.device == "cuda" else math.inf, self.left() - 3)

    def run(self, parts: Sequence[str]) -> bool:
        """Run parts; return whether all passed."""
        for part in parts:
            self.found["parts"][part] = {"status": "not run", "seconds": 0.0, "count": 0, "checks": [], "tables": []}
        self.save()
        with tempfile.TemporaryDirectory() as folder:
            together = [part for part in TOGETHER if part in parts]
            if together:
                self.together(Path(folder), together)
            for part in [part for part in ALONE if part in parts]:
                longest, least = ALONE[part]
                if self.left() >= least:
                    self.follow(Path(folder), [part], 1, self.limit(longest))
                else:
                    print(f"{part}: not run, {self.left():.0f} s are left", flush=True)
        self.save()
        return all(part["status"] == "passed" for part in self.found["parts"].values())

    def together(self, folder: Path, parts: list[str]) -> None:
        """Run several parts at the same time, the numbers in several processes."""
        jobs = [part for part in parts if part != "numbers"]
        jobs += ["numbers"] * max(1, self.jobs - len(jobs)) * ("numbers" in parts)
        self.follow(folder, jobs, self.jobs, self.limit(LONGEST_TOGETHER))

    def follow(self, folder: Path, waiting: list[str], jobs: int, limit: float) -> None:
        """Run processes, at most ``jobs`` at the same time, and read their reports; kill them after the limit."""
        start, queue, tries = time.monotonic(), deque(waiting), TRIES
        running: list[Process] = []
        number = 0
        parts = set(waiting)
        while queue or running:
            while queue and len(running) < jobs:
                running.append(Process(queue.popleft(), folder, number, self.device, self.only))
                number += 1
            time.sleep(0.2)
            over = time.monotonic() - start > limit
            for process in list(running):
                status = process.handle.poll()
                if status is None and over:
                    process.handle.kill()
                    status = process.handle.wait()
                self.take(process)
                if status is None:
                    continue
                running.remove(process)
                if status in (0, BROKEN) and not over:
                    if status == BROKEN and tries > 0:  # the checks that no process has taken
                        tries -= 1
                        queue.append(process.part)
                elif over:
                    self.fail(process, f"not finished after {limit:.0f} s\n{process.tail()}")
                else:
                    self.fail(process, f"the process ended with {status}\n{process.tail()}")
                    if process.current and tries > 0:
                        tries -= 1
                        queue.append(process.part)
                if process.part not in (each.part for each in running) and process.part not in queue:
                    self.end(process.part, start)
            if over:
                queue.clear()
        for part in parts:
            if self.found["parts"][part]["status"] == "not run":
                self.end(part, start)

    def take(self, process: Process) -> None:
        """Add the new reports of a process."""
        part = self.found["parts"][process.part]
        new = process.read()
        for line in new:
            if "about" in line:
                self.found["about"] = line["about"]
            elif "count" in line:
                part["count"] = line["count"]
            elif "table" in line:
                part["tables"].append(line["table"])
            elif "check" in line:
                part["checks"].append(line)
                if line["status"] == "failed":
                    print(f"  {process.part}: {line['check']} FAILED: {line['error'].strip()[-300:]}", flush=True)
        if new:
            self.save()

    def fail(self, process: Process, error: str) -> None:
        """Note that a process was ended or has died, in the check that it was at."""
        name = process.current or "process"
        line = {"check": name, "status": "failed", "seconds": 0.0, "remark": "", "error": error}
        self.found["parts"][process.part]["checks"].append(line)
        print(f"  {process.part}: {name} FAILED: {error[-300:]}", flush=True)

    def end(self, name: str, start: float) -> None:
        """Decide whether a part has passed, and print its line."""
        part = self.found["parts"][name]
        part["seconds"] = round(time.monotonic() - start, 1)
        passed = [check for check in part["checks"] if check["status"] == "passed"]
        part["count"] = max(part["count"], len(part["checks"]))
        part["status"] = "passed" if passed and len(passed) == part["count"] else "failed"
        said = f"{len(passed)} of {part['count']} checks passed"
        print(f"{name}: {part['status']}, {said}, {part['seconds']:.0f} s ({self.left():.0f} s left)", flush=True)
        self.save()

    def save(self) -> None:
        """Write both files."""
        self.found["seconds"] = round(time.monotonic() - self.start, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".json", json.dumps(self.found, indent=1) + "\n"), (".md", report(self.found))):
            partial = self.out.with_suffix(f"{suffix}.partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.out.with_suffix(suffix))


# ---- pages


def machine(found: dict[str, Any]) -> str:
    """Return device and versions in a few words."""
    about = found["about"]
    if not about:
        return "no process has started"
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    return f"{about['device']}, torch {about['versions']['torch']}{cuda}, Python {about['python']}"


def outcomes(found: dict[str, Any]) -> str:
    """Return a table of the parts."""
    lines = ["|part|outcome|checks passed|seconds|", "|-|-|-|-|"]
    for name, part in found["parts"].items():
        passed = sum(check["status"] == "passed" for check in part["checks"])
        lines.append(f"|{name}|{part['status']}|{passed} of {part['count']}|{part['seconds']:.0f}|")
    return "\n".join(lines) + "\n"


def times(found: dict[str, Any]) -> str:
    """Return a table of all measurements; empty if there are none."""
    lines = ["|measured|variant|ms, median (spread)|ratio to plain (spread)|peak MiB|", "|-|-|-|-|-|"]
    for part in found["parts"].values():
        for table in part["tables"]:
            for row in table["rows"]:
                low, middle, high = (1e3 * row[f"seconds_{name}"] for name in ("min", "median", "max"))
                ratios = [row[f"ratio_to_plain_{name}"] for name in ("median", "min", "max")]
                ratio = "1" if row["variant"] == "plain" else "{:.2f} ({:.2f} to {:.2f})".format(*ratios)
                peak = row.get("peak_mib")
                lines.append(
                    f"|{table['title']}|{row['variant']}|{middle:.3g} ({low:.3g} to {high:.3g})|{ratio}"
                    f"|{'' if peak is None else f'{peak:.3g}'}|"
                )
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def report(found: dict[str, Any]) -> str:
    """Return the results file in Markdown."""
    text = f"# GPU check\n\n{machine(found)}; {found['date']}; {found['seconds']:.0f} s.\n\n{outcomes(found)}"
    failures = [(name, check) for name, part in found["parts"].items() for check in part["checks"] if check["error"]]
    if failures:
        text += "\n## Failures\n"
    for name, check in failures:
        text += f"\n### {name}: {check['check']}\n\n```text\n{check['error'].strip()}\n```\n"
    if measured := times(found):
        text += f"\n## Times\n\n{measured}"
    notes = [table["note"] for part in found["parts"].values() for table in part["tables"] if table.get("note")]
    if notes:
        text += "\n" + "\n\n".join(dict.fromkeys(notes)) + "\n"
    remarks = [check for part in found["parts"].values() for check in part["checks"] if check["remark"]]
    if remarks:
        text += "\n## Remarks\n\n|check|seconds|remark|\n|-|-|-|\n"
        text += "".join(f"|{one['check']}|{one['seconds']:.1f}|{one['remark'].replace('|', '/')}|\n" for one in remarks)
    return text


def section(file: Path = OUT) -> str:
    """Return the sentence of docs/performance.md about the results file if it exists."""
    results = file.with_suffix(".json")
    if not results.exists():
        return "It has not been run on a GPU yet.\n"
    found = json.loads(results.read_text(encoding="utf-8"))
    parts = found["parts"].values()
    if not math.fsum(part["seconds"] for part in parts):
        raise ValueError(f"{results} has no part that was run; run tools/gpu_check.py again.")
    passed = sum(check["status"] == "passed" for part in parts for check in part["checks"])
    return (
        f"Last run on {machine(found)}: {passed} of {sum(part['count'] for part in parts)} checks passed.\n"
        f"The [results](../benchmarks/results/{file.name}.md) have all times and memory.\n"
    )


def write_page(page: Path = PAGE, file: Path = OUT) -> None:
    """Write the section between its two marks in the page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{section(file)}{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check from the command line."""
    parts = [*TOGETHER, *ALONE]
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts")
    options.add_argument("--check", default="", help="expression for the names of checks in the first three parts")
    options.add_argument("--device", choices=["cuda", "cpu", "pretend"], default="cuda")
    options.add_argument("--budget", type=float, default=420, help="seconds")
    options.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)), help="processes")
    options.add_argument("--out", type=Path, default=OUT, help="results files, without ending")
    options.add_argument("--page", action="store_true", help="write docs/performance.md from the results file")
    given = options.parse_args(arguments)
    if given.page:
        write_page(file=given.out)
        return 0
    check = Check(given.out, given.device, given.budget, given.jobs, given.check)
    passed = check.run(given.only)
    print(f"{given.out}.md: {'all passed' if passed else 'NOT all passed'}, {check.found['seconds']:.0f} s", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
