"""Tokenizers: any tokenizer.json of Hugging Face's `tokenizers`, or the byte vocabulary.

Invariants: the tokens of a document do not depend on the batch in which it is encoded. Text never
becomes a special token, even if it looks like one, so the end-of-document token occurs only after
documents. The byte vocabulary needs no training: a token's id is its byte, and 255, which never
occurs in UTF-8, ends a document.
"""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError, UsageError

BYTES = "bytes"
"""Name of the byte vocabulary, in place of a file name."""
END_OF_DOCUMENT = "<|endoftext|>"
"""End-of-document token of tokenizers that are trained here."""

_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
_NUM_BYTES = 256
_LAST_BYTE = 255

PART_CHARACTERS = 2**20
"""Documents longer than this are encoded in parts."""
_CUT_REGION = 2**13
"""Number of characters that are searched for a cut at a time."""
_CUTS_PER_REGION = 4
_MOST_FAILED_CUTS = 64
"""Number of rejected cuts after which the rest of a text is encoded as one part."""
_NEIGHBOURS = 64
"""Characters on either side of a cut that are encoded to check that it changes no token."""
_WORD_END = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")
"""Between a word and the whitespace before the next, where all common tokenizers split words."""

Tokens = npt.NDArray[np.uint32]
_Encoded = tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]


