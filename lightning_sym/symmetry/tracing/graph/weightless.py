"""Build networks without weights: parameters on the meta device have shapes only, while constants keep their values."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from lightning_sym.symmetry.tracing.graph.capture import constant_names


def is_weightless(network: nn.Module) -> bool:
    """Return whether a network holds a parameter or buffer on the meta device."""
    return any(tensor.is_meta for held in (network.parameters(), network.buffers()) for tensor in held)


# Larger tensors (in elements) are computed only when their values are needed.
_LARGE: Final = 2**20


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build networks without memory for their weights: parameters on the meta device, buffers with values.

    Under ``torch.device("meta")`` buffers lose their values as well. Those of `transformers` and `timm` can be
    recomputed. Others (a table of sinusoids) cannot, so that every unit combined with them counts as fixed.

    A large tensor is created on the meta device and its operations are recorded. It is computed as soon as it becomes a
    buffer, an attribute of a module or a Python number. No weight is ever allocated; a large buffer is.

    Example:
        >>> with without_weights():
        ...     network = nn.Linear(100_000, 100_000)
        >>> network.weight.device
        device(type='meta')
    """
    register, register_buffer, set_attribute = (
        *(nn.Module.register_parameter, nn.Module.register_buffer),
        nn.Module.__setattr__,
    )
    known: Any = WeakIdKeyDictionary()  # a parameter in two places stays one
    deferred = _Deferred()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                kind, kept = type(parameter), parameter.__dict__
                known[parameter] = kind(parameter.to("meta"), requires_grad=parameter.requires_grad)
                known[parameter].__dict__.update(kept)
            parameter = known[parameter]
        register(module, name, parameter)

    def buffered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, deferred.value(tensor), persistent)

    def assigned(module: nn.Module, name: str, value: Any) -> None:
        set_attribute(module, name, deferred.value(value))

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    nn.Module.register_buffer = buffered  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = assigned  # type: ignore[method-assign, assignment]
    try:
        with deferred:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        nn.Module.register_buffer = register_buffer  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class _Step:
    """A call that creates a tensor, or changes one in place.

    Attributes:
        call: The function.
        leaves: Its flat arguments: steps for tensors on the meta device, copies of other tensors.
        spec: The nesting of the arguments.
        changed: Index of the argument that the call changes in place; None if it creates a tensor.
        place: Index of the created tensor among the results.
    """

    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    changed: int | None = None
    place: int = 0


