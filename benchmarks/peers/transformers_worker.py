"""transformers' own decoding: generate, eager or compiled, or its continuous batching.

    transformers_worker.py TARGET eager|compiled|continuous [--threads 2]

``generate`` takes the prompts as one batch, padded on the left. Compiled means what its manual names: a static cache
and torch.compile of the forward; prompts are padded to a multiple of 32, so that few lengths have to be compiled.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from protocol import Clock, Prompts, Result, Round, serve, versions
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)

PADDED = 32


class Hearing(StoppingCriteria):
    """Never stops anything: tells the clock of every token of the batch."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for index, token in enumerate(input_ids[:, -1].tolist()):
            self.clock.hear(index, [token])
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate:
    """model.generate on a padded batch."""

    def __init__(self, model: Any, compiled: bool):
        self.model, self.compiled = model, compiled

    def round(self, prompts: Prompts, tokens: int, warm_up: bool) -> Result:
        width = max(map(len, prompts))
        how: dict[str, Any] = {}
        if self.compiled:
            width = -(-width // PADDED) * PADDED
            how = {"cache_implementation": "static", "compile_config": compile_everywhere()}
        clock = Clock(len(prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[Hearing(clock)],
            **how,
        )
        return clock.result()


class Continuous:
    """Its continuous batching, whose manager runs in a thread of its own."""

    def __init__(self, model: Any, most: int):
        how = ContinuousBatchingConfig(
            num_blocks=4 * most,  # of 256 tokens
            max_requests_per_batch=most,
            max_batch_tokens=4096,
            allow_block_sharing=False,  # every round asks the same prompts
        )
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.manager = model.init_continuous_batching(settings, how)
        self.manager.start()

    def round(self, prompts: Prompts, tokens: int, warm_up: bool) -> Result:
        clock = Clock(len(prompts))
        names = {
            self.manager.add_request(prompt, max_new_tokens=tokens, streaming=True): index
            for index, prompt in enumerate(prompts)
        }
        going = set(names)
        while going:
            output = self.manager.get_result(timeout=1)
            if output is None:
                if not self.manager.is_running():
                    raise RuntimeError("the manager of continuous batching has ended")
                continue
            index = names[output.request_id]
            clock.hear(index, output.generated_tokens[len(clock.answers[index]) :])
            if output.is_finished():
                if output.error:
                    raise RuntimeError(output.error)
                going.remove(output.request_id)
        return clock.result()


def compile_everywhere() -> CompileConfig:
    """transformers compiles on accelerators alone unless this is set."""
    config = CompileConfig(mode="default", options=None, dynamic=False)
    config._compile_all_devices = True
    return config


def load(args: argparse.Namespace) -> tuple[Round, dict[str, Any]]:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    peer = Continuous(model, args.most) if args.how == "continuous" else Generate(model, args.how == "compiled")
    return peer.round, {**versions("transformers", "torch"), "threads": args.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("how", choices=("eager", "compiled", "continuous"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=int, default=32, help="sequences at a time")
    args = parser.parse_args()
    serve(lambda: load(args))
    os._exit(0)  # the manager's thread would keep the process


if __name__ == "__main__":
    main()
