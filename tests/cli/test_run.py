"""``eyas run`` on one prompt: what goes in, what comes out, and where."""

from __future__ import annotations

import io
import sys

import pytest
from cli import tiny
from PIL import Image
from zoo import IMAGE

from eyas.cli import run as run_module
from eyas.core import DraftShape
from eyas.engine.memory import Memory

ASK = ("w5 w9 w77", "--max-tokens", "12")
FIXED = ("--speculation", "fixed")
FIELDS = {
    "prompt", "seed", "text", "token_ids", "finish_reason", "prompt_tokens", "tokens_per_second", "acceptance_length",
    "acceptance_rates", "steps", "drafted", "first_token_seconds", "seconds",
}  # fmt: skip


def record(ran):
    assert ran.code == 0, ran.err
    (only,) = ran.records
    return only


# What comes out


def test_the_answer_alone_is_on_stdout(eyas, target):
    plain = eyas("run", target, *ASK, "--drafter", "none")
    fast = eyas("run", target, *ASK, "--drafter", "untrained", *FIXED)
    assert plain.code == fast.code == 0
    assert plain.out == fast.out
    assert len(plain.out.split()) == 12 and plain.out.endswith("\n") and plain.out.count("\n") == 1
    for shown in ("tokens/s", "first token", "12 (cut off: --max-tokens)"):
        assert shown in plain.err and shown in fast.err
    assert "acceptance" not in plain.err
    assert "acceptance length" in fast.err and "acceptance rate" in fast.err and "draft tokens" in fast.err
    assert "seed" not in fast.err


def test_a_terminal_gets_the_answer_and_a_spinner(eyas, target, monkeypatch):
    piped = eyas("run", target, *ASK, "--drafter", "untrained")
    assert "\x1b" not in piped.err and "reading" not in piped.err
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for stdout_too in (False, True):  # what is printed while the spinner turns stays on stdout
        monkeypatch.setattr(sys.stdout, "isatty", lambda stdout_too=stdout_too: stdout_too)
        shown = eyas("run", target, *ASK, "--drafter", "untrained")
        assert shown.out == piped.out
        assert "loading" in shown.err and "\x1b[?25l" in shown.err  # a line that is drawn over and over
        assert ("decoding" in shown.err) != stdout_too


def test_json(eyas, target):
    ran = eyas("run", target, *ASK, "--drafter", "untrained", *FIXED, "--json")
    found = record(ran)
    assert found.keys() == FIELDS
    assert found["prompt"] == ASK[0] and found["prompt_tokens"] == 5  # user, three words, assistant
    assert len(found["token_ids"]) == 12 and found["finish_reason"] == "length"
    assert found["steps"] > 0 and found["drafted"] >= found["steps"]
    assert found["acceptance_length"] >= 1 and all(0 <= rate <= 1 for rate in found["acceptance_rates"])
    assert found["seconds"] >= found["first_token_seconds"] > 0
    assert "tokens/s" not in ran.err


def test_a_drafter_from_disk(eyas, target, drafter):
    plain = record(eyas("run", target, *ASK, "--drafter", "none", "--json"))
    for place in (drafter, drafter / "model.safetensors"):
        found = record(eyas("run", target, *ASK, "--drafter", place, *FIXED, "--json"))
        assert found["token_ids"] == plain["token_ids"] and found["steps"] > 0


def test_how_much_is_drafted_changes_no_token(eyas, target, drafter):
    plain = record(eyas("run", target, *ASK, "--drafter", "none", "--json"))
    for how in ("auto", "fixed", "off"):
        found = record(eyas("run", target, *ASK, "--drafter", drafter, "--speculation", how, "--json"))
        assert found["token_ids"] == plain["token_ids"]
        assert {"fixed": found["steps"] > 0, "off": found["steps"] == 0}.get(how, True)


@pytest.mark.parametrize("how", [["--no-speculation"], ["--speculation", "off"]], ids=str)
def test_no_speculation_decodes_plainly(eyas, target, drafter, how):
    for args in (["--drafter", drafter], []):
        ran = eyas("run", target, *ASK, *args, *how, "--json")
        assert record(ran)["steps"] == 0
        assert "note" not in ran.err


# Drafters that come with Eyas


def test_a_missing_drafter_is_said(eyas, target):
    ran = eyas("run", target, *ASK, "--json")
    assert record(ran)["steps"] == 0
    assert f"note: no trained drafter is there yet for {target}: decoding plainly" in ran.err


