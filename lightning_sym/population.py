"""Several networks of one architecture, trained independently in one process.

There are two ways to run the members, which give the same numbers up to rounding:

- :class:`LoopPopulation` runs one member after another, each with its own parameters;
- :class:`VmapPopulation` stacks each parameter along a leading member axis and runs all members
  in one vectorised call (``torch.func.vmap``).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._pytree import tree_map

from lightning_sym._random import derive_seed, seeded
from lightning_sym.networks import Network

Loss = Callable[[Any, Any], Tensor]
"""A member's loss: maps outputs and targets of a batch to a scalar. See :meth:`Population.step`."""

# Integer types by bytes, for the bits of a floating number.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class PopulationStep:
    """Results of one training step of a population.

    Attributes:
        losses: Each member's loss. Shape ``[M]``, detached; 0 for skipped members.
        gradients: One gradient per entry of :meth:`Population.trainable`, in that order.
        outputs: The members' outputs, detached, with a leading member axis (``[M, B, K]`` for logits; if outputs are
            tuples or dictionaries, one of stacked tensors). Rows of skipped members are 0; None if all were.
    """

    losses: Tensor
    gradients: list[Tensor]
    outputs: Any


class Population(nn.Module, ABC):
    """Members that share an architecture and differ by seed; see the module's docstring.

    Args:
        network: The architecture; its weights are not used: member ``n`` is ``network.fresh(n)``. Or a function
            that makes member ``n``; under vmap all must have parameters of the same names and shapes.
        numbers: The members' indices, which are their seeds. Distinct, at least one.

    Raises:
        ValueError: If ``numbers`` is empty or has duplicates, or members are not modules, share a trained tensor or,
            under vmap, have different architectures.
    """

    def __init__(self, network: Network | Callable[[int], nn.Module], numbers: Sequence[int]) -> None:
        super().__init__()
        self._make: Callable[[int], nn.Module] = network.fresh if isinstance(network, Network) else network
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"numbers must be distinct and at least one, got {list(numbers)}.")
        self.numbers = tuple(int(number) for number in numbers)
        # Whether training draws random numbers, by members; known after the first step.
        self._stochastic: dict[tuple[int | str, ...], bool] = {}

    def _made(self, number: int) -> nn.Module:
        """Make a member on the CPU, whatever device Lightning is at: random numbers differ between devices."""
        with torch.device("cpu"):
            made = self._make(number)
        if not isinstance(made, nn.Module):
            raise ValueError(f"Member {number} must be a module, got {type(made).__name__}; return one (make_member).")
        return made

    def __len__(self) -> int:
        return len(self.numbers)

    def trainable(self) -> list[nn.Parameter]:
        """Return the trained parameters, in the order of :attr:`PopulationStep.gradients`."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @abstractmethod
    def owners(self) -> list[int | None]:
        """Return the member of each entry of :meth:`trainable`; None for tensors with one row per member."""

    @abstractmethod
    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield ``(name within the network, parameter)`` for every trainable parameter, in the same order."""

    @abstractmethod
    def step(
        self,
        inputs: Tensor,
        targets: Any,
        loss: Loss,
        *,
        shared: bool = False,
        skip: frozenset[int] = frozenset(),
        draw: int = 0,
    ) -> PopulationStep:
        """Compute every member's loss and its gradient.

        Args:
            inputs: One batch per member, shape ``[M, B, ...]``; or one for all, shape ``[B, ...]``.
            targets: Targets for the loss: a tensor ``[M, B, ...]``, or ``[B, ...]`` if shared; or a
                tuple, list or dictionary of such tensors.
            loss: Called as ``loss(outputs, targets)`` with one member's outputs and targets; returns a scalar. A loss
                with a method ``stacked``, which maps outputs and targets of all members, ``[M, B, ...]``, to ``[M]``,
                is faster with :class:`VmapPopulation`, which calls the method instead of ``vmap(loss)``.
            shared: Whether all members see the same batch.
            skip: Indices of members not to run; their losses and gradients are 0.
            draw: Identifies this step for networks with dropout or other random layers.

        Returns:
            Losses, gradients and outputs; nothing is accumulated into ``.grad``.
        """

    @abstractmethod
    def forward(self, inputs: Tensor, *, skip: frozenset[int] = frozenset()) -> Any:
        """Return the members' outputs for the same inputs.

        Args:
            inputs: Shape ``[B, ...]``.
            skip: Indices of members to leave out.

        Returns:
            Outputs of the other members, with a leading member axis; None if there are none.
        """

    @abstractmethod
    def member_state(self, number: int) -> dict[str, Tensor]:
        """Return a copy of one member's parameters and buffers, under the network's own names."""

    @abstractmethod
    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Set one member's parameters and buffers, under the network's own names; they are copied."""

    @abstractmethod
    def set_buffer(self, name: str, values: Tensor) -> None:
        """Set a buffer of all members by copying, without synchronising with the device.

        Args:
            name: The buffer's name within the network.
            values: In the order of :attr:`numbers`. Shape ``[M, *shape of the buffer]``.
        """

    @abstractmethod
    def without(self, gradients: Sequence[Tensor], alive: Tensor) -> list[Tensor]:
        """Return gradients with zeros for stopped members, also where they are not finite, without synchronising.

        Args:
            gradients: One per entry of :meth:`trainable`.
            alive: Whether members continue. Shape ``[M]``, bool, on the gradients' device.
        """

    @abstractmethod
    def clip_gradients(self, value: float, *, by_norm: bool) -> None:
        """Clip every member's gradient separately, as if it were trained alone.

        Args:
            value: Largest norm (or absolute value) allowed. > 0.
            by_norm: Clip the Euclidean norm over the member's parameters; otherwise each entry.
        """

    @abstractmethod
    def drop_gradients(self, number: int) -> None:
        """Remove one member's gradient, so that the optimizer skips the member if possible."""

    @contextmanager
    def _drawing(self, device: torch.device, *keys: int | str) -> Iterator[None]:
        """Seed dropout and other random layers, so that other members and a resume have no effect on them.

        Args:
            device: Device of the random numbers.
            keys: Keys of the seed: members, then the step.
        """
        # Seeding takes longer than a small member's step; the first step determines whether it is needed.
        members = keys[:-1]
        if self._stochastic.get(members) is False:
            yield
            return
        with seeded(derive_seed("forward", *keys)):
            before = _generator_state(device)
            yield
            if members not in self._stochastic:
                self._stochastic[members] = not torch.equal(before, _generator_state(device))

    def _index(self, number: int) -> int:
        try:
            return self.numbers.index(number)
        except ValueError:
            raise ValueError(
                f"No member {number} in this population of members {list(self.numbers)}; with ddp_members every "
                "process holds its own."
            ) from None


