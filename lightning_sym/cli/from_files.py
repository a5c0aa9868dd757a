"""Commands that ask a question about checkpoints: the files become a zoo, and a recipe runs on it.

A command is a row of a table. This module reads the options without importing torch.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from lightning_sym.cli.catalogue import shipped_options
from lightning_sym.cli.checking import checked_options
from lightning_sym.cli.given import (
    FIGURES,
    arguments_of,
    class_of,
    meant,
    merge,
    missing_options,
    prefix_of,
    read_given,
    separated,
    unknown_option,
    with_one_dash,
    without_value,
)
from lightning_sym.cli.importing import NETWORK, Asked, make_data, make_zoo, own_package, print_members
from lightning_sym.cli.named import check_classes
from lightning_sym.cli.places import check_files, check_places, has_epoch, is_first_process, is_zoo

_ZOO = "imported"  # its folder in the run folder
_OWN = ("network", "out", "prefix")
_ALSO = ("data", "model", "trainer", "checkpoint", "config", "overwrite", "seed_everything", "log_details", *FIGURES)
# Options of other commands, and a hint to the option here.
_ELSEWHERE = {
    "run_dir": " The run folder is --out.",
    "input": " The shape of an input follows from --data.",
    "ckpt_path": " Checkpoints are given without an option.",
}
_MEMBERS = ("--model=lightning_sym.tasks.ZooTask", "--trainer.max_epochs=0", "--trainer.enable_model_summary=false")


@dataclass(frozen=True)
class FileCommand:
    """A command that takes checkpoints.

    Attributes:
        name: Its name.
        finds: What it finds, for the help.
        least: Smallest number of checkpoints.
        settings: Options of ``fit``: a recipe, or a task that trains nothing, and what differs from them.
        zoo: Option with the folder of the zoo.
        loss: Whether the task takes a loss, which for a regression is the squared distance.
        example: Further options, for the help.
    """

    name: str
    finds: str
    least: int
    settings: tuple[str, ...]
    example: str
    zoo: str = "model.zoo"
    loss: bool = True

    NEEDS = "lightning_sym.cli.lightning"  # imports PyTorch

    @property
    def USAGE(self) -> str:  # noqa: N802
        """The usage in one line."""
        files = " ".join(["FILE"] * self.least)
        return f"usage: lightning-sym {self.name} {files} ... --network NETWORK --data DATAMODULE [--out FOLDER]"

    @property
    def HELP(self) -> str:  # noqa: N802
        """The help."""
        files = " ".join(["a.pt", "b.pt"][: self.least])
        return f"""{self.USAGE}

{self.finds[:1].upper()}{self.finds[1:]}.

  FILE ...             state dicts of torch.save, Lightning checkpoints or .safetensors, or the folder of a zoo;
                       nothing in them is run
{NETWORK}
  --out FOLDER         the run folder: tables and figures in results/, the files as a zoo in imported/; default a new
                       one, runs/{self.name}
  --prefix PREFIX      prefix of the weights' names, if several fit

Options of fit win over the settings of the command, which are

  {" ".join(self.settings)}

