"""Define published results in miniature, and run them: resumable, from recipes to one JSON file."""

import csv
import fcntl
import json
import math
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist, stdev
from typing import Any, Literal, NamedTuple

from lightning_sym.reports import bootstrap_over_models, student_interval
from published.power import MOST_RUNS, fewest_runs

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "papers"
Pair = tuple[int, int]
Word = Literal["agrees", "partly", "disagrees", "not decided"]
ACCURACY = "test accuracy, "  # of the networks that the rest of the label names
ANY, SIZE, PERCENT = (-math.inf, math.inf), (0.0, math.inf), (0.0, 100.0)  # bounds of quantities
_SEEDS = re.compile(r"\d+ seeds")
_NORMAL = NormalDist().inv_cdf(0.975)
CORE_HOURS = 16.0  # a claim that takes more is out of reach: 8 hours of two cores


@dataclass(frozen=True)
class Source:
    """A published text.

    Attributes:
        authors: As it is cited, ``"Godfrey et al."``.
        year: Year of publication.
        title: Its title.
        where: ``"arXiv 2205.14258"``, or an address.
    """

    authors: str
    year: int
    title: str
    where: str


SOURCES = {
    "genni": Source(
        "Lengyel et al.",
        2020,
        "GENNI: Visualising the Geometry of Equivalences for Neural Network Identifiability",
        "arXiv 2011.07407",
    ),
    "intertwiners": Source(
        "Godfrey et al.",
        2022,
        "On the Symmetries of Deep Learning Models and their Internal Representations",
        "arXiv 2205.14258",
    ),
    "notebook": Source(
        "Shalizi", 2023, "Notebooks: Symmetries of Neural Networks", "bactra.org/notebooks/symmetries-of-nnets.html"
    ),
    "rashomon": Source(
        "A post of the SERI MATS research sprint",
        2022,
        "on weights that differ and functions that do not (the Rashomon manifold)",
        "no arXiv number",
    ),
    "equivariance": Source(
        "van der Ouderaa et al.",
        2023,
        "Learning Layer-wise Equivariances Automatically using Gradients",
        "arXiv 2310.06131",
    ),
    "git-re-basin": Source(
        "Ainsworth et al.", 2023, "Git Re-Basin: Merging Models modulo Permutation Symmetries", "arXiv 2209.04836"
    ),
    "repair": Source(
        "Jordan et al.", 2023, "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", "arXiv 2211.08403"
    ),
    "mode-connectivity": Source(
        "Garipov et al.", 2018, "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", "arXiv 1802.10026"
    ),
    "swa": Source(
        "Izmailov et al.", 2018, "Averaging Weights Leads to Wider Optima and Better Generalization", "arXiv 1803.05407"
    ),
    "peers": Source("Other packages", 2026, "Comparisons in one process", "versions below"),
}


@dataclass(frozen=True)
class Run:
    """One call of ``lightning-sym fit``, or of a script of ``examples/``.

    Runs of different results that are equal share one folder: a zoo is trained once for all of them.

    Attributes:
        name: Its folder below that of all runs, and its key in ``measure``.
        recipe: ``"stitching/mnist5k"``, or ``"similarity_tests.py"``.
        options: As on the command line; ``{other-name}`` is the folder of another run of the same result that comes
            before, and ``{folder}`` its own, for scripts.
        seed: ``--seed_everything``; of no use to scripts.
    """

    name: str
    recipe: str
    options: tuple[str, ...] = ()
    seed: int = 0


@cache  # pages ask for one interval many times
def _resampled(pairs: tuple[Pair, ...], values: tuple[float, ...]) -> tuple[float, float] | None:
    """Return the interval of a mean over pairs of resampled networks; None if there is none."""
    found = bootstrap_over_models(pairs, values)
    return None if found.note else (float(found.low), float(found.high))