def _difference(first: nn.Module, other: nn.Module) -> str:
    """Return the first difference between two members that a vectorised call would ignore; empty if there is none."""
    modules, others = dict(first.named_modules()), dict(other.named_modules())
    if modules.keys() != others.keys():
        return f"their modules, as {min(modules.keys() ^ others.keys())}"
    for name, module in modules.items():
        # Every parametrised module has another class; its parametrisations are submodules.
        kind, other_kind = map(type_before_parametrizations, (module, others[name]))
        if kind is not other_kind or module.extra_repr() != others[name].extra_repr():
            return f"the module {name}" if name else "their class or its description"
    held = dict((*other.named_parameters(), *other.named_buffers()))
    for name, tensor in (*first.named_parameters(), *first.named_buffers()):
        found = held.get(name)
        if found is None or found.shape != tensor.shape:
            return f"the shape of {name}"
    return ""


class LoopPopulation(Population):
    """Runs one member after another; a member's numbers are bitwise those of training it alone.

    The gradient of each member is computed before the next one runs, so that memory for activations is that of
    one member.

    Args:
        network: The architecture; see :class:`Population`.
        numbers: The members' indices; see :class:`Population`.
        channels_last: Keep four-dimensional tensors in ``torch.channels_last`` layout.
    """

    def __init__(
        self, network: Network | Callable[[int], nn.Module], numbers: Sequence[int], *, channels_last: bool = False
    ) -> None:
        super().__init__(network, numbers)
        self.channels_last = channels_last
        self.members = nn.ModuleDict({_key(number): self._made(number) for number in self.numbers})
        owners: dict[Tensor, int] = {}
        for number, member in zip(self.numbers, self.members.values(), strict=True):
            for name, parameter in member.named_parameters():
                if parameter.requires_grad and owners.setdefault(parameter, number) != number:
                    raise ValueError(
                        f"Members {owners[parameter]} and {number} train one tensor, {name}, and are not independent; "
                        "return a new module for each member (copy.deepcopy)."
                    )
        if channels_last:
            self.members.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _member(self, number: int) -> nn.Module:
        self._index(number)
        return self.members[_key(number)]

    def network(self, number: int) -> nn.Module:
        """Return one member's module, with its current weights."""
        return self._member(number)

    def member_parameters(self, number: int) -> list[nn.Parameter]:
        """Return one member's trainable parameters."""
        return [parameter for parameter in self._member(number).parameters() if parameter.requires_grad]

    def owners(self) -> list[int | None]:  # noqa: D102
        return [number for number in self.numbers for _ in self.member_parameters(number)]

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: D102
        for member in self.members.values():
            for name, parameter in member.named_parameters():
                if parameter.requires_grad:
                    yield name, parameter

    def step(  # noqa: D102
        self,
        inputs: Tensor,
        targets: Any,
        loss: Loss,
        *,
        shared: bool = False,
        skip: frozenset[int] = frozenset(),
        draw: int = 0,
    ) -> PopulationStep:
        prepared = self.prepared(inputs) if shared else None
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        outputs: list[Any] = []
        for index, number in enumerate(self.numbers):
            parameters = self.member_parameters(number)
            if number in skip:
                gradients += [torch.zeros_like(parameter) for parameter in parameters]
                losses.append(torch.zeros((), device=inputs.device))
                outputs.append(None)
                continue
            with self._drawing(inputs.device, self.random_key(number), draw):
                found = self.run_member(number, prepared if shared else self.prepared(inputs[index]))
            value = loss(found, targets if shared else tree_map(lambda tensor, i=index: tensor[i], targets))
            _check_loss(value, 0)
            if (penalty := self.penalty(number)) is not None:
                value = value + penalty
            with torch.autocast(inputs.device.type, enabled=False):
                gradients += _gradients(value, parameters)
            losses.append(value.detach())
            outputs.append(tree_map(Tensor.detach, found))
        return PopulationStep(torch.stack(losses), gradients, _stacked(outputs))

    def prepared(self, inputs: Tensor) -> Any:
        """Return the input of :meth:`run_member`: computations shared by all members with these inputs."""
        four = self.channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if four else inputs

    def random_key(self, number: int) -> int | str:
        """Return the key of a member's dropout and other random layers, in addition to the step: its index."""
        return number

    def penalty(self, number: int) -> Tensor | None:
        """Return a member's regularisation, which is independent of its outputs: a scalar, or None."""
        return None

    def run_member(self, number: int, prepared: Any) -> Any:
        """Return one member's outputs.

        Args:
            number: Index of the member.
            prepared: Result of :meth:`prepared` for its inputs.
        """
        return self._member(number)(prepared)

    def forward(self, inputs: Tensor, *, skip: frozenset[int] = frozenset()) -> Any:  # noqa: D102
        prepared = self.prepared(inputs)
        return _stacked([self.run_member(number, prepared) for number in self.numbers if number not in skip])

    def member_state(self, number: int) -> dict[str, Tensor]:  # noqa: D102
        return {name: value.detach().clone() for name, value in self._member(number).state_dict().items()}

    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:  # noqa: D102
        self._member(number).load_state_dict(state)

    def set_buffer(self, name: str, values: Tensor) -> None:  # noqa: D102
        for member, value in zip(self.members.values(), values, strict=True):
            member.get_buffer(name).copy_(value, non_blocking=True)

    def without(self, gradients: Sequence[Tensor], alive: Tensor) -> list[Tensor]:  # noqa: D102
        given = iter(gradients)
        return [
            gradient
            for number, flag in zip(self.numbers, alive.unbind(), strict=True)
            for gradient in zero_unless(flag, list(islice(given, len(self.member_parameters(number)))))
        ]

    def clip_gradients(self, value: float, *, by_norm: bool) -> None:  # noqa: D102
        clip = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        for number in self.numbers:
            # Members that were not run have no gradients, and torch cannot clip an empty list by value.
            if parameters := [p for p in self.member_parameters(number) if p.grad is not None]:
                clip(parameters, value)

    def drop_gradients(self, number: int) -> None:  # noqa: D102
        for parameter in self._member(number).parameters():
            parameter.grad = None


