"""``eyas bench``: exit codes that a pipeline can go by, what is shown, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import made, profilers, served
from bench.servers import Server, serving
from bridges.launching import engine

from eyas.bench.passes import Level

AT = [Level("concurrency", n) for n in (1, 8)]
QUICK = ("--task", "chat", "--concurrency", 1, "--num-prompts", 1, "--output-len", 8, "--warmup", 0)


def saved(path, gains, **more):
    path.write_text(json.dumps(made.results(made.pairs(AT, gains, **more))))
    return path


@pytest.mark.parametrize(
    ("plain", "fast", "code", "word"),
    [
        ({"pause": 0.02}, {"pause": 0.02, "burst": 4}, 0, "PAYS"),
        ({"pause": 0.002}, {"pause": 0.08, "burst": 2}, 4, "DOES NOT PAY"),
    ],
)
def test_servers(eyas, tmp_path, plain, fast, code, word):
    with serving(Server(**plain)) as a, serving(Server(**fast)) as b:
        ran = eyas(
            "bench",
            "--without",
            a.url,
            "--with",
            b.url,
            *QUICK,
            "--rounds",
            6,
            "--out",
            tmp_path / "r.json",
            "--report",
        )
    assert ran.code == code, ran.err
    assert ran.out.splitlines()[0] == word and f"{b.url}" not in ran.out.splitlines()[1]
    assert "round 6 of 6" in ran.err and "Traceback" not in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.jsonl"]
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["provenance"]["packages"]["torch"] and results["settings"]["rounds"] == 6
    assert results["verdict"]["exit_code"] == code


def test_a_rate_of_arrival_and_a_dataset(eyas, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one two"}\nbroken\n')
    with serving(Server()) as a, serving(Server(burst=4)) as b:
        sides = ("--base-url-a", a.url + "/v1", "--base-url-b", b.url)
        load = ("--request-rate", 50, "--dataset", file, "--num-prompts", 3, "--output-len", 8, "--rounds", 2)
        ran = eyas("bench", *sides, *load, "--warmup", 0, "--out", tmp_path / "r.json", "--format", "json")
    assert ran.code == 3 and "1 not JSON (line 2)" in ran.err
    (results,) = ran.records
    assert (
        results["rows"][0]["level"] == {"kind": "request rate", "value": 50.0} and results["rows"][0]["task"] == "mine"
    )


def test_the_embedded_engine(eyas, target, drafter, tmp_path):
    pair = ("bench", target, "--drafter", drafter, "--out", tmp_path / "r.json", "--format", "md")
    load = ("--concurrency", "1,2", "--task", "translation", "--rounds", 1, "--num-prompts", 2, "--warmup", 0)
    ran = eyas(*pair, *load, "--output-len", 4)
    assert ran.code == 3, ran.err
    assert ran.out.startswith("### Speculation: not shown") and "| 2 | translation | not shown |" in ran.out
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 4
    assert results["rows"][0]["acceptance"]["steps"] > 0 and results["rows"][0]["step"]["measured"]


@pytest.mark.parametrize("knows", [True, False])
def test_an_engine_is_profiled(eyas, target, drafter, tmp_path, monkeypatch, knows):
    """When everything is measured and written; not at all where the engine could not be, which is said first."""
    place = engine(tmp_path / "vllm", "vllm")
    (place / "vllm/entrypoints/cli/main.py").write_text(Path(served.__file__).read_text())
    if knows:
        profilers.with_config(place)
    tests = Path(__file__).parents[1]
    more = {"ACT": "acted", "PYTHONPATH": f"{place}:{tests}", "EYAS_CACHE": tmp_path / "cache"}
    for name, value in more.items():
        monkeypatch.setenv(name, str(value))
    flags = ("--engine", "vllm", "--no-check", "--share-gpus", "--side-by-side", "--profile", "--format", "md")
    load = (*QUICK, "--concurrency", "1,8", "--rounds", 1)
    ran = eyas("bench", target, "--drafter", drafter, *flags, *load, "--out", tmp_path / "r.json")
    if not knows:
        ran.failed(2, "has neither ProfilerConfig nor VLLM_TORCH_PROFILER_DIR: leave out --profile")
        assert not (tmp_path / "r.json").exists()
        return
    assert ran.code == 3, ran.err
    assert ran.err.index("round 1 of 1") < ran.err.index("profiling without speculation at concurrency 1")
    results = json.loads((tmp_path / "r.json").read_text())
    assert [entry["level"]["value"] for entry in results["profile"]] == [1, 8]
    assert "| 8 | all-reduce | 0.515 ms (51.5%) | 0.515 ms (25.8%) |" in ran.out
    ran = eyas("bench", "--show", tmp_path / "r.json", "--report")
    assert ran.code == 3 and "0.515 ms (51.5%)" in ran.out and "0.515 ms (51.5%)" in (tmp_path / "r.html").read_text()


def test_results_are_shown_again(eyas, tmp_path):
    file = saved(tmp_path / "r.json", [1.5, 1.2], tasks=("chat", "code"))
    ran = eyas("bench", "--show", file, "--report")
    assert ran.code == 0 and ran.out.startswith("PAYS\nSpeculation pays at every concurrency measured: 1.")
    same = "answers (100.0%) are the same on both sides"
    for words in ("break-even concurrency: above 8", same, "Latency in ms, p50"):
        assert words in ran.out
    assert max(map(len, ran.out.splitlines()[2:12])) <= 110 and (tmp_path / "r.html").exists()
    assert eyas("bench", "--show", saved(tmp_path / "s.json", [1.5, 0.8])).code == 4
    assert eyas("bench", "--show", saved(tmp_path / "t.json", [1.5, 1.2], rounds=3), "--format", "md").code == 3


def test_two_results(eyas, tmp_path):
    files = saved(tmp_path / "a.json", [1.5, 1.2]), saved(tmp_path / "b.json", [1.5, 1.4])
    ran = eyas("bench", "--compare", *files)
    assert ran.code == 0 and "(intervals overlap)" in ran.out and "+" in ran.out
    assert eyas("bench", "--compare", *files, "--format", "md").out.startswith("| level | task |")
    assert [r["level"] for r in eyas("bench", "--compare", *files, "--format", "json").records] == [
        "concurrency 1",
        "concurrency 8",
    ]


def test_refused_and_failed(eyas, tmp_path):
    with serving(Server(burst=2)) as a, serving(Server(burst=2)) as b:
        sides = ("bench", "--without", a.url, "--with", b.url, "--out", tmp_path / "r.json")
        eyas(*sides).failed(1, "speculates itself")
    eyas(*sides).failed(1, "cannot be reached", "is the server running?")
    eyas("bench", "--show", tmp_path / "none.json").failed(1, "cannot be read")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Name a TARGET, or two servers"),
        (("--with", "http://a"), "Name a TARGET, or two servers"),
        (("m", "--with", "http://a"), "excludes servers"),
        (("--without", "a", "--with", "b", "--drafter", "d"), "--drafter is for TARGET"),
        (
            ("--without", "a", "--with", "b", "--speculative-num-steps", "3"),
            "are for TARGET: servers were launched with",
        ),
        (("--without", "a", "--with", "b", "--dtype", "float32"), "are for TARGET: servers were launched with"),
        (("m", "--drafter", "d", "--completions"), "are for servers"),
        (("--without", "a", "--with", "b", "--concurrency", "4,4"), "different whole numbers above 0"),
        (("--without", "a", "--with", "b", "--concurrency", "0"), "whole numbers above 0"),
        (("--without", "a", "--with", "b", "--request-rate", "nan"), "numbers above 0"),
        (("--without", "a", "--with", "b", "--concurrency", "1", "--request-rate", "1"), "exclude each other"),
        (("--without", "a", "--with", "b", "--resume"), "name it with --out"),
        (("--without", "a", "--with", "b", "--out", "x.txt"), "--out ends in .json"),
        (("--without", "a", "--with", "b", "--rounds", "0"), "--rounds must be at least 1"),
        (("--without", "a", "--with", "b", "--task", "poems"), "no built-in prompts for 'poems'"),
        (("--without", "ftp://a", "--with", "b"), "An endpoint is an address"),
        (("--without", "a", "--with", "b", "--format", "xml"), "--format is text, md or json"),
        (("--without", "a", "--with", "b", "--resume", "--out", "none.json"), "nothing to resume: none.jsonl does not"),
        (("./nothing",), "no drafter comes with Eyas for ./nothing: name one with --drafter"),
        (("m", "--", "--tp", "2"), "are for --engine vllm or sglang"),
        (("--engine", "vllm", "--", "--tp", "2"), "launches a TARGET: name it"),
        (("m", "--engine", "vllm", "--drafter", "d", "--dtype", "float32"), "its own stand behind --"),
        (("m", "--engine", "vllm", "--drafter", "d", "--without", "http://a"), "excludes servers"),
        (("m", "--engine", "sglang", "--drafter", "untrained"), "needs a drafter of files"),
        (("m", "--drafter", "d", "--one-at-a-time"), "are for --engine"),
        (("m", "--drafter", "d", "--speculation", "off"), "leaves nothing to compare"),
        (("m", "--drafter", "d", "--profile"), "--profile is for --engine vllm or sglang"),
        (("--without", "a", "--with", "b", "--profile"), "--profile is for --engine vllm or sglang"),
        (("m", "--engine", "vllm", "--drafter", "d", "--profile", "--request-rate", "1"), "it needs --concurrency"),
    ],
)
def test_bad_usage(eyas, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    eyas("bench", *flags).failed(2, words)
    assert not list(tmp_path.iterdir())


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys, eyas, eyas.cli.main, eyas.bench.verdict, eyas.bench.report, eyas.bench.client\n"
        "print([name for name in ('scipy', 'matplotlib', 'httpx', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
