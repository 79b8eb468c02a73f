"""Writes the tables of families: ``python -m tests.text.convert.families_table``.

They stand in docs/huggingface.md, and a test compares the page with what this module makes.
"""

from pathlib import Path

from megatron_ext.text.convert.families import FAMILIES, LACKING, MULTIMODAL
from megatron_ext.text.convert.family import Family

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"
START = "<!-- families: python -m tests.text.convert.families_table -->\n"
END = "<!-- end of families -->\n"


def limits_of(family: Family) -> list[str]:
    """Return what a family refuses, without what its nearest refuses too."""
    own = [f"`{key}` other than {_said(value)}" for key, value in family.only.items()]
    own += [text for entry in family.entries for text in entry.limits()]
    nearest = FAMILIES.get(family.nearest or "")
    if nearest is None or nearest is family:
        return own
    return [text for text in own if text not in _all_limits(nearest)]


def _all_limits(family: Family) -> list[str]:
    own = [f"`{key}` other than {_said(value)}" for key, value in family.only.items()]
    return own + [text for entry in family.entries for text in entry.limits()]


def _said(value: object) -> str:
    return (
        "none" if value is None else f"{value}".lower() if isinstance(value, bool) else f"{value}"
    )


def table() -> str:
    """Return the tables of families, of multimodal models, and of what is refused by name."""
    lines = ["| `model_type` | like | what it has | refused |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        nearest = "" if family.nearest in (None, name) else f"`{family.nearest}`"
        lines.append(f"| `{name}` | {nearest} | {family.says} | {'; '.join(limits_of(family))} |")
    lines += ["", "Of multimodal folders the text part is trained; all else is kept as it is:", ""]
    lines += ["| `model_type` | its text part |", "|---|---|"]
    for name, kind in MULTIMODAL.items():
        lines.append(f"| `{name}` | {', '.join(f'`{x}`' for x in kind.texts)} |")
    lines += ["", "Refused, for a part that no layer here has:", "", "| `model_type` | part |"]
    lines += ["|---|---|", *(f"| `{name}` | {part} |" for name, part in LACKING.items())]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table of families as they are now."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
