"""The methods that merge tensors, by name, and their settings (docs/theory/merging.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

import numpy as np
from torch import Tensor

from lightning_sym._checks import as_list, check_numbers, finite_or_mask, is_finite
from lightning_sym._text import unknown
from lightning_sym.connectivity.interpolation import weighted_sum
from lightning_sym.merging import formulas

T = TypeVar("T", Tensor, Mapping[str, Tensor])
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
    coefficients: formulas.Coefficients | None = field(default=None, repr=False)
    sparsify: formulas.Sparsify | None = field(default=None, repr=False)
    elect: bool = False


# The table.

_DEFAULTS = {"weight": 1.0, "density": 1.0, "gamma": 0.01, "epsilon": 0.15, "scale": 1.0, "lambda": 1.0}


def _own(*names: str) -> dict[str, float]:
    return {name: _DEFAULTS[name] for name in names}


def _task(
    name: str,
    summary: str,
    source: str,
    sparsify: formulas.Sparsify | None = None,
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


_LARGEST = (partial(formulas.by_magnitude, least=1), ["density"])
_CRUMBS = (partial(formulas.by_magnitude, least=0), ["density", "gamma"])
_DARE, _DELLA = (formulas.at_random, ["density"]), (formulas.by_rank, ["density", "epsilon"])
_TABLE = (
    MergeMethod(
        "linear",
        "weighted mean",
        "2203.05482",
        "unused",
        per_model=_own("weight"),
        shared={"normalize": True},
        coefficients=formulas.linear,
    ),
    MergeMethod(
        "slerp",
        "point t of the arc from the first model to the second",
        "Shoemake (1985), Animating rotation with quaternion curves",
        "unused",
        2,
        2,
        shared={"t": 0.5},
        coefficients=lambda group: formulas.slerp(group, float(group.shared["t"] or 0.0), formulas.PARALLEL),
    ),
    MergeMethod(
        "nuslerp",
        "slerp at the second weight's share; with a base, of task vectors",
        "mergekit",
        "optional",
        2,
        2,
        per_model=_own("weight"),
        coefficients=lambda group: formulas.slerp(group, group.shares()[1], formulas.EQUAL),
    ),
    MergeMethod(
        "karcher",
        "mean direction on the sphere, iterated, times the mean norm",
        "Karcher (1977), Riemannian center of mass and mollifier smoothing",
        "unused",
        per_model=_own("weight"),
        coefficients=partial(formulas.mean_direction, steps=formulas.STEPS),
    ),
    MergeMethod(
        "multislerp",
        "direction of the mean of unit vectors, times the mean norm; with a base, of task vectors",
        "mergekit",
        "optional",
        per_model=_own("weight"),
        coefficients=partial(formulas.mean_direction, steps=0),
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
        coefficients=formulas.model_stock,
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


RANGES = {"density": "in (0, 1]", "gamma": "in [0, 1)", "epsilon": "in [0, 0.5)"}
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
    tally: formulas.Tally | None = None,
) -> T:
    r"""Merge tensors, or mappings from names to tensors, by a method of :data:`METHODS`.

    Settings are one number, or one number for each model; a setting that the method does not have must be left at its
    default.

    Args:
        method: Name or method.
        tensors: One tensor for each model, floating, of one shape; or one mapping for each model, with the same names
            and finite numbers. Tensors of integers are those of the base, else of the first model.
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
    models = list(tensors) if isinstance(tensors, Tensor) else as_list("tensors", tensors)
    check_models(chosen, len(models), base is not None)
    each = {"weight": weight, "density": density, "gamma": gamma, "epsilon": epsilon, "scale": scale}
    settings = _settings(
        chosen, len(models), each, {"lambda": lambda_, "normalize": normalize, "rescale": rescale, "t": t}
    )
    first = models[0] if base is None else base
    if isinstance(first, Tensor):
        return _merged(chosen, models, base, *settings, seed, name, tally)
    _check_mappings({f"model {n}": own for n, own in enumerate(models)} | ({} if base is None else {"the base": base}))
    result: dict[str, Tensor] = {}
    for key, reference in first.items():
        if reference.is_floating_point() or reference.is_complex():
            origin = None if base is None else reference
            result[key] = _merged(chosen, [own[key] for own in models], origin, *settings, seed, key, tally)
        else:
            result[key] = reference
    return result


