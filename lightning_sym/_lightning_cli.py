"""LightningCLI with run folders, recipes and one-line errors."""

import inspect
import logging
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.warnings import PossibleUserWarning

# Their classes can be named without their full path, on the command line and in recipes.
import lightning_sym.callbacks
import lightning_sym.datamodules
import lightning_sym.networks
import lightning_sym.tasks
from lightning_sym._files import write_atomically
from lightning_sym._metrics_csv import MetricsCSV
from lightning_sym.cli import TRACEBACK, USAGE

_SECTIONS = [
    "model",
    "data",
    "trainer",
    "checkpoint",
    "run_dir",
    "overwrite",
    "seed_everything",
    "ckpt_path",
    "config",
]


class RecipeParser(LightningArgumentParser):
    """A parser whose errors are one line, with the nearest valid name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what was wrong and exit with status 2."""
        if ex is not None and show_traceback():
            raise ex
        print(f"lightning-sym: error: {explain(message)}", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)


def explain(message: str) -> str:
    """Return a parser's message on one line, with the nearest valid name where a name was not known."""
    line = " ".join(message.split())
    if match := re.search(r"Option '([^']+)' is not accepted|[Uu]nrecognized arguments: (?:--)?([^\s=]+)", line):
        given = match[1] or match[2]
        head, _, rest = given.partition(".")
        wrong = head if not rest or head not in _SECTIONS else given.rsplit(".", 1)[-1]
        return f"Unknown option {given!r}.{_hint(wrong, _SECTIONS if wrong == head and rest else _option_names())}"
    if match := re.search(r"module '[\w.]+' has no attribute '(\w+)'", line):
        return f"{line}.{_hint(match[1], _class_names())}"
    if match := re.search(r"Expected a dot import path string: (\S+)", line):
        return f"Unknown class {match[1]!r}; give the full path, or the name of one of ours.{_hint(match[1], _class_names())}"
    # A type error inside a class is reported for each type that would have been possible; the first is ours.
    if match := re.search(r"Errors: - (.+?)(?: - Expected a <class 'NoneType'>| Given value type:|$)", line):
        line = match[1]
    return line


def root_cause(error: BaseException) -> BaseException:
    """Return the error that a parser wrapped while it built classes; other errors as they are."""
    if not type(error).__module__.startswith(("jsonargparse", "argparse", "builtins")):
        return error
    innermost = error
    while (inner := innermost.__cause__ or innermost.__context__) is not None:
        innermost = inner
    frames = traceback.extract_tb(error.__traceback__)
    return innermost if frames and "jsonargparse" in frames[-1].filename else error


def show_traceback() -> bool:
    """Return whether the user asked for tracebacks."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _hint(given: str, names: Iterable[str]) -> str:
    nearest = get_close_matches(given, sorted(set(names)), n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _classes() -> dict[str, type]:
    rooms = (lightning_sym.callbacks, lightning_sym.datamodules, lightning_sym.networks, lightning_sym.tasks)
    named = {name: getattr(room, name) for room in rooms for name in room.__all__}
    return {name: value for name, value in named.items() if isinstance(value, type)}


def _class_names() -> list[str]:
    return list(_classes())


def _option_names() -> list[str]:
    kinds = [Trainer, ModelCheckpoint, *_classes().values()]
    return [*_SECTIONS, *(name for kind in kinds for name in inspect.signature(kind).parameters)]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are whole or absent, also when the process is killed or the disk is full."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write under a temporary name in the same folder, then rename."""
        buffer = BytesIO()
        torch.save(checkpoint, buffer)
        write_atomically(path, buffer.getvalue())


