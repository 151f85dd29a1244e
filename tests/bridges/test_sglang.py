"""SGLang in miniature: every rule found by following code, so the code is changed and the answer must follow."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from bridges import pairs
from bridges.engines import SGLANG, WRAPPER, edited, write

from eyas.bridges.check import check
from eyas.bridges.code.source import open_engine
from eyas.bridges.matrix import matrix
from eyas.bridges.report import Problem, Report
from eyas.core import EyasError

RUNNER = "sglang/srt/model_executor/model_runner.py"
WORKER = "sglang/srt/speculative/eagle_worker.py"
LLAMA = "sglang/srt/models/llama.py"
DRAFTER = "sglang/srt/models/llama_eagle3.py"


@pytest.fixture
def ask(tmp_path: Path):
    """Checks a pair that fits, but for what a test changes."""

    def run(
        files: dict[str, str] | None = None, *, target: Any = None, flags: Any = None, drafter: Any = None
    ) -> Report:
        source = open_engine("sglang", write(tmp_path / "engine", files or SGLANG))
        folder = pairs.target(tmp_path / "target", **(target or {}))
        return check(folder, pairs.drafter(tmp_path / "drafter", "sglang", **(drafter or {})), source, flags or {}, {})

    return run


def bad(report: Report, *severities: str) -> list[Problem]:
    return [p for p in report.problems if p.severity in (severities or ("fails", "silent", "undecided"))]


def the(report: Report, *words: str) -> Problem:
    """The one problem that says all of these."""
    found = [p for p in bad(report) if all(w in f"{p.evidence} {p.consequence} {p.fix}" for w in words)]
    assert len(found) == 1, report.problems
    return found[0]


WRAPPED = {"architectures": ["WrapperForConditionalGeneration"], "text_config": pairs.TARGET}


def test_a_pair_that_fits(ask):
    report = ask()
    assert report.fits and not bad(report)
    assert [p.evidence for p in report.problems] == ["server_args.py:20 will warn: Max running requests is reset to 48"]
    facts = {f.name: f.value for f in report.facts}
    assert facts["target class"] == "LlamaForCausalLM (models/llama.py:11)"


# The interface of the target


def test_a_wrapper_that_forwards_nothing(ask):
    report = ask({**SGLANG, "sglang/srt/models/wrapper.py": WRAPPER}, target=WRAPPED)
    first = the(report, "no set_eagle3_layers_to_capture", "model_runner.py:19")
    second = the(report, "no get_embed_and_head", "eagle_worker.py:3")
    assert "after the target's weights are loaded: AttributeError" in first.consequence
    assert "after both are loaded: AttributeError" in second.consequence
    assert "LlamaForCausalLM in self.language_model has it" in first.fix and not report.fits


def test_a_wrapper_that_forwards(ask):
    text = WRAPPER.replace(
        "    def forward",
        "    def get_embed_and_head(self):\n        return self.language_model.get_embed_and_head()\n\n"
        "    def set_eagle3_layers_to_capture(self, ids=None):\n"
        "        self.language_model.set_eagle3_layers_to_capture(ids)\n\n    def forward",
    )
    assert ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED).fits


def test_a_wrapper_that_forwards_only_if_it_can(ask):
    text = WRAPPER.replace("LlamaForCausalLM(config.text_config)", "Bare(config.text_config)").replace(
        "    def forward",
        "    def get_embed_and_head(self):\n        return 1, 2\n\n"
        "    def set_eagle3_layers_to_capture(self, ids=None):\n"
        "        if hasattr(self.language_model, 'set_eagle3_layers_to_capture'):\n"
        "            self.language_model.set_eagle3_layers_to_capture(ids)\n\n    def forward",
    )
    text = text.replace(
        "class Wrapper", "class Bare(nn.Module):\n    def __init__(self, config): ...\n\n\nclass Wrapper"
    )
    the(ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED), "sets nothing on the model inside it")


def test_a_wrapper_whose_model_cannot(ask):
    text = WRAPPER.replace("LlamaForCausalLM(config.text_config)", "Bare(config.text_config)")
    text = text.replace(
        "class Wrapper", "class Bare(nn.Module):\n    def __init__(self, config): ...\n\n\nclass Wrapper"
    )
    problem = the(ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED), "no get_embed_and_head")
    assert problem.severity == "fails" and "Bare inside it has no EAGLE-3 interface either" in problem.fix


def test_a_wrapper_that_chooses_at_run_time(ask):
    text = WRAPPER.replace("LlamaForCausalLM(config.text_config)", "make_model(config.text_config)")
    problem = the(ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED), "no get_embed_and_head")
    assert problem.severity == "undecided" and "chosen at run time" in problem.evidence


def test_a_wrapper_that_chooses_by_the_config(ask):
    text = WRAPPER.replace(
        "self.language_model = LlamaForCausalLM(config.text_config)",
        "if config.text_config.model_type == 'llama':\n            self.language_model = LlamaForCausalLM(config)\n"
        "        else:\n            self.language_model = Bare(config)",
    ).replace("class Wrapper", "class Bare(nn.Module):\n    def __init__(self, config): ...\n\n\nclass Wrapper")
    files = {**SGLANG, "sglang/srt/models/wrapper.py": text}
    assert "LlamaForCausalLM in self" in the(ask(files, target=WRAPPED), "no get_embed").fix
    other = {**WRAPPED, "text_config": {**pairs.TARGET, "model_type": "other"}}
    assert "Bare inside it" in the(ask(files, target=other), "no get_embed").fix


def test_a_wrapper_that_goes_around_its_model(ask):
    text = WRAPPER.replace("language_model=self.language_model)", "language_model=self.language_model.model)")
    problem = the(ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED), "no get_embed_and_head")
    assert "goes around LlamaForCausalLM" in problem.fix


def test_a_proxy(ask):
    text = WRAPPER + "\n\nclass Unused: ...\n"
    text = text.replace("    def forward", "    def __getattr__(self, name):\n        return 1\n\n    def forward")
    problem = the(ask({**SGLANG, "sglang/srt/models/wrapper.py": text}, target=WRAPPED), "no get_embed_and_head")
    assert problem.severity == "undecided" and "__getattr__" in problem.evidence


def test_the_stage_is_read_off_the_callers(ask):
    """The graph runner calls first, so this is where it dies; a helper of the worker calls the other."""
    files = edited(
        SGLANG,
        "sglang/srt/model_executor/cuda_graph_runner.py",
        "class CudaGraphRunner: ...",
        """
