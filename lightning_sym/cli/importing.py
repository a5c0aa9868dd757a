"""``lightning-sym import``: checkpoints from elsewhere become members of a zoo.

This module reads the options without importing torch.
"""

import json
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sym._checkpoint_files import check_folder
from lightning_sym.cli.given import LINKED, arguments_of, class_of, missing_options, prefix_of, read_own
from lightning_sym.cli.named import check_classes
from lightning_sym.cli.places import check_files, is_zoo

USAGE = "usage: lightning-sym import FILE ... --network NETWORK --out FOLDER [--data DATAMODULE] [--prefix PREFIX]"
NEEDS = "lightning_sym.models"  # imports PyTorch
NETWORK = """\
  --network NETWORK    torchvision:resnet18, timm:NAME, a folder with timm's config.json, a class or a function by its
                       path (my_networks.Net in the current folder; lightning_sym's by its name), or a zoo
  --network.ARGUMENT   an argument of it; sizes follow from the data
  --data DATAMODULE    data that the networks were trained on: MNIST5kDataModule, or TensorDataModule --data.train FILE,
                       or DatasetDataModule --data.dataset my_data.MyDataset; --data.ARGUMENT for its arguments"""
HELP = f"""{USAGE}

Makes a zoo of checkpoints that were trained elsewhere, or adds them to one.

  FILE ...             state dicts of torch.save, Lightning checkpoints or .safetensors; nothing in them is run
{NETWORK}
                       with data, accuracies are measured and recorded
  --out FOLDER         the folder of the zoo
  --prefix PREFIX      prefix of the weights' names, if several fit"""
_OPTIONS = ("network", "out", "prefix", "data")


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        files: The checkpoints.
        network: The network with its arguments.
        out: The folder of the zoo.
        prefix: Prefix of the names of the weights.
        data: The class of the data with its arguments; None for none.
    """

    files: tuple[str, ...]
    network: Any
    out: Path
    prefix: str | None = None
    data: Any = None


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is missing or not known, or there is no file.
    """
    given, files = read_own("import", args, _OPTIONS)
    missing = [name for name in ("network", "out") if not class_of(given.get(name))]
    if missing or not files:
        raise ValueError(missing_options(missing, "runs/mine/zoo") if missing else "Missing: the file of a checkpoint.")
    return Asked(tuple(files), given["network"], Path(str(given["out"])), prefix_of(given), given.get("data"))


def look(asked: Asked) -> Asked:
    """Check that the files exist.

    Raises:
        FileNotFoundError: If one does not.
        ValueError: If one is a folder, or a class or its module does not exist.
    """
    check_files(asked.files)
    check_folder(asked.out)
    check_classes(network=asked.network, data=asked.data)
    return asked


def run(asked: Asked) -> None:
    """Read the files, check that they fit the network, add them to a zoo, and print how to use it.

    Args:
        asked: As :func:`read_options` returns it.

    Raises:
        ValueError: If a class is not found, or a file does not fit. Nothing is written then.
    """
    data = None if asked.data is None else make_data(asked.data)
    zoo = make_zoo(asked, data)
    _report(zoo, asked.files, _as_options("data", asked.data), regression=getattr(data, "regression", False))


def make_data(node: Any) -> Any:
    """Build a datamodule as ``fit`` does.

    Args:
        node: Its class and arguments, by :func:`lightning_sym.cli.given.merge`.
    """
    from pytorch_lightning import LightningDataModule

    from lightning_sym.cli.lightning import RecipeParser

    parser = RecipeParser()
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    RecipeParser.given = {"data": node}
    return parser.instantiate_classes(parser.parse_object({"data": _nested(node)})).data


def _nested(node: Any) -> Any:
    """Return classes with their arguments below ``init_args``, as a parser takes them."""
    if isinstance(node, list):
        return [_nested(entry) for entry in node]
    if not isinstance(node, Mapping):
        return node
    arguments = {name: _nested(value) for name, value in arguments_of(node).items()}
    return {"class_path": class_of(node), "init_args": arguments} if class_of(node) else arguments


