"""vLLM's speculators 0.9: its EAGLE-3 model, masks, loss and optimiser settings, on states that transformers computes.

    training_speculators.py TASK

Its own trainer wants an accelerator, a vLLM server that writes states to disk, and flex attention, which has no
backward pass on a CPU. What it does in a step is done here as its ``Trainer.train_epoch`` does it, with the attention
it has for CPUs (``sdpa``). It leaves its head frozen, which is less work than the others do.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from training_protocol import Task, Update, serve
from transformers import AutoConfig, AutoModelForCausalLM


class Loop:
    def __init__(self, task: Task, dtype: torch.dtype):
        self.task, self.dtype = task, dtype
        self.target = AutoModelForCausalLM.from_pretrained(task.target, dtype=torch.bfloat16).eval()
        self.last: list[torch.Tensor] = []
        self.target.model.norm.register_forward_pre_hook(lambda _, args: self.last.append(args[0]))
        config = AutoConfig.from_pretrained(task.target)
        config.num_hidden_layers = 1
        ids = torch.tensor(task.draft_ids)
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        self.model = Eagle3DraftModel.from_training_args(
            config,
            t2d=t2d,
            d2t=ids - torch.arange(len(ids)),
            draft_vocab_size=len(ids),
            norm_before_residual=False,
            target_layer_ids=task.layer_ids,
            ttt_steps=task.unroll,
            verifier_name_or_path=task.target,
            draft_attn_impl="sdpa",
        ).train()
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.01)
        self.loss = resolve_loss_config("kl_div", "eager")  # fused needs Triton

    def update(self, number: int) -> float:
        batch = self.batch(number)
        with torch.autocast("cpu", self.dtype) if self.dtype != torch.float32 else nullcontext():
            _, loss, _ = self.model(**batch, ttt_steps=self.task.unroll, ttt_step_loss_decay=0.8, loss_config=self.loss)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Rows one after the other in a line of their own, as its collate function packs them."""
        parts = []
        for owner, (ids, mask) in enumerate(self.task.batches[number]):
            tokens = torch.tensor(ids)
            self.last.clear()
            out = self.target(tokens[None], output_hidden_states=True, use_cache=False, logits_to_keep=1)
            part = shift_batch(
                {
                    "input_ids": tokens,
                    "hidden_states": torch.cat([out.hidden_states[n][0] for n in self.task.layer_ids], dim=-1),
                    "verifier_last_hidden_states": self.last[0][0],
                    "loss_mask": torch.tensor(mask),
                    "lengths": torch.tensor([len(ids)]),
                    "position_ids": torch.arange(len(ids)),
                }
            )
            part["document_ids"] = torch.full_like(part["input_ids"], owner)
            parts.append(part)
        names = [name for name in parts[0] if name != "lengths"]
        joined = {name: torch.cat([part[name] for part in parts])[None] for name in names}
        return {name: x.float() if x.is_floating_point() else x for name, x in joined.items()}


def load(task: Task) -> tuple[Update, dict[str, Any]]:
    torch.set_num_threads(task.threads)
    can = torch.cpu.get_capabilities()
    dtype = torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32
    about = {"precision": str(dtype), **{name: version(name) for name in ("speculators", "torch", "transformers")}}
    return Loop(task, dtype).update, about


if __name__ == "__main__":
    task = Task.read(sys.argv[1])
    serve(lambda: load(task))
