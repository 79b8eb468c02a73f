"""The programs that are started from a command line: pretraining, and the tools around it.

The docstring of a module is the program's help; its ``main`` takes the arguments and returns the
exit code. The files in tools/ start the modules of their names (preprocess_data.py: `preprocess`),
and so do the commands ``megatron-ext-NAME`` that pip installs.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from megatron_ext.errors import end_on_interrupt, run_program

_COMMAND = "megatron-ext-"
_FILE = re.compile(r"(?:python )?(?:tools/|\b(?=pretrain_))(\w+)\.py")


def run(name: str) -> NoReturn:
    """Run the program in the module ``name``, and exit with its code."""
    end_on_interrupt()
    run_program(import_module(f"{__name__}.{name}").main)


def run_command() -> NoReturn:
    """Run the program of the installed command that this process is, and exit with its code.

    The help then names commands, such as megatron-ext-plan, in place of files, such as
    tools/plan.py.
    """
    end_on_interrupt()
    command = Path(sys.argv[0]).name
    module = import_module(f"{__name__}.{command.removeprefix(_COMMAND).replace('-', '_')}")
    module.__doc__ = _FILE.sub(_command_of, module.__doc__ or "")
    run_program(module.main)


def _command_of(file: re.Match[str]) -> str:
    return _COMMAND + file[1].removesuffix("_data").replace("_", "-")
