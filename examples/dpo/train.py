"""Direct preference optimization (DPO, arXiv:2305.18290) of a GPT, in any layout.

Each row of the data has a prompt, a chosen and a rejected answer. With the policy pi, the model
that is trained, and the reference pi_ref, a frozen model, the margin of a pair is

    m = beta (log pi(chosen) - log pi_ref(chosen) - log pi(rejected) + log pi_ref(rejected))

where log pi(answer) sums over the tokens of the answer. The loss of a pair, with label smoothing e:

    sigmoid  -(1 - e) log sigmoid(m) - e log sigmoid(-m)
    ipo      (m / beta - 1 / (2 beta))^2 (arXiv:2310.12036), where log pi(answer) is the mean over
             the answer's tokens

The loss of a step is its mean over the pairs of the global batch. A pair is one sample: a row of
--seq-length tokens that holds both conversations as two documents, so every layout works as in
pretraining. The gradient of a pair's loss is a weighted sum of the gradients of the tokens' log
probabilities. So one pass over the head finds the weights, and a second one is a weighted
cross-entropy, which never holds the logits.

The reference is scored once, before the first step. It is the model of --dpo-reference-hf FOLDER,
without adapters, or else the model from which the run starts. The log probabilities are kept in
--save, where a resumed run finds them. If they are lost, they can be computed again only under
LoRA adapters that have started at zero: the model with its adapters switched off is the one from
which the run started.

    python examples/dpo/train.py --dpo-data pairs.jsonl --load-hf models/chat --save out/dpo ...
    SMOKE=1 bash examples/dpo/train.sh

Rows are those of TRL: {"prompt", "chosen", "rejected"} with texts or lists of messages, or whole
conversations in "chosen" and "rejected", whose common beginning is the prompt, whether or not the
row has it as "prompt" too. A text is a turn of the user or of the assistant. Columns that nothing
uses, such as scores, are counted at the start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.utils import unwrap_model
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.config.flags import flag
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.data.loader import StepDataset
from megatron_ext.disk.reading import lines_of, row_of
from megatron_ext.errors import CheckpointError, DataError
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, pair, share_of_step
from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.run import text_source, with_tokenizer
from megatron_ext.text.sft.chat import Chat, build_chat
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.dataset import lay_out
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.masks import tokenize_conversation
from megatron_ext.text.step import gpt_forward_step, output_head
from megatron_ext.text.task import GPT
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.main import main
from megatron_ext.train.task import Datasets

CHOSEN, REJECTED = 0, 1
LOSSES = ("sigmoid", "ipo")
EQUAL = "pairs have equal answers"


@dataclasses.dataclass(frozen=True)
class DpoFlags:
    """The flags of this program."""

    dpo_data: str | None = flag(None, "a file of JSON lines with the pairs to train on")
    dpo_valid_data: str | None = flag(None, "a file with the pairs to evaluate")
    dpo_beta: float = flag(0.1, "how strongly the policy is held to the reference")
    dpo_loss: str = flag("sigmoid", "loss of a pair", choices=LOSSES)
    dpo_label_smoothing: float = flag(0.0, "share of pairs whose answers are taken as swapped")
    dpo_reference_hf: str | None = flag(
        None, "folder of the reference, of the policy's shape (default: the starting model)"
    )

    def errors(self, config: RunConfig) -> list[str]:
        """Return a sentence on each wrong value."""
        errors = []
        if self.dpo_data is None:
            errors.append("`--dpo-data` is missing; name a file of pairs.")
        if not self.dpo_beta > 0:
            errors.append(f"`--dpo-beta` ({self.dpo_beta}) must be above 0; use 0.1.")
        if not 0 <= self.dpo_label_smoothing < 0.5:
            errors.append(
                f"`--dpo-label-smoothing` ({self.dpo_label_smoothing}) must be from 0 to below "
                "0.5; use 0.1."
            )
        if self.dpo_label_smoothing and self.dpo_loss != "sigmoid":
            errors.append("`--dpo-label-smoothing` goes with `--dpo-loss sigmoid`; leave it out.")
        if config.loss.cross_entropy_impl != "chunked":
            errors.append(
                f"`--cross-entropy-impl` ({config.loss.cross_entropy_impl}) must be chunked here; "
                "leave it out."
            )
        if config.checkpoint.save is None:
            errors.append("`--save` is missing; the reference's log probabilities are kept there.")
        return errors


Answers = tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]
"""The (token ids, mask) of the chosen and of the rejected conversation of a pair."""


class Pairs(StepDataset):
    """Pairs of answers, each a row of two documents.

    ``sample_ids`` of a row are ``2 * number + side``, where the pair's number counts from ``first``
    and the side is `CHOSEN` or `REJECTED`; -1 in padding. The ``loss_mask`` of an answer's token is
    1 / n, for n such tokens in the row, so that the weights of a pair sum up to 1.
    """

    packs_documents = True

    def __init__(self, pairs: Sequence[Answers], first: int, length: int, pad_id: int) -> None:
        self.pairs = pairs
        self.first = first
        self._length = length
        self._pad_id = pad_id

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = 2 * (self.first + index)
        answers = {number + side: pair for side, pair in enumerate(self.pairs[index])}
        row = lay_out(answers, self._length, self._pad_id)
        row["loss_mask"] /= row["loss_mask"].sum()
        return {name: torch.from_numpy(column) for name, column in row.items()}


def read_pairs(name: str, chat: Chat, length: int, intake: Intake) -> list[Answers]:
    """Return the tokenized pairs of a file of JSON lines; add to ``intake`` what is not used.

    Raises:
        DataError: the file or a row cannot be read, a row lacks an answer, or its two conversations
            do not fit in ``length`` tokens together.
    """
    pairs = []
    for number, line in enumerate(lines_of(name), 1):
        place = Place(name, number)
        row = row_of(line)
        if row is None or not {"chosen", "rejected"} <= row.keys():
            raise DataError(
                f"{place} must be a JSON object with `chosen` and `rejected`; mend the row."
            )
        prompt, chosen, rejected = _parts(row, place)
        rest = {key: row[key] for key in row.keys() - {"prompt", "chosen", "rejected"}}
        sft = dataclasses.replace(chat.sft, sft_row_format="prompt-completion")
        columns = sft.prompt_column, sft.response_column
        answers = []
        for answer in (chosen, rejected):
            whole = {**rest, columns[0]: prompt, columns[1]: answer}
            conversation = read_conversation(whole, place, sft)
            ids, mask = tokenize_conversation(chat.tokenizer, conversation, sft)
            if answers:
                # The columns beside the answers have been counted with the chosen one.
                ignored = conversation.intake.ignored
                for column in [x for x in ignored if x.startswith("column ")]:
                    del ignored[column]
            intake.add(conversation.intake)
            if not any(mask[1:]):
                raise DataError(f"{place} has an answer without a token; give both answers.")
            answers.append((ids, mask))
        needed = sum(len(ids) - 1 for ids, _ in answers)
        if needed > length:
            raise DataError(
                f"{place} takes {needed} tokens for its two conversations, but `--seq-length` is "
                f"{length}; raise it, or shorten the row."
            )
        if answers[CHOSEN] == answers[REJECTED]:
            intake.counts[EQUAL] += 1
        pairs.append((answers[CHOSEN], answers[REJECTED]))
    if not pairs:
        raise DataError(f"{name} holds no pairs; give rows with prompt, chosen and rejected.")
    return pairs


def _parts(row: Mapping[str, Any], place: Place) -> tuple[Any, Any, Any]:
    """Return the prompt, the chosen and the rejected answer of a row."""
    chosen, rejected = row["chosen"], row["rejected"]
    are_lists = isinstance(chosen, list) and isinstance(rejected, list)
    count = _in_common(chosen, rejected) if are_lists else 0
    if "prompt" in row:
        prompt = row["prompt"]
        if not 0 < count < min(len(chosen), len(rejected)):
            return prompt, chosen, rejected
        if isinstance(prompt, list) and prompt != chosen[: min(len(prompt), count)]:
            return prompt, chosen, rejected
        texts = [x for turn in chosen[:count] if isinstance(turn, dict) for x in turn.values()]
        if isinstance(prompt, str) and prompt not in texts:
            raise DataError(
                f"{place} has a `prompt` that is none of the messages with which `chosen` and "
                "`rejected` both begin; leave out one of the two."
            )
    elif not are_lists:
        raise DataError(
            f"{place} has no `prompt`, and `chosen` and `rejected` are no lists of messages; give "
            "the prompt."
        )
    if not 0 < count < min(len(chosen), len(rejected)):
        raise DataError(
            f"{place} has conversations with {count} messages in common, of {len(chosen)} and "
            f"{len(rejected)}; they must begin alike and end with different answers."
        )
    return chosen[:count], chosen[count:], rejected[count:]


def _in_common(chosen: list[Any], rejected: list[Any]) -> int:
    """Return the number of messages with which both conversations begin."""
    same = [one == other for one, other in zip(chosen, rejected, strict=False)]
    return same.index(False) if False in same else len(same)


@dataclasses.dataclass
class Reference:
    """The reference's log probabilities of all pairs.

    Attributes:
        datasets: the train and the valid split.
        tokenizer: the tokenizer of the run.
        scores: ``[pairs, 2]`` float32, sums over the answers' tokens; None until they are known.
        is_scoring: whether the model now computes the reference's scores, to be recorded.
        unused: sentences on what in the data is not used.
    """

    datasets: tuple[Pairs, Pairs | None] | None = None
    tokenizer: Tokenizer | None = None
    scores: Tensor | None = None
    is_scoring: bool = False
    unused: list[str] = dataclasses.field(default_factory=list)

    def of(self, numbers: Tensor) -> Tensor:
        """Return the scores ``[b, 2]`` of the pairs ``[b]``; a negative number stands for none."""
        assert self.scores is not None
        return self.scores.to(numbers.device)[numbers.clamp(min=0)]


REFERENCE = Reference()
"""The reference of this process, a rank of one run."""


def prepare(config: RunConfig) -> tuple[RunConfig, Any]:
    """Tokenize the pairs; return the configuration and what the data sets need."""
    config, tokenizer = with_tokenizer(config)
    flags = config.section(DpoFlags)
    chat = build_chat(tokenizer, config.section(TokenizerConfig), config.section(SftConfig))
    length = config.model.seq_length
    assert length is not None and flags.dpo_data is not None
    pad = chat.tokenizer.pad_token_id or 0
    intake = Intake()
    train = Pairs(read_pairs(flags.dpo_data, chat, length, intake), 0, length, pad)
    valid = None
    if flags.dpo_valid_data is not None:
        pairs = read_pairs(flags.dpo_valid_data, chat, length, intake)
        valid = Pairs(pairs, len(train), length, pad)
    REFERENCE.unused = intake.warnings()
    if intake.counts[EQUAL]:
        REFERENCE.unused.append(f"{intake.counts[EQUAL]:,} {EQUAL}, which teach nothing")
    REFERENCE.datasets = train, valid
    REFERENCE.tokenizer = tokenizer
    return config, tokenizer


def build_pairs(config: RunConfig, *_: Any) -> Datasets:
    """Return the splits that `prepare` has read."""
    assert REFERENCE.datasets is not None
    return Datasets(*REFERENCE.datasets, None)


def forward_step(
    config: RunConfig, batch: Batch, model: torch.nn.Module, counts: StepCounts | None
) -> tuple[Tensor, LossFunction]:
    """Run one model chunk on one micro-batch; return its output and the loss function."""
    hidden, _ = gpt_forward_step(config, batch, model, counts)

    def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Report]:
        return preference_loss(config, hidden, batch, model, counts)

    return hidden, loss


def preference_loss(
    config: RunConfig,
    hidden: Tensor,
    batch: Batch,
    model: torch.nn.Module,
    counts: StepCounts | None,
) -> tuple[Tensor, Tensor, Report]:
    """Return the loss of a micro-batch, its number of targets and its log entries.

    Args:
        hidden: the last hidden states, ``[s, b, h]``; ``[s/tp, b, h]`` with sequence parallelism.
        counts: the counts of the step; None in evaluation.
    """
    flags = config.section(DpoFlags)
    head = output_head(model)
    hidden = hidden.to(head.weight.dtype)
    is_answer = (batch.loss_weights > 0).float()

    def cross_entropy(token_weights: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_linear_cross_entropy(
            hidden,
            head.weight,
            batch.labels,
            token_weights,
            tp_group=head.tp_group,
            sequence_parallel=head.sequence_parallel,
            block_size=config.loss.cross_entropy_chunk_size,
            bias=head.bias,
            softcap=head.softcap,
        )

    with torch.no_grad():
        losses, _ = cross_entropy(is_answer)
        scores, lengths, numbers, weights = _sums(losses, is_answer, batch)
    if REFERENCE.is_scoring:
        _record(scores, numbers, weights)
        nothing = hidden.sum() * 0
        return nothing, torch.count_nonzero(is_answer).int(), {}
    reference = REFERENCE.of(numbers)
    if flags.dpo_loss == "ipo":
        scores, reference = scores / lengths, reference / lengths
    values, slopes, report = pair_losses(flags, scores, reference)
    # The loss falls if the chosen answer becomes likelier, and rises with the rejected one. The
    # cross-entropy of a token is minus its log probability.
    slopes = slopes * weights
    by_side = torch.stack([-slopes, slopes], dim=1)
    if flags.dpo_loss == "ipo":
        by_side = by_side / lengths
    side = batch.sample_ids.clamp(min=0) % 2
    token_weights = torch.gather(by_side, 1, side) * is_answer
    share = share_of_step(
        batch.loss_weights, counts, per_token=config.training.calculate_per_token_loss
    )
    _, total = cross_entropy(token_weights * share)
    summed = (values * weights).sum()
    total = total + (summed * share - total).detach()
    entries = {name: pair((value * weights).sum(), weights.sum()) for name, value in report.items()}
    return (
        total,
        torch.count_nonzero(is_answer).int(),
        {"dpo loss": pair(summed, weights.sum())} | entries,
    )


def pair_losses(
    flags: DpoFlags, scores: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return, for each pair, the loss, its derivative by log pi(chosen), and what to log.

    The derivative by log pi(rejected) is the opposite.

    Args:
        scores, reference: log probabilities of the answers ``[b, 2]``, of policy and reference.
    """
    beta = flags.dpo_beta
    rewards = beta * (scores - reference)
    margins = rewards[:, CHOSEN] - rewards[:, REJECTED]
    if flags.dpo_loss == "ipo":
        distance = margins / beta - 1 / (2 * beta)
        values, slopes = distance**2, 2 * distance
    else:
        e = flags.dpo_label_smoothing
        values = -(1 - e) * F.logsigmoid(margins) - e * F.logsigmoid(-margins)
        slopes = beta * (e * torch.sigmoid(margins) - (1 - e) * torch.sigmoid(-margins))
    report = {
        "rewards/chosen": rewards[:, CHOSEN],
        "rewards/rejected": rewards[:, REJECTED],
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
        "logps/chosen": scores[:, CHOSEN],
        "logps/rejected": scores[:, REJECTED],
    }
    return values, slopes, report


