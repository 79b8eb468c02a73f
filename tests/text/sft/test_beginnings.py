"""The ends of messages that one marked templating finds are those of templating each beginning."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_ext.text.sft import beginnings
from megatron_ext.text.sft.beginnings import find_beginnings, marked_source
from megatron_ext.text.sft.chat import Template
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import tokenize_conversation
from tests.text.sft import tiny

FAMILIES = sorted(path.stem for path in tiny.TEMPLATES.glob("*.jinja"))
MARKED = ("chatml", "deepseek", "gemma", "llama2", "llama3", "mistral", "phi3")


def talk(turns: int, *, system: bool = False) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": f"  word {i}\n{{{{ x }}}} "} for i in range(turns)]
    return [{"role": "system", "content": "Be kind."}] * system + said


def template_of(messages: list[dict[str, Any]], family: str, source: str | None = None) -> Template:
    conversation = read_conversation({"messages": messages}, Place("chats.jsonl", 1))
    tokenizer = tiny.tokenizer(family, template=source)
    return Template(tokenizer, conversation, {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
def test_each_beginning_is_where_templating_it_alone_ends(family: str, system: bool) -> None:
    messages = talk(6, system=system and family != "gemma")
    template = template_of(messages, family)
    whole = template.text(len(messages))
    beginning = find_beginnings(template, len(messages), whole)
    assert (marked_source(template.source()) is not None) == (family in MARKED)
    for turn in range(1 + system, len(messages)):
        for prompt in (False, True):
            text = template.text(turn, prompt=prompt)
            expected = len(text) if whole.startswith(text) else None
            assert beginning(turn, prompt) == expected, (turn, prompt)


@pytest.mark.parametrize(
    "body",
    [
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.nextitem.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages|length }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ messages[-1].role }}{% endfor %}",
        "{% set all = messages %}{% for m in messages %}{{ m.content }}{{ all[-1] }}{% endfor %}",
        "{% set n = messages|length %}{% for m in messages %}{{ m.content }}{{ n }}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{% for m in messages if m.role %}{{ m.content }}{% endfor %}",
        "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}"
        "{{ m.content }}{% endfor %}{{ s.n }}",
        "{% for m in messages %}{% set l = loop %}{{ m.content }}{{ l.last }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{% endfor %}",
        "{% for m in messages|reverse %}{{ m.content }}{% endfor %}",
        "{% for m in messages[2:] %}{{ m.content }}{% endfor %}",
        "{% if 1 %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
    ],
)
def test_a_template_that_may_look_ahead_is_not_marked(body: str) -> None:
    assert marked_source(body) is None


def test_white_space_control_after_the_loop_is_kept() -> None:
    messages = talk(4)
    for close in ("%}", "-%}", "+%}"):
        source = f"a\n  {{% for m in messages {close}\n  [{{{{ m.content }}}}]\n{{% endfor %}}"
        template = template_of(messages, "chatml", source)
        whole = template.text(4)
        beginning = find_beginnings(template, 4, whole)
        assert [beginning(n, False) for n in (1, 2, 3)] == [
            len(template.text(n)) for n in (1, 2, 3)
        ]


def test_a_long_conversation_is_templated_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The square of 2,000 turns took most of a minute."""
    tokenizer = tiny.tokenizer("chatml")
    conversation = read_conversation({"messages": talk(2000)}, Place("chats.jsonl", 1))
    real, templated = Template._apply, []

    def count(self: Template, messages: int, **kwargs: Any) -> Any:
        templated.append(messages)
        return real(self, messages, **kwargs)

    monkeypatch.setattr(Template, "_apply", count)
    tokenize_conversation(tokenizer, conversation)
    assert sorted(templated) == [1, 1, 2000, 2000]


def test_marks_give_the_mask_of_templating_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(3)
    for family in MARKED:
        tokenizer = tiny.tokenizer(family, merges=((".", "<"), ("d", "Ġ")))
        messages = talk(random.randint(2, 9))
        for message in messages[1::2]:
            message["loss_mask"] = random.randint(0, 1)
        conversation = read_conversation({"messages": messages}, Place("chats.jsonl", 1))
        found = tokenize_conversation(tokenizer, conversation)
        with monkeypatch.context() as patch:
            patch.setattr(beginnings, "marked_source", lambda source: None)
            assert tokenize_conversation(tokenizer, conversation) == found
