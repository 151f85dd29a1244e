"""Engines in miniature: just enough source for a check to follow. Files are given as text, by path."""

from __future__ import annotations

import textwrap
from pathlib import Path

SGLANG = {
    "sglang/__init__.py": "",
    "sglang/version.py": '__version__ = "0.7.1"\n',
    "sglang/srt/layers/linear.py": """
        class QKVParallelLinear: ...
        class RowParallelLinear: ...
        class MergedColumnParallelLinear: ...
        """,
    "sglang/srt/layers/layernorm.py": "class RMSNorm: ...\n",
    "sglang/srt/layers/rotary_embedding.py": "def get_rope(head_dim, base=10000, rope_scaling=None): ...\n",
    "sglang/srt/layers/vocab_parallel_embedding.py": """
        class VocabParallelEmbedding: ...
        class ParallelLMHead: ...
        """,
    "sglang/srt/models/llama.py": """
        from torch import nn
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


        class LlamaModel(nn.Module):
            def __init__(self, config):
                self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
                self.layers_to_capture = []


        class LlamaForCausalLM(nn.Module):
            def __init__(self, config, quant_config=None):
                self.config = config
                self.pp_group = get_pp_group()
                self.model = LlamaModel(config)
                self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

            def get_embed_and_head(self):
                return self.model.embed_tokens.weight, self.lm_head.weight

            def set_embed(self, embed):
                self.model.embed_tokens.weight = embed

            def set_embed_and_head(self, embed, head):
                self.model.embed_tokens.weight = embed
                self.lm_head.weight = head

            def set_eagle3_layers_to_capture(self, layer_ids=None):
                if not self.pp_group.is_last_rank:
                    return
                if layer_ids is None:
                    n = self.config.num_hidden_layers
                    self.model.layers_to_capture = [2, n // 2, n - 3]
                else:
                    self.model.layers_to_capture = [i + 1 for i in layer_ids]


        EntryClass = LlamaForCausalLM
        """,
    "sglang/srt/models/llama_eagle3.py": """
        import torch
        from torch import nn
        from sglang.srt.layers.layernorm import RMSNorm
        from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
        from sglang.srt.layers.rotary_embedding import get_rope
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from sglang.srt.models.llama import LlamaForCausalLM


        class Attention(nn.Module):
            def __init__(self, config):
                self.qkv_proj = QKVParallelLinear(2 * config.hidden_size, config.head_dim, bias=False)
                self.o_proj = RowParallelLinear(
                    config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
                )
                self.rotary_emb = get_rope(
                    config.head_dim,
                    base=getattr(config, "rope_theta", 10000),
                    rope_scaling=getattr(config, "rope_scaling", None),
                )


        class MLP(nn.Module):
            def __init__(self, config):
                self.gate_up_proj = MergedColumnParallelLinear(
                    config.hidden_size, [config.intermediate_size] * 2, bias=False
                )
                self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False)


        class Layer(nn.Module):
            def __init__(self, config):
                self.self_attn = Attention(config)
                self.mlp = MLP(config)
                self.input_layernorm = RMSNorm(config.hidden_size)
                self.hidden_norm = RMSNorm(config.hidden_size)
                self.post_attention_layernorm = RMSNorm(config.hidden_size)


        class LlamaModel(nn.Module):
            def __init__(self, config):
                self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
                ids = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
                wide = getattr(config, "target_hidden_size", config.hidden_size) * (len(ids) if ids else 3)
                self.fc = nn.Linear(wide, config.hidden_size, bias=False)
                self.midlayer = Layer(config)
                self.norm = RMSNorm(config.hidden_size)


        class LlamaForCausalLMEagle3(LlamaForCausalLM):
            def __init__(self, config, quant_config=None):
                nn.Module.__init__(self)
                self.config = config
                if config.num_hidden_layers != 1:
                    raise ValueError("EAGLE3 currently only supports 1 layer")
                self.model = LlamaModel(config)
                self.load_lm_head_from_target = False
                if config.draft_vocab_size is None:
                    self.load_lm_head_from_target = True
                    config.draft_vocab_size = config.vocab_size
                self.lm_head = ParallelLMHead(config.draft_vocab_size, config.hidden_size)
                self.hot_token_id = None

            def load_weights(self, weights):
                params = dict(self.named_parameters())
                stacked = [(".qkv_proj", ".q_proj"), (".qkv_proj", ".k_proj"), (".qkv_proj", ".v_proj"),
                           (".gate_up_proj", ".gate_proj"), (".gate_up_proj", ".up_proj")]
                for name, weight in weights:
                    if "d2t" in name:
                        self.hot_token_id = weight + torch.arange(weight.shape[0])
                        continue
                    if "t2d" in name:
                        continue
                    for fused, part in stacked:
                        name = name.replace(part, fused)
                    name = name if name in params else f"model.{name}"
                    if name in params:
                        param = params[name]
                        loader = getattr(param, "weight_loader", None)
                        loader(param, weight)


        EntryClass = [LlamaForCausalLMEagle3]
        """,
    "sglang/srt/speculative/spec_info.py": """
        from enum import Enum


        class SpeculativeAlgorithm(Enum):
            EAGLE3 = 1

            def is_eagle(self): ...
            def is_eagle3(self): ...
            def is_none(self): ...

            def create_worker(self, server_args):
                if self.is_none():
                    return None
                if self.is_eagle():
                    from sglang.srt.speculative.eagle_worker import EAGLEWorker

                    return EAGLEWorker
        """,
    "sglang/srt/speculative/eagle_worker.py": """
        class EAGLEWorker:
            def __init__(self, target_worker):
                embed, head = self.target_worker.model_runner.model.get_embed_and_head()
                if self.speculative_algorithm.is_eagle3():
                    if (
                        hasattr(self.draft_model_runner.model, "load_lm_head_from_target")
                        and self.draft_model_runner.model.load_lm_head_from_target
                    ):
                        self.draft_model_runner.model.set_embed_and_head(embed, head)
                    else:
                        self.draft_model_runner.model.set_embed(embed)
                    if self.draft_model_runner.model.hot_token_id is not None:
                        self.hot_token_id = self.draft_model_runner.model.hot_token_id
                else:
                    self.draft_model_runner.model.set_what_only_others_have(embed, head)
        """,
    "sglang/srt/model_executor/model_runner.py": """
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner


        class ModelRunner:
            def __init__(self, spec_algorithm, is_draft_worker):
                if self.spec_algorithm.is_eagle3() and not self.is_draft_worker:
                    draft_model_config = ModelConfig.from_server_args(self.server_args, is_draft_model=True)
                    self.eagle_use_aux_hidden_state = True
                    try:
                        eagle_config = getattr(draft_model_config.hf_config, "eagle_config", None)
                        self.eagle_aux_hidden_state_layer_ids = eagle_config["eagle_aux_hidden_state_layer_ids"]
                    except:
                        self.eagle_aux_hidden_state_layer_ids = None
                self.initialize()

            def initialize(self):
                self.load_model()
                if self.eagle_use_aux_hidden_state:
                    self.model.set_eagle3_layers_to_capture(self.eagle_aux_hidden_state_layer_ids)
                self.graph_runner = CudaGraphRunner(self)
        """,
    "sglang/srt/model_executor/cuda_graph_runner.py": "class CudaGraphRunner: ...\n",
    "sglang/srt/server_args.py": """
        import logging

        logger = logging.getLogger(__name__)


        class ServerArgs:
            speculative_algorithm: str = None
            speculative_num_steps: int = None
            speculative_eagle_topk: int = None
            speculative_num_draft_tokens: int = None
            max_running_requests: int = None
            page_size: int = None
            attention_backend: str = None
            enable_multi_layer_eagle: bool = False
            disable_overlap_schedule: bool = False

            def _handle_speculative_decoding(self):
                if self.max_running_requests is None:
                    self.max_running_requests = 48
                    logger.warning("Max running requests is reset to 48")
                if self.speculative_num_steps is None:
                    assert self.speculative_eagle_topk is None and self.speculative_num_draft_tokens is None
                    self.speculative_num_steps, self.speculative_eagle_topk = 3, 1
                if self.speculative_eagle_topk > 1 and self.page_size > 1 and self.attention_backend not in ["fa3"]:
                    raise ValueError("top-k above 1 wants pages of 1")
        """,
    "sglang/srt/configs/model_config.py": """
        def get_context_length(config):
            return config.max_position_embeddings


        class ModelConfig:
            def __init__(self, path): ...

            def _derive_context_length(self, context_length):
                derived = get_context_length(self.hf_text_config)
                if context_length > derived:
                    raise ValueError(f"context_length ({context_length}) is greater than the derived {derived}")
        """,
}

