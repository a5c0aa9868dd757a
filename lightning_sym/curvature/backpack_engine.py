"""Curvature by BackPACK: all square-root columns go through the network together, layer by layer."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from backpack import disable, memory_cleanup
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.custom_module.branching import Parallel, SumModule
from backpack.custom_module.scale_module import ScaleModule
from backpack.extensions import KFAC, KFLR
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from torch import Tensor, nn

from lightning_sym.curvature import passes
from lightning_sym.curvature.proof import Pass, check_rows
from lightning_sym.curvature.rules import FFC, Rule, curved_parameters, find_rule
from lightning_sym.curvature.structure import children_in_order, runs
from lightning_sym.curvature.sums import FactorSums, regroups
from lightning_sym.layers import ResidualPathways
from lightning_sym.networks import architecture_name

# Elementwise, several inputs, or losses: BackPACK's own extensions. Ours is for one input, column by column.
_OF_BACKPACK = (
    *(nn.ReLU, nn.Sigmoid, nn.Tanh, ScaleModule, SumModule),
    *(nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss),
)


# ---- extensions of BackPACK; they also work without the engine


class _Jacobian(BaseDerivatives):  # type: ignore[misc]
    """Derivatives of a module that is a function of its input alone: back through the graph of its forward pass."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def hessian_is_zero(self, module: nn.Module) -> bool:
        """Say so: only KFRA, which we do not offer, needs second derivatives."""
        return True

    def _jac_t_mat_prod(
        self, module: Any, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None
    ) -> Tensor:
        """Return columns at the input, shape ``[V, N, ...]``, for those at the output."""
        found = []
        for piece in torch.split(mat, self.columns):
            for (g,) in passes.pull_back(module.output, [module.input0], piece):
                found.append(module.input0.new_zeros(1, *module.input0.shape) if g is None else g)
        return found[0] if len(found) == 1 else torch.cat(found)


class _Blocks(HBPBaseModule):  # type: ignore[misc]
    """The extension of one layer in one backward pass: BackPACK calls a method per parameter, all from one result."""

    def __init__(self, rule: Rule | None, names: list[str], columns: int) -> None:
        self._rule = rule
        self._found: Mapping[str, Any] | None = None
        for name in names:
            setattr(self, name, functools.partial(self._block, name))
        super().__init__(_Jacobian(columns), names)

    @torch.no_grad()
    def _block(self, name: str, ext: Any, module: Any, g_inp: Any, g_out: Any, g: Tensor) -> Any:
        if self._found is None:
            assert self._rule is not None
            self._found = ext.measure(self._rule, module, g)
        if name not in self._found:
            raise ValueError(
                f"The curvature rule of {type(module).__name__} gives no gradients for {name!r}; return them, or name "
                "it in left_out."
            )
        return self._found[name]


class _Layer(ModuleExtension):  # type: ignore[misc]
    """Module extension of a class of modules: finds the rule and parameters of a module."""

    def __init__(self, ffc: FFC, columns: int, lengthscales: bool) -> None:
        super().__init__()
        self.ffc: FFC = ffc
        self.columns, self.lengthscales = columns, lengthscales

    def __call__(self, extension: Any, module: nn.Module, g_inp: Any, g_out: Any) -> None:
        """Leave the blocks at the parameters, and the columns for the layers before."""
        names = [name for name, tensor in module.named_parameters(recurse=False) if tensor.requires_grad]
        rule = find_rule("", module, self.ffc, self.lengthscales) if names else None
        left_out = () if rule is None else rule.left_out
        _Blocks(rule, [name for name in names if name not in left_out], self.columns)(extension, module, g_inp, g_out)


