"""Hessian and Gauss-Newton matrix of a mean loss as linear operators, over streamed data and over processes.

Products with the Gauss-Newton matrix, and traces, are those of curvlinops. This module adds sums over processes with
unequal shares, ignored samples, products on a subspace, and checks of data, network and loss. Products with the Hessian
are ours: reverse derivatives of reverse derivatives, which torch has for nearly all operations.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from lightning_sym._checks import check_integers, check_known, check_rows
from lightning_sym._distributed import gathered, run_on, summed, together, wide
from lightning_sym._random import derive_seed, seeded
from lightning_sym.curvature.blocks import EmptyLoaderError, NonFiniteError
from lightning_sym.curvature.passes import batches, check_weights, ready
from lightning_sym.networks.modes import batch_loss, for_loss, in_precision, loss_errors, twice_differentiable
from lightning_sym.symmetry.tracing.graph.capture import copied

_LOG = logging.getLogger(__name__)

Kind = Literal["hessian", "gauss_newton"]
Loss = Callable[[Tensor, Tensor], Tensor]
# Values below this, relative to the largest magnitude, are rounding.
ROUNDING = 1e-12
_FEW = 16  # vectors
_EIGHTHS_FROM = 64  # samples
# Words of torch's errors about derivatives that do not exist.
_UNDERIVED = ("implemented", "differentiate twice", "checkpoint", "saved tensor hooks")


@functools.cache
def curvlinops() -> ModuleType:
    """Return the library of that name, imported at its first use, which takes a second."""
    with warnings.catch_warnings():
        # One of its libraries uses torch.jit.script, and so does torch itself before its first forward derivative.
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        library = importlib.import_module("curvlinops")
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
        return library


class SymmetricOperator(ABC):
    """A symmetric matrix known only through its products with vectors.

    It may act on a subspace only. Eigenvalues, densities and directions are then those of its restriction to that
    subspace; the zeros of the matrix outside it are not among its eigenvalues.

    Attributes:
        size: Number of rows and of columns, P.
        dtype: Dtype of the products.
        device: Where products are computed.
        products: How many vectors it has been multiplied with by now.
    """

    size: int
    dtype: torch.dtype
    device: torch.device

    def __init__(self) -> None:
        self.products = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.size, self.size

    @property
    def dimension(self) -> int:
        """Number of eigenvalues: the dimension of the subspace that the matrix acts on, P if that is all."""
        return self.size

    def inside(self, vectors: Tensor) -> Tensor:
        """Return the parts of vectors in the subspace that the matrix acts on; the same shape, dtype and device."""
        return vectors

    def few(self) -> "SymmetricOperator | None":
        """Return a cheaper operator with nearly the same extreme eigenvectors; None if there is none."""
        return None

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Return the product with one vector or with several.

        Args:
            vectors: Shape ``[P]`` or ``[P, K]``, floating, on any device.

        Returns:
            The same shape, dtype and device as ``vectors``; computed in ``self.dtype``.

        Raises:
            ValueError: If the shape does not fit.
        """
        fits = vectors.ndim in (1, 2) and len(vectors) == self.size and vectors.numel()
        if not fits or not (vectors.is_floating_point() or vectors.is_complex()):
            raise ValueError(
                f"the operator has shape {list(self.shape)} and multiplies floating vectors of shape [{self.size}] or "
                f"[{self.size}, K], got {vectors.dtype} {list(vectors.shape)}."
            )
        given = vectors.detach().to(device=self.device, dtype=self.dtype)
        self.products += 1 if vectors.ndim == 1 else vectors.shape[1]
        return self._times(given if vectors.ndim == 2 else given[:, None]).reshape(vectors.shape).to(vectors)

    @abstractmethod
    def _times(self, vectors: Tensor) -> Tensor:
        """Return the product with a matrix of shape ``[P, K]``, on the device and in the dtype of the operator."""


