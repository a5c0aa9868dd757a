"""The loss of a network on data that are held in memory, at many weight vectors at once."""

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_sym._checks import check_batches, check_counts_alike
from lightning_sym._random import derive_seed, seeded
from lightning_sym.landscape.langevin import lanczos_top
from lightning_sym.landscape.planes import weight_tensors, weight_vector
from lightning_sym.networks.modes import in_precision, loss_errors, twice_differentiable
from lightning_sym.symmetry.tracing.graph.capture import copied

BatchLoss = Callable[[Any, Any], Tensor]
# Calls before a function is recorded, which takes as long as a few calls.
_OFTEN = 5
_SAME = {f.default for f in (torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.expand, torch.ops.aten.view)}
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class LossOnData:
    """The mean loss of a network in evaluation mode on data that are held in memory, as a function of its weights.

    Args:
        network: Any module. Not changed; a copy is used. Parameters without ``requires_grad`` are constant.
        batches: Pairs of inputs and targets. Inputs are a tensor, a tuple or list of tensors (positional arguments), or
            a dictionary (keyword arguments); targets any nesting of tensors; samples along the first axis.
        loss: Called with outputs and targets; the mean over samples, a scalar.
        dtype: Dtype of weights, floating inputs and targets.
        block_size: Most samples that go through the network at once, >= 1.
        execution: ``"vmap"`` or ``"loop"``: networks with other weights together, or one after another.

    Attributes:
        network: The copy.
        own: Its weight vector. Shape ``[P]``.
        samples: How many there are, n.
        work: Size of one evaluation: samples times the weights and the inputs of one.

    Raises:
        ValueError: If there are no data, the network has nothing to train, or the loss is not a mean over samples.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Iterable[Any],
        loss: BatchLoss,
        *,
        dtype: torch.dtype,
        block_size: int = 2048,
        execution: Literal["vmap", "loop"] = "vmap",
    ) -> None:
        self.network = in_precision(copied(network), dtype).eval()
        self.own = weight_vector(self.network)
        self._compare = _cross_entropy if loss is F.cross_entropy else loss
        self._block, self._execution = block_size, execution
        record = Recorded if execution == "vmap" else lambda function: function
        self._values = record(functools.partial(self._mapped, self._mean, shared=True))
        self._slopes = record(functools.partial(self._with_slopes, shared=True))
        self._slopes_of_own = record(functools.partial(self._with_slopes, shared=False))
        self._products = record(functools.partial(self._mapped, self._product, shared=True))
        self.data = joined(batches, self.own)
        self.samples = len(tree_leaves(self.data)[0])
        self.work = self.samples * len(self.own) + sum(tensor.numel() for tensor in tree_leaves(self.data[0]))
        if loss is F.cross_entropy and not all(_classes(target) for target in tree_leaves(self.data[1])):
            raise ValueError(
                "the cross-entropy needs class indices or probabilities as targets, got other floating ones; give "
                "another loss."
            )
        two = self._rows(torch.arange(min(2, self.samples)))
        if self._compare is _cross_entropy and any(bool((target < 0).any()) for target in tree_leaves(self.data[1])):
            self._compare = loss  # some are ignored
        with seeded(derive_seed("learning coefficient", 1)):
            outputs = self._outputs(self.own, two[0])
            with loss_errors(outputs, two[1]):
                drawn = self._compare(outputs, two[1])
        with seeded(derive_seed("learning coefficient", 2)):
            again = self._mean(self.own, two)
        if not torch.allclose(drawn, again, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                "the outputs of the network change from run to run in eval mode, so that its loss is no function "
                "of its weights; use modules for dropout and noise, which eval mode turns off."
            )
        once, twice = self._mean(self.own, two), self._mean(self.own, tree_map(lambda t: torch.cat([t, t]), two))
        if once.ndim != 0 or not once.is_floating_point():
            raise ValueError(f"loss must return one number, got {once.dtype} of shape {list(once.shape)}.")
        if bool(torch.isfinite(once)) and not torch.allclose(once, twice, rtol=1e-3, atol=1e-6):
            raise ValueError(
                "loss must be the mean over samples, and that of two samples changes when each is given twice, from "
                f"{float(once):.4g} to {float(twice):.4g}; use reduction='mean'."
            )
        with torch.no_grad():
            check_counts_alike(
                lambda rows: self._mean(self.own, self._rows(rows)),
                self.samples,
                lambda rows: self._mapped(functools.partial(self._mean, self.own), self._rows(rows[:, None])),
                self.data[1],
            )

    def _rows(self, rows: Tensor) -> Any:
        return tree_map(lambda tensor: tensor[rows.to(tensor.device)], self.data)

    def _mean(self, vector: Tensor, batch: Any) -> Tensor:
        return self._compare(self._outputs(vector, batch[0]), batch[1])

    def _outputs(self, vector: Tensor, inputs: Any) -> Any:
        positional = (
            () if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
        )
        named = inputs if isinstance(inputs, dict) else {}
        with twice_differentiable():
            return functional_call(self.network, weight_tensors(self.network, vector), positional, named)

    def _mapped(self, function: Callable[..., Any], *arguments: Any, shared: bool = False) -> Any:
        """Call a function for each row of its arguments; the last one is the same for all if ``shared``."""
        if self._execution == "vmap":
            dims = (*(0 for _ in arguments[shared:]), *([None] if shared else []))
            try:
                return vmap(function, in_dims=dims, randomness="same")(*arguments)
            except RuntimeError as error:
                if not re.search("vmap|batching rule", str(error), re.IGNORECASE):
                    raise
                reason = str(error).split(". ")[0].splitlines()[0]
                raise ValueError(f"vmap cannot run the network ({reason}); use execution='loop'.") from error
        own = arguments[:-1] if shared else arguments
        results = []
        for row in range(len(tree_leaves(own)[0])):
            given = [tree_map(lambda tensor, row=row: tensor[row], one) for one in own]
            results.append(function(*given, *arguments[len(own) :]))
        return tree_map(lambda *parts: torch.stack(parts), *results)

    def _summed(self, function: Callable[..., Any], *vectors: Tensor) -> Any:
        """Average a function of vectors and data over all data, a block at a time."""
        total: Any = None
        for rows in torch.split(torch.arange(self.samples), self._block):
            whole = len(rows) == self.samples
            found = function(*vectors, self.data if whole else self._rows(rows))
            if whole:
                return found
            found = tree_map(functools.partial(torch.mul, len(rows) / self.samples), found)
            total = found if total is None else tree_map(torch.add, total, found)
        return total

    def at(self, vector: Tensor) -> Tensor:
        """Return the loss on all data at one weight vector ``[P]``, a scalar; differentiable."""
        return self._mean(vector, self.data)

    def values(self, vectors: Tensor) -> Tensor:
        """Return the losses on all data at weight vectors ``[C, P]``. Shape ``[C]``."""
        with torch.no_grad():
            found: Tensor = self._summed(self._values, vectors)
        return found

    def gradients(self, vectors: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return gradients ``[C, P]`` and losses ``[C]`` at weight vectors ``[C, P]``.

        Args:
            vectors: The weight vectors.
            rows: Numbers of the samples of each, shape ``[C, B]``; None for all data.
        """
        # One gradient of the sum is that of each chain: their losses share no weights.
        found: tuple[Tensor, Tensor] = (
            self._summed(self._slopes, vectors) if rows is None else self._slopes_of_own(vectors, self._rows(rows))
        )
        return found

    def _with_slopes(self, vectors: Tensor, batch: Any, shared: bool = True) -> tuple[Tensor, Tensor]:
        """Return gradients and losses on a batch, which is the same for all weight vectors if ``shared``."""
        leaves = vectors.detach().requires_grad_()
        with torch.enable_grad():
            values: Tensor = self._mapped(self._mean, leaves, batch, shared=shared)
            (slopes,) = torch.autograd.grad(values.sum(), leaves)
        return slopes, values.detach()

    def largest_curvatures(self, vectors: Tensor, seed: int = 0) -> Tensor:
        """Return upper estimates of the largest Hessian eigenvalues at ``[C, P]``. Shape ``[C]``, float64, CPU.

        This is :func:`lightning_sym.landscape.langevin.largest_curvatures` for blocks of data.
        """
        if self.samples > self._block or (self._execution == "loop" and len(vectors) > 1):
            return lanczos_top(lambda directions: self._summed(self._products, vectors, directions), vectors, seed=seed)
        # One graph of the gradients for all products, which takes no more memory than one product.
        leaves = vectors.detach().requires_grad_()
        with torch.enable_grad():
            total = self._mapped(self._mean, leaves, self.data, shared=True).sum()
            (slopes,) = torch.autograd.grad(total, leaves, create_graph=True)

        def products(directions: Tensor) -> Tensor:
            if not slopes.requires_grad:
                return torch.zeros_like(directions)
            (found,) = torch.autograd.grad(slopes, leaves, directions, retain_graph=True, materialize_grads=True)
            return found

        return lanczos_top(products, vectors, seed=seed)

    def _product(self, vector: Tensor, direction: Tensor, batch: Any) -> Tensor:
        """Return the Hessian's product with a direction."""

        def slope(weights: Tensor) -> Tensor:
            ahead: Tensor = torch.func.grad(self._mean)(weights, batch) * direction
            return ahead.sum()

        found: Tensor = torch.func.grad(slope)(vector)
        return found


