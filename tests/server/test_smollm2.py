"""The real SmolLM2 with the drafter that comes with Eyas, behind the server, asked by the official client.

Everything is float32, where the same seed must give the same text to the letter. What is chosen is held against plain
passes of transformers over prompt and answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import torch
from server.live import Live

from eyas.core import DraftShape
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.shipped import shipped_drafter
from eyas.engine.llm import LLM, load

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SHAPE = DraftShape(3, 1, 4)
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
PROMPTS = (
    "Write a haiku about a falcon.",
    "Give me a recipe for pancakes.",
    "Write SQL that counts the orders of each customer.",
)
TOKENS = 12
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def loaded() -> LLM:
    drafter = shipped_drafter("smollm2")
    assert drafter is not None
    return load("smollm2", drafter, dtype="float32", context_length=256, max_running_requests=1)


@contextmanager
def serving(loaded: LLM, speculation: str) -> Iterator[Live]:
    """A server of its own over the same weights; one at a time."""

    def made() -> LLM:
        drafter = Eagle3Drafter(loaded.drafter.model)  # type: ignore[union-attr]
        settings: dict[str, Any] = {"speculation": speculation, "max_running_requests": 8, "context_length": 256}
        return LLM(loaded.target, loaded.tokenizer, drafter=drafter, shape=SHAPE, name="smollm2", **settings)

    server = Live(made, model_name="smollm2", model_defaults=False)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(loaded) -> Iterator[Live]:
    with serving(loaded, "fixed") as made:
        yield made


@pytest.fixture
def chat(server) -> Ask:
    client = server.openai()
    given = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8}

    def ask(**more: Any) -> Any:
        extra = {"return_token_ids": True, **more.pop("extra_body", {})}
        return client.chat.completions.create(**{**given, **more}, extra_body=extra)

    return ask


@pytest.fixture
def complete(server) -> Ask:
    client = server.openai()
    given = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    return lambda **more: client.completions.create(**{**given, **more}, extra_body={"return_token_ids": True})


@torch.no_grad()
def logits_after(loaded: LLM, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """[len(answer), vocabulary], of transformers: what each token of the answer was chosen from."""
    ids = torch.tensor([[*prompt, *answer]])
    return loaded.target.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def test_models(server):
    client = server.openai()
    (model,) = client.models.list().data
    assert model.id == "smollm2" and client.models.retrieve("smollm2") == model
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.models.retrieve("gpt-4")
    assert server.get("/health").status_code == 200 and b"eyas:acceptance_length" in server.get("/metrics").content


def test_a_chat_with_log_probabilities(loaded, chat):
    answer = chat(logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    ids = choice.token_ids
    assert choice.message.content == loaded.tokenizer.decode(ids) and choice.finish_reason == "length"
    assert answer.usage.completion_tokens == len(ids) == 8
    expected = loaded.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert answer.prompt_token_ids == expected and answer.usage.prompt_tokens == len(expected)
    logprobs = logits_after(loaded, answer.prompt_token_ids, ids).log_softmax(-1)
    assert ids == logprobs.argmax(-1).tolist()
    for entry, row, token in zip(choice.logprobs.content, logprobs, ids, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        top = [one.logprob for one in entry.top_logprobs]
        assert top == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert bytes(entry.bytes).decode() == entry.token == loaded.tokenizer.decode([token])


def test_bias_and_penalties(loaded, chat):
    """One request has them all: each token is the best once they are reckoned in."""
    free = chat().choices[0].token_ids
    biased = {str(free[0]): -100, str(free[1]): 4.0}
    asked = {"frequency_penalty": 0.7, "presence_penalty": 0.9, "logit_bias": biased, "max_tokens": 12}
    answer = chat(**asked)
    ids = answer.choices[0].token_ids
    assert ids[0] != free[0] and free[0] not in ids
    said: Counter[int] = Counter()
    for row, token in zip(logits_after(loaded, answer.prompt_token_ids, ids), ids, strict=True):
        for name, bias in biased.items():
            row[int(name)] += bias
        for other, count in said.items():
            row[other] -= 0.7 * count + 0.9
        assert int(row.argmax()) == token
        said[token] += 1


def test_a_stream_with_usage(chat):
    whole = chat(max_completion_tokens=10, max_tokens=3)
    assert whole.usage.completion_tokens == 10, "the new name is the one that counts"
    chunks = list(chat(max_completion_tokens=10, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    seen = whole.usage.speculative
    assert seen["accepted"] > 0 and seen["acceptance_length"] > 1, "it does speculate"


def test_several_answers_each_with_a_seed_of_its_own(chat):
    answer = chat(n=3, temperature=1.0, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert chat(temperature=1.0, seed=6).choices[0].message.content == texts[1]
    parts: Counter[int] = Counter()
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat(n=3, temperature=1.0, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            parts[choice.index] += 1
    assert [*streamed.values()] == texts and min(parts.values()) > 1


def test_a_stop_string(chat):
    text = chat().choices[0].message.content
    word = text.split()[2]
    (choice,) = chat(stop=[word]).choices
    assert choice.finish_reason == "stop" and choice.message.content == text[: text.index(word)]


def test_completions(loaded, complete):
    answer = complete(logprobs=2)
    (choice,) = answer.choices
    ids = choice.token_ids
    logprobs = logits_after(loaded, choice.prompt_token_ids, ids).log_softmax(-1)
    assert ids == logprobs.argmax(-1).tolist() and "Paris" in choice.text
    assert choice.logprobs.token_logprobs == pytest.approx(
        [float(r[t]) for r, t in zip(logprobs, ids, strict=True)], abs=1e-3
    )
    assert "".join(choice.logprobs.tokens) == choice.text
    streamed = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == choice.text
    assert streamed[-1].usage.completion_tokens == 6
    two = complete(prompt=["The capital of France is", "The capital of Japan is"], n=2, max_tokens=2)
    assert [c.text for c in two.choices[:2]] == [choice.text[: len(two.choices[0].text)]] * 2
    assert len(two.choices) == 4 and two.choices[2].text == two.choices[3].text != two.choices[0].text
    by_ids = complete(prompt=choice.prompt_token_ids, max_tokens=2)
    assert by_ids.choices[0].text == two.choices[0].text


def seeded(server: Live, prompt: str, seed: int, **more: Any) -> tuple[str, int]:
    """An answer, and how many draft tokens of it were accepted."""
    answer = server.openai().chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=TOKENS,
        temperature=0.8,
        seed=seed,
        extra_body=more,
    )
    return answer.choices[0].message.content, answer.usage.speculative["accepted"]


@pytest.mark.thorough
def test_a_seed_says_the_same_whatever_is_drafted_and_whoever_else_is_there(loaded, server):
    """Speculation off, fixed and auto; alone, and all at once."""

    def ask_all(at: Live, at_once: int, **more: Any) -> tuple[list[str], int]:
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda p: seeded(at, p[1], p[0], **more), enumerate(PROMPTS)))
        return [text for text, _ in found], sum(accepted for _, accepted in found)

    alone, none = ask_all(server, 1, speculation="off")
    assert none == 0 and len(set(alone)) == len(PROMPTS) and all(len(text) > 10 for text in alone)
    for at_once in (1, 3):
        texts, accepted = ask_all(server, at_once)
        assert texts == alone and accepted > 0
    with serving(loaded, "auto") as auto:
        assert ask_all(auto, 1)[0] == alone
        asked = [(seed, prompt, how) for how in ("off", "auto") for seed, prompt in enumerate(PROMPTS)]
        with ThreadPoolExecutor(len(asked)) as pool:  # some with drafts and some without, in the same steps
            mixed = pool.map(lambda one: seeded(auto, one[1], one[0], speculation=one[2])[0], asked)
            assert list(mixed) == alone * 2
