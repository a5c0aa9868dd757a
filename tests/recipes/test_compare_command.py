"""``lightning-sym compare``: runs made by the command line, and copies of one in which little is changed."""

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import QUIET, SMALL, call, succeed
from helpers import read_csv

from lightning_sym._statistics import student_interval
from lightning_sym.cli.compare import read_options
from lightning_sym.reports import ResultTable

SHORT = ("--trainer.max_epochs=1", "--trainer.callbacks=ZooReport", *QUIET)
RUNS = {
    "wide-0": (),
    "wide-2": ("--model.seed=2",),
    "narrow-0": ("--model.network.widths=[2]",),
    "narrow-2": ("--model.network.widths=[2]", "--model.seed=2"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with four finished runs, two seeds of two widths; not to be written into."""
    folder = tmp_path_factory.mktemp("compared")
    with contextlib.chdir(folder):
        for name, options in RUNS.items():
            succeed("fit", *SMALL, *SHORT, *options, "--run_dir", f"runs/{name}")
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """Return a copy of these runs in the current folder."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    return Path("runs")


def change(run: Path, numbers: dict[str, float] | None = None, **options: Any) -> None:
    """Change settings of a run and what it ended with, in the files that it left."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["init_args"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if numbers is not None:
        rows = [{"number": name, "value": value} for name, value in numbers.items()]
        ResultTable("numbers", "what the run ended with", rows).write(run / "results")


@pytest.mark.drawn
@pytest.mark.long
def test_seeds_are_grouped_and_groups_compared(runs: Path) -> None:
    out = succeed("compare", *(runs / name for name in RUNS), "--out=both").out
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.replace("│", " ").split())
    assert "model.network.widths [8] [2]" in words
    assert "model.seed 0, 2 0, 2" in words
    assert "test/accuracy: fraction of inputs, 0 to 1" in words
    accuracies = {
        name: json.loads((runs / name / "results/numbers.json").read_text())["rows"][0]["value"] for name in RUNS
    }
    rows = {row["group"]: row for row in read_csv(Path("both/comparison.csv"))}
    for group in ("wide", "narrow"):
        own = [accuracies[f"{group}-{seed}"] for seed in (0, 2)]
        assert rows[group]["number"] == "test/accuracy"
        found = [float(rows[group][end]) for end in ("low", "high")]
        assert found == pytest.approx(student_interval(own))
    about = json.loads(Path("both/comparison.json").read_text())
    assert about["groups"]["narrow"] == ["runs/narrow-0", "runs/narrow-2"]
    assert {name: own["test/accuracy"] for name, own in about["values"].items()} == accuracies
    assert Path("both/comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # A folder of runs is all of its runs, each once; the order of groups is then that of their names.
    again = succeed("compare", runs, runs / "wide-0", "--out=again").out
    assert again.index("narrow") < again.index("wide")
    names = ("runs", "mean", "std", "low", "high")
    other = {row["group"]: row for row in read_csv(Path("again/comparison.csv"))}
    assert [[other[g][n] for n in names] for g in rows] == [[rows[g][n] for n in names] for g in rows]


def test_what_was_logged_and_tables_are_compared_by_pattern(runs: Path) -> None:
    out = succeed("compare", runs, "--metrics", "val/loss, train/acc*").out
    assert [name for name in ("val/loss", "train/accuracy", "test/accuracy", "details") if name in out] == [
        "val/loss",
        "train/accuracy",
    ]
    change(runs / "wide-2", seed=9)
    succeed("compare", runs / "wide-0", runs / "narrow-0", "--table=members.csv", "--metrics=test_*", "--out=table")
    rows = read_csv(Path("table/comparison.csv"))
    names = [f"{member}: test_{name}" for member in (0, 1) for name in ("accuracy", "loss")]
    assert [row["number"] for row in rows[::2]] == names
    members = read_csv(runs / "narrow-0" / "results" / "members.csv")
    assert float(rows[1]["mean"]) == pytest.approx(float(members[0]["test_accuracy"]))


def test_a_run_that_goes_on_is_left_out_of_a_folder_and_refused_by_name(runs: Path) -> None:
    shutil.rmtree(runs / "narrow-2/results")
    config = yaml.safe_load((runs / "narrow-2/config.yaml").read_text())
    config["trainer"]["max_epochs"] = 3
    (runs / "narrow-2/config.yaml").write_text(yaml.safe_dump(config))
    assert "left out: runs/narrow-2 has not ended" in succeed("compare", runs).out
    error = call("compare", runs / "narrow-0", runs / "narrow-2").error
    assert error == (
        "runs/narrow-2 has not ended: it has no results, and 1 of 3 epochs; resume it (lightning-sym fit --config "
        "runs/narrow-2/config.yaml --ckpt_path last), or leave it out."
    )
    # Without a report a run has ended after its last epoch, and what was logged last is compared.
    for name in ("wide-0", "wide-2"):
        shutil.rmtree(runs / name / "results")
    assert "val/accuracy" in succeed("compare", runs / "wide-0", runs / "wide-2").out


def test_runs_of_different_recipes_are_compared_by_what_they_share(runs: Path) -> None:
    change(runs / "wide-0", {"test/accuracy": 0.5, "barrier": 1.0})
    change(runs / "narrow-0", {"test/accuracy": 0.25, "penalty": 2.0})
    out = succeed("compare", runs / "wide-0", runs / "narrow-0").out
    assert "in one group only, and left out: barrier, penalty" in " ".join(out.split())
    change(runs / "wide-0", {"barrier": 1.0})
    error = call("compare", runs / "wide-0", runs / "narrow-0", "--out=none").error
    says = "The runs have no number in common: runs/wide-0 has barrier; runs/narrow-0 has test/accuracy"
    assert error.startswith(says)
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("runs/wide-0", "Expected two or more runs that have ended, got runs/wide-0 alone; several seeds of one"),
        ("runs/wide-0 runs/../runs/wide-0", "Expected two or more runs that have ended, got runs/wide-0 alone"),
        ("runs/wide-0 runs/wide-0/results", "runs/wide-0/results holds no run; expected the folder of a run"),
        ("runs/wide-0 runs/wide-0/config.yaml", "runs/wide-0/config.yaml is a file; expected the folder of a run"),
        ("runs --table=membres", "has no such table. Unknown table 'membres'; expected one of: members, numbers. Did"),
        ("runs --metrics=nothing", "The runs have no number like nothing in common: runs/narrow-0 has none"),
        ("runs --out=runs/wide-0/config.yaml", "runs/wide-0/config.yaml is a file; --out takes a folder."),
        ("damaged runs/wide-0", "damaged/config.yaml is no configuration of a run; expected the file that fit writes."),
        ("torn runs/wide-0", "torn/results/numbers.json is damaged or cannot be read; expected a table of results."),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(args: str, says: str, runs: Path) -> None:
    for name in ("damaged", "torn"):
        shutil.copytree(runs / "wide-0", name)
    Path("damaged/config.yaml").write_text("model: [")
    Path("torn/results/numbers.json").write_text('{"rows": [')
    result = call("compare", *args.split())
    assert result.status == 1
    assert says in result.error
    assert not result.out


def test_commands_of_the_documentation_are_understood() -> None:
    pages = Path(__file__).parents[2] / "docs" / "command-line.md", Path(__file__).parents[2] / "README.md"
    lines = [line for page in pages for line in re.findall(r"lightning-sym (compare runs[^`#\n]*)", page.read_text())]
    assert len(lines) > 2
    for line in lines:
        assert read_options(shlex.split(line)[1:]).places