@dataclass(frozen=True)
class Quantity:
    """A measured number with its population.

    Attributes:
        label: Name of the quantity; claims look it up by this.
        values: One for each member, pair or seed, in the same order in all quantities that are compared.
        unit: Unit of the values: ``"nats"``, ``"points of accuracy"``, ``"1"``.
        over: The population: ``"5 pairs"``, ``"3 seeds"``; ``"one run"`` for a single value.
        pairs: The two models of each value, where pairs share models; then models are resampled for the interval.
        bounds: Least and largest possible value; intervals end there. Those of ``"%"`` are 0 and 100 by default.
        failed: Number of networks behind it that have not learned. No claim is judged by it if there are any.
        rows: Rows of the table that it is from, with a run for each seed. By default: the label after its
            first comma.
    """

    label: str
    values: tuple[float, ...]
    unit: str
    over: str
    pairs: tuple[Pair, ...] = ()
    bounds: tuple[float, float] = ANY
    failed: int = 0
    rows: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if not self.values or not all(math.isfinite(value) for value in self.values):
            raise ValueError(f"The values of {self.label!r} must be finite numbers, got {self.values}.")
        if self.pairs and len(self.pairs) != len(self.values):
            raise ValueError(f"{self.label!r} has {len(self.values)} values of {len(self.pairs)} pairs.")
        if self.unit == "%" and self.bounds == ANY:
            object.__setattr__(self, "bounds", PERCENT)
        if not self.rows:
            object.__setattr__(self, "rows", frozenset([self.label.partition(", ")[2]]))
        if not self.bounds[0] <= min(self.values) <= max(self.values) <= self.bounds[1]:
            raise ValueError(f"The values of {self.label!r} must be in {self.bounds}, got {self.values}.")

    @property
    def mean(self) -> float:
        """The mean over the population."""
        return math.fsum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean: of resampled models for pairs, Student's otherwise; None if there is none.

        It is cut at the bounds of the quantity. This keeps its coverage, as the mean is within them.
        """
        if len(self.values) < 2:
            return None
        if self.pairs:
            found = _resampled(self.pairs, self.values)
            if found is None:
                return None
            low, high = found
        else:
            low, high = student_interval(self.values)
        return max(low, self.bounds[0]), min(high, self.bounds[1])

    @property
    def brief(self) -> str:
        """The mean with its unit, and whether it is a difference."""
        word = "difference " if " less " in self.label else ""
        return f"{word}{short(self.mean)}{'' if self.unit == '1' else ' ' + self.unit}"

    def less(self, other: "Quantity") -> "Quantity":
        """Return the differences of paired values, ``self - other``: of the seeds that both have."""
        seeds = [_SEEDS.fullmatch(quantity.over) for quantity in (self, other)]
        if (len(self.values), self.pairs) != (len(other.values), other.pairs) and not all(seeds):
            raise ValueError(f"{self.label!r} and {other.label!r} are not of the same members, in the same order.")
        differences = tuple(a - b for a, b in zip(self.values, other.values, strict=not all(seeds)))
        (low, high), (least, most) = self.bounds, other.bounds
        bounds = (low - most, high - least)
        label, failed = f"{self.label} less {other.label}", self.failed + other.failed
        over = min(self, other, key=lambda quantity: len(quantity.values)).over
        return Quantity(label, differences, self.unit, over, self.pairs, bounds, failed, self.rows | other.rows)

    def decided_by(self, low: float, high: float) -> tuple["Need", ...]:
        """Return the number of runs that are expected to show whether the mean is in a range."""
        have = len({member for pair in self.pairs for member in pair}) if self.pairs else len(self.values)
        interval, total = self.interval, math.inf
        if interval is not None:
            # Intervals end at the bounds of the quantity, so that an end of the range there is always respected.
            low, high = (-math.inf if low <= self.bounds[0] else low), (math.inf if high >= self.bounds[1] else high)
            if self.pairs:  # the half of the interval that contains an end of the range is the one to get shorter
                ends = [end for end in (low, high) if interval[0] <= end <= interval[1]]
                below = any(end <= self.mean for end in ends) * (self.mean - interval[0])
                above = any(end > self.mean for end in ends) * (interval[1] - self.mean)
                std = max(below, above) / _NORMAL * math.sqrt(have)
                total = fewest_runs(have, self.mean, std, low, high, known=True)
            else:
                total = fewest_runs(have, self.mean, stdev(self.values), low, high)
        return tuple(Need(row, have, total) for row in sorted(self.rows))

    def __str__(self) -> str:
        interval = self.interval
        spread = "" if interval is None else f" [{short(interval[0])}, {short(interval[1])}]"
        unit = "" if self.unit == "1" else f" {self.unit}"
        if interval is not None and min(self.values) == max(self.values):  # a constant has no spread to estimate
            return f"{short(self.mean)}{unit} in all {len(self.values)}"
        return f"{short(self.mean)}{spread}{unit}"


class Need(NamedTuple):
    """Further runs of a row that an open part of a claim needs.

    Attributes:
        row: Row of the table.
        have: Number of its runs: seeds, networks or pairs.
        total: Number of runs that are expected to decide it; ``inf`` if none is, and ``nan`` if networks that learn
            are needed.
    """

    row: str
    have: int
    total: float


class Verdict(NamedTuple):
    """Whether a claim holds here.

    Attributes:
        word: One of four.
        reason: One sentence, made from the figures.
        ours: The means in it, for the summary of all claims; empty if the reason is short enough.
        needs: Further runs for its open parts.
    """

    word: Word
    reason: str
    ours: str = ""
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One line of the page.

    Attributes:
        says: The claim of the source, one sentence; or ours.
        paper: The published values with their place, ``"table 3: 96.1 and 88.2 %"``; or ``"a figure, no number"``.
            Empty if the source does not make the claim: a control of ours, or a question that a result raises.
        holds: Decides from quantities, by label; never from a typed measurement.
    """

    says: str
    paper: str
    holds: Callable[[Mapping[str, Quantity]], Verdict]


