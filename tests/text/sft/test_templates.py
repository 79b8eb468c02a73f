"""Chat templates of strangers: endless work ends in a sentence, and honest ones change nothing."""

import resource
import time
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.text.sft import templates
from megatron_ext.text.sft.templates import TooCostly, apply_template
from tests.text.sft.tiny import tokenizer

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
_LOOP = "{% for _ in range(99999) %}"
COSTLY = {
    "nested loops": (_LOOP * 2 + "{% endfor %}" * 2, "turns of its loops"),
    "loops in a block": (
        "{% block a %}" + "{% for _ in range(300) %}" * 2 + "{% endfor %}" * 2 + "{% endblock %}",
        "turns of its loops",
    ),
    "a loop that calls itself": (
        "{% for x in [range(9)] recursive %}{{ loop(range(9)|map('list')) if 0 else '' }}"
        + _LOOP * 2
        + "{% endfor %}" * 3,
        "turns of its loops",
    ),
    "a macro that loops": (
        "{% macro m() %}" + _LOOP + "{% endfor %}{% endmacro %}" + _LOOP + "{{ m() }}{% endfor %}",
        "turns of its loops",
    ),
    "a text that doubles": (
        "{% set n = namespace(s='a') %}{% for _ in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "characters or items in one value",
    ),
    "a text that is joined with itself": (
        "{% set n = namespace(s='a') %}{% for _ in range(99) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "characters or items in one value",
    ),
    "a list that doubles": (
        "{% set n = namespace(s=[0]) %}{% for _ in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "MiB of memory",
    ),
    "a text that a filter doubles": (
        "{% set n = namespace(s='a') %}{% for _ in range(99) %}{% set n.s = [n.s, n.s]|join %}"
        "{% endfor %}",
        "MiB of memory",
    ),
    "a wide text": ("{{ messages[0].content.center(10 ** 10) }}", "MiB of memory"),
    "a wide constant": ("{{ 'a'.center(10000000000) }}", "MiB of memory"),
    "a wide format": ("{{ '%9999999999d'|format(messages|length) }}", "MiB of memory"),
    "many times a text": ("{{ messages[0].content * 10 ** 9 }}", "characters or items"),
    "a power of constants": ("{{ 9 ** 9 ** 9 ** 9 }}", "bits in one number"),
    "a power": ("{{ (messages|length) ** 99999999999 }}", "bits in one number"),
    "squares": (
        "{% set n = namespace(s=3) %}{% for _ in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "bits in one number",
    ),
    "a long output": (
        "{% for _ in range(9999) %}{{ 'a' * 100000 }}{% endfor %}",
        "characters or items in one value",
    ),
    "a long source": ("a" * (1 << 19), "262,144 characters"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 20_000)
    monkeypatch.setattr(templates, "MAX_MEMORY", 1 << 27)
    source, bound = COSTLY[name]
    before = resource.getrlimit(resource.RLIMIT_AS)
    started = time.process_time()
    chat, told = tokenizer("chatml", template=source), f"^The chat template of .* takes .*{bound}"
    with pytest.raises(TooCostly, match=told) as error:
        apply_template(chat, MESSAGES, tokenize=False)
    assert len(error.value.messages) == 1
    assert time.process_time() - started < 60
    assert resource.getrlimit(resource.RLIMIT_AS) == before


STRAIGHT = "{% set x = 'ab' * 5000000 %}" + "{% set y = x|replace('a', 'b') %}" * 500


def test_a_template_without_loops_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 1.0)
    chat = tokenizer("chatml", template=STRAIGHT)
    with pytest.raises(TooCostly, match="1 seconds of computing"):
        apply_template(chat, MESSAGES, tokenize=False)


