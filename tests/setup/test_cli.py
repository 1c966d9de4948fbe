"""The command line: picks a command, turns errors into a line and an exit status, loads no more than it needs."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import cli, demo, model_command
from nanovllm.errors import DownloadError, ModelNotFoundError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_command_it_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {command} ", shown, re.M) for command in ("demo", "doctor", "model", "check", "bench"))
    assert cli.main(["--help"]) == 0 and capsys.readouterr().out == shown


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dmeo"]) == 2
    assert "no command 'dmeo'; did you mean demo?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "no command 'xyzzy'\n" in capsys.readouterr().err


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "speed"]) == 2
    assert "no bench 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ("throughput", "latency", "decode", "cpu", "viz"))
def test_every_bench_has_help_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", name, "--help"])
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith(f"usage: nanovllm bench {name} ")


@pytest.mark.parametrize(
    "arguments, says",
    (
        ("throughput --num-seqs 0", "--num-seqs: must be a whole number of at least 1, got '0'"),
        ("throughput --longest 99", "--longest must be at least 100"),
        ("latency --batch 8 -1", "--batch: must be a whole number of at least 1, got '-1'"),
        ("latency --output 1", "--output must be at least 2"),
        ("decode --tp 0", "--tp: must be a whole number of at least 1, got '0'"),
        ("decode --context 25 --steps 100", "--context must exceed a quarter of --steps, which is 25"),
        ("cpu --repeats 0", "--repeats: must be a whole number of at least 1, got '0'"),
        ("viz --tokens 1.5", "--tokens: must be a whole number of at least 1, got '1.5'"),
    ),
)
def test_a_bench_refuses_what_it_cannot_measure(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments.split()])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "nanovllm", command, "--help"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and f"nanovllm {command}" in result.stdout, result.stderr


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: object, **options: object) -> Path:
        raise DownloadError("this machine is offline; check the cable")

    monkeypatch.setattr(model_command.hub, "ensure_default_model", offline)
    assert cli.main(["model", "get"]) == 1
    assert capsys.readouterr().err == "nanovllm model: this machine is offline; check the cable\n"


@pytest.mark.parametrize("command", ["--help", "progress", "doctor"])
def test_a_terminal_of_ascii_shows_question_marks(command: str) -> None:
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    environment = {**os.environ, **plain}
    result = subprocess.run([sys.executable, "-m", "nanovllm", command], capture_output=True, env=environment)
    assert result.returncode == 0 and not result.stderr
    assert result.stdout.isascii() and (command != "progress" or b" ? TODO" in result.stdout)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "model list", "progress"])
def test_a_reader_that_has_gone_is_no_traceback(command: str, unbuffered: str) -> None:
    """`nanovllm progress | head -0`, whether the text is written at once or at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "nanovllm", *command.split()], stdout=writer, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    finally:
        os.close(writer)
    assert result.stderr == b"" and result.returncode != 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "nanovllm", "progress"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode != 0 and result.stderr.startswith("nanovllm progress: No space left on device\n")
    assert "Traceback" not in result.stderr


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_command, "show_models", interrupted)
    assert cli.main(["model", "list"]) == 130
    assert capsys.readouterr().err == "nanovllm model: interrupted\n"


