"""Model folders that are broken or mean harm: refused by name, quickly, in little memory; no code runs, nothing outside
the folder is read. The cases are made by mutation of one good folder.

What cannot be refused is a flipped bit in a weight: every pattern is a number. The engine works, and says nonsense.
"""

import json
import os
import random
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nanovllm.tokenizer
from nanovllm import LLM, NanoVLLMError
from nanovllm.errors import MemoryBudgetError, RequestError, UnsupportedModelError, WeightError
from nanovllm.model_folder import MAX_JSON, MODEL_TYPES
from nanovllm.models.registry import supported_models
from nanovllm.tokenizer import MAX_TOKENIZER, default_template, load_tokenizer
from tests.faults.engines import build, cold, resident_bytes
from tests.tiny_models import edit_json

SECONDS = 5.0
MEMORY = 1 << 30
SECRET = "only the mutant could know this"
MESSAGES = [{"role": "user", "content": "hi"}]


class Watch:
    """What Python opens and imports; an audit hook stays for good, so there is one, which is switched on and off."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or event not in ("open", "import", "exec", "os.system", "subprocess.Popen", "socket.connect"):
            return
        if event != "open" or "w" not in str(args[1]):  # what is written is the test's own work
            self.seen.append(f"{event} {args[:1]}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A place beside the model folder, with a good copy of everything: whoever reaches it finds what it wants."""
    return tmp_path / "outside"


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path, outside: Path) -> Path:
    shutil.copytree(tiny_model_dir, outside)
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def limits(outside: Path, watch: Watch) -> Iterator[None]:
    """Within 5 s of processor time and 1 GiB more of address space than now, and without a look at `outside`."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    watch.seen.clear()
    watch.is_on = True
    started = time.process_time()
    try:
        yield
    finally:
        seconds = time.process_time() - started
        watch.is_on = False
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert seconds < SECONDS, f"{seconds:.1f} s"
    assert not [each for each in watch.seen if str(outside) in each], "something outside the folder was read"
    assert not [each for each in watch.seen if "evil" in each], "code of the folder was read"
    assert not [each for each in watch.seen if each.startswith(("os.system", "socket"))]


def use(path: Path) -> LLM:
    """Build an engine and let it say something, so that nothing is left for later."""
    llm = build(path)
    try:
        llm.generate(["the quick"], cold(2), use_tqdm=False)
        llm.chat(MESSAGES, cold(1))
    finally:
        llm.exit()
    return llm


def test_the_folder_is_good_before_it_is_spoilt(folder: Path, limits: None) -> None:
    use(folder)


# ---- config.json -------------------------------------------------------------------------------------------------

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
ODD_SIZES: list[Any] = [0, -1, 1.5, "64", [], {}, True, 2**31, 2**63, 10**30, 1e300]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_config_json(folder: Path, limits: None, name: str) -> None:
    for value in ODD_SIZES:
        if name == "max_position_embeddings" and value == 2**31:
            continue  # harmless: it only bounds max_model_len
        edit_json(folder / "config.json", **{name: value})
        with pytest.raises((UnsupportedModelError, WeightError, MemoryBudgetError)) as caught:
            use(folder)
        assert len(str(caught.value)) < 5000
    edit_json(folder / "config.json", **{name: None})
    if name not in ("num_key_value_heads", "head_dim", "max_position_embeddings"):  # these have a default
        with pytest.raises(NanoVLLMError):
            use(folder)


OPTIONS: dict[str, list[Any]] = {
    "rms_norm_eps": [-1, 0, "1e-6", [], 1e300, 10**400, "NaN"],
    "rope_theta": [-1, 0, "1e6", 10**400],
    "rope_parameters": [5, [], {"rope_type": "evil"}, {"rope_type": "llama3"}, {"rope_theta": "x"}, {"rope_theta": -1}],
    "rope_scaling": [5, "x", {"type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2}],
    "hidden_act": ["gelu", 5, ["silu"], "x" * 10**6],
    "architectures": [[], "Qwen3ForCausalLM", [5], ["GPT2LMHeadModel"], [["Qwen3ForCausalLM"]], {}],
    "model_type": ["gpt2", "qwen3_moe", 5, [], "", "../outside"],
    "tie_word_embeddings": ["yes", 5, False],
    "attention_bias": ["no", 1, True],
    "layer_types": [["sliding_attention"] * 3, ["full_attention"] * 2, ["evil"] * 3],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "num_labels": [10**9, -1, "2"],
    "auto_map": [{"AutoConfig": "evil.Config"}, "evil.Config", {}],
    "configuration_files": [["../outside/config.4.0.0.json"], ["config.4.0.0.json"]],
    "id2label": [5],
    "partial_rotary_factor": [0.5],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_config_json(folder: Path, limits: None, name: str) -> None:
    original = (folder / "config.json").read_text()
    for value in OPTIONS[name]:
        (folder / "config.json").write_text(original)
        edit_json(folder / "config.json", **{name: value})
        try:
            use(folder)
        except (UnsupportedModelError, WeightError):
            continue
        assert name in ("rope_parameters", "rope_scaling", "rope_theta", "id2label", "partial_rotary_factor"), (
            f"{name}={value!r:.100} was accepted"  # these are unknown to one of the versions of transformers
        )


CONTENTS: dict[str, bytes] = {
    "empty": b"", "text": b"not json", "list": b"[]", "number": b"5", "null": b"null",
    "half": b'{"model_type": "qwen3"',
    "latin": b'{"a": "\xff"}', "utf16": '{"model_type": "qwen3"}'.encode("utf-16"), "bomb": b"[" * 200_000,
    "deep": b'{"a":' * 100_000, "huge int": b'{"vocab_size": ' + b"9" * 5000 + b"}", "large": b" " * (MAX_JSON + 1),
    "nan": b'{"model_type": NaN}', "twice": b'{"model_type": "qwen3", "model_type": "evil"}', "nul": b"\0" * 100,
}  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_files_that_are_no_table(folder: Path, limits: None, name: str) -> None:
    for case, content in CONTENTS.items():
        (folder / name).write_bytes(content)
        try:
            use(folder)
        except UnsupportedModelError as error:
            assert name in str(error) or case in ("twice", "nan", "huge int"), error
            continue
        except RequestError as error:  # transformers 4 makes a tokenizer from what is left, without its template
            assert name == "tokenizer_config.json" and "has no chat template" in str(error), case
        assert name in ("tokenizer_config.json", "generation_config.json") and case in ("nan", "twice"), case


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_too_large(folder: Path, limits: None, name: str) -> None:
    """Good ones, with blanks behind; even those are not read."""
    with (folder / name).open("a") as file:
        file.write(" " * (MAX_TOKENIZER if name == "tokenizer.json" else MAX_JSON))
    with pytest.raises(UnsupportedModelError, match=rf"{name} cannot be read: it has .* bytes, the limit is"):
        use(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "cannot read config.json .*: there is no such file"),
        ("tokenizer.json", "has no tokenizer.json; only fast tokenizers"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_files_that_are_missing(folder: Path, limits: None, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises((UnsupportedModelError, WeightError), match=message):
        use(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                  "model.safetensors", "chat_template.jinja", "model.safetensors.index.json",
                                  "special_tokens_map.json"])  # fmt: skip
@pytest.mark.parametrize("kind", ["link out", "link loop", "pipe", "folder"])
def test_files_that_are_not_files(folder: Path, outside: Path, limits: None, name: str, kind: str) -> None:
    """A link leads to a good file: if it were followed, all would be well."""
    if not (outside / name).exists():
        (outside / name).write_text("{}" if name.endswith("json") else "hi")
    (folder / name).unlink(missing_ok=True)
    if kind == "link out":
        (folder / name).symlink_to(outside / name)
    elif kind == "link loop":
        (folder / name).symlink_to(folder / name)
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    with pytest.raises((UnsupportedModelError, WeightError), match=name):
        use(folder)


# ---- code, and files that the tables name --------------------------------------------------------------------------


def test_a_folder_with_code_is_refused_by_name_and_the_code_never_runs(folder: Path, limits: None) -> None:
    marker = folder / "it-ran"
    (folder / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit('evil')\n")
    (folder / "sitecustomize.py").write_text(f"open({str(marker)!r}, 'w')\n")
    use(folder)  # a file that nothing asks for is no harm
    for name, table in {
        "config.json": {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["modeling_evil.Tokenizer", None]},
    }.items():
        original = (folder / name).read_text()
        edit_json(folder / name, auto_map=table)
        with pytest.raises(UnsupportedModelError, match="auto_map.*modeling_evil.*never run"):
            use(folder)
        (folder / name).write_text(original)
    assert not marker.exists()


def test_transformers_is_told_to_run_no_code_and_to_stay_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is looked at before, so this is the second line of defence."""
    told: dict[str, Any] = {}

    def from_pretrained(path: str, **options: Any) -> None:
        told.update(options)
        raise OSError("enough")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(UnsupportedModelError, match="enough"):
        use(folder)
    assert told == {"trust_remote_code": False, "local_files_only": True}


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "merges_file", "init_inputs", "fast_tokenizer_files",
                                 "tokenizer_object", "gguf_file", "name_or_path", "from_slow"])  # fmt: skip
