"""Flags of tools/generate_text.py: each reaches the sampling, or is told to have no effect."""

import pytest

from megatron_ext.text.generation.config import GenerationConfig
from megatron_ext.text.generation.sampling import Sampling


def test_every_flag_of_the_choice_reaches_the_requests() -> None:
    flags = GenerationConfig(
        prompt=["a"],
        max_new_tokens=7,
        do_sample=True,
        temperature=0.6,
        top_k=5,
        top_p=0.4,
        repetition_penalty=1.7,
        stop_strings=["x", "y"],
    )
    assert flags.own_errors() == []
    assert flags.sampling(99) == Sampling(
        max_new_tokens=7,
        do_sample=True,
        temperature=0.6,
        top_k=5,
        top_p=0.4,
        repetition_penalty=1.7,
        stop_strings=("x", "y"),
        seed=99,
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"temperature": 0.5}, "`--temperature` (0.5) has an effect only with `--do-sample`"),
        ({"top_k": 3}, "`--top-k` (3) has an effect only with `--do-sample`"),
        ({"top_p": 0.5}, "`--top-p` (0.5) has an effect only with `--do-sample`"),
        ({"chat_template": "x"}, "`--chat-template` (x) has an effect only with `--chat`"),
        ({"chat_date": "2024-07-26"}, "`--chat-date` (2024-07-26) has an effect only with `--ch"),
        ({"chat": True, "chat_date": "26.7."}, "`--chat-date` (26.7.) must be a day as YYYY-MM-D"),
        ({"prompt_file": "f"}, "`--prompt` and `--prompt-file` exclude each other"),
        ({"stop_strings": ["a", ""]}, "`--stop-strings` must hold no empty text"),
    ],
)
def test_a_flag_without_effect_is_told(flags: dict[str, object], sentence: str) -> None:
    (error,) = GenerationConfig(prompt=["a"], **flags).own_errors()  # type: ignore[arg-type]
    assert sentence in str(error)
