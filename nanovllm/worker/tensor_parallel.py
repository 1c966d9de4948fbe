"""Tensor parallelism: one process a rank. Starts the ranks above 0, has them do as rank 0 does, outlives their death.

Rank 0 lives in the caller's process and holds a `RankGroup`; every other rank is a spawned process (`run_rank`) with a
`WorkerLink`, a `ModelRunner` of its own, and a loop that runs what it is told. Between them are
- a `MessageChannel` from rank 0: the method to run and its rows of numbers;
- a pipe back from each rank: "connecting", "ready", "failed", and the end of the pipe when the process ends;
- `Collectives`, private to this engine: NCCL on GPUs (small sums without it, see one_shot.py), gloo on CPUs.

A thread of rank 0 listens to the pipes. When a rank dies it ends the others too: a collective that waits for one of
them fails at once, and the caller gets an `EngineDeadError` with the dead rank's last words. Nothing here knows about
requests, schedulers or models.

Read `run_rank`, `WorkerLink.serve` and `RankGroup.running` first: they are all that happens while nothing fails.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from multiprocessing import process as processes
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile
from typing import IO, Any

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.engine.parts import Parts
from nanovllm.errors import ConfigError, EngineDeadError, NanoVLLMError, RankError
from nanovllm.layers.parallel import TPGroup
from nanovllm.models.model_config import ModelConfig
from nanovllm.worker.device import select_device
from nanovllm.worker.link import RankLink
from nanovllm.worker.message_channel import ChannelHandle, MessageChannel
from nanovllm.worker.model_runner import ModelRunner

LOOPBACK = "127.0.0.1"
PROCESS_NAME = "nanovllm-rank-"
PATIENCE = timedelta(minutes=5)  # with peers that are alive and do not come
GRACE = 5.0  # seconds for a rank to end after "exit", and for the reason of a failure to arrive
NO_GUARD = 86  # exit code of a rank that found itself running the caller's script
LAST_WORDS = 4000  # bytes
SPIN = 0.02  # seconds, longer than most steps on a GPU, where the 0.1 ms that it takes to wake up would count
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch ends the process, that is, the caller's, when a peer fails
    "NCCL_SOCKET_IFNAME": "lo",  # nobody outside this machine may connect
    # Else NCCL records an event behind every collective of a CUDA graph, in case that somebody starts one without a
    # graph meanwhile. Nobody does: `ModelRunner.run` waits for its graphs before it runs anything else.
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
}


class PeerLostError(RuntimeError):
    """A collective failed, most likely because another rank failed first."""


class Collectives:
    """The process group that `TPGroup` sends through. It can be left, and joined anew.

    A rank that fails in the middle of a step leaves. Its peers' collectives then fail too, so they come back from the
    step and leave as well; for the next step all of them join a new group, the next *generation*.
    """

    def __init__(self, rank: int, size: int, port: int, listener: int | None = None) -> None:
        """listener: on rank 0, a socket bound to `port`, at which the ranks find each other."""
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self.generation = -1
        self.on_failure: Callable[[], None] = lambda: None  # raises the reason, if it is known
        self._group: Any = None
        self._one_shot: Any = None  # an `OneShotAllReduce`, where GPUs can write into each other's memory ...
        self._mailbox: Any = None  # ... which is given back at the end: a step under way may still use it
        self._joining = -1  # the generation that a `join` is on its way to, if nobody left meanwhile
        self._lock = threading.Lock()
        self._decisions: dict[int, str] = {}  # rank 0: about each generation
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, None, listener is not None, PATIENCE, wait_for_workers=False, master_listen_fd=listener
        )

    def join(self, generation: int) -> None:
        """Meet the other ranks in the group of that generation; returns when each is connected with each.

        Rank 0 waits until all are there and says "go"; from then on nobody turns back. (One that left while two others
        were still connecting would leave them waiting for each other.) Raises `PeerLostError` if rank 0 calls it off.
        """
        with self._lock:
            if generation <= self.generation:  # perhaps left already; then the peers have yet to notice
                return
            self.generation = self._joining = generation
            self._group = self._one_shot = None
        store = self._store_of(generation)
        if self.rank == 0:
            self._see_all(generation, "here")
            decision = self.decide(generation, "go")
        else:
            store.set(f"here {self.rank}", "")
            decision = store.get("decision").decode()
        if decision != "go":
            raise PeerLostError(f"generation {generation} was called off")
        group: Any
        one_shot: Any = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            with environment(**NCCL_SETTINGS):
                group = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
                group.allreduce([torch.zeros(1, device=self.device)]).wait()  # connects: that is done at the first use
                torch.cuda.synchronize(self.device)
            if find_spec("triton") is not None:
                from nanovllm.worker.one_shot import OneShotAllReduce

                one_shot = self._mailbox = OneShotAllReduce.connect(store, self.rank, self.size, self.device)
        else:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = PATIENCE
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        self._see_all(generation, "connected")
        with self._lock:
            if self._joining == generation:
                self._group, self._one_shot = group, one_shot

    def decide(self, generation: int, decision: str) -> str:
        """Rank 0: whether that generation meets, "go" or "called off". The first decision holds; returns it."""
        decided = self._decisions.setdefault(generation, decision)
        if decided == decision and self._store is not None:
            self._store_of(generation).set("decision", decision)
        return decided

    def _store_of(self, generation: int) -> Any:
        return dist.distributed_c10d.PrefixStore(str(generation), self._store)

    def _see_all(self, generation: int, word: str) -> None:
        """Leave a word in the store; return when every rank has left it, or when the generation is called off."""
        store = self._store_of(generation)
        store.set(f"{word} {self.rank}", "")
        words = [f"{word} {rank}" for rank in range(self.size)]
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while not store.check(words) and self._decisions.get(generation) != "called off":
            if self._store is None or time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} waited for the others to be {word}, in vain")
            time.sleep(0.001)

    def leave(self) -> None:
        """Give the group up, even while a kernel waits in it; on CPUs the peers' collectives fail.

        The group of a `join` that has not returned is given up as soon as that has met the others.
        """
        with self._lock:
            group, one_shot, self._joining = self._group, self._one_shot, -1
            self._group = self._one_shot = None
        if one_shot is not None:
            one_shot.release()
        if group is not None:
            # On a GPU kernels that wait for a peer come back at once. `abort` itself may wait, for captured graphs to
            # be gone, and so may the end of the group, for its own threads: both in a thread that nobody waits for.
            aborting = threading.Thread(target=group.abort, name="nanovllm-abort", daemon=True)
            del group
            aborting.start()
            aborting.join(1.0)

    def close(self) -> None:
        """Leave, and stop listening. Needs the other ranks to have ended, and no step under way."""
        self.leave()
        if self._mailbox is not None:
            self._mailbox.close()
        self._store = None

    def allreduce(self, tensors: list[torch.Tensor]) -> "Collectives":
        """Sum over the ranks, in place."""
        one_shot = self._one_shot  # another thread may `leave` at any moment
        if one_shot is not None and one_shot.takes(*tensors):
            one_shot(*tensors)
            return self
        return self._run("allreduce", tensors, dist.AllreduceOptions())

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> "Collectives":
        """Every rank's input, in the outputs of the root that the options name."""
        return self._run("gather", outputs, inputs, options)

    def wait(self) -> None:
        """What a process group's work has; here it is done already."""

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        values = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        values[self.rank] = value
        self.allreduce([values])
        return int(values.min())

    def _run(self, name: str, *args: Any) -> "Collectives":
        if hasattr(args[-1], "asyncOp"):
            args[-1].asyncOp = False  # NCCL: in the stream of the layers, which saves two hand-overs
        work: Any = None
        try:
            group = self._group
            if group is None:
                raise PeerLostError(f"rank {self.rank} has left the group after a failed step")
            work = getattr(group, name)(*args)
            if work is not None:
                if self.device.type == "cpu":
                    let_interrupts_in(work)
                work.wait()
        except RuntimeError as error:
            self.on_failure()
            raise PeerLostError(f"{name}: {error}") from error
        finally:
            # It keeps gloo's connections open, and who keeps the error (a notebook does) keeps this frame: the rank
            # would have left in name only, and its peers would wait for it.
            work = group = None
        return self


