"""Models of other libraries by their names: built without downloads, and without running code that a file names."""

import contextlib
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lightning_sym.networks
from lightning_sym._checkpoint_files import check_model_folder, unknown_model_type
from lightning_sym._files import load_json
from lightning_sym._text import nearest
from lightning_sym.symmetry import Call, without_weights
from lightning_sym.symmetry.tracing.graph.capture import first_names
from lightning_sym.zoo import ModelZoo

# Two samples: an axis of one would broadcast.
_BATCH = 2
# Entries of a configuration that name other code, or replace weights by something else than parameters.
_LEFT_OUT = (
    *("auto_map", "custom_pipelines", "quantization_config", "use_kernels", "attn_implementation"),
    *("_attn_implementation", "_attn_implementation_internal", "experts_implementation", "_experts_implementation"),
)


@dataclass(frozen=True)
class Model:
    """A network, and the library that it is from.

    Attributes:
        name: As it was given.
        library: ``torchvision``, ``timm``, ``transformers``, or empty for a class.
        network: The network, in evaluation mode.
        shape: Shape of one input from the library's description of the model; None without one.
        notes: Choices that make it traceable.
    """

    name: str
    library: str
    network: nn.Module
    shape: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


def build_model(name: str, arguments: Mapping[str, Any] | None = None, *, meta: bool = False) -> Model:
    """Build a model with random weights.

    Args:
        name: ``torchvision:NAME``, ``timm:NAME``, ``transformers:CONFIGURATION``, or the path of a class.
        arguments: Arguments of the class or the library's function, by name.
        meta: Whether to build it without memory for its weights.

    Raises:
        ValueError: If there is no such model, or its library is not installed or refuses the arguments.
    """
    library, _, rest = name.partition(":") if ":" in name else ("", "", name)
    if library not in _BUILDERS:
        raise ValueError(
            f"{name} names no library of models; expected torchvision:..., timm:..., transformers:... or the path of "
            f"a class.{nearest(library, [known for known in _BUILDERS if known], after=':' + rest)}"
        )
    with without_weights() if meta else contextlib.nullcontext():
        network, shape = _BUILDERS[library](rest, dict(arguments or {}))
    notes = _traceable_experts(network) if library == "transformers" else ()
    return Model(name, library, network.eval(), shape, notes)


def _traceable_experts(network: Any) -> tuple[str, ...]:
    """Compute the experts of a model of transformers without branching on values, and return a note on that."""
    chosen = getattr(network.config, "_experts_implementation", None)
    can = getattr(network, "_can_set_experts_implementation", None)
    if chosen in (None, "batched_mm") or can is None or not can():
        return ()
    network.set_experts_implementation("batched_mm")
    return (f"experts are computed by batched_mm, which can be traced, not by {chosen}; their weights are the same",)


def example_of(
    model: Model, shape: tuple[int, ...] | None = None, tokens: int | None = None, count: int = _BATCH
) -> Call:
    """Return random inputs that a model takes.

    Args:
        model: The model.
        shape: Shape of one sample; default that of the model.
        tokens: The input is integers below this number, also where a class holds one tensor as an example.
        count: Number of inputs; those that a class holds as an example are taken as they are.

    Raises:
        ValueError: If the model describes no input, and no shape is given.
    """
    if model.library == "transformers":
        return _example_of_transformers(model.network, shape, tokens, count)
    shape = shape if shape is not None else model.shape
    if shape is None:
        given = getattr(model.network, "example_input_array", None)  # Lightning's
        if tokens is not None and isinstance(given, Tensor):
            return Call((_drawn(tuple(given.shape[1:]), tokens, len(given)),))
        if given is not None:
            return Call.of({}, given) if isinstance(given, Mapping) else Call.of(given)
        raise ValueError(f"{model.name} does not say what it takes; give the shape of one input, as in --input 3,32,32")
    return Call((_drawn(shape, tokens, count),))


def _drawn(shape: tuple[int, ...], tokens: int | None, count: int) -> Tensor:
    return torch.randn(count, *shape) if tokens is None else torch.randint(tokens, (count, *shape))


