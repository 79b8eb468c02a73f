"""The defects of data, layers and checkpoints: D29 to D43."""

from __future__ import annotations

from megatron_ext.extras.audit.defect import (
    NEWER,
    Defect,
    Rule,
    State,
    bias_recomputed,
    depth_pieces,
    local,
    misread_vocabulary,
    modelopt,
    no_vocabulary_size,
    uneven_pieces,
    whole_query_norm,
)

REST: tuple[Defect, ...] = (
    Defect(
        number="D29",
        affected="GPT dataset",
        stock="counts epochs for ever when samples are asked of an empty split",
        since=State("there", "counts for ever"),
        ours=("guard: `text/data/gpt.py` `check_inputs`, also for a dataset of a split of its own"),
        test=(
            "`test_d29_an_empty_split_is_refused_when_samples_are_asked_of_it`, "
            "`tests/text/data/test_gpt.py`, `test_d29_a_dataset_without_tokens_is_refused`"
        ),
        rules=(
            Rule(
                (
                    lambda x: not x.has("--mock-data"),
                    lambda x: x.has("--split"),
                    lambda x: x.size("--eval-iters", 100) > 0,
                ),
                "The start counts epochs for ever.",
                "Give each part of --split that is not 0 one document at least, or --eval-iters 0.",
                depends="a part of --split comes to less than one document",
            ),
        ),
    ),
    Defect(
        number="D30",
        affected="cache of sample indices",
        stock=(
            "its key leaves out two options and the identity of the files: indices of 40 "
            "documents used for 20"
        ),
        since=State("there", "19 instead of 39"),
        ours="own path: `KeyedGPTDataset`",
        test=(
            "`test_d30_the_key_of_a_cache_covers_what_decides_it`, `tests/text/data/test_gpt.py`"
        ),
        rules=(
            Rule(
                (lambda x: not x.has("--mock-data"), lambda x: x.has("--data-cache-path")),
                "Old indices are used for new files: 19 instead of 39 as measured.",
                "Empty --data-cache-path when files of the data change.",
                depends="the files of the data changed since the cache was written",
            ),
        ),
    ),
    Defect(
        number="D31",
        affected="`--per-dataset-sequences-path`",
        stock=(
            "ids of a vocabulary of 65,500 to 65,536 are written in 4 bytes and read in 2: `0"
            " 0 1 0 2` instead of `0 1 2 3 4`"
        ),
        since=State("there", "`0 0 1 0 2`"),
        ours="own path: `KeyedGPTDataset` reads the dtype from the file",
        test=(
            "`test_d31_stock_reads_int32_ids_as_pairs_of_uint16`, "
            "`test_d31_given_lengths_do_not_change_the_dtype`"
        ),
        rules=(
            Rule(
                (lambda x: x.has("--per-dataset-sequences-path"), misread_vocabulary),
                "Ids are read as pairs of halves: 0 0 1 0 2 for 0 1 2 3 4.",
                "Leave --per-dataset-sequences-path out.",
            ),
            Rule(
                (lambda x: x.has("--per-dataset-sequences-path"), no_vocabulary_size),
                "Ids are read as pairs of halves: 0 0 1 0 2 for 0 1 2 3 4.",
                "Leave --per-dataset-sequences-path out.",
                depends="the vocabulary has 65,500 to 65,536 ids",
            ),
        ),
    ),
    Defect(
        number="D32",
        affected="multimodal datasets",
        stock="default modes raise `TypeError`, reading all modes `ValueError`",
        since=State("there", "`TypeError`, `ValueError`"),
        ours="own path: `data/indexed_writer.py` and `data/indexed.py`",
        test=(
            "`test_d32_a_mode_is_written_where_none_is_given`, "
            "`tests/data/test_indexed.py::test_core_reads_modes_back`"
        ),
    ),
    Defect(
        number="D33",
        affected="partial last sequences",
        stock="counted in single precision: one sequence of 2,097,153 lost at 2^24 + 2 tokens",
        since=State("there", "one of 2,097,153 lost"),
        ours="not on our path: no run keeps partial sequences",
        test=(
            "`test_d33_stock_counts_partial_sequences_in_single_precision`, "
            "`test_d33_no_run_keeps_partial_sequences`"
        ),
    ),
    Defect(
        number="D34",
        affected="layers without Transformer Engine",
        stock="attention refuses context parallelism, norms refuse sequence parallelism",
        since=State("there", "refused with `AssertionError`"),
        ours="own path: `layers/attention.py`, `layers/pointwise.py`",
        test=(
            "`test_d34_attention_under_context_parallelism`, "
            "`test_d34_norms_under_sequence_parallelism`, `tests/layers/test_attention.py`, "
            "`tests/layers/test_pointwise.py`"
        ),
        rules=(
            Rule(
                (local, lambda x: x.cp > 1),
                "AssertionError: attention refuses context parallelism.",
                "Use --transformer-impl transformer_engine.",
            ),
            Rule(
                (local, lambda x: x.sequence_parallel),
                "AssertionError without Apex: norms refuse sequence parallelism.",
                "Use --transformer-impl transformer_engine.",
            ),
        ),
    ),
    Defect(
        number="D35",
        affected=(
            "experts with `--expert-tensor-parallel-size` other than the tensor-parallel size"
            " and `--expert-model-parallel-size` 1"
        ),
        stock=(
            "weights of experts are taken for dense ones, so that their gradients are summed "
            "over the wrong ranks: 0.69 off at TP 2"
        ),
        since=State("fixed", "gradients equal"),
        ours="own path: `mark_experts` in `layers/moe.py`, also in Transformer Engine's layers",
        test=(
            "`test_d35_whole_experts_sum_gradients_over_their_copies`, "
            "`test_d35_d36_runs_log_the_same_however_experts_are_shared`"
        ),
        rules=(
            Rule(
                (lambda x: x.experts, lambda x: x.etp != x.tp, lambda x: x.ep == 1),
                "Gradients of experts are summed over the wrong ranks: 0.69 off at TP 2.",
                f"{NEWER}, or --expert-tensor-parallel-size as the tensor-parallel size.",
            ),
        ),
    ),
    Defect(
        number="D36",
        affected="experts with biases under sequence parallelism",
        stock=(
            "the gradient of the second bias is summed over the tensor-parallel ranks, which "
            "hold other experts: 1.7 off at TP 2, EP 2, and the norm counts the bias of the "
            "first rank alone"
        ),
        since=State("there", "1.7 off in the gradients at TP 2, EP 2"),
        ours="own path, as D35",
        test=(
            "`test_d36_biases_of_other_experts_are_not_summed`, "
            "`test_d35_d36_runs_log_the_same_however_experts_are_shared`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.biases,
                    lambda x: x.sequence_parallel,
                    lambda x: x.etp < x.tp,
                    lambda x: x.ep > 1,
                ),
                "Gradients of the experts' second biases are summed over others': 1.7 off at TP 2.",
                "Use --disable-bias-linear.",
            ),
        ),
    ),
    Defect(
        number="D37",
        affected="recomputation",
        stock=(
            "`--recompute-modules mlp` returns the bias, a parameter, whose backward pass "
            "then recomputes for ever; pieces that do not divide the layers of a chunk raise "
            "`IndexError`, and multi-token prediction takes pieces of one layer only"
        ),
        since=State(
            "changed",
            (
                "pieces that do not divide the layers work; `mlp` with biases still recomputes "
                "for ever, multi-token prediction still takes one layer only"
            ),
        ),
        ours=(
            "own path: `layers/transformer_layer.py` adds the bias within, "
            "`text/model/gpt.py` shortens the last piece and recomputes each depth by itself;"
            " refused with Transformer Engine's MLP with biases"
        ),
        test="`tests/train/test_equal_curves.py`",
        began="0.18",
        between=(
            (
                "0.18",
                State(
                    "changed",
                    "as on 0.19, but full recomputation of multi-token prediction always ends in "
                    "`TypeError`",
                ),
            ),
        ),
        rules=(
            Rule((bias_recomputed,), "Recomputes for ever.", "Use --disable-bias-linear."),
            Rule(
                (depth_pieces,),
                "AssertionError in the depths of multi-token prediction.",
                "Use --recompute-num-layers 1.",
            ),
            Rule(
                (uneven_pieces,),
                "IndexError at the last piece of a chunk.",
                f"{NEWER}, or a --recompute-num-layers that divides the layers of a stage.",
                only="0.16 0.17",
            ),
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.text("--recompute-granularity") == "full"),
                "TypeError in the depths of multi-token prediction.",
                f"{NEWER}, or --recompute-granularity selective.",
                only="0.18",
            ),
        ),
    ),
    Defect(
        number="D38",
        affected="`--decoupled-lr`",
        stock=(
            "the mark by which groups of parameters are found in a checkpoint, "
            "`is_decoupled_lr`, is not set any more: a run that goes on gives its matrices "
            "the rate of the embedding (4.753 for 4.706 after three steps), or raises "
            "`ValueError` without the distributed optimizer"
        ),
        since=State("fixed", "rates are part of the mark of a group"),
        ours="own path: `optim/builder.py` sets it",
        test="`tests/checkpoint/test_optimizer_state.py::test_each_group_of_parameters_keeps_its_learning_rate`",
        rules=(
            Rule(
                (lambda x: x.has("--decoupled-lr"), lambda x: x.resumes),
                "After a resume matrices take the embedding's rate, or ValueError without the "
                "distributed optimizer.",
                f"{NEWER}, or leave --decoupled-lr out.",
            ),
        ),
    ),
    Defect(
        number="D39",
        affected="fp16 with experts that ranks share out",
        stock=(
            "dense weights and experts have a loss scale each, which only their own overflows"
            " lower, but the loss is multiplied by one: gradients of the experts are off by a"
            " power of 2"
        ),
        since=State("there", "a power of 2: 8 instead of 4"),
        ours="own path: `optim/update.py` lets all follow the one that overflowed",
        test="`test_d39_dense_weights_and_experts_have_one_loss_scale`",
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.has("--fp16"),
                    lambda x: x.ep > 1,
                    lambda x: not x.has("--loss-scale"),
                ),
                "After an overflow gradients of experts are off by a power of 2.",
                "Use --bf16, or a fixed --loss-scale.",
            ),
        ),
    ),
    Defect(
        number="D40",
        affected="`--override-opt-param-scheduler`",
        stock=(
            "the rates of the groups in the checkpoint win over the flag: another `--lr` "
            "changes nothing"
        ),
        since=State(
            "changed",
            (
                "no resume with another `--lr`: `KeyError` with the distributed optimizer, "
                "`ValueError` without"
            ),
        ),
        ours="own path: `checkpoint/state.py` settles the rates",
        test="`tests/checkpoint/test_optimizer_state.py::test_learning_rates_of_the_flags_or_of_the_checkpoint`",
        rules=(
            Rule(
                (lambda x: x.has("--override-opt-param-scheduler"), lambda x: x.resumes),
                "Another --lr changes nothing (0.16), or the resume fails (0.19).",
                "Resume with the same --lr, or with --no-load-optim.",
            ),
        ),
    ),
    Defect(
        number="D41",
        affected="fully reshardable optimizer state with padded buckets",
        stock=(
            "buckets are joined without the padding that follows each, then the parameters "
            "are cut out at their padded places, so that all values behind the first padding "
            "are shifted: with multi-token prediction on a stage of its own the loss after a "
            "resume was 7.377 instead of 7.632, with no more than a warning"
        ),
        since=State("there", "24 of 48 weights wrong after a resume"),
        ours=(
            "own path: `checkpoint/optimizer_boxes.py` saves each rank's part of each parameter "
            "without joining buckets"
        ),
        test="`tests/train/test_resume.py`",
        rules=(
            Rule(
                (
                    lambda x: x.has("--dist-ckpt-optim-fully-reshardable"),
                    lambda x: x.has("--use-distributed-optimizer"),
                    lambda x: x.resumes or x.has("--save"),
                    lambda x: (
                        x.has("--overlap-grad-reduce")
                        or (
                            x.pp > 1
                            and (x.mtp > 0 or not x.has("--untie-embeddings-and-output-weights"))
                        )
                    ),
                ),
                "Optimizer values behind the first padding are shifted after a resume.",
                "Leave --dist-ckpt-optim-fully-reshardable out.",
            ),
        ),
    ),
    Defect(
        number="D42",
        affected=(
            "multi-latent attention with `--q-lora-rank` and `--qk-layernorm`, tensor parallelism "
            "without sequence parallelism, in layers whose `q_layernorm` is a module: ModelOpt's "
            "and those of a `--spec`; Transformer Engine's hold that norm in `linear_q_up_proj`"
        ),
        stock=(
            "gradients of all weights with `q_layernorm` in their names are summed over the "
            "tensor-parallel ranks, but those of this norm are whole on each rank: 2.0000 of the "
            "right ones at TP 2"
        ),
        since=State("there", "2.0000"),
        ours="own path: `layers/latent_attention.py` gives each rank its share of that gradient",
        test=(
            "`test_d42_stock_counts_the_norm_of_compressed_queries_on_each_rank`, "
            "`tests/text/model/test_deepseek.py::"
            "test_documents_dropout_and_recomputation_without_experts`"
        ),
        rules=(
            Rule(
                (whole_query_norm, modelopt),
                lambda x: f"Gradients of compressed queries' norms are {x.tp} times too large.",
                "Use --sequence-parallel.",
            ),
            Rule(
                (whole_query_norm,),
                lambda x: f"Gradients of compressed queries' norms are {x.tp} times too large.",
                "Use --sequence-parallel.",
                depends="the layers are ModelOpt's or have another q_layernorm of their own",
            ),
        ),
    ),
    Defect(
        number="D43",
        affected="`--moe-router-enable-expert-bias` with `--bf16` or `--fp16`",
        stock=(
            "the counters of tokens by expert are cast with the model, and 16 bits round what is "
            "added from 257 tokens on (2,049 in fp16): 4,160 "
            "instead of 4,748 in a step of 400 micro-batches of 24 tokens, so that biases step the "
            "wrong way"
        ),
        since=State("there", "4,256 instead of 4,849"),
        ours=(
            "own path: `layers/moe.py` `Router` keeps the buffers of a router in fp32 when it is "
            "cast, also in Transformer Engine's layers and while a checkpoint is loaded"
        ),
        test=(
            "`test_d43_stock_rounds_the_tokens_of_an_expert_to_16_bits`, "
            "`test_d43_biases_step_by_the_tokens_of_the_whole_step`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.has("--moe-router-enable-expert-bias"),
                    lambda x: x.has("--bf16", "--fp16"),
                ),
                "Tokens by expert are counted in 16 bits, so that biases step the wrong way.",
                "Set the router's local_tokens_per_expert to float32 after the model is cast, or "
                "balance with --moe-aux-loss-coeff.",
            ),
        ),
    ),
)
