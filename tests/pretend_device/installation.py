"""Makes a CUDA build of torch believe in one GPU, which is `device.PretendTensor`."""

import types
import warnings

import device
import torch
from device import DEVICE, OTHER_NUMBERS, SLOT, Generator, PretendTensor, Random

aten = torch.ops.aten
_LIBRARIES = []  # not empty: the pretend GPU is installed


def real():
    """Whether this machine has a GPU: then nothing has to pretend, and the same scripts run on it.

    Convolutions compute in full precision then, as results are compared with the CPU's, and everything that can the
    same each time, as resumed runs are compared bit for bit. That needs ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.
    """
    found = torch.cuda.is_available() and not _LIBRARIES
    if found:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    return found


def install():
    """Make ``device="cuda"`` work, and Lightning's ``Trainer(accelerator="gpu", devices=1)``.

    To be called once, before anything asks for CUDA; it cannot be taken back, so use a process of its own.
    """
    if not torch.backends.cuda.is_built():
        raise RuntimeError("the pretend GPU needs a CUDA build of torch")
    torch.backends.cudnn.enabled = False  # its own operations have no CPU kernels
    torch._C._ensureCUDADeviceGuardSet()  # device guards of CUDA do nothing
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(SLOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        for name, operation in _operations(factories=True):
            for key in ("CUDA", "PrivateUse1"):
                library.impl(name, _making(operation), key, allow_override=True)
        for name, operation in _operations(factories=False):  # where C++ leaves the Python key out
            library.impl(name, _dispatching(operation), "PrivateUse1")
    _LIBRARIES.append(library)
    _patch_cuda()
    _patch_modules()
    _patch_serialization()
    _patch_fake_tensors()


# ---- operations


def _operations(*, factories):
    """Yield name and overload of operations that make tensors from nothing, or of those that take tensors."""
    without = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "_dep_token", "from_file")
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        operation = getattr(getattr(aten, name, None), overload or "default", None) if full[:6] == "aten::" else None
        if operation is None:
            continue
        schema = operation._schema
        takes = any("Tensor" in str(a.type) for a in schema.arguments)
        makes = any("Tensor" in str(r.type) for r in schema.returns)
        device_argument = any(a.name == "device" for a in schema.arguments)
        makes_from_nothing = device_argument and makes and not takes and not any(word in name for word in without)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
        if makes_from_nothing if factories else takes and not composite:
            yield full, operation


def _making(operation):
    def kernel(*args, **kwargs):
        if kwargs.get("device") is None:
            kwargs["device"] = DEVICE
        return device.dispatch(operation, args, kwargs)

    return kernel


def _dispatching(operation):
    def kernel(*args, **kwargs):
        return device.dispatch(operation, args, kwargs)

    return kernel


# ---- torch.cuda


def _patch_cuda():
    cuda = torch.cuda
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers = [
        (None, ["_lazy_init", "init", "set_device", "synchronize", "empty_cache", "ipc_collect"]),
        (None, ["reset_peak_memory_stats"]),
        (0, [*memory, "current_device", "current_blas_handle", "utilization", "initial_seed"]),
        (1, ["device_count"]),
        (True, ["is_available", "is_initialized", "is_bf16_supported", "_is_compiled"]),
        (False, ["_is_in_bad_fork"]),
    ]

    def get_rng_state(device="cuda"):
        return Random.state.clone()

    def set_rng_state(state, device="cuda"):
        if isinstance(state, PretendTensor):
            raise TypeError("RNG state must be a torch.ByteTensor (pretend device)")
        Random.state = state.clone()

    def manual_seed(seed):
        Random.state = torch.Generator().manual_seed(int(seed) ^ OTHER_NUMBERS).get_state()

    properties = types.SimpleNamespace(
        name="Pretend GPU", major=9, minor=0, total_memory=8 << 30, multi_processor_count=100, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, gcnArchName="",
        shared_memory_per_block=49152,
    )  # fmt: skip
    changes = {
        **{name: _answering(value) for value, names in answers for name in names},
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": lambda: manual_seed(0),
        "seed_all": lambda: manual_seed(0),
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (6 << 30, 8 << 30),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "device": _Context,  # one that entered the device would call the driver
        "_DeviceGuard": _Context,
    }
    for name, value in changes.items():
        for module in (cuda, cuda.random, cuda.memory):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.Generator = Generator
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    accelerator = {"is_available": True, "device_count": 1, "current_device_index": 0, "synchronize": None}
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, _answering(value))
    torch.accelerator.current_accelerator = _answering(torch.device("cuda"))


def _answering(value):
    return lambda *_, **__: value  # a function of its own for each name: torch._dynamo looks them up by identity


class _Stream:
    cuda_stream = 0
    device = DEVICE

    def synchronize(self): ...
    def wait_stream(self, stream): ...
    def wait_event(self, event): ...
    def record_event(self, event=None): ...


class _Context:
    def __init__(self, device): ...
    def __enter__(self): ...
    def __exit__(self, *_): ...


# ---- modules, optimizers, files, fake tensors


def _patch_modules():
    from torch.nn import Module, Parameter
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    plain = Module._apply

    def _apply(self, fn, recurse=True):
        # A module that moves keeps its parameters, the objects, as on CUDA.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return plain(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def set_data(self, value):
        if isinstance(value, PretendTensor):  # allowed on CUDA, and silent
            torch.utils.swap_tensors(self, Parameter(value.detach(), self.requires_grad))
        else:
            torch._C.TensorBase.data.__set__(self, value)

    Module._apply = _apply
    Parameter.data = property(lambda self: torch._C.TensorBase.data.__get__(self), set_data)
    for module in (optimizer, _foreach_utils):
        if PretendTensor not in getattr(module, "_foreach_supported_types", [PretendTensor]):
            module._foreach_supported_types.append(PretendTensor)


def _patch_serialization():
    from torch import serialization

    def tag(storage):
        return "cuda:0" if getattr(storage, "_pretend", False) else None

    def restore(storage, location):
        if not location.startswith("cuda"):
            return None
        storage._pretend = True
        return storage

    serialization.register_package(5, tag, restore)
    plain = torch._utils._rebuild_tensor

    def _rebuild_tensor(storage, offset, size, stride):
        tensor = plain(storage, offset, size, stride)
        return PretendTensor.wrap(tensor) if getattr(storage._untyped_storage, "_pretend", False) else tensor

    torch._utils._rebuild_tensor = _rebuild_tensor


def _patch_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = FakeTensorMode.from_tensor

    def from_tensor(self, tensor, **kwargs):
        if not isinstance(tensor, PretendTensor):
            return plain(self, tensor, **kwargs)
        with self:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        if getattr(tensor, "_is_param", False):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    FakeTensorMode.from_tensor = from_tensor
