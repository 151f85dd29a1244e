"""``eyas train``'s own loop, one update at a time.

training_eyas.py TASK
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from training_protocol import Task, Update, serve

from eyas.training.config import TrainConfig
from eyas.training.trainer import Progress, Training, prepare


def load(task: Task, out: Path) -> tuple[Update, dict[str, Any]]:
    torch.set_num_threads(task.threads)
    config = TrainConfig(
        target=task.target,
        data=task.data,
        out=str(out),
        unroll=task.unroll,
        batch_tokens=task.batch_tokens,
        draft_vocab_size=len(task.draft_ids),
        aux_layers=",".join(map(str, task.layer_ids)),
        eval_every=0,
        device="cpu",
    )
    prepared = prepare(config)
    if sorted(prepared.model.draft_to_target.tolist()) != sorted(task.draft_ids):
        raise SystemExit("another draft vocabulary than the others have")
    losses = [0.0]

    def hear(news: Any) -> None:
        if isinstance(news, Progress):
            losses.append(news.loss)

    training = Training(prepared, out, hear)

    def update(number: int) -> float:
        if len(prepared.course[training.state.step][0]) != len(task.batches[number]):
            raise RuntimeError(f"batch {number} is not the one whose turn it is")
        training.update()
        return losses[-1]

    return update, {"precision": str(prepared.frozen.dtype)}


if __name__ == "__main__":
    task = Task.read(sys.argv[1])
    serve(lambda: load(task, Path(sys.argv[1]).parent / "out"))
