"""The engine inside transformers: ``model.generate(custom_generate=...)`` gives what ``model.generate`` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from engine.harness import BUSH, CHAIN, TREE, plant, random_drafter, scripted, truth
from scripted import plans
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import eyas
from eyas.core import EyasError, NonFiniteLogitsError, UsageError
from eyas.drafter.storage import save
from eyas.engine import custom_generate as module

NAME = "llama"
PAD, EOS_AT = 155, 7


def ids(length: int = 30, seed: int = 0) -> Tensor:
    return torch.tensor([zoo.case(NAME).prompt(length, seed)])


def batch() -> dict[str, Tensor]:
    """Three prompts, padded on the left."""
    lengths = (30, 9, 1)
    rows = torch.full((3, 30), PAD)
    mask = torch.zeros(3, 30, dtype=torch.long)
    for row, length in enumerate(lengths):
        rows[row, 30 - length :] = ids(length, row)[0]
        mask[row, 30 - length :] = 1
    return {"input_ids": rows, "attention_mask": mask}


def both(inputs: dict[str, Any], name: str = NAME, how: Any = None, **settings: Any) -> tuple[Any, Any]:
    """What generate says without Eyas, and with it."""
    model = zoo.case(name).model
    how = how or eyas.custom_generate(random_drafter(name), TREE)
    arguments = {"do_sample": False, "pad_token_id": PAD, **inputs, **settings}
    return model.generate(**arguments), model.generate(**arguments, custom_generate=how)


EOS = truth(NAME).tokens[EOS_AT]
OTHER_EOS = truth(NAME).tokens[EOS_AT + 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 20},
    "max_length": {"max_length": 50},
    "one token": {"max_new_tokens": 1},
    "end of sequence": {"max_new_tokens": 20, "eos_token_id": EOS},
    "several ends": {"max_new_tokens": 20, "eos_token_id": [OTHER_EOS, EOS]},
    "an end and min_new_tokens": {"max_new_tokens": 30, "eos_token_id": [EOS, OTHER_EOS], "min_new_tokens": 15},
    "an end and min_length": {"max_new_tokens": 30, "eos_token_id": EOS, "min_length": 45},
    "min_new_tokens without an end": {"max_new_tokens": 20, "min_new_tokens": 15},
    "repetition penalty": {"max_new_tokens": 30, "repetition_penalty": 1.4},
    "all": {"max_length": 60, "eos_token_id": EOS, "min_new_tokens": 12, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("inputs", [{"input_ids": ids()}, batch()], ids=["single", "padded batch"])
def test_greedy(inputs, setting):
    expected, got = both(inputs, **SETTINGS[setting])
    assert torch.equal(expected, got) and expected.dtype == got.dtype
    assert expected.shape[1] > 30


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_model(name):
    known = truth(name)
    how = eyas.custom_generate(scripted({"0": known.script}, plans(5)["in turn"]), CHAIN)
    expected, got = both({"input_ids": torch.tensor([known.prompt])}, name, how, max_new_tokens=16)
    assert torch.equal(expected, got)


@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.image])
def test_images(name):
    prompt, images = zoo.case(name).image_prompt()
    expected, got = both({"input_ids": torch.tensor([prompt]), **images}, name, max_new_tokens=16)
    assert torch.equal(expected, got)
    twice = {"input_ids": torch.tensor([prompt, prompt]), **{k: torch.cat([v, v]) for k, v in images.items()}}
    with pytest.raises(UsageError, match="one prompt at a time"):
        both(twice, name, max_new_tokens=4)


def test_sampling_repeats_with_torchs_seed():
    model, how = zoo.case(NAME).model, eyas.custom_generate(random_drafter(NAME), BUSH)
    settings = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_new_tokens": 12, "num_return_sequences": 3}

    def sample(seed: int, **changes: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return model.generate(ids(), custom_generate=how, **{**settings, **changes}).tolist()

    first = sample(0)
    assert first == sample(0) != sample(1)
    assert len({tuple(row) for row in first}) == 3
    greedy = model.generate(ids(), max_new_tokens=12, do_sample=False).tolist()
    assert sample(0, top_k=1, num_return_sequences=1) == greedy
    assert sample(0, min_p=1.0, num_return_sequences=1) == greedy


def test_return_dict():
    expected, got = both({"input_ids": ids()}, max_new_tokens=9, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, got.sequences) and type(expected) is type(got)


class Three(StoppingCriteria):
    """Ends a row once three of its new tokens are below 60."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 30:] < 60).sum(-1) >= 3


