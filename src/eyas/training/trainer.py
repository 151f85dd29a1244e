"""The training loop: batches, states of the frozen target, the unrolled drafter, its loss, an update; over and over."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from safetensors import SafetensorError
from torch import nn

from eyas.core import UsageError, one_line
from eyas.drafter import storage
from eyas.drafter.model import Eagle3Model
from eyas.drafter.writing import cannot_say
from eyas.engine.llm import eos_ids
from eyas.files import write_whole
from eyas.target.adapter import HFTarget
from eyas.target.loading import LoadedTarget, load_target
from eyas.target.tuning import tune
from eyas.training import card, checkpoint, start, vocabulary
from eyas.training.acceptance import as_loaded
from eyas.training.batches import Batch, Course, pack
from eyas.training.checkpoint import State
from eyas.training.config import TrainConfig, TrainingError
from eyas.training.dataset import Dataset
from eyas.training.features import Features, FrozenTarget
from eyas.training.loss import StepSums, loss_of
from eyas.training.unroll import unroll
from eyas.training.vocabulary import Survey
from eyas.training.watch import Evaluation, Watch, hold_out, prompts_for

KEPT = "training"  # the folder in OUT for everything that is not the drafter
LOG = "log.jsonl"
BETAS = (0.9, 0.95)
SPEED_OVER = 20  # updates
LOG_EVERY = 10  # updates


@dataclass(frozen=True)
class Progress:
    """The training so far; ``loss`` and what follows are means over the last few updates."""

    step: int
    steps: int
    loss: float
    agreement: tuple[float, ...]  # by unroll step: how often the drafter's likeliest token was the target's
    missing: float  # probability of the target outside the draft vocabulary
    learning_rate: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    evaluation: Evaluation
    best: bool


Report = Callable[[Progress | Evaluated | str], None]


def silent(news: Progress | Evaluated | str) -> None:
    pass


@dataclass(frozen=True)
class TrainResult:
    out: Path
    step: int
    steps: int
    tokens: int
    seconds: float
    best: Evaluation | None
    interrupted: bool = False  # by a signal; it can be resumed
    main: bool = True  # of several processes, the one that speaks and writes

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


@dataclass
class Prepared:
    """All that a training works with, ready to go."""

    config: TrainConfig  # settled
    accelerator: Accelerator
    target: HFTarget
    data: Dataset
    found: Survey  # what is trained on
    held_out: list[int]
    model: Eagle3Model
    frozen: FrozenTarget
    course: Course
    watch: Watch | None

    @property
    def steps(self) -> int:
        return min(self.course.steps, self.config.max_steps or self.course.steps)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the data must still be when the training is resumed, and how many devices share its batches."""
        return {
            "rows": len(self.data),
            "tokens": int(self.data.lengths.sum()),
            "trained": len(self.found.rows),
            "devices": self.accelerator.num_processes,
        }


def train(config: TrainConfig, report: Report = silent) -> TrainResult:
    """Trains a drafter into ``config.out``, a folder that every engine takes as it is.

    Raises UsageError, DataError, TargetError or CheckpointError for what cannot be; TrainingError where a loss is no
    number or the disk is full. What was done up to the last checkpoint is kept, and ``resume`` goes on from there.
    """
    out = Path(config.out).expanduser()
    check_out(out, config.resume)
    prepared = prepare(config, report)
    return Training(prepared, out, report).run()


def check_out(out: Path, resume: bool) -> None:
    """Raises UsageError where the folder holds something that would be lost, or nothing to resume."""
    if resume:
        if not checkpoint.exists(out / KEPT):
            raise UsageError(f"{out} holds no training to resume; start without --resume, or name its folder.")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        goes_on = checkpoint.exists(out / KEPT)
        raise UsageError(
            f"{out} holds a training already: --resume goes on with it; for another one name another folder."
            if goes_on
            else f"{out} exists and is not empty; name another folder."
        )


def prepare(config: TrainConfig, report: Report = silent) -> Prepared:
    data = Dataset.open(config.data)
    accelerator = accelerator_for(config)
    report = report if accelerator.is_main_process else silent
    report(f"loading {config.target}")
    loaded = load_target(
        config.target,
        dtype=config.dtype,
        device=accelerator.device,
        trust_remote_code=config.trust_remote_code,
        need_tokenizer=False,
    )
    tune(loaded.model)
    target = HFTarget(loaded.model)
    data.manifest.check_target(loaded.tokenizer, target.vocab_size)
    return _prepare(config, accelerator, loaded, target, data, report)