class MatrixOperator(SymmetricOperator):
    """A symmetric matrix that is there as a whole.

    Args:
        matrix: Shape ``[P, P]``, floating.

    Raises:
        ValueError: If it is not square, or not symmetric to 1e-6 of its largest entry.
    """

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must have shape [P, P], got {list(matrix.shape)}.")
        if matrix.numel() and not float((matrix - matrix.T).abs().max()) <= 1e-6 * float(matrix.abs().max()):
            raise ValueError("matrix must be finite and symmetric; symmetrise it, or use its singular values.")
        self.matrix, self.size, self.dtype, self.device = matrix, len(matrix), matrix.dtype, matrix.device

    def _times(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors


class CurvatureOperator(SymmetricOperator):
    r"""The Hessian, or the Gauss-Newton matrix, of a network's mean loss over a data set.

    :math:`L(w) = \frac1N \sum_n \ell(f_w(x_n), y_n)`, over the samples of all processes. All samples weigh the same,
    for every batching and sharding; a process may have none. The matrix is that at the weights, buffers and data of
    now: the network is copied, in eval mode, so dropout is off and batch norms use their running statistics, which
    count as constants. A regulariser that is not in ``loss`` is not in the matrix: weight decay :math:`\lambda` in the
    optimizer adds :math:`\lambda I` to it. Products are those of curvlinops (docs/theory/spectra.md, 1).

    No gradient is stored, and the network and the global random state are restored bitwise.

    Args:
        network: Any module that maps a batch of inputs to a tensor of outputs.
        data: Batches ``(inputs, targets)`` in an order that does not change: a loader, a list, or one pair of tensors;
            or a datamodule with ``curvature_dataloader()``. This process's share of the samples.
        loss: Mean over the samples of a batch: outputs and targets to a scalar. Samples that it ignores, as of
            ``ignore_index``, do not count.
        kind: ``"hessian"`` or ``"gauss_newton"``: :math:`\frac1N \sum_n J_n^\top \nabla^2_f \ell\, J_n`.
        parameters: Names of the parameters that are the variables; default all that require gradients, in their order.
        dtype: Dtype of the computation; default the network's (float32 for half precision).
        columns: How many vectors go through the network together in products with matrices. >= 1.
        check: Whether to check in every product that the data are the same, and once that the network is deterministic
            and that the loss is a mean over samples: within each batch, and over samples of different batches. It costs
            a sum over the inputs, and one forward pass. Without it all samples count, also those that the loss
            ignores.

    Attributes:
        names: Names of the parameters, in the order of the vectors.
        shapes: Their shapes.
        samples: Number of samples N that count, over all processes.
        kind: As given.
        fallback: Why products with the Gauss-Newton matrix use reverse derivatives alone, as those with the Hessian
            always do: torch's message where it lacks the forward derivative of an operation, as of ``grid_sample``.
            Empty otherwise, and before the first product. Results agree up to rounding; many vectors take more time.

    Raises:
        ValueError: If an argument is out of range, or there is no such parameter. If the network or the loss does not
            fit the data, or outputs change from call to call. If the loss is no mean or has no second derivative.
        EmptyLoaderError: If there is no sample on any process.
        NonFiniteError: If a weight is not finite.

    Note:
        A product with one vector costs about as much as three gradients over all data, or two where the data are one
        batch: then the graph of the gradient is kept, which is as much memory as a product needs anyway. To be made,
        and multiplied with, on every process together.

    Example:
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> hessian = CurvatureOperator(nn.Linear(3, 2), (x, y), nn.functional.cross_entropy)
        >>> hessian.size, (hessian @ torch.ones(8)).shape
        (8, torch.Size([8]))
    """

    def __init__(
        self,
        network: nn.Module,
        data: Any,
        loss: Loss,
        *,
        kind: Kind = "hessian",
        parameters: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        columns: int = 8,
        check: bool = True,
    ) -> None:
        super().__init__()
        check_integers(columns=columns)
        check_known("kind", kind, get_args(Kind))
        if getattr(loss, "reduction", "mean") != "mean":
            raise ValueError(f"loss must be a mean over samples, got reduction={loss.reduction!r}; use 'mean'.")  # type: ignore[attr-defined]
        self.kind, self.columns, self.check, self.fallback = kind, columns, check, ""
        self._graph_checked = self._forward_checked = False
        together(lambda: self._prepare(network, data, loss, parameters, dtype))
        if check:
            together(self._check_calls)
        self.samples = sum(gathered(self._data.samples))
        if self.samples == 0 and any(gathered(self._data.longest)):
            raise EmptyLoaderError(
                "the loss of every sample is NaN, as of targets that it ignores; look for NaN there."
            )
        if self.samples == 0:
            raise EmptyLoaderError("data has no samples on any process; give the training split some.")

    def _prepare(
        self, network: nn.Module, data: Any, loss: Loss, names: Sequence[str] | None, dtype: torch.dtype | None
    ) -> None:
        """Copy the network and look at the data; one process may fail where others do not."""
        self.network = _copied(network, dtype)
        chosen = _chosen(self.network, names)
        self.network.requires_grad_(False)
        self._parameters = [p.requires_grad_(True) for p in chosen.values()]
        self.names, self.shapes = list(chosen), {name: tuple(p.shape) for name, p in chosen.items()}
        self._sizes = [p.numel() for p in self._parameters]
        self.size = sum(self._sizes)
        self.dtype, self.device = self._parameters[0].dtype, self._parameters[0].device
        self._loss = _MeanLoss(loss)
        # The gradient with its graph, of data that are one batch: it is the same in every product.
        self._kept: tuple[Tensor, ...] | None = None
        self._outputs: Tensor | None = None  # of that batch, with their graph, from the check to the first product
        self._data = _Batches(self.network, data, check=self.check)
        self._data.survey()

    # ---- products

    def _times(self, vectors: Tensor) -> Tensor:
        parts: list[Tensor] = []

        def multiply() -> None:
            try:
                parts.extend(self._local(part) for part in torch.split(vectors, self.columns, 1))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or not any(word in str(error) for word in _UNDERIVED):
                    raise
                said = " ".join(str(error).split())[:100]
                raise ValueError(
                    f"torch has no second derivative of the network or the loss ({said}); use modules and a loss that "
                    "have one."
                ) from error

        with _exactly(self.device):
            together(multiply)
            product = summed(torch.cat(parts, 1)) / self.samples
        if not product.isfinite().all():
            raise NonFiniteError("The curvature is not finite; lower the learning rate or look at the inputs.")
        found: Tensor = product.to(self.dtype)
        return found

    def _local(self, vectors: Tensor) -> Tensor:
        """Return this process's sum over samples. Shape ``[P, K]``."""
        if self._data.samples == 0:
            return torch.zeros_like(vectors, dtype=wide(self.device))
        product = self._one_by_one(vectors) if self.kind == "hessian" or self.fallback else self._together(vectors)
        self._data.require_same()
        return product

    def _together(self, vectors: Tensor) -> Tensor:
        """Return the Gauss-Newton matrix's product with vectors, as `_local`, by curvlinops unless that fails.

        A random combination of the first products is compared with the product of the combination by reverse
        derivatives: a forward derivative may be wrong without an error.
        """
        try:
            mean: Tensor = self._operator @ vectors
            product = mean.to(wide(self.device)) * self._data.samples
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return self._without_forward(vectors, " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200])
        if self._forward_checked:
            return product
        self._forward_checked = True
        draw = torch.Generator().manual_seed(0)
        signs = (2 * torch.randint(2, (vectors.shape[1], 1), generator=draw) - 1).to(vectors)
        try:
            difference = self._one_by_one(vectors @ signs) - product @ signs.to(product)
        except RuntimeError:  # no reverse derivative of the reverse one, which the matrix does not need
            return product
        if float(difference.norm()) > torch.finfo(self.dtype).eps ** 0.5 * float(product.norm()):
            return self._without_forward(vectors, "torch's forward derivatives disagree with its reverse ones")
        return product

    def _without_forward(self, vectors: Tensor, reason: str) -> Tensor:
        product = self._one_by_one(vectors)
        self.fallback = reason
        _LOG.info("Gauss-Newton products use reverse derivatives alone: %s.", reason)
        return product

    def _one_by_one(self, vectors: Tensor) -> Tensor:
        """Return the product with vectors, as `_local`, by reverse derivatives of reverse derivatives of autograd.

        One derivative of the same gradient after another. Forward derivatives of the gradient, of many vectors at once
        as in curvlinops, take half the time for small networks on small batches and more for others. torch lacks them
        for some operations, and that of ``jacrev`` is wrong for layer norms.
        """
        total = torch.zeros(self.size, vectors.shape[1], dtype=wide(self.device), device=self.device)
        columns = [list(self.split(vector).values()) for vector in vectors.T.contiguous()]
        outputs, self._outputs = self._outputs, None
        for x, y in self._data:
            if self.kind == "gauss_newton":
                self._add_gauss_newton(total, columns, x, y)
                continue
            slopes = self._kept
            if slopes is None:
                loss = self._loss(self.network(x) if outputs is None else outputs, y)
                slopes = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
                self._check_graph(slopes)
                self._kept = slopes if len(x) == self._data.samples else None
            ends = [slope for slope in slopes if slope.requires_grad]
            for column, directions in enumerate(columns if ends else ()):
                along = [one for slope, one in zip(slopes, directions, strict=True) if slope.requires_grad]
                parts = torch.autograd.grad(ends, self._parameters, along, retain_graph=True, materialize_grads=True)
                total[:, column] += len(x) * torch.cat([part.flatten() for part in parts])
        return total

    def _check_graph(self, slopes: Sequence[Tensor]) -> None:
        """Check that the gradient can be differentiated, once for each operator.

        A function marked as ``once_differentiable`` ends the graph with an error that autograd never reaches where it
        needs gradients of earlier parameters only: the second derivative would be another one, without any error.

        Args:
            slopes: The gradient, with its graph.

        Raises:
            RuntimeError: If a part of the graph cannot be differentiated.
        """
        if self._graph_checked:
            return
        left: list[Any] = [slope.grad_fn for slope in slopes]
        seen: set[Any] = set()
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            if node.name() == "torch::autograd::Error":
                raise RuntimeError("trying to differentiate twice a function that is marked with @once_differentiable")
            seen.add(node)
            left += [before for before, _ in node.next_functions]
        self._graph_checked = True

    def _add_gauss_newton(self, total: Tensor, columns: Sequence[Sequence[Tensor]], x: Tensor, y: Tensor) -> None:
        r"""Add a batch's sum over samples of :math:`J^\top \nabla^2_f \ell\, J v` to the columns of a tensor.

        :math:`J v` is the derivative of :math:`u \mapsto J^\top u`, which is linear, along v.
        """
        outputs = self.network(x)
        fixed = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self._loss(fixed, y), fixed, create_graph=True)
        if not (slope.requires_grad and outputs.requires_grad):  # a linear loss, or constant outputs
            return
        sides = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, self._parameters, sides, create_graph=True, materialize_grads=True)
        self._check_graph(pulled)
        known = [one.requires_grad for one in pulled]
        ends = list(itertools.compress(pulled, known))
        for column, directions in enumerate(columns if ends else ()):
            along = list(itertools.compress(directions, known))
            (moved,) = torch.autograd.grad(ends, sides, along, retain_graph=True, materialize_grads=True)
            (turned,) = torch.autograd.grad(slope, fixed, moved, retain_graph=True, materialize_grads=True)
            parts = torch.autograd.grad(outputs, self._parameters, turned, retain_graph=True, materialize_grads=True)
            total[:, column] += len(x) * torch.cat([part.flatten() for part in parts])

    @functools.cached_property
    def _operator(self) -> Any:
        """The Gauss-Newton matrix of this process's mean."""
        return curvlinops().GGNLinearOperator(
            self.network,
            self._loss,
            self._parameters,
            self._data,
            check_deterministic=False,
            num_data=self._data.samples,
            # Otherwise a batch would be asked for, only to look at the type of its inputs.
            batch_size_fn=len,
        )

    @property
    def loss(self) -> Loss:
        """The mean loss of a batch."""
        return self._loss

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the batches of this process.

        Yields:
            Inputs and targets, on the network's device and in its precision.
        """
        with _exactly(self.device):
            yield from self._data if self._data.samples else ()
        self._data.require_same()

    def residual(self) -> "CurvatureOperator":
        r"""Return the Hessian less the Gauss-Newton matrix, :math:`\frac1N \sum_{nk} r_{nk} \nabla^2_w f_{nk}`.

        Here r are the derivatives of the loss by the outputs at these weights. It is 0 where all r are.
        """
        found = copy.copy(self)
        found.__dict__.pop("_operator", None)
        found.kind, found.products, found._kept = "hessian", 0, None
        found._loss = _MeanLoss(functools.partial(_linear, self._loss))
        return found

    def few(self) -> "CurvatureOperator | None":
        """Return the operator of an eighth of the samples, if each process has one batch of at least 64."""
        count = self._data.samples
        if any(of != count or count < _EIGHTHS_FROM for of in gathered(self._data.longest)):
            return None
        (x, y), found = next(iter(self._data)), copy.copy(self)
        found.__dict__.pop("_operator", None)
        found._data = _Batches(self.network, [(x[::8], y[::8])], check=False)
        found._data.survey()
        found.products, found._kept, found._outputs = 0, None, None
        found.samples = sum(gathered(found._data.samples))
        return found

    def gradient_and_loss(self) -> tuple[Tensor, float]:
        """Return the gradient of the mean loss, shape ``[P]``, and the mean loss; to be called on every process."""
        found = [torch.zeros(self.size + 1, dtype=wide(self.device), device=self.device)]

        def add() -> None:
            for x, y in self._data if self._data.samples else ():
                loss = self._loss(self.network(x), y)
                parts = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
                joined = torch.cat([*(part.flatten() for part in parts), loss.detach()[None]])
                found[0] += len(x) * joined.to(found[0])
            self._data.require_same()

        with _exactly(self.device):
            together(add)
            mean = summed(found[0]) / self.samples
        return mean[:-1].to(self.dtype), float(mean[-1])

    def matrix(self, *, max_parameters: int = 4000) -> Tensor:
        """Return the whole matrix, symmetrised.

        Args:
            max_parameters: Most parameters that are accepted. >= 1.

        Returns:
            Shape ``[P, P]``, float64 (float32 where the device has none), on the device of the network.

        Raises:
            ValueError: If there are more parameters, or the device has no room for the matrix.
        """
        check_integers(max_parameters=max_parameters)
        if self.size > max_parameters:
            raise ValueError(
                f"the network has {self.size} parameters, and the whole matrix is made for at most max_parameters="
                f"{max_parameters}; use top_eigenpairs, trace and spectral_density, or raise max_parameters."
            )
        try:
            matrix, symmetric = (
                torch.empty(self.size, self.size, dtype=wide(self.device), device=self.device) for _ in range(2)
            )
        except RuntimeError as error:  # where there is no room
            raise ValueError(
                f"the whole matrix of {self.size} parameters needs {16 * self.size**2 / 2**30:.3g} GiB, more than "
                f"{self.device} has; use top_eigenpairs, trace and spectral_density, and a lower max_parameters."
            ) from error
        columns = max(self.columns, 128)
        for start in range(0, self.size, columns):
            part = torch.zeros(self.size, min(columns, self.size - start), dtype=matrix.dtype, device=self.device)
            part.diagonal(-start).fill_(1)
            matrix[:, start : start + columns] = self @ part
        torch.add(matrix, matrix.T, out=symmetric)
        return symmetric.div_(2)

    # ---- vectors

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return tensors by the names of the parameters as one vector, shape ``[P]``.

        Raises:
            ValueError: If one is missing or has another shape.
        """
        for name, shape in self.shapes.items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                got = list(tensors[name].shape) if name in tensors else "nothing"
                raise ValueError(f"{name!r} must be a tensor of shape {list(shape)}, got {got}.")
        return torch.cat([tensors[name].detach().flatten() for name in self.names])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector, shape ``[P]``, by the names of the parameters, each in its shape."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector must have shape [{self.size}], got {list(vector.shape)}.")
        parts = torch.split(vector, self._sizes)
        return {name: part.view(self.shapes[name]) for name, part in zip(self.names, parts, strict=True)}

    # ---- checks

    def _check_calls(self) -> None:
        """Check that the network is a function, and in every batch that the loss is a mean; leave ignored samples out.

        The form of the loss depends on the labels, so one batch does not represent the others.
        """
        counted = []
        across: list[tuple[Tensor, Tensor]] = []  # one sample of each of the last batches
        for number, (x, y) in enumerate(self._data):
            alone = self.kind == "hessian" and len(x) == self._data.samples
            with _exactly(self.device), torch.set_grad_enabled(alone):
                outputs = self._checked_outputs(x, again=number == 0)
            with _exactly(self.device):
                counted.append(self._counted(outputs, y))
                # The first product continues from here.
                self._outputs = outputs if alone and bool(counted[0].all()) else None
                outputs = outputs.detach()
                shapes = outputs.shape[1:], y.shape[1:]
                if across and shapes != tuple(part.shape[1:] for part in across[0]):
                    self._check_across(across)
                    across = []
                elif len(across) == _FEW:
                    self._check_across(across)
                    across = across[-1:]
                across.append((outputs[:1].clone(), y[:1]))
        with _exactly(self.device):
            self._check_across(across)
        self._data.count_only(counted)

    def _check_across(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        """Check that the loss is a mean over samples of different batches.

        Batches of one sample, or of one class, do not tell a mean from a sum or from a mean with weights.

        Args:
            rows: Outputs and targets of one sample each.
        """
        several = rows * 2 if len(rows) == 1 else rows
        if several and self._data.longest < self._data.samples + (self._data.samples == 1):
            outputs, targets = (torch.cat(parts) for parts in zip(*several, strict=True))
            self._counted(outputs, targets)

    def _checked_outputs(self, x: Tensor, *, again: bool) -> Tensor:
        """Return a batch's outputs, checked, and whether they are the same a second time."""
        one = check_rows(run_on(self.network, x), x)
        if not one.isfinite().all():
            raise NonFiniteError("The network's outputs are not finite; lower the learning rate or look at the inputs.")
        if again:
            # Another state of the random numbers changes the outputs of random modules.
            with torch.no_grad():
                two = self.network(x[:_FEW])
                with seeded(derive_seed("curvature", "again")):
                    three = self.network(x[:_FEW])
            if not torch.allclose(two, three, rtol=1e-4, atol=1e-6 * float(one.detach().abs().max())):
                raise ValueError(
                    "the outputs of the network change from run to run in eval mode, so that it has no unique "
                    "curvature; use modules for dropout and noise, which eval mode turns off."
                )
        return one

    def _counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a mask of the samples that the loss averages, without ignored ones. Shape ``[N]``.

        Raises:
            ValueError: If it is not their mean, or its gradient not that of the mean.
        """
        given = outputs.detach().requires_grad_()
        value = batch_loss(self._loss, given, targets)
        with loss_errors(outputs, targets):
            if value.requires_grad:  # integers instead of floats fail only here
                torch.autograd.grad(value, given, allow_unused=True)
        # Other samples' outputs are tried as well: outputs that fit have zero loss and gradient.
        tried = torch.cat([outputs, outputs.roll(1, 0)])
        apart = _apart(self._loss, tried, torch.cat([targets, targets]))
        counted = ~apart[0][: len(outputs)].isnan()  # of an ignored sample alone, the mean of none
        if not counted.any():
            return counted
        for given, alone, slopes in zip(tried.chunk(2), *(part.chunk(2) for part in apart), strict=True):
            given = given.detach().requires_grad_()
            value = self._loss(given, targets)
            (slope,) = torch.autograd.grad(value, given)
            value = value.detach()
            mean = alone[counted].mean()
            digits = torch.finfo(value.dtype).eps ** 0.5
            error = (slope.reshape(slopes.shape)[counted] * int(counted.sum()) - slopes[counted]).norm(dim=1)
            sizes = slopes[counted].norm(dim=1)
            wrong = error > digits * sizes + digits**2 * 16 * sizes.max()
            if value.isfinite() and mean.isfinite():
                wrong |= (value - mean).abs() > digits * (alone[counted].abs().mean() + digits)
            if wrong.any():
                raise ValueError(
                    f"loss must be the mean over samples with equal weights, and of {int(counted.sum())} "
                    f"samples it is {float(value):.4g} where the mean of their losses is {float(mean):.4g}, or its "
                    "gradient is another one; divide sums by the number of samples, without class weights and without "
                    "means over what some samples have more of."
                )
        return counted


def directional_curvature(
    operator: SymmetricOperator, directions: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    r"""Return :math:`\|H d\|` and :math:`d^\top H d` for some directions, each brought to length 1.

    If the matrix acts on a subspace, the parts of the directions in it are used.

    Args:
        operator: The matrix H.
        directions: Vectors by name, shape ``[P]`` each, not zero.

    Returns:
        The two numbers by name.

    Raises:
        ValueError: If a direction is zero, not finite, or orthogonal to the subspace that the matrix acts on.
    """
    if not directions:
        return {}
    units = []
    for name, direction in directions.items():
        vector = direction.detach().to(device=operator.device, dtype=wide(operator.device))
        length = float(vector.norm())
        if not 0 < length < float("inf"):
            raise ValueError(f"direction {name!r} must be a finite vector other than zero, got one of norm {length}.")
        part = operator.inside(vector / length)
        if not float(part.norm()) > ROUNDING:
            raise ValueError(
                f"direction {name!r} is orthogonal to the subspace that the matrix acts on, and has no curvature there."
            )
        units.append(part / part.norm())
    block = torch.stack(units, 1)
    products = operator @ block
    norms, curvatures = products.norm(dim=0).tolist(), (block * products).sum(0).tolist()
    return dict(zip(directions, zip(norms, curvatures, strict=True), strict=True))


# ---- data, loss and network


class _MeanLoss(nn.Module):
    """A loss as curvlinops wants it."""

    reduction = "mean"

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._call = loss.forward if isinstance(loss, nn.Module) else loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._call(outputs, targets)


def _linear(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Linearise a loss: the same gradient, and no second derivative by the outputs."""
    fixed = outputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(fixed, targets), fixed)
    return (slope * outputs).sum()