class CudaGraphRunner:
    def __init__(self, model_runner):
        if model_runner.spec_algorithm.is_eagle3():
            self.model_runner.model.set_eagle3_layers_to_capture()
""",
    )
    files |= {"sglang/srt/models/wrapper.py": WRAPPER}
    problem = the(ask(files, target=WRAPPED), "no set_eagle3")
    assert "cuda_graph_runner.py:4, model_executor/model_runner.py:19" in problem.evidence
    assert problem.consequence.startswith("dies at graph capture, after the target's weights are loaded")


def test_a_call_that_asks_first_is_optional(ask):
    files = edited(
        SGLANG, RUNNER, "                if self.eagle_use_aux_hidden_state:",
        "                if self.eagle_use_aux_hidden_state and hasattr(self.model, 'set_eagle3_layers_to_capture'):",
    )  # fmt: skip
    files |= {"sglang/srt/models/wrapper.py": WRAPPER}
    assert not [p for p in bad(ask(files, target=WRAPPED)) if "no set_eagle3" in p.evidence]


def test_another_method_is_found_under_its_own_name(ask):
    """Nothing is keyed on the names of today: rename the interface everywhere and the check follows."""
    renamed = {path: text.replace("set_eagle3_layers_to_capture", "set_eagle3_taps") for path, text in SGLANG.items()}
    renamed |= {"sglang/srt/models/wrapper.py": WRAPPER}
    the(ask(renamed, target=WRAPPED), "no set_eagle3_taps")
    assert ask(renamed).fits


def test_a_list_of_classes_and_an_unknown_one(ask):
    the(ask(target={"architectures": ["NobodyForCausalLM"]}), "NobodyForCausalLM; sglang 0.7.1 registers none such")
    the(ask(target={"architectures": ...}), "(none)")


def test_a_model_that_cannot_be_parsed_is_not_registered(ask):
    report = ask({**SGLANG, "sglang/srt/models/odd.py": "EntryClass = [ (:\n"})
    assert report.fits


@pytest.mark.parametrize(
    ("whole", "broken"),
    [("class LlamaForCausalLM(nn.Module):", "class LlamaForCausalLM(:"), ("EntryClass = Llama", "EntryClass = [Llama")],
)
def test_the_target_s_own_module_cannot_be_parsed(ask, tmp_path, whole, broken):
    """Neither its class nor what it registers: the file is named, not the architecture that SGLang then lacks."""
    with pytest.raises(EyasError) as found:
        ask(edited(SGLANG, LLAMA, whole, broken))
    lines = (tmp_path / "engine" / LLAMA).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.startswith(broken)]
    said = re.fullmatch(rf"sglang 0\.7\.1: {LLAMA} cannot be parsed: .+, line (\d+)", str(found.value))
    assert said and int(said[1]) == number


# Layers


NESTED = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"eagle_config": {NESTED: [1, 4, 6]}}, None, ()),
        ({"eagle_config": {NESTED: [0, 4, 6]}}, None, ()),
        ({"eagle_config": {NESTED: [2, 5, 7]}}, "undecided", ("the default entry ids, or output ids?",)),
        ({"eagle_config": ..., NESTED: [2, 5, 7]}, None, ()),  # ignored, and the default is the same
        ({"eagle_config": ..., NESTED: [1, 5, 7]}, "silent", ("captures entry ids [2, 5, 7]", "listens to [1, 5, 7]")),
        ({"eagle_config": {NESTED: [1, 4, 9]}}, "fails", ("entry id 10 is never entered by a target of 10 layers",)),
        ({"eagle_config": {NESTED: [1, 4, 12]}}, "fails", ("entry ids end at 10",)),
    ],
)
def test_layer_ids(ask, change, severity, words):
    report = ask(drafter=change)
    found = [p for p in bad(report) if any(w in p.evidence for w in words)] if words else bad(report)
    assert [p.severity for p in found] == ([severity] if severity else [])


def test_a_target_with_another_convention(ask):
    """No + 1 in the setter: then the ids of the config are taken as entry ids."""
    files = edited(SGLANG, LLAMA, "[i + 1 for i in layer_ids]", "list(layer_ids)")
    assert the(ask(files), "captures entry ids [1, 4, 6]; the drafter listens to [2, 5, 7]").severity == "silent"


def test_a_convention_that_depends_on_the_ids(ask):
    files = edited(
        SGLANG, LLAMA, "[i + 1 for i in layer_ids]",
        "[i + 1 for i in layer_ids] if layer_ids[0] == 1 else list(layer_ids)",
    )  # fmt: skip
    assert ask(files).fits
    assert the(ask(files, drafter={"eagle_config": {NESTED: [0, 4, 6]}}), "captures entry ids [0, 4, 6]")


def test_ids_from_another_place(ask):
    files = edited(
        SGLANG, RUNNER, 'eagle_config["eagle_aux_hidden_state_layer_ids"]',
        'draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids',
    )  # fmt: skip
    assert ask(files, drafter={"eagle_config": ..., NESTED: [0, 4, 6]}).problems[0].severity == "silent"


def test_ids_that_only_a_running_engine_knows(ask):
    files = edited(SGLANG, LLAMA, "[i + 1 for i in layer_ids]", "remapped(layer_ids)")
    assert the(ask(files), "decided at run time").severity == "undecided"


def test_graphs_captured_before_the_ids_are_set(ask):
    files = edited(
        SGLANG,
        "sglang/srt/model_executor/cuda_graph_runner.py",
        "class CudaGraphRunner: ...",
        """
