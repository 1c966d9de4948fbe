"""pyproject.toml, constraints.txt and environment.yml say the same, and what is installed is what they say."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import nanovllm

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
    for requirement in [Requirement(line)]
}
WANTED = [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
CONDA_TEXT = (ROOT / "environment.yml").read_text(encoding="utf-8")


def pinned_version(requirement: Requirement) -> Version:
    (pin,) = requirement.specifier
    assert pin.operator == "==" and "*" not in pin.version, f"{requirement} is not an exact pin"
    return Version(pin.version)


@pytest.mark.parametrize("requirement", WANTED, ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is outside of {requirement}"


@pytest.mark.parametrize("name", sorted(PINS))
def test_pins_are_exact_and_complete(name: str) -> None:
    """What a pinned package needs here is pinned too, so that two installs are the same."""
    pinned_version(PINS[name])
    try:
        needs = distribution(name).requires or []
    except PackageNotFoundError:
        pytest.skip(f"{name} is for other systems and not installed here")
    for requirement in map(Requirement, needs):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        # torch's CUDA build, and nobody else, pins NVIDIA's libraries itself.
        if applies and name != "torch":
            assert canonicalize_name(requirement.name) in PINS, f"{name} needs {requirement}, which has no pin"


def test_torch_is_the_release_that_the_project_is_made_for() -> None:
    assert str(pinned_version(PINS["torch"])) == "2.13.0"
    torch = next(requirement for requirement in WANTED if requirement.name == "torch")
    assert torch.specifier.contains("2.6.0") and not torch.specifier.contains("2.5.1")


def test_triton_is_for_linux_and_the_one_that_torch_wants() -> None:
    triton = next(requirement for requirement in WANTED if requirement.name == "triton")
    assert isinstance(triton.marker, Marker)
    here = {"platform_system": "Linux", "platform_machine": "x86_64"}
    assert triton.marker.evaluate(here)
    assert not triton.marker.evaluate({**here, "platform_system": "Darwin"})
    for text in distribution("torch").requires or []:  # only torch's CUDA build names a triton
        wish = Requirement(text)
        if wish.name == "triton":
            assert wish.specifier.contains(pinned_version(PINS["triton"])), f"torch wants {wish}"


def conda_requirements() -> list[str]:
    (pip_section,) = [entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict)]
    return list(pip_section)


def test_the_conda_file_is_thin_and_takes_the_pins() -> None:
    plain = [entry for entry in CONDA["dependencies"] if isinstance(entry, str)]
    assert [re.split("[=<>]", entry)[0] for entry in plain] == ["python", "pip"]
    assert "--constraint constraints.txt" in conda_requirements()
    assert "--editable .[test]" in conda_requirements()


def test_the_conda_file_names_the_pinned_versions() -> None:
    named = [Requirement(line) for line in conda_requirements() if not line.startswith("--")]
    assert {requirement.name for requirement in named} >= {"torch", "triton", "transformers"}
    wanted = {requirement.name: requirement for requirement in WANTED}
    for requirement in named:
        assert requirement.specifier == PINS[canonicalize_name(requirement.name)].specifier, requirement
        assert requirement.marker == wanted[requirement.name].marker, requirement


def test_flash_attn_is_an_extra_and_a_comment() -> None:
    assert not any(requirement.name == "flash-attn" for requirement in WANTED)
    (extra,) = PROJECT["optional-dependencies"]["flash"]
    assert f"# - {extra.replace(chr(39), chr(34))}" in CONDA_TEXT


def test_the_conda_python_is_one_that_the_package_admits() -> None:
    (python,) = [entry.partition("=")[2] for entry in CONDA["dependencies"] if str(entry).startswith("python=")]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python)


def test_versions_agree() -> None:
    assert nanovllm.__version__ == PROJECT["version"] == version("nanovllm")


def test_the_installed_packages_satisfy_the_project() -> None:
    """As long as the environment was made by `make`, every requirement that applies here is met."""
    for requirement in WANTED:
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(version(requirement.name), prereleases=True), requirement


def test_make_help_lists_the_targets() -> None:
    text = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    for target in ("demo", "lab", "test", "test-slow", "notebooks", "clean"):
        assert f"make {target}" in text


def test_make_test_leaves_the_learners_tests_out() -> None:
    command = ["make", "-C", str(ROOT), "--dry-run", "--assume-old=.venv/.installed", "test"]
    plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in plan.splitlines() if "-m pytest" in line]
    folders = line.partition("not slow")[2]
    assert "tests/setup" in folders and "tests/engine" in folders and "tests/test_architecture.py" in folders
    assert not re.search(r"tests/ch\d", folders)
    assert '-m "not slow"' in line


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "nanovllm"
    shown = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == nanovllm.__version__
