"""Generation: the same tokens with and without a cache, and as transformers' generate makes of the exported model."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from byte_tokenizer import save_byte_tokenizer
from launcher.cli import main
from launcher.commands.export import write_export
from launcher.commands.generate import argument_problems, check_length, generate_text, readable
from launcher.config.tree import RunConfig
from launcher.console import escaped
from launcher.errors import UserError
from modeling.config import FAMILIES, FamilyName
from modeling.context import Context
from modeling.families.family import family_of
from modeling.generate import choose, generate, new_tokens, nucleus
from modeling.rope_scaling import DynamicScaling, LongRopeScaling
from rotating import some_fast
from saved_runs import save_run
from small_models import build, example_config, expressible, tensors_of
from tokenizers_of_kinds import save_tokenizer_of
from warnings_seen import no_warnings


def prompts(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (3, 7), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [None, 5])
def test_greedy_equals_no_cache(family: FamilyName, window: int | None) -> None:
    config = example_config(family, sliding_window=window, init_std=0.5)  # so that more than a few tokens come
    model = build(config, 1)
    tokens_BS = prompts(config.vocab_size)
    result_BS = generate(model, tokens_BS, 20, temperature=0.0)
    for _ in range(20):
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        with torch.no_grad():
            logits_BSV = model(tokens_BS, Context(positions_BS, torch.zeros_like(tokens_BS))).logits_BSV
        tokens_BS = torch.cat([tokens_BS, logits_BSV[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(result_BS, tokens_BS)
    assert len(tokens_BS[:, 7:].unique()) > 3  # not one token for ever


WINDOWS = [(name, expressible(name, "sliding_window", [5, None])[0], ()) for name in FAMILIES]
# Where all layers are linear, transformers' generate does not know how long the text is.
WINDOWS = [(name, window, (1,) if family_of(name).has("linear_attention") else full) for name, window, full in WINDOWS]
WINDOWS += [
    (name, 5, (1,)) for name, window, _ in WINDOWS if window and expressible(name, "full_attention_layers", [(1,)])
]


@pytest.mark.parametrize(("family", "window", "full"), WINDOWS)
def test_greedy_equals_transformers(
    family: FamilyName, window: int | None, full: tuple[int, ...], tmp_path: Path
) -> None:
    """Prompts of 7 tokens, longer than the window where there is one."""
    config = example_config(family, sliding_window=window, full_attention_layers=full)
    model = build(config, 2)
    write_export(tensors_of(model).items(), config, 64, None, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, trust_remote_code=False)
    tokens_BS = prompts(config.vocab_size)
    with no_warnings():
        expected_BS = theirs.generate(
            tokens_BS, attention_mask=torch.ones_like(tokens_BS), max_new_tokens=20, do_sample=False
        )
    assert torch.equal(generate(model, tokens_BS, 20, temperature=0.0), expected_BS)


def test_greedy_beyond_a_dynamic_base_equals_transformers(tmp_path: Path) -> None:
    """Each pass goes by its own length; keys that are cached stay as they were turned."""
    scaling = DynamicScaling(factor=4.0, original_seq_len=10)
    config = example_config("llama", rope_scaling=scaling, rope_theta=100.0, init_std=0.5)
    model = build(config, 2)
    write_export(tensors_of(model).items(), config, 10, None, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, trust_remote_code=False)
    tokens_BS = prompts(config.vocab_size)
    told = {"attention_mask": torch.ones_like(tokens_BS), "max_new_tokens": 20, "do_sample": False}
    generated_BS = generate(model, tokens_BS, 20, temperature=0.0)
    assert torch.equal(generated_BS, theirs.generate(tokens_BS, **told))
    plain = build(replace(config, rope_scaling=None), 2)
    assert not torch.equal(generated_BS, generate(plain, tokens_BS, 20, temperature=0.0))


LONGROPE = LongRopeScaling(
    original_seq_len=12, longest_seq_len=64, short_factor=(1.0, 1.1, 1.5, 2.0), long_factor=(1.2, 3.0, 9.0, 40.0)
)


@pytest.mark.parametrize("window", some_fast([None, 5], None))
@pytest.mark.parametrize("original_seq_len", some_fast([5, 12, 40], 12))  # all beyond, across, within
def test_greedy_across_longrope_equals_transformers(tmp_path: Path, original_seq_len: int, window: int | None) -> None:
    """From the token on that makes a sequence longer than the original length, all of them turn by the long factors."""
    scaling = replace(LONGROPE, original_seq_len=original_seq_len)
    config = example_config("phi3", rope_scaling=scaling, rope_fraction=1.0, init_std=0.5, sliding_window=window)
    model = build(config, 2)
    write_export(tensors_of(model).items(), config, 10, None, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, trust_remote_code=False)
    tokens_BS = prompts(config.vocab_size)
    told = {"attention_mask": torch.ones_like(tokens_BS), "max_new_tokens": 20, "do_sample": False}
    generated_BS = generate(model, tokens_BS, 20, temperature=0.0)
    assert torch.equal(generated_BS, theirs.generate(tokens_BS, **told))
    for end in range(7, 27):  # each token as without a cache
        positions_BS = torch.arange(end).expand(3, end)
        with torch.no_grad():
            context = Context(positions_BS, torch.zeros_like(positions_BS))
            logits_BSV = model(generated_BS[:, :end], context).logits_BSV
        assert torch.equal(logits_BSV[:, -1].argmax(-1), generated_BS[:, end])


def test_planted_keys_of_short_factors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = example_config("phi3", rope_scaling=LONGROPE, rope_fraction=1.0, init_std=0.5)
    model = build(config, 2)
    tokens_BS = prompts(config.vocab_size)
    expected_BS = generate(model, tokens_BS, 20, temperature=0.0)
    monkeypatch.setattr("modeling.generate.is_stale", lambda cache, n_new, cached_up_to: False)
    assert not torch.equal(generate(model, tokens_BS, 20, temperature=0.0), expected_BS)


def test_planted_cache_forgets_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens rotated as if they stood at position 0 are seen."""
    config = example_config("llama")
    model = build(config, 1)
    tokens_BS = prompts(config.vocab_size)
    expected_BS = generate(model, tokens_BS, 20, temperature=0.0)
    monkeypatch.setattr("modeling.generate.KVCache.length", 0)
    assert not torch.equal(generate(model, tokens_BS, 20, temperature=0.0), expected_BS)