def test_stopping_criteria():
    criteria = StoppingCriteriaList([Three()])
    expected, got = both({"input_ids": ids()}, max_new_tokens=40, stopping_criteria=criteria)
    assert torch.equal(expected, got) and 33 <= got.shape[1] < 70


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_streamers_hear_the_same():
    model, listeners = zoo.case(NAME).model, (Listener(), Listener())
    for how, listener in zip(({}, {"custom_generate": eyas.custom_generate("untrained")}), listeners, strict=True):
        model.generate(ids(), max_new_tokens=12, do_sample=False, streamer=listener, **how)
    assert listeners[0].heard == listeners[1].heard and listeners[0].heard[-1] == "end"


def test_a_drafter_by_its_path(tmp_path):
    drafter = random_drafter(NAME)
    save(drafter.model, tmp_path / "drafter")
    expected, got = both({"input_ids": ids()}, how=eyas.custom_generate(tmp_path / "drafter"), max_new_tokens=12)
    assert torch.equal(expected, got)


def test_one_for_several_models_and_lengths():
    how = eyas.custom_generate("untrained")
    for name, tokens in ((NAME, 5), ("gemma3", 9), (NAME, 20), (NAME, 3), ("deepseek-v3", 12)):
        expected, got = both({"input_ids": torch.tensor([zoo.case(name).prompt()])}, name, how, max_new_tokens=tokens)
        assert torch.equal(expected, got)


def test_plain_generate_is_as_before():
    """Nothing of ours stays on the model."""
    model = zoo.case("llama4").model
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    prompt = torch.tensor([zoo.case("llama4").prompt()])
    first = model.generate(prompt, max_new_tokens=9, do_sample=False)
    model.generate(prompt, max_new_tokens=9, do_sample=False, custom_generate=eyas.custom_generate("untrained"))
    assert torch.equal(first, model.generate(prompt, max_new_tokens=9, do_sample=False))
    after = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    assert before == after


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    zoo.case(NAME).model(ids()[:, :5], cache=cache)
    return cache


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams must be 1"),
    "n-grams": ({"no_repeat_ngram_size": 3}, "cannot honour NoRepeatNGram"),
    "bad words": ({"bad_words_ids": [[3]]}, "cannot honour"),
    "typical sampling": ({"do_sample": True, "typical_p": 0.5}, "cannot honour Typical"),
    "guidance": ({"guidance_scale": 2.0}, "cannot honour"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 30, 32)}, "cannot use inputs_embeds"),
    "a cache": ({"cache": filled_cache()}, "no filled cache"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    settings, message = REFUSED[case]
    model = zoo.case(NAME).model
    with pytest.raises(UsageError, match=message):
        model.generate(ids(), max_new_tokens=5, custom_generate=eyas.custom_generate("untrained"), **settings)


def test_a_target_that_breaks_says_so_and_works_afterwards():
    model = zoo.case(NAME).build()
    how = eyas.custom_generate("untrained")
    handle = model.lm_head.register_forward_hook(lambda _m, _a, logits: logits + torch.nan)
    with pytest.raises(EyasError):
        model.generate(ids(), max_new_tokens=5, custom_generate=how)
    handle.remove()
    expected = model.generate(ids(), max_new_tokens=5, do_sample=False)
    assert torch.equal(expected, model.generate(ids(), max_new_tokens=5, do_sample=False, custom_generate=how))
    handle = model.lm_head.register_forward_hook(lambda _m, _a, logits: logits + torch.nan)
    with pytest.raises(NonFiniteLogitsError):
        model.generate(ids(), max_new_tokens=5, custom_generate=how)


@pytest.mark.parametrize(
    ("name", "old", "new", "setting"),
    [
        ("sampling_params", "config.max_length - prompt_length", "config.max_length - prompt_length - 1", "max_length"),
        ("sampling_params", "if minimum > 0 and eos is not None", "if False", "an end and min_new_tokens"),
        ("sampling_params", 'settings["repetition_penalty"] = config.repetition_penalty', "pass", "repetition penalty"),
        ("answer", "if bool(stopping_criteria(sequence, None).all())", "if False", "end of sequence"),
    ],
)
def test_these_tests_see(name, old, new, setting, monkeypatch):
    plant(monkeypatch, module, name, old, new)
    with pytest.raises(AssertionError):
        test_greedy({"input_ids": ids()}, setting)
