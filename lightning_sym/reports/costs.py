"""Estimate the cost of a run from the times of its parts; docs/scaling-out.md has the formulas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_sym.reports.report import ResultTable

UNITS = {
    "times": "how often the part comes in a whole run",
    "each": "seconds of the wall clock, once",
    "wall": "seconds of the wall clock, in all",
    "cpu": "seconds of the processor, in all; more than one thread counts several times",
    "seconds": "of the wall clock, of the whole run, each device as fast as this one",
    "speedup": "over one device",
    "sent": "bytes that each process sends over the network, of gradients (ddp) or of weights at the end (ddp_members)",
}


@dataclass(frozen=True)
class Times:
    """Seconds of one part of a run.

    Attributes:
        wall: Seconds of the wall clock.
        cpu: Seconds of the processor.
    """

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Times") -> "Times":
        return Times(self.wall - other.wall, self.cpu - other.cpu)

    def __mul__(self, factor: float) -> "Times":
        return Times(self.wall * factor, self.cpu * factor)

    @classmethod
    def mean(cls, several: Sequence["Times"]) -> "Times":
        """Return the mean; nothing of none."""
        return sum(several, cls()) * (1 / max(len(several), 1))


@dataclass(frozen=True)
class Network:
    """Network between devices.

    Attributes:
        bandwidth: Bytes per second that a process sends, and receives, at once.
        latency: Seconds of one message.
    """

    bandwidth: float = 25e9
    latency: float = 1e-5


@dataclass(frozen=True)
class RunCosts:
    """Times and counts of the parts of a run.

    Attributes:
        start: Everything before the first step.
        step: One training step.
        steps: Steps of an epoch.
        epochs: Epochs.
        validation: One validation.
        validations: How many there are.
        epoch: Work once per epoch apart from steps and validation.
        periodic: Work of callbacks after some epochs, by their names, and its count.
        after: Everything after the last epoch: tests, reports, figures.
        gradients: Bytes of all gradients of a step.
        members: Members of the population; 1 for another task.
    """

    start: Times
    step: Times
    steps: int
    epochs: int
    validation: Times
    validations: int
    epoch: Times
    after: Times
    periodic: Mapping[str, tuple[Times, int]] = field(default_factory=dict)
    gradients: int = 0
    members: int = 1

    def parts(self) -> dict[str, tuple[Times, int]]:
        """Return each part's time and how often it comes."""
        return {
            "start": (self.start, 1),
            "training step": (self.step, self.steps * self.epochs),
            "validation": (self.validation, self.validations),
            "rest of an epoch": (self.epoch, self.epochs),
            **self.periodic,
            "after training": (self.after, 1),
        }

    @property
    def total(self) -> Times:
        """The whole run on one device."""
        return sum((each * times for each, times in self.parts().values()), Times())


def cost_table(costs: RunCosts, what: str) -> ResultTable:
    """Return a row for each part and one for all.

    Args:
        costs: Measured times.
        what: Description of the run.
    """
    rows = [
        {"part": name, "times": times, "each": each.wall, "wall": each.wall * times, "cpu": each.cpu * times}
        for name, (each, times) in costs.parts().items()
        if times
    ]
    total = costs.total
    rows.append({"part": "all", "times": 1, "each": total.wall, "wall": total.wall, "cpu": total.cpu})
    return ResultTable("costs", what, rows, UNITS)


def sharing_table(costs: RunCosts, devices: int, network: Network | None = None) -> ResultTable:
    r"""Estimate the cost of the run on several devices like this one, by strategy.

    With ``ddp`` a process takes every ``N``-th batch: :math:`\lceil S / N \rceil` steps of an epoch, each followed by a
    ring all-reduce of the gradients. It takes :math:`2 (N - 1) / N \cdot G / b + 2 (N - 1) \ell` seconds, without
    overlap. Validation and callbacks after epochs take an ``N``-th. With ``ddp_members`` a process has
    :math:`\lceil M / N \rceil` of ``M`` members. Steps, validation and callbacks take that share; weights of the
    others are sent at the end. The start, the rest of an epoch, and the work after training take as long as on one.

    Args:
        costs: Times measured on one device.
        devices: How many, >= 1.
        network: Network between them.
    """
    network = network or Network()
    rows = [{"strategy": "one device", "devices": 1, "seconds": costs.total.wall, "speedup": 1.0, "sent": 0.0}]
    steps = math.ceil(costs.steps / devices) * costs.epochs
    sent = 2 * (devices - 1) / devices * costs.gradients
    reduced = sent / network.bandwidth + 2 * (devices - 1) * network.latency
    share = math.ceil(costs.members / devices) / costs.members
    plans = [("ddp", 1 / devices, steps, reduced, steps * sent)]
    if costs.members > 1:
        whole = costs.steps * costs.epochs
        plans.append(("ddp_members", share, round(whole * share), 0.0, (1 - share) * costs.gradients))
    for strategy, part, count, more, traffic in plans:
        callbacks = sum(each.wall * times for each, times in costs.periodic.values())
        fixed = costs.start.wall + costs.epochs * costs.epoch.wall + costs.after.wall
        seconds = (
            fixed + count * (costs.step.wall + more) + part * (costs.validation.wall * costs.validations + callbacks)
        )
        rows.append(
            {
                "strategy": strategy,
                "devices": devices,
                "seconds": seconds,
                "speedup": costs.total.wall / seconds,
                "sent": float(traffic),
            }
        )
    about = {"bandwidth": network.bandwidth, "latency": network.latency}
    return ResultTable("sharing", f"on {devices} devices like this one", rows, UNITS, about)
