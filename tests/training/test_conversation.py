from __future__ import annotations

import numpy as np
import pytest
from training import talkers

from eyas.training.conversation import Chat, Turn, stitch
from eyas.training.dataset import DataError

USER = {"role": "user", "content": "Why do falcons dive?"}
ANSWER = {"role": "assistant", "content": "To catch pigeons."}
MORE = {"role": "user", "content": "How fast?"}
LAST = {"role": "assistant", "content": "Very."}
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(template: str = talkers.CHATML, end: str = "<|im_end|>", **settings: object) -> Chat:
    tokenizer = talkers.tokenizer(template, end)
    return Chat(tokenizer, (tokenizer.eos_token_id,), settings)


def written(made: Chat, messages: list[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Each row's text, and the stretches of it that are masked."""
    rows = []
    for ids, mask in stitch(made.answered(messages)):
        cuts = np.flatnonzero(np.diff(mask)) + 1
        parts = zip(np.split(ids, cuts), np.split(mask, cuts), strict=True)
        rows.append((made.decode(ids.tolist()), [made.decode(i.tolist()) for i, m in parts if m[0]]))
    return rows


@pytest.mark.parametrize(
    ("template", "end", "messages", "text", "masked"),
    [
        (
            talkers.CHATML,
            "<|im_end|>",
            [USER, ANSWER, MORE, LAST],
            "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nWhy do falcons dive?<|im_end|>\n"
            "<|im_start|>assistant\nTo catch pigeons.<|im_end|>\n<|im_start|>user\nHow fast?<|im_end|>\n"
            "<|im_start|>assistant\nVery.<|im_end|>",
            ["To catch pigeons.<|im_end|>", "Very.<|im_end|>"],
        ),
        (
            talkers.TAGGED,
            "<|im_end|>",
            [SYSTEM, USER, ANSWER, MORE, LAST],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy do falcons dive?<|im_end|>\n"
            "<|im_start|>assistant\nTo catch pigeons.<|im_end|>\n<|im_start|>user\nHow fast?<|im_end|>\n"
            "<|im_start|>assistant\nVery.<|im_end|>",
            ["To catch pigeons.<|im_end|>", "Very.<|im_end|>"],
        ),
        (
            talkers.INST,
            "</s>",
            [SYSTEM, USER, {**ANSWER, "content": " To catch pigeons. "}, MORE, LAST],
            "[INST] Be brief.\n\nWhy do falcons dive? [/INST]To catch pigeons.</s>[INST] How fast? [/INST]Very.</s>",
            ["To catch pigeons.</s>", "Very.</s>"],
        ),
        (
            talkers.MODEL,
            "<end>",
            [USER, ANSWER],
            "<turn>user\nWhy do falcons dive?<end>\n<turn>model\nTo catch pigeons.<end>",
            ["To catch pigeons.<end>"],
        ),
        (  # the block is the template's, not the target's
            talkers.THINKING,
            "<|im_end|>",
            [USER, ANSWER],
            "<|im_start|>user\nWhy do falcons dive?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            "To catch pigeons.<|im_end|>",
            ["To catch pigeons.<|im_end|>"],
        ),
        (  # these thoughts are the target's
            talkers.THINKING,
            "<|im_end|>",
            [USER, {**ANSWER, "content": "<think>\nHm.\n</think>\n\nFood."}],
            "<|im_start|>user\nWhy do falcons dive?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n"
            "Food.<|im_end|>",
            ["<think>\nHm.\n</think>\n\nFood.<|im_end|>"],
        ),
    ],
)
def test_the_mask_is_what_the_target_wrote(template, end, messages, text, masked) -> None:
    assert written(chat(template, end), messages) == [(text, masked)]


def test_a_row_ends_where_the_template_forgets_thoughts() -> None:
    thought = {**ANSWER, "content": "<think>\nHm.\n</think>\n\nFood."}
    first, second = written(chat(talkers.THINKING), [USER, thought, MORE, LAST])
    assert first[1] == ["<think>\nHm.\n</think>\n\nFood.<|im_end|>"]
    assert second[0] == (
        "<|im_start|>user\nWhy do falcons dive?<|im_end|>\n<|im_start|>assistant\nFood.<|im_end|>\n"
        "<|im_start|>user\nHow fast?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nVery.<|im_end|>"
    )
    assert second[1] == ["Very.<|im_end|>"]


def test_template_settings_reach_the_template() -> None:
    plain = chat(talkers.THINKING, enable_thinking=False)
    assert plain.decode(plain.prompt([USER])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert written(plain, [USER, ANSWER])[0][1] == ["To catch pigeons.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (talkers.FORCED_THINKING, [USER, ANSWER], "begins answers with"),
        (talkers.MISTAGGED, [USER, ANSWER], "generation tags"),
        (talkers.CHATML.replace("message['content']", "message['content'] | upper"), [USER, ANSWER], "rewrites it"),
        (talkers.INST, [USER, MORE, ANSWER], "must take turns"),
        (talkers.CHATML, [USER], "no answer"),
    ],
)
def test_a_mask_that_would_be_wrong_is_refused(template, messages, words) -> None:
    with pytest.raises(DataError, match=words):
        chat(template).answered(messages)


def test_no_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Chat(talkers.tokenizer(None), (1,))


def test_a_user_turn_is_left_open() -> None:
    made = chat()
    begun = made.user_turn([SYSTEM, USER, ANSWER], "And")
    assert made.decode(begun).endswith("pigeons.<|im_end|>\n<|im_start|>user\nAnd")
    end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*made.encode(" the owls?"), end, *made.encode("\n<|im_start|>assistant\nThey")]
    assert made.user_message(begun, "And", ids) == "And the owls?"
    assert made.stop_ids == (end,)


def test_what_ends_a_user_turn_need_not_end_an_answer() -> None:
    made = chat(talkers.INST, "</s>")
    close, end = made.tokenizer.convert_tokens_to_ids(["[/INST]", "</s>"])
    # " [/INST]": a space comes first, so the token is not what follows at once, and the text is cut instead
    before = made.user_turn([])
    assert made.decode(before) == "[INST] "
    assert made.user_message(before, "", made.encode("Why? [/INST]Because")) == "Why?"
    assert made.end_id == end and close in made.special


def test_text_answers_are_split_as_behind_their_prompt() -> None:
    made = chat()
    prompt = made.prompt([USER])
    assert made.answer_ids(prompt, "So.", ended=True) == [*made.encode("So."), made.end_id]
    assert made.answer_ids(prompt, "So.", ended=False) == made.encode("So.")


def test_turns_that_go_on_make_one_row() -> None:
    (ids, mask), (other, late) = stitch([Turn([1, 2], [3, 4]), Turn([1, 2, 3, 4, 5], [6]), Turn([1, 9], [7])])
    assert ids.tolist() == [1, 2, 3, 4, 5, 6] and ids.dtype == np.int32
    assert mask.tolist() == [False, False, True, True, False, True] and mask.dtype == bool
    assert other.tolist() == [1, 9, 7] and late.tolist() == [False, False, True]
