"""Data of a finished run in, tables, figures and a summary out; no Lightning."""

from lightning_sym.reports.equivalence import equivalence_results
from lightning_sym.reports.evidence import evidence_results
from lightning_sym.reports.matching import matching_results
from lightning_sym.reports.rotation import rotation_results
from lightning_sym.reports.stitching import stitching_results
from lightning_sym.reports.symmetry import SymmetryMeter, monitor_results
from lightning_sym.reports.table import ResultTable, RunResults
from lightning_sym.reports.walk import walk_results
from lightning_sym.reports.zoo import zoo_results

__all__ = [
    "ResultTable",
    "RunResults",
    "SymmetryMeter",
    "equivalence_results",
    "evidence_results",
    "matching_results",
    "monitor_results",
    "rotation_results",
    "stitching_results",
    "walk_results",
    "zoo_results",
]
