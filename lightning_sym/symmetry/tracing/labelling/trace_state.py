"""State of a trace: the current operation, the network's tensors, and the reads of each tensor."""

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from lightning_sym.symmetry.tracing.affine.growing import growing_axes
from lightning_sym.symmetry.tracing.graph.capture import Capture, Mark, operation_name
from lightning_sym.symmetry.tracing.graph.nodes import result_shape
from lightning_sym.symmetry.tracing.graph.sizes import growing_inputs
from lightning_sym.symmetry.tracing.labelling.constraints import UNSET, Constraints, Label, Sighting, counted
from lightning_sym.symmetry.tracing.labelling.gained import BatchNorm
from lightning_sym.symmetry.tracing.labelling.offsets import is_centred
from lightning_sym.symmetry.tracing.labelling.stacks import Stacks
from lightning_sym.symmetry.tracing.labelling.values import InFront, Path, Value


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a buffer holds zeros and one other number; untrained statistics and gains hold one number only."""
    if isinstance(tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return False
    held = tensor[tensor != 0]
    return 0 < held.numel() < tensor.numel() and bool((held == held[0]).all() and held[0].isfinite())


class TraceState:
    """The state of a walk through a network, including all constraints.

    Args:
        states: The network's parameters and buffers.
        constants: The names of states that no state dict contains.
        affine: Whether to allow sign changes that add a constant.

    Attributes:
        node: The current operation.
    """

    def __init__(self, states: dict[str, Tensor], *, constants: Container[str] = (), affine: bool = False) -> None:
        self.constraints = Constraints()
        self.constraints.where = lambda: self.where
        self.stacks = Stacks(self.constraints)
        self.tensors = states
        self.constants = constants
        self.capture: Capture
        self.node: fx.Node
        self.axis_labels: dict[str, tuple[Label, ...]] = {}
        self.kinds: dict[str, tuple[str, float]] = {}
        self.grouped: dict[str, Label] = {}
        self.joint: set[str] = set()
        self.grouped_by: dict[str, set[fx.Node]] = {}
        self.untold: set[fx.Node] = set()
        self.mixed_uses: set[str] = set()
        self.leaf: dict[str, Value] = {}
        self._affine = affine
        self.absorbed: list[tuple[str, str, int, float]] = []
        self.absorbed_before: tuple[tuple[str, str, int, float], ...] = ()
        self.walks = 0
        self.made_of_states: dict[int, Any] = {}
        self.beside_zeros: set[Any] = set()
        self.made_by: dict[str | int, fx.Node] = {}
        self.lengths: set[int] = set()
        self._growing: tuple[Capture | None, dict[fx.Node, list[frozenset[int]]]] = None, {}
        self.reads: dict[str | int, tuple[Value, list[Path]]] = {}
        self.uses: Counter[str] = Counter()
        self.gains: Counter[str] = Counter()
        self.batch_norms: set[BatchNorm] = set()
        self.taps: dict[Mark, Value] = {}
        self.seen: set[int] = set()
        self.untagged: list[Label] = []
        self.half_turned: dict[fx.Node, InFront] = {}
        self.periodic: set[str] = set()
        self.aperiodic: set[str] = set()
        self.environment: dict[fx.Node, Any] = {}
        self.known: dict[Any, Any] = {}

    @property
    def affine(self) -> bool:
        """Whether sign changes may add a constant to the current result: if asked for, or if norms subtract it."""
        return self._affine or is_centred(self.node)

    # Names for notes and errors.

    @property
    def operation(self) -> str:
        """The name of the current operation."""
        return self.node.meta.get("rule_of") or operation_name(self.node.target)

    @property
    def where(self) -> str:
        """The current operation and its module."""
        return self.where_is(self.node)

    def where_is(self, node: fx.Node) -> str:
        """Return the operation of a node and its module."""
        told = (node.meta.get(own) for own in ("written_for", "rule_of"))
        operation, module = next(filter(None, told), operation_name(node.target)), self.capture.modules.get(node)
        return f"{operation} in {module}" if module else operation

    def note(self, text: str) -> None:
        """Add a note on the current operation for the user."""
        self.constraints.notes[f"{self.where}: {text}"] = None

    def tell(self, factor: str, parameter: Value) -> None:
        """Declare that a factor of the group acts on a parameter; see `Factor.told`.

        Raises:
            ValueError: If the value is not a parameter or buffer of the network.
        """
        if parameter.state is None:
            raise ValueError(f"{self.where}: a rule tells {factor} of a value; expected trace.parameter(...)")
        self.capture.told.add((factor, parameter.state))

    def growing(self, node: Any) -> frozenset[int]:
        """Return the axes of a tensor that are longer for longer inputs."""
        if self._growing[0] is not self.capture:
            self._growing = self.capture, growing_axes(self.capture.graph, growing_inputs(self.capture.inputs))
        return self._growing[1].get(node, [frozenset()])[0]

    # Values.

    def state_value(self, name: str) -> Value:
        """Return the value of a parameter or buffer."""
        tensor = self.tensors[name]
        if name in self.constants or not tensor.is_floating_point():
            if tensor.is_meta:
                self.constraints.notes[
                    f"{name} is a constant without values (on meta): units combined with it are fixed; build the "
                    "network under without_weights(), which keeps buffers"
                ] = None
                return Value(tuple(tensor.shape))
            return Value(tuple(tensor.shape), concrete=tensor.detach().to("cpu", copy=True))
        if name not in self.axis_labels:
            shape = tuple(tensor.shape)
            self.axis_labels[name] = tuple(
                self.constraints.fresh((axis,), (size,), tag=UNSET) for axis, size in enumerate(shape)
            ) or (self.constraints.fresh((), (), tag=UNSET),)
            if _is_mask(tensor):  # a mask is permuted with the units and remains binary
                for label in self.axis_labels[name]:
                    self.constraints.fix_scales(label.scale)
        return Value(tuple(tensor.shape), self.axis_labels[name], state=name)

    def parameter(self, module: nn.Module, name: str) -> Value:
        """Return a parameter or buffer of the current module, in a rule for a module class.

        Raises:
            KeyError: If the module has no parameter or buffer of this name.
        """
        if name not in self.leaf:
            raise KeyError(
                f"{type(module).__name__} has no parameter or buffer {name!r}; it has {', '.join(self.leaf)}"
            )
        return self.leaf[name]

    def label(self, value: Value, axis: int) -> Label | None:
        """Return the label on one axis alone, or None.

        The label of a unit that fills a whole tensor counts for every axis.
        """
        axis %= value.ndim
        for label in value.labels:
            if label.axes == (axis,):
                return label
        for label in value.labels:
            if not label.axes:
                return self.constraints.spread(label, axis, value.shape[axis])
        return None

    def output_shape(self, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of the current operation's result (or of the result at an index, if it has several)."""
        return result_shape(self.node, index)

    def fix(self, value: Value, reason: str | None = None) -> Value:
        """Fix this value: its units may be neither permuted nor rescaled.

        Args:
            value: Any value.
            reason: The reason, for the notes.
        """
        for label in value.labels:
            self.constraints.fix(label)
        if value.labels and reason:
            self.note(counted(reason, max((label.atom for label in value.labels), key=np.size)))
        return Value(value.shape)

    def see(self, label: Label, name: str | None = None) -> None:
        """Record an occurrence of units: only units with corresponding occurrences can be permuted.

        Args:
            label: The units.
            name: The name of the value that contains them, if any.
        """
        if name is None and (self.constraints.pending(label, UNSET).tag == UNSET).any():  # of a part of a weight
            self.untagged.append(label)
            return
        label = self.constraints.resolve(label)
        held = hash((label.atom.tobytes(), label.tag.tobytes()))
        if name is None and held in self.seen:  # known occurrences add nothing
            return
        self.seen.add(held)
        self.constraints.occurrences.append(Sighting(label, name))

    # Reads of moved values: a longer input may read the remaining elements.

    def carry(self, value: Value, result: Value, step: Callable[[Tensor], Tensor] | None = None) -> Value:
        """Record that a result holds elements of a value, moved by a step, so that its readers read only these."""
        steps = () if step is None else (step,)
        sources = tuple((root, (*path, *steps)) for root, path in value.sources or ((value, ()),))
        return replace(result, sources=(*result.sources, *sources))

    def cut_by_size(self, value: Value) -> None:
        """Record that a slice of a value depends on the input's size, so that unread elements count as for weights."""
        self.made_of_states |= {id(root): root for root, _ in value.sources or ((value, ()),)}

    def read(self, value: Value) -> None:
        """Record that all elements of a value are read."""
        for root, path in value.sources or ((value, ()),):
            self.uses[root.state or ""] += 1
            if root.labels:
                # One entry per parameter for all walks.
                key = root.state if root.state is not None else id(root)
                self.reads.setdefault(key, (root, []))[1].append(path)