def _prepare(
    config: TrainConfig,
    accelerator: Accelerator,
    loaded: LoadedTarget,
    target: HFTarget,
    data: Dataset,
    report: Report,
) -> Prepared:
    found = vocabulary.survey(data, least(config.max_length, target.context_length))
    ends = eos_ids(loaded.model, loaded.tokenizer)
    model = start_model(config, target, found, ends)
    config = config.settled(target.device.type, model.config.hidden_size)
    assert config.batch_tokens is not None
    room = target.context_length and target.context_length - config.eval_tokens
    found, held_out = hold_out(found, config.eval_prompts if config.eval_every else 0, room)
    course = Course(
        found.rows,
        found.lengths,
        tokens=config.batch_tokens,
        seed=config.seed,
        epochs=config.epochs,
        group=accelerator.num_processes * config.accumulation,
    )
    for remark in remarks(config, found, model, course):
        report(remark)
    dtype = compute_dtype(config, target.device)
    frozen = FrozenTarget(
        target, model.aux_layer_ids, model.draft_to_target, dtype=dtype, temperature=config.label_temperature
    )
    watch = None
    if config.eval_every and accelerator.is_main_process:
        prompts = prompts_for(data, held_out, loaded.tokenizer, config.eval_builtin, room)
        watch = Watch(prompts, config.eval_steps, config.eval_tokens, ends) if prompts else None
    return Prepared(config, accelerator, target, data, found, held_out, model, frozen, course, watch)


def accelerator_for(config: TrainConfig) -> Accelerator:
    """Places processes and talks to trackers; precision is ours. Raises UsageError for a tracker that is not there."""
    names = [name.strip() for name in (config.track or "").split(",") if name.strip()]
    there = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    if missing := [name for name in names if name not in there]:
        raise UsageError(
            f"The tracker {missing[0]!r} is not installed or unknown; there is {', '.join(there) or 'none'} here."
        )
    # where accelerate itself would take a GPU, the device asked for decides; a precision that `accelerate launch` has
    # from its own settings would scale or round gradients a second time
    made = Accelerator(
        mixed_precision="no",
        cpu=config.device is not None and config.device.startswith("cpu"),
        log_with=names or None,
        project_dir=str(Path(config.out).expanduser() / KEPT) if names else None,
    )
    if config.device is not None and made.num_processes == 1:
        made.state.device = torch.device(config.device)
    return made


def start_model(config: TrainConfig, target: HFTarget, found: Survey, ends: tuple[int, ...]) -> Eagle3Model:
    if config.drafter is not None:
        if config.draft_vocab_size is not None or config.aux_layers is not None or config.layers != 1:
            raise UsageError("--drafter brings its own vocabulary, states and layers: give none of them beside it.")
        return start.existing(config.drafter, target)
    ids = vocabulary.choose(found.counts, config.draft_vocab_size, ends)
    return start.new(target, ids, layers=config.layers, aux_layer_ids=config.aux_layer_ids, seed=config.seed)


def remarks(config: TrainConfig, found: Survey, model: Eagle3Model, course: Course) -> Iterator[str]:
    """What whoever trains should know beforehand. Raises UsageError where there is not one update to make."""
    if found.too_long:
        yield f"{found.too_long:,} conversations are longer than the target's context or max_length and are left out"
    if found.too_short:
        yield f"{found.too_short:,} conversations have no two tokens of the target in a row and are left out"
    covered = vocabulary.coverage(found.counts, model.draft_to_target.cpu().numpy())
    yield f"the draft vocabulary of {model.config.draft_vocab_size:,} tokens covers {covered:.2%} of the answers"
    if not course.steps:
        raise UsageError(
            f"{len(found.rows):,} conversations make fewer batches than one update takes ({config.accumulation} for "
            "each device): lower accumulation or batch_tokens, or make more data."
        )


def least(*numbers: int | None) -> int | None:
    return min((n for n in numbers if n is not None), default=None)


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """What is multiplied in: bfloat16 where the hardware does so, unless told otherwise."""
    if config.precision != "auto":
        return getattr(torch, config.precision)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported()
    else:
        can = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        native = bool(can.get("avx512_bf16") or can.get("amx_bf16"))
    return torch.bfloat16 if native else torch.float32


