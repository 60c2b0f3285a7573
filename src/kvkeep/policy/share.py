"""Share: a budget as a share of the tokens fed."""

from __future__ import annotations

from kvkeep.errors import SpecError

_EVERY = 32  # tokens


class Share(float):
    """A share of the tokens fed, above 0 and at most 1; as text, a percentage."""

    def __new__(cls, share: float) -> Share:
        if not 0 < share <= 1:
            raise SpecError(f"a share of {share:.0%}; give more than 0% and at most 100%")
        return super().__new__(cls, share)

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read `25%`.

        Raises:
            ValueError: the text is not a number followed by a percent sign.
            SpecError: the share is out of range.
        """
        number, percent, rest = text.strip().partition("%")
        if not percent or rest:
            raise ValueError(text)
        return cls(float(number) / 100)

    def __str__(self) -> str:
        return f"{100 * self:.10g}%"

    __repr__ = __str__

    def budget(self, fed: int, least: int) -> int:
        """The budget once `fed` tokens have been fed: this share of them, but at least `least`. The
        share is computed at each multiple of 32 tokens and tokens fed since are added, so that only
        every 32nd single-token step evicts."""
        since = fed % _EVERY
        return max(self.of(fed - since), least) + since

    @staticmethod
    def fullest(fed: int) -> int:
        """The last number of tokens fed, from `fed` on, before the share is computed again: there
        the budget is largest."""
        return fed - fed % _EVERY + _EVERY - 1

    def times(self, factor: float) -> Share:
        """This share times `factor`, at most 100 %."""
        return Share(min(1.0, self * factor))

    def of(self, tokens: int) -> int:
        """This share of `tokens` tokens, rounded down, but at least 1."""
        return max(1, int(self * tokens + 1e-9))
