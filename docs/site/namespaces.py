"""Loads the folders without ``__init__.py``, which griffe leaves out of a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class Namespaces(griffe.Extension):
    """An extension of griffe that adds these folders to a package, with all their modules."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        assert isinstance(pkg.filepath, Path)
        root = pkg.filepath.parent
        for path in sorted(root.rglob("*.py")):
            *folders, _name = path.relative_to(root).parts
            if (path.parent / "__init__.py").exists() or not folders:
                continue
            parent: Any = pkg
            for depth, folder in enumerate(folders, 1):
                if folder not in parent.members:
                    place = root.joinpath(*folders[:depth], "__init__.py")
                    parent.set_member(folder, self._module(folder, place, parent, loader))
                parent = parent.members[folder]
            parent.set_member(path.stem, self._module(path.stem, path, parent, loader))

    def _module(
        self, name: str, path: Path, parent: griffe.Module, loader: griffe.GriffeLoader
    ) -> griffe.Module:
        """Return a module that is read from a file; an empty one if the file does not exist."""
        code = path.read_text(encoding="utf-8") if path.exists() else ""
        loader.lines_collection[path] = code.splitlines()
        return griffe.visit(
            name,
            filepath=path,
            code=code,
            parent=parent,
            extensions=loader.extensions,
            docstring_parser=loader.docstring_parser,
            docstring_options=loader.docstring_options,
            lines_collection=loader.lines_collection,
            modules_collection=loader.modules_collection,
        )
