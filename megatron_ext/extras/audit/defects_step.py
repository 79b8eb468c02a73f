"""The defects of schedules, losses, optimizers and routers: D15 to D28."""

from __future__ import annotations

from megatron_ext.extras.audit.defect import (
    BY_MEAN,
    NEWER,
    Defect,
    Rule,
    State,
    auxiliary,
    local,
    positive,
)

STEP: tuple[Defect, ...] = (
    Defect(
        number="D15",
        affected="interleaved schedule, two stages, batched messages",
        stock=(
            "both neighbours are one peer and the messages swap: gradients 1.7 % off in a "
            "chain of four factors (a factor of 28 in the norm of a GPT, *earlier*), without "
            "a word"
        ),
        since=State("there", "1.7 %"),
        ours=(
            "own path: our runtime gives every direction a channel; switch: with "
            "`--pipeline-schedule core-interleaved` messages are never batched"
        ),
        test=(
            "`test_d15_stock_swaps_batched_messages_between_two_stages`, "
            "`test_d15_d16_no_run_has_either_configuration`, "
            "`tests/schedules/test_runtime.py::test_zero_bubble_and_virtual_chunks_train_like_1f1b`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.interleaved,
                    lambda x: x.pp == 2,
                    lambda x: x.has("--no-overlap-p2p-communication"),
                ),
                "Messages of the two stages swap: gradients are 1.7 % off and more.",
                "Leave --no-overlap-p2p-communication out; Megatron-LM's own checks refuse it "
                "here.",
            ),
        ),
    ),
    Defect(
        number="D16",
        affected="overlapped messages with deallocated outputs",
        stock="a buffer is freed while it is being sent: errors from 4e-4 to 1e28",
        since=State("fixed", "0 of 32 gradients wrong"),
        ours="own path: our runtime waits; switch: never both with core's schedule",
        test=(
            "`test_d16_stock_frees_outputs_that_are_being_sent`, "
            "`test_d15_d16_no_run_has_either_configuration`, "
            "`tests/schedules/test_runtime.py::test_d16_outputs_are_deallocated_and_messages_stay_whole`"
        ),
        began="0.18",
        rules=(
            Rule(
                (
                    lambda x: x.interleaved,
                    lambda x: x.pp > 1,
                    lambda x: not x.has("--no-overlap-p2p-communication"),
                ),
                "A buffer may be freed while it is sent: gradients off by 4e-4 to 1e28, by chance.",
                f"{NEWER}, or with more than two stages --no-overlap-p2p-communication.",
            ),
        ),
    ),
    Defect(
        number="D17",
        affected="token counts",
        stock="an integer sum: `RuntimeError` deep inside for a fraction",
        since=State("there", "`RuntimeError`"),
        ours="guard: `losses/contract.py` names the loss; put weights into the sum",
        test="`test_d17_fractional_counts_are_refused_by_name`, `tests/losses/test_custom.py`",
    ),
    Defect(
        number="D18",
        affected="logged losses",
        stock="divided in place together with the loss: 1 logged instead of the sum 12",
        since=State("there", "1 instead of 12"),
        ours="own path: `pair` and `checked` copy",
        test="`test_d18_what_is_logged_survives_cores_divisions`",
    ),
    Defect(
        number="D19",
        affected="a loss of two values, per token",
        stock="nothing is counted: gradients 2 times too large at DP 2 and 4 times at CP 2",
        since=State("there", "2 at DP 2, 4 at CP 2"),
        ours="guard: three values or a sentence",
        test="`test_d19_pairs_are_refused_because_core_scales_them_with_the_layout`",
    ),
    Defect(
        number="D20",
        affected="hybrid context parallelism",
        stock="a flag is passed in place of a size, and a two-valued loss becomes 0",
        since=State("fixed", "gradient 2 of 2"),
        ours="not on our path: `--hybrid-context-parallel` is refused",
        test=(
            "`test_d20_stock_takes_a_flag_for_a_size_of_a_group`, "
            "`test_d20_hybrid_context_parallelism_is_refused`"
        ),
        between=tuple(
            (release, State("changed", "`TypeError`: `backward_step` lost an argument"))
            for release in ("0.17", "0.18")
        ),
        rules=(
            Rule(
                (lambda x: x.has("--hybrid-context-parallel"),),
                "A flag is taken for a size, a two-valued loss becomes 0; TypeError on 0.17 and "
                "0.18.",
                f"{NEWER}, or leave --hybrid-context-parallel out.",
            ),
        ),
    ),
    Defect(
        number="D21",
        affected="optimizer in fp32 and bf16",
        stock=(
            "applies a step whose norm is NaN: the weight behind it is NaN, and all are after"
            " the next step"
        ),
        since=State(
            "there",
            "all 48 weights are NaN after two steps, also with its new threshold of the norm",
        ),
        ours=(
            "own path: `optim/update.py` decides by the global norm, skips on all ranks, and "
            "says so"
        ),
        test=(
            "`test_d21_one_bad_gradient_skips_the_step`, `tests/optim/test_update.py`, "
            "`test_a_skipped_step_is_announced_once_when_it_happens`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.has("--no-check-for-nan-in-loss-and-grad"),
                    lambda x: not x.has("--fp16"),
                ),
                "One NaN gradient makes every weight NaN after two steps.",
                "Leave --no-check-for-nan-in-loss-and-grad out: the run then stops instead.",
            ),
        ),
    ),
    Defect(
        number="D22",
        affected="`--cross-entropy-loss-fusion` (native)",
        stock="its gradient is always rounded to bf16: error 1.9e-3 in fp32, 6e-8 unfused",
        since=State("there", "1.9e-3"),
        ours=(
            "guard: refused on a GPU without `--bf16`, where it is bit-equal to the unfused "
            "loss; not used on CPUs"
        ),
        test=(
            "`test_d22_stock_rounds_the_gradient_of_the_fused_loss_to_bf16`, "
            "`test_d22_in_bf16_the_fused_gradient_is_the_unfused_one`, "
            "`test_d22_the_fused_loss_without_bf16_is_refused_and_none_on_a_cpu`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.has("--cross-entropy-loss-fusion"),
                    lambda x: x.text("--cross-entropy-fusion-impl", "native") == "native",
                    lambda x: not x.has("--bf16"),
                ),
                "The gradient of the loss is rounded to bf16: error 1.9e-3.",
                "Leave --cross-entropy-loss-fusion out, or train with --bf16.",
            ),
        ),
    ),
    Defect(
        number="D23",
        affected="unfused cross-entropy",
        stock="leaves the softmax where fp32 logits were",
        since=State("there", "the softmax is left"),
        ours=(
            "not on our path: nothing reads logits after the loss; losses and gradients equal"
            " plain torch"
        ),
        test="`test_d23_logits_are_overwritten_and_losses_are_right`",
    ),
    Defect(
        number="D24",
        affected="label smoothing with tensor parallelism",
        stock=(
            "uses the size and the mean of the rank's part of the vocabulary: error 1.8e-2 at"
            " TP 2, 1e-7 at TP 1"
        ),
        since=State("there", "1.8e-2 at TP 2"),
        ours=(
            "ours: `--label-smoothing` belongs to chunked cross-entropy, which counts the "
            "whole vocabulary; refused with the others"
        ),
        test=(
            "`test_d24_stock_smooths_labels_over_the_part_of_the_vocabulary`, "
            "`test_d24_ours_is_the_same_on_two_ranks`, "
            "`test_d24_whole_logits_are_not_smoothed`"
        ),
        rules=(
            Rule(
                (lambda x: positive(x, "--label-smoothing"), lambda x: x.tp > 1),
                lambda x: (
                    f"Losses are smoothed over 1/{x.tp} of the vocabulary: 1.8e-2 off at TP 2."
                ),
                "Use --tensor-model-parallel-size 1, or no smoothing.",
            ),
        ),
    ),
    Defect(
        number="D25",
        affected="experts without Transformer Engine",
        stock="`NameError: te_general_gemm` in the router",
        since=State("fixed", "gives logits"),
        ours="own path: `layers/moe.py` `Router.gating`",
        test="`test_d25_the_router_works_without_transformer_engine`",
        began="0.17",
        rules=(
            Rule(
                (lambda x: x.experts, local),
                "NameError te_general_gemm where Transformer Engine is not installed.",
                f"{NEWER}, or install Transformer Engine.",
            ),
        ),
    ),
    Defect(
        number="D26",
        affected="expert bias with a padding mask",
        stock="masks an expert instead of a token where there are as many of both, else crashes",
        since=State("there", "0 instead of 3 tokens"),
        ours="not on our path: no padding mask",
        test=(
            "`test_d26_stock_masks_an_expert_instead_of_a_padded_token`, "
            "`test_d13_d26_no_router_is_given_padding`"
        ),
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.has("--moe-router-enable-expert-bias"),
                    lambda x: x.has("--sft"),
                ),
                "An expert's count is masked instead of a token's: 0 instead of 3 as measured.",
                "Pass no padding mask, or leave --moe-router-enable-expert-bias out.",
                depends="your forward step passes a padding mask",
            ),
        ),
    ),
    Defect(
        number="D27",
        affected="log of auxiliary losses",
        stock=(
            "a stage without experts leaves the depths of multi-token prediction out of its "
            "size, 4 against 5, and the sum over stages does not fit"
        ),
        since=State("fixed", "5 entries"),
        ours="own path: `train/step.py` sums one number per loss",
        test=(
            "`test_d27_stock_sizes_the_log_otherwise_without_experts`, "
            "`test_d27_a_stage_without_experts_logs_what_one_rank_logs`"
        ),
        began="0.17",
        rules=(
            Rule(
                (
                    lambda x: x.experts,
                    lambda x: x.mtp > 0,
                    lambda x: x.pp > 1,
                    lambda x: "0" in x.text("--moe-layer-freq"),
                    auxiliary,
                ),
                "Only the log: a stage without experts sizes it otherwise, 4 entries for 5.",
                f"{NEWER}.",
            ),
        ),
    ),
    Defect(
        number="D28",
        affected="a step without targets, experts, per token",
        stock="auxiliary gradients keep the factor: 64 times too large with 64 tokens",
        since=State("there", "64 times"),
        ours="own path: N = 0 makes the factor 0",
        test=(
            "`test_d28_a_step_without_targets_has_no_auxiliary_gradient`, "
            "`tests/layers/test_moe.py`"
        ),
        rules=(
            Rule(
                (lambda x: x.experts, lambda x: x.per_token, auxiliary, lambda x: x.masked),
                "In a step whose targets are all masked, auxiliary gradients are as many times too "
                "large as it has tokens.",
                f"Leave samples without targets out of the data, or {BY_MEAN}.",
            ),
        ),
    ),
)
