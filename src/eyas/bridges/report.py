"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# fails: the engine stops, or the first request does. silent: it runs, with little or no acceptance, or with numbers
# that mean nothing. undecided: only a running engine can tell. note: worth knowing, nothing is wrong.
Severity = Literal["fails", "silent", "undecided", "note"]
SEVERITIES: tuple[Severity, ...] = ("fails", "silent", "undecided", "note")


@dataclass(frozen=True)
class Problem:
    severity: Severity
    evidence: str  # what was found, with file:line of the engine or the key of a config
    consequence: str
    fix: str = ""
    issue: str = ""  # the public report
    # What eyas-plugin does about it: it cures this, or does so too for a target of which it cures something else.
    plugin: Literal["", "cures", "completes"] = ""


@dataclass(frozen=True)
class Fact:
    name: str
    value: str


@dataclass
class Report:
    engine: str
    target: str
    drafter: str
    facts: list[Fact] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not any(problem.severity in ("fails", "silent") for problem in self.problems)

    def sorted_problems(self) -> list[Problem]:
        """Worst first; what is said twice is said once."""
        return sorted(dict.fromkeys(self.problems), key=lambda problem: SEVERITIES.index(problem.severity))
