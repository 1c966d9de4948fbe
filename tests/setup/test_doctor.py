"""`nanovllm doctor`: says what is here, and changes nothing."""

from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import diagnosis
from nanovllm.attention import describe_backends


def test_it_reports_what_decides_how_an_engine_runs() -> None:
    text = repr(nanovllm.doctor())
    for expected in (
        torch.__version__,
        nanovllm.__version__,
        "number format",
        "GiB",
        "tensor parallelism",
        "CUDA graphs",
    ):
        assert expected in text
    for name, usable, reason in describe_backends("cuda" if torch.cuda.is_available() else "cpu"):
        assert f"{'yes' if usable else 'no'}: {reason}" in text and name in text


def test_a_notebook_gets_a_table_with_the_same_findings() -> None:
    report = nanovllm.doctor()
    html = report._repr_html_()
    assert html.startswith("<table>")
    for title, rows in report.sections.items():
        assert title in html
        assert all(name in html for name, _ in rows)


def test_what_the_system_says_cannot_break_the_table() -> None:
    html = diagnosis.Report({"Machine": [("CPU", "<b>fast</b> & cheap")]})._repr_html_()
    assert "&lt;b&gt;fast&lt;/b&gt; &amp; cheap" in html


def test_a_missing_default_model_comes_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "none"))
    assert "nanovllm model get" in repr(nanovllm.doctor())
    assert not (tmp_path / "none").exists(), "a look changes nothing"


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "memory", lambda: (diagnosis.GIB, 4 * diagnosis.GIB))
    assert "short of memory" in dict(nanovllm.doctor().sections["What runs here"])["demo, notebooks"]


def test_missing_packages_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed", lambda package: None)
    abilities = dict(nanovllm.doctor().sections["What runs here"])
    assert "anywidget" in abilities["live views"] and abilities["Triton kernels"].startswith("no")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnosis.main([]) == 0
    assert "What runs here" in capsys.readouterr().out
