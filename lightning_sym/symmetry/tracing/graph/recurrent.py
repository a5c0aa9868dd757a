"""Decompose recurrent layers into two time steps, with the same constraints on the weights as all steps.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are one operation each. All steps share their weights, so the group acts on the state
identically after each step. Two steps therefore express every constraint, as the second step reads the state of the
first (docs/theory/intertwiners.md, 2.9). The result does not compute the layer's values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]
# Maps the gate inputs (from the input, and from the state) and the state to the next state.
Cell = Callable[[Tensor, Tensor, State], State]


@torch.library.custom_op("lightning_sym::any_step", mutates_args=())
def any_step(sequence: Tensor, axis: int) -> Tensor:
    """Return any step of a sequence; the group may not act along its axis.

    Raises:
        RuntimeError: Always, as the operation is only traced.
    """
    raise RuntimeError("a step is only traced, never taken")


@any_step.register_fake
def _(sequence: Tensor, axis: int) -> Tensor:
    return torch.empty_like(sequence.select(axis, 0))


def _lstm_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    let_in, forget, candidate, put_out = (inputs + recurrent).chunk(4, -1)
    memory = forget.sigmoid() * state[1] + let_in.sigmoid() * candidate.tanh()
    return put_out.sigmoid() * memory.tanh(), memory


def _gru_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    reset, update, candidate = inputs.chunk(3, -1)
    own_reset, own_update, own_candidate = recurrent.chunk(3, -1)
    kept = (update + own_update).sigmoid()
    new = (candidate + (reset + own_reset).sigmoid() * own_candidate).tanh()
    return ((1 - kept) * new + kept * state[0],)


def _tanh_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return ((inputs + recurrent).tanh(),)


def _relu_cell(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return ((inputs + recurrent).relu(),)


def _direction(cell: Cell, sequence: Tensor, axis: int, state: State, weights: Sequence[Tensor], biased: bool) -> Any:
    """Return the output and the final state of a layer in one direction."""
    step = any_step(sequence, axis)
    into, back, *rest = weights
    biases = (rest.pop(0), rest.pop(0)) if biased else (None, None)
    states = []
    for _ in range(2):
        state = cell(F.linear(step, into, biases[0]), F.linear(state[0], back, biases[1]), state)
        if rest:  # a projection
            state = (F.linear(state[0], rest[0]), *state[1:])
        states.append(state[0].unsqueeze(axis))
    length = sequence.shape[axis]
    shape = [length - 1 if place == axis else size for place, size in enumerate(states[1].shape)]
    return torch.cat([states[0], states[1].expand(shape)], axis) if length > 1 else states[1], state


def _layers(cell: Cell, count: int) -> Callable[..., Any]:
    """Return a layer with the signature of torch's operation, from its cell and the number of its state tensors."""

    def run(
        sequence: Tensor,
        initial: Any,
        weights: Sequence[Tensor],
        biased: bool,
        layers: int,
        dropout: float,
        training: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> Any:
        given = list(initial) if count > 1 else [initial]
        axis = 1 if batch_first and sequence.ndim == 3 else 0
        directions = 2 if both_ways else 1
        per_direction = len(weights) // (layers * directions)
        left: list[State] = []
        for _layer in range(layers):
            outputs = []
            for _ in range(directions):
                number = len(left)
                own = weights[number * per_direction : (number + 1) * per_direction]
                state = tuple(tensor.select(0, number) for tensor in given)
                output, last = _direction(cell, sequence, axis, state, own, biased)
                outputs.append(output)
                left.append(last)
            sequence = torch.cat(outputs, -1) if both_ways else outputs[0]
        return sequence, *(_stacked(tensors) for tensors in zip(*left, strict=True))

    return run


def _stacked(states: Sequence[Tensor]) -> Tensor:
    """Stack states such that the units of different layers remain separate."""
    units = torch.cat(list(states), -1)
    return units.reshape(*units.shape[:-1], len(states), -1).movedim(-2, 0)


def _one_step(cell: Cell, count: int) -> Callable[..., Any]:
    def run(
        x: Tensor, state: Any, into: Tensor, back: Tensor, bias: Tensor | None = None, own: Tensor | None = None
    ) -> Any:
        state = tuple(state) if count > 1 else (state,)
        result = cell(F.linear(x, into, bias), F.linear(state[0], back, own), state)
        return result if count > 1 else result[0]

    return run


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of recurrent operations for a captured graph."""
    aten = torch.ops.aten
    return {
        aten.lstm.input: _layers(_lstm_cell, 2),
        aten.gru.input: _layers(_gru_cell, 1),
        aten.rnn_tanh.input: _layers(_tanh_cell, 1),
        aten.rnn_relu.input: _layers(_relu_cell, 1),
        aten.lstm_cell.default: _one_step(_lstm_cell, 2),
        aten.gru_cell.default: _one_step(_gru_cell, 1),
        aten.rnn_tanh_cell.default: _one_step(_tanh_cell, 1),
        aten.rnn_relu_cell.default: _one_step(_relu_cell, 1),
    }
