r"""Write texts with a checkpoint of pretrain_gpt.py or a Hugging Face model, in any layout.

    python tools/generate_text.py --load RUN --prompt "The river" "In winter" --max-new-tokens 40
    python tools/generate_text.py --load RUN --nproc-per-node 4 --tensor-model-parallel-size 2 \
        --prompt-file prompts.jsonl --output-file texts.jsonl --do-sample --temperature 0.8
    python tools/generate_text.py --load RUN --interactive --chat

With ``--load``, model, tokenizer and precision are those of the checkpoint; ``--load-hf`` names a
folder of a Hugging Face model. All other flags are those of pretrain_gpt.py;
``--help generation`` lists those of this tool alone.
The same seed gives the same texts in every layout, in fp32. Multi-token prediction is not used.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.config.sections import help_question
from megatron_ext.text.generation.tool import generate_text


def main(argv: Sequence[str]) -> int:
    """Complete the prompts of the flags; return the exit code."""
    if help_question(argv) in ("", "all"):
        print(__doc__)
    return generate_text(argv)
