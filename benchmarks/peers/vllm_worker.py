"""vLLM on the CPU, plain or with an EAGLE-3 drafter; runs in an environment of its own (``make peers``).

    vllm_worker.py TARGET [--drafter FOLDER --draft-tokens 5] [--threads 2]

The engine runs inside this process. vLLM's default, an engine process and a worker process beside it, leaves the model
only one of two cores. Its rule for feigned
acceptance is not implemented for the CPU, so what an untrained drafter shows is its cost.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from protocol import Clock, Prompts, Result, Round, serve, versions

LONGEST = 2048


def environment(threads: int) -> dict[str, str]:
    """What must be set before Python starts: OpenMP reads it once, and the loader preloads once.

    vLLM's manual asks for Intel's OpenMP (which comes with the wheel) and tcmalloc (which does not) to be preloaded.
    """
    libraries = [next(Path(sys.prefix, "lib").glob("libiomp5.so"), None)]
    libraries += [next(Path("/usr/lib").glob(f"*-linux-gnu/{name}"), None) for name in ("libtcmalloc_minimal.so.4",)]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library is not None),
        "OMP_NUM_THREADS": str(threads),
        # what vLLM itself sets in a worker process, and here there is none
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def restart_with(settings: dict[str, str]) -> None:
    """Starts this program anew in the environment it needs, unless it is already there."""
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})


class Vllm:
    """One engine, one round at a time."""

    def __init__(self, args: argparse.Namespace):
        from vllm import EngineArgs, LLMEngine

        settings: dict[str, Any] = {
            "model": args.target,
            "dtype": "bfloat16",
            "max_model_len": LONGEST,
            "max_num_seqs": args.most,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,  # every round asks the same prompts
            "disable_log_stats": False,  # the counts of accepted tokens
        }
        if args.drafter:
            settings["speculative_config"] = {
                "method": "eagle3",
                "model": args.drafter,
                "num_speculative_tokens": args.draft_tokens,
            }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))

    def round(self, prompts: Prompts, tokens: int, warm_up: bool) -> Result:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        before = self.counts()
        clock = Clock(len(prompts))
        for index, ids in enumerate(prompts):
            self.engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                clock.hear(int(output.request_id.split("-")[0]), list(output.outputs[0].token_ids))
        result = clock.result()
        drafts, accepted = (now - then for now, then in zip(self.counts(), before, strict=True))
        result.acceptance_length = 1 + accepted / drafts if drafts else None
        return result

    def counts(self) -> tuple[float, float]:
        """Drafts made and draft tokens accepted so far."""
        found = {"vllm:spec_decode_num_drafts": 0.0, "vllm:spec_decode_num_accepted_tokens": 0.0}
        for metric in self.engine.get_metrics():
            if metric.name in found:
                found[metric.name] += metric.value
        drafts, accepted = found.values()
        return drafts, accepted


def load(args: argparse.Namespace) -> tuple[Round, dict[str, Any]]:
    peer = Vllm(args)
    return peer.round, {**versions("vllm-cpu", "torch"), "threads": args.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter", help="a folder in a spelling that vLLM reads")
    parser.add_argument("--draft-tokens", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=int, default=32, help="sequences at a time")
    args = parser.parse_args()
    restart_with(environment(args.threads))
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
