"""The engine inside transformers: ``model.generate(custom_generate=...)`` gives what ``model.generate`` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from engine.harness import BUSH, CHAIN, TREE, plant, random_drafter, scripted, truth
from scripted import plans
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria
from transformers.generation import logits_process as hf
from transformers.generation.streamers import BaseStreamer

import eyas
from eyas.core import EyasError, NonFiniteLogitsError, UsageError
from eyas.drafter.storage import save
from eyas.engine import custom_generate as module
from eyas.speculation.sampling import TokenHistory, process_logits

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
    "a static cache": {"max_new_tokens": 20, "cache_implementation": "static"},
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
    assert sample(0, min_p=1.0, top_p=1.0, num_return_sequences=1) == greedy


# The caller's own processors, beside the settings they come with


class MyPenalty(hf.RepetitionPenaltyLogitsProcessor):
    """Might do anything."""


OWN: dict[str, dict[str, Any]] = {
    "penalty": {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(3.0)]},
    "penalty before the setting's": {
        "logits_processor": [hf.RepetitionPenaltyLogitsProcessor(3.0)],
        "repetition_penalty": 1.2,
    },
    "lengths": {
        "logits_processor": [hf.MinLengthLogitsProcessor(45, EOS), hf.MinNewTokensLengthLogitsProcessor(30, 9, EOS)],
        "eos_token_id": EOS,
    },
    "new tokens counted from behind the prompt": {
        "logits_processor": [hf.MinNewTokensLengthLogitsProcessor(34, 5, EOS)],
        "eos_token_id": EOS,
    },
    "penalty and length": {
        "logits_processor": [hf.RepetitionPenaltyLogitsProcessor(3.0)],
        "min_new_tokens": 15,
        "eos_token_id": [EOS, OTHER_EOS],
    },
    "warpers that greedy decoding does not see": {
        "logits_processor": [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(3)],
        "repetition_penalty": 1.4,
    },
    "longer than generate would": {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(70)]),
    },
    "another end": {
        "stopping_criteria": StoppingCriteriaList([EosTokenCriteria(OTHER_EOS)]),
        "eos_token_id": EOS,
    },
}


@pytest.mark.parametrize("case", OWN)
def test_own_processors(case):
    inputs = {"input_ids": ids()}
    expected, got = both(inputs, max_new_tokens=30, **OWN[case])
    assert torch.equal(expected, got)
    if "longer" not in case and "warpers" not in case:
        settings = {k: v for k, v in OWN[case].items() if k in ("eos_token_id", "repetition_penalty")}
        assert not torch.equal(expected, both(inputs, max_new_tokens=30, **settings)[0])


SAMPLING: dict[str, dict[str, Any]] = {
    "generate's": {},
    "all but top_p": {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.3},
    "all but min_p": {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.0},
    "min_p alone": {"top_k": 0, "min_p": 0.2},
    "own": {
        "top_k": 0,
        "temperature": 1.0,
        "logits_processor": [
            hf.RepetitionPenaltyLogitsProcessor(2.0),
            hf.TemperatureLogitsWarper(0.5),
            hf.MinPLogitsWarper(0.02),
            hf.TopKLogitsWarper(40),
            hf.TopPLogitsWarper(0.7),
        ],
    },
    "an end": {"eos_token_id": EOS, "min_new_tokens": 3},
}


@pytest.mark.parametrize("case", SAMPLING)
def test_sampling_is_from_generates_distribution(case):
    """What the processors make of logits, and what SamplingParams does."""
    logits = 3 * torch.randn(1, zoo.VOCAB, generator=torch.Generator().manual_seed(1))

    def how(_model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **_: Any) -> Tensor:
        params = module.sampling_params(True, logits_processor, stopping_criteria, input_ids.shape[1], [0])
        history = TokenHistory.from_tokens(input_ids[0], [], zoo.VOCAB)
        found = process_logits(
            logits, params, output_indices=[0], history=history, stop_ids=params.stop_token_ids
        ).softmax(-1)
        expected = logits_processor(input_ids, logits.clone()).softmax(-1)
        assert torch.allclose(found, expected, atol=1e-6)
        assert torch.equal(found > 0, expected > 0)
        return input_ids

    zoo.case(NAME).model.generate(ids(), max_new_tokens=5, do_sample=True, custom_generate=how, **SAMPLING[case])


def test_a_penalty_counts_no_padding():
    """generate's own skips it, the caller's does not: that would penalise the padding token."""
    own = {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.4, torch.tensor([0, 21, 29]))]}
    expected, got = both(batch(), max_new_tokens=20, **own)
    assert torch.equal(expected, got)
    for ignored in (None, 9, torch.tensor([0, 21, 30])):
        own = {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(1.4, ignored)]}
        with pytest.raises(UsageError, match="cannot honour RepetitionPenalty"):
            both(batch(), max_new_tokens=20, **own)


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


class AsToldFirst(StoppingCriteria):
    """The first new token of a row says how many it will have."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] - 30 >= 3 + input_ids[:, 30] % 13


