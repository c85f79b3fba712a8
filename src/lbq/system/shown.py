"""Texts from files as they are shown: what moves the cursor or turns the direction of reading stands as a code. No torch."""

from __future__ import annotations

import re

# controls but for tab and new line, marks of direction, other ends of lines, halves of characters
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# what a terminal's own output needs: a return, and escapes for colours
HIDDEN_IN_OUTPUT = re.compile(HIDDEN.pattern.replace("\x0b-\x1f", "\x0b\x0c\x0e-\x1a\x1c-\x1f"))


def shown(text: str, hidden: re.Pattern[str] = HIDDEN) -> str:
    """The text with a code, such as \\u202e, for each hidden character."""
    return hidden.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
