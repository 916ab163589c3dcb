"""Models as transformers saves them, imported: the same logits, and the same files when they are exported again.

Logits are compared in fp32, to 2e-5 absolute as those of exports are; weights bit for bit.
"""

import dataclasses
import json
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

import launcher.importing.weights
from data.tokenizer import read_info
from hf_folders import LOGITS_TOLERANCE, SEQ_LEN, difference, imported, loaded, said, save_hf_model, stored
from launcher.cli import main
from launcher.commands.trained import end_ids, load_decoder, load_tokenizer
from launcher.config.load import load_config
from launcher.tasks.generation import Wanted, generate_all
from launcher.training.init_from import open_source
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.families.config_json import SpecialTokens, to_config_json
from modeling.families.family import family_of
from modeling.families.weights import HFPart, hf_parts, hf_template
from modeling.logical import logical_shapes
from parallel.checkpoint.manifest import BUFFER, WEIGHT, hash_file, write_manifest
from rotating import some_fast
from small_models import MOE_FAMILIES, configs, example_config
from warnings_seen import no_warnings

# What an export says otherwise than the class does by default, and what changes nothing that is computed.
FREE_KEYS = {"_name_or_path", "transformers_version", "router_aux_loss_coef", "pad_token_id", "bos_token_id"}
SMALL_SHARDS = "20KB"
FEW = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("dtype", "shard"),
    [
        pytest.param(torch.float32, SMALL_SHARDS, id="fp32, shards"),
        pytest.param(torch.float32, "5GB", id="fp32, one file", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, SMALL_SHARDS, id="bf16, shards", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "5GB", id="bf16, one file", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: FamilyName, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    """Logits are transformers', and an export is the source again: each tensor bit for bit, the config, the tokens."""
    source, out, again = tmp_path / "source", tmp_path / "runs/one", tmp_path / "again"
    save_hf_model(source, example_config(family, vocab_size=257), dtype, shard)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard == SMALL_SHARDS)
    trained = imported(source, out)
    assert said(trained.config.model) == said(example_config(family, vocab_size=257))
    assert trained.config.data.seq_len == SEQ_LEN
    assert trained.config.train.precision == ("fp32" if dtype == torch.float32 else "bf16")
    assert difference(source, out) <= LOGITS_TOLERANCE
    assert main(["export", str(out), str(again), "--dtype", trained.config.train.precision]) == 0
    before, after = stored(source), stored(again)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))] == []
    others = {name for name in before if before[name].dtype != after[name].dtype}
    assert all(name.endswith(family_of(family).in_fp32) for name in others)
    configs_read = [AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict() for folder in (source, again)]
    old, new = ({key: value for key, value in each.items() if key not in FREE_KEYS} for each in configs_read)
    assert old == new
    generation = [(folder / "generation_config.json").read_bytes() for folder in (source, again)]
    assert generation[0] == generation[1]
    texts = [
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).encode("naïve\n  def")
        for folder in (source, again)
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 9


