"""What ``eyas plan`` predicts beside what was published: the tables of docs/plan.md.

    python benchmarks/plan_vs_published.py                        # print them
    python benchmarks/plan_vs_published.py --update docs/plan.md  # write them where the guide has them

No number of the right-hand side is used on the left. Where a publication does not say how many tokens were accepted,
the acceptance length that would explain its speedup is shown instead; one above steps + 1 cannot be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from eyas.bench.hardware import PROFILES, Hardware
from eyas.bench.plan import needed_length
from eyas.bench.roofline import Forecast, Split
from eyas.bench.shapes import default_drafter, target_model, with_kv_bytes
from eyas.bridges.target import Target
from eyas.core import DraftShape

BEGIN, END = "<!-- tables: benchmarks/plan_vs_published.py -->", "<!-- end of tables -->"


def llama(hidden: int, width: int, layers: int, heads: int, kv: int, vocabulary: int, **more: object) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": kv, **sizes, **more}


KIMI = {  # Kimi-K2.5 and K2.6: routed experts in 4 bits, all else in 16
    **llama(7168, 18432, 61, 64, 64, 163840, model_type="kimi_k2", first_k_dense_replace=1),
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}
CONFIGS = {
    "Llama-3.1-8B": llama(4096, 14336, 32, 32, 8, 128256),
    "Vicuna-13B": llama(5120, 13824, 40, 40, 40, 32000),
    "Qwen3-8B": llama(4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Kimi-K2": KIMI,
}
CHAIN2, CHAIN3, CHAIN5 = DraftShape(2, 1, 3), DraftShape(3, 1, 4), DraftShape(5, 1, 6)
TREE60 = DraftShape(8, 10, 60)  # the EAGLE-3 code's defaults: a first level and 7 more, top-k 10, 60 tokens


def forecast(model: str, hardware: Hardware, gpus: int = 1, kv_bytes: float = 2.0) -> Forecast:
    target = Target(Path(model), CONFIGS[model])
    shape = target_model(target, kv_bytes=kv_bytes)
    return Forecast(shape, with_kv_bytes(default_drafter(target, shape), kv_bytes), hardware, gpus)


def off(predicted: float, published: float) -> str:
    return f"{predicted / published - 1:+.0%}"


def table(title: str, text: str, header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    lines = [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
    return "\n".join([f"### {title}", "", text, "", *lines])


def plain(cost: Forecast, B: int, S: int) -> Split:
    return cost.verify(B, 1, S)


def founding() -> str:
    """8 GPUs over PCIe whose name is not told; of those with room for 595 GB and no NVLink, the likeliest."""
    machine = PROFILES["rtx-pro-6000"]
    ways = {name: forecast("Kimi-K2", machine.only(name), 8) for name in ("ring", "ring-host", "one-shot")}
    one = {name: plain(cost, 1, 1024) for name, cost in ways.items()}
    speeds = " / ".join(f"{1 / split.total:.1f}" for split in one.values())
    shares = " / ".join(f"{split.all_reduce / split.total:.1%}" for split in one.values())
    steps = {name: cost.step(CHAIN3, 1, 1024) for name, cost in ways.items()}
    many = " / ".join(f"{128 / plain(cost, 128, 1024).total:,.0f}" for cost in ways.values())

    def lengths(speedup: float) -> str:
        return " / ".join(f"{needed_length(cost, CHAIN3, speedup, 1, 1024):.2f}" for cost in ways.values())

    cheap = " / ".join(f"{steps[name] / steps['one-shot']:.2f}x" for name in ("ring", "ring-host"))
    even = " / ".join(f"{needed_length(cost, CHAIN3, 1, 1, 1024):.2f}" for cost in ways.values())
    rows = [
        ["plain decoding, one stream", speeds, "63.6, later 92.6 tok/s (SGLang), 82.5 (vLLM)"],
        ["share of all-reduce in a plain step", shares, "51.5% (older stack)"],
        ["plain decoding, concurrency 128", many, "2,370 tok/s (SGLang), 1,536 (vLLM)"],
        ["break-even acceptance length, chain of 3", even, "not known"],
        ["acceptance length that explains 54.1 against 92.6", lengths(54.1 / 92.6), "not known"],
        ["acceptance length that explains 96.1 against 92.6", lengths(96.1 / 92.6), "not known"],
        ["speculative step, dear all-reduce over cheap", cheap, f"{96.1 / 54.1:.2f}x (54.1 to 96.1 tok/s)"],
    ]
    text = (
        "Kimi-K2.5 on 8 GPUs over PCIe, SGLang, EAGLE-3 with 3 steps. The GPU is not told: 8 RTX PRO 6000 are assumed, "
        "with 1,024 tokens of context. Predictions for NCCL's ring with peer-to-peer / through host memory / a "
        "one-shot all-reduce."
    )
    return table("The founding case", text, ["", "predicted", "published"], rows)


def curve(title: str, text: str, cost: Forecast, shape: DraftShape, points: dict[int, float], S: int) -> str:
    """Speedups over batch size without acceptance: what explains each, and what the first predicts of the others."""
    lengths = {B: needed_length(cost, shape, speedup, B, S) for B, speedup in points.items()}
    length = next(iter(lengths.values()))
    rows = []
    for index, (B, speedup) in enumerate(points.items()):
        predicted = length / needed_length(cost, shape, 1, B, S)
        error = off(predicted, speedup) if index else "(taken from here)"
        rows.append([str(B), f"{speedup:.2f}x", f"{lengths[B]:.2f}", f"{predicted:.2f}x", error])
    header = ["batch", "published", "length that explains it", "predicted with the first row's length", "off"]
    return table(title, text, header, rows)


def sglang() -> str:
    cost = forecast("Llama-3.1-8B", PROFILES["h100-sxm"])
    speed = 1 / plain(cost, 1, 512).total
    length = needed_length(cost, DraftShape(5, 4, 8), 373.25 / 158.34, 1, 512)
    text = (
        "Llama-3.1-8B on one H100, SGLang 0.4.4, MT-bench, chain of 3 (EAGLE-3 paper); context of 512 assumed. Plain "
        f"decoding of one stream: {speed:.1f} tok/s predicted, 158.3 published ({off(speed, 158.34)}). EAGLE-3 at "
        f"373.3 tok/s (shape not told) is explained by an acceptance length of {length:.2f} with SGLang's default of 5 "
        "steps, top-k 4, 8 tokens."
    )
    speedups = (1.81, 1.82, 1.62, 1.48, 1.39, 1.32, 1.38, 1.34, 1.38)
    points = dict(zip((2, 4, 8, 16, 24, 32, 48, 56, 64), speedups, strict=True))
    return curve("SGLang over batch sizes", text, cost, CHAIN3, points, 512)


def vllm() -> str:
    speedups = (1.75, 1.68, 1.58, 1.49, 1.42, 1.36, 1.21, 1.01)
    points = dict(zip((2, 4, 8, 16, 24, 32, 48, 56), speedups, strict=True))
    text = (
        "Llama-3.1-8B, vLLM, MT-bench, chain of 2 (EAGLE-3 paper), context of 512 assumed. The paper names the RTX "
        "3090 in one place and the A100 in another; "
    )
    tables = [
        curve(
            f"vLLM over batch sizes, were it the {name}",
            text + "this is one of the two.",
            forecast("Llama-3.1-8B", PROFILES[name]),
            CHAIN2,
            points,
            512,
        )
        for name in ("a100-80gb-sxm", "rtx-3090")
    ]
    return "\n\n".join(tables)


def pytorch() -> str:
    """Acceptance is published here; the engine is eager PyTorch, which is bound by the host's launches."""
    rows = []
    for model, who, tau, speedup in (
        ("Llama-3.1-8B", "EAGLE-3 paper, mean of 5 tasks", 6.23, 4.44),
        ("Vicuna-13B", "EAGLE-3 paper, mean of 5 tasks", 6.62, 5.51),
        ("Vicuna-13B", "Spec-Bench, A100", 5.71, 3.02),
    ):
        cost = forecast(model, PROFILES["a100-80gb-sxm"])
        predicted = tau / needed_length(cost, TREE60, 1, 1, 512)
        rows.append([f"{model}, {who}", f"{tau:.2f}", f"{predicted:.2f}x", f"{speedup:.2f}x", off(predicted, speedup)])
    text = (
        "Batch 1, greedy, trees of 60 tokens, with the acceptance length that was published. These ran in eager "
        "PyTorch, the predictions are for an engine with CUDA graphs. An A100 80 GB is assumed for the paper's rows."
    )
    return table("Batch 1 in PyTorch", text, ["", "acceptance length", "predicted", "published", "off"], rows)


