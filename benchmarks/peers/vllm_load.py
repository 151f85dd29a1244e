"""``vllm bench serve``, run as often as it is told to in one process: importing vLLM takes longer than most runs.

    vllm_load.py

A worker as ``protocol.listen`` has it. Its orders are JSON lists, the arguments behind ``vllm bench serve``; each is
answered with ``{"done": null}``. Results go where the arguments say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol import listen


def load() -> tuple[Callable[[list[str]], dict[str, Any]], dict[str, str]]:
    from vllm import __version__
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def run(arguments: list[str]) -> dict[str, Any]:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        try:
            main(parser.parse_args(arguments))
        except SystemExit as left:
            raise RuntimeError(f"it left with status {left.code}") from left
        return {"done": None}

    return run, {"vllm": __version__}


if __name__ == "__main__":
    listen(load)
