"""Stitching: cut networks, joined by trainable stitching layers, and families of these layers."""

from lightning_sym._exports import exported
from lightning_sym.stitching.maps.base import FittedMap as FittedMap
from lightning_sym.stitching.maps.base import Port as Port
from lightning_sym.stitching.maps.base import StitchingMap as StitchingMap
from lightning_sym.stitching.maps.birkhoff import nearest_permutation as nearest_permutation
from lightning_sym.stitching.maps.birkhoff import project_to_birkhoff as project_to_birkhoff
from lightning_sym.stitching.maps.birkhoff import sinkhorn as sinkhorn
from lightning_sym.stitching.maps.birkhoff import soft_sort as soft_sort
from lightning_sym.stitching.maps.block_maps import BlockMap as BlockMap
from lightning_sym.stitching.maps.block_maps import HeadMap as HeadMap
from lightning_sym.stitching.maps.block_maps import OnesFixingMap as OnesFixingMap
from lightning_sym.stitching.maps.families import STITCHING_MAPS as STITCHING_MAPS
from lightning_sym.stitching.maps.families import stitching_map as stitching_map
from lightning_sym.stitching.maps.group_maps import AssignmentMap as AssignmentMap
from lightning_sym.stitching.maps.group_maps import GroupMap as GroupMap
from lightning_sym.stitching.maps.group_maps import SoftSortMap as SoftSortMap
from lightning_sym.stitching.maps.linear_maps import FixedMap as FixedMap
from lightning_sym.stitching.maps.linear_maps import FullMap as FullMap
from lightning_sym.stitching.maps.linear_maps import IdentityMap as IdentityMap
from lightning_sym.stitching.maps.linear_maps import LassoMap as LassoMap
from lightning_sym.stitching.maps.linear_maps import LeastSquaresMap as LeastSquaresMap
from lightning_sym.stitching.maps.linear_maps import LowRankMap as LowRankMap
from lightning_sym.stitching.maps.linear_maps import OrthogonalMap as OrthogonalMap
from lightning_sym.stitching.maps.linear_maps import ProcrustesMap as ProcrustesMap
from lightning_sym.stitching.maps.moments import FeatureMoments as FeatureMoments
from lightning_sym.stitching.networks import BatchNormMode as BatchNormMode
from lightning_sym.stitching.networks import Crossing as Crossing
from lightning_sym.stitching.networks import CutNetwork as CutNetwork
from lightning_sym.stitching.networks import PlantedStitches as PlantedStitches
from lightning_sym.stitching.networks import Ports as Ports
from lightning_sym.stitching.networks import StitchedNetwork as StitchedNetwork
from lightning_sym.stitching.networks import stitch_ports as stitch_ports

__all__ = exported(globals())
