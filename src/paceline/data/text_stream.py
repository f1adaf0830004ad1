"""Incremental decoding of tokens to text, in whole characters."""

from paceline.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""Replacement character that decoders emit for invalid or incomplete bytes."""


class TextStream:
    """Decodes tokens one by one; holds back the bytes of a character until it is complete.

    Args:
        tokenizer: The tokenizer of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens are decoded after their predecessors: some decoders treat the first differently.
        self._first = 0
        self._num_done = 0

    def add(self, token: int) -> str:
        """Returns the text that a token completes; empty in the middle of a character."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._first, self._num_done = self._num_done, len(self._tokens)
        return text

    def finish(self) -> str:
        """Returns the remaining text, even if its last character is incomplete."""
        text = self._new_text()
        self._first = self._num_done = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._first : self._num_done])
        return self._tokenizer.decode(self._tokens[self._first :])[len(before) :]
