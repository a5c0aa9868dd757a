"""``lightning-sym merge``: align checkpoints of one network by its symmetry, and merge their weights.

This module reads the options without importing torch.
"""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_sym._checkpoint_files import check_described, check_out, check_whole, locate
from lightning_sym._files import write_atomically
from lightning_sym._text import nearest, unknown
from lightning_sym.cli.given import (
    arguments_of,
    class_of,
    listed,
    missing_options,
    prefix_of,
    read_own,
    seed_of,
    shape_of,
    whole,
)
from lightning_sym.cli.named import check_classes

USAGE = (
    "usage: lightning-sym merge {MODEL MODEL ... | ZOO | CONFIG.yml} --out OUT [--base MODEL] [--method METHOD] "
    "[--weight 0.5,0.3] [--align auto|weights|activations|none] [--network NETWORK] [--data DATAMODULE]"
)
NEEDS = "lightning_sym.models"  # imports PyTorch
# The names are repeated here so that misspelt ones do not wait for PyTorch; those that merge differences need a base.
DIFFERENCES = (
    *("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della"),
    *("della_linear", "model_stock"),
)
METHODS = (*("linear", "slerp", "nuslerp", "karcher", "multislerp"), *DIFFERENCES, "passthrough")
HELP = f"""{USAGE}

Aligns checkpoints of one network (by permutations of units, and by scales, signs and matrices where the network allows
them), checks that each function is unchanged, and writes the merged network. Networks in one order, as fine-tunes of
one parent, are not changed.

  MODEL                a state dict, Lightning checkpoint, .safetensors, an index of shards, or a folder of transformers
                       (config.json beside weights); FOLDER+ADAPTER for a LoRA adapter on it; nothing in them is run
  ZOO                  the folder of a zoo: all of its members
  CONFIG.yml           a configuration of mergekit with local models; it replaces the options of the method
  --out OUT            a new .safetensors; a new folder if the base (else the first model) is an index or a folder, with
                       its other files. Names, types, shards are those of that model. A report is written to OUT-report

  --method METHOD      linear (default), {", ".join(METHODS[1:8])},
                       {", ".join(METHODS[8:])}
  --base MODEL         differences from it are merged; needed by the methods from task_arithmetic to model_stock
  --weight 0.5,0.3     of each model, or one number for all; likewise --density (1), --gamma, --epsilon, --scale
  --lambda 1           factor of the merged differences; --normalize true|false, --rescale, --t 0.5 likewise
  --align              auto (default): weights, where that helps; weights or activations: search in any case; none
  --align-only         write the second model, aligned to the first, its function unchanged; nothing is merged
  --recalibrate        recompute the batch norm statistics of the result; without batch norms, those of units (REPAIR)
  --ignore PATTERN     leave out tensors by name, as 'ema.*'; several patterns with commas
  --out-dtype bfloat16 type of the result
  --rank 8             rank of a merged adapter

  --network NETWORK    for files: torchvision:resnet18, timm:NAME, transformers:path/to/config.json, or a class by its
                       full path (lightning_sym's: by its name); --network.ARGUMENT for its arguments
  --data DATAMODULE    losses, barriers and a figure; needed for activations and recalibration; --data.ARGUMENT
  --points 11          points on the linear path between two networks
  --prefix PREFIX      prefix of the weights' names, if several fit
  --input 3,224,224    shape of one input, without the batch; default: from the data or the model
  --tokens 1000        the input is integers below 1000
  --seed 0             of the matching and of random masks

Nothing is downloaded. timm and transformers: pip install 'lightning_sym[hf]'."""
DTYPES = ("float16", "bfloat16", "float32", "float64")
WAYS = ("auto", "weights", "activations", "none")
_FLAGS = ("align-only", "no-align", "recalibrate")
# Settings of the methods, by their names in Python; the method checks their values.
_SETTINGS = {name: name for name in ("weight", "density", "gamma", "epsilon", "scale", "normalize", "rescale", "t")}
_SETTINGS["lambda"] = "lambda_"
_FORMULA = ("method", "base", *_SETTINGS)
_OPTIONS = (
    *("network", "out", "data", "align", "points", "prefix", "input", "tokens", "seed", "ignore", "out-dtype", "rank"),
    *(*_FORMULA, *_FLAGS),
)


