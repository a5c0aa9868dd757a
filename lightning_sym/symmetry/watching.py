"""Record inputs or outputs of modules at the taps of a network while it runs."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_sym.symmetry.elements import Tap

T = TypeVar("T")


def watched(
    network: nn.Module,
    taps: Mapping[str, Tap],
    run: Callable[[], object],
    keep: Callable[[str, Tensor], T],
    *,
    inputs: bool = False,
) -> dict[str, T]:
    """Run a network and record values at some taps.

    Args:
        network: The network.
        taps: Taps by any key; outputs of modules, not values that cross a cut.
        run: Runs the network.
        keep: Maps the key and the value to the record. It is called at once: later modules may change the value.
        inputs: Whether to record the modules' inputs instead of their outputs.

    Returns:
        The records by the same keys; taps that the run did not reach are missing.
    """
    modules = dict(network.named_modules())
    found: dict[str, T] = {}
    handles = []

    def watch(key: str, tap: Tap) -> Callable[..., None]:
        calls = itertools.count()

        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any = None) -> None:
            if next(calls) == tap.call:
                found[key] = keep(key, (arguments[0] if inputs else output).detach())

        return hook

    try:
        for key, tap in taps.items():
            module = modules[tap.module]
            register = module.register_forward_pre_hook if inputs else module.register_forward_hook
            handles.append(register(watch(key, tap)))
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
