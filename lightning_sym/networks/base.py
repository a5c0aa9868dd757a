"""The base class of all networks that a recipe may name, and the wrapper for other modules."""

import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, fx, nn

from lightning_sym._checks import check_integers, check_known, height_width
from lightning_sym._random import seeded
from lightning_sym.networks.cuts import TracedNetwork, crossing_nodes, cut, lower_half, trace, upper_half, with_values
from lightning_sym.networks.narrowing import KEPT, kept_as_json, narrowed

_PUBLIC = "lightning_sym.networks"
_PRECISIONS = {  # of a trainer
    torch.float16: "16-true",
    torch.bfloat16: "bf16-true",
    torch.float32: "32-true",
    torch.float64: "64-true",
}
M = TypeVar("M", bound=nn.Module)


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor record its arguments unless a subclass's constructor did so already."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if "_recorded_call" not in self.__dict__:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError:
                pass  # the constructor itself raises a better error
            else:
                bound.apply_defaults()
                self.__dict__["_recorded_call"] = (snapshot(bound.args[1:]), snapshot(bound.kwargs))
        init(self, *args, **kwargs)

    return recorded


def snapshot(value: Any) -> Any:
    """Copy containers, so that later changes to them leave the record unchanged."""
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    return value


@dataclass(frozen=True)
class Cuts:
    """A network cut at several sites, made by :meth:`Network.cuts`.

    All modules share the network's submodules and parameters, under the same names, as those of
    :meth:`Network.split` do.

    Attributes:
        sites: The cut sites.
        lower: Maps the input to a tuple with one tuple per site: all values that cross the cut, in execution order
            after the site's activation.
        uppers: By site, maps that tuple of values to the output.
        crossing: By site, names of the values: of the module that returns the value, otherwise of the operation.
        whole: Maps the input to a tuple: the output, then the values that cross the cuts, site by site.
    """

    sites: tuple[str, ...]
    lower: nn.Module
    uppers: Mapping[str, nn.Module]
    crossing: Mapping[str, tuple[str, ...]]
    whole: nn.Module

    @property
    def taps(self) -> list[str]:
        """Names of the crossing values, in the order of ``whole``: ``site/0``, ``site/1``, ..."""
        return [f"{site}/{index}" for site in self.sites for index in range(len(self.crossing[site]))]


class NetworkOrModule(ABC):
    """Annotation of a task's argument ``network`` on the command line: a :class:`Network`, or any module's class.

    The command line wraps modules other than networks, as ``build`` does; in Python pass
    ``Network.wrap(functools.partial(YourModule, ...))``.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return issubclass(kind, nn.Module) if cls is NetworkOrModule else NotImplemented

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output."""


