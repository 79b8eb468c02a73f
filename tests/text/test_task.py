"""The padded vocabulary: the same with every layout, or a note."""

from dataclasses import replace

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.text.task import padded_to_ranks, padding_note
from tests.config.runs import SMALL
from tests.training_runs import config_of


def test_padding_that_differs_from_that_of_one_rank_is_told() -> None:
    given = replace(config_of(SMALL).model, make_vocab_size_divisible_by=32)
    for ranks, entries in ((1, 32), (2, 64), (4, 128)):
        parallel = ParallelConfig(tensor_model_parallel_size=ranks)
        # 32 entries for each rank hold 31 ids and the end of a document.
        padded = padded_to_ranks(given, parallel, 32)
        assert padded.padded_vocab_size == entries
        note = padding_note(given, padded, ranks)
        if ranks == 1:
            assert note is None
            continue
        assert note is not None
        assert f"padded to {entries} entries" in note and "but to 32 on one rank" in note
        assert note.endswith(f"`--padded-vocab-size {entries}` makes layouts the same.")
        same = replace(given, padded_vocab_size=entries)
        assert padding_note(same, padded_to_ranks(same, parallel, 32), ranks) is None
