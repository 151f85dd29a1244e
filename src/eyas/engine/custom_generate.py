"""Speculative decoding inside transformers' own ``model.generate(custom_generate=...)``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation import logits_process as hf

from eyas.core import DraftShape, Request, SamplingParams, UsageError
from eyas.drafter.contract import Drafter
from eyas.engine.engine import Engine
from eyas.engine.llm import load_drafter_for
from eyas.target.adapter import HFTarget, find_embed
from eyas.target.images import TEXT_KEYS, image_inputs

# What SamplingParams can say too, and when it comes there: within a stage the order makes no difference.
STAGES: dict[type, int] = {
    hf.MinLengthLogitsProcessor: 0,
    hf.MinNewTokensLengthLogitsProcessor: 0,
    hf.RepetitionPenaltyLogitsProcessor: 0,
    hf.TemperatureLogitsWarper: 1,
    hf.TopKLogitsWarper: 2,
    hf.MinPLogitsWarper: 2,
    hf.TopPLogitsWarper: 3,
}

# Settings that act neither as a logits processor nor as a stopping criterion and ask for another text or result.
REFUSED = (
    *("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "dola_layers"),
    *("is_assistant", "assistant_ensemble_weight"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
)


def custom_generate(
    drafter: Drafter | str | Path, shape: DraftShape | None = None, *, streamer: Any = None
) -> CustomGenerate:
    """What to hand to ``model.generate(..., custom_generate=)``: the same tokens as without it, sooner.

    In float32, greedy output is token for token that of ``generate``; in lower precision a near-tie may go to the other
    token. Sampling draws from the same distribution, with noise seeded from torch's generator, so ``torch.manual_seed``
    repeats it. Stopping criteria, padded batches and images work. What would be ignored raises UsageError: beams,
    scores, other ways of decoding, logits processors (your own too) that SamplingParams cannot express.

    A ``streamer`` goes here, or is set on the result before a call: transformers keeps ``generate(streamer=)`` to
    itself, and such a one hears the prompt and nothing else.
    """
    return CustomGenerate(drafter, shape, streamer)


class CustomGenerate:
    def __init__(self, drafter: Drafter | str | Path, shape: DraftShape | None, streamer: Any):
        self._drafter, self._shape, self.streamer = drafter, shape, streamer
        self._loaded: tuple[HFTarget, Drafter, Any] | None = None
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: hf.LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        refuse(generation_config)
        images, streamer, mask = encoded_images(model_kwargs), self.streamer, model_kwargs.get("attention_mask")
        if len(input_ids) > 1 and (images or streamer is not None):
            raise UsageError("custom_generate takes images or a streamer for one prompt at a time, not for a batch.")
        prompts = [ids if mask is None else ids[mask[row].bool()] for row, ids in enumerate(input_ids)]
        width = input_ids.shape[1]
        padding = [width - len(prompt) for prompt in prompts]
        sampling = sampling_params(generation_config.do_sample, logits_processor, stopping_criteria, width, padding)
        engine = self._engine_for(model, width - min(padding) + sampling.max_tokens, len(prompts))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        requests = []
        for row, prompt in enumerate(prompts):
            if not sampling.greedy:
                sampling = replace(sampling, seed=int(torch.randint(2**63 - 1, ())))
            requests.append(Request(str(row), prompt.tolist(), sampling, images))
        answers = answer(engine, requests, input_ids, stopping_criteria, streamer)
        if streamer is not None:
            streamer.end()
        tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(a, device=input_ids.device, dtype=input_ids.dtype) for a in answers],
            batch_first=True,
            padding_value=padding_id(generation_config),
        )
        sequences = torch.cat([input_ids, tokens], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _engine_for(self, model: Any, length: int, count: int) -> Engine:
        """An engine with room for ``count`` times ``length`` tokens; target and drafter stay as long as the model."""
        weight = find_embed(model).weight
        place = (weight.dtype, weight.device, weight.shape)
        if self._loaded is None or self._loaded[0].model is not model or self._loaded[2] != place:
            target, drafter = HFTarget(model), self._drafter
            drafter = load_drafter_for(target, drafter) if isinstance(drafter, str | Path) else drafter
            self._loaded, self._engine = (target, drafter, place), None
        target, drafter, _ = self._loaded
        most = target.context_length or math.inf
        if length > most:
            raise UsageError(f"Prompt and answer may take {length} tokens, but the target's context holds {most}.")
        engine = self._engine
        if engine is None or engine.context_length < length or engine.scheduler.max_running < count:
            engine = self._engine = None  # its cache goes before a larger one comes
            room = int(min(most, 1 << (length - 1).bit_length()))
            engine = Engine(target, drafter, shape=self._shape, context_length=room, max_running_requests=count)
        engine.forget()  # the model may have been trained since
        self._engine = engine
        return engine


def answer(
    engine: Engine,
    requests: Sequence[Request],
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    streamer: Any,
) -> list[list[int]]:
    """The tokens of each answer, ended where the caller's stopping criteria say so (end-of-sequence is one of them)."""
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    prompts = dict(zip(answers, input_ids, strict=True))
    try:
        for request in requests:
            engine.add(request)
        while not engine.idle:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                prompt, tokens = prompts[output.request_id], answers[output.request_id]
                for token in output.emitted:
                    tokens.append(token.token_id)
                    if streamer is not None:
                        streamer.put(torch.tensor([token.token_id]))
                    sequence = torch.cat([prompt, torch.tensor(tokens, device=prompt.device, dtype=prompt.dtype)])
                    if bool(stopping_criteria(sequence[None], None).all()):
                        engine.abort(output.request_id)
                        break
    finally:
        for request in requests:
            engine.abort(request.id)
    return list(answers.values())