@pytest.mark.parametrize("family", some_fast(FAMILIES, "gpt_oss", "deepseek_v3"))
def test_random_models(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family))
    def check(config: ModelConfig) -> None:
        assume(config.sliding_window != 1)  # which no config may have
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_hf_model(folder / "source", config, seed=5, tokenizer=False)
            assert said(imported(folder / "source", folder / "run").config.model) == said(config)
            assert difference(folder / "source", folder / "run") <= LOGITS_TOLERANCE

    check()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_hf_model(tmp_path / "source", example_config("glm4_moe", vocab_size=257), shard=SMALL_SHARDS)
    return tmp_path / "source"


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_planted_two_experts_swapped_are_seen(
    family: FamilyName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(config: ModelConfig, name: str) -> list[HFPart]:
        parts = hf_parts(config, name)
        if len(parts) > 1:
            parts[0], parts[1] = parts[1], parts[0]
        elif "experts.up" in name:  # all experts in one tensor: their gates are taken for what they let through
            (gate,) = hf_parts(config, name.replace("experts.up", "experts.gate"))
            parts = [dataclasses.replace(parts[0], view=gate.view)]
        return parts

    save_hf_model(tmp_path / "source", example_config(family, vocab_size=257))
    monkeypatch.setattr(launcher.importing.weights, "hf_parts", swapped)
    imported(tmp_path / "source", tmp_path / "run")
    assert difference(tmp_path / "source", tmp_path / "run") > 100 * LOGITS_TOLERANCE


@pytest.mark.parametrize(
    "name", ["layers.0.attention_norm.weight", "layers.1.feed_forward.router.bias", "embed.weight"]
)
def test_planted_one_tensor_of_ones_is_seen(name: str, source: Path, tmp_path: Path, monkeypatch) -> None:
    blocks = launcher.importing.weights.Weights.blocks

    def planted(self, named, on_bytes):
        return (block.fill_(1.0) if named == name else block for block in blocks(self, named, on_bytes))

    monkeypatch.setattr(launcher.importing.weights.Weights, "blocks", planted)
    imported(source, tmp_path / "run")
    assert difference(source, tmp_path / "run") > 100 * LOGITS_TOLERANCE


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    """Every finite fp16 value, subnormal ones too, and both zeros."""
    config = example_config("llama", vocab_size=2048, tie_embeddings=True)
    model = save_hf_model(tmp_path / "source", config, torch.float16, tokenizer=False)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    with torch.no_grad():
        model.model.embed_tokens.weight.view(-1).copy_(values.where(values.isfinite(), torch.zeros(())))
    model.save_pretrained(tmp_path / "source")
    read = imported(tmp_path / "source", tmp_path / "run").read("embed.weight")
    assert torch.equal(read.half().view(torch.int16), model.model.embed_tokens.weight.view(torch.int16))
    assert read.abs()[read != 0].min() == 2.0**-24


def test_a_folder_of_two_dtypes_keeps_every_bit(source: Path, tmp_path: Path, capsys) -> None:
    """The fp32 masters hold both; no one --dtype gives the source again, and none is named."""
    before = stored(source)
    for path in source.glob("*.safetensors"):
        halved = {name: t.bfloat16() if t.ndim == 2 else t for name, t in load_file(path).items()}
        save_file(halved, path, metadata={"format": "pt"})
    assert imported(source, tmp_path / "run").config.train.precision == "bf16"
    first = capsys.readouterr().out.splitlines()[0]
    assert "bf16 and fp32 widened to fp32" in first and "--dtype" not in first
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    after = stored(tmp_path / "again")
    halved = {name: t.bfloat16().float() if t.ndim == 2 else t for name, t in before.items()}
    assert [name for name in halved if not torch.equal(after[name], halved[name])] == []


def test_what_is_ignored_as_transformers_does(tmp_path: Path) -> None:
    """Rotary buffers of old files, and the head of a tied model where it is the embedding."""
    config = example_config("llama", vocab_size=257, tie_embeddings=True)
    save_hf_model(tmp_path / "source", config)
    path = tmp_path / "source/model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.int64)
    save_file(tensors, path, metadata={"format": "pt"})
    with no_warnings():
        loaded(tmp_path / "source")
    trained = imported(tmp_path / "source", tmp_path / "run")
    assert "head.weight" not in trained.checkpoint.names()
    assert difference(tmp_path / "source", tmp_path / "run") <= LOGITS_TOLERANCE


@pytest.mark.parametrize(
    ("family", "prefix", "masked"),
    [
        ("gpt2", "transformer.", "h.{layer}.attn"),
        ("bloom", "transformer.", None),
        ("gpt_neox", "", "gpt_neox.layers.{layer}.attention"),
    ],
)
def test_files_as_the_hub_has_them(family: FamilyName, prefix: str, masked: str | None, tmp_path: Path) -> None:
    """GPT-2's and BLOOM's names lack a prefix, GPT-2's and Pythia's files hold each layer's mask."""
    config = example_config(family, vocab_size=257, tie_embeddings=family != "gpt_neox")
    save_hf_model(tmp_path / "source", config)
    path = tmp_path / "source/model.safetensors"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    for layer in range(config.n_layers) if masked else ():
        tensors[masked.format(layer=layer) + ".bias"] = torch.ones(1, 1, 96, 96).tril()
        tensors[masked.format(layer=layer) + ".masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, metadata={"format": "pt"})
    imported(tmp_path / "source", tmp_path / "run")
    assert difference(tmp_path / "source", tmp_path / "run") <= LOGITS_TOLERANCE


@pytest.mark.parametrize("family", some_fast(FAMILIES, "llama", "gpt2", "gpt_oss", "deepseek_v3"))
def test_a_tied_model_may_store_its_head_alone(family: FamilyName, tmp_path: Path) -> None:
    """As transformers reads it; and an export has the embedding again."""
    config = example_config(family, vocab_size=257, tie_embeddings=True)
    save_hf_model(tmp_path / "source", config, tokenizer=False)
    path = tmp_path / "source/model.safetensors"
    tensors = load_file(path)
    embedding = hf_template(config, "embed.weight")
    only_head = {hf_template(config, "head.weight") if name == embedding else name: t for name, t in tensors.items()}
    assert only_head.keys() != tensors.keys() and len(only_head) == len(tensors)
    save_file(only_head, path, metadata={"format": "pt"})
    imported(tmp_path / "source", tmp_path / "run")
    assert difference(tmp_path / "source", tmp_path / "run") <= LOGITS_TOLERANCE
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert torch.equal(stored(tmp_path / "again")[embedding], tensors[embedding])


def test_a_generation_config_is_kept_byte_for_byte(source: Path, tmp_path: Path) -> None:
    """As its author wrote it: keys that no version knows, several ends of text, no end of the last line."""
    content = '{"eos_token_id":[0, 7],\t"temperature": 0.60, "naïve": {"x": 1e-3}}'.encode()
    (source / "generation_config.json").write_bytes(content)
    imported(source, tmp_path / "run")
    for path, out in ((tmp_path / "run", "one"), (tmp_path / "run/checkpoints/step-00000000", "two")):
        assert main(["export", str(path), str(tmp_path / out), "--verify"]) == 0
        assert (tmp_path / out / "generation_config.json").read_bytes() == content
    assert loaded(tmp_path / "two").generation_config.eos_token_id == [0, 7]


def test_any_end_that_a_generation_config_names_ends_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in transformers: models that chat name the end of a turn there beside their tokenizer's EOS."""
    source, run = tmp_path / "source", tmp_path / "run"
    save_hf_model(source, example_config("llama", vocab_size=257))
    theirs, tokenizer = loaded(source), AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    prompt = tokenizer.encode("def ", return_tensors="pt")
    free = theirs.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
    end = next(each for each in free[7:] if each not in free[:7])
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    wanted = loaded(source).generate(prompt, do_sample=False, max_new_tokens=12)[0]
    assert wanted[-1] == end and len(wanted) < len(free)
    trained = imported(source, run)
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "def ", "--temperature", "0", "--max-new-tokens", "12"]) == 0
    text = tokenizer.decode(wanted)
    assert capsys.readouterr().out == text + "\n"
    asked = Wanted(until=("<|endoftext|>",), max_new_tokens=12, temperature=0.0, top_k=None, top_p=None)
    model, ends = load_decoder(trained, "cpu", torch.float32), end_ids(trained, tokenizer)
    (found,) = generate_all(model, tokenizer, [(prompt[0].tolist(), asked)], 1, 0, ends=ends)
    assert "def " + found == text


