"""``lightning-sym merge``: align checkpoints of one network by its symmetry and average their weights.

This module reads the options without importing torch.
"""

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sym._files import write_atomically
from lightning_sym.cli.given import arguments_of, class_of, read_own, shape_of, whole

USAGE = (
    "usage: lightning-sym merge {ZOO | FOLDER FOLDER | A B [C ...] --network NETWORK [--network.ARGUMENT VALUE ...]} "
    "--out FILE.safetensors [--data DATAMODULE [--data.ARGUMENT VALUE ...]] [--method weights|activations] "
    "[--recalibrate] [--align-only]"
)
NEEDS = "lightning_sym.models"  # imports PyTorch
HELP = f"""{USAGE}

Aligns checkpoints of one network (by permutations of units, and by scales, signs and matrices where the network allows
them), checks that each function is unchanged, and writes the weight average.

  A B C ...            state dicts, Lightning checkpoints, .safetensors, or the index of several shards
                       (model.safetensors.index.json); nothing in them is run
  ZOO                  the folder of a zoo: all of its members; the zoo records their network
  FOLDER               a model of transformers: config.json, and model.safetensors, its index or pytorch_model.bin
  --network NETWORK    torchvision:resnet18, timm:NAME, transformers:path/to/config.json, or a class by its full path
                       (lightning_sym's: by its name)
  --network.ARGUMENT   an argument of that class
  --out FILE           a new .safetensors; if A is an index or a FOLDER, a new folder, with the other files of A's.
                       Names, types, shards are those of A. A report is written to FILE-report
  --data DATAMODULE    losses, barriers and a figure; needed for activations and recalibration
  --data.ARGUMENT      an argument of that class
  --method             weights (default), or activations: units belong together that are active on the same inputs
  --recalibrate        recompute the batch norm statistics of the average
  --align-only         write B, aligned to A, its function unchanged; no average
  --points 11          points on the linear path between two networks
  --prefix PREFIX      prefix of the weights' names, if several fit
  --input 3,224,224    shape of one input, without the batch; default: from the data or the model
  --tokens 1000        the input is integers below 1000
  --seed 0             of the matching

Nothing is downloaded. timm and transformers: pip install 'lightning_sym[hf]'."""
_FLAGS = ("align-only", "recalibrate")
# Files of a transformers model, in the search order of from_pretrained.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_OPTIONS = ("network", "out", "data", "method", "points", "prefix", "input", "tokens", "seed", *_FLAGS)


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        files: The checkpoints, and folders of zoos.
        network: The class or the model, with its arguments; None for that of a zoo.
        out: Where the result goes.
        data: The class of the data with its arguments; None for none.
        method: "weights" or "activations".
        align_only: Whether to write the second network, aligned to the first.
        recalibrate: Whether to recompute batch norm statistics.
        points: Number of points on a linear path.
        prefix: Prefix of the names of the weights.
        shape: Shape of one input.
        tokens: The input is integers below this number.
        seed: Seed of the matching.
    """

    files: tuple[str, ...]
    network: Any
    out: Path
    data: Any
    method: str
    align_only: bool
    recalibrate: bool
    points: int
    prefix: str | None
    shape: tuple[int, ...] | None
    tokens: int | None
    seed: int

    @property
    def report(self) -> Path:
        """The folder of the report."""
        return self.out.with_name(f"{self.out.name.removesuffix('.safetensors')}-report")


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is not known, missing or has a wrong value, or there are not enough checkpoints.
    """
    given, files = read_own("merge", args, _OPTIONS, _FLAGS)
    zoos = [file for file in files if Path(file).is_dir()]
    for name in ("network", "out"):
        if not class_of(given.get(name)) and not (name == "network" and name not in given and zoos):
            raise ValueError(f"Missing: --{name}.")
    for name in _FLAGS:
        if given.get(name, True) is not True:
            raise ValueError(f"--{name} takes no value, got {given[name]!r}.")
    method = given.get("method", "weights")
    if method not in ("weights", "activations"):
        raise ValueError(f"--method takes weights or activations, got {method!r}.")
    if len(files) < 2 and not zoos:
        raise ValueError(f"Expected two or more checkpoints, got {', '.join(files) or 'none'}.")
    return Asked(
        files=tuple(files),
        network=given.get("network"),
        out=Path(str(given["out"])),
        data=given.get("data"),
        method=method,
        align_only="align-only" in given,
        recalibrate="recalibrate" in given,
        points=whole(given, "points", 2, 11),
        prefix=None if given.get("prefix") is None else str(given["prefix"]),
        shape=shape_of(given["input"]) if "input" in given else None,
        tokens=whole(given, "tokens", 1),
        seed=whole(given, "seed", 0, 0),
    )