class CudaGraphRunner:
    def __init__(self, model_runner):
        if model_runner.spec_algorithm.is_eagle3():
            self.model_runner.model.set_eagle3_layers_to_capture()
""",
    )
    assert ask(files).fits  # the default layers
    other = {"eagle_config": {NESTED: [0, 4, 6]}}
    problem = the(ask(files, drafter=other), "captures the CUDA graphs with the default layers, entry ids [2, 5, 7]")
    assert problem.severity == "silent" and problem.issue.endswith("22836")
    assert ask(files, drafter=other, flags={"disable_cuda_graph": True}).fits


def test_an_empty_list_of_ids(ask):
    problem = the(
        ask(drafter={"eagle_config": {NESTED: []}}), f"{NESTED} is [], read at model_executor/model_runner.py"
    )
    assert problem.severity == "fails" and problem.fix.startswith(f"remove {NESTED}")
    files = edited(SGLANG, LLAMA, "if layer_ids is None:", "if not layer_ids:")
    assert ask(files, drafter={"eagle_config": {NESTED: []}}).fits  # an engine that takes it for its default


FORWARD = """
            def forward(self, ids, forward_batch):
                residual = None
                states = []
                hidden_states = self.embed_tokens(ids)
                for i in range(self.start_layer, self.end_layer):
                    with recorder(i):
                        if i in self.layers_to_capture:
                            states.append({captured})
                    hidden_states, residual = self.layers[i](hidden_states, residual)
                if self.end_layer in self.layers_to_capture:
                    states.append(hidden_states + residual)
                return hidden_states, states


        class LlamaForCausalLM(nn.Module):"""


def capturing(captured: str) -> dict[str, str]:
    return edited(SGLANG, LLAMA, "class LlamaForCausalLM(nn.Module):", FORWARD.replace("{captured}", captured).lstrip())


def test_the_state_before_there_is_a_residual(ask):
    embedding = {"eagle_config": {NESTED: [-1, 4, 6]}}
    found = the(ask(capturing("hidden_states + residual"), drafter=embedding), "entry id 0", "residual", "TypeError")
    assert found.severity == "fails" and "models/llama.py:" in found.evidence
    assert ask(capturing("hidden_states if residual is None else hidden_states + residual"), drafter=embedding).fits
    assert ask(capturing("hidden_states + residual")).fits


def test_an_id_as_high_as_there_are_layers(ask):
    """It can only be an entry id, wherever it stands."""
    files = edited(
        capturing("hidden_states"), LLAMA, "[i + 1 for i in layer_ids]",
        "list(layer_ids) if max(layer_ids) == self.config.num_hidden_layers else [i + 1 for i in layer_ids]",
    )  # fmt: skip
    assert ask(files, drafter={"eagle_config": {NESTED: [1, 4, 10]}}).fits
    found = the(ask(capturing("hidden_states"), drafter={"eagle_config": {NESTED: [1, 4, 10]}}), "entry id 11 is never")
    assert found.severity == "fails"


# The drafter


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "fails", "LlamaForCausalLM has no hot_token_id"),
        ({"architectures": ["NobodyEagle3"]}, "fails", "NobodyEagle3, and registers none such"),
        ({"model_type": ...}, "fails", "no model_type"),
        ({"model_type": "frobnicate"}, "fails", "has model_type 'frobnicate', which neither transformers nor sglang"),
        ({"model_type": ["llama"]}, "fails", "has model_type ['llama'], which neither"),
        ({"draft_vocab_size": ...}, "fails", "has no attribute 'draft_vocab_size'"),
        ({"num_hidden_layers": 2}, "fails", "EAGLE3 currently only supports 1 layer"),
        ({"max_position_embeddings": 2048}, "fails", "max_position_embeddings of the drafter is 2048"),
        ({"norm_before_residual": True}, "silent", "norm_before_residual is true"),
        ({"norm_output": True}, "silent", "norm_output is true"),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0}}, "silent", "reads RoPE theta 10000,"),
        ({"tensors": {"extra.weight": pairs.zeros(2, 2)}}, "silent", "drops extra.weight without a word"),
        ({"tensors": {"midlayer.self_attn.q_norm.weight": pairs.zeros(8)}}, "silent", "drops midlayer.self_attn.q_n"),
        ({"without": ("midlayer.mlp.down_proj.weight",)}, "silent", "fills model.midlayer.mlp.down_proj.weight"),
        ({"without": ("d2t", "t2d")}, "silent", "expected d2t"),
        ({"tensors": {"fc.weight": pairs.zeros(pairs.H, 64)}}, "fails", "fc.weight is [32, 64]"),
        ({"target_hidden_size": 48, "tensors": {"fc.weight": pairs.zeros(32, 144)}}, "fails", "hidden_size 48"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit(ask, change, severity, words):
    report = ask(drafter=change)
    found = [p for p in bad(report) if words in p.evidence]
    assert found and found[0].severity == severity, report.problems
    assert not report.fits and all("\n" not in p.evidence for p in report.problems)


def test_a_layer_under_another_name_leaves_everything_empty(ask):
    files = edited(SGLANG, DRAFTER, "self.midlayer = Layer(config)", "self.layers = nn.ModuleList([Layer(config)])")
    problem = the(ask(files), "drops midlayer.hidden_norm.weight")
    assert "keep what memory held" in problem.consequence
    mapped = edited(
        files,
        DRAFTER,
        "for fused, part in stacked:",
        """name = name.replace("midlayer", "layers.0")
                    for fused, part in stacked:""",
    )
    assert ask(mapped).fits


def test_a_head_that_is_borrowed(ask):
    change = {"draft_vocab_size": None, "without": ("lm_head.weight", "d2t", "t2d")}
    assert ask(drafter=change).fits
    files = edited(SGLANG, DRAFTER, "self.load_lm_head_from_target = True", "pass")
    the(ask(files, drafter=change), "fills lm_head.weight")


def test_an_embedding_that_cannot_be_borrowed(ask):
    files = edited(
        SGLANG,
        LLAMA,
        "    def set_embed(self, embed):\n",
        """    def set_embed(self, embed):
                if getattr(self.config, "target_hidden_size", self.config.hidden_size) != self.config.hidden_size:
                    return
