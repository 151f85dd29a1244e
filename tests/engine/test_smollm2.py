"""The real SmolLM2: the same tokens with and without speculation, in fp32 and in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted import Script, ScriptedDrafter

from eyas.core import DraftShape, Request, SamplingParams
from eyas.drafter.shipped import shipped_drafter
from eyas.engine.llm import LLM, load
from eyas.engine.lossless import Comparer, first_difference
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget
from eyas.target.loading import LoadedTarget, load_target

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TOKENS = 16
PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about a falcon.",
    "What is 17 times 23? Show your work.",
    "Translate into French: The bird sings in the morning.",
    "Write a Python function that reverses a string.",
    "List five fruits.",
    "Who was Ada Lovelace?",
    "Summarise in one sentence: Rain fell all night, the river rose, and by dawn the bridge was gone.",
    "Give me a recipe for pancakes.",
    "What is the capital of Mongolia?",
    "Explain recursion to a child.",
    "Continue the story: The lighthouse keeper heard a knock.",
    "Write SQL that counts the orders of each customer.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "How do I remove rust from a bicycle chain?",
    "Give three synonyms for 'quick'.",
    "Write a polite e-mail that declines a meeting.",
    "What comes next: 2, 4, 8, 16?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Tell me a joke about computers.",
)
GREEDY = SamplingParams(max_tokens=TOKENS)
SAMPLED = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.05, seed=7)


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", DraftShape(4, 1, 5)), pytest.param("bfloat16", DraftShape(3, 2, 8), marks=pytest.mark.thorough)],
)
def test_same_tokens_on_twenty_prompts(dtype: str, shape: DraftShape) -> None:
    """With the drafter that comes with Eyas, which is right about half of the time; ten answers at a time."""
    drafter = shipped_drafter("smollm2")
    settings = {"context_length": 512, "max_running_requests": 10, "speculation": "fixed"}
    llm = load("smollm2", drafter, dtype=dtype, shape=shape, **settings)
    samplings = [GREEDY if index % 2 else SAMPLED for index in range(len(PROMPTS))]
    requests = [llm.request(messages(p), s) for p, s in zip(PROMPTS, samplings, strict=True)]
    plain, _ = answers(llm, [replace(request, speculate=False) for request in requests])
    speculative, every = answers(llm, requests)
    comparer = Comparer(llm)
    for prompt, request, ours, theirs in zip(PROMPTS, requests, plain, speculative, strict=True):
        if (index := first_difference(ours, theirs)) is not None:
            assert dtype != "float32", (prompt, index)
            assert comparer.judge(request, ours, theirs, index).near_tie, (prompt, index)
    assert every.acceptance_length > 1.4
    alone = comparer.compare(messages(PROMPTS[0]), SAMPLED)
    assert alone.lossless and alone.speculative.stats.steps > 0


def answers(llm: LLM, requests: list[Request]) -> tuple[list[list[int]], AcceptanceStats]:
    """The tokens of each answer, and what its drafts came to in all."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    every = AcceptanceStats()
    for output in llm.stream_all(requests):
        tokens[output.request_id] += [emitted.token_id for emitted in output.emitted]
        if output.stats is not None:
            every.add(output.stats)
    return list(tokens.values()), every


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target("smollm2", dtype="float32")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.thorough
def test_accepted_drafts_change_nothing(sampling: SamplingParams, loaded: LoadedTarget) -> None:
    """As above with a drafter that is right more often."""
    target = HFTarget(loaded.model)
    settings = {"context_length": 512, "max_running_requests": 1, "speculation": "fixed"}
    plain = LLM(target, loaded.tokenizer, **settings)
    for prompt in PROMPTS[:3]:
        expected = plain.generate(messages(prompt), sampling)
        ids, _ = plain.encode(messages(prompt))
        shape = DraftShape(4, 3, 10)
        drafter = ScriptedDrafter({"0": Script(expected.token_ids)}, lambda step: step % 5)
        found = LLM(target, loaded.tokenizer, drafter=drafter, shape=shape, **settings).generate(ids, sampling)
        assert found.token_ids == expected.token_ids
        assert found.text == expected.text
        assert found.acceptance_length > 1.5 or len(expected.tokens) < 6
