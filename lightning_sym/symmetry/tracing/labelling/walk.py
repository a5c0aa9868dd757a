"""Walk through a captured network and apply the rule of each operation."""

import math
from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import OPAQUE, Capture, Mark
from lightning_sym.symmetry.tracing.graph.coordinates import left_after
from lightning_sym.symmetry.tracing.graph.nodes import replaces, written_by
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.graph.sizes import OF_NO_SIZE, lengths_of
from lightning_sym.symmetry.tracing.labelling import (  # noqa: F401 (they register rules)
    complex_rules,
    elementwise_rules,
    half_turns,
    linear_rules,
    planes,
    write_rules,
)
from lightning_sym.symmetry.tracing.labelling.choice_rules import tells_unknown_choice
from lightning_sym.symmetry.tracing.labelling.offsets import offset_behind
from lightning_sym.symmetry.tracing.labelling.rules import absorbs_offset, fix_choice, rule_for, unknown
from lightning_sym.symmetry.tracing.labelling.stacks import stacked
from lightning_sym.symmetry.tracing.labelling.values import Value, values_in
from lightning_sym.symmetry.tracing.labelling.vocabulary import OnlyUnlabelledError, Trace


def _uniform(value: Value) -> bool:
    """Whether all elements of a constant are equal, so that this holds for each of its parts."""
    constant = value.concrete
    return constant is not None and (constant.numel() == 0 or bool((constant == constant.reshape(-1)[0]).all()))


def _is_device(item: Any) -> bool:
    return isinstance(item, torch.device)


