"""LightningCLI with run folders, recipes and one-line errors."""

import atexit
import inspect
import logging
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import jsonargparse
import torch
import yaml
from jsonargparse import Namespace, _typehints
from jsonargparse._parameter_resolvers import get_signature_parameters
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelSummary, ProgressBar, TQDMProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.warnings import PossibleUserWarning  # type: ignore[attr-defined]
from safetensors.torch import save as save_safetensors

import lightning_sym.tasks  # noqa: F401 (classes that have been imported can be named without their full path)
from lightning_sym._checkpoint_files import TORCH, other_format
from lightning_sym._claims import Claim
from lightning_sym._files import TooLargeError, load_yaml, remove_abandoned, write_atomically
from lightning_sym._text import USAGE
from lightning_sym._trust import SETTINGS, check_settings, resolve
from lightning_sym.callbacks import FigureFiles, ZooExport, publish_text
from lightning_sym.cli.annotations import fitting_size, takes_anything, unsaid_pair, unsubscripted
from lightning_sym.cli.checkpoints import AtomicCheckpointIO, RunCheckpoint
from lightning_sym.cli.given import LINKED, classes, full_path, merge, read_given
from lightning_sym.cli.loggers import MetricsCSV, RunTensorBoard
from lightning_sym.cli.messages import class_at, explain, first_missing, object_at, show_traceback
from lightning_sym.cli.places import check_checkpoint, check_run_folder, named_modules
from lightning_sym.cli.processes import watch_over
from lightning_sym.cli.requirements import Requirement, find_requirements, make, redirect
from lightning_sym.cli.summary import RunSummary
from lightning_sym.cli.watch import Watch
from lightning_sym.networks import Network, build


