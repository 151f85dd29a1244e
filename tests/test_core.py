"""What may be asked for: draft shapes and sampling settings."""

from __future__ import annotations

import math
from itertools import product

import pytest

from eyas.core import (
    CheckpointError,
    DraftShape,
    EyasError,
    NonFiniteLogitsError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    TargetError,
    UsageError,
    one_line,
)


def test_defaults():
    params = SamplingParams()
    assert params.greedy and params.max_tokens == 256 and params.stop == () and params.logprobs is None
    assert DraftShape() == DraftShape(num_steps=5, eagle_topk=1, num_draft_tokens=6)
    assert not SamplingParams(temperature=0.1).greedy


def test_every_request_has_its_own_seed():
    assert len({SamplingParams().seed for _ in range(20)}) == 20
    assert all(0 <= SamplingParams().seed < 2**63 for _ in range(20))


NAN, INF = math.nan, math.inf
EDGES = {
    "temperature": ([0, 0.01, 5], [-0.1, NAN, INF]),
    "top_k": ([0, 1, 10**6], [-2]),
    "top_p": ([0.01, 1], [0, -0.1, 1.1, NAN]),
    "min_p": ([0, 1], [-0.1, 1.1, NAN]),
    "repetition_penalty": ([0.01, 1, 9], [0, -1, NAN, INF]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1, NAN]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1, NAN]),
    "max_tokens": ([1, 10**6], [0, -1]),
    "min_tokens": ([0, 256], [-1, 257]),
    "stop": ([(), ("a",), ["a", "bc"], ("\n",)], [("",), ("a", "")]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "seed": ([0, -1, 2**64, 10**30], []),
    "logit_bias": ([{}, {3: 1.0, 5: -INF}], []),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (fine, _) in EDGES.items() for value in fine])
def test_sampling_settings_that_can_be(field, value):
    assert getattr(SamplingParams(**{field: value}), field) is not None or value is None


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (_, wrong) in EDGES.items() for value in wrong])
def test_sampling_settings_that_cannot_be(field, value):
    with pytest.raises(UsageError, match="stop strings" if field == "stop" else field):
        SamplingParams(**{field: value})


def test_one_stop_string_is_not_many_letters():
    assert SamplingParams(stop="END").stop == ("END",)
    with pytest.raises(UsageError):
        SamplingParams(stop="")


def test_min_tokens_goes_up_to_max_tokens():
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    with pytest.raises(UsageError, match=r"min_tokens must be in \[0, max_tokens\], got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_one_constraint_as_plain_data():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    made = StructuredOutputsParams(json=schema)
    assert made.json == '{"type": "object", "properties": {"b": {}, "a": {}}}' and made.kind == "json"
    assert made == StructuredOutputsParams(json=made.json) and hash(made) == hash(StructuredOutputsParams(json=schema))
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputsParams(regex="").kind == "regex"
    assert SamplingParams(structured_outputs=made).structured_outputs is made


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar: none was given"),
        ({"regex": "a", "grammar": "start: A"}, "regex and grammar were given"),
        ({"json_object": False}, "none was given"),
        ({"choice": []}, "choice must be text, or for choice at least one"),
        ({"choice": ["a", 1]}, "choice must be text"),
        ({"regex": 5}, "regex must be text"),
        ({"json": {"a": NAN}}, "cannot be written as JSON"),
        ({"json": {"a": object()}}, "cannot be written as JSON"),
    ],
)
def test_constraints_that_cannot_be(wrong, what):
    with pytest.raises(UsageError, match=what):
        StructuredOutputsParams(**wrong)


def test_a_constraint_is_not_any_mapping():
    with pytest.raises(UsageError, match="structured_outputs must be StructuredOutputsParams, got dict"):
        SamplingParams(structured_outputs={"regex": "a"})


def whole_tree(steps: int, topk: int) -> int:
    """Root, then topk children; from then on topk nodes are expanded by topk children each."""
    return 1 + topk + sum(topk * topk for _ in range(steps - 1))


@pytest.mark.parametrize(("steps", "topk"), [*product((1, 2, 5), (1, 2, 4))])
def test_draft_shapes(steps, topk):
    most = whole_tree(steps, topk)
    least = 2 if topk > 1 else most
    assert DraftShape.most_tokens(steps, topk) == most
    for tokens in (least, most):
        assert DraftShape(steps, topk, tokens).num_draft_tokens == tokens
    for tokens in (least - 1, most + 1, 0, -3):
        with pytest.raises(UsageError, match="num_draft_tokens must be"):
            DraftShape(steps, topk, tokens)


@pytest.mark.parametrize(("steps", "topk"), [(0, 1), (-1, 1), (3, 0), (3, -2)])
def test_draft_shapes_without_steps_or_candidates(steps, topk):
    with pytest.raises(UsageError, match="must be >= 1"):
        DraftShape(steps, topk, 4)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EyasError, 1),
        (TargetError, 1),
        (CheckpointError, 1),
        (NonFiniteLogitsError, 1),
        (UsageError, 2),
        (RequestError, 2),
    ],
)
def test_exit_codes(error, code):
    assert error("why").exit_code == code and isinstance(error("why"), EyasError)


@pytest.mark.parametrize(
    "setting",
    [{"max_tokens": 2.5}, {"top_k": 2.5}, {"seed": "7"}, {"stop_token_ids": ("a",)}, {"logit_bias": {"3": 1.0}}],
)
def test_whole_numbers_must_be_whole(setting):
    with pytest.raises(UsageError, match="whole numbers"):
        SamplingParams(**setting)


def test_none_means_the_default():
    params = SamplingParams(seed=None, stop=None, stop_token_ids=None, logit_bias=None, top_k=-1)
    assert isinstance(params.seed, int) and params.seed != SamplingParams(seed=None).seed
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.top_k) == ((), (), {}, 0)


@pytest.mark.parametrize("shape", [(10**9, 1, 10**9 + 1), (5, 10**9, 60), (5, 10, 2000)])
def test_drafts_of_absurd_size(shape):
    with pytest.raises(UsageError, match="at most"):
        DraftShape(*shape)


def test_errors_of_others_fit_a_sentence():
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(OSError("x" * 900)) == "x" * 500 + " ..."
