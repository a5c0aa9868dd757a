"""Exports that are imported when they are first used."""

import importlib
import subprocess
import sys

import pytest

import lightning_sym.symmetry


def test_a_package_and_its_first_name_load_no_more_than_they_need():
    code = (
        "import sys, lightning_sym.symmetry; print('torch' in sys.modules); "
        "from lightning_sym.symmetry import trace_symmetry; "
        "print([name for name in ('scipy.optimize', 'scipy.linalg', 'rich.progress') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split("\n")[:2] == ["False", "[]"]


def test_a_package_exports_what_it_imports_as_itself():
    package = importlib.import_module("lightning_sym.reports")
    assert package.__all__ == ["Column", "Report", "ResultTable", "RunResults", "averages", "bootstrap_over_models",
                               "grouped", "student_interval"]  # fmt: skip
    assert "exported" not in package.__all__


def test_every_export_is_found_and_is_what_its_module_has():
    package = lightning_sym.symmetry
    assert set(package.__all__) <= set(dir(package))
    assert package.trace_symmetry is importlib.import_module("lightning_sym.symmetry.trace").trace_symmetry
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=r"'lightning_sym\.symmetry' has no attribute 'trace_symetry'"):
        _ = package.trace_symetry
