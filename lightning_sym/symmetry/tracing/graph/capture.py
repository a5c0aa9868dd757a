"""Capture a network as a flat list of ATen operations with the names of parameters, buffers and modules."""

import contextlib
import copy
import functools
import itertools
import logging
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils import _pytree as pytree

from lightning_sym._checks import UnfitInputsError
from lightning_sym.networks.base import Cuts
from lightning_sym.networks.modes import attributes_kept
from lightning_sym.symmetry.charts import Chart, Piece
from lightning_sym.symmetry.tracing.graph.calls import Call, OutputError, misspelt, tensors_of
from lightning_sym.symmetry.tracing.graph.derivatives import of_derivatives
from lightning_sym.symmetry.tracing.graph.folding import Folding
from lightning_sym.symmetry.tracing.graph.recurrent import decompositions

M = TypeVar("M", bound=nn.Module)
_PLAIN = (bool, int, float, str, type(None))  # attributes of modules that hold no tensors
_OF_MODULES = {*vars(nn.Module())} - {"_buffers"}  # nor do these, beyond the leaves that parameters are
# Leaf modules run as one operation, so that rules for module classes apply to them. The operation looks up its result
# shapes here.
_LEAVES: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}


@torch.library.custom_op("lightning_sym::leaf", mutates_args=())
def _leaf(inputs: Sequence[Tensor], weights: Sequence[Tensor], key: int) -> list[Tensor]:
    raise RuntimeError("a leaf module is only traced, never run")


@_leaf.register_fake
def _(inputs: Sequence[Tensor], weights: Sequence[Tensor], key: int) -> list[Tensor]:
    floating = next((given.dtype for given in inputs if given.is_floating_point()), None)
    return [
        torch.empty(shape, dtype=floating if floating and dtype.is_floating_point else dtype)
        for shape, dtype in _LEAVES[key]
    ]