def _library(name: str) -> ModuleType:
    """Import an optional library; it is told to stay off the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"{name} is not installed; pip install 'lightning_sym[hf]' brings it") from None


@contextlib.contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn any error of a library that builds a model into one sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{name} "):
            raise  # a sentence of this module
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} cannot be built ({type(error).__name__}: {reason[:300]})") from error


def _of_torchvision(name: str, arguments: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    known = torchvision.models.list_models()
    if name not in known:
        raise ValueError(f"torchvision has no model {name!r}.{nearest(name, known)}")
    takes = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    random = {key: None for key in ("weights", "weights_backbone") if key in takes}
    with _refusing(f"torchvision:{name}"):
        network = torchvision.models.get_model(name, **{**arguments, **random})
    return network, _shape_of_torchvision(name)


def _shape_of_torchvision(name: str) -> tuple[int, ...] | None:
    """Return the shape of the images or videos that torchvision trained a model on."""
    weights = list(torchvision.models.get_model_weights(name))
    if not weights:
        return None
    transforms = weights[-1].transforms()
    size = getattr(transforms, "crop_size", None)
    if size is None:
        return (3, 224, 224)
    frames = (16,) if type(transforms).__name__ == "VideoClassification" else ()
    return (3, *frames, size[0], size[-1])


def _of_timm(name: str, arguments: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    timm = _library("timm")
    if not timm.is_model(name):
        hint = nearest(name, timm.list_models())
        raise ValueError(f"timm has no model {name!r}.{hint or ' timm.list_models() lists them.'}")
    with _refusing(f"timm:{name}"):
        network = timm.create_model(name, **{**arguments, "pretrained": False})
    shape = timm.data.resolve_model_data_config(network).get("input_size")
    if size := arguments.get("img_size"):
        shape = (3, size, size) if isinstance(size, int) else (3, *size)
    return network, None if shape is None else tuple(shape)


def _of_class(path: str, arguments: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    if path.endswith(".json") or os.sep in path:
        raise ValueError(f"{path} is no class; expected transformers:{path} for the configuration of a model.")
    make = construct(path, arguments, lightning_sym.networks, "network")
    with _refusing(path):
        network = make()
    if not isinstance(network, nn.Module):
        raise ValueError(f"{path} makes a {type(network).__name__}; expected a network (a torch.nn.Module).")
    return network, network.image_shape() if isinstance(network, lightning_sym.networks.Network) else None


def construct(path: str, arguments: Mapping[str, Any], known: Any, option: str) -> functools.partial[Any]:
    """Return a factory of a class by its path, with its arguments.

    Args:
        path: The class; without dots a name in ``known``.
        arguments: Its arguments by name.
        known: Module to search for a class without its path.
        option: The option that named it, for errors.

    Raises:
        ValueError: If there is no such class, or it does not take the arguments.
    """
    module, _, name = path.rpartition(".")
    try:
        room = importlib.import_module(module) if module else known
    except ModuleNotFoundError as error:
        if "is not a package" in str(error):
            raise ValueError(
                f"{path} is not at the top level of a module, where it could be found again; move it there."
            ) from None
        raise ValueError(
            f"There is no module {error.name!r}, which {path} needs; run this in its folder, or put that on PYTHONPATH."
        ) from None
    found = getattr(room, name, None)
    if not callable(found):
        near = nearest(name, [known for known in dir(room) if not known.startswith("_")])
        raise ValueError(f"There is no class {path!r}.{near}")
    _check_arguments(found, name, arguments, option)
    return functools.partial(found, **arguments)


def _check_arguments(found: Any, name: str, arguments: Mapping[str, Any], option: str) -> None:
    """Check the arguments of a constructor by name: it takes all that were given, and none is missing."""
    takes = inspect.signature(found).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    for argument in arguments:
        if argument not in takes and not any_name:
            near = nearest(argument, takes) or f" It takes {', '.join(takes) or 'none'}."
            raise ValueError(f"{name} has no argument {argument!r}.{near}")
    for parameter in takes.values():
        given, star = parameter.name in arguments, parameter.kind is inspect.Parameter.VAR_POSITIONAL
        needed = parameter.default is inspect.Parameter.empty and not star
        if parameter.kind is inspect.Parameter.VAR_KEYWORD or not (given or needed):
            continue
        if star or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"{name} takes {'*' * star}{parameter.name} by its position only, and options have names; write a "
                f"function that takes it by name and returns {name}(...), and give that as --{option}."
            )
        if not given:
            raise ValueError(f"{name} needs the argument {parameter.name!r}; give --{option}.{parameter.name}.")


def build_light(build: Callable[..., Model]) -> Model:
    """Build a model without memory for its weights if a checkpoint fills all that it has, else with it.

    Args:
        build: Takes ``meta``, as :func:`build_model` does.

    Raises:
        ValueError: As the function does.
    """
    for meta in (True, False):
        torch.manual_seed(0)
        with warnings.catch_warnings(), contextlib.suppress(Exception) if meta else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            model = build(meta=meta)
            if not meta or _needs_no_values(model.network):
                return model
    raise AssertionError("the second attempt returns or raises")


def _needs_no_values(network: nn.Module) -> bool:
    """Return whether only parameters of a network are without values, and a state dict fills them all."""
    held = (leaf for module in network.modules() for leaf in pytree.tree_leaves(vars(module)))
    others = (leaf for leaf in held if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter))
    return not any(tensor.is_meta for tensor in others) and network.state_dict().keys() <= first_names(network).keys()


def named_in(folder: str | Path, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the model of a folder, as :func:`build_model` takes them.

    Args:
        folder: A folder with the ``config.json`` of transformers or timm.
        arguments: Entries that replace those of the configuration, by name.

    Raises:
        ValueError: If it is no such folder.
    """
    content = _read_json(Path(folder) / "config.json")
    if "architecture" not in content or "model_type" in content:
        return f"transformers:{folder}", dict(arguments)
    given = {key: content[key] for key in ("num_classes", "global_pool") if content.get(key) is not None}
    own = content.get("model_args") or {}  # without those that name other files
    given |= {key: own[key] for key in own if not key.startswith(("pretrained", "checkpoint", "cache"))}
    return f"timm:{content['architecture']}", {**given, **arguments}