class VmapPopulation(Population):
    """Runs all members in one vectorised call; many small members run much faster than one after another.

    Parameters and buffers have a leading member axis, so that the optimizer must act elementwise,
    as SGD and the Adam family do; the task checks this.

    Args:
        network: The architecture; see :class:`Population`. All its operations must support
            ``torch.func.vmap``.
        numbers: The members' indices; see :class:`Population`.
    """

    def __init__(self, network: Network | Callable[[int], nn.Module], numbers: Sequence[int]) -> None:
        super().__init__(network, numbers)
        members = [self._made(number) for number in self.numbers]
        first = members[0]
        for number, member in zip(self.numbers, members, strict=True):
            if difference := _difference(first, member):
                raise ValueError(
                    f"Under vmap all members run the modules of the first, but members {self.numbers[0]} and {number} "
                    f'differ in {difference}; keep what differs in a buffer, or set execution to "loop".'
                )
        # In a tuple, so that it is not a submodule: only the stacked tensors are parameters of the population.
        self._skeleton = (copy.deepcopy(first).to("meta"),)
        # The network's state dict: without non-persistent buffers, with all names of tied tensors.
        self._state_names = list(first.state_dict())
        for name, parameter in first.named_parameters():
            stacked = torch.stack([member.get_parameter(name).detach() for member in members])
            self.register_parameter(_flat(name), nn.Parameter(stacked, requires_grad=parameter.requires_grad))
        for name, _ in first.named_buffers():
            self.register_buffer(_flat(name), torch.stack([member.get_buffer(name) for member in members]))
        self._parameter_names = [name for name, _ in first.named_parameters()]
        own: dict[Tensor, str] = {}
        self._own_names = {
            name: own.setdefault(tensor, name)
            for name, tensor in [
                *first.named_parameters(remove_duplicate=False),
                *first.named_buffers(remove_duplicate=False),
            ]
        }

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: D102
        for name in self._parameter_names:
            parameter = self.get_parameter(_flat(name))
            if parameter.requires_grad:
                yield name, parameter

    def owners(self) -> list[int | None]:  # noqa: D102
        return [None] * len(self.trainable())

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, _flat(own)) for name, own in self._own_names.items()}

    def _call(self, inputs: Tensor, inputs_axis: int | None) -> Any:
        skeleton = self._skeleton[0].train(self.training)

        def run(state: dict[str, Tensor], inputs: Tensor) -> Any:
            return functional_call(skeleton, state, (inputs,), tie_weights=False)

        return vmap(run, in_dims=(0, inputs_axis), randomness="different")(self._tensors(), inputs)

    def step(  # noqa: D102
        self,
        inputs: Tensor,
        targets: Any,
        loss: Loss,
        *,
        shared: bool = False,
        skip: frozenset[int] = frozenset(),
        draw: int = 0,
    ) -> PopulationStep:
        with self._drawing(inputs.device, *self.numbers, draw):
            outputs = self._call(inputs, None if shared else 0)
        if shared:
            targets = tree_map(lambda tensor: tensor.expand(len(self), *tensor.shape), targets)
        losses: Tensor = _stacked_loss(loss)(outputs, targets)
        _check_loss(losses, 1)
        with torch.autocast(losses.device.type, enabled=False):
            gradients = _gradients(losses.sum(), self.trainable())
        losses, outputs = losses.detach(), tree_map(Tensor.detach, outputs)
        if skip:
            rows = [index for index, number in enumerate(self.numbers) if number in skip]
            losses[rows] = 0.0
            for gradient in gradients:
                gradient[rows] = 0.0
            outputs = tree_map(
                lambda tensor: tensor.index_fill(0, torch.tensor(rows, device=tensor.device), 0), outputs
            )
        return PopulationStep(losses, gradients, outputs)

    def forward(self, inputs: Tensor, *, skip: frozenset[int] = frozenset()) -> Any:  # noqa: D102
        outputs = self._call(inputs, None)
        kept = [index for index, number in enumerate(self.numbers) if number not in skip]
        return outputs if len(kept) == len(self) else tree_map(lambda tensor: tensor[kept], outputs) if kept else None

    def member_state(self, number: int) -> dict[str, Tensor]:  # noqa: D102
        return {name: value.clone() for name, value in self._member_views(number).items()}

    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:  # noqa: D102
        for name, view in self._member_views(number).items():
            view.copy_(state[name])

    def set_buffer(self, name: str, values: Tensor) -> None:  # noqa: D102
        self._tensors()[name].copy_(values, non_blocking=True)

    def _member_views(self, number: int) -> dict[str, Tensor]:
        index, tensors = self._index(number), self._tensors()
        return {name: tensors[name][index].detach() for name in self._state_names}

    # Checkpoints have the names of LoopPopulation, one entry per member and tensor, so that the members of several
    # processes can be merged and split.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for number in self.numbers:
            for name, value in self._member_views(number).items():
                destination[f"{prefix}members.{_key(number)}.{name}"] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = set()
        for number in self.numbers:
            for name, view in self._member_views(number).items():
                key = f"{prefix}members.{_key(number)}.{name}"
                expected.add(key)
                if key not in state_dict:
                    missing_keys.append(key)
                elif state_dict[key].shape != view.shape:
                    error_msgs.append(f"{key}: shape {list(state_dict[key].shape)}, expected {list(view.shape)}")
                else:
                    view.copy_(state_dict[key])
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in expected]

    def without(self, gradients: Sequence[Tensor], alive: Tensor) -> list[Tensor]:  # noqa: D102
        return [torch.where(alive.view(-1, *[1] * (gradient.dim() - 1)), gradient, 0.0) for gradient in gradients]

    def clip_gradients(self, value: float, *, by_norm: bool) -> None:  # noqa: D102
        gradients = [parameter.grad for parameter in self.trainable() if parameter.grad is not None]
        if not by_norm:
            torch._foreach_clamp_min_(gradients, -value)
            torch._foreach_clamp_max_(gradients, value)
            return
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients])
        # 1e-6 as in torch.nn.utils.clip_grad_norm_
        factor = (value / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))

    def drop_gradients(self, number: int) -> None:  # noqa: D102
        # A row of a stacked tensor cannot be skipped; zeros keep values that are not finite from its neighbours.
        for parameter in self.trainable():
            if parameter.grad is not None:
                parameter.grad[self._index(number)] = 0.0


