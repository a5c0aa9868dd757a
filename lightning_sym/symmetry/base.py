"""The symmetry of a network: its group, its elements, and how they act on weights."""

import contextlib
import functools
import html
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.utils.weak import WeakIdKeyDictionary

from lightning_sym._distributed import on_device_of
from lightning_sym._exports import explained
from lightning_sym._text import unknown
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.architecture import ADVICE, Architecture, digest, held_by, same_but_for_rounding
from lightning_sym.symmetry.charts import charted, uncharted
from lightning_sym.symmetry.described import described_blocks, described_table, joined, listed, wrapped
from lightning_sym.symmetry.elements import AxisGroup, Tap, axis_groups, tap_of
from lightning_sym.symmetry.files import Shards, named_for, write_moved
from lightning_sym.symmetry.group.action import Action, ActivationAction
from lightning_sym.symmetry.group.channels import ChannelGroup, channel_group
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.element_group import ElementGroup
from lightning_sym.symmetry.group.factor import Draw
from lightning_sym.symmetry.group.kinds import factors_of
from lightning_sym.symmetry.group.statistics import buffer_rank, counted_twice, scaled_buffers
from lightning_sym.symmetry.permutation_spec import PermutationSpec, permutation_spec_of
from lightning_sym.symmetry.proof import batches_of, double, double_copy, largest_change, tolerance_of
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.parts import Shown
from lightning_sym.symmetry.tracing.graph.calls import Call, check_arguments
from lightning_sym.symmetry.tracing.graph.capture import Mark, copied, memory_of, places_of, state_tensors
from lightning_sym.symmetry.tracing.graph.norms import Norm
from lightning_sym.symmetry.tracing.graph.weightless import is_weightless
from lightning_sym.symmetry.tracing.labelling.values import Value

# Number of elements that act on a network at its first use, unless it is large.
_ELEMENTS = 6
_UNCHECKED: ContextVar[bool] = ContextVar("unchecked", default=False)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let symmetries skip the test run of unknown networks: for copies of networks that were tested."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


