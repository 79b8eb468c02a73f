"""Holds what determines a conversation's tokens: the tokenizer, the chat template and options.

To make the loss mask we must know where the first n messages end in a conversation's text. It would
take quadratic time to apply the template to the first n messages for every n. But most templates
write messages one after another, independently of later messages. If the syntax tree of a template
shows this, we apply the template only once, with a mark before each message, and the positions of
the marks are the ends that we need.
"""

import copy
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_ext.disk.reading import UnreadableFile, read_text
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.sft.conversation import Conversation, Message
from megatron_ext.text.sft.templates import TooCostly, apply_template
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.text.tokenizers.huggingface import (
    load_pretrained,
    refused_panic,
    tokenizer_folder,
)

# Keywords of `apply_chat_template` that the user must not set, because this package sets them.
_RESERVED_KEYWORDS = (
    "conversation add_generation_prompt continue_final_message tokenize return_dict tools "
    "return_assistant_tokens_mask return_tensors padding truncation max_length tokenizer_kwargs"
).split()
_COLUMNS = ("messages", "conversations", "system", "tools", "enable_thinking")
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
_ALPACA_COLUMNS = ("instruction", "input", "output", "history")


class ChatTokenizer(Protocol):
    """The methods and attributes of a transformers tokenizer that this package uses."""

    is_fast: bool
    pad_token_id: int | None
    chat_template: Any
    apply_chat_template: Callable[..., Any]
    get_chat_template: Callable[..., str]

    def __call__(self, text: str, **kwargs: Any) -> Any: ...


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise a ConfigError if ``--sft-template-kwargs`` has a keyword that this module sets itself.

    ``kwargs`` are the user's keyword arguments for `apply_chat_template`.
    """
    for name in kwargs:
        if name in _RESERVED_KEYWORDS:
            raise ConfigError.about(
                "--sft-template-kwargs",
                name,
                "must not hold what the tokenization of conversations sets itself "
                f"({', '.join(_RESERVED_KEYWORDS)})",
                "leave it out",
            )


class Template:
    """A chat template bound to one conversation; it can be applied to the first n messages.

    If the conversation's row has `enable_thinking`, this value overrides the one in
    ``--sft-template-kwargs``.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, conversation: Conversation, kwargs: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.conversation = conversation
        self._given = kwargs
        self._kwargs = dict(kwargs)
        if conversation.enable_thinking is not None:
            self._kwargs["enable_thinking"] = conversation.enable_thinking
        if conversation.tools is not None:
            self._kwargs["tools"] = list(conversation.tools)

    def of(self, conversation: Conversation) -> "Template":
        """Return this chat template bound to another conversation and its tools."""
        return Template(self.tokenizer, conversation, self._given)

    @cached_property
    def whole(self) -> str:
        """Return the text that the template writes for all messages of the conversation."""
        return self.text(len(self.conversation.messages))

    def apply(self, count: int, **kwargs: Any) -> Any:
        """Return the result of `apply_chat_template` for the first ``count`` messages.

        ``kwargs`` are more arguments of `apply_chat_template`. Raise a DataError if the template
        fails.
        """
        messages = [dict(message) for message in self.conversation.messages[:count]]
        try:
            return apply_template(self.tokenizer, messages, **{**self._kwargs, **kwargs})
        except TooCostly:
            raise
        except Exception as error:  # a template can raise anything
            raise RefusedByTemplate(self, count, _reason(error)) from error

    def ids(self, count: int, *, prompt: bool = False) -> list[int]:
        """Return the token ids of the text for the first ``count`` messages.

        ``prompt`` adds the generation prompt.
        """
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": prompt}
        return list(self.apply(count, **options)["input_ids"])

    def text(self, count: int, *, prompt: bool = False, **kwargs: Any) -> str:
        """Return the text that the template writes for the first ``count`` messages.

        ``prompt`` adds the generation prompt; ``kwargs`` are more arguments of
        `apply_chat_template`.
        """
        return str(self.apply(count, tokenize=False, add_generation_prompt=prompt, **kwargs))

    def source(self) -> str:
        """Return the Jinja source of the template."""
        own = self._kwargs.get("chat_template")
        return self.tokenizer.get_chat_template(own, self._kwargs.get("tools"))

    def encode(self, text: str) -> Any:
        """Tokenize a text that the template has written.

        Return a mapping of `input_ids` and `offset_mapping`, the (start, end) of each token in
        characters. Raise a DataError if the tokenizer refuses the text.
        """
        try:
            with refused_panic(getattr(self.tokenizer, "name_or_path", "")):
                return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:  # tokenizers refuse half a surrogate pair with various errors
            name = next(self._half_pairs(), None)
            if name is not None:
                raise DataError(
                    f"{self.conversation.place}: `{name}` holds half a surrogate pair, which is no "
                    "character; correct the row."
                ) from error
            raise DataError(
                f"{self.conversation.place}: the tokenizer refuses the text of the conversation "
                f"({_reason(error)}); correct the row."
            ) from error

    def _half_pairs(self) -> Iterator[str]:
        """Yield the name of each text in the conversation that contains a lone surrogate.

        A lone surrogate is half of a UTF-16 surrogate pair, and is not a character. A name tells
        where the text is, such as `messages[1].content`.
        """
        conversation = self.conversation
        values = {
            conversation.name(index, key): value
            for index, message in enumerate(conversation.messages)
            for key, value in message.items()
        }
        values[conversation.tools_name] = list(conversation.tools or ())
        for name, value in values.items():
            for text_name, text in _texts_below(value, name):
                if any("\ud800" <= letter <= "\udfff" for letter in text):
                    yield text_name


