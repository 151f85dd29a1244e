"""Speculative decoding inside transformers' own ``model.generate(custom_generate=...)``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.core import DraftShape, Request, SamplingParams, UsageError
from eyas.drafter.contract import Drafter
from eyas.engine.engine import Engine
from eyas.engine.llm import load_drafter_for
from eyas.target.adapter import HFTarget
from eyas.target.images import TEXT_KEYS, image_inputs

# What generate() makes of settings that SamplingParams has too. Anything else would be ignored, so it is refused.
HONOURED = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def custom_generate(drafter: Drafter | str | Path, shape: DraftShape | None = None) -> CustomGenerate:
    """What to hand to ``model.generate(..., custom_generate=)``: the same tokens as without it, sooner.

    Greedy output is token for token that of ``generate``. Sampling draws from the same distribution (min_p goes before
    top_k and top_p, as in vLLM), with noise seeded from torch's generator, so ``torch.manual_seed`` repeats it.
    Stopping criteria, streamers, padded batches and images work; beams, scores and logits processors that have no
    counterpart in SamplingParams are refused with UsageError.
    """
    return CustomGenerate(drafter, shape)


class CustomGenerate:
    def __init__(self, drafter: Drafter | str | Path, shape: DraftShape | None):
        self._drafter, self._shape = drafter, shape
        self._engine: Engine | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        refuse(generation_config, logits_processor)
        streamer = streamer or streamer_of(sys._getframe(1))
        images = encoded_images(model_kwargs)
        if images and len(input_ids) > 1:
            raise UsageError("custom_generate takes images for one prompt at a time, not for a batch.")
        mask = model_kwargs.get("attention_mask")
        engine = self._engine_for(model, generation_config.max_length)
        answers = []
        for row, ids in enumerate(input_ids):
            prompt = ids if mask is None else ids[mask[row].bool()]
            request = Request(str(row), prompt.tolist(), sampling_params(generation_config, len(ids)), images)
            answers.append(answer(engine, request, ids, stopping_criteria, streamer))
        if streamer is not None:
            streamer.end()
        padding = generation_config.pad_token_id
        tokens = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(a, device=input_ids.device, dtype=input_ids.dtype) for a in answers],
            batch_first=True,
            padding_value=0 if padding is None else int(padding),
        )
        sequences = torch.cat([input_ids, tokens], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _engine_for(self, model: Any, length: int) -> Engine:
        """An engine for this model with room for ``length`` tokens, kept for the next call."""
        engine = self._engine
        if engine is None or engine.target.model is not model or engine.context_length < length:
            target = HFTarget(model)
            drafter = self._drafter
            if isinstance(drafter, str | Path):
                drafter = load_drafter_for(target, drafter)
            engine = self._engine = Engine(target, drafter, shape=self._shape, context_length=length)
        return engine


def answer(
    engine: Engine, request: Request, ids: torch.Tensor, stopping_criteria: StoppingCriteriaList, streamer: Any
) -> list[int]:
    """The tokens of one answer, ended where the caller's stopping criteria say so (end-of-sequence is one of them)."""
    tokens: list[int] = []
    for token in decoded(engine, request):
        tokens.append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        sequence = torch.cat([ids, torch.tensor(tokens, device=ids.device, dtype=ids.dtype)])[None]
        if bool(stopping_criteria(sequence, None).all()):
            break
    return tokens


def decoded(engine: Engine, request: Request) -> Iterator[int]:
    engine.add(request)
    try:
        while not engine.idle:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                yield from (token.token_id for token in output.emitted)
    finally:
        engine.abort(request.id)


def encoded_images(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What belongs to images among ``generate``'s inputs: a processor's tensors, or what its encoder made of them.

    Raises UsageError for inputs that would be ignored.
    """
    types = {name: value for name, value in inputs.items() if name.endswith("token_type_ids")}
    if encoded := inputs.get("mm_encoder_outputs"):
        return {"mm_encoder_outputs": encoded, "position_ids": inputs["position_ids"], **types}
    images = image_inputs(inputs)
    known = {*TEXT_KEYS, *types, *(images or ())}
    if ignored := [name for name, value in inputs.items() if hasattr(value, "shape") and name not in known]:
        raise UsageError(f"custom_generate reads token ids and images: it cannot use {', '.join(ignored)}.")
    for name in ("cache", "past_key_values"):
        if inputs.get(name) is not None and inputs[name].get_seq_length() > 0:
            raise UsageError("custom_generate keeps a cache of its own: give the whole prompt, and no filled cache.")
    return images


def streamer_of(caller: FrameType) -> Any:
    """transformers 5.24 has a streamer hear the prompt, but hands it to its own decoding methods only: take it there.

    A streamer that hears neither tokens nor the end leaves whoever reads from it waiting for ever.
    """
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None


def sampling_params(config: Any, prompt_length: int) -> SamplingParams:
    """transformers' generation settings in Eyas's words. The end of the answer is left to the stopping criteria."""
    settings: dict[str, Any] = {"max_tokens": config.max_length - prompt_length, "ignore_eos": True}
    eos = config.eos_token_id
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    minimum = max(config.min_new_tokens or 0, (config.min_length or 0) - prompt_length)
    if minimum > 0 and eos is not None:
        settings["min_tokens"] = min(minimum, settings["max_tokens"])
        settings["stop_token_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if config.repetition_penalty is not None:
        settings["repetition_penalty"] = config.repetition_penalty
    if config.do_sample:
        settings |= {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
            "seed": int(torch.randint(2**63 - 1, ())),
        }
    return SamplingParams(**settings)


def refuse(config: Any, processors: LogitsProcessorList) -> None:
    """Raises UsageError for what cannot be honoured, instead of ignoring it."""
    if (config.num_beams or 1) > 1:
        raise UsageError("custom_generate decodes one continuation per prompt: num_beams must be 1.")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise UsageError(f"custom_generate does not return what {name} asks for.")
    for processor in processors:
        if not isinstance(processor, HONOURED):
            raise UsageError(
                f"custom_generate cannot honour {type(processor).__name__}; it knows temperature, top_k, top_p, min_p, "
                "repetition_penalty and minimum lengths."
            )
