"""What a population does beside training: names, states, clipping, skipping, random layers."""

import copy
import functools

import pytest
import torch
from helpers import assert_refused, assert_same
from torch import Tensor, nn

from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.population import LoopPopulation, VmapPopulation, carry_gradients
from lightning_sym.tasks.losses import CrossEntropy, SquaredDistance

KINDS = [LoopPopulation, VmapPopulation]


class Dropping(Network):
    """A network with dropout as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear1 = nn.Linear(16, 8)
        self.activation1 = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.linear2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


class Noisy(Dropping):
    """A network whose random layer has no telling name."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Noise()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class Odd(Network):
    """Tied weights, a buffer that is not persistent, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(16, 3)
        self.last.bias.requires_grad = False
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.rand(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(self.flatten(x))) * self.scale)


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(5,), image_size=4, num_classes=3)


def batch(members: int, size: int = 6, shape: tuple[int, ...] = (1, 4, 4), seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(members, size, *shape, generator=generator)
    return images, torch.randint(3, (members, size), generator=generator)


def step(population, images, labels, skip=frozenset(), draw=0, label_smoothing=0.0):
    return population.step(images, labels, CrossEntropy(label_smoothing), skip=skip, draw=draw)


def gradients_of(population, gradients, number):
    """Return one member's gradients, whatever the execution."""
    if isinstance(population, VmapPopulation):
        return [gradient[population.numbers.index(number)] for gradient in gradients]
    start = sum(len(population.member_parameters(n)) for n in population.numbers[: population.numbers.index(number)])
    return gradients[start : start + len(population.member_parameters(number))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [(), (1, 1)])
def test_numbers_must_be_distinct_and_some(kind, numbers):
    assert_refused(lambda: kind(perceptron(), numbers), says="numbers must be distinct and at least one, got")


@pytest.mark.parametrize("kind", KINDS)
def test_members_start_from_their_numbers(kind):
    network = perceptron()
    population = kind(network, (3, 0, 12))
    assert len(population) == 3
    for number in (3, 0, 12):
        assert_same(population.member_state(number), network.fresh(number).state_dict())
    assert_refused(population.member_state, 1, says="No member 1 in this population of members [3, 0, 12]")


