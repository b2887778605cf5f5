"""Markup in sampled tokens: all that a renderer may read as more than plain text.

Renderers find reasoning and tool calls by added tokens (`<|channel|>`, `<tool_call>`), or by text where a tokenizer has
no such token: `</think>`, and DeepSeek's tags, which hold a U+FF5C. The plain text of a chat template's reply loses the
texts of added tokens too.
"""

import re
from collections.abc import Mapping, Sequence

from rolltap.addons.prompts.tokenizer import CachingTokenizer

_TEXTS = ["</?think>", "\uff5c"]


class Markup:
    """The added tokens of a tokenizer, by id and by text."""

    def __init__(self, tokenizer: CachingTokenizer) -> None:
        self._tokenizer = tokenizer
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        texts = sorted((text for text in added if text.strip()), key=len, reverse=True)  # some are white space
        self._ids = frozenset(added[text] for text in texts)
        self._pattern = re.compile("|".join([*map(re.escape, texts), *_TEXTS]))
        self.longest = max((len(text) for text in texts), default=0)
        """The length of the longest text of an added token in characters."""

    def in_tokens(self, token_ids: Sequence[int]) -> bool:
        """Return whether one of the tokens is an added one."""
        return not self._ids.isdisjoint(token_ids)

    def in_text(self, text: str) -> bool:
        """Return whether the text holds markup."""
        return self._pattern.search(text) is not None

    def around_last(self, token_ids: list[int]) -> tuple[str, str]:
        """Return the texts before and after the last markup. Without markup, all text is after it.

        The text before is cut to a length in tokens of that after it, and some more.
        """
        start = next((n for n in range(len(token_ids), 0, -1) if token_ids[n - 1] in self._ids), 0)
        after = self.decode(token_ids[start:])
        places = [place.span() for place in self._pattern.finditer(after)]
        if places:
            begin, end = places[-1]
            return after[:begin], after[end:]
        return self.decode(token_ids[max(0, 2 * start - len(token_ids) - 8) : max(0, start - 1)]), after

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens, with the texts of special ones."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
