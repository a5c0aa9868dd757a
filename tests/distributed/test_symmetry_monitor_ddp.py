"""SymmetryMonitor gives the same curves from two processes, whether they share out the data or the members."""

import csv
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def runs(run_scenarios, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("monitor")
    run_scenarios("symmetry_monitor_scenarios.py", folder)
    return folder


def rows(path: Path, name: str = "symmetry") -> list[dict]:
    return json.loads((path / "results" / f"{name}.json").read_text())["rows"]


def metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_only_the_interrupted_runs_failed(runs):
    errors = json.loads((runs / "errors.json").read_text())
    assert set(errors) == {"part members", "part data"}, errors


def test_sharing_out_members_changes_nothing(runs):
    for name in ("symmetry", "symmetry_distance"):
        assert rows(runs / "members 2", name) == rows(runs / "members 1", name)
    for row, other in zip(metrics(runs / "members 2"), metrics(runs / "members 1"), strict=True):
        found = {tag for tag in row if tag.startswith("symmetry/")}
        assert "symmetry/drift/linear2/member-0001" in found
        assert {tag: row[tag] for tag in found} == {tag: other[tag] for tag in found}
    assert (runs / "members 2" / "results" / "symmetry.png").is_file()


def test_sharing_out_data_is_a_larger_batch(runs):
    one, two = rows(runs / "data 1"), rows(runs / "data 2")
    assert len(one) == len(two) == 4 * 3 * 2
    for row, other in zip(one, two, strict=True):
        for name, value in row.items():
            assert other[name] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-5)), name


def test_steps_and_a_process_that_watches_nothing(runs):
    found = rows(runs / "steps 2")
    assert {row["member"] for row in found} == {0, 2}
    steps = sorted({row["step"] for row in found})
    assert steps == sorted({*range(0, steps[-1] + 1, 2), steps[-1]})


@pytest.mark.parametrize("name", ["members", "data"])
def test_resumed_is_uninterrupted(runs, name):
    assert not (runs / f"part {name}" / "results" / "symmetry.csv").exists()
    for table in ("symmetry", "symmetry_distance"):
        assert rows(runs / f"resumed {name}", table) == rows(runs / f"{name} 2", table)