def let_interrupts_in(work: Any) -> None:
    """Wait for gloo's `work` as Python waits, so that Ctrl-C ends it; gloo itself would wait on for a lost peer."""
    ended = threading.Event()
    work.get_future().add_done_callback(lambda future: ended.set())
    ended.wait()


@dataclass
class RankProcess:
    """What rank 0 knows of another rank."""

    rank: int
    process: Any
    reports: Connection
    stderr: IO[bytes]
    stage: str = "starting"  # then "connecting", then "ready"

    def obituary(self) -> str:
        """How the process ended, and the last that it wrote to stderr."""
        deadline = time.monotonic() + GRACE
        while (code := self.process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)  # also if another thread, which joins it too, has got the code and has yet to set it
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        self.stderr.seek(max(0, self.stderr.seek(0, os.SEEK_END) - LAST_WORDS))
        words = self.stderr.read().decode(errors="replace").strip() or "(none)"
        if self.stage == "starting":
            words += f"\nIt imports {main_script()} first; if that failed, stderr says why."
        return f"rank {self.rank} (process {self.process.pid}) {how} while {self.stage}. Its last words:\n{words}"


class JointLink(RankLink):
    """What the links of all ranks have in common."""

    collectives: Collectives

    def meet(self) -> None:
        """Join the first group."""

    def tensor_parallel_group(self, device: torch.device) -> TPGroup:
        """Meet the other ranks. Rank 0 raises `EngineDeadError` or `ConfigError` if one of them does not come."""
        self.collectives.device = device
        self.meet()
        return TPGroup(self.collectives.rank, self.collectives.size, self.collectives)

    def smallest(self, value: int) -> int:
        return self.collectives.smallest(value)


