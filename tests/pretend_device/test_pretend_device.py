"""Everything that trains, and every function on networks, on a GPU that is not there; see README.md.

Each test runs a script in a process of its own, as torch cannot be made to forget the device again.
"""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# The pretend device uses interfaces that torch does not promise to keep: these versions were tried.
TRIED = ("2.14", "2.15")

# No tasks and no callbacks that run by themselves.
NOT_RUN = {
    "Calibrated": "what AnalyticLandscapesTask finds",
    "CurveName": "which curve a member of a population is",
    "Dissected": "what a dissection has found",
    "FigureFiles": "chooses how figures are written",
    "FoundWeights": "what a search has found",
    "MemberParallelStrategy": "places members on several processes",
    "PopulationTask": "the base class of tasks with several networks",
    **dict.fromkeys(("PopulationClassification", "PopulationLoss"), "metrics that every population task updates"),
    "RecalibrationTargets": "a protocol",
    "RunReport": "the base class of reports",
    "CrossEntropy": "the loss that the tasks of the scenarios use by themselves",
    **dict.fromkeys(("publish_numbers", "publish_results", "publish_table", "publish_text"), "parts of every report"),
}
ROOMS = (
    "connectivity",
    "curvature",
    "ensembles",
    "landscape",
    "networks",
    "population",
    "stitching",
    "symmetry",
    "zoo",
)
INPUTS = {"inputs", "images", "example", "example_input", "data", "loader", "batches"}


def why_not() -> str:
    """Return why the pretend device cannot be used; empty if it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is no CUDA build"
    if not torch.__version__.startswith(tuple(f"{version}." for version in TRIED)):
        return f"torch {torch.__version__} was not tried, only {', '.join(TRIED)}"
    return ""


@pytest.mark.timeout(900)  # beside other work
@pytest.mark.pretend_device
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("script", ["scenarios.py 0/2", "functions.py", "scenarios.py 1/2", "bugs.py"])
def test_all_is_well_on_the_pretend_device(script: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    line = [sys.executable, *script.split()]
    done = subprocess.run(line, cwd=HERE, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def names_used(script: str) -> set[str]:
    """Return the names that a script uses, beside those that it only imports."""
    tree = ast.parse((HERE / script).read_text())
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("room", ["callbacks", "tasks"])
def test_every_task_and_callback_is_in_a_scenario(room: str) -> None:
    exported = set(importlib.import_module(f"lightning_sym.{room}").__all__)
    assert exported - names_used("scenarios.py") - NOT_RUN.keys() == set()


def test_what_is_not_run_is_still_there_and_not_run() -> None:
    rooms = [importlib.import_module(f"lightning_sym.{room}") for room in ("callbacks", "tasks")]
    exported = {name for room in rooms for name in room.__all__}
    assert NOT_RUN.keys() <= exported
    assert not NOT_RUN.keys() & names_used("scenarios.py")


def takes_network_and_inputs(public: object) -> bool:
    """Return whether a function, or the constructor of a class, has a parameter for each."""
    try:
        parameters = inspect.signature(public).parameters
    except (TypeError, ValueError):  # no callable, or an exception
        return False
    kinds = " ".join(str(parameter.annotation) for parameter in parameters.values())
    return bool(INPUTS & parameters.keys()) and ("Module" in kinds or "Network" in kinds)


# Not compared with the pretend GPU yet.
NOT_COMPARED = {"example_input", "merge_checkpoints", "stream_axes"}


def test_every_function_of_a_network_and_inputs_is_compared() -> None:
    used = names_used("functions.py")
    public = {}
    for room in ROOMS:
        module = importlib.import_module(f"lightning_sym.{room}")
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        public |= {name: getattr(module, name) for name in names}
    found = {name for name, value in public.items() if takes_network_and_inputs(value)}
    assert {"trace_symmetry", "factors", "CutNetwork", "LossSurface", "barrier"} <= found
    assert found - used - NOT_COMPARED == set()
