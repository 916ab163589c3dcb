"""Exported folders as transformers 4 and the installed version load them, each with nothing but the folder.

Version 4 lies in .transformers4, which `make test-transformers4` fills, and runs in a process of its own. Tolerances as
in test_model_hf.py. No router of these models is near a tie (the tokens are drawn so), since version 4 does not say
what it chose.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from data.tokenizer import load_origin, save_tokenizer
from launcher.commands.export import write_export
from launcher.config.families import check_family
from launcher.config.rules import Precision
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from modeling.families.family import family_of
from modeling.families.rope_json import longest
from modeling.generate import generate
from modeling.rope_scaling import DynamicScaling, YarnScaling
from modeling.router import SCORES, Router, Routing
from small_models import (
    LENGTHS,
    MOE_FAMILIES,
    Rows,
    build,
    configs,
    example_config,
    expressible,
    packed_rows,
    tensors_of,
)
from tokenizers_of_kinds import KINDS, TEXTS, save_tokenizer_of
from transformers_judge import NEW_TOKENS, judge
from transformers_tokenizers import REPLACED

# `make test-transformers4` runs it. Whichever test comes first waits until a version has judged every family's cases.
JUDGE_SECONDS = 800
pytestmark = [pytest.mark.slow, pytest.mark.timeout(JUDGE_SECONDS + 100)]
ROOT = Path(__file__).parents[2]
TRANSFORMERS_4 = ROOT / ".transformers4"
LOGITS_TOLERANCE = 2e-5
TIE_GAP = 1e-4  # far above what rounding moves
RANDOM_MODELS = 6  # of each family
SEQ_LEN, PROMPT = 64, 7
VERSIONS = ["4", "installed"]
# no version reads from position_ids where documents begin
UNPACKED = ("gpt_oss", "bloom", "afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
UNPACKED_IN_4 = (
    "stablelm",
    "nemotron",
    "qwen2_moe",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
)  # of these, version 4 does not read from position_ids where documents begin
NO_KERNELS = "fast path is not available"  # which version 4 says of linear attention without its packages of kernels
ONE_BASE_IN_4 = ("olmo3",)  # version 4 knows one base of the rotary frequencies, under a window too
EAGER_IN_4 = ("gemma2", "vaultgemma")  # the attention that version 4 takes by itself leaves out model.score_cap


@dataclass
class Case:
    """One exported model and what was asked about it."""

    name: str
    config: ModelConfig
    model: Decoder
    rows: Rows
    folder: Path
    dtype: Precision
    tokenizer: Path | None

    def seen(self, version: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The judge's answers."""
        folder = self.folder / version
        return load_file(folder / "seen.safetensors"), json.loads((folder / "seen.json").read_text())


def least_gap(model: Decoder, rows: Rows) -> float:
    """By how little a choice of experts, or of groups, leads the next one, over all tokens and layers."""
    gaps = [float("inf")]

    def hook(router: Router, _: object, routing: Routing) -> None:
        gaps.append(float(router.gap(SCORES[router.score].of(routing.logits_TE)).min()))

    hooks = [module.register_forward_hook(hook) for module in model.modules() if isinstance(module, Router)]
    with torch.no_grad():
        for each in (rows, unpacked(rows)):
            model(each.tokens_BS, each.context())
    for each in hooks:
        each.remove()
    return min(gaps)


def unpacked(rows: Rows) -> Rows:
    """The same tokens, each row one document."""
    tokens_BS = rows.tokens_BS
    return Rows(tokens_BS, torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS), torch.zeros_like(tokens_BS))


