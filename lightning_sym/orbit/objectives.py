"""Objectives for descents over orbits: norms, flatness, and errors of rounded or pruned networks."""

import copy
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional

from lightning_sym._checks import check_integers, check_numbers, check_words
from lightning_sym._text import unknown
from lightning_sym.networks.modes import loss_errors, twice_differentiable
from lightning_sym.orbit.closed_forms import least_dual_squares, least_squares
from lightning_sym.orbit.objective import Objective, check_no_targets
from lightning_sym.orbit.rounding import Granularity, RoundedInputs, check_rounding, kept, matrices_of, rounded
from lightning_sym.orbit.view import View, call_of, targets_of
from lightning_sym.symmetry import Call, Element, Symmetry

Loss = Callable[[Tensor, Tensor], Tensor]

# Coordinates that change no norm of a matrix, and those of biases.
_NO_SCALES = ("rotations", "phases", "shifts", "tilts")
_MOST = 2**28  # numbers that the derivatives of all outputs may be together
_PRODUCTS = 30  # of the curvature with vectors, to its largest eigenvalue


def weight_norm(p: float = 2) -> Objective:
    r"""Build the objective :math:`\sum |w|^p` of all parameters; for p = 2 the squared norm.

    Args:
        p: The power, > 0. Below 1 and at 1 there are kinks at 0.

    Raises:
        ValueError: If the power is not positive.
    """
    check_numbers("> 0", p=p)
    return WeightNorm(p)


def path_norm(p: float = 2) -> Objective:
    r"""Build the objective of the sum over all paths of the product of :math:`|w|^p`, for networks of ReLU.

    Neyshabur et al. 2015 (arXiv 1506.02617). The sum is the output of a network with weights :math:`|w|^p` where all
    inputs are 1; biases begin paths as well. Scales of ReLU units leave it alone, so that only linear layers in a row
    can change it. Only the shape of the data counts.

    Args:
        p: The power, > 0.

    Raises:
        ValueError: If the power is not positive. At the start of a descent: if the network has norms, or is not
            positively homogeneous in its inputs and biases.
    """
    check_numbers("> 0", p=p)
    return PathNorm(p)


def gradient_norm(loss: str | Loss = "cross_entropy", p: float = 2) -> Objective:
    r"""Build the objective :math:`\sum |\partial L / \partial w|^p` of the mean loss L of a batch.

    The objective of symmetry teleportation (Zhao et al. 2022, arXiv 2205.10637). It has no maximum on an orbit with
    scales. Several batches give the mean of their norms, which is larger than the norm of the mean.

    Args:
        loss: "cross_entropy" (classes along the last axis), "mse", or a function of outputs and targets that returns
            the mean loss.
        p: The power, > 0.

    Raises:
        ValueError: If the power is not positive, or there is no such loss.
    """
    check_numbers("> 0", p=p)
    return GradientNorm(_loss(loss), p)


def sharpness(
    loss: str | Loss = "cross_entropy", kind: Literal["trace", "top"] = "trace", *, probes: int | None = None
) -> Objective:
    r"""Build the objective of the trace, or the largest eigenvalue, of the Gauss-Newton matrix of the mean loss.

    The matrix is :math:`\frac1N \sum_n J_n^\top \Lambda_n J_n` with the Jacobian J of the outputs of sample n and the
    second derivative of its loss by these. Its trace is that of the Hessian where each output is piecewise linear in
    every single weight, as in networks of ReLU.

    - ``"trace"``: exactly, from the derivatives of all outputs of each sample, which are held together; or, with
      `probes`, by Hutchinson's estimate with random signs that are the same at each call, without that memory.
    - ``"top"``: 30 steps of Lanczos's method with a fixed first vector, then the Rayleigh quotient of the vector found,
      whose derivative is that of the eigenvalue up to the square of the vector's error.

    Args:
        loss: As for :func:`gradient_norm`; a function must be a mean over samples.
        kind: See above.
        probes: Number of vectors of random signs, >= 1; None for the exact trace.

    Raises:
        ValueError: If there is no such loss or kind; if probes are given for the largest eigenvalue. In a descent: if
            the derivatives of all outputs are more than 2^28 numbers.
    """
    check_words(("kind", kind, ("trace", "top")))
    if probes is not None:
        check_integers(1, probes=probes)
        if kind == "top":
            raise ValueError("probes estimate the trace; leave these out for kind='top'.")
    return LargestCurvature(_loss(loss)) if kind == "top" else GaussNewtonTrace(_loss(loss), probes)