WRAPPER = """
from torch import nn
from sglang.srt.models.llama import LlamaForCausalLM


class WrapperForConditionalGeneration(nn.Module):
    def __init__(self, config, quant_config=None):
        self.config = config
        self.language_model = LlamaForCausalLM(config.text_config)

    def forward(self, ids):
        return embed_routine(ids, language_model=self.language_model)


EntryClass = [WrapperForConditionalGeneration]
"""


def write(root: Path, files: dict[str, str], **changes: str) -> Path:
    """Writes an engine's files; ``changes`` are further files, their paths with __ for / and without .py."""
    extra = {path.replace("__", "/") + ".py": text for path, text in changes.items()}
    for path, text in {**files, **extra}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return root


def edited(files: dict[str, str], path: str, old: str, new: str) -> dict[str, str]:
    """The files with one passage replaced, which must be there."""
    assert old in files[path], f"{path} has no {old!r}"
    return {**files, path: files[path].replace(old, new)}


VLLM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": '__version__ = version = "0.40.1"\n',
    "vllm/model_executor/layers/linear.py": "class QKVParallelLinear: ...\nclass ReplicatedLinear: ...\n",
    "vllm/model_executor/layers/layernorm.py": "class RMSNorm: ...\n",
    "vllm/model_executor/layers/vocab.py": "class VocabParallelEmbedding: ...\nclass ParallelLMHead: ...\n",
    "vllm/model_executor/models/registry.py": """
        _TEXT_GENERATION_MODELS = {
            "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
            "SplitForCausalLM": ("vllm.models.split", "SplitForCausalLM"),
            "LazyForCausalLM": ("vllm.models.lazy", "LazyForCausalLM"),
        }
        _MULTIMODAL_MODELS = {
            "SilentForConditionalGeneration": ("wrappers", "Silent"),
            "ChosenForConditionalGeneration": ("wrappers", "Chosen"),
            "ReadyForConditionalGeneration": ("wrappers", "Ready"),
            "HollowForConditionalGeneration": ("wrappers", "Hollow"),
        }
        _SPECULATIVE_DECODING_MODELS = {
            # "Gone": ("gone", "Gone"),
            "Eagle3LlamaForCausalLM": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
            "LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
        }
        """,
    "vllm/model_executor/models/interfaces.py": """
        from typing import Protocol, runtime_checkable


        class EagleModelMixin:
            def _set_aux_hidden_state_layers(self, layers):
                self.aux_hidden_state_layers = tuple(sorted(set(layers)))


        class SupportsMultiModal(Protocol):
            supports_multimodal = True

            def get_language_model(self): ...
            def _mark_language_model(self, vllm_config): ...


        @runtime_checkable
        class SupportsEagle3(Protocol):
            supports_eagle3 = True
            has_own_lm_head: bool = False
            has_own_embed_tokens: bool = False

            def set_aux_hidden_state_layers(self, layers):
                parent = self.get_language_model() if hasattr(self, "get_language_model") else self
                holder = getattr(parent, "model", parent)
                assert isinstance(holder, EagleModelMixin), "it must inherit from EagleModelMixin"
                holder._set_aux_hidden_state_layers(layers)

            def get_eagle3_default_aux_hidden_state_layers(self):
                parent = self.get_language_model() if hasattr(self, "get_language_model") else self
                n = len(parent.model.layers)
                return (2, n // 2, n - 3)


        def supports_eagle3(model):
            return isinstance(model, SupportsEagle3)
        """,
    "vllm/model_executor/models/utils.py": "class AutoWeightsLoader: ...\nclass WeightsMapper: ...\n",
    "vllm/model_executor/models/llama.py": """
        from torch import nn
        from vllm.model_executor.layers.vocab import ParallelLMHead, VocabParallelEmbedding
        from .interfaces import EagleModelMixin, SupportsEagle3
        from .utils import make_layers


        class LlamaModel(nn.Module, EagleModelMixin):
            def __init__(self, *, vllm_config, prefix=""):
                config = vllm_config.model_config.hf_config
                self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
                self.start_layer, self.end_layer, self.layers = make_layers(config.num_hidden_layers, Layer)


        class LlamaForCausalLM(nn.Module, SupportsEagle3):
            def __init__(self, *, vllm_config, prefix=""):
                config = vllm_config.model_config.hf_config
                self.model = LlamaModel(vllm_config=vllm_config)
                self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        """,
    "vllm/model_executor/models/wrappers.py": """
        from torch import nn
        from .interfaces import SupportsEagle3, SupportsMultiModal
        from .utils import init_vllm_registered_model


        class Silent(nn.Module, SupportsMultiModal):
            def __init__(self, *, vllm_config, prefix=""):
                self.config = vllm_config.model_config.hf_config
                with self._mark_language_model(vllm_config):
                    self.language_model = init_vllm_registered_model(
                        vllm_config=vllm_config,
                        hf_config=self.config.text_config,
                        architectures=["LlamaForCausalLM"],
                    )


        class Chosen(Silent):
            def __init__(self, *, vllm_config, prefix=""):
                self.config = vllm_config.model_config.hf_config
                with self._mark_language_model(vllm_config):
                    self.language_model = init_vllm_registered_model(
                        vllm_config=vllm_config, hf_config=self.config.text_config
                    )


        class Ready(Silent, SupportsEagle3):
            pass


        class Bare(nn.Module): ...


        class Hollow(nn.Module, SupportsMultiModal, SupportsEagle3):
            def __init__(self, *, vllm_config, prefix=""):
                self.config = vllm_config.model_config.hf_config
                with self._mark_language_model(vllm_config):
                    self.language_model = Bare()
        """,
    "vllm/models/split/__init__.py": """
        if current_platform.is_rocm():
            from .amd import SplitForCausalLM
        else:
            from .nvidia import SplitForCausalLM
        """,
    "vllm/models/split/amd.py": "from torch import nn\nclass SplitForCausalLM(nn.Module): ...\n",
    "vllm/models/split/nvidia.py": """
        from vllm.model_executor.models.llama import LlamaForCausalLM as SplitForCausalLM
        """,
    "vllm/models/lazy/__init__.py": "def __getattr__(name): ...\n",
    "vllm/model_executor/models/llama_eagle3.py": """
        import torch
        from torch import nn
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
        from vllm.model_executor.layers.vocab import ParallelLMHead, VocabParallelEmbedding
        from .llama import LlamaForCausalLM
        from .utils import AutoWeightsLoader


        class Layer(nn.Module):
            def __init__(self, config):
                h, i = config.hidden_size, config.intermediate_size
                self.self_attn = nn.Module()
                self.q_proj = ReplicatedLinear(2 * h, config.num_attention_heads * config.head_dim, bias=False)
                self.norm_before_residual = getattr(config, "norm_before_residual", False)


        class Model(nn.Module):
            def __init__(self, *, vllm_config):
                self.config = vllm_config.speculative_config.draft_model_config.hf_config
                self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
                self.layers = nn.ModuleList([Layer(self.config) for _ in range(self.config.num_hidden_layers)])
                self.fc = ReplicatedLinear(3 * self.config.hidden_size, self.config.hidden_size, bias=False)
                self.norm = RMSNorm(self.config.hidden_size)

            def load_weights(self, weights):
                return AutoWeightsLoader(self).load_weights(weights)


        class Eagle3LlamaForCausalLM(LlamaForCausalLM):
            def __init__(self, *, vllm_config, prefix=""):
                self.config = vllm_config.speculative_config.draft_model_config.hf_config
                self.model = Model(vllm_config=vllm_config)
                self.lm_head = ParallelLMHead(self.config.draft_vocab_size, self.config.hidden_size)
                self.draft_id_to_target_id = None
                if self.config.draft_vocab_size != vllm_config.model_config.get_vocab_size():
                    self.draft_id_to_target_id = nn.Parameter(torch.zeros(self.config.draft_vocab_size))

            def load_weights(self, weights):
                found = {}
                for name, weight in weights:
                    if "t2d" in name:
                        continue
                    if "d2t" in name:
                        name = name.replace("d2t", "draft_id_to_target_id")
                    elif "lm_head" not in name:
                        name = "model." + name
                    found[name] = weight
                AutoWeightsLoader(self).load_weights(found.items())
        """,
    "vllm/transformers_utils/configs/eagle.py": """
        from transformers import PreTrainedConfig


        class EAGLEConfig(PreTrainedConfig):
            def __init__(self, model=None, method="eagle", **kwargs):
                if method == "eagle3":
                    kwargs["architectures"] = [
                        arch if arch.startswith("Eagle3") or arch.endswith("Eagle3") else f"Eagle3{arch}"
                        for arch in model.architectures
                    ]
                super().__init__(**kwargs)
        """,
    "vllm/transformers_utils/configs/speculators.py": """
        TYPES = {}


        def register_speculator(name): ...


        @register_speculator("eagle3")
        def update_eagle3(config_dict, pre_trained_config):
            for key in ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"):
                pre_trained_config[key] = config_dict.get(key)
            if pre_trained_config.get("model_type") != "llama":
                raise ValueError("Unsupported model_type")
            pre_trained_config["architectures"] = ["Eagle3LlamaForCausalLM"]
        """,
    "vllm/v1/worker/gpu_model_runner.py": """
        from vllm.model_executor.models.interfaces import supports_eagle3


        class GPUModelRunner:
            def _setup_eagle3(self):
                if not supports_eagle3(self.get_model()):
                    raise RuntimeError("Model does not support EAGLE3 interface")
                layers = self._layers() or self.model.get_eagle3_default_aux_hidden_state_layers()
                self.model.set_aux_hidden_state_layers(layers)

            def _layers(self):
                config = self.speculative_config.draft_model_config.hf_config
                ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
                if not ids and getattr(config, "eagle_config", None):
                    ids = config.eagle_config.get("eagle_aux_hidden_state_layer_ids")
                return tuple(ids) if ids else None
        """,
    "vllm/v1/spec_decode/proposer.py": """
        class Proposer:
            def load_model(self, target_model):
                if supports_multimodal(target_model):
                    if self.get_model_name(target_model) in ["Ready"]:
                        self.model.config.image_token_index = target_model.config.image_token_id
                    else:
                        self.model.config.image_token_index = target_model.config.image_token_index
        """,
}
