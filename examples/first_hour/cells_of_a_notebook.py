# Look at results in a notebook; each paragraph is a cell.
# Have: the network in my_networks.py
# Get: its symmetries as a table of HTML, and a figure that shows itself, here as `page.html` and `figure.png`
from pathlib import Path

import torch
from my_networks import Plain

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.symmetry import trace_symmetry

symmetry = trace_symmetry(Plain(), torch.randn(2, 1, 8, 8))
print(symmetry)
Path("page.html").write_text(symmetry._repr_html_())  # in a notebook the name alone, symmetry, shows it

rows = [{"layer": name, "norm": float(tensor.norm())} for name, tensor in Plain().state_dict().items()]
figure = Chart([Panel([Marks("norm", "layer", kind="bars")], ylabel="norm")], title="Norms").draw(rows)
Path("figure.png").write_bytes(figure._repr_png_())