def test_eos_ends_each_sequence() -> None:
    config = example_config("llama")
    model = build(config, 1)
    tokens_BS = prompts(config.vocab_size)
    free_BS = generate(model, tokens_BS, 20, temperature=0.0)[:, 7:]
    eos_id = int(free_BS[0, 3])
    ended_BS = generate(model, tokens_BS, 20, temperature=0.0, eos_id=eos_id)[:, 7:]
    for free_S, ended_S in zip(free_BS, ended_BS, strict=True):
        first = (free_S == eos_id).nonzero()
        end = int(first[0]) if len(first) else len(ended_S)
        assert torch.equal(ended_S[:end], free_S[:end])
        assert (ended_S[end:] == eos_id).all()
    alone_S = generate(model, tokens_BS[:1], 20, temperature=0.0, eos_id=eos_id)[0, 7:]
    assert torch.equal(alone_S, ended_BS[0, : len(alone_S)])
    assert int((alone_S == eos_id).sum()) == 1


def test_sampling_depends_on_seed_alone() -> None:
    config = example_config("qwen3_moe")
    model = build(config, 1)
    tokens_BS = prompts(config.vocab_size)
    torch.manual_seed(0)
    first_BS = generate(model, tokens_BS, 10, seed=3)
    torch.manual_seed(1)
    assert torch.equal(generate(model, tokens_BS, 10, seed=3), first_BS)
    assert not torch.equal(generate(model, tokens_BS, 10, seed=4), first_BS)


def test_sampling_follows_the_distribution() -> None:
    logits_BV = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, 4)
    tokens_B = choose(logits_BV, 0.5, None, None, torch.Generator().manual_seed(0))
    frequencies_V = tokens_B.bincount(minlength=4) / 20_000
    torch.testing.assert_close(frequencies_V, (logits_BV[0] / 0.5).softmax(-1), rtol=0.0, atol=0.015)  # 4 deviations


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).expand(500, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits_BV, 1.0, 2, None, generator).tolist()) == {1, 3}
    assert set(choose(logits_BV, 1.0, None, 0.8, generator).tolist()) == {1, 3}  # 0.64, then 0.88
    assert set(choose(logits_BV, 1.0, None, 0.6, generator).tolist()) == {1}
    assert set(choose(logits_BV, 1.0, None, 1e-9, generator).tolist()) == {1}
    torch.testing.assert_close(nucleus(logits_BV.softmax(-1), 1.0), logits_BV.softmax(-1))
    assert nucleus(torch.tensor([[0.25, 0.5, 0.25]]), 0.5).tolist() == [[0.0, 0.5, 0.0]]  # which reaches it exactly


def test_arguments_are_checked_at_once() -> None:
    assert len(argument_problems(0, -1.0, 0, 1.5, -1)) == 5
    assert argument_problems(1, 0.0, None, None, 0) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_new_tokens", value) for value in (10**30, 0, -(10**30))),
        *(("temperature", value) for value in (float("nan"), float("inf"), -0.1, 1e-300)),
        *(("top_p", value) for value in (float("nan"), 2.0, 0.0)),
        *(("seed", value) for value in (2**63, -1)),
        ("top_k", 0),
    ],
)
def test_an_option_out_of_range_is_one_line(option: str, value: float) -> None:
    options = {"max_new_tokens": 1, "temperature": 0.8, "top_k": None, "top_p": None, "seed": 0, option: value}
    (line,) = argument_problems(**options)
    assert line.startswith(f"--{option.replace('_', '-')}={value} must ")


