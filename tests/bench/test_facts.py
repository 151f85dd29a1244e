"""What servers say of themselves, in the words of SGLang 0.5.9, vLLM 0.32 and Eyas."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from bench.servers import Server, serving

from eyas.bench.client import Endpoint
from eyas.bench.facts import (
    SIMULATED,
    Facts,
    Told,
    differences,
    facts_of,
    flags_of,
    model_differences,
    process_of,
    told,
)
from eyas.bench.provenance import no_secrets
from eyas.core import DraftShape, UsageError

SGLANG = {
    "model_path": "/models/kimi",
    "context_length": 65536,
    "max_running_requests": None,
    "quantization": "w4afp8",
    "attention_backend": "triton",
    "speculative_algorithm": None,
    "port": 30000,
    "sampling_defaults": "model",
    "load_format": "auto",
    "version": "0.5.9",
    "internal_states": [{"effective_max_running_requests_per_dp": 2048}],
}
SPECULATING = SGLANG | {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "attention_backend": "flashinfer",
    "port": 30001,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
}
CARD = {"id": "kimi", "owned_by": "sglang", "root": "kimi", "max_model_len": 65536}
VLLM_CARD = {"id": "m", "owned_by": "vllm", "root": "/models/m", "max_model_len": 4096}
COUNTERS = 'vllm:spec_decode_num_drafts_total{model_name="m"} 0.0\n'
DRAFTS = {"method": "eagle3", "num_speculative_tokens": 5}


def test_sglang():
    plain, fast = (facts_of("here", Told(CARD, info)) for info in (SGLANG, SPECULATING))
    assert (plain.engine, plain.version, plain.model, plain.served) == ("SGLang", "0.5.9", "/models/kimi", "kimi")
    assert (plain.context_length, plain.max_running_requests, plain.speculates) == (65536, 2048, False)
    assert (fast.max_running_requests, fast.speculates, fast.shape) == (48, True, DraftShape(3, 1, 4))
    assert plain.sampling == {"sampling_defaults": "model"} and not plain.simulated
    assert differences(plain, fast) == ["attention_backend 'triton' without, 'flashinfer' with"]
    assert any(SIMULATED in note for note in plain.notes), "what HTTP does not tell is said"


@pytest.mark.parametrize(
    ("told", "evidence"),
    [
        (Told(CARD, SPECULATING, simulated="3.5"), f"{SIMULATED}=3.5"),
        (Told(CARD, SPECULATING | {"internal_states": [{"env_vars": {SIMULATED: "2"}}]}), f"{SIMULATED}=2"),
        (Told(CARD, SPECULATING | {"load_format": "dummy"}), "random"),
        (
            Told(VLLM_CARD, {"vllm_config": {"speculative_config": DRAFTS | {"rejection_sample_method": "synthetic"}}}),
            "synthetic",
        ),
        (
            Told(VLLM_CARD, {"vllm_config": {"speculative_config": DRAFTS | {"synthetic_acceptance_rate": 0.7}}}),
            "synthetic_acc",
        ),
        (Told(CARD, SPECULATING, simulated="-1"), ""),
        (Told(CARD, SPECULATING, simulated="nonsense"), ""),
    ],
)
def test_simulated_acceptance(told, evidence):
    found = facts_of("here", told).simulated
    assert (evidence in found) if evidence else found == ""


def test_vllm_from_its_metrics_and_its_command_line():
    assert facts_of("here", Told(VLLM_CARD, metrics="vllm:generation_tokens_total 1\n")).speculates is False
    assert facts_of("here", Told(VLLM_CARD, metrics=COUNTERS)).speculates is True
    command = ("python", "/bin/vllm", "serve", "/models/m", "--max-num-seqs", "16", "--speculative-config")
    fast = facts_of("here", Told(VLLM_CARD, command=(*command, '{"method": "eagle3", "num_speculative_tokens": 5}')))
    assert (fast.max_running_requests, fast.speculates, fast.shape) == (16, True, DraftShape(5, 1, 6))
    dotted = flags_of(("vllm", "serve", "m", "--speculative-config.num_speculative_tokens=2"))
    assert dotted["speculative_config"] == {"num_speculative_tokens": 2}
    assert flags_of(("vllm", "--sc", "{broken")) is None
    assert "cannot be read" in facts_of("here", Told(VLLM_CARD, command=("vllm", "--sc", "{broken"))).notes[-1]


def test_vllm_in_development_mode():
    config = {
        "model_config": {"model": "/models/m", "max_model_len": 2048, "dtype": "bfloat16", "quantization": None},
        "scheduler_config": {"max_num_seqs": 256},
        "parallel_config": {"tensor_parallel_size": 2},
        "speculative_config": DRAFTS,
    }
    found = facts_of("here", Told(VLLM_CARD, {"vllm_config": config}, version="0.32"))
    assert (found.model, found.context_length, found.max_running_requests) == ("/models/m", 2048, 256)
    assert found.speculates and found.settings["tp_size"] == 2 and found.version == "0.32"


def test_weights_that_are_made_up_are_found_in_development_mode():
    config = {"load_config": {"load_format": "dummy"}, "model_config": {"quantization": None}}
    found = facts_of("here", Told(VLLM_CARD, {"vllm_config": config}))
    assert "random" in found.simulated and found.settings["quantization"] is None


def by_command(*flags: str) -> Facts:
    return facts_of("here", Told(VLLM_CARD, command=("python", "/bin/vllm", "serve", "/models/m", *flags)))


def test_a_flag_that_only_one_command_line_has_is_a_difference():
    one, other = by_command("--port", "1", "-tp", "2"), by_command("--port", "2", "--tensor-parallel-size", "2")
    assert differences(one, other) == [] and one.settings["tp_size"] == other.settings["tp_size"] == 2
    eager = by_command("-tp", "4", "--enforce-eager", "--speculative-config", '{"num_speculative_tokens": 2}')
    assert differences(one, eager) == ["enforce_eager not given without, True with"]
    assert model_differences(one, eager) == ["tp_size"]


def test_what_counts_and_what_does_not_between_two_servers():
    plain = facts_of("here", Told(CARD, SGLANG | {"num_continuous_decode_steps": 1, "num_running_reqs": 3}))
    fast = facts_of("here", Told(CARD, SPECULATING | {"num_continuous_decode_steps": 4, "num_running_reqs": 5}))
    assert differences(plain, fast)[1:] == ["num_continuous_decode_steps 1 without, 4 with"]


def test_secrets_stay_where_they_are():
    secrets = {"admin_api_key": "s3cret", "ssl_keyfile_password": "s3cret", "launch_command": "x --api-key s3cret"}
    found = facts_of("http://me:s3cret@h:1", Told(CARD, SGLANG | secrets | {"nested": {"hf_token": "s3cret"}}))
    assert found.where == "http://h:1" and "s3cret" not in str(found.as_record())
    assert "s3cret" not in str(by_command("--hf-token", "s3cret").as_record())
    assert found.settings["attention_backend"] == "triton"


def test_no_secret_is_in_a_command_that_is_passed_on():
    keys = ("--api-key", "s3cret", "s3cret too", "--hf-token=s3cret", "--with", "http://me:s3cret@h:1/v1")
    told = no_secrets(("eyas", "bench", "m", "--speculative-num-draft-tokens", "4", "--", *keys))
    assert told[:5] == ["eyas", "bench", "m", "--speculative-num-draft-tokens", "4"]
    assert told[5:] == ["--", "--api-key", "***", "***", "--hf-token=***", "--with", "http://h:1/v1"]


def test_what_another_launch_would_tell_again():
    again = SGLANG | {"port": 4, "random_seed": 9, "max_total_num_tokens": 5}
    one, other = facts_of("http://h:3", Told(CARD, SGLANG)), facts_of("http://h:4", Told(CARD, again))
    assert one.lasting() == other.lasting() != facts_of("http://h:4", Told(CARD, again | {"dtype": "half"})).lasting()


def test_eyas():
    card = {"id": "smollm2", "owned_by": "eyas", "root": "smollm2", "max_model_len": 8192}
    info = {"model_path": "smollm2", "speculation": "auto", "speculative_num_steps": 5, "speculative_eagle_topk": 1}
    info |= {"speculative_num_draft_tokens": 6, "max_running_requests": 32}
    found = facts_of("here", Told(card, info))
    assert (found.engine, found.speculates, found.shape, found.max_running_requests) == ("Eyas", True, DraftShape(), 32)
    assert facts_of("here", Told(card, info | {"speculation": "off"})).speculates is False


def test_what_a_server_does_not_say_stays_unknown():
    found = facts_of("here", Told({"id": "gpt"}))
    assert (found.engine, found.model, found.speculates, found.context_length) == ("unknown", None, None, None)
    assert "whether it speculates is not told" in found.notes


def test_asking_a_server():
    async def run(server: Server, model: str | None = None) -> Told:
        endpoint = Endpoint(server.url, model=model)
        try:
            return await told(endpoint)
        finally:
            await endpoint.close()

    with serving(Server(info=SGLANG, card=CARD)) as server:
        found = asyncio.run(run(server))
        assert found.info == SGLANG and "generation_tokens" in found.metrics and found.model["root"] == "kimi"
        assert found.command is not None and found.simulated is None, "its process is this one"
    with serving(Server(names=("a", "b"))) as server:
        with pytest.raises(UsageError, match=r"serves 2 models \(a, b\): say which with --model"):
            asyncio.run(run(server))
        with pytest.raises(UsageError, match="does not serve 'c' but a, b"):
            asyncio.run(run(server, "c"))
        assert asyncio.run(run(server, "b")).info == {}


def test_the_environment_of_a_server_on_this_machine():
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    )
    command = [sys.executable, "-c", code, "--max-running-requests", "7"]
    with subprocess.Popen(command, env=os.environ | {SIMULATED: "2.5"}, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            arguments, simulated = process_of(f"http://127.0.0.1:{int(child.stdout.readline())}")
        finally:
            child.kill()
    assert simulated == "2.5" and arguments[-2:] == ("--max-running-requests", "7")
    assert process_of("http://127.0.0.1:9") == (None, None)