class _Relaxed:
    """Base of both extensions: branches, and one module extension for all layers with a rule."""

    ffc: FFC
    columns: int
    lengthscales = False  # whether they get blocks
    samples: int | None = None  # N, where the rows of layers may be positions of samples
    _rows: int | None = None  # N of the loss, where all of them must be samples

    def __call__(self, module: Any, g_inp: Any, g_out: Any) -> None:
        """Leave the blocks at a module's parameters, and columns for the modules before it."""
        if isinstance(module, nn.modules.loss._Loss):
            outputs, targets = vars(module)["input0"], vars(module)["input1"]
            _check_loss(module, targets)
            self._rows = len(outputs)
        if not _known(module):
            extension = _Layer(self.ffc, self.columns, self.lengthscales)
            self.set_module_extension(type(module), extension, overwrite=True)  # type: ignore[attr-defined]
        super().__call__(module, g_inp, g_out)  # type: ignore[misc]

    def measure(self, rule: Rule, module: Any, g: Tensor) -> Mapping[str, Any]:
        """Return the blocks of a layer's parameters, from columns ``[V, N, ...]`` at its output."""
        x = module.input0.detach()
        if self.samples is None and self._rows is not None and len(x) != self._rows:
            raise ValueError(
                f"A layer {type(module).__name__} has an input of shape {list(x.shape)} for {self._rows} samples; give "
                "it [N, ...], or use lightning_sym.curvature.factors, which knows tokens folded into the batch."
            )
        return rule.blocks(module, x, g, self.samples)

    def accumulate_backpropagated_quantities(self, existing: Tensor, other: Tensor) -> Tensor:
        """Return the sum: a tensor that several paths use gets the columns of all of them."""
        return existing + other


class RelaxedKFLR(_Relaxed, KFLR):  # type: ignore[misc]
    """BackPACK's exact Kronecker factors for our layers and for all that :func:`register_layer` was told of.

    It differs from ``backpack.extensions.KFLR`` in that branches and any modules without parameters are allowed, and
    that ``parameter.kflr`` is a :class:`~lightning_sym.curvature.KroneckerBlock`, B summed over the batch and A
    averaged. Convolutions of torch may
    have any padding mode, stride and groups, with the scale of KFC: BackPACK's own is silently wrong for circular
    padding, and about as many times too large as there are positions.

    :func:`~lightning_sym.curvature.factors` with ``engine="backpack"`` uses it and needs no ``extend``. On extended
    modules of one's own, the loss must be the sum over the batch (of BackPACK's ``MSELoss``, the blocks are twice those
    of unit noise), and the backward pass keeps the graph, ``loss.backward(retain_graph=True)``.

    Args:
        ffc: As for :class:`~lightning_sym.curvature.Rule`.
        columns: How many columns go through a layer together, by ``vmap``.

    References:
        Dangel, Kunstner, Hennig (2020), "BackPACK: Packing more into Backprop", arXiv:1912.10985;
        docs/theory/curvature.md, 1.6 and 4.1.

    Example:
        >>> from backpack import backpack, extend
        >>> network, loss = extend(nn.Sequential(nn.Linear(4, 3))), extend(nn.CrossEntropyLoss(reduction="sum"))
        >>> x, y = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
        >>> with backpack(RelaxedKFLR()):
        ...     loss(network(x), y).backward(retain_graph=True)
        >>> network[0].weight.kflr.in_factor.shape
        torch.Size([4, 4])
    """

    def __init__(self, ffc: FFC = "shared", columns: int = 1) -> None:
        super().__init__()
        self.ffc, self.columns = ffc, columns


class RelaxedKFAC(_Relaxed, KFAC):  # type: ignore[misc]
    """The same with labels drawn from the network's predictions, in ``parameter.kfac``; see :class:`RelaxedKFLR`.

    Args:
        ffc: As for :class:`~lightning_sym.curvature.Rule`.
        columns: How many columns go through a layer together, by ``vmap``.
        mc_samples: Labels per sample, drawn by BackPACK's losses from the global generator.
    """

    def __init__(self, ffc: FFC = "shared", columns: int = 1, mc_samples: int = 1) -> None:
        super().__init__(mc_samples)
        self.ffc, self.columns = ffc, columns


class _Look(RelaxedKFLR):
    """Leaves, at each parameter, the input of its layer and the gradients at the output that its rule would see."""

    def measure(self, rule: Rule, module: Any, g: Tensor) -> Mapping[str, Any]:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return dict.fromkeys(names, (module.input0.detach(), g[0]))


class _Sum(RelaxedKFLR):
    """Adds the inputs of the rules to sums, and stores nothing."""

    def __init__(self, sums: FactorSums, names: Mapping[nn.Module, str], samples: int, columns: int) -> None:
        super().__init__(columns=columns)
        self.sums, self.names, self.count = sums, names, samples

    def measure(self, rule: Rule, module: Any, g: Tensor) -> Mapping[str, Any]:
        self.sums.add_out(self.names[module], module.input0.detach(), g, self.count)
        return dict.fromkeys(name for name, _ in module.named_parameters(recurse=False))


