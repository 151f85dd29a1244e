"""Do both sides write the same? How often, where they part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from eyas.bench.passes import Answer, Pair
from eyas.bench.sides import Side, Unlike, common
from eyas.bench.workload import Prompt
from eyas.core import EyasError

EXPLAINED = 8  # differences that are looked into
STRANGE = 0.5  # share of the answers that part at once, above which something else than rounding is at work
AT_ONCE = 12  # characters
ENOUGH = 20  # answers, from which on a side's agreement with itself is a measure for that with the other


@dataclass(frozen=True)
class Agreement:
    """Of answers to the same prompt. ``itself`` is how often the side without speculation agrees with itself in other
    rounds, where other requests ran beside it: what there is of rounding without any speculation.
    """

    answers: int
    same: int
    at_once: int  # parted in their first characters
    shares: tuple[float, ...] = ()  # of those that part: how much of the shorter text is the same
    itself: tuple[int, int] = (0, 0)  # compared, and the same
    explained: tuple[Unlike, ...] = field(default=(), compare=False)

    @property
    def strange(self) -> bool:
        """Greedily, these sides do not run the same model, or one of them makes its tokens up."""
        return self.answers > 0 and (self.at_once > STRANGE * self.answers or self.rare)

    @property
    def rare(self) -> bool:
        """The sides agree far less than the one without speculation does with itself."""
        compared, same = self.itself
        enough = min(self.answers, compared) >= ENOUGH
        return enough and self.same / self.answers < same / compared / 4

    @property
    def bugs(self) -> int:
        """Differences looked into that no rounding explains."""
        return sum(one.near_tie is False for one in self.explained)

    def sentence(self, greedy: bool) -> str:
        if not self.answers:
            return "No answers to compare."
        text = f"{self.same:,} of {self.answers:,} answers ({self.same / self.answers:.1%}) are the same on both sides"
        if self.itself[0]:
            text += f"; without speculation, {self.itself[1] / self.itself[0]:.1%} are the same in other rounds"
        if self.same < self.answers and not greedy:
            return f"{text}. At a temperature, other texts are to be expected of engines that draw anew each time."
        if self.shares:
            text += f"; those that part have {median(self.shares):.0%} in common before (median)"
        return text + self._reasons() + "."

    def _reasons(self) -> str:
        judged = [one.near_tie for one in self.explained if one.near_tie is not None]
        gaps = [one.gap for one in self.explained if one.gap is not None]
        if judged:
            ties = sum(judged)
            others = f", {len(judged) - ties} are NOT: a bug" if ties < len(judged) else ""
            return f"; of {len(judged)} looked into, {ties} are near-ties{others}"
        if gaps:
            return (
                f"; of {len(gaps)} looked into, the best two tokens of the side without speculation were "
                f"{median(gaps):.2g} apart there in log-probability (median), at most {max(gaps):.2g}"
            )
        return ""

    def as_record(self, greedy: bool) -> dict[str, object]:
        return {
            "answers": self.answers,
            "same": self.same,
            "at_once": self.at_once,
            "common_share": median(self.shares) if self.shares else None,
            "itself": {"answers": self.itself[0], "same": self.itself[1]},
            "explained": [vars(one) for one in self.explained],
            "sentence": self.sentence(greedy),
        }


def agreement(pairs: Sequence[Pair]) -> Agreement:
    same, at_once, shares, count = 0, 0, list[float](), 0
    for one, other in matched(pairs):
        count += 1
        if equal(one, other):
            same += 1
            continue
        place, (shorter, longer) = common(one.text, other.text), sorted((len(one.text), len(other.text)))
        shares.append(place / shorter if shorter else 0.0)
        at_once += place < min(AT_ONCE, longer)
    return Agreement(count, same, at_once, tuple(shares), _itself(pairs))


def matched(pairs: Sequence[Pair]) -> Iterator[tuple[Answer, Answer]]:
    for pair in pairs:
        for one, other in zip(pair.without.answers, pair.with_.answers, strict=True):
            if not one.error and not other.error:
                yield one, other


def equal(one: Answer, other: Answer) -> bool:
    """By tokens, where both are known."""
    return one.ids == other.ids if one.ids and other.ids else one.text == other.text


def _itself(pairs: Sequence[Pair]) -> tuple[int, int]:
    first: dict[str, Answer] = {}
    compared = same = 0
    for pair in pairs:
        for answer in pair.without.good:
            before = first.setdefault(answer.key, answer)
            if before is not answer:
                compared += 1
                same += equal(before, answer)
    return compared, same


async def explain(side: Side, pairs: Sequence[Pair], prompts: Mapping[str, Prompt]) -> tuple[Unlike, ...]:
    """Looks into a few differences, of prompts that differ. ``side`` is the one without speculation."""
    seen, found = set[str](), list[Unlike]()
    for one, other in matched(pairs):
        if len(found) == EXPLAINED:
            break
        if one.key in seen or equal(one, other) or one.key not in prompts:
            continue
        seen.add(one.key)
        try:
            found.append(await side.explain(prompts[one.key], one, other))
        except EyasError:  # a server that has nothing more to say: the numbers stand without it
            found.append(Unlike(None))
    return tuple(found)
