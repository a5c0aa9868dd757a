"""How the package is laid out: who may import whom, what is exported, and what is packaged."""

import ast
import functools
import graphlib
import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

from helpers import assert_refused

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "lightning_sym": ROOT / "lightning_sym",
    **{f"lightning_sym.{name}": ROOT / name for name in ("callbacks", "datamodules", "recipes")},
}

# The rooms from the bottom up: what stands in a line may import what stands in it and below. The recipes are files to
# be read; their module only finds them.
LEVELS = [
    {"_agreement", "_checkpoint_files", "_checks", "_claims", "_distributed", "_exports", "_files"}
    | {"_linear_algebra", "_measures", "_notebook", "_random", "_runs", "_statistics", "_tags", "_text", "_trust"}
    | {"recipes"},
    {"layers"},
    {"networks"},
    {"symmetry", "curvature", "weights"},
    {"stitching", "connectivity", "landscape", "similarity", "dissection", "ensembles", "zoo", "population"},
    {"merging", "models", "orbit", "zoo_weights"},
    {"reports", "figures"},
    {"_loading"},
    {"tasks", "datamodules"},
    {"callbacks"},
    {"cli"},
]
# The rooms of the tracer, from the bottom up.
TRACING = ["graph", "affine", "labelling", "normal_form"]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


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


