"""Which tokens of the joint sequence [text; image] a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import DataError


@dataclass(frozen=True)
class TokenRange:
    """The tokens ``start`` to ``end`` of a sequence of text tokens followed by image tokens.

    Attention is bidirectional, so that contiguous parts cost all ranks the same.

    Attributes:
        num_text: text tokens of the whole sequence.
        num_image: image tokens of the whole sequence.
        start: first token of the range.
        end: one past its last token.
    """

    num_text: int
    num_image: int
    start: int
    end: int

    @classmethod
    def whole(cls, num_text: int, num_image: int) -> TokenRange:
        """The whole sequence."""
        return cls(num_text, num_image, 0, num_text + num_image)

    def part(self, index: int, size: int) -> TokenRange:
        """Part ``index`` of ``size`` equal contiguous ones.

        Raises:
            DataError: the range cannot be cut so.
        """
        length = len(self)
        if length % size:
            raise DataError(
                f"a sequence of {self.num_text} text and {self.num_image} image tokens gives a "
                f"part of {length} tokens, which must be divisible by {size} ranks; pad the text "
                "so that the sequence is divisible by the context-parallel size, times the "
                "tensor-parallel size with sequence parallelism."
            )
        start = self.start + index * (length // size)
        return TokenRange(self.num_text, self.num_image, start, start + length // size)

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def text(self) -> slice:
        """Where the range's text tokens stand among all text tokens."""
        return slice(min(self.start, self.num_text), min(self.end, self.num_text))

    @property
    def image(self) -> slice:
        """Where the range's image tokens stand among all image tokens."""
        return slice(max(self.start - self.num_text, 0), max(self.end - self.num_text, 0))

    @property
    def local_text(self) -> int:
        """Number of text tokens in the range, before its image tokens."""
        return self.text.stop - self.text.start  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LocalTokens:
    """Both ranges that a rank works on.

    Attributes:
        chunk: what the context-parallel rank holds; its attention and MLPs see all of it.
        part: what this tensor-parallel rank keeps between them, a part of the chunk with sequence
            parallelism, else the chunk.
    """

    chunk: TokenRange
    part: TokenRange
