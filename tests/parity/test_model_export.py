"""The exported folder: what is in it, what transformers makes of it, and what is refused."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from byte_tokenizer import save_byte_tokenizer
from data.tokenizer import INFO
from hf_comparison import from_hf
from launcher.commands.export import export, write_export
from launcher.commands.generate import generate_from_checkpoint
from launcher.commands.trained import load_decoder, open_trained
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from modeling.families.config_json import SpecialTokens, to_config_json
from modeling.families.family import family_of
from modeling.families.weights import hf_parts, to_hf
from modeling.logical import logical_shapes
from modeling.moe_config import NoBalance
from modeling.rope_scaling import YarnScaling
from rotating import some_fast
from saved_runs import save_run
from small_models import build, configs, example_config, tensors_of
from transformers_tokenizers import REPLACED
from warnings_seen import no_warnings

FEW = settings(max_examples=10, deadline=None, derandomize=True)


def write_example(family: FamilyName, out: Path, **options: object) -> tuple[ModelConfig, Decoder]:
    config = example_config(family)
    model = build(config, 3)
    write_export(tensors_of(model).items(), config, 64, None, out, **options)
    return config, model


@pytest.mark.parametrize("family", FAMILIES)
def test_names_there_and_back(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family, predicts_further=True))
    def check(config: ModelConfig) -> None:
        tensors = {name: torch.randn(shape) for name, shape in logical_shapes(config).items()}
        theirs = dict(to_hf(config, tensors.items()))
        back = from_hf(config, theirs.__getitem__)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensors[name]) for name in tensors)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_config_means_in_transformers_what_it_says(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family))
    def check(config: ModelConfig) -> None:
        written = to_config_json(config, 128, SpecialTokens(eos=5), "bfloat16")
        read = AutoConfig.for_model(**written)
        rope = {key: written.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in written}
        for key, other in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
            assert written.pop(key, rope.get(other)) == rope.get(other)
        parameters = getattr(read, "rope_parameters", {"no": "positions that turn"})
        if (told := family_of(family)).has_local_rope:
            base = parameters["sliding_attention"]["rope_theta"]
            assert base == written["rope_parameters"]["sliding_attention"]["rope_theta"]
            assert not told.local_rope_key or base == written.pop(told.local_rope_key)
            written["rope_parameters"], parameters = parameters, parameters["full_attention"]
            written.pop("rope_scaling", None)
        assert rope.items() < parameters.items()  # what version 4 reads says the same as what 5 does
        for key, value in written.items():
            if key in ("dtype", "torch_dtype"):
                assert read.dtype == torch.bfloat16
            else:
                seen = getattr(read, key)
                assert seen == value or (key == "sliding_window" and not seen and value is None), key

    check()


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    write_example("qwen3_moe", tmp_path / "one")
    write_example("qwen3_moe", tmp_path / "many", shard_bytes=20_000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 22_000 for file in files)
    whole = load_file(tmp_path / "one/model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "many" / file, framework="pt") as shard:
            assert torch.equal(shard.get_tensor(name), whole[name])
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    with no_warnings():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32, trust_remote_code=False)
    assert loaded.num_parameters() == sum(whole[name].numel() for name in whole)
    assert not [path for path in (tmp_path / "many").iterdir() if path.name.startswith("shard")]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    _, model = write_example("glm4_moe", tmp_path / "out", dtype=dtype)
    with no_warnings():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert theirs.dtype == torch_dtype
    assert torch.equal(theirs.model.embed_tokens.weight, model.embed.weight.to(torch_dtype))
    bias = dict(model.named_buffers())["layers.1.feed_forward.router.bias"]
    assert torch.equal(theirs.model.layers[1].mlp.gate.e_score_correction_bias, bias)  # stays fp32


@pytest.mark.parametrize("family", some_fast(FAMILIES, "llama", "qwen3_moe", "gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize(("d_model", "d_ff"), [(16, 24), (20, 24), (16, 12), (12, 4)])
def test_widths_that_a_dtype_cannot_have(family: FamilyName, d_model: int, d_ff: int, tmp_path: Path) -> None:
    """What is refused really fails in transformers, what is not runs; nothing is left of what is refused."""
    config = example_config(family, d_model=d_model, n_heads=2, n_kv_heads=2)
    if config.rope_dim % 2:  # no config may have half a pair of channels turn
        config = replace(config, rope_fraction=1.0)
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, d_ff=d_ff))
    tensors = tensors_of(build(config, 3))
    write_export(tensors.items(), config, 64, None, tmp_path / "fp32")
    tokens_BS = torch.arange(9)[None]
    for dtype in ("bf16", "fp16"):
        widths = {} if config.moe is None else {"model.d_model": d_model, "model.moe.d_ff": d_ff}
        uneven = [f"{key}={width} " for key, width in widths.items() if width % 8]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", trust_remote_code=False, dtype=DTYPES[dtype])
        if not uneven:
            write_export(tensors.items(), config, 64, None, tmp_path / dtype, dtype)
            AutoModelForCausalLM.from_pretrained(tmp_path / dtype, trust_remote_code=False)(tokens_BS)
            continue
        with pytest.raises(UserError) as refused:
            write_export(tensors.items(), config, 64, None, tmp_path / dtype, dtype)
        assert [line for line, told in zip(refused.value.problems, uneven, strict=True) if told not in line] == []
        assert all(line.startswith(f"--dtype={dtype} ") for line in refused.value.problems)
        assert not (tmp_path / dtype).exists()
        with pytest.raises(RuntimeError, match="16 bytes"):
            model(tokens_BS)


def test_glm_without_bias_exports_zeros(tmp_path: Path) -> None:
    config = example_config("glm4_moe")
    assert config.moe is not None
    object.__setattr__(config.moe, "balance", NoBalance())
    model = build(config, 3)
    write_export(tensors_of(model).items(), config, 64, None, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stored[name].dtype == torch.float32
    assert not stored[name].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_and_generation(family: FamilyName, tmp_path: Path) -> None:
    """AutoTokenizer and generate work on the folder as it is, sampling included, and warn of nothing."""
    vocab_size = save_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / INFO).touch()
    config = example_config(family, vocab_size=vocab_size)
    write_export(tensors_of(build(config, 3)).items(), config, 64, tmp_path / "tokenizer", tmp_path / "out")
    with no_warnings():
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False)
        inputs = tokenizer("def f(x):", return_tensors="pt", return_token_type_ids=False)
        for options in ({}, {"do_sample": False}, {"temperature": 0.7, "top_k": 5}):
            torch.manual_seed(0)
            assert model.generate(**inputs, max_new_tokens=4, **options).shape[1] > 9
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id == 0
    made_for = config.max_positions or 64
    if isinstance(config.rope_scaling, YarnScaling):
        made_for = config.rope_scaling.factor * config.rope_scaling.original_seq_len
    assert getattr(model.config, family_of(family).length_key) == made_for
    assert not (tmp_path / "out" / INFO).exists()  # ours alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_that_transformers_replaces_is_told(
    family: FamilyName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For some families version 5 splits text by that model's own rule, whatever tokenizer.json says."""
    corpus = ["def f(x):\n    return 12345", "naïve café"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=90, special_tokens=["<|end|>"]))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    config = example_config(family, vocab_size=200)
    write_export(tensors_of(build(config, 3)).items(), config, 64, tmp_path / "tokenizer", tmp_path / "out")
    said = capsys.readouterr().err
    told = f"for model.family={family}, transformers' AutoTokenizer loads {REPLACED.get(family)}, which does not split"
    assert (told in said) == (family in REPLACED) == ("AutoTokenizer loads" in said)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert [plain(text)["input_ids"] for text in corpus] == [tokenizer.encode(text).ids for text in corpus]


