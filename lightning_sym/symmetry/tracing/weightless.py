"""Networks without weights: parameters on torch's meta device have shapes and no values, constants need theirs."""

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

from lightning_sym.symmetry.tracing.capture import constant_names, state_tensors


def is_weightless(network: nn.Module) -> bool:
    """Return whether a network holds a parameter or buffer on the meta device."""
    return any(tensor.is_meta for tensor in state_tensors(network).values())


# Tensors of more elements are not made before their values are needed.
_LARGE: Final = 2**20


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build networks without memory for their weights: parameters are on the meta device, buffers keep their values.

    Under ``torch.device("meta")`` buffers lose their values, too. Those of `transformers` and `timm` can be had again,
    others (a table of sinusoids) cannot, and what they meet is then taken to be fixed.

    A large tensor is made on the meta device, and what is done with it is remembered; it is computed where it becomes
    a buffer, an attribute of a module or a Python number. So no weight is ever allocated, and a large buffer is.

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
    known: Any = WeakIdKeyDictionary()  # a parameter in two places is still one
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
    """A call that makes a tensor, or changes one in place.

    Attributes:
        call: What is called.
        leaves: Its arguments, flat: steps in the place of tensors on the meta device, copies of others.
        spec: How the arguments are put together.
        changed: Place of the tensor among the arguments that the call changes; None if it makes one.
        place: Place of the tensor that it makes among its results.
    """

    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    changed: int | None = None
    place: int = 0


class _Deferred(TorchFunctionMode):
    """Makes large tensors on the meta device, and remembers by which calls, so that their values can be had later.

    Of a tensor that shares its storage with one that was changed in place, the values are not known any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: Any = WeakIdKeyDictionary()  # by tensor: the last step, and how often its storage had changed
        self._changes: Counter[int] = Counter()
        self._values: Any = WeakIdKeyDictionary()
        self._used: dict[int, Tensor] = {}  # what has values, by storage, kept so that no other gets its number
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
        """Return a tensor on the CPU that was deferred; anything else, parameters too, as it is."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter) or (step := self._step(tensor)) is None:
            return tensor
        if tensor not in self._values:
            self._values[tensor] = self._computed(step)
            self._values[tensor].__dict__.update(tensor.__dict__)  # of a torch.nn.Buffer
            self._used[_storage(tensor)] = tensor
        return self._values[tensor]

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that makes a tensor; where it is large, on the meta device."""
        try:
            made = func(*args, **{**kwargs, "device": "meta"})
        except Exception:  # of data that are there already, or with wrong arguments
            return func(*args, **kwargs)
        if not isinstance(made, Tensor) or made.numel() <= _LARGE:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        self._remember(made, _Step(func, tuple(leaves), spec))
        return made

    def _apply(self, func: Any, leaves: list[Any], spec: TreeSpec) -> Any:
        """Call a function of tensors on the meta device; where it needs their values, with these."""
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
        except Exception:  # it needs values: where to write, or what shape its result has
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
        """Take note that a call has changed a tensor in place, and all that share its storage."""
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
        """Return what a step has made, with its values."""
        off, self._off = self._off, True
        try:
            with torch.no_grad():
                return _computed(step)
        finally:
            self._off = off


def _computed(step: _Step) -> Tensor:
    later: list[_Step] = []  # changes in place, the last one first: there may be thousands
    while step.changed is not None:
        later.append(step)
        step = step.leaves[step.changed]
    args, kwargs = _arguments(step)
    found: Tensor = tree_flatten(step.call(*args, **kwargs))[0][step.place]
    if later:
        found = found.clone()  # it may be a view of something else
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
    """Return the places, among a call's flat arguments, of what it writes into: the first one, or ``out``."""
    args, kwargs = tree_unflatten(list(range(count)), spec)
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return tree_flatten([kwargs.get("out", []), args[:1] if in_place else []])[0]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def constant_values(network: nn.Module) -> dict[str, Tensor]:
    """Return the values of constant buffers that have none, as the network's own initialisation gives them.

    Constant are buffers that are in no state dict, and those of integers. `timm` fills them by a method of the module,
    `transformers` by one of the model.

    Returns:
        By name, on the CPU; those that nothing fills, or randomly, are missing.
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
        # What is the same whatever was there before has been filled.
        zeros, ones = (_initialised(network, prefix, module, list(wanted), fill) for fill in (0, 1))
        for own, name in wanted.items():
            if own in zeros and own in ones and torch.equal(zeros[own], ones[own]):
                values[name] = zeros[own]
    return values


def _initialised(network: nn.Module, prefix: str, module: nn.Module, names: list[str], fill: int) -> dict[str, Tensor]:
    """Return buffers of a copy of a module after its own initialisation; they were filled with a number before."""
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
