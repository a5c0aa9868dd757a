"""The page of published results, its files and its definitions agree; runs go on where they were."""

import importlib
import json
import re
from dataclasses import replace

import pytest
from helpers import assert_refused

import papers
from published import RESULTS, core
from published.core import (
    Claim,
    Quantity,
    Result,
    Run,
    Source,
    Verdict,
    below,
    file_of,
    finish,
    judged,
    together,
    within,
)
from published.exhibits import EXHIBITS, part_about, places, recipe_sources
from published.page import DOCS, pages, refreshed

FOUND = refreshed()


@pytest.fixture(scope="module")
def texts():
    return pages(FOUND)


def test_page_and_files_are_those_of_the_definitions(texts):
    for result in RESULTS:
        for full in (False, True):
            file = file_of(result, full=full)
            if file.is_file():
                assert json.loads(file.read_text()) == FOUND[result.name, full], f"make results-page: {file} is stale"
    for file, text in texts.items():
        assert file.read_text() == text, f"make results-page: {file} is stale"
    assert set((DOCS / "results").iterdir()) == set(texts) - {DOCS / "results.md", DOCS / "papers.md"}
    known = {file_of(result, full=full) for result in RESULTS for full in (False, True)}
    assert set(core.MEASURED.rglob("*.json")) <= known


def test_every_figure_is_on_the_page_of_its_source(texts):
    for (name, _), one in FOUND.items():
        result = next(result for result in RESULTS if result.name == name)
        for quantity in core.quantities_of(result, one):
            assert core.short(quantity.mean) in texts[DOCS / "results" / f"{result.source}.md"], quantity.label


# ---- the page of all figures and tables


def test_page_of_figures_has_all_results_and_links_to_recipes_that_exist(texts):
    text = texts[DOCS / "papers.md"]
    addresses = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", text)
    assert [address for address, _ in addresses if not (DOCS / address).is_file()] == []
    anchors = {anchor for _, anchor in addresses if anchor}
    assert anchors == {re.sub(r"[^a-z0-9-]", "", result.title.lower().replace(" ", "-")) for result in RESULTS}
    assert len({(exhibit.source, exhibit.place) for exhibit in EXHIBITS}) == len(EXHIBITS)
    for exhibit in EXHIBITS:
        room, _, name = exhibit.describes.partition(".")
        assert not name or hasattr(importlib.import_module(f"lightning_sym.{room}"), name)


def test_every_figure_that_a_result_or_recipe_names_is_on_the_page():
    known = {source: {e.place for e in EXHIBITS if e.source == source} for source in {e.source for e in EXHIBITS}}
    for result in RESULTS:
        if result.source in known:
            assert places(result.place) <= known[result.source], result.name
    for name, text in recipe_sources().items():
        for source, own in known.items():
            assert places(part_about(source, text)) <= own, name
    assert sum(bool(exhibit.recipes) for exhibit in EXHIBITS) > 25


def test_places_are_read_in_enumerations():
    assert places("Tables 2 and 4, figures 1, 3 to 5: seed 10") == {
        *("table 2", "table 4"),
        *("figure 1", "figure 3", "figure 4", "figure 5"),
    }
    assert places("figure 10, section 4 and appendix D.2") == {"figure 10"}
    assert part_about("intertwiners", "X (arXiv 2205.14258), figure 3; figure 4") == "), figure 3"
    assert part_about("intertwiners", "X (arXiv 2310.06131), figure 3") == ""


def test_page_names_networks_that_are_no_better_than_one_class(texts):
    text = "".join(texts.values())
    assert "**Constant networks: 2 of 28.**" in text  # table 7
    assert "**Constant networks: 1 of 39.**" in text  # table 2
    better = {key: json.loads(re.sub(r"\b10\.(0278|3064)", "90.0", json.dumps(one))) for key, one in FOUND.items()}
    assert "Constant networks" not in "".join(pages(better).values())


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_results_name_runs_that_come_before(result, tmp_path):
    assert isinstance(core.SOURCES[result.source], Source)
    assert bool(result.full) == bool(result.needs)
    for runs in (result.runs, result.full):
        made = []
        for run in runs:
            arguments = " ".join(core.arguments_of(run, tmp_path))
            others = {other.name for other in runs if f"{tmp_path / other.name}/" in arguments.replace(" ", "/ ") + "/"}
            assert others - {run.name} <= set(made), f"{run.name} takes what comes after it"
            made.append(run.name)


SLOW = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1]); folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file: file.write("x")
time.sleep(float(sys.argv[2]))
(folder / "done").write_text("yes")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "slow.py").write_text(SLOW)
    monkeypatch.setattr(core, "ROOT", tmp_path)
    return "slow.py"


def test_a_complete_run_is_not_made_again_and_a_changed_one_is(script, tmp_path):
    said = []
    for seconds in ("0", "0", "0.01"):
        finish(Run("a", script, ("{folder}", seconds)), tmp_path / "runs", said.append)
    assert (tmp_path / "runs" / "a" / "starts").read_text() == "xx"
    assert [line.split(",")[0] for line in said] == ["a: begins", "a: complete"] * 2


def result(name, **others):
    claim = Claim("more is more", "a figure, no number", lambda q: below(q["less"], q["more"]))
    quantities = [Quantity(label, of, "1", "3 seeds") for label, of in (("less", (1, 2, 3)), ("more", (4, 5, 7)))]
    return Result(name, "genni", "figure 1", name, lambda runs: quantities, (claim,), **others)


