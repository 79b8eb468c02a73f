"""Applies chat templates, which are untrusted programs, within bounds.

transformers renders templates in jinja2's sandbox, which denies them Python's objects, but does not
bound their work. `apply_template` gives the same result within bounds: it counts loop iterations
and macro calls, checks the CPU time and the size of each number and text that an operator makes,
and limits the memory that the process may map during a rendering. It cannot interrupt a single call
of a filter or of a string method on values that fit into that memory.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template as JinjaTemplate
from jinja2.visitor import NodeTransformer

from megatron_ext.errors import DataError
from megatron_ext.text.tokenizers.huggingface import refused_panic

MAX_SOURCE = 1 << 18
"""The largest number of characters in a template's source."""
MAX_STEPS = 500_000
"""The largest number of loop iterations and macro calls in one rendering; most need thousands."""
MAX_SECONDS = 30.0
"""The largest CPU time, in seconds, that the thread of one rendering may take."""
MAX_TEXT = 1 << 26
"""The largest number of characters in a rendered text or in the result of an operator.

It also bounds the number of items in a list that an operator makes."""
MAX_BITS = 1 << 14
"""The largest number of bits in a number that an operator makes."""
MAX_MEMORY = 1 << 29
"""The largest number of bytes that the process may map in addition during a rendering."""
MAX_CACHED = 64
_STATM = Path("/proc/self/statm")


class TooCostly(DataError):
    """Raised for a chat template that exceeds a bound on its steps, time, memory or text."""


class _Excess(Exception):
    """Raised where a rendering exceeds a bound; the message names the bound."""


class _Budget:
    """The loop iterations, macro calls and time that one rendering has left.

    The methods are called from within the rendering. Some count or check what is left; others apply
    an operator and check the size of its result.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._steps = MAX_STEPS
        self._end = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Count one loop iteration or macro call; raise an _Excess if none is left."""
        self._steps -= 1
        if self._steps < 0:
            raise _Excess(f"{MAX_STEPS:,} turns of its loops")
        self.timed()

    def timed(self, value: Any = None) -> Any:
        """Return ``value`` if time is left, else raise an _Excess.

        `_Counting` passes the input of each filter and the function of each call of a template
        through this method.
        """
        if time.thread_time() > self._end:
            raise _Excess(f"{MAX_SECONDS:.0f} seconds of computing")
        return value

    def binop(self, _context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator; raise an _Excess if the result would be too large."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_length(len(left) + len(right))
            return left + right
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    _check_length(len(one) * other)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
            return left * right
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
        return left**right

    def joined(self, *parts: Any) -> str:
        """Join texts, as the operator ``~`` does; raise an _Excess if the result is too long."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise _Excess(f"{MAX_TEXT:,} characters or items in one value")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise _Excess(f"{MAX_BITS:,} bits in one number")


def _call(name: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class _Counting(NodeTransformer):
    """Inserts calls of the methods of `_Budget` into the syntax tree of a template.

    The body of each loop and macro then counts a step, each filter and call checks the time, and
    each ``~`` checks the length of its result.
    """

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_call("count_step")))
        if isinstance(node, (nodes.Filter, nodes.Call)) and node.node is not None:
            node.node = _call("check_time", node.node)
        return _call("joined_texts", *node.nodes) if isinstance(node, nodes.Concat) else node


def _check_constants(tree: nodes.Template) -> None:
    """Raise an _Excess if a template has large powers of constants.

    jinja2 computes such powers while it compiles the template, before `_Budget` can stop it.
    """
    for power in tree.find_all(nodes.Pow):
        sides = (power.left, power.right)
        small = all(isinstance(x, nodes.Const) and abs(x.value) < 64 for x in sides)
        if not small and next(power.find_all(nodes.Name), None) is None:
            raise _Excess(f"{MAX_BITS:,} bits in one number")


_rendering = threading.Lock()
_bounded = set[str]()
"""The sources of the templates that `_bound` has bounded, at most `MAX_CACHED`."""


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Raise an _Excess if the process maps too much additional memory within a ``with`` block.

    Systems without `/proc/self/statm` have no limit.
    """
    if not _STATM.is_file():
        yield
        return
    # Without the lock, a thread could save the limit that another has set, and restore it too late.
    with _rendering:
        before = resource.getrlimit(resource.RLIMIT_AS)
        mapped = int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        soft = mapped + MAX_MEMORY
        if before[0] != resource.RLIM_INFINITY:
            soft = min(soft, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
        try:
            yield
        except MemoryError:
            raise _Excess(f"{MAX_MEMORY >> 20:,} MiB of memory") from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def apply_template(tokenizer: Any, messages: Any, **kwargs: Any) -> Any:
    """Call ``tokenizer.apply_chat_template`` within the bounds of this module; return its result.

    Raises:
        TooCostly: the template exceeds a bound.
        DataError: a regular expression of the tokenizer takes too long on the text.
        Exception: the template raises an error, which may be of any class.
    """
    try:
        _bound(tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools")))
        with refused_panic(getattr(tokenizer, "name_or_path", "")):
            return tokenizer.apply_chat_template(messages, **kwargs)
    except _Excess as excess:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise TooCostly(
            f"The chat template of {name} takes more than {excess} for one conversation; give a "
            "template that takes less."
        ) from None


def _bound(source: str) -> None:
    """Add the bounds to the compiled template of ``source`` in transformers' cache.

    Call this before each rendering, since the cache is small and may have dropped the template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if source in _bounded and hasattr(_compile_jinja_template(source).environment, "count_step"):
        return
    if len(source) > MAX_SOURCE:
        raise _Excess(f"{MAX_SOURCE:,} characters")
    with _limited_memory():
        # Parse the source by transformers' environment, which knows its tags. Parsing computes
        # nothing yet, so this is the place to look at constants.
        _check_constants(_compile_jinja_template("").environment.parse(source))
        compiled: JinjaTemplate = _compile_jinja_template(source)
        environment: Any = compiled.environment
        budget = _Budget()
        environment.intercepted_binops = frozenset(("+", "*", "**"))
        environment.call_binop = budget.binop
        environment.joined_texts = budget.joined
        environment.count_step = budget.step
        environment.check_time = budget.timed
        # `lipsum` makes texts of any length.
        environment.globals.pop("lipsum", None)
        tree = _Counting().visit(environment.parse(source))
        code = environment.compile(tree)
        bounded = JinjaTemplate.from_code(environment, code, environment.make_globals(None))
    render = bounded.root_render_func

    def within_bounds(context: Any) -> Iterator[str]:
        budget.start()
        length = 0
        with _limited_memory():
            for piece in render(context):
                length += len(piece)
                _check_length(length)
                yield piece

    compiled.root_render_func = within_bounds
    compiled.blocks = bounded.blocks
    if len(_bounded) >= MAX_CACHED:
        _bounded.clear()
    _bounded.add(source)
