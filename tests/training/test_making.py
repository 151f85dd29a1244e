"""The whole way from a commission to a data set, with servers that say what they are told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import talkers

from eyas.core import SamplingParams, UsageError
from eyas.training import answering
from eyas.training.answering import Answer, EndpointAnswerer, Prompt, Refused
from eyas.training.commission import Commission, Described, make_data
from eyas.training.conversation import Chat
from eyas.training.dataset import DataError, Dataset, Row
from eyas.training.heldout import HELDOUT
from eyas.training.making import Settings

TOKENIZER = talkers.tokenizer()
TARGET = Described("t", TOKENIZER, len(TOKENIZER), (TOKENIZER.eos_token_id,))
CHAT = Chat(TOKENIZER, TARGET.end_ids)


class Scripted:
    """Answers with texts by a function of the prompt's text; a pair's second says whether the answer ended."""

    trouble = ""

    def __init__(self, say: Any):
        self.say, self.asked = say, list[tuple[str, SamplingParams]]()

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Answer:
        text = CHAT.decode(prompt.ids)
        self.asked.append((text, sampling))
        said = self.say(text)
        if isinstance(said, Exception):
            raise said
        words, ended = said if isinstance(said, tuple) else (said, True)
        ids = CHAT.encode(words)
        return Answer([*ids, CHAT.end_id] if ended else ids[: sampling.max_tokens], ended)

    async def close(self) -> None:
        pass


def commission(folder: Path, **changes: Any) -> Commission:
    settings = {"max_answer_tokens": 200, "max_length": 4000, **changes.pop("settings", {})}
    return Commission(**{"out": folder / "d", "conversations": 20, "settings": Settings(**settings), **changes})


def jsonl(folder: Path, *entries: Any) -> Path:
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def masked(row: Row) -> list[str]:
    cuts = np.flatnonzero(np.diff(row.mask)) + 1
    parts = zip(np.split(row.ids, cuts), np.split(row.mask, cuts), strict=True)
    return [CHAT.decode(ids.tolist()) for ids, mask in parts if mask[0]]


def asks(text: str) -> bool:
    """The target is to write the user's message."""
    return text.rpartition("<|im_start|>")[2].startswith("user\n")


def test_a_target_that_talks_to_itself(tmp_path: Path) -> None:
    def say(text: str) -> str:
        return " " + talkers.utterance(text)

    who = Scripted(say)
    made = make_data(TARGET, commission(tmp_path, conversations=60), lambda chat: who)
    assert len(made) == 60 and made.manifest.complete and made.manifest.sources == {"selfmade": 60}
    turns = Counter[int]()
    for row in made:
        text = CHAT.decode(row.ids.tolist())
        # every answer is what was said to exactly the text before it
        for part in masked(row):
            before = text[: text.index(part)]
            assert before.endswith("<|im_start|>assistant\n")
            assert part == say(before) + "<|im_end|>"
        assert len(masked(row)) == row.provenance["turns"] == text.count("<|im_start|>user\n")
        assert row.provenance["prompt"] in text
        turns[row.provenance["turns"]] += 1
    assert len(turns) > 2
    temperatures = {params.temperature for text, params in who.asked if not asks(text)}
    assert temperatures == {0.0, 0.3, 0.7, 1.0}
    assert {params.temperature for text, params in who.asked if asks(text)} == {0.7, 1.0}
    assert made.manifest.diversity["kinds"] and made.manifest.sampling["temperatures"] == [0.0, 0.3, 0.7, 1.0]
    made.manifest.check_target(TOKENIZER, len(TOKENIZER))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "empty prompt"),
        ("la la " * 60, "looping prompt"),
        (("and so on and on " + "x" * 300, False), "endless prompt"),
        (Refused("too long for me"), "refused prompt"),
    ],
)
def test_a_target_that_writes_nothing_of_use_is_told_so(tmp_path: Path, said: Any, reason: str) -> None:
    who = Scripted(lambda text: said)
    with pytest.raises(DataError, match=f"Of the last 64 conversations 0 can be used: {reason}") as failed:
        make_data(TARGET, commission(tmp_path, kinds=("free",), concurrency=4), lambda chat: who)
    assert "too long for me" in str(failed.value) or reason != "refused prompt"


def test_the_same_prompt_again_is_dropped(tmp_path: Path) -> None:
    count = iter(range(1000))

    def say(text: str) -> str:
        return f"Tell me {talkers.utterance(str(next(count) // 4))}" if asks(text) else "Well, it is so."

    made = make_data(TARGET, commission(tmp_path, kinds=("free",), systems=()), lambda chat: Scripted(say))
    prompts = [row.provenance["prompt"] for row in made]
    assert len(prompts) == len(set(prompts)) == 20
    assert made.manifest.dropped["near-duplicate prompt"] > 10


