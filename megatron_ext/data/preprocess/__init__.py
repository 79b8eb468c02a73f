"""jsonl in, indexed datasets out: the work behind tools/preprocess_data.py.

```
inputs ─ cut into parts ─▶ worker processes ─▶ part files ─ joined by the kernel ─▶ .bin/.idx
(globs, gz, zst, stdin)    one part at a time    kept over kills                    renamed last
```

Nothing here imports torch.
"""

from megatron_ext.data.preprocess.options import PreprocessOptions
from megatron_ext.data.preprocess.run import Report, preprocess
from megatron_ext.data.preprocess.tokenizer_flags import TokenizerFlags

__all__ = ["PreprocessOptions", "Report", "TokenizerFlags", "preprocess"]