def _stacked_loss(loss: Loss) -> Loss:
    """Return the loss of all members at once; ignores a method inherited by a class that overrides the call."""
    stacked: Loss | None = getattr(loss, "stacked", None)
    names = {"stacked", "__call__", "forward"}
    nearest = next(found for kind in type(loss).__mro__ if (found := names & vars(kind).keys()))
    outdated = hasattr(type(loss), "stacked") and "stacked" not in nearest
    return vmap(loss) if stacked is None or outdated else stacked


class _GradientCarrier(torch.autograd.Function):
    """A scalar with a backward that returns precomputed gradients.

    Members' gradients are computed one at a time; this passes them to ``.grad`` by an ordinary
    ``backward()``, so that Lightning's accumulation and DDP's reduction work as usual.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, *tensors: Tensor) -> Tensor:
        half = len(tensors) // 2
        ctx.gradients = tensors[:half]  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients  # type: ignore[attr-defined]
        return (None, *[None] * len(gradients), *torch._foreach_mul(gradients, outputs[0]))


def carry_gradients(value: Tensor, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return ``value`` as a scalar with a backward that adds the given gradients to the parameters.

    Args:
        value: The loss to report. Scalar, detached.
        gradients: One per parameter, of its shape.
        parameters: Leaves that require gradients.

    Returns:
        A scalar equal to ``value``; ``backward()`` multiplies the gradients by the incoming factor.
    """
    result: Tensor = _GradientCarrier.apply(value, *gradients, *parameters)
    return result


