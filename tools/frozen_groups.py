"""Record the groups that the tracer finds in many networks, and compare two such records.

The networks and tests are those of the checkout with this file; the tracer is that of the Python that runs it::

    .venv/bin/python tools/frozen_groups.py write new.jsonl                  # the corpus, some minutes on one core
    /work/old/.venv/bin/python tools/frozen_groups.py write old.jsonl        # the tracer of another checkout
    .venv/bin/python tools/frozen_groups.py tests new-tests.jsonl            # every trace of the fast tests
    .venv/bin/python tools/frozen_groups.py compare old.jsonl new.jsonl      # exits with 1 if anything is smaller
"""

import argparse
import fnmatch
import functools
import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "identities")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

Record = dict[str, Any]
# A network and its example for tracing: positional arguments as a tuple, or keyword arguments as a dictionary.
Made = tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]
# Timeout for a network, in seconds.
LIMIT = 300
# Smallest ratio of process times, and smallest difference in seconds, of a slower trace.
SLOWER, NOTABLE = 1.5, 0.3
# Numbers that are smaller than before the unified search for translations because the old ones were wrong: patterns of
# the network's and the number's name, and the reason. `reason` has the rules that apply to all networks.
WRONG = (
    (
        "transformers/deberta",
        r"dimension|shifts",
        "832 directions were rows of its table of distances that the example does not read; longer inputs do",
    ),
    ("more transformers/funnel", r"scales|signs", "4 scales changed nothing: of 636 tangents 632 were independent"),
    (
        "timm/vit, learned rotary",
        r"dimension|scales|signs",
        "a scale changed nothing: 1220 tangents were independent",
    ),
)
# Folders of the tests with recorded traces, and names that occur in files that trace networks.
TESTS = ("identities", "unit/symmetry", "properties")
TRACING = re.compile(r"trace_symmetry|orbit_cases|symmetry_family_cases")


# ---- numbers of a group


def numbers(symmetry: Any) -> Record:
    """Describe a group by numbers and words."""
    structure = symmetry.structure
    rotations = sorted((rotation.dimension for rotation in structure.rotations), reverse=True)
    mixed = [len(cell) for cell in structure.dense] + [rotation.size for rotation in structure.rotations]
    return {
        "dimension": symmetry.dimension,
        "buffer_dimension": symmetry.buffer_dimension,
        "shifts": symmetry.shifts,
        "shift_kinds": symmetry.shift_kinds,
        "scales": symmetry.scales,
        "signs": symmetry.signs,
        "rotations": rotations,
        "matrices": sum(len(cell) ** 2 for cell in structure.dense),
        "tilts": sum(tilt.size for tilt in structure.tilts),
        "phases": structure.phases,
        "log10_permutations": round(symmetry.log10_permutations, 6),
        "log10_permutations_of_mixed_units": round(sum(math.lgamma(size + 1) for size in mixed) / math.log(10), 6),
        "groups": len(symmetry.groups),
        "notes": list(symmetry.notes),
    }


def permutations(record: Record) -> float:
    """Return the logarithm of the number of permutations, including those among matrices and rotations."""
    return float(record["log10_permutations"]) + float(record.get("log10_permutations_of_mixed_units", 0))


def comparable(record: Record) -> dict[str, float]:
    """Return the numbers that must not decrease, by name."""
    plain = ("dimension", "shifts", "scales", "signs", "matrices", "tilts", "phases", "log10_permutations")
    kinds = {f"shifts, {kind}": count for kind, count in record["shift_kinds"].items()}
    return {name: record[name] for name in plain} | {"rotations": sum(record["rotations"])} | kinds


def sentence(error: BaseException) -> str:
    """Return an exception's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


# ---- the corpus


def _of_case(module: str, table: str, name: str) -> Made:
    """Make a network from one of the tests' tables of networks."""
    case = getattr(importlib.import_module(module), table)[name]
    if module in ("model_zoo_cases", "further_model_cases"):
        return case.make(), case.inputs(False)
    if module == "symmetry_family_cases":
        return case.make().double(), case.example(2)
    make, shape = case
    return make().eval(), (torch.randn(2, *shape),)


def _spelled(function: Any, spelling: str) -> Made:
    """Make a network in one spelling of a function."""
    return function.network(spelling), function.inputs(2)


def _of_torchvision(name: str, size: int, **settings: Any) -> Made:
    """Make a network of torchvision with random weights, and two images."""
    import torchvision

    return torchvision.models.get_model(name, weights=None, **settings).eval(), (torch.randn(2, 3, size, size),)