def test_names_of_files_in_tokenizer_config_are_ignored(folder: Path, outside: Path, limits: None, key: str) -> None:
    expected = load_tokenizer(folder, 300).encode("the quick")
    for value in (str(outside / "tokenizer.json"), ["../outside/tokenizer.4.0.0.json"], "../outside"):
        edit_json(folder / "tokenizer_config.json", **{key: value, "tokenizer_class": "Evil"})
        use(folder)
        assert load_tokenizer(folder, 300).encode("the quick") == expected


def test_the_model_types_are_those_of_the_registry() -> None:
    assert {f"{name}ForCausalLM".lower() for name in MODEL_TYPES} == {name.lower() for name in supported_models()}


# ---- the tokenizer and its template --------------------------------------------------------------------------------


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path, limits: None) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"]["evil"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(UnsupportedModelError, match=r"token 300 \('evil'\).*ends at 299"):
        use(folder)


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "additional_special_tokens"])
def test_special_tokens_that_the_model_does_not_have(folder: Path, limits: None, name: str) -> None:
    """One fits, for the model has a row to spare; then there is no more room."""
    value: Any = ["<evil 1>", "<evil 2>"] if name.endswith("s") else "<evil>"
    edit_json(folder / "tokenizer_config.json", **{name: value})
    if name.endswith("s"):
        with pytest.raises(UnsupportedModelError, match="ends at 299"):
            use(folder)
    else:
        assert use(folder).tokenizer.convert_tokens_to_ids("<evil>") == 299