def zero_unless(flag: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors unchanged, or zeros even for values that are not finite, without synchronising.

    Args:
        flag: Whether to keep the values. Scalar, bool, on the tensors' device.
        tensors: Real floating tensors; not changed.
    """
    if not tensors:
        return []
    # Multiply bits as integers, since NaN times 0 is NaN: a single kernel for all, where torch.where needs one each.
    bits = [tensor.view(_INTEGERS[tensor.element_size()]) for tensor in tensors]
    kept = torch._foreach_mul(bits, flag.to(bits[0].dtype))
    return [part.view(tensor.dtype) for part, tensor in zip(kept, tensors, strict=True)]


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients; zeros for parameters that the loss does not depend on."""
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def _stacked(outputs: Sequence[Any]) -> Any:
    """Stack members' outputs along a leading member axis, 0 for skipped members; None if there are no outputs."""
    like = next((value for value in outputs if value is not None), None)
    if like is None:
        return None
    empty = tree_map(torch.zeros_like, like) if any(value is None for value in outputs) else None
    return tree_map(lambda *parts: torch.stack(parts), *(empty if value is None else value for value in outputs))


def _check_loss(value: Tensor, members: int) -> None:
    """Raise an error unless a loss is one number per member; ``members`` is the number of member axes."""
    if value.dim() != members:
        raise ValueError(
            f"loss must return one number for a member's batch, got shape {list(value.shape[members:])}; average over "
            "the batch."
        )


def _generator_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _key(number: int) -> str:
    return f"{number:04d}"


def _flat(name: str) -> str:
    return name.replace(".", "/")
