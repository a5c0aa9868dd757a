"""The tool that compares what two tracers find: what is smaller, larger, slower, missing."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "frozen_groups.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("frozen_groups", TOOL)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])  # the tool adds the folders of tests
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def stream(tool: ModuleType) -> dict[str, Any]:
    return tool.measured("spelling/residual: plus", check=False)


def compared(tool: ModuleType, folder: Path, old: list[Any], new: list[Any], ignore: str = "") -> int:
    for name, records in (("old", old), ("new", new)):
        lines = [json.dumps(record) for record in [tool.about(), *records]]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tool.compare(folder / "old", folder / "new", ignore)


def test_a_traced_network_is_recorded(stream: dict[str, Any]) -> None:
    assert stream["name"] == "spelling/residual: plus"
    assert stream["dimension"] == 54  # the nullity: tests/identities/spelling_cases.py
    assert stream["dimension"] == stream["scales"] + stream["shifts"] + sum(stream["rotations"])
    assert stream["shift_kinds"]["rows that read a layer norm"] == 10
    assert (stream["signs"], stream["rotations"], stream["notes"]) == (20, [6], [])
    assert stream["log10_permutations"] == pytest.approx(1.380211)  # 4 hidden units; those of the stream are rotated


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({}, 0, "smaller: 0"),
        ({"dimension": 55}, 0, "dimension 54 -> 55"),
        ({"dimension": 53}, 1, "dimension 54 -> 53"),
        ({"log10_permutations": 1.0}, 1, "log10_permutations"),
        (
            {"log10_permutations": 1.0, "log10_permutations_of_mixed_units": 3.0},
            0,
            "1 (matrices and rotations hold them)",
        ),
        ({"shift_kinds": {"another": 33}}, 0, "shifts, rows that read a layer norm 10 -> 0 (called something else"),
        ({"shift_kinds": {"another": 33}, "shifts": 1}, 1, "shifts, rows that read a layer norm 10 -> 0"),
        ({"rotations": [6, 1]}, 0, "rotations 6 -> 7"),
        ({"seconds": 900.0}, 0, "slower: 1"),
        ({"name": "another"}, 1, "missing: 1"),
    ],
)
def test_what_is_smaller_fails(
    change: dict[str, Any], status: int, says: str, tool: ModuleType, stream: dict[str, Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert compared(tool, tmp_path, [stream], [stream | change]) == status
    assert says in capsys.readouterr().out


def test_a_network_that_is_refused(tool: ModuleType, stream: dict[str, Any], tmp_path: Path) -> None:
    refused = {"name": stream["name"], "seconds": 0.1, "error": "ValueError: no"}
    assert compared(tool, tmp_path, [stream], [refused]) == 1
    assert compared(tool, tmp_path, [refused], [stream]) == 0
    assert compared(tool, tmp_path, [refused], [refused]) == 0


def test_what_may_be_smaller(tool: ModuleType, stream: dict[str, Any], tmp_path: Path) -> None:
    less = stream | {"signs": 1}
    assert compared(tool, tmp_path, [stream], [less]) == 1
    assert compared(tool, tmp_path, [stream], [less], ignore="signs ") == 0
