"""The package of the paper's authors finds the same in a quadratic loss, where both must be at the formula."""

import math

import pytest
import torch
from torch import nn

from lightning_sym.landscape.analytic import AnalyticLandscape, SquareSum

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_devinterp_finds_the_same_in_a_quadratic_loss(tmp_path) -> None:
    pytest.importorskip("devinterp")
    from devinterp.slt.llc import llc

    settings = {"inverse_temperature": 1e3, "step": 2e-4, "localisation": 10.0, "method": "sgld"}
    ours = AnalyticLandscape(
        "toy", SquareSum(3.0, 5.0, 0.0), 1.0, "regular", {**settings, "chains": 300, "steps": 1600}
    )
    inputs = torch.zeros(1, 3)
    found = ours.estimate(inputs)
    exact = ours.exact(inputs, found)

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        value = model(torch.zeros(1, 3)).square().sum()
        return value.expand(len(tokens), tokens.shape[1] - 1)

    theirs = llc(
        SquareSum(3.0, 5.0, 0.0).float(),
        [{"input_ids": torch.zeros(2, dtype=torch.int64)}] * 8,
        {},
        lr=2e-4,
        n_beta=1e3,
        localization=10.0,
        num_chains=4,
        num_draws=1500,
        batch_size=1,
        loss_fn=loss,
        device="cpu",
        output_path=tmp_path / "samples.zarr",
    )
    values = torch.tensor(theirs["llc_per_chain"].values)
    error = float(values.std()) / math.sqrt(len(values))
    assert exact == pytest.approx(1.7136, abs=1e-4)
    assert float(found.chain_means.mean()) == pytest.approx(exact, rel=0.03)
    # All of their draws count, the first ones before the chains have spread too.
    assert float(values.mean()) == pytest.approx(exact, abs=max(4 * error, 0.05 * exact))
