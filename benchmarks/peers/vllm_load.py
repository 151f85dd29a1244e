"""``vllm bench serve``, run as often as it is told to in one process: importing vLLM takes longer than most runs.

    vllm_load.py

Writes ``{"ready": versions}``, then takes a JSON list a line, the arguments behind ``vllm bench serve``, and answers
each with ``{"done": null}`` or ``{"error": "..."}``. Results go where the arguments say. End of input ends it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints is not for whoever listens

from vllm import __version__  # noqa: E402
from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def run(arguments: list[str]) -> None:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(arguments))


if __name__ == "__main__":
    say({"ready": {"vllm": __version__}})
    for line in sys.stdin:
        try:
            run(json.loads(line))
            say({"done": None})
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
