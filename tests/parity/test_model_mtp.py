"""Modules that predict further tokens in the files of transformers: kept, dropped, read; and computed there.

transformers 5 has these modules for its `generate(use_mtp=True)` (`modeling_layers.MtpModel`): it reads them from the
files that we write, and its losses and gradients are the oracle of ours. Losses are fp32 sums in another order;
gradients are held to 1e-5 of their norm, as those of models are.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from hf_comparison import from_hf
from launcher.cli import main
from launcher.commands.trained import load_decoder, open_trained
from launcher.config.tree import RunConfig
from modeling.config import FamilyName, ModelConfig
from modeling.decoder import Decoder
from modeling.mtp import Ahead, following
from modeling.mtp_config import MTPConfig
from rotating import some_fast
from saved_runs import save_run
from small_models import build, example_config, next_tokens, packed_rows, tensors_of
from warnings_seen import no_warnings

FAMILIES_OF_IT: tuple[FamilyName, ...] = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
GRADIENT_TOLERANCE = 1e-5
ONE_FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(family: FamilyName, depth: int = 2, **changes: Any) -> tuple[ModelConfig, Decoder]:
    config = example_config(family, vocab_size=257, mtp=MTPConfig(depth=depth), **changes)
    model = build(config, 3)
    save_run(Path("run"), RunConfig(model=config), model, 5)
    return config, model


def stored(folder: str) -> dict[str, Tensor]:
    return load_file(Path(folder) / ONE_FILE)


def told(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


def their_losses(folder: str, tokens_BS: Tensor, config: ModelConfig) -> tuple[Any, list[Tensor]]:
    """transformers' main model of the folder, and by depth from 0 the mean loss of the tokens that far ahead and one.

    Rows are documents. The number of the layers is told to it: it knows those of published models.
    """
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("transformers 4 does not compute these modules")
    main_model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    if not hasattr(main_model.config, "num_mtp_layers"):  # of glm4_moe_lite, whose class knows no key for them
        main_model.config.num_mtp_layers = len(config.mtp_layers)
        main_model.config.mtp_mlp_layer_types = ["sparse"] * len(config.mtp_layers)
    main_model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\." for layer in config.mtp_layers]
    modules = modeling_layers.MtpModel.from_pretrained(main_model, trust_remote_code=False)
    output = main_model(tokens_BS, output_hidden_states=True, use_cache=False)
    losses = [F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())]
    hidden_BSD = output.hidden_states[-1]
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    for k in range(1, len(config.mtp_layers) + 1):
        seen = {"position_ids": positions_BS[:, k:], "mtp_cache": None, "input_ids": tokens_BS[:, k:]}
        hidden_BSD = modules.forward_layer(k - 1, hidden_BSD[:, :-1], **seen)
        logits_BSV = main_model.lm_head(hidden_BSD[:, :-1])
        losses.append(F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, k + 1 :].flatten()))
    main_model.modules_of_mtp = modules
    return main_model, losses


def their_gradients(config: ModelConfig, main_model: Any) -> dict[str, Tensor]:
    """By the names in the files, but for experts, of which version 5 has stacks."""
    grads = {name: weight.grad for name, weight in main_model.named_parameters() if "modules_of_mtp" not in name}
    for name, weight in main_model.modules_of_mtp.layers.named_parameters():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        grads[f"model.layers.{config.n_layers + int(number)}.{rest}"] = weight.grad
    return grads


def of_files(grads: dict[str, Tensor], name: str) -> Tensor:
    """The gradient of a tensor of the files: stacks of experts have gates and ups together; biases have none."""
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(6)
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return grads[name]
    stack, expert, kind = found[1], int(found[2]), found[3]
    if kind == "down":
        return grads[f"{stack}.down_proj"][expert]
    gate, up = grads[f"{stack}.gate_up_proj"][expert].chunk(2)
    return gate if kind == "gate" else up


@pytest.mark.parametrize("family", some_fast(FAMILIES_OF_IT, "glm4_moe"))
def test_losses_and_gradients_are_those_of_transformers(family: FamilyName) -> None:
    """Its modules read what we write, and with the same tokens lose the same, by every weight."""
    config, model = write_run(family)
    assert config.mtp is not None
    assert main(["export", "run", "out", "--keep-mtp"]) == 0
    rows = packed_rows(config.vocab_size, 4, [[12], [12]])
    main_model, losses = their_losses("out", rows.tokens_BS, config)
    weight = config.mtp.coefficient / config.mtp.depth
    (losses[0] + weight * sum(losses[1:])).backward()
    targets_BS = next_tokens(rows)
    counts = [2 * (12 - k - 1) for k in range(3)]
    further = following(targets_BS, config.mtp.depth)
    ahead = [Ahead(*each, weight / count) for each, count in zip(further, counts[1:], strict=True)]
    output = model(rows.tokens_BS, rows.context(), targets_BS, ahead=ahead)
    assert output.loss is not None
    (output.loss / counts[0]).backward()
    ours = [output.loss, *output.further_losses]
    for loss, count, theirs in zip(ours, counts, losses, strict=True):
        assert float(loss.detach()) / count == pytest.approx(float(theirs.detach()), rel=1e-5)
    grads = their_gradients(config, main_model)
    theirs = from_hf(config, lambda name: of_files(grads, name))
    total = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = max(float(theirs[name].norm()), 1e-5 * float(total))
        assert float((parameter.grad - theirs[name]).norm()) / scale <= GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("family", some_fast(FAMILIES_OF_IT, "glm4_moe"))
def test_dropped_is_the_model_alone_and_silent(family: FamilyName) -> None:
    """By default: transformers loads it with no word of missing or unexpected weights, and config.json has none."""
    write_run(family)
    assert main(["export", "run", "out"]) == 0
    assert told("out")["num_nextn_predict_layers"] == 0
    with no_warnings():
        _, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True, trust_remote_code=False)
    assert not any(info.values())
    assert not [name for name in stored("out") if re.match(r"model\.layers\.[2-9]\.", name)]


@pytest.mark.parametrize("family", some_fast(FAMILIES_OF_IT, "glm4_moe"))
@pytest.mark.parametrize("tied", some_fast([False, True], False))
def test_kept_there_and_back(family: FamilyName, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported, imported and exported again, file for file; what the files hold twice is the embedding and the head."""
    config, model = write_run(family, tie_embeddings=tied)
    assert main(["export", "run", "out", "--keep-mtp"]) == 0
    assert told("out")["num_nextn_predict_layers"] == 2
    files = stored("out")
    for layer in config.mtp_layers:
        assert torch.equal(files[f"model.layers.{layer}.embed_tokens.weight"], model.embed.weight)
        assert torch.equal(files[f"model.layers.{layer}.shared_head.head.weight"], model.head.weight)
    assert main(["import", "out", "runs/again"]) == 0
    again = open_trained("runs/again")
    assert again.config.model.mtp == MTPConfig(depth=2)
    for name, tensor in tensors_of(model).items():
        assert torch.equal(again.read(name), tensor), name
    assert main(["export", "runs/again", "again", "--keep-mtp"]) == 0
    for file in (ONE_FILE, "config.json", "generation_config.json"):
        assert (Path("out") / file).read_bytes() == (Path("again") / file).read_bytes(), file
    assert capsys.readouterr().err == ""
    assert not load_decoder(again, "cpu", torch.float32).mtp  # nothing goes on from what they predict


