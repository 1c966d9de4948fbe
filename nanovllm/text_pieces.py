"""TextPieces: text handed out while it is being generated, in pieces that never hold half a character.

Knows a tokenizer's `decode` and nothing else, neither requests nor models.
"""

from collections.abc import Sequence
from typing import Any


class TextPieces:
    """Turns a growing list of token ids into pieces of text that join to the text of the whole list.

    Only the tail is decoded each time: from `start`, where a piece last began, so the cost stays linear; only tokens
    that show nothing (end tokens, half characters) are decoded anew until one shows something.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.start = 0  # tokens before it are not decoded again; from here to `read` they are, as context
        self.read = 0  # tokens whose text was handed out
        self.sent = ""  # that text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def push(self, token_ids: list[int], is_last: bool) -> str:
        """The text that the new tokens add; "" while a character is incomplete. token_ids: all tokens so far.

        A tokenizer may write a token differently at the very beginning (a leading space), so the text of the tokens
        from `start` on is compared with and without the new ones. A replacement character at the end means that bytes
        are missing. At the end whatever is left of the whole text is handed out.
        """
        if is_last:
            whole = self._decode(token_ids)
            piece = whole[len(self.sent) :]
            self.sent = whole
            return piece
        before = self._decode(token_ids[self.start : self.read])
        now = self._decode(token_ids[self.start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        piece = now[len(before) :]
        self.start, self.read = self.read, len(token_ids)
        self.sent += piece
        return piece