class Walk(Trace):
    """A trace that applies the rule of each operation; see :meth:`run`.

    Args:
        states: The network's parameters and buffers.
        constants: The names of states that no state dict contains.
        affine: Whether to allow sign changes that add a constant.
        examples: The number of input lengths that the user gave. Further lengths do not count as evidence of unused
            elements.
    """

    def __init__(
        self,
        states: dict[str, Tensor],
        *,
        constants: Container[str] = (),
        affine: bool = False,
        examples: int = 1,
    ) -> None:
        super().__init__(states, constants=constants, affine=affine)
        self.examples = examples

    def run(self, capture: Capture) -> list[Value]:
        """Walk through a capture of the network; return its outputs."""
        self.stacks.sizes |= stacked(capture, self.tensors) if self.walks == 0 else {}
        self.capture = capture
        self.walks += 1
        self.made_of_states, self.made_by = {}, {}
        varying: set[fx.Node] = set(capture.inputs)
        self.lengths = lengths_of(capture.inputs)
        self.absorbed_before = tuple(self.absorbed)
        environment = self.environment = dict[fx.Node, Any]()
        self.periodic = set()
        marks: dict[fx.Node, list[Mark]] = {}
        for mark in capture.marks if self.walks == 1 else ():
            marks.setdefault(mark.node, []).append(mark)
        outputs: list[Value] = []
        for node in capture.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                if node in capture.states:
                    environment[node] = (
                        self.stacks.state(self.state_value(capture.states[node])) if node.users else None
                    )
                else:
                    meta = node.meta.get("val")  # torch 2.11 has no metadata for arguments that are not tensors
                    environment[node] = Value(tuple(meta.shape)) if isinstance(meta, Tensor) else meta
            elif node.op == "get_attr":
                held = getattr(node.graph.owning_module, str(node.target))
                if isinstance(held, Tensor):
                    concrete = None if held.is_meta else held.detach().to("cpu", copy=True)
                    held = Value(tuple(held.shape), concrete=concrete)
                environment[node] = held
            elif node.op == "output":
                arguments = fx.map_arg(node.args[0], lambda n: environment[n])
                outputs = values_in(arguments)
                for value in outputs:
                    self.read(value)
                    for label in value.labels:
                        self.constraints.fix_units(label.atom)
                        self.constraints.restrict(label)
                    self.constraints.fix_product([label.scale for label in value.labels])
                    fix_choice(self, value)
            else:
                result = self._operate(node, environment)
                environment[node] = result
                self.made_by |= {id(v): node for v in values_in(result) if v.labels and not v.sources}
                if any(argument in varying for argument in node.all_input_nodes):
                    varying.add(node)
                else:
                    self.made_of_states |= {id(v): v for v in torch.utils._pytree.tree_leaves(result)}
                for value in values_in(result):
                    for label in value.labels:
                        self.see(label)
            for mark in marks.get(node, ()):
                if isinstance(value := environment[mark.node], Value):
                    self.taps[mark] = value
                    for label in value.labels:
                        self.see(label, mark.name)
        self.taps = {
            mark: replace(value, half_turned=self.half_turned.get(mark.node, value.half_turned))
            for mark, value in self.taps.items()
            if mark.node not in self.untold
        }
        self.aperiodic |= {state for node, state in capture.states.items() if node.users and state not in self.periodic}
        self._fix_unread()
        for node, state in capture.states.items():
            if not set(node.users) <= self.grouped_by.pop(state, set(node.users)):
                self.mixed_uses.add(state)
        return outputs

    def _operate(self, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
        """Apply an operation's rule and return the result; operations on constants are computed."""
        arguments: Any = fx.map_arg(node.args, lambda n: environment[n])
        keywords: Any = fx.map_arg(node.kwargs, lambda n: environment[n])
        result = self._constant(node, arguments, keywords)
        if result is not None:
            return result
        self._only_where_absorbed(node, arguments, keywords)
        tells_unknown_choice(self, node, values_in((arguments, keywords)))
        rule = rule_for(node.target) if "out" not in node.kwargs else unknown
        if "watched" in node.meta:
            with self.constraints.between_planes():
                result = rule(self, *arguments, **keywords)
            return replace(result, squared=True) if isinstance(result, Value) else result
        since = self.stacks.before((arguments, keywords))
        try:
            result = rule(self, *arguments, **keywords)
        except OnlyUnlabelledError as error:
            if not written_by(node):
                raise TypeError(str(error)) from None
            result = None
        if result is None and written_by(node):
            result = unknown(self, *arguments, **keywords)
        result = self.stacks.after(node, arguments, keywords, result, since)
        if isinstance(result, Value) and node.args and isinstance(given := arguments[0], Value) and given.offset:
            result = replace(result, offset=offset_behind(node, given.offset) or 0.0)
        self._read_by(result, (arguments[1:] if replaces(node) else arguments, keywords))
        return result

    def finish(self) -> None:
        """Add the constraints that depend on all walks: elements of weights that none of them read."""
        for label in self.untagged:
            self.see(self.constraints.resolve(label))
        for name, labels in self.axis_labels.items():  # a part was taken, but not used
            if name not in self.reads:
                root = Value(tuple(self.tensors[name].shape), labels, state=name)
                self.reads[name] = (root, [])
        self._fix_unread(states=True)
        for name in self.aperiodic & self.constraints.half_periods.keys():  # a capture reads the bias in another way
            self.constraints.half_periods[name] = replace(self.constraints.half_periods[name], size=math.nan)
        for name in [name for name, times in self.gains.items() if times != self.uses[name]]:  # and other uses
            del self.gains[name]
            for label in self.axis_labels[name]:
                self.constraints.restrict(label)
        for name in self.mixed_uses:  # the meaning of its second axis depends on the group, but elsewhere it does not
            if name in self.grouped:
                self.constraints.fix(self.grouped.pop(name))
            self.fix(Value(tuple(self.tensors[name].shape), self.axis_labels[name]))

    def _read_by(self, result: Any, arguments: Any) -> None:
        """Record the arguments that an operation reads; moves do not read."""
        carried = {id(root) for part in values_in(result) for root, _ in (*part.sources, (part, ()))}
        for value in values_in(arguments):
            if not any(id(root) in carried for root, _ in value.sources or ((value, ()),)):
                self.read(value)

    def _fix_unread(self, states: bool = False) -> None:
        """Fix unread elements of weights, or of values made of weights only, as longer inputs may read them."""
        for key, (root, paths) in list(self.reads.items()):
            if (root.state is not None) != states:
                continue
            del self.reads[key]
            if () in paths:
                continue
            # If the elements of a matrix became units, these count, rather than those of its axes.
            for label in self.axis_labels[str(key)] if key in self.joint else root.labels:
                reached = np.zeros(label.size + 1, bool)
                for path in paths:
                    reached[self.once(left_after, root.shape, label.axes, path)] = True
                missed = int((~reached[1:]).sum())
                if missed and not (states or key in self.made_of_states):
                    maker = self.made_by.get(key)
                    if maker is not None and _made_for(maker):
                        note = (
                            f"{self.where_is(maker)}: nothing reads {missed} of {label.size} units, so that more of "
                            "their weights is free than the group moves"
                        )
                        self.constraints.unread.append((label.atom[~reached[1:].reshape(label.atom.shape)], note))
                elif missed:
                    # A shorter input may omit more elements; several examples show which ones.
                    left = label.at(~reached[1:].reshape(label.atom.shape))
                    self.constraints.fix(label if self.examples == 1 and key not in self.beside_zeros else left)
                    maker = self.made_by.get(key)
                    where = "a value made of weights" if maker is None else f"the result of {self.where_is(maker)}"
                    where = where if root.state is None else f"{root.state}{list(label.axes)}"
                    note = (
                        f"{where} is fixed: no example reaches {missed} of its {label.size} places, another input may"
                    )
                    if key in self.beside_zeros:
                        note = f"{where}: {missed} of {label.size} places are multiplied by zeros only and stay fixed"
                    if root.state not in self.capture.buffers:  # such as the mask of a longer context
                        self.constraints.notes[note] = None

    def _only_where_absorbed(self, node: fx.Node, arguments: Any, keywords: Any) -> None:
        """Fix the signs of units if the current operation cannot absorb the constant that a sign change adds."""
        for value in values_in((arguments, keywords)):
            if value.offset and not absorbs_offset(self, node.target, value, arguments):
                for label in value.labels:
                    self.constraints.fix_scales(label.scale, magnitudes=False)

    def _constant(self, node: fx.Node, arguments: Any, keywords: Any) -> Any:
        """Compute operations on constants, as their results may be indices of other operations."""
        if node.target in OPAQUE or written_by(node):
            return None
        values, name = values_in((arguments, keywords)), name_of(node)
        if not isinstance(node.target, torch._ops.OpOverload) or any(v.concrete is None for v in values):
            if name not in operations(Trait.LIKE):
                return None
            # Only size and dtype of this tensor are used.
            arguments = [
                Value(v.shape, concrete=torch.empty(v.shape, dtype=argument.meta["val"].dtype, device="meta"))
                if isinstance(v, Value) and isinstance(argument, fx.Node)
                else v
                for argument, v in zip(node.args, arguments, strict=True)
            ]
            keywords = {**keywords, "device": "cpu", "pin_memory": None}
        elif not values and not isinstance(node.meta.get("val"), Tensor):
            return None

        def unwrap(item: Any) -> Any:
            return item.concrete if isinstance(item, Value) else torch.device("cpu") if _is_device(item) else item

        arguments, keywords = torch.utils._pytree.tree_map(unwrap, (arguments, keywords))
        function: Any = node.target
        result = function(*arguments, **keywords)
        if "empty" in str(node.target):
            result = torch.zeros_like(result)  # uninitialised memory that no operation may read
        by_size = name not in OF_NO_SIZE or any(value.by_size for value in values)

        def wrapped(tensor: Tensor) -> Value:
            part = any(
                v.concrete is not None and tensor.numel() < v.concrete.numel() and not _uniform(v) for v in values
            )
            return Value(tuple(tensor.shape), concrete=tensor, by_size=by_size or part)

        return torch.utils._pytree.tree_map_only(Tensor, wrapped, result)


def _made_for(node: fx.Node) -> bool:
    """Whether a layer without other readers writes into a value by operations that act unit by unit."""
    left = [node]
    while left:
        if name_of(node := left.pop()) not in _UNIT_BY_UNIT:
            return False
        for given in node.all_input_nodes:
            if len(given.users) == 1 and name_of(given) in operations(Trait.CONTRACT):
                return True
            left += [given] * (len(given.users) == 1 and given.op == "call_function")
    return False


_UNIT_BY_UNIT = {"neg"} | operations(
    Trait.POINTWISE
    | Trait.JOIN
    | Trait.PRODUCT
    | Trait.SUM
    | Trait.POOL
    | Trait.MAX_POOL
    | Trait.MOVE
    | Trait.CAST
    | Trait.NORM
)