def _narrow(family: str) -> Made:
    """Make a narrow network of a class of torchvision, and two images."""
    from torchvision import models
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    make: dict[str, Callable[[], nn.Module]] = {
        "swin": lambda: models.SwinTransformer([2, 2], 16, [1, 1], [2, 4], [4, 4], num_classes=5),
        "convnext": lambda: ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=5),
        "densenet": lambda: models.DenseNet(4, (2, 2), 8, num_classes=5),
        "vit": lambda: models.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=5),
    }
    return make[family]().eval(), (torch.randn(2, 3, 32, 32),)


def _layer(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Made:
    """Make a layer of torch, and random inputs of some shapes."""
    return make().eval(), tuple(torch.randn(shape) for shape in shapes)


def _tables() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield the networks of the tests' tables with their names."""
    tables = {
        "torch": ("model_zoo_cases", "TORCH"),
        "transformers": ("model_zoo_cases", "TRANSFORMERS"),
        "more transformers": ("further_model_cases", "FURTHER_TRANSFORMERS"),
        "timm": ("model_zoo_cases", "TIMM"),
        "ours": ("architectures", "OURS"),
        "architectures": ("architectures", "TORCHVISION"),
        "family": ("symmetry_family_cases", "CASES"),
    }
    for library, (module, table) in tables.items():
        for name in getattr(importlib.import_module(module), table):
            yield f"{library}/{name}", functools.partial(_of_case, module, table, name)
    for module, table in (("spelling_cases", "FUNCTIONS"), ("further_spelling_cases", "FURTHER")):
        for name, function in getattr(importlib.import_module(module), table).items():
            for spelling in function.spellings:
                yield f"spelling/{name}: {spelling}", functools.partial(_spelled, function, spelling)


def corpus() -> dict[str, Callable[[], Made]]:
    """Return the constructor of each network of the corpus, by name."""
    sizes: dict[str, tuple[int, dict[str, Any]]] = {
        "resnet18": (64, {}),
        "alexnet": (64, {}),
        "vgg11_bn": (32, {}),
        "squeezenet1_1": (64, {}),
        "mobilenet_v2": (64, {"width_mult": 0.35}),
        "mobilenet_v3_small": (64, {"width_mult": 0.5}),
        "googlenet": (64, {"aux_logits": False, "init_weights": False}),
        "efficientnet_b0": (64, {}),
        "shufflenet_v2_x0_5": (64, {}),
        "mnasnet0_5": (64, {}),
        "regnet_y_400mf": (64, {}),
    }
    settings: dict[str, Any] = {"batch_first": True}
    layer = settings | {"d_model": 16, "nhead": 4, "dim_feedforward": 12}
    memory = ((2, 5, 16), (2, 4, 16))
    cells = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
    made: dict[str, Callable[[], Made]] = {
        **{
            f"torchvision/{name}": functools.partial(_of_torchvision, name, size, num_classes=5, **more)
            for name, (size, more) in sizes.items()
        },
        **{
            f"torchvision/{family}": functools.partial(_narrow, family)
            for family in ("swin", "convnext", "densenet", "vit")
        },
        **{
            f"layers/{name}{'_both_ways' * both}": functools.partial(
                _layer, functools.partial(cell, 5, 6, num_layers=2, bidirectional=both, **settings), (2, 4, 5)
            )
            for name, cell in cells.items()
            for both in (False, True)
        },
        "layers/lstm_with_projection": lambda: _layer(lambda: nn.LSTM(5, 6, proj_size=3, **settings), (2, 4, 5)),
        "layers/self_attention": lambda: _layer(lambda: nn.MultiheadAttention(16, 4, **settings), *[(2, 5, 16)] * 3),
        "layers/encoder_layer": lambda: _layer(lambda: nn.TransformerEncoderLayer(**layer), (2, 5, 16)),
        "layers/decoder_layer": lambda: _layer(lambda: nn.TransformerDecoderLayer(**layer), *memory),
        "layers/decoder": lambda: _layer(
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(norm_first=True, **layer), 2), *memory
        ),
        "layers/bilinear": lambda: _layer(lambda: nn.Bilinear(5, 4, 6), (3, 5), (3, 4)),
    }
    return made | dict(_tables())


# ---- writing