def model_in(folder: str | Path, arguments: Mapping[str, Any] | None = None, *, meta: bool = False) -> Model:
    """Build the model of a folder with random weights.

    Args:
        folder: A folder with the ``config.json`` of transformers or timm, or a zoo.
        arguments: Entries that replace those of the configuration, by name. A zoo has none.
        meta: Whether to build it without memory for its weights.

    Raises:
        ValueError: If it is no such folder, or its network cannot be built.
    """
    if (Path(folder) / "config.json").is_file():
        name, arguments = named_in(folder, arguments or {})
        return build_model(name, arguments, meta=meta)
    check_model_folder(folder)
    if arguments:
        raise ValueError(f"{folder} is a zoo, whose network has its arguments; got {', '.join(arguments)}.")
    architecture = ModelZoo.open(folder).architecture
    path = architecture["class_path"]
    try:
        with without_weights() if meta else contextlib.nullcontext():
            network = lightning_sym.networks.build(architecture)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; for a command without that option, give the class with its arguments for "
            f"{folder}, or as --network."
        ) from error
    return Model(path, "", network.eval(), network.image_shape())


# transformers.


def with_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of entries that it lacks; unchanged if transformers does not know it."""
    try:
        found = _configuration(_library("transformers"), content, "config.json").to_dict()
    except (ValueError, KeyError):
        return content
    return {**content, **found}


def names_in_network(network: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the names that transformers gives to a checkpoint's tensors when it reads them into one of its models.

    Args:
        network: Any network; the names of others than those of transformers stay.
        keys: Names in the checkpoint.

    Raises:
        ValueError: If it joins several tensors into one.
    """
    keys = list(keys)
    if not type(network).__module__.startswith("transformers."):
        return {key: key for key in keys}
    _library("transformers")
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(network)
    changes = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    joins = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    found, held = {}, network.state_dict().keys()
    for key in sorted(keys):
        name = functools.reduce(lambda own, change: change.rename_source_key(own)[0], changes, key)
        if name not in held and any(one.rename_source_key(name)[0] in held for one in joins):
            raise ValueError(
                f"transformers joins {key!r} with other tensors as it reads {type(network).__name__}; write them "
                "joined, with save_pretrained(..., save_original_format=False)."
            )
        found[key] = name
    return {key: found[key] for key in keys} if len({*found.values()}) == len(keys) else {key: key for key in keys}


def _of_transformers(path: str, arguments: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...] | None]:
    content = {**_read_configuration(Path(path)), **arguments}
    transformers = _library("transformers")
    transformers.logging.set_verbosity_error()
    config, kind = _configuration(transformers, content, path), content.get("architectures")
    with _refusing(path):
        if not kind:
            return transformers.AutoModel.from_config(config, trust_remote_code=False, dtype=torch.float32), None
        found = _class_of_transformers(transformers, kind[0], config, path)
        return found._from_config(config, dtype=torch.float32), None


