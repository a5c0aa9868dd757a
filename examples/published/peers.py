"""Compare measurements with those of other packages, on the same networks and data."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.curvature import CurvatureOperator, Evidence, factors, parameter_groups, top_eigenpairs
from lightning_sym.datamodules import DiabetesDataModule, DigitsDataModule
from lightning_sym.similarity import CKA
from lightning_sym.zoo import ModelZoo
from published.core import Claim, Quantity, Result, Run, Verdict, together, within
from published.rashomon import DIGITS, PAIRS

_REGRESSORS = Run("zoo-diabetes", "zoo/diabetes")
_ROUNDING = 1e-8  # in double precision


def _digits(runs: Mapping[str, Path], split: str) -> tuple[ModelZoo, Tensor, Tensor]:
    """Return the zoo of digits, and a split of its data in double precision."""
    data = DigitsDataModule()
    data.setup()
    images, labels = data.split_tensors(split)
    return ModelZoo.open(runs[DIGITS.name] / "zoo"), data.normalize(images).double(), labels


def _cka(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    import cka
    import ckatorch

    zoo, images, _ = _digits(runs, "test")
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for pair in PAIRS:
            networks = [zoo.load(number).double().eval() for number in pair]
            for site in networks[0].sites()[:2]:
                x, y = (network.split(site)[0](images).flatten(1) for network in networks)
                for estimator in ("unbiased", "biased"):
                    metric = CKA(estimator=estimator)
                    metric.update(x, y)
                    ours, theirs = (
                        float(metric.compute()),
                        float(ckatorch.cka_base(x, y, unbiased=estimator == "unbiased")),
                    )
                    found.setdefault(f"CKA, {estimator}", []).append(ours)
                    found.setdefault(f"difference from ckatorch, {estimator}", []).append(abs(ours - theirs))
                    if estimator == "unbiased":
                        theirs = float(cka.cka_from_features(x, y))
                        found.setdefault("difference from pytorch-cka, unbiased", []).append(abs(ours - theirs))
    over = f"{len(PAIRS)} pairs, 2 layers each"
    return [Quantity(label, tuple(values), "1", over) for label, values in found.items()]


def _seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """Return the median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _products(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    from curvlinops import HessianLinearOperator
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    zoo, images, labels = _digits(runs, "train")
    names = "curvlinops", "hessian-eigenthings", "plain autograd"
    differences: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    eigenvalues = []
    for number in range(5):
        network = zoo.load(number).double().eval()
        parameters = list(network.parameters())
        operator = CurvatureOperator(network, (images, labels), F.cross_entropy, check=False)
        other = HessianOperator(network, [(images, labels)], supervised_loss(F.cross_entropy))
        third = HessianLinearOperator(
            network, nn.CrossEntropyLoss(), parameters, [(images, labels)], check_deterministic=False
        )
        vector = torch.randn(operator.size, dtype=torch.float64, generator=torch.Generator().manual_seed(number))

        def plain(
            network: nn.Module = network, parameters: list[nn.Parameter] = parameters, vector: Tensor = vector
        ) -> Tensor:
            gradients = torch.autograd.grad(F.cross_entropy(network(images), labels), parameters, create_graph=True)
            flat = nn.utils.parameters_to_vector(gradients)
            return nn.utils.parameters_to_vector(torch.autograd.grad(flat @ vector, parameters))

        calls = {
            "curvlinops": lambda third=third, vector=vector: third @ vector,
            "hessian-eigenthings": lambda other=other, vector=vector: other.matvec(vector),
            "plain autograd": plain,
        }
        ours = operator @ vector
        own = _seconds(lambda operator=operator, vector=vector: operator @ vector)
        for name, call in calls.items():
            differences[name].append(_relative(ours, call().detach()))
            ratios[name].append(own / _seconds(call))
        top = top_eigenpairs(operator, 1, tolerance=1e-9).values
        found = lanczos(other, k=1, max_iter=80, tol=1e-10, which="LA", seed=0, reorthogonalize=True)
        eigenvalues.append(_relative(top, found.eigenvalues.double()))
    over = "5 networks"
    return [
        *(
            Quantity(f"relative difference of products from {name}", tuple(v), "1", over)
            for name, v in differences.items()
        ),
        Quantity("relative difference of the top eigenvalue from hessian-eigenthings", tuple(eigenvalues), "1", over),
        *(Quantity(f"time of a product over that of {name}", tuple(v), "1", over) for name, v in ratios.items()),
    ]


def _laplace(runs: Mapping[str, Path]) -> Sequence[Quantity]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a library that it imports uses torch.jit.script
        from backpack import extend
        from laplace import KronLaplace
        from laplace.curvature.backpack import BackPackGGN
    data = DiabetesDataModule(standardize=True)
    data.setup()
    inputs, targets = data.split_tensors("train")
    zoo = ModelZoo.open(runs[_REGRESSORS.name] / "zoo")
    x, y = inputs.double(), targets.double().reshape(len(targets), -1)
    values, differences = [], []
    log_noise = math.log(0.7)
    for number in range(5):
        network = zoo.load(number).double().eval()
        groups = parameter_groups(network, "per_tensor")
        precisions = torch.linspace(-1, 1, len(groups.names), dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = KronLaplace(extend(_plain(network)), "regression", backend=BackPackGGN)
            theirs.fit(DataLoader(TensorDataset(x, y), batch_size=64))
            each = dict(zip(groups.names, precisions.exp(), strict=True))
            delta = torch.stack([each[groups.precisions[name]] for name, _ in network.named_parameters()])
            expected = float(
                theirs.log_marginal_likelihood(delta, torch.tensor(math.exp(log_noise), dtype=torch.float64))
            )
        batches = list(zip(x.split(64), y.split(64), strict=True))
        evidence = Evidence.of(network, factors(network, batches, "regression"), groups)
        ours = float(evidence.log_marginal_likelihood(precisions, log_noise))
        values.append(ours / len(x))
        differences.append(abs(ours - expected) / abs(expected))
    return [
        Quantity("log marginal likelihood for each patient", tuple(values), "nats", "5 networks"),
        Quantity("relative difference from laplace-torch", tuple(differences), "1", "5 networks"),
    ]


def _plain(network: nn.Module) -> nn.Module:
    """Return the same layers in a container that BackPACK knows."""
    layers = [copy.deepcopy(m) for m in network.modules() if not list(m.children())]
    return nn.Sequential(*layers)


def _agree(q: Mapping[str, Quantity], bound: float = _ROUNDING) -> Verdict:
    return together(*(within(one, 0, bound) for label, one in q.items() if "difference" in label))


RESULTS = (
    Result(
        "peers-cka",
        "peers",
        "ckatorch and pytorch-cka",
        "Similarity of digit networks (CKA)",
        _cka,
        (Claim("Linear CKA agrees.", "", _agree),),
        (DIGITS,),
        sizes=("",),
    ),
    Result(
        "peers-products",
        "peers",
        "curvlinops, hessian-eigenthings and plain autograd",
        "Hessian products and top eigenvalue",
        _products,
        (
            Claim("Products and eigenvalues agree.", "", lambda q: _agree(q, 1e-6)),
            Claim(
                "A product takes no longer than the peers' (ratio at most 1.1).",
                "",
                lambda q: together(*(within(one, 0, 1.1) for label, one in q.items() if "time" in label)),
            ),
        ),
        (DIGITS,),
        remark=(
            "Two Lanczos processes with separate tolerances: hence 1e-6. Ours keeps the gradient's graph "
            "between products; the others rebuild it."
        ),
        sizes=("",),
    ),
    Result(
        "peers-laplace",
        "peers",
        "laplace-torch",
        "Evidence of a small regression (Laplace, Kronecker factors)",
        _laplace,
        (Claim("Log marginal likelihoods agree.", "", _agree),),
        (_REGRESSORS,),
        sizes=("relative difference",),
    ),
)
