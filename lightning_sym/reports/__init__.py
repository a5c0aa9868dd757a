"""Data of a finished run in, tables, figures and a summary out; no Lightning. One file for each experiment."""

from lightning_sym._statistics import bootstrap_over_models, student_interval
from lightning_sym.reports.report import Column, Report
from lightning_sym.reports.table import ResultTable, RunResults

__all__ = ["Column", "Report", "ResultTable", "RunResults", "bootstrap_over_models", "student_interval"]
