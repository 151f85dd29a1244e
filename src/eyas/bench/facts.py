"""What a side says of itself: model, limits, sampling, speculation. What it does not say stays unknown.

SGLang tells its arguments at /server_info, vLLM only in its development mode; where a server runs on this machine, its
command line and the one variable that fakes SGLang's acceptance are read as well, for HTTP does not tell them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from eyas.bench.client import Endpoint, local
from eyas.bench.provenance import SECRET, no_password
from eyas.bridges.flags import read_flags
from eyas.core import DraftShape, UsageError

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
# Arguments that another launch of the same command changes.
VOLATILE = {
    *("acceptance", "policy", "num_running_reqs", "num_queue_reqs", "status", "startup_time", "uptime"),
    *("host", "port", "nccl_port", "dist_init_addr", "random_seed", "max_total_num_tokens", "max_req_input_len"),
}
# Of those that two sides may differ in, what cannot change how fast they are, or must differ, or is judged by itself.
APART = VOLATILE | {
    *("spec_config", "num_lookahead_slots", "drafter", "base_gpu_id", "served_model_name", "seed"),
    *("show_time_cost", "enable_metrics", "crash_dump_folder", "version"),
    *("max_running_requests", "max_queued_requests"),
}
ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "max_model_len": "context_length",
    "cache_dtype": "kv_cache_dtype",
    "q": "quantization",
    "sc": "speculative_config",
}
# What matters of vLLM's nested configuration.
VLLM = {
    "model": (
        *("model", "dtype", "quantization", "max_model_len", "enforce_eager"),
        *("override_generation_config", "generation_config"),
    ),
    "scheduler": ("max_num_seqs", "max_num_batched_tokens"),
    "cache": ("cache_dtype", "enable_prefix_caching"),
    "parallel": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "load": ("load_format",),
}
MODEL = ("revision", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size", "pp_size", "ep_size")


@dataclass(frozen=True)
class Facts:
    """None: unknown."""

    where: str  # without a password
    engine: str = "unknown"  # its name
    version: str | None = None
    model: str | None = None  # path or id of the weights
    served: str | None = None  # by this name
    context_length: int | None = None
    max_running_requests: int | None = None
    speculates: bool | None = None
    simulated: str = ""  # the evidence that acceptance is faked
    shape: DraftShape | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # its own arguments, as far as it tells them
    from_command: bool = False  # these are what its command line names: the others are as they are by default
    asked: str = ""  # in which way, beyond the sampling
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of its own
    notes: tuple[str, ...] = ()

    def lasting(self) -> dict[str, Any]:
        """What another launch of the same command would tell again."""
        told = self.as_record()
        for name in ("where", "settings", "notes"):
            del told[name]
        host = urlsplit(self.where).hostname or self.where
        return {n: v for n, v in self.settings.items() if n not in VOLATILE} | {"host": host, **told}

    def as_record(self) -> dict[str, Any]:
        return vars(self) | {"shape": vars(self.shape) if self.shape else None, "notes": list(self.notes)}


@dataclass(frozen=True)
class Told:
    """What the places where a server speaks of itself hold."""

    model: Mapping[str, Any]  # its entry in /v1/models
    info: Mapping[str, Any] = field(default_factory=dict)  # /server_info
    metrics: str = ""
    version: str | None = None
    command: tuple[str, ...] | None = None  # of its process, on this machine
    simulated: str | None = None  # SIMULATED in its environment there


async def told(endpoint: Endpoint) -> Told:
    """Asks a server. Raises UsageError where it serves several models and none was chosen."""
    models = await endpoint.models()
    names = [str(entry.get("id")) for entry in models]
    if endpoint.model is None and len(names) != 1:
        shown = ", ".join(names[:5]) or "none"
        raise UsageError(f"{endpoint.shown} serves {len(names)} models ({shown}): say which with --model.")
    if endpoint.model is not None and names and endpoint.model not in names:
        raise UsageError(f"{endpoint.shown} does not serve {endpoint.model!r} but {', '.join(names[:5])}.")
    endpoint.model = endpoint.model or names[0]
    info = await endpoint.json("/server_info?config_format=json") or await endpoint.json("/get_server_info") or {}
    version = (await endpoint.json("/version") or {}).get("version")
    command, simulated = process_of(endpoint.root) if local(endpoint.root) else (None, None)
    entry: dict[str, Any] = next((one for one in models if one.get("id") == endpoint.model), {"id": endpoint.model})
    return Told(entry, info, await endpoint.page("/metrics") or "", version, command, simulated)


def facts_of(where: str, told: Told) -> Facts:
    info, engine = told.info, _engine(told)
    flags = flags_of(told.command) if engine != "unknown" else {}
    settings = dict(info) or dict(flags or {})
    if isinstance(config := info.get("vllm_config"), Mapping):
        settings = _vllm_settings(config)
    unread = ("its command line cannot be read",) if flags is None else ()
    flags = flags or {}
    draft = _draft_config(settings, flags)
    speculates = _speculates(engine, told, settings, draft)
    return Facts(
        no_password(where),
        engine=engine,
        version=_string(info.get("version")) or told.version,
        model=_string(settings.get("model_path") or settings.get("model") or told.model.get("root")),
        served=_string(told.model.get("id")),
        context_length=_number(settings.get("context_length"), told.model.get("max_model_len")),
        max_running_requests=_running(info, settings, flags),
        speculates=speculates,
        simulated=_simulated(told, info, settings, draft),
        shape=_shape(settings, draft),
        settings=_public({name: value for name, value in settings.items() if name != "internal_states"}),
        from_command=bool(flags) and not info,
        sampling=_sampling(settings),
        notes=_notes(engine, told, speculates) + unread,
    )


def differences(one: Facts, other: Facts) -> list[str]:
    """Arguments of the same engine that differ, beyond speculation itself."""
    by_command = one.from_command and other.from_command
    names = {*one.settings, *other.settings} if by_command else {*one.settings} & {*other.settings}
    names -= APART | {*model_differences(one, other)}
    found = []
    for name in sorted(name for name in names if not name.startswith(("speculati", "log_"))):
        a, b = (repr(side.settings[name]) if name in side.settings else "not given" for side in (one, other))
        if a != b and len(a + b) < 200:
            found.append(f"{name} {a} without, {b} with")
    return found


def model_differences(one: Facts, other: Facts) -> list[str]:
    """Names of arguments by which the sides certainly do not run the same model in the same way.

    SGLang's are as they were given: None may be what the other side was told, read from the weights.
    """
    both = [name for name in MODEL if name in one.settings and name in other.settings]
    pairs = {name: (one.settings[name], other.settings[name]) for name in both}
    return [name for name, (a, b) in pairs.items() if a != b and (None not in (a, b) or one.engine != "SGLang")]


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _public(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if not name.lower().endswith(SECRET)
    }


# What it is


def _engine(told: Told) -> str:
    owner, command = str(told.model.get("owned_by", "")).lower(), " ".join(told.command or ())
    for name, sign in (("Eyas", "eyas"), ("SGLang", "sglang"), ("vLLM", "vllm")):
        if sign in owner or told.metrics.find(f"{sign}:") >= 0 or f"{sign} serve" in command:
            return name
    if "internal_states" in told.info:
        return "SGLang"
    return "vLLM" if "vllm_config" in told.info else "unknown"


def _vllm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nested configuration under the names of its flags, as far as they matter here."""
    found = {"speculative_config": config.get("speculative_config")}
    for part, names in VLLM.items():
        told = config.get(f"{part}_config") or {}
        found |= {ALIASES.get(name, name): told[name] for name in names if name in told}
    return {name: value for name, value in found.items() if value is not None or name == "quantization"}  # of no kind


