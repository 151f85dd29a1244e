"""/v1/completions: every form of a prompt, and the log-probabilities' own shape."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server.live import COMPLETIONS, Live, completion, plainly, tokenizer

from eyas.core import SamplingParams
from eyas.training.answering import EndpointAnswerer, Prompt
from eyas.training.conversation import Chat

IDS = [5, 9, 77]


def alone(prompt: Any = IDS, **sampling: Any) -> Any:
    return plainly(prompt, SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "seed": 3, **sampling}))


@pytest.mark.parametrize("prompt", ["w5 w9 w77", IDS, ["w5 w9 w77"], [IDS]], ids=str)
def test_one_prompt_in_every_form(live, prompt):
    answer = live.openai().completions.create(**completion(prompt=prompt))
    assert answer.choices[0].text == alone().text and answer.object == "text_completion"
    assert answer.id.startswith("cmpl-") and answer.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "prompts", [["w5 w9", "w7", "w5 w9 w77 w8"], [[5, 9], [7], [5, 9, 77, 8]]], ids=["text", "ids"]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts_and_choices_in_order(live, prompts, streamed):
    expected = [alone(ids, seed=3 + n).text for ids in ([5, 9], [7], [5, 9, 77, 8]) for n in range(2)]
    texts = [""] * 6
    answer = live.openai().completions.create(**completion(prompt=prompts, n=2), stream=streamed)
    for piece in answer if streamed else [answer]:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert streamed or answer.usage.prompt_tokens == 7


def test_sixteen_tokens_unless_told_otherwise(live):
    body = live.post(COMPLETIONS, json={"prompt": "w5", "temperature": 0}).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["text"] == alone([5], temperature=0, max_tokens=16).text


def test_log_probabilities(live):
    choice = live.openai().completions.create(**completion(logprobs=2)).choices[0]
    found = choice.logprobs
    reference = alone(logprobs=2)
    assert found.tokens == reference.text.split()
    assert found.token_logprobs == pytest.approx([token.logprob for token in reference.tokens], abs=1e-4)
    for own, likely, token in zip(found.tokens, found.top_logprobs, reference.tokens, strict=True):
        best = {tokenizer().decode([i]): value for i, value in token.top_logprobs}
        assert likely == pytest.approx({own: token.logprob, **best}, abs=1e-4)
    assert sorted(set(found.text_offset)) == found.text_offset and found.text_offset[0] == 0
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset:].lstrip().startswith(token)
    stream = live.openai().completions.create(**completion(logprobs=2), stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for piece in pieces for item in getattr(piece, name)] == getattr(found, name)
    none = live.openai().completions.create(**completion(logprobs=0)).choices[0].logprobs
    assert [len(likely) for likely in none.top_logprobs] == [1] * 12


def test_token_ids(live):
    body = live.post(COMPLETIONS, json=completion(prompt=[IDS, [7]], return_token_ids=True)).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [IDS, [7]]
    assert [choice["token_ids"] for choice in body["choices"]] == [alone().token_ids, alone([7]).token_ids]
    assert "token_ids" not in live.post(COMPLETIONS, json=completion()).json()["choices"][0]


def test_a_beginning_that_was_there_is_told(live):
    prompt = [11, *range(20, 60)]
    for cached in (0, 39):
        usage = live.post(COMPLETIONS, json=completion(prompt=prompt, max_tokens=2)).json()["usage"]
        assert usage["prompt_tokens"] == 41
        assert abs(usage["prompt_tokens_details"]["cached_tokens"] - cached) <= 1


def test_our_own_client_is_answered(live: Live):
    """``eyas data --endpoint`` finds out by itself what a server can do."""

    async def job() -> list[int]:
        client = EndpointAnswerer(live.url, Chat(tokenizer(), [150]), retries=0)
        answer = await client.complete(Prompt(IDS), SamplingParams(temperature=0, max_tokens=9))
        await client.close()
        return answer.ids

    assert asyncio.run(job()) == alone(temperature=0, max_tokens=9).token_ids
