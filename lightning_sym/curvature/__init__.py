"""Curvature: Kronecker factors of the Gauss-Newton matrix and the marginal likelihood that follows from them."""

from lightning_sym._exports import exported
from lightning_sym.curvature import layer_rules as layer_rules  # registers the rules of our layers
from lightning_sym.curvature.backpack_engine import RelaxedKFAC as RelaxedKFAC
from lightning_sym.curvature.backpack_engine import RelaxedKFLR as RelaxedKFLR
from lightning_sym.curvature.blocks import CurvatureError as CurvatureError
from lightning_sym.curvature.blocks import EmptyLoaderError as EmptyLoaderError
from lightning_sym.curvature.blocks import Factors as Factors
from lightning_sym.curvature.blocks import KroneckerBlock as KroneckerBlock
from lightning_sym.curvature.blocks import NonFiniteError as NonFiniteError
from lightning_sym.curvature.blocks import Spectrum as Spectrum
from lightning_sym.curvature.engines import factors as factors
from lightning_sym.curvature.evidence import EffectiveNumber as EffectiveNumber
from lightning_sym.curvature.evidence import Evidence as Evidence
from lightning_sym.curvature.evidence import EvidenceTerms as EvidenceTerms
from lightning_sym.curvature.evidence import PrecisionOptimizer as PrecisionOptimizer
from lightning_sym.curvature.jacobians import JacobianRank as JacobianRank
from lightning_sym.curvature.jacobians import input_jacobians as input_jacobians
from lightning_sym.curvature.jacobians import jacobian_rank as jacobian_rank
from lightning_sym.curvature.krylov import EigenPairs as EigenPairs
from lightning_sym.curvature.krylov import Eigenvalue as Eigenvalue
from lightning_sym.curvature.krylov import NotConvergedError as NotConvergedError
from lightning_sym.curvature.krylov import Quadrature as Quadrature
from lightning_sym.curvature.krylov import lanczos as lanczos
from lightning_sym.curvature.krylov import top_eigenpairs as top_eigenpairs
from lightning_sym.curvature.krylov import top_eigenvalue as top_eigenvalue
from lightning_sym.curvature.laplace import to_laplace as to_laplace
from lightning_sym.curvature.modulo_symmetry import ComplementOperator as ComplementOperator
from lightning_sym.curvature.modulo_symmetry import Sharpness as Sharpness
from lightning_sym.curvature.modulo_symmetry import SharpnessModuloSymmetry as SharpnessModuloSymmetry
from lightning_sym.curvature.modulo_symmetry import canonical_operator as canonical_operator
from lightning_sym.curvature.modulo_symmetry import sharpness_modulo_symmetry as sharpness_modulo_symmetry
from lightning_sym.curvature.operators import CurvatureOperator as CurvatureOperator
from lightning_sym.curvature.operators import MatrixOperator as MatrixOperator
from lightning_sym.curvature.operators import SymmetricOperator as SymmetricOperator
from lightning_sym.curvature.operators import directional_curvature as directional_curvature
from lightning_sym.curvature.prior import GaussianPrior as GaussianPrior
from lightning_sym.curvature.prior_groups import PriorGroups as PriorGroups
from lightning_sym.curvature.prior_groups import parameter_groups as parameter_groups
from lightning_sym.curvature.rules import Rule as Rule
from lightning_sym.curvature.rules import find_rule as find_rule
from lightning_sym.curvature.rules import register_layer as register_layer
from lightning_sym.curvature.spectra import NearZero as NearZero
from lightning_sym.curvature.spectra import SpectralDensity as SpectralDensity
from lightning_sym.curvature.spectra import TraceEstimate as TraceEstimate
from lightning_sym.curvature.spectra import near_zero as near_zero
from lightning_sym.curvature.spectra import smoothed as smoothed
from lightning_sym.curvature.spectra import spectral_density as spectral_density
from lightning_sym.curvature.spectra import trace as trace

__all__ = exported(globals())
