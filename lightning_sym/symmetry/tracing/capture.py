"""A network as a flat list of ATen operations, with the names of the parameters, buffers and modules behind them."""

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
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils import _pytree as pytree

from lightning_sym.networks.base import Cuts
from lightning_sym.symmetry.charts import Piece
from lightning_sym.symmetry.tracing.calls import Call, OutputError, misspelt, tensors_of
from lightning_sym.symmetry.tracing.folding import Folding
from lightning_sym.symmetry.tracing.recurrent import decompositions

# Leaf modules run as one operation: rules for module classes see them whole. The operation finds its results here.
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


# What a user's rule demands of values, and no operation of torch says: see `expansion.py`.
@torch.library.custom_op("lightning_sym::demand", mutates_args=())
def _demand(inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    raise RuntimeError("a demand of a rule is only traced, never run")


@_demand.register_fake
def _(inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return inputs[0].new_empty(shape) if inputs else torch.empty(shape)


DEMAND = torch.ops.lightning_sym.demand.default
OPAQUE = (DEMAND, torch.ops.lightning_sym.leaf.default)  # operations without numbers


@dataclass(frozen=True)
class Template:
    """The arguments and keywords of a call, without what stands for its tensors.

    Attributes:
        leaves: All that they hold, None in the place of tensors.
        given: Which of these are tensors.
        form: How they make arguments and keywords.
    """

    leaves: tuple[Any, ...]
    given: tuple[bool, ...]
    form: pytree.TreeSpec

    @classmethod
    def of(cls, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "tuple[Template, list[Any]]":
        """Return the template of a call, and what stands for its tensors: all that is of a class."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        given = tuple(isinstance(leaf, kind) for leaf in leaves)
        rest = tuple(None if isinstance(leaf, kind) else leaf for leaf in leaves)
        return cls(rest, given, form), [leaf for leaf in leaves if isinstance(leaf, kind)]

    def filled(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keywords, with something in the place of each tensor."""
        left = iter(tensors)
        leaves = [next(left) if given else leaf for leaf, given in zip(self.leaves, self.given, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return args, kwargs


@dataclass(frozen=True)
class Leaf:
    """A call of a module that runs as one operation.

    Attributes:
        module: The module.
        call: What it is called with, but for its tensors.
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
        modules: The innermost named module in which each operation ran.
        marks: The tensors that have a name.
        leaves: The call of a module behind each leaf operation, by key.
        left_out: The names of outputs that do not count.
        folded: The constants whose values may have been read while it ran.
        buffers: The names of the states that are no parameters.
        charts: What is added to a parameter wherever it is read, if the graph has the sum in the parameter's place: a
            number, or one for each element of a vector.
        pieces: By parameter that is read in pieces, all of these, if the graph has them in the parameter's place.
        call: The call that was captured.
        rules: The operations and modules of which rules of users have said what they do.
        told: What such rules told factors: a factor's name, and that of a parameter.
    """

    graph: fx.Graph
    states: dict[fx.Node, str]
    inputs: list[fx.Node]
    modules: dict[fx.Node, str]
    marks: list["Mark"] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    folded: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    charts: dict[str, float | tuple[float, ...]] = field(default_factory=dict)
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    call: Call = field(default_factory=Call)
    rules: set[str] = field(default_factory=set)
    told: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Mark:
    """A tensor of the graph that a user can name.

    Attributes:
        name: The module whose output it is, with ``-2``, ``-3``, ... for its later calls; or as the caller named it.
        node: The operation whose result it is.
        after: The last operation before it was named: what was written into it until then belongs to it.
        module: The module, empty if the caller named it.
        call: Which of the module's calls it is, from 0.
    """

    name: str
    node: fx.Node
    after: fx.Node
    module: str = ""
    call: int = 0


def operation_name(target: Any) -> str:
    """Return what an operation of the graph is called, without a namespace if that is aten."""
    schema = getattr(target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else getattr(target, "__name__", str(target))


def address_of(tensor: Tensor) -> tuple[Any, int]:
    """Return a key for what memory a tensor lies in, and at which byte of it the tensor begins.

    Addresses, where there are any: numpy and DLPack make several storages of one memory.

    Raises:
        RuntimeError, NotImplementedError, ValueError: If there is none (sparse, lazy, or of a functional transform).
    """
    storage = tensor.untyped_storage()
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if storage.device.type == "meta":
        return storage._cdata, begin
    return str(storage.device), storage.data_ptr() + begin


def memory_of(tensor: Tensor) -> Any:
    """Return a key for the numbers of a tensor in memory: two names with the same key hold one tensor."""
    try:
        place = address_of(tensor)
    except (RuntimeError, NotImplementedError, ValueError):
        return id(tensor)
    if not tensor.numel():
        return id(tensor)
    strides = tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return place, tuple(tensor.shape), strides, tensor.dtype


def state_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer once, by its first name: names that share their memory hold one tensor."""
    found: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        found.setdefault(memory_of(tensor), (name, tensor))
    return dict(found.values())


def places_of(network: nn.Module) -> dict[str, Tensor]:
    """Return every place that holds a parameter or buffer: modules and weights may go by several names."""
    return {
        (f"{prefix}." if prefix else "") + name: tensor
        for prefix, module in network.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def first_names(network: nn.Module) -> dict[str, str]:
    """Return for every place that holds a parameter or buffer the first name of what it holds."""
    first = {memory_of(tensor): name for name, tensor in state_tensors(network).items()}
    return {place: first[memory_of(tensor)] for place, tensor in places_of(network).items()}


def unsaved_places(network: nn.Module) -> set[str]:
    """Return the places of buffers that a state dict does not hold."""
    return {
        (f"{prefix}." if prefix else "") + name
        for prefix, module in network.named_modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def constant_names(network: nn.Module) -> set[str]:
    """Return the tensors, by their first names, that a state dict holds nowhere: they come with the architecture."""
    names, unsaved = first_names(network), unsaved_places(network)
    return set(names.values()) - {name for place, name in names.items() if place not in unsaved}


def share_memory(network: nn.Module, names: Mapping[str, str]) -> nn.Module:
    """Let places hold one tensor, in place.

    Args:
        network: Changed.
        names: For each place the first name of what it shall hold, as :func:`first_names` returns.
    """
    places = places_of(network)
    for place, name in names.items():
        if places[place] is not places[name] and memory_of(places[place]) != memory_of(places[name]):
            places[place].data = places[name].data
    return network


def _held_by(network: nn.Module, made: dict[int, Any]) -> str:
    """Say which attribute of which module cannot be copied, if it is one by itself."""
    for name, module in network.named_modules():
        for attribute, held in vars(module).items():
            if attribute.startswith("_"):  # tensors and modules, hooks
                continue
            try:
                copy.deepcopy(held, dict(made))
            except TypeError:
                return f" because of {f'{name}.{attribute}' if name else attribute}"
    return ""


def copied(network: nn.Module, made: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a network, in which the same names share their memory.

    Args:
        network: Not changed.
        made: What to put in the place of things, by their `id`.

    Raises:
        TypeError: If it holds something that cannot be copied.
    """
    made = {} if made is None else made
    # What modules keep of a forward pass (a pruned weight) hangs on the graph of its gradient, which is not copied.
    for leaf in (leaf for module in network.modules() for leaf in pytree.tree_leaves(vars(module))):
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
    """Return "file:line: code" of the innermost frame that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*ours, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "an unknown line"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give something another attribute for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def without_log() -> contextlib.AbstractContextManager[None]:
    """Let torch log no errors of operations that do not run without data, as exceptions say the same."""
    return _replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def _is_causal_as_given(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Let transformer layers of torch apply a mask as it is, without a look at its values: it may be the causal one."""
    return is_causal is True


@contextlib.contextmanager
def attributes_kept(network: nn.Module) -> Iterator[None]:
    """Put back, afterwards, what modules keep in their attributes from one call to the next."""
    kept = {module: dict(vars(module)) for module in network.modules()}
    try:
        with containers_kept(network):
            yield
    finally:
        for module, attributes in kept.items():
            vars(module).clear()
            vars(module).update(attributes)


@contextlib.contextmanager
def containers_kept(network: nn.Module) -> Iterator[None]:
    """Empty, afterwards, the dictionaries and lists that modules fill on the way (with biases by resolution: LeViT)."""
    caches = [held for module in network.modules() for held in vars(module).values() if type(held) in (dict, list)]
    before = [held.copy() for held in caches]
    try:
        yield
    finally:
        for held, content in zip(caches, before, strict=True):
            held.clear()
            if isinstance(held, dict):
                held.update(content)
            else:
                held.extend(content)


@contextlib.contextmanager
def caches_kept(network: nn.Module) -> Iterator[None]:
    """Empty, afterwards, the caches of functions (``functools.lru_cache``) that were filled on the way.

    Those of the modules' methods, and of functions in the files of their classes, perhaps inside of decorators.
    """
    before = [(own, own.cache_info().misses) for own in _caches(network)]
    try:
        yield
    finally:
        for own, misses in before:
            if own.cache_info().misses != misses:
                own.cache_clear()


def _caches(network: nn.Module) -> Iterator[Any]:
    """Yield the caches of functions that the modules of a network may call."""
    classes = {base for module in network.modules() for base in type(module).__mro__}
    files = {own.__module__ for own in classes} & sys.modules.keys()
    spaces = [*map(vars, classes), *(vars(sys.modules[name]) for name in files)]
    left, seen = [held for space in spaces for held in list(space.values())], set()
    for held in left:
        function = getattr(held, "__func__", held)
        if isinstance(function, functools._lru_cache_wrapper) and id(function) not in seen:
            yield function
        elif isinstance(function, types.FunctionType) and id(function) not in seen:  # a decorator holds it perhaps
            with contextlib.suppress(ValueError):  # a cell is empty yet
                left += [cell.cell_contents for cell in function.__closure__ or ()]
        seen.add(id(function))


class _Recorder:
    """Forward hooks that note which operations of the graph each module added, and which result is its output."""

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
        if tensors := tensors_of(outputs):  # of several, the first
            self.mark(f"{name}-{call + 1}" if call else name, tensors[0], name, call)

    def mark(self, name: str, value: Any, module: str = "", call: int = 0) -> None:
        """Note under which name a floating tensor of the graph is known."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        tracer = self._tracer()
        slot: Any = get_proxy_slot(value, tracer, None)
        while name in self.marks:  # a module may really be called relu-2
            name += "-2"
        if slot is not None:
            self.marks[name] = Mark(name, slot.proxy.node, next(iter(reversed(tracer.graph.nodes))), module, call)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@contextlib.contextmanager
def _as_leaves(network: nn.Module, leaf_types: tuple[type[nn.Module], ...], call: Call) -> Iterator[dict[int, Leaf]]:
    """Let the modules of the given types run as one operation each; what comes out is told by a real forward.

    Yields:
        The calls that stand behind the operations, by key.
    """
    leaves = [m for m in network.modules() if isinstance(m, leaf_types)]
    if not leaves:
        yield {}
        return
    # Only shapes count, as in the capture itself, so that inputs may be of another precision than the weights.
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
    """Return what runs a module as one operation.

    Args:
        module: The module.
        outputs: What comes out of each of its calls, in order: shapes and types in the place of tensors.
        calls: Gets each call.
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
    """Whether something is the shape and the type of a tensor."""
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)


def _run_on_meta(network: nn.Module, call: Call) -> None:
    """Run a network of which some tensors have no values: then none needs any."""
    call, held = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), (call, places_of(network)))
    with torch.device("meta"):
        torch.func.functional_call(network, held, call.positional, dict(call.keywords), tie_weights=False)


def _without_data(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a tensor without data like another one: on the CPU where that has no data itself."""
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
) -> Capture:
    """Run a network once on tensors without data and write down its operations.

    The operations are those that `torch.export` shows (before autograd, in evaluation mode); its passes that check and
    serialize the program are left out, which makes this two to three times as fast.

    Args:
        network: The network.
        call: Its arguments, of which tensors are used for their shapes only, and which of its outputs count.
        leaf_types: Module classes to record as one operation.
        cuts: Cuts of the network, whose values are named ``site/0``, ``site/1``, ... as well.
        fold: Whether to keep the values of constants on the way, which takes longer; it is tried where the network
            does not run without.

    Raises:
        ValueError: If the control flow depends on values, an operation cannot run without data, or there is no output
            that counts.
    """
    states = state_tensors(network)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attributes_kept(network))
        stack.enter_context(caches_kept(network))
        stack.enter_context(_replaced(nn.modules.transformer, "_detect_is_causal_mask", _is_causal_as_given))
        network.eval()
        leaves = stack.enter_context(_as_leaves(network, leaf_types, call)) if leaf_types else {}
        recorder = _Recorder(network, leaf_types)
        stack.callback(recorder.close)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Detached before the mode is entered, which would make it ten times as slow.
        fake = {name: _without_data(tensor, mode) for name, tensor in states.items()}
        arguments = pytree.tree_map_only(
            Tensor, lambda t: _without_data(t, mode), (call.positional, dict(call.keywords))
        )
        stack.enter_context(mode)

        names = first_names(network)
        unsaved = constant_names(network)
        constants = {n for n, t in states.items() if not t.is_meta and (n in unsaved or not t.is_floating_point())}
        running = network if cuts is None else cuts.whole
        left_out: list[str] = []

        def run(state: Mapping[str, Tensor], arguments: tuple[Any, Any]) -> Any:
            held = {place: state[names[place]] for place in places_of(running)}
            known = [(state[name], states[name]) for name in constants]
            with torch.no_grad(), Folding(known) if fold else contextlib.nullcontext():
                outputs = torch.func.functional_call(running, held, *arguments, tie_weights=False)
            if cuts is not None:
                outputs, *values = outputs
                for name, value in zip(cuts.taps, values, strict=True):
                    recorder.mark(name, value)
            left_out.extend(call.left_out(outputs))
            return call.counted(outputs)

        stack.enter_context(without_log())
        try:
            module: fx.GraphModule | None = make_fx(run, decompositions(), tracing_mode="real", pre_dispatch=True)(
                fake, arguments
            )
        except OutputError as error:
            raise ValueError(str(error)) from None
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            if fold:
                raise _refusal(error, misspelt(network, call), _of_experts(network)) from error
            module = None
        except Exception as error:
            raise _refusal(error, misspelt(network, call), _of_experts(network)) from error  # says what the log would
    if module is None or (_hidden(module) and not fold):
        return capture(network, call, leaf_types, cuts=cuts, fold=True)
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
        buffers=frozenset(name for name, tensor in states.items() if not isinstance(tensor, nn.Parameter)),
        call=call,
    )


def _of_experts(network: nn.Module) -> str:
    """Say how a model of transformers with experts can be traced, if it is one."""
    chosen = getattr(getattr(network, "config", None), "_experts_implementation", None)
    can_choose = getattr(network, "_can_set_experts_implementation", None)
    if chosen in (None, "batched_mm") or can_choose is None or not can_choose():
        return ""
    way = "network.set_experts_implementation('batched_mm')"
    return f"; its experts, computed by {chosen!r}, can be traced after {way}"


def _refusal(error: Exception, hint: str, experts: str = "") -> ValueError:
    """Say why a network does not run without data."""
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
            f"the network cannot be traced, {because}; expected that every operation says what shape comes out: "
            "see torch.library.register_fake"
        )
    return ValueError(
        f"the network does not run on the example input, {because}; expected an input as the network takes it, several "
        f"as a tuple or by name{experts}{'.' * bool(hint)}{hint}"
    )


def _hidden(module: fx.GraphModule) -> list[fx.Node]:
    """Return the tensors of a graph that come out of nowhere, as what made them was not seen."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    return [node for node in nodes if isinstance(getattr(module, str(node.target), None), FakeTensor)]


def _check_operations(module: fx.GraphModule, recorder: _Recorder) -> None:
    """Refuse graphs in which some operations cannot be seen."""
    invisible = _hidden(module)
    for node in module.graph.nodes:
        values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
        hidden = node in invisible
        if hidden or any(is_functorch_wrapped_tensor(value) for value in values):
            what = (
                "computes a gradient inside, or sets the .data of a tensor"
                if hidden
                else "uses torch.vmap or another transform of functions"
            )
            where = recorder.modules.get(node, "forward")
            raise ValueError(
                f"the network cannot be traced, because {where} {what}; expected plain operations: write them with a "
                "batch axis, or register a rule for the module that holds them (lightning_sym.symmetry.register_rule)"
            )
