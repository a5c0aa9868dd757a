r"""Formulas that merge tensors of one shape (docs/theory/merging.md).

Most methods are linear combinations whose coefficients depend on the tensors' inner products only. The others add task
vectors to a base: each is sparsified, then a sign may be elected, and the weighted sum is normalised and scaled.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

import torch
from torch import Tensor

from lightning_sym._checks import check_numbers
from lightning_sym._distributed import wide
from lightning_sym._random import generator
from lightning_sym._text import unknown
from lightning_sym.connectivity.interpolation import parts, weighted_sum

T = TypeVar("T", Tensor, Mapping[str, Tensor])
# Above this cosine `slerp` is linear; `nuslerp` only where the angle is rounding.
_PARALLEL, _EQUAL = 0.9995, 1 - 1e-12
_STEPS, _SMALL = 10, 1e-5  # of the iteration to the Karcher mean
FLAGS = ("normalize", "rescale")
"""Settings of a merge that are true or false."""


@dataclass(frozen=True, eq=False)
class MergeMethod:
    """A formula for merging.

    Attributes:
        name: Name, as in mergekit.
        summary: One line for help and guide.
        source: Reference, an arXiv number if there is one.
        base: Whether the formula needs a base, can use one, or has no place for one.
        fewest: Smallest number of models besides the base.
        most: Largest number of models besides the base; None: any number.
        per_model: Settings of each model, with their defaults.
        shared: Settings of the merge, with their defaults.
        coefficients: Coefficients of the tensors, or of the differences from the base; None: task vectors are added.
        sparsify: Chooses the kept numbers of a task vector; None: all.
        elect: Whether only numbers of the elected sign are added.
    """

    name: str
    summary: str
    source: str
    base: Literal["needed", "optional", "unused"]
    fewest: int = 1
    most: int | None = None
    per_model: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, float | bool | None] = field(default_factory=dict)
    coefficients: Callable[["_Group"], Sequence[float]] | None = field(default=None, repr=False)
    sparsify: Callable[["_Group", int], tuple[Tensor, float]] | None = field(default=None, repr=False)
    elect: bool = False


class Tally:
    """Sums over tensors, for the report of a merge."""

    def __init__(self) -> None:
        self._gram: Tensor | None = None
        self._numbers = self._in_conflict = 0
        self._dropped: Tensor | None = None
        self._reasons: dict[str, list[str]] = {}

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
            f"{reason}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for reason, names in self._reasons.items()
        )

    def note(self, reason: str, name: str) -> None:
        """Remember an exception from a formula at a tensor."""
        self._reasons.setdefault(reason, []).append(name or "the tensor")

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
class _Group:
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
        if abs(total) <= 1e-12 * sum(map(abs, weights)):  # 0.1 + 0.2 - 0.3 is 0 as well
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


def _linear(group: _Group) -> Sequence[float]:
    return group.shares() if group.shared["normalize"] else group.each["weight"]


def _slerp(group: _Group, t: float, parallel: float) -> Sequence[float]:
    cosine = float(_cosines(group.gram())[1][0, 1])
    if abs(cosine) > parallel:
        return 1 - t, t
    angle = math.acos(cosine)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def _direction(group: _Group, steps: int) -> Sequence[float]:
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


def _stock(group: _Group) -> Sequence[float]:
    count = len(group.tensors)
    cosine = float(_cosines(group.gram())[1].triu(1).sum()) / (count * (count - 1) / 2)
    divisor = 1 + (count - 1) * cosine
    t = count * cosine / divisor if divisor > 1e-6 else -math.inf
    if not 0 <= t <= 1:
        group.note(f"t of model_stock was outside [0, 1] and became {min(max(t, 0.0), 1.0):g}")
    return [min(max(t, 0.0), 1.0) / count] * count


# Masks of task vectors: the kept numbers, and with `rescale` a factor that makes up for the others, else 1.


def _by_magnitude(group: _Group, model: int, *, least: int) -> tuple[Tensor, float]:
    """Drop the share `gamma` of the largest numbers, then the smallest; equal ones rank by their place."""
    size, density = group.tensors[model].numel(), group.each["density"][model]
    kept = max(min(least, size), int(density * size))
    dropped = min(int(group.each["gamma"][model] * size), size - kept) if "gamma" in group.each else 0
    mask = _largest(group, model, dropped + kept)
    if dropped:
        mask &= ~_largest(group, model, dropped)
    return mask, _restoring(group, model, mask)


def _largest(group: _Group, model: int, count: int) -> Tensor:
    """Mark the `count` numbers of largest magnitude; of equal ones the first."""
    size = group.tensors[model].numel()
    mask = torch.zeros(size, dtype=torch.bool)
    if count == 0:
        return mask
    dtype = _dtype(group.tensors)
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


def _at_random(group: _Group, model: int) -> tuple[Tensor, float]:
    """Keep every number with probability `density`, and divide by it."""
    density, draw = group.each["density"][model], group.draw(model)
    mask = torch.zeros(group.tensors[model].numel(), dtype=torch.bool)
    for part in parts(len(mask)):
        mask[part] = torch.rand(len(mask[part]), generator=draw) < density
    return mask, 1 / density if group.shared["rescale"] else 1.0


def _by_rank(group: _Group, model: int) -> tuple[Tensor, float]:
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


def _restoring(group: _Group, model: int, mask: Tensor) -> float:
    """Return the factor that restores the sum of magnitudes; 1 without `rescale`, or if all numbers are dropped."""
    before = after = 0.0
    for part, rows in group.differences(model) if group.shared["rescale"] else ():
        sizes = rows[0].abs()
        before, after = before + float(sizes.sum()), after + float(sizes[mask[part].to(sizes.device)].sum())
    return before / after if after else 1.0


def _with_task_vectors(method: MergeMethod, group: _Group) -> Tensor:
    """Return the base plus the weighted task vectors: flat, in the dtype of the result."""
    sparsify, base, densities = method.sparsify, group.base, group.each.get("density", ())
    assert base is not None
    masks = [sparsify(group, model) if sparsify and own < 1 else None for model, own in enumerate(densities)]
    device = group.tensors[0].device
    exact = wide(device)
    weights = torch.tensor(group.each["weight"], dtype=exact, device=device)[:, None]
    if group.shared["normalize"] and not method.elect:
        weights = torch.tensor(group.shares(), dtype=exact, device=device)[:, None]
    scaling = float(group.shared["lambda"] or 0.0)
    result = torch.empty(base.numel(), dtype=_dtype([base, *group.tensors]), device=device)
    for part, vectors in group.differences():
        gram = (vectors @ vectors.T).double().cpu() if group.tally is not None else None
        for vector, own in zip(vectors, masks, strict=False):  # task_arithmetic has no masks
            if own is not None:
                vector *= own[0][part].to(vector) * own[1]
        vectors *= weights
        if group.tally is not None and gram is not None:
            dropped = [0 if own is None else int((~own[0][part]).sum()) for own in masks]
            group.tally.count(gram, vectors, torch.tensor(dropped or [0] * len(vectors)))
        if method.elect:
            agree = vectors.sign() == torch.where(vectors.sum(0) >= 0, 1.0, -1.0)
            vectors *= agree
            if group.shared["normalize"]:
                divisor = (weights * agree).sum(0)
                vectors /= torch.where(divisor == 0, 1.0, divisor)
        result[part] = base[part].to(device, exact) + scaling * vectors.sum(0)
    return result


# The table.

_DEFAULTS = {"weight": 1.0, "density": 1.0, "gamma": 0.01, "epsilon": 0.15, "scale": 1.0, "lambda": 1.0}


def _own(*names: str) -> dict[str, float]:
    return {name: _DEFAULTS[name] for name in names}


def _task(
    name: str,
    summary: str,
    source: str,
    sparsify: Callable[[_Group, int], tuple[Tensor, float]] | None = None,
    more: Sequence[str] = (),
    *,
    elect: bool = False,
    normalize: bool = False,
    rescale: bool = False,
) -> MergeMethod:
    settings, shared = _own("weight", *more), {"lambda": 1.0, "normalize": normalize}
    if sparsify is not None:
        shared["rescale"] = rescale
    return MergeMethod(
        name, summary, source, "needed", per_model=settings, shared=shared, sparsify=sparsify, elect=elect
    )


_LARGEST = (partial(_by_magnitude, least=1), ["density"])
_CRUMBS = (partial(_by_magnitude, least=0), ["density", "gamma"])
_DARE, _DELLA = (_at_random, ["density"]), (_by_rank, ["density", "epsilon"])
_TABLE = (
    MergeMethod(
        "linear",
        "weighted mean",
        "2203.05482",
        "unused",
        per_model=_own("weight"),
        shared={"normalize": True},
        coefficients=_linear,
    ),
    MergeMethod(
        "slerp",
        "point t of the arc from the first model to the second",
        "Shoemake (1985), Animating rotation with quaternion curves",
        "unused",
        2,
        2,
        shared={"t": 0.5},
        coefficients=lambda group: _slerp(group, float(group.shared["t"] or 0.0), _PARALLEL),
    ),
    MergeMethod(
        "nuslerp",
        "slerp at the second weight's share; with a base, of task vectors",
        "mergekit",
        "optional",
        2,
        2,
        per_model=_own("weight"),
        coefficients=lambda group: _slerp(group, group.shares()[1], _EQUAL),
    ),
    MergeMethod(
        "karcher",
        "mean direction on the sphere, iterated, times the mean norm",
        "Karcher (1977), Riemannian center of mass and mollifier smoothing",
        "unused",
        per_model=_own("weight"),
        coefficients=partial(_direction, steps=_STEPS),
    ),
    MergeMethod(
        "multislerp",
        "direction of the mean of unit vectors, times the mean norm; with a base, of task vectors",
        "mergekit",
        "optional",
        per_model=_own("weight"),
        coefficients=partial(_direction, steps=0),
    ),
    _task("task_arithmetic", "base plus weighted task vectors", "2212.04089"),
    _task(
        "ties",
        "the largest numbers of task vectors, averaged where the elected sign agrees",
        "2306.01708",
        *_LARGEST,
        elect=True,
        normalize=True,
    ),
    _task("dare_linear", "random numbers of task vectors, rescaled", "2311.03099", *_DARE, rescale=True),
    _task("dare_ties", "as dare_linear, where the elected sign agrees", "2311.03099", *_DARE, elect=True, rescale=True),
    _task("breadcrumbs", "task vectors without the largest and the smallest numbers", "2312.06795", *_CRUMBS),
    _task("breadcrumbs_ties", "as breadcrumbs, where the elected sign agrees", "2312.06795", *_CRUMBS, elect=True),
    _task(
        "della",
        "as della_linear, averaged where the elected sign agrees",
        "2406.11617",
        *_DELLA,
        elect=True,
        normalize=True,
        rescale=True,
    ),
    _task(
        "della_linear",
        "random numbers of task vectors, large ones with higher probability",
        "2406.11617",
        *_DELLA,
        rescale=True,
    ),
    MergeMethod(
        "model_stock",
        "base plus a share of the mean task vector, from the cosines of task vectors",
        "2403.19522",
        "needed",
        2,
        coefficients=_stock,
    ),
    MergeMethod(
        "passthrough",
        "one model times scale",
        "mergekit",
        "unused",
        1,
        1,
        per_model=_own("scale"),
        coefficients=lambda group: group.each["scale"],
    ),
)
METHODS: Mapping[str, MergeMethod] = MappingProxyType({method.name: method for method in _TABLE})
_LATER = ("sce", "nearswap", "arcee_fusion")


def merge_method(name: str) -> MergeMethod:
    """Return a method by its name.

    Raises:
        ValueError: If there is none; the message names the nearest.
    """
    if name in METHODS:
        return METHODS[name]
    if name in ("weights", "activations"):
        raise ValueError(f"{name} says how to align: --align {name}")
    if name in _LATER:
        raise ValueError(f"The merge method {name!r} is not available yet; expected one of: {', '.join(METHODS)}.")
    raise ValueError(unknown("merge method", name, METHODS))


_RANGES = {"density": "in (0, 1]", "gamma": "in [0, 1)", "epsilon": "in [0, 0.5)"}
_FINITE = "in (-inf, inf)"


def merge_tensors(
    method: str | MergeMethod,
    tensors: Sequence[T],
    *,
    base: T | None = None,
    weight: float | Sequence[float] = 1.0,
    density: float | Sequence[float] = 1.0,
    lambda_: float = 1.0,
    normalize: bool | None = None,
    rescale: bool | None = None,
    t: float | None = None,
    gamma: float | Sequence[float] = 0.01,
    epsilon: float | Sequence[float] = 0.15,
    scale: float | Sequence[float] = 1.0,
    seed: int = 0,
    name: str = "",
    tally: Tally | None = None,
) -> T:
    r"""Merge tensors, or mappings from names to tensors, by a method of :data:`METHODS`.

    Settings are one number, or one number for each model; a setting that the method does not have must be left at its
    default.

    Args:
        method: Name or method.
        tensors: One tensor for each model, floating, of one shape; or one mapping for each model, with the names of the
            first. Tensors of integers are those of the base, else of the first model.
        base: The base, which is not among ``tensors``; needed for task vectors.
        weight: Weights, unitless, finite; other than for task vectors with a sum other than 0.
        density: Share of a task vector's numbers that stay, in (0, 1].
        lambda_: Factor of the sum of task vectors.
        normalize: Whether the sum is divided by the sum of the weights; None: as usual for the method.
        rescale: Whether kept numbers are scaled up to make up for dropped ones: in ``dare`` by 1 / density, else to the
            same sum of magnitudes; None: as usual for the method.
        t: Place on the arc of ``slerp``: 0 is the first tensor, 1 the second; None: 0.5.
        gamma: Share of the largest numbers that ``breadcrumbs`` drops, in [0, 1). Without effect at density 1.
        epsilon: Half the range of the probabilities of ``della``; density - epsilon and density + epsilon must be
            within (0, 1), unless the density is 1.
        scale: Factor of ``passthrough``.
        seed: Seed of random masks; the mask of a tensor depends on the seed, the model's index and the name.
        name: Name of the tensors, for masks and messages; of a mapping, its keys are used.
        tally: Sums for a report, to which these tensors are added.

    Returns:
        Tensor on the first tensor's device, in float64 if an input is, else in float32 (complex: the first's dtype); or
        a dict of them. Differences, inner products and sums are computed in float64, for part of a tensor at a time.

    Raises:
        ValueError: If the tensors do not fit each other or the method, or a setting is out of its range.
    """
    chosen = method if isinstance(method, MergeMethod) else merge_method(method)
    models = list(tensors)
    _check_counts(chosen, len(models), base is not None)
    each = {"weight": weight, "density": density, "gamma": gamma, "epsilon": epsilon, "scale": scale}
    settings = _settings(
        chosen, len(models), each, {"lambda": lambda_, "normalize": normalize, "rescale": rescale, "t": t}
    )
    first = models[0] if base is None else base
    if isinstance(first, Tensor):
        return _merged(chosen, models, base, *settings, seed, name, tally)
    result: dict[str, Tensor] = {}
    for key, reference in first.items():
        if missing := [str(number) for number, own in enumerate(models) if key not in own]:
            raise ValueError(f"{key} is missing in model {', '.join(missing)}; expected the same names in all.")
        if reference.is_floating_point() or reference.is_complex():
            origin = None if base is None else reference
            result[key] = _merged(chosen, [own[key] for own in models], origin, *settings, seed, key, tally)
        else:
            result[key] = reference
    return result


def _merged(
    method: MergeMethod,
    tensors: Sequence[Tensor],
    base: Tensor | None,
    each: Mapping[str, Sequence[float]],
    shared: Mapping[str, float | bool | None],
    seed: int,
    name: str,
    tally: Tally | None,
) -> Tensor:
    """Merge the tensors of one name."""
    given = [*tensors, *([] if base is None else [base])]
    says = name or "The tensors"
    if len({tensor.shape for tensor in given}) > 1:
        raise ValueError(f"{says} must have one shape, got {', '.join(str(list(own.shape)) for own in given)}.")
    dtype = _dtype(given)
    if method.coefficients is _linear and tensors[0].is_complex():
        dtype = tensors[0].dtype
    elif not all(tensor.is_floating_point() for tensor in given):
        raise ValueError(f"{says} must be floating, got {', '.join(str(own.dtype) for own in given)}.")
    flat = [tensor.detach().reshape(-1) for tensor in given]
    origin = None if base is None else flat[-1]
    group = _Group(flat[: len(tensors)], origin, tensors[0].shape, each, shared, seed, name, tally)
    if method.coefficients is None:
        return _with_task_vectors(method, group).reshape(group.shape)
    found = [*method.coefficients(group)]
    return weighted_sum(flat, found if base is None else [*found, 1 - math.fsum(found)], dtype).reshape(group.shape)


def _check_counts(method: MergeMethod, count: int, based: bool) -> None:
    if count < method.fewest or (method.most is not None and count > method.most):
        expected = f"{method.fewest}" if method.most == method.fewest else f"at least {method.fewest}"
        raise ValueError(f"{method.name} merges {expected} models besides a base, got {count}.")
    if method.base == ("unused" if based else "needed"):
        says = "needs a base, got none" if not based else "has no place for a base; leave it out, or name it as a model"
        raise ValueError(f"{method.name} {says}.")


def _settings(
    method: MergeMethod,
    count: int,
    each: Mapping[str, float | Sequence[float]],
    shared: Mapping[str, float | bool | None],
) -> tuple[dict[str, list[float]], dict[str, float | bool | None]]:
    """Return the settings of each model and of the merge, checked.

    Raises:
        ValueError: If one is out of its range, has another number of values, or the method does not have it.
    """
    found = {}
    for key, given in each.items():
        values = [given] * count if isinstance(given, int | float) else list(given)
        if len(values) != count:
            raise ValueError(f"{key} must be one number, or one for each of {count} models, got {len(values)}.")
        for value in values:
            check_numbers(_RANGES.get(key, _FINITE), **{key: value})
        found[key] = [float(value) for value in values]
    unused: dict[str, object] = {key: each[key] for key, own in found.items() if set(own) != {_DEFAULTS[key]}}
    unused |= {key: own for key, own in shared.items() if own not in (None, _DEFAULTS.get(key))}
    for key in unused.keys() - method.per_model.keys() - method.shared.keys():
        raise ValueError(f"{method.name} has no {key}, got {unused[key]!r}; leave it out.")
    merge = {key: default if shared[key] is None else shared[key] for key, default in method.shared.items()}
    check_numbers(_FINITE, **{key: value for key, value in merge.items() if key not in FLAGS})
    return {key: found[key] for key in method.per_model}, merge


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return float64 if a tensor has it, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