def qwen() -> str:
    cost = forecast("Qwen3-8B", PROFILES["h100-sxm"])
    rows = []
    for B, speed, oracle, k, eagle, shape in (
        (1, 125, 10.50, 12, 2.85, CHAIN5),
        (8, 898, 5.27, 12, 2.39, CHAIN3),
        (32, 2726, 3.50, 16, 2.68, CHAIN5),
    ):
        predicted = B / plain(cost, B, 1024).total
        perfect = (k + 1) * plain(cost, B, 1024).total / cost.verify(B, k + 1, 1024).total
        length = needed_length(cost, shape, eagle, B, 1024)
        rows.append(
            [
                str(B),
                f"{predicted:,.0f} / {speed:,} ({off(predicted, speed)})",
                f"{perfect:.2f}x / {oracle:.2f}x ({off(perfect, oracle)})",
                f"{eagle:.2f}x, {shape.num_steps} steps",
                f"{length:.2f}",
            ]
        )
    text = (
        "Qwen3-8B on one H100, vLLM 0.31 without asynchronous scheduling (results on vLLM pull request 62258), context "
        "of 1,024 assumed. The oracle drafts the answer itself at no cost, so its acceptance is known: all of k tokens."
    )
    header = [
        "sequences",
        "plain tok/s, predicted / published",
        "oracle, predicted / published",
        "EAGLE-3",
        "explained by",
    ]
    return table("vLLM with a perfect drafter", text, header, rows)


