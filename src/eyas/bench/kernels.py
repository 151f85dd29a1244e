"""What a kernel of an engine is for, by its name: kernels of GPUs, and operators of PyTorch where a CPU computes."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

Part = Literal[
    "attention", "matmul", "moe", "allreduce", "communication", "elementwise", "sampling", "copies", "other", "idle"
]
# In the order in which they are shown.
LABELS: dict[Part, str] = {
    "attention": "attention",
    "matmul": "matrix products",
    "moe": "mixture of experts",
    "allreduce": "all-reduce",
    "communication": "other communication",
    "elementwise": "norms, activations, elementwise",
    "sampling": "sampling, draft bookkeeping",
    "copies": "copies",
    "other": "other",
    "idle": "host, device idle",
}

# The first that is found in the name decides. Names of templates hold those of their arguments: what is particular
# comes before what is general, so a grouped product is not taken for a plain one, nor FlashAttention for CUTLASS.
_NAMES: tuple[tuple[Part, str], ...] = (
    ("copies", r"^Mem(cpy|set)\b"),
    ("elementwise", r"^triton_(poi|red|per)_"),  # TorchInductor's, which are named after what was fused into them
    ("allreduce", r"all_?reduce|cross_device_reduce|quickreduce"),
    (
        "communication",
        r"nccl|rccl|all_?gather|reduce_?scatter|all_?to_?all|\bdeep_ep\b|nvshmem|pplx|mscclpp|\bc10d::|\bgloo:",
    ),
    (
        "moe",
        r"moe|expert|topk_?gating|routing(Indices|Deepseek|Renormalize|Main)|finalizeKernel|grouped_?(mm|gemm)|m_grouped"
        r"|GroupProblemShape|GemmType\)[12]\b|matmul_ogs|^bmm_\w*(E2m1|E4m3|MxE)",
    ),
    (
        "attention",
        r"\bflash(_|::|_?attn|_?mla)|FlashAttn|fmha|\bmha|attention|attn|(?<![a-z])mla(?![a-z])|mqa_logits"
        r"|Batch(Prefill|Decode)|SingleDecode|PagedKV|paged_?kv|kv_?(cache|buffer|indices)|(reshape|concat)_and_cache"
        r"|_fwd_(grouped_)?kernel|merge_(attn_)?states?|scaled_dot_product|causal_conv1d|selective_scan|mamba"
        r"|gated_delta|fused_recurrent|slot_mapping|scheduler_metadata",
    ),
    (
        "sampling",
        r"sampl|argmax|argmin|multinomial|top_?[kp](?![a-z]*gating)|radix_?sort|\bsort|soft_?max|exponential|gumbel"
        r"|distribution_elementwise|penalt|rejection|verify_?(tree|chain)|build_?(efficient_)?tree|TreeSpec|bitmask|min_?p_|eagle",
    ),
    (
        "matmul",
        r"gemm|gemv|nvjet|cutlass|cublas|matmul|marlin|machete|split_?k|xmma|\bCijk_|wvSplitK|tensorop|triton_tem_"
        r"|_mm\b|\b(b|add|badd)?mm\b|\b(linear|addmv|mv|dot|einsum|mkldnn_\w*linear\w*|onednn_\w+)\b|dot_kernel|\bawq_|gptq",
    ),
    (
        "copies",
        r"direct_copy|CatArrayBatchedCopy|\baten::(copy_|_to_copy|cat|clone|contiguous|_pin_memory|stack)$|copy_kernel",
    ),
    (
        "elementwise",
        r"norm|act_and_mul|silu|gelu|relu|swiglu|sigmoid|tanh|elementwise|rotary|rope|quant|cvt_|reduce_kernel|index"
        r"|gather|scatter|embedding|triton_|CompiledFxGraph|Torch-Compiled|\baten::(add|sub|mul|div|neg|pow|r?sqrt|exp|log"
        r"|sum|mean|max|min|amax|amin|any|all|eq|ne|lt|le|gt|ge|where|masked_fill|fill|zero|cumsum|arange|clamp|cos|sin|abs"
        r"|bitwise_\w+|logical_\w+|floor_divide|remainder|maximum|minimum|rsub|nonzero|repeat_interleave)_?$",
    ),
)


@cache
def part_of(name: str) -> Part:
    """Which part of a step a kernel or an operator belongs to; "other" where its name does not say."""
    return next((part for part, pattern in _NAMES if re.search(pattern, name, re.IGNORECASE)), "other")
