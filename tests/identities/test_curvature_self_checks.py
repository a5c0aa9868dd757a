"""Factors of small networks are those of their samples one by one, or are refused: never another number.

The reference knows nothing of axes: it runs the network on one sample at a time, so that all rows of a layer are places
of that sample, whatever their order.
"""

import copy
import functools
import math
from contextlib import nullcontext

import pytest
import torch
from curvature_references import data, dense_blocks, hessians, perturbed, relative_error
from helpers import Program, buffer, of, one_in
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.curvature import Evidence, Rule, factors, parameter_groups, register_layer
from lightning_sym.layers import CircularConv, PolyphasePool, ResidualPathways

SAMPLES, TOKENS, WIDTH, OUTPUTS = 6, 4, 3, 3
TOKEN_SHAPE = (TOKENS, WIDTH)
TOLERANCE = 1e-10


class Do(nn.Module):
    """A function of tensors as a module, so that both engines can take the network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def sequence(*parts, tokens=TOKENS):
    """Return parts that keep the shape ``[N, T, 3]``, after a layer and before a head, and the shape of a sample."""
    head = [nn.Tanh(), nn.Flatten(), nn.Linear(tokens * WIDTH, OUTPUTS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *parts, *head), (tokens, WIDTH)


def images(*parts, side=4):
    """Return parts that keep the shape ``[N, 2, side, side]``, after a layer and before a head."""
    head = [nn.Tanh(), nn.Flatten(), nn.Linear(2 * side * side, OUTPUTS)]
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), *parts, *head), (2, side, side)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def between(before, layer, after):
    """Return a layer between two functions that change the order of axes."""
    return Do(before), layer, Do(after)


def time_first(layer):
    return between(lambda x: x.transpose(0, 1), layer, lambda x: x.transpose(0, 1))


def folded(layer, tokens=1):
    """Return a layer of rows of so many tokens that are folded into the batch."""
    shape = () if tokens == 1 else (tokens,)
    return between(lambda x: x.reshape(-1, *shape, WIDTH), layer, lambda x: x.view(-1, TOKENS, WIDTH))


def folded_time_first(layer):
    def before(x):
        return x.transpose(0, 1).reshape(-1, WIDTH)

    return between(before, layer, lambda x: x.view(TOKENS, -1, WIDTH).transpose(0, 1))


def with_windows(layer, shift=0, samples_first=True):
    """Return a layer of windows, in the order of the samples or in that of the windows."""

    def before(x):
        x = windows(x.roll((shift, shift), (2, 3)), 2)
        return x if samples_first else x.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1)

    def after(x):
        x = x if samples_first else x.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
        return joined(x, 2, 4).roll((-shift, -shift), (2, 3))

    return between(before, layer, after)


def windows(x: Tensor, size: int) -> Tensor:
    """Cut maps ``[N, C, H, W]`` as Swin does into ``[N * windows, size * size, C]``, those of a sample together."""
    x = x.unflatten(2, (-1, size)).unflatten(4, (-1, size))  # [N, C, h, size, w, size]
    return x.permute(0, 2, 4, 3, 5, 1).flatten(0, 2).flatten(1, 2)


def joined(x: Tensor, size: int, side: int) -> Tensor:
    """Undo :func:`windows`."""
    count = side // size
    x = x.unflatten(1, (size, size)).unflatten(0, (-1, count, count))
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def attention(x: Tensor, over: str) -> Tensor:
    """Attend with the values themselves over tokens or over the batch."""
    if over == "batch":
        x = x.transpose(0, 1)
    x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
    return x.transpose(0, 1) if over == "batch" else x


# ---- layers and rules of one's own


class Matrix(nn.Module):
    """Multiplies tokens by a matrix of shape ``[I, O]``, and adds a shift."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.shift


def with_rule(**methods):
    """Return a matrix layer of a new class, with a rule that is right but for some methods."""

    class Layer(Matrix):
        pass

    right = {
        "inputs": lambda self, module, x: {"matrix": x.flatten(1, -2)},
        "gradients": changed_gradients(lambda g: g),
        "axes": lambda self, module, name: ((WIDTH, WIDTH), (1, 0)) if name == "matrix" else None,
    }
    register_layer(Layer)(type("LayerRule", (Rule,), right | methods))
    return Layer()


