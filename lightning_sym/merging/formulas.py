r"""Formulas for tensors of one name: linear combinations, and sums of sparsified task vectors (docs/theory/merging.md).

Most methods are linear combinations whose coefficients depend on the tensors' inner products only. The others add task
vectors to a base: each is sparsified, then a sign may be elected, and the weighted sum is normalised and scaled.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sym._distributed import wide
from lightning_sym._random import generator
from lightning_sym.connectivity.interpolation import parts

# Above this cosine `slerp` is linear; `nuslerp` only where the angle is rounding.
PARALLEL, EQUAL = 0.9995, 1 - 1e-12
STEPS, _SMALL = 10, 1e-5  # of the iteration to the Karcher mean
_CANCELLED = 1e-12  # weights whose sum is smaller, relative to their magnitudes, sum to 0: 0.1 + 0.2 - 0.3
Coefficients: TypeAlias = Callable[["TensorGroup"], Sequence[float]]
Sparsify: TypeAlias = Callable[["TensorGroup", int], tuple[Tensor, float]]


class Tally:
    """Sums over tensors, for the report of a merge."""

    def __init__(self) -> None:
        self._gram: Tensor | None = None
        self._numbers = self._in_conflict = 0
        self._dropped: Tensor | None = None
        self._reasons: dict[str, dict[str, None]] = {}

    @property
    def cosines(self) -> Tensor | None:
        """Cosines between the models' differences from the base, shape ``[N, N]``, float64; None without a base."""
        return None if self._gram is None else _cosines(self._gram)[1]

    @property
    def masked(self) -> tuple[float, ...]:
        """For each model, the share of its numbers that sparsification drops; empty without task vectors."""
        return () if self._dropped is None else tuple((self._dropped.double() / max(1, self._numbers)).tolist())

    @property
    def conflicts(self) -> float:
        """Share of the numbers at which kept differences, times their weights, have both signs."""
        return self._in_conflict / max(1, self._numbers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Exceptions from the formulas, each with its first tensor and the number of others."""
        return tuple(
            f"{reason}: {next(iter(names))}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for reason, names in self._reasons.items()
        )

    def note(self, reason: str, name: str) -> None:
        """Remember an exception from a formula at a tensor."""
        self._reasons.setdefault(reason, {})[name or "the tensor"] = None

    def count(self, gram: Tensor, kept: Tensor, dropped: Tensor) -> None:
        """Add part of a tensor.

        Args:
            gram: Inner products of the differences from the base. Shape ``[N, N]``, float64.
            kept: The differences after sparsification, times their weights. Shape ``[N, P]``.
            dropped: Numbers dropped for each model. Shape ``[N]``.
        """
        self._gram = gram if self._gram is None else self._gram + gram
        self._dropped = dropped if self._dropped is None else self._dropped + dropped
        self._in_conflict += int(((kept > 0).any(0) & (kept < 0).any(0)).sum())
        self._numbers += kept.shape[1]


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Tensors of one name, with the settings there.

    Attributes:
        tensors: One flat tensor for each model.
        base: The base, flat; None if there is none.
        shape: Shape of each tensor.
        each: Settings of each model.
        shared: Settings of the merge.
        seed: Seed of random masks.
        name: Name of the tensors; empty if there is none.
        tally: Sums for the report; None: nobody asks.
    """

    tensors: Sequence[Tensor]
    base: Tensor | None
    shape: torch.Size
    each: Mapping[str, Sequence[float]]
    shared: Mapping[str, float | bool | None]
    seed: int
    name: str
    tally: Tally | None

    def differences(self, *models: int, unit: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices, and there the differences from the base (or the tensors): ``[N, P]``, in double precision."""
        origin = self.tensors[0]
        exact, chosen = wide(origin.device), [self.tensors[model] for model in models] if models else self.tensors
        for part in parts(origin.numel(), unit):
            rows = torch.stack([tensor[part].to(origin.device, exact) for tensor in chosen])
            yield part, rows if self.base is None else rows - self.base[part].to(origin.device, exact)

    def gram(self) -> Tensor:
        """Return the inner products of the differences: ``[N, N]``, float64, on the CPU."""
        count = len(self.tensors)
        gram = torch.zeros(count, count, dtype=torch.float64)
        weights = torch.tensor(self.each.get("weight", [1.0] * count), dtype=torch.float64)[:, None]
        for _, rows in self.differences():
            own = (rows @ rows.T).double().cpu()
            gram += own
            if self.tally is not None and self.base is not None:
                self.tally.count(own, rows * weights.to(rows), torch.zeros(count))
        return gram

    def shares(self) -> list[float]:
        """Return the weights divided by their sum.

        Raises:
            ValueError: If the sum is 0.
        """
        weights = self.each["weight"]
        total = math.fsum(weights)
        if abs(total) <= _CANCELLED * sum(map(abs, weights)):
            at = f" at {self.name}" if self.name else ""
            raise ValueError(f"weight must have a sum other than 0, got {list(weights)}{at}; change one of them.")
        return [weight / total for weight in weights]

    def note(self, reason: str) -> None:
        """Remember an exception from the formula."""
        if self.tally is not None:
            self.tally.note(reason, self.name)

    def draw(self, model: int) -> torch.Generator:
        """Return the generator for the random mask of a model: the same in any order of tensors and models."""
        return generator("merge", self.seed, model, self.name)


# Linear combinations.


def _cosines(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms and cosines; a vector of zeros has cosine 0 with all."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(norms > 0, 1 / norms, 0.0)
    return norms, (inverse[:, None] * gram * inverse).clamp(-1, 1)


def linear(group: TensorGroup) -> Sequence[float]:
    """Return the weights, divided by their sum if they are to be normalised."""
    return group.shares() if group.shared["normalize"] else group.each["weight"]


def slerp(group: TensorGroup, t: float, parallel: float) -> Sequence[float]:
    """Return the coefficients of a point on the arc between two tensors (Shoemake 1985).

    Args:
        group: The two tensors.
        t: The point; 0 is the first tensor, 1 the second.
        parallel: Above this absolute cosine, the point is on the line between them.
    """
    cosine = float(_cosines(group.gram())[1][0, 1])
    if abs(cosine) > parallel:
        if cosine < 0 and group.shape.numel() > 1:
            group.note("the two tensors are opposite, and a point on the line between them was taken")
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def mean_direction(group: TensorGroup, steps: int) -> Sequence[float]:
    """Return the mean direction on the sphere times the mean norm.

    The start is the projected mean of the unit vectors. Every iterate is a combination of them, so that their cosines
    are sufficient.
    """
    weights = torch.tensor(group.shares(), dtype=torch.float64)
    norms, cosines = _cosines(group.gram())

    def length(vector: Tensor) -> float:
        return float((vector @ cosines @ vector).clamp(min=0).sqrt())

    mean = torch.where(norms > 0, weights, 0.0)
    if length(mean) <= _SMALL * float(mean.abs().sum()):
        if bool(mean.any()):
            group.note("the directions cancel, and the plain mean was taken")
        return weights.tolist()
    pull, mean = mean / mean.abs().sum(), mean / length(mean)
    for _ in range(steps):
        along = (cosines @ mean).clamp(-1, 1)
        angles = along.acos()
        # Towards an opposite vector, no direction is shortest.
        stretch = torch.where(angles.sin() > _SMALL, angles / angles.sin(), (along > 0).double()) * pull
        step = stretch - (stretch @ along) * mean
        if (size := length(step)) < _SMALL:
            break
        mean = math.cos(size) * mean + math.sin(size) / size * step
        mean = mean / length(mean)
    return torch.where(norms > 0, mean / norms * (weights @ norms), 0.0).tolist()


def model_stock(group: TensorGroup) -> Sequence[float]:
    """Return the coefficients of Model Stock (arXiv:2403.19522) from the mean cosine of differences."""
    count = len(group.tensors)
    cosine = float(_cosines(group.gram())[1].triu(1).sum()) / (count * (count - 1) / 2)
    divisor = 1 + (count - 1) * cosine
    t = count * cosine / divisor if divisor > 1e-6 else -math.inf
    if not 0 <= t <= 1:
        group.note(f"t of model_stock was outside [0, 1] and became {min(max(t, 0.0), 1.0):g}")
    return [min(max(t, 0.0), 1.0) / count] * count


# Masks of task vectors: the kept numbers, and with `rescale` a factor that makes up for the others, else 1.


def by_magnitude(group: TensorGroup, model: int, *, least: int) -> tuple[Tensor, float]:
    """Drop the share `gamma` of the largest numbers, then the smallest; equal ones rank by their place."""
    size, density = group.tensors[model].numel(), group.each["density"][model]
    kept = max(min(least, size), int(density * size))
    dropped = min(int(group.each["gamma"][model] * size), size - kept) if "gamma" in group.each else 0
    mask = _largest(group, model, dropped + kept)
    if dropped:
        mask &= ~_largest(group, model, dropped)
    return mask, _restoring(group, model, mask)


def _largest(group: TensorGroup, model: int, count: int) -> Tensor:
    """Mark the `count` numbers of largest magnitude; of equal ones the first."""
    size = group.tensors[model].numel()
    mask = torch.zeros(size, dtype=torch.bool)
    if count == 0:
        return mask
    dtype = dtype_of(group.tensors)
    magnitudes = torch.empty(size, dtype=dtype)
    for part, rows in group.differences(model):
        magnitudes[part] = rows[0].abs()
    array = magnitudes.numpy()
    array.partition(size - count)  # in place: no more than one copy of the tensor
    threshold = array[size - count].item()
    equal = count - int((array[size - count :] > threshold).sum())
    for part, rows in group.differences(model):
        own = rows[0].abs().to("cpu", dtype)
        mask[part] = own > threshold
        places = (own == threshold).nonzero()[:equal, 0]
        mask[part][places] = True
        equal -= len(places)
    return mask


def at_random(group: TensorGroup, model: int) -> tuple[Tensor, float]:
    """Keep every number with probability `density`, and divide by it."""
    density, draw = group.each["density"][model], group.draw(model)
    mask = torch.zeros(group.tensors[model].numel(), dtype=torch.bool)
    for part in parts(len(mask)):
        mask[part] = torch.rand(len(mask[part]), generator=draw) < density
    return mask, 1 / density if group.shared["rescale"] else 1.0


def by_rank(group: TensorGroup, model: int) -> tuple[Tensor, float]:
    """Keep large numbers of a row with higher probability."""
    density, epsilon = group.each["density"][model], group.each["epsilon"][model]
    if not (epsilon >= 0 and density - epsilon > 0 and density + epsilon < 1):
        raise ValueError(
            f"epsilon must leave density - epsilon and density + epsilon in (0, 1), got {epsilon} with density "
            f"{density}; lower epsilon."
        )
    draw = group.draw(model)
    mask = torch.zeros(group.tensors[model].numel(), dtype=torch.bool)
    shape = group.shape if len(group.shape) > 1 else torch.Size([1, len(mask)])
    for part, rows in group.differences(model, unit=math.prod(shape[1:])):
        sizes = rows[0].abs().cpu().reshape(-1, *shape[1:])
        ranks = sizes.argsort(dim=1, stable=True).argsort(dim=1) / max(1, shape[1] - 1) if shape[1] > 1 else 0.5
        chances = density - epsilon + 2 * epsilon * ranks
        mask[part] = (torch.rand(sizes.shape, generator=draw) < chances).reshape(-1)
    return mask, _restoring(group, model, mask)


def _restoring(group: TensorGroup, model: int, mask: Tensor) -> float:
    """Return the factor that restores the sum of magnitudes; 1 without `rescale`, or if all numbers are dropped."""
    before = after = 0.0
    for part, rows in group.differences(model) if group.shared["rescale"] else ():
        sizes = rows[0].abs()
        before, after = before + float(sizes.sum()), after + float(sizes[mask[part].to(sizes.device)].sum())
    return before / after if after else 1.0


def with_task_vectors(group: TensorGroup, sparsify: Sparsify | None, *, elect: bool) -> Tensor:
    """Return the base plus the weighted task vectors: flat, in the dtype of the result.

    Args:
        group: The tensors.
        sparsify: Chooses the kept numbers of a task vector; None: all.
        elect: Whether only numbers of the elected sign are added.
    """
    base, densities = group.base, group.each.get("density", ())
    assert base is not None
    masks = [sparsify(group, model) if sparsify and own < 1 else None for model, own in enumerate(densities)]
    device = group.tensors[0].device
    exact = wide(device)
    weights = torch.tensor(group.each["weight"], dtype=exact, device=device)[:, None]
    if group.shared["normalize"] and not elect:
        weights = torch.tensor(group.shares(), dtype=exact, device=device)[:, None]
    scaling = float(group.shared["lambda"] or 0.0)
    result = torch.empty(base.numel(), dtype=dtype_of([base, *group.tensors]), device=device)
    for part, vectors in group.differences():
        gram = (vectors @ vectors.T).double().cpu() if group.tally is not None else None
        for vector, own in zip(vectors, masks, strict=False):  # task_arithmetic has no masks
            if own is not None:
                vector *= own[0][part].to(vector) * own[1]
        vectors *= weights
        if group.tally is not None and gram is not None:
            dropped = [0 if own is None else int((~own[0][part]).sum()) for own in masks]
            group.tally.count(gram, vectors, torch.tensor(dropped or [0] * len(vectors)))
        if elect:
            agree = vectors.sign() == torch.where(vectors.sum(0) >= 0, 1.0, -1.0)
            vectors *= agree
            if group.shared["normalize"]:
                divisor = (weights * agree).sum(0)
                cancels = divisor.abs() <= _CANCELLED * (weights.abs() * agree).sum(0)
                vectors /= torch.where(cancels, 1.0, divisor)
        result[part] = base[part].to(device, exact) + scaling * vectors.sum(0)
    return result


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return float64 if a tensor has it, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
