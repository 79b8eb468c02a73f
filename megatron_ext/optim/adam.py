"""Creates the zero state of torch's Adam and SGD, so that it exists before their first update."""

from __future__ import annotations

from typing import Any

import torch

ADAMS = (torch.optim.Adam, torch.optim.AdamW)
"""torch's classes of Adam; before torch 2.7 neither is a subclass of the other."""


def start_state(inner: torch.optim.Optimizer, _core_config: Any = None) -> None:
    """Create the all-zero state of torch's Adam or SGD before its first update.

    Existing state is kept. In a `muon.Muon`, which is a subclass of AdamW, weights that Muon
    updates get no second moment. megatron-core passes ``_core_config``, which is ignored.
    """
    exp_avg, exp_avg_sq = getattr(inner, "moments", (None, None))
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            if isinstance(inner, ADAMS):
                if "exp_avg" in state:
                    continue
                if "step" not in state:  # A loaded group may already count its steps.
                    place = parameter.device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), dtype=torch.float32, device=place)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=exp_avg)
                if parameter not in getattr(inner, "matrices", ()):
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=exp_avg_sq)
            elif group["momentum"] and not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
