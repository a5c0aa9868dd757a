"""A network's tensors as they would be under an element: made when asked for, and not kept."""

from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lightning_sym.symmetry.group.action import Action
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Factors
from lightning_sym.symmetry.rearranging import Summand
from lightning_sym.symmetry.views import ConvertedTensors


class MovedTensors(ConvertedTensors):
    """Tensors under an element of a network's group, each moved whenever it is asked for.

    Args:
        factors: Those of the group.
        element: What moves them.
        tensors: All parameters and buffers that what is asked for depends on, by name. Not changed.
        names: Those that there are; by default all.
        shifted: Whether to add shifts, and to move running variances as evaluation asks for.

    Raises:
        ValueError: Where a tensor is asked for, as :meth:`Symmetry.act` does.
    """

    def __init__(
        self,
        factors: Factors,
        element: Element,
        tensors: Mapping[str, Tensor],
        names: Collection[str] | None = None,
        *,
        shifted: bool = True,
    ) -> None:
        super().__init__(tensors, torch.detach, names)
        self._action, self._shifted = Action(factors, element), shifted

    @cached_property
    def _added(self) -> dict[str, list[Summand]]:
        self._action.learn_gains(self._tensors)
        return self._action.summands(self._tensors, shifted=self._shifted)

    def _made(self, name: str) -> Tensor:
        tensor, added = self._tensors[name], self._added.get(name, ())
        if name not in self._action.structure.slots_of:
            return tensor.detach()
        return self._action.moved(tensor, name, shifted=self._shifted, added=added)
