"""A pretend NVIDIA GPU: tensors whose device is cuda:0 and whose numbers lie in hidden CPU tensors.

An operation takes the hidden tensors, runs on the CPU and wraps what comes out, after it was checked that CUDA would
have run it: no CPU tensor beside those of the device, no CPU generator, a kernel that exists. What is refused says
"pretend device". Limits: see README.md.
"""

import collections
import contextlib
import copy
import os
import threading
import traceback

import torch

DEVICE = torch.device("cuda", 0)  # what Python is told
SLOT = "pretend"  # what C++ is told: the slot for other backends, so that autograd's threads never ask the driver
NAME = "(pretend device)"

# Copies to the CPU that do not wait, although nothing makes sure that they have ended before they are read.
SUSPICIONS: collections.Counter[str] = collections.Counter()
_WAITS: list[collections.Counter[str]] = []


@contextlib.contextmanager
def recorded_waits(into):
    """Count in a counter, within the block, where the code waits for the device: by file, line and what it does."""
    _WAITS.append(into)
    try:
        yield
    finally:
        _WAITS.remove(into)


def _note_wait(what):
    if _WAITS:
        site = f"{_site()}: {what}"
        for counter in _WAITS:
            counter[site] += 1


def _site():
    """Return file and line of the innermost frame that is of no library."""
    here = os.path.dirname(__file__)
    for frame in reversed(traceback.extract_stack()):
        if "site-packages" not in frame.filename and os.path.dirname(frame.filename) != here:
            return f"{frame.filename}:{frame.lineno}"
    return "elsewhere"


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device; its numbers are in ``_e``."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def wrap(e):
        assert not is_device(e)
        if e.layout is not torch.strided:
            raise NotImplementedError(f"sparse tensors {NAME}")
        if e._is_zerotensor():
            e = torch.zeros(e.size(), dtype=e.dtype)
        e = e.resolve_conj().resolve_neg()
        result = torch.Tensor._make_wrapper_subclass(
            PretendTensor,
            e.size(),
            strides=e.stride(),
            storage_offset=e.storage_offset(),
            dtype=e.dtype,
            layout=e.layout,
            device=torch.device(SLOT, 0),
            requires_grad=False,
        )
        result._e = e
        torch._C.TensorBase.untyped_storage(result)._hidden = e  # for shells that C++ copies
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents=None):
        return f"Pretend({self._e!r})"

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return 0

    def to(self, *args, **kwargs):
        args = tuple(_slot(a) for a in args)
        kwargs = {name: _slot(a) if name in ("device", "other") else a for name, a in kwargs.items()}
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device(SLOT, 0), *args[1:])
        return torch._C.TensorBase.to(self, *args, **kwargs)

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() {NAME}")

    def tolist(self):
        return self.detach().cpu().tolist()

    def pin_memory(self, *args, **kwargs):
        raise RuntimeError(f"cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned {NAME}")

    def data_ptr(self):
        return self._e.data_ptr()

    def untyped_storage(self):
        return self._e.untyped_storage()  # its device is the CPU

    @property
    def data(self):
        return torch._C.TensorBase.data.__get__(self)

    @data.setter
    def data(self, value):
        if not isinstance(value, PretendTensor):
            torch.utils.swap_tensors(self, torch.nn.Parameter(value.detach(), self.requires_grad))
            return
        torch._C.TensorBase.data.__set__(self, value)
        self._e = value._e

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"Only Tensors created explicitly by the user support the deepcopy protocol {NAME}")
        with torch.no_grad():
            result = PretendTensor.wrap(copy.deepcopy(self._e, memo))
        result.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if name != "_e":
                result.__dict__[name] = copy.deepcopy(value, memo)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol):
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, collections.OrderedDict())
        e = self._e.detach()
        storage = e._typed_storage()
        storage._untyped_storage._pretend = True
        where = storage, e.storage_offset(), tuple(e.size()), e.stride()
        return torch._utils._rebuild_tensor_v2, (*where, self.requires_grad, collections.OrderedDict())


def is_device(value):
    return isinstance(value, PretendTensor) or (
        isinstance(value, torch.Tensor) and torch._C.TensorBase.device.__get__(value).type == SLOT
    )


def _slot(value):
    if isinstance(value, (str, torch.device)):
        return torch.device(SLOT, 0) if torch.device(value).type == "cuda" else value
    return value


def _hidden(value):
    if isinstance(value, PretendTensor):
        return value._e
    e = torch._C.TensorBase.untyped_storage(value)._hidden  # C++ copied a shell
    if e.size() != value.size() or e.stride() != value.stride() or e.storage_offset() != value.storage_offset():
        e = e.as_strided(value.size(), value.stride(), value.storage_offset())
    return e


# ---- what CUDA refuses

