"""The loss of one network at many weight vectors."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_known
from lightning_sym._distributed import device_of, run_on, wide
from lightning_sym.landscape._first_layer import FirstLayer, apply_elementwise, find_first_layer, with_fast_pools
from lightning_sym.landscape.planes import WeightPlane, as_tensors, trainable, weight_vector
from lightning_sym.landscape.two_unit.loss import ReluLine, is_relu_line
from lightning_sym.networks.modes import in_precision
from lightning_sym.symmetry.tracing.graph.capture import copied

Method: TypeAlias = Literal["auto", "closed_form", "affine", "vmap", "loop"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# Inputs of the first block, for early rejection (docs/theory/equivalence.md, 3.3).
_FIRST_INPUTS = 64
# Bytes of the largest activation of all points and inputs that are worked on at once.
_CPU_BYTES, _DEVICE_BYTES = 4 * 2**20, 256 * 2**20
# The most bytes that "auto" spends on the first layer's outputs at the centre and for each basis vector.
_AFFINE_BYTES = 2**30
# Points of a chunk where the network runs for one at a time.
_LOOP_POINTS = 8
_CLOSED_FORM_POINTS = 8192


class LossSurface:
    r"""J, or another loss, at many weight vectors of one network on fixed inputs.

    :math:`J(\theta) = \frac{1}{N} \sum_x \lVert f(x; \theta) - y(x) \rVert^2`: a sum over outputs and a mean over
    inputs (docs/theory/equivalence.md, 1.1). ``torch.nn.MSELoss`` divides by the number of outputs as well.

    The network is copied when the surface is made, in eval mode; later changes of it are not seen. Evaluation takes
    place without gradients. A network must treat its inputs independently.

    **Methods.** All give the same numbers up to rounding.

    - ``closed_form``: from two slopes, always in float64; for ``MultiLayerPerceptron`` with one input, one hidden
      layer of ReLUs, one output and no biases, under the squared distance.
    - ``affine``: within a plane the first linear or convolutional layer's output is affine in the coefficients, so it
      is computed once at the centre and once for each basis vector. Perceptrons then run many points at a time,
      other networks one by one. Needs a network that torch.fx can trace, where only that layer reads the input.
      At weight vectors outside a plane (:meth:`at`) perceptrons still run many at a time.
    - ``vmap``: ``torch.func.vmap`` over some points at a time.
    - ``loop``: the network itself, point by point.
    - ``auto``: ``closed_form`` where there is one; ``affine`` for perceptrons; on CPUs, for networks with convolutions,
      ``affine`` where possible (and at most 1 GiB is kept), else ``loop``. Only for other networks, and for those with
      convolutions on accelerators, the methods are timed on a few points: there two runs may choose differently, and
      then agree up to rounding only. Store :attr:`method` and pass it to get the same bits again.

    **Reproducibility.** Points are evaluated :attr:`chunk` at a time from the first on, and inputs in fixed blocks, so
    that the same call with the same number of threads gives the same bits; another position of a point within the
    chunk may change its last bit. Two calls that cut one list of points at multiples of :attr:`chunk` give the bits of
    one call.

    Args:
        network: Any module that takes one tensor and returns one. Its trainable parameters vary.
        inputs: Shape [N, ...], N >= 1, finite. Moved to the network's device.
        targets: Shape [N, ...]; detached. For the squared distance of the shape of the outputs, and finite.
        loss: ``"squared_distance"``, or a function from outputs [G, N, ...] and targets [N, ...] to the loss of each
            input, [G, N]; it is called with some of the inputs at a time.
        method: See above.
        dtype: Dtype of the forward pass, floating; None for the network's. float64 for thresholds below 1e-12 of the
            zero function's J, and for topology; float32 for pictures. Sums over inputs are taken in float64 always.
        chunk: Points evaluated together, >= 1; None for as many as fit the cache (CPU) or 256 MiB.

    Attributes:
        method: The method used; ``"auto"`` until the first evaluation if it has to be timed. Set it to that of another
            surface of the same network to get the same bits.
        inputs: As they are evaluated.
        targets: Likewise.
        size: The number P of trainable parameters.

    Raises:
        ValueError: If an argument is out of range, shapes do not fit, or the method is not possible for the network.

    Example:
        >>> from lightning_sym.networks import MultiLayerPerceptron
        >>> network, x = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False), torch.randn(500, 1)
        >>> surface = LossSurface(network, x, torch.zeros(500, 1))
        >>> surface.at(torch.zeros(3, 4))
        tensor([0., 0., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        loss: Literal["squared_distance"] | Loss = "squared_distance",
        method: Method = "auto",
        dtype: torch.dtype | None = None,
        chunk: int | None = None,
    ) -> None:
        options = get_args(Method)
        check_known("method", method, options)
        if loss != "squared_distance" and not callable(loss):
            raise ValueError(f"loss must be 'squared_distance' or a function of outputs and targets, got {loss!r}.")
        check_integers(optional=True, chunk=chunk)
        parameters = trainable(network)
        self.dtype = dtype or next(iter(parameters.values())).dtype
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype such as torch.float64, got {dtype!r}.")
        self.device = device_of(network)
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.size = sum(shape.numel() for shape in self._shapes.values())
        self.loss = loss
        self._squared = loss == "squared_distance"
        self.inputs, self.targets = self._data(inputs, "inputs"), self._data(targets, "targets")
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"There are {len(self.inputs)} inputs and {len(self.targets)} targets; pass one for each.")

        self._spaces: dict[str, Tensor] = {}
        self._network, self._flat = self._private(network)
        self._frozen = {name: value for name, value in self._network.named_parameters() if name not in self._shapes}
        self._width = self._check_outputs()
        self._line = self._closed_form(network, inputs, targets)
        self._blocks = self._input_blocks()
        self._first: FirstLayer | None = None
        try:
            self._first = find_first_layer(self._network)
        except ValueError as error:
            if method == "affine":
                raise ValueError(f"method='affine' is not possible here: {error} Use 'auto'.") from error
        self._plane: tuple[WeightPlane, Tensor, list[Tensor]] | None = None
        self._shape: tuple[int, ...] = ()  # of the first layer's output for one input
        self._chunk = chunk
        if method == "closed_form" and self._line is None:
            raise ValueError(
                "method='closed_form' needs a MultiLayerPerceptron with one input, one hidden layer of ReLUs, one "
                "output and no biases, and the squared distance; use 'auto'."
            )
        self.method: Method = self._rule() if method == "auto" else method

    @property
    def chunk(self) -> int:
        """Points evaluated together."""
        if self._chunk is not None:
            return self._chunk
        if self.method == "closed_form":
            return _CLOSED_FORM_POINTS
        if self.method in ("loop", "affine") and not self._batched:
            return _LOOP_POINTS
        largest: int = max(block.stop - block.start for block in self._blocks)
        width = self._width
        if self.method == "affine" and self._first is not None:  # the first layer's input is held once
            parts = [self._first.layer, *(self._network.get_submodule(name) for name in self._dense or ())]
            width = max(part.out_features for part in parts if isinstance(part, nn.Linear))
        return max(1, min(4096, self._bytes // (largest * width * self.dtype.itemsize)))

    def at(self, vectors: Tensor) -> Tensor:
        """Return the losses at weight vectors.

        Args:
            vectors: Shape [G, P], floating, any device; order as in :func:`weight_vector`.

        Returns:
            Means over the inputs, shape [G], float64, on the CPU. Losses that are not finite are ``inf``.

        Raises:
            ValueError: If the shape or dtype is wrong.
        """
        return self._evaluate(None, self._rows(vectors, self.size, "vectors"), None)

    def on(self, plane: WeightPlane, coefficients: Tensor, *, below: float | None = None) -> Tensor:
        """Return the losses at points of a plane.

        Args:
            plane: Plane in weight space, of this network's number of parameters.
            coefficients: Shape [G, m], floating, any device.
            below: Only losses below this number are wanted, for example epsilon: a point is given up as soon as the
                inputs seen so far make its mean at least that. Exact, rounding included: sums only grow, and those of
                the points kept are bitwise the same as without ``below``. Needs losses >= 0.

        Returns:
            Means over the inputs, shape [G], float64, on the CPU. Losses that are not finite, and with ``below`` all
            that are not below it, are ``inf``.

        Raises:
            ValueError: If a shape or dtype is wrong, or ``below`` is given and a loss is negative.
        """
        if len(plane.centre) != self.size:
            raise ValueError(
                f"The plane lies in a space of {len(plane.centre)} weights, but the network has {self.size} trainable "
                "parameters; make the plane from weight vectors of this network."
            )
        return self._evaluate(plane, self._rows(coefficients, plane.dimension, "coefficients"), below)

    def choose(self, plane: WeightPlane | None, rows: Tensor) -> Method:
        """Time the possible methods if there is no rule for the network, and keep the fastest.

        Args:
            plane: Where the rows are coefficients, otherwise None.
            rows: Some coefficients or weight vectors, shape [G, m or P], G >= 1.

        Returns:
            The method that :meth:`at` and :meth:`on` will use.
        """
        if self.method == "auto":
            seconds: dict[Method, float] = {}
            for method in self._possible(plane):
                self.method = method
                few = rows[: min(self.chunk, _LOOP_POINTS)]
                try:
                    self._evaluate(plane, few, None)
                except (RuntimeError, NotImplementedError):  # no batched version, or too little memory
                    if method == "loop":
                        self.method = "auto"
                        raise
                    continue
                start = time.perf_counter()
                self._evaluate(plane, few, None)
                seconds[method] = time.perf_counter() - start
            self.method = min(seconds, key=seconds.__getitem__)
        return self.method

    def description(self) -> tuple[str, ...]:
        """Describe network, loss, method, precision, device and chunk, which with the tensors determine the losses."""
        loss = self.loss if isinstance(self.loss, str) else f"{self.loss.__module__}.{_name(self.loss)}"
        return repr(self._network), loss, self.method, str(self.dtype), self.device.type, str(self.chunk)

    def constants(self) -> list[Tensor]:
        """Return the constant tensors that losses depend on: inputs, targets, frozen weights, buffers."""
        return [self.inputs, self.targets, *self._frozen.values(), *self._network.buffers()]

    # ---- parts of a surface

    def _data(self, tensor: Tensor, name: str) -> Tensor:
        """Return a checked copy on the device, floating numbers in the dtype."""
        if tensor.ndim == 0 or len(tensor) == 0:
            raise ValueError(f"{name} must be a tensor [N, ...] of at least one input, got {list(tensor.shape)}.")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite; leave those inputs out.")
        dtype = self.dtype if tensor.is_floating_point() or (self._squared and name == "targets") else tensor.dtype
        return tensor.detach().to(self.device, dtype, copy=True)

    def _closed_form(self, network: nn.Module, inputs: Tensor, targets: Tensor) -> ReluLine | None:
        if not self._squared or not is_relu_line(network) or inputs[0].numel() != 1 or not inputs.is_floating_point():
            return None
        return ReluLine.of(inputs, targets)

    def _private(self, network: nn.Module) -> tuple[nn.Module, Tensor]:
        """Copy the network, with trainable parameters that are views of one vector; return the copy and the vector."""
        private = in_precision(copied(network), self.dtype).eval()
        flat = weight_vector(private)
        nn.utils.vector_to_parameters(flat, trainable(private).values())
        private.requires_grad_(False)
        if self.device.type == "cpu":
            with_fast_pools(private)
        return private, flat

    def _check_outputs(self) -> int:
        """Run the network once; return the most numbers that it holds for an input at once."""
        width = self.inputs[0].numel()
        count = min(len(self.inputs), _FIRST_INPUTS)

        def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal width
            if isinstance(output, Tensor):
                width = max(width, output.numel() // count)

        with ExitStack() as hooks, self._quietly():
            for part in self._network.modules():
                hooks.enter_context(part.register_forward_hook(watch))
            output = run_on(self._network, self.inputs[:count])
            if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != count:
                raise ValueError("The network must return one tensor with the inputs along its first axis.")
            if self._squared and output.shape != self.targets[:count].shape:
                raise ValueError(
                    f"targets must have the shape of the outputs, [{len(self.inputs)}, "
                    f"{', '.join(map(str, output.shape[1:]))}], got {list(self.targets.shape)}."
                )
            losses = self._sums(output[None], self.targets[:count])
        assert losses.shape == (1,)
        return width

    @property
    def _bytes(self) -> int:
        return _CPU_BYTES if self.device.type == "cpu" else _DEVICE_BYTES

    def _input_blocks(self) -> list[slice]:
        """Return the blocks of inputs: a first one for early rejection, then equal ones that fit."""
        count = len(self.inputs)
        most = max(2 * _FIRST_INPUTS, self._bytes // (self._width * self.dtype.itemsize))
        if count < 2 * _FIRST_INPUTS:
            return [slice(0, count)]
        others = -(-(count - _FIRST_INPUTS) // most)
        ends = [_FIRST_INPUTS + (count - _FIRST_INPUTS) * index // others for index in range(others + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise([0, *ends])]

    @property
    def _dense(self) -> tuple[str, ...] | None:
        return self._first.dense if self._first is not None else None

    def _rule(self) -> Method:
        """Return the method that is certain to be best, or ``"auto"`` to time them."""
        if self._line is not None:
            return "closed_form"
        if self._dense is not None:
            return "affine"
        convolutional = any(isinstance(part, nn.modules.conv._ConvNd) for part in self._network.modules())
        if convolutional and self.device.type == "cpu":
            return "loop" if self._first is None else "affine"
        return "auto"

    def _possible(self, plane: WeightPlane | None) -> list[Method]:
        methods: list[Method] = ["loop", "vmap"]
        if plane is not None and self._first is not None and self._fits(plane):
            methods.append("affine")
        return methods

    def _fits(self, plane: WeightPlane) -> bool:
        """Return whether the first layer's outputs for a plane are small enough to be kept."""
        return (plane.dimension + 1) * len(self.inputs) * self._width * self.dtype.itemsize <= _AFFINE_BYTES

    # ---- evaluation

    def _rows(self, rows: Tensor, size: int, name: str) -> Tensor:
        if not rows.is_floating_point() or rows.ndim != 2 or rows.shape[1] != size:
            raise ValueError(f"{name} must be a floating tensor [G, {size}], got {rows.dtype} {list(rows.shape)}.")
        return rows.detach()

    def _evaluate(self, plane: WeightPlane | None, rows: Tensor, below: float | None) -> Tensor:
        result = torch.empty(len(rows), dtype=torch.float64)
        if not len(rows):
            return result
        if self.method == "auto":
            self.choose(plane, rows)
        losses = self._closed_losses if self.method == "closed_form" else self._network_losses
        with self._quietly():
            for start in range(0, len(rows), self.chunk):
                stop = start + self.chunk
                result[start:stop] = losses(plane, rows[start:stop], below).to("cpu", torch.float64)
        result.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if below is not None:
            result.masked_fill_(result >= below, torch.inf)
        return result

    def _closed_losses(self, plane: WeightPlane | None, rows: Tensor, below: float | None) -> Tensor:
        """Return the losses at a chunk of coefficients or vectors from their slopes."""
        assert self._line is not None
        rows = rows.to("cpu", torch.float64)
        columns = rows.T.contiguous() if plane is None else torch.addmm(plane.centre[:, None], plane.basis, rows.T)
        return self._line.loss(columns)

    def _network_losses(self, plane: WeightPlane | None, rows: Tensor, below: float | None) -> Tensor:
        """Return the losses at a chunk of coefficients or vectors, from one block of inputs after another."""
        rows = rows.to(self.device, self.dtype)
        matrix, firsts = self._prepared(plane) if plane is not None else (None, None)
        # A one in front of the coefficients is the factor of the centre.
        coefficients = rows if matrix is None else F.pad(rows, (1, 0), value=1.0)
        vectors = rows if matrix is None else coefficients @ matrix
        total = torch.zeros(len(rows), dtype=wide(self.device), device=self.device)
        # Points that are computed together are given up together.
        points = [slice(0, len(rows))] if self._batched else [slice(k, k + 1) for k in range(len(rows))]
        for index, block in enumerate(self._blocks):
            for some in points:
                hidden = None if firsts is None else self._affine(coefficients[some], firsts[index])
                outputs = self._outputs(vectors[some], hidden, self.inputs[block])
                total[some] += self._sums(outputs, self.targets[block], below)
            if below is not None:
                over = total / len(self.inputs) >= below
                points = [some for some in points if not bool(over[some].all())]
        return total / len(self.inputs)

    @property
    def _batched(self) -> bool:
        """Whether all points of a chunk are computed together."""
        return self.method == "vmap" or (self.method == "affine" and self._dense is not None)

    def _outputs(self, vectors: Tensor, hidden: Tensor | None, inputs: Tensor) -> Tensor:
        """Return the outputs [G, N, ...] at weight vectors, from the first layer's outputs if they are given."""
        if self.method == "vmap":
            call = vmap(partial(functional_call, self._network), in_dims=(0, None))
            outputs: Tensor = call(as_tensors(vectors, self._shapes), (inputs,))
            return outputs
        if self._batched:
            return self._dense_outputs(as_tensors(vectors, self._shapes), hidden, inputs)
        self._flat.copy_(vectors[0])
        if hidden is None:
            outputs = self._network(inputs)
        else:
            outputs = cast(FirstLayer, self._first).rest(hidden.view(len(inputs), *self._shape))
        return outputs[None]

    def _prepared(self, plane: WeightPlane) -> tuple[Tensor, list[Tensor] | None]:
        """Return [centre; basis] and, for the affine method, the first layer's outputs at each of them by block.

        Both are kept for the next call. The outputs of a block have the shape [m + 1, entries]; the entries of
        perceptrons are features times inputs, those of others inputs times the output's shape.
        """
        affine = self.method == "affine" and (self._dense is not None or self._fits(plane))
        if self._plane is None or self._plane[0] is not plane or affine != bool(self._plane[2]):
            matrix = torch.cat([plane.centre[None], plane.basis.T]).to(self.device, self.dtype)
            outputs = self._first_outputs(matrix) if affine else []
            self._plane = (plane, matrix, outputs)
        return self._plane[1], self._plane[2] if affine else None

    def _first_outputs(self, matrix: Tensor) -> list[Tensor]:
        first = cast(FirstLayer, self._first)
        names = {name: f"{first.name}.{name}" for name, _ in first.layer.named_parameters()}
        tensors = as_tensors(matrix, self._shapes)
        for name in self._frozen.keys() & names.values():  # which is there once, at the centre
            value = self._frozen[name]
            tensors[name] = torch.cat([value[None], value.new_zeros(len(matrix) - 1, *value.shape)])
        blocks = []
        for block in self._blocks:
            entering = first.entering(self.inputs[block])
            found = []
            for row in range(len(matrix)):
                values = {name: tensors[whole][row] for name, whole in names.items()}
                output = functional_call(first.layer, values, (entering,))
                self._shape = output.shape[1:]
                found.append((output.T if self._dense is not None else output).flatten())
            blocks.append(torch.stack(found))
        return blocks

    def _dense_outputs(self, tensors: dict[str, Tensor], hidden: Tensor | None, inputs: Tensor) -> Tensor:
        """Return the outputs [G, N, K] of a perceptron at many weights, from its first layer's outputs if given."""
        first = cast(FirstLayer, self._first)
        points = len(next(iter(tensors.values())))
        tensors = tensors | {name: value.expand(points, *value.shape) for name, value in self._frozen.items()}
        if hidden is None:
            hidden = torch.matmul(tensors[f"{first.name}.weight"], first.entering(inputs).T)
            bias = tensors.get(f"{first.name}.bias")
            hidden = hidden if bias is None else hidden.add_(bias[..., None])
        else:
            hidden = hidden.view(points, -1, len(inputs))
        for name in first.dense or ():
            weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
            if weight is None:
                hidden = apply_elementwise(self._network.get_submodule(name), hidden)
                continue
            space = self._space(name, (points, weight.shape[1], hidden.shape[2]), self.dtype)
            if bias is None:
                hidden = torch.bmm(weight, hidden, out=space)
            else:
                hidden = torch.baddbmm(bias[..., None], weight, hidden, out=space)
        return hidden.transpose(1, 2)

    def _affine(self, coefficients: Tensor, outputs: Tensor) -> Tensor:
        """Return the first layer's outputs at coefficients [G, m + 1]: [G, entries]."""
        shape = (len(coefficients), outputs.shape[1])
        return torch.mm(coefficients, outputs, out=self._space("first", shape, self.dtype))

    def _space(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for intermediate numbers: new large tensors cost more in page faults than in arithmetic."""
        size = math.prod(shape)
        if name not in self._spaces or len(self._spaces[name]) < size:
            self._spaces[name] = torch.empty(size, dtype=dtype, device=self.device)
        return self._spaces[name][:size].view(shape)

    def _sums(self, outputs: Tensor, targets: Tensor, below: float | None = None) -> Tensor:
        """Return the sums over inputs of the losses of outputs [G, N, ...]: [G], float64."""
        dtype = wide(self.device)
        if self._squared:
            distance = torch.sub(outputs, targets, out=self._space("distance", outputs.shape, self.dtype)).square_()
            return self._space("sum", distance.shape, dtype).copy_(distance).flatten(1).sum(1)
        losses, got = None, None
        try:
            losses = cast(Loss, self.loss)(outputs, targets)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            got = f"an error ({error})"
        if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:2]:
            got = got or (str(list(losses.shape)) if isinstance(losses, Tensor) else type(losses).__name__)
            raise ValueError(
                f"loss must return the loss of each input, [G, N] = {list(outputs.shape[:2])}, for outputs "
                f"{list(outputs.shape)}, got {got}."
            )
        if below is not None and bool((losses < 0).any()):
            raise ValueError("below needs losses >= 0, and this loss is negative for some input; leave below out.")
        return losses.sum(1, dtype=dtype)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Switch off gradients and reduced precision of convolutions."""
        with torch.no_grad(), torch.backends.cudnn.flags(benchmark=False, deterministic=True, allow_tf32=False):
            yield


def _name(function: Any) -> str:
    """Return the qualified name of a function, or of the class of a callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