def measured(name: str, check: bool) -> Record:
    """Trace one network of the corpus.

    Args:
        name: The network's name.
        check: Whether to run the self-test.

    Returns:
        The name, seconds of the process, and the group's numbers or the exception's message.
    """
    from lightning_sym.symmetry import trace_symmetry

    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            network, inputs = corpus()[name]()
            start = time.process_time()
            given, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
            found = numbers(trace_symmetry(network, *given, check=check, **keywords))
    except Exception as error:
        found = {"error": sentence(error)}
    return {"name": name, "seconds": round(time.process_time() - start, 3), **found}


def _interrupt(*_: Any) -> None:
    raise TimeoutError(f"more than {LIMIT} s")


def _within_the_limit(name: str, check: bool) -> Record:
    """Trace one network in a separate process."""
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(LIMIT)
    try:
        return measured(name, check)
    finally:
        signal.alarm(0)


def about() -> Record:
    """Describe the tracer and torch: the tracer's folder, and the last commit that changed it."""
    import lightning_sym

    folder = Path(lightning_sym.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True).stdout.strip()

    changed = " and changes" * bool(git("status", "--porcelain", "."))
    commit = git("log", "-1", "--format=%h", ".") + changed
    return {"about": {"tracer": str(folder), "commit": commit, "torch": torch.__version__}}


def write(file: Path, only: str, jobs: int, check: bool) -> None:
    """Trace the corpus, or the networks that match a pattern, and write one line of JSON per network."""
    names = [name for name in corpus() if fnmatch.fnmatch(name, only)]
    if not names:
        raise SystemExit(f"no network matches {only!r}; the names are: {', '.join(corpus())}")
    start = time.perf_counter()
    trace = functools.partial(_within_the_limit, check=check)
    # Autograd may wait forever in a forked process.
    workers = multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,))
    with file.open("w", encoding="utf-8") as out, workers as pool:
        out.write(json.dumps(about()) + "\n")
        for record in pool.imap(trace, names):
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"{record['seconds']:7.2f} s  {record['name']}: {record.get('error', record.get('dimension'))}")
    print(f"{len(names)} networks in {time.perf_counter() - start:.0f} s, in {file}")


class Recorder:
    """Records every trace of the tests: a plugin of pytest.

    A trace is named by its test and its index there.

    Args:
        file: File for lines of JSON.
    """

    def __init__(self, file: Path) -> None:
        self.out = file.open("w", encoding="utf-8")
        self.out.write(json.dumps(about()) + "\n")
        self.test = ""
        self.counts: Counter[str] = Counter()
        import lightning_sym.symmetry
        import lightning_sym.symmetry.trace

        original = lightning_sym.symmetry.trace.trace_symmetry

        @functools.wraps(original)
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            start = time.process_time()
            record: Record = {"name": f"{self.test}#{self.counts[self.test]}"}
            self.counts[self.test] += 1
            try:
                symmetry = original(*arguments, **keywords)
            except Exception as error:
                self.add(record | {"seconds": round(time.process_time() - start, 3), "error": sentence(error)})
                raise
            record["seconds"] = round(time.process_time() - start, 3)
            self.add(record | numbers(symmetry))
            return symmetry

        # Before a test imports the function by name.
        for module in (lightning_sym.symmetry, lightning_sym.symmetry.trace):
            module.trace_symmetry = recorded  # type: ignore[attr-defined]

    def add(self, record: Record) -> None:
        """Write a line."""
        self.out.write(json.dumps(record) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the test that begins."""
        self.test = nodeid

    def pytest_collectstart(self, collector: Any) -> None:
        """Record the file that is collected."""
        self.test = collector.nodeid


def write_tests(file: Path, more: list[str]) -> int:
    """Run the fast tests of symmetry, or the given ones, and write a line for each of their traces."""
    import pytest

    recorder = Recorder(file.resolve())
    os.chdir(ROOT)
    every = [test for folder in TESTS for test in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    tracing = [str(test) for test in every if TRACING.search(test.read_text(encoding="utf-8"))]
    options = ["-c", "pyproject.toml", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "--tb=no", "-W", "ignore"]
    status = pytest.main([*options, *(more or tracing)], plugins=[recorder])
    recorder.out.close()
    print(f"{sum(recorder.counts.values())} traces of {len(recorder.counts)} tests, in {file}")
    return int(status)


# ---- comparing


def read(file: Path) -> dict[str, Record]:
    """Return the records of a file by name."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines if "name" in line}


def differences(old: Record, new: Record) -> tuple[list[str], list[str]]:
    """Describe the numbers that decreased and those that increased between two records of a network."""
    if "error" in old:
        return [], [] if "error" in new else [f"traced now, dimension {new['dimension']}; was {old['error']}"]
    if "error" in new:
        return [f"fails now: {new['error']}"], []
    before, after = comparable(old), comparable(new)
    smaller: list[str] = []
    larger: list[str] = []
    for name in before | after:
        one, two = before.get(name, 0), after.get(name, 0)
        if not math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-5):
            (smaller if two < one else larger).append(f"{name} {one:g} -> {two:g}")
    return smaller, larger


