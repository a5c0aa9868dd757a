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
from lightning_sym.curvature.laplace import to_laplace
from lightning_sym.curvature.prior import GaussianPrior
from lightning_sym.curvature.prior_groups import PriorGroups, parameter_groups
from lightning_sym.curvature.rules import Rule, find_rule, register_layer

__all__ = [
    "CurvatureError",
    "EffectiveNumber",
    "EmptyLoaderError",
    "Evidence",
    "EvidenceTerms",
    "Factors",
    "GaussianPrior",
    "KroneckerBlock",
    "NonFiniteError",
    "PrecisionOptimizer",
    "PriorGroups",
    "RelaxedKFAC",
    "RelaxedKFLR",
    "Rule",
    "Spectrum",
    "_layer_rules",
    "factors",
    "find_rule",
    "parameter_groups",
    "register_layer",
    "to_laplace",
]
