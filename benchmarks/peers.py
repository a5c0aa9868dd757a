"""Time and accuracy compared with other packages, in one process.

Variants take turns, so that drifts in the machine's speed affect all. Seconds are processor time of one thread. Run it
alone on the machine, with the packages below installed (those of the extra "test" are enough for the first five)::

    python benchmarks/peers.py                        # every peer, about five minutes
    python benchmarks/peers.py --only rebasin ckatorch
    python benchmarks/peers.py --check                # the short ones, compared with the stored ratios (make bench)
    python benchmarks/peers.py --folder modelsym=~/modelsym ella=~/ella

Without ``--only`` and ``--check`` it writes ``benchmarks/results/peers-cpu.json`` and ``.md``. A peer that is not there
is a section that says how to get it. Code of papers without a package is run from the folder that ``--folder`` names,
at the version that git gives there, else the folder's name.

``--check`` ends with exit status 1 if the median ratio of a peer has become larger than the stored one by more than the
stored spread over rounds.

Inputs and networks are the same for both. The errors are those of results in single precision, relative to double
precision, unless the table says something else.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import logging
import math
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _timing import PARTS, RESULTS, parser, timed, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Number = Callable[[Any], float]


@dataclass(frozen=True)
class Case:
    """A task that a peer and this package solve.

    Attributes:
        title: The task.
        theirs: Computes it by the peer.
        ours: Computes it by this package.
        error: How far a result is from the truth.
        accuracy: Name of ``error``, as in "relative error".
    """

    title: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    error: Number
    accuracy: str = "relative error"


@dataclass(frozen=True)
class Peer:
    """A package, or the code of a paper in a folder.

    Attributes:
        cases: Return the cases, given the module ``file`` of a folder or None.
        needs: Modules that have to be importable.
        package: Its name for pip; None for code in a folder.
        file: The file in the folder that has the code.
        short: Whether ``--check`` runs it.
    """

    cases: Callable[[Any], list[Case]]
    needs: tuple[str, ...] = ()
    package: str | None = None
    file: str = ""
    short: bool = True


def relative(truth: Any) -> Number:
    """Return the function that gives the error relative to a number or tensor, in norms."""
    exact = torch.as_tensor(truth, dtype=torch.float64)
    return lambda value: float((torch.as_tensor(value, dtype=torch.float64).detach() - exact).norm() / exact.norm())


# ---- packages


def _laplace(_: Any) -> list[Case]:
    from backpack import extend
    from laplace import KronLaplace
    from laplace.curvature.backpack import BackPackGGN

    from lightning_sym.curvature import Evidence, factors, parameter_groups

    _, images, labels = _cnn()
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )

    def theirs(dtype: torch.dtype = torch.float32) -> float:
        found = KronLaplace(extend(copy.deepcopy(network).to(dtype)), "classification", backend=BackPackGGN)
        found.fit(DataLoader(TensorDataset(images.to(dtype), labels), batch_size=128))
        return float(found.log_marginal_likelihood())

    def ours() -> float:
        batches = list(zip(images.split(128), labels.split(128), strict=True))
        groups = parameter_groups(network, "per_tensor")
        found = Evidence.of(network, factors(network, batches), groups)
        return float(found.log_marginal_likelihood(torch.zeros(len(groups.names))))

    title = "evidence by Kronecker factors, MLP of 17,000 weights, 512 images (their engine: BackPACK)"
    return [Case(title, theirs, ours, relative(theirs(torch.float64)))]


def _cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a CNN of 19,000 weights that has learned 512 noisy patterns, with these."""
    from spectra import convolutional

    torch.manual_seed(0)
    model, generator = convolutional(), torch.Generator().manual_seed(1)
    labels = torch.randint(10, (512,), generator=generator)
    patterns = torch.randn(10, 1, 8, 8, generator=generator)
    images = patterns[labels] + 0.7 * torch.randn(512, 1, 8, 8, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model, images, labels


def _curvlinops(_: Any) -> list[Case]:
    from curvlinops import HessianLinearOperator

    from lightning_sym.curvature import CurvatureOperator

    network, *data = _cnn()
    ours = CurvatureOperator(network, data, F.cross_entropy, check=False)
    exact = CurvatureOperator(network, data, F.cross_entropy, check=False, dtype=torch.float64)
    vectors = torch.randn(10, ours.size, generator=torch.Generator().manual_seed(0))
    theirs = HessianLinearOperator(
        network, nn.CrossEntropyLoss(), list(network.parameters()), [tuple(data)], check_deterministic=False
    )

    def products(operator: Any) -> Tensor:
        return torch.stack([operator @ vector for vector in vectors])

    truth = torch.stack([exact @ vector.double() for vector in vectors])
    title = "10 Hessian products, one by one, CNN of 19,000 weights, 512 images"
    return [Case(title, partial(products, theirs), partial(products, ours), relative(truth))]


def _eigenthings(_: Any) -> list[Case]:
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    from lightning_sym.curvature import CurvatureOperator, top_eigenpairs

    network, *data = _cnn()
    operator = partial(CurvatureOperator, network, data, F.cross_entropy)
    error = relative(top_eigenpairs(operator(dtype=torch.float64), tolerance=1e-6).values[0])

    def ours() -> float:
        return float(top_eigenpairs(operator(), tolerance=2e-2).values[0])

    def theirs(steps: int) -> float:
        other = HessianOperator(network, [tuple(data)], supervised_loss(F.cross_entropy))
        return float(lanczos(other, k=1, max_iter=steps, which="LA", seed=0, reorthogonalize=True).eigenvalues[0])

    # They get as few steps as they need to be as accurate as ours.
    own = error(ours())
    steps = next((steps for steps in range(4, 40) if error(theirs(steps)) <= own), 40)
    title = f"top Hessian eigenvalue, CNN of 19,000 weights, 512 images (they: {steps} steps of Lanczos)"
    return [Case(title, partial(theirs, steps), ours, error)]


def _pyhessian(_: Any) -> list[Case]:
    from pyhessian import hessian
    from spectra import CASES, trained

    from lightning_sym.curvature import CurvatureOperator, trace

    def their(network: nn.Module, data: Sequence[Tensor]) -> Any:
        return hessian(network, nn.CrossEntropyLoss(), data=tuple(data), cuda=False)

    network, *data = _cnn()
    operator = partial(CurvatureOperator, network, data, F.cross_entropy)
    seeds = range(2)

    def their_traces() -> list[float]:
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            found.append(their(network, data).trace())
        return [sum(values) / len(values) for values in found]

    def our_traces() -> list[float]:
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]
        return [trace(operator(), 2, method="per_sample", generator=source).value for source in sources]

    exact = trace(operator(dtype=torch.float64), 10, method="per_sample").value
    network_is = "CNN of 19,000 weights, 512 images"
    networks = {network_is: (network, *data), **{name: trained(name) for name in CASES}}
    return [
        *(_their_top(name, their, *of) for name, of in networks.items()),
        Case(
            f"trace of the Hessian, {network_is}, {len(seeds)} seeds",
            their_traces,
            our_traces,
            relative([exact] * len(seeds)),
        ),
    ]


