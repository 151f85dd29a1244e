"""Constrained output: what a request's grammar lets follow each node of a draft.

The grammars are llguidance's (the extra ``serve``): one wheel that needs nothing else, and that names the keywords of a
schema that it lacks. xgrammar would bring a compiler's runtime along.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from eyas.core import Draft, RequestError, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Path = tuple[int, ...]  # the tokens from below the root of a draft to a node, itself included

MOST_BYTES = 1 << 17  # of a schema or grammar
MOST_RULES = 500  # of GBNF: llguidance's translation to Lark takes time with the cube of them
KEPT = 128  # compiled constraints
# Between tokens of JSON. Without an end to it, models are known to write blanks until the answer is cut.
WHITESPACE = r"([ \t]|\n[ \t]{0,40})"
NAMES = {
    "json": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
# At most a second or two to compile and some 20 ms for a step: with llguidance's own, one line can take many seconds.
LIMITS: dict[str, Any] = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,  # of 2 kB
    "verbose_errors": False,  # these quote what was written, and are logged
}


class Node(NamedTuple):
    """A place in an answer."""

    bits: np.ndarray  # int32 [W]: bit v % 32 of word v // 32 is set where token v may follow
    ended: bool = False  # the answer is complete: nothing may follow
    fault: str | None = None  # why an answer cannot come to this place, or not beyond it: nothing may follow


class Grammars:
    """Compiles constraints for one target, once each. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]):
        """Nothing is done before the first request that needs it: a vocabulary takes a second."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._compiling, self._lock = threading.Lock(), threading.Lock()  # the latter for an instant only

    def compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        """The matcher at the beginning of an answer: others are copied from it.

        Raises RequestError for what is no grammar, is not supported, or is too large; and where the package is missing.
        """
        if (known := self.known(asked)) is not None:  # an engine must not wait for what others have compiled
            return known
        with self._compiling:
            if (known := self.known(asked)) is not None:
                return known
            matcher = self._matcher(asked)
        with self._lock:
            self._compiled[asked] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def known(self, asked: StructuredOutputsParams) -> LLMatcher | None:
        """What ``compile`` would return at once, None where it would take its time."""
        with self._lock:
            if asked in self._compiled:
                self._compiled.move_to_end(asked)
            return self._compiled.get(asked)

    def start(self, asked: StructuredOutputsParams, output_ids: Sequence[int] = ()) -> Grammar:
        """Behind ``output_ids``. Raises RequestError as ``compile`` does, and where these are not in the grammar."""
        compiled = self.compile(asked)
        assert self._vocabulary is not None
        grammar = Grammar(compiled, self._eos_ids, -(-self._vocabulary.vocab_size // 32))
        if fault := grammar.node(()).fault:
            raise RequestError(f"The {NAMES[asked.kind]} allows no answer ({fault}).")
        for index, token in enumerate(output_ids):
            if grammar.node((token,)).fault is not None:
                raise RequestError(f"Token {index} of the answer that is there already is not in its grammar.")
            if grammar.accept(token):
                raise RequestError("The answer that is there already is complete: its grammar lets nothing follow.")
        return grammar

    def _matcher(self, asked: StructuredOutputsParams) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise RequestError("Structured outputs need the package llguidance: pip install 'eyas[serve]'.") from error
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        name = NAMES[asked.kind]
        limits = LLParserLimits(**LIMITS)
        try:
            matcher = LLMatcher(self._vocabulary, source_of(asked), log_level=0, limits=limits)
        except (ValueError, TypeError, RecursionError) as error:  # no JSON, no GBNF, or too much of it
            raise RequestError(f"The {name} cannot be used: {one_line(str(error))}.") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # much is settled only now
        if matcher.is_error():
            raise RequestError(f"The {name} cannot be used: {reason(matcher)}.")
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None or not self._eos_ids:
            what = "tokenizer" if self._tokenizer is None else "token that ends an answer"
            raise RequestError(f"Structured outputs need a {what}, and this engine has none.")
        count = max(self._vocab_size, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, count, eos_token=list(self._eos_ids))
        except ValueError as error:
            raise RequestError(
                f"This target's tokenizer cannot be used for structured outputs: no bytes of its tokens ({error})."
            ) from error


class Grammar:
    """How far one answer is in its grammar, and what may follow the tokens of a draft behind it.

    The one matcher follows one path at a time, and is rolled back to where the next one branches off. What it said is
    remembered until the answer goes on elsewhere: drafting and verifying ask about the same nodes. What it says depends
    on the tokens alone, never on what else was asked.
    """

    def __init__(self, compiled: LLMatcher, ends: Sequence[int], words: int):
        """``ends`` are the tokens that end an answer where it may end; masks have ``words`` words."""
        self._compiled, self._matcher = compiled, compiled.deep_copy()
        self._ends, self._nothing = frozenset(ends), np.zeros(words, dtype=np.int32)
        self._accepted: list[int] = []
        self._path: Path = ()  # behind the accepted tokens, where the matcher is
        self._nodes: dict[Path, Node] = {}

    def node(self, path: Path) -> Node:
        """What may follow a path behind the answer so far. A path that cannot be is a node with a fault, no error."""
        found = self._nodes.get(path)
        if found is None:
            found = self._nodes[path] = self._look(path)
        return found

    def accept(self, token: int) -> bool:
        """Takes one more token of the answer, and says whether the answer is complete with it.

        Raises RequestError where the grammar cannot be followed any further.
        """
        node = self.node((token,))
        if node.fault is not None:
            raise RequestError(
                f"The constraint cannot be followed beyond output token {len(self._accepted)}: {node.fault}."
            )
        self._nodes = {path[1:]: below for path, below in self._nodes.items() if path[:1] == (token,)}
        if not node.ended:
            if self._path[:1] != (token,):
                self._go((token,))
            self._path = self._path[1:]
        self._accepted.append(token)
        return node.ended

    def _look(self, path: Path) -> Node:
        if path:
            above, token = self.node(path[:-1]), path[-1]
            if above.fault is not None or above.ended or not has(above.bits, token):
                return Node(self._nothing, fault="a token that is not in the grammar")
            if token in self._ends:  # the matcher itself would not count it, and roll back too far
                return Node(self._nothing, ended=True)
        for _ in range(2):  # what broke it may be what was asked before
            self._go(path)
            bits = self._nothing.copy()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if not self._matcher.is_error():
                complete = bool(path) and self._only_ends(bits)
                return Node(self._nothing, ended=True) if complete else Node(bits)
            fault = reason(self._matcher)
            self._matcher, self._path = self._compiled.deep_copy(), ()
            self._matcher.consume_tokens(self._accepted)
        return Node(self._nothing, fault=fault)

    def _go(self, path: Path) -> None:
        """Moves the matcher; where it fails at that, it says so from now on."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        if shared < len(path):
            self._matcher.consume_tokens(list(path[shared:]))
        self._path = path

    def _only_ends(self, bits: np.ndarray) -> bool:
        rest = bits.view(np.uint32).copy()
        for token in self._ends:
            rest[token // 32] &= ~np.uint32(1 << token % 32)
        return not rest.any()


def allowed_below(grammars: Sequence[tuple[int, Grammar]], paths: torch.Tensor) -> torch.Tensor:
    """What a drafter may propose: int32 [C, F, W] for the C sequences that have a grammar, each with its row.

    ``paths`` is int64 [B, F, depth]: the tokens from below the root to each node. Nothing where such a path cannot be,
    or ends the answer.
    """
    given = paths.tolist()
    bits = [[grammar.node(tuple(path)).bits for path in given[row]] for row, grammar in grammars]
    return torch.from_numpy(np.array(bits)).to(paths.device, non_blocking=True)


def paths_to(rows: Sequence[int], draft: Draft) -> list[list[Path]]:
    """The path to each node of these rows' drafts; to padding it is that to the root. Waits for a GPU."""
    tokens = draft.tokens.tolist()
    parents = draft.parents.tolist() if draft.parents is not None else None
    found = []
    for row in rows:
        above = parents[row] if parents is not None else range(-1, len(tokens[row]) - 1)
        paths: list[Path] = [()]
        for token, parent in zip(tokens[row][1:], above[1:], strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else ())
        found.append(paths)
    return found


def allowed_after(
    grammars: Sequence[tuple[int, Grammar]], paths: Sequence[Sequence[Path]]
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """What the target may choose after each node of a draft, int32 [C, N, W], and the nodes that cannot be.

    ``paths`` are those to the nodes of each sequence that has a grammar. Nodes that cannot be are given as row and
    node. There, and behind the end of an answer, everything is allowed: it comes to nothing.
    """
    bits, wrong = [], []
    for (row, grammar), own in zip(grammars, paths, strict=True):
        found = [grammar.node(path) for path in own]
        wrong += [(row, index) for index, node in enumerate(found) if node.fault is not None]
        bits.append([np.full_like(n.bits, -1) if n.ended or n.fault is not None else n.bits for n in found])
    return torch.from_numpy(np.array(bits)), wrong


def has(bits: np.ndarray, token: int) -> bool:
    return 0 <= token < 32 * len(bits) and bool(bits[token // 32] >> token % 32 & 1)


def reason(matcher: LLMatcher) -> str:
    """What a matcher that failed says of it."""
    return one_line(matcher.get_error().replace("<non-verbose/>", ""))


def one_line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")


def source_of(asked: StructuredOutputsParams) -> str:
    """A constraint as llguidance takes it. Raises ValueError for what cannot be one."""
    from llguidance import LLMatcher, grammar_from

    text = getattr(asked, asked.kind)
    if sum(len(part.encode()) for part in ((text,) if isinstance(text, str) else asked.choice or ())) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 10} KiB")
    if asked.json is not None or asked.json_object:
        schema = asked.json if asked.json is not None else '{"type": "object"}'
        if not isinstance(json.loads(schema), dict):
            raise ValueError("it must be an object")
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark(
            f"start: {' | '.join(json.dumps(c, ensure_ascii=False) for c in asked.choice)}"
        )
    if text.count("::=") > MOST_RULES:
        raise ValueError(f"as GBNF it may have {MOST_RULES} rules, and as Lark as many as it likes")
    return grammar_from("grammar", text)
