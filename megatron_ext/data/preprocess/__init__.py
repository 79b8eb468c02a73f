"""jsonl in, indexed datasets out: the work behind tools/preprocess_data.py.

```
inputs ─ cut into parts ─▶ worker processes ─▶ part files ─ joined by the kernel ─▶ .bin/.idx
(globs, gz, zst, stdin)    one part at a time    kept over kills                    renamed last
```

Nothing here imports torch.
"""

from megatron_ext.data.preprocess.options import PreprocessOptions, TokenizerFlags
from megatron_ext.data.preprocess.run import Report, preprocess

__all__ = ["PreprocessOptions", "Report", "TokenizerFlags", "preprocess"]
