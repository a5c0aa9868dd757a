"""Low-rank adapters (LoRA) in `peft`'s files: balance and match them, merge them, and add them to a network."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from lightning_sym._checks import as_list, check_words
from lightning_sym._files import read_json, write_atomically
from lightning_sym._random import seeded
from lightning_sym._text import unknown
from lightning_sym.merging.methods import METHODS as FORMULAS
from lightning_sym.merging.methods import merge_tensors
from lightning_sym.merging.parameters import MergeSettings
from lightning_sym.symmetry.low_rank import Gauge, LowRank, difference, mean_factors, mean_product
from lightning_sym.symmetry.views import NamedTensors
from lightning_sym.weights import read_weights

CONFIG, WEIGHTS, README = "adapter_config.json", "adapter_model.safetensors", "README.md"
_PICKLED = "adapter_model.bin"  # of old versions; only tensors are read
_START = "base_model.model."
# Factors A and B of a layer; the bias of B is not a factor and stays unchanged.
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")
METHODS = ("product", "aligned", "factors")
Combine: TypeAlias = Callable[[str, list[Tensor]], Tensor]
# Sides of a product above which its singular vectors are approximated.
_LARGE = 1024
# Initialisations that change the weights of the network as well.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, eq=False)
class Adapter:
    r"""A low-rank adapter in a folder of ``peft``, which adds :math:`s B A` to the weight of each module.

    For every invertible matrix g, the factors :math:`B g^{-1}` and :math:`g A` define the same adapter: each module has
    its own gauge freedom (docs/theory/matching.md, 7).

    Attributes:
        config: Content of ``adapter_config.json``.
        tensors: Tensors of ``adapter_model.safetensors``.
        source: The folder, for messages.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    source: str = "the adapter"

    @classmethod
    def read(cls, folder: str | Path) -> "Adapter":
        """Read an adapter without running code in its files.

        Args:
            folder: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or ``adapter_model.bin`` of
                older versions.

        Raises:
            ValueError: If a file is missing, damaged or not finite, or the adapter is not plain LoRA, that is, it does
                not just add its product to the weight (DoRA and others).
        """
        folder = Path(folder)
        weights = folder / (_PICKLED if not (folder / WEIGHTS).exists() and (folder / _PICKLED).exists() else WEIGHTS)
        for file in (folder / CONFIG, weights):
            if not file.is_file():
                raise ValueError(f"There is no file {file}; expected an adapter's folder, as peft saves it.")
        config = read_json(folder / CONFIG)
        if config is None:
            raise ValueError(f"{folder / CONFIG} is damaged or cannot be read; expected the JSON that peft writes.")
        tensors = read_weights(weights)
        adapter = cls(config, tensors, str(folder))
        adapter.products  # noqa: B018  # checks the tensors
        return adapter

    def write(self, folder: str | Path, *, readme: str | None = None) -> Path:
        """Write the adapter in the form that ``peft`` reads.

        Args:
            folder: Created if it does not exist.
            readme: Text of a ``README.md``; None for no such file.

        Returns:
            The folder.

        Raises:
            ValueError: If the folder holds such a file already.
            OSError: If the folder cannot be written to; no partial file remains.
        """
        folder = Path(folder)
        weights = save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, {"format": "pt"})
        contents: dict[str, str | bytes] = {CONFIG: json.dumps(dict(self.config), indent=2) + "\n"}
        contents |= {} if readme is None else {README: readme}
        contents[WEIGHTS] = weights  # last: a folder with weights is whole
        if there := next((name for name in contents if (folder / name).exists()), None):
            raise ValueError(f"{folder / there} exists already; expected a folder without an adapter.")
        try:
            for name, content in contents.items():
                write_atomically(folder / name, content)
        except BaseException:
            for name in contents:
                (folder / name).unlink(missing_ok=True)
            raise
        return folder

    # Products.

    @cached_property
    def _names(self) -> dict[str, tuple[str, str]]:
        """Return the names of the tensors A and B, by module."""
        found: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            if match := _FACTOR.fullmatch(name):
                found.setdefault(match[1], {})[match[3]] = name
        for module, own in found.items():
            if len(own) != 2:
                raise ValueError(f"{self.source} holds only one factor of {module}; expected lora_A and lora_B.")
        factors = {name for own in found.values() for name in own.values()}
        others = [name for name in self.tensors if "lora_" in name and name not in factors]
        if other := next((name for name in others if not name.endswith(".lora_B.bias")), None):
            kind = "DoRA" if "magnitude" in other else "another kind"
            raise ValueError(
                f"{self.source} holds {other}, of {kind}, which does more than add its product to the weight; expected "
                "plain LoRA."
            )
        if not found:
            raise ValueError(f"{self.source} holds no lora_A and lora_B; expected a LoRA adapter.")
        return {module: (own["A"], own["B"]) for module, own in found.items()}

    @cached_property
    def products(self) -> dict[str, LowRank]:
        """Products that are added to the module weights, in float64; each factor takes half of the scaling.

        Kernels of convolutions are flattened; products of embeddings are transposed.

        Raises:
            ValueError: If the adapter is not plain LoRA, not finite, or does not match the configuration.
        """
        self._check_kind()
        for name, tensor in self.tensors.items():
            if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
                raise ValueError(f"{self.source} holds {name} with values that are not finite floating numbers.")
        found = {}
        for module, names in self._names.items():
            down, up = (self.tensors[name].double() for name in names)
            rank, expected = down.shape[0], self._of("r", "rank_pattern", module)
            if down.ndim < 2 or up.ndim < 2 or rank != expected or up.shape[1] != rank or up[0, 0].numel() != 1:
                raise ValueError(
                    f"{self.source} holds factors of {module} of shapes {list(up.shape)} and {list(down.shape)}; "
                    f"expected the rank {expected:g} of its configuration between them, and no groups."
                )
            found[module] = LowRank(up.flatten(1), down.flatten(1)).times(self.scaling(module))
        return found

    def scaling(self, module: str) -> float:
        """Return s: ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` for rsLoRA, with the patterns of both."""
        rank = self._of("r", "rank_pattern", module)
        return self._of("lora_alpha", "alpha_pattern", module) / (rank**0.5 if self.config.get("use_rslora") else rank)

    def _of(self, name: str, pattern: str, module: str) -> float:
        """Return a configured number for a module, from the first pattern that matches its name as in peft."""
        value, patterns = self.config.get(name), self.config.get(pattern) or {}
        path = module.removeprefix(_START)
        try:
            value = next((own for key, own in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", path)), value)
        except (re.error, AttributeError):
            raise ValueError(f"{self.source}: {pattern} must map patterns of names, got {patterns}.") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ValueError(f"{self.source}: {name} of {path} is {value!r}; expected a number > 0.")
        return value

    def _check_kind(self) -> None:
        if self.config.get("peft_type") != "LORA":
            raise ValueError(f"{self.source} is of peft_type {self.config.get('peft_type')!r}; expected LORA.")
        used = [key for key, value in self.config.items() if key.startswith("use_") and value and key != "use_rslora"]
        if used:
            kind = "DoRA: the columns of the weight are normalised after the product" if "use_dora" in used else "other"
            raise ValueError(
                f"{self.source} is not plain LoRA ({used[0]}, {kind}): its factors alone do not determine the change "
                "of a weight; expected plain LoRA adapters."
            )

    # Gauges.

    def balanced(self) -> "Adapter":
        """Return the same adapter with equal, diagonal Gram matrices of both factors: ``B.T @ B == A @ A.T``.

        In exact arithmetic the result is the same for all gauges, see :meth:`LowRank.balanced`. Do not continue
        training from it if B is still zero: A becomes zero as well.
        """
        return self.with_products({module: own.balanced() for module, own in self.products.items()})

    def matched(self, reference: "Adapter", gauge: Gauge = "orthogonal") -> "Adapter":
        """Return the same adapter in the gauge that brings its factors closest to those of another adapter.

        Args:
            reference: Adapter of the same modules and ranks; its gauge stays.
            gauge: "orthogonal": Procrustes in the balanced gauge. "invertible": starts there and minimises the distance
                of the factors over all gauges; see :meth:`LowRank.matched`.

        Raises:
            ValueError: If the adapters do not match, or a product has a smaller rank than its factors.
        """
        check_words(("gauge", gauge, get_args(Gauge)))
        check_same_network([reference, self], ranks=True)
        theirs = reference.products
        return self.with_products({m: own.matched(theirs[m], gauge) for m, own in self.products.items()})

    def with_products(self, products: Mapping[str, LowRank]) -> "Adapter":
        """Return the adapter with other products; their ranks replace those of the configuration, alpha stays.

        Args:
            products: One product for each of :attr:`products`, of its shape.

        Raises:
            ValueError: If a number exceeds the range of the tensors' dtype.
        """
        ranks = {module: own.rank for module, own in products.items()}
        config, tensors = dict(self.config), dict(self.tensors)
        if ranks != {module: own.rank for module, own in self.products.items()}:
            most = max(ranks.values())
            config["r"] = most
            config["rank_pattern"] = {re.escape(m.removeprefix(_START)): r for m, r in ranks.items() if r != most}
        changed = replace(self, config=config)
        for module, (name_a, name_b) in self._names.items():
            own = products[module].times(1 / changed.scaling(module))
            for name, factor, axis in ((name_a, own.down, 0), (name_b, own.up, 1)):
                shape = list(self.tensors[name].shape)
                shape[axis] = own.rank
                tensors[name] = factor.reshape(shape).to(self.tensors[name].dtype)
                if not bool(tensors[name].isfinite().all()):
                    raise ValueError(f"{name} would hold numbers outside the range of {tensors[name].dtype}.")
            if (bias := name_b.removesuffix(".weight") + ".bias") in tensors:  # has the scaling of the product
                ratio = self.scaling(module) / changed.scaling(module)
                tensors[bias] = (self.tensors[bias].double() * ratio).to(self.tensors[bias].dtype)
        return replace(changed, tensors=tensors)

    def added(self, name: str) -> Tensor | None:
        """Return a tensor that is no factor (bias of B times its scaling); None if it does not exist."""
        tensor = self.tensors.get(name)
        module = name.removesuffix(".bias").removesuffix(".lora_B")
        factor = self.scaling(module) if name.endswith(".lora_B.bias") and module in self._names else 1.0
        return None if tensor is None else tensor.double() * factor


def is_adapter(path: str | Path) -> bool:
    """Return whether a path is the folder of an adapter."""
    return (Path(path) / CONFIG).is_file()


def check_same_network(adapters: Sequence[Adapter], *, ranks: bool = False) -> None:
    """Check that adapters belong to the same network.

    Args:
        adapters: At least one.
        ranks: Whether their ranks must agree.

    Raises:
        ValueError: If not; the message names the first difference.
    """
    first = adapters[0]
    sizes = {module: (own.up.shape[0], own.down.shape[1]) for module, own in first.products.items()}
    for other in adapters[1:]:
        if missing := min(sizes.keys() ^ other.products.keys(), default=None):
            has, lacks = (first, other) if missing in sizes else (other, first)
            raise ValueError(f"{has.source} changes {missing}, but {lacks.source} does not; expected the same modules.")
        for module, own in other.products.items():
            if (own.up.shape[0], own.down.shape[1]) != sizes[module]:
                raise ValueError(f"{module} has another shape in {other.source} than in {first.source}.")
            if ranks and own.rank != first.products[module].rank:
                raise ValueError(
                    f"{module} has rank {own.rank} in {other.source} and {first.products[module].rank} in "
                    f"{first.source}; expected equal ranks, which merge_adapters does not require."
                )


@dataclass(frozen=True, eq=False)
class MergedAdapters:
    """Merged adapters.

    Attributes:
        adapter: The result, with the configuration of the first adapter except for ranks.
        errors: For each module the Frobenius distance of the result from the exact merged product, relative to the norm
            of that. Means have the errors of all three ways ("product", "aligned", "factors"), other methods their own.
        method: The method of ``adapter``.
    """

    adapter: Adapter
    errors: Mapping[str, Mapping[str, float]]
    method: str

    def __str__(self) -> str:
        width, columns = max(map(len, [*self.errors, "module"])), list(next(iter(self.errors.values())))
        rows = [f"{'module':{width}}  " + "  ".join(f"{name:>9}" for name in columns)]
        rows += [
            f"{module:{width}}  " + "  ".join(f"{own[name]:{max(9, len(name))}.2e}" for name in columns)
            for module, own in self.errors.items()
        ]
        return "\n".join(rows)


def merge_adapters(
    adapters: Sequence[Adapter],
    *,
    method: str | Combine | MergeSettings = "product",
    rank: int | None = None,
    weights: Sequence[float] | None = None,
    **settings: Any,
) -> MergedAdapters:
    """Merge adapters of one network.

    The exact target is the mean of the products ``s B A``, or another formula of them; its rank is larger.

    Args:
        adapters: At least one, for the same modules; ranks and scalings may differ.
        method: "product" or "linear": truncated singular value decomposition of the mean product, which is optimal for
            its rank. "aligned": mean of the factors, balanced and rotated to those of the first adapter. "factors":
            mean of the factors in their given gauges, for comparison; it depends on the gauges. Any other of
            :data:`lightning_sym.merging.methods.METHODS`: the formula for products, with zero as the base, truncated.
            A function of a weight's name and the products: the same for its result. A formula with its settings, the
            same for all tensors: weights and further settings must then be left out.
        rank: Rank of the result, >= 1, not for "aligned" and "factors"; default: for each module the largest rank of an
            adapter.
        weights: One number per adapter; for means >= 0, and divided by their sum. None: equal weights.
        **settings: Settings of the formula, as for :func:`lightning_sym.merging.methods.merge_tensors`.

    Returns:
        The result and the errors. Biases of B are merged like products, and whole modules are averaged. Above 1024
        rows and columns, the singular vectors of a sparsified sum are approximated by subspace iteration; the error is
        that of the result.

    Raises:
        ValueError: If the adapters do not match, or an argument is out of its range.
    """
    adapters = as_list("adapters", adapters)
    if isinstance(method, MergeSettings):
        if weights is not None or settings:
            raise ValueError("the method holds its settings; leave out weights and others.")
        name, values = method.method.name, method.constants()
        own = values.pop("weight", None)
        if name == "linear" and values["normalize"]:  # truncated exactly
            return merge_adapters(adapters, rank=rank, weights=own)
        return merge_adapters(adapters, method=name, rank=rank, weights=own, seed=method.seed, **values)
    way = "product" if method == "linear" and not settings else method
    if not (callable(way) or way in METHODS or way in FORMULAS):
        raise ValueError(unknown("method", way, [*METHODS, *FORMULAS]))
    if way in METHODS and settings:
        raise ValueError(f"{way} has no {next(iter(settings))}; leave it out, or choose another method.")
    if rank is not None and not (isinstance(rank, int) and rank >= 1 and way not in ("aligned", "factors")):
        raise ValueError(
            f"rank must be an integer >= 1 and needs a method that truncates, got {rank!r} and {method!r}."
        )
    given = [1.0] * len(adapters) if weights is None else list(map(float, weights))
    if len(given) != len(adapters) or not all(map(math.isfinite, given)):
        raise ValueError(f"weights must be {len(adapters)} finite numbers, got {weights}.")
    check_same_network(adapters)
    combine = None if way in METHODS else way if callable(way) else _formula(way, weights, settings)
    if combine is None and (min(given) < 0 or not sum(given) > 0):
        raise ValueError(f"weights must be {len(adapters)} numbers >= 0 with a sum above 0, got {weights}.")
    label = str(getattr(way, "__name__", way))
    results: dict[str, LowRank] = {}
    errors: dict[str, dict[str, float]] = {}
    for module in adapters[0].products:
        products = [own.products[module] for own in adapters]
        most = max(own.rank for own in products)
        if combine is None:
            shares = [weight / math.fsum(given) for weight in given]
            exact = mean_product(products, shares)
            padded = [own.padded(most) for own in products]
            found = {
                "product": exact.truncated(rank or most),
                "aligned": mean_factors(_aligned(padded), shares),
                "factors": mean_factors(padded, shares),
            }
            norm, distances = exact.norm, {name: difference(own, exact) for name, own in found.items()}
        else:
            whole = combine(f"{module.removeprefix(_START)}.weight", [own.product for own in products])
            found = {label: _truncated(whole, products, rank or most)}
            norm, distances = float(whole.norm()), {label: float((found[label].product - whole).norm())}
        errors[module] = {name: distance / norm if norm else 0.0 for name, distance in distances.items()}
        results[module] = found[label]
    adapter = adapters[0].with_products(results)
    return MergedAdapters(replace(adapter, tensors=_others_merged(adapter, adapters, given, combine)), errors, label)


def _formula(name: str, weights: Sequence[float] | None, settings: Mapping[str, Any]) -> Combine:
    """Return a merge method as a function of a name and differences from zero."""
    more = dict(settings) if weights is None else {**settings, "weight": weights}

    def combine(place: str, products: list[Tensor]) -> Tensor:
        base = torch.zeros_like(products[0]) if FORMULAS[name].base == "needed" else None
        return merge_tensors(name, products, base=base, name=place, **more)

    return combine


def _truncated(matrix: Tensor, products: Sequence[LowRank], rank: int) -> LowRank:
    """Return the nearest product of a rank to a matrix that was computed from products."""
    basis = torch.linalg.qr(torch.cat([own.up for own in products], 1)).Q
    if (matrix - basis @ (basis.T @ matrix)).norm() > 1e-9 * matrix.norm():  # not a linear combination
        if min(matrix.shape) <= _LARGE:
            return LowRank(matrix, torch.eye(matrix.shape[1], dtype=matrix.dtype)).truncated(rank)
        with seeded(0):
            basis = torch.svd_lowrank(matrix, q=min(2 * rank + 16, *matrix.shape), niter=4)[0]
    return LowRank(basis, basis.T @ matrix).truncated(rank)


def _aligned(products: Sequence[LowRank]) -> list[LowRank]:
    """Balance products and align them to the first."""
    first, *others = (own.balanced() for own in products)
    return [first, *(own.aligned(first) for own in others)]


def _others_merged(
    merged: Adapter, adapters: Sequence[Adapter], weights: Sequence[float], combine: Combine | None
) -> dict[str, Tensor]:
    """Return a merged adapter's tensors: biases of B like products, whole modules averaged."""
    tensors, factors = dict(merged.tensors), {name for names in merged._names.values() for name in names}
    names = dict.fromkeys(name for own in adapters for name in own.tensors)
    for name in names:
        if name in factors:
            continue
        held = [value for own in adapters if (value := own.added(name)) is not None]
        if len(held) < len(adapters) or len({value.shape for value in held}) > 1:
            raise ValueError(f"{name} is missing in an adapter or has another shape there; expected the same tensors.")
        if name.endswith(".lora_B.bias"):
            module = name.removesuffix(".lora_B.bias")
            place = f"{module.removeprefix(_START)}.bias"
            mean = merge_tensors("linear", held, weight=weights) if combine is None else combine(place, held)
            mean = mean / merged.scaling(module)
        else:
            mean = merge_tensors("linear", held, weight=weights, name=name)
        tensors[name] = mean.to(merged.tensors[name].dtype)
    return tensors


# Adapters on a network.


def with_adapter(tensors: Mapping[str, Tensor], adapter: Adapter) -> Mapping[str, Tensor]:
    """Return a network's tensors with an adapter added, as after ``merge_and_unload`` of ``peft``.

    Products are added to weights (transposed for embeddings and where a layer stores its weight transposed, as
    GPT-2's do), biases of B to biases; whole modules replace those of the network. Names may differ by a prefix, as
    between a network with and without its head.

    Args:
        tensors: The network's tensors by name; it may load them when asked.
        adapter: The adapter.

    Returns:
        Tensors of the same names. Changed ones are computed when asked, in float64, and returned in float32 or the
        tensor's wider dtype, so that small changes of 16-bit weights are not rounded away.

    Raises:
        ValueError: If the adapter changes tensors that are not there, or its initialisation changed the network too; at
            access, if a shape does not fit.
    """
    start = adapter.config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"{adapter.source} has init_lora_weights {start!r}, which changed the weights of the network as well; "
            "convert it to plain LoRA with peft first."
        )
    changes: dict[str, list[Callable[[Tensor], Tensor]]] = {}
    transposed, factors = bool(adapter.config.get("fan_in_fan_out")), set(sum(adapter._names.values(), ()))
    # Whole tensors first: peft also saves a changed embedding without its product.
    for name in sorted(adapter.tensors.keys() - factors, key=lambda name: "lora_" in name):
        added = adapter.added(name)
        if added is None or ".original_module." in name:
            continue
        if name.endswith(".lora_B.bias"):
            changes.setdefault(_path(name.replace(".lora_B.", ".")), []).append(partial(torch.add, added))
        else:
            changes.setdefault(_path(name), []).append(partial(_replaced, added, name))
    for module, own in adapter.products.items():
        turned = transposed or "lora_embedding" in adapter._names[module][0]
        path = _path(f"{module}.weight")
        changes.setdefault(path, []).append(partial(_plus_product, own, turned, path))
    places = _places(list(changes), tensors)
    names = set(tensors)  # asks for no tensor
    if missing := [path for path, place in places.items() if place not in names]:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{adapter.source} changes {', '.join(missing[:3])}{others}, which the network does not have; expected the "
            "network that it was trained on."
        )
    return _Changed(tensors, {place: changes[path] for path, place in places.items()})


