"""Compute labels and constraints from the operations of a network."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sym.symmetry.charts import Charts, Onto
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.labelling.stacks import unstack
from lightning_sym.symmetry.tracing.labelling.values import Value
from lightning_sym.symmetry.tracing.labelling.walk import Walk
from lightning_sym.symmetry.tracing.normal_form.alike import stacks_of
from lightning_sym.symmetry.tracing.normal_form.charts import charts_of
from lightning_sym.symmetry.tracing.normal_form.pieces import pieces_of
from lightning_sym.symmetry.tracing.tensors import Tensors


class Labels(NamedTuple):
    """The constraints of a network's operations, and the labels of its tensors.

    Attributes:
        walk: The constraints, and the labels of tensors and named values.
        charts: The numbers that the network adds to tensors wherever it reads them, and the pieces that it reads.
        kept: The tensors without translations: in no state dict, or in several charts.
        stacked: The tensors with members that have separate units.
    """

    walk: Walk
    charts: Charts
    kept: set[str]
    stacked: set[str]


def find_labels(captures: Sequence[Capture], tensors: Tensors, *, affine: bool, lengths: int) -> Labels:
    """Walk through captures, and record the constraints of each operation.

    Args:
        captures: The network in normal form, on one or several examples.
        tensors: Its tensors.
        affine: Whether to allow sign changes that add a constant.
        lengths: The number of input lengths that the user gave.
    """
    walks: list[Walk] = []
    while len(walks) < 2 and (not walks or walks[0].constraints.apart):
        # Steps of a loop join values that only later steps show to move together: a second walk knows these.
        walks.append(Walk(tensors.states, constants=tensors.unsaved, affine=affine, examples=lengths))
        if len(walks) > 1:
            walks[1].constraints.first = walks[0].constraints.united().__getitem__
        for captured in captures:
            walks[-1].run(captured)
    walk = min(walks, key=lambda own: own.constraints.apart)
    charts, unlike = charts_of(captures)
    for name in unlike & walk.axis_labels.keys():
        walk.fix(Value(tuple(tensors.states[name].shape), walk.axis_labels[name]))
    positive = {name for name, chart in charts.items() if isinstance(chart, Onto)}
    for label in (label for name in positive & walk.axis_labels.keys() for label in walk.axis_labels[name]):
        walk.constraints.restrict(label)
        walk.constraints.fix_scales(label.scale, magnitudes=False)
    walk.finish()
    stacked, hidden = unstack(walk.stacks, walk.axis_labels)
    walk.taps = {mark: value for mark, value in walk.taps.items() if mark.name not in hidden}
    return Labels(
        walk, Charts(charts, pieces_of(captures), stacks_of(captures)), tensors.unsaved | unlike | positive, stacked
    )