""",
    )
    wider = {"target_hidden_size": 48, "tensors": {"fc.weight": pairs.zeros(pairs.H, 144)}}
    report = ask(files, drafter=wider, target={"hidden_size": 48})
    the(report, "fills model.embed_tokens.weight")
    wider["tensors"]["embed_tokens.weight"] = pairs.zeros(pairs.V, pairs.H)
    assert ask(files, drafter=wider, target={"hidden_size": 48}).fits


def test_a_model_type_of_the_engine_s_own(ask):
    """Names change; what the engine's source spells anywhere, it may know."""
    files = {**SGLANG, "sglang/srt/configs/mine.py": 'class Mine:\n    model_type = "frobnicate"\n'}
    change = {"model_type": "frobnicate"}
    assert not [p for p in ask(files, drafter=change).problems if "which neither" in p.evidence]


MODEL_CONFIG = "sglang/srt/configs/model_config.py"
DTYPES = """
TYPES = {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "bfloat16": torch.bfloat16}


def get_hf_text_config(config):
    return config.text_config if hasattr(config, "text_config") else config


def chosen(config, dtype):
    stated = TYPES.get(getattr(config, "dtype", None), torch.float32)
    if dtype == "auto":
        made = torch.bfloat16 if stated == torch.float32 else stated
    elif dtype in TYPES:
        made = TYPES[dtype]
    else:
        raise ValueError(f"Unknown dtype: {dtype}")
    return made


class ModelConfig:
    def __init__(self, path, dtype):
        self.dtype = chosen(self.hf_text_config, dtype)
"""
UNTYPED = textwrap.dedent(SGLANG[MODEL_CONFIG])
TYPED = edited(
    {**SGLANG, MODEL_CONFIG: UNTYPED}, MODEL_CONFIG, "class ModelConfig:\n    def __init__(self, path): ...\n", DTYPES
)


