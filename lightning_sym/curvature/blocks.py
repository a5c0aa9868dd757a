"""Kronecker factored curvature: one block for each parameter tensor, and their sums for the evidence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sym._checks import check_known
from lightning_sym._distributed import gathered, ranks, summed, together, wide

Likelihood: TypeAlias = Literal["classification", "regression"]
LIKELIHOODS: tuple[Likelihood, ...] = ("classification", "regression")

Axes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of the axes of a block's entries, and the permutation of these axes that gives those of the parameter."""


class CurvatureError(ValueError):
    """The curvature of these weights on these data does not exist; of other weights or data it may."""


class EmptyLoaderError(CurvatureError):
    """There was no sample to compute curvature of."""


class NonFiniteError(CurvatureError):
    """Weights, loss, outputs or factors are infinite or not a number."""


def check_likelihood(likelihood: str) -> None:
    """Raise ``ValueError`` if a likelihood is unknown."""
    if not isinstance(likelihood, str):
        raise ValueError(
            f"likelihood must be 'classification' or 'regression', got {likelihood!r}; a loss with class weights is no "
            "negative log likelihood, so leave them out and draw the classes as often as they should count."
        )
    check_known("likelihood", likelihood, LIKELIHOODS)


def check_targets(outputs: Tensor, targets: Tensor, likelihood: Likelihood) -> None:
    """Raise ``ValueError`` unless targets have the shape and type that a likelihood of the outputs takes."""
    if likelihood == "regression" and targets.shape != outputs.shape:
        raise ValueError(
            f"Regression targets must have the shape of the outputs, {list(outputs.shape)}, got {list(targets.shape)}; "
            "reshape them in the datamodule."
        )
    if likelihood == "classification" and (targets.shape != outputs.shape[:1] or targets.is_floating_point()):
        raise ValueError(
            f"Labels must be class indices of shape [{len(outputs)}], got {targets.dtype} of shape "
            f"{list(targets.shape)}; for values choose likelihood regression."
        )


def _broadcast(*shapes: torch.Size) -> torch.Size:
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a block: all products of one of ``out`` and one of ``inner`` with the same leading axes.

    Attributes:
        out: Eigenvalues of B, >= 0, ascending. Shape ``[..., O]``.
        inner: Eigenvalues of A, >= 0, ascending. Shape ``[..., I]``; a single 1 for a block without A.
    """

    out: Tensor
    inner: Tensor

    @property
    def size(self) -> int:
        """Number of eigenvalues, which is that of the parameters."""
        leading = _broadcast(self.out.shape[:-1], self.inner.shape[:-1])
        return leading.numel() * self.out.shape[-1] * self.inner.shape[-1]

    def products(self) -> Tensor:
        """Return all eigenvalues. Shape ``[..., O, I]``."""
        return self.out[..., :, None] * self.inner[..., None, :]


@dataclass(frozen=True)
class KroneckerBlock:
    r"""The curvature :math:`B \otimes A` of one parameter tensor, in the row-major order of the tensor.

    Leading axes, on either factor, are those of a block-diagonal matrix: of ``[C, O, O]`` and ``[C, I, I]`` the
    block is :math:`\operatorname{diag}_c(B_c \otimes A_c)`, and a factor without the axis is the same for all c.

    Attributes:
        out_factor: ``B``, symmetric, summed over the data. Shape ``[..., O, O]``.
        in_factor: ``A``, symmetric, averaged over the data. Shape ``[..., I, I]``; None for a tensor with the block
            ``B`` alone, for example a bias.
        blocks_first: Whether the leading axes come before the out axis in the tensor, as in the weight of a grouped
            convolution, or after it, as the input channels of ``[O, C, I]``.
        axes: For a tensor with yet another order, as that of a transposed convolution, ``[I, O, ...]``: sizes and
            permutation such that ``entries.reshape(sizes).permute(permutation)`` has that order. None otherwise.
        places: Mean number R of places per sample at which the tensor is used and that the loss sees: B is the
            sum over all of them, over R. 0 if it sees none; of no meaning without ``in_factor``.

    References:
        docs/theory/curvature.md, 1.1 to 1.3.
    """

    out_factor: Tensor
    in_factor: Tensor | None = None
    blocks_first: bool = False
    axes: Axes | None = None
    places: float = 1.0

    @property
    def leading(self) -> torch.Size:
        """Shape of the leading axes."""
        inner = torch.Size() if self.in_factor is None else self.in_factor.shape[:-2]
        return _broadcast(self.out_factor.shape[:-2], inner)

    @property
    def size(self) -> int:
        """Number of parameters."""
        inner = 1 if self.in_factor is None else self.in_factor.shape[-1]
        return self.leading.numel() * self.out_factor.shape[-1] * inner

    @property
    def dense_sides(self) -> list[int]:
        """Sides of the one or two dense matrices that laplace-torch needs for the block.

        Those of B and A, the latter with its blocks side by side, or of the whole where that is no Kronecker product.
        """
        out, inner = self.out_factor, self.in_factor
        if self.axes is not None and inner is not None and self.shared_out_last:
            return [self.leading.numel() * inner.shape[-1], out.shape[-1]]
        if inner is None or self.axes is not None:  # laplace-torch has the rows of B first
            return [self.size]
        if not self.leading or (out.ndim == 2 and not self.blocks_first):
            return [out.shape[-1], self.leading.numel() * inner.shape[-1]]
        return [self.size]

    @property
    def shared_out_last(self) -> bool:
        """Whether the tensor has the axis of B last, behind all of A: the block is then the product of A and B."""
        return self.axes is not None and self.axes[1][-1] == 0 and self.out_factor.ndim == 2

    def dense(self) -> Tensor:
        """Return the whole block, for small ones. Shape ``[P, P]`` in the row-major order of the tensor."""
        out = self.out_factor
        inner = out.new_ones(1, 1) if self.in_factor is None else self.in_factor
        leading, sides = self.leading, (out.shape[-1], inner.shape[-1])
        count = leading.numel()
        out = out.expand(*leading, *out.shape[-2:]).reshape(count, sides[0], sides[0])
        inner = inner.expand(*leading, *inner.shape[-2:]).reshape(count, sides[1], sides[1])
        eye = torch.eye(count, dtype=out.dtype, device=out.device)
        order = "loikpm" if self.blocks_first else "olipkm"
        found = torch.einsum(f"lop,lim,lk->{order}", out, inner, eye).reshape(self.size, self.size)
        at = in_parameter_order(torch.arange(self.size, device=out.device), self.axes)
        return found[at][:, at]


def in_parameter_order(entries: Tensor, axes: Axes | None) -> Tensor:
    """Return the entries of a block's parameter, of shape ``[P]``, in the row-major order of the parameter."""
    return entries if axes is None else entries.reshape(axes[0]).permute(axes[1]).flatten()


