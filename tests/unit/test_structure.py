"""How the package is laid out: who may import whom, what is exported, and what is packaged."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "lightning_sym": ROOT / "lightning_sym",
    **{f"lightning_sym.{name}": ROOT / name for name in ("callbacks", "datamodules", "recipes")},
}

# Each room and the rooms that it may import from, besides itself; from the bottom up.
HELPERS = {"_distributed", "_files", "_random", "_statistics", "_text"}
NUMERICS = {"symmetry", "curvature", "similarity", "landscape"}
ARROWS: dict[str, set[str]] = {
    "_distributed": set(),
    "_files": set(),
    "_random": set(),
    "_statistics": set(),
    "_text": set(),
    "layers": HELPERS,
    "networks": {"layers", *HELPERS},
    **{room: {"layers", "networks", *NUMERICS, *HELPERS} for room in NUMERICS},
    "stitching": {"layers", "networks", *NUMERICS, *HELPERS},
    "connectivity": {"layers", "networks", *NUMERICS, *HELPERS},
    "population": {"layers", "networks", *NUMERICS, *HELPERS},
    "zoo": {"layers", "networks", *NUMERICS, *HELPERS},
    "figures": HELPERS,
    "datamodules": {"figures", "layers", "networks", *NUMERICS, *HELPERS},
}
BELOW = set(ARROWS)
ARROWS |= {
    "tasks": BELOW,
    "callbacks": {"tasks", *BELOW},
    "cli": {"callbacks", "tasks", "recipes", *BELOW},
    "recipes": {"cli", *HELPERS},
}
WITHOUT_LIGHTNING = {
    "layers",
    "networks",
    *NUMERICS,
    "population",
    "stitching",
    "connectivity",
    "figures",
    "zoo",
    "recipes",
    *HELPERS,
}


def modules():
    """Yield the dotted name and the file of every module of the package."""
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), file


MODULES = dict(modules())


def room(name):
    """Return the room that a module is in; None for the package itself."""
    return name.split(".")[1] if "." in name else None


def natural(name):
    """Return the key by which constants come first and CIFAR10 before CIFAR100, as ruff sorts."""
    constant = name.isupper() and "_" in name
    return [not constant, *(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))]


def imports(file):
    """Yield everything that a file imports, wherever in the file: dotted names and the level of the import."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.level) for alias in node.names)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    for target, level in imports(MODULES[name]):
        assert level == 0, "imports are absolute"
        top = target.split(".")[0]
        assert top not in ("lightning", "callbacks", "datamodules", "recipes", "tests", "benchmarks")
        if room(name) in WITHOUT_LIGHTNING | {None}:
            assert top not in ("pytorch_lightning", "lightning_fabric")
        if top == "lightning_sym" and target != "lightning_sym.__version__":
            assert room(target) in {room(name), *ARROWS[room(name)]}, f"{name} imports {target}"


def test_tests_and_benchmarks_import_absolutely():
    for folder in ("tests", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for target, level in imports(file):
                assert level == 0, file
                assert target.split(".")[0] not in ("lightning", "callbacks", "datamodules", "recipes"), file


@pytest.mark.parametrize("name", [name for name, file in MODULES.items() if file.name == "__init__.py"])
def test_what_is_exported_is_sorted_and_documented(name):
    package = importlib.import_module(name)
    assert package.__doc__
    if name == "lightning_sym.recipes":  # functions of its own
        return
    exported = getattr(package, "__all__", [])  # a sub-room exports nothing itself
    assert exported == sorted(exported, key=natural)
    for export in exported:
        value = getattr(package, export)
        if inspect.isclass(value):
            # In vars: a docstring that is inherited says nothing about the class.
            assert vars(value).get("__doc__"), export
        elif inspect.isfunction(value):
            assert value.__doc__, export


@pytest.mark.parametrize("name", [name for name in MODULES if "lightning_sym._" not in name])
def test_public_classes_are_documented(name):
    for node in ast.parse(MODULES[name].read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}.{node.name}"


def test_all_packages_are_in_the_wheel_and_only_they():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join([package, *folder.relative_to(top).parts]): folder
        for package, top in FOLDERS.items()
        for folder in [top, *top.rglob("*")]
        if (folder / "__init__.py").is_file()
    }
    assert project["packages"] == sorted(found)
    for package, folder in FOLDERS.items():
        assert project["package-dir"][package] == folder.relative_to(ROOT).as_posix()


def test_importing_the_package_loads_nothing_heavy():
    heavy = "('torch', 'numpy', 'pytorch_lightning', 'matplotlib', 'sklearn', 'jsonargparse')"
    names = "lightning_sym, lightning_sym.cli, lightning_sym.recipes"
    code = f"import sys, {names}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[]\n"