def kimi() -> str:
    machine = PROFILES["rtx-pro-6000"]
    both = {name: replace(machine.all_reduce[name], stock=True) for name in ("ring", "one-shot")}
    cost = forecast("Kimi-K2", replace(machine, all_reduce=both), 8, kv_bytes=1.0)
    measured = {
        512: (
            (88.5, 148.4, 233.8, 340.7, 475.2, 823.6, 1330.2, 2026.3),
            (114.1, 178.9, 243.7, 417.4, 659.0, 1055.2, 1522.0, 1992.3),
        ),
        16384: (
            (82.6, 139.1, 214.6, 310.2, 413.8, 667.9, 954.0, 1272.2),
            (108.1, 166.4, 226.4, 353.3, 502.9, 680.6, 879.5, 1080.1),
        ),
    }
    rows = []
    for S, (plains, drafted) in measured.items():
        for B, without, speed in zip((1, 2, 4, 8, 16, 32, 64, 128), plains, drafted, strict=True):
            predicted = B / plain(cost, B, S).total
            speedup = speed / without
            guess = 2.62 / needed_length(cost, CHAIN3, 1, B, S)
            rows.append(
                [
                    f"{S:,} / {B}",
                    f"{predicted:,.1f}",
                    f"{without:,.1f}",
                    off(predicted, without),
                    f"{guess:.2f}x",
                    f"{speedup:.2f}x",
                    off(guess, speedup),
                    f"{needed_length(cost, CHAIN3, speedup, B, S):.2f}",
                ]
            )
    text = (
        "Kimi-K2.6 on 8 RTX PRO 6000 over PCIe, vLLM, EAGLE-3 chain of 3, 8-bit cache (models/kimi-k26.md of "
        "github.com/voipmonitor/rtx6kpro, DCP=1; its empty context is taken as 512 tokens). The drafter's acceptance "
        "is not published: 2.62 is that of another EAGLE-3 drafter for this target (card of nvidia/Kimi-K2.6-Eagle3, "
        "3 steps, MT-bench)."
    )
    header = [
        "context / sequences",
        "plain tok/s",
        "published",
        "off",
        "speedup at 2.62",
        "published",
        "off",
        "explained by",
    ]
    return table("A mixture of experts over concurrency", text, header, rows)


def tables() -> Iterator[str]:
    yield from (founding(), kimi(), sglang(), vllm(), qwen(), pytorch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE", help="replace the tables in this guide")
    file = parser.parse_args().update
    text = "\n\n".join(tables())
    if file is None:
        print(text)
        return
    before, rest = file.read_text(encoding="utf-8").split(BEGIN)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