class RankGroup(JointLink):
    """Rank 0's link to the other ranks."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.channel: MessageChannel = parts.resolve(MessageChannel).create(config.tensor_parallel_size - 1)
        self.channel.check = self.check
        self.events = self.channel.events
        self._owner = os.getpid()
        self._is_ending = self._is_stopped = False
        self._is_settled = True  # the running method has no collective left to start
        self._generation = 0
        self._failure: str | None = None  # what a rank reported about a method of this generation
        self._death: NanoVLLMError | None = None
        self._news = threading.Condition()
        listener = socket.create_server((LOOPBACK, 0))  # any free port, and for nobody outside this machine
        port = listener.getsockname()[1]
        self.collectives = Collectives(0, config.tensor_parallel_size, port, listener.detach())
        self.collectives.on_failure = self._explain
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(1, config.tensor_parallel_size):
                self._ranks.append(self._start(config, rank, port, parts))
        except BaseException:
            self.stop()
            raise
        self.ps = [each.process for each in self._ranks]
        self._watcher.start()

    def _start(self, config: Config, rank: int, port: int, parts: Parts) -> RankProcess:
        ctx = get_context("spawn")  # a forked process would inherit a CUDA context that it cannot use
        reports, their_reports = ctx.Pipe(duplex=False)
        stderr = TemporaryFile()
        their_stderr = Connection(os.dup(stderr.fileno()), readable=False)  # so that it travels
        args = (config, rank, self.channel.handle(rank - 1), port, their_reports, their_stderr, parts.portable())
        process = ctx.Process(target=run_rank, args=args, name=f"{PROCESS_NAME}{rank}", daemon=True)
        # Ctrl-C goes to every process of a terminal. The mask is inherited, so this one will not see it. (Python's
        # resource tracker must run already: starting it with the first process would take SIGINT off the mask.)
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        their_reports.close()  # the pipe ends with the process only if nobody else holds this end
        their_stderr.close()
        return RankProcess(rank, process, reports, stderr)

    def meet(self) -> None:
        self._wait_for("connecting", "ready")
        self._join()

    def wait_ready(self, timeout: float = 3600.0) -> None:
        """Wait until every rank has built its runner. Raises as `check` does."""
        self._wait_for("ready", timeout=timeout)

    @contextmanager
    def running(self, method: str, args: tuple[Any, ...]) -> Iterator[None]:
        """The other ranks run `method(*args)` while the block runs it here.

        A block that fails before `settle` leaves the ranks somewhere in the middle of a step. On CPUs they are brought
        together again for the next one; on GPUs, where captured graphs know only one group, the engine is closed.
        """
        if method == "exit":
            self._is_ending = True
            if self.is_alive():
                self.channel.write(method, (self._generation, args))
            yield
            return
        self.check()
        on_gpu, threads = self.collectives.device.type == "cuda", torch.get_num_threads()
        try:
            self._is_settled = False
            if not on_gpu:  # where ranks compute on this CPU; a GPU would wait 20 us for it in every step
                torch.set_num_threads(share_of_cores(self.collectives))
            self.channel.write(method, (self._generation, args))
            self._join()
            yield
            self.check()  # a GPU that was called back from waiting for a dead peer returns numbers, but wrong ones
        except BaseException as error:
            if on_gpu and isinstance(error, RuntimeError) and not isinstance(error, NanoVLLMError):
                self._explain(1.0)
            if on_gpu and not self._is_settled:
                self._die(EngineDeadError(f"rank 0 failed in the middle of a step, so the ranks disagree: {error!r}"))
            elif not self._is_settled:
                self._regroup()
            raise
        finally:
            if not on_gpu:
                torch.set_num_threads(threads)

    def settle(self) -> None:
        self._is_settled = True

    def is_alive(self) -> bool:
        return self._death is None and not self._is_stopped and os.getpid() == self._owner

    def check(self) -> None:
        """Raise if a rank died (`EngineDeadError`, `ConfigError`) or failed in a method (`RankError`, once)."""
        if os.getpid() != self._owner:
            raise EngineDeadError("this process is a forked copy, and the ranks obey the original: build an LLM here")
        if self._death is not None:
            raise type(self._death)(str(self._death))  # a new one each time: a raised error keeps its traceback
        if self._is_stopped:
            raise EngineDeadError("the ranks of this engine were stopped")
        if self._failure is not None:
            failure = self._failure
            self._regroup()
            raise RankError(failure)

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        if self._is_stopped or os.getpid() != self._owner:  # a forked copy of this process does not own the ranks
            return
        patience = GRACE if self._is_ending and self._death is None else 0
        self._is_ending = True
        for each in self._ranks:
            each.process.join(patience)
        for each in self._ranks:  # all of them before anything else, for an interrupt may end this
            each.process.kill()
        for each in self._ranks:
            each.process.join()
        if self._watcher.is_alive():
            self._watcher.join()
        self.collectives.close()
        self.channel.close()
        for each in self._ranks:
            each.reports.close()
            each.stderr.close()
        self._is_stopped = True  # not before: who was interrupted may call again

    def _wait_for(self, *stages: str, timeout: float | None = None) -> None:
        with self._news:
            self._news.wait_for(lambda: self._death or all(each.stage in stages for each in self._ranks), timeout)
            late = [each.rank for each in self._ranks if each.stage not in stages]
        self.check()
        if late:
            raise EngineDeadError(f"ranks {late} are not {stages[0]} after {timeout:.0f} s")

    def _join(self) -> None:
        """Join the current generation. Waiting for peers cannot be interrupted, so a thread does it."""
        if self.collectives.generation == self._generation:
            return
        failures: list[Exception] = []

        def join() -> None:
            try:
                self.collectives.join(self._generation)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=join, name="nanovllm-join", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            self.check()
        if failures:  # not by a peer that turned back, so it is for good
            self._explain()
            self._die(EngineDeadError(f"the ranks cannot be connected: {failures[0]}"))
            self.check()

    def _explain(self, patience: float = GRACE) -> None:
        """After a failed collective: raise what made it fail, which may become known only in a moment."""
        with self._news:
            self._news.wait_for(lambda: self._death or self._failure, patience)
        self.check()

    def _regroup(self) -> None:
        """Bring the other ranks out of their step; the next message finds all of them in a new group."""
        with self._news:
            self._generation += 1
            self._failure = None
        self.collectives.decide(self._generation - 1, "called off")  # if rank 0 did not come as far as to join it
        self.collectives.leave()

    def _die(self, death: NanoVLLMError) -> None:
        """End the other ranks: whatever waits for one of them then fails instead of waiting on."""
        with self._news:
            self._death = self._death or death
            for each in self._ranks:
                each.process.kill()
            self._news.notify_all()
        if self.collectives.device.type == "cuda":
            self.collectives.leave()  # a kernel of rank 0 would wait on

    def _watch(self) -> None:
        """The watching thread: takes what the pipes bring until the last of them has ended."""
        ranks: dict[Any, RankProcess] = {each.reports: each for each in self._ranks}
        while ranks:
            for reports in wait(list(ranks)):
                try:
                    self._on_report(ranks[reports], *ranks[reports].reports.recv())
                except (EOFError, OSError):
                    self._on_end(ranks.pop(reports))

    def _on_report(self, each: RankProcess, kind: str, generation: int, text: str) -> None:
        with self._news:
            if kind != "failed":
                each.stage = kind
            elif generation == self._generation and self._failure is None:  # else a consequence of what is known
                self._failure = f"rank {each.rank} failed in {text}"
            self._news.notify_all()

    def _on_end(self, each: RankProcess) -> None:
        if self._is_ending or self._death is not None:
            return
        obituary = each.obituary()
        if each.process.exitcode == NO_GUARD:
            self._die(ConfigError(
                f"rank {each.rank} could not start: {main_script()} builds an LLM while it is imported, and the "
                'processes of ranks above 0 import it first; put its code under `if __name__ == "__main__":`'
            ))  # fmt: skip
        else:
            self._die(EngineDeadError(f"{obituary}\nThe engine is closed; build a new LLM."))


class WorkerLink(JointLink):
    """The link of a rank above 0, in its own process."""

    def __init__(self, collectives: Collectives, channel: MessageChannel, reports: Connection) -> None:
        super().__init__()
        self.collectives, self.channel, self.reports = collectives, channel, reports
        self.events = channel.events

    def report(self, kind: str, text: str = "") -> None:
        """Tell rank 0's watching thread."""
        self.reports.send((kind, self.collectives.generation, text))

    def meet(self) -> None:
        self.report("connecting")
        self.collectives.join(0)

    def serve(self, runner: ModelRunner) -> None:
        """Run what rank 0 says, until it says "exit"."""
        self.report("ready")
        self.channel.spin = SPIN if self.collectives.device.type == "cuda" else 0.0
        method = ""
        while method != "exit":
            method, (generation, args) = self.channel.read()
            try:
                if method != "exit":
                    self.collectives.join(generation)
            except PeerLostError:
                continue  # any other failure to join ends this rank, because some peer may wait for it
            try:
                getattr(runner, method)(*args)
            except Exception as error:
                if self.collectives.device.type == "cuda":
                    raise
                if not isinstance(error, PeerLostError):
                    self.report("failed", f"{method}:\n{traceback.format_exc()}")
                self.collectives.leave()