def _cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Return the mean cross-entropy; of ``[N, classes]`` by way of ``[classes, N]``.

    On CPUs a softmax over a short last axis takes ten times as long as one over another axis. Written out for class
    indices, as ``vmap`` of the function asks of each one whether it is ignored.
    """
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return F.cross_entropy(outputs, targets)
    if targets.ndim == 2:
        return F.cross_entropy(outputs.T.contiguous()[None], targets.T[None])
    logs = outputs.T.contiguous().log_softmax(0)
    return -logs.gather(0, targets.long()[None]).mean()


def _classes(targets: Tensor) -> bool:
    """Return whether targets are class indices, or probabilities of classes."""
    if not targets.is_floating_point():
        return True
    return targets.ndim > 1 and bool((targets >= 0).all()) and bool(((targets.sum(1) - 1).abs() < 1e-3).all())


def joined(batches: Iterable[Any], like: Tensor) -> Any:
    """Concatenate all batches to inputs and targets on a tensor's device, floating ones in its dtype.

    Raises:
        ValueError: If there is no batch, or one is not a pair.
    """
    parts = []
    check_batches(batches)
    for batch in batches:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            found = f"{len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
            raise ValueError(f"data must be batches of two parts, inputs and targets, got one that is {found}.")
        if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in tree_leaves(tuple(batch))):
            raise ValueError("data must be batches of tensors with a row for each sample; use a DataLoader.")
        parts.append(tuple(batch))
    if not parts or not len(tree_leaves(parts[0])[0]):
        raise ValueError("data must hold at least one sample, got none.")
    whole = tree_map(lambda *tensors: torch.cat(tensors), *parts)
    if len(lengths := {len(tensor) for tensor in tree_leaves(whole)}) > 1:
        raise ValueError(f"inputs and targets must have as many samples, got {sorted(lengths)}.")
    return tree_map(
        lambda tensor: tensor.detach().to(like.device, like.dtype if tensor.is_floating_point() else None), whole
    )


class Recorded:
    """A function of tensors that is recorded once it has been called often, and played back from then on.

    Vectorising and differentiating a small network takes longer than the operations that come of it, which are the same
    in every call. They are recorded for each set of shapes, and give the same numbers, without gradients. The call
    after that compares both. Where they differ, or nothing can be recorded, because the function looks at values or
    depends on more than its arguments, it is still called, only not as fast.

    Args:
        function: From nested tensors to nested tensors; draws nothing, and depends on its arguments and constants only.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls: Counter[Any] = Counter()
        self._played: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's value."""
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tree_leaves(arguments))
        if self._calls[key] > _OFTEN:
            with torch.no_grad():
                return self._played[key](*arguments)
        self._calls[key] += 1
        if self._calls[key] == _OFTEN:
            self._played[key] = self._record(arguments)
        value = self._function(*arguments)
        if self._calls[key] > _OFTEN:
            with torch.no_grad():
                if not _alike(self._played[key](*arguments), value):
                    self._played[key] = self._function
        return value

    def _record(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        given = tree_leaves(arguments)
        try:
            with _Tape(given) as tape:
                values, form = tree_flatten(self._function(*arguments))
        except _LooksAtValuesError:
            return self._function
        play = tape.played(values)
        return lambda *arguments: tree_unflatten(play(*tree_leaves(arguments)), form)


class _LooksAtValuesError(RuntimeError):
    """The operations of a function depend on the values of its tensors."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations on tensors as they come, below the layers that vectorise and differentiate, as a graph.

    ``torch.fx`` records the same with ``make_fx``, in twenty times the time.

    Args:
        given: The arguments; other tensors that no operation makes are constants.
    """

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = Graph(), dict[str, Tensor]()
        self._kept: list[Tensor] = []  # a tensor's identity is its own only as long as it lives
        self._nodes: dict[int, Node] = {}
        for number, tensor in enumerate(given):
            self._add(tensor, self.graph.placeholder(f"given_{number}"))

    def _add(self, tensor: Tensor, node: Node) -> None:
        self._kept.append(tensor)
        self._nodes[id(tensor)] = node

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            self._add(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _UNKNOWN.intersection(func.tags):
            raise _LooksAtValuesError
        kwargs = kwargs or {}
        node = self.graph.call_function(func, *tree_map_only(Tensor, self._node, (args, kwargs)))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self._add(found, node)
            same = func in _SAME or (func is torch.ops.aten.mul.Scalar and args[1] == 1)
            if same and found.shape == args[0].shape and found.dtype == args[0].dtype:
                node.meta["same"] = self._node(args[0])
        else:
            for number, part in enumerate(found):
                if isinstance(part, Tensor):
                    self._add(part, self.graph.call_function(operator.getitem, (node, number)))
        return found

    def played(self, values: list[Tensor]) -> Callable[..., list[Tensor]]:
        """Return the recorded function, from its arguments to some of its tensors."""
        self.graph.output([self._node(value) for value in values])
        schemas = [getattr(node.target, "_schema", None) for node in self.graph.nodes]
        if not any(schema is not None and schema.is_mutable for schema in schemas):
            for node in self.graph.nodes:
                if "same" in node.meta:
                    node.replace_all_uses_with(node.meta["same"])
        self.graph.eliminate_dead_code()
        play: Callable[..., list[Tensor]] = GraphModule(self.constants, self.graph).forward
        return play


def _alike(values: Any, others: Any) -> bool:
    """Return whether two nests of tensors are the same up to rounding."""
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().nan_to_num(posinf=0.0).max()), equal_nan=True)
        for a, b in zip(tree_leaves(values), tree_leaves(others), strict=True)
        if b.numel()
    )