class RecipeParser(LightningArgumentParser):
    """A parser that reports errors in one line, with the nearest valid name.

    Args:
        kwargs: Passed on.

    Attributes:
        given: The options that are being parsed.
        refused: Why YAML among them was not read; empty if all was.
    """

    given: ClassVar[Mapping[str, Any]] = {}
    refused: ClassVar[str] = ""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)  # --trainer.max_epoch is a misspelling, not max_epochs

    def format_help(self, *args: Any) -> str:
        """Return the help; options of a class within a class are named by their whole path."""
        text: str = super().format_help(*args)
        if match := re.match(r"Help for --(\S+)\.help=", self.description or ""):
            path = full_path(self.given, f"{match[1]}.help").removesuffix(".help")
            text = re.sub(rf"--{re.escape(match[1])}(?=[.\s=])", f"--{path}", text)
        return text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with status 2."""
        if ex is not None and show_traceback():
            raise ex
        print(f"lightning-sym: error: {self.refused or explain(message, self.given)}", file=sys.stderr)
        print(USAGE, file=sys.stderr)
        raise SystemExit(2)

    def _add_signature_parameter(
        self, container: Any, nested_key: str | None, param: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add an argument of a class or function, with an annotation that jsonargparse supports."""
        param = replace(param, annotation=unsubscripted(param.annotation))
        return super()._add_signature_parameter(container, nested_key, param, *args, **kwargs)

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add an instantiator that is not told of sizes which the class it builds does not take.

        jsonargparse reports every link to Lightning's instantiator, even without a target. Lightning would store these
        links in the checkpoint or fail: tasks need not have a network, nor networks all sizes.
        """

        def instantiate(
            kind: type, /, *values: Any, applied_instantiation_links: Mapping[str, Any], **named: Any
        ) -> object:
            network = named.get("network")
            taken = set() if network is None else {one.name for one in get_signature_parameters(type(network))}
            links = {key: value for key, value in applied_instantiation_links.items() if key.split(".")[-1] in taken}
            return instantiator(kind, *values, applied_instantiation_links=links, **named)

        super().add_instantiator(instantiate, *args, **kwargs)


class RunConfig(SaveConfigCallback):
    """Write the settings of a command into the run folder: ``config.yaml`` of a fit, else ``config_<command>.yaml``.

    ``fit --config config.yaml`` repeats the run: the file does not say that the run was resumed or that it replaced
    another one. It is written when training can start, so that errors in settings or data do not cost the earlier run.

    Args:
        settings: As for ``SaveConfigCallback``: the parser, the settings, and how they are written.
        replaced: Files and folders of the run that is replaced.
        options: As for ``SaveConfigCallback``.
    """

    def __init__(self, *settings: Any, replaced: Sequence[Path] = (), **options: Any) -> None:
        super().__init__(*settings, **options)
        self._replaced = replaced

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the settings of other commands than fit."""
        if stage != "fit":
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the earlier run and write the settings of this one."""
        for path in self._replaced if trainer.is_global_zero else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self.config = self.config.clone()
        self.config.ckpt_path, self.config.overwrite = None, False
        super().setup(trainer, pl_module, "fit")
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, RunTensorBoard):
                logger.headline = logger.headline or getattr(pl_module, "shown", None)
                logger.show_first(pl_module, *trainer.callbacks)  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            text = self.parser.dump(self.config, skip_none=False, skip_default=True)  # also repeats the run
            publish_text(trainer, text, "config")


class RecipeCLI(LightningCLI):
    """The command line of ``lightning-sym`` from ``fit`` on.

    It extends LightningCLI. A run folder (``--run_dir``) holds all files of a run. Sizes of the data are linked into
    the network. ``--ckpt_path last`` fails if there is nothing to resume. Model settings of the command line override
    those of a checkpoint.

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
        # val_fraction 0 asks for an empty validation split.
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        # Going on with a run, or testing its checkpoint from another folder, is nothing to warn of.
        warnings.filterwarnings("ignore", message="(Checkpoint directory .* is not empty|The dirpath has changed from)")
        self._command = args[0]
        self._made: list[Path] = []
        self._claim: Claim | None = None
        with self._leaving_no_empty_folder():
            self._start(args)

    @contextmanager
    def _leaving_no_empty_folder(self) -> Iterator[None]:
        """Let others use the run folder, and remove it if the run failed before it had anything to leave there."""
        try:
            yield
        except BaseException:
            self._release()
            for folder in self._made:
                with suppress(OSError):  # something is there
                    folder.rmdir()
            raise
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def _start(self, args: Sequence[str]) -> None:
        super().__init__(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=RecipeParser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            args=list(args),
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # there it is static
        """Return the command that was given, alone: parsers for all four were half of the time before a run starts."""
        return {self._command: LightningCLI.subcommands()[self._command]}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; settings that a checkpoint holds come first, so that a recipe and the command line win."""
        options = _with_checkpoint_settings(args)
        self._given = read_given(options[1:])
        RecipeParser.given = merge(self._given)  # on the class, as nested parsers also report errors
        RecipeParser.refused = ""
        self.config = parser.parse_args(options)
        if missing := first_missing(RecipeParser.given):
            parser.error(missing)
        self._allow(named_modules(list(args)[1:]))

    def _allow(self, modules: Sequence[str]) -> None:
        """Trust the modules of classes that the command line names, as if they were in ``allow``."""
        settings = self.config[self._command].get("model", {}).get("init_args")
        if modules and settings is not None and "allow" in settings:
            settings["allow"] = list(dict.fromkeys([*(settings["allow"] or ()), *modules]))

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and the checkpoint, and link the data's sizes into the network."""
        parser.add_argument(
            "--run_dir",
            type=str,
            default="runs/default",
            help="Folder for all files of the run.",
        )
        parser.add_argument(
            "--overwrite",
            type=bool,
            default=False,
            help="Replace the run that run_dir holds: its logs, checkpoints, results, and members of the same numbers.",
        )
        parser.add_argument(
            "--log_details",
            type=bool,
            default=False,
            help="Show curves of single members, pairs and layers in TensorBoard as well, below details/; metrics.csv "
            "always has them.",
        )
        parser.add_argument(
            "--figures", type=Literal["png", "pdf", "svg"], default="png", help="Write figures in this format as well."
        )
        parser.add_argument(
            "--figure_size",
            type=Literal["column", "page"] | None,
            default=None,
            help="Width of figures: a column (3.25 inches) or a page (6.75 inches) of a paper; default as drawn.",
        )
        parser.add_argument(
            "--zoo_dir", type=str | None, default=None, help="Zoo that members are exported to; default run_dir/zoo."
        )
        parser.add_argument(
            "--requires",
            type=dict[str, str] | None,
            default={},
            help="Recipes that make the inputs of the run, by the option of their folder, for example "
            "{model.zoo: zoo/mnist5k}; fit runs them first if the folder is not there. Null for none.",
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                # Not all there are: a recipe's batch size, and so its result, is that of one.
                "trainer.devices": 1,
                # One file, last.ckpt, rewritten after every epoch. Validation precedes the epoch's end: a run resumed
                # from there would miss the work of tasks at the end of an epoch.
                "checkpoint.filename": "last",
                "checkpoint.enable_version_counter": False,
                "checkpoint.save_on_train_epoch_end": True,
                "checkpoint.auto_insert_metric_name": False,
            }
        )
        for size in LINKED:
            parser.link_arguments(
                f"data.{size}",
                f"model.init_args.network.init_args.{size}",
                compute_fn=partial(self._fitting, size),
                apply_on="instantiate",
            )

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        self.parser.add_instantiator(self._make_module, torch.nn.Module, subclasses=True)

    def _dump_config(self) -> None:
        """Dump the settings once; a network that takes nothing but sizes has a place for those that are linked."""
        super()._dump_config()
        network = (self.config_dump.get("model", {}).get("init_args") or {}).get("network")
        if isinstance(network, dict):
            network.setdefault("init_args", {})

    def _network(self) -> Any:
        """Return the class, or function, of the network in the settings; None if there is none."""
        network = (self._get(self.config, "model").get("init_args") or {}).get("network")
        return object_at(network.class_path) if isinstance(network, Namespace) else None

    def _fitting(self, name: str, size: Any) -> Any:
        kind = self._network()
        return size if kind is None else fitting_size(kind, name, size)

    def _make_module(
        self, kind: type, /, *args: Any, applied_instantiation_links: Mapping[str, Any], **named: Any
    ) -> object:
        """Make a module; wrap one that is given as network and is no ``Network``, if its package is allowed."""
        settings = self._get(self.config, "model").get("init_args") or {}
        path = (settings.get("network") or {}).get("class_path", "")
        try:
            if issubclass(kind, Network) or class_at(path) is not kind:
                return kind(*args, **named)
            return build({"class_path": path, "init_args": named}, settings.get("allow") or ())
        except TypeError as error:
            if pair := unsaid_pair(kind, named):
                reason = str(error).partition(", but")[0]  # torch adds all signatures
                raise ValueError(
                    f"{kind.__name__} does not take the data's {pair}, height and width of the images ({reason}); "
                    "if it takes the side of square ones, annotate the argument as int."
                ) from error
            raise

    def _parse_ckpt_path(self) -> None:
        """Do nothing: settings of a checkpoint have been read already, before those of the command line."""

    @property
    def _run_dir(self) -> Path:
        return Path(self._get(self.config, "run_dir"))

    def before_instantiate_classes(self) -> None:
        """Prepare the run folder and find the checkpoint, before anything is built."""
        config = self.config[self.subcommand]
        torch.backends.cudnn.deterministic = True  # gradients of convolutions differ from run to run otherwise
        if self.subcommand != "fit" or config.get("ckpt_path") is not None:  # untrained weights are never meant
            config.ckpt_path = str(check_checkpoint(self._command, self._run_dir, config.get("ckpt_path")))
        self._required: list[Requirement] = []
        self._trial: Path | None = None
        if self.subcommand == "fit":
            self._prepare_run_dir(config)
            required = find_requirements(config.requires, config, self._given)
            self._required = [requirement for requirement in required if not requirement.met]
            if self._required and config.trainer.get("fast_dev_run"):
                self._try_requirements(config)

    def _try_requirements(self, config: Namespace) -> None:
        """Run the requirements of a trial as further trials, in a temporary folder."""
        self._trial = Path(tempfile.mkdtemp(prefix="lightning-sym-"))
        atexit.register(shutil.rmtree, self._trial, ignore_errors=True)
        folders: dict[tuple[str, Path], Path] = {}  # one for options that name the same folder
        for number, requirement in enumerate(self._required):
            folder = folders.setdefault((requirement.recipe, requirement.folder), self._trial / str(number))
            self._required[number] = replace(requirement, folder=folder)
            redirect(config, requirement.option, self._required[number].folder)

    def _prepare_run_dir(self, config: Any) -> None:
        if rank_zero_only.rank or config.trainer.get("fast_dev_run"):  # type: ignore[attr-defined]
            return
        run_dir = self._run_dir
        try:
            self._made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=run_dir):
                pass
        except OSError as error:
            raise OSError(
                error.errno,
                f"The run folder {run_dir.absolute()} cannot be written to ({error.strerror}); choose another one with "
                "--run_dir",
            ) from None
        self._claim = Claim(
            run_dir, "run", None, f"The run folder {run_dir}", "wait for it, or choose another one with --run_dir"
        )
        if not config.get("ckpt_path"):
            replaced = check_run_folder(run_dir, overwrite=config.overwrite)
            self.save_config_kwargs["replaced"] = replaced
            if replaced and not config.overwrite:
                print(f"{run_dir} holds a run without a finished epoch, which is replaced", file=sys.stderr)
        for folder in (run_dir, run_dir / "checkpoints", run_dir / "results"):
            remove_abandoned(folder)

    def after_instantiate_classes(self) -> None:
        """Check sizes that were given, and let members be replaced where the run is."""
        self._check_sizes()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ZooExport):
                callback.overwrite |= self._get(self.config, "overwrite")
                callback.dirpath = self._get(self.config, "zoo_dir") or callback.dirpath

    def _check_sizes(self) -> None:
        """Check that sizes follow from the data also where they were given: those of the data are used."""
        if (kind := self._network()) is None:
            return
        network = self._get(self.config, "model").init_args.network
        parameters = {one.name: one.default for one in get_signature_parameters(kind)}
        if parameters.keys().isdisjoint(LINKED) and takes_anything(kind):
            warnings.warn(
                f"{kind.__name__} takes arguments of any name (**), so that nothing says which sizes it needs: "
                f"{', '.join(LINKED)} of the data are not handed to it; name them in its constructor.",
                stacklevel=2,
            )
        for name in LINKED:
            given, default = (
                tuple(one) if isinstance(one, list) else one
                for one in (network.get("init_args", {}).get(name), parameters.get(name))
            )
            follows = getattr(self.datamodule, name, None)
            if name not in parameters or follows is None or given in (None, default):
                continue
            if given != follows and (given, given) != follows:
                raise ValueError(
                    f"model.network.{name} is set to {given}, but follows from the data: {follows} with "
                    f"{type(self.datamodule).__name__}; leave it out, or choose data that fit."
                )

    def _run_subcommand(self, subcommand: str) -> None:
        """Meet the requirements of the run and run the command.

        If it fails, the processes that it started, which would wait for this one, are ended.
        """
        for requirement in self._required:
            if requirement.met:  # by another option's
                continue
            make(requirement, self._get(self.config, "trainer"), self._trial)
        try:
            super()._run_subcommand(subcommand)
        except Exception:
            kill = getattr(self.trainer.strategy.launcher, "kill", None)
            if kill is not None:
                kill(signal.SIGTERM)
            raise

    def predict(self, **kwargs: Any) -> None:
        """Run ``Trainer.predict`` and write the predictions to ``results/predictions.safetensors``.

        Raises:
            ValueError: If there are several processes: each would see a share of the images.
        """
        if self.trainer.world_size > 1:
            raise ValueError(f"predict runs in one process, got {self.trainer.world_size}; set --trainer.devices 1.")
        batches = self.trainer.predict(**{**kwargs, "return_predictions": True})
        tensors = [batch.cpu() for batch in batches or [] if isinstance(batch, torch.Tensor)]
        if not tensors or len(tensors) < len(batches or []):
            return  # fast_dev_run, or callbacks of the task store its predictions
        # The last axis indexes the outputs of an image, the axis before it the images.
        predictions = torch.cat(tensors, dim=-2)
        file = self._run_dir / "results" / "predictions.safetensors"
        write_atomically(file, save_safetensors({"predictions": predictions.contiguous()}))
        print(f"  predictions, shape {list(predictions.shape)}: {file}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with the run folder's loggers and checkpoints, and with the user's own."""
        config = self._get(self.config_init, "trainer")
        run_dir = self._run_dir
        kwargs["logger"] = self._loggers(config.get("logger"), config.get("max_epochs"))
        if config.get("accelerator") == "auto" and torch.backends.mps.is_available():
            kwargs["accelerator"] = "cpu"  # Apple's GPU has no float64, and metrics need it
        if config.get("default_root_dir") is None:
            kwargs["default_root_dir"] = str(run_dir)
        plugins = config.get("plugins") or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        callbacks = config.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if (figures := FigureFiles(*(self._get(self.config, name) for name in ("figures", "figure_size")))).chosen:
            kwargs["callbacks"] = callbacks = [*callbacks, figures]
        bars = any(isinstance(callback, ProgressBar) for callback in callbacks)
        wanted = config.get("enable_progress_bar")
        if wanted is None and not sys.stdout.isatty() and not bars:
            kwargs["enable_progress_bar"] = False  # it would be kilobytes in a file or a pipe
        elif wanted is not False and not bars:
            callbacks = [*callbacks, TQDMProgressBar()]  # one line, also in a narrow terminal
        if config.get("enable_model_summary") is None and not any(isinstance(one, ModelSummary) for one in callbacks):
            callbacks = [*callbacks, RunSummary(run_dir)]
        kwargs["callbacks"] = callbacks
        checkpoint = self._get(self.config_init, "checkpoint")
        if checkpoint.dirpath is None:
            checkpoint.dirpath = str(run_dir / "checkpoints")
        if config.get("enable_checkpointing") is False:
            self._parser(self.subcommand).callback_keys.remove("checkpoint")
        if self.subcommand != "fit":
            self.save_config_kwargs["config_filename"] = f"config_{self.subcommand}.yaml"
        trainer = super().instantiate_trainer(**kwargs)
        watch_over(trainer, self._command, self.config[self.subcommand], self.datamodule)
        if Watch.current is not None and self.subcommand == "fit" and not config.get("fast_dev_run"):
            Watch.current.folder = run_dir
        return trainer

    def _loggers(self, given: Any, epochs: int | None) -> list[Logger] | bool:
        """Return the loggers of the run folder and those that the user names; False if there are to be none.

        Args:
            given: The trainer's setting.
            epochs: The most epochs that there are.
        """
        if given is False:
            return False
        own = [] if given in (None, True) else given if isinstance(given, list) else [given]
        loggers: list[Logger] = []
        # validate would add a point at step 0 to the curves of the fit.
        if self.subcommand != "validate" and not any(isinstance(logger, TensorBoardLogger) for logger in own):
            shown = self._get(self.config, "log_details")
            loggers.append(RunTensorBoard(self._run_dir, details=shown, points=0 < (epochs or 0) < _CURVE))
        # Not one file for all commands: a test starts at step 0 again, and would take the rows of the fit away.
        file = "metrics.csv" if self.subcommand == "fit" else f"metrics_{self.subcommand}.csv"
        return [*loggers, MetricsCSV(self._run_dir, file), *own]


_CURVE = 3  # epochs; lines through fewer points are no curves


def _with_checkpoint_settings(args: list[str]) -> list[str]:
    """Put the model settings of a checkpoint before all others.

    Args:
        args: Command and options.
    """
    given = [arg.removeprefix("--ckpt_path=") for arg in args if arg.startswith("--ckpt_path=")]
    given += [value for arg, value in pairwise(args) if arg == "--ckpt_path"]
    if not given or not Path(given[-1]).is_file():
        return args
    file, options = given[-1], merge(read_given(args[1:]))
    settings = _load_checkpoint(file).get("hyper_parameters", {})
    class_path = settings.get("_class_path") if isinstance(settings, Mapping) else None
    if isinstance(settings, Mapping) and class_path is None:  # written from Python, without the command line
        return args
    allow = _trusted(options)
    kind = resolve(str(class_path), (*SETTINGS, *allow), file) if isinstance(settings, Mapping) else LightningModule
    settings = check_settings(settings, kind, allow, file)
    if not (isinstance(kind, type) and issubclass(kind, LightningModule)):
        raise ValueError(f"{file} names {class_path} as its task, which is none; give a checkpoint of a task.")
    # Some are there to be read only, such as the name of the optimizer; and a file does not say whom to trust.
    taken = set(inspect.signature(kind).parameters) - {"allow"}
    settings = {name: value for name, value in settings.items() if name in taken}
    try:
        text = yaml.safe_dump({"model": {"class_path": class_path, "init_args": settings}})
    except yaml.YAMLError:
        raise ValueError(f"{file} holds settings that are no plain values; give another checkpoint.") from None
    return [args[0], "--config", text, *args[1:]]


def _trusted(options: Mapping[str, Any]) -> list[str]:
    """Return the packages and modules that the user trusts: those in allow, and those of classes named as options."""
    allowed = _section(options, "model").get("allow")
    allowed = [str(name) for name in allowed] if isinstance(allowed, list) else []
    named = classes({section: options[section] for section in ("model", "data") if section in options})
    return [*allowed, *(kind.rpartition(".")[0] for _, kind, _ in named if _is_class(kind))]


def _is_class(kind: str) -> bool:
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*\.[A-Z]\w*", kind) is not None


def _discard_arguments(parser: Any, before: Any, chosen: Any) -> None:
    """Drop the arguments of an optimizer, scheduler or network when a later option replaces its class.

    jsonargparse would keep arguments of the same name. The SGD of the command line would get the recipe's weight decay
    for Adam, and another network the width of the recipe's network.
    """
    kind = class_at(chosen["class_path"])
    if before and kind is not None and issubclass(kind, _MADE_ANEW) and not issubclass(kind, LightningModule):
        if before["class_path"] != chosen["class_path"]:
            before["init_args"] = Namespace()  # type: ignore[no-untyped-call]
    else:
        _DISCARD(parser, before, chosen)  # type: ignore[no-untyped-call]


_MADE_ANEW = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_DISCARD = _typehints.discard_init_args_on_class_path_change
_typehints.discard_init_args_on_class_path_change = _discard_arguments


def _load_within_limits(text: str) -> Any:
    """Load YAML that the parser reads: values of options, and files that they name."""
    if len(text) > _HARMLESS or "*" in text:
        try:
            load_yaml(text, "The value of an option, or a file that it names,")
        except TooLargeError as error:
            RecipeParser.refused = str(error)  # jsonargparse tries other types, and then says something else
            raise
        except yaml.YAMLError:
            pass  # the parser reports the error
    return _LOAD(text)


_HARMLESS = 100  # characters
_LOAD = jsonargparse.get_loader("yaml")
jsonargparse.set_loader("yaml", _load_within_limits, (yaml.YAMLError,))


def _section(settings: Any, name: str) -> dict[str, Any]:
    section = settings.get(name) if isinstance(settings, Mapping) else None
    return section if isinstance(section, dict) else {}


def _load_checkpoint(path: str) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # the bytes of another file can raise any error
        said = other_format(Path(path), TORCH) or f"{path} is damaged, or no checkpoint of lightning-sym."
        raise ValueError(said) from error
    checkpoint: dict[str, Any] = content if isinstance(content, dict) else {}
    if missing := next((name for name in ("state_dict", "pytorch-lightning_version") if name not in checkpoint), None):
        raise ValueError(
            f"{path} is no checkpoint of Lightning: it has no {missing}; give one that fit wrote (lightning-sym import "
            "reads weights alone)."
        )
    return checkpoint
