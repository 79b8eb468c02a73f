"""The forms in which LoRA adapters are written. Programs list them in their help, without torch.

A layer's weight changes by ``scale * B A``. The forms differ in the names of the matrices A and B,
in the text before the names of layers, and in how they tell the scale:

=========  ================================================  =====================================
form       names                                             scale
=========  ================================================  =====================================
peft       ``base_model.model.LAYER.lora_A.weight``          in adapter_config.json, beside it
peft-      the same, with a layer for each expert, as in     the same
experts    published files
diffusers  ``transformer.LAYER.lora_A.weight``               in the file's header
kohya      ``lora_unet_LAYER.lora_down.weight``, with ``_``  a tensor ``.alpha`` for each layer,
           for each dot of LAYER                             which is the scale times the rank
comfyui    ``diffusion_model.LAYER.lora_A.weight``           the same
original   ``LAYER.lora_A.weight``                           1: B is multiplied by it
=========  ================================================  =====================================
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = "adapter_model.safetensors"
"""The file of tensors in a folder of peft."""
PREFIX = "base_model.model"


@dataclass(frozen=True)
class AdapterForm:
    """One of the forms in which adapters are published.

    Attributes:
        name: its name, a value of ``--format``.
        before: text before the names of layers.
        matrices: the names of A and B.
        file: name of the file in the folder that is written; None for a single file.
        flat: whether layers have ``_`` in place of dots.
        alphas: whether each layer has a tensor ``alpha``.
        naming: names of forms of the weights, of which the first that a network has gives the names
            of layers; none stands for the network's first.
    """

    name: str
    before: str
    matrices: tuple[str, str] = ("lora_A", "lora_B")
    file: str | None = None
    flat: bool = False
    alphas: bool = False
    naming: tuple[str, ...] = ()


FORMS = {
    form.name: form
    for form in (
        AdapterForm("peft", f"{PREFIX}.", file=WEIGHTS),
        AdapterForm("peft-experts", f"{PREFIX}.", file=WEIGHTS),
        AdapterForm("diffusers", "transformer.", file="pytorch_lora_weights.safetensors"),
        AdapterForm(
            "kohya", "lora_unet_", ("lora_down", "lora_up"), flat=True, alphas=True,
            naming=("original",),
        ),
        AdapterForm("comfyui", "diffusion_model.", alphas=True, naming=("comfyui", "original")),
        AdapterForm("original", "", naming=("original",)),
    )
}  # fmt: skip