Example:

  lightning-sym {self.name} {files} --network my_networks.Net --data MNIST5kDataModule{self.example}"""

    def read_options(self, args: Sequence[str]) -> "Question":
        """Read the options.

        Args:
            args: The arguments after the command; not those that ask for help.

        Raises:
            ValueError: If an option is missing or not known, or there are not enough checkpoints.
        """
        options, files = separated(args)
        mine = [option for option in options if _first(option) in _OWN]
        rest = [option for option in options if _first(option) not in _OWN]
        if wrong := with_one_dash(args):
            raise ValueError(wrong)
        given, known = merge(read_given(mine)), (*_OWN, *_ALSO)
        for option in rest:
            if _first(option) not in known:
                hint = _ELSEWHERE.get(_first(option)) or meant(_first(option), known)
                raise ValueError(f"{self.name} has no option '{_first(option)}'.{hint}")
        if wrong := without_value(options):
            raise ValueError(wrong)
        zoo = len(files) == 1 and is_zoo(files[0])
        if len(files) < self.least and not zoo:
            number = ("one", "two")[self.least - 1]
            got = ", ".join(file if Path(file).exists() else f"{file}, which does not exist" for file in files)
            raise ValueError(f"{self.name} takes {number} or more checkpoints, or a zoo; got {got or 'none'}.")
        if len(files) > 1 and (zoos := [file for file in files if is_zoo(file)]):
            raise ValueError(f"{zoos[0]} is a zoo; expected one zoo alone, or the files of checkpoints.")
        if zoo and (surplus := [name for name in ("network", "prefix") if name in given]):
            raise ValueError(f"{files[0]} is a zoo, which has its network; leave out --{surplus[0]}.")
        before, after = checked_options(list(self.settings)), checked_options(rest)
        merged = merge(read_given([*before, *after]))
        if wrong := unknown_option(merged, shipped_options):
            raise ValueError(wrong)
        data = merge(read_given(after)).get("data")
        folders = any(map(os.path.isdir, files))  # of which another sentence tells
        missing = [] if class_of(given.get("network")) or folders else ["network"]
        missing += [] if class_of(data) else ["data"]
        if missing:
            raise ValueError(missing_options(missing))
        folder = Path(str(given["out"])) if "out" in given else _free_folder(Path("runs") / self.name)
        imported = Path(files[0]) if zoo else folder / _ZOO
        prefix = prefix_of(given)
        allow = arguments_of(merged.get("model")).get("allow") or []
        return Question(
            Asked(tuple(files), given.get("network"), imported, prefix, data),
            zoo,
            folder,
            tuple(before),
            tuple(after),
            tuple(map(str, allow if isinstance(allow, list) else [allow])),
        )

    def look(self, asked: "Question") -> "Question":
        """Check files and folders.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If the run folder is taken, or a class or its module does not exist.
        """
        if not asked.is_zoo:
            check_files(asked.of.files)
        check_classes(network=asked.of.network, data=asked.of.data)
        try:
            check_places("fit", [*asked.before, *asked.after, *self._places(asked, Path())], zoos=False)
        except ValueError as error:  # the run folder has another name here
            said = str(error).replace("resume it (--ckpt_path last), ", "")
            raise ValueError(said.replace("--run_dir", "--out")) from None
        return asked

    def run(self, asked: "Question") -> None:
        """Make the zoo, and run the recipe on it.

        Raises:
            ValueError: If a class is not found, a file does not fit, or the recipe fails. Nothing is left then.
        """
        from lightning_sym.cli.lightning import RecipeCLI
        from lightning_sym.cli.watch import Watch
        from lightning_sym.zoo import ModelZoo

        data, folder, allow = make_data(asked.of.data), asked.of.out, list(asked.allow)
        with _left_if_it_ends(asked):
            if not asked.is_zoo and is_first_process():
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
                zoo = make_zoo(asked.of, data)
                print_members(zoo, asked.of.files)
                allow += filter(None, [own_package(zoo)])  # the command line names it
            else:
                zoo = ModelZoo.open(folder, allow=allow)
            options = self._places(asked, folder)
            if self.zoo == "model.initial":
                options += [f"--model.members={len(zoo)}", f"--model.seed={zoo.numbers[0]}"]
            if self.loss and getattr(data, "regression", False):
                options.append("--model.loss=lightning_sym.tasks.SquaredDistance")
            trusted = [f"--model.allow=[{', '.join(dict.fromkeys(allow))}]"] if allow else []
            with Watch() as watch:
                watch.call(lambda: RecipeCLI(args=["fit", *asked.before, *options, *asked.after, *trusted]))

    def _places(self, asked: "Question", zoo: Path) -> list[str]:
        return [f"--{self.zoo}={zoo}", "--requires=null", f"--run_dir={asked.folder}"]


@dataclass(frozen=True)
class Question:
    """Options of such a command.

    Attributes:
        of: Files, network and data, with the folder of the zoo.
        is_zoo: Whether a zoo was given instead of files.
        folder: The run folder.
        before: Options of ``fit`` that the command sets.
        after: Those that were given.
        allow: Packages that they trust.
    """

    of: Asked
    is_zoo: bool
    folder: Path
    before: tuple[str, ...]
    after: tuple[str, ...]
    allow: tuple[str, ...]


def _first(option: str) -> str:
    """Return the first part of an option's name: ``model`` for ``--model.pairs=all``."""
    return option.removeprefix("--").partition("=")[0].partition(".")[0].removesuffix("+")


def _free_folder(folder: Path) -> Path:
    """Return a run folder that does not exist yet; in a further process of a run, that of the first one."""
    candidates = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    taken: Path | None = None
    for candidate in chain([folder], candidates):
        if not candidate.exists():
            return candidate if taken is None or is_first_process() else taken
        taken = candidate
    raise AssertionError("the candidates never end")


@contextmanager
def _left_if_it_ends(asked: Question) -> Iterator[None]:
    """Remove the zoo and the folders that were made for it, unless the run leaves something."""
    made = [folder for folder in (asked.folder, *asked.folder.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        if not asked.is_zoo and is_first_process() and not has_epoch(asked.folder):
            shutil.rmtree(asked.of.out, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # something is there
                    folder.rmdir()
        raise


COMMANDS = {
    command.name: command
    for command in (
        FileCommand(
            "spectrum",
            "finds the sharpness of each network, raw and modulo symmetry, and the spectral density of its Hessian",
            1,
            (*_MEMBERS, "--trainer.callbacks=SpectrumReport"),
            " --trainer.callbacks.train_batches 2",
            zoo="model.initial",
        ),
        FileCommand(
            "learning-coefficient",
            "estimates the local learning coefficient of each network by SGLD chains",
            1,
            (*_MEMBERS, "--trainer.callbacks=LearningCoefficient"),
            " --trainer.callbacks.localisation 100",
            zoo="model.initial",
        ),
        FileCommand(
            "evidence",
            "finds the Laplace approximation of the marginal likelihood, and effective parameters, of each network",
            1,
            (*_MEMBERS, "--model.prior_precision=1", "--trainer.callbacks=MarginalLikelihood",
             "--trainer.callbacks.burn_in=null"),
            " --model.prior_precision 10",
            zoo="model.initial",
        ),
        FileCommand(
            "similarity",
            "compares the representations of every two networks, layer by layer",
            2,
            ("--config", "similarity/mnist5k", "--trainer.enable_model_summary=false"),
            " --model.measures '[cka_linear]'",
            loss=False,
        ),
        FileCommand(
            "curve",
            "trains low-loss curves between every two networks",
            2,
            ("--config", "curve/mnist5k_mlp", "--model.pairs=all", "--trainer.enable_model_summary=false"),
            " --trainer.max_epochs 5",
        ),
    )
}  # fmt: skip