def symmetric_eigenvalues(matrix: Tensor, name: str) -> Tensor:
    """Return the eigenvalues of positive semidefinite matrices, in double precision where float32 fails.

    Args:
        matrix: Shape ``[..., n, n]``; float32 or float64.
        name: Name of the parameter, for errors.

    Returns:
        Ascending, >= 0. Shape ``[..., n]``, of the matrix's dtype and device.

    Raises:
        NonFiniteError: If the matrix is not finite or the search for eigenvalues fails in double precision too.
    """
    if not matrix.isfinite().all():
        raise NonFiniteError(
            f"A curvature factor of {name!r} is not finite; lower the learning rate or look at weights and inputs."
        )
    for trial in (matrix, matrix.to(wide(matrix.device))):
        try:
            values: Tensor = torch.linalg.eigvalsh(trial)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if values.isfinite().all():
            return values.clamp_min(0).to(matrix.dtype)
    raise NonFiniteError(
        f"The eigenvalues of a curvature factor of {name!r} were not found, not in double precision either; "
        "look at the scale of weights and inputs."
    )


@dataclass(frozen=True)
class Factors:
    """Kronecker blocks of a network's parameters on a set of data, with the fit to these data.

    Attributes:
        blocks: By the parameter's name, in the order of ``named_parameters``.
        samples: Number N of samples.
        outputs: Number K of outputs of the network.
        likelihood: ``"classification"`` or ``"regression"``.
        loss_sum: Sum over samples of the cross-entropy, in nats, or of the squared error summed over outputs; float64.
        left_out: Trainable parameters that have no block on purpose: anchor positions and, by default, length scales.
    """

    blocks: Mapping[str, KroneckerBlock]
    samples: int
    outputs: int
    likelihood: Likelihood
    loss_sum: float
    left_out: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        check_likelihood(self.likelihood)

    def _signature(self) -> tuple[object, ...]:
        return self.outputs, self.likelihood, self.left_out, _shapes(self.blocks)

    def eigenvalues(self) -> dict[str, Spectrum]:
        """Return the eigenvalues of every block; negative ones, which are rounding, are 0.

        To be called on every rank, with the same factors: each finds the eigenvalues of a share of the matrices,
        and sends them to the others, so that all have the same numbers to the last bit.

        Returns:
            By the parameter's name.

        Raises:
            NonFiniteError: If a factor is not finite, or its eigenvalues cannot be found in double precision either; on
                every rank.
        """
        jobs = {(name, "out"): block.out_factor for name, block in self.blocks.items()}
        jobs |= {(n, "inner"): b.in_factor for n, b in self.blocks.items() if b.in_factor is not None}
        # A linear map with a single place has one B for weight and bias: found once.
        same: dict[str, str] = gathered(self._repeated())[0]
        for name in same:
            del jobs[name, "out"]
        owners, rank = _share(jobs), torch.distributed.get_rank() if ranks() > 1 else 0
        values: dict[tuple[str, str], Tensor] = {key: m.new_empty(m.shape[:-1]) for key, m in jobs.items()}

        def work() -> None:
            for key, matrix in jobs.items():
                if owners[key] == rank:
                    values[key].copy_(symmetric_eigenvalues(matrix, key[0]))

        together(work)
        if ranks() > 1:
            for key, tensor in values.items():
                torch.distributed.broadcast(tensor, owners[key])
        return {
            name: Spectrum(
                values[same.get(name, name), "out"], values.get((name, "inner"), block.out_factor.new_ones(1))
            )
            for name, block in self.blocks.items()
        }

    def _repeated(self) -> dict[str, str]:
        """Return each parameter that shares B with an earlier one of the same module, with that one."""
        found: dict[str, str] = {}
        first: dict[str, list[str]] = {}  # by module, one parameter for each B
        for name, block in self.blocks.items():
            others = first.setdefault(name.rpartition(".")[0], [])
            same = [o for o in others if torch.equal(self.blocks[o].out_factor, block.out_factor)]
            if same:
                found[name] = same[0]
            else:
                others.append(name)
        return found


