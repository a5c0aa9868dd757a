"""Check that the tangents of one tracer's groups are in the span of another one's, for networks of frozen_groups.

The tracer is that of the Python that runs it; the weights are generic and the same::

    PYTHONPATH=/work/old .venv/bin/python tools/frozen_tangents.py write old/ --only 'timm/vit*'
    .venv/bin/python tools/frozen_tangents.py compare old/    # exits with 1 if a tangent is not in the span
"""

import argparse
import fnmatch
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import frozen_groups
import numpy as np
import torch
from scipy import sparse
from torch import nn

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

# Largest squared residual of a unit tangent in the span, and largest relative eigenvalue that counts as zero.
LEFT, NOTHING = 1e-7, 1e-10
MOST = 3000  # default of the largest dimension of a group


class Tangents(NamedTuple):
    """Unit tangents of parameters alone, as columns, and the kind of each."""

    vectors: sparse.csc_matrix
    kinds: list[str]
    dimension: int


def generic(network: nn.Module) -> nn.Module:
    """Return a network with distinct nonzero weights, in double precision."""
    network, generator = network.double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.05)
    return network


def found_in(name: str) -> Tangents:
    """Return the tangents of one network of the corpus."""
    torch.manual_seed(0)
    network, inputs = frozen_groups.corpus()[name]()
    given, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    symmetry = trace_symmetry(network, *given, check=False, **keywords)
    named, charts = dict(generic(network).named_parameters()), symmetry.structure.charts
    parameters = {name: own.detach().numpy() for name, own in charted(named, charts).items()}
    states = charted(state_tensors(network), charts)
    blocks = [factor.tangents(parameters, states) for factor in symmetry.factors]
    vectors = sparse.hstack(blocks).tocsc()
    kinds = [type(f).__name__ for f, block in zip(symmetry.factors, blocks, strict=True) for _ in range(block.shape[1])]
    lengths = np.sqrt(np.asarray(vectors.multiply(vectors).sum(0)).ravel())
    alive = np.flatnonzero(lengths > NOTHING * lengths.max(initial=0.0))
    vectors = vectors[:, alive] @ sparse.diags(1 / lengths[alive])
    return Tangents(vectors.tocsc(), [kinds[at] for at in alive], symmetry.dimension)


def independent(vectors: sparse.csc_matrix) -> Any:
    """Return the coefficients of an orthonormal basis of the span of some vectors."""
    values, rotation = np.linalg.eigh((vectors.T @ vectors).toarray())
    used = values > NOTHING * values.max(initial=0.0)
    return rotation[:, used] / np.sqrt(values[used])


def outside_of(old: Tangents, new: Tangents) -> Counter[str]:
    """Count the old tangents of each kind outside of the span of the new ones."""
    parts = independent(new.vectors).T @ (new.vectors.T @ old.vectors).toarray()
    lengths = np.asarray(old.vectors.multiply(old.vectors).sum(0)).ravel()
    return Counter(old.kinds[at] for at in np.flatnonzero(lengths - (parts**2).sum(0) > LEFT))


def chosen(only: str, most: int) -> Iterator[str]:
    """Yield the names of the networks that match a pattern and have at most this dimension of the group."""
    for name in frozen_groups.corpus():
        if fnmatch.fnmatch(name, only):
            record = frozen_groups.measured(name, check=False)
            if record.get("dimension", most + 1) <= most:
                yield name


def write(folder: Path, only: str, most: int) -> None:
    """Write the tangents of networks, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen(only, most):
        try:
            own = found_in(name)
        except Exception as error:
            print(f"{name}: {frozen_groups.sentence(error)}", flush=True)
            continue
        own_file = folder / f"{name.replace('/', '__')}.npz"
        vectors = own.vectors
        np.savez(
            own_file,
            name=name,
            kinds=own.kinds,
            dimension=own.dimension,
            shape=vectors.shape,
            data=vectors.data,
            indices=vectors.indices,
            indptr=vectors.indptr,
        )
        print(f"{name}: {own.vectors.shape[1]} tangents", flush=True)


def compare(folder: Path, only: str) -> int:
    """Print the recorded tangents outside of the current span; return 1 if there are any, else 0."""
    counts = Counter[bool]()
    for file in sorted(folder.glob("*.npz")):
        own = np.load(file)
        if fnmatch.fnmatch(name := str(own["name"]), only):
            vectors = sparse.csc_matrix((own["data"], own["indices"], own["indptr"]), own["shape"])
            old, new = Tangents(vectors, own["kinds"].tolist(), int(own["dimension"])), found_in(name)
            left = outside_of(old, new)
            counts[not left] += 1
            what = ", ".join(f"{count} {kind}" for kind, count in left.items()) or "nothing"
            print(f"{name}: dimension {old.dimension} -> {new.dimension}; lost: {what}", flush=True)
    print(f"of {sum(counts.values())} networks, {counts[True]} have all old tangents")
    return int(counts[False] > 0)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="pattern of names, such as 'timm/*'")
    parser.add_argument("--most", type=int, default=MOST, help="dimension of the largest group")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.command == "write":
        write(given.folder, given.only, given.most)
        return 0
    return compare(given.folder, given.only)


if __name__ == "__main__":
    sys.exit(main())