def _read_configuration(path: Path) -> dict[str, Any]:
    """Read the file of a configuration, or ``config.json`` in its folder."""
    file = path / "config.json" if path.is_dir() else path
    content = _read_json(file)
    if not isinstance(content.get("model_type"), str):
        raise ValueError(f"{file} names no model_type; expected the configuration of a model of transformers.")
    return content


def _read_json(file: Path) -> dict[str, Any]:
    """Read the file of a configuration."""
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"There is no file {os.path.abspath(file)}; expected the configuration of a model (config.json), or its "
            "folder. Nothing is downloaded."
        ) from None
    except ValueError as error:  # neither text nor JSON
        raise ValueError(f"{file} is not JSON ({error}); expected the configuration of a model.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} names no model_type; expected the configuration of a model of transformers.")
    return content


def _configuration(transformers: ModuleType, content: dict[str, Any], path: str) -> Any:
    """Make a configuration of one of the library's own classes, without entries that refer to other code."""
    name, known = content["model_type"], transformers.CONFIG_MAPPING
    if name not in known:
        raise ValueError(unknown_model_type(path, content, transformers.__version__, known.keys()))
    with _refusing(path):
        config = known[name].from_dict(_tame({key: item for key, item in content.items() if key != "architectures"}))
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if getattr(part, "use_pretrained_backbone", False):
            part.use_pretrained_backbone = False  # random weights, as everything else
    return config


def _tame(content: Any) -> Any:
    """Return a configuration without the entries that name code elsewhere."""
    if isinstance(content, dict):
        return {key: _tame(item) for key, item in content.items() if key not in _LEFT_OUT}
    return [_tame(item) for item in content] if isinstance(content, list) else content


def _class_of_transformers(transformers: ModuleType, name: Any, config: Any, path: str) -> Any:
    """Return the model class that a configuration names: one of the library's own, for such a configuration."""
    found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        hint = nearest(str(name), dir(transformers))
        raise ValueError(f"{path} names the architecture {name!r}, which transformers does not have.{hint}")
    expected: Any = getattr(found, "config_class", None)
    if not isinstance(config, expected or ()):
        raise ValueError(
            f"{path} names the architecture {name}, which takes a {getattr(expected, '__name__', 'configuration')}, "
            f"not the {type(config).__name__} of its model_type."
        )
    return found


def _example_of_transformers(network: Any, shape: tuple[int, ...] | None, tokens: int | None, count: int) -> Call:
    """Return keyword arguments of a model of transformers, from its configuration."""
    takes, config, first = inspect.signature(network.forward).parameters, network.config, network.main_input_name
    keywords: dict[str, Tensor] = {}
    text = config.get_text_config()
    limit = min(getattr(text, "max_position_embeddings", None) or 16, 16)
    own = shape if len(shape or ()) == 1 else None
    images, sounds = _image_shape(config), _sound_shape(config)

    def ids() -> Tensor:
        return _drawn(own or (max(limit - limit // 4, 1),), tokens or getattr(text, "vocab_size", None) or 2, count)

    if "pixel_values" in takes and images is not None and (first == "pixel_values" or "input_ids" in takes):
        keywords["pixel_values"] = _drawn(images if shape is None or own else shape, None, count)
    if first in ("input_features", "input_values") and sounds is not None:
        keywords[first] = _drawn(shape or sounds, None, count)
    if first == "input_ids":
        keywords["input_ids"] = ids()
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        keywords["decoder_input_ids"] = ids()
    if not keywords:
        if shape is None:
            raise ValueError(
                f"{type(network).__name__} does not say what it takes; give the shape of its {first}, without the "
                "batch, as --input"
            )
        keywords[first] = _drawn(shape, tokens, count)
    return Call((), keywords)


def _image_shape(config: Any) -> tuple[int, ...] | None:
    """Return channels, height and width of the images that a configuration is for; None if it is for none."""
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        if size is not None:
            height, width = (size, size) if isinstance(size, int) else tuple(size)
            return (getattr(part, "num_channels", 3), height, width)
    return (getattr(config, "num_channels", 3), 224, 224) if hasattr(config, "num_channels") else None


def _sound_shape(config: Any) -> tuple[int, ...] | None:
    """Return the shape of one sound: features over time, or a waveform."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return (config.num_mel_bins, 2 * config.max_source_positions)
    return (4000,) if hasattr(config, "conv_stride") else None


_BUILDERS = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers, "": _of_class}
