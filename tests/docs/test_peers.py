"""Comparisons with other packages: what has become slower, and what is not there."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("peers", "_timing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import peers

    return peers


def stored(median, least, most, title="a: task"):
    ratios = {"ratio_to_plain_median": median, "ratio_to_plain_min": least, "ratio_to_plain_max": most}
    return {"title": title, "rows": [{}, ratios]}


def test_slower_is_more_than_the_stored_spread_above_the_stored_ratio(peers):
    before = [stored(0.5, 0.4, 0.6), stored(2.0, 2.0, 2.0, "b: task"), {"title": "c", "rows": [], "skipped": "..."}]
    assert peers.slower([stored(0.69, 0.1, 3.0), stored(2.0, 2.0, 2.0, "b: task")], before) == []
    assert peers.slower([stored(0.5, 0.4, 0.6, "new: task"), {"title": "c", "rows": []}], before) == []
    found = peers.slower([stored(0.71, 0.71, 0.71), stored(2.1, 2.1, 2.1, "b: task")], before)
    assert found == [
        "a: task takes 0.71 of the peer's time, stored 0.5 with spread 0.2.",
        "b: task takes 2.1 of the peer's time, stored 2 with spread 0.",
    ]


def test_a_peer_that_is_not_there_is_a_row_that_says_how_to_get_it(peers, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(peers.PEERS, "absent", peers.Peer(list, ("no_such_module",), "absent-package"))
    monkeypatch.setitem(peers.PEERS, "paper", peers.Peer(list, file="code/layer.py"))
    rows = [peers.measure(name, folders, 1) for name, folders in (("absent", {}), ("paper", {}))]
    rows.append(peers.measure("paper", {"paper": tmp_path}, 1))
    sentences = [row["skipped"] for (row,) in rows]
    assert sentences[:2] == ["pip install absent-package", "Name a folder with its code: --folder paper=PATH."]
    assert sentences[2] == f"{tmp_path} has no code/layer.py."
    assert capsys.readouterr().out.splitlines()[0] == "absent: skipped. pip install absent-package"


def test_the_exit_status_says_whether_anything_became_slower(peers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "RESULTS", tmp_path)
    (tmp_path / "peers-cpu.json").write_text(json.dumps({"results": [stored(0.5, 0.4, 0.6)]}))
    for ratio, status, words in ((0.6, 0, "No case is slower"), (0.8, 1, "a: task takes 0.8")):
        monkeypatch.setattr(peers, "measure", lambda name, folders, rounds, own=ratio: [stored(own, own, own)])
        assert peers.main(["--check", "--only", "ckatorch"]) == status
        assert words in capsys.readouterr().out
