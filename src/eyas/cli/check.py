"""``eyas check``: what a checkpoint is, from its config and headers, before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.console import counted
from eyas.cli.options import Debug, Json

if TYPE_CHECKING:
    from eyas.drafter.inspect import DrafterReport

WIDTH = 100
DIALECTS = {"eagle": "official EAGLE", "sglang": "SGLang, SpecForge", "vllm": "vLLM speculators"}


def check(
    drafter: Annotated[Path, typer.Argument(help="A drafter's folder or weights file.", show_default=False)],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a drafter checkpoint is, and what is odd about it, without loading it.

    Exits with 1 where Eyas would not load it.

    Examples:

    eyas check ./my-drafter

    eyas check ./my-drafter/model.safetensors --json
    """
    from eyas.drafter.inspect import describe

    report = describe(drafter)
    if as_json:
        from eyas.cli.records import print_json

        print_json(as_record(report))
    else:
        show(report)
    if report.problems:
        raise typer.Exit(1)


def as_record(report: DrafterReport) -> dict[str, Any]:
    ids = report.layer_ids
    both = {"entry": ids.entry, "output": ids.output}
    return {"loads": not report.problems} | asdict(report) | {"path": str(report.path), "layer_ids": asdict(ids) | both}


def show(report: DrafterReport) -> None:
    from rich.text import Text

    from eyas.cli.console import clean, console
    from eyas.cli.render import grid

    out = console()
    out.width = min(out.width, WIDTH)
    rows: list[tuple[str, str | Text]] = [(name, Text(clean(value))) for name, value in facts(report)]
    rows += [("odd" if n == 0 else "", Text(clean(note), "yellow")) for n, note in enumerate(report.odd)]
    rows += [("problems" if n == 0 else "", Text(clean(note), "red")) for n, note in enumerate(report.problems)]
    loads = Text("no: see problems", "bold red") if report.problems else Text("yes", "bold green")
    out.print(grid([*rows, ("loads in Eyas", loads)]))


def facts(report: DrafterReport) -> list[tuple[str, str]]:
    c = report.config
    vocabulary = f"{c.draft_vocab_size:,} of the target's {c.vocab_size:,} tokens"
    if c.draft_vocab_size == c.vocab_size:
        vocabulary = f"the target's {c.vocab_size:,} tokens"
    rope = ", ".join(f"{key} {value}" for key, value in c.rope.items() if key != "rope_type")
    return [
        ("drafter", str(report.path)),
        ("dialect", f"{DIALECTS[report.dialect]} ({'; '.join(report.evidence)})"),
        ("architecture", ", ".join(report.architectures) or "none named"),
        ("layers", counted(report.layers_found, "decoder layer")),
        ("sizes", f"hidden {c.hidden_size}, the target's {c.target_hidden_size}, MLP {c.intermediate_size}"),
        ("attention", f"{c.num_attention_heads} heads of {c.head_dim}, {c.num_key_value_heads} for keys and values"),
        ("positions", f"RoPE {c.rope['rope_type']}, {rope}; up to {c.max_position_embeddings:,}"),
        ("vocabulary", vocabulary),
        ("target states", layer_ids(report)),
        ("norms", norms(report)),
        ("embedding", report.embedding),
        ("head", report.head),
        ("weights", f"{report.parameters:,} in {', '.join(report.dtypes)}: {report.nbytes / 1e6:,.1f} MB"),
        ("files", ", ".join(report.files)),
    ]


def layer_ids(report: DrafterReport) -> str:
    ids = report.layer_ids
    if ids.entry is None or ids.output is None:
        return f"{report.config.num_aux}, entry ids [2, n // 2, n - 3] by default: the config names none"
    entry, output = (", ".join(map(str, numbers)) for numbers in (ids.entry, ids.output))
    return f"entry ids {entry} = output ids {output} (written as {ids.convention} ids {list(ids.written)} in {ids.key})"


def norms(report: DrafterReport) -> str:
    c = report.config
    extra = [
        name
        for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norm")
        if getattr(c, name)
    ]
    return f"RMSNorm, eps {c.rms_norm_eps:g}; {', '.join(extra) or 'none beyond the standard ones'}"
