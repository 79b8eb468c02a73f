"""A pretraining program as Megatron-LM 0.16 has it, in three files put into one.

It reads every flag and imports every name that Megatron-LM's ``pretrain_gpt.py``,
``gpt_builders.py`` and ``model_provider.py`` do. Only the import lines differ, as docs/porting.md
says: names of ``megatron.training`` come from `megatron_ext.text.megatron_style`, and that of
``megatron.legacy`` is gone.
"""

import json
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model

from megatron_ext.text.megatron_style import (
    GPTFIMDataset,
    GPTFIMDatasetConfig,
    SFTDataset,
    build_tokenizer,
    core_transformer_config_from_args,
    core_transformer_config_from_yaml,
    get_args,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    get_timers,
    get_tokenizer,
    inprocess_restart,
    is_first_or_last_pipeline_stage,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)

try:
    from megatron.post_training.arguments import add_modelopt_args

    has_nvidia_modelopt = True
except ImportError:
    has_nvidia_modelopt = False

stimer = StragglerDetector()


def layer_of(use_te, config):
    args = get_args()
    shape = (args.num_experts, args.moe_grouped_gemm, args.qk_layernorm)
    latent = (args.multi_latent_attention, args.experimental_attention_variant)
    legacy = args.moe_use_legacy_grouped_gemm
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(
            *shape, *latent, moe_use_legacy_grouped_gemm=legacy, qk_l2_norm=args.qk_l2_norm
        )
    return get_gpt_layer_local_spec(
        *shape,
        *latent,
        moe_use_legacy_grouped_gemm=legacy,
        normalization=args.normalization,
        use_kitchen=config.use_kitchen,
    )


def gpt_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    print_rank_0("building GPT model ...")
    if config is None:
        if args.yaml_cfg is not None:
            config = core_transformer_config_from_yaml(args, "language_model")
        else:
            config = core_transformer_config_from_args(args)
    assert not args.use_legacy_models
    use_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.experimental_attention_variant is not None or args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    else:
        assert args.heterogeneous_layers_config_path is None
        spec = layer_of(use_te, config)
    mtp_spec = None
    if args.mtp_num_layers is not None:
        mtp_spec = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=use_te, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def model_provider(
    model_builder,
    pre_process=True,
    post_process=True,
    vp_stage=None,
    config=None,
    pg_collection=None,
):
    args = get_args()
    if args.record_memory_history:
        torch.cuda.memory._record_memory_history(True)
        print_rank_0(args.memory_snapshot_path)
    assert not (has_nvidia_modelopt and getattr(args, "modelopt_enabled", False))
    return model_builder(
        args, pre_process, post_process, vp_stage, config=config, pg_collection=pg_collection
    )


def reads_data(vp_stage):
    config = core_transformer_config_from_args(get_args())
    return is_first_or_last_pipeline_stage(vp_stage) or mtp_on_this_rank(
        config, ignore_virtual=False, vp_stage=vp_stage
    )


def get_batch(data_iterator, vp_stage=None):
    if not reads_data(vp_stage):
        return None, None, None, None, None, None
    config = core_transformer_config_from_args(get_args())
    batch = get_batch_on_this_tp_rank(
        data_iterator,
        mtp_on_this_rank=mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage),
    )
    packed = [batch.pop(name, None) for name in ("cu_seqlens", "max_seqlen", "local_cp_size")]
    assert packed == [None, None, None]
    batch = get_batch_on_this_cp_rank(batch)
    return (*batch.values(), None)


def loss_func(loss_mask, output_tensor, model=None):
    args = get_args()
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        machine.validate_result(
            result=loss, rejection_func=torch.isnan, message="NaN", tolerance=0.0, fatal=True
        )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=10, context="loss"),
            message="spike",
            tolerance=0.0,
            fatal=False,
        )
    return loss, num_tokens, report


def forward_step(data_iterator, model, return_schedule_plan=False):
    args = get_args()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, loss_mask, attention_mask, position_ids, packed = get_batch(
            data_iterator, vp_stage
        )
    timers("batch-generator").stop()
    assert not args.use_legacy_models
    if return_schedule_plan:
        assert args.overlap_moe_expert_parallel_comm
    with stimer:
        output = model(
            tokens,
            position_ids,
            attention_mask,
            labels=labels,
            loss_mask=loss_mask,
            packed_seq_params=packed,
        )
    return output, partial(loss_func, loss_mask, model=model)


def is_dataset_built_on_rank(vp_stage=None):
    return reads_data(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args):
    tokenizer = get_tokenizer() if args.legacy_tokenizer else build_tokenizer(args)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    options = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": tokenizer,
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": sequences_per_dataset,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
    }
    if args.fim_data:
        tokens = {"prefix": args.fim_prefix_token, "pad": args.fim_pad_token}
        return GPTFIMDatasetConfig(**options, fim_extra_tokens=tokens, fim_rate=args.fim_rate)
    return GPTDatasetConfig(**options)


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    if args.sft:
        dataset_type = SFTDataset
    elif args.mock_data:
        dataset_type = MockGPTDataset
    else:
        dataset_type = GPTFIMDataset if args.fim_data else GPTDataset
    is_built = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    builder = BlendedMegatronDatasetBuilder(
        dataset_type, train_val_test_num_samples, is_built, config
    )
    return builder.build()


def get_embedding_ranks(pp_ranks):
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


if __name__ == "__main__":
    set_startup_timestamps(program_start=0.0, main_entry=0.0)
    train_valid_test_datasets_provider.is_distributed = True
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