def _draft_config(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM's --speculative-config, from wherever it is told."""
    found = settings.get("speculative_config") or flags.get("speculative_config")
    return found if isinstance(found, Mapping) else {}


def _speculates(engine: str, told: Told, settings: Mapping[str, Any], draft: Mapping[str, Any]) -> bool | None:
    if "speculation" in settings:  # Eyas
        return settings["speculation"] != "off" and settings.get("speculative_num_steps") is not None
    if draft or settings.get("speculative_algorithm") or settings.get("speculative_draft_model_path"):
        return True
    if "speculative_algorithm" in settings:  # and it is nothing
        return False
    if "vllm:spec_decode_num_drafts_total" in told.metrics:
        return True
    if engine == "vLLM" and ("vllm_config" in told.info or "vllm:" in told.metrics):  # which has counters if it does
        return False
    return None


def _simulated(told: Told, info: Mapping[str, Any], settings: Mapping[str, Any], draft: Mapping[str, Any]) -> str:
    states = info.get("internal_states")
    exposed = [s.get("env_vars") or {} for s in states if isinstance(s, Mapping)] if isinstance(states, list) else []
    for value in (told.simulated, *(e.get(SIMULATED) for e in exposed if isinstance(e, Mapping))):
        if _positive(value):
            return f"{SIMULATED}={value}"
    if draft.get("rejection_sample_method") == "synthetic":
        return 'vLLM\'s rejection_sample_method is "synthetic"'
    if synthetic := [name for name, value in draft.items() if name.startswith("synthetic_") and value is not None]:
        return f"vLLM's --speculative-config has {synthetic[0]}"
    if settings.get("load_format") == "dummy":
        return "the weights are random (--load-format dummy)"
    return ""


def _running(info: Mapping[str, Any], settings: Mapping[str, Any], flags: Mapping[str, Any]) -> int | None:
    """How many requests it runs at a time: what SGLang's schedulers really do, else what was asked for."""
    states = info.get("internal_states")
    if isinstance(states, list):
        counts = [_number(s.get("effective_max_running_requests_per_dp")) for s in states if isinstance(s, Mapping)]
        if counts and all(counts):
            return sum(count for count in counts if count)
    return _number(*(told.get(n) for told in (settings, flags) for n in ("max_running_requests", "max_num_seqs")))


def _shape(settings: Mapping[str, Any], draft: Mapping[str, Any]) -> DraftShape | None:
    from eyas.bridges.sglang.metrics import draft_shape

    tokens = draft.get("num_speculative_tokens")
    try:
        return DraftShape(tokens, 1, tokens + 1) if isinstance(tokens, int) else draft_shape(settings)
    except (UsageError, ValueError):
        return None


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = ("preferred_sampling_params", "sampling_defaults", "override_generation_config", "generation_config")
    return {name: settings[name] for name in names if settings.get(name)}


def _notes(engine: str, told: Told, speculates: bool | None) -> tuple[str, ...]:
    notes = []
    if speculates is None:
        notes.append("whether it speculates is not told")
    if engine == "SGLang" and told.command is None:
        notes.append(f"its environment cannot be seen from here: make sure that {SIMULATED} is not set there")
    if engine == "vLLM" and "vllm_config" not in told.info and told.command is None:
        notes.append("its limits are not told (VLLM_SERVER_DEV_MODE=1 would tell them): check --max-num-seqs yourself")
    return tuple(notes)


# Its process


def process_of(root: str) -> tuple[tuple[str, ...] | None, str | None]:
    """The command line of whoever listens at this port of this machine, and what fakes SGLang's acceptance there.

    (None, None) where there is none to see: it may be another user's, or in a container.
    """
    import psutil

    port = urlsplit(root).port
    try:
        listening = [
            c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
        pid = next((c.pid for c in listening if c.pid), None)
        if pid is None:
            return None, None
        process = psutil.Process(pid)
        return tuple(process.cmdline()), process.environ().get(SIMULATED)
    except (psutil.Error, OSError):
        return None, None


def flags_of(command: Sequence[str] | None) -> dict[str, Any] | None:
    """The flags of an engine's command line, whatever comes before them; None where it cannot be read."""
    arguments = list(command or ())
    try:
        found = read_flags(arguments[_first_flag(arguments) :])
    except UsageError:
        return None
    both = [name.partition(".") for name in found]  # --speculative-config.KEY VALUE, as vLLM takes it too
    dotted = {key: found[f"{name}.{key}"] for name, dot, key in both if dot and name == "speculative_config"}
    found = {ALIASES.get(name, name): value for name, value in found.items()}
    return found | ({"speculative_config": dotted} if dotted else {})


def _first_flag(arguments: Sequence[str]) -> int:
    """Behind ``serve`` or ``-m MODULE``, where short ones are the engine's; else the first long one."""
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            return place
        if argument in ("serve", "-m"):
            behind = range(place + 1 + (argument == "-m"), len(arguments))
            return next((n for n in behind if arguments[n].startswith("-")), len(arguments))
    return len(arguments)


def _positive(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def _number(*values: Any) -> int | None:
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