HONEST = {
    "arithmetic": "{{ messages|length * 2 + 1 }} {{ 2 ** 10 }} {{ 2.5 * 2 }} {{ [1] + [2] }}"
    "{{ 3 * 'a' }}",
    "joins": "{{ messages[0].role ~ 1 ~ none ~ undefined_name ~ [2] }}",
    "loops": (
        "{% for m in messages if m.role != 'x' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.previtem.role if loop.previtem is defined }}{% if loop.first %}{% continue %}"
        "{% endif %}{{ m.content }}{% else %}none{% endfor %}"
    ),
    "recursive": "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}"
    "{{ loop.depth }},{% endfor %}",
    "macros": "{% macro m(x, y=2) %}\n  {{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{% call m(3) %}\n inner {% endcall %}",
    "white space": "  {% for m in messages %}\n  {{- m.content }}\n  {% endfor %}\n end",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "scopes": "{% set x = 1 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "error": "{{ raise_exception('no ' ~ messages|length) }}",
    "undefined": "{% for m in nothing.at.all %}{% endfor %}",
    "numbers": "{{ 1 + 'a' }}",
    "filters": "{% filter upper %}a{{ messages|map(attribute='role')|join(',') }}{% endfilter %}"
    "{{ 'a b'.split()|last }}{{ range(3)|list|tojson }}",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_template_gives_what_transformers_gives(name: str) -> None:
    from transformers.utils import chat_template_utils

    chat = tokenizer("chatml", template=HONEST[name])

    def result(apply: Any) -> Any:
        chat_template_utils._compile_jinja_template.cache_clear()
        try:
            return apply()
        except Exception as error:
            return type(error), str(error)

    expected = result(lambda: chat.apply_chat_template(MESSAGES, tokenize=False))
    assert result(lambda: apply_template(chat, MESSAGES, tokenize=False)) == expected


def test_the_bounds_hold_again_for_each_rendering_and_after_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 1000)
    from transformers.utils import chat_template_utils

    chat = tokenizer("chatml", template="{% for _ in range(999) %}{% endfor %}a")
    for _ in range(6):
        assert apply_template(chat, MESSAGES, tokenize=False) == "a"
    nested = tokenizer("chatml", template=_LOOP * 2 + "{% endfor %}" * 2)
    for _ in range(2):
        with pytest.raises(TooCostly):
            apply_template(nested, MESSAGES, tokenize=False)
        # transformers keeps a limited number of compiled templates.
        chat_template_utils._compile_jinja_template.cache_clear()


def test_a_pattern_that_does_not_end_is_a_sentence() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from megatron_ext.text.tokenizers.huggingface import HuggingFaceTokenizer

    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(words)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"^(a+)+$"), "isolated")
    backend.pre_tokenizer = split
    made = HuggingFaceTokenizer("HuggingFaceTokenizer", "folder", backend, {})
    for encode in (made.tokenize, lambda text: made.encode_batch([text])):
        with pytest.raises(DataError, match=r"`--tokenizer-model` \(folder\) has a pattern or"):
            encode("a" * 60 + "b")


def test_a_limit_of_memory_that_is_lower_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    own = (1 << 60, resource.RLIM_INFINITY)
    for limit in (own, (1 << 20, 1 << 21), (resource.RLIM_INFINITY, 1 << 62)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: limit)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
        with templates._limited_memory():
            pass
    assert given[1] == own and given[2:4] == [(1 << 20, 1 << 21)] * 2
    mapped = given[0][0] - templates.MAX_MEMORY
    assert 0 < mapped < 1 << 50 and abs(given[4][0] - given[0][0]) < 1 << 30
    assert given[5] == (resource.RLIM_INFINITY, 1 << 62)


def test_a_template_may_have_the_greatest_length_and_no_random_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "MAX_SOURCE", 40)
    longest = tokenizer("chatml", template="a" * 40)
    assert apply_template(longest, MESSAGES, tokenize=False) == "a" * 40
    longer = tokenizer("chatml", template="a" * 41)
    with pytest.raises(TooCostly, match="takes more than 40 characters"):
        apply_template(longer, MESSAGES, tokenize=False)
    random = tokenizer("chatml", template="{{ lipsum(n=1) }}")
    with pytest.raises(Exception, match="'lipsum' is undefined"):
        apply_template(random, MESSAGES, tokenize=False)