def begin_forked_copy() -> None:
    """In a forked copy of the caller's process: the ranks are not its children, and it must not end them with itself.
    Nor did torch's threads come along; every operation that shares its work with them would wait for ever."""
    torch.set_num_threads(1)
    children: set[Any] = getattr(processes, "_children", set())
    children -= {child for child in children if child.name.startswith(PROCESS_NAME)}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=begin_forked_copy)


def start_ranks(config: Config, parts: Parts) -> RankLink:
    """Start a process for each rank above 0 and return the link to them.

    Does not wait for them: they start while rank 0 builds its own runner, and meet it there. Raises `ConfigError` for
    head counts that do not divide, for too few devices, and for parts that cannot travel.
    """
    if config.tensor_parallel_size == 1:
        return RankLink()
    if getattr(current_process(), "_inheriting", False) and current_process().name.startswith(PROCESS_NAME):
        sys.exit(NO_GUARD)  # this is a rank that is importing the caller's script: see RankGroup._on_end
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and hasattr(main, "__file__") and not os.path.exists(main_script()):
        raise ConfigError(
            f"the processes of ranks above 0 import the main script, and {main_script()} cannot be imported; save it "
            'as a file, with its code under `if __name__ == "__main__":`'
        )
    ModelConfig.from_hf(config.hf_config).heads_on_rank(TPGroup(size=config.tensor_parallel_size))
    select_device(config.device, config.tensor_parallel_size - 1)
    try:
        parts.portable()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    keep_stderr_open()
    return RankGroup(config, parts)


