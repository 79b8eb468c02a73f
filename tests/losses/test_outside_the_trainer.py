"""The example of docs/losses.md: loss and calibration without a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses.md"


def documented_step() -> Any:
    """Return the function of the page, as a reader would copy it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["step"]


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("bias", [False, True])
def test_micro_batches_of_the_page_give_the_gradient_of_one_batch(
    reduction: str, bias: bool
) -> None:
    """Truth is torch's cross-entropy over whole logits of all rows at once, in float64."""
    generator = torch.Generator().manual_seed(1)
    b, s, h, v, ignored = 4, 6, 8, 12, 3
    tokens = torch.randint(0, v, (b, s), generator=generator)
    labels = torch.randint(0, v, (b, s), generator=generator)
    labels[0, :4] = ignored
    torch.manual_seed(2)
    backbone, head = torch.nn.Embedding(v, h), torch.nn.Linear(h, v, bias=bias)
    parts = [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])]
    loss = documented_step()(backbone, head, parts, reduction, ignored)
    found = [p.grad.clone() for p in (*backbone.parameters(), *head.parameters())]

    backbone, head = backbone.double(), head.double()
    backbone.zero_grad()
    head.zero_grad()
    each = F.cross_entropy(
        head(backbone(tokens)).transpose(1, 2), labels, reduction="none", ignore_index=ignored
    )
    counts = (labels != ignored).sum(1, keepdim=True)
    weights = (labels != ignored) / (counts if reduction == "sample" else 1)
    want = (each * weights).sum() / weights.sum()
    want.backward()
    assert loss == pytest.approx(float(want.detach()), rel=1e-6)
    for mine, parameter in zip(found, (*backbone.parameters(), *head.parameters()), strict=True):
        torch.testing.assert_close(mine.double(), parameter.grad, rtol=1e-5, atol=1e-7)
