"""Why acceptance is low: other readings of the checkpoint tried out here, and an engine's drafts beside the right ones.

The target answers the project's own held-out prompts once, and every reading is judged on the same answers, from a pass
over them. Which one is right is decided by agreement: the part of the target's and the drafter's distributions that is
the same, sum of min(p, q), at every token and every step of a draft. Acceptance of greedy chains, which is shown beside
it, is the same in the end, but says so only after thousands of tokens: one layer off may cost a few percent.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.bridges import corrected, hypotheses
from eyas.bridges.hypotheses import AS_READ, Facts, Hypothesis
from eyas.bridges.reference import reference
from eyas.bridges.trace import STATES, Comparison, Trace, compare
from eyas.core import CheckpointError, DraftShape, SamplingParams
from eyas.drafter import dialects
from eyas.drafter.checkpoint import Checkpoint, refusal
from eyas.drafter.dialects import Reading
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.drafter.storage import load_for
from eyas.engine.stats import AcceptanceStats
from eyas.progress import Report
from eyas.target.adapter import HFTarget
from eyas.training.acceptance import Answered, answer_all, interval, total
from eyas.training.features import FrozenTarget
from eyas.training.recording import batch_of, record
from eyas.training.simulate import simulate
from eyas.training.start import shape_of
from eyas.training.unroll import unroll

SHAPE = DraftShape(3, 1, 4)
SURE = 0.99  # that no reading is called right by chance, of all that are tried
NOTHING = 1.1  # an acceptance length below which drafts are as good as never right


@dataclass(frozen=True)
class Pair:
    """A target that is loaded, and a drafter's checkpoint as it lies on disk; ``layer_ids`` replace its own."""

    target: HFTarget
    drafter: Path
    eos_ids: tuple[int, ...] = ()
    layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Measured:
    """``better``: where the gain in agreement over the checkpoint as read lies; None for that itself."""

    hypothesis: Hypothesis
    stats: AcceptanceStats
    interval: tuple[float, float]  # 95%, of the acceptance length
    agreement: float  # of target and drafter, from 0 to 1
    better: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return self.hypothesis.name

    @property
    def length(self) -> float:
        return self.stats.acceptance_length


@dataclass(frozen=True)
class Verdict:
    """``name`` of the reading that is right, "" where none is. ``change``: what has to stand in config.json."""

    name: str
    text: str
    fix: str = ""
    change: dict[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> bool:
        return self.name != AS_READ


@dataclass(frozen=True)
class Readings:
    """What every reading came to. ``model`` is the one that the verdict names, or the checkpoint as read."""

    measured: tuple[Measured, ...]
    left_out: tuple[str, ...]
    verdict: Verdict
    right: Hypothesis
    model: Eagle3Model


# Other readings


def measure(pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int, report: Report) -> Readings:
    """Raises CheckpointError for a drafter that cannot be read in any way, UsageError without prompts."""
    checkpoint = Checkpoint.open(pair.drafter)
    reading = dialects.read(checkpoint)
    if pair.layer_ids:
        reading = replace(reading, config=replace(reading.config, aux_layer_ids=tuple(sorted(pair.layer_ids))))
    read = hypotheses.as_read(checkpoint, reading, pair.target.num_layers)
    known = _facts(pair.target, checkpoint, reading)
    made = list(hypotheses.others(read, known))
    tried = [h for h in made if isinstance(h, Hypothesis)]
    left_out = [h for h in made if isinstance(h, str)]
    base, repaired = _loaded(pair, checkpoint, reading, tried)
    if repaired is None:
        tried.insert(0, read)
    else:  # the others repair something else, and leave what cannot be read
        left_out.append(f"as read it cannot be used: {'; '.join(reading.problems)}")
        tried = [h for h in tried if h.stage == "d2t"]
    measured = list(_measured(pair, base, tried, prompts, max_tokens, report))
    verdict = _verdict(reading, measured)
    right = next((m.hypothesis for m in measured if m.name == verdict.name), tried[0])
    return Readings(tuple(measured), tuple(left_out), verdict, right, corrected.changed(base, right))


def _facts(target: HFTarget, checkpoint: Checkpoint, reading: Reading) -> Facts:
    rope = shape_of(target.config)["rope"]
    return Facts(target.num_layers, rope, hypotheses.maps_of(checkpoint, reading))


def _loaded(
    pair: Pair, checkpoint: Checkpoint, reading: Reading, tried: Sequence[Hypothesis]
) -> tuple[Eagle3Model, Hypothesis | None]:
    """The drafter as read; or, where its vocabulary maps make no sense, with the first that do."""
    if not reading.problems:
        return load_for(pair.target, checkpoint.path, aux_layer_ids=pair.layer_ids), None
    for hypothesis in tried:
        if hypothesis.stage != "d2t":
            continue
        with tempfile.TemporaryDirectory(prefix="eyas-probe-") as place, suppress(CheckpointError):
            out = Path(place) / "drafter"
            corrected.write(checkpoint, reading, hypothesis, out)
            return load_for(pair.target, out, aux_layer_ids=hypothesis.config.aux_layer_ids), hypothesis
    raise refusal(checkpoint.path, list(reading.problems))


def _measured(
    pair: Pair,
    base: Eagle3Model,
    tried: Sequence[Hypothesis],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    report: Report,
) -> Iterator[Measured]:
    drafters = [Eagle3Drafter(corrected.changed(base, hypothesis)) for hypothesis in tried]
    what, sampling = f"the target answers {len(prompts)} prompts", SamplingParams(max_tokens=max_tokens, seed=0)
    answers = answer_all(
        pair.target,
        drafters[0],
        prompts,
        shape=SHAPE,
        sampling=sampling,
        eos_ids=pair.eos_ids,
        report=lambda share: report(what, share),
    )
    answers = [answer for answer in answers if len(answer.output_ids) > 1]
    first: np.ndarray[Any, Any] | None = None
    level = 1 - (1 - SURE) / max(1, len(tried) - 1)
    for number, (hypothesis, drafter) in enumerate(zip(tried, drafters, strict=True)):
        report(f"measuring: {hypothesis.name}", number / len(tried))
        parts, agreed = _parts(pair.target, drafter, answers), _agreement(pair.target, drafter.model, answers)
        gain = None if first is None else _gain(first, agreed, level)
        first = agreed if first is None else first
        yield Measured(hypothesis, total(parts), interval(parts), float(agreed[:, 0].sum() / agreed[:, 1].sum()), gain)


def _parts(target: HFTarget, drafter: Eagle3Drafter, answers: Sequence[Answered]) -> list[AcceptanceStats]:
    recordings = record(target, drafter, answers, depth=SHAPE.num_steps, width=1)
    return [simulate([recording], [SHAPE])[0].stats for recording in recordings]


@torch.inference_mode()
def _agreement(target: HFTarget, model: Eagle3Model, answers: Sequence[Answered]) -> np.ndarray[Any, Any]:
    """By answer [N, 2]: the sum of min(p, q) over its places and draft steps, and how many these are."""
    frozen = FrozenTarget(target, model.aux_layer_ids, model.draft_to_target)
    found = []
    for answer in answers:
        features = frozen(batch_of(answer).to(model.device))
        agreed, count = 0.0, 0
        for guesses in unroll(model, features, SHAPE.num_steps):
            q = model.logits(guesses.normed).float().softmax(-1)
            agreed += float(torch.minimum(features.labels.probs[guesses.labels], q).sum())
            count += len(q)
        found.append((agreed, count))
    return np.array(found)


def _gain(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], level: float) -> tuple[float, float]:
    """Where the difference in agreement lies for other prompts of this kind: Student's interval, answers in pairs.

    Resampling would not do: of few answers that happen to agree it makes a certainty.
    """
    count, gains = before[:, 1], after[:, 0] - before[:, 0]
    mean, answers = float(gains.sum() / count.sum()), len(count)
    if answers < 2:
        return -math.inf, math.inf
    spread = ((gains - mean * count) / count.mean()).std(ddof=1)
    reach = float(_times(answers - 1, level) * spread / math.sqrt(answers))
    return mean - reach, mean + reach


