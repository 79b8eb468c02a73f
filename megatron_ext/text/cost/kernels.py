"""Counts the GPU kernels of a GPT's micro-batch, and the bytes that they read and write.

The operations of the layers' matrix products are left out, since `Network.products` has them. Each
compiled function of `layers.pointwise` and `losses` is assumed to read its inputs and write its
outputs once. Classes of kernels are the keys of `planning.kernels.KINDS`, such as "pointwise".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config.layers import ATTENTION, has_experts, mixer_of, mlp_of
from megatron_ext.planning.kernels import Phase, Work, cast_of
from megatron_ext.planning.network import ATTENTION_BACKWARD
from megatron_ext.planning.stages import FP32, Stage
from megatron_ext.text.cost.dispatch import cast_work
from megatron_ext.text.cost.flops import WORD_EMBEDDING, GptFlops

ATTENTION_KERNELS = {
    ("linear", Phase.FORWARD): 2,
    ("linear", Phase.INPUT): 2,
    ("linear", Phase.WEIGHT): 2,
    ("attention", Phase.FORWARD): 1,
    ("attention", Phase.INPUT): 3,
    ("pointwise", Phase.FORWARD): 3,
    ("pointwise", Phase.INPUT): 1,
}
"""The number of kernels of attention, by class and phase; three split and rotate its inputs."""
MLP_KERNELS = {
    ("linear", Phase.FORWARD): 2,
    ("linear", Phase.INPUT): 2,
    ("linear", Phase.WEIGHT): 2,
    ("pointwise", Phase.FORWARD): 1,
    ("pointwise", Phase.INPUT): 1,
}
"""The number of kernels of an MLP; used for experts too. The pointwise one is the activation."""
HALF_KERNELS = {
    ("pointwise", Phase.FORWARD): 2,
    ("pointwise", Phase.INPUT): 2,
    ("plumbing", Phase.WEIGHT): 2,
}
"""The number of kernels around a mixer or an MLP: a norm and a residual addition.

In the backward pass the norm takes two kernels. Those of the class "plumbing" cast the gradient of
its weight to float32 and add it to the gradient buffer.
"""
CLASSES = (*ATTENTION_KERNELS, ("plumbing", Phase.WEIGHT))
"""Classes and phases of the kernels of a layer."""
PASSES = 4
"""The number of kernels that run over a block of logits in the chunked cross-entropy.

Three compute the maxima and the sums of exponentials, one computes the gradient."""
VECTOR_KERNELS = 18
"""The number of further kernels for a block; they work on vectors with one number per token."""
LOSS_KERNELS = 66
"""The number of kernels of a micro-batch for loss weights, sums of losses and reported values.

They work on vectors with one number per token."""

LOGIT = 2 + 4
"""Bytes that the chunked cross-entropy moves per 16-bit logit.

A first pass reads the logit; a second pass reads it and overwrites it with its gradient."""
EAGER_LOGIT = 48
"""Bytes per 16-bit logit moved by the eager cross-entropy: all logits at once, nothing compiled."""

ZEROING = 4
"""Bytes per weight that a step writes to zero the gradients of output layer and embedding."""
HEAD_PLUMBING = 12
"""Bytes moved per weight of the output layer when its float32 gradient is added to the buffer.

The gradient is read; the buffer is read and written. The first gradient of a step is written, not
added, which saves 4 bytes, unless an embedding shares the weight."""
ROW_PLUMBING = 2 + 4 + 4 + 8
"""Bytes moved per element of the embedding's output when its gradient is added to the buffer.