def rounded(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The model with weights that ``dtype`` can hold; the selection biases stay."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype))
    return model


def without_negative_biases(model: Decoder) -> Decoder:
    """The model with biases by which version 4 chooses the same experts.

    It gives those of left-out groups a score of 0, not of -inf: they would come before an expert of a chosen group
    whose score and bias add up to less than 0.
    """
    for module in model.modules():
        if isinstance(module, Router) and module.bias is not None and module.n_groups > 1:
            module.bias.abs_()
    return model


def make_case(name: str, config: ModelConfig, folder: Path, dtype: Precision = "fp32", kind: str | None = None) -> Case:
    """Exports a model of ``config``, with a tokenizer of ``kind`` as a run would keep it, and writes the questions."""
    model = without_negative_biases(rounded(build(config, 5), DTYPES[dtype]))
    drawn = (packed_rows(config.vocab_size, seed, LENGTHS) for seed in count())
    rows = next(rows for rows in drawn if least_gap(model, rows) > TIE_GAP)
    tokenizer = None
    if kind is not None:
        tokenizer = folder / "tokenizer"
        save_tokenizer_of(kind, folder / "origin")
        save_tokenizer(load_origin(str(folder / "origin")), tokenizer)
    for version in VERSIONS:
        here = folder / version
        here.mkdir(parents=True)
        write_export(tensors_of(model).items(), config, SEQ_LEN, tokenizer, here / "export", dtype)
        prompts_BS = rows.tokens_BS[:, :PROMPT].contiguous()
        asked = {"tokens_BS": rows.tokens_BS, "positions_BS": rows.positions_BS, "prompts_BS": prompts_BS}
        save_file(asked, here / "asked.safetensors")
        questions = {
            "texts": TEXTS if tokenizer is not None else [],
            "accelerate": kind == KINDS[0],
            "packed": config.family not in UNPACKED,
            "attention": "eager" if version == "4" and config.family in EAGER_IN_4 else None,
        }
        (here / "asked.json").write_text(json.dumps(questions))
    return Case(name, config, model, rows, folder, dtype, tokenizer)


def is_allowed(config: ModelConfig) -> bool:
    """Whether a run could have such a model, and both versions compute the same of it in silence (docs/families.md)."""
    scaling = config.rope_scaling
    scales_scores = isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None
    clamps_elsewhere = config.moe is not None and config.moe.swiglu_limit not in (None, 7.0)
    differs = clamps_elsewhere or (config.family == "deepseek_v2" and scales_scores)
    differs = differs or (config.family == "ernie4_5_moe" and not config.has_experts)
    differs = differs or (family_of(config.family).has_rope_alpha and isinstance(scaling, DynamicScaling))
    differs = differs or (config.linear_attention is not None and not config.full_attention_layers)  # none generates
    differs = differs or longest(config, SEQ_LEN) < PROMPT + NEW_TOKENS  # a text beyond the positions is warned of
    return not any(check_family(config)) and not differs


def random_configs(family: FamilyName) -> list[ModelConfig]:
    """Random small models, the same ones every time."""
    found: list[ModelConfig] = []
    once = settings(
        max_examples=RANDOM_MODELS,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    drawn = configs(family).map(as_version_4_has_it).filter(is_allowed)
    once(given(config=drawn, _=st.integers())(lambda config, _: found.append(config)))()
    return found


def as_version_4_has_it(config: ModelConfig) -> ModelConfig:
    """The config with the one base of the rotary frequencies that version 4's class may know."""
    return replace(config, local_rope_theta=config.rope_theta) if config.family in ONE_BASE_IN_4 else config


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    root, made = tmp_path_factory.mktemp("exports"), []
    for family in FAMILIES:
        window = expressible(family, "sliding_window", [5, None])[0]
        plain = {"vocab_size": 310, "rope_theta": 123.0, "norm_eps": 1e-3, "sliding_window": window}
        fixed = [
            ("no-d_head", example_config(family, d_head=None, tie_embeddings=True, **plain), "fp32"),
            ("bf16", example_config(family, **plain), "bf16"),
            ("fp16", example_config(family, **plain), "fp16"),
        ]
        for (name, drawn, dtype), kind in zip(fixed, KINDS, strict=True):
            config = as_version_4_has_it(drawn)
            made.append(make_case(f"{family}-{name}", config, root / f"{family}-{name}", dtype, kind))
        for number, config in enumerate(random_configs(family)):
            made.append(make_case(f"{family}-{number}", config, root / f"{family}-{number}"))
    return made


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest, all_cases: list[Case]) -> str:
    """The version's name, once it has judged all cases of families that it has."""
    judge_with(request.param, [case.folder / request.param for case in all_cases if has_family(request.param, case)])
    return request.param


@pytest.fixture
def cases(all_cases: list[Case], version: str) -> list[Case]:
    """The cases that this version has judged."""
    return [case for case in all_cases if has_family(version, case)]


def has_family(version: str, case: Case) -> bool:
    """Whether the version has the class of the case's family."""
    return version != "4" or family_of(case.config.family).since <= 4


def judge_with(version: str, folders: list[Path]) -> None:
    """Has this version judge the folders; skips the test where version 4 is not installed."""
    if version == "installed":
        for folder in folders:
            judge(folder)
        return
    if not (TRANSFORMERS_4 / "transformers").is_dir():
        pytest.skip("transformers 4 is not here; `make test-transformers4` installs it into .transformers4")
    support = ROOT / "tests/support"
    judged = subprocess.run(
        [sys.executable, "-P", support / "transformers_judge.py", *folders],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TRANSFORMERS_4), str(support)]), "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=JUDGE_SECONDS,
    )
    assert judged.returncode == 0, judged.stderr


def close(seen: Tensor, ours: Tensor) -> float:
    assert seen.shape == ours.shape
    return float((seen - ours).abs().max())


