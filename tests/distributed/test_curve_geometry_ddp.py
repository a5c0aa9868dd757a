"""The geometry along a curve from two processes is that of one, with batch norms and unequal shares."""

import pytest
import torch
from experiments import SmallCNN
from fits import digits
from helpers import randomize_statistics, read_rows
from scenarios import load

from lightning_sym.callbacks import CurveGeometry
from lightning_sym.connectivity import Curve, curve_geometry
from lightning_sym.landscape import weight_vector
from lightning_sym.tasks import CurveTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]


def work(rank, world, folder):
    network = randomize_statistics(SmallCNN(norm=True), 0).double()
    source = torch.Generator().manual_seed(0)
    x = torch.randn(21, 1, 8, 8, generator=source, dtype=torch.float64)
    y = torch.randint(10, (21,), generator=source)
    points = torch.randn(3, len(weight_vector(network)), generator=source, dtype=torch.float64) / 3
    shape = curve_geometry(
        Curve(points), network, (x[rank::world], y[rank::world]), points=2, inputs=x[:6], probes=3, max_parameters=0
    )
    numbers = [
        [p.loss, p.gradient_norm, *p.spectrum.eigenvalues, p.spectrum.trace, *sum(p.directions.values(), ())]
        for p in shape.points
    ]
    return {"numbers": torch.tensor(numbers, dtype=torch.float64), "cka": shape.cka, "worst": shape.worst_deviation}


def scenarios(run, matching_zoo):
    for world in (2, 1):
        run.processes(world, work)
        report = CurveGeometry(points=2, images=21, jacobian_images=4, probes=2, density_steps=0, max_parameters=0)
        task = CurveTask(str(matching_zoo), pairs=[[0, 2]], kinds=["chain"])
        data = digits(batch_size=16 // world, max_samples=81)
        run.fit(f"fit {world}", task, data, report, processes=world, max_epochs=1, limit_train_batches=1)


def test_two_processes_are_one(runs):
    (one,), (first, second) = load(runs, 1), load(runs, 2)
    torch.testing.assert_close(first["numbers"], one["numbers"], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(first["cka"], one["cka"], rtol=1e-8, atol=1e-8)
    assert torch.equal(first["numbers"], second["numbers"])
    assert max(one["worst"], first["worst"]) < 1e-6


def test_every_image_counts_once_in_the_tables(runs):
    one, two = (read_rows(runs / f"fit {world}" / "results" / "geometry") for world in (1, 2))
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "gradient_norm", "trace", "detour_norm", "eigenvalue_1", "cosine_to_start"):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name