A cast from 16 bits to float32 reads 2 and writes 4. The addition reads these 4, and reads and
writes 4 in the gradient buffer.
"""


def other_work(network: GptFlops, stage: Stage) -> list[Work]:
    """Return the kernels of one micro-batch in a stage that `Network.products` does not count.

    The matrix products of layers are listed too, but without their operations.
    """
    x = network.sizes
    count = network.num_microbatches
    fp8 = network.config.fp8
    again = Counter(network.costs[number] for number in network.run_again(stage))
    work: list[Work] = []
    for number, layers in network.unlike(stage.layers):
        kind = x.kinds[number]
        sent = cast_work(network) if has_experts(kind) else []
        computed = layer_work(network, kind, joins=network.joins_activation(number))
        repeated = computed if network.keeps_tokens else [*computed, *sent]
        times = again[network.costs[number]]
        work += [part * times for part in _run_again(repeated) if times]
        of_layer = [*computed, *sent]
        if x.in_8_bits(fp8, number):
            # Inputs and output gradients of linear layers; once in a step their weights.
            linears = layer_kernels(network, kind)["linear", Phase.FORWARD]
            casts = linears * cast_of(fp8.fp8_recipe)[1]
            of_layer.append(Work("casts", Phase.FORWARD, kernels=casts * (1 + 1 / count)))
            of_layer.append(Work("casts", Phase.INPUT, kernels=casts))
        work += [part * layers for part in of_layer]
    for _ in range(stage.depths):
        sent = cast_work(network) if has_experts(x.depth) else []
        computed = [*layer_work(network, x.depth), *_norms(network, 3)]
        work += [*computed, *sent]
        if network.recomputes_depths:
            work += _run_again(computed if network.keeps_tokens else [*computed, *sent])
    if stage.final_norm:
        work += _norms(network, 1)
    if stage.embedding:
        embedded = 2 * network.residual
        work.append(Work("pointwise", Phase.FORWARD, num_bytes=embedded, kernels=2))
    if (stage.embedding or stage.depths) and network.updates(WORD_EMBEDDING):
        moved = ZEROING * network.table / count + ROW_PLUMBING * x.tokens * x.h
        work.append(Work("plumbing", Phase.WEIGHT, num_bytes=moved, kernels=8))
    return work + (_head_work(network, stage) if stage.head else [])


def _run_again(work: Sequence[Work]) -> list[Work]:
    """Return the kernels of the forward pass, as the backward pass runs them once more."""
    return [replace(x, phase=Phase.INPUT) for x in work if x.phase is Phase.FORWARD]


def layer_kernels(network: GptFlops, kind: str) -> Counter[tuple[str, Phase]]:
    """Return the number of kernels of a layer of this kind, by class and phase.

    Of seven pointwise kernels of a plain layer's forward pass, one adds to the residual stream and
    normalizes the sum.
    """
    count: Counter[tuple[str, Phase]] = Counter()
    letter = mixer_of(kind)
    if letter:
        mixer = (
            ATTENTION_KERNELS if letter == ATTENTION else network.mixers[letter].kernels(network)
        )
        count.update(mixer)
        count.update(HALF_KERNELS)
    if mlp_of(kind):
        count.update(MLP_KERNELS)
        count.update(HALF_KERNELS)
    if letter and mlp_of(kind):
        count["pointwise", Phase.FORWARD] -= 1
    return count


def layer_work(network: GptFlops, kind: str, *, joins: bool = False) -> list[Work]:
    """Return the kernels of one layer, one `Work` for each entry of `CLASSES`.

    Only the class "pointwise" gets a number of bytes here, and only the class "attention" of a
    mixer in chunks gets operations.

    Args:
        kind: the kind of the layer (see `config.layers`).
        joins: whether the kernel that casts to 8 bits also computes the activation. If so, the
            bytes of the activation are left out here, since they count as bytes of the cast.
    """
    x = network.sizes
    r = network.residual
    letter = mixer_of(kind)
    halves = bool(letter) + bool(mlp_of(kind))
    # Forward, a norm moves 2 tensors and a sum 3, but a sum with the norm after it 4. Going back,
    # each norm reads 3, one of them the gradient of the residual, and writes 1.
    forward: float = (5 * halves - (halves == 2)) * r
    backward: float = 4 * halves * r
    chunks = 0.0
    if letter == ATTENTION:
        qkv = x.tokens * x.projected // x.tp * x.width
        forward += 2 * qkv
        backward += 2 * qkv
    elif letter:
        mixer = network.mixers[letter]
        chunks = mixer.chunk_flops(network)
        both = mixer.moved(network)
        forward += both[0]
        backward += both[1]
    if mlp_of(kind):
        both = _mlp_bytes(network, experts=has_experts(kind), joins=joins)
        forward += both[0]
        backward += both[1]
    moved = {("pointwise", Phase.FORWARD): forward, ("pointwise", Phase.INPUT): backward}
    flops = {
        ("attention", Phase.FORWARD): chunks,
        ("attention", Phase.INPUT): ATTENTION_BACKWARD * chunks,
    }
    graphed = network.config.cuda_graphs.cuda_graph_impl == "local"
    counted = layer_kernels(network, kind)
    return [
        Work(
            *which,
            flops=flops.get(which, 0.0),
            num_bytes=moved.get(which, 0),
            kernels=counted[which],
            width=x.width,
            graphed=graphed,
        )
        for which in CLASSES
    ]


def _mlp_bytes(network: GptFlops, *, experts: bool, joins: bool) -> tuple[int, int]:
    """Return the bytes that the pointwise kernels of an MLP move, forward and backward.

    For ``joins`` see `layer_work`. Experts sort tokens there and back.
    """
    x = network.sizes
    f = x.tokens * x.f // x.tp * x.width
    routed = 0
    if experts:
        routed = network.routed * network.routed_hidden * x.width
        f = network.routed * network.expert_width * x.width
    if joins:
        return 4 * routed, 4 * routed
    wide = 2 * f if network.config.model.gated else f
    return 4 * routed + wide + f, 4 * routed + 2 * wide + f


def _norms(network: GptFlops, count: int) -> list[Work]:
    """Return the kernels of ``count`` norms of the residual stream.

    Each norm moves 2 tensors in the forward pass and 3 in the backward pass.
    """
    return [
        Work("pointwise", phase, num_bytes=count * tensors * network.residual, kernels=2 * count)
        for phase, tensors in ((Phase.FORWARD, 2), (Phase.INPUT, 3))
    ]


def _overwrites_head(network: GptFlops, stage: Stage) -> bool:
    """Return whether the output layer's first weight gradient of a step overwrites the buffer.

    Return False where every gradient is added to the gradient buffer. This is so with CUDA
    graphs, with sharded gradients, and on a stage whose embedding shares the layer's weight.
    """
    tied = not network.config.model.untie_embeddings_and_output_weights
    graphed = network.config.cuda_graphs.cuda_graph_impl == "local"
    adds = graphed or network.config.optimizer.shards_gradients
    return not adds and not (tied and (stage.embedding or stage.depths))


def _head_work(network: GptFlops, stage: Stage) -> list[Work]:
    """Return the kernels of the output layer and the loss.

    The chunked cross-entropy computes the gradients in its forward pass, block by block, and
    sums the weight gradient in float32. Per element of the weight, the first block writes 4
    bytes, and each other block reads and writes 8. Of these, 2 bytes per block are not counted
    here, because the assumed rate of matrix products includes writing a 16-bit result.
    """
    x = network.sizes
    losses = 1 + x.depths
    chunked = network.config.loss.cross_entropy_impl == "chunked"
    counted = network.logits_flops()
    blocks = -(-x.tokens // network.loss_rows) if chunked else 1
    count = losses * blocks
    summed = 0
    trains = network.updates(network.head)
    if chunked and trains:
        summed = network.table * (8 * blocks - 4 - 2 * blocks)
    inputs, weights = (Phase.FORWARD,) * 2 if chunked else (Phase.INPUT, Phase.WEIGHT)
    per_logit = (LOGIT if chunked else EAGER_LOGIT) * x.width / 2
    logits = losses * x.tokens * x.v // x.tp
    work = [
        Work("head", Phase.FORWARD, counted.head, 0.0, count, x.width),
        Work("head", inputs, counted.head, 0.0, count, x.width),
        Work("head", weights, counted.head_weights, losses * summed, count, x.width),
        Work(
            "logits",
            Phase.FORWARD,
            0.0,
            per_logit * logits,
            count * (PASSES + VECTOR_KERNELS) + LOSS_KERNELS,
        ),
    ]
    if trains:
        first = -FP32 if _overwrites_head(network, stage) else ZEROING
        moved = (HEAD_PLUMBING * losses + first / network.num_microbatches) * network.table
        work.append(Work("plumbing", Phase.WEIGHT, num_bytes=moved, kernels=5 * losses))
    return work