@dataclass(frozen=True)
class Asked:
    """Options of the command.

    Attributes:
        files: The checkpoints, folders and zoos, or one configuration.
        out: Where the result goes.
        network: The class or the model, with its arguments; None for that of a folder.
        base: The base; None for none.
        method: Name of the method.
        settings: Settings of the method, as in Python.
        align: "auto", "weights", "activations" or "none"; None for that of the configuration, or "auto".
        align_only: Whether to write the second network, aligned to the first.
        recalibrate: Whether to recompute batch norm statistics.
        ignore: Patterns of names of tensors to leave out.
        out_dtype: Type of the result.
        rank: Rank of a merged adapter.
        data: The class of the data with its arguments; None for none.
        points: Number of points on a linear path.
        prefix: Prefix of the names of the weights.
        shape: Shape of one input.
        tokens: The input is integers below this number.
        seed: Seed of the matching and of masks; None for that of the configuration, or 0.
    """

    files: tuple[str, ...]
    out: Path
    network: Any = None
    base: str | None = None
    method: str = "linear"
    settings: Mapping[str, Any] = field(default_factory=dict)
    align: str | None = None
    align_only: bool = False
    recalibrate: bool = False
    ignore: tuple[str, ...] = ()
    out_dtype: str | None = None
    rank: int | None = None
    data: Any = None
    points: int = 11
    prefix: str | None = None
    shape: tuple[int, ...] | None = None
    tokens: int | None = None
    seed: int | None = None

    @property
    def report(self) -> Path:
        """The folder of the report."""
        return self.out.with_name(f"{self.out.name.removesuffix('.safetensors')}-report")

    @property
    def configuration(self) -> str | None:
        """The file of the configuration; None for options."""
        return self.files[0] if len(self.files) == 1 and self.files[0].endswith((".yml", ".yaml")) else None


def read_options(args: Sequence[str]) -> Asked:
    """Read the options.

    Args:
        args: The arguments after the command; not those that ask for help.

    Raises:
        ValueError: If an option is not known, missing or has a wrong value, or there are not enough checkpoints.
    """
    given, files = read_own("merge", args, _OPTIONS, _FLAGS)
    folders = [file for file in files if Path(file.partition("+")[0]).is_dir() or Path(file).is_dir()]
    folders += [file for file in files if Path(file).is_file() and Path(file).with_name("config.json").is_file()]
    configured = len(files) == 1 and files[0].endswith((".yml", ".yaml"))
    missing = [file for file in files if not (file in folders or Path(file).exists())]
    needless = bool(folders or configured or missing)  # a file that is missing is named later
    for name in ("network", "out"):
        if not class_of(given.get(name)) and not (name == "network" and name not in given and needless):
            raise ValueError(missing_options([name]))
    method = given.get("method", "linear")
    if method in ("weights", "activations"):
        raise ValueError(f"{method} says how to align, not how to merge: --align {method}.")
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    if (out_dtype := given.get("out-dtype")) not in (None, *DTYPES):
        raise ValueError(unknown("word of --out-dtype", out_dtype, DTYPES))
    align = "none" if "no-align" in given else given.get("align")
    if align is not None and align not in WAYS:
        raise ValueError(f"--align takes {', '.join(WAYS)}, got {align!r}.{nearest(str(align), WAYS)}")
    if "no-align" in given and given.get("align", "none") != "none":
        raise ValueError(f"--no-align and --align {given['align']} contradict each other; leave one of them out.")
    if configured and (twice := [name for name in _FORMULA if name in given]):
        raise ValueError(f"--{twice[0]} is set by {files[0]}; change it there.")
    alone = folders or configured or "base" in given or method == "passthrough"
    if not files or (len(files) < 2 and not alone):
        raise ValueError(f"Expected two or more checkpoints, got {', '.join(files) or 'none'}.")
    return Asked(
        files=tuple(files),
        out=Path(str(given["out"])),
        network=given.get("network"),
        base=None if given.get("base") is None else str(given["base"]),
        method=str(method),
        settings={own: _values(name, given[name]) for name, own in _SETTINGS.items() if name in given},
        align=align,
        align_only="align-only" in given,
        recalibrate="recalibrate" in given,
        ignore=listed(given, "ignore"),
        out_dtype=None if given.get("out-dtype") is None else str(given["out-dtype"]),
        rank=whole(given, "rank", 1),
        data=given.get("data"),
        points=whole(given, "points", 2, 11),
        prefix=prefix_of(given),
        shape=shape_of(given),
        tokens=whole(given, "tokens", 1),
        seed=seed_of(given),
    )


