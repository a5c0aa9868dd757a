"""The intertwiner group of an activation: the channel mixings that commute with it, and their images after it."""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._random import seeded
from lightning_sym._text import unknown
from lightning_sym.networks.activations import Gaussian, IdentityActivation, Polynomial, make_activation
from lightning_sym.symmetry.intertwiners import ACCEPT, IntertwinerGroup


def _rows() -> Mapping[str, IntertwinerGroup]:
    """Return the table of groups, by the activation's name."""
    kinds: dict[tuple[str, ...], dict[str, Any]] = {
        ("identity", "avg_pool", "interpolate"): {"positive_scales": True, "signs": True, "dense": True},
        ("relu", "leaky_relu", "prelu", "max_pool"): {"positive_scales": True, "signs": False},
        ("relu_squared",): {"positive_scales": True, "signs": False, "exponent": 2.0},
        ("abs",): {"positive_scales": True, "signs": True, "even": True},
        ("polynomial(2)",): {"positive_scales": True, "signs": True, "exponent": 2.0, "even": True},
        ("polynomial(3)",): {"positive_scales": True, "signs": True, "exponent": 3.0},
        ("dropout",): {"positive_scales": True, "signs": True},
        ("gaussian", "cos"): {"positive_scales": False, "signs": True, "even": True},
        ("tanh", "sin", "erf", "atan", "softsign", "hardtanh", "softshrink", "hardshrink", "tanhshrink"): {
            "positive_scales": False,
            "signs": True,
        },
        (
            *("sigmoid", "logsigmoid", "gelu", "silu", "softplus", "elu", "celu", "selu", "mish"),
            *("relu6", "hardswish", "hardsigmoid", "alpha_dropout"),
        ): {"positive_scales": False, "signs": False},
    }
    return MappingProxyType({name: IntertwinerGroup(name, **flags) for names, flags in kinds.items() for name in names})


INTERTWINER_GROUPS: Mapping[str, IntertwinerGroup] = _rows()
"""Groups by the activation's name, read-only.

Source: Godfrey et al. (2022), arXiv:2205.14258, Table 1, with our additions (docs/theory/intertwiners.md, 1.2).
Activations with parameters are listed with their defaults; :func:`intertwiner_group` respects the parameters.
Dropout has scales and signs only, although it is linear in evaluation: other mixings would change the
distribution in training. For the same reason alpha dropout has permutations only.
"""

# sigma(-x) = offset - sigma(x): docs/theory/intertwiners.md, 1.4.
_OFFSETS = {"sigmoid": 1.0, "hardsigmoid": 1.0}

_TYPES: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Identity, IdentityActivation), "identity"),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), "avg_pool"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "avg_pool"),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), "interpolate"),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), "max_pool"),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), "max_pool"),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "dropout"),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), "alpha_dropout"),
    **{
        kind: kind.__name__.lower()
        for kind in (
            *(nn.ReLU, nn.PReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.SELU, nn.Mish, nn.Hardswish, Gaussian),
            *(nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid),
        )
    },
}

_ALIASES = {
    "square": "polynomial(2)",
    "arctan": "atan",
    "swish": "silu",
    "upsample": "interpolate",
    **{f"{how}{kind}_pool{n}d": f"{kind}_pool" for how in ("", "adaptive_") for kind in ("max", "avg") for n in "123"},
}


