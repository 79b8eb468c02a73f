"""The rules that say which of Megatron-LM's flags trigger each defect in `defects.yaml`.

A rule also gives the size of the error with these flags. In each function, ``x`` holds the flags of
the command line that is checked.
"""

from __future__ import annotations

from megatron_ext.extras.audit.defect import Rule
from megatron_ext.extras.audit.flags import Flags

NEWER = "Use megatron-core 0.19"
BY_MEAN = "leave --calculate-per-token-loss out"


def auxiliary(x: Flags) -> bool:
    """Return whether the router has an auxiliary loss with a nonzero coefficient."""
    kinds = x.text("--moe-router-load-balancing-type", "aux_loss").split()
    balanced = any("aux_loss" in kind for kind in kinds) and positive(x, "--moe-aux-loss-coeff")
    return balanced or positive(x, "--moe-z-loss-coeff")


def positive(x: Flags, name: str) -> bool:
    """Return whether the flag ``name``, which may have several values, has a positive one."""
    return x.number(name, 0) > 0 or any(word.strip("[],0.") for word in x.text(name).split()[1:])


def sequence_loss(x: Flags) -> bool:
    """Return whether the load-balancing loss of experts is computed per sequence."""
    kinds = x.text("--moe-router-load-balancing-type", "aux_loss").split()
    return "seq_aux_loss" in kinds and positive(x, "--moe-aux-loss-coeff")


def split_tokens(x: Flags) -> int:
    """Return the number of ranks over which the tokens of a sequence are sharded."""
    return x.cp * (x.tp if x.sequence_parallel else 1)


def depth_weight(x: Flags) -> str:
    """Return a sentence on the error of megatron-core 0.16 in the weight of the last MTP depth."""
    length = x.size("--seq-length", 0)
    if x.masked or not length:
        return "A depth weighs by the targets it keeps; 12 % off with ragged masks as measured."
    share = 1 - x.mtp / length
    return f"Depth {x.mtp} weighs {share:.6f} of what it should with full masks."


def local(x: Flags) -> bool:
    """Return whether ``--transformer-impl local`` is given: megatron-core's own layers."""
    return x.text("--transformer-impl") == "local"


def learned(x: Flags) -> bool:
    """Return whether position embeddings are learned, which is the default."""
    kind = x.text("--position-embedding-type", "learned_absolute")
    return kind == "learned_absolute" and not x.has("--use-rotary-position-embeddings")


