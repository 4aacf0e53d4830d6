"""The text of tokens, and of each token in its place.

A decoder looks at more than one token. SentencePiece's drops the space in front of a text's first
word, and a character may take several tokens. So new tokens are decoded behind the tokens in front
of them, and a single token is decoded behind a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

PART = "\ufffd"  # decoders write this for bytes that are not a whole character
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, as SentencePiece names it
_CONTEXT_SIZES = (8, 16, 32, 64)  # numbers of tokens behind which new ones are decoded
# After so many tokens an incomplete character cannot become whole any more: each token has at least
# one byte.
_MAX_PARTS = 8
_MAX_WINDOW = 64  # tokens that are decoded together if a long text is measured token by token
_MAX_NEIGHBOURS = 4096  # ids among which a letter is looked for


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that texts of tokens need.

    Attributes that this module reads with `getattr` may be missing in a tokenizer of the tests.
    """

    def __hash__(self) -> int: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class Detokenizer:
    """The texts of a tokenizer's tokens.

    specials: the contents of special tokens, by id. Texts leave them out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self.specials = _special_tokens(tokenizer)
        self._pieces: dict[int, str | None] = {}
        self._texts: dict[int, str] = {}

    # Texts of several tokens
    def text(self, token_ids: Sequence[int], with_specials: bool = False) -> str:
        """Return the text of tokens with nothing in front of them."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_specials))

    def behind(
        self, before: Sequence[int], token_ids: Sequence[int], with_specials: bool = False
    ) -> str:
        """Return the text that tokens add behind others: the text of all minus that of the others.

        A character that begins before and ends here belongs to this text.

        before: as many tokens as `context` returns.
        """
        whole = self.text([*before, *token_ids], with_specials)
        return (
            whole[len(common_start(self.text(before, with_specials), whole)) :] if before else whole
        )

    def context(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last of these tokens, as many as decide the text of what follows."""
        found: list[int] = []
        for token in reversed(token_ids):
            if not self.has_text(token):
                continue
            found.append(token)
            # A character that is cut at the beginning may spoil the bytes behind it.
            if len(found) in _CONTEXT_SIZES and not self.text(found[::-1]).startswith(PART):
                break
            if len(found) == _CONTEXT_SIZES[-1]:
                break
        return found[::-1]

    def has_text(self, token: int) -> bool:
        """Return whether a token adds to a text.

        It must not be special, and it must be in the tokenizer's table.
        """
        return token not in self.specials and self._piece(token) is not None

    def bytes_at_end(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens at the end are single bytes, as SentencePiece has them.

        Special tokens between them count too. Such bytes are decoded together: the next one may
        change the text of all of them.
        """
        size = 0
        for i, token in enumerate(reversed(token_ids), start=1):
            if self._is_byte(token):
                size = i
            elif self.has_text(token):
                break
        return size

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self._piece(token) or "") is not None

    def starts(self, before: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Return, for each of `token_ids`, how many characters of their text are in front of it."""
        places = Places(self, before)
        for token in token_ids:
            places.add(token)
        places.settle()
        return places.starts

    # Single tokens

    def token(self, token: int) -> str:
        """Return a token's text behind a letter, with its space in front.

        For a special token return its content.
        """
        if token not in self._texts:
            self._texts[token] = self.specials.get(token) or self.behind(self._neighbour, [token])
        return self._texts[token]

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token. A part of a character has its own bytes."""
        text = self.token(token)
        if PART not in text or token in self.specials:
            return text.encode("utf-8", "surrogatepass")
        piece = self._piece(token) or ""
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        letters = _byte_letters()
        if piece and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        return text.encode()

    def name(self, token: int) -> str:
        """Return the text of a token, or the bytes of a part of a character.

        Bytes are written as OpenAI writes them: `bytes:\\xf0`.
        """
        text = self.token(token)
        own = self.token_bytes(token)
        if own == text.encode("utf-8", "surrogatepass"):
            return text
        return "bytes:" + "".join(
            chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in own
        )

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return names of tokens, all different.

        Two tokens may have the same text, and a token may have none. Then the later one is named
        `token_id:N`.
        """
        found: dict[str, int] = {}
        for token in token_ids:
            name = self.name(token)
            found[name if name and name not in found else f"token_id:{token}"] = token
        return list(found)

    def _piece(self, token: int) -> str | None:
        """Return the token's entry in the tokenizer's table, or None if it has none."""
        if token not in self._pieces:
            look_up = getattr(self._tokenizer, "convert_ids_to_tokens", None)
            if look_up is None:
                self._pieces[token] = "" if 0 <= token < self._size else None
            else:
                found = look_up([token])[0]
                self._pieces[token] = None if found is None else str(found)
        return self._pieces[token]

    @cached_property
    def _neighbour(self) -> list[int]:
        """A token that is a letter or more, as a list; [] if none was found.

        It must be a token that is decoded alone. SentencePiece decodes several byte tokens
        together.
        """
        for token in range(min(self._size, _MAX_NEIGHBOURS)):
            if not self.has_text(token) or self._is_byte(token):
                continue
            text = self.text([token])
            if text.isascii() and text.isalnum() and self.text([token, token]).startswith(text):
                return [token]
        return []


class Places:
    """The places where tokens begin in the text that they make, token by token.

    The text of the newest tokens may end in an incomplete character.

    starts: for each token, the number of characters in front of it.
    """

    def __init__(self, detokenizer: Detokenizer, before: Sequence[int]) -> None:
        self.starts: list[int] = []
        self._detokenizer = detokenizer
        self._window = detokenizer.context(before)
        self._text = detokenizer.text(self._window)
        self._before: str | None = self._text  # None once it is known where this text ends
        self._offset = -len(self._text.rstrip(PART))  # place of the window's text in the whole text
        # Tokens that begin behind an incomplete character: (index, window's text before it).
        self._open: list[tuple[int, str]] = []

    def add(self, token: int) -> None:
        if self._text.endswith(PART):
            self._open.append((len(self.starts), self._text))
        least = self.starts[-1] if self.starts else 0
        self.starts.append(max(least, self._offset + len(self._text.rstrip(PART))))
        if not self._detokenizer.has_text(token):
            return
        self._window.append(token)
        self._text = self._detokenizer.text(self._window)
        if not self._text.endswith(PART):
            self.settle()
        elif len(self._open) > _MAX_PARTS:
            self._settle_one(*self._open.pop(0))
        if len(self._window) >= _MAX_WINDOW and not self._open:
            self._shorten()
        elif len(self._window) >= 2 * _MAX_WINDOW:
            self.settle()
            self._shorten()

    def settle(self) -> None:
        """Note that no text follows.

        Incomplete characters in front of the newest tokens stay incomplete.
        """
        for i, text in self._open:
            self._settle_one(i, text)
        self._open.clear()

    def _settle_one(self, i: int, text: str) -> None:
        if self._before is not None:
            self._offset = -len(common_start(self._before, self._text))
            self._before = None
        least = self.starts[i - 1] if i else 0
        self.starts[i] = max(least, self._offset + len(common_start(text, self._text)))

    def _shorten(self) -> None:
        """Restart the window at its last tokens."""
        self._window = self._detokenizer.context(self._window)
        text = self._detokenizer.text(self._window)
        self._offset += len(self._text) - len(text)
        self._text = text


@lru_cache(maxsize=8)
def detokenizer_of(tokenizer: Tokenizer) -> Detokenizer:
    """Return the detokenizer of a tokenizer. It remembers what it has looked up."""
    return Detokenizer(tokenizer)


def common_start(one: str, other: str) -> str:
    """Return the text with which both texts begin."""
    if other.startswith(one):
        return one
    size = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        len(other),
    )
    return one[:size]


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the ids that decode to nothing because they are special, each with its content."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {i: str(token) for i, token in added.items() if getattr(token, "special", False)}
    for token in tokenizer.all_special_ids:
        if token not in found:
            found[token] = str(tokenizer.decode([token], skip_special_tokens=False))
    return found


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Return the letters that byte-level tokenizers (GPT-2) write for bytes.

    A byte's letter is its own, or one from code point 256 on.
    """
    letters: dict[str, int] = {}
    others = 256
    for byte in range(256):
        if 33 <= byte < 127 or 161 <= byte < 173 or byte >= 174:
            letters[chr(byte)] = byte
        else:
            letters[chr(others)] = byte
            others += 1
    return letters
