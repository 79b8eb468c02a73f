"""Which tokens of a context and its continuation a model of so many positions reads and scores."""

from megatron_ext.text.evaluation.service import ScoreRequest


def test_a_continuation_is_scored_after_as_much_context_as_fits() -> None:
    """The last token of a text is scored but not read, so it needs no position."""
    for context, continuation, ids, first in (
        ([1, 2], [3, 4], (1, 2, 3, 4), 2),
        ([1, 2, 3], [4, 5], (1, 2, 3, 4, 5), 3),
        ([1, 2, 3, 4], [5, 6], (2, 3, 4, 5, 6), 3),
        ([1], [2, 3, 4, 5], (1, 2, 3, 4, 5), 1),
        # The first token of a text has nothing before it that could tell it.
        ([1], [2, 3, 4, 5, 6], (2, 3, 4, 5, 6), 1),
    ):
        request = ScoreRequest.of_continuation(context, continuation, max_length=4)
        assert (request.ids, request.first) == (ids, first)