def test_each_row_of_a_batch_ends_for_itself():
    criteria = StoppingCriteriaList([AsToldFirst()])
    expected, got = both(batch(), max_new_tokens=40, stopping_criteria=criteria, eos_token_id=159)
    assert torch.equal(expected, got) and got.shape[1] < 50
    assert len(set((got[:, 30:] == PAD).sum(1).tolist())) == 3, "some end at once"


def test_rows_are_answered_together():
    how = eyas.custom_generate(random_drafter(NAME), TREE)
    for inputs, running in (({"input_ids": ids()}, 1), (batch(), 3), ({"input_ids": ids()}, 3)):
        expected, got = both(inputs, how=how, max_new_tokens=20)
        assert torch.equal(expected, got) and how._engine.scheduler.max_running == running
    steps: list[int] = []
    step, how._engine.step = how._engine.step, lambda: steps.append(1) or step()
    expected, got = both(batch(), how=how, max_new_tokens=20)
    assert torch.equal(expected, got) and len(steps) <= 21


def test_a_model_that_was_trained_in_between():
    """Nothing that was computed with other weights is used."""
    model, how = zoo.case(NAME).build(), eyas.custom_generate("untrained")
    settings = {"max_new_tokens": 20, "do_sample": False}
    first = model.generate(ids(), custom_generate=how, **settings)
    with torch.no_grad():
        for weight in model.model.layers[0].parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    expected = model.generate(ids(), **settings)
    assert not torch.equal(first, expected)
    assert torch.equal(expected, model.generate(ids(), custom_generate=how, **settings))


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_streamers_hear_the_same():
    model, listeners = zoo.case(NAME).model, (Listener(), Listener())
    model.generate(ids(), max_new_tokens=12, do_sample=False, streamer=listeners[0])
    how = eyas.custom_generate("untrained", streamer=listeners[1])
    model.generate(ids(), max_new_tokens=12, do_sample=False, custom_generate=how)
    assert listeners[0].heard == listeners[1].heard and listeners[0].heard[-1] == "end"
    how.streamer = other = Listener()
    model.generate(ids(), max_new_tokens=12, do_sample=False, custom_generate=how)
    assert other.heard == listeners[0].heard == listeners[1].heard
    with pytest.raises(UsageError, match="one prompt at a time"):
        model.generate(**batch(), max_new_tokens=12, custom_generate=how)


def test_generate_keeps_its_streamer_to_itself():
    """Once transformers hands it over, take it: then no streamer of ours is needed."""
    listener = Listener()
    zoo.case(NAME).model.generate(
        ids(), max_new_tokens=3, streamer=listener, custom_generate=eyas.custom_generate("untrained")
    )
    assert listener.heard == [ids().tolist()]


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


