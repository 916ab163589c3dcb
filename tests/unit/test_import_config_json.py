"""What `roundtable import` says of config.json and generation_config.json; what it refuses leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from import_sources import copied, edit, refused, write_sources
from launcher.cli import main


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def here(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of the two."""
    monkeypatch.chdir(copied(sources, tmp_path))
    return tmp_path


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def test_code_that_config_json_names_is_not_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published files of DeepSeek, Phi-3, MiniMax and others name some: the class is transformers' own."""
    Path("one/evil.py").write_text("raise SystemExit('it ran')")
    edit("one/config.json", lambda content: content.update(auto_map=CODE))
    assert main(["import", "one", "runs/one"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    told = "auto_map names code of the folder's own, which is not run"
    assert line == f"one/config.json: {told}: the model is that of transformers' own Glm4MoeForCausalLM"
    assert main(["export", "runs/one", "again"]) == 0
    before, after = load_file("one/model.safetensors"), load_file("again/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "auto_map" not in json.loads(Path("again/config.json").read_text())


SETTINGS = {"max_length": 4096, "do_sample": True, "temperature": 0.6, "top_p": 1.0, "num_beams": 1, "top_k": None}


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (None, "do_sample=true, max_length=4096, temperature=0.6"),
        ({"do_sample": True, "temperature": 0.7}, "max_length=4096, temperature=0.6"),
        ({"do_sample": True, "temperature": 0.6, "max_length": 4096}, None),
    ],
)
def test_settings_of_generation_in_config_json_are_not_lost_silently(
    kept: dict[str, Any] | None, told: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old versions of transformers wrote them there, and 5 does not read them."""
    Path("one/generation_config.json").unlink()
    if kept is not None:
        Path("one/generation_config.json").write_text(json.dumps(kept))
    edit("one/config.json", lambda content: content.update(SETTINGS, torchscript=False, pruned_heads={}))
    assert main(["import", "one", "runs/one"]) == 0
    rule = "write them to generation_config.json to keep them"
    line = f"one/config.json: settings of generation are not kept from here ({told}); {rule}\n"
    assert capsys.readouterr().err == ("" if told is None else line)


def test_a_tokenizer_of_code_that_config_json_names_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("one/config.json", lambda content: content.update(auto_map={**CODE, "AutoTokenizer": "x--y.Z"}))
    lines = refused(capsys, "one")
    assert "config.json names code to run under auto_map (x--y.Z)" in lines[-1]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "mamba"}, 'one/config.json: model_type="mamba" must be one of the '),
    "a list": ({"model_type": ["llama"]}, 'one/config.json: model_type=["llama"] must be one of the '),
    "no family": ({"model_type": None}, "one/config.json: model_type=null must be one of the "),
    "groups": ({"n_group": 3}, "one/config.json: n_group=3 is not possible with model.family=glm4"),
    "biases": ({"attention_bias": 1}, "one/config.json: attention_bias=1 is not possible with model.family=glm4"),
    "activation": ({"hidden_act": "gelu"}, 'one/config.json: hidden_act="gelu" is not possible'),
    "newer": ({"new_key": 7}, "one/config.json: new_key=7 is not known with model.family=glm4_moe; remove it if"),
    "quantized": (
        {"quantization_config": {"bits": 8}},
        'one/config.json: quantization_config={"bits": 8} is not possible: quantized weights are not read',
    ),
    "scaled": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        'one/config.json: rope_parameters={"rope_type": "yarn", "factor": 4} is not possible',
    ),
    "mistyped": ({"hidden_size": "32"}, 'one/config.json: hidden_size="32" is not possible'),
    "zero": ({"hidden_size": 0}, "one/config.json: model.d_model=0 must be at least 1; give another model"),
    "no channels": ({"head_dim": 0}, "one/config.json: model.d_head=0 must be at least 1; give another model"),
    "huge": ({"vocab_size": 2**40}, "one/config.json: model.vocab_size=1099511627776 must be at most 16777216; give"),
    "uneven": ({"num_key_value_heads": 3}, "one/config.json: model.n_kv_heads=3 must divide model.n_heads=4; give"),
    **{
        f"{name} modules": (
            {"num_nextn_predict_layers": depth},
            f"one/config.json: model.mtp.depth={depth} must be at {rule}; give another model",
        )
        for name, depth, rule in (("many", 10**9, "most 64"), ("too many", 10**30, "most 64"), ("fewer", -1, "least 1"))
    },
    "no length": ({"max_position_embeddings": 0}, "one/config.json: max_position_embeddings=0 must be a whole number"),
    "true length": ({"max_position_embeddings": True}, "one/config.json: max_position_embeddings=True must be a whole"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_ours(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, start = CONFIGS[case]
    edit("one/config.json", lambda content: content.update(changes))
    (line,) = refused(capsys, "one")
    assert line.startswith(start)


GENERATION: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "must be JSON, and is not ("),
    "no JSON": (b"import os", "must be JSON, and is not ("),
    "no text": (b"\xff\xfe{}", "must be JSON, and is not ("),
    "a list": (b"[1]", "must hold a JSON object, and holds list; "),
    "no number": (b'{"temperature": NaN}', "must be JSON, and is not (NaN is no number); "),
    "deep": (b'{"a": ' + 100_000 * b"[", "must be JSON, and is not ("),
    "half a character": (b'{"a": "\\ud800"}', "must be JSON, and is not ("),
    "large": (b'{"a": "' + (1 << 20) * b"a" + b'"}', "has more than the 1048576 bytes that such a file may have; "),
    "code": (b'{"auto_map": {"GenerationConfig": "x.C"}}', "must hold options alone, and holds auto_map; "),
    "code to generate": (b'{"custom_generate": "x"}', "must hold options alone, and holds custom_generate; "),
    "a method": (b'{"validate": 1}', "must hold options alone, and holds validate; "),
    "a class": (b'{"__class__": "x"}', "must hold options alone, and holds __class__; "),
    "no length": (b'{"max_new_tokens": -1}', "must be what transformers' GenerationConfig takes, and is not ("),
    "mistyped": (
        b'{"max_new_tokens": "\\u001b[31m"}',
        "must be what transformers' GenerationConfig takes, and is not (",
    ),
}


@pytest.mark.parametrize("case", GENERATION)
def test_a_generation_config_that_is_none(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, rule = GENERATION[case]
    Path("one/generation_config.json").write_bytes(content)
    (line,) = refused(capsys, "one")
    assert line.startswith(f"one/generation_config.json {rule}")


def test_a_generation_config_elsewhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one/generation_config.json").rename("elsewhere.json")
    Path("one/generation_config.json").symlink_to(here / "elsewhere.json")
    (line,) = refused(capsys, "one")
    assert line.startswith("one/generation_config.json is a link that leads out of the folder; ")


def test_each_key_that_is_not_ours_has_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("one/config.json", lambda content: content.update(new=1, newer=2, n_group=3))
    keys = [line.removeprefix("one/config.json: ").partition("=")[0] for line in refused(capsys, "one")]
    assert sorted(keys) == ["n_group", "new", "newer"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "must be JSON, and is not ("),
        (b"[1]", "must hold a JSON object, and holds list"),
        (b"\xff\xfe\x00", "must be JSON, and is not ("),
        (b"[" * 100_000, "must be JSON, and is not ("),
        (b'{"rms_norm_eps": NaN}', "must be JSON, and is not (NaN is no number)"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "must be JSON, and is not ("),
        (b" " * (4 << 20) + b"{}", "has more than the 1048576 bytes"),
    ],
    ids=["cut", "list", "bytes", "nested", "nan", "digits", "long"],
)
def test_a_config_that_is_none(content: bytes, told: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("one/config.json").write_bytes(content)
    (line,) = refused(capsys, "one")
    assert line.startswith(f"one/config.json {told}")
