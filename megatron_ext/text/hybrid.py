"""``--hybrid-layer-pattern``: a GPT described by a pattern of megatron-core's HybridModel.

A pattern has a letter for each layer: ``*`` attention, ``-`` an MLP, ``E`` experts; ``|`` ends a
pipeline stage, and each ``/`` begins a depth of multi-token prediction. In ``*-*E|*-*E/*E`` every
``*`` and the letter after it are one layer of a GPT, called a pair here. The pattern sets the flags
that would describe the same GPT, so that weights, checkpoints, dropout and costs are the GPT's.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_ext.config.flags import spelling_of
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.rules.parallel import STAGES
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.text.config.attention import LatentAttentionConfig
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.moe import MoEConfig

PAIRS = "*-", "*E"


def _has_hybrid_model() -> bool:
    # To ask for the module itself would import megatron-core, which takes seconds.
    spec = importlib.util.find_spec("megatron.core")
    places = None if spec is None else spec.submodule_search_locations
    return any(Path(place, "models", "hybrid").is_dir() for place in places or ())


HAS_HYBRID_MODEL = _has_hybrid_model()
"""Whether megatron-core has a HybridModel, of attention, MLP and other layers in any order."""

NO_PATH = {
    "M": "Mamba layers have kernels for GPUs only",
    "G": "gated-delta layers have kernels for GPUs only",
    "D": "sparse attention of DeepSeek has kernels for GPUs only",
    "+": "multi-latent attention is not among the layers of a pattern",
}
"""Letters of megatron-core's layers that are refused, each with the reason."""

