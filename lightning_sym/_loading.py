"""Load tasks and datamodules from checkpoints, which may be untrusted."""

import argparse
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from pytorch_lightning.core.saving import CHECKPOINT_PAST_HPARAMS_KEYS, load_hparams_from_yaml
from pytorch_lightning.utilities.model_helpers import _restricted_classmethod
from torch import nn

from lightning_sym._checks import not_finite
from lightning_sym._trust import SETTINGS, check_settings, resolve

# Lightning's name of the function that builds an object from a file's settings, with a parser that imports.
_INSTANTIATOR = "pytorch_lightning.cli.instantiate_module"


class LoadsTrusted:
    """Loads only checkpoints with settings that name trusted classes and functions.

    List it before ``LightningModule`` or ``LightningDataModule`` among the bases of a class.
    """

    CHECKPOINT_HYPER_PARAMS_KEY: str  # of Lightning

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805 (a class method by another name)
        checkpoint_path: Any,
        *args: Any,
        allow: Iterable[str] | None = None,
        finite: bool = True,
        **options: Any,
    ) -> Any:
        """Load from a checkpoint; see Lightning's method of the same name.

        Names of classes and functions in the checkpoint are compared with an allow-list before any import:
        ``lightning_sym``, ``torchvision.models``, ``torch.nn``, ``torch.optim``, the module of this class, ``allow``.
        A checkpoint cannot extend the list: its own ``allow`` is ignored.

        Args:
            checkpoint_path: The file.
            args: Passed to Lightning's method.
            allow: Further trusted packages, for example ``["my_package"]``; also the task's argument.
            finite: Whether to reject weights that are not finite, such as those of stopped members.
            options: Passed to Lightning's method. With ``weights_only=False`` the file may run code, and names are
                not checked.

        Raises:
            ValueError: If the checkpoint names an untrusted class or function, or weights are not finite.
        """
        parent = super().load_from_checkpoint  # type: ignore[misc]
        if "allow" in inspect.signature(cls).parameters:
            options["allow"] = None if allow is None else list(allow)
        given = inspect.signature(parent).bind(cls, checkpoint_path, *args, **options).arguments
        if given.get("weights_only") is not False:
            content = _read(checkpoint_path, given.get("hparams_file"), cls.CHECKPOINT_HYPER_PARAMS_KEY)
            content = {name: value for name, value in content.items() if name not in options}  # options take precedence
            options |= _check(
                content, cls, (cls.__module__, *cls.trusted_modules(), *(allow or ())), str(checkpoint_path)
            )
        try:
            found = parent(checkpoint_path, *args, **options)
        except argparse.ArgumentError as error:  # of the parser, with the argument's name
            said = " ".join(str(error).split())
            raise ValueError(f"{checkpoint_path} holds settings that do not fit {cls.__name__}: {said}") from error
        if finite and (broken := found.broken_weights()):
            raise ValueError(
                f"{checkpoint_path} has values that are not finite in {broken[0]}: training diverged; choose another "
                "checkpoint, or load it with finite=False."
            )
        return found

    def broken_weights(self) -> list[str]:
        """Return the names of weights that are not finite."""
        return not_finite(self.state_dict()) if isinstance(self, nn.Module) else []

    @classmethod
    def trusted_modules(cls) -> Iterable[str]:
        """Return further modules with classes that a checkpoint may name; default none."""
        return ()


def _read(checkpoint: Any, other: Any, key: str) -> dict[str, Any]:
    """Return a checkpoint's arguments of a class, also from older versions of Lightning.

    Args:
        checkpoint: The file, open or not.
        other: A file of settings that replace those of the checkpoint, or None.
        key: Entry of the settings in the checkpoint.
    """
    if not hasattr(checkpoint, "read") and str(checkpoint).startswith("http"):
        raise ValueError(f"{checkpoint} is not on this machine; download it, and pass the file.")
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if hasattr(checkpoint, "seek"):
        checkpoint.seek(0)
    found: dict[str, Any] = {}
    for name in (*CHECKPOINT_PAST_HPARAMS_KEYS, key):
        part = content.get(name, {}) if isinstance(content, Mapping) else None
        if not isinstance(part, Mapping):
            raise ValueError(
                f"{checkpoint} holds no settings by name under {name!r}; pass a checkpoint that lightning-sym wrote."
            )
        found |= part
    if other is not None:
        found |= load_hparams_from_yaml(other) if str(other).endswith(("yml", "yaml")) else {}
    return found


def _check(settings: Mapping[str, Any], kind: type, allow: Sequence[str], source: str) -> dict[str, Any]:
    """Check a checkpoint's settings, and return those that replace them."""
    plain = {name: value for name, value in settings.items() if name not in ("_instantiator", "_class_path")}
    if settings.get("_instantiator", _INSTANTIATOR) not in (_INSTANTIATOR, None):
        raise ValueError(f"{source} names {settings['_instantiator']!r} as its builder; expected {_INSTANTIATOR}.")
    path = settings.get("_class_path")
    found = kind if path is None else resolve(str(path), (*SETTINGS, *allow), source)
    checked = check_settings(plain, found, allow, source)
    return {name: value for name, value in checked.items() if value is not plain[name]}
