"""Flags that name Hugging Face folders, which `text.convert.training` reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.flags import COUNT, Changeable, derived, flag

if TYPE_CHECKING:
    from megatron_ext.text.convert.config import HuggingFaceModel


@dataclass(frozen=True)
class HuggingFaceConfig(Changeable):
    """The flags for starting a run from a Hugging Face folder, and writing such folders."""

    load_hf: str | None = flag(
        None,
        "folder of a Hugging Face model that gives the flags of the model, the tokenizer and, "
        "where no checkpoint is loaded, the initial weights",
        from_checkpoint=False,
    )
    resize_vocabulary: str | None = flag(
        None,
        "let the vocabulary of --load-hf grow to the tokenizer's; new rows are the mean of the old "
        "ones, with a little noise of their covariance as transformers draws them, or normal, by "
        "the folder's initializer_range",
        choices="mean noise normal",
        from_checkpoint=False,
    )
    save_hf: str | None = flag(
        None,
        "folder for Hugging Face models of this run, one in iter_<step> at the end",
        from_checkpoint=False,
    )
    save_hf_interval: int | None = flag(
        None,
        "write to --save-hf after each multiple of this many steps too",
        COUNT,
        "steps",
        from_checkpoint=False,
    )
    save_hf_quantization: str | None = flag(
        None,
        "number format of the linear layers in --save-hf, in the form that transformers and vLLM "
        "load: fp8 has a scale for each block, mxfp4 is for gpt-oss (plain values)",
        choices="fp8 mxfp4",
        from_checkpoint=False,
    )
    save_hf_shard_size: str | None = flag(
        None,
        "largest size of a file of weights in --save-hf, such as 5GB (5GB)",
        from_checkpoint=False,
    )
    adapter_path: str | None = flag(
        None,
        "folder of LoRA adapters of peft to go on from, which gives --lora-rank and the other "
        "flags of adapters",
        from_checkpoint=False,
    )
    origin: dict[str, Any] | None = derived()
    """The content of the config.json of the Hugging Face model from which the weights come.

    It describes the model with indexers if the run adds these (`convert.sparse_start`). None if the
    weights come from no such model. Its vocabulary is that of the run.
    """
    grown_vocabulary: int | None = derived()
    """Number of entries to which the vocabulary of ``load_hf`` has grown; None if it has not."""

    def model(self) -> HuggingFaceModel | None:
        """Return the parsed config.json of the Hugging Face model that gave the weights, if any."""
        if self.load_hf is not None:
            from megatron_ext.text.convert.config import parse_model, read_model

            model = read_model(Path(self.load_hf))
            if self.origin is not None and self.origin["model_type"] != model.raw["model_type"]:
                # The run adds indexers to the model.
                model = parse_model(self.origin, model.path)
            grown = self.grown_vocabulary
            return model if grown is None else model.with_vocabulary(grown)
        if self.origin is not None:
            from megatron_ext.text.convert.config import parse_model

            return parse_model(self.origin, Path("config.json"))
        return None