def test_a_weight_that_a_family_does_not_name_is_named() -> None:
    rule = r"modeling\.families\.llama: FAMILY\.weights has no name for layers\.\{layer\}\.attention_norm\.bias"
    with pytest.raises(TypeError, match=rule):
        hf_parts(replace(example_config("llama"), norm="layer"), "layers.0.attention_norm.bias")


def only(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("below", ["step-00000009", "step-00000005/hf", "new/folder"])
def test_a_run_s_checkpoints_are_no_place_for_an_export(tmp_path: Path, below: str) -> None:
    """Where the next start would set it aside as a damaged checkpoint, or a rule delete it."""
    config = example_config("llama", vocab_size=257)
    save_run(tmp_path / "run", RunConfig(model=config), build(config, 1), 5)
    held = tmp_path / "run/checkpoints"
    before = sorted(held.rglob("*"))
    with pytest.raises(UserError) as refused:
        export(tmp_path / "run", held / below)
    assert refused.value.problems[0].startswith(f"OUT={held / below} must lie outside of {held}, where a run keeps ")
    assert sorted(held.rglob("*")) == before
    assert export(tmp_path / "run", tmp_path / "exports/step-00000009") == 0
    assert export(tmp_path / "run", tmp_path / "exports/step-00000010") == 0


def test_a_place_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    """A tokenizer is read back there by libraries that take UTF-8 alone; weights are read by ours."""
    config = example_config("llama", vocab_size=save_byte_tokenizer(tmp_path / "tokenizer"))
    tensors = tensors_of(build(config, 3)).items()
    out = tmp_path / os.fsdecode(b"l\xe4uf")  # Latin-1
    with pytest.raises(UserError) as refused:
        write_export(tensors, config, 64, tmp_path / "tokenizer", out)
    (line,) = refused.value.problems
    assert line.startswith(f"OUT={out} must have a whole path of UTF-8, ")
    assert only(tmp_path) == {"tokenizer"}
    write_export(tensors, config, 64, None, out)
    assert (out / "model.safetensors").is_file()


def test_an_occupied_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").touch()
    with pytest.raises(UserError) as refused:
        write_example("llama", tmp_path / "out")
    assert len(refused.value.problems) == 1
    assert only(tmp_path) == {"out"}
    assert only(tmp_path / "out") == {"precious"}
    (tmp_path / "file").touch()
    with pytest.raises(UserError):
        write_example("llama", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with pytest.raises(UserError):
        write_example("llama", tmp_path / "link")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_example("llama", tmp_path / "out")
    assert only(tmp_path) == {"out"}
    assert only(tmp_path / "out") == {"config.json", "generation_config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # all follow the umask


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match="GiB free"):
        write_example("llama", tmp_path / "sub/out")
    assert only(tmp_path) == set()


def test_planted_interruption_leaves_nothing(tmp_path: Path) -> None:
    config = example_config("llama")

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors_of(build(config, 3)).items())[:3]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_export(broken(), config, 64, None, tmp_path / "out", shard_bytes=10)
    assert only(tmp_path) == set()


@pytest.mark.parametrize("element", [65504.0, -70000.0, float("inf")])
def test_what_fp16_cannot_hold_is_refused(element: float, tmp_path: Path) -> None:
    """It became infinite without a word; what is infinite already stays so."""
    config = example_config("llama")
    tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(build(config, 3)).items()}
    tensors["final_norm.weight"][0] = element
    for dtype in ("fp32", "bf16", "fp16"):
        if dtype == "fp16" and element == -70000.0:
            told = (
                r"^--dtype=fp16 must hold model\.norm\.weight, whose largest element is 70000, and ends at 65504; give"
            )
            with pytest.raises(UserError, match=told):
                write_export(tensors.items(), config, 64, None, tmp_path / dtype, dtype)
            assert only(tmp_path) == {"fp32", "bf16"}
            return
        write_export(tensors.items(), config, 64, None, tmp_path / dtype, dtype)


