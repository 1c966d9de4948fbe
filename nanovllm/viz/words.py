"""Words: what the views show, in sentences. The text twin of every picture is made here, without a drawing package."""

from collections.abc import Iterable, Sequence

from nanovllm.engine.events import BlockEventKind, FinishReason, StepRecord, StepRow
from nanovllm.viz.recorder import Decode, Moment
from nanovllm.viz.state import EngineState, SequenceInfo

NOTHING_YET = "No step has been seen yet."


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def ranges(numbers: Iterable[int], limit: int = 12) -> str:
    """[4, 5, 6, 9] -> "4–6, 9"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [f"{first}" if first == last else f"{first}–{last}" for first, last in parts[:limit]]
    return ", ".join(shown) + (", …" if len(parts) > limit else "")


def token_text(token_id: int | None, decode: Decode | None) -> str:
    """A token for a reader: spaces and line ends made visible, the bare id where there is no decoder."""
    if token_id is None:
        return ""
    if decode is None:
        return str(token_id)
    text = decode(token_id).replace(" ", "·").replace("\n", "⏎").replace("\t", "→")
    return text if text.isprintable() else ascii(text)[1:-1]


def quoted(text: str) -> str:
    """As Python does it: where commas are listed, a token that is a comma must be told from those between."""
    mark = '"' if "'" in text else "'"
    return f"{mark}{text}{mark}"


def pool_words(state: EngineState) -> str:
    counts = state.counts()
    parts = [f"{counts.held:,} held ({counts.shared:,} shared)", f"{counts.cached_free:,} cached and free"]
    text = f"{plural(state.num_blocks, 'block')} of {plural(state.block_size, 'token')}: "
    text += ", ".join([*parts, f"{counts.empty:,} empty"])
    return text if state.is_complete else text + " (watched from mid-run: blocks show once touched)"


def sequence_words(info: SequenceInfo, block_size: int) -> str:
    name = f"s{info.seq_id}"
    if info.status == "waiting":
        return f"{name} waits with {plural(info.num_prompt_tokens, 'prompt token')}"
    if info.status == "preempted":
        return f"{name} was preempted and waits to compute its {plural(info.num_tokens, 'token')} again"
    cached = f", {info.num_cached_tokens} of them from the prefix cache," if info.num_cached_tokens else ""
    if info.status == "ended":
        tokens = plural(info.num_computed_tokens, "token")
        return f"{name} ended with {tokens}{cached} in blocks {ranges(info.block_table)}"
    fill = info.num_computed_tokens - (len(info.block_table) - 1) * block_size
    table = ranges(info.block_table) or "none yet"
    cached = cached.rstrip(",")
    text = f"{name} holds {plural(info.num_computed_tokens, 'token')}{cached}, in blocks {table}"
    return text + (f" (the last one {max(fill, 0)}/{block_size} full)" if info.block_table else "")


def run_words(totals: dict[str, float], num_sequences: int) -> str:
    """A run in one line."""
    parts = [
        plural(int(totals["steps"]), "step"),
        duration(totals["seconds"]),
        f"{plural(num_sequences, 'sequence')} ({int(totals['finished']):,} ended)",
        f"prefill {plural(int(totals['prefill_tokens']), 'token')} at {rate(totals, 'prefill')} tok/s",
        f"decode {plural(int(totals['decode_tokens']), 'token')} at {rate(totals, 'decode')} tok/s",
        f"{hit_rate(totals):.0%} of prompt tokens from the prefix cache",
        plural(int(totals["preemptions"]), "preemption"),
        plural(int(totals["evictions"]), "eviction"),
    ]
    return ", ".join(parts)


def rate(totals: dict[str, float], phase: str) -> str:
    """Tokens of a phase by the seconds of the steps that had any."""
    seconds = totals[f"{phase}_seconds"]
    return number(totals[f"{phase}_tokens"] / seconds) if seconds else "0"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def hit_rate(totals: dict[str, float]) -> float:
    """The share of the prompt tokens of newly admitted sequences that the prefix cache already had."""
    return totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else 0.0


# -- one step


def step_title(record: StepRecord) -> str:
    return f"Step {record.step:,}: {record.phase}"


def step_numbers(record: StepRecord) -> str:
    timings = record.timings
    return (
        f"{plural(len(record.rows), 'sequence')}, {record.num_tokens:,} of {record.token_budget:,} tokens "
        f"({record.num_prefill_tokens:,} prefill, {record.num_decode_tokens:,} decode), "
        f"{sum(timings) * 1e3:.1f} ms (schedule {timings.schedule * 1e3:.2f}, run {timings.run * 1e3:.1f}, "
        f"postprocess {timings.postprocess * 1e3:.2f})"
    )


def why(record: StepRecord) -> str:
    """Why these sequences were scheduled and not others."""
    idle = record.num_running + len(record.finished) - len(record.rows)
    if not record.rows:
        return "nothing to compute"
    if record.phase == "prefill":
        behind = f"; {plural(idle, 'resident sequence')} must wait a step" if idle > 0 else ""
        return f"prompt tokens go first{behind}"
    if record.phase == "mixed":
        return "running sequences decode, prompts fill the rest of the budget"
    if record.num_waiting:
        verb = "waits" if record.num_waiting == 1 else "wait"
        return f"every running sequence takes one token; {record.num_waiting:,} {verb} for a seat or for blocks"
    return "nobody waits, so every running sequence takes one token"


def step_lines(record: StepRecord, decode: Decode | None = None) -> list[tuple[str, str]]:
    """The step as (kind, sentence): why, queue, row, block and end lines, in the order in which things happened."""
    lines = [("why", why(record))]
    if record.queued:
        lines.append(("queue", "new requests: " + list_of([f"s{s} ({n} tokens)" for s, n in record.queued])))
    for admission in record.admitted:
        verb = "comes back" if admission.is_resumed else "gets a seat"
        cached = f", {admission.num_cached_tokens} found in the prefix cache" if admission.num_cached_tokens else ""
        tokens = plural(admission.num_prompt_tokens, "prompt token")
        lines.append(("queue", f"s{admission.seq_id} {verb}: {tokens}{cached}"))
    if record.preempted:
        names = list_of([f"s{seq_id}" for seq_id in record.preempted])
        lines.append(("queue", f"preempted, because the pool had no free block left: {names}"))
    lines += [("row", row_words(row, decode)) for row in record.rows if row.is_prefill]
    decodes = [row_words(row, decode) for row in record.rows if not row.is_prefill]
    lines += [("row", "decode " + ",  ".join(decodes[i : i + 6])) for i in range(0, len(decodes), 6)]
    lines += [("block", text) for text in block_words(record)]
    for finish in record.finished:
        reasons = {FinishReason.STOP: "an end token", FinishReason.LENGTH: "its length limit"}
        reason = reasons.get(finish.reason, "an abort")
        tokens = plural(finish.num_completion_tokens, "generated token")
        lines.append(("end", f"s{finish.seq_id} ends by {reason} after {tokens}"))
    return lines


def list_of(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def row_words(row: StepRow, decode: Decode | None) -> str:
    start, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
    token = token_text(row.sampled_token_id, decode)
    sampled = "" if row.sampled_token_id is None else f" → {quoted(token) if decode else token}"
    if not row.is_prefill:
        return f"s{row.seq_id} at {start}{sampled}"
    left = row.num_tokens - end
    rest = f", {left} left for later steps" if left else ""
    return f"s{row.seq_id} prefill: positions {start}–{end - 1} of {row.num_tokens}{rest}{sampled}"


def block_words(record: StepRecord) -> list[str]:
    """Block events, those of one kind and sequence together."""
    groups: dict[tuple[BlockEventKind, int | None], list[int]] = {}
    for event in record.block_events:
        seq_id = None if event.kind in (BlockEventKind.EVICT, BlockEventKind.CACHE) else event.seq_id
        groups.setdefault((event.kind, seq_id), []).append(event.block_id)
    verbs = {
        BlockEventKind.ALLOCATE: "takes",
        BlockEventKind.REUSE: "hits the prefix cache and shares",
        BlockEventKind.RELEASE: "lets go of",
        BlockEventKind.EVICT: "cached content given up:",
        BlockEventKind.CACHE: "full, can be found from now on:",
    }
    lines = []
    for (kind, seq_id), block_ids in groups.items():
        who = "" if seq_id is None else f"s{seq_id} "
        noun = "block" if len(block_ids) == 1 else "blocks"
        lines.append(f"{who}{verbs[kind]} {noun} {ranges(block_ids)}")
    return lines


def moment_words(moment: Moment) -> str:
    """The picture in one sentence, for a screen reader."""
    state, record = moment.state, moment.record
    if state is None:
        return NOTHING_YET
    running, waiting = len(state.by_status("running")), len(state.by_status("waiting", "preempted"))
    phase = f" ({record.phase})" if record else ""
    return f"After step {state.step:,}{phase}: {running} running, {waiting} waiting. KV pool: {pool_words(state)}."
