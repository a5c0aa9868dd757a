"""A network's tensors under an element: computed on access, and not stored."""

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
    """Tensors under an element of a network's group, each transformed on access.

    Args:
        factors: The factors of the group.
        element: The element.
        tensors: Parameters and buffers by name: those to transform, and those that the action depends on. Not changed.
        names: Names to include; by default all.
        shifted: Whether to apply translations, and to transform running variances as in evaluation mode.

    Raises:
        ValueError: On access, as in :meth:`Symmetry.act`.
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