def test_a_pipe_that_was_closed_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nanovllm model list | head`; what Python would write to stderr at its end goes nowhere, too."""

    def broken() -> int:
        raise BrokenPipeError

    stderr = io.StringIO()
    monkeypatch.setattr(model_command, "show_models", broken)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert cli.main(["model", "list"]) == 1 and stderr.closed


def test_model_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    assert cli.main(["model", "list"]) == 0
    assert "fetch the default one with: nanovllm model get" in capsys.readouterr().out
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Tiny").symlink_to(tiny_model_dir)
    assert cli.main(["model", "list"]) == 0
    line = capsys.readouterr().out
    assert re.match(r"Qwen/Tiny +Qwen3ForCausalLM +\d+ MB +/", line) and line.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[1]", '{"architectures": [1, 2]}', "\udcff"])
def test_model_list_goes_on_behind_a_damaged_folder(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    (tmp_path / "bad" / "model.safetensors").touch()
    (tmp_path / "good").symlink_to(tiny_model_dir)
    assert cli.main(["model", "list"]) == 0
    bad, good = capsys.readouterr().out.splitlines()
    assert "damaged config.json" in bad and "Qwen3ForCausalLM" in good


def test_a_home_of_nobody_is_a_folder_like_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOVLLM_HOME", "~nobody-of-this-name/models")
    assert cli.main(["model", "list"]) == 0
    assert f"no model in {tmp_path}/~nobody-of-this-name/models yet" in capsys.readouterr().out


def test_without_a_stderr_stdout_holds_the_answer_alone(tmp_path: Path) -> None:
    command = 'exec "$0" -m nanovllm grade 4.1 --answers "$1" --json 2>&-'
    result = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert result.returncode == 0 and json.loads(result.stdout)["points"] == 0


@pytest.mark.parametrize("arguments", [["--revision", "main"], ["Qwen/Qwen3-0.6B", "--from", "x.whl"]])
def test_model_get_refuses_an_option_that_would_do_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["model", "get", *arguments])
    assert stopped.value.code == 2 and "--from for the default model" in capsys.readouterr().err


def test_model_list_loads_no_torch() -> None:
    code = (
        "import sys\nfrom nanovllm.cli import main\nmain(['model', 'list'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_demo_answers_eight_questions(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> None:
    assert cli.main(["demo", "--model", str(tiny_model_dir), "--max-tokens", "6", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n> ") == 8 == len(demo.QUESTIONS)
    summary = captured.out.strip().splitlines()[-1]
    found = re.fullmatch(
        r"(\d+) tokens in [\d.]+ s: [\d,]+ tok/s, (\d+) steps; "
        r"prefix cache: ([\d,]+) of ([\d,]+) prompt tokens; preemptions: 0",
        summary,
    )
    assert found and 8 <= int(found[1]) <= 48 and 6 <= int(found[2]) <= 14
    assert "Prefill=" in captured.err and "Decode=" in captured.err


def test_the_demo_counts_preemptions_and_hits(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> None:
    options = {"attention_backend": "torch", "kvcache_block_size": 4, "num_kvcache_blocks": 40, "device": "cpu"}
    with LLM(str(tiny_model_dir), seed=0, **options) as llm:
        demo.run(llm, SamplingParams(temperature=1e-6, max_tokens=40, ignore_eos=True))
    summary = capsys.readouterr().out.strip().splitlines()[-1]
    assert int(summary.rpartition(": ")[2]) > 0
    hits = re.search(r"prefix cache: ([\d,]+) of", summary)
    assert hits and int(hits[1]) > 0


def test_demo_with_a_model_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", "Qwen/No-Such-Model"]) == 1
    assert "nanovllm model get Qwen/No-Such-Model" in capsys.readouterr().err


def test_example_runs_unedited(tiny_model_dir: Path) -> None:
    """On a given folder; its own default is the default model."""
    command = [sys.executable, str(ROOT / "example.py"), str(tiny_model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_example_has_the_values_of_the_course() -> None:
    source = (ROOT / "example.py").read_text(encoding="utf-8")
    for line in (
        "llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)",
        "sampling_params = SamplingParams(temperature=0.6, max_tokens=256)",
        "outputs = llm.generate(prompts, sampling_params)",
        'print(outputs[0]["text"])',
    ):
        assert line in source


def test_a_missing_folder_names_the_command() -> None:
    with pytest.raises(ModelNotFoundError, match="nanovllm model get Qwen/Qwen3-0.6B"):
        LLM("Qwen/Qwen3-0.6B")


def test_a_path_may_begin_with_a_tilde(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny_model_dir.parent))
    with LLM(f"~/{tiny_model_dir.name}", device="cpu", num_kvcache_blocks=2, max_model_len=256) as llm:
        assert llm.config.model == str(tiny_model_dir)