def _sums(losses: Tensor, is_answer: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sums over the answers of each row, all the same on the row's context-parallel ranks.

    Returns:
        scores: log probabilities of the two answers, ``[b, 2]``.
        lengths: their numbers of tokens, ``[b, 2]``, at least 1.
        numbers: the numbers of the pairs, ``[b]``.
        weights: 1 for a pair, 0 for a row that only fills up a step, ``[b]``.
    """
    assert batch.sample_ids is not None
    on_side = torch.stack([batch.sample_ids % 2 == side for side in (CHOSEN, REJECTED)], dim=2)
    tokens = on_side * is_answer.unsqueeze(2)
    sums = torch.cat([-(losses.unsqueeze(2) * tokens).sum(1), tokens.sum(1)], dim=1)
    numbers = batch.sample_ids.amax(dim=1) // 2
    group = batch.loss_inputs
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=group)
    scores, lengths = sums[:, :2], sums[:, 2:]
    return scores, lengths.clamp(min=1), numbers, (lengths.sum(1) > 0).float()


def with_group(
    _config: RunConfig, batches: Sequence[Batch], context: ParallelContext
) -> Sequence[Batch]:
    """Return a step's micro-batches with the ranks that share their rows, for `_sums`."""
    return [dataclasses.replace(batch, loss_inputs=context.pgs.cp) for batch in batches]


def _record(scores: Tensor, numbers: Tensor, weights: Tensor) -> None:
    """Note the reference's scores of a micro-batch's pairs."""
    assert REFERENCE.scores is not None
    for number, row, weight in zip(numbers.tolist(), scores.cpu(), weights.tolist(), strict=True):
        if weight:
            REFERENCE.scores[number] = row


class ScoreReference(Callback):
    """Scores all pairs with the reference before the first step, or reads its scores."""

    def on_train_start(self) -> None:
        """Raise a CheckpointError if a resumed run has neither the scores nor a way to get them."""
        run = self.run
        path = Path(str(run.config.checkpoint.save)) / "reference.npz"
        identity = self._identity()
        known = path.is_file()
        # All ranks must take the same way.
        exists = torch.tensor(int(known), device=run.device)
        torch.distributed.all_reduce(exists, torch.distributed.ReduceOp.MIN)
        if int(exists):
            with np.load(path, allow_pickle=False) as stored:
                if str(stored["identity"]) == identity:
                    REFERENCE.scores = torch.from_numpy(stored["scores"])
                    return
        flags = run.config.section(DpoFlags)
        is_start = run.progress.iteration == 0
        if flags.dpo_reference_hf is None and not is_start and not _is_start_without(run.config):
            raise CheckpointError(
                f"{path} does not hold the reference's log probabilities of these pairs, and the "
                "model has been trained since; give the starting model by `--dpo-reference-hf`."
            )
        self._score()
        if run.context.rank == run.context.reporting_rank:
            assert REFERENCE.scores is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(".reference.npz")
            np.savez(temporary, scores=REFERENCE.scores.numpy(), identity=identity)
            temporary.rename(path)

    def _identity(self) -> str:
        """Return a digest of the pairs and of the reference."""
        assert REFERENCE.datasets is not None
        flags = self.run.config.section(DpoFlags)
        digest = hashlib.sha256(repr(flags.dpo_reference_hf).encode())
        for split in REFERENCE.datasets:
            digest.update(repr(split.pairs if split is not None else None).encode())
        return digest.hexdigest()

    def _score(self) -> None:
        """Fill `Reference.scores` on the ranks of the last stage."""
        run = self.run
        splits = [split for split in REFERENCE.datasets or () if split is not None]
        REFERENCE.scores = torch.zeros(sum(map(len, splits)), 2)
        REFERENCE.is_scoring = True
        try:
            with torch.no_grad(), self._reference_in_place():
                for split in splits:
                    self._pass_over(split)
        finally:
            REFERENCE.is_scoring = False
        scores = REFERENCE.scores.to(run.device)
        # Each replica has scored its own pairs; the others are zero there.
        torch.distributed.all_reduce(scores, group=run.context.pgs.dp)
        REFERENCE.scores = scores.cpu()

    def _pass_over(self, split: Pairs) -> None:
        run = self.run
        source = text_source(run, split, REFERENCE.tokenizer, 0, True)
        batch = run.evaluation_batch_size
        count = batch // run.batch_size.samples_per_microbatch
        for chunk in run.chunks:
            chunk.eval()
        for _ in range(-(-len(split) // batch)):
            run.runner.evaluate(source.next_step(count), count)
        for chunk in run.chunks:
            chunk.train()

    @contextmanager
    def _reference_in_place(self) -> Iterator[None]:
        """Within the context, the chunks compute the reference."""
        run = self.run
        folder = run.config.section(DpoFlags).dpo_reference_hf
        if folder is None and run.progress.iteration == 0:
            # Adapters of another run, or that start from singular values, belong to the start.
            yield
            return
        with adapters_off(run.chunks):
            if folder is None:
                yield
                return
            from megatron_ext.text.convert.reading import load_folder

            bare: Any = unwrap_model(run.chunks)
            tensors = [x for chunk in bare for x in (*chunk.parameters(), *chunk.buffers())]
            own = [tensor.detach().clone() for tensor in tensors]
            try:
                load_folder(run.chunks, Path(folder), run.context)
                yield
            finally:
                for tensor, values in zip(tensors, own, strict=True):
                    tensor.copy_(values)


def _is_start_without(config: RunConfig) -> bool:
    """Return whether a trained model without its adapters is the one from which the run started."""
    lora = config.lora
    at_zero = not lora.is_variant and config.section(HuggingFaceConfig).adapter_path is None
    return lora.lora_rank is not None and at_zero and not lora.lora_modules_to_save


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the context, the layers compute without their LoRA adapters."""
    adapted = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if getattr(module, "lora", None) is not None
    ]
    adapters = [module.lora for module in adapted]
    for module in adapted:
        module.lora = None
    try:
        yield
    finally:
        for module, adapter in zip(adapted, adapters, strict=True):
            module.lora = adapter


def rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return a sentence on each flag of a GPT that this program cannot follow."""
    errors = list(GPT.rules(given, run))
    folder = run.section(DpoFlags).dpo_reference_hf
    if folder is not None and run.lora.lora_quantize_weights is not None:
        errors.append(
            "`--dpo-reference-hf` takes the place of weights for a while, which those of "
            "`--lora-quantize-weights` do not allow; leave one out."
        )
    if folder is not None and run.optimizer.shards_weights:
        errors.append(
            "`--dpo-reference-hf` needs whole weights on each rank, which `--data-parallel-sharding"
            "-strategy optim_grads_params` does not keep; use optim_grads."
        )
    return errors if folder is None else errors + _misfits(folder, run)


def _misfits(folder: str, run: RunConfig) -> list[str]:
    """Return a sentence, in a list, if the reference in ``folder`` has another shape than a run."""
    from megatron_ext.text.convert.config import read_model
    from megatron_ext.text.convert.family import Gpt, architecture_of, differences

    theirs = read_model(Path(folder))
    found = differences(architecture_of(theirs.sections()), architecture_of(Gpt.of(run)))
    policy = run.section(HuggingFaceConfig).model()
    if policy is not None and policy.vocab_size != theirs.vocab_size:
        found = [("vocab_size", theirs.vocab_size, policy.vocab_size), *found]
    return [
        f"`--dpo-reference-hf` ({folder}) has {name} {one}, but the policy has {other}; give a "
        "reference of the policy's shape."
        for name, one, other in found[:1]
    ]


TASK = dataclasses.replace(
    GPT.replace(
        preflight=prepare,
        datasets=build_pairs,
        data_lines=lambda config, assets: REFERENCE.unused,
        forward_step=forward_step,
        prepare_batches=with_group,
        rules=rules,
        callbacks=(*GPT.callbacks, ScoreReference),
        perplexity=False,
        defaults={
            "reset_attention_mask": True,
            "reset_position_ids": True,
            "dataloader_type": "cyclic",
            "data_sharding": False,
        },
    ),
).with_sections(DpoFlags)

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:]))