def keep_stderr_open() -> None:
    """Let the ranks inherit a file number 2, also where the caller has closed its stderr (`2>&-`).

    Otherwise the first pipe that a rank opens gets this number, and is lost when its stderr is put there.
    """
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.set_inheritable(2, True)


def main_script() -> str:
    """What a spawned process imports before anything else."""
    return getattr(sys.modules["__main__"], "__file__", None) or "the main script"


def run_rank(
    config: Config, rank: int, handle: ChannelHandle, port: int, reports: Connection, stderr: Connection,
    replacements: dict[str, str],
) -> None:  # fmt: skip
    """The main function of a rank above 0. It ends when rank 0 says so or dies; an error ends it with a traceback."""
    os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    threading.Thread(target=end_with_parent, name="nanovllm-parent", daemon=True).start()
    parts = Parts(replacements)
    collectives = Collectives(rank, config.tensor_parallel_size, port)
    torch.set_num_threads(share_of_cores(collectives))
    link = WorkerLink(collectives, parts.resolve(MessageChannel).attach(handle), reports)
    link.serve(parts.resolve(ModelRunner)(config, rank, link, parts))
    sys.stdout.flush()
    os._exit(0)  # rank 0 waits, and the interpreter's own way out takes seconds


def share_of_cores(collectives: Collectives) -> int:
    """Threads for one rank: more of them than cores would wait for each other at every step."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // collectives.size))


@contextmanager
def environment(**settings: str) -> Iterator[None]:
    """Set environment variables that nobody has set, for the length of the block."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def end_with_parent() -> None:
    """Wait for the end of the caller's process and go with it, whatever the main thread is waiting for."""
    parent = parent_process()
    assert parent is not None, "a rank above 0 has a parent"
    wait([parent.sentinel])
    os._exit(1)
