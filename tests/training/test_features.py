"""What is learned from, against the target run on each row alone, by transformers itself."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from zoo import WORDS, case

from eyas.target.adapter import HFTarget
from eyas.training.batches import pack
from eyas.training.dataset import Row
from eyas.training.features import FrozenTarget

MASKS = ["." * 10 + "x" * 12, "...xxxxx..xxxx", "..xxxxxxx", "xxx"]
NAMES = ["llama", "gemma3", "gpt-oss", "gpt2", "deepseek-v3", "llama4", "qwen2.5-vl"]
IDS = (1, 3, 4)  # the last is the last layer's output


def rows() -> list[Row]:
    random = np.random.default_rng(0)
    return [Row(random.integers(0, WORDS, len(m)).astype(np.int32), np.array([c == "x" for c in m])) for m in MASKS]


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_are_rows_alone(name: str) -> None:
    """Windows, chunks, sinks and multi-axis positions included: rows are longer than window and chunk."""
    target = HFTarget(case(name).model)
    draft_ids = torch.arange(0, target.vocab_size, 3)
    batch = pack(rows(), range(4))
    assert len(batch.tokens) == 3, "two rows share a line"
    got = FrozenTarget(target, IDS, draft_ids)(batch)
    asked = 0
    for number, row in enumerate(rows()):
        at = batch.owners == number
        logits, states = alone(target, row)
        torch.testing.assert_close(got.states[at], states, rtol=1e-3, atol=1e-3)
        labels = got.label_of[at]
        for place in range(len(row.ids)):
            drafted = place > 0 and row.mask[place] and place + 1 < len(row.ids) and bool(row.mask[place + 1])
            assert (labels[place] >= 0) == drafted, "what follows the first token of a draft, to the end of the turn"
            if not drafted:
                continue
            asked += 1
            p = logits[place].softmax(-1)
            label = int(labels[place])
            torch.testing.assert_close(got.labels.probs[label], p[draft_ids], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(got.labels.mass[label], p[draft_ids].sum(), rtol=1e-3, atol=1e-4)
            best = int(p.argmax())
            assert int(got.labels.best[label]) == (best // 3 if best % 3 == 0 else -1)
    assert asked == len(got.labels.probs) == int(got.label_of.max()) + 1 > 20


def alone(target: HFTarget, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and states [n, ...] of one row, through hooks of our own, without cache or mask."""
    states: dict[int, torch.Tensor] = {}

    def entering(layer: int, _: object, args: tuple, kwargs: dict) -> None:
        states[layer] = args[0] if args else kwargs["hidden_states"]

    def leaving(_: object, args: tuple, output: object) -> None:
        states[4] = output[0] if isinstance(output, tuple) else output  # type: ignore[assignment]

    hooks = [target.layers[i].register_forward_pre_hook(partial(entering, i), with_kwargs=True) for i in IDS if i < 4]
    hooks.append(target.layers[-1].register_forward_hook(leaving))
    try:
        with torch.no_grad():
            logits = target.model(torch.from_numpy(row.ids).long()[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, torch.cat([states[i] for i in IDS], -1)[0]


def test_temperature_sharpens() -> None:
    target = HFTarget(case("llama").model)
    draft_ids = torch.arange(target.vocab_size)
    batch = pack(rows(), range(4))
    plain, sharp = (FrozenTarget(target, IDS, draft_ids, temperature=t)(batch).labels for t in (1.0, 0.5))
    expected = (2 * plain.probs.log()).softmax(-1)
    torch.testing.assert_close(sharp.probs, expected, rtol=1e-3, atol=1e-5)
    assert torch.equal(sharp.best, plain.best)


def test_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFTarget(case("llama").model)
    batch = pack(rows(), range(4))
    frozen = FrozenTarget(target, IDS, torch.arange(0, 160, 2), dtype=torch.bfloat16)
    whole = frozen(batch).labels
    monkeypatch.setattr("eyas.training.features.CHUNK", {"cpu": 1000})
    pieces = frozen(batch).labels
    assert whole.probs.dtype == torch.bfloat16 and whole.mass.dtype == torch.float32
    assert torch.equal(whole.probs, pieces.probs) and torch.equal(whole.best, pieces.best)


def test_the_model_is_left_as_it_was() -> None:
    """Its head sees every place again, and no hook of ours is left."""
    target = HFTarget(case("llama").model)
    FrozenTarget(target, IDS, torch.arange(160))(pack(rows(), range(4)))
    with torch.no_grad():
        assert target.model(torch.arange(12)[None]).logits.shape == (1, 12, 160)