def test_a_target_that_knows_so_much_and_no_more_is_not_asked_for_ever(tmp_path: Path) -> None:
    known, asked = [f"Tell me {talkers.utterance(str(number))}" for number in range(100)], count()

    def say(text: str) -> str:
        return known[min(next(asked), 99)] if asks(text) else "Well, it is so."

    wanted = commission(tmp_path, conversations=200, kinds=("free",), systems=())
    with pytest.raises(DataError, match=r"Of the last 256 conversations [0-5] can be used: near-duplicate prompt"):
        make_data(TARGET, wanted, lambda chat: Scripted(say))
    assert len(Dataset.open(wanted.out)) > 50  # what was written stays
    assert next(asked) < 600


def test_what_acceptance_is_measured_on_is_never_trained_on(tmp_path: Path) -> None:
    prompts = [prompt for prompts in HELDOUT.values() for prompt in prompts]
    count = iter(range(1000))

    def say(text: str) -> str:
        number = next(count)
        return prompts[number % len(prompts)] if number % 2 else f"Tell me {talkers.utterance(str(number))}"

    wanted = commission(tmp_path, kinds=("free",), systems=(), settings={"max_prompt_tokens": 400})
    made = make_data(TARGET, wanted, lambda chat: Scripted(lambda text: say(text) if asks(text) else "Well."))
    assert not {row.provenance["prompt"] for row in made} & set(prompts)
    assert made.manifest.dropped["near-duplicate prompt"] > 10


@pytest.mark.parametrize("keep", [False, True])
def test_nor_is_it_where_a_file_asks_it(keep: bool, tmp_path: Path) -> None:
    asked = [HELDOUT["maths"][3], f"{HELDOUT['code'][0]} Please.", "Something else entirely?"]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}] for text in asked]
    file = jsonl(tmp_path, *({"messages": talk} for talk in talks))
    wanted = commission(tmp_path, conversations=None, prompts=file, keep_answers=keep)
    made = make_data(TARGET, wanted, lambda chat: Scripted(lambda text: "Well."))
    assert [row.provenance["prompt"] for row in made] == asked[2:]
    assert made.manifest.dropped == {"prompt that eyas eval measures on": 2}


def test_conversations_are_answered_anew(tmp_path: Path) -> None:
    old = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "Two?"},
    ]
    file = jsonl(tmp_path, {"messages": old}, {"prompt": "Alone?"}, {"messages": old[2:3]})
    who = Scripted(lambda text: f"re {len(text)}")
    made = make_data(TARGET, commission(tmp_path, conversations=None, prompts=file), lambda chat: who)
    rows = {row.provenance["line"]: CHAT.decode(row.ids.tolist()) for row in made}
    begin = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    first = f"{begin}re {len(begin)}<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    assert rows[1] == f"{first}re {len(first)}<|im_end|>"
    alone = "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nAlone?<|im_end|>\n<|im_start|>assistant\n"
    assert rows[2] == f"{alone}re {len(alone)}<|im_end|>"
    assert made.manifest.dropped == {"conversations out of order": 1}
    assert "old" not in "".join(rows.values())


