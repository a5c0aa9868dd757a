"""Candidates of one input and one output without biases, trained by a closed form."""

import torch
from torch import Tensor

from lightning_sym.population import Loss, PopulationStep, VmapPopulation
from lightning_sym.tasks.losses import SquaredDistance


class ReluLinePopulation(VmapPopulation):
    r"""Networks :math:`\sum_i c_i\, (a_i x)_+` of one input, see :func:`lightning_sym.landscape.is_relu_line`.

    Their outputs are :math:`p x_+ + q x_-` with :math:`p = \sum_i c_i (a_i)_+` and :math:`q = \sum_i c_i (a_i)_-`, two
    numbers for each network (docs/theory/equivalence.md, 5.1). So J and its gradient take two products of matrices and
    the chain rule through p and q, up to rounding those of :class:`VmapPopulation`, which computes steps with other
    losses, with separate batches, or under autocast.
    """

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss,
        *,
        shared: bool = False,
        skip: frozenset[int] = frozenset(),
        draw: int = 0,
    ) -> PopulationStep:
        shape = (len(self), len(inputs))
        plain = shared and not skip and type(loss) is SquaredDistance and targets.shape == (len(inputs), 1)
        a, c = (parameter.detach().view(len(self), -1) for parameter in self.trainable())
        if not plain or inputs.dtype != a.dtype or torch.is_autocast_enabled(inputs.device.type):
            return super().step(inputs, targets, loss, shared=shared, skip=skip, draw=draw)
        both, x = torch.stack([a, -a]).relu(), inputs.detach().view(-1)  # both has a_+ and a_-
        halves = torch.stack([x, -x]).relu()
        outputs = (both * c).sum(2).T @ halves
        rest = outputs - targets.view(-1)
        slopes = (halves @ rest.T).mul_(2 / len(x))[:, :, None]  # by p and q
        signs = (both > 0).to(a)
        incoming = slopes[0] * signs[0] - slopes[1] * signs[1]
        gradients = [c * incoming, (slopes * both).sum(0)]
        return PopulationStep(
            losses=rest.square().sum(1) / len(x),
            gradients=[own.view_as(one) for own, one in zip(gradients, self.trainable(), strict=True)],
            outputs=outputs.view(*shape, 1),
        )