class Tokenizer:
    """Encodes documents to tokens and decodes tokens to text.

    Args:
        json: The contents of a tokenizer.json.
        end_of_document: The token that follows every document, by name or id; by default the first
            well-known name in the vocabulary.
        where: Name of the tokenizer in error messages.
    """

    def __init__(
        self, json: str, end_of_document: str | int | None = None, where: str = "tokenizer.json"
    ) -> None:
        import tokenizers

        self.json = json
        try:
            self._inner = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # The package raises nothing more specific.
            raise DataError(
                f"{where}: not a tokenizer that the tokenizers package can read: {error}"
            ) from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = _find_end(vocabulary, end_of_document, where)
        # The byte vocabulary is encoded without the package if byte 255 ends a document.
        self._is_bytes = json == byte_tokenizer_json() and self.end_of_document == _LAST_BYTE

    @functools.cached_property
    def blake3(self) -> str:
        """The digest of the tokenizer.json."""
        return blake3.blake3(self.json.encode()).hexdigest()

    @property
    def end_token(self) -> str | None:
        """Name of the end-of-document token, if it has one."""
        return self._inner.id_to_token(self.end_of_document)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The dtype in which tokens are stored."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode_documents(self, texts: Sequence[str]) -> _Encoded:
        """Returns the concatenated tokens of documents, with ends, and the length of each."""
        if self._is_bytes:
            contents = [text.encode() for text in texts]
            joined = b"\xff".join((*contents, b""))
            lengths = np.fromiter(map(len, contents), np.int64, len(contents)) + 1
            return np.frombuffer(joined, np.uint8).astype(self.dtype), lengths
        if max(map(len, texts), default=0) <= PART_CHARACTERS:
            return self._encode_short(texts)
        parts = [
            (self._encode_short if len(text) <= PART_CHARACTERS else self._encode_long)([text])
            for text in texts
        ]
        return np.concatenate([part[0] for part in parts]), np.concatenate(
            [part[1] for part in parts]
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each document, without the end-of-document token."""
        tokens, lengths = self.encode_documents(texts)
        ends = np.cumsum(lengths)
        return [
            tokens[end - length : end - 1].astype(np.uint32)
            for end, length in zip(ends, lengths, strict=True)
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the tokens of a prompt; for an empty one, the end-of-document token."""
        (encoded,) = self.encode_batch([text])
        return [int(token) for token in encoded] or [self.end_of_document]

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        text: str = self._inner.decode([int(each) for each in tokens], skip_special_tokens=True)
        return text

    def _encode_short(self, texts: Sequence[str]) -> _Encoded:
        ids: list[int] = []
        lengths = np.empty(len(texts), np.int64)
        num_before = 0
        for number, encoding in enumerate(
            self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ):
            ids += encoding.ids
            ids.append(self.end_of_document)
            lengths[number] = len(ids) - num_before
            num_before = len(ids)
        return np.array(ids, dtype=self.dtype), lengths

    def _encode_long(self, texts: Sequence[str]) -> _Encoded:
        """Encodes one document in parts: as a whole it would need 150 times its size in memory."""
        (text,) = texts
        parts = [np.array(self._ids(part), self.dtype) for part in self._parts(text)]
        tokens = np.concatenate([*parts, np.array([self.end_of_document], self.dtype)])
        return tokens, np.array([len(tokens)])

    def _parts(self, text: str) -> Iterator[str]:
        """Cuts a text between words, where encoding the surroundings shows no effect on tokens."""
        start = 0
        num_failed = 0
        first, end = PART_CHARACTERS - _CUT_REGION, PART_CHARACTERS
        while end < len(text) and num_failed < _MOST_FAILED_CUTS:
            cuts = [match.start() for match in _WORD_END.finditer(text, first, end)]
            for cut in cuts[: -_CUTS_PER_REGION - 1 : -1]:
                if self._may_cut(text, cut):
                    yield text[start:cut]
                    start = cut
                    end = cut + PART_CHARACTERS - _CUT_REGION  # Advanced below.
                    break
                num_failed += 1
            first, end = end, end + _CUT_REGION
        yield text[start:]

    def _may_cut(self, text: str, cut: int) -> bool:
        before, after = text[cut - _NEIGHBOURS : cut], text[cut : cut + _NEIGHBOURS]
        return self._ids(before + after) == self._ids(before) + self._ids(after)

    def _ids(self, text: str) -> list[int]:
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def load_tokenizer(name: str | os.PathLike[str], end_of_document: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, or the byte vocabulary for ``bytes``."""
    if os.fspath(name) == BYTES:
        return Tokenizer(byte_tokenizer_json(), end_of_document, BYTES)
    path = pathlib.Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        json = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--tokenizer {name}: {error.strerror}; name a tokenizer.json, or {BYTES!r} for the "
            "byte vocabulary; `paceline data tokenizer` trains one"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a tokenizer.json: {error}") from error
    return Tokenizer(json, end_of_document, str(path))


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """Trains byte-level BPE and returns its tokenizer.json.

    Every text can be encoded, because all 256 bytes are in the vocabulary.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UsageError(
            f"--vocab-size {vocab_size}: byte-level BPE starts with {len(alphabet)} bytes and "
            f"{END_OF_DOCUMENT}; ask for more than {len(alphabet)}"
        )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(documents, trainer)
    json: str = trained.to_str(pretty=True)
    return json


@functools.cache
def byte_tokenizer_json() -> str:
    """Returns the byte vocabulary as a tokenizer.json, for programs that need that format."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    characters = _byte_characters()
    vocabulary = {characters[byte]: byte for byte in range(_LAST_BYTE)}
    vocabulary[END_OF_DOCUMENT] = _LAST_BYTE
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without its regular expression: without merges, splitting into words has no effect.
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_DOCUMENT])
    json: str = made.to_str(pretty=True)
    return json


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits `tokenizers` to the calling thread, because each worker has one core."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _byte_characters() -> list[str]:
    """Returns the printable character that byte-level tokenizers use for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(_NUM_BYTES + number) for number, byte in enumerate(others)}
    return [characters[byte] for byte in range(_NUM_BYTES)]


def _find_end(vocabulary: dict[str, int], asked_for: str | int | None, where: str) -> int:
    if isinstance(asked_for, int):
        return asked_for
    if asked_for is not None and asked_for not in vocabulary:
        raise UsageError(f"--end-of-document {asked_for!r}: {where} has no such token")
    for name in (asked_for,) if asked_for is not None else _KNOWN_ENDS:
        if name in vocabulary:
            return vocabulary[name]
    raise UsageError(
        f"{where}: none of {', '.join(_KNOWN_ENDS)} is in its vocabulary; name the token that "
        "ends a document with --end-of-document"
    )


_INCOMPLETE = "\ufffd"
"""Replacement character that decoders emit for invalid or incomplete bytes."""


class TextStream:
    """Decodes tokens one by one; holds back the bytes of a character until it is complete."""

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
