from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli import tiny
from safetensors.torch import load_file
from training import sets

from eyas.core import EyasError, UsageError
from eyas.drafter.model import untrained
from eyas.drafter.storage import load_drafter, save
from eyas.target.adapter import HFTarget
from eyas.target.loading import load_target
from eyas.training import trainer
from eyas.training.acceptance import measure_acceptance
from eyas.training.config import TrainConfig, TrainingError
from eyas.training.dataset import DataError, Row
from eyas.training.trainer import Evaluated, Progress, learning_rate, train

Config = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write(tmp_path_factory.mktemp("data") / "data", sets.rows(60)).folder


@pytest.fixture
def config(target: Path, data: Path, tmp_path: Path) -> Config:
    """A training of a few seconds into tmp_path / "out"."""

    def made(**settings: Any) -> TrainConfig:
        where = {
            "data": data,
            "out": tmp_path / "out",
            **{k: settings.pop(k) for k in ("data", "out") if k in settings},
        }
        return sets.config(target, where["data"], where["out"], **settings)

    return made


def drafter_of(folder: Path, target: HFTarget) -> Any:
    sizes = {
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    return load_drafter(folder, **sizes, dtype=torch.float32)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.thorough
def test_eight_sequences_are_learned_by_heart(config: Config, target: Path, tmp_path: Path) -> None:
    """And the engine accepts nearly every token of it, at every position (the likeliest counts: some are close)."""
    eight = sets.write(tmp_path / "eight", sets.rows(8, length=24))
    recipe = {"batch_tokens": 256, "unroll": 6, "learning_rate": 5e-3, "step_decay": 1.0, "label_temperature": 0.1}
    done = train(config(data=eight.folder, epochs=200, **recipe))
    assert done.finished and done.step == 200
    loaded = HFTarget(load_target(str(target)).model)
    prompts = [row.ids[:6].tolist() for row in eight]
    stats = measure_acceptance(loaded, drafter_of(tmp_path / "out", loaded), prompts, steps=5, max_tokens=24)
    assert len(stats.acceptance_rates) == 5 and min(stats.acceptance_rates) > 0.95, stats.acceptance_rates


def test_learns_and_keeps_the_best(config: Config, tmp_path: Path) -> None:
    news: list[Any] = []
    settings = {"epochs": 8, "eval_every": 40, "eval_prompts": 4, "eval_builtin": 3, "eval_tokens": 16}
    done = train(config(**settings, learning_rate=1e-2), news.append)
    steps = [item for item in news if isinstance(item, Progress)]
    assert [item.step for item in steps] == list(range(1, done.steps + 1)) and steps[-1].seconds_left == 0
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert 0 <= steps[-1].missing < 0.2 and all(item.tokens_per_second > 0 for item in steps)
    found = [item for item in news if isinstance(item, Evaluated)]
    assert [item.evaluation.step for item in found] == [*range(40, done.steps, 40), done.steps]
    best = max(item.evaluation.acceptance_length for item in found)
    assert done.best is not None and done.best.acceptance_length == best > 1
    assert set(done.best.by_task) == {"held out", "chat", "code", "maths"}
    log = [json.loads(line) for line in (tmp_path / "out" / "training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "acceptance_length" in line] == [item.evaluation.step for item in found]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"**{best:.2f}**" in card and "56 trained on, 4 held out" in card and "eyas run llama --drafter out" in card


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumed_is_uninterrupted_bit_for_bit(
    stop: int, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between checkpoints: what came after the last one happens again, the same."""
    settings = {"epochs": 2, "accumulation": 2, "save_every": 3, "draft_vocab_size": 90}
    whole = train(config(out=tmp_path / "whole", **settings))
    assert whole.steps > 8

    class Killed(Exception):
        pass

    update = trainer.Training.update

    def dying(self: trainer.Training) -> None:
        if self.state.step == stop:
            raise Killed
        update(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, "update", dying)
        with pytest.raises(Killed):
            train(config(**settings))
    resumed = config(**settings, resume=stop >= 3)
    if not resumed.resume:
        shutil.rmtree(tmp_path / "out")
    assert train(resumed).step == whole.steps
    assert same(tmp_path / "whole", tmp_path / "out")
    logs = [(tmp_path / name / "training" / "log.jsonl").read_text().splitlines() for name in ("whole", "out")]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


def test_stops_when_asked_and_goes_on(config: Config, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests were put into the background
    settings = {"epochs": 2, "save_every": 1000}
    train(config(out=tmp_path / "whole", **settings))

    def ask(news: Any) -> None:
        if isinstance(news, Progress) and news.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    done = train(config(**settings), ask)
    assert done.interrupted and not done.finished and done.step == 5
    assert signal.getsignal(signal.SIGINT) is before
    assert train(config(**settings, resume=True)).finished
    assert same(tmp_path / "whole", tmp_path / "out")


def test_sittings(config: Config, tmp_path: Path) -> None:
    """A time limit does not change what is learned."""
    train(config(out=tmp_path / "whole", epochs=1))
    first = train(config(epochs=1, stop_after=1e-9))
    assert first.step == 1 and not first.interrupted
    assert train(config(epochs=1, resume=True)).finished
    assert same(tmp_path / "whole", tmp_path / "out")


def test_a_drafter_goes_on_with_its_vocabulary(config: Config, target: Path, tmp_path: Path) -> None:
    train(config(out=tmp_path / "first", draft_vocab_size=70))
    train(config(drafter=str(tmp_path / "first")))
    before, after = weights(tmp_path / "first"), weights(tmp_path / "out")
    assert torch.equal(before["d2t"], after["d2t"]) and not torch.equal(before["fc.weight"], after["fc.weight"])
    with pytest.raises(UsageError, match="brings its own"):
        train(config(out=tmp_path / "third", drafter=str(tmp_path / "first"), draft_vocab_size=50))


@pytest.mark.parametrize("shape", [{"own_head": False}, {"own_head": False, "tied_head": True}], ids=["lent", "tied"])
def test_a_head_that_is_the_targets_stays(shape: dict[str, Any], config: Config, tmp_path: Path) -> None:
    save(untrained(32, 4, 160, own_embedding=False, **shape), tmp_path / "first")
    train(config(drafter=str(tmp_path / "first")))
    after = weights(tmp_path / "out")
    assert "lm_head.weight" not in after and "embed_tokens.weight" not in after


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "acceptance", "label_temperature": 0.5},
        {"precision": "bfloat16", "schedule": "linear", "clip": 0.5, "weight_decay": 0.1},
        {"layers": 2, "aux_layers": "0,4", "draft_vocab_size": 0, "schedule": "constant", "max_steps": 80},
    ],
    ids=["acceptance loss", "bfloat16", "two layers"],
)
def test_other_recipes_learn_too(settings: dict[str, Any], config: Config) -> None:
    steps: list[Any] = []
    train(config(epochs=6, learning_rate=1e-2, **settings), steps.append)
    steps = [item for item in steps if isinstance(item, Progress)]
    assert steps[-1].agreement[0] > steps[0].agreement[0] + 0.05 and steps[-1].loss < steps[0].loss


def test_learning_rates() -> None:
    made = TrainConfig("t", "d", "o", learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(made, step, 100) for step in range(100)]
    assert rates[:3] == [0.1, 0.2, 0.3] and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and 0 < rates[99] < 1e-3
    assert all(a >= b for a, b in pairwise(rates[9:]))
    flat = TrainConfig("t", "d", "o", learning_rate=1.0, warmup=0.0, schedule="constant")
    assert {learning_rate(flat, step, 10) for step in range(10)} == {1.0}
    straight = replace(made, schedule="linear")
    assert [learning_rate(straight, step, 100) for step in (10, 55, 99)] == pytest.approx([1.0, 0.5, 1 / 90])


# Bad input


def refused(config: TrainConfig, kind: type[EyasError], *words: str) -> None:
    with pytest.raises(kind) as error:
        train(config)
    for word in words:
        assert word in str(error.value), error.value


def test_no_number_stops_and_names_the_rows(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(config(out=tmp_path / "short", max_steps=4, epochs=2))
    real, calls = trainer.loss_of, []

    def breaking(*args: Any, **kwargs: Any) -> Any:
        loss, sums = real(*args, **kwargs)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 7 else loss), sums

    monkeypatch.setattr(trainer, "loss_of", breaking)
    refused(config(epochs=2, save_every=4), TrainingError, "loss of step 7 is nan", "rows [", "step 4 is kept")
    state = trainer.checkpoint.load(tmp_path / "out" / "training")
    assert state.step == 4 and whole.step == 4
    assert all(bool(w.isfinite().all()) for w in state.weights.values() if w.is_floating_point())


def test_data_of_somebody_else(config: Config, tmp_path: Path) -> None:
    foreign = tiny.tokenizer()
    foreign.chat_template = "another"
    sets.write(tmp_path / "foreign", sets.rows(10), foreign)
    refused(config(data=tmp_path / "foreign"), DataError, "another chat template")
    refused(config(data=tmp_path / "none"), DataError, "is no folder")


def test_nothing_to_train_on(config: Config, tmp_path: Path) -> None:
    alone = Row(np.arange(9, dtype=np.int32), np.arange(9) == 5)
    sets.write(tmp_path / "alone", [alone])
    refused(config(data=tmp_path / "alone"), DataError, "no two tokens in a row")
    refused(config(max_length=10), DataError, "are longer than 10 tokens")
    refused(config(accumulation=1000), UsageError, "fewer batches than one update takes")


def test_rows_left_out_are_said(config: Config, tmp_path: Path) -> None:
    long = Row(np.zeros(600, np.int32), np.ones(600, bool))
    sets.write(tmp_path / "mixed", [*sets.rows(20), long])
    news: list[Any] = []
    train(config(data=tmp_path / "mixed"), news.append)
    assert any("1 conversations are longer" in str(item) for item in news)


def test_too_large_a_vocabulary(config: Config) -> None:
    refused(config(draft_vocab_size=159), UsageError, "the answers in the data hold", "all of the target's (0)")
    refused(config(draft_vocab_size=161), UsageError, "the target has 160")


def test_folders_that_are_in_use(config: Config, tmp_path: Path, data: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    refused(config(), UsageError, "is not empty")
    refused(config(resume=True), UsageError, "no training to resume")
    train(config(out=tmp_path / "done", max_steps=2))
    refused(config(out=tmp_path / "done", max_steps=2), UsageError, "--resume")
    refused(config(out=tmp_path / "done", max_steps=2, seed=1, resume=True), UsageError, "begun with seed 0")
    sets.write(tmp_path / "more", sets.rows(20))
    refused(config(out=tmp_path / "done", max_steps=2, data=tmp_path / "more", resume=True), UsageError, "has changed")


def test_another_number_of_devices(config: Config, tmp_path: Path) -> None:
    """They would share the batches otherwise: some would be skipped, others taken twice."""
    train(config(max_steps=2))
    folder = tmp_path / "out" / "training"
    state = trainer.checkpoint.load(folder)
    assert state.data["devices"] == 1
    state.data["devices"] = 2
    trainer.checkpoint.save(folder, state)
    refused(config(max_steps=2, resume=True), UsageError, "begun on 2 devices, and now there are 1")


def test_a_full_disk_keeps_the_checkpoint_before(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.save

    def full(content: Any, file: Any) -> None:
        if content["step"] > 4:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        real(content, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        refused(config(epochs=2, save_every=4), TrainingError, "No space left", "one before it is kept")
    assert trainer.checkpoint.load(tmp_path / "out" / "training").step == 4
    assert [p.name for p in (tmp_path / "out" / "training").rglob("*") if p.name.startswith(".")] == []
    train(config(out=tmp_path / "whole", epochs=2, save_every=4))
    train(config(epochs=2, save_every=4, resume=True))
    assert same(tmp_path / "whole", tmp_path / "out")


def test_a_damaged_checkpoint(config: Config, tmp_path: Path) -> None:
    train(config(max_steps=2))
    path = tmp_path / "out" / "training" / "checkpoint" / "state.pt"
    path.write_bytes(path.read_bytes()[:1000])
    refused(config(max_steps=2, resume=True), TrainingError, "cannot be read")


def test_a_tracker_that_is_not_there(config: Config) -> None:
    refused(config(track="abacus"), UsageError, "'abacus' is not installed or unknown")
