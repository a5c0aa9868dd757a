"""What recipes require: found among the settings, made by a process of its own, and refused in one sentence."""

import functools
import sys
from pathlib import Path

import pytest
from helpers import assert_refused
from jsonargparse import Namespace

from lightning_sym.cli import requirements
from lightning_sym.cli.requirements import Requirement, find_requirements, make, redirect

REQUIRED = Requirement("model.zoo", "zoo/mnist5k", Path("runs/a/zoo"))


def settings(folder: object = "runs/a/zoo", **trainer: object) -> Namespace:
    return Namespace(
        model=Namespace(class_path="x.Task", init_args=Namespace(zoo=folder, members=3)),
        trainer=Namespace(**trainer),
        run_dir="runs/b",
    )


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch):
    """Replace the process by one that makes the folder, or fails; holds the arguments."""
    seen: list[list[str]] = []

    class Process:
        status, leaves = 0, True

        def __init__(self, args):
            seen.append(args)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

        def wait(self):
            options = dict(arg.removeprefix("--").split("=", 1) for arg in seen[-1] if "=" in arg)
            if Process.leaves:
                folder = Path(options.get("zoo_dir", f"{options['run_dir']}/zoo"))
                folder.mkdir(parents=True)
                (folder / "member-0000.safetensors").touch()
            return Process.status

    monkeypatch.setattr(requirements.subprocess, "Popen", Process)
    return seen, Process


def test_options_are_found_as_on_the_command_line():
    (found,) = find_requirements({"model.zoo": "zoo/mnist5k"}, settings())
    assert found == REQUIRED
    (found,) = find_requirements({"run_dir": "zoo/mnist5k"}, settings())
    assert found.folder == Path("runs/b")
    assert find_requirements({}, settings()) == []
    changed = settings()
    redirect(changed, "model.zoo", Path("other"))
    assert changed.model.init_args.zoo == "other"


def test_an_entry_that_a_later_option_removed_needs_no_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "member-0000.safetensors").touch()
    requires = {"model.zoos.relu": "zoo/mnist5k", "model.zoos.linear sums": "zoo/mnist5k_lenet"}
    recipe = {"requires": requires, "model": {"zoos": {"relu": "runs/a/zoo", "linear sums": "runs/b/zoo"}}}
    fewer = {"model": {"zoos": {"relu": str(tmp_path / "a")}}}
    config = Namespace(model=Namespace(class_path="DissectionTask", init_args=Namespace(zoos=fewer["model"]["zoos"])))
    (found,) = find_requirements(requires, config, [recipe, fewer])
    assert found.option == "model.zoos.relu"
    with pytest.raises(ValueError, match=r"'model\.zoos\.linear sums', which this run does not have"):
        find_requirements(requires, config, [{"requires": requires}, fewer])  # no recipe gives it: a slip of the pen


def test_a_folder_counts_if_it_holds_something(tmp_path):
    required = Requirement("model.zoo", "zoo/mnist5k", tmp_path / "zoo")
    assert not required.met
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / ".writable").touch()
    assert not required.met
    (tmp_path / "zoo" / "member-0000.safetensors").touch()
    assert required.met


