"""Curvature: Kronecker factors of the Gauss-Newton matrix and the marginal likelihood that follows from them."""

from lightning_sym.curvature import layer_rules as _layer_rules  # registers the rules of our layers
from lightning_sym.curvature.backpack_engine import RelaxedKFAC, RelaxedKFLR
from lightning_sym.curvature.blocks import (
    CurvatureError,
    EmptyLoaderError,
    Factors,
    KroneckerBlock,
    NonFiniteError,
    Spectrum,
)
from lightning_sym.curvature.engines import factors
from lightning_sym.curvature.evidence import EffectiveNumber, Evidence, EvidenceTerms, PrecisionOptimizer
from lightning_sym.curvature.jacobians import JacobianRank, input_jacobians, jacobian_rank
from lightning_sym.curvature.krylov import (
    EigenPairs,
    Eigenvalue,
    NotConvergedError,
    Quadrature,
    lanczos,
    top_eigenpairs,
    top_eigenvalue,
)
from lightning_sym.curvature.laplace import to_laplace
from lightning_sym.curvature.modulo_symmetry import (
    ComplementOperator,
    Sharpness,
    SharpnessModuloSymmetry,
    canonical_operator,
    sharpness_modulo_symmetry,
)
from lightning_sym.curvature.operators import (
    CurvatureOperator,
    MatrixOperator,
    SymmetricOperator,
    directional_curvature,
)
from lightning_sym.curvature.prior import GaussianPrior
from lightning_sym.curvature.prior_groups import PriorGroups, parameter_groups
from lightning_sym.curvature.rules import Rule, find_rule, register_layer
from lightning_sym.curvature.spectra import (
    NearZero,
    SpectralDensity,
    TraceEstimate,
    near_zero,
    smoothed,
    spectral_density,
    trace,
)

__all__ = [
    "ComplementOperator",
    "CurvatureError",
    "CurvatureOperator",
    "EffectiveNumber",
    "EigenPairs",
    "Eigenvalue",
    "EmptyLoaderError",
    "Evidence",
    "EvidenceTerms",
    "Factors",
    "GaussianPrior",
    "JacobianRank",
    "KroneckerBlock",
    "MatrixOperator",
    "NearZero",
    "NonFiniteError",
    "NotConvergedError",
    "PrecisionOptimizer",
    "PriorGroups",
    "Quadrature",
    "RelaxedKFAC",
    "RelaxedKFLR",
    "Rule",
    "Sharpness",
    "SharpnessModuloSymmetry",
    "SpectralDensity",
    "Spectrum",
    "SymmetricOperator",
    "TraceEstimate",
    "_layer_rules",
    "canonical_operator",
    "directional_curvature",
    "factors",
    "find_rule",
    "input_jacobians",
    "jacobian_rank",
    "lanczos",
    "near_zero",
    "parameter_groups",
    "register_layer",
    "sharpness_modulo_symmetry",
    "smoothed",
    "spectral_density",
    "to_laplace",
    "top_eigenpairs",
    "top_eigenvalue",
    "trace",
]
