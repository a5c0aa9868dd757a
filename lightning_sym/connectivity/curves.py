"""Curves in weight space between two networks: Bezier curves and polygonal chains."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, Unpack, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_known
from lightning_sym._files import load_json, write_atomically
from lightning_sym.connectivity.interpolation import Barrier, LabelledBatches, LossOptions, split_losses
from lightning_sym.landscape.planes import WeightPlane, trainable, weight_tensors
from lightning_sym.symmetry.tracing.graph.capture import copied

CurveKind: TypeAlias = Literal["bezier", "chain"]
KINDS: tuple[CurveKind, ...] = get_args(CurveKind)

FORMAT = "lightning_sym.curve/1"


def curve_coefficients(kind: CurveKind, count: int, t: Tensor) -> Tensor:
    r"""Return the coefficients of the control points at parameters ``t`` of a curve.

    They are >= 0 and sum to 1. At each endpoint exactly one coefficient is 1 (docs/theory/curves.md, 1.1):

    .. math:: \binom{n-1}{k} t^k (1-t)^{n-1-k} \quad\text{(bezier)}, \qquad \max(0, 1 - |t (n-1) - k|)
        \quad\text{(chain)}.

    Args:
        kind: ``"bezier"`` or ``"chain"``.
        count: Number ``n`` of control points, endpoints included. >= 2.
        t: Curve parameters in [0, 1]; any shape, floating.

    Returns:
        Shape ``[*t.shape, n]``, dtype and device of ``t``.

    Raises:
        ValueError: If the kind is unknown, ``count`` is out of range, or ``t`` not floating.
    """
    check_known("kind", kind, KINDS)
    check_integers(2, count=count)
    if not t.is_floating_point():
        raise ValueError(f"t must be a floating tensor, got {t.dtype}.")
    last = count - 1
    if kind == "chain":
        return torch.stack([(1 - (t * last - k).abs()).clamp(min=0) for k in range(count)], -1)
    return torch.stack([math.comb(last, k) * t**k * (1 - t) ** (last - k) for k in range(count)], -1)


@dataclass(frozen=True, eq=False)
class Curve:
    r"""A curve in weight space, :math:`\gamma(t) = \sum_k c_k(t) W_k` with ``n`` control points.

    The first and the last control point are the endpoints; :attr:`bends` counts the others. A polygonal chain passes
    through its inner control points, with line segments between consecutive ones; a Bezier curve does not. With two
    control points both kinds are the linear path.

    Parameters ``t`` are numbers in [0, 1], or tensors of any shape ``[...]``. Results have the dtype and device of the
    control points.

    Attributes:
        points: The control points, weight vectors in the order of :func:`lightning_sym.landscape.weight_vector`. Shape
            ``[n, P]``, floating, n >= 2.
        kind: ``"bezier"`` or ``"chain"``.
        about: Metadata: plain values, stored with the curve.

    Raises:
        ValueError: If the control points have another shape or dtype, or the kind is unknown.

    References:
        Garipov et al. (2018), "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv:1802.10026,
        equations 1 to 3. docs/theory/curves.md, 1.1.

    Example:
        >>> curve = Curve(torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]]))
        >>> curve(0.5), curve.tangent(0.0)
        (tensor([1., 1.]), tensor([2., 4.]))
    """

    points: Tensor
    kind: CurveKind = "bezier"
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_known("kind", self.kind, KINDS)
        given = self.points
        if given.ndim != 2 or len(given) < 2 or not given.is_floating_point():
            raise ValueError(f"points must be at least two weight vectors, got {given.dtype} {list(given.shape)}.")

    @classmethod
    def straight(cls, start: Tensor, end: Tensor, bends: int = 0, kind: CurveKind = "bezier") -> Self:
        """Return the linear path between two weight vectors, with equally spaced control points on it.

        Args:
            start: Endpoint at t = 0. Shape ``[P]``.
            end: Endpoint at t = 1. Shape ``[P]``.
            bends: Number of control points between the endpoints. >= 0.
            kind: ``"bezier"`` or ``"chain"``.

        Returns:
            The curve; both endpoints are bitwise copies.

        Raises:
            ValueError: If an argument is out of range, or the endpoints differ in shape or dtype.
        """
        check_integers(0, bends=bends)
        if start.ndim != 1 or start.shape != end.shape or start.dtype != end.dtype or not start.is_floating_point():
            raise ValueError(
                "start and end must be floating weight vectors of one shape and dtype, got "
                f"{start.dtype} {list(start.shape)} and {end.dtype} {list(end.shape)}."
            )
        share = torch.linspace(0, 1, bends + 2, dtype=torch.float64)[1:-1, None].to(start)
        return cls(torch.cat([start[None], torch.lerp(start, end, share), end[None]]).detach(), kind)

    @property
    def bends(self) -> int:
        """Number of control points between the endpoints."""
        return len(self.points) - 2

    def __call__(self, t: float | Tensor) -> Tensor:
        """Return the weight vectors at ``t``. Shape ``[..., P]``; bitwise the endpoints at 0 and 1."""
        places = self._places(t)
        found = curve_coefficients(self.kind, len(self.points), places).to(self.points) @ self.points
        for place, point in ((0, self.points[0]), (1, self.points[-1])):  # a sum with 0 changes -0 to 0
            found = torch.where((places == place).to(self.points.device)[..., None], point, found)
        return found

    def tangent(self, t: float | Tensor) -> Tensor:
        """Return the derivatives by ``t``, of shape ``[..., P]``; at a bend of a chain that of the next segment."""
        steps, last = self.points.diff(dim=0), len(self.points) - 1
        if self.kind == "chain":
            return last * steps[self._segment(t)]
        return last * self._sum(steps, t)

    def second_derivative(self, t: float | Tensor) -> Tensor:
        """Return the second derivatives by ``t``, of shape ``[..., P]``; 0 on a chain, although undefined at bends."""
        last = len(self.points) - 1
        if self.kind == "chain" or last == 1:
            return self.points.new_zeros(*self._places(t).shape, self.points.shape[1])
        return last * (last - 1) * self._sum(self.points.diff(n=2, dim=0), t)

    def length(self, chords: int = 60) -> float:
        """Return the length of the polygon through ``chords + 1`` points, equally spaced in t: a lower bound."""
        check_integers(chords=chords)
        return float(self.steps(torch.linspace(0, 1, chords + 1, dtype=torch.float64)).sum())

    def steps(self, t: Tensor) -> Tensor:
        """Return the distances between consecutive points at ``t [T]``, T >= 2: ``[T - 1]``, float64, on the CPU."""
        if t.ndim != 1 or len(t) < 2:
            raise ValueError(f"t must have shape [T], T >= 2, got {list(t.shape)}.")
        points = [self(place) for place in t.tolist()[:1]]
        found = []
        for place in t.tolist()[1:]:  # one by one, as all of them together may not fit into memory
            points = [points[-1], self(place)]
            found.append(torch.linalg.vector_norm((points[1] - points[0]).double()))
        return torch.stack(found).cpu()

    def plane(self) -> WeightPlane:
        """Return the plane through the endpoints and the control point furthest from the linear path.

        With one inner control point the plane contains the curve (docs/theory/curves.md, 1.4). The first coordinate
        runs along the linear path, the second towards the control point.

        Raises:
            ValueError: If all control points are collinear or the endpoints coincide.
        """
        exact = self.points.detach().double().cpu()
        along = exact[-1] - exact[0]
        if not bool(along.any()):
            raise ValueError("Both endpoints have identical weights and span no plane; pass two different networks.")
        offsets = exact[1:-1] - exact[0]
        away = offsets - (offsets @ along / (along @ along))[:, None] * along
        if self.bends == 0:
            raise ValueError("The curve has no inner control point and spans no plane; train it with bends >= 1.")
        distances = torch.linalg.vector_norm(away, dim=1)
        if distances.max() <= 1e-6 * torch.linalg.vector_norm(exact, dim=1).max():  # rounding, in float32
            raise ValueError(
                "All control points of the curve are on the linear path and span no plane; train the curve."
            )
        return WeightPlane.through(exact[[0, -1, 1 + int(distances.argmax())]], tolerance=1e-9)

    def writer(self, network: nn.Module) -> Callable[[float], None]:
        """Return a function that writes the weights at ``t`` into a network, in place.

        Args:
            network: Network to write to; only its trainable parameters change.

        Raises:
            ValueError: If the network has another number of trainable parameters.
        """
        parameters = trainable(network)
        weight_tensors(network, self.points)  # raises if the sizes differ

        @torch.no_grad()
        def place(t: float) -> None:
            for name, value in weight_tensors(network, self(t)).items():
                parameters[name].copy_(value)

        return place

    def save(self, path: str | Path) -> None:
        """Write control points, kind and :attr:`about` to a safetensors file, completely or not at all.

        Args:
            path: The file. Its folder is created if it does not exist.

        Raises:
            OSError: If it cannot be written.
        """
        write_atomically(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the file of :meth:`save`."""
        try:
            text = json.dumps({"format": FORMAT, "kind": self.kind, "about": dict(self.about)}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"about must map names to numbers, texts and lists of these ({error}).") from error
        return save({"points": self.points.detach().cpu().contiguous()}, metadata={"curve": text})

    def _places(self, t: float | Tensor) -> Tensor:
        places = torch.as_tensor(t, dtype=torch.float64)
        if not bool(((places >= 0) & (places <= 1)).all()):
            raise ValueError(f"t must be in [0, 1], got {t}.")
        return places

    def _segment(self, t: float | Tensor) -> Tensor:
        last = len(self.points) - 1
        at = self._places(t) * last
        bends = at.round()  # k / last times last may be below k by rounding
        near = (at - bends).abs() <= 2 * torch.finfo(at.dtype).eps * bends
        return torch.where(near, bends, at).long().clamp(max=last - 1)

    def _sum(self, points: Tensor, t: float | Tensor) -> Tensor:
        """Return the point of the Bezier curve with the given control points, at least one."""
        places = self._places(t)
        if len(points) == 1:
            return points[0].expand(*places.shape, -1)
        return curve_coefficients("bezier", len(points), places).to(points) @ points