def intertwiner_group(
    activation: nn.Module | str | Callable[[Tensor], Tensor], *, affine: bool = False
) -> IntertwinerGroup:
    """Return the intertwiner group of an activation: from the table, or measured.

    Args:
        activation: One of

            - a module: all elementwise ones of torch and ours; pooling, resizing and dropout, which act on
              channels as in the table; any other elementwise module, which is measured;
            - a name of :data:`INTERTWINER_GROUPS` or :func:`lightning_sym.networks.make_activation`;
            - a function of torch with its default options, such as ``torch.relu`` or ``F.gelu``;
            - any other elementwise function from tensor to tensor, which is measured.

            Parameters count: ``LeakyReLU(1)`` is the identity and ``LeakyReLU(-1)`` is ``abs``. Modules that are
            random in training (``RReLU``, dropout) count as in evaluation. ``PReLU`` has positive scales for all
            slopes, as these are trained. With one slope per channel, permutations also act on the slopes.
        affine: Whether to include intertwiners with an offset: as ``sigmoid(-x) = 1 - sigmoid(x)``, networks with
            biases then have its signs as well (see :meth:`IntertwinerGroup.shift`).

    Returns:
        The group; ``measured``, ``residual`` and ``margin`` describe its origin.

    Raises:
        TypeError: If `activation` is none of these.
        ValueError: If the name is unknown, or the activation cannot be measured: see :func:`measure`.

    Note:
        A look-up takes microseconds, a measurement one or two milliseconds.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Table 1 and section 3.

    Example:
        >>> intertwiner_group(nn.Hardtanh(-1, 2)) == intertwiner_group("gelu")
        True
        >>> intertwiner_group("sigmoid", affine=True).offset
        1.0
    """
    if isinstance(activation, str):
        name = _ALIASES.get(activation, activation)
        if name not in INTERTWINER_GROUPS:
            try:
                module = make_activation(activation)
            except ValueError as error:
                if "(" in activation:  # the original message describes the wrong argument
                    raise
                raise ValueError(unknown("activation", activation, INTERTWINER_GROUPS)) from error
            return intertwiner_group(module, affine=affine)
        group = INTERTWINER_GROUPS[name]
    elif isinstance(activation, type):
        raise TypeError(f"Expected an activation, got the class {activation.__name__}; pass an instance of it.")
    else:
        found = _look_up_module(activation) if isinstance(activation, nn.Module) else _look_up_function(activation)
        if found is None:
            return measure(activation, affine=affine)
        group = found
    if affine and group.name in _OFFSETS:
        return replace(group, signs=True, offset=_OFFSETS[group.name])
    return group


def _look_up_module(module: nn.Module) -> IntertwinerGroup | None:
    """Return a module's row of the table; None if it has to be measured."""
    # A subclass inherits its row only while it computes the same.
    kind = next((base for base in type(module).__mro__ if "forward" in vars(base)), type(module))
    if kind is nn.LeakyReLU or kind is nn.RReLU:
        # RReLU in evaluation: the mean of its bounds
        bounds = ("negative_slope",) if kind is nn.LeakyReLU else ("lower", "upper")
        slope = sum(float(getattr(module, bound)) for bound in bounds) / len(bounds)
        if not math.isfinite(slope):
            raise ValueError(f"The slope of {kind.__name__} must be finite, got {slope}.")
        return INTERTWINER_GROUPS["identity" if slope == 1 else "abs" if slope == -1 else "leaky_relu"]
    if kind is Polynomial:
        assert isinstance(module, Polynomial)
        degree = module.degree
        if degree == 1:
            return INTERTWINER_GROUPS["identity"]
        return IntertwinerGroup(f"polynomial({degree})", True, True, exponent=float(degree), even=degree % 2 == 0)
    # Classes further up compute something else (ReLU6 inherits from Hardtanh, but has its own row).
    inherited = type(module).__mro__[: type(module).__mro__.index(kind) + 1]
    return next((INTERTWINER_GROUPS[_TYPES[base]] for base in inherited if base in _TYPES), None)


def _look_up_function(function: Callable[..., Any]) -> IntertwinerGroup | None:
    """Return the row of a function of torch; None if it has to be measured."""
    try:
        name = _functions().get(function)
    except TypeError:  # not hashable
        return None
    return None if name is None else INTERTWINER_GROUPS[name]


@functools.cache
def _functions() -> dict[Any, str]:
    """Return the functions of torch with a row in the table, and its name."""
    names = {**{name: name for name in INTERTWINER_GROUPS}, **_ALIASES}
    found: dict[Any, str] = {}
    for name, row in names.items():
        for home in (torch, F, torch.special, torch.Tensor):
            function = getattr(home, name, None)
            if function is not None:
                found[function] = row
    return found


_MODEST = 2.0  # activations must be finite up to this magnitude; beyond, they may overflow
_TIMES = (2.0, 1 / math.pi)  # log(pi) / log(2) is irrational: no function is periodic in log(x) with both periods


@functools.cache
def _grid() -> Tensor:
    """Return the points x: 0 and both signs of magnitudes from 1e-30 to 1e30. Shape [16, 16]; x[i] = -x[~i]."""
    modest = torch.linspace(0.0123, _MODEST, 47, dtype=torch.float64, device="cpu")
    wide = torch.logspace(-30, 30, 73, dtype=torch.float64, device="cpu")
    some = torch.linspace(_MODEST + 0.321, 12.3, 7, dtype=torch.float64, device="cpu")
    half = torch.cat([modest, wide, some, torch.zeros(1, dtype=torch.float64, device="cpu")])
    return torch.cat([half, -half.flip(0)]).view(16, 16)


