"""The library in three lines: loading a pair, streaming from it, and what it says to those who ask wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from cli import tiny
from engine.harness import random_drafter, scripted, truth
from scripted import plans

import eyas
from eyas.core import EyasError, NonFiniteLogitsError, RequestError, SamplingParams, UsageError
from eyas.drafter import storage
from eyas.drafter.model import untrained
from eyas.engine.llm import DEFAULT_CONTEXT, LLM, eos_ids, fit_context
from eyas.engine.lossless import Comparer

NAME = "llama"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A target with a tokenizer and a chat template, and a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    storage.save(random_drafter(NAME).model, root / "drafter")
    return tiny.save(root / "target"), root / "drafter"


@pytest.fixture(scope="module")
def llm(folders) -> LLM:
    target, drafter = folders
    return eyas.load(target, drafter=drafter, context_length=128, speculation="fixed")


def talking(errs=lambda step: 0) -> LLM:
    """With a drafter that knows the answer, whichever request asks for it."""
    scripts = dict.fromkeys(map(str, range(10)), truth(NAME).script)
    return LLM(zoo.case(NAME).model, tiny.tokenizer(), drafter=scripted(scripts, errs), speculation="fixed")


# Three lines


def test_three_lines(folders, capsys):
    target, drafter = folders
    llm = eyas.load(target, drafter=drafter)
    for chunk in llm.stream("w5 w6 w7", max_tokens=8):
        print(chunk.text, end="")
    assert len(capsys.readouterr().out.split()) == 8


def test_a_loaded_pair_decodes_as_transformers_does(llm):
    expected = truth(NAME)
    answer = llm.generate(expected.prompt, max_tokens=40)
    assert answer.token_ids == expected.tokens[:40]
    assert answer.stats.steps > 0 and answer.finish_reason == "length" and answer.prompt_tokens == 30
    assert answer.text == tiny.tokenizer().decode(expected.tokens[:40], skip_special_tokens=True)
    assert answer.acceptance_length == answer.stats.emitted / answer.stats.steps >= 1
    plain = llm.generate(expected.prompt, max_tokens=40, speculate=False)
    assert plain.token_ids == answer.token_ids and plain.stats.steps == 0 and plain.acceptance_length == 1.0
    assert answer.prefill_seconds > 0 and answer.decode_seconds > 0
    assert answer.tokens_per_second == pytest.approx(39 / answer.decode_seconds)
    assert llm.generate(expected.prompt, max_tokens=1).tokens_per_second < 1e9


@pytest.mark.parametrize("drafter", [None, "untrained"])
def test_other_drafters_and_none(folders, drafter):
    shape = eyas.DraftShape(2, 3, 8)
    llm = eyas.load(folders[0], drafter=drafter, shape=shape, speculation="fixed")
    assert (llm.generate([5, 6, 7], max_tokens=9).stats.steps > 0) == (drafter is not None)


def test_streamed_pieces_are_the_generated_answer():
    expected = truth(NAME)
    request = {"max_tokens": 40, "stop": (tiny.tokenizer().decode(expected.tokens[30:32]),)}
    whole = talking().generate(expected.prompt, **request)
    pieces = list(talking(plans(5)["in turn"]).stream(expected.prompt, **request))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token.token_id for piece in pieces for token in piece.emitted] == whole.token_ids == expected.tokens[:32]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert pieces[-1].stats is not None and len(pieces) < 32


def test_complete_lets_one_listen():
    llm, heard = talking(), []
    answer = llm.complete(llm.request(truth(NAME).prompt, max_tokens=9), heard.append)
    assert "".join(output.text for output in heard) == answer.text


@pytest.mark.parametrize(
    "speculation", ["auto", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("fixed", "off"))]
)
def test_how_much_is_drafted_changes_no_token(folders, speculation):
    expected = truth(NAME)
    llm = eyas.load(folders[0], drafter=folders[1], speculation=speculation, context_length=128)
    for _ in "again, with what was learned":
        answer = llm.generate(expected.prompt, max_tokens=60)
        assert answer.token_ids == expected.tokens[:60]
    assert {"fixed": answer.stats.steps > 10, "off": answer.stats.steps == 0}.get(speculation, True)


def test_many_at_once(llm):
    """What comes of each, as it comes; one that breaks, or that cannot be, ends alone."""
    texts = [truth(NAME, length=length, tokens=24) for length in (30, 9, 8, 1)]
    requests = [llm.request(text.prompt, max_tokens=20) for text in texts]
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    order = []
    for output in llm.stream_all(requests):
        found[output.request_id] += [token.token_id for token in output.emitted]
        order.append(output.request_id)
    assert list(found.values()) == [text.tokens[:20] for text in texts]
    assert order != sorted(order, key=[request.id for request in requests].index), "one after the other"
    assert llm.engine.idle and not llm._inboxes
    with pytest.raises(RequestError, match="prompt is empty"):
        list(llm.stream_all([requests[0], llm.request([])]))
    assert llm.engine.idle and not llm._inboxes
    next(pieces := llm.stream_all(requests))
    pieces.close()
    assert llm.engine.idle and not llm._inboxes


def test_one_that_breaks_among_many():
    llm = LLM(tiny.poisoned(), tiny.tokenizer(), drafter=random_drafter(NAME), speculation="fixed")
    expected = truth(NAME)
    assert 40 not in expected.prompt + expected.tokens[:5]
    broken, fine = llm.request("w5 w40 w6"), llm.request(expected.prompt, max_tokens=5)
    outputs = list(llm.stream_all([broken, fine]))
    errors = {output.request_id for output in outputs if output.error is not None}
    assert errors == {broken.id} and llm.engine.idle
    tokens = [t.token_id for output in outputs if output.request_id == fine.id for t in output.emitted]
    assert tokens == expected.tokens[:5]


# What a prompt may be


def test_text_ids_and_messages(llm):
    ids = [5, 6, 7]
    assert llm.encode("w5 w6 w7") == (ids, None) == llm.encode(ids) == llm.encode(tuple(ids))
    turn = [{"role": "user", "content": "w5 w6"}]
    assert llm.encode(turn) == ([0, 5, 6, 1], None)  # user w5 w6 assistant
    greedy = {"max_tokens": 6}
    assert llm.generate(turn, **greedy).token_ids == llm.generate([0, 5, 6, 1], **greedy).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, "two"], "text, a list of token ids, or a list of chat messages"),
        ([{"role": "user", "content": "w5"}, 3], "text, a list"),
        (["w5"], "text, a list"),
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([5] * 128, "shorten it"),
        ([zoo.VOCAB], "outside the target's"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "image"),
    ],
    ids=str,
)
def test_prompts_that_cannot_be(llm, prompt, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)
    assert llm.engine.idle


def test_without_a_tokenizer():
    llm = LLM(zoo.case(NAME).model)
    answer = llm.generate(truth(NAME).prompt, max_tokens=5)
    assert answer.token_ids == truth(NAME).tokens[:5] and answer.text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("w5")
    with pytest.raises(RequestError, match="chat template"):
        llm.generate([{"role": "user", "content": "w5"}])
    with pytest.raises(RequestError, match="Stop strings need a tokenizer"):
        llm.generate([5], stop=("w6",))


def test_images_as_tensors():
    seen = truth("gemma3-vl", image=True)
    llm = LLM(zoo.case("gemma3-vl").model, drafter=random_drafter("gemma3-vl"))
    assert llm.generate(seen.prompt, images=seen.images, max_tokens=10).token_ids == seen.tokens[:10]


# Settings


def test_unknown_settings(llm):
    with pytest.raises(UsageError, match=r"Unknown sampling settings: temprature\. Known ones: temperature,"):
        llm.stream("w5", temprature=1.0)
    with pytest.raises(UsageError, match="temperature must be"):
        llm.generate("w5", temperature=-1.0)


def test_settings_go_over_params(llm):
    request = llm.request("w5", SamplingParams(max_tokens=7, seed=3), temperature=0.5)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.temperature) == (7, 3, 0.5)


def test_a_seed_repeats(llm):
    one, two, other = (llm.generate("w5 w6", temperature=1.5, seed=s, max_tokens=12).token_ids for s in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize(
    ("wanted", "most", "context"),
    [
        (None, 512, 512),
        (None, 10**6, DEFAULT_CONTEXT),
        (None, None, DEFAULT_CONTEXT),
        (64, 512, 64),
        (512, 512, 512),
        (10**5, None, 10**5),
        (10**5, 10**6, 10**5),
        (2, 512, 2),
    ],
)
def test_context_length(wanted, most, context):
    assert fit_context(wanted, most) == context


@pytest.mark.parametrize(("wanted", "most"), [(513, 512), (1, 512), (0, None), (-5, None)])
def test_context_length_that_cannot_be(wanted, most):
    with pytest.raises(UsageError, match=r"context_length must be from 2 to .*got"):
        fit_context(wanted, most)


def test_the_context_ends_an_answer(folders):
    llm = eyas.load(folders[0], drafter=folders[1], context_length=40)
    answer = llm.generate(truth(NAME).prompt)
    assert answer.token_ids == truth(NAME).tokens[:10] and answer.finish_reason == "length"
    with pytest.raises(UsageError):
        eyas.load(folders[0], context_length=513)


def test_what_ends_an_answer():
    model, words = zoo.case(NAME).build(), tiny.tokenizer()
    end = words.eos_token_id
    for configured, expected in ((None, {end}), (7, {7, end}), ([7, end, 9], {7, 9, end})):
        model.generation_config.eos_token_id = configured
        assert set(eos_ids(model, words)) == expected
        assert set(eos_ids(model, None)) == expected - ({end} if configured in (None, 7) else set())
    model.generation_config.eos_token_id = truth(NAME).tokens[4]
    llm = LLM(model, words)
    assert llm.generate(truth(NAME).prompt).token_ids == truth(NAME).tokens[:5]
    assert len(llm.generate(truth(NAME).prompt, ignore_eos=True, max_tokens=30).token_ids) == 30


# Leaving early, and going on


def test_a_closed_stream_frees_its_slot():
    llm, expected = talking(), truth(NAME)
    for count in range(4):
        pieces = llm.stream(expected.prompt, max_tokens=30)
        for _ in range(count):
            next(pieces)
        pieces.close()
        assert llm.engine.idle
        llm.engine.scheduler.check()
    assert llm.generate(expected.prompt, max_tokens=9).token_ids == expected.tokens[:9]


def test_leaving_a_loop_frees_the_slot(llm):
    for _ in llm.stream("w5 w6", max_tokens=30):
        break
    assert llm.engine.idle
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream("w5 w6", max_tokens=30):
            raise ZeroDivisionError
    assert len(llm.generate("w5", max_tokens=3).token_ids) == 3


def test_two_streams_at_once_are_not_mixed_up(llm):
    """Both are decoded together, by whoever asks for more, and nothing is lost."""
    one, two = truth(NAME), truth(NAME, length=9, tokens=24)
    first, second = llm.stream(one.prompt, max_tokens=12), llm.stream(two.prompt, max_tokens=12)
    pieces = {"first": [next(first)], "second": [next(second)]}
    third = llm.generate(one.prompt, max_tokens=5)
    pieces["second"] += second
    pieces["first"] += first
    tokens = {name: [t.token_id for output in outputs for t in output.emitted] for name, outputs in pieces.items()}
    assert tokens == {"first": one.tokens[:12], "second": two.tokens[:12]}
    assert third.token_ids == one.tokens[:5] and llm.engine.idle and not llm._inboxes


def test_a_stream_put_aside_does_not_hinder_others(llm):
    aside = llm.stream(truth(NAME).prompt, max_tokens=12)
    next(aside)
    compared = Comparer(llm).compare(truth(NAME).prompt, SamplingParams(max_tokens=12))
    assert compared.equal and compared.plain.token_ids == truth(NAME).tokens[:12]
    aside.close()
    assert llm.engine.idle


def test_a_target_that_breaks():
    llm = LLM(tiny.poisoned(), tiny.tokenizer(), drafter=random_drafter(NAME))
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        llm.generate("w5 w40 w6")
    assert llm.engine.idle
    expected = truth(NAME)
    assert 40 not in expected.prompt + expected.tokens[:5]
    assert llm.generate(expected.prompt, max_tokens=5).token_ids == expected.tokens[:5]


# What does not load


@pytest.mark.parametrize(("target", "drafter"), [("nowhere", None), (None, "nowhere"), (None, "target")])
def test_paths_that_are_not_what_they_should_be(folders, tmp_path, target, drafter):
    with pytest.raises(EyasError):
        eyas.load(
            tmp_path / target if target else folders[0],
            drafter={"nowhere": tmp_path / "nowhere", "target": folders[0], None: None}[drafter],
        )


def test_a_drafter_for_another_target(folders, tmp_path):
    storage.save(untrained(64, 4, zoo.VOCAB), tmp_path / "wide")
    with pytest.raises(EyasError, match="64"):
        eyas.load(folders[0], drafter=tmp_path / "wide")


# Importing


def test_importing_eyas_is_cheap():
    """No torch, and under 0.3 seconds: the best of five, since other work may slow any one of them down."""
    code = (
        "import sys, time; begin = time.perf_counter(); import eyas; seconds = time.perf_counter() - begin; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'imports too much'; "
        "eyas.SamplingParams(); print(seconds)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.3


def test_names_come_when_asked_for():
    assert set(eyas.__all__) <= {*dir(eyas), "LLM", "Completion", "load", "custom_generate"}
    for name in eyas.__all__:
        assert getattr(eyas, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        _ = eyas.LLN


def test_no_gradients_are_kept(llm):
    assert not any(p.requires_grad for p in llm.target.model.parameters())
    with torch.enable_grad():
        assert llm.generate("w5", max_tokens=2).token_ids


def test_a_request_given_twice_does_not_end_the_first(llm):
    request = llm.request([5, 6, 7], max_tokens=6)
    first = llm._run(request)
    found = [next(first)]
    with pytest.raises(RequestError, match="still being answered"):
        llm.complete(request)
    found += first
    assert sum(len(output.emitted) for output in found) == 6
