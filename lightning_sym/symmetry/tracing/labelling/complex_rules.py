"""Rules for Fourier transforms and complex numbers: scales and matrices are real, so they pass all linear maps."""

from dataclasses import replace
from typing import Any

from lightning_sym.symmetry.tracing.labelling.rules import register_rule
from lightning_sym.symmetry.tracing.labelling.values import Value
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace

_LINES = [f"aten::fft_{name}" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")]
_PLANES = [f"{name}{suffix}" for name in _LINES for suffix in "2n" if "hfft" not in name]


@register_rule(*_LINES)
def _fourier(trace: Trace, value: Value, size: Any = None, dim: int = -1, norm: Any = None) -> Value:
    return trace.linear_along(value, [dim], trace.output_shape())


@register_rule(*_PLANES)
def _fourier_of_axes(trace: Trace, value: Value, sizes: Any = None, dim: Any = None, norm: Any = None) -> Value:
    if dim is None:
        count = value.ndim if sizes is None else len(sizes)
        dim = [-2, -1] if trace.operation.endswith("2") else range(-count, 0)
    return trace.linear_along(value, list(dim), trace.output_shape())


@register_rule("aten::real", "aten::imag", "aten::view_as_real", "aten::_conj", "aten::conj_physical")
def _part(trace: Trace, value: Value) -> Value:
    return Value(trace.output_shape(), tuple(trace.constraints.resolve(label) for label in value.labels))


@register_rule("aten::view_as_complex")
def _as_complex(trace: Trace, value: Value) -> Value:
    tied = trace.free_of(value, [-1], "") if value.state is not None else trace.tied(value, [-1])
    return replace(_part(trace, tied), state=None)


@register_rule("aten::complex")
def _complex(trace: Trace, one: Value, two: Value) -> Value:
    return trace.join(one, two, product=False)


@register_rule("aten::polar")
def _polar(trace: Trace, length: Value, angle: Value) -> Value:
    return trace.join(length, trace.permutations_only(angle), product=True)