def look(asked: Asked) -> Asked:
    """Check files, folders and names of classes.

    Raises:
        ValueError: If there is no such file or class, nothing says what the network is, or the result cannot be written
            to its place.
    """
    if asked.report.exists():
        raise ValueError(
            f"{asked.report} exists already, the report of an earlier merge; remove it, or choose another --out."
        )
    check_classes(network=asked.network, data=asked.data)
    if asked.configuration is not None:
        if not Path(asked.configuration).is_file():
            raise ValueError(f"There is no file {os.path.abspath(asked.configuration)}; expected a configuration.")
        return asked
    found = [locate(file) for file in asked.files]
    if all(one.is_adapter for one in found):
        return asked
    check_whole(found)
    first = found[0] if asked.base is None else locate(asked.base)
    if asked.base is None and asked.method in DIFFERENCES and not asked.align_only:
        raise ValueError(f"{asked.method} needs a base, the parent of the models; pass base (--base).")
    others = len(found) - (asked.base in asked.files)
    for name, value in asked.settings.items() if not any(one.is_zoo for one in found) else ():
        if isinstance(value, list) and len(value) not in (len(found), others):
            raise ValueError(
                f"--{name} holds {len(value)} values for {others} models; expected one for all, or one for each."
            )
    if asked.network is None:
        check_described(first)
    for needed, what in ((asked.align == "activations", "--align activations"), (asked.recalibrate, "--recalibrate")):
        if needed and asked.data is None:
            raise ValueError(f"{what} needs data to run the networks on; give --data.")
    check_out(asked.out, found[1] if asked.align_only and len(found) > 1 else first)
    return asked


def _values(name: str, given: Any) -> Any:
    """Return the value of a setting; numbers that were written with commas as a list.

    Raises:
        ValueError: If it is no number, or where the setting is a choice, neither true nor false.
    """
    if name in ("normalize", "rescale"):
        if not isinstance(given, bool):
            raise ValueError(f"--{name} takes true or false, got {given!r}.")
        return given
    if isinstance(given, list):
        return given
    try:
        found = [float(part) for part in str(given).split(",")]
    except ValueError:
        raise ValueError(
            f"--{name} takes a number, or one for each model with commas, as in 0.5,0.3; got {given!r}."
        ) from None
    return found if "," in str(given) else found[0]


def run(asked: Asked) -> None:
    """Merge checkpoints, write the result and its report, and print the comparison.

    Args:
        asked: As :func:`read_options` returns it.

    Raises:
        ValueError: If something does not fit; nothing is written then.
        OSError: If a file is missing or cannot be written.
    """
    from lightning_sym.cli.importing import make_data, sizes_named, with_sizes
    from lightning_sym.merging import MergeConfig, merge_checkpoints
    from lightning_sym.merging.adapters import is_adapter
    from lightning_sym.merging.checkpoint import find_checkpoints, model_of
    from lightning_sym.merging.config import trusted_class
    from lightning_sym.models import build_light, build_model, example_of
    from lightning_sym.reports.merging import merging_results
    from lightning_sym.symmetry.files import new_folder

    config = None if asked.configuration is None else MergeConfig.read(asked.configuration)
    if all(map(is_adapter, asked.files)) or (config is not None and config.of_adapters):
        return _merge_adapters(asked, config)
    if asked.rank is not None:
        raise ValueError("--rank is that of merged adapters; leave it out, or give folders of adapters alone.")
    data = None if asked.data is None else make_data(asked.data)
    if config is not None and config.data is not None and data is None:
        data = _data(*trusted_class(config.data, "lightning_sym.datamodules", str(config.file)))
    identity = None if data is None else data.identity()  # reads the data, which tell whether targets are numbers
    loss = None if data is None else _loss(data)
    options: dict[str, Any] = {
        "align_only": asked.align_only,
        "data": None if data is None else data.test_dataloader(),
        "train": None if data is None else data.curvature_dataloader(),
        "loss": loss,
        "points": asked.points,
        "prefix": asked.prefix,
        "progress": sys.stderr.isatty(),
    }
    given = {"align": asked.align, "ignore": asked.ignore, "out_dtype": asked.out_dtype, "seed": asked.seed}
    given |= {"recalibrate": asked.recalibrate}
    options |= {name: value for name, value in given.items() if value}
    about: dict[str, Any] = {"seed": asked.seed or 0}
    model = None
    if asked.network is not None:
        name = class_of(asked.network)
        about |= {"network": name, "arguments": with_sizes(name, arguments_of(asked.network), data)}
        model = build_light(functools.partial(build_model, about["network"], about["arguments"]))
        options["network"] = model.network
    elif asked.shape or asked.tokens:
        first = asked.base or asked.files[0] if config is None else config.base or config.models[0]
        model = model_of(find_checkpoints(first)[0])
    if data is not None and asked.shape is None:
        options["inputs"] = next(iter(data.test_dataloader()))[0][:2]
    elif model is not None:
        options["inputs"] = example_of(model, asked.shape, asked.tokens)
    own = sizes_named(class_of(asked.network), arguments_of(asked.network), data)
    if identity is not None:
        about["data"] = identity
    place = asked.out.parent
    # Weights and report appear together, at the end: the same command starts an interrupted one again.
    with new_folder(place, [asked.report.name, asked.out.name]) as folder:
        out = folder / asked.out.name
        with errors_named(about.get("network", asked.files[0]), data, given="network" in about), own:
            if config is not None:
                found = config.run(out, **options)
            else:
                found = merge_checkpoints(
                    asked.files, out, base=asked.base, method=asked.method, **options, **asked.settings
                )
        found = replace(found, out=place / found.out.relative_to(folder))
        results = merging_results(found, about, None if loss is None else "mean squared distance")
        _write_report(results, folder / asked.report.name)
    _print(asked, found, results)


