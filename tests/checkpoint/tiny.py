"""A tiny GPT with its optimizer, in any layout, and its state as whole tensors."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_ext.checkpoint.files import published, standing_folder_of
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import fault_of
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.device import select
from megatron_ext.parallel.context import ParallelContext, init_groups, seed_everything
from megatron_ext.parallel.grid import Layout

RUN_CONFIG: dict[str, Any] = {"training": {"seed": 1234}, "model": {"num_layers": 4}}


@dataclass
class Tiny:
    model: list[Any]
    optimizer: Any
    scheduler: Any

    def step(self) -> None:
        """Update with gradients that follow from each weight's own value, in any layout."""
        for chunk in self.model:
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(parameter.detach().float() * 0.5 + 0.01)
        self.optimizer.step()
        self.scheduler.step(1)

    def spoil(self) -> None:
        """Change every weight, so that only loading can bring it back."""
        with torch.no_grad():
            for chunk in self.model:
                for parameter in chunk.parameters():
                    parameter.add_(1.0)
        self.optimizer.reload_model_params()


def one_of_two(rank: int, store: Path) -> ParallelContext:
    """Let this forked process be one of two replicas, which meet in the file ``store``."""
    torch.set_num_threads(1)
    device = select()
    device.activate(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    context = init_groups(Layout(2), device, init_method=f"file://{store}")
    seed_everything(context, 1234)
    return context


def build(
    context: ParallelContext,
    *,
    hidden: int = 16,
    vocabulary: int = 64,
    layers: int = 4,
    precision: str = "fp32",
    distributed: bool = True,
) -> Tiny:
    layout = context.layout
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    low = precision != "fp32"
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        ffn_hidden_size=4 * hidden,
        gated_linear_unit=True,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    virtual = layout.virtual_pipeline_model_parallel_size
    model = []
    for stage in range(virtual or 1):
        chunk: Any = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=vocabulary,
            max_sequence_length=8,
            pre_process=context.is_first_stage and stage == 0,
            post_process=context.is_last_stage and stage == (virtual or 1) - 1,
            vp_stage=stage if virtual else None,
            pg_collection=context.pgs,
        )
        if low:
            chunk = Float16Module(config, chunk)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        model.append(DistributedDataParallel(config, ddp, chunk, pg_collection=context.pgs))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.001,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
            initial_loss_scale=1.0 if precision == "fp16" else 2.0**32,
        ),
        model,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 0.01, 0.001, 2, 100, "cosine", 0.1, 0.1, 100, "constant"
    )
    return Tiny(model, optimizer, scheduler)


def manager(context: ParallelContext, folder: Path, **options: Any) -> CheckpointManager:
    values = {"save": str(folder), "load": str(folder), **options}
    return CheckpointManager(CheckpointConfig(**values), context)


def save(checkpoints: CheckpointManager, tiny: Tiny, iteration: int, context: Any) -> Path:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    parallel = {name: getattr(context.layout, name) for name in names}
    return checkpoints.save(
        iteration,
        model=tiny.model,
        optimizer=tiny.optimizer,
        scheduler=tiny.scheduler,
        progress={"iteration": iteration, "consumed_train_samples": 8 * iteration},
        run_config={**RUN_CONFIG, "parallel": parallel},
    )


def load(checkpoints: CheckpointManager, tiny: Tiny) -> Any:
    return checkpoints.load(model=tiny.model, optimizer=tiny.optimizer, scheduler=tiny.scheduler)


def newest_whole(root: Path) -> int | None:
    """Return the iteration of the newest checkpoint with all its files; None if there is none."""
    newest_first = reversed(published(root))
    return next((i for i in newest_first if fault_of(standing_folder_of(root, i)) is None), None)


def whole_tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint unsharded, by torch's own converter."""
    dcp_to_torch_save(str(checkpoint), str(scratch))
    content = torch.load(scratch, weights_only=False)
    return {name: value for name, value in content.items() if torch.is_tensor(value)}