def quantization_error(
    bits: int = 4,
    granularity: Granularity = "tensor",
    activations: int | None = None,
    kind: Literal["output", "range"] = "output",
) -> Objective:
    r"""Build the objective of the error of rounding a network's matrices and kernels.

    - ``"output"``: the relative squared error of the outputs on data, of the network that
      :func:`round_to_nearest` gives, against the network itself. Its derivative is the straight-through one, and moves
      all coordinates, as SpinQuant does with rotations (Liu et al. 2024, arXiv 2405.16406).
    - ``"range"``: the squared error that uniform rounding has on average, a twelfth of the square of the step, relative
      to the weights' squares; the mean over tensors. It reads no data. Scales and matrices would lower it by letting
      few weights count, so that it moves rotations only unless `factors` says otherwise.

    Args:
        bits: Number of bits of a weight, >= 2.
        granularity: Whether each tensor has one range, or each output channel its own.
        activations: Number of bits of the inputs of linear maps and convolutions, >= 2; None leaves these.
        kind: See above.

    Raises:
        ValueError: If a number of bits is below 2, the granularity or kind is unknown, or activations are to be rounded
            without outputs.
    """
    check_rounding(bits, granularity, activations)
    check_words(("kind", kind, ("output", "range")))
    if kind == "output":
        return ErrorOfRounding(bits, granularity, activations)
    if activations is not None:
        raise ValueError("kind='range' looks at weights alone; leave activations out, or choose kind='output'.")
    return RangeOfWeights(bits, granularity)


def sparsity(fraction: float = 0.5, kind: Literal["output", "l1"] = "output") -> Objective:
    r"""Build the objective of the error of pruning a network's matrices and kernels by magnitude.

    - ``"output"``: the relative squared error of the outputs on data, of the network that :func:`prune_by_magnitude`
      gives, against the network itself; differentiated with the mask held.
    - ``"l1"``: :math:`\|W\|_1 / (\sqrt n\, \|W\|_2)`, the mean over tensors of n weights: 1 where all are equal in
      size, 0.8 for normally distributed ones. It reads no data. It moves rotations only unless `factors` says
      otherwise, as for ``kind="range"`` of :func:`quantization_error`.

    Args:
        fraction: Part of the weights of each tensor that becomes 0, in [0, 1). ``"l1"`` ignores it.
        kind: See above.

    Raises:
        ValueError: If the fraction is outside [0, 1), or the kind is unknown.
    """
    check_numbers("in [0, 1)", fraction=fraction)
    check_words(("kind", kind, ("output", "l1")))
    return ErrorOfPruning(fraction) if kind == "output" else RelativeL1()


OBJECTIVES: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {own.__name__: own for own in (weight_norm, path_norm, gradient_norm, sharpness, quantization_error, sparsity)}
)


def objective_named(name: str, **options: Any) -> Objective:
    """Build an objective by its name.

    Args:
        name: One of :data:`OBJECTIVES`.
        options: The arguments of the function of this name.

    Raises:
        ValueError: If there is no such objective or option, or an option is out of its range.

    Example:
        >>> objective_named("weight_norm", p=1).smooth
        False
    """
    if name not in OBJECTIVES:
        raise ValueError(unknown("objective", name, OBJECTIVES))
    taken = inspect.signature(OBJECTIVES[name]).parameters
    for option in options:
        if option not in taken:
            raise ValueError(unknown(f"option of the objective {name}", option, taken))
    return OBJECTIVES[name](**options)


def _loss(given: str | Loss) -> Loss:
    losses: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": functional.mse_loss}
    if callable(given):
        return given
    if given not in losses:
        raise ValueError(unknown("loss", given, losses))
    return losses[given]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; classes are the last axis where the other axes are those of the targets."""
    if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(outputs, targets)


class WeightNorm(Objective):
    """See :func:`weight_norm`."""

    def __init__(self, p: float) -> None:
        self.p, self.smooth = p, p > 1

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        return _power_sum(view.values(), self.p)

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the balanced element for p = 2; see :class:`Objective`."""
        return least_squares(symmetry, view.parameters, kinds) if self.p == 2 else None