def test_dtypes_by_the_engine_s_own_rule(ask):
    """Of this one float32 becomes bfloat16: nothing is keyed on what SGLang does today."""
    half = {"torch_dtype": "float16"}
    problem = the(ask(TYPED, target={"torch_dtype": "bfloat16"}, drafter=half), "makes the target bfloat16")
    assert "configs/model_config.py:" in problem.evidence and "--dtype bfloat16" in problem.fix
    assert ask(TYPED, target={"dtype": "bfloat16"}).fits and ask(TYPED, target=half, drafter={"dtype": "float16"}).fits
    the(ask(TYPED, target=half), "no torch_dtype, which makes the drafter bfloat16")
    assert ask(TYPED, target=half, flags={"dtype": "float16"}).fits
    the(ask(TYPED, flags={"dtype": "int8"}), "raises ValueError: Unknown dtype: int8")
    assert ask(SGLANG, target=half).fits  # a version without any such rule


@pytest.mark.parametrize(
    ("path", "text", "chosen"),
    [
        ("srt/server_args.py", "if arch in ['LlamaForCausalLM']:\n    self.dtype = 'bfloat16'\n", True),
        ("srt/server_args.py", "if arch in ['Another']:\n    self.dtype = 'bfloat16'\n", False),
        ("srt/arg_groups/x.py", "OVERRIDES = {'LlamaForCausalLM': {'dtype': 'bfloat16'}}\n", True),
        ("srt/arg_groups/x.py", "OVERRIDES = {'Another': {'dtype': 'bfloat16'}, 'LlamaForCausalLM': {}}\n", False),
        ("srt/arg_groups/x.py", "@of('LlamaForCausalLM')\ndef f(o):\n    if x:\n        o['dtype'] = 'half'\n", True),
        ("srt/speculative/other_worker.py", "server_args.dtype = name_of(target.dtype)\n", True),
    ],
)
def test_dtypes_that_the_engine_chooses_for_both(ask, path, text, chosen):
    """For an architecture, by a condition or a table; or by a worker that lends its drafter the target's."""
    files = {**TYPED, f"sglang/{path}": textwrap.dedent(TYPED.get(f"sglang/{path}", "")) + text}
    assert ask(files, target={"torch_dtype": "float16"}).fits is chosen


