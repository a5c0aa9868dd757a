"""Rules of how parameters enter a layer: one per class of layer, for every engine, with a registry."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_known
from lightning_sym._distributed import wide
from lightning_sym.curvature.blocks import Axes, KroneckerBlock

FFC: TypeAlias = Literal["shared", "per_channel"]
Sizes: TypeAlias = tuple[int, ...]
Layers: TypeAlias = "Mapping[str, tuple[nn.Module, Rule]]"
RuleT = TypeVar("RuleT", bound="type[Rule]")
_RULES: dict[type[nn.Module], "type[Rule]"] = {}
_AT_ONCE = 1 << 22  # numbers that are copied to double precision together


class Rule:
    r"""Says how each parameter of a layer enters it, which is all that an engine has to know of the layer.

    A parameter W of shape ``[O, ...]`` that is used as a matrix at R places r of each sample n,
    :math:`s_{n,r} = W a_{n,r}`, has the block :math:`B \otimes A` with

    .. math::
        A = \frac1N \sum_{n,r} a_{n,r} a_{n,r}^\top, \qquad
        B = \frac1R \sum_{n,r,v} g_{nv,r} g_{nv,r}^\top,

    where g is the gradient at s. A rule gives the vectors ``a`` (:meth:`inputs`) and ``g`` (:meth:`gradients`). A
    parameter without inputs has the block B alone: give the gradient at the parameter itself, summed over the
    places, as a single place. It is then exact.

    Both may have leading axes, for blocks of a block-diagonal matrix; see :class:`KroneckerBlock`.

    Rules have no state: they see the layer, its input ``x`` of shape ``[N, ...]``, and gradients at its output. If a
    network folds T tokens of a sample into the batch, ``[N * T, ...]``, the rule treats every row as a sample. The
    engines convert rows to places. Once per pass the engines check that the sum of all products ``g a`` is autograd's
    gradient of the parameter.

    Attributes:
        left_out: Names of parameters that get no block.
        lengthscales: Those of them that get one where length scales are asked for, see :func:`find_rule`.
        blocks_first: Names of parameters with block axes before their out axis.

    Args:
        ffc: Whether factored fully connected layers share B between channels.

    References:
        docs/theory/curvature.md, 1.1 and 1.2.

    Example:
        A new layer, a linear map of tokens ``[N, T, I]`` without bias:

        >>> class Tokens(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.matrix = nn.Parameter(torch.randn(5, 3))
        ...
        ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
        ...         return x @ self.matrix.T
        >>> @register_layer(Tokens)
        ... class TokensRule(Rule):
        ...     def inputs(self, module, x):
        ...         return {"matrix": x}  # [N, R, I]
        ...
        ...     def gradients(self, module, x, g):
        ...         return {"matrix": g}  # [V, N, R, O]
    """

    left_out: tuple[str, ...] = ()
    lengthscales: ClassVar[tuple[str, ...]] = ()
    blocks_first: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ffc: FFC = "shared") -> None:
        self.ffc = ffc

    def inputs(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return the input that each parameter multiplies.

        Args:
            module: The layer.
            x: Its input, detached. Shape ``[N, ...]``.

        Returns:
            By the parameter's name, shape ``[*blocks, N, R, I]``; parameters without A are left out.
        """
        return {}

    def gradients(self, module: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients at the products of each parameter with its inputs.

        Args:
            module: The layer.
            x: Its input, detached. Shape ``[N, ...]``.
            g: Square-root gradients at its output. Shape ``[V, N, ...]``, the rest as the output.

        Returns:
            By the parameter's name, shape ``[*blocks, V, N, R, O]``.
        """
        raise NotImplementedError

    def axes(self, module: Any, name: str) -> Axes | None:
        """Return the layout of a block in its parameter, if not ``[O, *blocks, I]`` or with blocks first.

        Args:
            module: The layer.
            name: Name of the parameter.

        Returns:
            Sizes and permutation such that ``entries.reshape(sizes).permute(permutation)`` has the order of the
            parameter: ``((O, I), (1, 0))`` for a matrix of shape ``[I, O]``. None, for none such.
        """
        return None

    def in_factors(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return N times A of each parameter that has one; override it where there is a faster way.

        Args:
            module: The layer.
            x: Its input, detached. Shape ``[N, ...]``.

        Returns:
            By the parameter's name, shape ``[*blocks, I, I]``.
        """
        return {name: gram(a, a.ndim - 3) for name, a in self.inputs(module, x).items()}

    def out_factors(self, module: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return B of each parameter.

        Args:
            module: The layer.
            x: Its input, detached. Shape ``[N, ...]``.
            g: Square-root gradients at its output. Shape ``[V, N, ...]``.

        Returns:
            By the parameter's name, shape ``[*blocks, O, O]``.
        """
        return mean_products(self.gradients(module, x, g))

    def blocks(self, module: Any, x: Tensor, g: Tensor, samples: int | None = None) -> dict[str, KroneckerBlock]:
        """Return the blocks of one batch: B summed over it, A averaged.

        Args:
            module: The layer.
            x: Its input, detached. Shape ``[N, ...]``.
            g: All square-root gradients at its output. Shape ``[V, N, ...]``.
            samples: N, where the rows of ``x`` and ``g`` are N times as many places, those of a sample together;
                default: every row is a sample. All rows count; :func:`factors` leaves out those that nobody sees.

        Returns:
            By the parameter's name.
        """
        samples = x.shape[0] if samples is None else samples
        inner = {name: a / samples for name, a in self.in_factors(module, x).items()}
        vectors = unfolded(self.gradients(module, x, g), samples, inner)
        return {
            name: KroneckerBlock(
                b, inner.get(name), name in self.blocks_first, self.axes(module, name), vectors[name].shape[-2]
            )
            for name, b in mean_products(vectors).items()
        }


def mean_products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return B ``[*blocks, O, O]`` of vectors ``[*blocks, V, N, R, O]``: the sum of their outer products, over R."""
    return {name: b / max(1, vectors[name].shape[-2]) for name, b in summed_products(vectors).items()}


def summed_products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of outer products of vectors ``[*blocks, V, N, R, O]``. Shape ``[*blocks, O, O]``."""
    products: dict[int, Tensor] = {}  # one for a weight and a bias with the same gradients
    for v in vectors.values():
        if id(v) not in products:
            products[id(v)] = gram(v, v.ndim - 4)
    return {name: products[id(v)] for name, v in vectors.items()}


def unfolded(vectors: Mapping[str, Tensor], samples: int, with_inputs: Collection[str]) -> dict[str, Tensor]:
    """Return the gradients of a rule, where the rows of a layer may be places of samples.

    Args:
        vectors: By the parameter's name, shape ``[*blocks, V, N * T, R, O]``, the T rows of a sample together.
        samples: N.
        with_inputs: Parameters that have A: their places are now those of all rows. The gradients of others are
            summed over the rows of a sample.

    Returns:
        By the parameter's name, shape ``[*blocks, V, N, T * R, O]``, or ``[*blocks, V, N, R, O]`` without A.
    """
    if all(v.shape[-3] == samples for v in vectors.values()):
        return dict(vectors)
    split = {name: torch.unflatten(v, -3, (samples, -1)) for name, v in vectors.items()}  # [*blocks, V, N, T, R, O]
    return {name: v.flatten(-3, -2) if name in with_inputs else v.sum(-3) for name, v in split.items()}


def gram(vectors: Tensor, block_axes: int) -> Tensor:
    """Return the sum of outer products over all axes but the leading ones and the last, in double precision.

    Products of single precision numbers are exact there, so that inputs far from 0 keep all of their digits.

    Args:
        vectors: Shape ``[*blocks, ..., R, F]``.
        block_axes: How many axes lead.

    Returns:
        Shape ``[*blocks, F, F]``; float64 (float32 where the device has none).
    """
    vectors = vectors.flatten(block_axes, -3)  # [*blocks, M, R, F]
    rows, features = vectors.shape[-2:]
    total = vectors.new_zeros(*vectors.shape[:block_axes], features, features, dtype=wide(vectors.device))
    step = max(128, features // 4)  # the upper triangle only, in blocks that are large enough for fast products
    step = features if features < 2 * step else step
    places_last = vectors.stride(-2) == 1 and vectors.stride(-1) != 1
    one = max(1, vectors[(slice(None),) * block_axes + (slice(1),)].numel())
    for part in torch.split(vectors, max(1, _AT_ONCE // one), block_axes) if vectors.numel() else ():
        part = part.to(total.dtype)
        if (
            rows >= features and places_last and step == features
        ):  # a product per sample: no copy of images, which have the places last
            total += (part.mT @ part).sum(-3)
        else:
            part = part.flatten(block_axes, -2)
            for start in range(0, features, step):
                total[..., start : start + step, start:] += part[..., start : start + step].mT @ part[..., start:]
    for start in range(step, features, step):
        total[..., start:, start - step : start] = total[..., start - step : start, start:].mT
    return total


def register_layer(*classes: type[nn.Module]) -> Callable[[RuleT], RuleT]:
    """Teach every engine a class of layers: a decorator for its :class:`Rule`.

    The layer takes one tensor with samples on the first axis, and gives one. No sample's output depends on another
    sample in eval mode. Its parameters are direct attributes. Subclasses that keep ``forward`` follow the same rule.
    A rule that does not fit its layer is an error of :func:`factors`.

    Args:
        classes: Subclasses of ``nn.Module``. A later registration replaces an earlier one.

    Returns:
        The decorator, which returns the rule.

    Raises:
        TypeError: If one is no module class, or the rule is no subclass of :class:`Rule`.

    Example:
        See :class:`Rule`.
    """
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"register_layer takes subclasses of nn.Module, got {kind!r}.")

    def register(rule: RuleT) -> RuleT:
        if not (isinstance(rule, type) and issubclass(rule, Rule)):
            raise TypeError(f"register_layer decorates a subclass of Rule, got {rule!r}.")
        for kind in classes:
            _RULES[kind] = rule
        return rule

    return register


def find_rule(name: str, module: nn.Module, ffc: FFC = "shared", lengthscales: bool = False) -> Rule:
    """Return the rule of a layer.

    Args:
        name: Name of the module in its network, for the error.
        module: A module with direct parameters.
        ffc: As for :class:`Rule`.
        lengthscales: Whether length scales get blocks.

    Returns:
        The rule of its class, or of the next base class with the same ``forward``.

    Raises:
        ValueError: If there is none, or ``ffc`` is unknown.
    """
    check_known("ffc", ffc, ("shared", "per_channel"))
    for kind in type(module).__mro__:
        if kind in _RULES and (kind is type(module) or kind.forward is type(module).forward):
            rule = _RULES[kind](ffc)
            if lengthscales:
                rule.left_out = tuple(key for key in rule.left_out if key not in rule.lengthscales)
            return rule
    raise ValueError(
        f"Module {name!r} has parameters but its type {type(module).__name__} has no curvature rule; teach it with "
        "lightning_sym.curvature.register_layer, or freeze its parameters."
    )


def full_name(module: str, parameter: str) -> str:
    """Return the name that a parameter of a module has in the network."""
    return f"{module}.{parameter}" if module else parameter


def curved_parameters(layers: Layers, *, left_out: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield the trainable parameters of layers that have a block, in order.

    Args:
        layers: The layers and their rules, by name.
        left_out: Whether to yield those that have none on purpose instead.

    Yields:
        Full name of a parameter, name of its layer, and its name in the layer.
    """
    for name, (module, rule) in layers.items():
        for key, tensor in module.named_parameters(recurse=False):
            if tensor.requires_grad and (key in rule.left_out) == left_out:
                yield full_name(name, key), name, key


# ---- layers of torch


@register_layer(nn.Linear)
class LinearRule(Rule):
    """``x`` of shape ``[N, ..., I]``: all axes between are places."""

    def inputs(self, module: nn.Linear, x: Tensor) -> dict[str, Tensor]:
        """Return the rows of x."""
        return {"weight": x.reshape(x.shape[0], -1, x.shape[-1])}

    def gradients(self, module: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the rows of g, for the bias their sum."""
        g = g.reshape(*g.shape[:2], -1, g.shape[-1])
        return {"weight": g, "bias": g if g.shape[2] == 1 else g.sum(2, keepdim=True)}


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(Rule):
    """Any stride, padding, dilation, groups and padding mode; groups are blocks, each with its own B and A.

    The places are the positions of the output: KFC, as in CurvLinOps. BackPACK's B is about T times larger.
    """

    blocks_first = ("weight",)

    def inputs(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return the input of each output position: shape ``[N, T, I]``, with groups ``[groups, N, T, I]``."""
        patches = self.patches(module, x)  # [N, groups, I, T]
        return {"weight": patches[:, 0].mT if module.groups == 1 else patches.transpose(0, 1).mT}

    def patches(self, module: Any, x: Tensor) -> Tensor:
        """Return the patches of a convolution of any dimension. Shape ``[N, groups, I, T]``."""
        amounts = module._reversed_padding_repeated_twice  # last axis first; torch has it ready for "same" too
        x = F.pad(x, amounts, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
        return _windows(x, module.kernel_size, module.stride, module.dilation, module.groups)

    def gradients(self, module: nn.Conv2d, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradient at each position, for the bias their sum."""
        g = g.flatten(3)  # [V, N, C', T]
        weight = g.mT if module.groups == 1 else torch.unflatten(g, 2, (module.groups, -1)).movedim(2, 0).mT
        return {"weight": weight, "bias": g.sum(3)[:, :, None]}


def _windows(x: Tensor, kernel: Sizes, stride: Sizes, dilation: Sizes, groups: int, flip: bool = False) -> Tensor:
    """Return the windows of a padded input of any dimension, maybe mirrored. Shape ``[N, groups, I, T]``."""
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        # A window per position, then every gap-th of its entries.
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
        x = x.flip(-1) if flip else x
    # [N, C, *positions, *kernel] to [N, C, *kernel, *positions]
    dims = len(kernel)
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    return x.reshape(x.shape[0], groups, -1, x.shape[-dims:].numel())


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(ConvRule):
    """That of the convolution which gives the same: of the input with zeros between, with the mirrored kernel.

    The places are the positions of the output. So both ways to write a layer have the same evidence.
    """

    def patches(self, module: nn.ConvTranspose2d, x: Tensor) -> Tensor:
        """Return the patches of the convolution which gives the same. Shape ``[N, groups, I, T]``."""
        sizes = [(length - 1) * step + 1 for length, step in zip(x.shape[2:], module.stride, strict=True)]
        apart = x.new_zeros(*x.shape[:2], *sizes)
        apart[(slice(None), slice(None), *(slice(None, None, step) for step in module.stride))] = x
        amounts: list[int] = []
        for axis, (size, gap, more) in enumerate(
            zip(module.kernel_size, module.dilation, module.output_padding, strict=True)
        ):
            reach = gap * (size - 1) - int(module.padding[axis])  # negative: cut off
            amounts = [reach, reach + more, *amounts]  # last axis first
        ones = (1,) * len(sizes)
        return _windows(F.pad(apart, amounts), module.kernel_size, ones, module.dilation, module.groups, flip=True)

    def axes(self, module: nn.ConvTranspose2d, name: str) -> Axes | None:
        """Return that of a weight of shape ``[groups * I, O, *kernel]``."""
        if name != "weight":
            return None
        (rows, out), kernel = module.weight.shape[:2], module.weight.shape[2:].numel()
        return (module.groups, out, rows // module.groups, kernel), (0, 2, 1, 3)


@register_layer(
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
class NormRule(Rule):
    """Scale and shift after a normalisation, in eval mode: exact dense blocks, ``P x P``.

    Each of them enters linearly and once. They belong to channels.
    """

    def gradients(self, module: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients at scale and shift."""
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"{type(module).__name__} has no running statistics, so that samples depend on one another and "
                "curvature is not defined; make it with track_running_stats=True."
            )
        plain = copy.copy(module)
        plain._parameters = dict.fromkeys(module._parameters)  # without scale and shift
        axes = self.summed_axes(module, g)
        found = {"weight": g * plain.forward(x), "bias": g}
        return {name: (values.sum(axes) if axes else values).flatten(2)[:, :, None] for name, values in found.items()}

    def summed_axes(self, module: Any, g: Tensor) -> tuple[int, ...]:
        """Return the axes of ``g`` along which a parameter is shared: all but the channels."""
        return tuple(range(3, g.ndim))


@register_layer(nn.LayerNorm, nn.RMSNorm)
class LayerNormRule(NormRule):
    """The same over the normalised axes."""

    def summed_axes(self, module: nn.LayerNorm, g: Tensor) -> tuple[int, ...]:
        """Return the axes between the samples and those that are normalised."""
        return tuple(range(2, g.ndim - len(module.normalized_shape)))


@register_layer(nn.PReLU)
class PReLURule(Rule):
    """The slope, or one of each channel. Exact dense block."""

    def gradients(self, module: nn.PReLU, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients at the slopes."""
        slopes = g * x.clamp_max(0)
        if module.num_parameters == 1:
            return {"weight": slopes.flatten(2).sum(2)[..., None, None]}
        return {"weight": slopes.sum(tuple(range(3, g.ndim)))[:, :, None] if g.ndim > 3 else slopes[:, :, None]}


def circular_gram(x: Tensor, kernel: int, *, depthwise: bool = False) -> Tensor:
    r"""Return the sum of outer products of circular patches, without making the patches.

    Entry :math:`(c, i, j), (d, k, l)` depends on the offset :math:`(k-i, l-j)` only, as the sum runs over all
    positions of a torus. All offsets together are the self-convolution of the features. By the convolution theorem it
    needs one product of ``C x C`` for each frequency instead of one for each position and offset. The opposite offset
    has the transposed matrix.

    Args:
        x: Shape ``[N, C, H, W]``.
        kernel: Side k of the patches.
        depthwise: Whether to leave out the products of different channels.

    Returns:
        Shape ``[C, k * k, C, k * k]``; depthwise ``[C, k * k, k * k]``.
    """
    channels = x.shape[1]
    lags = range(1 - kernel, kernel)
    offsets = [(down, right) for down in range(kernel) for right in (lags if down else range(kernel))]
    x = x.to(wide(x.device))  # as in gram
    waves = torch.fft.rfft2(x).flatten(2).permute(2, 1, 0).contiguous()  # [F, C, N]
    inverse = _inverse_transform(offsets, *x.shape[2:]).to(waves)  # [offsets, F]
    found = x.new_zeros(len(offsets), channels if depthwise else channels**2)
    for at in torch.split(torch.arange(len(waves), device=x.device), max(1, _AT_ONCE // found.shape[1])):
        if depthwise:
            spectrum = waves[at].abs().square().sum(2).to(waves)
        else:
            spectrum = (waves[at].conj() @ waves[at].mT).flatten(1)
        found += (inverse[:, at] @ spectrum).real
    grams: dict[tuple[int, int], Tensor] = {}
    for (down, right), product in zip(
        offsets, found if depthwise else torch.unflatten(found, 1, (channels, -1)), strict=True
    ):
        if (down, right) == (0, 0) and not depthwise:
            product = (product + product.mT) / 2
        grams[down, right] = product
        grams[-down, -right] = product if depthwise else product.mT
    table = torch.stack([grams[down, right] for down in lags for right in lags])  # [(2 k - 1)^2, C, C]
    at = torch.arange(kernel, device=x.device)
    lag = at[None, :] - at[:, None] + kernel - 1  # [i, k]
    index = lag[:, None, :, None] * (2 * kernel - 1) + lag[None, :, None, :]  # [i, j, k, l]
    products = table[index.reshape(kernel**2, kernel**2)]
    return products.permute(2, 0, 1) if depthwise else products.permute(2, 0, 3, 1)


def _inverse_transform(offsets: list[tuple[int, int]], height: int, width: int) -> Tensor:
    """Return the inverse of ``rfft2`` at a few positions, complex128 on the CPU. Shape ``[positions, F]``."""
    down, right = torch.tensor(offsets).unbind(1)
    rows, columns = torch.arange(height), torch.arange(width // 2 + 1)
    turns = (down[:, None] * rows % height).double()[:, :, None] / height
    turns = turns + (right[:, None] * columns % width).double()[:, None] / width
    # Columns other than the first and the last stand for two frequencies.
    weights = torch.where((columns == 0) | (2 * columns == width), 1.0, 2.0).double() / (height * width)
    return torch.polar(weights.expand_as(turns), 2 * math.pi * turns).flatten(1)


def circular_patches(x: Tensor, kernel: int) -> Tensor:
    """Return circular patches of ``[N, C, H, W]``, for odd kernels. Shape ``[N, C, k * k, H * W]``."""
    reach = (kernel - 1) // 2
    shifts = [(reach - i, reach - j) for i in range(kernel) for j in range(kernel)]
    return torch.stack([x.roll(shift, (2, 3)).flatten(2) for shift in shifts], dim=2)
