"""Acceptance, counted once and defined once (vocabulary: acceptance length, acceptance rate at position i)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AcceptanceStats:
    """Counts over verify steps. Plain steps (nothing drafted) are not verify steps."""

    steps: int = 0
    drafted: int = 0  # draft tokens verified, the whole tree
    emitted: int = 0  # tokens of the answer that came of it, bonus tokens included
    reached: list[int] = field(default_factory=list)  # [depth]: steps whose draft was still alive at this position
    accepted: list[int] = field(default_factory=list)  # [depth]: and whose token there was accepted

    def record(self, depth: int, drafted: int, hits: int, emitted: int) -> None:
        """One verify step: ``drafted`` tokens, up to ``depth`` deep, of which ``hits`` in a row were accepted.

        ``emitted`` tokens were taken: the answer may end inside the run, and what is behind its end does not count.
        """
        if depth == 0:
            return
        self.steps += 1
        self.drafted += drafted
        self.emitted += emitted
        hits = min(emitted, hits)
        judged = min(hits + (emitted > hits), depth)  # the bonus token says that the position after the hits was a miss
        if len(self.reached) < depth:
            for counts in (self.reached, self.accepted):
                counts.extend([0] * (depth - len(counts)))
        for position in range(judged):
            self.reached[position] += 1
        for position in range(hits):
            self.accepted[position] += 1

    def add(self, other: AcceptanceStats) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.emitted += other.emitted
        for mine, theirs in ((self.reached, other.reached), (self.accepted, other.accepted)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, bonus token included; 1.0 when nothing was ever verified."""
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def acceptance_rates(self) -> list[float]:
        """By position: accepted there / drafts that reached it."""
        return [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]