def test_an_export_has_its_own_generation_config_where_none_came(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").unlink()
    imported(source, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again/generation_config.json").read_bytes())["top_k"] == 0


def test_ids_of_special_tokens_are_kept_without_a_tokenizer(tmp_path: Path) -> None:
    """Those that config.json tells, several ends of text too; of a key that it leaves out what the class takes."""
    source = tmp_path / "source"
    save_hf_model(source, example_config("gemma2"), tokenizer=False)
    (source / "generation_config.json").unlink()
    content = json.loads((source / "config.json").read_text()) | {"eos_token_id": [5, 7], "pad_token_id": None}
    del content["bos_token_id"]
    (source / "config.json").write_text(json.dumps(content))
    imported(source, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--verify"]) == 0
    before, after = (AutoConfig.from_pretrained(each, trust_remote_code=False) for each in (source, tmp_path / "again"))
    ids = [(each.bos_token_id, each.eos_token_id, each.pad_token_id) for each in (before, after)]
    assert ids[0] == ids[1] == (2, [5, 7], None)
    generation = json.loads((tmp_path / "again/generation_config.json").read_bytes())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (2, [5, 7], 5)
    assert loaded(tmp_path / "again").generation_config.eos_token_id == [5, 7]


@pytest.mark.parametrize("eos", [None, 5])
def test_a_cwm_without_a_beginning_of_text_has_its_end_there(eos: int | None, tmp_path: Path) -> None:
    """Its class refuses null, and where the key is left out it has an id beyond a small vocabulary."""
    source, out, again = tmp_path / "source", tmp_path / "run", tmp_path / "again"
    save_hf_model(source, example_config("cwm", vocab_size=257), special=SpecialTokens(eos=eos), tokenizer=False)
    imported(source, out)
    assert main(["export", str(out), str(again), "--verify"]) == 0
    assert json.loads((again / "config.json").read_text())["bos_token_id"] == (eos or 0)
    several = SpecialTokens(eos=(7, 9))
    assert to_config_json(example_config("cwm"), SEQ_LEN, several, "float32")["bos_token_id"] == 7


def test_ids_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    save_hf_model(source, example_config("llama"), tokenizer=False)
    content = json.loads((source / "config.json").read_text()) | {"eos_token_id": [5, "</s>"]}
    (source / "config.json").write_text(json.dumps(content))
    assert main(["import", str(source), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = 'eos_token_id=[5, "</s>"] is not possible: it must be int; give another model'
    assert line == f"{source}/config.json: {told}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("generation_config.json", content) for content in (b"", b"[]", b'{"max_new_tokens": -1}')),
        *(("token_ids.json", content) for content in (b"", b"[]", b'{"bos_token_id": "x"}')),
    ],
)
def test_a_checkpoint_s_small_files_are_not_trusted(
    name: str, content: bytes, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wrote the checkpoint wrote its hashes too."""
    trained = imported(source, tmp_path / "run")
    capsys.readouterr()
    directory = tmp_path / "run/checkpoints/step-00000000"
    (directory / name).write_bytes(content)
    record = {"bytes": len(content), "xxh3_128": hash_file(directory / name)}
    trained.checkpoint.manifest.files[name] = record
    write_manifest(trained.checkpoint.manifest, directory)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"CHECKPOINT={directory}: its {name} must ")
    assert line.endswith("; give another checkpoint") and not (tmp_path / "out").exists()


def test_the_run_directory_and_its_checkpoint(source: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """What training would have written at step 0 but for the optimizer's states; every command takes it."""
    monkeypatch.chdir(tmp_path)
    trained = imported(Path("source"), Path("runs/one"))
    assert {path.name for path in Path("runs").iterdir()} == {"one"}
    assert {path.name for path in Path("runs/one").iterdir()} == {"config.yaml", "checkpoints", ".started_in"}
    config = load_config("runs/one/config.yaml")
    assert (config.name, config.run_dir, str(config.run_path)) == ("one", None, "runs/one")
    manifest = trained.checkpoint.manifest
    assert (manifest.step, manifest.scalars["updates"], manifest.scalars["written_by"]) == (0, 0, None)
    assert manifest.kinds.keys() == {WEIGHT, BUFFER}
    assert list(manifest.tensors) == list(logical_shapes(config.model))
    assert trained.tokenizer is not None and read_info(trained.tokenizer).eos_id == 0
    theirs = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    assert load_tokenizer(trained).decode([70, 71]) == theirs.decode([70, 71])
    assert open_source("runs/one")[1] == config
    Path("text.txt").write_text("a text of some words\n")
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("source -> runs/one: glm4_moe, ") and "generate runs/one" in out
    for command in (
        ["checkpoint", "verify", "runs/one"],
        ["checkpoint", "show", "runs/one"],
        ["checkpoint", "show", "runs/one/checkpoints/step-00000000"],
        ["generate", "runs/one", "--prompt", "a", "--max-new-tokens", "2"],
        ["eval", "runs/one", "--text", "text.txt"],
        ["runs"],
    ):
        assert main(command) == 0, command
    assert "runs/one" in capsys.readouterr().out


def test_no_training_goes_on_from_weights_alone(source: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    imported(source, Path("runs/one"))
    Path("text.txt").write_text("a text of some words\n")
    capsys.readouterr()
    for place in ([], ["train.precision=fp32", "optimizer.name=sgd"]):
        assert main(["train", "runs/one/config.yaml", "data.sources=[{path: text.txt}]", "--ranks", "1", *place]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            "run_dir=runs/one must be a run's, and holds imported or averaged weights, without the optimizer's"
        )
        assert line.endswith("; set init_from=runs/one, and choose another name or run_dir")
    assert {path.name for path in Path("runs/one").iterdir()} == {"config.yaml", "checkpoints", ".started_in"}


def test_a_tensor_is_read_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and numpy hold no more than a few blocks, however large the model."""
    config = dataclasses.replace(example_config("llama", vocab_size=2**15), d_model=64)
    save_hf_model(tmp_path / "source", config, tokenizer=False)
    imported(tmp_path / "source", tmp_path / "first")  # what is imported and kept for good is there then
    monkeypatch.setattr(launcher.importing.weights, "BLOCK_ELEMENTS", 1 << 12)
    tracemalloc.start()
    try:
        assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "source/model.safetensors").stat().st_size > 16 << 20
    assert peak < 2 << 20


@pytest.mark.parametrize(("family", "key"), [("llama", "max_position_embeddings"), ("bloom", "seq_length")])
def test_a_length_that_is_left_out_is_the_class_s(family: FamilyName, key: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path / "source", example_config(family), tokenizer=False)
    path = tmp_path / "source/config.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    assert imported(tmp_path / "source", tmp_path / "run").config.data.seq_len == 2048


def test_a_branch_of_imported_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hf_model(tmp_path / "source", example_config("llama", vocab_size=257))
    imported(tmp_path / "source", tmp_path / "run")
    capsys.readouterr()
    assert main(["branch", str(tmp_path / "run"), str(tmp_path / "new"), "--step", "0"]) == 2
    assert "holds imported or averaged weights" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_an_import_has_not_is_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hf_model(tmp_path / "source", example_config("llama", vocab_size=257))
    imported(tmp_path / "source", tmp_path / "run")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--text must name what to read, since CHECKPOINT's config has no data.sources (it was imp")


def test_a_copied_key_of_another_value_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers turns as many channels as ``head_dim`` says, where it is given."""
    save_hf_model(tmp_path / "source", example_config("deepseek_v3", vocab_size=257))
    path = tmp_path / "source/config.json"
    content = json.loads(path.read_text())
    assert content["head_dim"] == content["qk_rope_head_dim"] != 2
    path.write_text(json.dumps(content | {"head_dim": 2}))
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert f"config.json: head_dim=2 is not possible with qk_rope_head_dim={content['qk_rope_head_dim']}, " in told