def test_the_recipe_runs_in_its_own_run_folder(calls, capfd):
    make(REQUIRED, Namespace(accelerator="cpu", enable_progress_bar=False, devices=4))
    ((python, *args),) = calls[0]
    assert python == sys.executable
    start = args.index("fit")
    assert args[start - 2 : start] == ["-m", "lightning_sym.cli"]
    assert args[start:] == [
        *("fit", "--config", "zoo/mnist5k", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
        "--run_dir=runs/a",
    ]
    assert "runs/a/zoo, which model.zoo names, is not there: it is made first" in capfd.readouterr().out
    make(REQUIRED, Namespace())  # another run has made it meanwhile
    assert len(calls[0]) == 1


@pytest.mark.parametrize(
    ("folder", "left", "expected"),
    [
        ("mine/members", None, ["--run_dir=mine/members-run", "--zoo_dir=mine/members"]),
        ("zoo", None, ["--run_dir=zoo-run", "--zoo_dir=zoo"]),  # not the current folder
        ("mine/zoo", "mine/words.txt", ["--run_dir=mine/zoo-run", "--zoo_dir=mine/zoo"]),  # not somebody's folder
        ("mine/zoo", "mine/config.yaml", ["--run_dir=mine", "--overwrite=true"]),  # interrupted in its first epoch
        ("mine/zoo", "mine/checkpoints/last.ckpt mine/config.yaml", ["--run_dir=mine", "--ckpt_path=last"]),
    ],
)
def test_where_the_recipe_runs_and_goes_on(folder, left, expected, calls):
    for file in (left or "").split():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    make(Requirement("model.zoo", "zoo/mnist5k", Path(folder)), Namespace())
    assert calls[0][0][-2:] == expected


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"])
def test_one_of_several_processes_makes_nothing(name, calls, monkeypatch):
    monkeypatch.setenv(name, "0")
    says = (f"is not made by one of several processes ({name} is set); make it first", "--run_dir runs/a")
    assert_refused(make, REQUIRED, Namespace(), says=says)
    assert calls[0] == []


def test_what_fails_is_one_sentence(calls):
    calls[1].leaves = False
    assert_refused(make, REQUIRED, Namespace(), says="ran, but left nothing in runs/a/zoo; look at its recipe")
    calls[1].status = 1
    says = "could not be made: lightning-sym fit --config zoo/mnist5k ended with status 1, its message is above"
    assert_refused(make, REQUIRED, Namespace(), says=says)


def test_an_interrupted_recipe_interrupts_the_run(calls, capsys):
    calls[1].leaves, calls[1].status = False, 130
    with pytest.raises(SystemExit) as stop:
        make(REQUIRED, Namespace())
    assert stop.value.code == 130
    assert "interrupted; the same command resumes" in capsys.readouterr().err


def test_a_folder_of_one_recipe_is_not_made_by_another(tmp_path):
    folder = tmp_path / "runs" / "zoo-mnist5k-lenet" / "zoo"
    first = "run lightning-sym fit --config zoo/mnist5k_lenet first"
    for name in ("zoo/mnist5k_mlp", "mine.yaml"):
        says = (f"this run would make it by {name}, ", first)
        assert_refused(find_requirements, {"model.zoo": name}, settings(folder), says=says)
    assert find_requirements({"model.zoo": "zoo/mnist5k_lenet"}, settings(folder))
    folder.mkdir(parents=True)
    (folder / "member-0000.safetensors").touch()  # it is there: to use it is what was asked for
    assert find_requirements({"model.zoo": "zoo/mnist5k_mlp"}, settings(folder))[0].met


def test_only_the_folder_that_the_recipe_names_is_made(tmp_path):
    recipe = {"requires": {"model.zoo": "zoo/mnist5k"}, "model": {"zoo": "runs/a/zoo"}}
    requires, option = recipe["requires"], {"model": {"zoo": "runs/aa/zoo"}}
    find = functools.partial(find_requirements, requires)
    assert find(settings("runs/a/zoo"), [recipe]) == find(settings("runs/a/zoo/"), [recipe, option]) == [REQUIRED]
    says = ("runs/aa/zoo, which --model.zoo names, is not there", "runs/a/zoo is then made, by zoo/mnist5k")
    assert_refused(find, settings("runs/aa/zoo"), [recipe, option], says=says)
    assert find(settings("runs/aa/zoo"), [recipe, option, {"requires": requires}])  # both are given: meant
    Path("runs/aa/zoo").mkdir(parents=True)
    assert_refused(
        find, settings("runs/aa/zoo"), [recipe, option], says=("is empty; give a folder that is not", says[1])
    )
    Path("runs/aa/zoo/member-0000.safetensors").touch()
    assert find(settings("runs/aa/zoo"), [recipe, option])[0].met
    assert find_requirements(None, settings()) == []


def test_requirements_may_be_entries_of_a_dictionary():
    found = settings({"one": "runs/one/zoo", "two words": "runs/two/zoo"})
    option = "model.zoo.two words"
    (requirement,) = find_requirements({option: "zoo/mnist5k"}, found)
    assert requirement.folder == Path("runs/two/zoo")
    redirect(found, option, Path("elsewhere"))
    assert found.model.init_args.zoo == {"one": "runs/one/zoo", "two words": "elsewhere"}
    assert_refused(find_requirements, {"model.zoo.three": "zoo/mnist5k"}, found, says="'model.zoo.three'")