@functools.cache
def _times(freedom: int, level: float) -> float:
    """Student's quantile, simulated: SciPy, which has it, does not belong to a plain install."""
    return float(np.quantile(abs(np.random.default_rng(0).standard_t(freedom, 1_000_000)), level))


def _verdict(reading: Reading, measured: Sequence[Measured]) -> Verdict:
    """The best reading where it drafts and is surely better than the checkpoint as read; else that, where it drafts."""
    read, best = measured[0], max(measured, key=lambda m: m.agreement)
    if max(read.length, best.length) < NOTHING:
        return Verdict(
            "",
            f"no reading of this checkpoint drafts for this target: {read.length:.2f} tokens a step, whatever was "
            "tried",
            "take the drafter of exactly this target (a fine-tune is another one), compare the tokenizers and chat "
            "templates with eyas check, or train one: eyas train",
        )
    if best.better is not None and best.better[0] > 0:
        gain = f"{best.length:.2f} tokens a step in place of {read.length:.2f}, "
        gain += f"agreement {best.agreement:.1%} in place of {read.agreement:.1%}"
        return _right(reading, best.hypothesis, f"{best.name} is right: {best.hypothesis.meaning} ({gain})")
    more = "ask more prompts: --limit N, or --prompts FILE"
    if read.length < NOTHING:
        text = f"{read.name} drafts next to nothing ({read.length:.2f} tokens a step); {best.name} may be right "
        return Verdict("", f"{text}({best.length:.2f}), which so few answers do not make sure", more)
    if read.name != AS_READ:
        return _right(reading, read.hypothesis, f"{read.name} is right: {read.hypothesis.meaning}")
    if unsure := [m.name for m in measured if m.better is not None and m.better[1] >= 0]:
        text = f"no sure difference to {', '.join(unsure)}: the checkpoint as read is taken"
        return Verdict(AS_READ, f"{text}; to be surer {more}, or trace an engine")
    return Verdict(AS_READ, "the checkpoint is right as it is read, its layer ids too")


def _right(reading: Reading, right: Hypothesis, text: str) -> Verdict:
    change = corrected.spelled(reading, right)
    fixes = [f"in config.json: {json.dumps(change)[1:-1]}"] if change else []
    if right.config.aux_layer_ids != reading.config.aux_layer_ids:
        entry = right.config.aux_layer_ids or ()
        text += f"; the states entering layers {list(entry)}, which are output ids {[i - 1 for i in entry]}"
        fixes.append(f"eyas run and serve take --drafter-layer-ids {','.join(map(str, entry))}")
    fixes.append("--write OUT writes a copy of the drafter that says so")
    return Verdict(right.name, text, "; ".join(fixes), change)


# The engine's drafts


def examine(target: HFTarget, model: Eagle3Model, recorded: Trace) -> Comparison:
    """What the engine's drafter was fed and answered, beside what this drafter should have been."""
    ours, theirs = str(target.dtype).removeprefix("torch."), recorded.dtype
    coarser = max(ours, theirs, key=lambda kind: STATES.get(kind, 1.0))
    return compare(recorded, reference(target, model, recorded), coarser)