def uneven_pieces(x: Flags) -> bool:
    """Return whether full recomputation in groups of layers leaves a smaller group on a stage."""
    layers = x.size("--num-layers", 0)
    piece = x.size("--recompute-num-layers", 1)
    chunks = x.pp * (x.size("--num-virtual-stages-per-pipeline-rank"))
    return (
        x.text("--recompute-granularity") == "full"
        and x.text("--recompute-method") == "uniform"
        and piece > 0
        and (layers // max(chunks, 1)) % piece != 0
    )


def bias_recomputed(x: Flags) -> bool:
    """Return whether MLPs have biases and are recomputed selectively."""
    selective = x.text("--recompute-granularity") == "selective" or x.has("--recompute-activations")
    return selective and "mlp" in x.text("--recompute-modules").split() and x.biases


def depth_pieces(x: Flags) -> bool:
    """Return whether MTP depths are recomputed in groups of several layers."""
    full = x.text("--recompute-granularity") == "full"
    return full and x.mtp > 0 and x.size("--recompute-num-layers", 1) > 1


def misread_vocabulary(x: Flags) -> bool:
    """Return whether megatron-core chooses a wrong dtype for token ids at this vocabulary size."""
    size = x.size("--vocab-size", 0) or x.size("--padded-vocab-size", 0)
    return 65_500 <= size < 65_536


def no_vocabulary_size(x: Flags) -> bool:
    """Return whether no flag gives the size of the vocabulary."""
    return not x.has("--vocab-size", "--padded-vocab-size")


def whole_query_norm(x: Flags) -> bool:
    """Return whether tensor-parallel ranks all normalize the same compressed queries (MLA)."""
    latent = x.has("--multi-latent-attention") and x.has("--q-lora-rank")
    return latent and x.has("--qk-layernorm") and x.tp > 1 and not x.sequence_parallel


def modelopt(x: Flags) -> bool:
    """Return whether a flag selects the layers of NVIDIA's Model Optimizer."""
    return x.has("--modelopt-enabled", "--export-kd-teacher-load")


RULES: dict[str, tuple[Rule, ...]] = {
    "D1": (
        Rule(
            (
                lambda x: x.experts,
                lambda x: x.per_token,
                auxiliary,
                lambda x: split_tokens(x) > 1,
            ),
            lambda x: f"Auxiliary gradients are {1 / split_tokens(x):.4g} of what they should be.",
            f"{NEWER}, or {BY_MEAN}.",
        ),
    ),
    "D2": (
        Rule(
            (lambda x: x.experts, lambda x: x.per_token, auxiliary, lambda x: x.masked),
            "Auxiliary gradients grow by tokens / unmasked targets: 2 times with half masked.",
            f"Multiply the coefficients by the share of unmasked targets, or {BY_MEAN}.",
        ),
    ),
    "D3": (
        Rule(
            (
                lambda x: x.experts,
                lambda x: x.per_token,
                sequence_loss,
                lambda x: x.size("--micro-batch-size") > 1,
            ),
            lambda x: (
                f"Its gradients are {1 / x.size('--micro-batch-size'):.4g} of what they should be."
            ),
            f"{NEWER}, or --micro-batch-size 1.",
        ),
    ),
    "D4": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.masked),
            "A step without a target in a depth gives NaN in the log, and in gradients with "
            "the mean of means.",
            f"{NEWER}.",
        ),
    ),
    "D5": (
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
    "D6": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.has("--decoupled-lr"), lambda x: x.pp > 1),
            "The copies of the embedding take different steps: 0.001 instead of 0.01 as measured.",
            f"{NEWER}, or leave --decoupled-lr out.",
        ),
    ),
    "D7": (
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
    "D8": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.pp > 1, learned),
            "Each stage has a table of positions of its own: a third of the gradient as measured.",
            "Use --position-embedding-type rope; Megatron-LM's own checks refuse learned ones.",
        ),
    ),
    "D9": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.has("--sft")),
            "Depths learn targets across packed samples: 10 instead of 9 as measured.",
            "Leave --mtp-num-layers out of fine-tuning.",
        ),
    ),
    "D10": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.has("--sft"), lambda x: x.cp > 1),
            lambda x: f"IndexError on samples shorter than {2 * x.cp} tokens per depth.",
            "Use --context-parallel-size 1, or leave --mtp-num-layers out.",
        ),
    ),
    "D11": (
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
    "D13": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.experts, lambda x: x.has("--sft")),
            "Experts count padding as tokens: 32 instead of 19 (0.16), 20 (0.19) as measured.",
            "Fill samples whole.",
            depends="your forward step passes a padding mask",
        ),
    ),
    "D14": (
        Rule(
            (lambda x: x.mtp > 0, lambda x: x.masked),
            "Only the log is off: 0.991 of the right loss on ragged data as measured.",
            "Do not compare logged losses of depths between micro-batch sizes.",
        ),
    ),
    "D15": (
        Rule(
            (
                lambda x: x.interleaved,
                lambda x: x.pp == 2,
                lambda x: x.has("--no-overlap-p2p-communication"),
            ),
            "Messages of the two stages swap: gradients are 1.7 % off and more.",
            "Leave --no-overlap-p2p-communication out; Megatron-LM's own checks refuse it here.",
        ),
    ),
    "D16": (
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
    "D20": (
        Rule(
            (lambda x: x.has("--hybrid-context-parallel"),),
            "A flag is taken for a size, a two-valued loss becomes 0; TypeError on 0.17 and 0.18.",
            f"{NEWER}, or leave --hybrid-context-parallel out.",
        ),
    ),
    "D21": (
        Rule(
            (
                lambda x: x.has("--no-check-for-nan-in-loss-and-grad"),
                lambda x: not x.has("--fp16"),
            ),
            "One NaN gradient makes every weight NaN after two steps.",
            "Leave --no-check-for-nan-in-loss-and-grad out: the run then stops instead.",
        ),
    ),
    "D22": (
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
    "D24": (
        Rule(
            (lambda x: positive(x, "--label-smoothing"), lambda x: x.tp > 1),
            lambda x: f"Losses are smoothed over 1/{x.tp} of the vocabulary: 1.8e-2 off at TP 2.",
            "Use --tensor-model-parallel-size 1, or no smoothing.",
        ),
    ),
    "D25": (
        Rule(
            (lambda x: x.experts, local),
            "NameError te_general_gemm where Transformer Engine is not installed.",
            f"{NEWER}, or install Transformer Engine.",
        ),
    ),
    "D26": (
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
    "D27": (
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
    "D28": (
        Rule(
            (lambda x: x.experts, lambda x: x.per_token, auxiliary, lambda x: x.masked),
            "In a step whose targets are all masked, auxiliary gradients are as many times too "
            "large as it has tokens.",
            f"Leave samples without targets out of the data, or {BY_MEAN}.",
        ),
    ),
    "D29": (
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
    "D30": (
        Rule(
            (lambda x: not x.has("--mock-data"), lambda x: x.has("--data-cache-path")),
            "Old indices are used for new files: 19 instead of 39 as measured.",
            "Empty --data-cache-path when files of the data change.",
            depends="the files of the data changed since the cache was written",
        ),
    ),
    "D31": (
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
    "D34": (
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
    "D35": (
        Rule(
            (lambda x: x.experts, lambda x: x.etp != x.tp, lambda x: x.ep == 1),
            "Gradients of experts are summed over the wrong ranks: 0.69 off at TP 2.",
            f"{NEWER}, or --expert-tensor-parallel-size as the tensor-parallel size.",
        ),
    ),
    "D36": (
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
    "D37": (
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
    "D38": (
        Rule(
            (lambda x: x.has("--decoupled-lr"), lambda x: x.resumes),
            "After a resume matrices take the embedding's rate, or ValueError without the "
            "distributed optimizer.",
            f"{NEWER}, or leave --decoupled-lr out.",
        ),
    ),
    "D39": (
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
    "D40": (
        Rule(
            (lambda x: x.has("--override-opt-param-scheduler"), lambda x: x.resumes),
            "Another --lr changes nothing (0.16), or the resume fails (0.19).",
            "Resume with the same --lr, or with --no-load-optim.",
        ),
    ),
    "D41": (
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
    "D42": (
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
    "D43": (
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
}
"""Rules by number of the defect; the first that holds decides. Defects without rules do not depend
on flags."""