def test_the_shipped_drafter_is_the_default(eyas, target, drafter, monkeypatch, tmp_path):
    (tmp_path / "drafters").symlink_to(drafter.parent)
    monkeypatch.setattr("eyas.drafter.shipped.ROOTS", (tmp_path,))
    monkeypatch.setattr("eyas.drafter.shipped.SHIPPED", {str(target): drafter.name})
    ran = eyas("run", target, *ASK, *FIXED, "--json")
    assert record(ran)["steps"] > 0
    assert "note" not in ran.err


# Where the prompt comes from


def test_the_prompt_from_stdin(eyas, target):
    told = record(eyas("run", target, *ASK, "--json", "--drafter", "none"))
    for args in (["-"], []):
        read = record(
            eyas("run", target, *args, "--max-tokens", 12, "--json", "--drafter", "none", stdin="w5 w9 w77\n")
        )
        assert read["token_ids"] == told["token_ids"] and read["prompt"] == told["prompt"]


def test_a_prompt_beats_stdin(eyas, target):
    assert record(eyas("run", target, *ASK, "--json", stdin="w8"))["prompt"] == ASK[0]


def test_messages_or_the_text_as_it_is(eyas, target, tmp_path):
    assert record(eyas("run", target, *ASK, "--json", "--system", "w3 w4"))["prompt_tokens"] == 8
    assert record(eyas("run", target, *ASK, "--json", "--raw"))["prompt_tokens"] == 3
    without = tiny.save(tmp_path / "base", template=None)
    assert record(eyas("run", without, *ASK, "--json"))["prompt_tokens"] == 3
    eyas("run", without, *ASK, "--system", "w3").failed(2, "no chat template")


# Sampling


def test_sampling_flags_arrive(eyas, target, monkeypatch):
    seen = {}
    monkeypatch.setattr(run_module, "answer", lambda llm, printer, params, *rest, **more: seen.update(params=params))
    given = {
        "temperature": 0.7, "top_k": 11, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 12, "max_tokens": 9, "logprobs": 2,
    }  # fmt: skip
    args = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    ran = eyas("run", target, "w5", *args, "--stop", "w7", "--stop", "w8 w9", "--ignore-eos", "--json")
    assert ran.code == 0
    params = seen["params"]
    assert {name: getattr(params, name) for name in given} == given
    assert params.stop == ("w7", "w8 w9") and params.ignore_eos


def test_the_same_seed_is_the_same_text_with_and_without_speculation(eyas, target):
    sampled = ("run", target, *ASK, "--temperature", 1, "--json")
    told = record(eyas(*sampled, "--seed", 5, "--drafter", "untrained"))
    again = record(eyas(*sampled, "--seed", 5, "--drafter", "none"))
    other = record(eyas(*sampled, "--drafter", "none"))
    assert told["token_ids"] == again["token_ids"] and told["seed"] == 5
    assert other["token_ids"] != told["token_ids"] and other["seed"] != 5
    assert "seed" in eyas("run", target, *ASK, "--temperature", 1).err


def test_stop_and_logprobs(eyas, target):
    whole = record(eyas("run", target, *ASK, "--json", "--logprobs", 2))
    word = whole["text"].split()[4]
    stopped = record(eyas("run", target, *ASK, "--json", "--stop", word))
    assert stopped["finish_reason"] == "stop" and stopped["text"] == whole["text"].partition(word)[0]
    assert [entry["token_id"] for entry in whole["logprobs"]] == whole["token_ids"]
    for entry in whole["logprobs"]:
        assert entry["logprob"] < 0 and len(entry["top"]) == 2
        assert entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}
    assert "logprobs" not in stopped


# Draft shapes


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((), None),
        ((3, None, None), DraftShape(3, 1, 4)),
        ((None, None, 4), DraftShape(3, 1, 4)),
        ((None, 1, None), DraftShape(5, 1, 6)),
        ((None, 4, None), DraftShape(5, 4, 8)),
        ((9, 4, None), DraftShape(9, 4, 10)),
        ((1, 2, None), DraftShape(1, 2, 3)),
        ((None, 4, 4), DraftShape(3, 4, 4)),
        ((None, 8, 60), DraftShape(5, 8, 60)),
        ((2, 2, 7), DraftShape(2, 2, 7)),
    ],
)
def test_draft_shapes(eyas, target, monkeypatch, given, shape):
    seen = {}
    monkeypatch.setattr(
        "eyas.cli.options.LoadingFlags.load", lambda self, target, drafter, shape, *_, **__: seen.update(shape=shape)
    )
    monkeypatch.setattr(run_module, "make_printer", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "answer", lambda *_, **__: None)
    names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    args = [part for name, value in zip(names, given, strict=False) if value is not None for part in (name, value)]
    assert eyas("run", target, "w5", *args).code == 0
    assert seen["shape"] == shape


