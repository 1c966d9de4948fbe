"""`nanovllm bench`: what the engine does in a second, and where the second goes. A table for people, one JSON line.

throughput   256 requests of 100 to 1,024 ids in and out, all at once
latency      one batch of 1, 8 and 64 streams
decode       steps of one batch size at one context, against the bytes that they must read
cpu          the default model on this CPU, beside transformers and llama.cpp
viz          what a live dashboard costs while generate runs
"""

import sys
from importlib import import_module

COMMANDS = {
    "throughput": "nanovllm.bench.throughput",
    "latency": "nanovllm.bench.latency",
    "decode": "nanovllm.bench.decode",
    "cpu": "nanovllm.bench.cpu",
    "viz": "nanovllm.bench.viz",
}


def main(argv: list[str]) -> int:
    """Run one bench and return the exit status."""
    if not argv or argv[0] not in COMMANDS:
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        if argv and not asked_for_help:
            print(f"nanovllm bench: there is no bench {argv[0]!r}; there are {', '.join(COMMANDS)}\n", file=sys.stderr)
        print(__doc__.rstrip(), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    status: int | None = import_module(COMMANDS[argv[0]]).main(argv[1:])
    return status or 0