# A constraint of a user's rule that no torch operation expresses: see `expansion.py`.
@torch.library.custom_op("lightning_sym::demand", mutates_args=())
def _demand(inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    raise RuntimeError("a demand of a rule is only traced, never run")


@_demand.register_fake
def _(inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return inputs[0].new_empty(shape) if inputs else torch.empty(shape)


DEMAND = torch.ops.lightning_sym.demand.default
OPAQUE = (DEMAND, torch.ops.lightning_sym.leaf.default)  # operations that cannot be evaluated


@dataclass(frozen=True)
class Template:
    """The arguments and keywords of a call, with its tensors removed.

    Attributes:
        leaves: All leaves of the arguments; None replaces each tensor.
        given: For each leaf, whether it was a tensor.
        form: The nesting of the leaves in arguments and keywords.
    """

    leaves: tuple[Any, ...]
    given: tuple[bool, ...]
    form: pytree.TreeSpec

    @classmethod
    def of(cls, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "tuple[Template, list[Any]]":
        """Return the template of a call, and the leaves of type ``kind``, which represent its tensors."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        given = tuple(isinstance(leaf, kind) for leaf in leaves)
        rest = tuple(None if isinstance(leaf, kind) else leaf for leaf in leaves)
        return cls(rest, given, form), [leaf for leaf in leaves if isinstance(leaf, kind)]

    def filled(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords with the given items for the tensors."""
        left = iter(tensors)
        leaves = [next(left) if given else leaf for leaf, given in zip(self.leaves, self.given, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return args, kwargs


@dataclass(frozen=True)
class Leaf:
    """A call of a module that runs as one operation.

    Attributes:
        module: The module.
        call: The arguments of the call without its tensors.
    """

    module: nn.Module
    call: Template


@dataclass
class Capture:
    """A captured network.

    Attributes:
        graph: The operations, in the order of execution.
        states: The name of the parameter or buffer behind each placeholder that holds one.
        inputs: The placeholders of the network's inputs.
        modules: The innermost named module that ran each operation.
        marks: The named tensors.
        leaves: The module call behind each leaf operation, by key.
        left_out: The names of outputs that do not count.
        folded: The constants with values that the run may have read.
        given: Whether shapes or branches depend on the values of integer or boolean inputs.
        buffers: The names of the states that are not parameters.
        charts: By parameter w, the number n of the sum w + n that replaces it in the graph; for vectors perhaps one
            number per element.
        pieces: By parameter that the network reads in pieces, these pieces, if the graph contains them instead of the
            parameter.
        stacks: By stack that the graph contains instead of tensors of equal modules, these tensors.
        call: The captured call.
        rules: The operations and modules replaced by users' rules.
        told: Pairs (factor name, parameter name) that such rules passed to factors.
    """

    graph: fx.Graph
    states: dict[fx.Node, str]
    inputs: list[fx.Node]
    modules: dict[fx.Node, str]
    marks: list["Mark"] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    folded: frozenset[str] = frozenset()
    given: bool = False
    buffers: frozenset[str] = frozenset()
    charts: dict[str, Chart] = field(default_factory=dict)
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call: Call = field(default_factory=Call)
    rules: set[str] = field(default_factory=set)
    told: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Mark:
    """A tensor of the graph that users can name.

    Attributes:
        name: The module that returns it, with ``-2``, ``-3``, ... for its later calls; or the caller's name.
        node: The operation that produces it.
        after: The last operation before the tensor was named. Earlier writes into the tensor belong to it.
        module: The module; empty if the caller named the tensor.
        call: The index of the module's call, from 0.
    """

    name: str
    node: fx.Node
    after: fx.Node
    module: str = ""
    call: int = 0


@functools.cache
def operation_name(target: Any) -> str:
    """Return the name of a graph operation without the namespace ``aten``."""
    schema = getattr(target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else getattr(target, "__name__", str(target))


def address_of(tensor: Tensor) -> tuple[Any, int]:
    """Return a key for the memory of a tensor, and the byte offset of its first element.

    The key uses addresses where they exist, as numpy and DLPack create several storages for the same memory.

    Raises:
        RuntimeError, NotImplementedError, ValueError: If the tensor has no address (sparse, lazy, or inside a
            functional transform).
    """
    storage = tensor.untyped_storage()
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if storage.device.type == "meta":
        return storage._cdata, begin
    return str(storage.device), storage.data_ptr() + begin


def memory_of(tensor: Tensor) -> Any:
    """Return a key for a tensor's elements in memory. Names with equal keys hold the same tensor."""
    try:
        place = address_of(tensor)
    except (RuntimeError, NotImplementedError, ValueError):
        return id(tensor)
    if not tensor.numel():
        return id(tensor)
    strides = tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return place, tuple(tensor.shape), strides, tensor.dtype


def state_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer once, by its first name. Tensors that share all memory count as one."""
    found: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        found.setdefault(memory_of(tensor), (name, tensor))
    return dict(found.values())


def places_of(network: nn.Module) -> dict[str, Tensor]:
    """Return every place that holds a parameter or buffer, including duplicate names of shared modules and weights."""
    return {
        (f"{prefix}." if prefix else "") + name: tensor
        for prefix, module in network.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def first_names(network: nn.Module) -> dict[str, str]:
    """Map every place that holds a parameter or buffer to the first name of its tensor."""
    known = {id(tensor): name for name, tensor in state_tensors(network).items()}
    places = places_of(network)
    if all(id(tensor) in known for tensor in places.values()):
        return {place: known[id(tensor)] for place, tensor in places.items()}
    first = {memory_of(tensor): name for name, tensor in state_tensors(network).items()}
    return {place: first[memory_of(tensor)] for place, tensor in places.items()}


def unsaved_places(network: nn.Module) -> set[str]:
    """Return the places of non-persistent buffers, which a state dict does not contain."""
    return {
        (f"{prefix}." if prefix else "") + name
        for prefix, module in network.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def constant_names(network: nn.Module, names: Mapping[str, str] | None = None) -> set[str]:
    """Return the first names of tensors that no state dict contains: constants of the architecture.

    Args:
        network: The network.
        names: Its :func:`first_names`, if known.
    """
    names, unsaved = first_names(network) if names is None else names, unsaved_places(network)
    return set(names.values()) - {name for place, name in names.items() if place not in unsaved}


def share_memory(network: M, names: Mapping[str, str]) -> M:
    """Make places share one tensor, in place.

    Args:
        network: Is changed.
        names: For each place the first name of its tensor, as returned by :func:`first_names`.
    """
    places = places_of(network)
    for place, name in names.items():
        if places[place] is not places[name] and memory_of(places[place]) != memory_of(places[name]):
            places[place].data = places[name].data
    return network


def _held_by(network: nn.Module, made: dict[int, Any]) -> str:
    """Name the module attribute that prevents copying, if a single attribute does."""
    for name, module in network.named_modules():
        for attribute, held in vars(module).items():
            if attribute.startswith("_"):  # tensors and modules, hooks
                continue
            try:
                copy.deepcopy(held, dict(made))
            except TypeError:
                return f" because of {f'{name}.{attribute}' if name else attribute}"
    return ""


def copied(network: M, made: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a network that preserves shared memory.

    Args:
        network: Is not changed.
        made: Replacements for objects, by their `id`.

    Raises:
        TypeError: If the network holds an object that cannot be copied.
    """
    made = {} if made is None else made
    # Tensors that modules keep from a forward pass (a pruned weight) belong to an autograd graph and cannot be
    # deep-copied.
    held = (
        own
        for module in network.modules()
        for name, own in vars(module).items()
        if name not in _OF_MODULES and not isinstance(own, _PLAIN)
    )
    for leaf in (leaf for own in held if not isinstance(own, dict) or own for leaf in pytree.tree_leaves(own)):
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            made.setdefault(id(leaf), leaf.detach().clone())
    try:
        result = copy.deepcopy(network, made)
    except TypeError as error:
        raise TypeError(
            f"the network cannot be copied ({error}){_held_by(network, made)}; expected modules without locks, files "
            "or other things that copy.deepcopy refuses"
        ) from error
    return share_memory(result, first_names(network))


def _first_line_of_user(error: BaseException) -> str:
    """Return "file:line: code" of the innermost frame outside torch and this package."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*ours, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object temporarily."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def without_log() -> contextlib.AbstractContextManager[None]:
    """Silence torch's log for operations that cannot run without data, as exceptions carry the same message."""
    return _replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def _is_causal_as_given(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Make torch's transformer layers apply a mask without reading its values to detect a causal mask."""
    return is_causal is True


@contextlib.contextmanager
def caches_kept(network: nn.Module) -> Iterator[None]:
    """Clear the function caches (``functools.lru_cache``) that the block fills.

    Covered are caches of the modules' methods, and of functions in the files that define their classes, also behind
    decorators.
    """
    before = [(own, own.cache_info().misses) for own in _caches(network)]
    try:
        yield
    finally:
        for own, misses in before:
            if own.cache_info().misses != misses:
                own.cache_clear()


def _caches(network: nn.Module) -> Iterator[Any]:
    """Yield the cached functions that the modules of a network may call."""
    classes = {base for module in network.modules() for base in type(module).__mro__}
    files = {own.__module__ for own in classes} & sys.modules.keys()
    spaces = [*map(vars, classes), *(vars(sys.modules[name]) for name in files)]
    left, seen = [held for space in spaces for held in list(space.values())], set()
    for held in left:
        function = getattr(held, "__func__", held)
        if isinstance(function, functools._lru_cache_wrapper) and id(function) not in seen:
            yield function
        elif isinstance(function, types.FunctionType) and id(function) not in seen:  # decorated, perhaps cached
            with contextlib.suppress(ValueError):  # an empty cell
                left += [cell.cell_contents for cell in function.__closure__ or ()]
        seen.add(id(function))


class _Recorder:
    """Forward hooks that record the module of each graph operation, and the output of each module."""

    def __init__(self, network: nn.Module, leaf_types: tuple[type[nn.Module], ...]) -> None:
        self.modules: dict[fx.Node, str] = {}
        self.marks: dict[str, Mark] = {}
        self.calls: dict[str, int] = {}
        self.handles: list[Any] = []
        self.stack: list[tuple[str, fx.Node]] = []
        inside = {
            child for m in network.modules() if isinstance(m, leaf_types) for child in m.modules() if child is not m
        }
        for name, module in network.named_modules():
            if name and module not in inside:
                self.handles.append(module.register_forward_pre_hook(self._enter(name)))
                self.handles.append(module.register_forward_hook(self._leave))

    @staticmethod
    def _tracer() -> Any:
        mode = get_proxy_mode()
        assert mode is not None  # hooks run while a graph is made
        return mode.tracer

    def _enter(self, name: str) -> Any:
        def hook(*_: Any) -> None:
            self.stack.append((name, next(iter(reversed(self._tracer().graph.nodes)))))

        return hook

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        name, before = self.stack.pop()
        for node in itertools.takewhile(lambda node: node is not before, reversed(self._tracer().graph.nodes)):
            self.modules.setdefault(node, name)  # inner modules end first
        call = self.calls[name] = self.calls.get(name, -1) + 1
        if tensors := tensors_of(outputs):  # the first of several
            self.mark(f"{name}-{call + 1}" if call else name, tensors[0], name, call)

    def mark(self, name: str, value: Any, module: str = "", call: int = 0) -> None:
        """Record the name of a floating-point tensor of the graph."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        tracer = self._tracer()
        slot: Any = get_proxy_slot(value, tracer, None)
        while name in self.marks:  # a module may have the name relu-2
            name += "-2"
        if slot is not None:
            self.marks[name] = Mark(name, slot.proxy.node, next(iter(reversed(tracer.graph.nodes))), module, call)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextlib.contextmanager
def _as_leaves(network: nn.Module, leaf_types: tuple[type[nn.Module], ...], call: Call) -> Iterator[dict[int, Leaf]]:
    """Run modules of the given types as one operation each; a real forward pass determines their output shapes.

    Yields:
        The calls behind these operations, by key.
    """
    leaves = [m for m in network.modules() if isinstance(m, leaf_types)]
    if not leaves:
        yield {}
        return
    # Only shapes matter, as in the capture itself, so inputs may have another precision than the weights.
    dtype = next((t.dtype for t in network.parameters() if t.is_floating_point()), None)
    call = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, call)
    weightless = any(tensor.is_meta for tensor in state_tensors(network).values())
    outputs: dict[nn.Module, list[Any]] = {}
    handles = [
        m.register_forward_hook(
            lambda m, _, out: outputs.setdefault(m, []).append(
                pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), out)
            )
        )
        for m in leaves
    ]
    try:
        with torch.no_grad():
            if weightless:
                _run_on_meta(network, call)
            else:
                call.run(network)
    finally:
        for handle in handles:
            handle.remove()
    calls: dict[int, Leaf] = {}
    try:
        for module in outputs:
            module.__dict__["forward"] = _leaf_forward(module, outputs[module], calls)
        yield calls
    finally:
        for module in outputs:
            module.__dict__.pop("forward", None)
        for key in calls:
            del _LEAVES[key]


def _leaf_forward(module: nn.Module, outputs: list[Any], calls: dict[int, Leaf]) -> Any:
    """Return a forward function that runs a module as one operation.

    Args:
        module: The module.
        outputs: The outputs of its calls, in order, with (shape, dtype) for tensors.
        calls: Receives each call.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        template, inputs = Template.of(Tensor, args, kwargs)
        own = outputs.pop(0) if len(outputs) > 1 else outputs[0]
        results, spec = pytree.tree_flatten(own, is_leaf=_is_described)
        key = max(_LEAVES, default=0) + 1
        _LEAVES[key], calls[key] = [one for one in results if _is_described(one)], Leaf(module, template)
        made = iter(_leaf(inputs, list(state_tensors(module).values()), key))
        return pytree.tree_unflatten([next(made) if _is_described(one) else one for one in results], spec)

    return forward


def _is_described(leaf: Any) -> bool:
    """Whether a leaf is the (shape, dtype) pair of a tensor."""
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)


def _run_on_meta(network: nn.Module, call: Call) -> None:
    """Run a network that has some tensors on the meta device entirely on the meta device."""
    call, held = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), (call, places_of(network)))
    with torch.device("meta"):
        torch.func.functional_call(network, held, call.positional, dict(call.keywords), tie_weights=False)


def _without_data(tensor: Tensor, mode: FakeTensorMode, *, alone: bool = False) -> Tensor:
    """Return a fake tensor like the given one; on the CPU if the original is on the meta device.

    Args:
        tensor: A tensor.
        mode: The mode of the result.
        alone: Whether no other tensor has the same elements in memory.
    """
    plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided and not tensor.is_quantized
    if alone and plain and not tensor.is_meta and tensor.untyped_storage().nbytes() == tensor.nbytes:
        # Eight times as fast as below, where views share their memory.
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, like, tensor.device)
    if not tensor.is_meta:
        return mode.from_tensor(tensor.detach())
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def capture(
    network: nn.Module,
    call: Call,
    leaf_types: tuple[type[nn.Module], ...] = (),
    *,
    cuts: Cuts | None = None,
    fold: bool = False,
    given: bool = False,
    inside: bool = False,
) -> Capture:
    """Run a network once on tensors without data and record its operations.

    The operations are those that `torch.export` shows before autograd, in evaluation mode. Skipping the passes that
    verify and serialise the program makes this two to three times as fast. If the network differentiates or vectorises
    functions, they are those below autograd instead.

    Args:
        network: The network.
        call: Its arguments, used only for the shapes of tensors, and the outputs that count.
        leaf_types: Module classes to record as one operation.
        cuts: Cuts of the network; their values receive the additional names ``site/0``, ``site/1``, ...
        fold: Whether to compute the values of constants during the run, which is slower. Without it the function falls
            back to folding where the network needs values.
        given: Whether integer and boolean inputs are constants, too. The function falls back to this last.
        inside: Whether to record the operations of derivatives and vectorised functions.

    Raises:
        ValueError: If the control flow depends on values, an operation cannot run without data, or no output counts.
    """
    states = state_tensors(network)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attributes_kept(network))
        stack.enter_context(caches_kept(network))
        stack.enter_context(_replaced(nn.modules.transformer, "_detect_is_causal_mask", _is_causal_as_given))
        # Nothing reads these descriptions of all tensors.
        stack.enter_context(_replaced(proxy_tensor, "_extract_tensor_metadata", lambda _: None))
        network.eval()
        leaves = stack.enter_context(_as_leaves(network, leaf_types, call)) if leaf_types else {}
        recorder = _Recorder(network, leaf_types)
        stack.callback(recorder.close)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Detached before entering the mode: inside, detaching is ten times as slow.
        fake = {
            name: _without_data(tensor, mode, alone=True).requires_grad_(inside and tensor.requires_grad)
            for name, tensor in states.items()
        }
        arguments = pytree.tree_map_only(
            Tensor, lambda t: _without_data(t, mode), (call.positional, dict(call.keywords))
        )
        stack.enter_context(mode)

        names = first_names(network)
        unsaved = constant_names(network, names)
        constants = {n for n, t in states.items() if not t.is_meta and (n in unsaved or not t.is_floating_point())}
        running = network if cuts is None else cuts.whole
        left_out: list[str] = []

        def run(state: Mapping[str, Tensor], arguments: tuple[Any, Any]) -> Any:
            held = {place: state[names[place]] for place in places_of(running)}
            known = [(state[name], states[name]) for name in constants]
            known += _integers(arguments, (call.positional, dict(call.keywords))) if given else []
            with torch.set_grad_enabled(inside), Folding(known) if fold else contextlib.nullcontext():
                outputs = torch.func.functional_call(running, held, *arguments, tie_weights=False)
            if cuts is not None:
                outputs, *values = outputs
                for name, value in zip(cuts.taps, values, strict=True):
                    recorder.mark(name, value)
            left_out.extend(call.left_out(outputs))
            return call.counted(outputs)

        stack.enter_context(without_log())
        refusal: ValueError | None = None
        try:
            spelled = decompositions() | (of_derivatives() if inside else {})
            module: fx.GraphModule | None = make_fx(run, spelled, tracing_mode="real", pre_dispatch=not inside)(
                fake, arguments
            )
        except OutputError as error:
            raise ValueError(str(error)) from None
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            if given or (fold and not _integers(arguments, (call.positional, dict(call.keywords)))):
                raise _refusal(error, misspelt(network, call), _of_experts(network)) from error
            module = None
        except Exception as error:
            refusal = _refusal(error, misspelt(network, call), _of_experts(network))
            if inside:
                raise refusal from error  # as in the log
            refusal.__cause__ = error
    if refusal is not None:
        with contextlib.suppress(ValueError):
            return capture(network, call, leaf_types, cuts=cuts, fold=fold, given=given, inside=True)
        raise refusal
    if module is None or (_hidden(module) and not fold):
        return capture(network, call, leaf_types, cuts=cuts, fold=True, given=fold, inside=inside)
    if not inside and next(_transformed(module), None):
        return capture(network, call, leaf_types, cuts=cuts, fold=fold, given=given, inside=True)
    _check_operations(module, recorder)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return Capture(
        graph=module.graph,
        states=dict(zip(placeholders, states, strict=False)),
        inputs=placeholders[len(states) :],
        modules=recorder.modules,
        marks=list(recorder.marks.values()),
        leaves=leaves,
        left_out=left_out,
        folded=frozenset(constants if fold else ()),
        given=given,
        buffers=frozenset(name for name, tensor in states.items() if not isinstance(tensor, nn.Parameter)),
        call=call,
    )


def _integers(without_data: Any, values: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of an integer or boolean tensor without data and its value."""
    pairs = zip(pytree.tree_leaves(without_data), pytree.tree_leaves(values), strict=True)
    return [
        (own, value)
        for own, value in pairs
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex() or value.is_meta)
    ]


def _of_experts(network: nn.Module) -> str:
    """Explain how to trace a `transformers` model with experts; empty for other networks."""
    chosen = getattr(getattr(network, "config", None), "_experts_implementation", None)
    can_choose = getattr(network, "_can_set_experts_implementation", None)
    if chosen in (None, "batched_mm") or can_choose is None or not can_choose():
        return ""
    way = "network.set_experts_implementation('batched_mm')"
    return f"; its experts, computed by {chosen!r}, can be traced after {way}"


def _refusal(error: Exception, hint: str, experts: str = "") -> ValueError:
    """Explain why a network does not run without data."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    because = f"because of {_first_line_of_user(error)} ({type(error).__name__}: {reason[:200]})"
    text = f"{type(error).__name__} {error}".lower()
    if any(sign in text for sign in ("datadependent", "data-dependent", "dynamicoutputshape", "tracing tensor")):
        return ValueError(
            f"the network cannot be traced, {because}; expected operations whose order and shapes do not depend on "
            "values: rewrite that line with tensor operations, or register a rule for the module that holds it "
            f"(lightning_sym.symmetry.register_rule){experts}"
        )
    if "no fake impl" in text:
        return ValueError(
            f"the network cannot be traced, {because}; expected operations that declare their output shapes: "
            "see torch.library.register_fake"
        )
    return UnfitInputsError(
        f"the network does not run on the example input, {because}; expected an input as the network takes it, several "
        f"as a tuple or by name{experts}{'.' * bool(hint)}{hint}"
    )


def _hidden(module: fx.GraphModule) -> list[fx.Node]:
    """Return the tensors of a graph without a recorded operation."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    return [node for node in nodes if isinstance(getattr(module, str(node.target), None), FakeTensor)]


def _transformed(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the operations inside derivatives or vectorised functions, of which the graph shows no values."""
    invisible = _hidden(module)
    for node in module.graph.nodes:
        values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        if node in invisible or any(is_functorch_wrapped_tensor(value) for value in values):
            yield node


def _check_operations(module: fx.GraphModule, recorder: _Recorder) -> None:
    """Reject graphs with operations that the capture cannot record."""
    for node in _transformed(module):
        where = recorder.modules.get(node, "forward")
        raise ValueError(
            f"the network cannot be traced, because {where} sets the .data of a tensor, or transforms a function in a "
            "way that cannot be followed; expected plain operations: write them with a batch axis, or register a rule "
            "for the module that holds them (lightning_sym.symmetry.register_rule)"
        )