def load_curve(path: str | Path) -> Curve:
    """Read a curve that :meth:`Curve.save` or :class:`lightning_sym.tasks.CurveTask` wrote.

    Args:
        path: The safetensors file.

    Returns:
        The curve, on the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no curve, or is damaged.

    Example:
        >>> curve = load_curve("results/curve-0-1-bezier.safetensors")  # doctest: +SKIP
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no curve at {file}; pass the file of a curve, for example one of {file.parent}."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            record = load_json((opened.metadata() or {})["curve"])
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {FORMAT!r}")
            return Curve(opened.get_tensor("points"), record["kind"], record["about"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} holds no curve, or is damaged ({error}); train the curve again.") from None


def curve_barriers(
    curve: Curve,
    network: nn.Module,
    splits: Mapping[str, LabelledBatches],
    *,
    points: int = 61,
    **options: Unpack[LossOptions],
) -> dict[str, Barrier]:
    """Measure loss and accuracy along a curve, as :func:`lightning_sym.connectivity.barrier` does on a linear path.

    Batch norm statistics are recomputed at every point, endpoints included.

    Args:
        curve: The curve.
        network: A network of the architecture, with any weights. Not changed. Its device is used.
        splits: Data by name, ``{"train": ..., "test": ...}``; each as for ``barrier``.
        points: Number of points, equally spaced in t, endpoints included. >= 2; for barriers use 61 points and the
            training data, as few points miss the maximum.
        options: As for ``barrier``; without ``recalibration_data`` the first of the splits.

    Returns:
        Loss, accuracy and barriers, by name of the data.

    Raises:
        ValueError: As for ``barrier``, or if the curve does not match the network.
    """
    check_integers(2, points=points)
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    scratch = copied(network)
    found = split_losses(scratch, curve.writer(scratch), t.tolist(), splits, **options)
    return {name: Barrier(own.loss, own.accuracy, own.samples, own.recalibrated, t) for name, own in found.items()}


@dataclass(frozen=True)
class CurveSummary:
    """Summary of a quantity along a curve, in the units of the quantity.

    Attributes:
        start: Value at t = 0.
        end: Value at t = 1.
        lowest: Minimum over all points.
        highest: Maximum over all points.
        mean: Mean over points, that is, over t.
        integral: Mean over arc length, by the trapezoidal rule; equals ``mean`` for a curve of length 0.
    """

    start: float
    end: float
    lowest: float
    highest: float
    mean: float
    integral: float

    @classmethod
    def of(cls, values: Tensor, steps: Tensor) -> Self:
        """Summarise values at points of a curve (docs/theory/curves.md, 1.3).

        Args:
            values: Shape ``[T]``, T >= 2.
            steps: Distances between consecutive points, see :meth:`Curve.steps`. Shape ``[T - 1]``.

        Raises:
            ValueError: If the shapes do not match.
        """
        if values.ndim != 1 or steps.shape != (len(values) - 1,) or len(values) < 2:
            raise ValueError(
                f"values must have shape [T] and steps [T - 1], got {list(values.shape)} and {list(steps.shape)}."
            )
        values, steps = values.double(), steps.double()
        middles = (values[1:] + values[:-1]) / 2
        if not steps.any():  # equal endpoints
            steps = torch.ones_like(steps)
        return cls(
            start=float(values[0]),
            end=float(values[-1]),
            lowest=float(values.min()),
            highest=float(values.max()),
            mean=float(values.mean()),
            integral=float((middles * steps).sum() / steps.sum()),
        )
