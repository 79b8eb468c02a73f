"""Figures of matplotlib that are drawn into files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(**settings: Any) -> Figure:
    """Return a matplotlib Figure with the keyword arguments ``settings``.

    pyplot is avoided: it takes a second to import and keeps its own list of figures. The variable
    ``MPLBACKEND`` is ignored: notebooks export one that programs started from them cannot import.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure(**settings)
