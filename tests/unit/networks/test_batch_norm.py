"""Running statistics measured anew: against a second computation, and what is left as it was."""

import copy

import pytest
import torch
from helpers import Program, assert_refused, of
from torch import Tensor, nn

from lightning_sym.networks import CIFARResNet, MyrtleCNN, batch_norms, recalibrate_batch_norm
from lightning_sym.networks.batch_norm import NotFiniteStatisticsError

# Rounding in double precision of sums over a few thousand numbers.
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def deep(seed: int = 0) -> nn.Sequential:
    """Six convolutions with batch norms whose statistics are wrong, and dropout."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for channels in (2, 4, 4, 4, 4, 4):
        layers += [nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    with torch.no_grad():
        for norm in batch_norms(network).values():
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked.fill_(50)
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return network


def images(channels: int = 2, side: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, channels, side, side, generator=generator, dtype=torch.float64)


def statistics(network: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in network.named_buffers()}


def assert_unchanged(network: nn.Module, before: dict[str, Tensor]) -> None:
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def one_batch_outputs(network: nn.Module, data: Tensor) -> Tensor:
    """Outputs in train mode, for batch norms only, of all data in one batch."""
    network = copy.deepcopy(network).eval()
    for norm in batch_norms(network).values():
        norm.train()
    return network(data)


# ---- which ones


def test_batch_norms_are_found_by_name():
    shared = nn.BatchNorm1d(2)
    network = nn.ModuleDict(
        {
            "one": shared,
            "again": shared,
            "two": nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm3d(2, affine=False)),
            "sync": nn.SyncBatchNorm(2),
            "instance": nn.InstanceNorm2d(2, track_running_stats=True),
            "without": nn.BatchNorm2d(2, track_running_stats=False),
            "group": nn.GroupNorm(1, 2),
        }
    )
    assert list(batch_norms(network)) == ["one", "two.0", "two.1", "sync"]
    assert batch_norms(network)["one"] is shared
    assert list(batch_norms(shared)) == [""]


def test_lazy_batch_norm_is_an_error_until_it_is_called():
    network = nn.Sequential(nn.LazyBatchNorm1d())
    assert_refused(batch_norms, network, says="'0' is not initialised")
    network(torch.randn(3, 2))
    assert list(batch_norms(network)) == ["0"]


# ---- the default: one pass


def test_one_pass_is_the_mean_over_batches():
    """Each layer's mean and unbiased variance of its inputs, which are normalised by their own batch.

    Neither momentum nor the 50 batches that were counted before weigh in.
    """
    network, batches = deep(), images().split(8)
    expected = {name: [] for name in batch_norms(network)}
    for batch in batches:
        x = batch
        for name, module in network.named_children():
            if name in expected:
                variance, mean = torch.var_mean(x, (0, 2, 3))
                expected[name].append(torch.stack([mean, variance]))
                biased = x.var((0, 2, 3), correction=0)
                x = (x - mean[:, None, None]) / (biased[:, None, None] + module.eps).sqrt()
                x = x * module.weight[:, None, None] + module.bias[:, None, None]
            elif not isinstance(module, nn.Dropout):
                x = module(x)
    assert recalibrate_batch_norm(network, batches) == list(expected)
    for name, norm in batch_norms(network).items():
        mean, variance = torch.stack(expected[name]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean, **EXACT)
        torch.testing.assert_close(norm.running_var, variance, **EXACT)
        assert norm.num_batches_tracked == 3


# ---- exact


@pytest.mark.parametrize(
    ("make", "channels", "sizes"),
    [
        *((deep, 2, sizes) for sizes in (24, 8, [1, 5, 18])),
        (lambda: CIFARResNet(width=2, shortcut="B", image_size=8).fresh(0).double(), 3, 10),
        (lambda: MyrtleCNN(2, image_size=8).fresh(0).double(), 3, 10),
    ],
)
def test_exact_statistics_are_those_of_one_batch(make, channels, sizes):
    side = 4 if make is deep else 8
    network, data = make().eval(), images(channels=channels, side=side)
    expected = one_batch_outputs(network, data)
    assert set(recalibrate_batch_norm(network, data.split(sizes), exact=True)) == set(batch_norms(network))
    torch.testing.assert_close(network(data), expected, atol=1e-10, rtol=1e-10)


def test_exact_variance_does_not_cancel():
    """In float32, the mean square of these inputs is only known to within 10, and their variance is 1."""
    norm = nn.BatchNorm1d(2)
    data = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) + 1e4
    recalibrate_batch_norm(norm, data.split(100), exact=True)
    torch.testing.assert_close(norm.running_var, data.double().var(0, correction=0).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 2, 2), (2, 3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_exact_for_every_kind_and_dtype(shape, dtype):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = kind(3, dtype=dtype)
    data = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    recalibrate_batch_norm(norm, list(data.split(1)), exact=True)
    values = data.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(norm.running_mean, values.mean(1).to(dtype))
    torch.testing.assert_close(norm.running_var, values.var(1, correction=0).to(dtype))
    assert norm.num_batches_tracked == shape[0]


# ---- what is left as it was


@pytest.mark.parametrize("exact", [False, True])
def test_only_statistics_change(exact):
    network = deep()
    network[1].eval()
    network[4].momentum = None
    network[3].weight.requires_grad = False
    modes = [module.training for module in network.modules()]
    before = copy.deepcopy(network)
    state = torch.get_rng_state()
    recalibrate_batch_norm(network, images().split(8), exact=exact)
    assert torch.equal(torch.get_rng_state(), state), "dropout must be off"
    assert [module.training for module in network.modules()] == modes
    for a, b in zip(network.modules(), before.modules(), strict=True):
        assert getattr(a, "momentum", 0) == getattr(b, "momentum", 0)
        assert not a._forward_pre_hooks
    for a, b in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None
        assert a.requires_grad == b.requires_grad


@pytest.mark.parametrize("exact", [False, True])
def test_some_of_the_batch_norms(exact):
    network, before = deep(), statistics(deep())
    assert recalibrate_batch_norm(network, images().split(8), exact=exact, modules=["10", "4"]) == ["4", "10"]
    changed = {name.split(".")[0] for name, buffer in network.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"4", "10"}
    assert recalibrate_batch_norm(network, [], exact=exact, modules=[]) == []
    # Those that are not selected use their own statistics: the first layers alone give the inputs of the second norm.
    if exact:
        inputs = network.eval()[:4](images())
        torch.testing.assert_close(network[4].running_mean, inputs.mean((0, 2, 3)), **EXACT)


def with_auxiliary_head() -> nn.Module:
    """Return a network with a batch norm that is there in training only, as the auxiliary heads of GoogLeNet."""
    norms = {"main": of(nn.BatchNorm1d, 2), "auxiliary": of(nn.BatchNorm1d, 2)}
    return Program(lambda net, x: net.main(x) + (net.auxiliary(x) if net.training else 0), norms)


@pytest.mark.parametrize("exact", [False, True])
def test_batch_norms_that_are_not_reached_are_left_alone(exact):
    network = with_auxiliary_head()
    network(torch.randn(4, 2))
    before = statistics(network.auxiliary)
    assert recalibrate_batch_norm(network, [torch.randn(4, 2)], exact=exact) == ["main"]
    assert_unchanged(network.auxiliary, before)
    with pytest.raises(ValueError, match=r"No batch reached any of the batch norms \['auxiliary'\]"):
        recalibrate_batch_norm(network, [torch.randn(4, 2)], exact=exact, modules=["auxiliary"])
    assert_unchanged(network.auxiliary, before)


@pytest.mark.parametrize("exact", [False, True])
def test_batches_may_be_pairs_or_a_function(exact):
    a, b, c = deep(), deep(), deep()
    recalibrate_batch_norm(a, images().split(8), exact=exact)
    recalibrate_batch_norm(b, [(batch, torch.zeros(8)) for batch in images().split(8)], exact=exact)
    recalibrate_batch_norm(c, lambda: iter(images().split(8)), exact=exact)
    assert_unchanged(a, statistics(b))
    assert_unchanged(a, statistics(c))


def test_inference_mode():
    network, other = deep(), deep()
    with torch.inference_mode():
        recalibrate_batch_norm(network, images().split(8))
    recalibrate_batch_norm(other, images().split(8))
    assert_unchanged(network, statistics(other))
    network.train()(images()).sum().backward()


# ---- errors, after which all is as before


@pytest.mark.parametrize(
    ("batches", "message", "exact"),
    [
        ([], "There are no batches", False),
        ([], "There are no batches", True),
        ([images(), images() * torch.nan], "of the batch norm '1' are not finite", False),
        ([images(), images() * torch.inf], "of the batch norm '1' are not finite", True),
        ([{"image": images()}], "batches must yield tensors.*got dict", False),
        ([()], "batches must yield tensors.*got tuple", True),
        (iter([images()]), "can be read only once", True),
    ],
)
def test_errors_change_nothing(batches, message, exact):
    network = deep()
    network[7].eval()
    before, modes = statistics(network), [module.training for module in network.modules()]
    with pytest.raises(ValueError, match=message):
        recalibrate_batch_norm(network, batches, exact=exact)
    assert_unchanged(network, before)
    assert [module.training for module in network.modules()] == modes
    assert network[1].momentum == 0.1
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_wrong_weights_and_names_are_named():
    network = deep()
    assert_refused(recalibrate_batch_norm, network, [images()], modules=["1", "2"], says="Unknown batch norm")
    assert_refused(recalibrate_batch_norm, network, [images()], modules="1", says="modules must be a list of")
    with torch.no_grad():
        network[6].weight[0, 0, 0, 0] = torch.inf
    error = NotFiniteStatisticsError
    assert_refused(recalibrate_batch_norm, network, [images()], exact=True, says="batch norm '7' are not", error=error)


def test_batch_norm_that_is_called_twice():
    norm = nn.BatchNorm1d(2)
    network = nn.Sequential(norm, nn.ReLU(), norm)
    assert_refused(recalibrate_batch_norm, network, [torch.randn(4, 2)], exact=True, says="'0' is called 2 times for")
    assert recalibrate_batch_norm(network, [torch.randn(4, 2)]) == ["0"]
    assert norm.num_batches_tracked == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exact", [False, True])
def test_cuda_is_the_cpu(exact):
    network, other = deep(), deep().cuda()
    recalibrate_batch_norm(network, images().split(8), exact=exact)
    recalibrate_batch_norm(other, images().split(8), exact=exact)
    for name, buffer in network.named_buffers():
        torch.testing.assert_close(other.get_buffer(name).cpu(), buffer, atol=1e-10, rtol=1e-10)