@functools.cache
def imports(file):
    """Return everything that a file imports, wherever in the file: module, name (or none) and level of the import."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module, alias.name, node.level) for alias in node.names]
    return found


def arrows():
    """Return pairs of a module and what it imports of the package, a module or a name of one; functions included."""
    return {
        (source, module if name is None else f"{module}.{name}")
        for source, file in MODULES.items()
        for module, name, _ in imports(file)
        if module.split(".")[0] == "lightning_sym"
    }


def circle(pairs):
    """Return the modules of a circle; none if there is none."""
    targets = {name: set() for name in MODULES}
    for source, target in pairs:
        targets[source].add(target if target in MODULES else target.rpartition(".")[0])
    try:
        graphlib.TopologicalSorter(targets).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_run_down_without_circles_and_past_no_private_name():
    assert not (found := circle(arrows())), f"{' imports '.join(found[::-1])}; import the module, not its package"
    offenders = set()
    for source, target in arrows():
        here, there = room(source), room(target)
        if None in (here, there) or here == there or there == "__version__":
            continue
        if LEVEL[there] > LEVEL[here]:
            offenders.add(f"{source} runs up to {target}")
        private = [index for index, part in enumerate(target.split(".")) if index > 1 and part.startswith("_")]
        if private:
            offenders.add(f"{source} imports the private {'.'.join(target.split('.')[: private[0] + 1])}")
    assert not offenders


def test_imports_within_the_tracer_run_down():
    start = "lightning_sym.symmetry.tracing."
    for source, target in arrows():
        here, there = (name.removeprefix(start).split(".")[0] for name in (source, target))
        if here in TRACING and target.startswith(start):
            assert there in TRACING[: TRACING.index(here) + 1], f"{source} runs up to {target}"


def test_imports_are_absolute_and_only_the_upper_rooms_know_lightning():
    offenders = []
    for name, file in MODULES.items():
        forbidden = {"lightning", "callbacks", "datamodules", "recipes", "tests", "benchmarks"}
        if LEVEL.get(room(name), 0) < LEVEL["_loading"]:
            forbidden |= {"pytorch_lightning", "lightning_fabric"}
        for module, _, level in imports(file):
            if level or module.split(".")[0] in forbidden:
                offenders.append(f"{name} imports {module}")
    assert not offenders


def test_tests_and_benchmarks_import_absolutely():
    for folder in ("tests", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for module, _, level in imports(file):
                assert level == 0, file
                assert module.split(".")[0] not in ("lightning", "callbacks", "datamodules", "recipes"), file


def test_what_is_exported_is_documented():
    offenders = []
    for name, file in MODULES.items():
        if file.name != "__init__.py" or name == "lightning_sym.recipes":  # recipes: functions of its own
            continue
        package = importlib.import_module(name)
        if not package.__doc__:
            offenders.append(name)
        for export in getattr(package, "__all__", []):  # sub-rooms export nothing; ruff sorts
            value = getattr(package, export)
            # In vars: a docstring that is inherited says nothing about the class.
            if (inspect.isclass(value) or inspect.isfunction(value)) and not vars(value).get("__doc__", value.__doc__):
                offenders.append(f"{name}.{export}")
    assert not offenders


def test_public_classes_and_functions_are_documented():
    offenders = [
        f"{name}.{node.name}"
        for name, file in MODULES.items()
        if "lightning_sym._" not in name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert not offenders


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


def test_the_oldest_dependencies_follow_from_their_lower_bounds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    lowest = importlib.import_module("lowest").lowest
    oldest = ["torch==2.11", "jsonargparse[signatures]==4.51"]
    assert lowest(["torch>=2.11", "jsonargparse[signatures]>=4.51,<5"]) == oldest
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(lowest(project["dependencies"])) == len(project["dependencies"])
    assert_refused(lowest, ["torch"], says="torch has no lower bound")


# What belongs to one kind of symmetry: fields of a structure, parts of elements, modules with the classes of factors.
OF_ONE_KIND = {
    *("cell_of", "dense", "dense_places", "gained_of", "gained_places", "half_turns", "magnitudes", "phase_of"),
    *("phases", "planes", "rotated_places", "rotation_of", "rotations", "same", "scale_table", "shifts", "sign_table"),
    *("signs", "tilted_places", "tilts", "turned_places"),
}
ONLY_THERE = OF_ONE_KIND - {"dense", "magnitudes", "planes", "phases", "rotations", "same", "shifts", "signs"}
PARTS = {"dense", "gained", "half_turn", "log_scale", "permutation", "phase", "rotation", "shift", "sign", "tilt"}
HOLDERS = {"structure", "values", "_values"}
ELEMENTS = {"back", "course", "element", "found", "gauge", "identity", "initial", "left", "match", "right", "start"}
KINDS = {"diagonal", "gained", "half_turn", "matrix", "permutation", "phase", "rotation", "shift", "tilt"}


def named_kinds(file):
    """Return by which names of single kinds of symmetry a file knows them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            holder = getattr(node.value, "attr", getattr(node.value, "id", None))
            if node.attr in ONLY_THERE or (node.attr in OF_ONE_KIND and holder in HOLDERS):
                found.add(node.attr)
            if node.attr in PARTS and holder in ELEMENTS:
                found.add(f"element.{node.attr}")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replaced":
            found |= {f"replaced({own.arg})" for own in node.keywords if own.arg in PARTS}
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") in ("factors", "parts"):
            found |= {f"[{node.slice.value}]"} if getattr(node.slice, "value", None) in PARTS else set()
    homes = {f"lightning_sym.symmetry.group.{kind}" for kind in KINDS}
    return found | {f"import {name}" for module, name, _ in imports(file) if module in homes}


def test_kinds_of_symmetry_are_named_by_their_classes_and_what_finds_them():
    """What a kind needs elsewhere is a method of `Factor`, which all others ask in loops."""
    knowing = set()
    for name, file in MODULES.items():
        if not name.startswith(tuple(f"lightning_sym.symmetry.{own}." for own in ("group", "solving", "tracing"))):
            knowing |= {name.removeprefix("lightning_sym.")} if named_kinds(file) else set()
    knowing.discard("symmetry.intertwiners")  # groups of activations, whose elements are of another class
    # The user's view of a symmetry, of its units, and the move that rotates what no other factor does.
    assert knowing == {"symmetry.base", "symmetry.elements", "symmetry.moves.streams"}
