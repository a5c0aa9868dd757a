"""``lightning-sym symmetry``: the table of a network's symmetries, of any model by its name.

This module reads the options without importing torch; :mod:`lightning_sym.models` builds the model.
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sym._checkpoint_files import check_above, check_model_folder
from lightning_sym._files import write_atomically
from lightning_sym.cli.given import read_own, shape_of, whole
from lightning_sym.cli.named import check_classes

USAGE = (
    "usage: lightning-sym symmetry NETWORK [--input SHAPE] [--tokens NUMBER] [--output NAME] [--meta] [--out FILE.json]"
)
NEEDS = "lightning_sym.models"  # imports PyTorch
HELP = f"""{USAGE}

Finds the changes of weights that leave a network's function alone, tries random ones, and prints a table.

NETWORK is one of
  torchvision:resnet50                  a model of torchvision, with random weights
  timm:vit_tiny_patch16_224             a model of timm
  transformers:path/to/config.json      a model of transformers, by its configuration
  path/to/folder                        the same in a folder with config.json, also of timm; or a zoo
  mypkg.nets.MyNet                      your class, with --network.width 8 for its arguments

  --input 3,224,224   shape of one input, without the batch (of tokens: 16); default: from the model
  --tokens 1000       the input is integers below 1000
  --output logits     which of several outputs is to stay the same: a name, or a place in a tuple
  --meta              build the network without memory for its weights; nothing can be tried on it then
  --out table.json    also write the table there

Nothing is downloaded, and no code that a file names is run. timm and transformers: pip install 'lightning_sym[hf]'."""
_OPTIONS = ("network", "input", "tokens", "output", "meta", "out")


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        network: The network's name.
        arguments: Arguments of its class, by name.
        shape: Shape of one input, without the batch.
        tokens: The input is integers below this number; None for floating numbers, or as the model says.
        output: Which output counts.
        meta: Whether to build it without weights.
        out: Where to write the table.
    """

    network: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    tokens: int | None = None
    output: str | int | None = None
    meta: bool = False
    out: Path | None = None


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is not known or has a wrong value, or there is not one network.
    """
    given, names = read_own("symmetry", args, _OPTIONS, ("meta",))
    arguments = given.get("network", {})
    if len(names) != 1:
        raise ValueError(f"Expected one network, got {', '.join(names) or 'none'}.")
    if not isinstance(arguments, Mapping):
        raise ValueError("--network takes the arguments of a class, as in --network.width 8.")
    tokens, out = whole(given, "tokens", 1), given.get("out")
    if out is not None and not str(out).endswith(".json"):
        raise ValueError(f"--out takes a file that ends in .json, got {out}.")
    return Asked(
        names[0],
        arguments,
        shape_of(given),
        tokens,
        given.get("output"),
        "meta" in given,
        None if out is None else Path(out),
    )


def look(asked: Asked) -> Asked:
    """Check the name of the network, and the place of the table.

    Raises:
        ValueError: If there is no such class or folder of a model, or the table cannot be written to its place.
    """
    if asked.out is not None:
        check_above(asked.out)
        if asked.out.is_dir():
            raise ValueError(f"{asked.out} is a folder; expected a file that ends in .json.")
    if Path(asked.network).is_dir():
        check_model_folder(asked.network)
    check_classes(network={"class_path": asked.network, **asked.arguments})
    return asked


def run(asked: Asked) -> None:
    """Build the network, trace it, print the table and write it.

    Args:
        asked: As :func:`read_options` returns it.

    Raises:
        ValueError: If the network cannot be built, traced or run on the input; nothing is written then.
        OSError: If the table cannot be written.
    """
    import torch

    from lightning_sym.models import build_model, example_of, model_in
    from lightning_sym.symmetry import trace_symmetry

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes contain what matters
        build = model_in if Path(asked.network).is_dir() else build_model
        model = build(asked.network, asked.arguments, meta=asked.meta)
        example = example_of(model, asked.shape, asked.tokens)
        symmetry = trace_symmetry(model.network, example.positional, output=asked.output, **example.keywords)
    symmetry.notes = (*model.notes, *symmetry.notes)
    print(symmetry)
    if asked.out is not None:
        inputs = [*example.positional, *example.keywords.values()]
        content = {
            "network": asked.network,
            "arguments": dict(asked.arguments),
            "inputs": [list(value.shape) for value in inputs if isinstance(value, torch.Tensor)],
            **_numbers(symmetry),
        }
        write_atomically(asked.out, json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"written to {asked.out}", file=sys.stderr)


def _numbers(symmetry: Any) -> dict[str, Any]:
    """Return the table as data."""
    tested = symmetry.elements_tried > 0
    return {
        "dimension": symmetry.dimension,
        "buffer_dimension": symmetry.buffer_dimension,
        "units": symmetry.units,
        "signs": symmetry.signs,
        "log10_permutations": symmetry.log10_permutations,
        "elements_tried": symmetry.elements_tried,
        "worst_error": symmetry.worst_error if tested else None,
        "nullity": symmetry.nullity,
        "tolerance": symmetry.tolerance if tested else None,
        "fingerprint": symmetry.fingerprint,
        "groups": symmetry.table(),
        "shifts": symmetry.shift_kinds,
        "notes": list(symmetry.notes),
    }
