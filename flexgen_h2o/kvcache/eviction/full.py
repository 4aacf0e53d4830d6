"""The full cache: every column is kept, each in the slot of its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Full:
    """Keep all columns. The newest token's column is never read again, so it needs no slot."""

    name: ClassVar[str] = "full"

    def slots(self, prompt_len: int, gen_len: int) -> int:
        """Slots that a row of `prompt_len` tokens needs to generate `gen_len` more."""
        return max(1, prompt_len + gen_len - 1)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name}
