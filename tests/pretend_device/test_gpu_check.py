"""The check for a GPU runs, reports what fails, and docs/performance.md shows its last results."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("gpu_check")


def test_a_check_is_run_and_reported(gpu_check, tmp_path, capsys, monkeypatch):
    out = tmp_path / "found"
    options = ["--device", "cpu", "--only", "distributed", "zoo", "--check", "without a process group", "--jobs", "1"]
    options += ["--budget", "250", "--out", str(out)]
    monkeypatch.setattr(gpu_check, "ALONE", {"zoo": (80, 1000)})  # for which nothing is left
    assert gpu_check.main(options) == 1
    found = json.loads(out.with_suffix(".json").read_text())
    (check,) = found["parts"]["distributed"]["checks"]
    assert (check["check"], check["status"]) == ("without a process group", "passed")
    assert found["parts"]["zoo"]["status"] == "not run"
    assert "torch" in out.with_suffix(".md").read_text()
    said = capsys.readouterr().out
    assert "distributed: passed, 1 of 1" in said
    assert "zoo: not run" in said


DIES = """
import json, os, pathlib, sys
_, part, device, file, claims, only = sys.argv
with open(file, "a") as lines:
    print(json.dumps({"count": 3}), file=lines)
    for name, end in (("good", 0), ("bad", 7), ("last", 0)):
        try:
            (pathlib.Path(claims) / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        print(json.dumps({"begun": name}), file=lines, flush=True)
        if end:
            print("what it said", flush=True)
            os._exit(end)
        done = {"check": name, "status": "passed", "seconds": 0.1, "remark": "", "error": ""}
        print(json.dumps(done), file=lines, flush=True)
"""


def test_a_process_that_dies_fails_its_check_and_another_goes_on(gpu_check, tmp_path, monkeypatch):
    (tmp_path / "gpu_check_parts.py").write_text(DIES)
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "gpu_check.py"))
    check = gpu_check.Check(tmp_path / "found", "cpu", 60, 1)
    assert not check.run(["half"])
    part = json.loads((tmp_path / "found.json").read_text())["parts"]["half"]
    outcomes = {each["check"]: each["status"] for each in part["checks"]}
    assert outcomes == {"good": "passed", "bad": "failed", "last": "passed"}
    assert part["status"] == "failed"
    text = (tmp_path / "found.md").read_text()
    assert "### half: bad" in text
    assert "ended with 7" in text
    assert "what it said" in text


def test_the_page_shows_the_last_results(gpu_check, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(gpu_check.PAGE.read_text())
    gpu_check.write_page(page)
    assert page.read_text() == gpu_check.PAGE.read_text(), "run python tools/gpu_check.py --page"


def test_a_page_with_times(gpu_check, tmp_path):
    row = {f"{what}_{part}": value for what, value in (("seconds", 0.002), ("ratio_to_plain", 0.5))
           for part in ("median", "min", "max")}  # fmt: skip
    table = {"title": "A step", "rows": [{"variant": "plain", **row}, {"variant": "ours", **row, "peak_mib": 12.25}]}
    check = gpu_check.Check(tmp_path / "found", "cuda", 60, 1)
    part = {"status": "passed", "seconds": 2.0, "count": 0, "checks": [], "tables": [table]}
    check.found |= {"parts": {"zoo": part}, "about": {"device": "a GPU", "cuda": "13.0", "python": "3.12"}}
    check.found["about"]["versions"] = {"torch": "2.11"}
    check.save()
    text = gpu_check.section(tmp_path / "found")
    assert "a GPU, torch 2.11, CUDA 13.0, Python 3.12" in text
    assert "0 of 0 checks passed" in text
    text = (tmp_path / "found.md").read_text()
    assert "|A step|plain|2 (2 to 2)|1||\n|A step|ours|2 (2 to 2)|0.50 (0.50 to 0.50)|12.2|\n" in text
    check.found["parts"]["zoo"]["seconds"] = 0.0
    check.save()
    with pytest.raises(ValueError, match="no part that was run"):
        gpu_check.section(tmp_path / "found")


def test_the_end_of_a_traceback_is_kept(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    explained = importlib.import_module("gpu_check_parts").explained

    def deep(level):
        if level:
            deep(level - 1)
        raise ValueError("x" * 5000 + "the end")

    with pytest.raises(ValueError, match="the end") as caught:
        deep(3)
    text = explained(caught.value)
    assert len(text) < 1600
    assert text.rstrip().endswith("the end")
    assert "in deep" in text
    assert sys.modules["gpu_check_parts"].ROOT == ROOT