@pytest.mark.parametrize("kind", KINDS)
def test_members_are_made_on_the_cpu_whatever_device_new_tensors_are_on(kind):
    """Lightning makes modules on its device, whose random numbers are others."""

    def make(number):
        torch.manual_seed(number)
        return nn.Linear(3, 2)

    with torch.device("meta"):
        population = kind(make, [0, 1])
    assert_same(population.member_state(1), make(1).state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_member_state_is_a_copy(kind):
    population = kind(perceptron(), (0, 1))
    state = population.member_state(1)
    before = copy.deepcopy(state)
    with torch.no_grad():
        for parameter in population.parameters():
            parameter.add_(1)
    assert_same(state, before)


@pytest.mark.parametrize("kind", KINDS)
def test_named_trainable_names_what_trainable_gives(kind):
    population = kind(perceptron(), (0, 1))
    named = list(population.named_trainable())
    assert [id(parameter) for _, parameter in named] == [id(parameter) for parameter in population.trainable()]
    names = [name for name, _ in perceptron().named_parameters()]
    assert [name for name, _ in named] == names * (2 if kind is LoopPopulation else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_unusual_networks(kind):
    """The state is the network's own: tied weights under both names, no buffer that is not persistent."""
    network = Odd()
    population = kind(network, (0, 1))
    state = population.member_state(1)
    assert state.keys() == network.state_dict().keys()
    network.fresh(0).load_state_dict(state)
    assert "unused" in [name for name, _ in population.named_trainable()]
    assert "last.bias" not in [name for name, _ in population.named_trainable()]

    images, labels = batch(2)
    found = step(population, images, labels)
    member = network.fresh(1)
    nn.functional.cross_entropy(member(images[1]), labels[1]).backward()
    expected = [p.grad if p.grad is not None else torch.zeros_like(p) for p in member.parameters() if p.requires_grad]
    torch.testing.assert_close(gradients_of(population, found.gradients, 1), expected)
    before = population(images[0])
    population.set_member_state(1, state)
    torch.testing.assert_close(population(images[0]), before)
    population.set_member_state(0, state)
    assert_same(population.member_state(0), population.member_state(1))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_of_all_members_but_the_skipped_ones(kind):
    network = MyrtleCNN(width=2, in_channels=1, image_size=8, num_classes=3)
    population = kind(network, (0, 5, 7)).eval()
    images = batch(1, shape=(1, 8, 8))[0][0]
    every = population(images)
    for row, number in enumerate((0, 5, 7)):
        torch.testing.assert_close(every[row], network.fresh(number).eval()(images))
    assert torch.equal(population(images, skip=frozenset({5})), every[[0, 2]])
    assert population(images, skip=frozenset({0, 5, 7})) is None


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_state_dict_is_the_same_for_both_executions(saved, loaded):
    network = MyrtleCNN(width=2, in_channels=1, image_size=8)
    source, target = saved(network, (0, 5)), loaded(network, (0, 5))
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            tensor.add_(1)
    target.load_state_dict(source.state_dict())
    for number in (0, 5):
        assert_same(source.member_state(number), target.member_state(number))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_of_other_members_is_refused(kind):
    population = kind(perceptron(), (0, 1))
    state = population.state_dict()
    assert_refused(lambda: kind(perceptron(), (0, 2)).load_state_dict(state), says="members.0002", error=RuntimeError)
    assert_refused(lambda: kind(perceptron(), (0,)).load_state_dict(state), says="Unexpected key", error=RuntimeError)
    wider = MultiLayerPerceptron(widths=(6,), image_size=4, num_classes=3)
    assert_refused(lambda: kind(wider, (0, 1)).load_state_dict(state), says="shape", error=RuntimeError)


def different(number, *, kind="activation"):
    """Return a member of which number 2 differs from the others."""
    last = number == 2
    wide = 4 if last and kind == "shape" else 3
    activation = nn.Tanh() if last and kind == "activation" else nn.LeakyReLU(0.1 * (1 + (last and kind == "slope")))
    return nn.Sequential(nn.Linear(2, wide, bias=not (last and kind == "bias")), activation)


@pytest.mark.parametrize(
    ("kind", "says"), [("activation", "module 1"), ("slope", "module 1"), ("shape", "module 0"), ("bias", "module 0")]
)
def test_members_that_a_vectorised_call_would_run_alike_are_refused(kind, says):
    says = [f"members 0 and 2 differ in the {says}", 'set execution to "loop"']
    assert_refused(lambda: VmapPopulation(functools.partial(different, kind=kind), (0, 1, 2)), says=says)
    alone = LoopPopulation(functools.partial(different, kind=kind), (0, 1, 2))
    assert len(alone) == 3


def parametrised(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def test_parametrised_members_run_together_as_alone():
    together, alone = (kind(parametrised, (0, 1)) for kind in KINDS)
    x = torch.randn(5, 3)
    torch.testing.assert_close(together(x), alone(x), rtol=0, atol=1e-6)


def test_members_are_modules_that_share_no_trained_tensor():
    one = nn.Linear(2, 3)
    assert_refused(lambda: LoopPopulation(lambda number: one, (0, 1)), says="Members 0 and 1 train one tensor, weight,")
    frozen = nn.Linear(2, 2).requires_grad_(False)
    LoopPopulation(lambda number: nn.Sequential(frozen, nn.Linear(2, 3)), (0, 1))
    for kind in KINDS:
        assert_refused(lambda kind=kind: kind(lambda number: None, (4, 5)), says="Member 4 must be a module")


@pytest.mark.parametrize("by_norm", [True, False])
def test_a_member_without_gradients_is_left_out_of_clipping(by_norm):
    population = LoopPopulation(MultiLayerPerceptron(widths=[2], image_size=2), [0, 1])
    for parameter in population.member_parameters(1):
        parameter.grad = torch.ones_like(parameter)
    population.clip_gradients(0.1, by_norm=by_norm)
    assert all(parameter.grad is None for parameter in population.member_parameters(0))
    assert all(parameter.grad.abs().max() <= 0.1 for parameter in population.member_parameters(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_norm", [True, False])
def test_clipping_is_that_of_each_member_alone(kind, by_norm):
    images, labels = batch(3)
    images[1] *= 50  # so that members differ in whether they are clipped
    limit = 1.5 if by_norm else 0.1
    population = kind(perceptron(), (0, 1, 2))
    found = step(population, images, labels)
    carry_gradients(found.losses.sum(), found.gradients, population.trainable()).backward()
    population.clip_gradients(limit, by_norm=by_norm)
    clipped = [parameter.grad for parameter in population.trainable()]
    factors = []
    for number in range(3):
        member = perceptron().fresh(number)
        nn.functional.cross_entropy(member(images[number]), labels[number]).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in member.parameters()])
        if by_norm:
            nn.utils.clip_grad_norm_(member.parameters(), limit)
        else:
            nn.utils.clip_grad_value_(member.parameters(), limit)
        factors.append(bool(norm > limit))
        expected = [parameter.grad for parameter in member.parameters()]
        torch.testing.assert_close(gradients_of(population, clipped, number), expected, atol=1e-6, rtol=1e-5)
    if by_norm:
        assert factors == [False, True, False], "the test must have members on both sides of the limit"


# ---- carry_gradients


# ---- random layers


@pytest.mark.parametrize("network", [Dropping, Noisy])
def test_random_layers_depend_on_member_and_draw_only(network):
    images, labels = batch(3)
    together = LoopPopulation(network(), (4, 5, 6))
    alone = LoopPopulation(network(), (5,))
    torch.manual_seed(1)
    for draw in (0, 1):
        a = step(together, images, labels, draw=draw)
        torch.rand(17)  # what others draw in between must not matter
        b = step(alone, images[1:2], labels[1:2], draw=draw)
        assert torch.equal(a.losses[1], b.losses[0])
    again = step(LoopPopulation(network(), (4, 5, 6)), images, labels, draw=1)
    assert torch.equal(again.losses, step(together, images, labels, draw=1).losses)
    other = step(together, images, labels, draw=2)
    assert not torch.isclose(other.losses, again.losses).any()


@pytest.mark.parametrize("network", [Dropping, Noisy])
def test_random_layers_under_vmap_are_reproducible_and_differ_by_member(network):
    images, labels = batch(1)
    images, labels = images.expand(2, *images.shape[1:]), labels.expand(2, -1)
    population = VmapPopulation(network(), (4, 5))
    state = {name: value for name, value in population.state_dict().items() if ".0005." in name}
    for name, value in state.items():
        value.copy_(population.state_dict()[name.replace("0005", "0004")])
    first = step(population, images, labels, draw=3)
    torch.rand(3)
    assert torch.equal(step(population, images, labels, draw=3).losses, first.losses)
    assert first.losses[0] != first.losses[1]  # same weights, same images, other masks
    assert not torch.isclose(step(population, images, labels, draw=4).losses, first.losses).any()


# ---- distances to targets, for searches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_distance_is_summed_over_outputs_and_averaged_over_inputs(kind, shape):
    """Also for outputs of more than one axis; the gradient is that of each member alone."""

    class Shaped(Network):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, torch.Size(shape).numel())

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).unflatten(1, shape)

    population = kind(Shaped(), (7, 2))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(5, *size, generator=generator) for size in ((4,), shape))
    found = population.step(inputs, targets, SquaredDistance(), shared=True)
    losses, gradients = found.losses, found.gradients
    assert not losses.requires_grad
    for index, number in enumerate((7, 2)):
        member = Shaped().fresh(number)
        expected = sum((member(x[None])[0] - y).square().sum() for x, y in zip(inputs, targets, strict=True)) / 5
        torch.testing.assert_close(losses[index], expected.detach())
        alone = torch.autograd.grad(expected, list(member.parameters()))
        torch.testing.assert_close(gradients_of(population, gradients, number), list(alone))
    assert all(parameter.grad is None for parameter in population.parameters())


