"""Functions of one variable, recognised by their values."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sym.symmetry.tracing.normal_form.chains import Homogeneous, Wave, measured_chain

FOUND: dict[str, tuple[Callable[[Tensor], Tensor], object]] = {
    "line": (lambda x: F.gelu(x) - F.gelu(-x), Homogeneous(1.0, -1.0, 1.0)),
    "rectifier": (lambda x: (3 * x + (3 * x).abs()) / 2, Homogeneous(3.0, 0.0, 1.0)),
    "leaky": (lambda x: torch.maximum(x, 0.2 * x), Homogeneous(1.0, -0.2, 1.0)),
    "square": (lambda x: (x + 1) ** 2 + (x - 1) ** 2 - 2, Homogeneous(2.0, 2.0, 2.0)),
    "sine": (lambda x: torch.cos(2.5 * x - math.pi / 2), Wave("sin", 1.0, 2.5)),
    "cosine": (lambda x: 1 - 2 * torch.sin(x / 2) ** 2, Wave("cos", 1.0, 1.0)),
    "odd": (lambda x: torch.log(x + (x * x + 1).sqrt()), ("odd", 0.0)),
    "even": (lambda x: x.exp() + (-x).exp(), ("even", 0.0)),
    "flipped": (lambda x: 3 / (1 + torch.exp(-x)), ("flipped", 3.0)),
}
# Functions that have no symmetry, though they nearly have one.
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "line with a constant": lambda x: 2 * x + 1,
    "bounds far away": lambda x: x.clamp(-50.0, 60.0),
    "bounds of other sizes": lambda x: F.relu(x + 1) - F.relu(x - 1.0001) - 1,
    "almost odd": lambda x: torch.tanh(x) + 1e-9 * x.square(),
    "two frequencies, shifted": lambda x: torch.sin(x + 0.3) + torch.sin(2 * x),
    "constant": lambda x: x - x + 1,
    "line with a bump near 51": lambda x: x + F.relu(x - 50) - 2 * F.relu(x - 51) + F.relu(x - 52),
    "rectifier with a narrow bump": lambda x: F.relu(x) + F.relu(0.03 - (x - 7.35).abs()),
    "even with a bump far away": lambda x: x.abs() + F.relu(3e3 - (x - 5.1e5).abs()),
    "not finite": lambda x: x.log(),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_function_is_recognised_by_its_values(name: str) -> None:
    function, expected = FOUND[name]
    assert measured_chain(function, waves=True) == expected


@pytest.mark.parametrize("name", NOTHING)
def test_nearly_symmetric_functions_are_not_symmetric(name: str) -> None:
    assert measured_chain(NOTHING[name], waves=True) is None