_FLAG = "--hybrid-layer-pattern"
_CUTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
)
"""Fields that set a stage's number of layers; they cannot be given together with a pattern."""
_CUTS_WITHOUT_STAGES = (
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields that cut the model into stages; a pattern with ``|`` does so itself, and excludes them."""


@dataclass(frozen=True)
class Pattern:
    """The layers that ``--hybrid-layer-pattern`` names.

    Attributes:
        stages: for each pipeline stage, the pairs of letters, such as ``*-``, that stand for its
            layers. A pattern without ``|`` has one stage.
        depths: for each MTP depth, the pair of letters that stands for its layer.
    """

    stages: tuple[tuple[str, ...], ...]
    depths: tuple[str, ...]

    @property
    def pairs(self) -> list[str]:
        """Return the pairs of letters of all stages; each pair is one layer of the GPT."""
        return [pair for stage in self.stages for pair in stage]

    def layout(self) -> str | None:
        """Return the ``--pipeline-model-parallel-layout`` that cuts the GPT as the pattern does.

        Return None if the pattern has no ``|`` and so does not cut the GPT into pipeline stages.
        """
        if len(self.stages) == 1:
            return None
        stages = ["t" * len(stage) for stage in self.stages]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * len(self.depths) + "L"
        return "|".join(stages)

    def moe_layer_freq(self) -> str | None:
        """Return the value of ``--moe-layer-freq`` for the layers; None if all are of one kind."""
        experts = [int(pair == "*E") for pair in self.pairs]
        return None if len(set(experts)) < 2 else str(experts).replace(" ", "")


def read_pattern(text: str) -> Pattern:
    """Parse a pattern; return the layers that it names.

    If the pattern is wrong, raise a ValueError with two arguments: the broken rule, and a remedy.
    """
    main, *depths = text.split("/")
    letters = "".join(PAIRS) + "|"
    for letter in text.replace("/", ""):
        if letter in NO_PATH:
            raise ValueError(f"has {letter}, but {NO_PATH[letter]}", "use *, - and E")
        if letter not in letters:
            raise ValueError(f"has {letter}, which is no layer", "use *, -, E, | and /")
    stages = tuple(
        tuple(stage[at : at + 2] for at in range(0, len(stage), 2)) for stage in main.split("|")
    )
    if any(pair not in PAIRS for stage in stages for pair in stage) or not any(stages):
        raise ValueError(
            "must be pairs of *- or *E in each stage, which are the layers of a GPT", "write *-*-"
        )
    last = next(stage[-1] for stage in reversed(stages) if stage)
    if any(depth != last for depth in depths):
        raise ValueError(
            f"must have depths of multi-token prediction like its last layers ({last})",
            f"write /{last}",
        )
    return Pattern(stages, tuple(depths))


def resolve_hybrid(config: RunConfig) -> RunConfig:
    """Return the configuration with the flags that ``--hybrid-layer-pattern`` stands for."""
    text = config.section(HybridConfig).hybrid_layer_pattern
    assert text is not None
    model = config.model
    moe = config.section(MoEConfig)
    parallel = config.parallel
    try:
        pattern = read_pattern(text)
    except ValueError:
        # The rule is said once; without a number of layers, another would follow from it.
        model = dataclasses.replace(model, num_layers=model.num_layers or 1)
        return dataclasses.replace(config, model=model)
    stages = parallel.pipeline_model_parallel_size
    layout = pattern.layout()
    model = dataclasses.replace(model, num_layers=len(pattern.pairs))
    if pattern.depths:
        model = dataclasses.replace(model, mtp_num_layers=len(pattern.depths))
    if frequency := pattern.moe_layer_freq():
        moe = dataclasses.replace(moe, moe_layer_freq=frequency)
    if layout is not None and stages > 1 and len(pattern.stages) % stages == 0:
        parallel = dataclasses.replace(
            parallel,
            pipeline_model_parallel_layout=layout,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
    return dataclasses.replace(config, model=model, parallel=parallel).with_section(moe)


def hybrid_errors(given: RunConfig, run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault of the pattern, and each flag that contradicts the pattern."""
    text = given.section(HybridConfig).hybrid_layer_pattern
    assert text is not None
    refused = partial(FlagError, _FLAG, text)
    if not HAS_HYBRID_MODEL:
        installed = importlib.metadata.version("megatron-core")
        yield FlagError(
            _FLAG,
            None,
            "needs the HybridModel of newer releases of megatron-core, which the installed one "
            f"({installed}) lacks",
            "give the flags of a GPT instead, or use Python 3.12, for which pip installs a newer "
            "one",
        )
    try:
        pattern = read_pattern(text)
    except ValueError as error:
        yield refused(*error.args)
        return
    yield from _size_errors(refused, pattern, given)
    yield from _stage_errors(refused, pattern, given)
    if run.model.transformer_impl == TE_IMPL:
        yield FlagError(
            _FLAG,
            None,
            f"needs our own layers, which `--transformer-impl {TE_IMPL}` replaces",
            "use `--transformer-impl torch`",
        )
    if run.section(LatentAttentionConfig).multi_latent_attention:
        yield FlagError(
            _FLAG,
            None,
            "has layers of halves, which `--multi-latent-attention` is not among",
            "give `--num-layers` instead",
        )
    if run.cuda_graphs.cuda_graph_impl != "none":
        yield FlagError(
            _FLAG,
            None,
            f"has layers of halves, but `--cuda-graph-impl {run.cuda_graphs.cuda_graph_impl}` "
            "captures whole layers",
            "use none",
        )


Refused = Callable[[str, str], FlagError]
"""A function that makes an error about ``--hybrid-layer-pattern``.

Its arguments are words on what is wrong with the pattern, and on how to mend it."""


def _size_errors(refused: Refused, pattern: Pattern, given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each of the ``given`` flags that contradicts the layers of the pattern.

    ``refused`` makes an error from a broken rule and a remedy.
    """
    pairs = pattern.pairs
    model = given.model
    moe = given.section(MoEConfig)
    if model.num_layers not in (None, len(pairs), 2 * len(pairs)):
        yield refused(
            f"has {2 * len(pairs)} layers, or {len(pairs)} with attention and MLP as one, but "
            f"`--num-layers` is {model.num_layers}",
            "leave it out",
        )
    depths = len(pattern.depths)
    if (model.mtp_num_layers or 0) not in (0, depths):
        yield refused(
            f"has {depths} depth{'s' * (depths != 1)} of multi-token prediction, but "
            f"`--mtp-num-layers` is {model.mtp_num_layers}",
            f"write /{pairs[-1]} for each",
        )
    experts = "*E" in pairs
    if experts != (moe.num_experts is not None):
        yield refused(
            f"has {'' if experts else 'no '}layers of experts (E), and `--num-experts` is "
            f"{'missing' if experts else moe.num_experts}",
            "give both or neither",
        )
    if moe.moe_layer_freq not in ("1", pattern.moe_layer_freq() or "1"):
        yield refused(
            "says which layers hold experts, and so does `--moe-layer-freq` "
            f"({moe.moe_layer_freq})",
            "leave it out",
        )


def _stage_errors(refused: Refused, pattern: Pattern, given: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in how the pattern is cut into pipeline stages.

    ``refused`` makes an error from a broken rule and a remedy; ``given`` has the user's flags.
    """
    parallel = given.parallel
    count = len(pattern.stages)
    size = parallel.pipeline_model_parallel_size
    for field in _CUTS:
        if getattr(parallel, field) is not None:
            other = spelling_of(parallel, field)
            yield refused(f"is cut into stages by |, not by `{other}`", "leave it out")
    if count == 1:
        return
    for field in _CUTS_WITHOUT_STAGES:
        if getattr(parallel, field) not in (None, False, pattern.layout()):
            other = spelling_of(parallel, field)
            yield refused(
                f"is cut into stages by |, and also by `{other}`", "leave out one of them"
            )
    if size < 2:
        yield refused(
            f"has {count} stages, but `{STAGES}` is {size}", f"use {count}, or leave out |"
        )
    elif count % size:
        yield refused(
            f"has {count} stages, which must be a multiple of `{STAGES}` ({size})",
            f"write {-(-count // size) * size}",
        )