# Flags, and what is faked


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "page_size": 64, "attention_backend": "triton"},
            "pages",
        ),
        ({"speculative_eagle_topk": 4}, "AssertionError"),
        (
            {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 9},
            "a tree of 7 tokens at most",
        ),
        ({"speculative_use_rejection_sampling": True}, "draft vocabulary of 20 tokens"),
        ({"speculative_num_steps": 0, "speculative_eagle_topk": 1}, "--speculative-num-steps is 0"),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 0}, "--speculative-eagle-topk is 0"),
    ],
)
def test_flags_that_do_not_go_together(ask, flags, words):
    report = ask(flags=flags)
    assert [p.severity for p in report.problems if words in p.evidence] == ["fails"]


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "page_size": 64, "attention_backend": "fa3"},
        {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "page_size": 1, "attention_backend": "triton"},
        {"speculative_num_steps": 3, "speculative_eagle_topk": 4},  # the engine chooses the rest
        {"max_running_requests": 128},
    ],
)
def test_flags_that_do(ask, flags):
    assert ask(flags=flags).fits


def test_the_cap_is_said_unless_it_is_given(ask):
    assert [p.severity for p in ask().problems] == ["note"]
    assert not ask(flags={"max_running_requests": 128}).problems


def test_acceptance_that_is_made_up(ask, tmp_path):
    ask()
    source = open_engine("sglang", tmp_path / "engine")
    report = check(tmp_path / "target", tmp_path / "drafter", source, {}, {"SGLANG_SIMULATE_ACC_LEN": "3"})
    assert the(report, "SGLANG_SIMULATE_ACC_LEN=3 is set").severity == "silent" and not report.fits


def test_no_number_for_acceptance_that_is_made_up(ask, tmp_path):
    ask()
    source = open_engine("sglang", tmp_path / "engine")
    report = check(tmp_path / "target", tmp_path / "drafter", source, {}, {"SGLANG_SIMULATE_ACC_LEN": "abc"})
    assert report.fits and ["SGLang does as without it" in p.consequence for p in report.problems].count(True) == 1


