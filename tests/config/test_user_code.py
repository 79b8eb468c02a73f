"""Classes of the user's own are loaded from files as a program would load them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.config.user_code import load_object


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """Take back what a test has imported."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_a_file_imports_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own_pieces.py").write_text("BETAS = (0.9, 0.99)\n")
    (tmp_path / "math.py").write_text("raise AssertionError\n")
    (tmp_path / "own_rule.py").write_text("import math\nfrom own_pieces import BETAS\n")
    assert load_object("--loss", f"{tmp_path}/own_rule.py:BETAS", "a number") == (0.9, 0.99)


def test_files_of_one_name_are_modules_of_their_own(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_rule.py").write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
            f"Kind{folder} = int\n\n\n@dataclass\nclass Rule:\n    size: Kind{folder} = 1\n"
        )
        kind = load_object("--loss", f"{tmp_path}/{folder}/own_rule.py:Rule", "a class")
        assert hasattr(sys.modules[kind.__module__], f"Kind{folder}")
