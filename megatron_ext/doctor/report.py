"""An examination in words."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.doctor.findings import Examination, Finding, Gpu

WORDS = {
    "found": "ok",
    "missing": "absent",
    "low": "LOW",
    "broken": "BROKEN",
    "unknown": "unknown",
    "not needed": "not needed",
}


def report(examination: Examination) -> list[str]:
    """The lines that a person reads."""
    width = max(len(finding.name) for finding in examination.findings)
    lines = [line for f in examination.findings for line in _finding(f, width)]
    for gpu in examination.gpus:
        lines += ["", *_gpu(gpu)]
    if examination.unknown:
        lines += ["", "Torch can use no GPU here, so this cannot be known:"]
        lines += [f"  - {text}" for text in examination.unknown]
    lines += ["", _verdict(examination)]
    return lines


def _finding(finding: Finding, width: int) -> Iterator[str]:
    words = [WORDS[finding.status], finding.version or "", finding.detail]
    yield f"{finding.name:<{width}}  {' '.join(word for word in words if word)}"
    indent = " " * (width + 2)
    if finding.cost:
        yield f"{indent}what it costs: {finding.cost}"
    if finding.install:
        yield f"{indent}mend by: {finding.install}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    capability = ".".join(map(str, gpu.capability))
    yield (
        f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, "
        f"{gpu.memory / 2**30:.1f} GiB"
    )
    if not gpu.has_bf16:
        yield "  bf16: its matrix units do not take it; `--fp16` is what they take"
    yield _recipes(gpu)
    if gpu.rates is None:
        yield f"  rates: {gpu.note}"
        return
    yield f"  bf16 matrix product, measured: {gpu.rates.bf16 / 1e12:.0f} TFLOP/s"
    if gpu.rates.fp8 is not None:
        yield f"  fp8 matrix product, measured: {gpu.rates.fp8 / 1e12:.0f} TFLOP/s"
    yield f"  copy within its memory, read and written: {gpu.rates.copy / 1e12:.2f} TB/s"


def _recipes(gpu: Gpu) -> str:
    if not gpu.has_fp8:
        return "  fp8: its matrix units do not take it"
    shown = "; ".join(f"{impl}: {', '.join(names)}" for impl, names in gpu.fp8_recipes.items())
    return f"  fp8 recipes by --transformer-impl: {shown}"


def _verdict(examination: Examination) -> str:
    stopping = [finding.name for finding in examination.findings if finding.stops_runs]
    if stopping:
        return f"No run can start: mend {', '.join(stopping)} first."
    if examination.gpus:
        return f"Runs compute on {len(examination.gpus)} GPU(s)."
    return "Runs compute on the CPU, and their ranks talk over gloo."