def test_answers_that_are_there_can_be_kept(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    more = [*talk, {"role": "user", "content": "Two?"}]
    file = jsonl(tmp_path, {"messages": talk}, {"messages": more}, {"prompt": "none"})
    wanted = commission(tmp_path, conversations=2, prompts=file, keep_answers=True)
    made = make_data(TARGET, wanted, lambda chat: Scripted(None))
    assert [masked(row) for row in made] == [["Yes.<|im_end|>"]] * 2
    with pytest.raises(DataError, match="Line 3: The conversation has no answer"):
        make_data(TARGET, Commission(**{**vars(wanted), "conversations": 3}), lambda chat: Scripted(None))


def test_loops_are_cut_and_rows_keep_their_length(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *({"prompt": f"Question {n}?"} for n in range(4)))
    answers = {
        0: ("Fine, then. " + "round and " * 50, False),
        1: ("x" * 5000, True),
        2: ("", True),
        3: ("Short.", True),
    }
    who = Scripted(lambda text: answers[int(text.split("Question ")[1][0])])
    wanted = commission(
        tmp_path, conversations=None, prompts=file, settings={"max_answer_tokens": 150, "max_length": 260}
    )
    made = make_data(TARGET, wanted, lambda chat: who)
    rows = {row.provenance["line"]: row for row in made}
    # ten tokens a period: the sixteen that begin with " round" come for the fourth time after three periods
    assert masked(rows[1]) == ["Fine, then." + " round and" * 3]
    assert rows[2].ids.size <= 260 and masked(rows[4]) == ["Short.<|im_end|>"]
    assert made.manifest.dropped == {"empty answer": 1} and 3 not in rows


def test_prompts_longer_than_the_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": "y" * 500}, {"prompt": "Short?"})
    wanted = commission(tmp_path, conversations=None, prompts=file, settings={"max_length": 300})
    made = make_data(TARGET, wanted, lambda chat: Scripted(lambda text: "Indeed."))
    assert len(made) == 1 and made.manifest.dropped == {"prompt longer than the rows may be": 1}


def test_what_fails_keeps_what_was_made_and_goes_on_later(tmp_path: Path) -> None:
    file = jsonl(tmp_path, *({"prompt": f"Question {n}?"} for n in range(30)))
    count = iter(range(1000))

    def say(text: str) -> Any:
        return DataError("The server is gone.") if next(count) == 17 else f"re {text[-60:]}"

    wanted = commission(tmp_path, conversations=None, prompts=file, concurrency=3)
    with pytest.raises(DataError, match="is gone"):
        make_data(TARGET, wanted, lambda chat: Scripted(say))
    assert 14 <= len(Dataset.open(tmp_path / "d")) <= 17
    again = Scripted(say)
    made = make_data(TARGET, wanted, lambda chat: again)
    assert sorted(row.provenance["line"] for row in made) == list(range(1, 31))
    assert len(again.asked) <= 16


def test_more_of_the_same_later(tmp_path: Path) -> None:
    def made(number: int) -> Dataset:
        wanted = commission(tmp_path, conversations=number, concurrency=8)
        return make_data(TARGET, wanted, lambda chat: Scripted(lambda text: " " + talkers.utterance(text)))

    first = [CHAT.decode(row.ids.tolist()) for row in made(10)]
    both = [CHAT.decode(row.ids.tolist()) for row in made(25)]
    assert both[:10] == first and len(both) == len(set(both)) == 25
    with pytest.raises(UsageError, match="begun with seed 0, and now it is 1"):
        make_data(TARGET, commission(tmp_path, seed=1), lambda chat: Scripted(None))


def test_commissions_that_make_no_sense(tmp_path: Path) -> None:
    for changes in (
        {"keep_answers": True},
        {"conversations": None},
        {"conversations": 0},
        {"concurrency": 0},
        {"settings": {"temperatures": ()}},
        {"settings": {"temperatures": (-1.0,)}},
        {"settings": {"max_answer_tokens": 1}},
    ):
        with pytest.raises(UsageError):
            commission(tmp_path, **changes)
    assert not (tmp_path / "d").exists()


CHILD = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from training.test_making import TARGET, commission
from eyas.training.answering import EndpointAnswerer
from eyas.training.commission import make_data
url, folder, number = sys.argv[1:]
wanted = commission(Path(folder), conversations=int(number), concurrency=8)
make_data(TARGET, wanted, lambda chat: EndpointAnswerer(url, chat, retries=0))
"""


def start(url: str, folder: Path, number: int) -> subprocess.Popen:
    code = CHILD.format(tests=str(Path(__file__).parents[1]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, url, str(folder), str(number)], env=environment)


def items(folder: Path) -> Sequence[str]:
    return [item for shard in Dataset.open(folder)._shards for item in shard.done]


def test_killed_and_resumed_is_as_if_it_had_never_been_killed(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    folder = tmp_path / "killed" / "d"
    with talkers.serving(TOKENIZER) as server:
        server.delay = 0.02
        for pieces in (5, 20):
            child = start(server.url, tmp_path / "killed", 60)
            journal, deadline = folder / "data-00000.jsonl", time.monotonic() + 60
            while not (journal.is_file() and journal.read_bytes().count(b"\n") >= pieces):
                assert time.monotonic() < deadline and child.poll() is None
                time.sleep(0.005)
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert start(server.url, tmp_path / "killed", 60).wait(60) == 0
        server.delay = 0
        whole = make_data(
            TARGET, commission(tmp_path, conversations=60), lambda chat: EndpointAnswerer(server.url, chat)
        )
    killed = Dataset.open(folder)
    assert len(killed) == len(whole) == 60
    done = items(folder)
    assert len(done) == len(set(done))

    def common(data: Dataset) -> dict[str, str]:
        return {CHAT.decode(row.ids.tolist()): row.provenance["kind"] for row in data}

    # which conversations are the last ones depends on who answers first, and nothing else may
    assert len(common(killed)) == 60 and len(common(killed).keys() & common(whole).keys()) >= 50


def test_the_engine_answers_as_it_does_elsewhere(tmp_path: Path) -> None:
    from cli import tiny
    from zoo import case

    from eyas.engine.llm import LLM
    from eyas.training.answering import EngineAnswerer

    llm = LLM(case("llama").model, tiny.tokenizer(), context_length=200, max_running_requests=4, name="tiny")
    file = jsonl(tmp_path, *({"prompt": f"w{n} w{n + 3} w{2 * n + 5}"} for n in range(3, 10)))
    wanted = commission(
        tmp_path,
        conversations=None,
        prompts=file,
        settings={"temperatures": (0.0,), "max_answer_tokens": 12, "max_length": 64},
    )
    made = make_data(Described.of(llm), wanted, lambda chat: EngineAnswerer(llm))
    assert len(made) == 7
    for row in made:
        prompt = row.ids[~row.mask].tolist()
        assert prompt == llm.encode([{"role": "user", "content": row.provenance["prompt"]}])[0]
        assert row.ids[row.mask].tolist() == llm.generate(prompt, max_tokens=12).token_ids


def test_a_target_is_described_without_its_weights(tmp_path: Path) -> None:
    from cli import tiny

    folder = tiny.save(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    found = Described.read(str(folder))
    assert found.vocab_size == 160 and found.end_ids == (found.tokenizer.eos_token_id,)
    assert answering.base_url("h:1") == "http://h:1/v1"
