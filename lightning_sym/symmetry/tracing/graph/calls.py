"""Calls of a network: the arguments, and the outputs that count."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_sym._distributed import outputs_on
from lightning_sym._text import nearest, unknown

# Outputs of `transformers` networks that their own next call reads.
_CACHES = ("past_key_values", "cache_params", "mems")


class OutputError(ValueError):
    """The network has no comparable output, or none of the requested name."""


class Call(NamedTuple):
    """One call of a network: its arguments, and the outputs that count.

    As a named tuple, it can be mapped over its tensors like any nested arguments.

    Attributes:
        positional: The positional arguments.
        keywords: The keyword arguments.
        output: The name (or index in a tuple) of the one output that counts. None selects ``logits`` where this name
            exists, and otherwise all outputs except caches.
    """

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}
    output: str | int | None = None

    @classmethod
    def of(cls, given: Any, keywords: Mapping[str, Any] | None = None, output: str | int | None = None) -> "Call":
        """Build a call from a user's arguments.

        Args:
            given: An input, a tuple of positional arguments, or a call; None for no positional argument.
            keywords: Keyword arguments.
            output: The output that counts.
        """
        if isinstance(given, Call):
            return given
        positional = given if isinstance(given, tuple) else () if given is None else (given,)
        return cls(positional, dict(keywords or {}), output)

    def run(self, network: nn.Module) -> Any:
        """Run a network on this call and return all outputs."""
        return outputs_on(network, *self.positional, **self.keywords)

    def outputs_of(self, network: nn.Module) -> list[Tensor]:
        """Run a network on this call and return the output tensors that count."""
        return self.counted(self.run(network))

    def counted(self, outputs: Any) -> list[Tensor]:
        """Select the tensors that count from all outputs of a network.

        Raises:
            OutputError: If the outputs contain no tensor, or no output of the requested name or index.
        """
        chosen = self._chosen(outputs)
        if found := tensors_of(chosen):
            return found
        what = type(chosen).__name__ if self.output is not None or _named(outputs) is None else type(outputs).__name__
        raise OutputError(
            f"the network returns nothing that can be compared, but {what}; expected tensors, or tuples, "
            "dictionaries or dataclasses of them"
        )

    def left_out(self, outputs: Any) -> list[str]:
        """Return the names of outputs that do not count but hold tensors or unknown objects; caches are omitted."""
        chosen = {id(leaf) for _, leaf in _leaves(self._chosen(outputs)) if isinstance(leaf, Tensor)}
        named = _named(outputs) or {}
        found = dict.fromkeys(
            str(name)
            for name, value in named.items()
            if name not in _CACHES
            for _, leaf in _leaves(value)
            if id(leaf) not in chosen and not isinstance(leaf, (bool, int, float, str, type(None)))
            if not type(leaf).__name__.endswith("Cache")
        )
        return list(found)

    def _chosen(self, outputs: Any) -> Any:
        """Return the outputs that count, with their nesting."""
        named = _named(outputs)
        if self.output is None:
            if named is None or not all(isinstance(name, str) for name in named):
                return outputs
            if named.get("logits") is not None:
                return named["logits"]
            return [value for name, value in named.items() if name not in _CACHES]
        if named is None:
            what = "one tensor" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise OutputError(f"output is {self.output!r}, but the network returns {what}; expected None")
        if isinstance(self.output, int) and not isinstance(outputs, Mapping):
            named = dict(enumerate(named.values()))
        if self.output not in named:
            raise OutputError(unknown("output", self.output, map(str, named)))
        return named[self.output]


def _named(outputs: Any) -> dict[str | int, Any] | None:
    """Return a network's outputs by name or index; None for a tensor and for opaque objects."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if hasattr(outputs, "_fields"):  # a named tuple (GoogLeNet's)
        return dict(zip(outputs._fields, outputs, strict=True))
    if isinstance(outputs, (list, tuple)):
        return dict(enumerate(outputs))
    if hasattr(outputs, "__dataclass_fields__"):
        return {name: getattr(outputs, name) for name in outputs.__dataclass_fields__}
    return None


def _leaves(outputs: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the leaves of nested tuples, dictionaries and dataclasses with their paths."""
    named = _named(outputs)
    if named is None:
        yield (), outputs
        return
    for name, value in named.items():
        for path, leaf in _leaves(value):
            yield (name, *path), leaf


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return all tensors in the return value of a module, also inside dataclasses and named tuples."""
    return [leaf for _, leaf in _leaves(outputs) if isinstance(leaf, Tensor)]


def check_arguments(network: nn.Module, call: Call, options: Sequence[str] = ()) -> None:
    """Check that a network's forward accepts the arguments of a call, without running it.

    Args:
        network: The network.
        call: The call.
        options: Names of the caller's own options, suggested for misspelt keywords.

    Raises:
        TypeError: If an argument is missing, unknown or superfluous.
    """
    try:
        signature = inspect.signature(network.forward)
    except (TypeError, ValueError):  # forward of a C function has no signature
        return
    takes, kind = signature.parameters, type(network).__name__
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    for name in call.keywords:
        # Where forward accepts any name, a misspelt option of the caller would pass silently.
        if name not in takes and (not takes_any or nearest(name, options)):
            raise TypeError(
                f"{kind}.forward has no argument {name!r}; it takes {arguments_of(network)}."
                f"{nearest(name, (*takes, *options))}"
            )
    try:
        signature.bind(*call.positional, **call.keywords)
    except TypeError as error:
        raise TypeError(
            f"the example does not fit {kind}.forward ({error}); expected its arguments: {arguments_of(network)}"
        ) from None


def misspelt(network: nn.Module, call: Call) -> str:
    """Suggest the nearest argument name for each keyword that forward does not name."""
    takes = inspect.signature(network.forward).parameters
    return "".join(nearest(name, takes) for name in call.keywords if name not in takes)


def arguments_of(network: nn.Module) -> str:
    """Return the arguments of a network's forward in words, required ones first."""
    takes = inspect.signature(network.forward).parameters.values()
    plain = [p for p in takes if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p.name for p in plain if p.default is p.empty]
    optional = [p.name for p in plain if p.default is not p.empty]
    shown = ", ".join(optional[:4]) + (", ..." if len(optional) > 4 else "")
    return ", ".join(needed) + (" and, if wanted, " if needed and optional else "") + shown or "nothing"
