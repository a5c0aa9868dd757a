"""What the tests of several folders share, without Lightning; see ``fits.py`` for runs of a trainer."""

import csv
import functools
import hashlib
import importlib.util
import io
import json
import math
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from torch import Tensor, fx, nn
from torchmetrics import Metric

from lightning_sym._files import write_atomically
from lightning_sym.figures import cards
from lightning_sym.figures.cards import CARD
from lightning_sym.networks import Network
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.zoo import rebuild_manifest, write_member

BRODEN = ("object", "part", "scene", "material", "texture", "color")  # categories of its concepts

# ---- cases


def one_in(count: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Return the cases, of which one in ``count`` is tested each time, from the ``first`` on; the others are slow.

    For a law with many cases and several tests: with another ``first`` in each, every case is in a test each time.
    """
    cases = list(cases)
    marks = [() if index % count == first else (pytest.mark.slow,) for index in range(len(cases))]
    return [
        pytest.param(*case.values, marks=(*case.marks, *own), id=case.id)
        if isinstance(case, type(pytest.param()))
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=own)
        for case, own in zip(cases, marks, strict=True)
    ]


# ---- refusals


def assert_refused(
    call: Callable[..., Any],
    /,
    *arguments: Any,
    says: str | Sequence[str] = (),
    error: type[Exception] = ValueError,
    **offered: Any,
) -> None:
    """Check that ``call(*arguments, **offered)`` raises an error whose sentence names what was wrong.

    Args:
        call: A class, a function, or a ``lambda`` around more.
        *arguments: Passed on; not looked for in the sentence.
        says: Texts that the sentence must hold; without any, each name and each value in ``offered``.
        error: What must be raised, exactly.
        **offered: Passed on.
    """
    with pytest.raises(error) as caught:
        call(*arguments, **offered)
    sentence = str(caught.value)
    assert caught.type is error, f"{caught.type.__name__}: {sentence}"
    texts = [says] if isinstance(says, str) else says
    for text in texts or [str(part) for item in offered.items() for part in item]:
        assert text in sentence, f"{text!r} is not in: {sentence}"


def refused(call: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Any:
    """Return a row for a table of refusals, ``@pytest.mark.parametrize("refusal", [refused(...), ...])``.

    The test calls ``refusal()``; see :func:`assert_refused` for the arguments.
    """
    says = settings.get("says", ())
    words = [says] if isinstance(says, str) else says
    names = [name for name in settings if name not in ("says", "error")]
    title = " ".join([getattr(call, "__name__", "call").replace("<lambda>", ""), *(names or words)])
    return pytest.param(functools.partial(assert_refused, call, *arguments, **settings), id=title.strip())


# ---- metrics


def measured(metric: Metric, x: Tensor, y: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """Return what a metric says of two tensors, of which it gets the samples in chunks that begin at the cuts."""
    metric.reset()
    for pair in zip(x.tensor_split(tuple(cuts)), y.tensor_split(tuple(cuts)), strict=True):
        metric.update(*pair)
    return metric.compute()


# ---- examples, and what a run left behind


def example(name: str) -> ModuleType:
    """Return ``examples/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


def read_csv(file: Path) -> list[dict[str, str]]:
    """Return the rows of a table on disk."""
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def dead_charts(charts: Mapping[str, str], logged: Collection[str]) -> list[str]:
    """Return the titles of charts in which nothing would be seen: no tag of theirs is logged."""
    return [title for title, tags in charts.items() if not any(re.match(tags, tag) for tag in logged)]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of ``results/NAME.json``."""
    return json.loads(file.with_suffix(".json").read_text())["rows"]


def printed(show: Callable[[Console], Any]) -> str:
    """Return what ``show(console)`` prints, in one line and without borders."""
    console = Console(file=io.StringIO(), width=80)
    show(console)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def too_small(figure: Figure, width: float = 420, height: float = math.inf, least: float = 9.0) -> list[str]:
    """Return titles and names of axes whose letters have fewer pixels where the picture is fitted into so many.

    TensorBoard's page of images shows pictures 420 wide before one clicks on them.
    """
    texts = [*filter(None, (figure.get_suptitle() and figure._suptitle, figure._supxlabel, figure._supylabel))]
    for axes in filter(Axes.get_visible, figure.axes):
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *([axes.zaxis.label] if axes.name == "3d" else [])]
    per_point = min(width / figure.get_figwidth(), height / figure.get_figheight()) / 72
    shown = [text for text in texts if text.get_text().strip() and text.get_visible()]
    return [f"{t.get_text()!r}: {t.get_size() * per_point:.1f}" for t in shown if t.get_size() * per_point < least]


def replace_traces(trace: Callable[..., Any], set_attribute: Callable[[ModuleType, str, Any], None] = setattr) -> None:
    """Have the imported tasks, reports and callbacks call ``trace`` in place of ``trace_symmetry``."""
    for name, module in list(sys.modules.items()):
        if re.match(r"lightning_sym\.(tasks|stitching|reports|callbacks)\b", name) and "trace_symmetry" in vars(module):
            set_attribute(module, "trace_symmetry", trace)


def as_pixel(publish_figure: Callable[..., None]) -> Callable[..., None]:
    """Return ``publish_figure`` with a white pixel in place of what the file would show.

    For runs that are about other things than pictures: drawing one takes a tenth of a second, the first one of a
    process half a second.
    """
    from lightning_sym.callbacks import publishing  # imports Lightning

    pixel = io.BytesIO()
    Image.new("L", (1, 1), 255).save(pixel, format="png")

    def write(figure: Figure, file: Path, *_: object) -> None:
        write_atomically(file, pixel.getvalue())

    def publish(trainer: Any, figure: Figure, tag: str, file: Path) -> None:
        with patch.object(publishing, "write_figure", write):
            publish_figure(trainer, figure, tag, file)

    return publish


def checked_cards(figure: Figure) -> Iterator[tuple[str, Figure]]:
    """Check that the words on each card can be read.

    Yields:
        Like ``cards``, but pixels in place of the pictures, which take long to draw.
    """
    for number, card in cards(figure):
        assert not too_small(card, *CARD), (number, too_small(card, *CARD))
        yield number, Figure(figsize=(0.01, 0.01), dpi=100)


def assert_same(a: object, b: object, where: str = "") -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(a, Mapping):
        assert isinstance(b, Mapping), where
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}/{index}")
    elif isinstance(a, Tensor):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")
    else:
        assert a == b or (a != a and b != b), where  # NaN is NaN


# ---- networks and zoos


class _Content(pickle.Pickler):
    """Writes tensors as their values: torch would write where they are in memory."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        own = value.detach().cpu()
        kind = f"{type(value)} {own.dtype} {own.shape} {own.stride()} {value.requires_grad}"
        return bytes, (kind.encode() + own.contiguous().flatten().view(torch.uint8).numpy().tobytes(),)


def fingerprint(content: Any) -> bytes | None:
    """Return bytes that are the same for equal networks and tensors; None if something in them cannot be pickled."""
    written = io.BytesIO()
    try:
        _Content(written).dump(content)
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    return hashlib.sha256(written.getvalue()).digest()


class Fixed:
    """Marks a part that becomes a buffer which is not saved."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make


class Program(nn.Module):
    """A network written as one function of itself and its inputs.

    Args:
        function: What it computes, ``function(network, *inputs)``.
        parts: By name, what it is made of, or what makes it; tensors become buffers.
    """

    def __init__(self, function: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, make in parts.items():
            part = make.make() if isinstance(make, Fixed) else make
            part = part if isinstance(part, nn.Module | Tensor) else part()
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=not isinstance(make, Fixed))
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def of(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: kind(*args, **kwargs)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


def buffer(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def sequential(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def randomize_statistics(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give each batch norm running statistics and an affine map that are not those of the start; in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
                if module.affine:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.normal_(0, 0.1, generator=generator)
    return network


def write_zoo(folder: Path, networks: Sequence[Network], data: Any, accuracies: Sequence[float] = ()) -> Path:
    """Write networks as the members 0, 1, ... of a zoo trained on a datamodule, and return its folder.

    Accuracies are those of the test split; there may be more than networks.
    """
    for number, network in enumerate(networks):
        state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
        metrics = {"test": {"accuracy": accuracies[number]}} if accuracies else {}
        record = {"architecture": network.architecture, "data": data.identity(), "metrics": metrics}
        write_member(folder, number, state, **record)
    rebuild_manifest(folder)
    return folder


def write_broden(folder: Path, images: int = 6, side: int = 64) -> Path:
    """Write random images with masks of half their side in the format of Broden, with all six of its categories."""
    rng, mask = np.random.default_rng(0), side // 2
    (folder / "images").mkdir(parents=True)

    def write(name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    numbers = {category: range(10 * place + 1, 10 * place + 6) for place, category in enumerate(BRODEN)}
    write("category.csv", ["name"], [[category] for category in BRODEN])
    for category, own in numbers.items():
        write(f"c_{category}.csv", ["number", "name"], [[number, f"{category} {number}"] for number in own])
    rows = []
    for image in range(images):
        pixels = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((side // 4, side // 4, 1)))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{image}.jpg")
        row: list[object] = [f"{image}.jpg", ("train", "val")[image % 2], mask, mask]
        for category, own in numbers.items():
            if category in ("scene", "texture"):  # of whole images
                row.append(int(rng.choice(own)))
                continue
            labels = np.kron(rng.choice([0, *own], (2, 2)), np.ones((mask // 2, mask // 2)))
            encoded = np.stack([labels % 256, labels // 256, 0 * labels], -1).astype(np.uint8)
            Image.fromarray(encoded).save(folder / f"images/{image}_{category}.png")
            row.append(f"{image}_{category}.png")
        rows.append(row)
    write("index.csv", ["image", "split", "sh", "sw", *BRODEN], rows)
    return folder


class Exact(fx.Interpreter):
    """Runs a graph, and instead of norms that only stand for another function this function."""

    def run_node(self, n):
        if "stands_for" not in n.meta:
            return super().run_node(n)
        function, steps = n.meta["stands_for"]
        for _ in range(steps):
            n = n.args[0]
        return function(self.env[n])


def outputs_of_graph(captured, network, inputs):
    """Run the graph of a capture on the numbers of a network and of inputs; return all outputs."""
    module = fx.GraphModule(captured.graph.owning_module or nn.Module(), captured.graph)
    interpreter = Exact(module, garbage_collect_values=False)
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(interpreter.run(*state_tensors(network).values(), *inputs))
