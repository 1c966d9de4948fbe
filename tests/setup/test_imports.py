"""`import nanovllm` is quick and loads nothing heavy; every public name comes when it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

TIME_LIMIT = 0.3  # seconds, of the quickest of five: a busy machine is not the package's fault


def seconds_to_import(statement: str) -> float:
    code = f"from time import perf_counter\nstart = perf_counter()\n{statement}\nprint(perf_counter() - start)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return float(shown)


def test_import_is_quick() -> None:
    assert min(seconds_to_import("import nanovllm") for _ in range(5)) < TIME_LIMIT


def test_import_of_the_light_names_is_quick() -> None:
    statement = "from nanovllm import SamplingParams, Config, Parts, RequestError, default_model_path"
    assert min(seconds_to_import(statement) for _ in range(5)) < TIME_LIMIT


@pytest.mark.parametrize("name", [name for name in nanovllm.__all__ if name != "__version__"])
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(nanovllm, name)
    assert value.__name__ == name
    assert getattr(nanovllm, name) is value
    assert name in dir(nanovllm)


def test_all_errors_are_exported() -> None:
    from nanovllm import errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert raised <= set(nanovllm.__all__)


def test_doctor_stays_a_function_after_it_was_used() -> None:
    """A module of the same name would take its place in the package."""
    assert callable(nanovllm.doctor)
    assert "Versions" in repr(nanovllm.doctor())
    assert callable(nanovllm.doctor)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        nanovllm.LMM  # noqa: B018


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "'2000'"), ({"GOMP_SPINCOUNT": "77"}, "'77'"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "'0'")]
)
@pytest.mark.skipif(sys.platform != "linux", reason="torch comes with another OpenMP there")
def test_threads_do_not_wait_for_long(given: dict[str, str], spins: str) -> None:
    """Beside a busy program a decode step took a hundred times as long as without. OpenMP says what it has read."""
    dropped = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {**given, "OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-c", "import nanovllm, torch"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch has another OpenMP")
    assert f"GOMP_SPINCOUNT = {spins}" in shown


def test_a_kernel_is_started_with_it() -> None:
    """A notebook may import torch first, so `make lab` and conda's environment set it as well, if nobody has."""
    root = Path(nanovllm.__file__).parents[1]
    assert "GOMP_SPINCOUNT: 2000" in (root / "environment.yml").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    rule = "show:\n\t@echo $$GOMP_SPINCOUNT\n"
    for given, expected in (({}, "2000"), ({"GOMP_SPINCOUNT": "77"}, "77")):
        command = ["make", "-s", "-f", "Makefile", "-f", "-", "show"]
        shown = subprocess.run(
            command, cwd=root, input=rule, capture_output=True, text=True, check=True, env={**environment, **given}
        ).stdout  # fmt: skip
        assert shown.strip() == expected
