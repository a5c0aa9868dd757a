"""A subclass of laplace-torch's KronLaplace; its import takes seconds, so it is left to those who call to_laplace."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from laplace import KronLaplace
from laplace.curvature.curvature import CurvatureInterface
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lightning_sym.curvature.blocks import Factors, KroneckerBlock
from lightning_sym.symmetry.tracing.graph.capture import copied


class _Unlisted:
    """An attribute that a class does not have although its base class has it."""

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError


class RelaxedLaplace(KronLaplace):
    """A ``KronLaplace`` of given factors; see :func:`lightning_sym.curvature.to_laplace`, which makes it.

    Args:
        network: The network that the factors belong to; copied.
        factors: With ``ffc="shared"``, at the network's present weights.
        precisions: By the parameter's name.
        noise: Sigma; of a regression.
        temperature: Temperature of the posterior.
    """

    # laplace.Laplace(network, likelihood, "all", "kron") picks among all subclasses by this key.
    _key = _Unlisted()

    def __init__(
        self, network: nn.Module, factors: Factors, precisions: Mapping[str, float], noise: float, temperature: float
    ) -> None:
        model = copied(network).eval()
        if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
            model = model.float()  # as the factors
        for name, parameter in model.named_parameters():
            parameter.grad = None
            # Anchor positions and lengthscales have no block: constants.
            parameter.requires_grad_(name in factors.blocks)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        # Sums in double precision end here: laplace-torch takes the network's.
        dtype = next(model.parameters()).dtype
        self._matrices = [_matrices(_rounded(factors.blocks[name], dtype)) for name in names]
        super().__init__(
            model,
            factors.likelihood,
            sigma_noise=noise,
            prior_precision=torch.tensor([precisions[name] for name in names], dtype=torch.float64),
            temperature=temperature,
            backend=CurvatureInterface,  # Jacobians by torch.func; BackPACK's would remove all hooks of the process
        )
        self.mean = parameters_to_vector(self.params).detach()
        self.loss = self.mean.new_tensor(factors.loss_sum * (0.5 if factors.likelihood == "regression" else 1.0))
        self.n_data, self.n_outputs = factors.samples, factors.outputs
        model.output_size = factors.outputs  # type: ignore[assignment]
        self.H_facs = self._kron()
        self.H = self.H_facs.decompose()

    def _init_H(self) -> None:  # noqa: N802
        # laplace-torch's own method dictates shapes, which a 2-d bias does not fit.
        self.H = self._kron()

    def _kron(self) -> Kron:
        # Copies: laplace-torch scales in place.
        kfacs: list[Any] = [[matrix.clone() for matrix in matrices] for matrices in self._matrices]
        return Kron(kfacs)

    def fit(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: the factors cannot be fitted again to other weights or data."""
        raise RuntimeError("This object has its factors already; call to_laplace again for other weights or data.")

    @property
    def posterior_precision(self) -> KronDecomposed:  # type: ignore[override]
        """Curvature over noise and temperature, plus the prior's precision; differentiable in both."""
        assert isinstance(self.H, KronDecomposed)
        # laplace-torch spreads the factor by math.pow, which loses its derivative.
        values: list[Any] = [[own[0] * self._H_factor, *own[1:]] for own in self.H.eigenvalues]
        return KronDecomposed(self.H.eigenvectors, values).__add__(self.prior_precision)


def _rounded(block: KroneckerBlock, dtype: torch.dtype) -> KroneckerBlock:
    inner = None if block.in_factor is None else block.in_factor.to(dtype)
    return replace(block, out_factor=block.out_factor.to(dtype), in_factor=inner)


def _matrices(block: KroneckerBlock) -> list[Tensor]:
    """Return a block as one or two dense matrices, in the order of the parameter's entries."""
    if block.in_factor is None or len(block.dense_sides) == 1:
        return [block.dense()]
    inner = block.in_factor.flatten(0, -3) if block.leading else block.in_factor[None]
    matrices = [block.out_factor, torch.block_diag(*inner)]  # type: ignore[no-untyped-call]
    return matrices[::-1] if block.shared_out_last else matrices