# ---- losses of one's own


class TwoHeads(Network):
    """A network of several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.trunk = nn.Linear(16, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(self.flatten(x)).tanh()
        return self.left(x), self.right(x)


def both_heads(outputs, targets):
    logits, values = outputs
    error = nn.functional.mse_loss(values, targets["values"])
    return nn.functional.cross_entropy(logits, targets["labels"]) + 0.1 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_any_loss_of_several_outputs_and_targets(kind, shared):
    images, labels = batch(2)
    targets = {"labels": labels, "values": torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(1))}
    if shared:
        images, targets = images[0], {name: value[0] for name, value in targets.items()}
    population = kind(TwoHeads(), (3, 4))

    def member_gradients(taken, number):
        return gradients_of(population, taken.gradients, number)

    found = population.step(images, targets, both_heads, shared=shared)
    for row, number in enumerate((3, 4)):
        member = TwoHeads().fresh(number)
        own = (images, targets) if shared else (images[row], {name: value[row] for name, value in targets.items()})
        outputs = member(own[0])
        expected = both_heads(outputs, own[1])
        torch.testing.assert_close(found.losses[row], expected.detach())
        for mine, theirs in zip(found.outputs, outputs, strict=True):
            torch.testing.assert_close(mine[row], theirs.detach())
        alone = torch.autograd.grad(expected, list(member.parameters()))
        torch.testing.assert_close(member_gradients(found, number), list(alone))
    some = population.step(images, targets, both_heads, shared=shared, skip=frozenset({3}))
    assert not any(part.any() for part in (some.losses[0], some.outputs[0][0], *member_gradients(some, 3)))
    assert torch.equal(some.outputs[0][1], found.outputs[0][1])
    assert_same(member_gradients(some, 4), member_gradients(found, 4))


@pytest.mark.parametrize("loss", [CrossEntropy(0.1), SquaredDistance()], ids=["cross-entropy", "distance"])
def test_losses_of_all_members_at_once_are_those_of_each(loss):
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (torch.randn(3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    given = targets.softmax(2) if isinstance(loss, CrossEntropy) else targets
    for wanted in (given, targets.argmax(2)) if isinstance(loss, CrossEntropy) else (given,):
        expected = torch.stack([loss(mine, theirs) for mine, theirs in zip(outputs, wanted, strict=True)])
        torch.testing.assert_close(loss.stacked(outputs, wanted), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_overrides_the_call_of_another_is_used_as_it_is(kind):
    class Doubled(CrossEntropy):
        def __call__(self, outputs, targets):
            return 2 * super().__call__(outputs, targets)

    images, labels = batch(2)
    plain, doubled = (kind(perceptron(), (0, 1)).step(images, labels, one()).losses for one in (CrossEntropy, Doubled))
    torch.testing.assert_close(doubled, 2 * plain)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_are_not_one_number_are_refused(kind):
    images, labels = batch(2)

    def every_image(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    assert_refused(lambda: kind(perceptron(), (0, 1)).step(images, labels, every_image), says="one number for a")


@pytest.mark.parametrize("kind", KINDS)
def test_set_member_state_copies_into_one_member(kind):
    network = MyrtleCNN(width=2, in_channels=1, image_size=8, num_classes=3)
    population = kind(network, (0, 5, 9))
    others = {number: population.member_state(number) for number in (0, 9)}
    state = {name: torch.full_like(value, 2) for name, value in network.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in population.parameters()]
    population.set_member_state(5, state)
    for name, value in population.member_state(5).items():
        assert torch.equal(value, state[name]), name
        state[name].zero_()
        assert population.member_state(5)[name].all(), name  # a copy
    assert_same({number: population.member_state(number) for number in others}, others)
    assert [parameter.data_ptr() for parameter in population.parameters()] == pointers  # the optimizer's tensors
    assert_refused(population.set_member_state, 1, state, says="No member 1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_members_that_do_not_go_on_are_zero_and_the_others_keep_their_bits(kind, dtype):
    population = kind(MultiLayerPerceptron(widths=(3,), image_size=2, num_classes=2), [0, 1, 2]).to(dtype)
    alive = torch.tensor([True, False, True])
    gradients = [torch.randn(parameter.shape).to(dtype) for parameter in population.trainable()]
    expected = [gradient.clone() for gradient in gradients]
    for gradient, zeros, number in zip(gradients, expected, population.owners(), strict=True):
        for bad, tensor in ((torch.nan, gradient), (0.0, zeros)):
            (tensor[1] if number is None else tensor)[...] = bad if number in (None, 1) else tensor
    assert_same(population.without(gradients, alive), expected)
