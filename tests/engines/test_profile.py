"""The judge profiles the real vLLM on CPU, launched with a drafter and without: the steps it counts, and where their
time goes, as the table has it that vLLM writes beside its trace.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from eyas.bench import trace
from eyas.bench.kernels import LABELS
from eyas.bench.launched import both
from eyas.bench.passes import Level
from eyas.bench.profile import STEPS, prepared, profiles
from eyas.bench.workload import Workload, builtin
from eyas.bridges.launch import Asked
from eyas.core import DraftShape, SamplingParams
from eyas.drafter.shipped import shipped_drafter

pytestmark = [pytest.mark.engines, pytest.mark.real, pytest.mark.timeout(3600)]
FLAGS = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8")
UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
ROW = re.compile(r"^ *(?P<name>\S.*?\S) {2,}[\d.]+% +(?P<value>[\d.]+)(?P<unit>us|ms|s) ")


def own_times(table: str) -> dict[str, float]:
    """Microseconds of each operator without what it calls, as PyTorch adds them up."""
    found = (ROW.match(line) for line in table.splitlines())
    return {row["name"]: float(row["value"]) * UNITS[row["unit"]] for row in found if row}


def test_where_the_time_of_a_step_goes(python, tmp_path):
    from eyas.target.smollm2 import smollm2_folder

    target, drafter = smollm2_folder(), shipped_drafter("smollm2")
    assert drafter is not None
    asked = Asked("vllm", str(target), drafter, FLAGS, python)
    out, sampling, levels = tmp_path / "r.json", SamplingParams(max_tokens=32, seed=0), [Level("concurrency", 2)]
    sides, _ = both(asked, DraftShape(2, 1, 3), sampling, side_by_side=None, running=2, log=out)
    workload = Workload({"chat": builtin(["chat"]).prompts["chat"][:4]}, "chat")
    found, notes = asyncio.run(profiles(prepared(sides, out), workload, levels, sampling))

    assert notes == [] and len(found) == 1
    names = dict[str, set[str]]()
    for name in ("without", "with"):
        side = found[0][name]
        print(name, {part: f"{share:.1%}" for part, share in side["shares"].items()}, side["seconds"])
        assert (side["device"], side["steps"], side["ranks"], side["running"]) == ("CPU", STEPS, 1, 2)
        assert sum(side["shares"].values()) == pytest.approx(1) and set(side["shares"]) == set(LABELS)
        assert side["shares"]["matmul"] > 0.1 and side["shares"]["attention"] > 0 and side["shares"]["other"] < 0.3
        assert side["shares"]["allreduce"] == side["shares"]["moe"] == 0
        events = trace.read(Path(side["trace"]))
        names[name] = {event.name for event in events}
        mine = dict[str, float]()
        for span in trace.exclusive(event for event in events if event.kind == "cpu_op"):
            mine[span.name] = mine.get(span.name, 0.0) + span.end - span.start
        (table,) = Path(side["trace"]).parent.glob("*.profiler_out.txt")
        theirs = own_times(table.read_text())
        longest = sorted(mine, key=mine.__getitem__)[-5:]
        assert {one: mine[one] for one in longest} == pytest.approx({one: theirs[one] for one in longest}, rel=0.01)
    only = names["with"] - names["without"]
    assert any("eagle" in name for name in only), "the steps of this side are those that draft"
