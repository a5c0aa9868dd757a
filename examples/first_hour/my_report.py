"""Your report, in a file of the current folder."""

from lightning_sym.callbacks import RunReport
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports import Column, Report, averages, grouped


class SizeReport(RunReport):
    """Report the norms of the tensors of the members of a zoo."""

    needs = ("kept_states",)
    example = "ZooTask"
    declared = Report(
        tables={"sizes": "mean norms over members", "sizes_each": "norms of members"},
        columns=[Column("layer", heading="layer"), Column("norm", heading="norm", number="final/norm/{layer}")],
        charts={"sizes": Chart([Panel([Marks("norm", "layer", table="sizes_each")], ylabel="norm")])},
        title="Sizes of {title}",
        places={"picture": "sizes.png", "table": "sizes.csv"},
    )

    def measure(self, trainer, task, data):
        rows = [
            {"member": number, "layer": name, "norm": float(tensor.norm())}
            for number, state in task.kept_states().items()
            for name, tensor in state.items()
        ]
        means = [{**layer, **averages(own, ["norm"])} for layer, own in grouped(rows, "layer")]
        return {"sizes": means, "sizes_each": rows}
