"""The table of the pictures: each has a command that is understood; what has changed is told from what has not."""

import contextlib
import io
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from commands import succeed
from guides import ROOT, Command, settings
from PIL import Image

sys.path.insert(0, str(ROOT / "tools"))
import figures

RUNS = figures.table()
COMMANDS = sorted({command for run in RUNS for command in run.commands})


def test_every_picture_is_in_the_table_once() -> None:
    named = [name for run in RUNS for name in run.pictures]
    assert sorted(named) == sorted(path.stem for path in figures.IMAGES.glob("*.png"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.long
def test_every_command_of_the_table_is_understood(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command)
    if program == "lightning-sym":
        assert succeed(*words, "--print_config").out
        return
    assert program == "python"
    monkeypatch.setattr(sys, "argv", [words[0], *words[1:], "--help"])
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    assert stop.value.code == 0


def test_pictures_are_taken_from_the_folder_that_the_command_leaves() -> None:
    for run in RUNS:
        made = [command for line in run.commands if line.startswith("lightning") and (command := Command.of(line))]
        folders = [dict(one.options).get("run_dir", settings(one.recipe)["run_dir"]) for one in made]
        for file in run.pictures.values() if made else ():
            assert any(file.startswith(f"{folder}/results/") for folder in folders), file


def test_a_picture_that_has_changed_is_told_from_one_that_was_rounded(tmp_path: Path) -> None:
    def picture(name: str, width: int = 50, shade: int = 255, dots: int = 0) -> Path:
        image = Image.new("RGB", (width, 40), (shade,) * 3)
        for place in range(dots):
            image.putpixel((place, place), (0, 0, 0))
        image.save(tmp_path / name)
        return tmp_path / name

    old = picture("old.png")
    assert figures.change(old, picture("rounded.png", shade=250, dots=2)) is None
    assert figures.change(old, picture("dotted.png", dots=20)) == "changed: 1.0 % of the pixels"
    assert figures.change(old, picture("wide.png", width=60)) == "changed: 60 x 40 pixels, before 50 x 40"
    assert figures.change(tmp_path / "none.png", old) == "new"


def test_a_run_replaces_the_pictures_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name, shade in (("same", 0), ("other", 200)):
        Image.new("L", (4, 4), shade).save(images / f"{name}.png")
    code = "from PIL import Image; [Image.new('L', (4, 4), 0).save(f'{name}.png') for name in ('same', 'other')]"
    monkeypatch.setattr(figures, "arguments", lambda command: [sys.executable, "-c", command])
    run = figures.Run({"same": "same.png", "other": "other.png"}, (code,), 0.1)
    said = dict(figures.make(run, images, tmp_path / "work"))
    assert said == {"same": "unchanged", "other": "changed: 100.0 % of the pixels"}
    assert figures.change(images / "other.png", tmp_path / "work" / "other.png") is None
    with pytest.raises(RuntimeError, match=r"log\.txt says why"):
        list(figures.make(figures.Run({}, ("raise SystemExit(3)",), 0.1), images, tmp_path / "work"))
    with pytest.raises(RuntimeError, match=r"made no .*none\.png"):
        list(figures.make(figures.Run({"none": "none.png"}, ("pass",), 0.1), images, tmp_path / "work"))
