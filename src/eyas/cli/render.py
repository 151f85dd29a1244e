"""Answers and comparisons for people: text on stdout, statistics on stderr, tables side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from eyas.cli.console import clean, console, counted, notice
from eyas.cli.printer import Listen, waiting
from eyas.cli.tables import grid
from eyas.core import Request
from eyas.engine.stats import AcceptanceStats

if TYPE_CHECKING:
    from eyas.engine.llm import LLM, Completion
    from eyas.engine.lossless import Comparison, Divergence
    from eyas.engine.sequence import Output

NOISE = 1.1  # of a speedup over the acceptance length, which it cannot exceed


class Terminal:
    """Plain text where stdout is a pipe: then nothing but the answer is on it."""

    def __init__(self, llm: LLM, show_drafts: bool = False, brief: bool = False):
        self.tokenizer, self.brief = llm.tokenizer, brief
        self.dtype = str(llm.target.dtype).removeprefix("torch.")
        self.out, self.err = console(), console(stderr=True)
        self.tint, self.codes = "", ("", "")
        if show_drafts and self.out.color_system is None:
            notice("--show-drafts needs a terminal with colours or underlining: nothing is tinted.")
        elif show_drafts:
            self.tint = "underline" if self.out.no_color else "green"
            with self.out.capture() as captured:
                self.out.out("|", style=self.tint, end="")
            on, _, off = captured.get().partition("|")
            self.codes = on, off

    # One answer

    def following(self, request: Request) -> AbstractContextManager[Listen]:
        return waiting(request, self.write, streams=self.out.is_terminal)

    def write(self, output: Output) -> None:
        for token in output.emitted:
            self._put(token.text, tinted=token.drafted)
        self._put(output.tail)

    def answer(self, text: str, request: Request, completion: Completion) -> None:
        if not completion.text.endswith("\n"):
            self._put("\n")
        if self.brief:
            self.err.print(brief_statistics(completion), style="dim")
            return
        rows = statistics(request, completion)
        if self.tint and completion.stats.steps:
            rows.append(("drafts", Text("accepted draft tokens look like this", self.tint)))
        if self.err.is_terminal:
            self.err.print()
        self.err.print(grid(rows, "dim"))

    def stopped(self, text: str, answer: str) -> None:
        self._put("\n")
        print("(stopped)", file=sys.stderr)

    def _put(self, text: str, tinted: bool = False) -> None:
        """Writes without rich, which would expand tabs."""
        if self.out.is_terminal and text:
            on, off = self.codes if tinted else ("", "")
            text = f"{on}{clean(text)}{off}"
        sys.stdout.write(text)
        sys.stdout.flush()

    # Comparisons

    def comparison(self, place: tuple[int, int], text: str, comparison: Comparison) -> None:
        title = Text(f"{numbered(place[0], text)}" if place[1] > 1 else clean(text), "bold")
        title.truncate(2 * self.out.width, overflow="ellipsis")
        self.out.print(title)
        table = Table(expand=True)
        sides = comparison.plain, comparison.speculative
        table.add_column("without speculation", ratio=1)
        legend = (" (accepted drafts)", self.tint) if self.tint else ""
        table.add_column(Text.assemble("with speculation", legend), ratio=1)
        table.add_row(*(self._tinted(side) for side in sides), end_section=True)
        table.add_row(*(f"{speed(side.tokens_per_second)} tokens/s" for side in sides))
        table.add_row("", f"acceptance length {comparison.speculative.acceptance_length:.2f}")
        self.out.print(table)
        self.out.print(self._verdict(comparison), "\n")

    def total(self, texts: Sequence[str], comparisons: Sequence[Comparison]) -> None:
        if len(comparisons) > 1:
            self.out.print(summary(texts, comparisons))

    def _tinted(self, completion: Completion) -> Text:
        text = Text()
        for token in completion.tokens:
            text.append(clean(token.text), self.tint if token.drafted else None)
        return text.append(clean(completion.text[sum(len(token.text) for token in completion.tokens) :]))

    def _verdict(self, comparison: Comparison) -> Text:
        if comparison.equal:
            text = Text(f"the same {counted(len(comparison.plain.tokens), 'token')}", "green")
        elif comparison.lossless:
            text = Text(f"the same tokens but for {sameness([comparison])} of rounding", "green")
        else:
            text = Text("the tokens DIFFER, and rounding does not explain it: this is a bug", "bold red")
        if comparison.speedup:
            text = Text.assemble(text, (f", speedup {comparison.speedup:.2f}x", "bold"))
        if comparison.speedup > NOISE * comparison.speculative.acceptance_length:
            text.append(": more than its drafts can bring, so something else disturbed one of the two", "yellow")
        lines = [text, *map(self._divergence, comparison.divergences)]
        if comparison.lossless and not comparison.equal:
            lines.append(Text("  with plain decoding's token put there, speculation gives the same text to its end"))
        return Text("\n").join(lines)

    def _divergence(self, divergence: Divergence) -> Text:
        plain, ours = (
            "the end" if token < 0 else repr(self.tokenizer.decode([token]) if self.tokenizer else token)
            for token in divergence.tokens
        )
        return Text(
            clean(
                f"  token {divergence.index + 1}: {plain} or {ours}, in fp32 {divergence.gap:.2g} apart; "
                f"{self.dtype} is off by up to {divergence.error:.2g} here"
            )
        )


def statistics(request: Request, completion: Completion) -> list[tuple[str, str | Text]]:
    stats, sampling = completion.stats, request.sampling
    ended = "complete"
    if completion.finish_reason == "length":
        ended = "cut off: " + (
            "--max-tokens" if len(completion.tokens) == sampling.max_tokens else "the context is full"
        )
    rows: list[tuple[str, str | Text]] = [
        ("tokens", f"{len(completion.tokens)} ({ended})"),
        ("speed", f"{speed(completion.tokens_per_second)} tokens/s"),
        ("first token", f"after {completion.prefill_seconds:.2f} s (prompt of {completion.prompt_tokens} tokens)"),
    ]
    if stats.steps:
        rows += [
            (
                "acceptance length",
                f"{stats.acceptance_length:.2f} tokens per verify step ({counted(stats.steps, 'step')})",
            ),
            (
                "acceptance rate",
                f"{rates(stats)} at draft positions 1, 2, ... ({counted(stats.drafted, 'draft token')})",
            ),
        ]
    if not sampling.greedy:
        rows.append(("seed", str(sampling.seed)))
    return rows


def brief_statistics(completion: Completion) -> str:
    parts = [counted(len(completion.tokens), "token"), f"{speed(completion.tokens_per_second)} tokens/s"]
    if completion.stats.steps:
        parts += [f"acceptance length {completion.acceptance_length:.2f}", f"rates {rates(completion.stats)}"]
    return ", ".join(parts)


def rates(stats: AcceptanceStats) -> str:
    return " ".join(f"{rate:.0%}" for rate in stats.acceptance_rates)


def summary(texts: Sequence[str], comparisons: Sequence[Comparison]) -> Table:
    table = Table(expand=True, show_footer=True)
    plain, speculative = ([getattr(c, way) for c in comparisons] for way in ("plain", "speculative"))
    stats = AcceptanceStats()
    for completion in speculative:
        stats.add(completion.stats)
    slow, fast = pooled_speed(plain), pooled_speed(speculative)
    columns = {
        "tokens/s\nwithout": speed(slow),
        "tokens/s\nwith": speed(fast),
        "acceptance\nlength": f"{stats.acceptance_length:.2f}",
        "\nspeedup": f"{fast / slow:.2f}x" if slow else "-",
        "same\ntokens": sameness(comparisons),
    }
    table.add_column("\nprompt", "in total", ratio=1, no_wrap=True)
    for name, total in columns.items():
        table.add_column(name, total, justify="right", footer_style="bold")
    for number, (text, c) in enumerate(zip(texts, comparisons, strict=True), start=1):
        table.add_row(
            numbered(number, text.replace("\n", " ")),
            speed(c.plain.tokens_per_second),
            speed(c.speculative.tokens_per_second),
            f"{c.speculative.acceptance_length:.2f}",
            f"{c.speedup:.2f}x" if c.speedup else "-",
            sameness([c]),
        )
    return table


def numbered(number: int, text: str) -> str:
    return f"[{number}] {clean(text)}"


def sameness(comparisons: Sequence[Comparison]) -> str:
    ties = sum(len(c.divergences) for c in comparisons)
    if not all(c.lossless for c in comparisons):
        return "NO"
    return counted(ties, "near-tie") if ties else "yes"


def pooled_speed(completions: Sequence[Completion]) -> float:
    seconds = sum(c.decode_seconds for c in completions)
    return sum(len(c.tokens) - 1 for c in completions) / seconds if seconds else 0.0


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second else "-"