def changed_gradients(change):
    """Return a method ``gradients`` with something else in it."""

    def gradients(self, module, x, g):
        g = g.flatten(2, -2)
        return change({"matrix": g, "shift": g.sum(2)[:, :, None]})

    return gradients


# ---- networks that are more than a sequence: engine autograd


def tied(again):
    """Return a network that uses the weight of its encoder once more."""

    def forward(net, x):
        x = net.encoder(x).tanh()
        return net.head(F.linear(x, again(net.encoder.weight)).tanh().flatten(1))

    return Program(forward, {"encoder": linear, "head": of(nn.Linear, TOKENS * WIDTH, OUTPUTS)})


def queried(count, expand):
    """Return a network with queries that are the same for all samples and go through a layer."""

    def forward(net, x):
        queries = net.queries.expand(len(x), -1, -1) if expand else net.queries
        return net.head((net.layer(queries).tanh() @ x.mT).flatten(1))

    head = of(nn.Linear, count * TOKENS, OUTPUTS)
    return Program(forward, {"queries": buffer(count, WIDTH), "layer": linear, "head": head})


class Token(nn.Module):
    """Puts a learned token before the others."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, -1), x], 1)


@register_layer(Token)
class TokenRule(Rule):
    def gradients(self, module, x, g):
        return {"token": g[:, :, :1]}


def experts():
    """Return a network that sends samples to one of two layers."""

    def forward(net, x):
        to_first = torch.arange(len(x)) % 2 == 0
        y = torch.zeros_like(x)
        y[to_first], y[~to_first] = net.first(x[to_first]), net.second(x[~to_first])
        return net.head(y.tanh().flatten(1))

    return Program(forward, {"first": linear, "second": linear, "head": of(nn.Linear, TOKENS * WIDTH, OUTPUTS)})


def skip(layer_of=lambda net, x: net.layer(x.flatten(0, 1)).view_as(x)):
    """Return a skip connection around a layer of folded tokens, or around what else is made of the layer."""
    return Program(lambda net, x: x + layer_of(net, x), {"layer": linear})


class Stubborn(nn.BatchNorm1d):
    """Stays in training mode."""

    def train(self, mode: bool = True):
        return super().train(True)


def hooked(hook, pre=False, backward=False):
    network, shape = sequence(linear())
    register = (
        "register_full_backward_hook" if backward else "register_forward_pre_hook" if pre else "register_forward_hook"
    )
    getattr(network[2], register)(hook)
    return network, shape


def twice():
    layer = linear()
    return sequence(layer, nn.Tanh(), layer)


def flat_batch_norm(**settings):
    """Return batch norms of tokens, whose channels are the last axis."""
    kind = settings.pop("kind", nn.BatchNorm1d)
    return sequence(*between(lambda x: x.mT, kind(WIDTH, **settings), lambda x: x.mT))


def video():
    """Return a convolution of frames that are folded into the batch."""
    conv = nn.Conv2d(2, 3, 3, padding=1, stride=2)
    parts = [Do(lambda x: x.flatten(0, 1)), conv, nn.GroupNorm(1, 3), nn.PReLU(3)]
    head = [nn.Tanh(), Do(lambda x: x.reshape(-1, 3 * 3 * 2 * 2)), nn.Linear(36, OUTPUTS)]
    return nn.Sequential(*parts, *head), (3, 2, 4, 4)


def normed(norm):
    """Return a normalisation of tokens that are folded into the batch."""
    return sequence(*between(lambda x: x.flatten(0, 1), norm, lambda x: x.unflatten(0, (-1, TOKENS))))


# By name: a constructor of a network and the shape of a sample.
RIGHT = {
    "samples first": lambda: sequence(linear()),
    "tokens folded": lambda: sequence(*folded(linear())),
    "tokens folded by halves": lambda: sequence(*folded(linear(), 2)),
    "tokens folded, a rule of one's own": lambda: sequence(*folded(with_rule(), 2)),
    "frames folded": video,
    "layer norm of folded tokens": lambda: normed(nn.LayerNorm(WIDTH)),
    "rms norm of folded tokens": lambda: normed(nn.RMSNorm(WIDTH)),
    "batch norm of folded tokens": lambda: normed(nn.BatchNorm1d(WIDTH)),
    "windows, those of a sample together": lambda: images(*with_windows(nn.Linear(2, 2))),
    "shifted windows": lambda: images(*with_windows(nn.Linear(2, 2), shift=1)),
    "attention over tokens": lambda: sequence(linear(), Do(functools.partial(attention, over="tokens")), linear()),
    "sequence reversed": lambda: sequence(*between(lambda x: x.flip(1), linear(), lambda x: x)),
    "a learned token": lambda: (nn.Sequential(Token(), linear(), nn.Tanh(), nn.Flatten(),
        nn.Linear((TOKENS + 1) * WIDTH, OUTPUTS)), (TOKENS, WIDTH)),
    "a token that is expanded": lambda: (nn.Sequential(*(Do(lambda x: torch.cat([x.new_ones(1, 1, WIDTH).expand(len(x),
        -1, -1), x], 1)), linear(), nn.Tanh()), *(nn.Flatten(), nn.Linear((TOKENS + 1) * WIDTH, OUTPUTS))),
        (TOKENS, WIDTH)),
    "a matrix that is transposed": lambda: sequence(with_rule()),
    "batch norm": lambda: flat_batch_norm(),
    "batch norm without affine": lambda: flat_batch_norm(affine=False),
    "instance norm": lambda: sequence(*between(lambda x: x.mT, nn.InstanceNorm1d(WIDTH, affine=True), lambda x: x.mT)),
    "a hook that looks on": lambda: hooked(lambda module, args, output: None),
    "a backward hook": lambda: hooked(lambda module, before, after: tuple(3 * g for g in before), backward=True),
    "residual": lambda: images(ResidualPathways(CircularConv(2, 2), nn.Sequential(CircularConv(2, 2), nn.Tanh()))),
    "polyphase": lambda: images(CircularConv(2, 2), PolyphasePool(), nn.Upsample(scale_factor=2)),
    "a class that is masked": lambda: (nn.Sequential(*sequence(*folded(linear()))[0],
        Do(lambda x: F.pad(x, (0, 1), value=-math.inf))), (TOKENS, WIDTH)),
    "an exact zero": lambda: sequence(linear(), Do(lambda x: 0 * x)),
    "a bias of which nothing comes through": lambda: sequence(linear(), Do(lambda x: x - x.mean(1, keepdim=True))),
}  # fmt: skip
RIGHT_WITH_AUTOGRAD = {
    "a hook before the layer": lambda: hooked(lambda module, args: (3 * args[0],), pre=True),
    "queries that are expanded": lambda: (queried(5, expand=True), (TOKENS, WIDTH)),
    "folded beside a skip connection": lambda: sequence(skip()),
}

AXIS = "whose first axis cannot be the samples"
MIXED = "changes for a sample when other samples do"
BEHIND = "Outputs of a sample depend on rows of other samples"
RULE = "that is not autograd's"


def prefixed(function):
    """Return a sequence after a function of the inputs."""
    network, shape = sequence(linear())
    return nn.Sequential(Do(function), *network), shape


def mixing(function):
    """Return a sequence with a function between two layers."""
    return sequence(Do(function), linear())


def ruled(change=None, **methods):
    """Return a sequence with a matrix layer whose rule is right but for its gradients or other methods."""
    gradients = {} if change is None else {"gradients": changed_gradients(change)}
    return sequence(with_rule(**gradients, **methods))


def batch_mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


def weak(x: Tensor) -> Tensor:
    return x + 1e-9 * x.mean(0)


def functional_batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.mT, None, None, training=True).mT


# By name: a constructor, and what the error says.
WRONG = {
    "time first": (lambda: sequence(*time_first(linear())),
        rf"'3' \(Linear\).*{AXIS} \(it seems to be the second; transpose it\)"),
    "time first, as many tokens as samples": (lambda: sequence(*time_first(linear()), tokens=SAMPLES),
        rf"'3' \(Linear\).*{AXIS}"),
    "time first, as many tokens as are tried": (lambda: sequence(*time_first(linear()), tokens=5),
        rf"'3' \(Linear\) {MIXED}"),
    "time first, a multiple of them": (lambda: sequence(*time_first(linear()), tokens=10), rf"'3' \(Linear\) {MIXED}"),
    "folded time first": (lambda: sequence(*folded_time_first(linear())),
        rf"'3' \(Linear\) {MIXED}.*keep the rows of a sample together"),
    "windows, those of all samples together": (lambda: images(*with_windows(nn.Linear(2, 2), samples_first=False)),
        rf"'3' \(Linear\) {MIXED}.*windows"),
    "samples as one sequence": (lambda: sequence(*between(lambda x: x.flatten(0, 1)[None], linear(),
        lambda x: x.view(-1, TOKENS, WIDTH))), rf"'3' \(Linear\).*{AXIS}"),
    "samples reversed": (lambda: sequence(*between(lambda x: x.flip(0), linear(), lambda x: x.flip(0))), MIXED),
    "outputs reversed": (lambda: sequence(linear(), Do(lambda x: x.flip(0))), MIXED),
    "batch norm without affine and statistics": (lambda: flat_batch_norm(affine=False, track_running_stats=False),
        rf"'7' \(Linear\) {MIXED}.*from module '3' \(BatchNorm1d\) on.*track_running_stats=True"),
    "batch norm without statistics": (lambda: flat_batch_norm(track_running_stats=False),
        rf"{MIXED}.*track_running_stats=True"),
    "batch norm in training mode": (lambda: flat_batch_norm(kind=Stubborn, affine=False),
        rf"{MIXED}.*from module '3' \(Stubborn\)"),
    "batch norm, functional": (lambda: mixing(functional_batch_norm), MIXED),
    "the mean at the start": (lambda: prefixed(lambda x: x - x.mean(0)), MIXED),
    "the mean at the start, of a masked class": (lambda: (nn.Sequential(*prefixed(batch_mean)[0],
        Do(lambda x: F.pad(x, (0, 1), value=-math.inf))), TOKEN_SHAPE), MIXED),
    "the mean at the end": (lambda: (nn.Sequential(*sequence(linear())[0], Do(lambda x: x - x.mean(0))),
        (TOKENS, WIDTH)), rf"The output of the network {MIXED}"),
    "a maximum over the batch": (lambda: mixing(lambda x: x / x.abs().amax()), rf"{MIXED}|{BEHIND}"),
    "a norm that is constant in derivatives": (lambda: mixing(lambda x: x / x.detach().norm()), MIXED),
    "softmax over the batch": (lambda: sequence(linear(), Do(lambda x: x.softmax(0))), MIXED),
    "attention over the batch": (lambda: sequence(linear(), Do(functools.partial(attention, over="batch")), linear()),
        rf"'4' \(Linear\) {MIXED}"),
    "a sum over earlier samples": (lambda: sequence(linear(), Do(lambda x: x.cumsum(0))), MIXED),
    "a sum over later samples": (lambda: sequence(linear(), Do(lambda x: x.flip(0).cumsum(0).flip(0))), MIXED),
    "the next sample": (lambda: sequence(linear(), Do(lambda x: x + 0.1 * x.roll(1, 0))), MIXED),
    "a weak mixture": (lambda: mixing(weak), MIXED),
    "positions of samples": (lambda: mixing(lambda x: x + torch.arange(1, 7)[: len(x), None, None]),
        r"'3' \(Linear\) is not the same for a sample in another row.*along the tokens"),
    "a hook that scales": (lambda: hooked(lambda module, args, output: 3 * output),
        rf"'2' \(Linear\).*'weight' {RULE}.*remove the hook|outputs of the network"),
    "a hook that replaces": (lambda: hooked(lambda module, args, output: output.relu()),
        rf"{RULE}|outputs of the network"),
    "called twice": (twice, "'2' is called more than once"),
    "random in eval mode": (lambda: mixing(lambda x: F.dropout(x, 0.5)),
        "second pass, in eval mode|outputs of the network"),
    "without an effect": (lambda: (nn.Sequential(*sequence(linear())[0], Do(lambda x: x.detach())), (TOKENS, WIDTH)),
        "No trainable parameter reaches the network's outputs"),
    "without gradients": (lambda: sequence(skip(torch.no_grad()(lambda net, x: net.layer(x)))),
        "'2.layer' .* is called without gradients|cannot handle module '2'"),
    "a rule that scales": (lambda: ruled(lambda g: {name: 3 * v for name, v in g.items()}), RULE),
    "a rule that is transposed": (lambda: ruled(axes=lambda self, module, name: None), f"'matrix' {RULE}"),
    "a rule that has the mean over places": (lambda: ruled(lambda g: g | {"matrix": g["matrix"].mean(2, keepdim=True)},
        inputs=lambda self, module, x: {"matrix": x.mean(1, keepdim=True)}), f"'matrix' {RULE}"),
    "a rule that takes places for samples": (lambda: ruled(lambda g: g | {"matrix": g["matrix"].flatten(1, 2)[:, :,
        None]}, inputs=lambda self, module, x: {"matrix": x.flatten(0, 1)[:, None]}),
        "8 inputs and 8 gradients of 'matrix' for 2 rows"),
    "a rule that does not sum a shift": (lambda: ruled(lambda g: g | {"shift": g["matrix"]}),
        "'shift' at 4 places and inputs at 1; sum them over the places"),
    "a rule whose places do not fit": (lambda: ruled(inputs=lambda self, module, x: {"matrix": x[:, :2]}),
        "'matrix' at 4 places and inputs at 2"),
    "a rule without gradients": (lambda: ruled(lambda g: {"matrix": g["matrix"]}), r"no gradients for \['shift'\]"),
    "a rule of another size": (lambda: ruled(lambda g: g | {"shift": g["shift"][..., :2]}),
        "block of 2 parameters for 'shift', which has 3"),
    "a rule with another A": (lambda: ruled(in_factors=lambda self, module, x: {"matrix": 2 * x.flatten(0,
        1).T @ x.flatten(0, 1)}), "in_factors that are not those of its inputs"),
    "a rule with A of another parameter": (lambda: ruled(in_factors=lambda self, module, x: {}),
        "in_factors that are not those of its inputs in shape"),
    "a rule with another B": (lambda: ruled(out_factors=lambda self, module, x, g: dict.fromkeys(("matrix", "shift"),
        torch.eye(WIDTH))), "out_factors that are not those of its gradients"),
}  # fmt: skip
ENCODER = rf"'encoder' .Linear.*'weight' .*{RULE}"
WRONG_WITH_AUTOGRAD = {
    "a weight once more, transposed": (lambda: (tied(lambda w: w.t()), TOKEN_SHAPE), ENCODER),
    "a weight once more": (lambda: (tied(lambda w: 1e-3 * w), TOKEN_SHAPE), ENCODER),
    "a layer of one token": (lambda: (queried(1, expand=False), TOKEN_SHAPE), rf"'layer' .Linear.*{AXIS}"),
    "a layer of as many queries as are tried": (lambda: (queried(5, expand=False), TOKEN_SHAPE), rf"{BEHIND}.*'layer'"),
    "a layer of a multiple of them": (lambda: (queried(10, expand=False), TOKEN_SHAPE), rf"{BEHIND}.*'layer'"),
    "experts for some samples": (lambda: (experts(), TOKEN_SHAPE),
        rf"'first' .Linear.*{AXIS}.*experts with routing, x\[mask\].*multiply its output by 0"),
}  # fmt: skip


def engines(both, autograd):
    return [
        *((name, engine) for name in both for engine in ("autograd", "backpack")),
        *((name, "autograd") for name in autograd),
    ]


def made(case):
    torch.manual_seed(0)
    network, shape = case()
    return perturbed(network), shape


def vectors(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what the matrix of a layer multiplies, ``[R, I]``, and the gradients there, ``[R, O]``, of one sample."""
    if isinstance(module, nn.Linear | Matrix):
        return x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if isinstance(module, nn.Conv2d | CircularConv):
        if isinstance(module, CircularConv):
            x = F.pad(x, (1, 1, 1, 1), mode="circular")
            patches = F.unfold(x, module.kernel_size)
        else:
            patches = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
        return patches.mT.flatten(0, 1), g.flatten(2).mT.flatten(0, 1)
    return None


