"""For all tests: one thread, and no pictures on a screen; runs of several processes; a zoo."""

import copy
import gc
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Not in `pyproject.toml`: a filter imports its class, in the process that only hands out tests as well.
IGNORED = (
    # Lightning's advice about its own settings, meant for people at a terminal.
    "pytorch_lightning.utilities.warnings.PossibleUserWarning",
    # Lightning 2.6 calls jsonargparse by names that jsonargparse 5 will drop; we allow 4 only.
    "jsonargparse._deprecated.JsonargparseDeprecationWarning",
)

LONG = frozenset(Path(__file__).with_name("long_tests.txt").read_text().splitlines())


def pytest_configure(config: pytest.Config) -> None:
    """Filter warnings in processes that run tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for category in IGNORED:
            config.addinivalue_line("filterwarnings", f"ignore::{category}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector what all tests share: nothing of it becomes garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test marked ``few``, keep one in so many and those named; of the rest, make half as many long.

    All others are slow: `make test-slow` runs them. Cases that are marked slow do not count. Tests in
    ``long_tests.txt``, which tools/quick_tests.py writes, are long as well.
    """
    for item in items:
        if item.nodeid in LONG:
            item.add_marker("long")
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            families.setdefault((item.path, item.originalname), []).append(item)
    for (_, test), cases in families.items():
        count, *always = cases[0].get_closest_marker("few").args
        named = {case.callspec.id: case for case in cases}
        lacking = {*always} - {*named}
        if lacking and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"few of {test} names {lacking}, and the cases are {[*named]}")
        for place, (name, case) in enumerate(named.items()):
            if place % count and name not in always:
                case.add_marker("long" if place % (2 * count) == count // 2 else "slow")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import matplotlib as mpl
    import torch

    mpl.use("agg")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of a test's runs only where the test is marked ``drawn``."""
    publishing = sys.modules.get("lightning_sym.callbacks.publishing")
    if publishing is not None and request.node.get_closest_marker("drawn") is None:
        from helpers import as_pixel, checked_cards

        monkeypatch.setattr(publishing, "publish_figure", as_pixel(publishing.publish_figure))
        monkeypatch.setattr(publishing, "cards", checked_cards)


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the tracing rules that a test registers."""
    rules = sys.modules.get("lightning_sym.symmetry.tracing.labelling.rules")
    for name in ("_RULES", "_MODULE_RULES") if rules is not None else ():
        monkeypatch.setattr(rules, name, dict(getattr(rules, name)))


@pytest.fixture(scope="module", autouse=True)
def _unmeasured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Measure the nullity of traced networks only in modules marked ``measured``: elsewhere the self-test suffices.

    Measuring takes up to half a minute for a network, and a fifth of the processor time of all tests.
    """
    from lightning_sym.symmetry import completeness

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("measured") is None:
            patch.setattr(completeness, "MOST_PARAMETERS", 0)
        yield


@pytest.fixture(scope="session")
def traced_once() -> Callable[..., Any]:
    """Return ``trace_symmetry`` without the self-test, which keeps what it found for equal networks and arguments."""
    from helpers import fingerprint

    from lightning_sym.symmetry import trace_symmetry

    found: dict[bytes, Any] = {}

    def trace(*arguments: Any, **options: Any) -> Any:
        key = fingerprint((arguments, options))
        if key is None or key not in found:
            with warnings.catch_warnings(record=True) as said:
                symmetry = trace_symmetry(*arguments, **{**options, "check": False})
            for one in said:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            if key is None or said:
                return symmetry
            found[key] = symmetry
        return copy.copy(found[key])

    return trace


@pytest.fixture(scope="module")
def unproven(traced_once: Callable[..., Any]) -> Iterator[None]:
    """Trace networks once and without the self-test in what tasks, reports and callbacks run about other things.

    Tracing and the self-test take up to a second for each run; the tests of the symmetries themselves keep both.

    Yields:
        Nothing.
    """
    from helpers import replace_traces

    from lightning_sym import callbacks, tasks  # noqa: F401 (brings all that traces)

    with pytest.MonkeyPatch.context() as patch:
        replace_traces(traced_once, patch.setattr)
        yield


@pytest.fixture(scope="session")
def launcher() -> Iterator[subprocess.Popen[str]]:
    """Start the process that imports torch and Lightning once and forks for each test module; see ``scenarios.py``.

    Yields:
        The process.
    """
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("scenarios.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.stdin.close()
        process.terminate()  # workers of data loaders that were forked meanwhile may hold the pipe's end open


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the function ``scenarios`` of the test module has filled; see ``scenarios.py``."""
    launcher = request.getfixturevalue("launcher")
    folder, log = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("log") / "output.txt"
    fixtures = list(inspect.signature(request.module.scenarios).parameters)[1:]
    arguments = {name: str(request.getfixturevalue(name)) for name in fixtures}
    launcher.stdin.write(json.dumps([request.module.__file__, str(log), str(folder), arguments]) + "\n")
    launcher.stdin.flush()
    limit = getattr(request.module, "LIMIT", 240)
    ready, _, _ = select.select([launcher.stdout], [], [], limit)
    if not ready:
        os.killpg(launcher.pid, signal.SIGKILL)
        pytest.fail(f"The scenarios took more than {limit} s: {log.read_text()[-3000:]}")
    status = launcher.stdout.readline().strip()
    if status != "0":
        pytest.fail(f"The scenarios ended with {status or 'their launcher'}: {log.read_text()}", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def matching_zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo of three perceptrons on 300 digits: member 1 is member 0 in another order and scale; 2 is by itself."""
    import torch
    from helpers import write_zoo

    from lightning_sym.datamodules import DigitsDataModule
    from lightning_sym.networks import MultiLayerPerceptron
    from lightning_sym.symmetry.trace import trace_symmetry

    data = DigitsDataModule(max_samples=300)
    images, labels = data.split_tensors("train")
    images = data.normalize(images)

    def trained(seed: int) -> MultiLayerPerceptron:
        network = MultiLayerPerceptron(widths=(12, 10), image_size=8).fresh(seed)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        return network.eval()

    first, third = trained(0), trained(2)
    symmetry = trace_symmetry(first, images[:2])
    second = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1), scale=0.3), first)
    return write_zoo(tmp_path_factory.mktemp("matching") / "zoo", (first, second, third), data)


@pytest.fixture
def part_of_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every fourth of the 5,000 MNIST digits: reports go through all, and no test asks for their numbers."""
    from lightning_sym.datamodules import MNIST5kDataModule
    from lightning_sym.datamodules.base import LabelledImages

    load = MNIST5kDataModule.load

    def part_of(data: MNIST5kDataModule) -> tuple[LabelledImages, ...]:
        return tuple(LabelledImages(part.images[::4], part.labels[::4]) for part in load(data))

    monkeypatch.setattr(MNIST5kDataModule, "load", part_of)
    monkeypatch.setattr(MNIST5kDataModule, "source_sizes", (1000, 250))