def test_steps_that_a_worker_can_do_without(ask):
    files = {**SGLANG, WORKER: SGLANG[WORKER] + "\n\n        IDLE = spec.speculative_num_steps == 0\n"}
    none = {"speculative_num_steps": 0, "speculative_eagle_topk": 1}
    assert the(ask(files, flags=none), "nothing is ever drafted").severity == "silent"


def test_another_algorithm(ask):
    problem = the(ask(flags={"speculative_algorithm": "EAGLE"}), "under EAGLE3 only (model_executor/model_runner.py:")
    assert problem.severity == "silent"
    the(ask(flags={"speculative_algorithm": "ngram"}), "--speculative-algorithm ngram", "is not run")
    assert ask(flags={"speculative_algorithm": "eagle3"}).fits


def test_pipeline_stages_by_the_engine_s_own_check(ask):
    checks = """
def check_all(args):
    if not args.enable_watermark:
        return
    if args.pp_size > 1:
        raise ValueError("not with watermarks")


def check_sizes(args):
    cfg = resolving_view(args)
    if cfg.pp_size > 1:
        check_stages(cfg)


def check_stages(cfg):
    assert cfg.disable_overlap_schedule, "not with overlap"
    assert cfg.speculative_algorithm is None, "stages cannot speculate"
"""
    args = textwrap.dedent(SGLANG["sglang/srt/server_args.py"]).replace(
        "page_size: int = None", "page_size: int = None\n    pp_size: int = 1\n    enable_watermark: bool = False"
    )
    files = {**SGLANG, "sglang/srt/server_args.py": args + checks}
    assert ask(files).fits and ask(files, flags={"pp_size": 1}).fits
    for flag in ("pp_size", "pipeline_parallel_size"):
        problem = the(ask(files, flags={flag: 2}), "--pp-size 2", "stages cannot speculate")
        assert problem.severity == "fails" and "--tp-size" in problem.fix
    assert ask({**files, "sglang/srt/server_args.py": args}, flags={"pp_size": 2}).fits  # one that can


# The matrix


def test_the_matrix(tmp_path):
    bare = "from torch import nn\nclass BareModel(nn.Module):\n    def __init__(self, config): ...\n"
    bare += "EntryClass = BareModel\n"
    half = textwrap.dedent("""
        from torch import nn
        class Half(nn.Module):
            def get_embed_and_head(self): ...
        EntryClass = Half
    """)
    more = {
        "sglang__srt__models__wrapper": WRAPPER,
        "sglang__srt__models__bare": bare,
        "sglang__srt__models__half": half,
        "sglang__srt__models__proxy": bare.replace("Bare", "Proxy").replace(
            "__init__(self, config)", "__getattr__(self, n)"
        ),
        "sglang__srt__models__chosen": WRAPPER.replace("LlamaForCausalLM(config", "make(config").replace(
            "Wrapper", "Chosen"
        ),
        "sglang__srt__models__lost": "from .nowhere import LostForCausalLM\nEntryClass = [LostForCausalLM]\n",
        "sglang__srt__models__odd": "def (:\nEntryClass = [Odd]\n",
    }
    rows = {r.architecture: r for r in matrix(open_engine("sglang", write(tmp_path, SGLANG, **more)))}
    assert {name: row.status for name, row in rows.items()} == {
        "LlamaForCausalLM": "ready",
        "LlamaForCausalLMEagle3": "ready",
        "WrapperForConditionalGeneration": "delegate",
        "BareModel": "cannot",
        "Half": "cannot",
        "ProxyModel": "undecided",
        "ChosenForConditionalGeneration": "undecided",
        "LostForCausalLM": "undecided",
        "Odd": "undecided",
    }
    assert rows["WrapperForConditionalGeneration"].inner == "LlamaForCausalLM"
    assert rows["Half"].reason.startswith("no set_eagle3_layers_to_capture")
