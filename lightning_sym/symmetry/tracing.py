"""From a network to its symmetry."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from lightning_sym.symmetry import _elementwise_rules, _linear_rules  # noqa: F401 (imported for the rules they register)
from lightning_sym.symmetry._capture import capture, evaluating, state_tensors
from lightning_sym.symmetry._structure import build_structure
from lightning_sym.symmetry._trace import Trace
from lightning_sym.symmetry.base import Symmetry, outputs_of
from lightning_sym.symmetry.rules import leaf_types

TOLERANCE = 1e-10


def trace_symmetry(
    network: nn.Module, example_input: Any, *, affine: bool = False, check: bool = True, tolerance: float = TOLERANCE
) -> Symmetry:
    """Find the weight-space symmetry of a network, and prove it on a random element.

    The network is run once on tensors without data; what each operation demands is written down, position by position,
    and solved. The result holds for every network of this architecture, in evaluation mode, for any weights and inputs.

    Args:
        network: Any network whose operations do not depend on values. Not changed.
        example_input: An input (a tensor of any batch size), or a tuple of positional arguments.
        affine: Whether to count changes of sign that add a constant, where the next bias can take it up: the units of
            sigmoid networks then have signs, as those of tanh networks do (spec 1.3).
        tolerance: Largest relative change of the output that the self-test accepts. The default suits networks that
            compute in the precision of their input; one that casts to float32 inside needs about 1e-5.
        check: Whether to run the self-test (recommended; two forward passes of one sample in float64).

    Returns:
        The symmetry.

    Raises:
        TypeError: If a parameter is complex or not floating, or the example holds no tensor.
        ValueError: If the network cannot be traced (data-dependent control flow, parametrised or lazy weights, a weight
            that is not finite).
        RuntimeError: If the self-test fails, because the rule of some operation allows too much.

    Example:
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> symmetry.dimension
        8
        >>> other = symmetry.act(symmetry.sample(), network)
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected a network (a torch.nn.Module), got {type(network).__name__}")
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if not tensors:
        raise TypeError(
            f"the example input must be a tensor or a tuple with tensors, got {type(example_input).__name__}"
        )
    if any(t.numel() == 0 for t in tensors):
        raise ValueError("the example input is empty; expected at least one sample")
    _check_network(network)
    states = state_tensors(network)
    captured = capture(network, inputs, leaf_types())
    trace = Trace(captured, states, affine=affine)
    trace.run()
    unused = [name for name in dict(network.named_parameters()) if name not in trace.axis_labels]
    structure = build_structure(trace.ledger, trace.axis_labels, trace.grouped, trace.kinds, trace.absorbed)
    notes = list(trace.ledger.notes)
    if unused:
        shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        note = f"parameters that evaluation never uses stay as they are, whatever reads them in training: {shown}"
        notes.insert(0, note)
        warnings.warn(note, stacklevel=2)
    modules = {node.name: name for node, name in captured.results.items()}
    symmetry = Symmetry(structure, network, notes, modules)
    if check:
        symmetry.worst_error = _self_test(symmetry, network, inputs)
        if not symmetry.worst_error <= tolerance:
            _check_repeatable(network, inputs)
            raise RuntimeError(
                f"the self-test changed the output by {symmetry.worst_error:.1e} (relative; at most {tolerance:g} was "
                "expected): either the rule of some operation allows too much (check your own rules, or report the "
                "network), or the network casts to a lower precision inside (then pass tolerance=1e-5)"
            )
    return symmetry


def _self_test(symmetry: Symmetry, network: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Return the largest relative change of the output; one sample is enough, where the network takes one alone."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    sizes = {t.shape[0] for t in tensors if t.ndim}
    if len(sizes) == 1 and all(t.ndim for t in tensors) and sizes != {1}:
        one = torch.utils._pytree.tree_map_only(Tensor, lambda t: t[:1], inputs)
        try:
            return symmetry.check(network, one, perturb=0.3)
        except (RuntimeError, ValueError, IndexError):
            pass  # written for this batch size
    return symmetry.check(network, inputs, perturb=0.3)


def _check_repeatable(network: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.no_grad(), evaluating(network):
        once, again = outputs_of(network, inputs), outputs_of(network, inputs)
    if not all(torch.equal(one, two) for one, two in zip(once, again, strict=True)):
        raise ValueError(
            "the network puts out something else every time, in evaluation mode too, so nothing can be tested; "
            "expected a network that draws no random numbers then (check F.dropout without training=self.training)"
        )


def _check_network(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{name or 'the network'} has parametrised weights, whose symmetry is that of what they are computed "
                "from; remove the parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        hooks = getattr(module, "_forward_pre_hooks", {}).values()
        if hook := next((h for h in hooks if type(h).__name__ in ("SpectralNorm", "WeightNorm")), None):
            kind = type(hook).__name__
            raise ValueError(
                f"{name or 'the network'} has weights that a {kind} hook computes before every forward; remove the "
                "hook first (torch.nn.utils.remove_spectral_norm or remove_weight_norm)"
            )
    for name, tensor in state_tensors(network).items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(f"{name} has no shape yet (a lazy module); run the network once on an example first")
    for name, parameter in network.named_parameters():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise TypeError(f"{name} has dtype {parameter.dtype}; expected real floating-point parameters")
    weights = dict(network.named_parameters())
    for name, tensor in state_tensors(network).items():
        # Other buffers may hold infinities: masks do.
        finite = name in weights or name.endswith(("running_mean", "running_var"))
        if finite and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds values that are not finite; expected finite weights and statistics")