class RecipeCLI(LightningCLI):
    """The command line of ``lightning-sym`` from ``fit`` on.

    On top of LightningCLI: a run folder (``--run_dir``) that holds everything a run leaves behind, sizes linked
    from the data into the network, ``--ckpt_path last`` that fails when there is nothing to resume, and model
    settings of the command line that win over those of a checkpoint.

    Args:
        args: Command and options.
    """

    def __init__(self, args: Sequence[str]) -> None:
        for name in ("pytorch_lightning", "lightning_fabric"):  # no advertisements, no list of absent devices
            for part in ("utilities.rank_zero", "utilities.seed"):
                logging.getLogger(f"{name}.{part}").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", category=PossibleUserWarning)
        # Lightning 2.6 on torch >= 2.13; nothing that a user could act on.
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=RecipeParser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            args=list(args),
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; settings that a checkpoint holds come first, so that a recipe and the command line win."""
        with tempfile.TemporaryDirectory() as folder:
            self.config = parser.parse_args(_with_checkpoint_settings(args, Path(folder)))

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and the checkpoint, and link the data's sizes into the network."""
        parser.add_argument(
            "--run_dir",
            type=str,
            default="runs/default",
            help="Folder for everything that the run leaves behind.",
        )
        parser.add_argument(
            "--overwrite",
            type=bool,
            default=False,
            help="Replace the run that run_dir holds: its logs, checkpoints, results, and members of the same numbers.",
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                # One file, last.ckpt, written anew after every epoch (not after validation, which comes before the
                # epoch's end: a run resumed from there would miss what tasks do at the end of an epoch).
                "checkpoint.filename": "last",
                "checkpoint.enable_version_counter": False,
                "checkpoint.save_on_train_epoch_end": True,
                "checkpoint.auto_insert_metric_name": False,
            }
        )
        for size in ("in_channels", "image_size", "num_classes"):
            parser.link_arguments(f"data.{size}", f"model.init_args.network.init_args.{size}", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Leave the settings as given: those of a checkpoint came first, so that the command line wins."""

    @property
    def _run_dir(self) -> Path:
        return Path(self._get(self.config, "run_dir"))

    def before_instantiate_classes(self) -> None:
        """Prepare the run folder and find the checkpoint, before anything is built."""
        config = self.config[self.subcommand]
        if config.get("ckpt_path") == "last":
            last = self._run_dir / "checkpoints" / "last.ckpt"
            if not last.is_file():
                raise FileNotFoundError(
                    f"Nothing to go on from: {last.absolute()} does not exist (the first checkpoint is written after "
                    "the first epoch); start the run without --ckpt_path."
                )
            config.ckpt_path = str(last)
        elif config.get("ckpt_path") and not Path(config.ckpt_path).is_file():
            raise FileNotFoundError(f"No checkpoint at {Path(config.ckpt_path).absolute()}; give a file, or last.")
        if self.subcommand == "fit":
            self._prepare_run_dir(config)

    def _earlier_run(self) -> list[Path]:
        """Return what an earlier run left in the run folder; the zoo is no part of it."""
        names = ("config.yaml", "hparams.yaml", "checkpoints", "results", "metrics.csv")
        paths = [self._run_dir / name for name in names]
        return [path for path in paths if path.exists()] + list(self._run_dir.glob("events.out.tfevents.*"))

    def _prepare_run_dir(self, config: Any) -> None:
        for callback in config.trainer.get("callbacks") or []:
            if callback.get("class_path", "").endswith("ZooExport") and config.overwrite:
                callback.init_args.overwrite = True
        if rank_zero_only.rank != 0 or config.trainer.get("fast_dev_run"):
            return
        run_dir = self._run_dir
        if not config.get("ckpt_path") and not config.overwrite and self._earlier_run():
            raise ValueError(
                f"{run_dir} already holds a run; go on with it (--ckpt_path last), put this one elsewhere "
                "(--run_dir FOLDER), or replace it (--overwrite true)."
            )
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run_dir):
                pass
        except OSError as error:
            raise OSError(
                error.errno,
                f"The run folder {run_dir.absolute()} cannot be written to ({error.strerror}); choose another one with "
                "--run_dir",
            ) from None

    def before_fit(self) -> None:
        """Remove an earlier run that is to be replaced; all that could be checked has been by now."""
        config = self.config[self.subcommand]
        if rank_zero_only.rank != 0 or self.trainer.fast_dev_run or config.get("ckpt_path") or not config.overwrite:
            return
        for path in self._earlier_run():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with the run folder's loggers and checkpoints; a logger set by the user stays."""
        config = self._get(self.config_init, "trainer")
        run_dir = self._run_dir
        if config.get("logger") in (None, True):
            kwargs["logger"] = [
                TensorBoardLogger(save_dir=run_dir.parent, name=run_dir.name, version=""),
                MetricsCSV(run_dir),
            ]
        if config.get("default_root_dir") is None:
            kwargs["default_root_dir"] = str(run_dir)
        plugins = config.get("plugins") or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        callbacks = config.get("callbacks") or []
        bars = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config.get("enable_progress_bar") is not False and not bars:
            kwargs["callbacks"] = [*callbacks, TQDMProgressBar()]  # one line, also in a narrow terminal
        checkpoint = self._get(self.config_init, "checkpoint")
        if checkpoint.dirpath is None:
            checkpoint.dirpath = str(run_dir / "checkpoints")
        return super().instantiate_trainer(**kwargs)


def _with_checkpoint_settings(args: list[str], folder: Path) -> list[str]:
    """Put the model settings that a checkpoint holds in front of all others, as a config file.

    Args:
        args: Command and options.
        folder: Where the config file is written.
    """
    given = [arg.removeprefix("--ckpt_path=") for arg in args if arg.startswith("--ckpt_path=")]
    given += [value for arg, value in zip(args, args[1:], strict=False) if arg == "--ckpt_path"]
    if not given or not Path(given[-1]).is_file():
        return args
    settings = torch.load(given[-1], weights_only=True, map_location="cpu").get("hyper_parameters", {})
    class_path = settings.pop("_class_path", None)
    if class_path is None:  # written from Python, without the command line
        return args
    settings.pop("_instantiator", None)
    file = folder / "checkpoint.yaml"
    file.write_text(yaml.safe_dump({"model": {"class_path": class_path, "init_args": settings}}))
    return [args[0], "--config", str(file), *args[1:]]