def _check_mappings(given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Check that mappings have the same names, and finite numbers: one NaN would spoil its tensor.

    Args:
        given: The mappings, by what they are.

    Raises:
        ValueError: If they do not.
    """
    for what, own in given.items():
        if not isinstance(own, Mapping):
            raise ValueError(f"{what} is a {type(own).__name__}; pass state dicts, as of network.state_dict().")
    for key in dict.fromkeys(key for own in given.values() for key in own):
        if missing := [what for what, own in given.items() if key not in own]:
            raise ValueError(f"{key} is missing in {', '.join(missing)}; expected the same names in all.")
    for what, own in given.items():
        for key, tensor in own.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{key} of {what} is a {type(tensor).__name__}, and no tensor; pass state dicts.")
            if not tensor.is_meta and not finite_or_mask(tensor):
                raise ValueError(f"{key} of {what} holds values that are not finite; expected finite weights.")


def _merged(
    method: MergeMethod,
    tensors: Sequence[Tensor],
    base: Tensor | None,
    each: Mapping[str, Sequence[float]],
    shared: Mapping[str, float | bool | None],
    seed: int,
    name: str,
    tally: formulas.Tally | None,
) -> Tensor:
    """Merge the tensors of one name."""
    given = [*tensors, *([] if base is None else [base])]
    says = name or "The tensors"
    if len({tensor.shape for tensor in given}) > 1:
        raise ValueError(f"{says} must have one shape, got {', '.join(str(list(own.shape)) for own in given)}.")
    dtype = formulas.dtype_of(given)
    if method.coefficients is formulas.linear and tensors[0].is_complex():
        dtype = tensors[0].dtype
    elif not all(tensor.is_floating_point() for tensor in given):
        raise ValueError(f"{says} must be floating, got {', '.join(str(own.dtype) for own in given)}.")
    if not all(map(is_finite, given)):
        if all(bool((own == given[0].to(own)).all()) for own in given[1:]):
            return given[0].detach().to(dtype)
        raise ValueError(f"{says} must be finite, or the same where they hold infinities, as masks do.")
    flat = [tensor.detach().reshape(-1) for tensor in given]
    origin = None if base is None else flat[-1]
    group = formulas.TensorGroup(flat[: len(tensors)], origin, tensors[0].shape, each, shared, seed, name, tally)
    if method.coefficients is None:
        return formulas.with_task_vectors(group, method.sparsify, elect=method.elect).reshape(group.shape)
    found = [*method.coefficients(group)]
    return weighted_sum(flat, found if base is None else [*found, 1 - math.fsum(found)], dtype).reshape(group.shape)


def check_models(method: MergeMethod, models: int, has_base: bool) -> None:
    """Check the number of models, and that there is a base if and only if the method uses one.

    Raises:
        ValueError: If one does not fit the method.
    """
    if method.base == "needed" and not has_base:
        raise ValueError(f"{method.name} needs a base, the parent of the models; pass base (--base, base_model).")
    if method.base == "unused" and has_base:
        raise ValueError(f"{method.name} uses no base; leave it out, or put it among the models.")
    if models < method.fewest or (method.most is not None and models > method.most):
        least = f"{method.fewest}" if method.fewest == method.most else f"at least {method.fewest}"
        besides = "" if method.base == "unused" else " besides the base"
        raise ValueError(f"{method.name} merges {least} model{'s' * (method.fewest > 1)}{besides}, got {models}.")


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
        given = given.tolist() if isinstance(given, Tensor | np.ndarray | np.generic) else given
        values = [given] * count if isinstance(given, int | float) else list(given)
        if len(values) != count:
            raise ValueError(f"{key} must be one number, or one for each of {count} models, got {len(values)}.")
        for value in values:
            check_numbers(RANGES.get(key, _FINITE), **{key: value})
        found[key] = [float(value) for value in values]
    unused: dict[str, object] = {key: each[key] for key, own in found.items() if set(own) != {_DEFAULTS[key]}}
    unused |= {key: own for key, own in shared.items() if own not in (None, _DEFAULTS.get(key))}
    for key in unused.keys() - method.per_model.keys() - method.shared.keys():
        raise ValueError(f"{method.name} has no {key}, got {unused[key]!r}; leave it out.")
    merge = {key: default if shared[key] is None else shared[key] for key, default in method.shared.items()}
    check_numbers(_FINITE, **{key: value for key, value in merge.items() if key not in FLAGS})
    return {key: found[key] for key in method.per_model}, merge