@dataclass(frozen=True)
class Result:
    """A published result in miniature.

    Attributes:
        name: Name of its JSON file.
        source: Key of :data:`SOURCES`.
        place: Where in the source: ``"table 3"``.
        title: Heading on the page.
        measure: Returns quantities, given the folder of each run by its name.
        claims: Claims of the source.
        runs: Runs in order.
        full: The same with the source's recipes; empty if ``runs`` have these already, or there are none.
        needs: Missing requirements of the full runs: ``"CIFAR-10 and a GPU"``.
        remark: Why ours differs, if a reader has to know.
        chance: Share of the commonest class in the test data, %. Networks that are no better have not learned: no claim
            is judged by a row that has one.
        sizes: Beginnings of the labels of quantities that cannot be negative; ``""`` for all.
        as_published: Whether ``runs`` have the source's settings already, or nothing depends on settings.
    """

    name: str
    source: str
    place: str
    title: str
    measure: Callable[[Mapping[str, Path]], Sequence[Quantity]]
    claims: tuple[Claim, ...]
    runs: tuple[Run, ...] = ()
    full: tuple[Run, ...] = ()
    needs: str = ""
    remark: str = ""
    chance: float | None = None
    sizes: tuple[str, ...] = ()
    as_published: bool = False


# ---- parts of claims and measures


def short(value: float, digits: int = 3) -> str:
    """Format a number with three digits, for all texts."""
    if 10 ** (digits - 1) <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return "0" if value == 0 else f"{value:#.{digits}g}".rstrip(".")


def _void(quantity: Quantity) -> Verdict:
    """Return no verdict, as networks that predict one class for all inputs are no evidence."""
    count = "one network has" if quantity.failed == 1 else f"{quantity.failed} networks have"
    needs = tuple(Need(row, len(quantity.values), math.nan) for row in sorted(quantity.rows))
    return Verdict("not decided", f"{quantity.label}: void, as {count} not learned", f"{quantity.brief} (void)", needs)


def positive(quantity: Quantity) -> Verdict:
    """Say whether a mean is above zero, by its interval."""
    interval = quantity.interval
    if quantity.failed:
        return _void(quantity)
    if interval is None:
        reason = f"{quantity.label}: {quantity}, of {quantity.over}, which has no interval"
        return Verdict("not decided", reason, needs=quantity.decided_by(0, math.inf))
    word: Word = "agrees" if interval[0] > 0 else "disagrees" if interval[1] < 0 else "not decided"
    needs = quantity.decided_by(0, math.inf) if word == "not decided" else ()
    return Verdict(word, f"{quantity.label}: {quantity} over {quantity.over}", quantity.brief, needs)


def below(lower: Quantity, upper: Quantity) -> Verdict:
    """Say whether one mean is below another, of the same members: by the interval of the differences."""
    verdict = positive(upper.less(lower))
    difference = verdict.reason.removeprefix(f"{upper.label} less {lower.label}: ")
    reason = f"{lower.label} {lower}, {upper.label} {upper}; difference {difference}"
    ours = f"{short(lower.mean)} against {upper.brief.removeprefix('difference ')}"
    return verdict._replace(reason=reason, ours=ours)


