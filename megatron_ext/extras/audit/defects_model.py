"""The defects of routers and of multi-token prediction: D1 to D14."""

from __future__ import annotations

from megatron_ext.extras.audit.defect import (
    BY_MEAN,
    NEWER,
    Defect,
    Rule,
    State,
    auxiliary,
    depth_weight,
    learned,
    sequence_loss,
    split_tokens,
)

MODEL: tuple[Defect, ...] = (
    Defect(
        number="D1",
        affected="router, auxiliary losses per token",
        stock=(
            "gradients of load balancing and z-loss are multiplied by the tokens of the "
            "*rank*: 0.5000 of what they should be at CP 2 and at TP 2 with sequence "
            "parallelism"
        ),
        since=State("fixed", "1.0000"),
        ours=(
            "own path: `layers/moe.py` attaches with N / (M × DP), also in Transformer "
            "Engine's layers"
        ),
        test=(
            "`test_d01_parallel_ranks_do_not_shrink_auxiliary_losses`, "
            "`test_d01_d02_d03_d28_transformer_engines_layers_have_our_router`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.per_token,
                    auxiliary,
                    lambda x: split_tokens(x) > 1,
                ),
                lambda x: (
                    f"Auxiliary gradients are {1 / split_tokens(x):.4g} of what they should be."
                ),
                f"{NEWER}, or {BY_MEAN}.",
            ),
        ),
    ),
    Defect(
        number="D2",
        affected="router, auxiliary losses per token, masked targets",
        stock="factor T/N where targets are masked: 2.0000 with half of them",
        since=State("there", "2.0000"),
        ours="own path, as D1",
        test="`test_d02_masked_targets_do_not_make_auxiliary_losses_grow`",
        rules=(
            Rule(
                (lambda x: x.experts, lambda x: x.per_token, auxiliary, lambda x: x.masked),
                "Auxiliary gradients grow by tokens / unmasked targets: 2 times with half masked.",
                f"Multiply the coefficients by the share of unmasked targets, or {BY_MEAN}.",
            ),
        ),
    ),
    Defect(
        number="D3",
        affected="router, `seq_aux_loss` per token",
        stock="a further 1 / micro-batch size: 0.2500 at 4",
        since=State("fixed", "1.0000"),
        ours="own path, as D1",
        test="`test_d03_the_micro_batch_size_does_not_shrink_the_loss_of_sequences`",
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.per_token,
                    sequence_loss,
                    lambda x: x.size("--micro-batch-size") > 1,
                ),
                lambda x: (
                    f"Its gradients are {1 / x.size('--micro-batch-size'):.4g} of what they "
                    "should be."
                ),
                f"{NEWER}, or --micro-batch-size 1.",
            ),
        ),
    ),
    Defect(
        number="D4",
        affected="multi-token prediction, empty masks",
        stock="0/0: gradients are NaN with the mean of means, the log in both modes",
        since=State("fixed", "the log and the gradients are 0"),
        ours="own path: counts are clamped, `layers/auxiliary_loss.py`; a log of nothing is 0",
        test="`test_d04_a_batch_without_targets_leaves_numbers`",
        began="0.17",
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.masked),
                "A step without a target in a depth gives NaN in the log, and in gradients with "
                "the mean of means.",
                f"{NEWER}.",
            ),
        ),
    ),
    Defect(
        number="D5",
        affected="multi-token prediction per token",
        stock=(
            "depth k weighs D_k/N: 31/32 at 32 tokens, 6 % off in the second depth, 12 % with"
            " ragged masks"
        ),
        since=State(
            "changed",
            (
                "counts of the rank instead of the global batch: 1.402 of the right weight with 3"
                " of 61 targets, 1.0000 with full masks"
            ),
        ),
        ours=(
            "own path: N / D_k; every gradient within 8e-7 of the formula, for micro-batches "
            "of 1 and 4"
        ),
        test=(
            "`tests/layers/test_mtp_normalization.py::test_losses_and_gradients_are_those_of_a_dense_model`,"
            " `test_d05_stock_weighs_a_depth_by_the_targets_that_it_keeps`"
        ),
        began="0.17",
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.per_token),
                depth_weight,
                f"Nothing to switch; {BY_MEAN} if depths must weigh alike.",
                only="0.16",
            ),
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.per_token, lambda x: x.masked),
                "A depth weighs by the rank's own targets: 1.402 of the right weight as measured.",
                f"Nothing to switch; {BY_MEAN} if depths must weigh alike.",
            ),
        ),
    ),
    Defect(
        number="D6",
        affected="multi-token prediction on a later stage, `--decoupled-lr`",
        stock=(
            "that stage's copy of the embedding is not marked as one, gets the other learning"
            " rate, and the copies part within 3 steps (9.0e-3 after one, *earlier*)"
        ),
        since=State("fixed", "the copies take the same step"),
        ours="own path: `text/model/gpt.py` marks it; copies bit-equal",
        test=(
            "`test_d06_a_decoupled_learning_rate_leaves_the_copies_of_the_embedding_equal`, "
            "`test_d06_stock_marks_the_first_copy_alone_as_an_embedding`"
        ),
        began="0.18",
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.has("--decoupled-lr"), lambda x: x.pp > 1),
                "The copies of the embedding take different steps: 0.001 instead of 0.01 as "
                "measured.",
                f"{NEWER}, or leave --decoupled-lr out.",
            ),
        ),
    ),
    Defect(
        number="D7",
        affected="multi-token prediction on a stage of its own",
        stock=(
            "default embedding ranks add gradients that do not belong together: errors of "
            "0.95 and 1.05 (untied), 0.047 (tied), *earlier*"
        ),
        since=State("there", "as on 0.16: 5 instead of 3 untied"),
        ours=(
            "own path: `embedding_ranks` in `parallel/context.py` takes the first stage, that"
            " stage, and the last one if tied; gradients on three stages within 8e-8 of one "
            "rank"
        ),
        test=(
            "`tests/layers/test_mtp_layout.py`: "
            "`test_d07_cores_embedding_ranks_mix_gradients`, "
            "`test_d07_own_stage_over_several_steps`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.mtp > 0,
                    lambda x: x.pp > 1,
                    lambda x: not x.program.startswith("pretrain_gpt"),
                ),
                "Gradients of the embedding are those of other ranks too: 1.667 as measured.",
                "Pass get_embedding_ranks as Megatron-LM's pretrain_gpt.py does.",
            ),
        ),
    ),
    Defect(
        number="D8",
        affected="multi-token prediction with learned positions, several stages",
        stock="each stage has a table of its own: error 0.065, *earlier*",
        since=State("there", "as on 0.16: a third of the gradient on 2 stages"),
        ours="guard: refused, use rope",
        test="`tests/layers/test_mtp_layout.py::test_d08_learned_positions_on_several_stages_are_refused`",
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.pp > 1, learned),
                "Each stage has a table of positions of its own: a third of the gradient as "
                "measured.",
                "Use --position-embedding-type rope; Megatron-LM's own checks refuse learned ones.",
            ),
        ),
    ),
    Defect(
        number="D9",
        affected="multi-token prediction, packed samples with padding",
        stock=(
            "the shift uses the lengths without padding: 10 targets instead of 9, some across"
            " samples, *earlier*"
        ),
        since=State("there", "10 instead of 9"),
        ours=(
            "own path: targets are made by document, before anything is cut "
            "(`data/batch.py`); 9 where core makes 10"
        ),
        test=(
            "`tests/layers/test_mtp.py`: "
            "`test_d09_padding_brings_no_targets_and_none_crosses_documents`, "
            "`test_d09_stock_shifts_by_the_lengths_without_padding`"
        ),
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.has("--sft")),
                "Depths learn targets across packed samples: 10 instead of 9 as measured.",
                "Leave --mtp-num-layers out of fine-tuning.",
            ),
        ),
    ),
    Defect(
        number="D10",
        affected="multi-token prediction, packed samples, context parallelism",
        stock="`IndexError` on short samples, *earlier*",
        since=State("there", "`IndexError`"),
        ours="own path, as D9",
        test=(
            "`tests/layers/test_mtp.py`: "
            "`test_d10_documents_shorter_than_the_chunks_of_ranks`, "
            "`test_d10_stock_cannot_shift_a_short_document`"
        ),
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.has("--sft"), lambda x: x.cp > 1),
                lambda x: f"IndexError on samples shorter than {2 * x.cp} tokens per depth.",
                "Use --context-parallel-size 1, or leave --mtp-num-layers out.",
            ),
        ),
    ),
    Defect(
        number="D11",
        affected="multi-token prediction, full recomputation, packed samples",
        stock="`TypeError` in the checkpoint function, *earlier*",
        since=State("fixed", "gradients equal"),
        ours="recomputation changes nothing (2.4e-7); packed sequences are refused as yet",
        test="`tests/layers/test_mtp_normalization.py::test_d11_full_recomputation_changes_nothing`",
        rules=(
            Rule(
                (
                    lambda x: x.mtp > 0,
                    lambda x: x.has("--sft"),
                    lambda x: x.text("--recompute-granularity") == "full",
                ),
                "TypeError in the checkpoint function.",
                f"{NEWER}, or --recompute-granularity selective.",
            ),
        ),
    ),
    Defect(
        number="D12",
        affected="a model with multi-token prediction, without labels",
        stock="crashes: `labels.clone()` of None, *earlier*",
        since=State("fixed", "gives logits"),
        ours="own path: the depths are not run, the model returns logits",
        test=(
            "`tests/layers/test_mtp_normalization.py`: "
            "`test_d12_without_labels_a_model_gives_the_logits_of_one_without_depths`, "
            "`test_d12_without_labels_on_a_stage_of_its_own`"
        ),
        began="0.17",
    ),
    Defect(
        number="D13",
        affected="multi-token prediction with experts",
        stock="the padding mask is not handed on, so that its experts route padding",
        since=State(
            "changed",
            ("handed on, but the place that the shift fills counts as a token: 20 instead of 19"),
        ),
        ours=(
            "not on our path: samples are full; every router gets no mask and counts the same"
            " tokens"
        ),
        test="`test_d13_d26_no_router_is_given_padding`",
        began="0.18",
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.experts, lambda x: x.has("--sft")),
                "Experts count padding as tokens: 32 instead of 19 (0.16), 20 (0.19) as measured.",
                "Fill samples whole.",
                depends="your forward step passes a padding mask",
            ),
        ),
    ),
    Defect(
        number="D14",
        affected="logged loss of multi-token prediction",
        stock=(
            "mean of means: 6.719 with micro-batches of 1 and 6.282 with 4, on the same ragged data"
        ),
        since=State("there", "4.5555 instead of 4.5957 on ragged data"),
        ours="own path: `[sum, count]`; 6.282 in both, and 1e-6 over CP 2, DP 2 and PP 2",
        test=(
            "`test_d14_the_logged_loss_does_not_depend_on_micro_batches`, "
            "`tests/layers/test_mtp_layout.py::test_layout_gives_the_gradients_of_one_rank`"
        ),
        rules=(
            Rule(
                (lambda x: x.mtp > 0, lambda x: x.masked),
                "Only the log is off: 0.991 of the right loss on ragged data as measured.",
                "Do not compare logged losses of depths between micro-batch sizes.",
            ),
        ),
    ),
)
