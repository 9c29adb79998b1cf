"""What of a text a terminal may be given: a model's answer must not steer it."""

from __future__ import annotations

# They move the cursor, set the title or turn text around; tabs and line ends are harmless.
_STEERING = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REPLACED = {code: "\ufffd" for code in _STEERING if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """A text without characters that steer a terminal."""
    return text.replace("\r\n", "\n").translate(_REPLACED)
