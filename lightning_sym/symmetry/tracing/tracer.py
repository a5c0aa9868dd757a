"""Capture a network on calls and rewrite it in normal form."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_sym.networks.base import Cuts
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import Capture, capture
from lightning_sym.symmetry.tracing.graph.functional import functional
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.labelling.rules import leaf_types, own_operations
from lightning_sym.symmetry.tracing.normal_form.alike import Role, alike, stack
from lightning_sym.symmetry.tracing.normal_form.charts import split_exponentials
from lightning_sym.symmetry.tracing.normal_form.expansion import expand
from lightning_sym.symmetry.tracing.normal_form.filling import join_writes
from lightning_sym.symmetry.tracing.normal_form.made_weights import shape_layers
from lightning_sym.symmetry.tracing.normal_form.members import take_apart
from lightning_sym.symmetry.tracing.normal_form.normalise import normalise
from lightning_sym.symmetry.tracing.normal_form.pieces import cut_arrays, cut_parameters, unlike_pieces


class Tracer:
    """Captures a network on calls and rewrites it in normal form.

    Args:
        network: The network.
        cuts: See :func:`~lightning_sym.symmetry.trace_symmetry`.
        constants: The values of buffers that no state dict contains, by name.
        kept: The buffers that no element changes, by name.

    Attributes:
        alike: For each set of modules with equal operations in the first captured call, its tensors.
        stacked: Tensors of such modules that are read as stacks, so that elements exchange the modules.
        splits: Whether biases before exponentials are read as factors behind them.
    """

    def __init__(
        self, network: nn.Module, cuts: Cuts | None, constants: Mapping[str, Tensor], kept: Mapping[str, Tensor]
    ) -> None:
        self.network, self._cuts = network, cuts
        self._constants, self._kept = constants, kept
        self._whole: set[str] = set()  # parameters that are not cut into pieces
        self.alike: list[tuple[Role, ...]] | None = None
        self.stacked: Sequence[Role] = ()
        self.splits = False

    def __call__(self, call: Call) -> Capture:
        """Return the operations of the network on a call, in normal form."""
        captured = capture(self.network, call, leaf_types(), cuts=self._cuts)
        for node, name in captured.states.items():
            if name in self._constants:
                node.meta["constant"] = self._constants[name]
            if name in self._kept:
                node.meta["kept"] = self._kept[name]
        expand(captured)
        take_apart(captured)
        join_writes(Rewriter(functional(captured), own_operations()))
        if self.alike is None:
            self.alike = [own.roles for own in alike(captured)]
        stack(captured, self.stacked)
        whole = self._whole | captured.stacks.keys()
        cut_parameters(captured, whole)
        normalise(captured, own_operations())
        if cut_arrays(captured, whole):
            normalise(captured, own_operations())
        if shape_layers(captured, whole, own_operations()):
            normalise(captured, own_operations())
        if self.splits and split_exponentials(Rewriter(captured, own_operations())):
            normalise(captured, own_operations())
        return captured

    def agreeing(self, captures: Sequence[Capture]) -> Sequence[Capture]:
        """Make captures split each parameter into the same pieces; parameters with differing pieces stay whole."""
        unlike = unlike_pieces(captures)
        self._whole |= unlike
        return [self(captured.call) for captured in captures] if unlike else captures
