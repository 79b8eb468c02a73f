"""Loads a class of the user's own that a flag names, and reads the options that it is given."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, did_you_mean


def load_object(flag: str, spec: str, kind: str) -> Any:
    """Return the object that ``spec`` names.

    Args:
        flag: the flag that has the value ``spec``, for errors.
        spec: ``module:Name`` or ``path/to/file.py:Name``.
        kind: what the object is, for errors, such as "the class of its options".

    Raises:
        ConfigError: ``spec`` has another form, its module cannot be imported, or the module has
            nothing of that name.
    """
    place, name = _parts(flag, spec, kind)
    module = _module(flag, spec, place)
    if not hasattr(module, name):
        classes = [x for x, value in vars(module).items() if isinstance(value, type)]
        remedy = did_you_mean(name, classes, count=2) or f"name {kind} that is in {place}"
        raise ConfigError.about(flag, spec, f"names nothing: {place} has no {name}", remedy)
    return getattr(module, name)


def check_place(flag: str, spec: str, kind: str) -> None:
    """Raise the ConfigError of `load_object` if the file that ``spec`` names cannot be read.

    Nothing is imported, so this is quick. The arguments are those of `load_object`.
    """
    place, _ = _parts(flag, spec, kind)
    if place.endswith(".py"):
        try:
            Path(place).resolve().open("rb").close()
        except OSError as error:
            raise _not_imported(flag, spec, error) from error


def _parts(flag: str, spec: str, kind: str) -> tuple[str, str]:
    """Return module (or file) and name of a ``spec``; raise a ConfigError if it has no such parts.

    The arguments are those of `load_object`.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError.about(flag, spec, "must be module:Class or file.py:Class", f"name {kind}")
    return place, name


def _module(flag: str, spec: str, place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        name = _module_name(path)
        file_spec = importlib.util.spec_from_file_location(name, path)
        assert file_spec is not None and file_spec.loader is not None
        module = importlib.util.module_from_spec(file_spec)
        # The dataclass decorator looks up the module by name, so it must be registered first.
        sys.modules.setdefault(name, module)
        # The file may import files beside it, as if it had been started as a program. They come
        # last, since they must not take the place of modules of these names.
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        file_spec.loader.exec_module(module)
        return module
    except (ImportError, OSError, SyntaxError) as error:
        raise _not_imported(flag, spec, error) from error


def _module_name(path: Path) -> str:
    """Return the name for the module of a file: the file's, unless another module has it."""
    loaded = sys.modules.get(path.stem)
    if loaded is None or getattr(loaded, "__file__", None) == str(path):
        return path.stem
    return f"{path.stem}_of_{path.parent.name}"


def _not_imported(flag: str, spec: str, error: Exception) -> ConfigError:
    rule = f"cannot be imported: {error}"
    return ConfigError.about(flag, spec, rule, "give a module on PYTHONPATH or a file")


def split_options(
    flag: str, spec: str, arguments: Sequence[str], names: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (the argument, name, value as text) for each option, given as ``name=value``.

    Args:
        flag: the flag with the options, for errors.
        spec: the class that takes the options, for errors.
        names: the options that the class has.

    Raises:
        ConfigError: an argument has another form, or names an option that the class lacks.
    """
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or name not in names:
            advice = did_you_mean(name, names) or f"it has {', '.join(names) or 'none'}"
            rule = f"must be FIELD=VALUE of {spec}"
            raise ConfigError.about(flag, argument, rule, advice)
        yield argument, name, text