def by_definition(network: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """Return the block of each parameter, from every sample by itself and every column of the root by itself.

    Parameters without A have their exact blocks, by Jacobians.
    """
    network = copy.deepcopy(network)
    for module in network.modules():
        module._backward_hooks.clear()
    found = dense_blocks(network, x, likelihood)
    sums: dict[str, list[Tensor]] = {}
    seen: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def keep(name, module, args, output):
        seen[name] = (module, args[0].detach(), output)

    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | Matrix | nn.Conv2d | CircularConv):
            module.register_forward_hook(functools.partial(keep, name))
    for sample in x:
        outputs = network(sample[None])
        values, directions = torch.linalg.eigh(hessians(outputs.detach(), likelihood)[0])
        for column in (directions * values.clamp_min(0).sqrt()).T:
            gradients = torch.autograd.grad(outputs, [y for _, _, y in seen.values()], column[None], retain_graph=True)
            for (name, (module, inputs, _)), g in zip(seen.items(), gradients, strict=True):
                a, g = vectors(module, inputs, g)
                b, _ = sums.setdefault(name, [torch.zeros(g.shape[1], g.shape[1]), torch.zeros(a.shape[1], a.shape[1])])
                b += g.T @ g / len(g)
        for name, (module, inputs, y) in seen.items():
            a, _ = vectors(module, inputs, y)
            sums[name][1] += a.T @ a / len(x)
    for name, (b, a) in sums.items():
        module = network.get_submodule(name)
        if isinstance(module, Matrix):  # [I, O]
            found[f"{name}.matrix"] = torch.kron(a, b)
        else:
            found[f"{name}.weight"] = torch.kron(b, a)
    return found


