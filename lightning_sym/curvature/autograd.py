"""Curvature of any network by back-propagated square-root columns, with autograd alone."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._distributed import run_on
from lightning_sym.curvature import passes
from lightning_sym.curvature.proof import Pass, check_rows
from lightning_sym.curvature.rules import FFC, curved_parameters
from lightning_sym.curvature.sums import regroups


class AutogradEngine(passes.Engine):
    """The engine for any architecture: gradients at the outputs of the layers, which rules turn into factors."""

    def __init__(self, network: nn.Module, ffc: FFC, columns: int, lengthscales: bool = False) -> None:
        super().__init__(network, ffc, columns, lengthscales)
        curved = curved_parameters(self.layers)
        self.parameters = {full: getattr(self.layers[name][0], key) for full, name, key in curved}
        # From the last forward pass, by layer: input, its version then, and output.
        self.recorded: dict[str, tuple[Tensor, int, Tensor]] = {}

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
            if name in self.recorded:
                raise passes.called_twice(name)
            if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
                raise passes.not_of_tensors(name, module)
            x = args[0].detach()
            self.recorded[name] = (x, x._version, output)
            # Operations in place, for example a ReLU's, change this copy.
            return output.clone()

        return record

    def add(self, x: Tensor, outputs: Tensor, square_root: Tensor) -> None:
        """Add a batch to the sums."""
        nodes = [output for _, _, output in self.recorded.values()]
        self.sums.regroups |= regroups(outputs, nodes)
        for piece in torch.split(square_root, self.columns):
            for gradients in passes.pull_back(outputs, nodes, piece):
                for (name, (a, _, output)), g in zip(self.recorded.items(), gradients, strict=True):
                    columns = output.new_zeros(1, *output.shape) if g is None else g
                    self.sums.add_out(name, a, columns, len(outputs))
        inputs = {name: a for name, (a, _, _) in self.recorded.items()}
        self.recorded.clear()
        self.sums.add_inner(x, inputs)

    def see(self, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None) -> Pass:
        """Run some samples and return the inputs of the rules, with gradients of pulled-back vectors."""
        with torch.set_grad_enabled(cotangent is not None):
            outputs = self.forward(x)
        recorded = dict(self.recorded)
        self.recorded.clear()
        inputs = {name: x for name, (x, _, _) in recorded.items()}
        if cotangent is None:
            return Pass(outputs, inputs)
        passes.check_trained(outputs)
        nodes = [output for _, _, output in recorded.values()]
        found = torch.autograd.grad(
            outputs,
            [*nodes, *self.parameters.values()],
            cotangent(outputs.detach()),
            allow_unused=True,
            materialize_grads=True,
        )
        return Pass(
            outputs.detach(),
            inputs,
            dict(zip(recorded, found[: len(nodes)], strict=True)),
            dict(zip(self.parameters, found[len(nodes) :], strict=True)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs; inputs and outputs of the layers are recorded."""
        self.recorded.clear()
        with ExitStack() as hooks:
            for name, (module, _) in self.layers.items():
                hooks.enter_context(module.register_forward_hook(self._hook(name), with_kwargs=True))
            outputs: Tensor = run_on(self.network, x)
        passes.check_outputs(outputs, x)
        self._check_recorded(len(x))
        return outputs

    def _check_recorded(self, samples: int) -> None:
        for name, (module, _) in self.layers.items():
            if name not in self.recorded:
                raise passes.not_called(name, module)
            x, version, output = self.recorded[name]
            if x._version != version:
                raise ValueError(
                    f"The input of module {name!r} is changed in place after the call; use operations out of place."
                )
            check_rows(name, module, x, samples)
            if torch.is_grad_enabled() and not output.requires_grad:
                raise ValueError(
                    f"Module {name!r} ({type(module).__name__}) is called without gradients, for example in "
                    "torch.no_grad(); freeze its parameters with requires_grad_(False)."
                )