def _their_top(name: str, their: Callable[..., Any], network: nn.Module, *data: Tensor) -> Case:
    """Return the case of PyHessian's top eigenvalue. Its tolerance is the largest that makes it as accurate as ours."""
    from lightning_sym.curvature import CurvatureOperator, top_eigenpairs, top_eigenvalue

    operator = partial(CurvatureOperator, network, data, F.cross_entropy)
    error = relative(top_eigenpairs(operator(dtype=torch.float64), tolerance=1e-6).values[0])

    def ours() -> float:
        return top_eigenvalue(operator()).value

    def theirs(tolerance: float) -> float:
        torch.manual_seed(0)
        return float(their(network, data).eigenvalues(100, tolerance)[0][0])

    own = error(ours())
    tolerance = next((t for t in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6) if error(theirs(t)) <= own), 1e-6)
    title = f"top Hessian eigenvalue, {name} (their tolerance {tolerance:.0e})"
    return Case(title, partial(theirs, tolerance), ours, error)


def _torch_pruning(_: Any) -> list[Case]:
    import torch_pruning
    from torchvision.models import resnet18

    from lightning_sym.symmetry import trace_symmetry

    torch.manual_seed(0)
    network, images = resnet18(weights=None).eval(), torch.randn(1, 3, 64, 64)

    def theirs() -> int:
        graph = torch_pruning.DependencyGraph().build_dependency(network, images)
        return len(list(graph.get_all_groups(ignored_layers=[network.fc])))

    def ours() -> int:
        return len(trace_symmetry(network, images, check=False).groups)

    # Two convolutions in each of the 8 blocks have outputs; those of the second ones, of the first layer and of the
    # shortcuts are tied within each of 4 stages.
    title = "channels of ResNet-18 that have to be removed or permuted together (ours without its self-test)"
    return [Case(title, theirs, ours, lambda groups: abs(groups - 12), "wrong groups of 12")]


