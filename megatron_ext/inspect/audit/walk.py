"""Walks through a bash script: its branches, loops and assignments, without running a command.

Where the condition of a branch is open, both ways are walked, each in a world of its own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from megatron_ext.inspect.audit import shell_nodes as shell
from megatron_ext.inspect.audit.conditions import invert, test
from megatron_ext.inspect.audit.expand import (
    Value,
    World,
    arithmetic,
    fields,
    subscript,
    text_of,
    unknown,
    unknowns,
)
from megatron_ext.inspect.audit.shell_nodes import Node, Simple

MAX_WORLDS = 64
"""Ways through the branches of a script that are walked at most."""
MAX_DEPTH = 40
MAX_ROUNDS = 64


class Walk:
    """A walk through the branches, loops and assignments of a script; commands are a subclass's."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._depth = 0

    def command(
        self, words: list[str], node: Simple, world: World, before: World | None
    ) -> list[World]:
        """Take note of a command; return the worlds after it.

        Args:
            before: the world without the assignments that stand before the command, if any do.
        """
        raise NotImplementedError

    def note(self, sentence: str) -> None:
        """Keep a sentence once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def run(self, nodes: list[Node], worlds: list[World]) -> list[World]:
        """Walk through commands in all worlds; return the worlds after them."""
        for node in nodes:
            after: list[World] = []
            for world in worlds:
                after += [world] if world.ended else self._node(node, world)
            worlds = self._fewer(after)
        return worlds

    def _fewer(self, worlds: list[World]) -> list[World]:
        """Drop worlds in the same state, then those beyond the limit, with a note."""
        if len(worlds) == 1:
            return worlds
        distinct: dict[str, World] = {}
        for world in worlds:
            key = repr((world.variables, world.positional, world.ended, sorted(world.functions)))
            if key in distinct:
                seen = distinct[key]
                seen.assumed = tuple(x for x in seen.assumed if x in world.assumed)
            else:
                distinct[key] = world
        if len(distinct) > MAX_WORLDS:
            self.note(
                f"The script has over {MAX_WORLDS} ways through its open conditions; the first "
                f"{MAX_WORLDS} are audited. Give values with --var."
            )
        return list(distinct.values())[:MAX_WORLDS]

    def _node(self, node: Node, world: World) -> list[World]:
        if self._depth > MAX_DEPTH:
            self.note(f"Commands nested deeper than {MAX_DEPTH} are not read.")
            return [world]
        self._depth += 1
        try:
            return self._dispatch(node, world)
        finally:
            self._depth -= 1

    def _dispatch(self, node: Node, world: World) -> list[World]:
        walks: dict[type, Callable[..., list[World]]] = {
            Simple: self._simple, shell.Test: self._test, shell.Arithmetic: self._arithmetic,
            shell.Function: self._function, shell.Chain: self._chain, shell.If: self._if,
            shell.Case: self._case, shell.For: self._for, shell.While: self._while,
            shell.Pipeline: self._pipeline, shell.Group: self._group,
        }  # fmt: skip
        return walks[type(node)](node, world)

    def _test(self, node: shell.Test, world: World) -> list[World]:
        world.status = test([text_of(x, world) for x in node.words], world)
        return [world]

    def _arithmetic(self, node: shell.Arithmetic, world: World) -> list[World]:
        return [self.calculate(node.text, world)]

    def _function(self, node: shell.Function, world: World) -> list[World]:
        world.functions[node.name] = node
        return [world]

    def _pipeline(self, node: shell.Pipeline, world: World) -> list[World]:
        worlds = self.run(node.commands, [world])
        for each in worlds:
            each.status = invert(each.status) if node.inverted else each.status
        return worlds

    def _group(self, node: shell.Group, world: World) -> list[World]:
        if not node.subshell:
            return self.run(node.body, [world])
        for inner in self.run(node.body, [world.copy()]):
            world.status = inner.status
        return [world]

    def _fork(self, world: World, text: str) -> tuple[World, World]:
        """Return two worlds, one where the condition holds and one where it does not."""
        known = dict(world.assumed).get(text)
        yes, no = world, world.copy()
        if known is None:
            yes.assumed, no.assumed = (*yes.assumed, (text, True)), (*no.assumed, (text, False))
        else:
            (no if known else yes).ended = "impossible"
        return yes, no

    def _chain(self, node: shell.Chain, world: World) -> list[World]:
        worlds = self._node(node.first, world)
        for joint, command in node.rest:
            after: list[World] = []
            for each in worlds:
                if each.ended:
                    after.append(each)
                elif each.status is None:
                    yes, no = self._fork(each, _text(node.first))
                    yes.status, no.status = True, False
                    runs, rests = (yes, no) if joint == "&&" else (no, yes)
                    after += [*self.run([command], [runs]), rests]
                elif each.status == (joint == "&&"):
                    after += self._node(command, each)
                else:
                    after.append(each)
            worlds = [x for x in after if x.ended != "impossible"]
        return worlds

    def _if(self, node: shell.If, world: World) -> list[World]:
        left, after = [world], []
        for condition, text, body in node.branches:
            judged = self.run(condition, left) if condition else left
            left = []
            for each in judged:
                if each.ended:
                    after.append(each)
                elif (
                    not condition
                    or each.status
                    or (each.status is None and _is_default(condition, body))
                ):
                    after += self.run(body, [each])
                elif each.status is None:
                    yes, no = self._fork(each, text)
                    after += self.run(body, [yes])
                    left.append(no)
                else:
                    left.append(each)
        worlds = [*after, *left]
        for each in worlds:
            each.status = True
        return [x for x in worlds if x.ended != "impossible"]

    def _case(self, node: shell.Case, world: World) -> list[World]:
        subject = text_of(node.subject, world)
        after: list[World] = []
        for patterns, body in node.branches:
            texts = [text_of(x, world) for x in patterns]
            if not unknowns(subject):
                if any(fnmatch.fnmatchcase(subject, x) for x in texts):
                    return self.run(body, [world])
                continue
            way = world.copy()
            way.assumed = (*way.assumed, (f"{node.text} is {' or '.join(texts)}", True))
            after += self.run(body, [way])
            if texts == ["*"]:
                return after
        return [*after, world]

    def _for(self, node: shell.For, world: World) -> list[World]:
        if node.words is None:
            values = [unknown(node.name)]
        else:
            values = [x for word in node.words for x in fields(word, world)]
        worlds = [world]
        for value in values[:MAX_ROUNDS]:
            for each in worlds:
                each.variables[node.name] = value
            worlds = self.run(node.body, worlds)
        return worlds

    def _while(self, node: shell.While, world: World) -> list[World]:
        if world.positional is None and (
            re.search(r"\bshift\b", node.text) or _first_words(node.condition) == ["getopts"]
        ):
            return [world]
        worlds = self.run(node.condition, [world])
        for _ in range(MAX_ROUNDS):
            on = [x for x in worlds if not x.ended and x.status is not node.until]
            if not on:
                break
            off = [x for x in worlds if x not in on]
            opened = any(x.status is None for x in on)
            on = self.run(node.body, on)
            worlds = off + (on if opened else self.run(node.condition, on))
            if opened:
                break
        return worlds

    def calculate(self, text: str, world: World) -> World:
        """Carry out ``((X = …))`` and its kin; the status is whether the value is not zero."""
        found = re.fullmatch(r"\s*(\w+)\s*(\+\+|--|[-+*/%]?=(?!=))(.*)", text, re.DOTALL)
        if found:
            name, sign, rest = found.groups()
            step = f"{name} {sign[0]} 1" if sign in ("++", "--") else rest
            whole = f"{name} {sign[0]} ({rest})" if len(sign) == 2 and sign[1] == "=" else step
            value = arithmetic(whole, world)
            world.variables[name] = unknown(name) if value is None else str(value)
        else:
            value = arithmetic(text, world)
        world.status = None if value is None else value != 0
        return world

    def _simple(self, node: Simple, world: World) -> list[World]:
        from_before = world.copy() if node.words and node.assigns else None
        for assign in node.assigns:
            self.assign(assign, world)
        words = [x for word in node.words for x in fields(word, world)]
        world.status = True
        if not words:
            return [world]
        return self.command(words, node, world, from_before)

    def assign(self, assign: shell.Assign, world: World) -> None:
        """Carry out an assignment to a variable, an element or an array."""
        old = world.variables.get(assign.name, world.given.get(assign.name))
        value: Value
        if isinstance(assign.value, list):
            keyed = [shell.keyed(word) for word in assign.value]
            if any(keyed):
                pairs = {text_of(k, world): text_of(v, world) for k, v in filter(None, keyed)}
                value = {**old, **pairs} if assign.added and isinstance(old, dict) else pairs
            else:
                value = tuple(x for word in assign.value for x in fields(word, world))
                if assign.added and old is not None:
                    value = (*((old,) if isinstance(old, str) else tuple(old)), *value)
        else:
            text = text_of(assign.value, world)
            if assign.key is not None:
                key = subscript(assign.key, world)
                elements = dict(old) if isinstance(old, dict) else {}
                if isinstance(old, tuple):
                    elements = {str(i): x for i, x in enumerate(old)}
                elements[key] = elements.get(key, "") + text if assign.added else text
                counted = [str(i) for i in range(len(elements))]
                value = tuple(elements.values()) if list(elements) == counted else elements
            elif isinstance(old, tuple) and assign.added:
                value = (old[0] + text, *old[1:]) if old else (text,)
            else:
                value = (old if assign.added and isinstance(old, str) else "") + text
        world.variables[assign.name] = value


def _is_default(condition: list[Node], body: list[Node]) -> bool:
    """Return whether a branch sets the variable that its condition finds empty: its default."""
    tests = [x for x in condition if isinstance(x, Simple | shell.Test)]
    words = [word for node in tests for word in node.words]
    tested = {re.split(r"\W", x.text)[0] for word in words for x in word if x.kind == "param"}
    sets = {x.name for node in body if isinstance(node, Simple) for x in node.assigns}
    return any(shell.spelled(x) == "-z" for x in words) and len(tested) == 1 and tested <= sets


def _first_words(nodes: list[Node]) -> list[str]:
    return [shell.spelled(x.words[0]) for x in nodes if isinstance(x, Simple) and x.words]


def _text(node: Node) -> str:
    """Return a condition as a reader of the script knows it."""
    if isinstance(node, shell.Test):
        return node.text
    if isinstance(node, shell.Arithmetic):
        return f"(({node.text}))"
    return node.text if isinstance(node, Simple) else "a condition"
