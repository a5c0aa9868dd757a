"""From the operations of a network to labels and demands."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sym.symmetry.charts import Charts
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.charts import charts_of
from lightning_sym.symmetry.tracing.pieces import pieces_of
from lightning_sym.symmetry.tracing.stacks import unstack
from lightning_sym.symmetry.tracing.tensors import Tensors
from lightning_sym.symmetry.tracing.values import Value
from lightning_sym.symmetry.tracing.walk import Walk


class Labels(NamedTuple):
    """What the operations of a network demand, and where its units are.

    Attributes:
        walk: The demands, and the labels of tensors and of values that have a name.
        charts: What is added to tensors wherever the network reads them, and which it reads in pieces.
        kept: The tensors to which nothing may be added: in no state dict, or in several charts.
        stacked: The tensors that hold members with units of their own.
    """

    walk: Walk
    charts: Charts
    kept: set[str]
    stacked: set[str]


def find_labels(captures: Sequence[Capture], tensors: Tensors, *, affine: bool, lengths: int) -> Labels:
    """Walk through what was captured, and put down what each operation demands.

    Args:
        captures: The network in normal form, on one example or several.
        tensors: Its tensors.
        affine: Whether to count changes of sign that add a constant.
        lengths: Number of lengths that the user gave.
    """
    walk = Walk(tensors.states, constants=tensors.unsaved, affine=affine, examples=lengths)
    for captured in captures:
        walk.run(captured)
    charts, unlike = charts_of(captures)
    for name in unlike & walk.axis_labels.keys():
        walk.fix(Value(tuple(tensors.states[name].shape), walk.axis_labels[name]))
    walk.finish()
    stacked, hidden = unstack(walk.stacks, walk.axis_labels)
    walk.taps = {mark: value for mark, value in walk.taps.items() if mark.name not in hidden}
    return Labels(walk, Charts(charts, pieces_of(captures)), tensors.unsaved | unlike, stacked)