@pytest.fixture(autouse=True)
def _in_double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def evidence_of(dense: dict[str, Tensor], network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the log marginal likelihood of a classification at precisions of 1."""
    parameters = dict(network.named_parameters())
    total = -F.cross_entropy(network(x), y, reduction="sum")
    for name, block in dense.items():
        total = total - torch.linalg.slogdet(block + torch.eye(len(block))).logabsdet / 2
        total = total - parameters[name].square().sum() / 2
    return total.item()


@pytest.mark.parametrize("batch", [SAMPLES, 4, 1], ids=["one batch", "batches", "single samples"])
@pytest.mark.parametrize(("name", "engine"), one_in(3, engines(RIGHT, RIGHT_WITH_AUTOGRAD)))
@pytest.mark.few(9)
def test_factors_are_those_of_the_samples_one_by_one(name, engine, batch):
    network, shape = made((RIGHT | RIGHT_WITH_AUTOGRAD)[name])
    x, y = data(SAMPLES, shape, OUTPUTS, "classification")
    expected = by_definition(network, x, "classification")
    found = factors(network, list(zip(x.split(batch), y.split(batch), strict=True)), engine=engine)
    assert found.blocks.keys() == expected.keys()
    for key, block in found.blocks.items():
        torch.testing.assert_close(block.dense(), expected[key], rtol=TOLERANCE, atol=TOLERANCE)
    evidence = Evidence.of(network, found, parameter_groups(network))
    value = evidence.log_marginal_likelihood(torch.zeros(len(evidence.groups.names)))
    assert value == pytest.approx(evidence_of(expected, network, x, y), rel=TOLERANCE)


@pytest.mark.parametrize(("name", "engine"), engines(WRONG, WRONG_WITH_AUTOGRAD))
def test_what_would_be_wrong_is_refused(name, engine):
    case, words = (WRONG | WRONG_WITH_AUTOGRAD)[name]
    network, shape = made(case)
    x, y = data(SAMPLES, shape, OUTPUTS, "classification")
    hooks = [len(module._forward_hooks) for module in network.modules()]
    with pytest.raises(ValueError, match=words) as error:
        factors(network, [(x, y)], engine=engine)
    assert str(error.value).count(". ") == 0, "one sentence"
    assert [len(module._forward_hooks) for module in network.modules()] == hooks


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("name", [name for name in WRONG if "rule" not in name])
def test_it_is_refused_of_a_first_batch_of_one_sample_or_none_too(name, engine):
    network, shape = made(WRONG[name][0])
    x, y = data(SAMPLES, shape, OUTPUTS, "classification")
    first = 0 if name == "the mean at the start" else 1
    with pytest.raises(ValueError, match=WRONG[name][1]):
        factors(network, [(x[:first], y[:first]), (x[first:], y[first:])], engine=engine)


# ---- which samples are tried


def seen_by(network, batches, engine="autograd"):
    """Return the inputs of all passes of a network but those of the batches themselves."""
    inputs = []
    network.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    factors(network, batches, engine=engine)
    shapes = [x.shape for x, _ in batches]
    return [x for x in inputs if x.shape not in shapes], inputs


def test_it_costs_two_passes_of_five_samples_for_each_call():
    network, shape = made(RIGHT["samples first"])
    x, y = data(40, shape, OUTPUTS, "classification")
    tried, inputs = seen_by(network, list(zip(x.split(10), y.split(10), strict=True)))
    assert [len(each) for each in tried] == [5, 5]
    assert len(inputs) == 6
    before, after = tried
    assert torch.equal(before, x[[0, 2, 4, 6, 8]])
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [False, True, True, False, False]
    assert torch.equal(after[1], 2 * x[0])


def test_changes_that_a_network_does_not_take_are_left_out():
    def positions(x):
        if x.abs().max() > 1:
            raise RuntimeError("only inputs of at most 1")
        return x

    network, shape = sequence(linear())
    network = perturbed(nn.Sequential(Do(positions), *network))
    x = torch.rand(SAMPLES, *shape)
    tried, _ = seen_by(network, [(x, torch.arange(SAMPLES) % OUTPUTS)])
    assert [len(each) for each in tried] == [5, 5, 5]
    assert torch.equal(tried[2][1], x[0])


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
def test_a_network_for_batches_of_one_size(engine):
    network, shape = made(lambda: sequence(*between(lambda x: x.reshape(6, -1, WIDTH), linear(), lambda x: x)))
    x, y = data(6, shape, OUTPUTS, "classification")
    found = factors(network, [(x, y)], engine=engine).blocks
    for name, block in factors(nn.Sequential(*network[:2], nn.Identity(), *network[3:]), [(x, y)]).blocks.items():
        torch.testing.assert_close(found[name].dense(), block.dense())
    network, _ = made(lambda: sequence(*between(lambda x: x.reshape(6, -1, WIDTH), linear(), lambda x: x + x.mean(0))))
    with pytest.raises(ValueError, match=MIXED):
        factors(network, [(x, y)], engine=engine)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("count", [7, 2, 1])
def test_inputs_that_are_no_real_numbers(kind, count):
    """Tokens are exchanged for those of other samples, or reversed: all that the network may ever see."""
    torch.manual_seed(0)
    embedding = nn.Embedding(2, WIDTH).requires_grad_(False)
    tokens = (torch.arange(count)[:, None] + torch.tensor([0, 0, 1, 1])) % 2
    x, y = tokens.to(kind), torch.arange(count) % OUTPUTS
    look_up = Do(lambda x: embedding(x.long()))
    network = perturbed(nn.Sequential(look_up, *sequence(linear())[0]))
    blocks = factors(network, [(x, y)]).blocks
    expected = by_definition(network, x, "classification")
    for name, block in blocks.items():
        torch.testing.assert_close(block.dense(), expected[name])
    mixing = nn.Sequential(look_up, Do(lambda x: x - x.mean(0)), *network[1:])
    with pytest.raises(ValueError, match=MIXED):
        factors(mixing, [(x, y)])


def test_whole_numbers_may_be_indices():
    """A table with a column of categories, all in floating point, whose double would be out of range."""
    torch.manual_seed(0)
    embedding = nn.Embedding(3, WIDTH)

    def look_up(x):
        return torch.cat([embedding(x[:, :1].long()), x[:, 1:].unflatten(1, (-1, WIDTH))], 1).detach()

    network, _ = sequence(linear(), tokens=2)
    x = torch.cat([torch.arange(SAMPLES)[:, None] % 3, torch.randn(SAMPLES, WIDTH)], 1)
    model = perturbed(nn.Sequential(Do(look_up), *network))
    tried, _ = seen_by(model, [(x, torch.arange(SAMPLES) % OUTPUTS)])
    assert [len(each) for each in tried] == [5, 5]
    assert torch.equal(tried[1][:, 0], tried[1][:, 0].round())
    assert tried[1][:, 0].max() < 3


@pytest.mark.parametrize("zeros", [5, 6])
def test_padded_samples_hide_nothing(zeros):
    """Of samples that are zero, what mixes them gives what it got."""
    network, shape = made(lambda: sequence(Do(lambda x: x + x.mean(0)), linear()))
    network = nn.Sequential(Do(lambda x: x - x.mean(0)), *network)
    x, y = data(SAMPLES, shape, OUTPUTS, "classification")
    x[:zeros] = 0
    with pytest.raises(ValueError, match=MIXED):
        factors(network, [(x, y)])


def test_later_batches_have_their_rows_counted():
    """A layer that one sample in a batch does not reach."""
    network, shape = sequence(Do(lambda x: x if len(x) < 6 else x[:5]), linear(), nn.Identity())
    network = perturbed(network)
    x, y = data(11, shape, OUTPUTS, "classification")
    for engine in ("autograd", "backpack"):
        with pytest.raises(ValueError, match=r"with a row for each of 6 inputs|first axis cannot be the samples"):
            factors(network, [(x[:5], y[:5]), (x[5:], y[5:])], engine=engine)


# ---- precision


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
@pytest.mark.few(6)
def test_single_precision_raises_no_false_alarm(engine, setting):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        for seed in range(10):
            torch.manual_seed(seed)
            deep = [part for _ in range(6) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
            network = nn.Sequential(
                nn.Conv2d(1, 4, 1), *deep, nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 3)
            ).float()
            x = 100 * torch.rand(5, 1, 8, 8, dtype=torch.float32) ** 4
            assert factors(network, [(x, torch.arange(5) % 3)], engine=engine).samples == 5
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_how_small_an_error_of_a_rule_is_found(dtype):
    tolerance = torch.finfo(dtype).eps ** 0.5
    for factor, found in ((1 + 0.1 * tolerance, False), (1 + 10 * tolerance, True)):
        scaled = changed_gradients(lambda g, factor=factor: {name: factor * v for name, v in g.items()})
        network, shape = sequence(with_rule(gradients=scaled))
        x, y = data(SAMPLES, shape, OUTPUTS, "classification")
        with pytest.raises(ValueError, match=RULE) if found else nullcontext():
            factors(network.to(dtype), [(x.to(dtype), y)])


# ---- rules for more layers


TRANSPOSED = {
    "plain": {},
    "stride and padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "dilation": {"dilation": 2, "padding": 3},
    "groups": {"groups": 2, "stride": 2},
    "cut": {"padding": 2, "bias": False},
}


@pytest.mark.parametrize("settings", TRANSPOSED)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.few(6, "1-stride and padding")
def test_a_transposed_convolution_has_the_factors_of_the_convolution_that_it_is(dims, settings):
    """That of the input with zeros between its entries, with mirrored and exchanged weights."""
    torch.manual_seed(0)
    settings = TRANSPOSED[settings]
    kinds = [(nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)]
    conv, transposed = kinds[dims - 1]
    layer = transposed(4, 6, 3, **settings)
    groups, stride, dilation = settings.get("groups", 1), settings.get("stride", 1), settings.get("dilation", 1)
    plain = conv(4, 6, 3, dilation=dilation, groups=groups, bias=layer.bias is not None)
    weight = layer.weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(tuple(range(2, 2 + dims)))
    state = {"weight": weight.detach()} | ({} if layer.bias is None else {"bias": layer.bias.detach()})
    plain.load_state_dict(state)

    def apart(x):
        for axis in range(2, 2 + dims):
            x = x.repeat_interleave(stride, axis)
            keep = torch.arange(x.shape[axis]) % stride == 0
            x = (x.movedim(axis, -1) * keep).movedim(-1, axis)
            x = x.narrow(axis, 0, x.shape[axis] - stride + 1)
        edge = 2 * dilation - settings.get("padding", 0)
        return F.pad(x, [edge, edge + settings.get("output_padding", 0)] * dims)

    x, y = data(4, (4, *(4, 3, 3)[:dims]), OUTPUTS, "classification")
    head = [nn.Tanh(), nn.Flatten(), nn.Linear(layer(x)[0].numel(), OUTPUTS)]
    torch.testing.assert_close(layer(x), plain(apart(x)))
    expected = factors(nn.Sequential(Do(apart), plain, *head), [(x, y)]).blocks
    for engine in ("autograd", "backpack"):
        found = factors(nn.Sequential(layer, *head), [(x, y)], engine=engine).blocks
        assert relative_error(found["0.weight"].out_factor, expected["1.weight"].out_factor) < TOLERANCE
        # In the order of the parameter's entries: groups, inputs, outputs, kernel.
        order = torch.arange(layer.weight.numel()).view_as(weight)
        order = order.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(tuple(range(2, 2 + dims))).flatten()
        dense = expected["1.weight"].dense()[order][:, order]
        assert relative_error(found["0.weight"].dense(), dense) < TOLERANCE
        if layer.bias is not None:
            assert relative_error(found["0.bias"].dense(), expected["1.bias"].dense()) < TOLERANCE
