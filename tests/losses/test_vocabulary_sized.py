"""Steps run few operations on tensors of the size of the embedding, with the right gradients."""

from collections import Counter
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.layers import onednn
from megatron_ext.layers.weight_gradients import StepGradients
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.ranks import ParallelContext, on_ranks
from tests.runs_from_inside import build
from tests.training_runs import TINY, mock_data

FLAGS = [*TINY, *mock_data(), *"--train-iters 4 --eod-mask-loss --global-batch-size 8".split()]
VIEWS = {"t", "view", "detach", "alias", "expand", "_unsafe_view", "transpose", "select", "slice"}
MAKES_NOTHING = {"empty_like", "empty", "empty_strided", "new_empty"}

IN_PLACE = {
    "mm",  # logits of a block, and gradients of its hidden states
    "addmm_",  # the weight's gradient in a block
    "addcmul_",  # the sum over blocks times the loss scale, added to the buffer
    "embedding",
    "_index_put_impl_",  # adds the rows of this micro-batch's tokens
}
"""Operations that a step needs on tensors ``[v, h]`` if gradients are added to the buffer."""


class Sized(TorchDispatchMode):
    """Counts operations that take or make a tensor of a shape, views apart."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes = {shape, shape[::-1]}
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if name not in VIEWS | MAKES_NOTHING and self.shapes & {tuple(x.shape) for x in tensors}:
            self.found[name] += 1
        return out


def gradients(
    run: Run, batches: Any, *, in_place: bool, overwrite: bool = False
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Return the gradients of a step's parameters, and the operations on tensors ``[v, h]``.

    With ``overwrite`` the buffers hold old gradients before.
    """
    run.runner.transformer_config.adds_in_place = in_place
    StepGradients(run.chunks).start(overwrite=overwrite)
    (chunk,) = run.chunks
    names = dict(chunk.named_parameters())
    (weight,) = (p for name, p in names.items() if name.endswith("word_embeddings.weight"))
    with Sized(tuple(weight.shape)) as sized:
        run.runner.compute_gradients(StepInputs(batches, run.batch_size.num_microbatches))
    return {name: p.main_grad.clone() for name, p in names.items()}, sized.found


def check(context: ParallelContext, words: str, allowed: set[str]) -> None:
    run = build([*FLAGS, *words.split()], context)
    batches = run.train_source.next_step(run.batch_size.num_microbatches)
    truth, before = gradients(run, batches, in_place=False)
    found, after = gradients(run, batches, in_place=True)
    assert before["add_"] + before["add"] > after["add_"] + after["add"]
    again, first = gradients(run, batches, in_place=True, overwrite=True)
    for name, gradient in truth.items():
        for other in (found, again):
            difference = (other[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert difference < 1e-6, name
    # The first sum over blocks of a step is written to the buffer, if the head has a weight alone.
    writes = "untie" in words and "no-untie" not in words
    assert (first["mul"], after["addcmul_"] - first["addcmul_"]) == (writes, writes)
    assert set(after) <= allowed


UNTIED = "--untie-embeddings-and-output-weights"
TIED = "--no-untie-embeddings-and-output-weights"
TP2 = "--tensor-model-parallel-size 2"
HOOKS = {"add_", "add", "embedding_dense_backward", "clone"}


@pytest.mark.parametrize(
    ("sizes", "words", "allowed"),
    [
        ({}, UNTIED, IN_PLACE),
        ({}, TIED, IN_PLACE),
        ({}, f"{TIED} --mtp-num-layers 2", IN_PLACE),
        ({"dp": 2}, f"{TIED} --overlap-grad-reduce", IN_PLACE),
        ({"tp": 2}, f"{TP2} {TIED} --sequence-parallel --position-embedding-type rope", IN_PLACE),
        ({"tp": 2}, f"{TP2} {UNTIED}", IN_PLACE),
        # Logits of all tokens at once come from a layer whose gradient is autograd's.
        ({}, f"{TIED} --cross-entropy-impl eager", {*IN_PLACE, *HOOKS}),
    ],
)
def test_gradients_of_the_vocabulary_are_made_once(
    sizes: dict[str, int], words: str, allowed: set[str]
) -> None:
    # oneDNN, which is for CPUs, cannot add to a matrix.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "takes", lambda *_: False)
        on_ranks(check, sizes, words=words, allowed=allowed)