def test_a_tree_decodes_the_same(eyas, target):
    plain = record(eyas("run", target, *ASK, "--drafter", "none", "--json"))
    tree = record(
        eyas("run", target, *ASK, "--drafter", "untrained", "--speculative-eagle-topk", 3, "--json", "--debug")
    )
    assert tree["token_ids"] == plain["token_ids"] and tree["drafted"] > 5 * 7


# Loading


def test_loading_flags_arrive(eyas, target, monkeypatch):
    seen = {}

    def load(name, drafter, **settings):
        seen.update(settings, name=name, drafter=drafter)

    monkeypatch.setattr("eyas.engine.llm.load", load)
    monkeypatch.setattr(run_module, "make_printer", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "answer", lambda *_, **__: None)
    given = {"dtype": "bfloat16", "device": "cpu", "context_length": 99, "attn_implementation": "eager"}
    args = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    args += ["--drafter-layer-ids", "2,15,27"]
    given["drafter_layer_ids"] = (2, 15, 27)
    assert eyas("run", target, "w5", "--drafter", "untrained", *args, "--trust-remote-code").code == 0
    given |= {"speculation": "auto", "chunked_prefill_size": None, "memory": Memory(0.85, None)}
    assert seen == {**given, "trust_remote_code": True, "shape": None, "name": str(target), "drafter": "untrained"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {"speculation": "auto"}),
        (["--speculative-num-steps", "3"], {"speculation": "fixed"}),
        (["--compare"], {"speculation": "fixed"}),
        (["--compare", "--speculation", "auto"], {"speculation": "auto"}),
        (["--speculative-num-steps", "3", "--speculation", "auto"], {"speculation": "auto"}),
        (["--speculation", "off"], {"speculation": "off"}),
        (["--chunked-prefill-size", "33"], {"chunked_prefill_size": 33}),
        (["--kv-cache-gib", "0.5"], {"memory": Memory(kv_cache_gib=0.5)}),
        (["--mem-fraction-static", "0.5"], {"memory": Memory(mem_fraction_static=0.5)}),
    ],
    ids=str,
)
def test_engine_flags_arrive(eyas, target, monkeypatch, args, expected):
    seen = {}
    monkeypatch.setattr("eyas.engine.llm.load", lambda name, drafter, **settings: seen.update(settings))
    for name in ("make_printer", "answer", "compare_all"):
        monkeypatch.setattr(run_module, name, lambda *_, **__: True)
    ran = eyas("run", target, "w5", "--drafter", "untrained", *args)
    assert ran.code == 0, ran.err
    assert {name: seen[name] for name in expected} == expected


def test_memory_and_pieces_change_no_token(eyas, target):
    told = record(eyas("run", target, *ASK, "--drafter", "none", "--json"))
    for args in (["--chunked-prefill-size", "2"], ["--kv-cache-gib", "0.01"]):
        found = record(eyas("run", target, *ASK, "--drafter", "untrained", *FIXED, *args, "--json"))
        assert found["token_ids"] == told["token_ids"] and found["steps"] > 0


def test_too_little_memory_for_one_request(eyas, target):
    eyas("run", target, *ASK, "--kv-cache-gib", "0.00001").failed(2, "One request", "--kv-cache-gib")


def test_other_precision_and_attention(eyas, target):
    ran = eyas("run", target, *ASK, "--dtype", "bfloat16", "--attn-implementation", "eager", "--context-length", 64)
    assert ran.code == 0
    full = eyas("run", target, ASK[0], "--context-length", 10)
    assert "5 (cut off: the context is full)" in full.err


# Images


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return tiny.save_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    file = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.radial_gradient("L").convert("RGB").save(file)
    return file


def test_an_image_is_seen(eyas, seeing, picture, monkeypatch):
    asked = []
    complete = run_module.answer

    def spy(llm, *rest, **more):
        real = llm.complete
        llm.complete = lambda request, *others: (asked.append(request), real(request, *others))[1]
        complete(llm, *rest, **more)

    monkeypatch.setattr(run_module, "answer", spy)
    blind = record(eyas("run", seeing, *ASK, "--drafter", "none", "--json", "--raw"))
    plain = record(eyas("run", seeing, *ASK, "--drafter", "none", "--json", "--image", picture))
    fast = record(eyas("run", seeing, *ASK, "--drafter", "untrained", "--json", "--image", picture))
    twice = record(eyas("run", seeing, *ASK, "--drafter", "none", "--json", "--image", picture, "--image", picture))
    assert fast["token_ids"] == plain["token_ids"] != blind["token_ids"]
    assert [list(request.prompt_ids).count(IMAGE) for request in asked] == [0, 4, 4, 8]
    assert twice["prompt_tokens"] > plain["prompt_tokens"]


