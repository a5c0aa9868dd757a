"""The examples of the README and the guides run, and what they point to exists."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer

from lightning_sym.callbacks import ZooExport
from lightning_sym.cli import main
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.recipes import recipe_names
from lightning_sym.tasks import ZooTask

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_small_zoo(path: str) -> None:
    task = ZooTask(MultiLayerPerceptron(widths=(16,), image_size=8), members=3, execution="vmap")
    trainer = Trainer(
        max_epochs=15, logger=False, callbacks=[ZooExport(path)], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(task, DigitsDataModule())


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run(page: Path, folder: Path) -> None:
    code = blocks(page, "python")
    if any('"runs/zoo-mnist5k/zoo"' in block for block in code):
        train_small_zoo("runs/zoo-mnist5k/zoo")
    namespace: dict[str, object] = {"__name__": "documentation"}
    torch.manual_seed(0)
    for block in code:
        exec(compile(block, page.name, "exec"), namespace)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines if line.startswith("lightning-sym")})


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = shlex.split(command)[1:]
    if args[0] in ("fit", "test"):
        args.append("--print_config")
    assert main(args) == 0
    assert capsys.readouterr().out


def options() -> list[tuple[str, str]]:
    """Return the recipe of each guide, the first that it runs, with each of the options in its tables."""
    found = []
    for page in PAGES:
        recipe = re.search(r"fit --config ([a-z0-9_]+/[a-z0-9_]+)", page.read_text())
        cells = re.findall(r"^\| [^|`]+ \|(.*)\|$", page.read_text(), re.MULTILINE)
        found += [(recipe[1], one) for cell in cells for one in re.findall(r"`(--[^`]* [^`]+)`", cell) if recipe]
    return found


@pytest.mark.parametrize(("recipe", "given"), options())
def test_options_in_tables_are_understood(
    recipe: str, given: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", recipe, *shlex.split(given), "--print_config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_lists_every_recipe() -> None:
    listed = re.findall(r"^\| `([a-z0-9_]+/[a-z0-9_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == recipe_names()


def test_make_targets_in_the_text_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"make ([a-z][a-z-]+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