class DrafterLoss(nn.Module):
    """Features to loss. A module, so that accelerate can share the work among devices."""

    def __init__(self, model: Eagle3Model, config: TrainConfig, dtype: torch.dtype, lent: tuple[torch.Tensor, ...]):
        super().__init__()
        self.model, self.config, self.dtype = model, config, dtype
        self._lent = lent  # the target's embedding and head: a tuple is nothing that would be trained, moved or saved

    def forward(self, features: Features) -> tuple[torch.Tensor, StepSums]:
        assert self.config.unroll is not None
        device = features.states.device.type
        with torch.autocast(device, self.dtype) if self.dtype != torch.float32 else nullcontext():
            guesses = unroll(self.model, features, self.config.unroll)
        return loss_of(guesses, self._head(), features.labels, kind=self.config.loss, decay=self.config.step_decay)

    def _head(self) -> torch.Tensor:
        model = self.model
        if model.lm_head is not None:
            return model.lm_head.weight
        if model.embed_tokens is not None and model.config.tied_head:
            return model.embed_tokens.weight
        return self._lent[0 if model.config.tied_head else 1].to(model.dtype)


class Training:
    """A training under way. ``out`` gets the best drafter so far, and what it takes to resume."""

    def __init__(self, prepared: Prepared, out: Path, report: Report = silent):
        self.p, self.out = prepared, out
        self.report = report if prepared.accelerator.is_main_process else silent
        config, model = prepared.config, prepared.model
        self.model = model.train()
        lent = prepared.target.get_embed_and_head()
        self.module = prepared.accelerator.prepare(DrafterLoss(model, config, prepared.frozen.dtype, lent))
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=0.0, betas=BETAS, weight_decay=config.weight_decay, fused=True
        )
        self.state = self._resumed() if config.resume else checkpoint.begun(config, prepared.fingerprint)
        self._lately: deque[tuple[StepSums, float, int, float]] = deque(maxlen=SPEED_OVER)
        self._began, self._saved = time.monotonic(), self.state.step

    def run(self) -> TrainResult:
        state, steps, interrupted = self.state, self.p.steps, False
        if self.main:
            (self.out / KEPT).mkdir(parents=True, exist_ok=True)
            self._forget_log_after(state.step)
        with self._tracking(), stop_signals() as asked:
            while state.step < steps:
                self.update()
                at_end, interrupted = state.step == steps, self._agreed(asked.is_set())
                if self.p.config.eval_every and (at_end or state.step % self.p.config.eval_every == 0):
                    self._evaluate()
                stop = interrupted or self._agreed(self._out_of_time())
                if stop or at_end or state.step % self.p.config.save_every == 0:
                    self._save()
                if stop:
                    break
        best = Evaluation(**state.best) if state.best else None
        return TrainResult(self.out, state.step, steps, state.tokens, state.seconds, best, interrupted, self.main)

    def update(self) -> None:
        """One step of the optimiser. Raises TrainingError, before it, where loss or gradient is no number."""
        config, accelerator, began = self.p.config, self.p.accelerator, time.perf_counter()
        group = self.p.course[self.state.step]
        mine = group[accelerator.process_index :: accelerator.num_processes]
        total, sums = 0.0, None
        for number, rows in enumerate(mine, start=1):
            batch = pack([self.p.data[row] for row in rows], rows).to(self.p.target.device)
            with nullcontext() if number == len(mine) else accelerator.no_sync(self.module):
                loss, part = self.module(self.p.frozen(batch))
                accelerator.backward(loss / len(mine))
            total += self._finite(loss, "loss", batch) / len(mine)
            sums = part if sums is None else sums + part
        norm = nn.utils.clip_grad_norm_(self.weights, config.clip)
        self._finite(norm, "gradient's norm", batch)
        rate = learning_rate(config, self.state.step, self.p.steps)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert sums is not None
        tokens = sum(int(self.p.data.lengths[list(rows)].sum()) for rows in group)
        self._count(sums, total, tokens, time.perf_counter() - began, rate)

    @property
    def main(self) -> bool:
        return self.p.accelerator.is_main_process

    def _finite(self, value: torch.Tensor, what: str, batch: Batch) -> float:
        number = value.item()
        if math.isfinite(number):
            return number
        kept = f"the checkpoint of step {self._saved:,} is kept" if self._saved else "nothing was kept yet"
        raise TrainingError(
            f"The {what} of step {self.state.step + 1:,} is {number}, on rows {batch.rows} of {self.p.data.folder}: "
            f"training stops, and {kept}. Lower learning_rate or clip, or look at these rows."
        )

    def _count(self, sums: StepSums, loss: float, tokens: int, seconds: float, rate: float) -> None:
        state = self.state
        state.step, state.tokens, state.seconds = state.step + 1, state.tokens + tokens, state.seconds + seconds
        self._lately.append((sums, loss, tokens, seconds))
        progress = self._progress(rate)
        self.report(progress)
        if self.main and (state.step % LOG_EVERY == 0 or state.step == self.p.steps):
            self._log({"loss": progress.loss, **_by_step("agreement", progress.agreement), "learning_rate": rate})

    def _progress(self, rate: float) -> Progress:
        sums = self._lately[0][0]
        for other in list(self._lately)[1:]:
            sums = sums + other[0]
        seconds = sum(part[3] for part in self._lately)
        speed = sum(part[2] for part in self._lately) / seconds
        left = (self.p.steps - self.state.step) * seconds / len(self._lately)
        return Progress(
            step=self.state.step,
            steps=self.p.steps,
            loss=sum(part[1] for part in self._lately) / len(self._lately),
            agreement=tuple((sums.hits / sums.places).tolist()),
            missing=float(sums.missing[0] / sums.places[0]),
            learning_rate=rate,
            tokens_per_second=speed,
            seconds_left=left,
        )

    def _evaluate(self) -> None:
        """On one process, while the others wait."""
        if self.main and self.p.watch is not None:
            found = self.p.watch.measure(self.p.target, self.model, self.state.step)
            best = self.state.best is None or found.acceptance_length > self.state.best["acceptance_length"]
            self.state.evaluations.append(asdict(found))
            if best:
                self.state.best = asdict(found)
                self._write_drafter()
            self._log({"acceptance_length": found.acceptance_length, **_by_step("acceptance", found.acceptance_rates)})
            self.report(Evaluated(found, best))
        self.p.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.main:
            if self.p.watch is None:
                self._write_drafter()
            self.state.weights = self.model.state_dict()
            self.state.optimizer = self.optimizer.state_dict()
            checkpoint.save(self.out / KEPT, self.state)
        self._saved = self.state.step
        self.p.accelerator.wait_for_everyone()

    def _write_drafter(self) -> None:
        """The drafter as it is now, ready to be loaded; its card goes with it."""
        config = self.model.config
        dialect = config.dialect if cannot_say(config, "sglang") else "sglang"
        try:
            storage.save(as_loaded(self.model, self.p.target), self.out, dialect)
            card.write(self.out, self.p, self.state)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"The drafter cannot be written to {self.out}: {one_line(error)}. The checkpoint of step "
                f"{self._saved:,} is kept: make room, and resume."
            ) from error

    def _resumed(self) -> State:
        state = checkpoint.load(self.out / KEPT)
        self.p.config.check_same(TrainConfig.from_dict(state.config))
        before, now = {"devices": 1, **state.data}, self.p.fingerprint
        if before["devices"] != now["devices"]:
            raise UsageError(
                f"This training was begun on {before['devices']} devices, and now there are {now['devices']}, which "
                "would share its batches otherwise: resume it on as many, or start another from its drafter "
                f"(--drafter {self.out}, another --out)."
            )
        if before != now:
            raise UsageError(
                f"{self.p.data.folder} has changed since this training began ({state.data['rows']:,} rows then, "
                f"{len(self.p.data):,} now): start another from its drafter (--drafter {self.out}, another --out)."
            )
        self.model.load_state_dict(state.weights)
        self.optimizer.load_state_dict(state.optimizer)
        return state

    def _out_of_time(self) -> bool:
        minutes = self.p.config.stop_after
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def _agreed(self, wish: bool) -> bool:
        """Whether any process wishes so: all of them stop together."""
        accelerator = self.p.accelerator
        if accelerator.num_processes == 1:
            return wish
        flag = torch.tensor([float(wish)], device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum").item())

    @contextmanager
    def _tracking(self) -> Iterator[None]:
        accelerator = self.p.accelerator
        if self.p.config.track:
            accelerator.init_trackers("eyas", config={k: v for k, v in asdict(self.p.config).items() if v is not None})
        yield
        if self.p.config.track:
            accelerator.end_training()

    def _log(self, values: dict[str, float]) -> None:
        line = {"step": self.state.step, "tokens": self.state.tokens, "seconds": round(self.state.seconds, 1), **values}
        with (self.out / KEPT / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.p.config.track:
            self.p.accelerator.log(values, step=self.state.step)

    def _forget_log_after(self, step: int) -> None:
        """What a killed training wrote behind its last checkpoint happens again."""
        path = self.out / KEPT / LOG
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            write_whole(path, "".join(line + "\n" for line in kept))


def _by_step(name: str, values: tuple[float, ...]) -> dict[str, float]:
    return {f"{name}_{number}": round(value, 5) for number, value in enumerate(values, start=1)}


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Of update ``step``, from 0: up in a line, then down by the schedule, to 0 behind the last one."""
    assert config.learning_rate is not None
    rising = round(config.warmup * steps)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - rising) / max(1, steps - rising)
    return config.learning_rate * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or a polite kill sets: the update under way is finished. A second one ends it at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        asked.set()
        for name, handler in before.items():
            signal.signal(name, handler)

    before = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