def reason(name: str, number: str, old: Record, new: Record) -> str:
    """Return the reason that allows a smaller number; empty if there is none.

    `frozen_tangents.py` checks that all old tangents are in the span of new ones.
    """
    for pattern, numbers, why in WRONG:
        if fnmatch.fnmatch(name, pattern) and re.match(numbers, number):
            return why
    if number.startswith("shifts, ") and new["shifts"] >= old["shifts"]:
        return "called something else: there are no fewer shifts"
    if number == "tilts" and new["tilts"] + new["shifts"] >= old["tilts"] + old["shifts"]:
        return "shifts hold them"
    if number == "log10_permutations" and permutations(new) >= permutations(old) - 1e-5:
        return "matrices and rotations hold them"
    if number in ("scales", "signs") and new["matrices"] > old["matrices"] and new["dimension"] >= old["dimension"]:
        return "matrices hold them"
    return ""


def compare(old_file: Path, new_file: Path, ignore: str) -> int:
    """Print the differences of two records.

    Args:
        old_file: Earlier record.
        new_file: Later record.
        ignore: Regular expression for the names of numbers that may be smaller.

    Returns:
        1 if a number decreased, a trace fails that succeeded, or a network is missing; else 0.
    """
    old, new = read(old_file), read(new_file)
    lines: dict[str, list[str]] = {
        "smaller": [],
        "allowed to be smaller": [],
        "larger": [],
        "slower": [],
        "missing": [],
    }
    lines["missing"] = [name for name in old if name not in new]
    for name in (name for name in old if name in new):
        before, after = old[name], new[name]
        smaller, larger = differences(before, after)
        why = {text: reason(name, text.rpartition(" -> ")[0].rpartition(" ")[0], before, after) for text in smaller}
        allowed = [f"{text} ({why[text]})" if why[text] else text for text in smaller
                   if why[text] or (ignore and re.match(ignore, text))]  # fmt: skip
        refused = [text for text in smaller if not (why[text] or (ignore and re.match(ignore, text)))]
        for key, found in (("smaller", refused), ("allowed to be smaller", allowed), ("larger", larger)):
            lines[key] += [f"{name}: {'; '.join(found)}"] * bool(found)
        if after["seconds"] > SLOWER * before["seconds"] and after["seconds"] - before["seconds"] > NOTABLE:
            lines["slower"].append(f"{name}: {before['seconds']:.2f} s -> {after['seconds']:.2f} s")
    for key, found in lines.items():
        print(f"{key}: {len(found)}", *(f"    {line}" for line in found), sep="\n")
    both = [name for name in old if name in new]
    totals = [sum(records[name]["seconds"] for name in both) for records in (old, new)]
    silent = sum("error" not in new[name] and not new[name]["notes"] for name in both)
    print(f"{len(both)} networks, {totals[0]:.0f} s -> {totals[1]:.0f} s; {silent} without notes")
    return int(bool(lines["smaller"] or lines["missing"]))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="trace the corpus")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", default="*", help="pattern of names, such as 'timm/*'")
    writing.add_argument("--jobs", type=int, default=1, help="processes")
    writing.add_argument("--check", action="store_true", help="also run the self-test")
    testing = commands.add_parser("tests", help="record the traces of tests")
    testing.add_argument("file", type=Path)
    testing.add_argument("pytest", nargs="*", help="arguments of pytest; by default the fast tests of symmetry")
    comparing = commands.add_parser("compare", help="compare two files; exits with 1 if anything is smaller")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--ignore", default="", help="regular expression: numbers that may be smaller")
    given = parser.parse_args()
    if given.command == "write":
        write(given.file, given.only, given.jobs, given.check)
        return 0
    return (
        write_tests(given.file, given.pytest)
        if given.command == "tests"
        else compare(given.old, given.new, given.ignore)
    )


if __name__ == "__main__":
    sys.exit(main())
