"""What decides latents and embeddings, as manifests keep it, and whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the model, without the versions and paths of who saved it."""
    incidental = ("transformers_version", "torch_dtype", "dtype")
    return {k: v for k, v in settings.items() if k[:1] != "_" and k not in incidental}


def compared(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The first difference of two identities in words, empty where they agree."""
    for name in sorted({*wanted, *found}):
        before, now = wanted.get(name), found.get(name)
        if before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            return compared(before, now)
        return f"`{name}` was {before!r}, but is {now!r}"
    return ""