def test_planted_missing_tensor_is_refused(tmp_path: Path) -> None:
    config = example_config("llama")
    tensors = tensors_of(build(config, 3))
    del tensors["final_norm.weight"]
    with pytest.raises(RuntimeError, match=r"final_norm\.weight"):
        write_export(tensors.items(), config, 64, None, tmp_path / "out")
    assert only(tmp_path) == set()


@pytest.fixture
def run_config() -> RunConfig:
    return RunConfig(model=example_config("glm4_moe", vocab_size=257, tie_embeddings=True))


def test_export_of_a_run_and_of_a_checkpoint(
    tmp_path: Path, run_config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run directory means its latest good checkpoint; what is read back is what was saved."""
    first, second = build(run_config.model, 1), build(run_config.model, 2)
    older = save_run(tmp_path / "run", run_config, first, 5)
    newer = save_run(tmp_path / "run", run_config, second, 10)
    for path, out, model in ((tmp_path / "run", "a", second), (older, "b", first)):
        export(path, tmp_path / out)
        theirs = load_file(tmp_path / out / "model.safetensors")
        read = from_hf(run_config.model, theirs.__getitem__)
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors_of(model).items())
        loaded = load_decoder(open_trained(path), "cpu", torch.float32)
        assert all(torch.equal(tensors_of(loaded)[name], tensor) for name, tensor in tensors_of(model).items())
        assert loaded.head.weight.data_ptr() == loaded.embed.weight.data_ptr()
    assert json.loads((tmp_path / "a/config.json").read_text())["max_position_embeddings"] == run_config.data.seq_len

    with open(newer / "shard.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"oops")
    assert open_trained(tmp_path / "run").checkpoint.step == 5
    assert "step-00000010 is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match="does not match its hash"):
        export(newer, tmp_path / "c")
    assert only(tmp_path) == {"run", "a", "b"}


def test_who_may_read_an_export_is_what_the_umask_says(tmp_path: Path, run_config: RunConfig) -> None:
    """The tokenizer's copy that is exported lies in a folder that only its owner reads; the export does not."""
    save_run(tmp_path / "run", run_config, build(run_config.model, 1), 5)
    (tmp_path / "plain").mkdir()
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_generate_from_a_run(tmp_path: Path, run_config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", run_config, build(run_config.model, 1), 5)
    text = generate_from_checkpoint(tmp_path / "run", "import", max_new_tokens=5)
    assert text.startswith("import")
    assert capsys.readouterr().out == text + "\n"


def test_checkpoints_that_are_none_are_refused(tmp_path: Path, run_config: RunConfig) -> None:
    (tmp_path / "empty").mkdir()
    directory = save_run(tmp_path / "run", run_config, build(run_config.model, 1), 5)
    (tmp_path / "run/config.yaml").unlink()
    for path, reason in (
        ("absent", "is not a folder"),
        ("empty", "no checkpoint"),
        (directory, r"config\.yaml is missing"),
    ):
        with pytest.raises(UserError, match=reason) as refused:
            export(tmp_path / path, tmp_path / "out")
        assert len(refused.value.problems) == 1
    assert only(tmp_path) == {"run", "empty"}


def test_a_model_of_no_family_is_not_exported(tmp_path: Path) -> None:
    config = replace(example_config("llama"), family="none", positions="t5", score_cap=5.0)
    with pytest.raises(UserError) as caught:
        write_export(tensors_of(build(config, 0)).items(), config, 64, None, tmp_path / "out")
    assert caught.value.problems == [
        "model.family=none names no class of `transformers` that an export could become; `roundtable generate` and "
        "`eval` take the checkpoint itself"
    ]
    assert not (tmp_path / "out").exists()