def _path(name: str) -> str:
    """Return the network's name of a tensor, without the parts that peft inserts."""
    return re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", name.removeprefix(_START))


def _places(paths: Sequence[str], tensors: Iterable[str]) -> dict[str, str]:
    """Return the network's names for an adapter's: with the prefix, added or left out, that fits most of them."""
    names, first = set(tensors), paths[0]
    more = [name.removesuffix(first) for name in names if name.endswith(f".{first}")]
    less = [first[: place + 1] for place, sign in enumerate(first) if sign == "."]
    prefixes = [("", ""), *((own, "") for own in sorted(more)), *(("", own) for own in less)]
    found = [{path: add + path.removeprefix(cut) for path in paths} for add, cut in prefixes]
    return min(found, key=lambda places: len(set(places.values()) - names))


class _Changed(NamedTensors):
    """Tensors of a network, some of them changed when asked."""

    def __init__(
        self, tensors: Mapping[str, Tensor], changes: Mapping[str, Sequence[Callable[[Tensor], Tensor]]]
    ) -> None:
        self._tensors, self._changes, self._names = tensors, changes, tensors

    def __getitem__(self, name: str) -> Tensor:
        own = self._tensors[name]
        if name not in self._changes:
            return own
        found = own.double()
        for change in self._changes[name]:
            found = change(found)
        return found.to(torch.promote_types(own.dtype, torch.float32))


def _plus_product(own: LowRank, transposed: bool, name: str, weight: Tensor) -> Tensor:
    """Add a product to a weight; for convolutions, its columns are the kernel."""
    sides = (own.up.shape[0], own.down.shape[1])
    # Only square weights leave a choice: the configuration of a network with both kinds of layers says one.
    if weight.ndim == 2 and weight.shape == sides[::-1] and (transposed or sides[0] != sides[1]):
        return weight + own.product.T
    if weight.shape[:1] != sides[:1] or weight.numel() != sides[0] * sides[1]:
        raise ValueError(f"{name} has shape {list(weight.shape)} in the network; the adapter expects {list(sides)}.")
    return weight + own.product.reshape(weight.shape)


def _replaced(value: Tensor, name: str, tensor: Tensor) -> Tensor:
    if value.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} in the network and {list(value.shape)} in the adapter."
        )
    return value
