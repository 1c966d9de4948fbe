"""Small engines for the fault tests, and what must hold of one after a fault."""

import gc
import threading
from pathlib import Path
from typing import Any

from nanovllm import LLM, Parts, SamplingParams
from tests.engine.fake import check_invariants

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], list(range(100, 113))]


def build(path: Path | str, parts: Parts | None = None, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention_backend": "torch", "kvcache_block_size": 4,
        "num_kvcache_blocks": 64, "max_model_len": 256, "seed": 0,
    }  # fmt: skip
    return LLM(str(path), parts, **{**settings, **options})


def cold(max_tokens: int) -> SamplingParams:
    """Always the most likely token, and no early end."""
    return SamplingParams(temperature=1e-6, max_tokens=max_tokens, ignore_eos=True)


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def assert_whole(llm: LLM) -> None:
    """Nothing runs, nothing waits, every block is free, and the door is open."""
    check_invariants(llm.scheduler)
    assert llm.is_finished(), f"left: {llm.scheduler.waiting} {llm.scheduler.running}"
    manager = llm.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    assert not llm._door.locked() and llm._inside is None and llm._in_step is None


def child_processes() -> set[int]:
    """Ids of this process's living children."""
    mine = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    found: set[int] = set()
    for task in mine.parent.parent.iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found


def resident_bytes() -> int:
    """This process's resident memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
