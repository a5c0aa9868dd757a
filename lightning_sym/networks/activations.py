"""Activations by name, and a test for activation modules."""

import math
import re

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym._text import unknown


class Gaussian(nn.Module):
    r"""The radial basis function :math:`e^{-x^2}`, elementwise; any shape, floating dtype.

    Example:
        >>> Gaussian()(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 0.3679])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``exp(-x**2)``, same shape, dtype and device as ``x``."""
        return torch.exp(-x.square())


class Polynomial(nn.Module):
    """The monomial ``x**degree``, elementwise; any shape, floating dtype.

    Args:
        degree: The exponent, an integer >= 1. Degree 1 is the identity.

    Raises:
        ValueError: If the degree is not an integer >= 1.

    Example:
        >>> Polynomial(2)(torch.tensor([-3.0, 2.0]))
        tensor([9., 4.])
    """

    def __init__(self, degree: int) -> None:
        super().__init__()
        check_integers(of="a polynomial activation", degree=degree)
        self.degree = degree

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x**degree``, same shape, dtype and device as ``x``."""
        return x**self.degree

    def extra_repr(self) -> str:
        """Return the degree, for ``repr``."""
        return f"degree={self.degree}"


class IdentityActivation(nn.Module):
    """The activation of a linear network: returns its input, but unlike ``nn.Identity`` counts as an activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` unchanged."""
        return x


_PLAIN: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gaussian": Gaussian,
    "identity": IdentityActivation,
}
_ACCEPTED = ("relu", "leaky_relu", "leaky_relu(0.1)", *list(_PLAIN)[1:-1], "polynomial(2)", "identity")

# Softmax and attention mix channels, GLU halves their number.
_MIXING = ("GLU", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin", "LogSoftmax")
_OF_TORCH = [name for name in torch.nn.modules.activation.__all__ if name not in _MIXING]
_ELEMENTWISE = (*(getattr(nn, name) for name in _OF_TORCH), Gaussian, IdentityActivation, Polynomial)

# The names in torch, and for those that are functions as well, in torch.nn.functional.
FUNCTIONAL_ACTIVATIONS = ["leaky_relu" if name == "LeakyReLU" else name.lower() for name in _OF_TORCH]


def make_activation(name: str) -> nn.Module:
    """Make an activation module, never in place.

    Args:
        name: ``relu``, ``leaky_relu`` (slope 0.01) or ``leaky_relu(0.1)`` (any finite slope), ``gelu``,
            ``silu``, ``tanh``, ``sigmoid``, ``gaussian`` (``exp(-x**2)``), ``polynomial(2)`` (any integer
            degree >= 1) or ``identity`` (a linear network).

    Returns:
        A module without parameters that satisfies :func:`is_activation`.

    Raises:
        ValueError: If the name is unknown, or its argument is missing, superfluous or out of range.

    Example:
        >>> make_activation("leaky_relu(0.1)")
        LeakyReLU(negative_slope=0.1)
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", name) if isinstance(name, str) else None
    kind, argument = (match[1], match[2]) if match else (None, None)
    if kind in _PLAIN:
        if argument is not None:
            raise ValueError(f"The activation {kind!r} takes no argument, got {name!r}.")
        return _PLAIN[kind]()
    if kind == "leaky_relu":
        return nn.LeakyReLU(0.01 if argument is None else _slope(argument, name))
    if kind == "polynomial":
        return Polynomial(_degree(argument, name))
    raise ValueError(unknown("activation", name, _ACCEPTED))


def is_activation(module: nn.Module) -> bool:
    """Test whether a module is an elementwise activation, so that its output is a site.

    True for all elementwise modules of ``torch.nn.modules.activation``, those of this file, and their subclasses.
    False for softmax, GLU and attention, which mix channels, and for ``nn.Identity``, which represents a missing layer
    (use :class:`IdentityActivation` for the activation of a linear network).
    """
    return isinstance(module, _ELEMENTWISE)


def _slope(text: str, name: str) -> float:
    """Parse the finite slope of a leaky ReLU."""
    try:
        slope = float(text)
    except ValueError:
        slope = math.nan
    if not math.isfinite(slope):
        raise ValueError(f"The slope of leaky_relu must be a finite number, as in leaky_relu(0.1), got {name!r}.")
    return slope


def _degree(text: str | None, name: str) -> int:
    """Parse the degree of a polynomial activation, an integer >= 1."""
    if text is None or not re.fullmatch(r"\s*[0-9]+\s*", text, re.ASCII) or int(text) < 1:
        raise ValueError(f"polynomial needs an integer degree >= 1, as in polynomial(2), got {name!r}.")
    return int(text)