def encoded_images(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What belongs to images among ``generate``'s inputs: a processor's tensors, or what its encoder made of them.

    Raises UsageError for inputs that would be ignored.
    """
    types = {name: value for name, value in inputs.items() if name.endswith("token_type_ids")}
    if encoded := inputs.get("mm_encoder_outputs"):
        return {"mm_encoder_outputs": encoded, "position_ids": inputs["position_ids"], **types}
    images = image_inputs(inputs)
    known = {*TEXT_KEYS, *types, *(images or ())}
    if not images and (positions := inputs.get("position_ids")) is not None:
        mask = torch.ones_like(positions) if inputs.get("attention_mask") is None else inputs["attention_mask"]
        if bool(((positions + 1 - mask.cumsum(-1)) * mask).any()):
            known.remove("position_ids")
    if ignored := [name for name, value in inputs.items() if hasattr(value, "shape") and name not in known]:
        raise UsageError(f"custom_generate reads token ids and images: it cannot use {', '.join(ignored)}.")
    for name in ("cache", "past_key_values"):
        if inputs.get(name) is not None and inputs[name].get_seq_length() > 0:
            raise UsageError("custom_generate keeps a cache of its own: give the whole prompt, and no filled cache.")
    return images


def sampling_params(
    do_sample: bool, processors: hf.LogitsProcessorList, criteria: StoppingCriteriaList, width: int, padding: list[int]
) -> SamplingParams:
    """What the logits processors, generate's own and the caller's, say in Eyas's words, for prompts of this width.

    The end of the answer is left to the stopping criteria. Raises UsageError for what cannot be said.
    """
    ends = {int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id}
    active = [p for p in processors if type(p) is not hf.MinPLogitsWarper or p.min_p > 0]
    kinds = [type(p) for p in active]
    wrong = [p for p in active if type(p) not in STAGES or not usual(p, ends, padding)]
    if not wrong and (kinds != sorted(kinds, key=STAGES.__getitem__) or len(set(kinds)) < len(kinds)):
        wrong = active
    if wrong:
        raise UsageError(
            f"custom_generate cannot honour {', '.join(type(p).__name__ for p in wrong)}: it knows minimum lengths and "
            "repetition_penalty, then temperature, then top_k and min_p, then top_p, each at most once, and all but "
            "the number itself as generate sets it up."
        )
    room, least = (criteria.max_length or 0) - width, 0
    settings: dict[str, Any] = {"temperature": 1.0}
    for p in active:
        if isinstance(p, hf.MinLengthLogitsProcessor):
            least = max(least, p.min_length - width)
        elif isinstance(p, hf.MinNewTokensLengthLogitsProcessor):
            least = max(least, p.min_new_tokens + p.prompt_length_to_skip - width)
        elif isinstance(p, hf.RepetitionPenaltyLogitsProcessor):
            settings["repetition_penalty"] = p.penalty
        else:
            settings |= {k: v for k, v in vars(p).items() if k in ("temperature", "top_k", "min_p", "top_p")}
    if least:
        settings |= {"min_tokens": min(least, room), "stop_token_ids": tuple(ends)}
    if not do_sample:
        settings["temperature"] = 0.0
    return SamplingParams(**settings, max_tokens=room, ignore_eos=True)


def padding_id(config: Any) -> int:
    """What transformers pads with: the padding token, else the first that ends an answer."""
    ids = [config.pad_token_id, *torch.as_tensor(config.eos_token_id or 0).flatten().tolist()]
    return next(int(i) for i in ids if i is not None)


def usual(processor: Any, ends: set[int], padding: list[int]) -> bool:
    """Whether a processor is as generate makes it, but for its number."""
    ignored = getattr(processor, "prompt_ignore_length", padding)
    return (
        getattr(processor, "filter_value", -math.inf) == -math.inf
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and {int(i) for i in getattr(processor, "eos_token_id", ends)} == ends
        and torch.as_tensor(0 if ignored is None else ignored).expand(len(padding)).tolist() == padding
    )


def refuse(config: Any) -> None:
    """Raises UsageError for settings that cannot be honoured, instead of ignoring them."""
    found = {name: getattr(config, name, None) for name in REFUSED}
    wrong = [f"{k}={v!r}" for k, v in found.items() if v not in (None, False) and not (v == 1 and "beam" in k)]
    if config.cache_implementation == "quantized":  # other caches hold the same keys and values
        wrong.append("cache_implementation='quantized'")
    if wrong:
        raise UsageError(
            f"custom_generate cannot honour {', '.join(wrong)}: it continues each prompt once, by the model's own "
            "logits, and returns tokens only."
        )
