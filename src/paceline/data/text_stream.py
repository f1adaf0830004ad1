"""Text from tokens as they come, in whole characters."""

from paceline.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""


class TextStream:
    """Decodes tokens one by one; the bytes of a character are held back until it is whole.

    Args:
        tokenizer: What the tokens are of.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens are decoded with those before them: some decoders treat the first one otherwise.
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
        """Returns what is left, though its last character be incomplete."""
        text = self._new_text()
        self._first = self._num_done = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._first : self._num_done])
        return self._tokenizer.decode(self._tokens[self._first :])[len(before) :]