@torch.no_grad()
def test_logits_and_generation(cases: list[Case], version: str) -> None:
    """Rows of one document, packed rows, and greedy continuations."""
    problems = []
    for case in cases:
        seen, found = case.seen(version)
        assert found["version"].startswith("4.") == (version == "4")
        alone, packed = unpacked(case.rows), case.rows
        for name, rows in (("logits_BSV", alone), ("packed_BSV", packed)):
            if name == "packed_BSV" and case.config.family in (*UNPACKED, *(UNPACKED_IN_4 if version == "4" else ())):
                continue
            error = close(seen[name], case.model(rows.tokens_BS, rows.context()).logits_BSV)
            problems += [f"{case.name}: {name} differ by {error:.1e}"] if error > LOGITS_TOLERANCE else []
        greedy_BS = generate(case.model, packed.tokens_BS[:, :PROMPT], NEW_TOKENS, temperature=0.0)
        problems += [] if torch.equal(seen["greedy_BS"], greedy_BS) else [f"{case.name}: other tokens generated"]
    assert not problems, "\n".join(problems)


def warnings_of(found: dict[str, Any]) -> list[Any]:
    """What a version said, but for the packages of kernels that it misses."""
    return [each for each in found["warnings"] if NO_KERNELS not in str(each)]


def test_loading_is_silent_and_complete(cases: list[Case], version: str) -> None:
    """No weight missing or unexpected, no warning from any part, the dtype understood."""
    for case in cases:
        _, found = case.seen(version)
        assert found["loading"] == {}, case.name
        assert warnings_of(found) == [], case.name
        assert found["config_dtype"] == str(DTYPES[case.dtype]), case.name


@torch.no_grad()
def test_accelerate_loads_ours_where_it_loads_theirs(cases: list[Case], version: str) -> None:
    """In version 4 all families; version 5 has a layer's experts in one tensor, which it saves one by one."""
    loaded = set()
    for case in cases:
        seen, found = case.seen(version)
        if not found.get("accelerate", {}).get("theirs"):
            continue
        loaded.add(case.config.family)
        assert found["accelerate"]["ours"], case.name
        rows = unpacked(case.rows)
        ours_BSV = case.model(rows.tokens_BS, rows.context()).logits_BSV
        assert close(seen["dispatched_BSV"], ours_BSV) <= LOGITS_TOLERANCE, case.name
    assert loaded >= {case.config.family for case in cases} - (set(MOE_FAMILIES) if version == "installed" else set())


def test_tokenizers(cases: list[Case], version: str) -> None:
    """Each text's ids, with special tokens and without, and the text from them, are the run's own tokenizer's."""
    for case in cases:
        if case.tokenizer is None or (case.config.family in REPLACED and version == "installed"):
            continue  # version 5 takes a class of its own, as the export says: test_model_export.py
        _, found = case.seen(version)
        ours = Tokenizer.from_file(str(case.tokenizer / "tokenizer.json"))
        loaded = load_origin(str(case.tokenizer))
        assert found["ids"] == [ours.encode(text).ids for text in TEXTS], case.name
        assert found["plain_ids"] == [ours.encode(text, add_special_tokens=False).ids for text in TEXTS], case.name
        assert found["decoded"] == [loaded.decode(ids) for ids in found["ids"]], case.name
        assert found["special_ids"] == [loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id], case.name
        assert found["all_special_ids"] == sorted(loaded.all_special_ids), case.name
        assert found["backend"] == json.loads(ours.to_str()), case.name


def test_sampling_is_from_the_whole_distribution(cases: list[Case], version: str) -> None:
    """Neither version falls back on its default of the 50 likeliest tokens."""
    for case in cases:
        if case.tokenizer is not None:
            assert case.seen(version)[1]["different_draws"] > 60, case.name


def test_planted_keys_of_version_5_alone(tmp_path: Path) -> None:
    """A config.json without what version 4 reads loads without a word, and its other logits are seen."""
    had = [family for family in FAMILIES if family_of(family).since <= 4]
    made = [make_case(family, example_config(family, rope_theta=123.0), tmp_path / family) for family in had]
    planted = []
    for case in made:
        path = case.folder / "4/export/config.json"
        config = json.loads(path.read_text())
        if case.config.positions != "rope" or "rotary_emb_base" in config:
            continue  # gpt_neox's own key, which both versions read
        planted.append(case)
        config = {key: config[key] for key in config.keys() - {"rope_theta", "partial_rotary_factor"}}
        path.write_text(json.dumps(config))
    judge_with("4", [case.folder / "4" for case in planted])
    for case in planted:
        seen, found = case.seen("4")
        assert warnings_of(found) == []
        with torch.no_grad():
            ours_BSV = case.model(case.rows.tokens_BS, unpacked(case.rows).context()).logits_BSV
        assert close(seen["logits_BSV"], ours_BSV) > 100 * LOGITS_TOLERANCE
