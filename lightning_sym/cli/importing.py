"""``lightning-sym import``: checkpoints from elsewhere become members of a zoo."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lightning_sym.datamodules
import lightning_sym.networks
from lightning_sym._text import nearest
from lightning_sym.cli.given import arguments_of, class_of, merge, read_given, separated
from lightning_sym.connectivity import curve_losses
from lightning_sym.models import construct
from lightning_sym.networks import Network, architecture_name
from lightning_sym.reports.cells import counted
from lightning_sym.tasks import SquaredDistance
from lightning_sym.weights import as_network, fit_weights, read_weights
from lightning_sym.zoo import ModelZoo

USAGE = (
    "usage: lightning-sym import --network CLASS [--network.ARGUMENT VALUE ...] --out FOLDER [--prefix PREFIX] "
    "[--data DATAMODULE [--data.ARGUMENT VALUE ...]] FILE ..."
)
HELP = """\
Makes a zoo of checkpoints that were trained elsewhere, or adds them to one.

  FILE ...             state dicts of torch.save, Lightning checkpoints or .safetensors; nothing in them is run
  --network CLASS      the class of the network, by its full path (lightning_sym's: by its name); put the folder of
                       your own module on PYTHONPATH
  --network.ARGUMENT   an argument of that class
  --out FOLDER         the folder of the zoo
  --prefix PREFIX      prefix of the weights' names, if several fit
  --data DATAMODULE    the data that they were trained on; accuracies are measured and recorded
  --data.ARGUMENT      an argument of that class"""
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
        print(USAGE, HELP, sep="\n\n")
        return
    options, files = separated(args)
    given = merge(read_given(options))
    for name in given:
        if name not in _OPTIONS:
            raise ValueError(f"import has no option '{name}'.{nearest(name, _OPTIONS)} {USAGE}")
    missing = [name for name in ("network", "out") if not class_of(given.get(name))]
    if missing or not files:
        raise ValueError(f"Missing: {', '.join(f'--{name}' for name in missing) or 'a file'}. {USAGE}")
    kind, arguments = class_of(given["network"]), arguments_of(given["network"])
    network = as_network(construct(kind, arguments, lightning_sym.networks, "network"))
    prefix = None if given.get("prefix") is None else str(given["prefix"])
    data, identity, metrics = None, None, None
    if given.get("data") is not None:
        data = construct(class_of(given["data"]), arguments_of(given["data"]), lightning_sym.datamodules, "data")()
        identity = data.identity()
        metrics = [
            _metrics(network, fit_weights(read_weights(file), network, prefix=prefix, source=file), data)
            for file in files
        ]
    zoo = ModelZoo.add(given["out"], files, network=network, prefix=prefix, data=identity, metrics=metrics)
    known = _as_options("data", given.get("data"))
    _report(zoo, files, known, regression=getattr(data, "regression", False))


def _as_options(name: str, node: Any) -> str:
    """Return the options that name a class with its arguments, as a shell takes them; without a class nothing."""
    if not class_of(node):
        return ""
    arguments = arguments_of(node)
    written = {f"--{name}": class_of(node)}
    written |= {f"--{name}.{key}": arg if isinstance(arg, str) else json.dumps(arg) for key, arg in arguments.items()}
    return "".join(f" {option} {shlex.quote(value)}" for option, value in written.items())


def _metrics(network: Network, state: Mapping[str, torch.Tensor], data: Any) -> dict[str, dict[str, float]]:
    """Return loss and accuracy, or for a regression the mean squared distance, on validation and test data."""
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
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(
                f"{architecture_name(network)} cannot be evaluated on {type(data).__name__} ({reason}); give the data "
                "that it was trained on, and the arguments that it was built with."
            ) from error
        results[split] = {"loss": float(found.loss)}
        if found.accuracy is not None:
            results[split]["accuracy"] = float(found.accuracy)
    return results


def _report(zoo: ModelZoo, files: Sequence[str], data: str, *, regression: bool) -> None:
    """Print the members, and commands that use them.

    Args:
        zoo: The zoo.
        files: Checkpoints of its last members.
        data: The options that name the data; empty if they are not known.
        regression: Whether the targets are values, not classes.
    """
    new = zoo.numbers[-len(files) :]
    for number, file in zip(new, files, strict=True):
        metrics = zoo.member(number).metrics.get("test", {})
        said = [f"accuracy {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []
        said += [f"loss {metrics['loss']:.3f}"] if metrics else []
        print(f"  member {number}: {Path(file).name}{', test ' if said else ''}{', '.join(said)}")
    package = zoo.architecture["class_path"].split(".")[0]
    own = package not in ("lightning_sym", "torchvision")
    allow = f" --model.allow '[{package}]'" if own else ""
    path = f"PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])} " if own and os.environ.get("PYTHONPATH") else ""
    print(f"  zoo     {zoo.path}, {counted(len(zoo), 'member')} of {zoo.architecture['class_path']}")
    tasks = {"matching": "matching/mnist5k_mlp", "stitching": "stitching/mnist5k"}
    if regression:
        tasks = {"matching": f"{tasks['matching']} --model.loss lightning_sym.tasks.SquaredDistance"}
    for task, recipe in tasks.items() if len(zoo) > 1 else ():
        print(
            f"  use it  {path}lightning-sym fit --config {recipe} --model.zoo {zoo.path} --model.pairs all{allow}"
            f"{data or ' --data DATAMODULE'} --run_dir {zoo.path.parent / task}"
        )