def loads_of(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Grows by the target's dtype whenever a target and a drafter are loaded."""
    loads: list[torch.dtype] = []
    load = module.load_drafter_for

    def counted(target: Any, drafter: Any) -> Any:
        loads.append(target.dtype)
        return load(target, drafter)

    monkeypatch.setattr(module, "load_drafter_for", counted)
    return loads


def test_a_longer_answer_loads_nothing_anew(monkeypatch):
    loads, how, contexts = loads_of(monkeypatch), eyas.custom_generate("untrained"), []
    for length in (33, 50, 64, 65, 40, 300):
        expected, got = both({"input_ids": ids()}, how=how, max_length=length)
        assert torch.equal(expected, got)
        contexts.append(how._engine.context_length)
    assert contexts == [64, 64, 64, 128, 128, 512] and len(loads) == 1


def test_no_more_than_the_target_holds(monkeypatch):
    loads, how = loads_of(monkeypatch), eyas.custom_generate("untrained")
    model = zoo.case(NAME).build()
    both({"input_ids": ids()}, how=how, max_length=40)
    how._loaded[0].context_length = 100
    both({"input_ids": ids()}, how=how, max_length=100)
    assert how._engine.context_length == 100 and len(loads) == 1
    with pytest.raises(UsageError, match="may take 101 tokens, but the target's context holds 100"):
        both({"input_ids": ids()}, how=how, max_length=101)
    with pytest.raises(UsageError, match="may take 513 tokens, but the target's context holds 512"):
        model.generate(ids(), max_length=513, custom_generate=how)
    rows = torch.cat([torch.full((1, 30), PAD), ids()], dim=1)
    mask = (rows != PAD).long()
    got = model.generate(
        rows, attention_mask=mask, max_length=540, eos_token_id=ids()[0, 3].item(), custom_generate=how
    )
    assert got.shape[1] > 60  # padding takes no room


@pytest.mark.parametrize("given", ["by name", "as an object"])
def test_a_model_in_another_dtype(given, monkeypatch):
    loads, model = loads_of(monkeypatch), zoo.case(NAME).build()
    how = eyas.custom_generate("untrained" if given == "by name" else random_drafter(NAME))
    settings = {"max_new_tokens": 9, "do_sample": False, "custom_generate": how}
    first = model.generate(ids(), **settings)
    assert model.to(torch.bfloat16).generate(ids(), **settings).shape == first.shape
    model.generate(ids(), **settings)
    assert torch.equal(model.float().generate(ids(), **settings)[:, :30], ids())
    assert loads == ([torch.float32, torch.bfloat16, torch.float32] if given == "by name" else [])


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


SCORES = {"return_dict_in_generate": True}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "cannot honour num_beams=2"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "cannot honour penalty_alpha=0.6"),
    "DoLa": ({"dola_layers": "high"}, "cannot honour dola_layers='high'"),
    "DoLa in layers": ({"dola_layers": [1, 2]}, "cannot honour dola_layers"),
    "ensemble": ({"prompt_lookup_num_tokens": 3, "assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
    "an assistant": ({"is_assistant": True}, "is_assistant=True"),
    "n-grams": ({"no_repeat_ngram_size": 3}, "cannot honour NoRepeatNGram"),
    "bad words": ({"bad_words_ids": [[3]]}, "cannot honour"),
    "typical sampling": ({"do_sample": True, "typical_p": 0.5}, "cannot honour Typical"),
    "min_p after top_p": ({"do_sample": True, "top_p": 0.5, "min_p": 0.1}, "then top_k and min_p, then top_p"),
    "guidance": ({"guidance_scale": 2.0}, "cannot honour"),
    "a subclass": ({"logits_processor": [MyPenalty(1.4)]}, "cannot honour MyPenalty"),
    "a function": ({"logits_processor": [lambda ids, scores: -scores]}, "cannot honour function"),
    "one twice": ({"do_sample": True, "logits_processor": [hf.TopKLogitsWarper(5)]}, "at most once"),
    "top_k before the penalty": (
        {"logits_processor": [hf.TopKLogitsWarper(5), hf.RepetitionPenaltyLogitsProcessor(2.0)]},
        "cannot honour TopKLogitsWarper, RepetitionPenalty",
    ),
    "a penalty on the answer alone": (
        {"logits_processor": [hf.RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=30)]},
        "cannot honour RepetitionPenalty",
    ),
    "a floor": ({"logits_processor": [hf.TopKLogitsWarper(5, filter_value=-9.0)]}, "cannot honour TopK"),
    "some to keep": ({"logits_processor": [hf.TopPLogitsWarper(0.5, min_tokens_to_keep=2)]}, "cannot honour TopP"),
    "a minimum length without what ends": (
        {"logits_processor": [hf.MinLengthLogitsProcessor(40, 7)], "eos_token_id": 8},
        "cannot honour MinLength",
    ),
    "scores": ({"output_scores": True, **SCORES}, "output_scores"),
    "logits": ({"output_logits": True, **SCORES}, "output_logits"),
    "attentions": ({"output_attentions": True, **SCORES}, "output_attentions"),
    "states": ({"output_hidden_states": True, **SCORES}, "output_hidden_states"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 30, 32)}, "cannot use inputs_embeds"),
    "positions": ({"position_ids": torch.arange(5, 35)[None]}, "cannot use position_ids"),
    "a cache": ({"cache": filled_cache()}, "no filled cache"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    settings, message = REFUSED[case]
    model = zoo.case(NAME).model
    with pytest.raises(UsageError, match=message):
        model.generate(ids(), max_new_tokens=5, custom_generate=eyas.custom_generate("untrained"), **settings)


# Every setting of transformers' generation, and who sees to it
FIELDS = {
    "logits processors": (
        "min_length min_new_tokens temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff "
        "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
        "begin_suppress_tokens exponential_decay_length_penalty sequence_bias guidance_scale watermarking_config"
    ),
    "stopping criteria": "max_length max_new_tokens max_time stop_strings eos_token_id",
    "generate itself": "num_return_sequences token_healing bos_token_id decoder_start_token_id",
    "we": "do_sample pad_token_id return_dict_in_generate cache_implementation",
    "nobody: for beams": "early_stopping length_penalty diversity_penalty",
    "nobody: for contrastive search": "low_memory",
    "nobody: other ways to the same text": (
        "use_mtp num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind "
        "speculation_type use_cache cache_config max_cache_len prefill_chunk_size compile_config disable_compile "
        "continuous_batching_config"
    ),
    "nobody: about the file": "_from_model_config transformers_version",
}


def test_every_setting_is_classified():
    known = [*module.REFUSED, *" ".join(FIELDS.values()).split()]
    assert len(known) == len(set(known))
    assert set(vars(GenerationConfig())) <= set(known), "honour, refuse or know as harmless what transformers added"


def test_a_quantized_cache_is_refused():
    """It changes the text; to generate, it needs another library."""
    with pytest.raises(UsageError, match="cache_implementation='quantized'"):
        module.refuse(GenerationConfig(cache_implementation="quantized"))


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
        (
            "sampling_params",
            "(criteria.max_length or 0) - width",
            "(criteria.max_length or 0) - width - 1",
            "max_length",
        ),
        ("sampling_params", "if least:", "if False:", "an end and min_new_tokens"),
        ("sampling_params", 'settings["repetition_penalty"] = p.penalty', "pass", "repetition penalty"),
        ("answer", "if bool(stopping_criteria(sequence[None], None).all())", "if False", "end of sequence"),
        ("answer", "engine.abort(output.request_id)", "pass", "end of sequence"),
    ],
)
def test_these_tests_see(name, old, new, setting, monkeypatch):
    plant(monkeypatch, module, name, old, new)
    with pytest.raises(AssertionError):
        test_greedy({"input_ids": ids()}, setting)