def make_zoo(asked: Asked, data: Any) -> Any:
    """Add checkpoints to a zoo, with their losses and accuracies on the data, and print choices that were made.

    Args:
        asked: Files, network and folder.
        data: The datamodule; None for none.

    Returns:
        The :class:`~lightning_sym.zoo.ModelZoo`.
    """
    from lightning_sym.weights import as_network, match_weights, read_weights
    from lightning_sym.zoo import ModelZoo

    name, arguments = class_of(asked.network), arguments_of(asked.network)
    network = as_network(_builder(name, arguments, data))
    identity, metrics = None, None
    with sizes_named(name, arguments, data):
        if data is not None:
            identity = data.identity()
            states = (
                match_weights(read_weights(file), network, prefix=asked.prefix, source=file).tensors
                for file in asked.files
            )
            metrics = [_metrics(network, state, data) for state in states]
        with warnings.catch_warnings(record=True) as choices:
            warnings.simplefilter("always", UserWarning)
            zoo = ModelZoo.add(
                asked.out, asked.files, network=network, prefix=asked.prefix, data=identity, metrics=metrics
            )
    for choice in choices:
        print(f"  {choice.message}")
    return zoo


@contextmanager
def sizes_named(name: str, arguments: Mapping[str, Any], data: Any) -> Iterator[None]:
    """Add the sizes that follow from the data to an error about the shape of a tensor in a file.

    Args:
        name: As for ``--network``.
        arguments: Arguments that were given.
        data: The datamodule; None for none.

    Raises:
        ValueError: Instead of the error.
    """
    try:
        yield
    except ValueError as error:
        sizes = {} if os.path.isdir(name) else with_sizes(name, {}, data)
        said = [f"{size} {value}" for size, value in sizes.items() if size not in arguments]
        if not said or " of shape " not in str(error):
            raise
        kind = ", as their targets are values, not class numbers" * bool(getattr(data, "regression", False))
        raise ValueError(f"{str(error).rstrip('.')}; the data give {', '.join(said)}{kind}.") from error


def _builder(name: str, arguments: dict[str, Any], data: Any) -> Any:
    """Return a network, or a function that builds it, which files of a zoo can name.

    Args:
        name: As for ``--network``.
        arguments: Its arguments; those that are sizes of the data may be left out.
        data: The datamodule; None for none.

    Raises:
        ValueError: If there is no such network, or it does not take the arguments.
    """
    import lightning_sym.networks
    from lightning_sym.models import build_model, construct, model_in, named_in

    if is_zoo(name):
        return model_in(name, arguments).network
    if Path(name).is_dir():
        name, arguments = named_in(name, arguments)
    library, colon, rest = name.partition(":")
    if library == "transformers":
        raise ValueError(
            f"{name}: networks of a zoo take one tensor and return one; for models of transformers there are merge, "
            "reparametrize and symmetry."
        )
    arguments = with_sizes(name, arguments, data)
    if library in ("torchvision", "timm") and colon:
        build_model(name, arguments, meta=True)  # tells what is wrong with the name
        own = {"name": rest, "weights": None} if library == "torchvision" else {"model_name": rest, "pretrained": False}
        path = "torchvision.models.get_model" if library == "torchvision" else "timm.create_model"
        return construct(path, {**own, **arguments}, None, "network")
    return construct(f"{library}.{rest}" if colon else name, arguments, lightning_sym.networks, "network")


