"""The examples of the README and the guides run on what their recipes make, and what they point to exists."""

import importlib
import re
import shlex
import shutil
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUIET, succeed
from guides import (
    HOMES,
    NAMES,
    PAGES,
    ROOT,
    Command,
    blocks,
    commands,
    docstring_folders,
    excerpts,
    faults,
    option_commands,
    providers,
    python_folders,
    settings,
    source_files,
)
from helpers import assert_refused, one_in, replace_traces

from lightning_sym.datamodules import ImageDataModule
from lightning_sym.tasks._members import check_data
from lightning_sym.zoo import ModelZoo

pytestmark = [pytest.mark.long, pytest.mark.measured]

Have = Callable[[dict[str, Command], set[str]], None]


# ---- Python, on what the page's own commands have made


def run_blocks(text: str, have: Have) -> None:
    """Run the blocks of a page, one after another, and check which zoo is used with which data.

    A block that begins with the name of a file, as in ``# my_networks.py``, is that module.
    """
    code = blocks(text, "python")
    for package in ("transformers", "timm", "optuna"):  # which not every environment has
        if any(re.search(rf"^(from|import) {package}\b", block, re.MULTILINE) for block in code):
            pytest.importorskip(package)
    folders = [python_folders(block) for block in code]
    have(providers(text), {one for _, read in folders for one in read} - {one for made, _ in folders for one in made})
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in code:
        if file := re.match(r"# (\w+)\.py\n", block):
            module = sys.modules[file[1]] = types.ModuleType(file[1])
            exec(compile(block, file[1], "exec"), vars(module))
            continue
        exec(compile(block, "documentation", "exec"), namespace)
        check_zoos_and_data(namespace)


