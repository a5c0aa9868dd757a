"""``lightning-sym import``: checkpoints from elsewhere become members of a zoo."""

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import lightning_sym.datamodules
import lightning_sym.networks
from lightning_sym._text import nearest
from lightning_sym.cli.given import class_of, merge, read_given
from lightning_sym.networks import Network
from lightning_sym.weights import as_network, fit_weights, read_weights
from lightning_sym.zoo import ModelZoo

USAGE = (
    "usage: lightning-sym import --network CLASS [--network.ARGUMENT VALUE ...] --out FOLDER [--prefix PREFIX] "
    "[--data DATAMODULE [--data.ARGUMENT VALUE ...]] FILE ..."
)
_OPTIONS = ("network", "out", "prefix", "data")


def import_members(args: Sequence[str]) -> None:
    """Read the files, check that they fit the network, and add them to a zoo.

    Args:
        args: Options and files.

    Raises:
        ValueError: If an option is missing or not known, a class is not found, or a file does not fit. Nothing is
            written then.
    """
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    options, files = _split(args)
    given = merge(read_given(options))
    for name in given:
        if name not in _OPTIONS:
            raise ValueError(f"import has no option '{name}'.{nearest(name, _OPTIONS)} {USAGE}")
    missing = [name for name in ("network", "out") if not class_of(given.get(name))]
    if missing or not files:
        raise ValueError(f"Missing: {', '.join(f'--{name}' for name in missing) or 'a file'}. {USAGE}")
    network = as_network(construct(given["network"], lightning_sym.networks))
    prefix = None if given.get("prefix") is None else str(given["prefix"])
    identity, metrics = None, None
    if given.get("data") is not None:
        data = construct(given["data"], lightning_sym.datamodules)()
        identity = data.identity()
        metrics = [
            _metrics(network, fit_weights(read_weights(file), network, prefix=prefix, source=file), data)
            for file in files
        ]
    zoo = ModelZoo.add(given["out"], files, network=network, prefix=prefix, data=identity, metrics=metrics)
    _report(zoo, files)


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options with their values, and the files."""
    options: list[str] = []
    files: list[str] = []
    waiting = False
    for arg in args:
        is_option = arg.startswith("--")
        (options if is_option or waiting else files).append(arg)
        waiting = is_option and "=" not in arg
    return options, files


def construct(node: Any, known: Any) -> functools.partial[Any]:
    """Return what builds a class that the command line names, with its arguments.

    Args:
        node: The class, or its path (``class_path``) with its arguments.
        known: The module in which classes are found by their names alone.

    Raises:
        ValueError: If there is no such class, or it does not take the arguments.
    """
    path = class_of(node)
    module, _, name = path.rpartition(".")
    try:
        room = importlib.import_module(module) if module else known
    except ModuleNotFoundError as error:
        if "is not a package" in str(error):
            raise ValueError(
                f"{path} is not at the top level of a module, where it could be found again; move it there."
            ) from None
        raise ValueError(
            f"There is no module {error.name!r}, which {path} needs; its folder has to be on PYTHONPATH, as in "
            "PYTHONPATH=. lightning-sym ..."
        ) from None
    found = getattr(room, name, None)
    if not callable(found):
        near = nearest(name, [known for known in dir(room) if not known.startswith("_")])
        raise ValueError(f"There is no class {path!r}.{near}")
    arguments = {key: value for key, value in node.items() if key != "class_path"} if isinstance(node, Mapping) else {}
    takes = inspect.signature(found).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        for argument in arguments:
            if argument not in takes:
                raise ValueError(f"{name} has no argument {argument!r}.{nearest(argument, takes)}")
    return functools.partial(found, **arguments)


def _metrics(network: Network, state: Mapping[str, torch.Tensor], data: Any) -> dict[str, dict[str, float]]:
    """Return loss and accuracy on the validation and the test images."""
    member = network.fresh(0)
    member.load_state_dict(state)
    member.eval()
    results = {}
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        loss, right, count = 0.0, 0, 0
        with torch.no_grad():
            for images, labels in loader:
                scores = member(images).double()
                loss += float(F.cross_entropy(scores, labels, reduction="sum"))
                right += int((scores.argmax(-1) == labels).sum())
                count += len(labels)
        if count:
            results[split] = {"loss": loss / count, "accuracy": right / count}
    return results


def _report(zoo: ModelZoo, files: Sequence[str]) -> None:
    new = zoo.numbers[-len(files) :]
    for number, file in zip(new, files, strict=True):
        metrics = zoo.member(number).metrics.get("test")
        found = f", test accuracy {metrics['accuracy']:.1%}, loss {metrics['loss']:.3f}" if metrics else ""
        print(f"  member {number}: {Path(file).name}{found}")
    package = zoo.architecture["class_path"].split(".")[0]
    allow = "" if package in ("lightning_sym", "torchvision") else f" --model.allow '[{package}]'"
    print(f"  zoo     {zoo.path}, {len(zoo)} members of {zoo.architecture['class_path']}")
    print(f"  use it  lightning-sym fit --config matching/mnist5k_mlp --model.zoo {zoo.path}{allow} --data DATAMODULE")