def within(quantity: Quantity, low: float, high: float) -> Verdict:
    """Say whether a quantity is in a range that is known beforehand: from theory, or from the source.

    A population agrees if its interval is inside, disagrees if it is outside, and is not decided between.
    """
    if quantity.failed:
        return _void(quantity)
    ends = quantity.interval or (quantity.mean, quantity.mean)
    inside, outside = low <= ends[0] and ends[1] <= high, ends[1] < low or ends[0] > high
    word: Word = "agrees" if inside else "disagrees" if outside else "not decided"
    bounds = f"at least {short(low)}" if high >= quantity.bounds[1] else f"at most {short(high)}"
    if low > quantity.bounds[0] and high < quantity.bounds[1]:
        bounds = f"between {short(low)} and {short(high)}" if low < high else short(low)
    needs = quantity.decided_by(low, high) if word == "not decided" else ()
    reason = f"{quantity.label} {quantity} over {quantity.over}; required: {bounds}"
    return Verdict(word, reason, quantity.brief, needs)


def no_more_than(lower: Quantity, upper: Quantity, margin: float) -> Verdict:
    """Say whether one mean is at most another plus a margin, of the same members: "no better", "as good as"."""
    return within(lower.less(upper), -math.inf, margin)


def together(*verdicts: Verdict) -> Verdict:
    """Return the verdict on a claim of several parts, with their reasons one after another.

    It agrees if all parts do, and does partly if some do. If none does, one part that is decided is enough to disagree.
    A row needs as many runs as the part that takes most of them.
    """
    words = {verdict.word for verdict in verdicts}
    some: Word = "partly" if words & {"agrees", "partly"} else "disagrees" if "disagrees" in words else "not decided"
    word = words.pop() if len(words) == 1 else some
    reasons, ours = (dict.fromkeys(texts) for texts in zip(*((v.reason, v.ours) for v in verdicts), strict=True))
    most: dict[str, Need] = {}
    for need in (need for verdict in verdicts for need in verdict.needs):
        known = most.setdefault(need.row, need)
        if math.isnan(need.total) or need.total - need.have > known.total - known.have:
            most[need.row] = need
    return Verdict(word, "; ".join(reasons), "; ".join(filter(None, ours)), tuple(most.values()))


def effort(verdict: Verdict, result: "Result", minutes: float) -> str:
    """Return the number of runs for the open parts of a claim, the largest of them; empty if there are none.

    Hours are of one core, in proportion to the minutes of the result: with several seeds, a run of each row that is
    compared; with a population of networks, all of the result for each further one.
    """
    void = [need for need in verdict.needs if math.isnan(need.total)]
    open_ = [need for need in verdict.needs if need not in void]
    learn = "needs networks that learn" if void else ""
    if not open_:
        return learn
    more = {need.row: need.total - need.have for need in open_}
    most = max(more.values())
    if math.isinf(most):
        said = f"out of reach: over {MOST_RUNS:,} more runs"
    else:
        seeds = len({run.seed for run in result.runs}) > 1
        cost = sum(more.values()) / len(result.runs) if seeds else most / open_[0].have
        hours = minutes * cost / 60
        word = "out of reach: " if hours > CORE_HOURS else ""
        runs = f"{_rounded(most):,} more run{'s' if most > 1 else ''}"
        said = f"{word}about {runs} ({short(hours, 2) if hours >= 0.1 else 'below 0.1'} hours)"
    return " and ".join(filter(None, (said, learn)))


def _rounded(runs: float) -> int:
    """Return a number of runs with two digits, rounded up."""
    step = 10 ** max(len(str(int(runs))) - 2, 0)
    return math.ceil(runs / step) * step


def rows(run: Path, table: str, **where: object) -> list[dict[str, Any]]:
    """Return the rows of ``results/TABLE.json`` of a run (or of its CSV) with the given column values.

    Raises:
        ValueError: If there is no such row.
    """
    file = run / "results" / f"{table}.json"
    content = json.loads(file.read_text())
    found: Iterable[dict[str, Any]] = content["rows"] if isinstance(content, dict) else content
    chosen = [row for row in found if all(row[name] == value for name, value in where.items())]
    if not chosen:
        raise ValueError(f"{file} has no row with {where}.")
    return chosen


def csv_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def over_pairs(
    label: str, unit: str, found: Sequence[Mapping[str, Any]], column: str, *, factor: float = 1.0
) -> Quantity:
    """Return a column of rows that have ``first`` and ``second``, the models of a pair, sorted by pair."""
    ordered = sorted(found, key=lambda row: (row["first"], row["second"]))
    pairs = tuple((row["first"], row["second"]) for row in ordered)
    values = tuple(factor * row[column] for row in ordered)
    return Quantity(label, values, unit, f"{len(pairs)} pairs of {len({m for p in pairs for m in p})} networks", pairs)