@pytest.mark.parametrize("value", [5, True, ["</s>"], {"content": 5}, {"text": "</s>"}])
def test_special_tokens_that_are_no_text_are_ignored(folder: Path, limits: None, value: Any) -> None:
    edit_json(folder / "tokenizer_config.json", pad_token=value, additional_special_tokens=[value])
    assert use(folder).tokenizer.pad_token is None


def test_one_chat_template_of_several() -> None:
    several = [{"name": "tools", "template": "t"}, 5, {"name": "default", "template": "d"}]
    assert default_template(several) == "d" and default_template("d") == "d"
    for entry in (several[:2], [{"name": "default"}], [], {"default": "d"}, 5, None):
        assert default_template(entry) is None, entry


def test_a_tokenizer_that_panics_and_one_that_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust code that fails raises what is no Exception. Ctrl-C does so too, and must not become a broken folder."""

    class PanicException(BaseException):
        pass

    for error, seen in ((PanicException("index out of bounds"), UnsupportedModelError), (KeyboardInterrupt(), None)):

        class Broken:
            @staticmethod
            def from_str(text: str, error: BaseException = error) -> None:
                raise error

        monkeypatch.setattr(nanovllm.tokenizer, "Tokenizer", Broken)
        with pytest.raises(seen or type(error)):
            load_tokenizer(folder, 300)


@pytest.mark.parametrize("value", [-1, 300, 2**70, 1.5, "2", True, [2, "2"], [[2]], {"a": 2}])
def test_end_tokens_in_generation_config(folder: Path, limits: None, value: Any) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(UnsupportedModelError, match="eos_token_id"):
        use(folder)


def mutate_tokenizer(table: Any, rng: random.Random) -> None:
    """Change one value somewhere in the table."""
    place = table
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.1:
            place[key] = rng.choice([None, -1, 2**40, "", "evil", [], {}, True, 1.5, ["a"], {"type": "Evil"}])
            return
        place = place[key]


def test_mutated_tokenizers(folder: Path, limits: None) -> None:
    """80 of them: refused by name, or a tokenizer that works within the vocabulary."""
    original, rng, refused = (folder / "tokenizer.json").read_text(), random.Random(0), 0
    for _ in range(80):
        table = json.loads(original)
        mutate_tokenizer(table, rng)
        (folder / "tokenizer.json").write_text(json.dumps(table))
        try:
            with build(folder) as llm:
                assert all(0 <= token_id < 300 for token_id in llm.encode("the quick brown fox"))
        except NanoVLLMError:
            refused += 1
    assert refused > 20


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}" * 3
TEMPLATES = {
    "loop": NESTED + ENDS,
    "silent loop": NESTED + "{% set x = a %}" + ENDS,
    "memory": "{{ 'a' * 10**10 }}",
    "compile time": "{{ 'a' * 10**9 ~ 'b' }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "format": "{{ '%99999999999d' | format(1) }}",
    "width": "{{ 'a'.ljust(10**11) }}",
    "long": "{{ 'a' * 20000000 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "class": "{{ messages.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "raise globals": "{{ raise_exception.__globals__['sys'].exit(0) }}",
    "import": "{{ joiner.__init__.__globals__.__builtins__.__import__('os').system('touch it-ran') }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'tokenizer.json' %}",
    "from": "{% from '/etc/passwd' import x %}",
    "syntax": "{% if",
    "undefined": "{{ nothing.at.all }}",
    "exception": "{{ raise_exception('no system messages, please') }}",
    "surrogate": "{{ '\\ud800' }}",
    "empty": "",
    "zero": "{{ 1 // 0 }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "attr": "{{ (''|attr('__class__')).mro() }}",
    "format class": "{{ '{0.__class__.__base__.x}'.format('') | length // 0 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(folder: Path, limits: None, name: str) -> None:
    """Each ends in an error of ours, in time; and the same engine goes on, with plain prompts and a good template."""
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    with build(folder) as llm:
        started = time.perf_counter()
        with pytest.raises(RequestError):
            llm.chat(MESSAGES, cold(1))
        assert time.perf_counter() - started < 60, "wall time, on a machine that is busy with other things"
        assert len(llm.generate(["the"], cold(1), use_tqdm=False)) == 1
        llm.tokenizer.chat_template = "{{ messages[0]['content'] }}"
        assert llm.chat_prompt(MESSAGES) == llm.encode("hi")
    assert not Path("it-ran").exists()


# ---- weights -------------------------------------------------------------------------------------------------------


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def change(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    """Change one entry of the header."""

    def mutate(content: bytes) -> bytes:
        header, data = header_of(content)
        header[name].update(changes)
        return with_header(header, data)

    return mutate


def every_dtype(dtype: str) -> Callable[[bytes], bytes]:
    def mutate(content: bytes) -> bytes:
        header, data = header_of(content)
        for entry in header.values():
            if "dtype" in entry:
                entry["dtype"] = dtype
        return with_header(header, data)

    return mutate


def twice(content: bytes) -> bytes:
    """One name twice in the header."""
    header, data = header_of(content)
    text = json.dumps(header)
    entry = json.dumps(header["model.norm.weight"])
    text = text[:-1] + f', "model.norm.weight": {entry.replace("F32", "I32")}}}'
    return struct.pack("<Q", len(text)) + text.encode() + data


def many_names(content: bytes) -> bytes:
    """Tensors without a byte."""
    header, data = header_of(content)
    end = max(entry["data_offsets"][1] for entry in header.values() if "data_offsets" in entry)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
    header.update((f"x{number}", empty) for number in range(50_000))
    return with_header(header, data)


NORM = "model.norm.weight"
WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "only a length": lambda content: content[:8],
    "half a header": lambda content: content[:500],
    "half the data": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one byte long": lambda content: content + b"x",
    "zeros": lambda content: bytes(len(content)),
    "noise": lambda content: random.Random(0).randbytes(len(content)),
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "pickle": lambda content: b"\x80\x04\x95" + content[3:],
    "header 2**60": lambda content: struct.pack("<Q", 2**60) + content[8:],
    "header 2**64-1": lambda content: struct.pack("<Q", 2**64 - 1) + content[8:],
    "header 2**63": lambda content: struct.pack("<Q", 2**63) + content[8:],
    "header 10**8": lambda content: struct.pack("<Q", 10**8) + content[8:],
    "header 0": lambda content: struct.pack("<Q", 0) + content[8:],
    "header of spaces": lambda content: struct.pack("<Q", 99_000_000) + b" " * 99_000_000 + content,
    "header of brackets": lambda content: struct.pack("<Q", 10**6) + b"[" * 10**6,
    "header is a list": lambda content: with_header([], content),
    "header is empty": lambda content: with_header({}, b""),
    "negative shape": change(NORM, shape=[-64]),
    "huge shape": change(NORM, shape=[2**40]),
    "overflowing shape": change(NORM, shape=[2**33, 2**33]),
    "no shape": change(NORM, shape=[]),
    "text shape": change(NORM, shape="64"),
    "other shape": change(NORM, shape=[8, 8]),
    "unknown dtype": change(NORM, dtype="EVIL"),
    "backward offsets": change(NORM, data_offsets=[64, 0]),
    "huge offsets": change(NORM, data_offsets=[0, 2**62]),
    "offsets of another": change(NORM, data_offsets=[0, 256]),
    "int dtype": every_dtype("I32"),
    "uint dtype": every_dtype("U32"),
    "half dtype": every_dtype("F16"),
    "double dtype": every_dtype("F64"),
    "twice in the header": twice,
    "50,000 names": many_names,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_broken_weights(folder: Path, limits: None, name: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(WEIGHTS[name](path.read_bytes()))
    with pytest.raises(WeightError):
        use(folder)


def test_flipped_bits_in_the_header(folder: Path, limits: None) -> None:
    """100 of them: refused, or (in the metadata that nobody reads) without effect."""
    path, rng, refused = folder / "model.safetensors", random.Random(0), 0
    original = path.read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    for _ in range(100):
        content = bytearray(original)
        content[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            build(folder).exit()
        except WeightError:
            refused += 1
    assert refused > 85


def test_flipped_bits_in_the_data_never_end_in_a_crash(folder: Path, limits: None) -> None:
    path, rng = folder / "model.safetensors", random.Random(0)
    original = path.read_bytes()
    for _ in range(20):
        content = bytearray(original)
        for _ in range(200):
            content[rng.randrange(20_000, len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with build(folder) as llm:
            for temperature in (1e-6, 1.0):
                params = cold(4)
                params.temperature = temperature
                ids = llm.generate(["the quick"], params, use_tqdm=False)[0]["token_ids"]
                assert len(ids) == 4 and all(0 <= token_id < 300 for token_id in ids)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_weights_that_are_no_numbers(folder: Path, limits: None, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.full_like(tensor, value) for name, tensor in tensors.items()}, folder / "model.safetensors")
    with build(folder) as llm:
        for temperature in (1e-6, 1.0):
            params = cold(4)
            params.temperature = temperature
            ids = llm.generate([[5, 6]], params, use_tqdm=False)[0]["token_ids"]
            assert len(ids) == 4 and all(0 <= token_id < 300 for token_id in ids)


def split(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = {}
    for shard in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[shard::2]}
        save_file(part, folder / f"model-{shard}.safetensors")
        table.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
    return table


INDEX_NAMES = (
    "../outside/model.safetensors", "/etc/passwd", "", ".", "..", "a/b.safetensors", "x" * 300, "a\0b", "\ud800",
    "model-2.safetensors", "config.json", "evil.bin",
)  # fmt: skip


@pytest.mark.parametrize("name", INDEX_NAMES, ids=range(len(INDEX_NAMES)))
def test_an_index_that_names_other_files(folder: Path, outside: Path, limits: None, name: str) -> None:
    table = split(folder)
    table[NORM] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(WeightError) as caught:
        use(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("index", [{}, {"weight_map": 5}, {"weight_map": {"a": ["b"]}}, {"weight_map": {}}, [], "x"])
def test_an_index_without_a_table(folder: Path, limits: None, index: Any) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightError, match="index"):
        use(folder)


def test_a_tensor_in_two_shards(folder: Path, limits: None) -> None:
    table = split(folder)
    tensors = load_file(folder / "model-0.safetensors")
    save_file({**tensors, **load_file(folder / "model-1.safetensors")}, folder / "model-0.safetensors")
    with pytest.raises(WeightError, match="more than one file"):
        use(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(WeightError, match="disagree"):
        use(folder)


def test_a_model_of_a_hundred_gigabytes_in_a_file_of_nothing(folder: Path) -> None:
    """Sparse files cost nothing; what they promise must fit the machine before it is asked for."""
    before = resident_bytes()
    header, _ = header_of((folder / "model.safetensors").read_bytes())
    sizes = {"vocab_size": 1 << 20, "hidden_size": 1 << 14, "intermediate_size": 1 << 18, "num_hidden_layers": 3}
    shapes = {64: 1 << 14, 300: 1 << 20, 112: 1 << 18}
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            keep = any(part in name for part in ("q_norm", "k_norm"))
            entry["shape"] = [size if keep else shapes.get(size, size) for size in entry["shape"]]
            if "k_proj" in name or "v_proj" in name:
                entry["shape"][0] = 64
            size = 4
            for length in entry["shape"]:
                size *= length
            entry["data_offsets"] = [end, end + size]
            end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    edit_json(folder / "config.json", **sizes)
    assert end > 100 << 30
    with pytest.raises(MemoryBudgetError, match="choose a smaller"):
        use(folder)
    assert resident_bytes() - before < 200 << 20