@pytest.mark.parametrize("temperature", [1e-6, 1e300])
def test_extreme_temperatures_draw_tokens(temperature: float) -> None:
    config = example_config("llama")
    tokens_BS = generate(build(config, 1), prompts(config.vocab_size), 3, temperature=temperature, top_p=1e-320)
    assert tokens_BS.shape == (3, 10)


def test_what_the_locale_cannot_read_is_read_as_utf8() -> None:
    """Under LC_ALL=C each byte of the argument comes as a lone surrogate."""
    assert readable("für", "--prompt") == ("für", [])
    assert readable("für".encode().decode("ascii", "surrogateescape"), "--prompt") == ("für", [])
    _, (line,) = readable(b"a\xff".decode("utf-8", "surrogateescape"), "--prompt")
    assert line == "--prompt must be UTF-8, and its byte 1 is 0xff; convert it to UTF-8"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_lacks_characters_shows_them_escaped(encoding: str, tmp_path: Path) -> None:
    """The whole command, in a process of its own."""
    config = RunConfig(model=example_config("llama", vocab_size=257))
    save_run(tmp_path / "run", config, build(config.model, 1), 5)
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}
    words = ["generate", str(tmp_path / "run"), "--prompt", "日本 für", "--max-new-tokens", "4"]
    ended = subprocess.run([sys.executable, "-m", "launcher", *words], env=environment, capture_output=True)
    shown = "日本 für".encode(encoding, "backslashreplace")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(shown)


class Terminal(io.StringIO):
    """A terminal that keeps what each write added."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.parts.append(text)
        return super().write(text)


@pytest.mark.parametrize(
    ("length", "new", "told"),
    [
        (3, 95, "--max-new-tokens=95 after a prompt of 3 tokens must stay within model.max_positions=96; try 94"),
        (97, 1, "--prompt has 97 tokens, and must have at most model.max_positions=96; shorten it"),
    ],
)
def test_text_ends_with_the_learned_positions(length: int, new: int, told: str) -> None:
    """One line where it would go beyond them; as many tokens as it says are made."""
    model = build(example_config("gpt2"), 1)
    with pytest.raises(UserError) as refused:
        check_length(length, new, model.max_positions)
    assert refused.value.problems == [told]
    with pytest.raises(ValueError, match="97 positions are needed, and the table has 96"):
        generate(model, torch.zeros(1, length, dtype=torch.int64), 98 - length)
    if length == 3:
        check_length(length, 94, model.max_positions)
        assert generate(model, torch.zeros(1, length, dtype=torch.int64), 94).shape == (1, 97)


def test_text_streams_to_a_terminal(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    config = example_config("qwen3_moe", vocab_size=len(tokenizer))
    model = build(config, 1)
    terminal, pipe = Terminal(), io.StringIO()
    options = {"max_new_tokens": 30, "temperature": 0.8, "top_k": 100, "top_p": 0.99, "seed": 0}
    text = generate_text(model, tokenizer, "für", **options, out=terminal)
    assert generate_text(model, tokenizer, "für", **options, out=pipe) == text
    assert text.startswith("für")
    assert pipe.getvalue() == text + "\n"
    assert terminal.getvalue() == escaped(text) + "\n"
    assert len(terminal.parts) > 10


def test_streaming_yields_what_generate_returns() -> None:
    config = example_config("llama")
    model = build(config, 1)
    tokens_BS = prompts(config.vocab_size)
    streamed = torch.stack(list(new_tokens(model, tokens_BS, 5, seed=1)), dim=1)
    assert torch.equal(generate(model, tokens_BS, 5, seed=1)[:, 7:], streamed)


def test_a_prompt_of_no_token_is_one_line(tmp_path: Path) -> None:
    save_tokenizer_of("words", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    model = build(example_config("llama", vocab_size=120), 3)
    options = {"max_new_tokens": 2, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    with pytest.raises(UserError, match="this tokenizer makes none of it"):
        generate_text(model, tokenizer, " \n", **options, out=io.StringIO())


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("value", [1e30, float("nan")])
def test_weights_whose_logits_are_not_finite_are_one_line(
    temperature: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that came apart: a draw was a traceback, and the likeliest of NaN the end of the text."""
    config = RunConfig(model=example_config("llama", vocab_size=257))
    model = build(config.model, 1)
    model.final_norm.weight.data.fill_(value)
    model.head.weight.data.fill_(1e30)
    folder = save_run(tmp_path / "run", config, model, 5)
    words = ["generate", str(tmp_path / "run"), "--prompt", "abc", "--temperature", temperature]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    told = "must have weights that a text can be made with, and the logits after token 3 are NaN or infinite"
    assert line == f"CHECKPOINT={folder} {told}; give an earlier checkpoint"