# ---- running


def arguments_of(run: Run, folder: Path) -> list[str]:
    """Return the command-line arguments of a run, with the names of folders filled in.

    Raises:
        ValueError: If an option names a run that is none.
    """

    def filled(option: str) -> str:
        return re.sub(
            r"\{([a-z][a-z0-9-]*)\}", lambda m: str(folder / (run.name if m[1] == "folder" else m[1])), option
        )

    options = [filled(option) for option in run.options]
    if run.recipe.endswith(".py"):
        return [str(ROOT / "examples" / run.recipe), *options]
    fixed = ["--run_dir", str(folder / run.name), "--seed_everything", str(run.seed)]
    return ["fit", "--config", run.recipe, *fixed, "--trainer.enable_progress_bar=false", *options]


def finish(run: Run, folder: Path, say: Callable[[str], None]) -> float:
    """Start or resume a run, unless it is complete; return its minutes on one core.

    ``<name>.json`` next to its folder holds its arguments, and its minutes once it is complete. A run that had
    other arguments is repeated. Two processes never make one run: the second waits, also for a child of a killed one.

    Raises:
        RuntimeError: If the run fails, with its last messages.
    """
    own, record = folder / run.name, folder / f"{run.name}.json"
    arguments = arguments_of(run, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{run.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{run.name}: waits for another process, which is making it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(record.read_text()) if record.is_file() else {}
        if known.get("arguments") == arguments and known["complete"]:
            return float(known["minutes"])
        going_on = known.get("arguments") == arguments and (own / "checkpoints" / "last.ckpt").is_file()
        spent = float(known["minutes"]) if going_on else 0.0
        save(record, {"arguments": arguments, "minutes": spent, "complete": False})
        if run.recipe.endswith(".py"):
            command = [sys.executable, *arguments]
        else:
            resume = ["--ckpt_path", "last"] if going_on else ["--overwrite", "true"]
            command = [str(Path(sys.executable).with_name("lightning-sym")), *arguments, *resume]
        say(f"{run.name}: {'goes on' if going_on else 'begins'}")
        log = folder / f"{run.name}.log"
        minutes, status = _call(command, log, lock.fileno())
        save(record, {"arguments": arguments, "minutes": spent + minutes, "complete": status == 0})
        if status:
            last = log.read_text(errors="replace").strip().splitlines()[-4:]
            raise RuntimeError(f"{run.name} failed ({' '.join(command[1:])}): {' '.join(last)} (all of it: {log})")
        say(f"{run.name}: complete, {minutes:.1f} minutes of one core")
        return spent + minutes


def _call(command: Sequence[str], log: Path, lock: int) -> tuple[float, int]:
    """Run a command with one thread; return the minutes of processor time, and its exit status."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with log.open("wb") as output:
        # The child holds the lock too, so that it is not made twice where its parent was killed.
        child = subprocess.Popen(
            command, env={**os.environ, **threads}, stdout=output, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return (used.ru_utime + used.ru_stime) / 60, child.returncode


_MEASURING = threading.Lock()  # torch's seeds and thread counts belong to the process


def make(result: Result, folder: Path, say: Callable[[str], None], *, full: bool = False) -> dict[str, Any]:
    """Make all runs of a result, measure, and return the content of its JSON file.

    Raises:
        RuntimeError: If a run fails.
    """
    runs = result.full if full else result.runs
    minutes = sum(finish(run, folder, say) for run in runs)
    with _MEASURING:
        start = time.thread_time()
        quantities = result.measure({run.name: folder / run.name for run in runs})
        minutes += (time.thread_time() - start) / 60
    options = " --full" if full else ""
    return judged(
        result,
        {
            "name": result.name,
            "command": f"python examples/papers.py --only {result.name}{options}",
            "minutes": round(minutes, 2),
            "cores": 1,
            "seeds": sorted({run.seed for run in runs}),
            "recipes": list(dict.fromkeys(run.recipe for run in runs)),
            "runs": [run.name for run in runs],
            "versions": versions(),
            "quantities": [
                {"label": q.label, "values": list(q.values), "unit": q.unit, "over": q.over, "pairs": q.pairs}
                for q in quantities
            ],
        },
    )


def lacks(result: Result, found: Mapping[str, Any], *, full: bool = False) -> list[Run]:
    """Return the runs without values in a JSON file: of seeds that were added to its definition."""
    runs = result.full if full else result.runs
    if "runs" in found:
        return [run for run in runs if run.name not in found["runs"]]
    return [run for run in runs if run.seed not in found["seeds"]]  # written before files had the names


def extend(
    result: Result, folder: Path, say: Callable[[str], None], found: Mapping[str, Any], *, full: bool = False
) -> dict[str, Any]:
    """Make the runs that a JSON file lacks, of further seeds, and return its content with their values at the ends.

    Raises:
        RuntimeError: If a run fails.
        ValueError: If values of the file are not of seeds, or a row is not in it.
    """
    runs, new = result.full if full else result.runs, lacks(result, found, full=full)
    there = [run.name for run in runs if run not in new]
    minutes = sum(finish(run, folder, say) for run in new)
    with _MEASURING:
        added = {q.label: q for q in result.measure({run.name: folder / run.name for run in new})}
    quantities = []
    for one in found["quantities"]:
        more = added.pop(one["label"], None)
        if more is not None and one["over"] != "exact":
            if more.pairs or not _SEEDS.fullmatch(one["over"]):
                raise ValueError(f"{one['label']!r} of {result.name} is over {one['over']}; only seeds can be added.")
            values = [*one["values"], *more.values]
            one = {**one, "values": values, "over": f"{len(values)} seeds"}
        quantities.append(one)
    if added:
        raise ValueError(f"{result.name} has no {sorted(added)} yet; make all of it with --again.")
    about = {
        "minutes": round(found["minutes"] + minutes, 2),
        "seeds": sorted({run.seed for run in runs}),
        "runs": [*there, *(run.name for run in new)],
        "quantities": quantities,
        "added": [*found.get("added", []), {"runs": len(new), **versions()}],
    }
    return judged(result, {**found, **about})


def judged(result: Result, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with means, intervals and verdicts as the definitions have them now."""
    quantities = quantities_of(result, found)
    about = {key: value for key, value in found.items() if key not in ("quantities", "claims")}
    verdicts = [(claim, claim.holds({quantity.label: quantity for quantity in quantities})) for claim in result.claims]
    return {
        **about,
        "quantities": [
            {
                "label": q.label,
                "mean": q.mean,
                "interval": None if q.interval is None else list(q.interval),
                "unit": q.unit,
                "over": q.over,
                "values": list(q.values),
                "pairs": [list(pair) for pair in q.pairs],
            }
            for q in quantities
        ],
        "claims": [
            {
                "says": claim.says,
                "paper": claim.paper,
                "verdict": verdict.word,
                "reason": verdict.reason,
                "ours": verdict.ours or verdict.reason,
                "effort": effort(verdict, result, found["minutes"]),
            }
            for claim, verdict in verdicts
        ],
    }


def quantities_of(result: Result, found: Mapping[str, Any]) -> list[Quantity]:
    """Return the quantities of a JSON file, with their bounds and the number of networks that have not learned."""
    chance = -math.inf if result.chance is None else result.chance
    failed: dict[str, int] = {}
    for q in found["quantities"]:
        if q["label"].startswith(ACCURACY) and q["unit"] == "%":
            failed[q["label"].removeprefix(ACCURACY)] = sum(value <= chance for value in q["values"])
    return [
        Quantity(
            q["label"],
            tuple(q["values"]),
            q["unit"],
            q["over"],
            tuple((a, b) for a, b in q["pairs"]),
            SIZE if result.sizes and q["label"].startswith(result.sizes) and q["unit"] != "%" else ANY,
            failed.get(q["label"].partition(", ")[2], 0),
        )
        for q in found["quantities"]
    ]


def file_of(result: Result, *, full: bool = False) -> Path:
    """Return the JSON file of a result."""
    return (MEASURED / "full" if full else MEASURED) / f"{result.name}.json"


def versions() -> dict[str, str]:
    """Return the versions of the packages used, and the commit."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    packages = {name: version(name) for name in ("torch", "pytorch-lightning", "lightning-sym")}
    return {"python": platform.python_version(), **packages, "commit": commit.stdout.strip() or "unknown"}


_NUMBERS = re.compile(r"(?<=\[)[\s\d.,e+\[\]-]+(?=\])")  # lists of numbers, which take one line


def save(file: Path, content: Mapping[str, Any] | str) -> None:
    """Write a JSON file, or text, so that it appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    text = (
        content
        if isinstance(content, str)
        else _NUMBERS.sub(
            lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        )
    )
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
