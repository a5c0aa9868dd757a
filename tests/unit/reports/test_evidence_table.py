"""The printed table of the evidence: a row for each path, readable at 80 columns."""

import pytest

from lightning_sym.reports.evidence import evidence_results

TERMS = {"log_marginal_likelihood": -1.0, "log_likelihood": -0.5, "log_determinant": 0.25, "scatter": 0.25}


def record(paths: list[str]) -> dict[str, object]:
    numbers = {"precision": 123.4, "mean_square": 1e-3, "effective": 10.0, "normalised": 0.1, "parameters": 100}
    found = {
        f"block{layer}{'.' if path else ''}{path}": {"layer": f"block{layer}", "relative": 1 / (1 + place), **numbers}
        for layer in range(1, 9)
        for place, path in enumerate(paths)
    }
    return {"epoch": 1, "seconds": 0.1, **TERMS, "paths": found}


@pytest.mark.parametrize(("ends", "falls"), [((-0.2, -0.3), True), ((-0.3, -0.2), False), ((-0.3, -0.3), False)])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_notes_say_what_is_of_other_weights_and_that_the_evidence_became_worse(ends, falls, keep):
    records = [
        record([""]) | {"epoch": 5 * n, "log_marginal_likelihood": end, "noise": 0.5} for n, end in enumerate(ends)
    ]
    last = {None: records[-1]}
    results = evidence_results(
        records,
        last,
        {None: {"loss": 1.25e-5}},
        network="Net",
        architecture={},
        members=None,
        updated=True,
        about={},
        keep=keep,
    )
    notes = "\n".join(results.notes)
    assert ("rose from 0.2 after epoch 0 to 0.3: training between" in notes) == falls
    assert ("of those kept" in notes) == (keep == "best")
    assert "test loss 1.25e-05" in notes
    assert "noise: 0.5" in notes