@pytest.mark.slow
def test_verified_with_the_modules(capsys: pytest.CaptureFixture[str]) -> None:
    write_run("glm4_moe", depth=1)
    assert main(["export", "run", "out", "--keep-mtp", "--verify"]) == 0
    assert "; transformers computes the same logits from it" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("family", "n_layers"), [("glm4_moe", 46), ("glm4_moe_lite", 47)])
def test_published_depth_needs_no_word(family: FamilyName, n_layers: int) -> None:
    """Of published models' numbers of layers, the class passes over the modules in silence."""
    config = example_config(family, vocab_size=257, mtp=MTPConfig(), n_layers=n_layers)
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, n_dense_layers=n_layers - 1))
    save_run(Path("run"), RunConfig(model=config), build(config, 3), 5)
    assert main(["export", "run", "out", "--keep-mtp"]) == 0
    with no_warnings():
        _, info = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True, trust_remote_code=False)
    assert not any(info.values())
    assert getattr(AutoConfig.from_pretrained("out", trust_remote_code=False), "num_nextn_predict_layers", 1) == 1


@pytest.mark.slow
def test_dropped_on_import(capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = write_run("deepseek_v3")
    assert main(["export", "run", "out", "--keep-mtp"]) == 0
    assert main(["export", "run", "alone"]) == 0
    assert main(["import", "out", "runs/one", "--drop-mtp"]) == 0
    model = open_trained("runs/one").config.model
    assert model.mtp is None and model.n_layers == config.n_layers
    assert main(["export", "runs/one", "again"]) == 0
    assert (Path("alone") / ONE_FILE).read_bytes() == (Path("again") / ONE_FILE).read_bytes()
    assert capsys.readouterr().err == ""
    assert main(["export", "runs/one", "none", "--keep-mtp"]) == 2
    assert "--keep-mtp needs modules that predict further tokens, and model.mtp=null" in capsys.readouterr().err


def test_told_of_and_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers saves a config.json that tells of modules whose weights it has passed over."""
    write_run("glm4_moe")
    assert main(["export", "run", "out"]) == 0
    config = Path("out/config.json")
    config.write_text(json.dumps({**told("out"), "num_nextn_predict_layers": 1}))
    assert main(["import", "out", "runs/one"]) == 0
    assert capsys.readouterr().err == (
        "out/config.json has keys of modules that predict further tokens, but no file holds a weight of theirs; "
        "they are left out (model.mtp=null)\n"
    )
    assert open_trained("runs/one").config.model.mtp is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param(
            lambda files: files.pop("model.layers.3.eh_proj.weight"),
            "HF_DIR=out must hold model.layers.3.eh_proj.weight [32, 64], and no file does",
            marks=pytest.mark.slow,
        ),
        (
            lambda files: files.update({"model.layers.2.shared_head.head.weight": torch.zeros(257, 32)}),
            "model.layers.2.shared_head.head.weight must be equal to lm_head.weight, which the model computes with, "
            "and is not; give --drop-mtp",
        ),
        pytest.param(
            lambda files: files.update({"model.layers.4.enorm.weight": torch.zeros(32)}),
            "holds model.layers.4 (1 tensors), and num_hidden_layers=2; a module that predicts further tokens is not "
            "read: give --drop-mtp, or remove its tensors",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["missing", "another head", "one too many"],
)
def test_files_that_do_not_fit_are_refused_and_can_be_dropped(change, line, capsys) -> None:
    write_run("glm4_moe", tie_embeddings=False)
    assert main(["export", "run", "out", "--keep-mtp"]) == 0
    files = stored("out")
    change(files)
    save_file(files, f"out/{ONE_FILE}", metadata={"format": "pt"})
    assert main(["import", "out", "runs/one"]) == 2
    assert line in capsys.readouterr().err
    assert main(["import", "out", "runs/one", "--drop-mtp"]) == 0
