"""Data of a finished run in, tables, figures and a summary out; no Lightning. One file for each experiment."""

from lightning_sym._exports import exported
from lightning_sym._statistics import bootstrap_over_models as bootstrap_over_models
from lightning_sym._statistics import student_interval as student_interval
from lightning_sym.reports.report import Column as Column
from lightning_sym.reports.report import Report as Report
from lightning_sym.reports.report import ResultTable as ResultTable
from lightning_sym.reports.report import RunResults as RunResults
from lightning_sym.reports.report import averages as averages
from lightning_sym.reports.report import grouped as grouped

__all__ = exported(globals())