_ANY_DEVICE = {
    *("aten::_has_compatible_shallow_copy_type", "aten::_has_same_storage_numel"),
    *("aten::copy_", "aten::_to_copy", "aten::fill_", "aten::fill"),
}
_INDEXING = {
    *("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
    *("aten::_unsafe_index", "aten::_unsafe_index_put"),
}
_SCALAR_VALUE = {"aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_"}
_MATRIX = {
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("convolution", "convolution_backward"),
}
# What raises on CUDA after torch.use_deterministic_algorithms(True), from the documentation of that function.
_NONDETERMINISTIC = {
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
    *("max_unpool2d", "upsample_linear1d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "replication_pad1d_backward"),
    *("replication_pad2d_backward", "replication_pad3d_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
    *("ctc_loss_backward", "put_", "histc", "kthvalue", "median_dim", "grid_sampler_2d_backward"),
    *("grid_sampler_3d_backward", "_embedding_bag_max"),
}


class _Facts:
    """What the schema of an operation says, read once.

    Attributes:
        written: The arguments that are written to.
        returns: For every result the written argument that it is, or None, and whether it is a view.
        random: Whether it draws random numbers.
        kernel: Whether CUDA has it.
        composite: Whether it is made of others; inference mode hands such ones over whole.
        mixing: Where a CPU tensor may stand: "all", "index", "scalar" (of no axes), "value" (of no axes, for that
            argument only), "none".
    """

    def __init__(self, func):
        schema = func._schema
        self.func, self.name, self.short = func, schema.name, schema.name.split("::")[1]
        self.arguments = [a.name for a in schema.arguments]
        self.written = {
            a.name: frozenset(a.alias_info.before_set)
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        self.returns = []
        for declared in schema.returns:
            alias = declared.alias_info
            same = None
            if alias is not None and alias.is_write:
                same = next((n for n, s in self.written.items() if s == frozenset(alias.before_set)), None)
            self.returns.append((same, alias is not None and not alias.is_write))
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CUDA")
        self.kernel = not self.name.startswith("aten::") or computed or self.composite
        foreach = self.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach"))
        if self.name in _ANY_DEVICE:
            self.mixing = "all"
        elif self.name in _INDEXING:
            self.mixing = "index"
        elif self.name in _SCALAR_VALUE:
            self.mixing = "value"
        elif foreach or torch.Tag.pointwise in func.tags:
            self.mixing = "scalar"
        else:
            self.mixing = "none"

    def allows(self, where, tensor):
        """Return whether an argument may be this CPU tensor, beside tensors of the device."""
        if where in self.written:
            return False
        if self.mixing == "index":
            return where != "self" and (where != "values" or tensor.dim() == 0)
        if self.mixing == "value":
            return where == "value" and tensor.dim() == 0
        return self.mixing == "scalar" and tensor.dim() == 0


_FACTS = {}


def _check(facts, host, shells, kwargs):
    """Raise what CUDA would raise for an operation on tensors of the device (shells) and of the CPU (host)."""
    first, short = shells[0], facts.short
    bad = [] if facts.mixing == "all" else [(where, t) for where, t in host if not facts.allows(where, t)]
    if bad:
        what = ", ".join(f"{where} {tuple(t.shape)} {t.dtype} on the CPU" for where, t in bad)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"{facts.func}: {what} {NAME}"
        )
    if not facts.kernel:
        raise NotImplementedError(f"Could not run '{facts.func}' with arguments from the 'CUDA' backend {NAME}")
    if short in _MATRIX and not (first.dtype.is_floating_point or first.dtype.is_complex):
        raise RuntimeError(f'"{short}_cuda" not implemented for {first.dtype} {NAME}')
    if short == "linalg_lstsq" and kwargs.get("driver") not in (None, "gels"):
        raise RuntimeError(f"torch.linalg.lstsq: parameter `driver` should be one of (gels) on CUDA {NAME}")
    if torch.are_deterministic_algorithms_enabled():
        if short in _NONDETERMINISTIC:
            message = f"{short} does not have a deterministic implementation on CUDA {NAME}"
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise RuntimeError(message)
            SUSPICIONS[f"{message} at {_site()}"] += 1
        if short in ("mm", "bmm", "addmm") and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise RuntimeError(f"Deterministic behaviour needs CUBLAS_WORKSPACE_CONFIG {NAME}")


# ---- random numbers

OTHER_NUMBERS = 0x5EED  # the device draws other numbers than the CPU from the same seed


class Random:
    """The device's default generator: the CPU's, with a state of its own."""

    state = torch.Generator().manual_seed(OTHER_NUMBERS).get_state()
    lock = threading.RLock()

    @classmethod
    @contextlib.contextmanager
    def drawing(cls):
        with cls.lock:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(cls.state)
            try:
                yield
            finally:
                cls.state = torch.default_generator.get_state()
                torch.default_generator.set_state(before)


_GENERATORS = set()  # the addresses of those of the device
_PlainGenerator = torch.Generator


class _Meta(type(_PlainGenerator)):
    def __instancecheck__(cls, instance):
        return isinstance(instance, _PlainGenerator)


class Generator(_PlainGenerator, metaclass=_Meta):
    """A ``torch.Generator`` that may be of the device; then it draws other numbers than one of the CPU, as there."""

    _on_device = False

    def __new__(cls, device="cpu"):
        result = _PlainGenerator.__new__(cls)
        if torch.device(device).type in ("cuda", SLOT):
            result._on_device = True
            _GENERATORS.add(result._cdata)
        return result

    def __init__(self, device="cpu"): ...

    def manual_seed(self, seed):
        return super().manual_seed(seed ^ OTHER_NUMBERS if self._on_device else seed)

    def __del__(self):
        if self._on_device:
            _GENERATORS.discard(self._cdata)

    @property
    def device(self):
        return DEVICE if self._on_device else torch.device("cpu")


# ---- running an operation


def dispatch(func, args, kwargs):
    """Run an operation as CUDA would."""
    facts = _FACTS.get(func)
    if facts is None:
        facts = _FACTS[func] = _Facts(func)
    if facts.name == "aten::_has_compatible_shallow_copy_type":
        return True
    if facts.composite:
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    shells, host = [], []
    hidden_args = [_unwrapped(where, value, shells, host) for where, value in zip(facts.arguments, args, strict=False)]
    hidden_kwargs = {where: _unwrapped(where, value, shells, host) for where, value in kwargs.items()}
    on_device = bool(shells)
    if (device := kwargs.get("device")) is not None:
        device = torch.device(device)
        on_device = device.type in ("cuda", SLOT)
        if on_device:
            hidden_kwargs["device"] = torch.device("cpu")
            if device.index not in (0, None):
                raise RuntimeError(f"CUDA error: invalid device ordinal {NAME}")
    if hidden_kwargs.pop("pin_memory", False):
        raise RuntimeError(f"Only dense CPU tensors can be pinned {NAME}")
    if shells:
        _check(facts, host, shells, kwargs)
        _note(facts, args, kwargs, on_device)
    if facts.random and on_device:
        generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
        if generator is not None and generator._cdata not in _GENERATORS:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu': {func} {NAME}")
        with Random.drawing() if generator is None else contextlib.nullcontext():
            out = func(*hidden_args, **hidden_kwargs)
    else:
        out = func(*hidden_args, **hidden_kwargs)
    return _results(facts, args, kwargs, out, shells, on_device)


def _note(facts, args, kwargs, on_device):
    """Count what waits for the device, and what should have waited."""
    if facts.name in ("aten::_to_copy", "aten::copy_"):
        if not on_device if facts.name == "aten::_to_copy" else not is_device(args[0]):
            if kwargs.get("non_blocking") or (facts.name == "aten::copy_" and len(args) > 2 and args[2]):
                SUSPICIONS[f"non_blocking copy to the CPU at {_site()}"] += 1
            _note_wait("copy to the CPU")
    elif facts.name == "aten::_local_scalar_dense":
        _note_wait("item")
    elif facts.name in ("aten::nonzero", "aten::masked_select") or _indexed_by_bools(facts, args):
        _note_wait(facts.short)  # how many are true decides the shape


def _indexed_by_bools(facts, args):
    indices = args[1] if facts.name in _INDEXING else ()
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


def _results(facts, args, kwargs, out, shells, on_device):
    """Return an operation's results as tensors of the device, where they are of it."""
    given = {**dict(zip(facts.arguments, args, strict=False)), **kwargs}
    for where in facts.written:
        value = given.get(where)
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, PretendTensor):
                _renew(leaf)
    results = []
    for (same, view), value in zip(facts.returns, out if len(facts.returns) > 1 else (out,), strict=False):
        if same is not None:
            results.append(given[same])
        elif not on_device:
            results.append(value)
        elif view:  # a view of an inference tensor is one
            with torch.inference_mode(shells[0].is_inference()):
                results.append(_wrapped(value))
        else:
            results.append(_wrapped(value))
    if not results:
        return None
    return tuple(results) if len(results) > 1 else results[0]


def _unwrapped(where, value, shells, host):
    if isinstance(value, torch.Tensor):
        if is_device(value):
            shells.append(value)
            return _hidden(value)
        host.append((where, value))
    elif isinstance(value, (list, tuple)):
        return [_unwrapped(where, v, shells, host) for v in value]
    return value


def _wrapped(value):
    if isinstance(value, torch.Tensor):
        return PretendTensor.wrap(value)
    if isinstance(value, (list, tuple)):
        return [_wrapped(v) for v in value]
    return value


def _renew(tensor):
    """Let the shell follow numbers that were resized."""
    e = tensor._e
    if e.size() != tensor.size() or e.stride() != tensor.stride() or e.storage_offset() != tensor.storage_offset():
        torch._C.TensorBase.data.__set__(tensor, PretendTensor.wrap(e))