def check_zoos_and_data(namespace: Mapping[str, object]) -> None:
    """Check that zoos were trained on the data beside them; tasks check those that they are given."""
    for zoo in (one for one in namespace.values() if isinstance(one, ModelZoo)):
        for data in (one for one in namespace.values() if isinstance(one, ImageDataModule)):
            check_data(zoo, zoo.numbers[0], data, trial=False)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every Trainer of the guides take two steps in an epoch, and change nothing else."""
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    torch.manual_seed(0)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run_on_what_the_recipes_of_the_page_make(page: Path, have: Have) -> None:
    run_blocks(page.read_text(), have)


BRANCHES = ROOT / "examples" / "branches"


def test_the_folder_of_the_tutorial_runs_and_passes_its_tests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(BRANCHES, folder / "branches")
    monkeypatch.syspath_prepend(folder)
    text = (ROOT / "docs" / "your-paper.md").read_text()
    (line,) = re.findall(r"^PYTHONPATH=\. lightning-sym (.*)$", text, re.MULTILINE)
    result = succeed(*shlex.split(line), "--trainer.max_epochs=2", *QUIET)
    assert re.search(r"picture +(\S+)", result.out)
    module = importlib.import_module("branches.test_branches")
    (test,) = (value for key, value in vars(module).items() if key.startswith("test_"))
    test(folder / "of-a-test")


def test_excerpts_of_the_tutorial_are_those_of_its_files() -> None:
    texts = [path.read_text().split() for path in (ROOT / "examples").glob("branches/*.*")]
    found = [excerpt.split() for excerpt in excerpts((ROOT / "docs" / "your-paper.md").read_text())]
    assert len(found) == 4
    assert [words for words in found if not any(" ".join(words) in " ".join(text) for text in texts)] == []


QUICK = {
    "spectrum": ["--trainer.callbacks.steps=4", "--trainer.callbacks.trace_probes=2", "--trainer.callbacks.probes=1"],
    "learning-coefficient": ["--trainer.callbacks.steps=8", "--trainer.callbacks.chains=3"],
    "similarity": ["--model.measures=[cka_linear]"],
    "curve": ["--trainer.max_epochs=1", "--trainer.callbacks.plane_points=3"],
    "fit": ["--trainer.max_epochs=5"],  # the evidence is updated after the fifth
}


@pytest.mark.usefixtures("few_steps", "part_of_mnist")
@pytest.mark.filterwarnings("ignore:The learning rate comes to its lowest")  # fewer epochs than the guide has
@pytest.mark.timeout(900)
def test_commands_on_files_of_the_readers_own_run_in_their_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, traced_once: Callable[..., Any]
) -> None:
    """As the installed program does: the folder is not on the module path until a command names a module in it."""
    text = (ROOT / "docs" / "your-own.md").read_text()
    files = {match[1]: block for block in blocks(text, "python") if (match := re.match(r"# (\w+)\.py\n", block))}
    assert files.keys() == {"my_networks", "my_tasks"}
    files["my_data"] = (ROOT / "examples" / "first_hour" / "my_data.py").read_text()
    for name, block in files.items():
        Path(f"{name}.py").write_text(block)
        monkeypatch.delitem(sys.modules, name, raising=False)
    fields, labels = torch.randn(900, 1, 12, 12), torch.arange(900) % 3
    torch.save({"x": fields, "y": labels}, "fields.pt")
    namespace: dict[str, Any] = {}
    exec(compile(files["my_networks"], "my_networks", "exec"), namespace)
    for name in ("first.pt", "second.pt"):
        torch.save(namespace["Plain"](width=8).state_dict(), name)
    importlib.import_module("lightning_sym.callbacks")  # brings all that traces
    replace_traces(traced_once, monkeypatch.setattr)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    assert len(lines) == 15
    for line in lines:
        _, name, *args = shlex.split(line)
        own = [] if name == "import" else [*QUICK.get(name, []), QUIET[0]]
        result = succeed(name, *args, *own)
        assert name == "import" or re.search(r"picture +\S+", result.out), line
        assert sys.path[-1] == str(folder)


def test_the_network_of_an_example_works_alone_and_in_a_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "examples" / "row_paths.py", "my_package.py")
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("my_package").main(max_samples=64)
    assert "block" in capsys.readouterr().out
    recipe = "--config=equivariance/digits_digit", "--model.network=my_package.RowNetwork", "--data.max_samples=256"
    succeed("fit", *recipe, "--trainer.fast_dev_run=true", *QUIET)


# ---- folders under runs/: who makes them, who needs them


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_folder_that_a_page_names_is_made_by_its_own_recipe(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_every_folder_in_a_docstring_is_one_that_a_recipe_makes() -> None:
    found = {folder for file in source_files() for folder in docstring_folders(file)}
    assert found  # there are some
    assert {folder.removesuffix("/zoo") for folder in found} <= set(HOMES)


def test_runs_that_a_page_compares_have_numbers_in_common() -> None:
    found = [
        one for page in PAGES for one in re.findall(r"lightning-sym compare ((?:runs/[\w-]+ ?){2,})", page.read_text())
    ]
    assert found  # there are some
    for folders in map(str.split, found):
        assert set(folders) <= set(HOMES), folders
        tasks = {settings(HOMES[folder])["model"]["class_path"] for folder in folders}
        assert len(tasks) == 1, f"{folders}: {tasks}"


OPENED = 'from lightning_sym.zoo import ModelZoo\nzoo = ModelZoo.open("runs/zoo-mnist5k/zoo")\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"```python\n{OPENED}```\n", "runs/zoo-mnist5k/zoo is needed, and nothing"),
        (
            f"```bash\nlightning-sym fit --config zoo/digits_mlp\n```\n```python\n{OPENED}```\n",
            "runs/zoo-mnist5k/zoo is needed, and nothing",
        ),
        (
            "```bash\nlightning-sym fit --config matching/mnist5k_mlp --model.zoo runs/zoo-mnist5k-lenet/zoo\n```\n",
            "runs/zoo-mnist5k-lenet/zoo is needed, and nothing",
        ),
        (
            "```bash\nlightning-sym fit --config zoo/digits_mlp --run_dir runs/zoo-mnist5k\n```\n",
            "runs/zoo-mnist5k is the folder of zoo/mnist5k, and zoo/digits_mlp writes there",
        ),
        (
            "```bash\nlightning-sym fit --config stitching/mnist5k\n```\n\n"
            "| a | b |\n|---|---|\n| other | `--model.target_zoo runs/other/zoo` |\n",
            "runs/other/zoo is needed, and nothing",
        ),
        ("```bash\nlightning-sym test --config zoo/mnist5k\n```\n", "runs/zoo-mnist5k is needed, and nothing"),
        ("It leaves `runs/zoo-mnist/zoo`.", "runs/zoo-mnist is named, and no recipe makes it"),
    ],
)
def test_a_folder_that_nobody_makes_is_found(text: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults(text)), faults(text)


def test_a_zoo_beside_other_data_is_found(have: Have) -> None:
    code = f"{OPENED}from lightning_sym.datamodules import MNIST5kDataModule\ndata = MNIST5kDataModule(data_seed=1)\n"
    page = f"```bash\nlightning-sym fit --config zoo/mnist5k\n```\n```python\n{code}```\n"
    assert_refused(run_blocks, page, have, says="were trained on other data", error=UserWarning)


# ---- commands


def own_runs() -> list[object]:
    """Return the commands that take what another command of the page has made."""
    found = {
        (page, command)
        for page in PAGES
        for command in (*commands(page.read_text()), *option_commands(page.read_text()))
        if command.needed()
    }
    return [
        pytest.param(page, command, id=f"{page.name}: {' '.join(command.arguments())}")
        for page, command in sorted(found, key=str)
    ]


@pytest.mark.parametrize(("page", "command"), own_runs())
def test_commands_take_what_the_page_has_made(page: Path, command: Command, have: Have) -> None:
    made = providers(page.read_text())
    have(made, command.needed() | {folder for folder in command.made() if folder in made and folder.endswith("/zoo")})
    trial = ["--trainer.fast_dev_run=true"] if command.name == "fit" else []
    succeed(*command.arguments(), *trial, *QUIET)


def with_options() -> list[Command]:
    """Return the recipe of each guide with each of the options that it names."""
    return [command for page in PAGES for command in option_commands(page.read_text())]


def lines() -> list[str]:
    found = [line for page in PAGES for block in blocks(page.read_text(), "bash") for line in block.splitlines()]
    return sorted({line.split("#")[0].strip() for line in found if line.startswith("lightning-sym")})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "command", [*lines(), *one_in(3, sorted({shlex.join(["", *one.arguments()]) for one in with_options()}))]
)
def test_commands_and_options_are_understood(command: str) -> None:
    _, name, *args = shlex.split(command)
    assert succeed(name, *args, *(["--print_config"] if name in ("fit", "test") else [])).out


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_in_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"make ([a-z][a-z-]+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