def _perceptrons(hidden: int, layers: int) -> tuple[nn.Module, nn.Module]:
    """Return two networks with random weights and layers named layer0, layer1 and so on."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = [784, *[hidden] * layers, 10]
        network = nn.Sequential()
        for number in range(layers + 1):
            network.add_module(f"layer{number}", nn.Linear(sizes[number], sizes[number + 1]))
            if number < layers:
                network.add_module(f"relu{number}", nn.ReLU())
        found.append(network)
    return found[0], found[1]


def _distance(a: nn.Module, b: Mapping[str, Tensor]) -> float:
    squares = [(parameter.detach() - b[name]).double().square().sum() for name, parameter in a.named_parameters()]
    return math.sqrt(sum(map(float, squares)))


def _matched(a: nn.Module, b: nn.Module) -> dict[str, Tensor]:
    from lightning_sym.symmetry import trace_symmetry, weight_matching

    symmetry = trace_symmetry(a, torch.randn(2, 784), check=False)
    return weight_matching(symmetry, a, b, scales=False, signs=False).network.state_dict()


def _rebasin(_: Any) -> list[Case]:
    from rebasin import PermutationCoordinateDescent

    a, b = _perceptrons(256, 3)

    def theirs() -> dict[str, Tensor]:
        torch.manual_seed(0)
        moved = copy.deepcopy(b)
        PermutationCoordinateDescent(a, moved, torch.randn(2, 784)).rebasin()
        return moved.state_dict()

    title = "tracing, and matching by permutations, of two random MLPs of 3 x 256 units"
    return [Case(title, theirs, partial(_matched, a, b), partial(_distance, a), "distance of weights")]


def _features() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 1024, generator=source).relu()
    return x, (0.5 * x + torch.randn(2000, 1024, generator=source)).relu()


def _our_cka(x: Tensor, y: Tensor) -> float:
    from lightning_sym.similarity import CKA

    metric = CKA()
    metric.update(x, y)
    return float(metric.compute())


def _cka(theirs: Callable[[Tensor, Tensor], Tensor]) -> Case:
    x, y = _features()
    truth = float(theirs(x.double(), y.double()))
    title = "linear CKA, unbiased, 2,000 images, 1,024 features"
    return Case(title, partial(theirs, x, y), partial(_our_cka, x, y), relative(truth))


def _pytorch_cka(_: Any) -> list[Case]:
    from cka import cka_from_features, compute_cka

    from lightning_sym.networks import MyrtleCNN
    from lightning_sym.similarity import CKA, SimilarityMatrix, features_of

    source = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 1000, 64, 8, 8, generator=source)
    y += x
    images = torch.rand(500, 1, 28, 28, generator=source).split(100)
    networks = [MyrtleCNN(16, in_channels=1, image_size=28).fresh(seed).eval() for seed in (0, 1)]
    sites = [f"{kind}{block}" for block in range(1, 5) for kind in ("conv", "activation")]

    def whole(x: Tensor, y: Tensor) -> float:
        return float(cka_from_features(x.flatten(1), y.flatten(1)))

    def theirs() -> Tensor:
        value: Tensor = compute_cka(*networks, [list(images)], layers=sites, device="cpu", progress=False)[0]
        return value

    def ours(models: Sequence[nn.Module] = networks, dtype: torch.dtype = torch.float32) -> Tensor:
        found = SimilarityMatrix(CKA(estimator="minibatch"), sites)
        for batch in images:
            found.update(*(features_of(model, sites, batch.to(dtype)) for model in models))
        value: Tensor = found.compute()
        return value

    exact = [copy.deepcopy(network).double() for network in networks]
    features = "linear CKA, unbiased, features of 1,000 x 64 x 8 x 8"
    pairs = "linear CKA, unbiased, all pairs of 8 layers of two CNNs, 500 images, with the forward passes"
    return [
        _cka(cka_from_features),
        Case(features, partial(whole, x, y), partial(_our_cka, x, y), relative(_our_cka(x.double(), y.double()))),
        Case(pairs, theirs, ours, relative(ours(exact, torch.float64))),
    ]


def _ckatorch(_: Any) -> list[Case]:
    from ckatorch import cka_base

    return [_cka(partial(cka_base, unbiased=True))]


def _devinterp(_: Any) -> list[Case]:
    from devinterp.slt.llc import llc

    from lightning_sym.landscape import learning_coefficient

    # Least squares: the stationary distribution of SGLD at a finite step is known.
    source = torch.Generator().manual_seed(0)
    x, count, chains, steps = torch.randn(64, 20, generator=source), 20, 4, 300
    network = nn.Linear(count, 1, bias=False)
    targets = network(x).detach()
    curvatures = torch.linalg.eigvalsh((2 * x.T @ x / len(x)).double())
    temperature, localisation, step = 1e3, 10.0, 2e-4
    pull = temperature * curvatures + localisation
    variances = step / (1 - (1 - step / 2 * pull).square())
    exact = float((temperature / 2 * curvatures * variances).sum())

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return (model(x[rows[:, 0]]) - targets[rows[:, 0]]).square()

    def theirs() -> float:
        data = [{"input_ids": torch.full((2,), row)} for row in range(len(x))]
        settings = {"num_chains": chains, "num_draws": steps, "batch_size": len(x), "num_init_loss_batches": 1}
        with tempfile.TemporaryDirectory() as folder:
            found = llc(
                network,
                data,
                {},
                lr=step,
                n_beta=temperature,
                localization=localisation,
                loss_fn=loss,
                device="cpu",
                output_path=Path(folder) / "samples.zarr",
                **settings,
            )
        return float(found["llc_per_chain"].values.mean())

    def ours() -> float:
        settings: Any = {
            "step": step,
            "inverse_temperature": temperature,
            "localisation": localisation,
            "method": "sgld",
        }
        batch = [(x, targets)]
        found = learning_coefficient(network, batch, F.mse_loss, chains=chains, steps=steps, **settings)
        return float(found.chain_means.mean())

    title = f"learning coefficient of least squares, {count} weights, {chains} chains of {steps} steps of SGLD"
    return [Case(title, theirs, ours, relative(exact), "relative error, from chance too")]


# ---- code of papers, in folders


def _modelsym(code: Any) -> list[Case]:
    from lightning_sym.similarity import CKA, GroupProcrustes

    source = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, 8, 8, generator=source).relu()
    y = (0.5 * x.roll(1, 1) + torch.randn(x.shape, generator=source)).relu()

    def theirs(similarity: Callable[..., Tensor]) -> float:
        # Today's torch.linalg.norm refuses the three axes that theirs sums over. CKA changes its inputs.
        with patch("torch.linalg.norm", torch.linalg.vector_norm):
            return float(similarity([x.clone()], [y.clone()], progress=False))

    def ours(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> float:
        metric = make()
        metric.update(x.to(dtype), y.to(dtype))
        return float(metric.compute())

    cka, procrustes = partial(CKA, "max"), partial(GroupProcrustes, "relu")
    images = "500 images, 64 x 8 x 8 features"
    # Their results are in single precision for any inputs: the truth is ours in double precision.
    pairs = (
        ("CKA with the maximum kernel", code.wreath_cka, cka),
        ("Procrustes for the group of ReLU", code.wreath_procrustes, procrustes),
    )
    return [
        Case(f"{what}, {images}", partial(theirs, other), partial(ours, own), relative(ours(own, torch.float64)))
        for what, other, own in pairs
    ]


def _linear_layers() -> None:
    """Stand in for the layers of the authors' fork of asdfghjkl, which are torch's in the forward pass."""
    if "asdfghjkl" not in sys.modules and importlib.util.find_spec("asdfghjkl") is None:
        names = ["asdfghjkl", "asdfghjkl.operations", "asdfghjkl.operations.linear2d"]
        sys.modules.update({name: types.ModuleType(name) for name in names})
        sys.modules[names[-1]].LinearUV = nn.Linear  # type: ignore[attr-defined]


def _ella(code: Any) -> list[Case]:
    from lightning_sym.layers import FactoredFullyConnected

    torch.manual_seed(0)
    own, other = FactoredFullyConnected(10, 20, 16), code.FLinear2d(10, 20, (16, 16), (16, 16))
    weights = [other.lin_U.weight.view(20, 10, -1), other.lin_V.weight, other.lin_U.bias, other.lin_V.bias]
    own.load_state_dict(dict(zip(("theta1", "theta2", "b1", "b2"), (w.detach() for w in weights), strict=True)))
    x, slope = torch.randn(128, 10, 16, 16), torch.randn(128, 20, 16, 16)
    exact = copy.deepcopy(own).double()(x.double()).detach()

    def step(layer: nn.Module) -> Tensor:
        layer.zero_grad()
        y: Tensor = layer(x)
        y.backward(slope)
        return y

    title = "forward and backward of F-FC, 10 to 20 channels, 16 x 16, batch 128"
    return [Case(title, partial(step, other), partial(step, own), relative(exact))]


def _squared_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(1).mean()


def _genni(code: Any) -> list[Case]:
    from equivalence import Case as Plane

    from lightning_sym.landscape import LossSurface

    found = []
    for name, points in (("two-unit net", 200), ("digits MLP 64-32-10", 200), ("LeNet, 43,661 parameters", 8)):
        plane = Plane(name, "cpu")
        coefficients = plane.coefficients(points)
        surface = LossSurface(plane.network, plane.inputs, plane.targets)
        data = [(plane.inputs, plane.targets)]

        def theirs(plane: Plane = plane, coefficients: Tensor = coefficients, data: Any = data) -> list[float]:
            vectors = [plane.plane.centre + plane.plane.basis @ row for row in coefficients]
            networks = (code.vec_to_net(vector, plane.network) for vector in vectors)
            return [code.get_net_loss(network, data, _squared_distance, full_dataset=True) for network in networks]

        double = copy.copy(plane)
        double.network, double.inputs, double.targets = (
            copy.deepcopy(plane.network).double(),
            plane.inputs.double(),
            plane.targets.double(),
        )
        # Their losses of inputs in single precision only: the truth is ours in double precision.
        exact = LossSurface(double.network, double.inputs, double.targets).on(plane.plane, coefficients)
        ours = partial(surface.on, plane.plane, coefficients)
        found.append(Case(f"J at {points} points of a plane, {name}, 500 inputs", theirs, ours, relative(exact)))
    return found


def _git_re_basin(code: Any) -> list[Case]:
    a, b = _perceptrons(512, 3)
    first, second = ({name: p.detach() for name, p in network.named_parameters()} for network in (a, b))

    def theirs() -> dict[str, Tensor]:
        torch.manual_seed(0)
        spec = code.mlp_permutation_spec(3)
        return code.apply_permutation(spec, code.weight_matching(spec, first, second), second)

    title = "matching by permutations of two random MLPs of 3 x 512 units (ours with tracing)"
    return [Case(title, theirs, partial(_matched, a, b), partial(_distance, a), "distance of weights")]


PEERS = {
    "laplace-torch": Peer(_laplace, ("laplace", "backpack"), "laplace-torch"),
    "curvlinops": Peer(_curvlinops, ("curvlinops",), "curvlinops-for-pytorch"),
    "hessian-eigenthings": Peer(_eigenthings, ("hessian_eigenthings",), "hessian-eigenthings"),
    "pytorch-cka": Peer(_pytorch_cka, ("cka",), "pytorch-cka"),
    "ckatorch": Peer(_ckatorch, ("ckatorch",), "ckatorch"),
    "pyhessian": Peer(_pyhessian, ("pyhessian",), "pyhessian"),
    "torch-pruning": Peer(_torch_pruning, ("torch_pruning",), "torch-pruning"),
    "rebasin": Peer(_rebasin, ("rebasin",), "rebasin"),
    "devinterp": Peer(_devinterp, ("devinterp",), "devinterp", short=False),
    "modelsym": Peer(_modelsym, file="model_symmetries/alignment/alignment.py"),
    "ella": Peer(_ella, file="sparse/flinear2d.py"),
    "GENNI": Peer(_genni, file="genni/utils.py"),
    "git-re-basin-pytorch": Peer(_git_re_basin, file="utils/weight_matching.py"),
}


# ---- measuring


def missing(name: str, folders: Mapping[str, Path]) -> str:
    """Return the sentence that says how to get a peer which is not there, else nothing."""
    peer = PEERS[name]
    if peer.package is None:
        if name not in folders:
            return f"Name a folder with its code: --folder {name}=PATH."
        return "" if (folders[name] / peer.file).is_file() else f"{folders[name]} has no {peer.file}."
    return "" if all(map(importlib.util.find_spec, peer.needs)) else f"pip install {peer.package}"


def version(name: str, folders: Mapping[str, Path]) -> str:
    """Return the version of a package; of a folder, the commit or its name."""
    package = PEERS[name].package
    if package is not None:
        return importlib.metadata.version(package)
    command = ["git", "-C", str(folders[name]), "rev-parse", "--short", "HEAD"]
    own = (folders[name] / ".git").exists()  # not a repository around the folder
    if own:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return folders[name].name.removeprefix(f"{name}-")


def _code(name: str, folders: Mapping[str, Path]) -> Any:
    if PEERS[name].package is not None:
        return None
    _linear_layers()
    file = folders[name] / PEERS[name].file
    spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide printed text, warnings and logs of peers."""
    nowhere = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def measure(name: str, folders: Mapping[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Return a result for each case of a peer, or one that says how to get the peer."""
    sentence = missing(name, folders)
    if sentence:
        print(f"{name}: skipped. {sentence}", flush=True)
        return [{"title": name, "peer": name, "rows": [], "skipped": sentence, "note": f"Skipped. {sentence}"}]
    found = []
    with quiet():
        for case in PEERS[name].cases(_code(name, folders)):
            errors = [case.error(run()) for run in (case.theirs, case.ours)]
            rows = timed({"plain": case.theirs, "ours": case.ours}, rounds, clock=time.process_time)
            of = version(name, folders)
            note = f"Plain: {name} {of}. Accuracy ({case.accuracy}): {errors[0]:.2g}; ours {errors[1]:.2g}."
            more = {"peer": name, "version": of, "accuracy": case.accuracy, "errors": errors, "note": note}
            found.append({"title": f"{name}: {case.title}", "case": case.title, "rows": rows, **more})
    for one in found:
        print(f"{one['title']}: ratio {_ratio(one)}; {one['note']}", flush=True)
    return found


def _ratio(found: Mapping[str, Any]) -> str:
    median, least, most = (found["rows"][1][f"ratio_to_plain_{part}"] for part in PARTS)
    return f"{median:.2g} ({least:.2g} to {most:.2g})"


def slower(found: list[dict[str, Any]], stored: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each slower case: its median ratio exceeds the stored one by more than the stored spread.

    Args:
        found: Results of now.
        stored: Those of the results file.
    """
    before = {one["title"]: one["rows"][1] for one in stored if one["rows"]}
    sentences = []
    for one in found:
        old = before.get(one["title"])
        if not one["rows"] or old is None:
            continue
        now, median = (row["ratio_to_plain_median"] for row in (one["rows"][1], old))
        spread = old["ratio_to_plain_max"] - old["ratio_to_plain_min"]
        if now > median + spread:
            sentences.append(
                f"{one['title']} takes {now:.2g} of the peer's time, stored {median:.2g} with spread {spread:.2g}."
            )
    return sentences


def _folder(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or name not in PEERS or PEERS[name].package is not None:
        names = ", ".join(name for name, peer in PEERS.items() if peer.package is None)
        raise argparse.ArgumentTypeError(f"expected NAME=PATH with a NAME of {names}, got {text}")
    return name, Path(path).expanduser().resolve()


def main(words: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parser(__doc__, 7)
    options.add_argument("--only", nargs="+", choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    options.add_argument("--folder", nargs="+", type=_folder, default=[], metavar="NAME=PATH")
    options.add_argument("--check", action="store_true", help="compare with the stored ratios")
    arguments = options.parse_args(words)
    torch.set_num_threads(1)
    folders = dict(arguments.folder)
    names = arguments.only or [name for name, peer in PEERS.items() if peer.short or not arguments.check]
    results = [found for name in names for found in measure(name, folders, arguments.rounds)]
    if arguments.check:
        sentences = slower(results, json.loads((RESULTS / "peers-cpu.json").read_text(encoding="utf-8"))["results"])
        print("\n".join(sentences) or "No case is slower relative to its peer than the stored spread allows.")
        return 1 if sentences else 0
    if not arguments.only:
        write("peers", results, "cpu", arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