@explained
class Symmetry(ElementGroup):
    """The group of changes of weights and buffers that leave a network's function alone, in evaluation mode.

    Made by `trace_symmetry`. Elements are made by `identity` and `sample`, combined by `compose` and `inverse`, and
    change networks by `act`. They act on every network of the traced architecture, for all weights.

    Attributes:
        taps: Hook points by name: values inside the network that elements act on, see :meth:`on_activations`. These
            are the outputs of all modules that ran (of several tensors, the first), and the values at traced cuts.
        notes: Limits of the group: unknown operations, parameters never used, and so on.
        worst_error: Largest relative change of an output that the self-test saw; NaN without a test.
        tolerance: The change that was accepted: 1e-10, or more for networks that round to a lower precision inside.
        precision: The lowest precision of the network's operations when it is run in float64.
        elements_tried: How many random elements the self-test tried.
        nullity: Dimension of the kernel of the Jacobian of the outputs by the parameters, at generic weights, as
            `trace_symmetry` measures it; None if it was not measured, or if it is another at all weights that were
            tried. A note names the part that the group leaves out. Entries that no output depends on do not count; a
            note names them.
        unmeasured: Why the self-test did not measure the nullity; empty if it did, or was not asked to.
        examples: The calls that were traced: positional arguments, keyword arguments, and which output counts.
        norms: The norms of single samples (layer norm, RMS norm), with their gains and biases.
        exchanged_norms: Modules of norms that elements exchange, which are not among these.
    """

    def __init__(
        self,
        structure: Structure,
        values: Structure,
        marked: Mapping[Mark, Value],
        network: nn.Module,
        notes: Sequence[str],
        *,
        constants: Mapping[str, Tensor] | None = None,
        examples: Sequence[Call] = (),
        shown: Mapping[str, Shown] | None = None,
        common_shift: Callable[[], int] | None = None,
        norms: Sequence[Norm] = (),
        absorbed: Collection[str] = (),
    ) -> None:
        self.notes: tuple[str, ...] = tuple(notes)
        self.worst_error = math.nan
        self.precision = torch.float64
        self.tolerance = tolerance_of(torch.float64)
        self.elements_tried = 0
        self.nullity: int | None = None
        self.unmeasured = ""
        self.examples = tuple(examples)
        self._common_shift = common_shift
        self.norms, self.exchanged_norms = tuple(norms), tuple[str, ...]()
        self.architecture = Architecture(network, constants or {}, structure.moving)
        charts, held = structure.charts, self.architecture.layout  # each by its first name
        shapes = {piece.name: piece.shape for pieces in charts.pieces.values() for piece in pieces}
        shapes |= {name: (len(members), *held[members[0]][0]) for name, members in charts.stacks.items()}
        self.layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            own: (shapes.get(own, shape), kind) for name, (shape, kind) in held.items() for own in charts.names_of(name)
        }
        self.shapes = {name: shape for name, (shape, _) in self.layout.items()}
        parameters = [name for name, _ in network.named_parameters() if name in held]
        self.parameter_names = frozenset(own for name in parameters for own in charts.names_of(name))
        self._statistics = frozenset(dict(network.named_buffers())) - frozenset(absorbed)
        fixed = scaled_buffers(structure) & {name for name, own in network.named_buffers() if own.is_floating_point()}
        self.weight_names = self.parameter_names | fixed
        super().__init__(structure, self.weight_names)
        self._closed = {} if is_weightless(network) else self.factors.closed(self.tensors(network))
        if self._closed:
            gains = sorted(frozenset().union(*(factor.gains for factor in self.factors)))
            zeros = [name for name in gains if not bool(self.tensors(network)[name].all())]
            self.notes += (
                f"{listed(zeros)} of this network hold zeros: the matrices and shifts that would be divided by these "
                "are left out of random elements, forms and tangents at such weights",
            )
        self._values = values
        self._on_values = factors_of(values)
        self._checked = True
        self._trials: list[tuple[Sequence[Call], bool]] = [(self.examples, False)]
        self._met: Any = WeakIdKeyDictionary()  # digests of attributes other than weights, by network
        shown = shown or {}
        self.taps = {mark.name: tap_of(mark, v, values, shown.get(mark.name, Shown())) for mark, v in marked.items()}
        self._leaves = {name for name, module in network.named_modules() if not any(module.children())}

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the architecture and the group; elements of other groups are rejected."""
        return digest(self.architecture.text, self.structure)

    @cached_property
    def groups(self) -> tuple[AxisGroup, ...]:
        """The axis groups, in the order of the forward pass."""
        watched = [tap for tap in self.taps.values() if tap.module in self._leaves]
        return tuple(axis_groups(self.structure, self.parameter_names, watched))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying: the common shift as a number, without its graphs.

        Networks are tested again.
        """
        number = self.common_shift
        return {**self.__dict__, "_common_shift": None, "common_shift": number, "_met": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _met=WeakIdKeyDictionary())

    # Properties of the group.

    @cached_property
    def shifts(self) -> int:
        """The dimension of the shifts: of all possible additions to weights (docs/theory/translations.md)."""
        return self.structure.shifts.dimension

    @cached_property
    def common_shift(self) -> int:
        """The number of further dimensions if a softmax reads the outputs: additions of one number to all logits."""
        return 0 if self._common_shift is None else self._common_shift()

    @property
    def shift_kinds(self) -> dict[str, int]:
        """The number of entries of the shifts of each kind; entries of two kinds count in both."""
        kinds: dict[str, int] = {}
        for own in self.structure.shifts.kinds:
            kinds[own.kind] = kinds.get(own.kind, 0) + len(own.entries)
        return kinds

    @cached_property
    def dimension(self) -> int:
        """The dimension of the group's continuous part, as far as it acts on parameters.

        It is that of the orbit of a generic network, unless consecutive linear layers are wider than their outputs:
        then some elements change nothing. Changes of running statistics count where the gain and bias of the batch
        norm can compensate for them; else they are part of :attr:`buffer_dimension`.
        """
        return self._whole_dimension - self.buffer_dimension

    @cached_property
    def buffer_dimension(self) -> int:
        """The dimension of the group's action on buffers that no parameters compensate for.

        Such are the running statistics of batch norms without gain and bias, and buffers that multiply units.
        With fixed buffers, the group that preserves the function has so many dimensions fewer.
        """
        return self._moving(self._statistics)

    def _moving(self, buffers: frozenset[str]) -> int:
        """Return the number of dimensions that move some buffers."""
        return buffer_rank(self.factors, buffers, self.shapes)

    @property
    def _whole_dimension(self) -> int:
        return sum(factor.dimension for factor in self.factors) - self._counted_twice

    @cached_property
    def _counted_twice(self) -> int:
        return counted_twice(self.structure, self.shapes)

    @cached_property
    def log10_permutations(self) -> float:
        """Decimal logarithm of the number of permutations (those that are among the matrices are not counted)."""
        return self.factors["permutation"].log_order / math.log(10)

    @property
    def log_order(self) -> float:
        """Natural logarithm of the order of the group's discrete part: permutations and signs."""
        return sum(factor.log_order for factor in self.factors)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per axis group: the content of `print(symmetry)`, as data."""
        rows = []
        for index, group in enumerate(self.groups):
            cells = np.bincount(self.structure.cells[index])
            shared = np.unique(self.structure.scale_table[index])
            turning = sum(rotation.dimension for rotation in group.rotations) + group.size * group.phase
            turning += sum(cell.size**2 - cell.size for cell in group.gained)  # their diagonals are among the scales
            rows.append(
                {
                    "group": group.name,
                    "size": group.size,
                    "cells": len(cells) if group.movable else group.size,
                    "type": group.kind,
                    "parameters": [f"{o.tensor}[{', '.join(map(str, o.axes))}]" for o in group.occurrences],
                    "dimension": int((cells**2).sum()) if group.dense else len(shared) + turning,
                    "log10_permutations": self.structure.log_order_in(index) / math.log(10),
                }
            )
        return rows

    def __str__(self) -> str:
        count = sum(group.size for group in self.groups)
        summary = (
            f"{len(self.groups)} axis groups, {count} units: 10^{self.log10_permutations:.1f} permutations, "
            f"{self.signs} signs, dimension {self.dimension}"
            + (f" and {self.buffer_dimension} of buffers" if self.buffer_dimension else "")
        )
        lower = f": it rounds to {self.precision}" if self.precision != torch.float64 else ""
        checked = (
            f"checked with {self.elements_tried} random elements: {self.worst_error:.1e} (tolerance "
            f"{self.tolerance:.1e}{lower})"
        )
        checks = [] if math.isnan(self.worst_error) else [checked]
        checks += [] if self.nullity is None else [f"nullity of the Jacobian: {self.nullity}"]
        checks += [f"nullity of the Jacobian: not measured ({self.unmeasured})"] * bool(self.unmeasured)
        lines = [*described_table(self.table()), *wrapped(summary)]
        lines += [line for factor in self.factors.inwards for text in factor.describe() for line in wrapped(text)]
        lines += described_blocks(self.structure, self.groups)
        notes = (f"note: {note}" for note in joined(self.notes))
        return "\n".join(lines + [line for text in (*checks, *notes) for line in wrapped(text)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return f"<Symmetry: {len(self.groups)} axis groups, {self.units} units, dimension {self.dimension}>"

    def drawn(self, draw: Draw) -> Element:
        """Draw a random element; see :class:`ElementGroup`."""
        return super().drawn(draw if draw.closed is not None else replace(draw, closed=self._closed))

    # Action.

    def act(
        self,
        element: Element,
        network: nn.Module,
        *,
        inplace: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        check: bool = True,
    ) -> nn.Module:
        """Change a network's weights and buffers by an element; its function in evaluation mode stays the same.

        Running variances move by v' = s^2 (v + eps) - eps, which keeps evaluation mode exact. In training mode, batch
        norm divides by the batch's own variance, so a scale s before it changes the output by O(eps / v). A matrix
        that mixes its channels (docs/theory/intertwiners.md, 2.18) changes it at order 1. All other elements are
        exact in training mode as well.

        Args:
            element: From this symmetry.
            network: Any network of the traced architecture. Not changed unless `inplace`.
            inplace: Whether to change the network itself.
            optimizer: The network's optimiser. Its state is transformed in place (momenta by the inverse
                scale, as gradients are; second moments by its square; shifts leave it alone, although gradients of
                weights that read shifted units change; elements that mix such weights by matrices are refused, as no
                second moments follow, even where only a momentum is held); needs `inplace`.
            check: Whether to run a network that this symmetry has not tested yet, see :meth:`require`.

        Returns:
            The changed network.

        Raises:
            ValueError: If the element or the network does not belong to this symmetry, or an optimiser is given without
                `inplace` or holds state that cannot be carried along.
        """
        self._own(element)
        with contextlib.nullcontext() if check else unchecked():
            self.require(network)
        if optimizer is not None and not inplace:
            raise ValueError("an optimiser's state can be carried along only with inplace=True")
        if not inplace:
            result = self._moved(element, network)
            if network in self._met:  # the copy computes the same function as the network
                self._met[result] = self._met[network]
            return result
        holders = self._holders(network)
        with torch.no_grad():
            if optimizer is not None:
                names = {own: name for name, held in holders.items() for own in held}
                Action(self.factors, element).carry(optimizer, names)
            for name, tensor in self._weights(element, state_tensors(network)):
                for own in holders.get(name, ()):
                    own.copy_(tensor)  # of those that share memory, again
        _recompute(network)
        return network

    def _holders(self, network: nn.Module) -> dict[str, list[Tensor]]:
        """Return all tensors that share one tensor of the traced network, by its names there."""
        held: dict[str, list[Tensor]] = {}
        places = places_of(network)
        for place, name in self.architecture.names.items():
            held.setdefault(name, []).append(places[place])
        return held

    def act_on_files(
        self, element: Element, checkpoint: str | Path, out: str | Path, *, leave: Sequence[str] = ()
    ) -> Path:
        """Change the weights of a checkpoint on disk by an element; the function of the network they are for stays.

        For networks that do not fit into memory: the group comes from the network without weights, and one tensor at a
        time is read, changed and written. Names, types, shards and metadata are kept. Numbers of 16 bits are
        moved in single precision and rounded once.

        Args:
            element: From this symmetry.
            checkpoint: A file of safetensors, or the index of several (``model.safetensors.index.json``). Its names
                may have a prefix more or less than the network's (``model.``). Not changed.
            out: A folder, which is made if it is not there; for one file also the path of the new one, ending in
                ``.safetensors``. Files that are there are not replaced.
            leave: Patterns (``"*.attn.bias"``) of names in the checkpoint that the network does not have; these stay.

        Returns:
            The new index or file.

        Raises:
            ValueError: If the element belongs to another network's symmetry, or the checkpoint is damaged, incomplete
                or of another configuration, or a number in it is not finite. No file remains then.
            OSError: If the folder cannot be written to. No file remains.
        """
        self._own(element)
        shards, architecture = Shards(checkpoint), self.architecture
        shapes = {name: shape for name, (shape, _) in architecture.layout.items()}
        named = named_for(shards, shapes, architecture.names, list(self.structure.moving), leave)
        for key, name in named.items():
            constant = architecture.constants.get(name)
            if constant is not None and not same_but_for_rounding(shards.read(shards.tensors[key]), constant):
                raise ValueError(
                    f"{checkpoint} holds other values of the constant {key} than the traced network: the element is of "
                    "another configuration."
                )
        first: dict[str, str] = {}
        for key, name in named.items():  # weights that are one tensor in the network may be there twice
            other = first.setdefault(name, key)
            one, two = (shards.tensors[own] for own in (other, key))
            if other != key and name in self.structure.moving and not torch.equal(shards.read(one), shards.read(two)):
                raise ValueError(
                    f"{checkpoint} holds other numbers as {key} than as {other}, which are one tensor in the traced "
                    "network; expected a checkpoint of a network with shared weights."
                )
        with torch.no_grad():
            moved = functools.partial(self._weights, element)
            return write_moved(shards, named, moved, self.structure.moving, out)

    def _weights(self, element: Element, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the new values of the parameters and buffers that move; each may then be overwritten."""
        charts = self.structure.charts
        moved = Action(self.factors, element).on_weights(charted(tensors, charts))
        return uncharted(moved, charts, tensors)

    def tensors(self, network: nn.Module) -> Mapping[str, Tensor]:
        """Return a network's parameters and buffers as the group acts on them, by their first names.

        Where the network reads a parameter only as 1 + w, the value is 1 + w, in double precision. A parameter that
        holds several layers gives the weights of each, as ``flat[40:48]``; the tensors of modules that elements
        exchange are stacked, as ``experts.{0,1}.weight``.

        Args:
            network: A network of the traced architecture; it is not checked. Its tensors are not copied.
        """
        return charted(state_tensors(network), self.structure.charts)

    def acted(self, element: Element, tensors: Mapping[str, Tensor], *, shifts: bool = True) -> dict[str, Tensor]:
        """Return the action on tensors in the form of :meth:`tensors`; see :meth:`act_on`."""
        return {**tensors, **dict(Action(self.factors, element).on_weights(tensors, shifted=shifts))}

    def _moved(self, element: Element, network: nn.Module) -> nn.Module:
        """Return a changed copy of a network without checking its function."""
        holders = self._holders(network)
        made: dict[int, Any] = {}  # the copy gets its new tensors at once, instead of copies of the old ones
        with torch.no_grad():
            for name, tensor in self._weights(element, state_tensors(network)):
                held = holders.get(name, ())
                memories: set[Any] = set()
                for own in held:
                    new = tensor
                    if len(held) > 1:
                        new = tensor.clone() if memories and memory_of(own) not in memories else tensor
                        memories.add(memory_of(own))
                    made[id(own)] = nn.Parameter(new, own.requires_grad) if type(own) is nn.Parameter else new
        result = copied(network, made)
        _recompute(result)
        return result

    def moved_tensors(self, element: Element, network: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of a network under an element, one after the other, by their first names.

        Args:
            element: From this symmetry.
            network: A network of the traced architecture. Not changed.
        """
        self._own(element)
        left = dict(state_tensors(network))
        names, holders = {id(tensor): name for name, tensor in left.items()}, self._holders(network)
        for first, tensor in self._weights(element, dict(left)):
            for name in dict.fromkeys(names[id(own)] for own in holders.get(first, ()) if id(own) in names):
                del left[name]
                yield name, tensor
        yield from left.items()

    def act_on(self, element: Element, tensors: Mapping[str, Tensor], *, shifts: bool = True) -> dict[str, Tensor]:
        """Apply an element to some parameters or buffers, by name, without changes in place.

        Args:
            element: From this symmetry.
            tensors: Parameters or buffers by name, as of a state dict. Neither shapes nor the element are checked. A
                bias absorbs signs and shifts only if its weight is among them.
            shifts: Whether to add shifts, and to move running variances as evaluation asks for.

        Raises:
            ValueError: If the network has no tensor of some name, or names of one tensor hold other numbers.
        """
        charts, known, own = self.structure.charts, self.architecture.first_of(tensors), dict[str, Tensor]()
        for name, tensor in tensors.items():
            own.setdefault(known[name], tensor)
        moved = dict(uncharted(self.acted(element, charted(own, charts), shifts=shifts).items(), charts, own))
        return {name: moved[known[name]] for name in tensors}

    def on_activations(self, element: Element, tap: Tap | str, network: nn.Module | None = None) -> ActivationAction:
        r"""Return the action of an element on a value inside the network, in evaluation mode.

        If the weights of a network are changed by the element, its values at the tap are those of the network before
        with this applied: :math:`v' = A v`. At the output of an activation it is :math:`\varphi(g)` of Godfrey et al.
        (2022), arXiv:2205.14258, Proposition 3.4. It follows from the constraints that give the action on the weights.

        Args:
            element: From this symmetry.
            tap: One of :attr:`taps`, or its name.
            network: The network before. Needed where a stream is rotated behind a norm's gain only: there D Q D^-1 acts
                for the gain's diagonal D.

        Raises:
            ValueError: If the element belongs to another network's symmetry, there is no such tap, or the network is
                needed.

        Example:
            >>> from lightning_sym.symmetry.trace import trace_symmetry
            >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> x = torch.randn(2, 5)
            >>> symmetry = trace_symmetry(network, x)
            >>> element = symmetry.sample()
            >>> moved = symmetry.act(element, network)
            >>> action = symmetry.on_activations(element, "1")
            >>> torch.allclose(moved[:2](x), action.apply(network[:2](x)), atol=1e-5)
            True
        """
        self._own(element)
        tap = self._tapped(tap)
        action = Action(self._on_values, element)
        tensors = None
        if network is not None:
            self.require(network)
            tensors = self.tensors(network)
            action.learn_gains(tensors)
        return action.on_activations(tap, tensors)

    def generators_at(self, tap: Tap | str) -> tuple[dict[int, float], dict[int, float]]:
        """Return the independent scales and signs at a tap, each with its exponent at its first place.

        Args:
            tap: One of :attr:`taps`, or its name.
        """
        found: list[dict[int, float]] = []
        for forms in (own.forms for own in self._on_values if own.forms is not None):
            shown = [forms[slot.rows] for slot in self._tapped(tap).seen]
            pairs = [pair for rows in shown for pair in zip(rows.indices.tolist(), rows.data.tolist(), strict=True)]
            found.append(dict(sorted(dict(reversed(pairs)).items())))
        return found[0], found[1]

    def sample_at(self, seen: Slot, generator: torch.Generator | None = None, *, scale: float = 0.5) -> Element:
        """Draw a random element that changes the units that are seen in one place, and no others.

        Args:
            seen: Positions of units in a value: one of :attr:`Tap.seen`.
            generator: Generator of the random numbers; by default the global one.
            scale: Standard deviation of the logarithms of scales; their means are 1.
        """
        draw = Draw(generator, scale)
        parts = {own.name: own.sample_at(seen, self._on_values[own.name], draw) for own in self.factors}
        return self.identity().replaced(**parts)

    def channels(self, tap: Tap | str) -> ChannelGroup:
        """Return the group that acts on the channels of a value inside the network.

        Args:
            tap: One of :attr:`taps`, or its name.

        Raises:
            ValueError: If there is no such tap, or units live on several of its axes apart from one another.
        """
        tap = self._tapped(tap)
        if len(tap.seen) != 1 or not tap.seen[0].axes:
            raise ValueError(
                f"units live on the axes {[slot.axes for slot in tap.seen]} of {tap.name}; expected channels on one "
                "axis, or on several together."
            )
        shifted = bool(tap.offset) or tap.shown.adds or tap.in_front is not None
        return channel_group(self._values, tap.seen[0], shifted=shifted, name=tap.name)

    def call(self, inputs: Any = None, keywords: Mapping[str, Any] | None = None) -> Call:
        """Return a call of a network with the same choice of outputs as in the traced examples.

        Args:
            inputs: An input, or a tuple of positional arguments; None for none.
            keywords: Keyword arguments.
        """
        return Call.of(inputs, keywords, self.examples[0].output if self.examples else None)

    def permutation_spec(self) -> PermutationSpec:
        """Return the axes of tensors that are permuted together, in the formats of other tools.

        Permutations of units that do not permute whole axes are left out: heads, channels that are flattened with their
        pixels or concatenated with those of other layers. The result lists them with reasons.

        Example:
            >>> from lightning_sym.symmetry.trace import trace_symmetry
            >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> spec = trace_symmetry(network, torch.randn(2, 5)).permutation_spec()
            >>> spec.perm_to_axes
            {'0': [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)]}
            >>> spec.numbered()["2.weight"]
            (2, 0)
        """
        charts = self.structure.charts
        return permutation_spec_of(self.groups, self.shapes, self.structure.blocks, charts.stacks)

    def _tapped(self, tap: Tap | str) -> Tap:
        if isinstance(tap, str) and tap not in self.taps:
            raise ValueError(unknown("tap", tap, self.taps))
        return self.taps[tap] if isinstance(tap, str) else tap

    def require(self, network: nn.Module, *, check: bool = True) -> None:
        """Check that a network's function differs from the traced one's by its weights only.

        The comparison covers the names, shapes and shared memory of tensors, the classes of modules and their
        `extra_repr`. It also covers the values of buffers that evaluation reads and no element moves: integers, masks,
        and buffers that are in no state dict. Casting a network (``half()``) may round these buffers. A run decides the
        rest. When this symmetry first sees a network, a random element acts on a copy in float64 with random weights,
        and the outputs are compared on the inputs of the self-test. The result is remembered, for all weights, until
        the other attributes of the network's modules change. The traced network counts as tested, and so do the results
        of :meth:`act` on a tested one.

        A symmetry that was traced with ``check=False`` runs no network, and none can be run on torch's meta device; a
        note reports this.

        Args:
            network: Not changed.
            check: Whether to run it. If not, it counts as tested from now on.

        Raises:
            TypeError: If it is no network, or cannot be copied.
            ValueError: If something differs, the outputs change, or the copy does not run.
        """
        self.architecture.require(network)
        if _UNCHECKED.get():
            return
        digest, held = held_by(network)
        self.architecture.require_apart(network, held)
        if is_weightless(network):
            note = "not checked: tensors on meta have no values; symmetry.check(network) tries elements on one that has"
            self.notes = (*self.notes, *({note} - {*self.notes} if check and self._checked else ()))
            return
        if digest and self._met.get(network) == digest:
            return
        if check and self._checked:
            self._meet(network)
        self._met[network] = digest

    def _meet(self, network: nn.Module) -> None:
        """Let a random element act on a copy of a network, and compare the outputs.

        Raises:
            ValueError: If they change.
        """
        where = self.architecture.other_setting(network)
        for calls, few in self._trials:
            last = calls is self._trials[-1][0]
            exact, generator = double_copy(network, self.architecture.names), torch.Generator().manual_seed(0)
            examples = on_device_of(exact, double(list(calls)))
            with torch.no_grad(), evaluating(exact):
                batches = [own for call in examples for own in batches_of(exact, call, generator, thrifty=few)]
                try:
                    change, precision = largest_change(
                        self,
                        exact,
                        [batches[1::2] if few else batches],
                        own=network.state_dict(),
                        # By chance, an element of few heads may be one of the group with half as many.
                        samples=1 + bool(where) if len(self._trials) > 1 else _ELEMENTS,
                        scale=0.5,
                        generator=generator,
                        noise=(math.inf,),
                        tolerance=self.tolerance,
                    )
                except ValueError:
                    if last:
                        raise
                    continue
            if change <= max(self.tolerance, tolerance_of(precision)):
                return
            break
        found = f": {where}" if where else ""
        raise ValueError(
            f"an element of the traced network's symmetry changes an output by {change:.1e} there (relative; at most "
            f"{self.tolerance:.1g} was expected), so that it computes another function{found}; {ADVICE}"
        )

    def check(
        self,
        network: nn.Module,
        inputs: Any = None,
        *,
        samples: int = 1,
        scale: float = 0.5,
        generator: torch.Generator | None = None,
        perturb: float = 0.0,
        **keywords: Any,
    ) -> float:
        """Let random elements act on a copy of a network, in float64 and evaluation mode, and compare the outputs.

        The changed weights go through a state dict into another copy. This is the way to see whether an element is a
        symmetry of a network with a difference that is invisible from outside (a number written into `forward`): the
        result is then far above `tolerance`.

        Args:
            network: A network of the traced architecture.
            inputs: Its input, or a tuple of its positional arguments, on any device; by default the traced examples and
                inputs with noise around them.
            samples: How many elements are tried.
            scale: Standard deviation of the logarithms of their magnitudes.
            generator: Where randomness comes from; by default the same elements every time.
            perturb: How much noise is added to the copy's weights and statistics before each element, relative to
                their root mean square. The self-test of `trace_symmetry` adds some, so that weights that happen to be
                zero, or statistics that have not been trained, cannot hide a mistake.
            **keywords: The network's keyword arguments, with or without `inputs`.

        Returns:
            The largest change of an output's element, relative to its own magnitude and the median one of that output.

        Raises:
            TypeError: If it is no network, or does not take the arguments.
            ValueError: If it has other tensors or modules, or its outputs have no finite number.
        """
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        self.architecture.require_tensors(network)
        if is_weightless(network):
            raise ValueError(
                "the network holds tensors without values (on meta), so that nothing can be tested; expected a network "
                "with weights of the traced architecture"
            )
        exact = double_copy(network, self.architecture.names)
        calls = [self.call(inputs, keywords)] if keywords or inputs is not None else []
        for call in calls:
            check_arguments(network, call, ("inputs", "samples", "scale", "generator", "perturb"))
        batches: list[Call] = list(on_device_of(exact, double(calls or list(self.examples))))
        with torch.no_grad(), evaluating(exact):
            if not calls:
                batches = [batch for example in batches for batch in batches_of(exact, example, generator)]
            return largest_change(
                self,
                exact,
                [batches],
                own=network.state_dict(),
                samples=samples,
                scale=scale,
                generator=generator,
                noise=(perturb,),
            )[0]


def _recompute(network: nn.Module) -> None:
    """Recompute the weights that pruned modules keep from one forward pass to the next."""
    for module in network.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                hook(module, None)