class _Deferred(TorchFunctionMode):
    """Creates large tensors on the meta device and records their calls, to compute their values on demand.

    After an in-place change, the values of other tensors in the same storage are unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: Any = WeakIdKeyDictionary()  # by tensor: its last step, and its storage's number of changes then
        self._changes: Counter[int] = Counter()
        self._values: Any = WeakIdKeyDictionary()
        self._used: dict[int, Tensor] = {}  # tensors with values, by storage; the reference keeps the id in use
        self._off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        if func in _device_constructors() and torch.device(kwargs.get("device") or "cpu").type in ("cpu", "meta"):
            return self._make(func, args, {**kwargs, "device": "cpu"})
        leaves, spec = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        return self._apply(func, leaves, spec)

    def value(self, tensor: Any) -> Any:
        """Return the values of a deferred tensor on the CPU; anything else, including parameters, unchanged."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter) or (step := self._step(tensor)) is None:
            return tensor
        if tensor not in self._values:
            self._values[tensor] = self._computed(step)
            self._values[tensor].__dict__.update(tensor.__dict__)  # of a torch.nn.Buffer
            self._used[_storage(tensor)] = tensor
        return self._values[tensor]

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that creates a tensor, on the meta device if the tensor is large."""
        try:
            made = func(*args, **{**kwargs, "device": "meta"})
        except Exception:  # for existing data, or with wrong arguments
            return func(*args, **kwargs)
        if not isinstance(made, Tensor) or made.numel() <= _LARGE:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        self._remember(made, _Step(func, tuple(leaves), spec))
        return made

    def _apply(self, func: Any, leaves: list[Any], spec: TreeSpec) -> Any:
        """Call a function of tensors on the meta device; compute their values if it needs them."""
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        before = {place: tensor._version for place, tensor in tensors.items()}
        moved = [
            leaf.to("meta") if place in tensors and not leaf.is_meta else leaf for place, leaf in enumerate(leaves)
        ]
        known = [self._step(leaf) if place in tensors and leaf.is_meta else leaf for place, leaf in enumerate(leaves)]
        complete = all(known[place] is not None for place in tensors)
        steps = tuple(step.clone() if isinstance(step, Tensor) else step for step in known)  # it may change later
        written = _written(func, spec, len(leaves))
        if any(place in tensors and not tensors[place].is_meta for place in written):
            return self._call_with_values(func, leaves, spec)
        try:
            args, kwargs = tree_unflatten(moved, spec)
            result = func(*args, **kwargs)
        except Exception:  # it needs values: for indices, or for the shape of the result
            if not complete:
                raise
            if not written:
                return self._call_with_values(func, leaves, spec)
            for place in written:
                self._change(tensors[place], _Step(func, steps, spec, changed=place))
            return None if func.__name__ == "__setitem__" else tensors[written[0]]
        changed = [place for place, tensor in tensors.items() if tensor._version != before[place]]
        for place in changed:
            self._change(tensors[place], _Step(func, steps, spec, changed=place) if complete else None)
        if complete and not changed:
            for place, made in enumerate(tree_flatten(result)[0]):
                if isinstance(made, Tensor) and made.is_meta and all(made is not one for one in tensors.values()):
                    self._remember(made, _Step(func, steps, spec, place=place))
        return result

    def _call_with_values(self, func: Any, leaves: list[Any], spec: TreeSpec) -> Any:
        args, kwargs = tree_unflatten([self.value(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def _change(self, tensor: Tensor, step: _Step | None) -> None:
        """Record that a call changed a tensor, and all others in its storage, in place."""
        key = _storage(tensor)
        if key in self._used:
            if tensor is not self._used[key] or step is None:
                raise RuntimeError(
                    "A large buffer was changed in place by another name, which without_weights() does not follow; "
                    "change it before it is registered, or build the network under torch.device('meta')."
                )
            self._values[tensor].copy_(self._computed(step))
        self._changes[key] += 1
        self._remember(tensor, step)

    def _remember(self, tensor: Tensor, step: _Step | None) -> None:
        self._steps[tensor] = (step, self._changes[_storage(tensor)])

    def _step(self, tensor: Tensor) -> _Step | None:
        step, changes = self._steps.get(tensor, (None, 0))
        return step if step is not None and changes == self._changes[_storage(tensor)] else None

    def _computed(self, step: _Step) -> Tensor:
        """Return the result of a step, with its values."""
        off, self._off = self._off, True
        try:
            with torch.no_grad():
                return _computed(step)
        finally:
            self._off = off


def _computed(step: _Step) -> Tensor:
    later: list[_Step] = []  # in-place changes, last one first; iterative, as there may be thousands
    while step.changed is not None:
        later.append(step)
        step = step.leaves[step.changed]
    args, kwargs = _arguments(step)
    found: Tensor = tree_flatten(step.call(*args, **kwargs))[0][step.place]
    if later:
        found = found.clone()  # it may be a view
    for change in reversed(later):
        args, kwargs = _arguments(change, found)
        change.call(*args, **kwargs)
    return found


def _arguments(step: _Step, changed: Tensor | None = None) -> Any:
    leaves = [
        changed if place == step.changed else _computed(leaf) if isinstance(leaf, _Step) else leaf
        for place, leaf in enumerate(step.leaves)
    ]
    return tree_unflatten(leaves, step.spec)


def _written(func: Any, spec: TreeSpec, count: int) -> list[int]:
    """Return the indices of the flat arguments that a call writes into: the first one, or ``out``."""
    args, kwargs = tree_unflatten(list(range(count)), spec)
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return tree_flatten([kwargs.get("out", []), args[:1] if in_place else []])[0]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def constant_values(network: nn.Module) -> dict[str, Tensor]:
    """Compute the values of constant buffers on the meta device by the network's own initialisation.

    Constants are integer buffers and buffers that no state dict contains. `timm` fills them by a method of the module,
    `transformers` by one of the model.

    Returns:
        CPU tensors by name. Buffers that remain unfilled, or are filled randomly, are missing.
    """
    unsaved = constant_names(network)
    values: dict[str, Tensor] = {}
    for prefix, module in network.named_modules():
        names = {f"{prefix}.{name}" if prefix else name: name for name, tensor in module.named_buffers(recurse=False)}
        wanted = {
            own: name
            for name, own in names.items()
            for tensor in [module._buffers[own]]
            if tensor is not None and tensor.is_meta and (name in unsaved or not tensor.is_floating_point())
        }
        if not wanted:
            continue
        # A buffer that is equal for both initial fills has been filled.
        zeros, ones = (_initialised(network, prefix, module, list(wanted), fill) for fill in (0, 1))
        for own, name in wanted.items():
            if own in zeros and own in ones and torch.equal(zeros[own], ones[own]):
                values[name] = zeros[own]
    return values


def _initialised(network: nn.Module, prefix: str, module: nn.Module, names: list[str], fill: int) -> dict[str, Tensor]:
    """Fill buffers of a copied module with a number, run its initialisation, and return these buffers."""
    twin = copy.copy(module)
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    for name in names:
        twin._buffers[name] = torch.full_like(module.get_buffer(name), fill, device="cpu")
    parts = prefix.split(".") if prefix else []
    owners: list[Any] = [network.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        torch.manual_seed(fill)
        if callable(own := getattr(twin, "init_non_persistent_buffers", None)):
            own()
        elif model := next((owner for owner in owners if callable(getattr(owner, "_init_weights", None))), None):
            model._init_weights(twin)
    found = {name: twin._buffers.get(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.device.type == "cpu"}