def _data(name: str, arguments: Mapping[str, Any]) -> Any:
    import lightning_sym.datamodules  # imports Lightning, which merging without data does not need
    from lightning_sym.models import construct

    return construct(name, arguments, lightning_sym.datamodules, "data")()


def _loss(data: Any) -> Any:
    """Return the loss of a regression; None for the default."""
    if not getattr(data, "regression", False):
        return None
    from lightning_sym.tasks import SquaredDistance

    return SquaredDistance()


def _merge_adapters(asked: Asked, config: Any) -> None:
    """Merge adapters without their network, and print the errors of the methods.

    Raises:
        ValueError: If an option does not apply to adapters, or they do not fit each other. Nothing is written then.
    """
    from lightning_sym.merging import MergeSettings
    from lightning_sym.merging.card import write_merged_adapters
    from lightning_sym.merging.methods import merge_method

    others = {"base": asked.base, "network": asked.network, "data": asked.data, "recalibrate": asked.recalibrate}
    others |= {
        "align": asked.align != "none" and asked.align,
        "prefix": asked.prefix,
        "align-only": asked.align_only,
        "ignore": asked.ignore,
        "out-dtype": asked.out_dtype,
    }
    if useless := [name for name, value in others.items() if value]:
        raise ValueError(f"--{useless[0]} does not apply to adapters alone; expected MODEL+ADAPTER, or leave it out.")
    if config is not None:
        if twice := [name for name in ("rank", "seed") if getattr(asked, name) is not None]:
            raise ValueError(f"--{twice[0]} of adapters is set by {config.file}; change it there.")
        merged = config.merge_adapters(asked.out)
    else:
        based = merge_method(asked.method).base == "needed"  # zero is their base
        settings = MergeSettings.of(
            asked.method, len(asked.files), has_base=based, seed=asked.seed or 0, **asked.settings
        )
        merged = write_merged_adapters(asked.files, settings, asked.out, rank=asked.rank)
    print(merged)
    print(f"  adapter {asked.out}")


def _write_report(results: Any, folder: Path) -> None:
    from lightning_sym.figures import write_figure

    for table in results.tables:
        table.write(folder)
    for name, figure in results.figures:
        write_figure(figure, folder / f"{name}.png")
    for name, content in results.files.items():
        write_atomically(folder / name, content)


def _print(asked: Asked, found: Any, results: Any) -> None:
    """Print tables and notes, and where the files are."""
    from rich.console import Console

    from lightning_sym.reports.merging import EXPLAINED

    console = Console(width=80)
    method = "aligned" if found.align_only else f"merged by {found.settings.method.name}"
    base = f", base {found.names[0]}" if found.has_base else ""
    console.print(f"{len(found.names)} networks, {method}{base}", highlight=False, markup=False)
    shown = [table for table in results.tables if table.name != "curves"]
    for table in shown:
        table.show(console)
    for name in EXPLAINED:
        if any(name in table.columns for table in shown):
            console.print(f"  {name}: {shown[0].units[name]}", highlight=False, markup=False)
    for note in results.notes:
        console.print(f"  {note}", highlight=False, markup=False)
    console.print(f"  weights {found.out}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  report  {asked.report}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def errors_named(network: str, data: Any, *, given: bool = True) -> Iterator[None]:
    """Add network and data to the errors of torch.

    Args:
        network: Name of the network.
        data: The datamodule; None for random inputs.
        given: Whether the network is that of ``--network``.

    Raises:
        ValueError: Instead of an error of torch.
    """
    from lightning_sym._checks import UnfitInputsError, reason_of

    try:
        with warnings.catch_warnings():  # the notes contain what matters
            warnings.filterwarnings("ignore", message="parameters that evaluation never uses")
            yield
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        from lightning_sym.symmetry.moves.moved import ChangedFunctionError

        unfit = isinstance(error, UnfitInputsError) or str(error).startswith("loss cannot be computed")
        if isinstance(error, ValueError) and not unfit:
            raise
        if isinstance(error, ChangedFunctionError):
            raise ValueError(f"{error}; nothing was written") from error
        of = "its own example" if data is None else type(data).__name__
        rest = "the arguments that it was built with" if given else "check its configuration"
        raise ValueError(
            f"{network} cannot be run on {of} ({reason_of(error)}); give the data that it was trained on, and {rest}."
        ) from error