class Network(nn.Module, NetworkOrModule):
    """A module that records its constructor arguments, knows its sites, and can be cut in two at each of them.

    A new architecture is a subclass with ``__init__`` and ``forward``, as for any module. Name the arguments that
    follow from the data ``in_channels``, ``num_classes`` and ``image_size``, to which recipes link; ``image_size`` is
    the pair (height, width), or the side of square images if the argument is annotated as an int (if it has no
    annotation, if its default is one). ``forward`` takes one tensor (further arguments need defaults, which are kept).
    Activations are functions, or modules that are not in place and are called once each; otherwise :meth:`sites`
    raises an error, unless the network is wrapped by :meth:`wrap`.

    The arguments of the outermost constructor are recorded, defaults included. They survive ``copy.deepcopy``
    and pickling.

    Attributes:
        leaf_modules: Module types that tracing treats as one call, for modules with an untraceable forward. All of
            ``torch.nn`` (except containers) and ``lightning_sym.layers`` and every activation are one call already.

    Example:
        >>> from lightning_sym.networks import MultiLayerPerceptron
        >>> network = MultiLayerPerceptron(widths=[16, 16], image_size=8)
        >>> network.sites()
        ['activation1', 'activation2']
        >>> lower, upper = network.split("activation1")
    """

    leaf_modules: ClassVar[tuple[type[nn.Module], ...]] = ()
    _strict: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__[: cls.__mro__.index(nn.Module)]
        hidden = [base for base in order[order.index(Network) :] if base is not Network and "forward" in vars(base)]
        if cls.forward is Network.forward and hidden:
            other = hidden[0].__name__
            raise TypeError(
                f"the forward of {other} is hidden in class {cls.__name__}, as Network precedes it; expected "
                f"class {cls.__name__}({other}, Network), or Network.wrap({other}(...)) without a new class"
            )
        made_by = next((base for base in order if "__init__" in vars(base)), None)
        if made_by is not None and (made_by is cls or not issubclass(made_by, Network)):
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the output, usually logits ``[N, C]``, for inputs with first axis ``N``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network, and explain errors from images of a wrong shape.

        Raises:
            ValueError: If it fails, and the images do not match ``in_channels`` and ``image_size``.
        """
        with self.explaining(*args):
            return super().__call__(*args, **kwargs)

    @contextmanager
    def explaining(self, *inputs: object) -> Iterator[None]:
        """Replace torch's error in the block by an explanation if the input has a wrong shape or dtype.

        Successful runs are not checked: many networks take images of any size.

        Args:
            *inputs: Arguments of the network, or of its first layers; only the first counts.

        Raises:
            ValueError: If the block fails, and the images do not match ``in_channels`` and ``image_size``, or weights.
        """
        try:
            yield
        except RuntimeError as error:
            if not (inputs and isinstance(inputs[0], Tensor)):
                raise
            shape, given, kind = self.image_shape(), tuple(inputs[0].shape), inputs[0].dtype
            weights = next((own.dtype for own in self.parameters()), kind)
            if weights != kind and weights in _PRECISIONS and re.search("dtype|scalar type", str(error)):
                raise ValueError(
                    f"The network has weights in {weights} and cannot take inputs in {kind}; convert them, or set the "
                    f"precision of the trainer to {_PRECISIONS[weights]!r}."
                ) from error
            if shape is None or given[1:] == shape:
                raise
            raise ValueError(
                f"{type(self).__name__} was built for images of shape [N, {', '.join(map(str, shape))}] and cannot "
                f"take {list(given)}; use data of the kind that it was trained on."
            ) from error

    def image_shape(self) -> tuple[int, ...] | None:
        """Return the constructor's channels, height and width; None if they are not recorded."""
        args, kwargs = self._call
        given = inspect.signature(type(self).__init__).bind(self, *args, **kwargs).arguments
        size = given.get("image_size") or given.get("grid")
        return (given["in_channels"], *height_width(size, "image_size")) if size and "in_channels" in given else None

    @property
    def architecture(self) -> dict[str, Any]:
        """Description from which :func:`lightning_sym.networks.build` makes such a network, ready for JSON.

        ``{"class_path": "lightning_sym.networks.MyrtleCNN", "init_args": {"width": 16, ...}}``: the public path of
        the package's own classes, module and qualified name of others; all arguments, with tuples as lists. A
        :func:`narrowed <lightning_sym.networks.narrowed>` network adds ``kept``, the positions of its tensors.

        Raises:
            ValueError: If an argument cannot be written as JSON.
        """
        cls = type(self)
        arguments: dict[str, object] = {}
        args, kwargs = self._call
        bound = inspect.signature(cls.__init__).bind(self, *args, **kwargs)
        for name, value in list(bound.arguments.items())[1:]:
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                arguments[name] = value
            elif value:
                raise ValueError(f"{cls.__name__} got unnamed arguments (*{name}); pass them by name to record them.")
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path.startswith(f"{_PUBLIC}.") and getattr(sys.modules.get(_PUBLIC), cls.__name__, None) is cls:
            path = f"{_PUBLIC}.{cls.__name__}"
        return self._described(path, arguments)

    def _narrowed_like_this(self, whole: M) -> M:
        return narrowed(whole, self.__dict__[KEPT]) if KEPT in self.__dict__ else whole

    def _described(self, path: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Return class path and arguments in jsonargparse's form, with the kept positions of a narrowed network."""
        described: dict[str, Any] = {
            "class_path": path,
            "init_args": {name: _json(value, name, path) for name, value in arguments.items()},
        }
        if KEPT in self.__dict__:
            described["kept"] = kept_as_json(self.__dict__[KEPT])
        return described

    def fresh(self, seed: int) -> Self:
        """Return a newly initialised network of the same class and arguments.

        Args:
            seed: Seed of the initialisation. The weights are exactly those of ``torch.manual_seed(seed)``
                followed by the constructor on the CPU. The caller's generator is unchanged.

        Returns:
            The new network, on the default device and dtype, in train mode. All devices give the same weights.

        Raises:
            ValueError: If a constructor argument is itself a module, which both networks would share.
        """
        args, kwargs = self._call
        for value in (*args, *kwargs.values()):
            if isinstance(value, nn.Module):
                raise ValueError(
                    f"{type(self).__name__} was given a {type(value).__name__}, which a fresh network "
                    f"would share; let its constructor build it."
                )
        return self._narrowed_like_this(_drawn(seed, lambda: type(self)(*args, **kwargs)))

    def sites(self) -> list[str]:
        """Return the names of the network's sites in execution order.

        A site is the output of an activation: of a module, named as in ``named_modules()``, or of a function, named
        after the module that calls it: ``block.functional-relu``, ``block.functional-relu-2``. A subclass may override
        this method to return names of other modules, such as whole blocks, at which :meth:`split` then cuts.

        Returns:
            The site names, each once.

        Raises:
            ValueError: If the network cannot be traced, calls an activation module twice or works in place; the
                message names the module.
        """
        return list(trace(self, self.leaf_modules, strict=self._strict).sites)

    def split(self, site: str) -> tuple[nn.Module, nn.Module]:
        """Cut the network after a site: ``upper(lower(x)) == network(x)``, bitwise.

        ``lower`` computes everything up to and including the site in execution order, ``upper`` the rest. If the rest
        needs only the site's activation, ``lower`` returns that tensor. Within a residual block it needs more (the
        skip connection, sometimes a size). Then ``lower`` returns a tuple that begins with the site's activation, and
        ``upper`` takes that tuple as its one argument.

        Both halves share the network's submodules and parameters, under the same names: training a half
        trains the network, and ``half.eval()`` puts the shared submodules in eval mode. They are traced in
        the network's present mode; split a network that reads ``self.training`` in ``forward`` again after a change
        of mode. ``upper`` does not modify its inputs, unless the network's ``forward`` overwrites a tensor and later
        reads a view of it.

        Args:
            site: One of :meth:`sites`.

        Returns:
            ``lower`` and ``upper``.

        Raises:
            ValueError: If there is no such site, or as for :meth:`sites`.
        """
        traced, (node,) = self._nodes([site])
        return cut(self, traced.graph, node)

    def cuts(self, sites: Sequence[str] | None = None, *, before: bool = False) -> Cuts:
        """Cut the network at several sites, with common bottom layers that run once for all of them.

        Args:
            sites: Some of :meth:`sites`; default all.
            before: Cut before the sites' modules instead of after them: the first crossing value is then the input
                of the activation.

        Returns:
            The parts; they share and modify tensors like the halves of :meth:`split`.

        Raises:
            ValueError: If there is no such site or none is given, or as for :meth:`sites`.
        """
        known = self.sites()
        names = known if sites is None else [site_name(site, known) for site in sites]
        if not names:
            raise ValueError(f"{type(self).__name__} must be cut at one site at least; it has {known}.")
        traced, nodes = self._nodes(names)
        if before:
            nodes = [node.all_input_nodes[0] for node in nodes]
        crossing = {name: crossing_nodes(traced.graph, node) for name, node in zip(names, nodes, strict=True)}
        return Cuts(
            sites=tuple(names),
            lower=lower_half(self, traced.graph, nodes),
            uppers={name: upper_half(self, traced.graph, node) for name, node in zip(names, nodes, strict=True)},
            crossing={
                name: tuple(str(node.target) if node.op == "call_module" else node.name for node in found)
                for name, found in crossing.items()
            },
            whole=with_values(self, traced.graph, [node for found in crossing.values() for node in found]),
        )

    def _nodes(self, sites: Sequence[str]) -> tuple[TracedNetwork, list[fx.Node]]:
        """Trace the network and find the nodes of sites."""
        traced = trace(self, self.leaf_modules, strict=self._strict)
        names = list(traced.sites) if type(self).sites is Network.sites else self.sites()
        nodes = []
        for site in (site_name(given, names) for given in sites):
            check_known("site", site, names)
            node = traced.sites.get(site) or traced.outputs.get(site)
            if node is None:
                raise ValueError(f"{type(self).__name__}.sites() names {site!r}, but no module of that name is called.")
            nodes.append(node)
        return traced, nodes

    @staticmethod
    def wrap(module: nn.Module | Callable[[], nn.Module]) -> "WrappedNetwork":
        """Return a network around any module that torch.fx can trace.

        Args:
            module: The module, which the wrapper then owns. Better: a function without arguments that builds one,
                such as ``Network.wrap(functools.partial(torchvision.models.resnet18, num_classes=10))``, so that
                :meth:`fresh` and :attr:`architecture` work.

        Returns:
            The wrapper; see :class:`WrappedNetwork`.
        """
        return WrappedNetwork(module)

    @property
    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the constructor, defaults included."""
        args, kwargs = self.__dict__.get("_recorded_call", ((), {}))
        return snapshot(args), snapshot(kwargs)


class _SequentialNetwork(Network):
    """A network that calls its children in the order of their addition."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[N, C]`` for images ``[N, in_channels, height, width]``."""
        for module in self.children():
            x = module(x)
        return x


class _ModuleHolder(Network):
    """A network that passes its input to one module, ``self.module``, with the lenient rules of wrapping.

    Args:
        module: The module, which the holder then owns; ``inplace`` becomes False in all its parts.
    """

    _strict = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for part in module.modules():
            if getattr(part, "inplace", False) is True:
                part.inplace = False  # type: ignore[assignment]
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output."""
        output: Tensor = self.module(x)
        return output


class WrappedNetwork(_ModuleHolder):
    """A network around any module that torch.fx can trace; made by :meth:`Network.wrap`.

    - The module is owned, not copied, and ``inplace`` becomes False in all its parts.
    - Parameters, state-dict keys and sites have the module's own names after ``module.``, as in
      ``named_modules()``; load other weights into ``wrapped.module``, the module itself.
    - Each call of a module is one site: ``module.layer1.0.relu`` is the first call, ``module.layer1.0.relu-2`` the
      second.
    - Elementwise activation functions (``F.relu``, ``torch.tanh``, ``x.sigmoid()``...) are sites as well, named after
      the module that calls them: ``module.functional-relu``, ``module.functional-relu-2``. Compositions such as
      ``x.clamp(min=0)`` or ``x * torch.sigmoid(x)`` are not recognised.

    Args:
        module: The module, or a callable without arguments that builds one: a function, a class, or a
            ``functools.partial`` of either. Only a callable supports :meth:`fresh` and (if it is importable and its
            keyword arguments can be written as JSON) :attr:`architecture`.
        factory: The callable that built ``module``, if that is a module; None if unknown.

    Raises:
        ValueError: If ``module`` is not and does not build a module, or is a ``Network`` already.
    """

    def __init__(
        self, module: nn.Module | Callable[[], nn.Module], factory: Callable[[], nn.Module] | None = None
    ) -> None:
        built: object = module
        if not isinstance(module, nn.Module) and callable(module):
            factory, built = module, module()
        if not isinstance(built, nn.Module):
            raise ValueError(f"Only a module or a callable that builds one can be wrapped, got {module!r}.")
        if isinstance(built, Network):
            raise ValueError(f"{type(built).__name__} is a Network already; use it without Network.wrap.")
        super().__init__(built)
        self._factory = factory
        self.__dict__["_recorded_call"] = ((), {})  # without the module, which would be stored twice

    @property
    def architecture(self) -> dict[str, Any]:
        """Path and keyword arguments of the function or class that builds the module, ready for JSON.

        Raises:
            ValueError: If a module was wrapped rather than a callable, the callable cannot be imported by its
                name, or an argument cannot be written as JSON.
        """
        function: Any = self._require_factory("its architecture recorded")
        arguments: dict[str, Any] = {}
        if isinstance(function, functools.partial):
            args, arguments, function = function.args, function.keywords, function.func
            named = inspect.signature(function).bind_partial(*args)
            if any(
                named.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL for name in named.arguments
            ):
                raise ValueError(f"{function!r} got unnamed arguments; pass them by name to record them.")
            arguments = {**named.arguments, **arguments}
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        found: object = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None or found is not function:
            raise ValueError(
                f"{name or repr(function)} cannot be imported by that name, so that the architecture cannot "
                f"be recorded; pass Network.wrap a functools.partial of a function or class of a module."
            )
        return self._described(f"{module}.{name}", arguments)

    def fresh(self, seed: int) -> Self:
        """Return a newly initialised network from the same factory.

        See :meth:`Network.fresh`.

        Args:
            seed: Seed of the initialisation.

        Returns:
            The new network.

        Raises:
            ValueError: If a module was wrapped rather than a callable.
        """
        factory = self._require_factory("fresh weights")
        return self._narrowed_like_this(_drawn(seed, lambda: type(self)(factory)))

    def image_shape(self) -> None:
        """Return None: the shape of the module's images is unknown."""

    def _require_factory(self, purpose: str) -> Callable[[], nn.Module]:
        """Return the factory, or raise an error if only a module was wrapped."""
        if self._factory is None:
            kind = type(self.module).__name__
            raise ValueError(
                f"This {kind} was wrapped as a module and cannot have {purpose}; "
                f"pass Network.wrap a callable that builds it, such as functools.partial({kind}, ...)."
            )
        return self._factory


def site_name(name: str, sites: Sequence[str]) -> str:
    """Return the name of a site for one that may lack ``module.``, which figures and tables of wrapped networks omit.

    Args:
        name: The name, with or without it.
        sites: Sites of the network.

    Example:
        >>> site_name("layer1.0.relu", ["module.relu", "module.layer1.0.relu"])
        'module.layer1.0.relu'
    """
    whole = f"module.{name}"
    return whole if name not in sites and whole in sites else name


def architecture_name(network: nn.Module) -> str:
    """Return the name of a network for titles and tables: that of its class, or of the wrapped module's."""
    return type(network.module if isinstance(network, WrappedNetwork) else network).__name__


def _drawn(seed: int, make: Callable[[], M]) -> M:
    """Make a module with a seed's random numbers and move it to the default device.

    Lightning makes an accelerator the default device in ``configure_model``, and random numbers differ between devices.
    """
    check_integers(0, seed=seed)
    with seeded(seed), torch.device("cpu"):
        made = make()
    return made.to(torch.get_default_device())


def _json(value: object, name: str, path: str) -> Any:
    """Convert a value for JSON: tuples become lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_json(item, name, path) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json(item, name, path) for key, item in value.items()}
    raise ValueError(
        f"The argument {name} of {path} is a {type(value).__name__}, which cannot be written as JSON; "
        f"use numbers, strings, lists or dictionaries for architectures to be recorded."
    )
