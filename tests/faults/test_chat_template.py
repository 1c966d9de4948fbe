"""The helper that renders chat templates: what transformers renders, in a process that cannot do harm and leaves."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm import chat_template
from nanovllm.chat_template import ChatTemplate, TemplateFailure
from nanovllm.tokenizer import load_tokenizer
from tests.faults.engines import child_processes

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>é</b> 👩‍👧 \u2028 \"'{{ 1 }}'"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n"}],
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "with tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}",
    "blocks and white space": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  U {{ m.content }}\n"
    "    {% else %}\n  A {{ m.content }}\n    {%- endif %}\n{% endfor %}\n  {# note #}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m.content }}{% endfor %}",
    "reverse": "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.content[1:] }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "macro": "{% macro show(m) %}[{{ m.role|upper }}] {{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y') }}",
    "nothing given": "{{ tools is none }}{{ documents is none }}{{ undefined_name is defined }}{{ messages | length }}",
    "tests and filters": "{% for m in messages %}{{ m.content is string }}{{ m.content.split(' ') | join('-') }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_what_transformers_renders(tiny_model_dir: Path, name: str) -> None:
    tokenizer = load_tokenizer(tiny_model_dir, 300)
    tokenizer.chat_template = TEMPLATES[name]
    template = ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map)
    for messages in CONVERSATIONS:
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected
    template.close()


def test_the_default_models_own_template(default_model_dir: Path) -> None:
    tokenizer = load_tokenizer(default_model_dir, 49152)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
    for messages in CONVERSATIONS:
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


def test_an_ordinary_template_costs_little() -> None:
    """After the first conversation; in processor time of both processes, for other programs run here too."""
    template = ChatTemplate(TEMPLATES["chatml"], {})
    template.render(CONVERSATIONS[0])
    best = min(seconds_of(template) for _ in range(5))
    assert best < 0.02, f"{best * 1000:.1f} ms a conversation"


def seconds_of(template: ChatTemplate, count: int = 20) -> float:
    started = time.perf_counter()
    for _ in range(count):
        template.render(CONVERSATIONS[1])
    return (time.perf_counter() - started) / count


def test_the_helper_can_open_nothing(tmp_path: Path) -> None:
    """Tried from inside, without the sandbox in between: what an escaped template could do."""
    code = (
        "import os, runpy, socket, sys; sys.path.append(sys.argv[1])\n"
        f"helper = runpy.run_path({str(chat_template.HELPER)!r})\n"
        f"before = open({str(tmp_path / 'before')!r}, 'wb', buffering=0)\n"
        "helper['give_up_rights'](512 << 20)\n"
        f"for attempt in (lambda: open('/etc/hostname'), lambda: open({str(tmp_path / 'x')!r}, 'w'), socket.socket,\n"
        "                lambda: os.listdir('/'), lambda: os.pipe(), lambda: bytearray(1 << 30),\n"
        "                lambda: before.write(b'x')):\n"
        "    try: attempt(); print('done')\n"
        "    except (OSError, MemoryError) as error: print('refused')\n"
    )
    packages = Path(sys.modules["jinja2"].__file__ or "").parents[1]
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(packages)], capture_output=True, text=True)
    assert result.stdout.split() == ["refused"] * 7, result.stdout + result.stderr


def test_the_limits_hold_for_the_helper_that_runs() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    template.render(CONVERSATIONS[0])
    assert template._helper is not None
    lines = Path(f"/proc/{template._helper.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    for name in ("Max open files", "Max file size", "Max processes", "Max core file size"):
        assert limits[name] == ["0", "0"], name
    assert limits["Max address space"] == [str(chat_template.MEMORY)] * 2
    template.close()


def run_isolated(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a bare Python as the helper's is; `sys.argv[1]` is where its packages lie."""
    packages = str(Path(sys.modules["jinja2"].__file__ or "").parents[1])
    return subprocess.run([sys.executable, "-I", "-S", "-c", code, packages], capture_output=True, text=True)


