"""Distillation of a GPT from a teacher (arXiv:1503.02531), in any layout.

With the teacher's distribution p and the student's q over the k token ids that have the teacher's
largest logits, both at temperature T and normalized over these ids, the loss of a token is

    l = alpha T^2 D + (1 - alpha) cross-entropy

    forward   D = KL(p || q) = sum p (log p - log q), which covers all of the teacher's modes
    reverse   D = KL(q || p) = sum q (log q - log p), which seeks one of them (arXiv:2306.08543)

The teacher is a Hugging Face folder of any size with the student's tokenizer, and has the layout of
the student. A step begins with the teacher's forward passes through the pipeline, which keep k
logits of each token. Then the student takes its step as in pretrain_gpt.py, whose flags all work,
--sft included.

    python examples/distillation/train.py --teacher-hf models/large --load-hf models/small ...
    SMOKE=1 bash examples/distillation/train.sh

Plans (--dry-run) count the student alone. Where the teacher's logits of all data fit on a disk,
examples/custom_loss/distillation.py reads them from there instead.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.config.flags import flag
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import build_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.losses.blockwise_loss import blockwise_loss
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, share_of_step
from megatron_ext.losses.custom import LossInputs, TokenLoss, TokenLossConfig
from megatron_ext.losses.linear_cross_entropy import hidden_states_loss
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.text.config.rules import SHAPE
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.convert.reading import load_folder
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.step import gpt_forward_step, output_head
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main
from megatron_ext.train.step import StepInputs, StepRunner

DIVERGENCES = ("forward", "reverse")


@dataclasses.dataclass(frozen=True)
class DistillationFlags:
    """The flags of this program."""

    teacher_hf: str | None = flag(None, "folder of the teacher, a Hugging Face model")
    teacher_top_k: int = flag(64, "token ids of the teacher that a token's loss compares")
    distill_temperature: float = flag(1.0, "temperature of both distributions")
    distill_alpha: float = flag(0.5, "share of the divergence in the loss; the rest is the data's")
    distill_divergence: str = flag("forward", "direction of the divergence", choices=DIVERGENCES)

    def errors(self, config: RunConfig) -> list[str]:
        """Return a sentence on each wrong value."""
        errors = []
        if self.teacher_hf is None:
            errors.append("`--teacher-hf` is missing; name the folder of the teacher.")
        if self.teacher_top_k < 1:
            errors.append(f"`--teacher-top-k` ({self.teacher_top_k}) must be at least 1; use 64.")
        if not self.distill_temperature > 0:
            errors.append(
                f"`--distill-temperature` ({self.distill_temperature}) must be above 0; use 1."
            )
        if not 0 <= self.distill_alpha <= 1:
            errors.append(f"`--distill-alpha` ({self.distill_alpha}) must be from 0 to 1; use 0.5.")
        if config.loss.cross_entropy_impl != "chunked" or config.loss.loss is not None:
            errors.append(
                "`--cross-entropy-impl` and `--loss` would replace the loss of this program; leave "
                "them out."
            )
        if (config.parallel.pipeline_schedule or "").startswith("core-"):
            errors.append(
                f"`--pipeline-schedule` ({config.parallel.pipeline_schedule}) runs one network; "
                "leave it out."
            )
        return errors


@dataclasses.dataclass(frozen=True)
class DivergenceConfig(TokenLossConfig):
    """The options of a `Divergence`."""

    temperature: float = 1.0
    alpha: float = 0.5
    divergence: str = "forward"


class Divergence(TokenLoss[DivergenceConfig]):
    """The divergence from the teacher on its k largest logits, mixed with cross-entropy."""

    name = "distillation loss"
    extra_names = ("divergence", "lm loss")

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses ``[C]`` and the two terms of them; see `TokenLoss.token_losses`."""
        options = self.config
        logits = head.logits(hidden)
        student = (head.at(logits, inputs["ids"]) / options.temperature).log_softmax(dim=1)
        teacher = (inputs["teacher"] / options.temperature).log_softmax(dim=1)
        if options.divergence == "reverse":
            divergence = (student.exp() * (student - teacher)).sum(dim=1)
        else:
            divergence = (teacher.exp() * (teacher - student)).sum(dim=1)
        cross_entropy = -head.log_prob(logits, inputs["labels"])
        mixed = options.alpha * options.temperature**2 * divergence
        mixed = mixed + (1 - options.alpha) * cross_entropy
        return mixed, {"divergence": divergence, "lm loss": cross_entropy}


