"""Compare GELU(t x) with t GELU(x): GELU is not homogeneous.

ReLU(t x) = t ReLU(x) for t > 0, so that positive scales belong to its intertwiner group. GELU has no such scales
(docs/theory/intertwiners.md, 1.2). The root-mean-square difference is that of figure 17 of Godfrey et al. (2022),
arXiv:2205.14258:

    python examples/gelu_homogeneity.py --out runs/gelu-homogeneity
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu

from lightning_sym.figures import Chart, Marks, Panel, write_figure

_END, _POINTS = 12.0, 48_001  # quadrature: beyond the end the normal density is below 1e-31
_RELU = r"$t\,$ReLU$(x)$"
CHART = Chart(
    [
        Panel([Marks("y", "x", ["curve"], table="curves", look={"marker": ""})], "t = {t:g}", "x", by=["t"]),
        Panel(
            [Marks("error", "t", table="errors", label=r"$\xi(t)$", look={"marker": ""}),
             Marks("limit", "t", table="errors", label="asymptotic slope",
                   look={"ls": "--", "marker": ""})],
            "error of the exchange", "t", bottom=0,
        ),
    ],
    "{title}",
    3,
    (3.0, 2.8),
    legend="each",
)  # fmt: skip


def exchange_error(scales: Sequence[float]) -> Tensor:
    r"""Return :math:`\xi(t) = E[(\mathrm{GELU}(t X) - t\,\mathrm{GELU}(X))^2]^{1/2}` for a standard normal X.

    The paper estimates it by sampling; here it is integrated, to a relative error below 1e-4 up to t = 100.

    Args:
        scales: The scales t, >= 0.

    Returns:
        Shape ``[T]``, float64.
    """
    x = torch.linspace(-_END, _END, _POINTS, dtype=torch.float64)
    t = torch.tensor(scales, dtype=torch.float64)[:, None]
    density = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
    return torch.trapezoid((gelu(t * x) - t * gelu(x)).square() * density, x).sqrt()


def limit_of_slope() -> float:
    """Return the limit of the error over t: the distance of GELU from ReLU for a standard normal input, 0.12675."""
    x = torch.linspace(-_END, _END, _POINTS, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
    return float(torch.trapezoid((x.relu() - gelu(x)).square() * density, x).sqrt())


def curves(scale: float) -> dict[str, Tensor]:
    """Return GELU(t x), t GELU(x) and t ReLU(x) at the places x.

    Args:
        scale: The scale t.
    """
    x = torch.linspace(-4, 4, 161, dtype=torch.float64)
    return {"x": x, "GELU$(t\\,x)$": gelu(scale * x), r"$t\,$GELU$(x)$": scale * gelu(x), _RELU: scale * x.relu()}


def main(args: Sequence[str] | None = None) -> None:
    """Draw the figure and print some errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gelu-homogeneity"), help="folder of figure.png")
    folder: Path = parser.parse_args(args).out
    scales = [step / 50 for step in range(201)]
    slope = limit_of_slope()
    errors = exchange_error(scales).tolist()
    tables = {
        "curves": [
            {"t": t, "curve": name, "x": x, "y": y}
            for t in (0.5, 2.0)
            for places in [curves(t)]
            for name in list(places)[1:]
            for x, y in zip(places["x"].tolist(), places[name].tolist(), strict=True)
        ],
        "errors": [{"t": t, "error": error, "limit": slope * t} for t, error in zip(scales, errors, strict=True)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_figure(CHART.draw(tables, "GELU and scaled GELU"), folder / "figure.png")
    for t in (0.25, 0.5, 0.75, 1.0, 2.0, 4.0):
        print(f"t = {t:<4g}  error {errors[scales.index(t)] if t in scales else float(exchange_error([t])):.4f}")
    print(f"error over t, for large t: {slope:.5f}")


if __name__ == "__main__":
    main()
