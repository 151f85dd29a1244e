"""Every kind of name loads what it says, and everything that is wrong with one is a single clear sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers as tf
from huggingface_hub import errors as hub_errors
from model_files import save, tiny_llama, tiny_tokenizer, write_gguf
from safetensors.torch import load_file, save_file
from zoo import CASES, Case

from eyas.core import TargetError, UsageError
from eyas.target.loading import LoadedTarget, load_target


def load(folder: Path, **options: object) -> LoadedTarget:
    return load_target(str(folder), device="cpu", **options)


def fails(folder: Path | str, match: str, **options: object) -> TargetError:
    """Loading raises one TargetError, one line long, that names the target and says ``match``."""
    with pytest.raises(TargetError, match=match) as caught:
        load_target(str(folder), device="cpu", **options)
    assert type(caught.value) is TargetError
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return caught.value


def edit_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> Path:
    path = folder / "model.safetensors"
    weights = {**load_file(path), **changes}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path, {"format": "pt"})
    return folder


# --- what loads ---


def test_a_folder(tmp_path: Path) -> None:
    target = load(save(tmp_path, tiny_llama().bfloat16()))
    assert type(target.model) is tf.LlamaForCausalLM
    assert target.model.dtype is torch.bfloat16, "auto is the checkpoint's own dtype"
    assert target.model.device.type == "cpu"
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not any(hasattr(m, "_hf_hook") for m in target.model.modules()), "nothing between the layers"
    assert target.tokenizer is not None and target.tokenizer("w1 w2").input_ids == [4, 5]
    assert target.processor is None and target.why_no_processor == "it is a text-only model"
    assert target.name == str(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_architecture_comes_back_as_it_was(tmp_path: Path, case: Case) -> None:
    case.model.save_pretrained(tmp_path)
    loaded = load(tmp_path, need_tokenizer=False).model
    assert type(loaded) is type(case.model)
    before, after = case.model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2.5-vl", "kimi-k2.5"])
def test_without_architectures_the_model_type_decides(tmp_path: Path, name: str) -> None:
    model = next(case.model for case in CASES if case.name == name)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=...)
    assert type(load(tmp_path, need_tokenizer=False).model) is type(model)


def test_a_bare_model_with_a_tied_head(tmp_path: Path) -> None:
    bare = tiny_llama(tie_word_embeddings=True).model
    target = load(save(tmp_path, bare))
    assert type(target.model) is tf.LlamaForCausalLM
    assert torch.equal(target.model.lm_head.weight, bare.embed_tokens.weight)


@pytest.mark.parametrize("dtype", ["float16", "fp16", "bf16", torch.float16, "float32"])
def test_dtype(tmp_path: Path, dtype: str | torch.dtype) -> None:
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(str(dtype)) or dtype
    assert str(load(save(tmp_path), dtype=dtype).model.dtype).endswith(str(wanted).removeprefix("torch."))


def test_attention_implementation(tmp_path: Path) -> None:
    assert load(save(tmp_path), attn_implementation="eager").model.config._attn_implementation == "eager"


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(vocab_size=262, tie_word_embeddings=tied).eval()
    target = load(write_gguf(tmp_path / "tiny.gguf", model))
    ids = torch.arange(20)[None]
    assert torch.allclose(target.model(ids).logits, model(ids).logits, atol=1e-5), "q and k permuted back exactly once"
    assert (target.model.lm_head.weight is target.model.get_input_embeddings().weight) == tied
    assert target.model.dtype is torch.float32
    assert target.tokenizer is not None and target.tokenizer.eos_token == "<|im_end|>"


def test_own_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))  # transformers would ask, and take this for a yes
    folder = save(tmp_path / "own")
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_kind'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, model_type="own_kind", architectures=["OwnForCausalLM"], auto_map=auto_map)
    fails(folder, r"'own_kind' brings its own Python code.*--trust-remote-code")
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnForCausalLM"


# --- folders with something wrong ---


def test_not_a_model_folder(tmp_path: Path) -> None:
    fails(tmp_path, r"has no config\.json$")
    (tmp_path / "adapter_config.json").write_text("{}")
    fails(tmp_path, "only an adapter; merge it")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    fails(tmp_path, r"name the file itself, like .*a\.gguf")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"model_type":', "config.json: not valid JSON"),
        ("\x00\x01", "config.json: not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "has no model_type"),
        (
            '{"model_type": "zzz"}',
            rf"transformers {tf.__version__} does not know the model type 'zzz'; a newer version",
        ),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "vit"}', "no text-generating class for the model type 'vit'"),
        ('{"model_type": "t5"}', "t5 is an encoder-decoder"),
        ('{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}', "encoder-decoder"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}', "is a drafter, not a target"),
        ('{"speculators_model_type": "eagle3"}', "is a drafter, not a target"),
        ('{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}', "has no language-model head"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', "BertForMaskedLM, which has no language-"),
    ],
)
def test_configs_that_cannot_be(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text)
    fails(tmp_path, match)


def test_no_weights(tmp_path: Path) -> None:
    (save(tmp_path) / "model.safetensors").unlink()
    fails(tmp_path, r"no file named model\.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 1000, -100])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    fails(tmp_path, r"model\.safetensors is damaged or truncated \(.*\); download it again")


def test_missing_shard(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[2]
    shard.unlink()
    fails(tmp_path, f"index.json lists {shard.name}, which is not there")


def test_missing_weights_are_never_invented(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), **{"model.layers.1.mlp.up_proj.weight": None})
    fails(tmp_path, r"LlamaForCausalLM needs are missing \(1 in all\): model\.layers\.1\.mlp\.up_proj\.weight")


def test_a_missing_head_is_never_invented(tmp_path: Path) -> None:
    fails(save(tmp_path, tiny_llama().model), r"missing \(1 in all\): lm_head\.weight")


def test_wrong_shape(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), **{"lm_head.weight": torch.zeros(10, 32)})
    fails(tmp_path, r"lm_head\.weight has shape \[10, 32\], where its config.json asks for \[96, 32\]")


def test_unknown_attention_implementation(tmp_path: Path) -> None:
    fails(save(tmp_path), 'attn_implementation="magic"', attn_implementation="magic")


# --- names ---


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "a/b/c", "/nowhere", "nowhere.gguf"])
def test_paths_that_are_not_there(name: str) -> None:
    fails(name, "nowhere|a/b/c")


def test_empty_name() -> None:
    with pytest.raises(UsageError, match="the target has no name"):
        load_target("")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    fails(tmp_path / "model.safetensors", "neither a GGUF file nor a model folder")


@pytest.mark.parametrize("cut", [4, 100, 3000, 50_000])
def test_truncated_gguf(tmp_path: Path, cut: int) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(vocab_size=262))
    file.write_bytes(file.read_bytes()[:cut])
    fails(file, "the GGUF file is truncated, damaged or")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    fails(tmp_path / "x.gguf", "is not a GGUF file: it begins with b'PK")


def test_unknown_dtype_and_device() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int3'; choose from auto, float32, bfloat16, float16"):
        load_target("smollm2", dtype="int3")
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        load_target("smollm2", device="gpu")
    with pytest.raises(UsageError, match="there is no device 'cuda:99'"):
        load_target("smollm2", device="cuda:99")


# --- the hub ---


def hub_says(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def answer(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)


def refused(kind: type[Exception]) -> Exception:
    return kind("no", response=SimpleNamespace(headers={}, request=None))


def test_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, refused(hub_errors.RepositoryNotFoundError))
    fails("org/name", r"not a folder here \(looked at .*/org/name\), and it is not a model on the Hugging Face hub")
    hub_says(monkeypatch, refused(hub_errors.GatedRepoError))
    fails("org/name", "is gated on the Hugging Face hub")
    hub_says(monkeypatch, refused(hub_errors.RemoteEntryNotFoundError))
    fails("org/name", "so it is not a transformers model")


def test_impossible_hub_name() -> None:
    fails("so wrong!", "cannot be a name on the Hugging Face hub")


def test_hub_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, OSError("Name or service not known"))
    fails(
        "org/name",
        r"not a folder here .*, and it is not in the Hugging Face cache, and the hub cannot be reached \(Name",
    )


def test_hub_unreachable_but_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--name"
    save(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "huggingface_hub.file_download.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path))
    hub_says(monkeypatch, OSError("Name or service not known"))
    target = load_target("org/name", device="cpu")
    assert type(target.model) is tf.LlamaForCausalLM and target.tokenizer is not None


# --- what is shown meanwhile ---


def test_transformers_shows_no_bar_and_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logging = tf.utils.logging
    monkeypatch.setattr(logging, "_tqdm_active", True)  # as in a process of its own
    folder, broken = save(tmp_path / "whole", tiny_llama()), save(tmp_path / "broken", tiny_llama())
    edit_weights(broken, **{"model.norm.weight": None})
    shown = []

    def hook(bar, args, given):
        shown.append(given.get("desc"))
        return bar(*args, **given)

    before = logging.set_tqdm_hook(hook)
    try:
        capfd.readouterr()
        load(folder)
        assert capfd.readouterr() == ("", "") and shown == []
        fails(broken, "missing")
        tf.LlamaForCausalLM.from_pretrained(folder)
        assert shown == ["Loading weights"] and "Loading weights" in capfd.readouterr().err
    finally:
        logging.set_tqdm_hook(before)


@pytest.mark.parametrize("patience", [0.0, 600.0])
def test_what_loads_slowly_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], patience: float
) -> None:
    monkeypatch.setattr("eyas.progress.PATIENCE", patience)
    folder = save(tmp_path)
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr() == ("", "" if patience else f"loading {folder} ...\n")


# --- tokenizers and processors ---


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt2"])
def test_a_missing_tokenizer(tmp_path: Path, name: str) -> None:
    next(case.model for case in CASES if case.name == name).save_pretrained(tmp_path)
    fails(tmp_path, "has no usable tokenizer: ")
    assert load(tmp_path, need_tokenizer=False).tokenizer is None


def test_a_missing_processor_is_a_reason_not_an_error(tmp_path: Path) -> None:
    next(case.model for case in CASES if case.name == "qwen2.5-vl").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.processor is None
    assert "processor" in (target.why_no_processor or "")