def largest_logits(
    hidden: Tensor, model: torch.nn.Module, weights: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token and their token ids, ``[b, s, k]`` each.

    Args:
        hidden: the last hidden states ``[s, b, h]``, or ``[s/tp, b, h]`` with sequence parallelism.
        model: the last chunk, which has the head.
        weights: ``[b, s]``; only its shape matters.
    """
    head = output_head(model)
    blocks: list[tuple[Tensor, Tensor]] = []

    def of_block(block: Tensor, part: VocabularyHead, _: Mapping[str, Tensor]) -> Tensor:
        logits = part.logits(block)
        values, columns = logits.topk(min(k, logits.shape[1]), dim=1)
        ids = columns + part.first
        if part.tp_group is not None and part.tp_group.size() > 1:
            values, ids = (_of_all_ranks(x, part) for x in (values, ids))
            values, columns = values.topk(min(k, values.shape[1]), dim=1)
            ids = ids.gather(1, columns)
        blocks.append((values, ids))
        return torch.zeros_like(values[:, 0])

    with torch.no_grad():
        blockwise_loss(
            of_block,
            hidden.to(head.weight.dtype),
            head.weight,
            torch.ones_like(weights),
            {},
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            bias=head.bias,
            softcap=head.softcap,
        )
    rows, length = weights.shape
    values, ids = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    # Blocks go along the sequence, whose tokens [s, b] are flattened.
    shape = length, rows, values.shape[1]
    return values.view(shape).transpose(0, 1), ids.view(shape).transpose(0, 1)


def _of_all_ranks(values: Tensor, head: VocabularyHead) -> Tensor:
    """Return the values ``[C, k]`` of all tensor-parallel ranks side by side."""
    assert head.tp_group is not None
    parts = [torch.empty_like(values) for _ in range(head.tp_group.size())]
    torch.distributed.all_gather(parts, values.contiguous(), group=head.tp_group)
    return torch.cat(parts, dim=1)


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the configuration of the teacher in the layout of the student's run.

    Raises:
        CheckpointError: the folder holds no model that can be converted.
        ConfigError: the teacher has another vocabulary than the student.
    """
    folder = Path(str(config.section(DistillationFlags).teacher_hf))
    source = read_model(folder)
    padded = config.model.padded_vocab_size or 0
    if source.vocab_size > padded:
        raise ConfigError(
            f"`--teacher-hf` ({folder}) has {source.vocab_size} tokens, but the student {padded}; "
            "use a teacher with the student's tokenizer."
        )
    gpt = source.sections()
    own = {name: value for name, value in vars(gpt.model).items() if name in SHAPE.split()}
    own |= {"padded_vocab_size": padded, "seq_length": config.model.seq_length}
    own |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "mtp_num_layers": None}
    own |= {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    model = dataclasses.replace(config.model, **own)
    config = dataclasses.replace(config, model=model, lora=LoraConfig())
    if gpt.moe.num_experts is None:
        # A dense teacher stands whole on each expert-parallel rank of the student.
        parallel = dataclasses.replace(
            config.parallel, expert_model_parallel_size=1, expert_tensor_parallel_size=None
        )
        config = dataclasses.replace(config, parallel=parallel)
    others = [section for name, section in vars(gpt).items() if name != "model"]
    return config.with_section(*others)


class Teacher:
    """The teacher's chunks on this rank, which run through the pipeline without gradients."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.config = teacher_config(runner.config)
        flags = self.config.section(DistillationFlags)
        self.k = flags.teacher_top_k
        self.transformer_config = build_transformer_config(self.config)
        chunks = build_chunks(build_gpt_chunk, self.config, self.transformer_config, runner.context)
        chunks = [chunk.to(runner.device) for chunk in chunks]
        if self.config.precision.bf16 or self.config.precision.fp16:
            chunks = [Float16Module(self.transformer_config, chunk) for chunk in chunks]
        load_folder(chunks, Path(str(flags.teacher_hf)), runner.context)
        for chunk in chunks:
            chunk.eval().requires_grad_(False)
        parallel = self.config.parallel
        self.engine = PipelineEngine(
            parallel.pipeline_schedule or "",
            chunks,
            self.transformer_config,
            runner.context,
            group_size=parallel.microbatch_group_size_per_vp_stage,
        )

    @torch.no_grad()
    def logits_of(self, inputs: StepInputs) -> list[tuple[Tensor, Tensor]]:
        """Return `largest_logits` of each micro-batch on the last stage; [] on other stages."""
        count = inputs.num_microbatches
        shape: Any = self.runner.shape_of(None, inputs.seq_length)
        logits: list[tuple[Tensor, Tensor]] = self.engine.run(
            self._forward_step,
            inputs.batches or [None] * count,
            count,
            (*shape[:2], self.transformer_config.hidden_size),
            forward_only=True,
            collect_non_loss_data=True,
        )
        return logits

    def _forward_step(
        self, batch: Any, model: torch.nn.Module, _counts: StepCounts | None
    ) -> tuple[Tensor, LossFunction]:
        hidden, _ = gpt_forward_step(self.config, batch, model, None)

        def kept(hidden: Tensor, non_loss_data: bool = True) -> Any:
            return largest_logits(hidden, model, batch.loss_weights, self.k)

        return hidden, kept


class DistillationRunner(StepRunner):
    """Runs steps of the student, each after the teacher's forward passes."""

    teacher: Teacher | None = None

    def prepared(self, inputs: StepInputs) -> Sequence[Batch] | None:
        """Return the micro-batches; on the last stage with the teacher's logits."""
        if self.teacher is None:
            self.teacher = Teacher(self)
        batches = super().prepared(inputs)
        logits = self.teacher.logits_of(inputs)
        if batches is None or not self.context.is_last_stage:
            return batches
        return [
            dataclasses.replace(batch, loss_inputs=_inputs(batch, *own))
            for batch, own in zip(batches, logits, strict=True)
        ]


def _inputs(batch: Batch, values: Tensor, ids: Tensor) -> LossInputs:
    tensors = {"labels": batch.labels, "teacher": values, "ids": ids}
    return LossInputs(batch.loss_weights, tensors)


def forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one chunk of the student on one micro-batch; return its output and the loss function."""
    hidden, _ = gpt_forward_step(config, batch, model, counts)
    flags = config.section(DistillationFlags)
    options = DivergenceConfig(
        flags.distill_temperature, flags.distill_alpha, flags.distill_divergence
    )

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Report]:
        per_token = config.training.calculate_per_token_loss
        return hidden_states_loss(
            hidden,
            output_head(model),
            batch,
            share=share_of_step(batch.loss_weights, counts, per_token=per_token),
            custom=Divergence(options),
            block_size=config.loss.cross_entropy_chunk_size,
        )

    return hidden, loss


TASK = TEXT.replace(
    forward_step=forward_step, prepare_batches=None, step_runner=DistillationRunner
).with_sections(DistillationFlags)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:]))