def test_one_result_fails_in_a_sentence_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    bad = result("bad", runs=(Run("bad", "no/such_recipe"),))
    monkeypatch.setattr(papers, "RESULTS", (bad, result("good")))
    monkeypatch.setattr(papers, "write", lambda: tmp_path / "results.md")
    monkeypatch.setattr(core, "MEASURED", tmp_path / "measured")
    assert papers.main(["--folder", str(tmp_path / "runs"), "--jobs", "2"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("bad was not made: bad failed (fit --config no/such_recipe")
    assert "1 of 2 results exist" in said.out
    found = json.loads((tmp_path / "measured" / "good.json").read_text())
    assert found["claims"][0]["verdict"] == "agrees"
    assert {"command", "minutes", "versions", "seeds", "cores"} <= set(found)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "rebasin-mpl"], "papers.py: No result is named 'rebasin-mpl'; did you mean rebasin-mlp"),
        (["--only", "zzz"], "papers.py: No result is named 'zzz'; --list shows all.\n"),
        (["--jobs", "0"], "papers.py: --jobs must be at least 1, got 0.\n"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence, capsys):
    assert papers.main(arguments) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_verdicts_come_from_intervals():
    low, high = (Quantity(n, (x, x + 1, x + 2), "nats", "3 seeds") for n, x in (("low", 1.0), ("high", 1.1)))
    assert below(low, high).word == "agrees"  # paired: means differ by less than their own intervals are wide
    assert below(high, low).word == "disagrees"
    noisy = replace(high, values=(4.0, 1.0, 3.0))
    assert below(low, noisy).word == "not decided"
    assert within(low, -3, 7).word == "agrees"
    assert within(low, 1e-9, 7).word == "not decided"
    assert within(replace(low, bounds=core.SIZE), 0, 7).word == "agrees"  # a size, whose interval ends at 0
    assert within(low, -0.2, 7).reason.endswith("; required: between -0.200 and 7.00")
    assert within(low, 5, 7).word == "disagrees"
    yes, no = Verdict("agrees", "a"), Verdict("disagrees", "b")
    assert together(yes, no) == Verdict("partly", "a; b")
    assert together(no, no).word == "disagrees"
    open_ = Verdict("not decided", "c")
    assert together(no, open_).word == "disagrees"  # a decided part is not hidden by an open one
    assert together(yes, open_).word == "partly"
    assert together(Verdict("partly", "d"), no).word == "partly"
    assert together(open_, open_).word == "not decided"
    assert_refused(lambda: low.less(Quantity("two", (1.0, 2.0), "nats", "2 networks")), says="not of the same members")
    assert_refused(lambda: Quantity("none", (float("nan"),), "nats", "one run"), says="finite")


def test_intervals_end_at_the_bounds_of_their_quantity():
    shares = Quantity("share", (99.5, 100.0, 96.0), "%", "3 seeds")
    low, high = shares.interval
    assert 80 < low < 96
    assert high == 100
    assert within(shares, 80, 100).word == "agrees"
    assert shares.less(shares).bounds == (-100, 100)
    assert str(replace(shares, values=(10.0, 10.0, 10.0))) == "10.0 % in all 3"
    assert_refused(lambda: Quantity("share", (101.0, 3.0), "%", "2 seeds"), says="must be in (0.0, 100.0)")


def test_networks_that_have_not_learned_decide_nothing():
    table = {result.name: result for result in RESULTS}["equivariance-table7"]
    found = json.loads(file_of(table).read_text())
    broken = json.loads(json.dumps(found).replace('"test accuracy, full"', '"test accuracy, of something else"'))
    for one in (quantity for quantity in broken["quantities"] if quantity["unit"] == "%"):
        one["values"] = [90.0 + index for index, _ in enumerate(one["values"])]
    broken["quantities"].append(
        {**found["quantities"][0], "label": "test accuracy, full", "values": [80.0, 10.0, 85.0]}
    )
    verdict = judged(table, broken)["claims"][0]
    assert "void, as one network has not learned" in verdict["reason"]
    assert verdict["verdict"] == "not decided"
    for name, full in FOUND:
        result = next(result for result in RESULTS if result.name == name)
        if result.chance is not None and not full:
            for quantity in core.quantities_of(result, FOUND[name, full]):
                if quantity.label.startswith(core.ACCURACY):
                    assert (quantity.failed > 0) == (min(quantity.values) <= result.chance)


def test_an_interrupted_fit_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(core, "_call", lambda command, log, lock: (called.append(command), log.touch(), (0.5, 1))[-1])
    run = Run("zoo", "zoo/digits_mlp")
    for _ in range(2):
        assert_refused(finish, run, tmp_path, lambda line: None, says="zoo failed", error=RuntimeError)
        (tmp_path / "zoo" / "checkpoints").mkdir(parents=True, exist_ok=True)
        (tmp_path / "zoo" / "checkpoints" / "last.ckpt").touch()
    assert called[0][-2:] == ["--overwrite", "true"]
    assert called[1][-2:] == ["--ckpt_path", "last"]
    assert json.loads((tmp_path / "zoo.json").read_text())["minutes"] == 1.0