class RefusedByTemplate(DataError):
    """Raised if a chat template refuses a conversation's first ``count`` messages.

    ``reason`` is the class and the message of the exception that the template raised.
    """

    def __init__(self, template: Template, count: int, reason: str) -> None:
        self._template = template
        self._count = count
        self._reason = reason
        total = len(template.conversation.messages)
        super().__init__(self._sentence(f"the first {count} of {total} messages"))

    def with_part(self) -> DataError:
        """Return an error that names the message or the tools that the template refuses.

        If neither can be found, return this error unchanged. To find the message, the template is
        applied again to fewer messages. This takes time, and many refusals are never shown, so call
        this only when the error is about to be shown.
        """
        template = self._template
        conversation = template.conversation
        if conversation.tools is not None:
            bare = template.of(dataclasses.replace(conversation, tools=None))
            if _refusal(bare, self._count) != self._reason:
                column = conversation.tools_name
                keys = {
                    key for tool in conversation.tools for key in _names_below(tool, f"{column}[]")
                }
                return DataError(self._sentence(f"`{column}` (with {', '.join(sorted(keys))})"))
        for count in range(1, self._count + 1):
            if _refusal(template, count) == self._reason:
                shown = _described(conversation.messages[count - 1])
                name = conversation.name(count - 1)
                return DataError(self._sentence(f"`{name}` ({shown})"))
        return self

    def _sentence(self, part: str) -> str:
        return (
            f"{self._template.conversation.place}: the chat template refuses {part}: "
            f"{self._reason}; correct the row, or give a template that takes it."
        )


def _refusal(template: Template, count: int) -> str | None:
    """Return the reason why a template refuses the first ``count`` messages.

    Return None if it accepts them.
    """
    try:
        template.text(count)
    except RefusedByTemplate as error:
        return error._reason
    return None


def _described(message: Message) -> str:
    """Return a message's role, its keys and the keys that it lacks, as text for an error."""
    names = [name for key in message for name in _names_below(message[key], key) if key != "role"]
    needed = ["content", *(["tool_call_id"] if message["role"] == "tool" else [])]
    lacking = [key for key in needed if key not in message]
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        inside = "tool_calls[]" if function is call else "tool_calls[].function"
        lacking += ["tool_calls[].id"] if "id" not in call else []
        lacking += [f"{inside}.arguments"] if "arguments" not in function else []
    shown = f"role {message['role']}"
    if names:
        shown += f", with {', '.join(dict.fromkeys(names))}"
    if lacking:
        shown += f", without {', '.join(dict.fromkeys(lacking))}"
    return shown


