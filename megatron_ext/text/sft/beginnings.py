"""The places where the first messages of a conversation end in its templated text.

Templating the messages before each turn anew costs the square of their number. Most templates write
one message after the other and look at nothing that follows; for these, which their syntax tree
shows, one templating with a mark before each message finds all ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, nodes

from megatron_ext.text.sft.chat import Template

Beginning = Callable[[int, bool], int | None]
"""A function from a number of messages, and whether the generation prompt follows, to the length of
their text; None where the whole text does not begin with it."""

_MARK = "\ue000message\ue001"
_FOR = r"\{%[-+]?\s*for\s+\w+\s+in\s+(?:NAMES)\s*([-+]?%\})"
_OF_PASSED_MESSAGES = ("first", "index", "index0", "previtem", "cycle", "changed")


def find_beginnings(template: Template, count: int, whole: str) -> Beginning:
    """Return the function to the ends of the first messages in the text of all ``count``."""
    ends = _marked_ends(template, count, whole)
    if ends is None:
        return lambda messages, prompt: _begins(whole, template.text(messages, prompt=prompt))
    tails = [template.text(1, prompt=prompt) for prompt in (False, True)]
    first = whole[: ends[1]]
    if not all(text.startswith(first) for text in tails):
        return lambda messages, prompt: _begins(whole, template.text(messages, prompt=prompt))
    closings = [text[len(first) :] for text in tails]

    def beginning(messages: int, prompt: bool) -> int | None:
        end, closing = ends[messages], closings[prompt]
        return end + len(closing) if whole.startswith(closing, end) else None

    return beginning


def _begins(whole: str, text: str) -> int | None:
    return len(text) if whole.startswith(text) else None


def _marked_ends(template: Template, count: int, whole: str) -> dict[int, int] | None:
    """Return the ends of the first n messages, n up to one less than all; None if unknown."""
    source = marked_source(template.source())
    if source is None or count < 2 or _MARK in whole:
        return None
    texts = template.text(count, chat_template=source).split(_MARK)
    before_loop = count - (len(texts) - 1)
    if before_loop not in (0, 1) or "".join(texts) != whole:
        return None
    ends, at = {}, 0
    for messages, text in enumerate(texts[:-1], before_loop):
        at += len(text)
        ends[messages] = at
    return ends


@lru_cache(maxsize=8)
def marked_source(source: str) -> str | None:
    """Return the template with a mark before each message.

    It is None where a message's text may depend on later ones, or where that cannot be told.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:
        return None
    names = _names_of_messages(tree)
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _over(node, names)]
    jumps = (nodes.Break, nodes.Continue)
    if len(loops) != 1 or any(isinstance(node, jumps) for node in _walk(tree)):
        return None
    (loop,) = loops
    tail = tree.body[tree.body.index(loop) + 1 :]
    if _looks_ahead(tree, loop, names) or not _is_constant(tail, tree):
        return None
    pattern = re.compile(_FOR.replace("NAMES", "|".join(sorted(names))))
    if len(pattern.findall(source)) != 1:
        return None
    # The new tag ends as the loop's did, so that the same white space is taken out after it.
    mark = f'{{{{ "{_MARK}" }}}}{{% set _ = 0 '
    return pattern.sub(lambda found: found[0] + mark + found[1], source)


def _over(loop: nodes.For, names: set[str]) -> bool:
    plain = not (loop.test or loop.else_ or loop.recursive)
    return plain and isinstance(loop.iter, nodes.Name) and loop.iter.name in names


def _names_of_messages(tree: nodes.Template) -> set[str]:
    """Return `messages` and the variables that are set to it or to all but the first of it."""
    names = {"messages"}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _aliased(node, names) is not None:
            names.add(node.target.name)
    return names


def _aliased(node: nodes.Assign, names: set[str]) -> nodes.Name | None:
    """Return the variable that an assignment gives another name, whole or but for its first."""
    value = node.node
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        part = value.arg
        if part.stop or part.step or not isinstance(part.start, nodes.Const):
            return None
        value = value.node if part.start.value == 1 else value
    return value if isinstance(value, nodes.Name) and value.name in names else None


def _looks_ahead(tree: nodes.Template, loop: nodes.For, names: set[str]) -> bool:
    """Tell whether what is written may depend on later messages.

    It does where they are read outside the loop (but for the first), or where the loop asks how
    many follow.
    """
    known = [loop.iter]
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and item.arg.value == 0:
            known.append(item.node)
    for assign in tree.find_all(nodes.Assign):
        if (alias := _aliased(assign, names)) is not None:
            known.append(alias)
        elif isinstance(assign.target, nodes.Name) and assign.target.name in names:
            return True
    loads = [name for name in tree.find_all(nodes.Name) if name.ctx == "load"]
    others = [name for name in loads if name.name in names and not any(name is k for k in known)]
    return bool(others) or any(map(_asks_what_follows, loop.body))


def _asks_what_follows(node: nodes.Node) -> bool:
    """Tell whether a node asks `loop` for what follows; inner loops have their own."""
    if isinstance(node, nodes.Getattr) and _is_loop(node.node):
        return node.attr not in _OF_PASSED_MESSAGES
    inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
    return _is_loop(node) or any(map(_asks_what_follows, inner))


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _is_constant(tail: list[nodes.Node], tree: nodes.Template) -> bool:
    """Tell whether what follows the loop writes the same after any number of messages."""
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    found = [node for part in tail for node in _walk(part)]
    names = {node.name for node in found if isinstance(node, nodes.Name)}
    return not (names & stored or any(isinstance(node, nodes.Call) for node in found))


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)
