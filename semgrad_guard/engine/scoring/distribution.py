"""Next-token distributions by one of their tokens, so that the mass of the others keeps its digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distribution:
    """n distributions p(v) = exp(logit_v - peak) / (1 + rest), [n] each.

    `peak` is the logit of one token, the mode. `rest` sums every term but its own, so that 1 - p(mode) = rest / (1 +
    rest) keeps its digits where the model is nearly certain; there the naive difference is rounding noise. `moment`
    sums (logit_v - peak) exp(logit_v - peak).
    """

    peak: torch.Tensor
    rest: torch.Tensor
    moment: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, mode: torch.Tensor, *, scratch: torch.Tensor | None = None) -> Distribution:
        """That of logits [n, V], which are overwritten, as is `scratch` of the same shape.

        `mode` [n, 1] is the token whose logit is the peak, best the greatest.
        """
        peak = logits.gather(1, mode)
        centred = logits.sub_(peak)
        terms = torch.softmax(centred, 1, out=scratch)  # in less time than exp: its divisor is multiplied again
        whole = 1 / terms.gather(1, mode).squeeze(1)
        moment = centred.mul_(terms).sum(1) * whole
        return cls(peak.squeeze(1), terms.scatter_(1, mode, 0.0).sum(1) * whole, moment)

    @classmethod
    def stacked(cls, parts: Sequence[Distribution]) -> Distribution:
        """Those of all parts, one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("peak", "rest", "moment")))

    def part(self, tokens: slice) -> Distribution:
        """Those of some tokens."""
        return Distribution(self.peak[tokens], self.rest[tokens], self.moment[tokens])

    def joined(self, other: Distribution) -> Distribution:
        """The distribution over this one's tokens and the other's."""
        peak = torch.maximum(self.peak, other.peak)
        ours, theirs = self._seen_from(peak), other._seen_from(peak)
        # Every term of both but the mode's own 1, which is in the one of the higher peak (in either, at a tie).
        higher = self.peak >= other.peak
        rest = torch.where(higher, self.rest + theirs[0], other.rest + ours[0])
        return Distribution(peak, rest, ours[1] + theirs[1])

    def _seen_from(self, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of all terms, the mode's included, and the moment, both in relation to a higher peak."""
        shift = self.peak - peak
        decay = shift.exp()
        return decay * (1 + self.rest), decay * (self.moment + shift * (1 + self.rest))

    @property
    def entropies(self) -> torch.Tensor:
        """In nats."""
        return (torch.log1p(self.rest) - self.moment / (1 + self.rest)).clamp(min=0)

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """log p of the tokens with these logits, one a distribution [n]."""
        return logits - self.peak - torch.log1p(self.rest)

    def complements(self, logits: torch.Tensor) -> torch.Tensor:
        """1 - p of the tokens with these logits, one a distribution [n]."""
        others = 1 + self.rest - (logits - self.peak).exp()
        return torch.where(logits == self.peak, self.rest, others) / (1 + self.rest)