def run(asked: Asked) -> None:
    """Merge checkpoints, write the result and its report, and print the comparison.

    Args:
        asked: As :func:`read_options` returns it.

    Raises:
        ValueError: If something does not fit; nothing is written then.
        OSError: If a file is missing or cannot be written.
    """
    from rich.console import Console

    import lightning_sym.datamodules
    from lightning_sym.merging import merge_checkpoints
    from lightning_sym.models import build_model, construct, example_of
    from lightning_sym.reports.merging import merging_results
    from lightning_sym.tasks import SquaredDistance

    if asked.report.exists():
        raise ValueError(f"{asked.report} is there already; expected a place without an earlier report.")
    files, architecture, configured = _members(asked.files)
    arguments: dict[str, Any]
    if asked.network is None and configured is not None:
        name, arguments = f"transformers:{configured}", {}
        model = _built(functools.partial(build_model, name, arguments))
    elif asked.network is None:
        name, arguments = architecture["class_path"], architecture.get("init_args", {})
        model = _built(functools.partial(_of_zoo, architecture))
    else:
        name = class_of(asked.network)
        arguments = arguments_of(asked.network)
        model = _built(functools.partial(build_model, name, arguments))
    data = None
    if asked.data is not None:
        data = construct(class_of(asked.data), arguments_of(asked.data), lightning_sym.datamodules, "data")()
    loss = SquaredDistance() if getattr(data, "regression", False) else None
    if data is not None and asked.shape is None:
        inputs: Any = next(iter(data.test_dataloader()))[0][:2]
    else:
        inputs = example_of(model, asked.shape, asked.tokens)
    with _named(model.name, data):
        found = merge_checkpoints(
            files,
            asked.out,
            network=model.network,
            inputs=inputs,
            method=asked.method,  # type: ignore[arg-type]
            align_only=asked.align_only,
            recalibrate=asked.recalibrate,
            data=None if data is None else data.test_dataloader(),
            train=None if data is None else data.curvature_dataloader(),
            loss=loss,
            points=asked.points,
            prefix=asked.prefix,
            seed=asked.seed,
            progress=sys.stderr.isatty(),
        )
    about = {"network": name, "arguments": arguments, "seed": asked.seed}
    if data is not None:
        about["data"] = data.identity()
    results = merging_results(found, about, None if loss is None else "mean squared distance")
    for table in results.tables:
        table.write(asked.report)
    for name, figure in results.figures:
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        write_atomically(asked.report / f"{name}.png", picture.getvalue())
    for name, content in results.files.items():
        write_atomically(asked.report / name, content)
    console = Console(width=80)
    for table in results.tables[:2]:
        if table.name != "curves":
            table.show(console)
    for note in results.notes:
        console.print(f"  {note}", highlight=False, markup=False)
    console.print(f"  weights {found.out}", highlight=False, soft_wrap=True)
    console.print(f"  report  {asked.report}", highlight=False, soft_wrap=True)


def _members(given: Sequence[str]) -> tuple[list[str], Mapping[str, Any], str | None]:
    """Return the checkpoints, also those in folders, and the network that the folders name.

    Returns:
        The files; the architecture of the first zoo (empty without one); the first folder of a model of transformers.
    """
    from lightning_sym.zoo import MANIFEST, ModelZoo

    files: list[str] = []
    architecture: Mapping[str, Any] = {}
    configured = None
    for name in given:
        if not Path(name).is_dir():
            files.append(name)
            continue
        weights = [path for path in (Path(name) / one for one in _WEIGHTS) if path.is_file()]
        if (Path(name) / "config.json").is_file() and weights:
            files.append(str(weights[0]))
            configured = configured or name
        elif (Path(name) / MANIFEST).exists() or any(Path(name).glob("member-*.safetensors")):
            zoo = ModelZoo.open(name)
            files += [str(zoo.path / member.file) for member in zoo]
            architecture = architecture or zoo.architecture
        else:
            raise ValueError(
                f"{name} is neither a zoo (a folder with member-0000.safetensors) nor the folder of a model "
                f"(config.json and {', '.join(_WEIGHTS)}); expected one of them, or checkpoints."
            )
    return files, architecture, None if architecture else configured


def _of_zoo(architecture: Mapping[str, Any], *, meta: bool) -> Any:
    """Build the network of a zoo."""
    from lightning_sym.models import Model
    from lightning_sym.networks import build
    from lightning_sym.symmetry import without_weights

    path = architecture["class_path"]
    try:
        with without_weights() if meta else contextlib.nullcontext():
            network = build(architecture)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; give --network with its arguments.") from error
    return Model(path, "", network.eval(), network.image_shape())


def _built(build: Callable[..., Any]) -> Any:
    """Build a model, without memory for its weights where all that it has besides them is there nevertheless."""
    import torch

    for meta in (True, False):
        torch.manual_seed(0)
        with warnings.catch_warnings(), contextlib.suppress(Exception) if meta else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            model = build(meta=meta)
            if not meta or _needs_no_values(model.network):
                return model
    raise AssertionError("the second attempt returns or raises")


def _needs_no_values(network: Any) -> bool:
    """Return whether only parameters of a network are without values, and a state dict fills them all."""
    from torch import Tensor, nn
    from torch.utils import _pytree as pytree

    from lightning_sym.symmetry.tracing.capture import first_names

    held = (leaf for module in network.modules() for leaf in pytree.tree_leaves(vars(module)))
    others = (leaf for leaf in held if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter))
    return not any(tensor.is_meta for tensor in others) and network.state_dict().keys() <= first_names(network).keys()


@contextlib.contextmanager
def _named(network: str, data: Any) -> Iterator[None]:
    """Add network and data to the errors of torch."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        of = "its own example" if data is None else type(data).__name__
        raise ValueError(
            f"{network} cannot be run on {of} ({reason[:200]}); give the data that it was trained on, and the "
            "arguments that it was built with."
        ) from error