def with_sizes(name: str, arguments: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """Add the sizes of the data to the arguments of a network that takes them.

    Args:
        name: As for ``--network``; no folder.
        arguments: Arguments that were given; they win.
        data: The datamodule; None for none.
    """
    library, colon, _ = name.partition(":")
    if not name or library == "transformers" or data is None:
        return dict(arguments)
    from jsonargparse._parameter_resolvers import get_signature_parameters

    import lightning_sym.networks
    from lightning_sym.cli.annotations import fitting_size
    from lightning_sym.cli.messages import object_at  # imports Lightning

    path = name.replace(":", ".", 1)
    found: Any = None
    if library in ("torchvision", "timm") and colon:
        takes = {"num_classes"}
    else:
        found = object_at(path) if "." in path else getattr(lightning_sym.networks, path, None)
        takes = {one.name for one in get_signature_parameters(found)} if callable(found) else set()
    sizes = {size: getattr(data, size, None) for size in LINKED if size in takes}
    fitting = {
        size: value if found is None else fitting_size(found, size, value)
        for size, value in sizes.items()
        if value is not None
    }
    return {**fitting, **arguments}


def _as_options(name: str, node: Any) -> str:
    """Return the options that name a class with its arguments, as a shell takes them; without a class nothing."""
    if not class_of(node):
        return ""
    written = f" --{name} {shlex.quote(class_of(node))}"
    for key, value in arguments_of(node).items():
        option = f"{name}.{key}"
        text = value if isinstance(value, str) else json.dumps(value)
        nested = class_of(value) if isinstance(value, Mapping) else ""
        written += _as_options(option, value) if nested else f" --{option} {shlex.quote(text)}"
    return written


def _metrics(network: Any, state: Mapping[str, Any], data: Any) -> dict[str, dict[str, float]]:
    """Return loss and accuracy, or for a regression the mean squared distance, on validation and test data."""
    from lightning_sym._checks import reason_of
    from lightning_sym.connectivity import curve_losses
    from lightning_sym.networks import architecture_name
    from lightning_sym.tasks import SquaredDistance

    member = network.fresh(0)
    member.load_state_dict(state)
    loss = SquaredDistance() if getattr(data, "regression", False) else None
    results = {}
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        if loader == []:
            continue
        try:
            found = curve_losses(member, lambda _: None, [0.0], loader, loss=loss, recalibrate=False)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{architecture_name(network)} cannot be evaluated on {type(data).__name__} ({reason_of(error)}); give "
                "the data that it was trained on, and the arguments that it was built with."
            ) from error
        results[split] = {"loss": float(found.loss)}
        if found.accuracy is not None:
            results[split]["accuracy"] = float(found.accuracy)
    return results


def print_members(zoo: Any, files: Sequence[str]) -> None:
    """Print the last members of a zoo.

    Args:
        zoo: The zoo.
        files: Checkpoints of its last members.
    """
    for number, file in zip(zoo.numbers[-len(files) :], files, strict=True):
        metrics = zoo.member(number).metrics.get("test", {})
        said = [f"accuracy {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []
        said += [f"loss {metrics['loss']:.3f}"] if metrics else []
        print(f"  member {number}: {Path(file).name}{', test ' if said else ''}{', '.join(said)}", flush=True)


def own_package(zoo: Any) -> str:
    """Return the package of a zoo's network, if it has to be trusted by name; else nothing."""
    package = str(zoo.architecture["class_path"]).split(".")[0]
    return "" if package in ("lightning_sym", "torchvision") else package


def _report(zoo: Any, files: Sequence[str], data: str, *, regression: bool) -> None:
    """Print the members, and commands that use them.

    Args:
        zoo: The zoo.
        files: Checkpoints of its last members.
        data: The options that name the data; empty if they are not known.
        regression: Whether the targets are values, not classes.
    """
    from lightning_sym.reports.report import counted

    print_members(zoo, files)
    package = own_package(zoo)
    allow = f" --model.allow '[{package}]'" if package else ""
    print(f"  zoo     {zoo.path}, {counted(len(zoo), 'member')} of {zoo.architecture['class_path']}")
    tasks = {"matching": "matching/mnist5k_mlp", "stitching": "stitching/mnist5k"}
    if regression:
        tasks = {"matching": f"{tasks['matching']} --model.loss lightning_sym.tasks.SquaredDistance"}
    for task, recipe in tasks.items() if len(zoo) > 1 else ():
        folder, out = (shlex.quote(str(place)) for place in (zoo.path, zoo.path.parent / task))
        print(
            f"  use it  lightning-sym fit --config {recipe} --model.zoo {folder} --model.pairs all{allow}"
            f"{data or ' --data DATAMODULE'} --run_dir {out}"
        )