class PathNorm(Objective):
    """See :func:`path_norm`."""

    reads_data = True

    def __init__(self, p: float) -> None:
        self.p, self.smooth = p, p > 1

    def begun(self, view: View, batches: Sequence[Any]) -> Objective:
        """Check that the network has paths; see :class:`Objective`.

        Raises:
            ValueError: If it has norms, or is not linear in positive inputs.
        """
        check_no_targets(batches)
        if any(isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm)) for module in view.module.modules()):
            raise ValueError("path norms are of linear maps and ReLU, but the network has norms; fold these first.")
        with torch.no_grad():
            one, two, three = (self._run(view, batches[0], size).double() for size in (1.0, 2.0, 3.0))
        if not torch.allclose(three - two, two - one, rtol=1e-9) or not bool((two > one).any()):
            raise ValueError(
                "path norms are of linear maps and ReLU, but the network with positive weights is not linear in "
                "positive inputs; expected one without softmax, norms and smooth activations."
            )
        return self

    def _run(self, view: View, batch: Any, size: float = 1.0) -> Tensor:
        call = call_of(batch)

        def filled(given: Any) -> Any:
            filling = isinstance(given, Tensor) and given.is_floating_point()
            return torch.full_like(given[:1], size) if filling else given

        ones = Call(tuple(map(filled, call.positional)), {n: filled(own) for n, own in call.keywords.items()})
        powers = {name: own.abs().pow(self.p) for name, own in view.items() if own.is_floating_point()}
        return view.replaced(powers).output(ones._replace(output=call.output))

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        return self._run(view, batch).sum()


class GradientNorm(Objective):
    """See :func:`gradient_norm`."""

    reads_data = True

    def __init__(self, loss: Loss, p: float) -> None:
        self.loss, self.p, self.smooth = loss, p, p > 1

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        slopes = self._slopes(view, batch, create_graph=True)
        return _power_sum([own for own in slopes.values() if own is not None], self.p)

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the element of the dual problem for p = 2 and one batch; see :class:`Objective`."""
        if self.p != 2 or len(batches) != 1:
            return None
        slopes = self._slopes(view, batches[0], create_graph=False)
        whole = {name: torch.zeros_like(view[name]) if own is None else own for name, own in slopes.items()}
        return least_dual_squares(symmetry, whole, kinds)

    def _slopes(self, view: View, batch: Any, *, create_graph: bool) -> dict[str, Tensor | None]:
        """Return the gradient of the loss by each parameter that has one."""
        leaves = {name: own for name, own in view.items() if own.requires_grad}
        with torch.enable_grad(), twice_differentiable():
            outputs, targets = view.output(batch), targets_of(batch)
            with loss_errors(outputs, targets):
                value = self.loss(outputs, targets)
            found = torch.autograd.grad(value, list(leaves.values()), create_graph=create_graph, allow_unused=True)
        return dict(zip(leaves, found, strict=True))


class GaussNewton(Objective):
    """The Gauss-Newton matrix of a mean loss."""

    reads_data = True

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def form(self, view: View, batch: Any, vectors: Mapping[str, Tensor]) -> Tensor:
        """Return the quadratic form of the matrix at a vector, given by parameter."""

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            return view.replaced(weights).output(batch)

        weights = {name: view[name] for name in vectors}
        value, speed = jvp(outputs, (weights,), (dict(vectors),))[:2]
        result: Tensor = (speed * self.curved(value, targets_of(batch))(speed)).sum()
        return result

    def curved(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the product with the second derivative of the mean loss by all outputs.

        By reverse derivatives alone, as the forward ones of some losses (squared errors) fail in torch.
        """

        def slope(own: Tensor) -> Tensor:
            found: Tensor = grad(self.loss)(own, targets)
            return found

        with loss_errors(outputs, targets):
            back = vjp(slope, outputs)[1]

        def product(speed: Tensor) -> Tensor:
            found: Tensor = back(speed)[0]
            return found

        return product


