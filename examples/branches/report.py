"""The barrier between the trunk and each branch."""

from matplotlib.figure import Figure

from lightning_sym.callbacks import RunReport
from lightning_sym.connectivity import barrier
from lightning_sym.reports import ResultTable, RunResults

UNITS = {
    "left_after": "epochs",
    "distance": "Euclidean, of all parameters",
    "loss_barrier": "nats, on test images: above the mean of both ends",
}


class BranchReport(RunReport):
    """Measure the barriers between the trunk and its branches."""

    needs = ("leave", "kept", "network")  # any task that has these will do
    example = "BranchTask"

    def __init__(self, points: int = 11, dirpath: str | None = None):
        super().__init__(dirpath)
        self.points = points

    def measure(self, trainer, task, data):
        networks = []
        for number in sorted(task.kept):
            networks.append(task.network.fresh(0).eval())
            networks[-1].load_state_dict(task.kept[number]["state"])
        trunk, *branches = networks
        return networks, [barrier(trunk, branch, data.test_dataloader(), points=self.points) for branch in branches]

    def report(self, trainer, task, data, measured):
        (trunk, *branches), lines = measured
        rows = [
            {"left_after": epochs, "distance": distance(trunk, branch), "loss_barrier": line.loss_barrier}
            for epochs, branch, line in zip(task.leave, branches, lines, strict=True)
        ]
        title, about = "a trunk and its branches", self.source(data)
        return RunResults(
            [ResultTable("branches", title, rows, UNITS, about)],
            figures=[("branches", draw(rows))],
            numbers={"final/barrier_of_the_first": rows[0]["loss_barrier"]},
            headline="final/barrier_of_the_first",
            places={"picture": "branches.png", "table": "branches.csv"},
        )


def distance(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    squares = [(one - two).detach().square().sum() for one, two in pairs]
    return float(sum(squares).sqrt())


def draw(rows):
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["left_after"] for row in rows], [row["loss_barrier"] for row in rows], marker="o")
    axes.set(xlabel="epochs together", ylabel="barrier, nats")
    return figure
