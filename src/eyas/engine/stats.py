"""What is counted, and defined, once: acceptance (acceptance length, acceptance rate at position i), and choices."""

from __future__ import annotations

from collections import defaultdict
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
        """One draft of ``drafted`` tokens and at most ``depth`` steps, of which the target accepted ``hits`` in a row.

        ``emitted`` tokens were really taken, of the hits and the bonus token: the answer may end inside the run.
        """
        if depth == 0:
            return
        self.steps += 1
        self.drafted += drafted
        self.emitted += emitted
        hits = min(emitted, hits)
        judged = hits + (emitted > hits)  # the bonus token says that the position after the last hit was a miss
        for counts in (self.reached, self.accepted):
            counts.extend([0] * (depth - len(counts)))
        for position in range(min(judged, depth)):
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


@dataclass(frozen=True)
class PolicyStatistics:
    """What a policy chose, why, and how that went. A choice is spelled as ``describe`` does: "plain", "chain of 3"."""

    choice: str  # the last one
    reason: str
    steps: int
    shares: dict[str, float]  # of the steps, by choice
    measured: dict[str, float]  # tokens per second, by choice, all batch sizes together
    predicted: dict[str, float]  # the same for the last step's batch
    exploration: float  # share of the time that went into choices which others were predicted to beat


@dataclass
class PolicyTally:
    """Counts for ``PolicyStatistics``."""

    steps: int = 0
    seconds: float = 0.0
    explored: float = 0.0  # seconds
    choice: str = ""
    reason: str = ""
    _by_choice: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def add(self, choice: str, reason: str, emitted: int, seconds: float, *, explored: bool) -> None:
        self.choice, self.reason = choice, reason
        self.steps += 1
        self.seconds += seconds
        self.explored += seconds if explored else 0.0
        counts = self._by_choice[choice]
        for i, count in enumerate((1, emitted, seconds)):
            counts[i] += count

    def statistics(self, predicted: dict[str, float]) -> PolicyStatistics:
        counts = self._by_choice.items()
        return PolicyStatistics(
            choice=self.choice,
            reason=self.reason,
            steps=self.steps,
            shares={choice: steps / self.steps for choice, (steps, _, _) in counts},
            measured={choice: tokens / seconds for choice, (_, tokens, seconds) in counts if seconds > 0},
            predicted=predicted,
            exploration=self.explored / self.seconds if self.seconds else 0.0,
        )
