"""Replaced parts: from files that fail, in the place of static methods, and only as long as somebody says."""

from pathlib import Path

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.parts import Parts, active_parts, load_object


def test_a_file_that_fails_fails_again(tmp_path: Path) -> None:
    """Half a module must not be what the next one gets."""
    path = tmp_path / "answer.py"
    path.write_text("def blocks_needed(num_tokens, block_size):\n    return 3\n\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object(f"{path}::blocks_needed")
    path.write_text(path.read_text().replace("1 / 0", ""))
    assert load_object(f"{path}::blocks_needed")(8, 4) == 3


def test_a_function_in_the_place_of_a_static_method_is_given_no_self() -> None:
    replaced = Parts({"BlockManager.blocks_needed": lambda num_tokens, block_size: 3}).resolve(BlockManager)
    assert replaced(4, 4).blocks_needed(8, 4) == replaced.blocks_needed(8, 4) == 3
    assert BlockManager.blocks_needed(8, 4) == 2


def test_parts_are_active_inside_their_block_only() -> None:
    before = active_parts()
    inner, outer = Parts({"Sampler": int}), Parts({"Sampler": str, "Config": str})
    with pytest.raises(ZeroDivisionError), outer.active():
        with inner.active() as merged:
            assert active_parts() is merged and merged.replacements == {"Sampler": int, "Config": str}
        assert active_parts().replacements == outer.replacements
        raise ZeroDivisionError
    assert active_parts() is before