def _apart(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of single samples, shape ``[N]``, and their gradients by the outputs, shape ``[N, ...]``."""

    def one(row: Tensor, target: Tensor) -> Tensor:
        return loss(row[None], target[None])

    outputs = outputs.detach()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            slopes, losses = vmap(grad_and_value(one))(outputs, targets)
    except RuntimeError:  # not supported by torch.func
        pairs = [grad_and_value(one)(row, target) for row, target in zip(outputs, targets, strict=True)]
        slopes, losses = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return losses.detach(), slopes.reshape(len(slopes), -1).detach()


def batches_of(data: Any) -> Any:
    """Return the batches of a datamodule, of one pair of tensors, or those that are given."""
    if hasattr(data, "curvature_dataloader"):
        data = data.curvature_dataloader()
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return [tuple(data)] if pair else data


class _Batches:
    """The batches of this process, in the network's precision, and whether they are the same as at the first time."""

    def __init__(self, network: nn.Module, data: Any, *, check: bool) -> None:
        data = batches_of(data)
        if isinstance(data, Iterator) or not isinstance(data, Iterable):
            raise ValueError(
                f"data must be batches that can be gone through again, a loader or a list, got {type(data).__name__}."
            )
        self._network, self._data, self._check = network, data, check
        self.samples = self.longest = 0  # of all batches, and of the largest
        self._passes = 0
        self._counted: list[Tensor] = []  # by batch, if some samples do not count
        self._first: list[tuple[int, float, float]] = []
        self._last: list[tuple[int, Tensor, Tensor]] = []

    def survey(self) -> None:
        """Count the samples, and record checksums of the data."""
        lengths = [len(x) for x, _ in self]
        self.samples, self.longest = sum(lengths), max(lengths, default=0)
        self._first = self._noted()

    def count_only(self, counted: list[Tensor]) -> None:
        """Leave samples out from now on, which the loss ignores: for each batch, which ones count."""
        self.samples = sum(int(each.sum()) for each in counted)
        self._counted = [] if all(bool(each.all()) for each in counted) else counted

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        dtype = next(self._network.parameters()).dtype
        self._last = []
        self._passes += 1
        given = batches(self._network, self._data)
        for number in itertools.count():
            # Shuffling and augmentation draw other random numbers in every pass, and are detected.
            with seeded(derive_seed("curvature data", self._passes, number)):
                batch = next(given, None)
            if batch is None:
                return
            x, y = batch
            if y.ndim == 0 or len(y) != len(x):
                raise ValueError(
                    f"targets must have a row for each of the {len(x)} inputs of a batch, got shape {list(y.shape)}."
                )
            y = y.to(dtype) if y.is_floating_point() else for_loss(y)
            if self._check:
                self._last.append((len(x), _checksum(x), _checksum(y)))
            if number < len(self._counted):
                x, y = x[self._counted[number]], y[self._counted[number]]
            if len(x):
                yield x, y

    def _noted(self) -> list[tuple[int, float, float]]:
        return [(count, float(x), float(y)) for count, x, y in self._last]

    def require_same(self) -> None:
        """Check that the last pass was over the same data as the first one.

        Raises:
            ValueError: If it was not.
        """
        if self._check and self._noted() != self._first:
            raise ValueError(
                "the data changed between two passes, so that products are of different matrices; give batches in a "
                "fixed order without shuffling and random augmentation, such as curvature_dataloader() of a datamodule."
            )


def _checksum(tensor: Tensor) -> Tensor:
    """Return a number that changes with the values and their order, as a tensor."""
    # NaN may mark a missing value and does not equal itself, so it is replaced by a number.
    rows = tensor.detach().reshape(len(tensor), -1).to(wide(tensor.device)).nan_to_num(math.e, math.pi, -math.pi)
    places = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device).sqrt()
    return (rows @ places) @ torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device).sqrt()


@contextlib.contextmanager
def _exactly(device: torch.device) -> Iterator[None]:
    """Compute in full precision, with gradients of gradients possible, wherever the caller is."""
    autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), autocast, twice_differentiable():
        yield


def _copied(network: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy in eval mode, without gradients and backward hooks."""
    with ready(network) as checked:
        found = copied(checked)
    if dtype is not None:
        in_precision(found, dtype)
    check_weights(found)
    return found


def _chosen(network: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters that are the variables, by name."""
    every = dict(network.named_parameters())
    for name, parameter in every.items():
        if parameter.is_complex() and (parameter.requires_grad if names is None else name in names):
            raise ValueError(f"Parameter {name!r} is complex, and curvature is that of real numbers; freeze it.")
    if names is None:
        chosen = {name: p for name, p in every.items() if p.requires_grad}
        if not chosen:
            raise ValueError("the network has no parameter that requires gradients; name some in parameters.")
        return chosen
    for name in names:
        check_known("parameter", name, every)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"parameters must be different names, at least one, got {list(names)!r}.")
    return {name: every[name] for name in names}