def _shapes(blocks: Mapping[str, KroneckerBlock]) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of blocks, for ranks without data; see :func:`_zeros`."""
    return {
        name: (b.out_factor.dtype, b.out_factor.shape, getattr(b.in_factor, "shape", None), b.blocks_first, b.axes)
        for name, b in blocks.items()
    }


def _zeros(shape: tuple[Any, ...], device: torch.device) -> KroneckerBlock:
    """Return a block of zeros."""
    dtype, *sizes, blocks_first, axes = shape
    out, inner = (None if size is None else torch.zeros(size, dtype=dtype, device=device) for size in sizes)
    assert out is not None
    return KroneckerBlock(out, inner, blocks_first, axes)


def over_batches_and_ranks(compute: Callable[[], Factors | None], device: torch.device) -> Factors:
    """Return the factors of the data of all ranks; the last step of an engine.

    Args:
        compute: Gives this rank's factors; None without a sample. An error on one rank is raised on all.
        device: On which the zeros of a rank without data are made.

    Returns:
        The same on every rank, exact sums.

    Raises:
        EmptyLoaderError: If no rank has a sample.
        NonFiniteError: If loss or factors are not finite.
    """
    local: list[Factors | None] = []
    together(lambda: local.append(compute()))
    (mine,) = local
    places = {} if mine is None else {name: block.places for name, block in mine.blocks.items()}
    signatures = gathered(None if mine is None else (mine._signature(), mine.samples, mine.loss_sum, places))
    known = [entry for entry in signatures if entry is not None]
    if not known:
        raise EmptyLoaderError("The loader gave no sample to compute curvature of; pass one with at least one batch.")
    outputs, likelihood, left_out, shapes = known[0][0]
    if any(entry[0] != known[0][0] for entry in known):
        raise ValueError("The ranks have curvature factors of different networks; give every rank the same network.")
    samples = sum(entry[1] for entry in known)
    loss_sum = sum(entry[2] for entry in known)
    blocks = {}
    for name, shape in shapes.items():
        block = _zeros(shape, device) if mine is None else mine.blocks[name]
        if ranks() > 1:
            share = 0.0 if mine is None else mine.samples / samples
            every = sum(entry[1] * entry[3][name] for entry in known) / samples
            # A rank's block is one of parts of the data.
            part = 1.0 if block.in_factor is None or mine is None else block.places / (every or 1.0)
            inner = None if block.in_factor is None else summed(block.in_factor * share)
            block = replace(block, out_factor=summed(block.out_factor * part), in_factor=inner, places=every)
        blocks[name] = block
    total = Factors(blocks, samples, outputs, likelihood, loss_sum, left_out)
    _check_finite(total)
    return total


def _check_finite(factors: Factors) -> None:
    if not torch.tensor(factors.loss_sum).isfinite():
        raise NonFiniteError(
            f"The loss in the curvature pass is {factors.loss_sum}; lower the learning rate or look at the inputs."
        )
    for name, block in factors.blocks.items():
        if not all(f.isfinite().all() for f in (block.out_factor, block.in_factor) if f is not None):
            raise NonFiniteError(
                f"A curvature factor of {name!r} is not finite; lower the learning rate or look at weights and inputs."
            )


def _share(jobs: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], int]:
    """Return the rank of each matrix: the costliest first, each to the rank with the least work so far."""
    load = [0] * ranks()
    owners = {}
    for key, matrix in sorted(jobs.items(), key=lambda job: -job[1].numel() * job[1].shape[-1]):
        owner = load.index(min(load))
        owners[key] = owner
        load[owner] += matrix.numel() * matrix.shape[-1]
    return owners
