"""The model card of a trained drafter: what it was made from and how, and what it was measured to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas import __version__
from eyas.files import write_whole
from eyas.training import vocabulary
from eyas.training.checkpoint import State

if TYPE_CHECKING:
    from eyas.training.trainer import Prepared

NAME = "README.md"
RECIPE = (
    "unroll",
    "loss",
    "step_decay",
    "label_temperature",
    "epochs",
    "batch_tokens",
    "accumulation",
    "learning_rate",
    "schedule",
    "warmup",
    "weight_decay",
    "clip",
    "seed",
)


def write(folder: Path, prepared: Prepared, state: State) -> None:
    write_whole(folder / NAME, text(prepared, state))


def text(prepared: Prepared, state: State) -> str:
    config, target = prepared.config, prepared.data.manifest.target
    parts = [
        _front_matter(target, config.license),
        f"# EAGLE-3 drafter for {target}\n",
        f"Drafts tokens for `{target}`, which verifies them: the text stays the target's. Trained by `eyas train` "
        f"(Eyas {__version__}) from what the target itself wrote.\n",
        f"    eyas run {target} --drafter {folder_name(config.out)}\n",
        "## Acceptance\n",
        _acceptance(state, config.eval_steps, config.eval_tokens),
        "## Drafter\n",
        _table(_drafter(prepared)),
        "## Data\n",
        _table(_data(prepared)),
        "## Recipe\n",
        _table(_recipe(prepared, state)),
    ]
    return "\n".join(parts)


def folder_name(out: str) -> str:
    return Path(out).name or out


def _front_matter(target: str, license: str | None) -> str:
    lines = ["---", *([f"license: {license}"] if license else []), f"base_model: {target}", "library_name: eyas"]
    return "\n".join([*lines, "tags:", "- eagle3", "- speculative-decoding", "---\n"])


def _acceptance(state: State, steps: int, tokens: int) -> str:
    if not state.best:
        return "Not measured while it was trained; `eyas eval` does.\n"
    best = state.best
    rates = ", ".join(f"{rate:.3f}" for rate in best["acceptance_rates"])
    tasks = [(f"acceptance length, {task}", f"{length:.2f}") for task, length in best["by_task"].items()]
    rows = [("acceptance length, all prompts", f"**{best['acceptance_length']:.2f}**"), *tasks]
    rows.append(("acceptance rate by position", rates))
    return (
        f"Tokens for each verify step of the target, bonus token included: greedy chains of {steps}, answers of up to "
        f"{tokens} tokens, by real decoding in Eyas after {best['step']:,} updates. Rows of the data that prompts were "
        f"taken from were held out; this drafter was chosen among others by this very figure.\n\n{_table(rows)}"
    )


def _drafter(prepared: Prepared) -> list[tuple[str, Any]]:
    model = prepared.model
    covered = vocabulary.coverage(prepared.found.counts, model.draft_to_target.cpu().numpy())
    dtype = str(prepared.target.dtype).removeprefix("torch.")
    return [
        ("weights", f"{sum(w.numel() for w in model.parameters()):,}, in {dtype}"),
        ("decoder layers", model.config.num_hidden_layers),
        ("states of the target it is fed", f"entering layers {', '.join(map(str, model.aux_layer_ids))}"),
        ("draft vocabulary", f"{model.config.draft_vocab_size:,} tokens, {covered:.2%} of the answers in the data"),
        ("embedding", "its own" if model.config.own_embedding else "the target's"),
    ]


def _data(prepared: Prepared) -> list[tuple[str, Any]]:
    manifest, found = prepared.data.manifest, prepared.found
    sources = ", ".join(f"{name} {count:,}" for name, count in manifest.sources.items())
    sampling = ", ".join(f"{name} {value}" for name, value in manifest.sampling.items())
    return [
        ("answers by", f"{manifest.target} itself" + (f" ({sampling})" if sampling else "")),
        ("conversations", f"{len(found.rows):,} trained on, {len(prepared.held_out):,} held out"),
        ("where they come from", sources or "not said"),
        ("tokens", f"{int(found.lengths.sum()):,}, of which the target wrote {int(found.written.sum()):,}"),
    ]


def _recipe(prepared: Prepared, state: State) -> list[tuple[str, Any]]:
    config = prepared.config
    rows: list[tuple[str, Any]] = [(name, getattr(config, name)) for name in RECIPE]
    begun = (
        f"the drafter {folder_name(config.drafter)}"
        if config.drafter
        else "the target's last layer, norm and head where they fit"
    )
    where = f"{prepared.accelerator.num_processes} x {prepared.target.device.type}"
    rows += [
        ("started from", begun),
        ("optimiser", "AdamW, betas 0.9 and 0.95"),
        ("updates", f"{state.step:,} of {prepared.steps:,}"),
        ("tokens seen", f"{state.tokens:,}"),
        ("time", f"{state.seconds / 60:.0f} minutes on {where}"),
        ("multiplied in", str(prepared.frozen.dtype).removeprefix("torch.")),
    ]
    return rows


def _table(rows: list[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + "\n"
