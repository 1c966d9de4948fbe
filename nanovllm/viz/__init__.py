"""Live and still pictures of the engine at work.

    from nanovllm.viz import live, Player, Recorder

    with live(llm):                      # a dashboard that follows the steps of a blocking call
        llm.generate(prompts, params)
    Player(llm, prompts, params)         # play, pause, step, step back
    recorder = Recorder(); recorder.attach(llm)      # keep a run, save it, show any of its steps later
    BlockPoolView(recorder).figure(step=17)

Everything here reads `nanovllm.engine.events` and never the engine's insides. It works without torch; matplotlib (for
stills), ipywidgets and anywidget (for live pictures) are loaded when they are first used.
"""

from nanovllm.viz.live import live, make_view
from nanovllm.viz.player import Player
from nanovllm.viz.pool_view import BlockPoolView
from nanovllm.viz.recorder import Recorder
from nanovllm.viz.scheduler_view import SchedulerView
from nanovllm.viz.steplog_view import StepLogView
from nanovllm.viz.tables_view import BlockTablesView
from nanovllm.viz.throughput_view import ThroughputView
from nanovllm.viz.views import Dashboard, View

__all__ = [
    "BlockPoolView",
    "BlockTablesView",
    "Dashboard",
    "Player",
    "Recorder",
    "SchedulerView",
    "StepLogView",
    "ThroughputView",
    "View",
    "live",
    "make_view",
]