def measure(
    function: nn.Module | Callable[[Tensor], Tensor], *, affine: bool = False, name: str | None = None
) -> IntertwinerGroup:
    r"""Find the intertwiner group of an elementwise function from its values.

    By Lemma 3.2 of the reference, the ``t`` such that some ``c`` satisfies ``sigma(t x) = c sigma(x)`` for all ``x``
    determine the group. The tests are ``t = -1`` (``c`` can only be 1 or -1) and ``t = 2`` together with ``t = 1/pi``
    (``c = t**exponent`` with a common exponent). They use float64, and points at 0 and at magnitudes from 1e-30 to
    1e30. An identity is accepted if its pointwise relative residual is below 1e-12. Otherwise it is rejected, and the
    group is ``doubtful`` if the residual is below 1e-2: its elements are right, but some may be missing. A function
    that is odd and homogeneous of degree 1 is linear, and its group dense. Differences below the rounding of values
    near ``abs(x) = 1`` are ignored: a kink narrower than about 1e-15 is not detected.

    Points where the function overflows are left out (``reach`` is the largest remaining magnitude), but it must be
    finite for ``abs(x) <= 2``.

    Args:
        function: A module or a function from a tensor to a tensor of the same shape and dtype, elementwise and
            deterministic. It gets float64 tensors of several shapes on the CPU. A module is copied; the copy is
            cast to float64 and put in evaluation mode.
        affine: Whether to try ``sigma(-x) = offset - sigma(x)`` as well.
        name: Name of the group; by default the function's name, or the module's description.

    Returns:
        The group, with ``measured=True``. For a linear function plus a constant, which the lemma does not cover, only
        the permutations (and with ``affine`` the signs).

    Raises:
        TypeError: If `function` is not callable, or does not return a float64 tensor.
        ValueError: If it raises, changes the shape, is random or stateful, does not act elementwise, is not finite
            near 0, or is constant.

    Note:
        About seven calls with up to 256 numbers each. Torch's random state is restored.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Lemma 3.2 and appendix B; the procedure is ours.

    Example:
        >>> group = measure(lambda x: x.relu() ** 2.5)
        >>> group.positive_scales, group.signs, group.exponent
        (True, False, 2.5)
    """
    if not callable(function):
        raise TypeError(f"Expected a function from tensor to tensor, got {type(function).__name__}.")
    name = name or _name(function)
    call = _caller(function, name)
    with torch.no_grad(), seeded(0):
        x = _grid()
        y = call(x)
        _check_values(call, name, x, y)
        scaled = [call(t * x).flatten() for t in _TIMES]
    x, y = x.flatten(), y.flatten()
    near = x.abs() <= _MODEST
    # Rounding error of a difference of values of this size.
    noise = 16 * torch.finfo(torch.float64).eps * float(y[near].abs().max())

    def residual(left: Tensor, right: Tensor) -> float:
        """Return the largest pointwise residual of left = right, where both are finite."""
        difference = ((left - right).abs() - noise).clamp_min(0)
        relative = difference / torch.maximum(left.abs(), right.abs()).clamp_min(torch.finfo(torch.float64).tiny)
        return float(relative[left.isfinite() & right.isfinite()].max())

    accepted, rejected = [0.0], [math.inf]
    flipped = y.flip(0)  # sigma(-x), by the order of the grid
    attempts = [(residual(flipped, y), True, 0.0), (residual(flipped, -y), False, 0.0)]
    if affine and min(attempts)[0] >= ACCEPT:
        offset = 2 * float(y[x == 0][0])  # the identity at x = 0
        attempts.append((residual(flipped, offset - y), False, offset))
    sign_residual, even, offset = min(attempts)
    signs = sign_residual < ACCEPT
    (accepted if signs else rejected).append(sign_residual)

    exponent = _exponent(y, scaled[0], noise)
    scale_residual = 1.0
    if exponent is not None:
        scale_residual = max(residual(s, t**exponent * y) for s, t in zip(scaled, _TIMES, strict=True))
    scales = scale_residual < ACCEPT
    (accepted if scales else rejected).append(scale_residual)

    return IntertwinerGroup(
        name,
        positive_scales=scales,
        signs=signs,
        dense=scales and signs and exponent == 1 and not even and offset == 0,
        exponent=exponent if scales and exponent is not None else 1.0,
        even=signs and even,
        offset=offset if signs else 0.0,
        measured=True,
        residual=max(accepted),
        margin=min(rejected),
    )


