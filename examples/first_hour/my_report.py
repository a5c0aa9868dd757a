"""Your report, in a file of the current folder."""

from lightning_sym.callbacks import RunReport
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports import Column, Report


class SizeReport(RunReport):
    """Report the norms of the layers of the first member of a zoo."""

    needs = ("population",)
    example = "ZooTask"
    declared = Report(
        tables={"sizes": "norms of layers"},
        columns=[Column("layer", heading="layer"), Column("norm", heading="norm", number="final/norm/{layer}")],
        charts={"sizes": Chart([Panel([Marks("norm", "layer", kind="bars")])], title="Sizes of {title}")},
        title="Sizes of {title}",
        places={"picture": "sizes.png", "table": "sizes.csv"},
    )

    def measure(self, trainer, task, data):
        weights = task.population.member_state(0).items()
        return {"sizes": [{"layer": name, "norm": float(weight.norm())} for name, weight in weights]}
