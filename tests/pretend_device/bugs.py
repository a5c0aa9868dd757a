"""Bugs that a CPU does not notice, planted one at a time: a scenario has to fail of each, for the right reason.

``python bugs.py`` prints a line for each and ends with 1 if one is missed.
"""

import re
import sys
from typing import Any, NamedTuple
from unittest import mock

import installation

if __name__ == "__main__":
    installation.install()

import torch
from scenarios import attempt, prepare

from lightning_sym import _distributed, networks
from lightning_sym._random import seeded
from lightning_sym.tasks import ZooTask
from lightning_sym.tasks._branches import BranchTask
from lightning_sym.tasks._divergence import Divergence
from lightning_sym.tasks.metrics import PopulationClassification


class Bug(NamedTuple):
    """What stands in place of an attribute, and the scenario that has to fail, with a message that matches."""

    owner: Any
    attribute: str
    instead: Any
    scenario: str
    message: str


def drawn_where_it_stays(seed, make):
    with seeded(seed):
        return make()


BUGS = {
    "metrics that go to numpy from the device": Bug(
        owner=PopulationClassification,
        attribute="values",
        instead=lambda self: {name: value.numpy() for name, value in self.compute().items()},
        scenario="zoo_vmap",
        message="can't convert cuda:0 device type tensor to numpy",
    ),
    "inputs that stay on the CPU": Bug(
        owner=_distributed,
        attribute="device_of",
        instead=lambda network: torch.device("cpu"),
        scenario="stitching",
        message="same device",
    ),
    "frozen networks that are not moved": Bug(
        owner=BranchTask,
        attribute="to_device",
        instead=lambda self, device: None,
        scenario="rotation",
        message="same device",
    ),
    "rows of members that come back in every step": Bug(
        owner=ZooTask,
        attribute="rows",
        instead=lambda self, device: self._rows.to(device).cpu(),
        scenario="zoo_vmap",
        message="steps wait for the device",
    ),
    "losses that are looked at in every step": Bug(
        owner=Divergence, attribute="due", instead=True, scenario="zoo_loop", message="steps wait for the device"
    ),
    "an average of integer buffers": Bug(
        owner=networks,
        attribute="float_average",
        instead=None,  # the default
        scenario="averaged_weights",
        message="Integer division",
    ),
    "initial weights that are drawn on the device": Bug(
        owner=networks.base,
        attribute="_drawn",
        instead=drawn_where_it_stays,
        scenario="zoo_diverging",
        message="not close",
    ),
}


def main():
    prepare()
    missed = False
    for name, bug in BUGS.items():
        with mock.patch.object(bug.owner, bug.attribute, bug.instead):
            error = attempt(bug.scenario)
        found = error is not None and re.search(bug.message, str(error)) is not None
        missed = missed or not found
        print(f"{name}: {'found' if found else 'MISSED'}, {type(error).__name__}: {str(error)[:200]!r}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
