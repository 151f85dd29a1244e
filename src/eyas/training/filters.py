"""What is not worth learning from: empty and endless prompts, loops, and what was asked before."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

LOOP_TOKENS, LOOP_TIMES = 16, 4
SHORTEST = 8  # characters of a prompt
SENTENCE_END = re.compile(r'(?:[.!?:;]["”)]?(?=\s)|\n)')
ROLE_LINE = re.compile(r"^\s*(?:user|assistant|system|human)\s*:?\s*$", re.IGNORECASE | re.MULTILINE)

HASHES, BANDS = 64, 16
ALIKE = 0.7


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a stretch of 16 tokens begins for the fourth time: what follows is a loop. None where nothing does."""
    seen = Counter[tuple[int, ...]]()
    for start in range(len(ids) - LOOP_TOKENS + 1):
        stretch = tuple(ids[start : start + LOOP_TOKENS])
        seen[stretch] += 1
        if seen[stretch] >= LOOP_TIMES:
            return start
    return None


def prompt_problem(text: str, ids: Sequence[int]) -> str:
    """Why a prompt that the target wrote is of no use; empty where it is."""
    if not text:
        return "empty prompt"
    if loop_start(ids) is not None:
        return "looping prompt"
    words = re.findall(r"\w+", text)
    if len(text) < SHORTEST or not any(c.isalpha() for c in text) or "\ufffd" in text:
        return "meaningless prompt"
    if ROLE_LINE.search(text):
        return "prompt with roles in it"
    if len(words) >= 12 and len(set(words)) < 0.35 * len(words):
        return "repetitive prompt"
    return ""


def end_at_sentence(text: str, least: int) -> str:
    """A prompt that was cut off, up to its last whole sentence; empty where this leaves less than ``least``."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    shortened = text[: ends[-1]].strip() if ends else ""
    return shortened if len(shortened) > least else ""


class Seen:
    """Prompts up to now, to tell those that are nearly the same: MinHash of words in threes (Broder 1997)."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._factors = random.integers(1, 2**63, (HASHES, 1), dtype=np.uint64) | np.uint64(1)
        self._offsets = random.integers(0, 2**63, (HASHES, 1), dtype=np.uint64)
        self._sketches: list[np.ndarray] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._sketches)

    def add(self, text: str) -> bool:
        """Takes a prompt in; False, and not taken, for one that is at least 70% alike to an earlier one."""
        sketch = self._sketch(text)
        if self._near(sketch):
            return False
        for key in _bands(sketch):
            self._buckets[key].append(len(self._sketches))
        self._sketches.append(sketch)
        return True

    def has(self, text: str) -> bool:
        """Whether this prompt, or one at least 70% alike, was taken in."""
        return self._near(self._sketch(text))

    def _near(self, sketch: np.ndarray) -> bool:
        near = {index for key in _bands(sketch) for index in self._buckets.get(key, ())}
        return any((self._sketches[index] == sketch).mean() >= ALIKE for index in near)

    def _sketch(self, text: str) -> np.ndarray:
        """uint32 [HASHES]: of each hash function the least over all stretches of three words."""
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        parts = {" ".join(words[n : n + 3]) for n in range(max(1, len(words) - 2))}
        hashes = np.fromiter((zlib.crc32(part.encode()) for part in parts), np.uint64)
        mixed = (hashes[None] + np.uint64(1)) * self._factors + self._offsets  # modulo 2^64: multiply-shift
        return (mixed >> np.uint64(32)).min(axis=1).astype(np.uint32)


def _bands(sketch: np.ndarray) -> list[tuple[int, bytes]]:
    return [(n, band.tobytes()) for n, band in enumerate(sketch.reshape(BANDS, -1))]