def _exponent(y: Tensor, doubled: Tensor, noise: float) -> float | None:
    """Return the q with ``sigma(2 x) = 2**q sigma(x)`` at most points, or None."""
    # Subnormal numbers have lost digits.
    usable = y.isfinite() & doubled.isfinite() & (y.abs() > max(1e3 * noise, 1e-290))
    if not bool(usable.any()):  # the function is nearly zero except for large x
        usable = y.isfinite() & doubled.isfinite() & (y != 0)
    if not bool(usable.any()):
        return None
    ratio = float((doubled[usable] / y[usable]).median())
    if not 1e-300 < ratio < 1e300:
        return None
    exponent = math.log2(ratio)
    simple = Fraction(exponent).limit_denominator(12)
    return float(simple) if abs(exponent - simple) < 1e-13 * max(1.0, abs(exponent)) else exponent


def _name(function: nn.Module | Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    if isinstance(function, nn.Module):
        text = repr(function)
        return text if "\n" not in text and len(text) <= 80 else type(function).__name__
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def _caller(function: nn.Module | Callable[..., Any], name: str) -> Callable[[Tensor], Tensor]:
    """Wrap a function to check its output; it gets a copy, in case it works in place."""
    if isinstance(function, nn.Module):
        try:
            module = copy.deepcopy(function).to(device="cpu", dtype=torch.float64).eval()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"{name} cannot be measured: copying it to float64 on the CPU failed ({_first_line(error)}); measure "
                "a plain function instead."
            ) from error
        function = module.forward  # past the hooks, which belong to the network

    def call(x: Tensor) -> Tensor:
        shape = list(x.shape)
        try:
            y = function(x.clone())
        except Exception as error:
            raise ValueError(
                f"{name} raised {type(error).__name__} ({_first_line(error)}) on a float64 tensor of shape {shape}; an "
                "activation takes any shape, elementwise."
            ) from error
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} returned {type(y).__name__}; an activation returns a tensor.")
        if list(y.shape) != shape:
            raise ValueError(
                f"{name} made shape {list(y.shape)} out of {shape}; an activation acts elementwise and keeps the shape."
            )
        if y.dtype != torch.float64:
            raise TypeError(f"{name} returned {y.dtype} for torch.float64; an activation keeps the dtype.")
        return y

    return call


def _check_values(call: Callable[[Tensor], Tensor], name: str, x: Tensor, y: Tensor) -> None:
    """Raise unless y = call(x) is deterministic, elementwise, finite near 0 and not constant."""
    if not torch.equal(call(x).nan_to_num(), y.nan_to_num()):
        raise ValueError(
            f"{name} gave two answers for one input: it is random or keeps state; put it in evaluation mode, or "
            "measure a deterministic function."
        )
    finite, near = y.isfinite(), x.abs() <= _MODEST
    # Elementwise first: a softmax of large numbers may violate both.
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    moved = torch.empty_like(y).flatten()
    moved[order] = call(x.flatten()[order].view(x.shape)).flatten()
    few = near.flatten().nonzero()[::7, 0]
    alone = call(x.flatten()[few][:, None]).flatten()
    single = call(x.flatten()[few[:1]][None]).flatten()
    whole = y.flatten()
    pairs = [(moved, whole), (alone, whole[few]), (single, whole[few[:1]])]
    if not all(torch.allclose(a, b, rtol=1e-12, atol=1e-14, equal_nan=True) for a, b in pairs):
        raise ValueError(
            f"{name} does not act elementwise: a number's image depends on its place or its neighbours; expected a "
            "function applied to each number by itself (for one slope per channel use nn.PReLU)."
        )
    if not bool(finite[near].all()):
        at = float(x[near & ~finite][0])
        raise ValueError(
            f"{name} is not finite at x = {at:.3g}; an activation must be finite on the whole line, at least for "
            f"abs(x) <= {_MODEST:g}."
        )
    values = y[finite]
    if float(values.max() - values.min()) <= 16 * torch.finfo(torch.float64).eps * float(values.abs().max()):
        raise ValueError(f"{name} is constant ({float(values[0]):.3g}), and so forgets its input: it has no group.")


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