def _check_loss(loss: nn.Module, targets: Tensor) -> None:
    """Raise unless a loss is the sum of negative log likelihoods of all samples."""
    kind = type(loss).__name__
    if getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None:
        raise ValueError(
            f"{kind} has class weights, with which it is no negative log likelihood; leave them out, and draw the "
            "classes as often as they should count."
        )
    if loss.reduction != "sum":
        raise ValueError(
            f"{kind} has reduction={loss.reduction!r}, but B is a sum over the data; make it with reduction='sum'."
        )
    if (targets == getattr(loss, "ignore_index", math.nan)).any():
        raise ValueError(f"{kind} ignores samples, which would still count for the curvature; leave them out.")


# ---- the copy of the network that BackPACK works on


class BackpackEngine(passes.Engine):
    """The engine by BackPACK, on a copy of the network's structure that is thrown away.

    The copy has new modules with the same tensors. :class:`~lightning_sym.layers.ResidualPathways` become BackPACK's
    ``Parallel`` and ``ScaleModule``. So hooks, attributes and gradients of the network are never touched,
    and there are no factors that could be stale.

    Raises:
        ValueError: If the network is not made of ``nn.Sequential``, :class:`~lightning_sym.layers.ResidualPathways` and
            modules whose forward calls their children in sequence.
    """

    def __init__(self, network: nn.Module, ffc: FFC, columns: int, lengthscales: bool = False) -> None:
        super().__init__(network, ffc, columns, lengthscales)
        self.lengthscales = lengthscales
        self.names = {id(module): name for name, module in network.named_modules()}
        self.copies: dict[str, nn.Module] = {}  # of layers with curvature
        self.hooked: list[tuple[str, nn.Module]] = []
        self.called: list[Any] = []  # in the last forward pass, in order
        self.converted = self.convert(network)
        for name, (module, _) in self.layers.items():
            if name not in self.copies:
                raise passes.not_called(name, module)

    def convert(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module."""
        name = self.names[id(module)]
        if name in self.layers or not any(parameter.requires_grad for parameter in module.parameters()):
            return self.leaf(name, module)
        if runs(module, ResidualPathways):
            parallel, scale = Parallel(*map(self.convert, module.paths.values())), ScaleModule(module.scale)
            self.hooked += [(name, parallel.merge), (name, scale)]
            return nn.Sequential(parallel, scale)
        if runs(module, nn.Sequential):
            return nn.Sequential(*map(self.convert, module))
        children = children_in_order(module)
        if children is None:
            label = f"module {name!r}" if name else "the network"
            raise ValueError(
                f"BackPACK cannot handle {label} ({type(module).__name__}), which does more than call its children one "
                "after the other; use engine: autograd, or make it of nn.Sequential and ResidualPathways."
            )
        return nn.Sequential(*map(self.convert, children))

    def leaf(self, name: str, module: nn.Module) -> nn.Module:
        """Return a module of the same class with the same tensors, without its hooks, and out of place."""
        if name in self.copies:
            raise passes.called_twice(name)
        copied: nn.Module = type(module).__new__(type(module))
        nn.Module.__init__(copied)
        own = {key: value for key, value in vars(module).items() if key == "training" or key not in vars(copied)}
        vars(copied).update(own)
        for key, parameter in module._parameters.items():
            # A separate parameter: BackPACK sets attributes on it.
            copied._parameters[key] = None if parameter is None else nn.Parameter(parameter.detach())
            if parameter is not None:
                copied._parameters[key].requires_grad_(parameter.requires_grad)  # type: ignore[union-attr]
        copied._buffers = dict(module._buffers)
        copied._modules = dict(module._modules)
        if vars(copied).get("inplace"):
            vars(copied)["inplace"] = False
        self.hooked.append((name, copied))
        if name in self.layers:
            self.copies[name] = copied
        return copied

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the copies leave input and output while the block runs."""
        with ExitStack() as hooks:
            for name, module in self.hooked:
                hooks.callback(memory_cleanup, module)
                hooks.enter_context(module.register_forward_pre_hook(_note_versions))
                hooks.enter_context(module.register_forward_hook(functools.partial(self._keep, name)))
            yield

    def _keep(self, name: str, module: Any, args: tuple[Any, ...], output: Any) -> Tensor:
        """Store input and output on a module, as BackPACK's hook does, with the output in separate memory.

        BackPACK tells tensors apart by address, which a view, or a module that returns its input, shares with others.
        """
        if not isinstance(output, Tensor) or not args or not all(isinstance(x, Tensor) for x in args):
            raise passes.not_of_tensors(name, module)
        if [x._version for x in args] != vars(module).pop("_versions"):
            raise ValueError(
                f"Module {name!r} ({type(module).__name__}) changes its input in place, which BackPACK cannot handle; "
                "use operations out of place, or engine: autograd."
            )
        memory = output.untyped_storage().data_ptr()
        if any(x.untyped_storage().data_ptr() == memory for x in args):
            output = output.clone()
        for index, x in enumerate(args):
            setattr(module, f"input{index}", x)
        module.output = output
        self.called.append(module)
        kept: Tensor = output
        return kept

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs; modules store the tensors for BackPACK."""
        self.called.clear()
        outputs: Tensor = self.converted(x)
        passes.check_outputs(outputs, x)
        return outputs

    def see(self, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None) -> Pass:
        """Return the inputs of the rules for some samples, and the gradients of the network itself."""
        with torch.set_grad_enabled(cotangent is not None):
            # Run the network before its copy, so that errors are those of its layers.
            with self.quiet():
                expected = self.network(x.clone())  # it might change its input
            outputs = self.forward(x)
            passes.check_outputs(expected, x)
        self._check(outputs.detach(), expected.detach())
        if cotangent is None:
            return Pass(outputs, {name: vars(self.copies[name])["input0"] for name in self.layers})
        passes.check_trained(expected)
        named = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        columns = cotangent(outputs.detach())
        own = torch.autograd.grad(expected, list(named.values()), columns, allow_unused=True, materialize_grads=True)
        seen = self._pull_back(outputs, columns[None], _Look())
        firsts: dict[str, tuple[Tensor, Tensor]] = {}
        for name, found in seen.items():
            firsts.setdefault(name.rpartition(".")[0], found)
        return Pass(
            outputs.detach(),
            {name: x for name, (x, _) in firsts.items()},
            {name: g for name, (_, g) in firsts.items()},
            dict(zip(named, own, strict=True)),
        )

    def _check(self, outputs: Tensor, expected: Tensor) -> None:
        """Raise unless the copy has the outputs of the network, which hooks may change."""
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        scale = expected.nan_to_num(0, 0, 0).norm(dim=1, keepdim=True)
        same = torch.isclose(outputs, expected, rtol=tolerance, atol=0, equal_nan=True)
        if not (same | ((outputs - expected).abs() <= tolerance * scale)).all():
            raise ValueError(
                f"The outputs of the network ({architecture_name(self.network)}) are not those of its layers, for "
                "example as a hook changes them, which BackPACK cannot handle; use engine: autograd."
            )

    def quiet(self) -> AbstractContextManager[Any]:
        """Return the block within which BackPACK leaves nothing at the layers of a network that it knows."""
        found: AbstractContextManager[Any] = disable()
        return found

    def add(self, x: Tensor, outputs: Tensor, square_root: Tensor) -> None:
        """Add a batch to the sums."""
        inputs = {name: vars(self.copies[name])["input0"].detach() for name in self.layers}
        for name, (module, _) in self.layers.items():
            check_rows(name, module, inputs[name], len(x))
        self.sums.regroups |= regroups(outputs, [vars(self.copies[name])["output"] for name in self.layers])
        names = {module: name for name, module in self.copies.items()}
        self._pull_back(outputs, square_root, _Sum(self.sums, names, len(x), self.columns))
        self.sums.add_inner(x, inputs)

    def _pull_back(self, outputs: Tensor, columns: Tensor, extension: Any) -> dict[str, Any]:
        """Return the results of an extension at the parameters, by their full names."""
        extension.lengthscales = self.lengthscales
        extension.saved_quantities.save_quantity(
            outputs.data_ptr(), columns, extension.accumulate_backpropagated_quantities
        )
        # Do the work of BackPACK's hooks without a backward pass, as its gradients are not needed.
        while self.called:
            module = self.called.pop()
            if module.output.requires_grad:
                extension(module, (), ())
            memory_cleanup(module)
        parameters = ((full, getattr(self.copies[name], key)) for full, name, key in curved_parameters(self.layers))
        return {full: vars(tensor).pop(extension.savefield) for full, tensor in parameters}


def _known(module: nn.Module) -> bool:
    """Return whether BackPACK's own extension of a module's class is right."""
    trainable = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return not trainable and type(module) in _OF_BACKPACK


def _note_versions(module: nn.Module, args: tuple[Any, ...]) -> None:
    vars(module)["_versions"] = [x._version for x in args if isinstance(x, Tensor)]