class GaussNewtonTrace(GaussNewton):
    """See :func:`sharpness`."""

    def __init__(self, loss: Loss, probes: int | None) -> None:
        super().__init__(loss)
        self.probes = probes

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        with twice_differentiable(functional=True):
            if self.probes is not None:
                return self._estimate(view, batch, self.probes)
            return torch.stack([own.sum() for own in self._diagonal(view, batch).values()]).sum()

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the element of the dual problem over scales alone; see :class:`Objective`."""
        if self.probes is not None or kinds != {"scales"}:
            return None
        with twice_differentiable(functional=True):
            diagonals = [{n: own.detach() for n, own in self._diagonal(view, batch).items()} for batch in batches]
        means = {name: torch.stack([own[name] for own in diagonals]).mean(0) for name in diagonals[0]}
        if any(bool((own < 0).any()) for own in means.values()):  # a loss that is not convex
            return None
        return least_dual_squares(symmetry, {name: own.sqrt() for name, own in means.items()}, kinds)

    def _estimate(self, view: View, batch: Any, probes: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(probes):
            total = total + self.form(view, batch, _signs(view, generator)).to(total)
        return total / probes

    def _diagonal(self, view: View, batch: Any) -> dict[str, Tensor]:
        """Return the diagonal of the matrix, by parameter."""
        call, targets = call_of(batch), targets_of(batch)
        inputs = call.positional
        if call.keywords or not all(isinstance(own, Tensor) for own in inputs):
            raise ValueError(
                "the exact trace takes inputs as tensors with samples along the first axis; pass probes=16."
            )
        weights = {name: own for name, own in view.items() if own.is_floating_point()}
        outputs = view.output(batch)
        count, width = len(outputs), math.prod(outputs.shape[1:])
        if count * width * sum(own.numel() for own in weights.values()) > _MOST:
            raise ValueError(
                f"the derivatives of {count} x {width} outputs are more than {_MOST} numbers; pass smaller batches, or "
                "probes=16 for an estimate of the trace."
            )

        # The blocks of the samples, with the weight of each in the mean: one that the loss ignores has none.
        columns = torch.eye(width).to(outputs).view(width, 1, *outputs.shape[1:]).expand(width, *outputs.shape)
        inner: Tensor = vmap(self.curved(outputs, targets))(columns).reshape(width, count, width).movedim(0, 1)

        def single(own: dict[str, Tensor], *one: Tensor) -> Tensor:
            batched = call._replace(positional=tuple(each[None] for each in one))
            return view.replaced(own).output(batched).reshape(-1)

        slopes = vmap(torch.func.jacrev(single), in_dims=(None, *(0 for _ in inputs)))(weights, *inputs)
        found = {}
        for name, own in slopes.items():
            rows = own.reshape(count, width, -1)
            found[name] = ((inner @ rows) * rows).sum((0, 1)).view(weights[name].shape)
        return found


class LargestCurvature(GaussNewton):
    """See :func:`sharpness`."""

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        with twice_differentiable(functional=True):
            return self.form(view, batch, self._vector(view, batch))

    def _vector(self, view: View, batch: Any) -> dict[str, Tensor]:
        """Return the unit vector of largest curvature, by Lanczos's method with full orthogonalisation."""
        names = [name for name, own in view.items() if own.is_floating_point()]
        still = view.replaced({name: view[name].detach() for name in names})
        shapes = {name: still[name].shape for name in names}
        first = _signs(still, torch.Generator().manual_seed(0))

        def flat(parts: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([parts[name].reshape(-1) for name in names])

        def shaped(vector: Tensor) -> dict[str, Tensor]:
            parts = torch.split(vector, [shape.numel() for shape in shapes.values()])
            return {name: own.view(shape) for (name, shape), own in zip(shapes.items(), parts, strict=True)}

        def product(vector: Tensor) -> Tensor:
            with torch.enable_grad():
                at = shaped(vector.clone().requires_grad_())
                value = self.form(still, batch, at)
                found = torch.autograd.grad(value, list(at.values()))
            return flat(dict(zip(names, found, strict=True))) / 2

        basis = [flat(first) / flat(first).norm()]
        images: list[Tensor] = []
        for _ in range(min(_PRODUCTS, len(basis[0]))):
            images.append(product(basis[-1]).detach())
            space = torch.stack(basis)
            rest = images[-1]
            for _ in range(2):
                rest = rest - space.mT @ (space @ rest)
            if float(rest.norm()) <= 1e-12 * float(images[-1].norm()):
                break
            basis.append(rest / rest.norm())
        space = torch.stack(basis[: len(images)])
        small = space @ torch.stack(images).mT
        vector = space.mT @ torch.linalg.eigh((small + small.mT) / 2)[1][:, -1]
        return shaped(vector / vector.norm())


class ErrorOfOutputs(Objective):
    """The relative squared error of the outputs of a network with changed weights.

    Attributes:
        activations: Number of bits of rounded activations; None for none.
    """

    smooth = False
    reads_data = True
    needs_one_sided = True  # relative errors do not fall where weights tend to 0
    activations: int | None = None

    def __init__(self) -> None:
        self._axes: dict[str, int] = {}
        self._references: list[tuple[Any, Tensor]] = []

    def begun(self, view: View, batches: Sequence[Any]) -> Objective:
        """Compute the outputs of the network itself; see :class:`Objective`."""
        check_no_targets(batches)
        begun = copy.copy(self)
        begun._axes = matrices_of(view.module)
        with torch.no_grad():
            begun._references = [(batch, view.output(batch).detach()) for batch in batches]
        return begun

    @abstractmethod
    def changed(self, weight: Tensor, axis: int) -> Tensor:
        """Return the changed weights of a matrix or kernel with output channels along an axis."""

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        if batch is None:
            raise ValueError(f"{type(self).__name__} needs data to run the network on; pass data=...")
        axes = self._axes or matrices_of(view.module)
        wanted = next((own for one, own in self._references if one is batch), None)
        if wanted is None:
            with torch.no_grad():
                wanted = view.output(batch)
        other = view.replaced({name: self.changed(view[name], axis) for name, axis in axes.items()})
        with twice_differentiable(), nullcontext() if self.activations is None else RoundedInputs(self.activations):
            found = other.output(batch)
        return (found - wanted).square().sum() / wanted.square().sum()


class ErrorOfRounding(ErrorOfOutputs):
    """See :func:`quantization_error`."""

    def __init__(self, bits: int, granularity: Granularity, activations: int | None) -> None:
        super().__init__()
        self.bits, self.granularity, self.activations = bits, granularity, activations

    def changed(self, weight: Tensor, axis: int) -> Tensor:
        """Return the changed weights; see :class:`ErrorOfOutputs`."""
        return rounded(weight, self.bits, axis if self.granularity == "channel" else None)


class ErrorOfPruning(ErrorOfOutputs):
    """See :func:`sparsity`."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction

    def changed(self, weight: Tensor, axis: int) -> Tensor:
        """Return the changed weights; see :class:`ErrorOfOutputs`."""
        return weight * kept(weight, self.fraction)


class OfMatrices(Objective):
    """The mean over matrices that are not 0 of a function of each."""

    smooth = False
    factors = _NO_SCALES

    @abstractmethod
    def of(self, weight: Tensor, axis: int) -> Tensor:
        """Return the value of a matrix with output channels along an axis."""

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        # A matrix of zeros is rounded without an error, and stays 0 along the orbit.
        found = [
            self.of(own, axis) for name, axis in matrices_of(view.module).items() if bool((own := view[name]).any())
        ]
        if not found:
            raise ValueError("the network has no matrix or kernel other than 0; expected at least one.")
        return torch.stack(found).mean()


class RangeOfWeights(OfMatrices):
    """See :func:`quantization_error`."""

    def __init__(self, bits: int, granularity: Granularity) -> None:
        self.bits, self.granularity = bits, granularity

    def of(self, weight: Tensor, axis: int) -> Tensor:
        """Return the value of a matrix; see :class:`OfMatrices`."""
        rows = weight.movedim(axis, 0).flatten(1) if self.granularity == "channel" else weight.reshape(1, -1)
        steps: Tensor = rows.abs().amax(1) / (2 ** (self.bits - 1) - 1)
        return steps.square().mean() / 12 / weight.square().mean()


class RelativeL1(OfMatrices):
    """See :func:`sparsity`."""

    def of(self, weight: Tensor, axis: int) -> Tensor:
        """Return the value of a matrix; see :class:`OfMatrices`."""
        return weight.abs().mean() / weight.square().mean().sqrt()


def _power_sum(tensors: Any, p: float) -> Tensor:
    """Return the sum of powers of magnitudes."""
    floating = [own for own in tensors if own.is_floating_point()]
    if p < 1:  # at 0 the derivative is infinite, but no coordinate moves a 0 by a factor
        floating = [own[own != 0] for own in floating]
    parts = [own.square().sum() if p == 2 else own.abs().pow(p).sum() for own in floating]
    if not parts:
        raise ValueError("the network has no floating parameter that the objective depends on; expected at least one.")
    return torch.stack(parts).sum()


def _signs(view: View, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random signs for each floating parameter."""
    found = {}
    for name, own in view.items():
        if own.is_floating_point():
            drawn = torch.randint(0, 2, own.shape, generator=generator)
            found[name] = (2 * drawn - 1).to(own)
    return found