def _texts_below(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each text at any depth in a value; ``name`` is the value's name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts_below(item, f"{name}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts_below(item, f"{name}[{index}]")
    elif isinstance(value, str):
        yield name, value


def _names_below(value: Any, name: str) -> Iterator[str]:
    """Yield the name of each value at any depth in ``value``, such as `tools[].function.name`.

    ``name`` is the name of ``value`` itself. `[]` stands for every index of a list. Values inside
    the arguments of tool calls are left out.
    """
    if isinstance(value, dict) and value and not name.endswith("arguments"):
        for key, item in value.items():
            yield from _names_below(item, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _names_below(item, f"{name}[]")
    else:
        yield name


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


CONTENT_VERSION = 1
"""The version of the tokenization; raise it if a change gives rows other tokens or masks.

Tokens that were cached under another version are then not reused.
"""


@dataclass(frozen=True)
class Chat:
    """The tokenizer, its chat template and the options with which conversations are tokenized.

    Attributes:
        sft: the options of the user; if the template writes a date, ``sft_date`` holds this date.
        identity: JSON values of everything that determines tokens. Tokens that were stored under
            another identity are not reused.
        date_is_given: whether the user gave the date that the template writes.
        unread: keywords of ``--sft-template-kwargs`` that the template does not read.
    """

    tokenizer: ChatTokenizer
    settings: TokenizerConfig
    vocab_size: int
    sft: SftConfig
    identity: dict[str, Any]
    date_is_given: bool = False
    unread: tuple[str, ...] = ()

    @property
    def date(self) -> str | None:
        """Return the date that the template writes; None if it writes none."""
        date: str | None = self.identity.get("date")
        return date


def build_chat(tokenizer: Tokenizer, settings: TokenizerConfig, sft: SftConfig) -> Chat:
    """Return the `Chat` of a run, whose transformers tokenizer gives the same ids as ``tokenizer``.

    ``settings`` are the flags from which ``tokenizer`` was built; ``sft`` has the chat options.
    Raise a ConfigError if there is no chat template, and a DataError if a file cannot be read.
    """
    # A digest identifies the tokenizer wherever its file is, so a moved file keeps its stores.
    about = dict(tokenizer.unique_identifiers)
    if "sha256" in about:
        about.pop("path", None)
    chat_tokenizer = load_chat_tokenizer(tokenizer, settings, sft.sft_chat_template)
    kwargs = sft.template_kwargs
    check_template_kwargs(kwargs)
    row_format = {
        "layout": sft.sft_row_format,
        "prompt": sft.prompt_column,
        "response": sft.response_column,
        **{column: getattr(sft, f"sft_{column}_key") for column in _COLUMNS},
    }
    if sft.sft_row_format == "alpaca":
        row_format |= {column: getattr(sft, f"sft_{column}_key") for column in _ALPACA_COLUMNS}
    identity = {
        "tokenizer": about,
        "template": _digest(chat_tokenizer.chat_template),
        "template_kwargs": kwargs,
        "on_mismatch": sft.sft_on_mismatch,
        "row_format": row_format,
        "versions": {
            "content": CONTENT_VERSION,
            **{name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")},
        },
    }
    # These flags are newer than some stores. At their defaults they are left out of the identity,
    # so that stores made before them are still reused.
    defaults = SftConfig()
    for name in ("sft_tool_arguments", "sft_on_unrendered", "sft_split_turns"):
        if getattr(sft, name) != getattr(defaults, name):
            identity[name.removeprefix("sft_")] = getattr(sft, name)
    sources = _sources(chat_tokenizer, kwargs)
    if any("strftime_now" in source for source in sources):
        identity["date"] = sft.sft_date or datetime.date.today().isoformat()
    unread = tuple(
        name
        for name in kwargs
        if name != "chat_template" and not any(reads_variable(x, name) for x in sources)
    )
    chat = Chat(
        chat_tokenizer,
        settings,
        tokenizer.vocab_size,
        sft,
        identity,
        sft.sft_date is not None,
        unread,
    )
    return chat if chat.date is None else dated(chat, chat.date)


def _sources(tokenizer: ChatTokenizer, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the Jinja source of each template that may be applied to a conversation.

    These are the tokenizer's own templates, or the ``chat_template`` in the keywords ``kwargs``.
    """
    own = kwargs.get("chat_template") or tokenizer.chat_template
    return [own] if isinstance(own, str) else list(own.values())


def dated(chat: Chat, date: str) -> Chat:
    """Return a copy of ``chat`` whose templates write ``date`` instead of the current time."""
    tokenizer = dated_tokenizer(chat.tokenizer, date)
    sft = dataclasses.replace(chat.sft, sft_date=date)
    identity = {**chat.identity, "date": date}
    return dataclasses.replace(chat, tokenizer=tokenizer, sft=sft, identity=identity)


def writes_date(tokenizer: ChatTokenizer) -> bool:
    """Tell whether the tokenizer's chat template asks for the current time."""
    return any("strftime_now" in source for source in _sources(tokenizer, {}))


def with_known_date(
    tokenizer: ChatTokenizer, trained: str | None
) -> tuple[ChatTokenizer, str | None]:
    """Return a tokenizer whose template writes a fixed date, and a sentence on it for the user.

    The date is ``trained``, the date that the model's training data had, or today's date if it is
    None. If the template writes no date, return ``tokenizer`` itself and None.
    """
    if not writes_date(tokenizer):
        return tokenizer, None
    date = trained or datetime.date.today().isoformat()
    which = "that of the model's training" if trained else "today's, as the model keeps none"
    sentence = f"the chat template writes the date {date}, {which}"
    return dated_tokenizer(tokenizer, date), sentence


def dated_tokenizer(tokenizer: ChatTokenizer, date: str) -> ChatTokenizer:
    """Return a copy of ``tokenizer`` whose chat templates write ``date``, as YYYY-MM-DD."""
    day = datetime.date.fromisoformat(date)
    tokenizer = copy.copy(tokenizer)
    own = tokenizer.chat_template
    if isinstance(own, str):
        tokenizer.chat_template = with_date(own, day)
    elif own:
        tokenizer.chat_template = {name: with_date(source, day) for name, source in own.items()}
    return tokenizer


_BEFORE_DATE = "{%- macro strftime_now(format) -%}{{ format"
_AFTER_DATE = " }}{%- endmacro %}\n"


def with_date(source: str, day: datetime.date) -> str:
    """Return the template ``source``, changed to write ``day`` as the current day.

    The function `strftime_now` of transformers is replaced by a macro at the start of the template.
    If an earlier call has added such a macro, the new one replaces it. The newline after the macro
    does not appear in the text, because transformers renders templates with `trim_blocks`.
    """
    if source.startswith(_BEFORE_DATE):
        source = source[source.index(_AFTER_DATE) + len(_AFTER_DATE) :]
    if "strftime_now" not in source:
        return source
    steps = "".join(
        f" | replace({json.dumps('%' + name)}, {json.dumps(day.strftime('%' + name))})"
        for name in (*_DIRECTIVES, "%")
    )
    return f"{_BEFORE_DATE}{steps}{_AFTER_DATE}{source}"


_DIRECTIVES = (*(f"-{letter}" for letter in "dmyjHIMS"), *"aAbBcdDeFGhHIjmMpSTuUVwWxXyYZz")
"""The directives of `strftime` that a template with a fixed date can use; the time is 00:00:00."""


def read_template(flag: str | None, path: str) -> str:
    """Return the text of the chat template file ``path``; raise a DataError if it cannot be read.

    ``flag`` is the flag that gave the path, for the error.
    """
    try:
        return read_text(path)
    except UnreadableFile as error:
        raise DataError.about(
            f"`{flag}`",
            path,
            f"cannot be read ({error.reason})",
            "give a file with a Jinja template",
        ) from None


def load_chat_tokenizer(
    tokenizer: Tokenizer,
    settings: TokenizerConfig,
    template: str | None,
    *,
    flag: str = "--sft",
    template_flag: str | None = "--sft-chat-template",
) -> Any:
    """Return a transformers tokenizer with a chat template and with the same ids as ``tokenizer``.

    Args:
        settings: the flags from which ``tokenizer`` was built.
        template: a Jinja file that replaces the tokenizer's own template; None keeps its own.
        flag: the flag for which a chat template is needed; errors name it.
        template_flag: the flag with which the user can give a template file; errors name it. None
            if there is no such flag.

    Raises:
        ConfigError: there is no chat template.
        DataError: a file cannot be read, or transformers gives another number of token ids.
    """
    if tokenizer.kind != "HuggingFaceTokenizer" or settings.tokenizer_model is None:
        raise ConfigError.about(
            "--tokenizer-type",
            tokenizer.kind,
            f"has no chat template, which `{flag}` needs",
            "use HuggingFaceTokenizer",
        )
    folder = tokenizer_folder(settings.tokenizer_model)
    loaded = load_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    special = list(settings.tokenizer_special_tokens or ())
    if special:
        loaded.add_special_tokens({"additional_special_tokens": special})
    if len(loaded) != tokenizer.vocab_size:
        raise DataError.about(
            "--tokenizer-model",
            folder,
            f"has {tokenizer.vocab_size} ids in tokenizer.json, but {len(loaded)} as "
            "transformers loads it",
            "save it again with save_pretrained",
        )
    if template is not None:
        loaded.chat_template = read_template(template_flag, template)
    if not loaded.chat_template:
        how = f"give one with `{template_flag}`" if template_flag else f"leave out `{flag}`"
        raise ConfigError.about(
            "--tokenizer-model",
            folder,
            "has no chat template, so conversations cannot be tokenized",
            how,
        )
    return loaded


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=64)
def reads_variable(source: str, name: str) -> bool:
    """Tell whether the template ``source`` reads the variable ``name``.

    Return True if the template cannot be parsed.
    """
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
        return name in meta.find_undeclared_variables(tree)
    except TemplateError:
        return True


def key_of(*values: Any) -> str:
    """Return a digest of JSON values, 20 hexadecimal digits long, for use in a file name."""
    return _digest(values)[:20]


FindEnd = Callable[[int, bool], int | None]
"""A function ``(n, prompt)`` that returns where a conversation's first n messages end in its text.

The end is an index of a character; if ``prompt`` is True, it is the end of the generation prompt
after these messages. It is None if the text of these messages alone does not begin the whole text.
"""

_MARK = "\ue000message\ue001"
_FOR = r"\{%[-+]?\s*for\s+\w+\s+in\s+(?:NAMES)\s*([-+]?%\})"
# Attributes of `loop` that depend only on this message and the ones before it.
_BACKWARD_ATTRIBUTES = ("first", "index", "index0", "previtem", "cycle", "changed")


def end_finder(template: Template, count: int, whole: str) -> FindEnd:
    """Return a function that finds where the first n messages end in the text ``whole``.

    ``whole`` is the text of all ``count`` messages. If `marked_source` can make the template write
    a mark before each message, all ends are found now, from one text with marks. Otherwise the
    returned function applies the template each time it is called.
    """

    def templated(messages: int, prompt: bool) -> int | None:
        text = template.text(messages, prompt=prompt)
        return len(text) if whole.startswith(text) else None

    ends = _marked_ends(template, count, whole)
    if ends is None:
        return templated
    first = whole[: ends[1]]
    tails = [template.text(1, prompt=prompt) for prompt in (False, True)]
    if not all(text.startswith(first) for text in tails):
        return templated
    # The text that the template adds after the last message, without and with generation prompt.
    closings = [text[len(first) :] for text in tails]

    def marked(messages: int, prompt: bool) -> int | None:
        end = ends[messages]
        closing = closings[prompt]
        return end + len(closing) if whole.startswith(closing, end) else None

    return marked


def _marked_ends(template: Template, count: int, whole: str) -> dict[int, int] | None:
    """Return {n: index in the text ``whole`` at which the first n messages end}, for n < ``count``.

    The template is applied to the conversation once more, with a mark before each message. Return
    None if the template's source has no place for marks, if they change the text, or if ``count``
    is below 2.

    Args:
        template: a template with its conversation.
        count: number of messages of the conversation.
        whole: the text of the conversation without marks.
    """
    source = marked_source(template.source())
    if source is None or count < 2:
        return None
    texts = template.text(count, chat_template=source).split(_MARK)
    before_loop = count - (len(texts) - 1)
    if before_loop not in (0, 1) or "".join(texts) != whole:
        return None
    ends = {}
    end = 0
    for messages, text in enumerate(texts[:-1], before_loop):
        end += len(text)
        ends[messages] = end
    return ends


@lru_cache(maxsize=8)
def marked_source(source: str) -> str | None:
    """Return a template's ``source`` changed to write a mark, `_MARK`, before each message.

    Return None if the text of a message may depend on later messages, so that marks would not help.
    """
    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:
        return None
    # Templates also loop over a copy of `messages`, or over `messages[1:]` after a system message.
    names = {"messages"}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _aliased(node, names) is not None:
            names.add(node.target.name)
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _over(node, names)]
    if len(loops) != 1 or next(tree.find_all((nodes.Break, nodes.Continue)), None) is not None:
        return None
    (loop,) = loops
    tail = tree.body[tree.body.index(loop) + 1 :]
    if _looks_ahead(tree, loop, names) or not _is_constant(tail, tree):
        return None
    pattern = re.compile(_FOR.replace("NAMES", "|".join(sorted(names))))
    if len(pattern.findall(source)) != 1:
        return None
    # The added tag ends as the loop's tag does (`%}` or `-%}`), to strip the same white space.
    mark = f'{{{{ "{_MARK}" }}}}{{% set _ = 0 '
    return pattern.sub(lambda match: match[0] + mark + match[1], source)


def _over(loop: nodes.For, names: set[str]) -> bool:
    plain = not (loop.test or loop.else_ or loop.recursive)
    return plain and isinstance(loop.iter, nodes.Name) and loop.iter.name in names


def _aliased(node: nodes.Assign, names: set[str]) -> nodes.Name | None:
    """Return the variable whose value an assignment copies, if it is one of ``names``.

    A copy without the first item, as in `messages[1:]`, counts too. Return None for any other
    assignment.
    """
    value = node.node
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        part = value.arg
        if part.stop or part.step or not isinstance(part.start, nodes.Const):
            return None
        value = value.node if part.start.value == 1 else value
    return value if isinstance(value, nodes.Name) and value.name in names else None


def _looks_ahead(tree: nodes.Template, loop: nodes.For, names: set[str]) -> bool:
    """Tell whether an iteration of ``loop``, the loop over messages, may read a later message.

    It may do so through one of the variables ``names``, which hold the messages, or through Jinja's
    variable `loop`.
    """
    allowed = [loop.iter]
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and item.arg.value == 0:
            allowed.append(item.node)
    for assign in tree.find_all(nodes.Assign):
        if (alias := _aliased(assign, names)) is not None:
            allowed.append(alias)
        elif isinstance(assign.target, nodes.Name) and assign.target.name in names:
            return True
    loads = [name for name in tree.find_all(nodes.Name) if name.ctx == "load"]
    others = [name for name in loads if name.name in names and not any(name is k for k in allowed)]
    return bool(others) or any(map(_reads_ahead_by_loop, loop.body))


def _reads_ahead_by_loop(node: nodes.Node) -> bool:
    """Tell whether a node may read later items through Jinja's `loop`, as in `loop.nextitem`.

    The bodies of inner loops are skipped, since `loop` is the inner loop there.
    """
    if isinstance(node, nodes.Getattr) and _is_loop(node.node):
        return node.attr not in _BACKWARD_ATTRIBUTES
    inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
    return _is_loop(node) or any(map(_reads_ahead_by_loop, inner))


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _is_constant(tail: list[nodes.Node], tree: nodes.Template) -> bool:
    """Tell whether what a template writes after its last message is the same in all conversations.

    ``tail`` holds the nodes after the loop over messages. They write the same text if they call
    nothing and read no variable that the template sets.
    """
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    output = nodes.Output(tail)
    names = {name.name for name in output.find_all(nodes.Name)}
    return not (names & stored) and next(output.find_all(nodes.Call), None) is None
