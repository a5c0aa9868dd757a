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
from lightning_sym.population import Population
from lightning_sym.tasks import ZooTask
from lightning_sym.tasks._branches import BranchTask
from lightning_sym.tasks._stopping import Divergence
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


def made_where_it_stays(self, number):
    with mock.patch.object(networks.base, "_drawn", drawn_where_it_stays):
        return self._make(number)


BUGS = {
    "metrics that go to numpy from the device": Bug(
        *(PopulationClassification, "values", lambda self: {k: v.numpy() for k, v in self.compute().items()}),
        *("zoo_vmap", "can't convert cuda:0 device type tensor to numpy"),
    ),
    "inputs that stay on the CPU": Bug(
        _distributed, "device_of", lambda network: torch.device("cpu"), "stitching", "same device"
    ),
    "frozen networks that are not moved": Bug(
        BranchTask, "to_device", lambda self, device: None, "rotation", "same device"
    ),
    "rows of members that come back in every step": Bug(
        *(ZooTask, "rows", lambda self, device: self._rows.to(device).cpu()),
        *("zoo_vmap", "different devices"),  # sums are added to by rows on their own device only
    ),
    "losses that are looked at in every step": Bug(Divergence, "due", True, "zoo_loop", "steps wait for the device"),
    # None is the default average.
    "an average of integer buffers": Bug(networks, "float_average", None, "averaged_weights", "Integer division"),
    "initial weights that are drawn on the device": Bug(  # a population and a network each prevent it
        Population, "_made", made_where_it_stays, "zoo_diverging", "not close"
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