def test_a_system_without_some_limit_has_the_others() -> None:
    code = (
        "import resource, runpy, sys; sys.path.append(sys.argv[1])\n"
        f"helper = runpy.run_path({str(chat_template.HELPER)!r})\n"
        "real = resource.setrlimit; del resource.RLIMIT_AS\n"
        "def picky(kind, values):\n"
        "    if kind == resource.RLIMIT_NOFILE: raise ValueError('not this one')\n"
        "    real(kind, values)\n"
        "resource.setrlimit = picky\n"
        "helper['give_up_rights'](512 << 20)\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))\n"
    )
    result = run_isolated(code)
    assert result.stdout == "(0, 0)\n", result.stderr


def test_only_its_own_modules_are_loaded_and_nothing_is_said_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither what lies in the working directory nor the start-up files of site-packages."""
    report = "{'text': f'{str() in sys.path} {\"site\" in sys.modules}'}"
    answer = f"sys.stdin.readline(); sys.stdin.readline(); print(json.dumps({report}), flush=True); sys.stdin.read()"
    monkeypatch.setattr(chat_template, "START", f"import json, sys; print('noise', file=sys.stderr); {answer}")
    template = ChatTemplate("", {})
    assert template.render([]) == "False False"
    template.close()
    assert capfd.readouterr().err == ""


def test_without_jinja2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TemplateFailure, match="pip install jinja2"):
        ChatTemplate("hi", {}).render([])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('no system messages, please') }}", "^no system messages, please$"),
        ("{% if", "expected"),
        ("{{ 1 // 0 }}", "^ZeroDivisionError: "),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10**10 }}", "^MemoryError"),
    ],
)
def test_the_reason_of_a_failure_reaches_the_caller_and_the_helper_goes_on(text: str, reason: str) -> None:
    template = ChatTemplate(text, {})
    helpers = []
    for _ in range(2):
        with pytest.raises(TemplateFailure, match=reason):
            template.render(CONVERSATIONS[0])
        helpers.append(template._helper)
    assert helpers[0] is helpers[1] is not None
    template.close()


def test_the_helper_sees_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    template = ChatTemplate(TEMPLATES["chatml"], {})
    template.render(CONVERSATIONS[0])
    assert template._helper is not None
    environment = Path(f"/proc/{template._helper.pid}/environ").read_bytes()
    assert b"SECRET_TOKEN" not in environment
    template.close()


@pytest.mark.parametrize("seen", [False, True], ids=["just now", "long ago"])
def test_a_killed_helper_is_told_and_another_one_starts(seen: bool) -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    expected = template.render(CONVERSATIONS[0])
    assert template._helper is not None
    template._helper.kill()
    if seen:
        template._helper.wait()  # the pipe is broken before anything is written
    with pytest.raises(TemplateFailure, match="status -9"):
        template.render(CONVERSATIONS[0])
    assert template.render(CONVERSATIONS[0]) == expected


def test_a_helper_that_left_for_want_of_work_is_not_missed() -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    expected = template.render(CONVERSATIONS[0])
    assert template._helper is not None
    template._helper.send_signal(signal.SIGALRM)  # what its own timer sends after a minute
    assert template.render(CONVERSATIONS[0]) == expected


def impatient() -> subprocess.Popen[bytes]:
    """A helper that leaves after a second without work, and has 30 for a rendering."""
    code = chat_template.HELPER.read_text().replace("IDLE_SECONDS = 60", "IDLE_SECONDS = 1")
    packages = str(Path(sys.modules["jinja2"].__file__ or "").parents[1])
    start = f"import sys; sys.path.append({packages!r})\n{code}"
    command = [sys.executable, "-I", "-S", "-c", start, "", packages, "30", str(1 << 29)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_conversation_is_not_charged_for_reading_and_for_the_one_before() -> None:
    """Each line takes 0.4 s to read here, and a rendering may take 0.3."""
    code = (
        "import runpy, sys, time; sys.path.append(sys.argv[1])\n"
        f"helper = runpy.run_path({str(chat_template.HELPER)!r})\n"
        "class Slow:\n"
        "    lines = [b'{\"template\": \"hi\", \"variables\": {}}', b'[]', b'[]', b'']\n"
        "    def readline(self):\n"
        "        end = time.process_time() + 0.4\n"
        "        while time.process_time() < end: pass\n"
        "        return self.lines.pop(0)\n"
        "sys.stdin = type('', (), {'buffer': Slow()})\n"
        "helper['serve'](0.3)\n"
    )
    result = run_isolated(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == '{"text": "hi"}\n' * 2


def test_it_does_not_leave_while_it_renders() -> None:
    now = "strftime_now('%s') | int"
    stop = "{% if " + now + " > begin + 2 %}{% break %}{% endif %}"
    loops = "{% for a in range(99999) %}{% for b in range(99) %}" + stop + "{% endfor %}" + stop + "{% endfor %}"
    text = "{% set begin = " + now + " %}" + loops + "done"
    with impatient() as helper:
        answer, _ = helper.communicate(json.dumps({"template": text, "variables": {}}).encode() + b"\n[]\n")
    assert json.loads(answer) == {"text": "done"}
    assert helper.returncode == 0, "and goes when there is no more to read"


def test_it_leaves_for_want_of_work() -> None:
    before = child_processes()
    helper = impatient()
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(b'{"template": "x", "variables": {}}\n')
    helper.stdin.flush()
    assert helper.wait(timeout=60) == -signal.SIGALRM
    helper.stdin.close()
    helper.stdout.close()
    assert child_processes() == before


@pytest.mark.parametrize("how", ["close", "del"])
def test_it_goes_with_its_owner(how: str) -> None:
    before = child_processes()
    template = ChatTemplate(TEMPLATES["chatml"], {})
    template.render(CONVERSATIONS[0])
    assert len(child_processes() - before) == 1
    helper = template._helper
    assert helper is not None and helper.stdin is not None and helper.stdout is not None
    if how == "close":
        template.close()
        template.close()
    del template
    assert helper.stdin.closed and helper.stdout.closed
    assert child_processes() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_copy_has_a_helper_of_its_own() -> None:
    """Else two processes would read one pipe, and get each other's conversations. In a process of its own, because this
    one has threads."""
    code = (
        "import os, sys\n"
        "from nanovllm.chat_template import ChatTemplate\n"
        "template = ChatTemplate('{{ messages }}', {}); template.render([0]); first = template._helper.pid\n"
        "child = os.fork()\n"
        "right = all(template.render([child, i]) == str([child, i]) for i in range(200))\n"
        "if not child:\n"
        "    sys.exit(0 if right and template._helper.pid != first else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and right\n"
        "assert template.render([1]) == '[1]' and template._helper.pid == first\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_it_goes_with_a_caller_that_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from nanovllm.chat_template import ChatTemplate\n"
        "template = ChatTemplate('{{ messages }}', {}); template.render([]); print(template._helper.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    helper = int(result.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(helper, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{helper}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the helper outlives its caller")


def test_a_loop_ends_even_if_the_caller_is_gone() -> None:
    """The limit is the operating system's, not the caller's."""
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = ChatTemplate(loops, {})
    started = time.process_time()
    with pytest.raises(TemplateFailure, match="may never end"):
        template.render([])
    assert time.process_time() - started < 1, "the caller only waits"


def test_an_interrupt_in_the_middle_leaves_no_answer_behind() -> None:
    """An answer that comes late must not be taken for that of the next question."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"content": "one"}]) == "one"
    helper = template._helper
    assert helper is not None
    helper.send_signal(signal.SIGSTOP)  # it has the question, and answers when nobody waits any more
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            template.render([{"content": "two"}])
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        helper.send_signal(signal.SIGCONT)
    assert template.render([{"content": "three"}]) == "three"
    template.close()


def test_an_interrupt_in_a_terminal_is_not_for_the_helper() -> None:
    """Ctrl-C goes to every process of the terminal's group; the helper is in a group of its own."""
    code = (
        "import os, signal\n"
        "from nanovllm.chat_template import ChatTemplate\n"
        "signal.signal(signal.SIGINT, lambda *noted: print('noted'))\n"
        "template = ChatTemplate('{{ messages }}', {}); template.render([]); helper = template._helper\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(template.render(['still there']), template._helper is helper)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert result.stdout.split("\n")[:2] == ["noted", "['still there'] True"], result.stdout + result.stderr
