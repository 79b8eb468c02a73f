"""Parses a bash script into commands, as far as launch scripts use the language; runs nothing."""

from __future__ import annotations

import re

from megatron_ext.inspect.audit.shell_nodes import (
    Arithmetic,
    Assign,
    Case,
    Chain,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Simple,
    Test,
    While,
    spelled,
)
from megatron_ext.inspect.audit.shell_words import Lexer, Part, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^\[\]\n=]|\[[^\[\]\n]*\])*)\])?(\+?)=")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:.-]+)(?:[ \t]*\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))"
)
_REDIRECT = re.compile(r"(?:\d*|&)(<<<|<<-|<<|<>|<&|>&|>>|>\||<\(|>\(|<|>)")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
"""Commands whose words may be assignments."""
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


def parse(text: str) -> list[Node]:
    """Return the commands of a script.

    Raises:
        DataError: a quote, a bracket or a compound command is not closed; the line is named.
    """
    parser = Parser(text.replace("\r\n", "\n"))
    nodes = parser.commands()
    if parser.operator() or parser.keyword():
        raise parser.error(f"`{parser.operator() or parser.keyword()}` closes nothing")
    return nodes


class Parser(Lexer):
    """Reads commands from a script."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._pending: list[tuple[Simple, str, bool, bool]] = []

    def take(self, operator: str) -> bool:
        """Take an operator if it follows; after an end of line, the heredocs that wait for it."""
        if self.operator() != operator:
            return False
        self.at += len(operator)
        if operator == "\n":
            self._read_documents()
        return True

    def newlines(self) -> None:
        """Skip ends of lines."""
        while self.take("\n"):
            pass

    def expect(self, word: str, opened: str, at: int) -> None:
        """Take a keyword, or raise that the command that begins at ``at`` is not closed."""
        while self.operator() in (";", "\n"):
            self.take(self.operator())
        if self.keyword() != word:
            raise self.error(f"`{opened}` has no `{word}`", at)
        self.at += len(word)

    def commands(self) -> list[Node]:
        """Return commands up to a closing keyword or operator, which is not taken."""
        found: list[Node] = []
        while True:
            while self.operator() in ("\n", ";", "&"):
                self.take(self.operator())
            if self.at >= len(self.text) or self.operator() in (")", ";;", ";&", ";;&"):
                return found
            if self.keyword() in _CLOSING:
                return found
            found.append(self._chain())

    def _chain(self) -> Node:
        first = self._pipeline()
        rest: list[tuple[str, Node]] = []
        while (operator := self.operator()) in ("&&", "||"):
            self.take(operator)
            self.newlines()
            rest.append((operator, self._pipeline()))
        return Chain(first, rest) if rest else first

    def _pipeline(self) -> Node:
        inverted = False
        while (word := self.keyword()) in ("!", "time"):
            inverted ^= word == "!"
            self.at += len(word)
        commands = [self._command()]
        while (operator := self.operator()) in ("|", "|&"):
            self.take(operator)
            self.newlines()
            commands.append(self._command())
        return Pipeline(commands, inverted) if inverted or len(commands) > 1 else commands[0]

    def _command(self) -> Node:
        self.blanks()
        start = self.at
        if self.text.startswith("((", start) and (inside := self.arithmetic(start)):
            return Arithmetic(inside)
        if self.take("("):
            group = Group(self.commands(), subshell=True)
            if not self.take(")"):
                raise self.error("`(` is not closed", start)
            return self._redirected(group)
        compound = {
            "if": self._if, "case": self._case, "for": self._for, "select": self._for,
            "while": self._while, "until": self._while, "{": self._braces, "[[": self._test,
        }.get(self.keyword())  # fmt: skip
        if compound:
            return self._redirected(compound(start))
        function = _FUNCTION.match(self.text, start)
        if function:
            self.at = function.end()
            self.newlines()
            return Function(function[1] or function[2], self._command())
        return self._simple()

    def _if(self, start: int) -> Node:
        branches: list[tuple[list[Node], str, list[Node]]] = []
        word = self.keyword()
        while word in ("if", "elif"):
            self.at += len(word)
            self.blanks()
            begin = self.at
            condition = self.commands()
            text = " ".join(self.text[begin : self.at].split()).rstrip("; ")
            self.expect("then", "if", start)
            branches.append((condition, text, self.commands()))
            word = self.keyword()
        if word == "else":
            self.at += len(word)
            branches.append(([], "", self.commands()))
        self.expect("fi", "if", start)
        return If(branches)

    def _case(self, start: int) -> Node:
        self.at += len("case")
        self.blanks()
        begin = self.at
        subject = self.word()
        text = self.text[begin : self.at]
        self.expect("in", "case", start)
        self.newlines()
        branches: list[tuple[list[Word], list[Node]]] = []
        while self.keyword() != "esac":
            if self.at >= len(self.text):
                raise self.error("`case` has no `esac`", start)
            self.take("(")
            self.blanks()
            patterns = [self.word()]
            while self.take("|"):
                self.blanks()
                patterns.append(self.word())
            if not self.take(")"):
                raise self.error("a pattern of `case` has no `)`")
            branches.append((patterns, self.commands()))
            for end in (";;&", ";;", ";&"):
                self.take(end)
            self.newlines()
        self.expect("esac", "case", start)
        return Case(subject, text, branches)

    def _for(self, start: int) -> Node:
        self.at += len(self.keyword())
        self.blanks()
        words: list[Word] | None = None
        if self.text.startswith("((", self.at):
            name = self.arithmetic(self.at).partition("=")[0].strip()
        else:
            name = self.keyword()
            self.at += len(name)
            self.newlines()
            if self.keyword() == "in":
                self.at += len("in")
                words = []
                while not self.operator() and self.at < len(self.text):
                    words.append(self.word())
        self.expect("do", "for", start)
        body = self.commands()
        self.expect("done", "for", start)
        return For(name, words, body)

    def _while(self, start: int) -> Node:
        word = self.keyword()
        self.at += len(word)
        condition = self.commands()
        self.expect("do", word, start)
        begin = self.at
        body = self.commands()
        text = self.text[begin : self.at]
        self.expect("done", word, start)
        return While(condition, body, word == "until", text)

    def _braces(self, start: int) -> Node:
        self.at += 1
        body = self.commands()
        self.expect("}", "{", start)
        return Group(body, subshell=False)

    def _test(self, start: int) -> Node:
        self.at += 2
        words: list[Word] = []
        while True:
            self.blanks()
            if self.at >= len(self.text):
                raise self.error("`[[` is not closed", start)
            operator = self.operator()
            if self.text.startswith("]]", self.at):
                self.at += 2
                return Test(words, self.text[start : self.at])
            if operator == "\n" or self.text[self.at] in "<>" or operator:
                length = len(operator) or 1
                if operator != "\n":
                    words.append((Part("text", self.text[self.at : self.at + length]),))
                self.at += length
            else:
                pattern = bool(words) and words[-1] == (Part("text", "=~"),)
                words.append(self.word(" \t\n" if pattern else " \t\n;&|<>()"))

    def _simple(self) -> Node:
        command, start = Simple(line=self.line()), self.at
        while self.at < len(self.text):
            operator = self.operator()
            if self._redirect(command):
                continue
            if operator or self.at >= len(self.text):
                break
            found = _ASSIGNMENT.match(self.text, self.at)
            declares = command.words and spelled(command.words[0]) in DECLARING
            if found and (declares or not command.words):
                command.assigns.append(self._assign(found))
            else:
                command.words.append(self.word())
            command.text = " ".join(self.text[start : self.at].split())
        return command

    def _assign(self, found: re.Match[str]) -> Assign:
        self.at = found.end()
        value: Word | list[Word]
        if self.text.startswith("(", self.at):
            start = self.at
            self.at += 1
            value = []
            while not self.take(")"):
                if self.at >= len(self.text):
                    raise self.error(f"the array {found[1]} is not closed", start)
                if not self.take("\n"):
                    before = self.at
                    value.append(self.word(" \t\n()"))
                    self.at += self.at == before
        else:
            value = self.word()
        return Assign(found[1], value, bool(found[3]), found[2])

    def _redirected(self, node: Node) -> Node:
        """Take the redirections behind a compound command."""
        reader = Simple()
        while self._redirect(reader):
            pass
        return node

    def _redirect(self, command: Simple) -> bool:
        """Take a redirection if one follows; a heredoc is read after the end of the line."""
        self.blanks()
        found = _REDIRECT.match(self.text, self.at)
        if not found:
            return False
        self.at = found.end()
        if found[1] in ("<(", ">("):
            self.at -= 1
            self.bracketed("(", ")")
            return True
        self.blanks()
        target = self.word()
        if found[1] == "<<<":
            command.documents.append(target)
        elif found[1] in ("<<", "<<-"):
            literal = any(part.quoted for part in target)
            end = "".join(part.text for part in target)
            self._pending.append((command, end, found[1] == "<<-", literal))
        return True

    def _read_documents(self) -> None:
        """Read the heredocs that were announced on the line that has just ended."""
        for command, end, tabs, literal in self._pending:
            lines: list[str] = []
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == end:
                    break
                lines.append(line.lstrip("\t") if tabs else line)
            text = "\n".join(lines)
            inside = [Part("text", text, True)] if literal else Lexer(text).quoted("")
            command.documents.append(tuple(inside))
        self._pending = []