def test_images_that_cannot_be(eyas, target, seeing, picture, tmp_path):
    ask = ("run", seeing, "w5")
    eyas("run", target, "w5", "--image", picture).failed(2, "no image processor")
    eyas(*ask, "--image", tmp_path / "none.png").failed(2, "no image file", "local files only")
    eyas(*ask, "--image", "https://example.org/a.png").failed(2, "local files only")
    (tmp_path / "text.png").write_text("hello")
    eyas(*ask, "--image", tmp_path / "text.png").failed(2, "text.png is not an image")
    (tmp_path / "half.png").write_bytes(picture.read_bytes()[:300])
    eyas(*ask, "--image", tmp_path / "half.png").failed(2, "half.png is damaged")
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    eyas(*ask, "--image", tmp_path / "large.png").failed(2, "9000 x 9000 pixels, more than 50,000,000")
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    eyas(*ask, "--image", tmp_path / "bomb.png").failed(2, "bomb.png is too large")


# What cannot be


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["w5", "--chat", "--compare"], "exclude each other"),
        (["w5", "--compare", "--drafter", "none"], "--compare needs speculation"),
        (["w5", "--compare", "--no-speculation"], "--compare needs speculation"),
        (["w5", "--compare", "--speculation", "off"], "--compare needs speculation"),
        (["w5", "--speculation", "sometimes"], "--speculation is off, fixed or auto, got 'sometimes'"),
        (["w5", "--chunked-prefill-size", "0"], "--chunked-prefill-size must be at least 1"),
        (["w5", "--kv-cache-gib", "0"], "kv_cache_gib must be above 0, got 0"),
        (["w5", "--mem-fraction-static", "1.5"], "mem_fraction_static must be in (0, 1], got 1.5"),
        (["--compare", "--image", "a.png"], "needs a PROMPT"),
        (["w5", "--raw", "--chat"], "--raw needs a PROMPT"),
        (["w5", "--raw", "--system", "w6"], "--raw sends no messages"),
        (["w5", "--logprobs", "1"], "--json"),
        (["w5", "--temperature", "-1"], "temperature must be >= 0, got -1"),
        (["w5", "--temperature", "nan"], "temperature must be >= 0, got nan"),
        (["w5", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["w5", "--max-tokens", "0"], "max_tokens must be >= 1"),
        (["w5", "--stop", ""], "stop strings must not be empty"),
        (["w5", "--logprobs", "99", "--json"], "logprobs must be in [0, 20]"),
        (["w5", "--speculative-num-steps", "0"], "num_steps and eagle_topk must be >= 1"),
        (["w5", "--speculative-num-draft-tokens", "1"], "a chain: num_draft_tokens must be num_steps + 1 = 2"),
        (
            ["w5", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "9"],
            "eagle_topk 1 is a chain: num_draft_tokens must be num_steps + 1 = 4",
        ),
        (
            [
                "w5",
                "--speculative-num-steps",
                "1",
                "--speculative-eagle-topk",
                "2",
                "--speculative-num-draft-tokens",
                "9",
            ],
            "num_draft_tokens must be in [2, 3] for num_steps 1 and eagle_topk 2",
        ),
        ([""], "The prompt is empty"),
        ([" \n"], "The prompt is empty"),
        (["-"], "The prompt is empty"),
        ([], "The prompt is empty"),
        (["", "--raw"], "The prompt is empty"),
        (["w5 \udcff"], "not valid UTF-8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(eyas, args, words):
    eyas("run", "/no/such/target", *args).failed(2, words)


def test_bytes_that_are_no_text(eyas):
    eyas("run", "x", "-", stdin=b"w5 \xff").failed(2, "not valid UTF-8")


def test_stdin_may_be_closed(eyas, monkeypatch):
    monkeypatch.setattr(io, "TextIOWrapper", lambda *_: None)
    eyas("run", "x").failed(2, "no PROMPT, and stdin is closed")
    assert sys.stdin is None


def test_layer_ids_must_be_numbers(eyas, target):
    ran = eyas("run", target, "w5", "--drafter", "untrained", "--drafter-layer-ids", "2,x")
    assert ran.code == 2 and "--drafter-layer-ids takes numbers" in ran.err and "Traceback" not in ran.err
