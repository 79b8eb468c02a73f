"""Step counts and zero state of the optimizers of torch, so that both exist before an update."""

from __future__ import annotations

from typing import Any

import torch

ADAMS = (torch.optim.Adam, torch.optim.AdamW)
"""torch's classes of Adam; before torch 2.7 neither is a subclass of the other."""


class Counted(torch.optim.Optimizer):
    """A base class that puts the step count of each group into the state dict, as apex's Adam does.

    The state of each parameter has its step count, a tensor ``[]``, under the key "step".
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with the step count in each group that has been updated."""
        state = super().state_dict()
        for group in state["param_groups"]:
            counts = [state["state"][i]["step"] for i in group["params"] if i in state["state"]]
            if counts:
                group["step"] = int(counts[0])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; copy each group's step count to all parameters of the group."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            count = group.pop("step", None)
            for parameter in group["params"] if count is not None else ():
                place = parameter.device if group.get("fused") else "cpu"
                self.state[parameter]["step"] = torch.tensor(float(count), device=place)


class Custom(Counted):
    """The base class of optimizers of the user's own, which only themselves know their state."""

    def start_state(self) -> None:
        """Create the state of each parameter before its first update."""
        raise NotImplementedError


def start_state(inner: torch.optim.Optimizer, _core_config: Any = None) -> None:
    """Create the state of an optimizer before its first update: zeros, for torch's Adam or SGD.

    Existing state is kept. In a `muon.Muon`, which is a subclass of AdamW, weights that Muon
    updates get no second moment. The state of a tensor in ``inner.on_host`` lies on the host.
    megatron-core passes ``_core_config``, which is ignored.
    """
    if isinstance(inner, Custom):
        inner.start_state()
        return
    exp_avg, exp_avg_sq = getattr(inner, "moments", (None, None))
    on_host = getattr(inner, "on_host", ())
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            device = torch.device("cpu") if parameter in on_host else parameter.device
            if isinstance(inner, ADAMS):
                if "exp_avg" in state:
                    continue
                if "step" not in state:  # A loaded group may already count its steps.
                    place = device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), dtype=torch.float32, device=place)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=exp_avg, device=device)
                if parameter not in getattr(inner, "matrices", ()):
                    state["exp_avg_sq"] = torch.zeros_like(
                        parameter, dtype=exp_avg_sq, device=device
                    )
            elif group["momentum"] and not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, device=device)
