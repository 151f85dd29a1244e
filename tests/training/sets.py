"""Tiny targets on disk, and data of what they really write."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cli import tiny
from zoo import WORDS, case

from eyas.training.config import TrainConfig
from eyas.training.dataset import Dataset, DatasetWriter, Manifest, Row

NAME, VOCAB = "llama", 160


@cache
def answers(count: int, prompt: int = 6, length: int = 24, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Random prompts of ``prompt`` words and, behind each, the target's own greedy continuation."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, WORDS, (count, prompt)))
    out = case(NAME).model.generate(ids, max_new_tokens=length, do_sample=False)
    return tuple(map(tuple, out.tolist()))


def rows(count: int, prompt: int = 6, length: int = 24, seed: int = 0) -> list[Row]:
    mask = np.arange(prompt + length) >= prompt
    return [Row(np.array(ids, np.int32), mask) for ids in answers(count, prompt, length, seed)]


def write(folder: Path, some: list[Row], tokenizer: Any = None) -> Dataset:
    manifest = Manifest.of(NAME, tokenizer or tiny.tokenizer(), VOCAB, sampling={"temperature": 0})
    writer = DatasetWriter(folder, manifest)
    writer.append(some)
    return writer.finish()


def config(target: Path, data: Path, out: Path, **settings: Any) -> TrainConfig:
    quick: dict[str, Any] = {"precision": "float32", "device": "cpu", "eval_every": 0, "batch_tokens": 128, "unroll": 3}
    return TrainConfig(str(target), str(data), str(out), **{**quick, **settings})
