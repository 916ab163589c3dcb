"""`eval --tasks`: what is refused, before anything is created; windows and rows; and that no code is run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data.batch import IGNORED, PADDING
from launcher.cli import main
from launcher.commands.evaluate_tasks import score_windows
from launcher.errors import UserError
from launcher.tasks import load, own
from launcher.tasks.generation import wanted_of
from launcher.tasks.load import Asked, Loaded, load_tasks, names_in_harness
from launcher.tasks.results import build_requests, results_of
from launcher.tasks.windows import Window, packed_rows, rolling_windows, window_of
from modeling.context import Context
from modeling.decoder import Decoder
from modeling.generate import choose
from task_runs import KINDS, save_task_run, write_tasks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    return save_task_run(tmp_path_factory.mktemp("asked"))


def task(folder: Path, kind: str = "pick", **more: Any) -> Path:
    """A task's file, with other keys."""
    return write_tasks(folder, kind, **more)[0]


def refused(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    """The one line that the command says, which creates nothing."""
    before = sorted(run.rglob("*"))
    assert main(["eval", str(run), *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and sorted(run.rglob("*")) == before
    (line,) = told.err.splitlines()
    return line


@given(n=st.integers(1, 60), max_length=st.integers(1, 20))
def test_rolling_windows_are_the_harness_s(n: int, max_length: int) -> None:
    """Against its own functions: each token once, in windows that are no longer than the context."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokens = list(range(1, n + 1))
    theirs = map(make_disjoint_window, get_rolling_token_windows(tokens, 0, max_length, 1))
    ours = list(rolling_windows(tokens, 0, max_length))
    assert [(window.tokens, window.n_scored) for window in ours] == [((*a, *b), len(b)) for a, b in theirs]
    assert all(window.n_inputs <= max_length for window in ours)


def test_a_context_that_is_too_long_loses_its_first_tokens() -> None:
    assert window_of([1, 2, 3], [4, 5], 3) == Window((2, 3, 4, 5), 2)
    assert window_of([1, 2, 3], [4, 5], 4) == Window((1, 2, 3, 4, 5), 2)


@given(lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30))
def test_rows_hold_each_window_once(lengths: list[tuple[int, int]]) -> None:
    windows = [Window(tuple(range(i * 50 + 1, i * 50 + 2 + n)), min(k, n)) for i, (n, k) in enumerate(lengths)]
    rows = packed_rows(windows, 12)
    for window, (row, column) in zip(windows, rows.places, strict=True):
        stop = column + window.n_scored
        start = stop - window.n_inputs
        assert tuple(rows.tokens_RS[row, start:stop]) == window.tokens[:-1]
        assert tuple(rows.targets_RS[row, column:stop]) == window.tokens[-window.n_scored :]
        assert (rows.targets_RS[row, start:column] == IGNORED).all()
        assert tuple(rows.positions_RS[row, start:stop]) == tuple(range(window.n_inputs))
        assert len(np.unique(rows.documents_RS[row, start:stop])) == 1
    assert (rows.documents_RS != PADDING).sum() == sum(window.n_inputs for window in windows)
    assert (rows.targets_RS != IGNORED).sum() == sum(window.n_scored for window in windows)


@torch.no_grad()
def logits_of(model: Decoder, tokens: tuple[int, ...]) -> torch.Tensor:
    ids_BS = torch.tensor([tokens])
    logits_BSV = model(ids_BS, Context(torch.arange(len(tokens))[None], torch.zeros_like(ids_BS))).logits_BSV
    return logits_BSV[0]


def test_answers_are_the_model_s_own(run: tuple[Path, Decoder]) -> None:
    """Of windows one by one, from logits: to 1e-5, since sums are in another order. Some continue greedily."""
    _, model = run
    draw = np.random.default_rng(1)
    windows = []
    for n in (3, 17, 9, 9, 30):
        tokens = draw.integers(1, 257, n).tolist()
        greedy = [int(logits_of(model, tuple(tokens))[-1].argmax())]
        windows += [Window((*tokens, *greedy), 1), Window((*tokens, greedy[0] - 1), 1), Window(tuple(tokens), n - 1)]
    found = score_windows(model, windows, torch.device("cpu"))
    for window, answer in zip(windows, found, strict=True):
        logits_SV = logits_of(model, window.tokens[:-1])[-window.n_scored :]
        targets_S = torch.tensor(window.tokens[-window.n_scored :])
        expected = float(logits_SV.log_softmax(-1).gather(1, targets_S[:, None]).sum())
        assert answer.loglikelihood == pytest.approx(expected, rel=1e-5)
        assert answer.is_greedy == bool((logits_SV.argmax(-1) == targets_S).all())
    assert [answer.is_greedy for answer in found[::3]] == [True] * 5


def test_a_table_and_json_and_a_file(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(ROOT / f"configs/tasks/{name}.yaml") for name in ("idioms", "snippets", "closing")]
    out = tmp_path / "out.json"
    arguments = ["eval", str(run[0]), "--tasks", ",".join(names), "--limit", "3", "--shots", "1", "--out", str(out)]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "idioms" in told.out and "acc_norm" in told.out and "lm-eval 0.4" in told.out
    assert "their first tokens were left out" in told.err and len(told.err.splitlines()) == 1
    assert main([*arguments[:-2], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert {name: each["documents"] for name, each in found["tasks"].items()} == dict.fromkeys(
        ("idioms", "snippets", "closing"), 3
    )
    assert found["tasks"]["idioms"]["shots"] == 1 and found["seed"] == 1234 and found["step"] == 5
    assert refused(capsys, run[0], "--tasks", names[0], "--out", str(out)).startswith(f"--out={out} is there already")
    assert main(["eval", str(run[0]), "--tasks", names[1], "--limit", "1", "--out", "/proc/nothing"]) == 2
    told = capsys.readouterr()  # the numbers are not lost
    assert "snippets" in told.out and told.err.splitlines()[-1].startswith("--out=/proc/nothing ")


def test_a_run_of_8_bits_is_asked_in_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights answer otherwise than in 16 bits, and as near as 8 are to 16."""
    path, _ = save_task_run(tmp_path, "llama", precision="fp8", d_ff=64, init_std=0.3)
    kept = (path / "config.yaml").read_text()
    found = {}
    for precision in ("fp8", "bf16"):
        (path / "config.yaml").write_text(kept.replace("precision: fp8", f"precision: {precision}"))
        assert main(["eval", str(path), "--tasks", str(task(tmp_path / "own", "roll")), "--json"]) == 0
        metrics = json.loads(capsys.readouterr().out)["tasks"]["roll"]["metrics"]
        found[precision] = metrics["bits_per_byte"]["value"]
    assert 1e-5 < abs(found["fp8"] / found["bf16"] - 1) < 2e-2, found


CARRIES = [  # keys that carry code, and what the line says
    ({"process_docs": "tools.run"}, "'process_docs' is not a key that is plain data"),
    ({"custom_dataset": "tools.run"}, "'custom_dataset' is not a key that is plain data"),
    ({"class": "tools.Task"}, "'class' is not a key that is plain data"),
    ({"use_prompt": "tools.py:x"}, "'use_prompt' is not a key that is plain data"),
    ({"unsafe_code": True}, "'unsafe_code' is not a key that is plain data"),
    ({"dataset_kwargs": {"trust_remote_code": True}}, "dataset_kwargs.trust_remote_code is not known"),
    ({"metric_list": [{"metric": "./evil", "aggregation": "mean"}]}, "'./evil' is no metric of the harness's own"),
    ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "'acc' is no metric of the harness's own"),
    ({"filter_list": [{"name": "f", "filter": [{"function": "custom"}]}]}, "'custom' must be one of"),
    ({"fewshot_config": {"process_docs": "tools.run"}}, "fewshot_config.process_docs is not plain data"),
    ({"dataset_path": "pandas"}, "needs a dataset of the Hugging Face hub"),
]


@pytest.mark.parametrize(("more", "told"), CARRIES, ids=lambda value: str(value)[:40])
def test_a_task_that_carries_code_is_refused(
    more: dict[str, Any],
    told: str,
    run: tuple[Path, Decoder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(load, "why_unreachable", lambda name, kind: "no answer")
    line = refused(capsys, run[0], "--tasks", str(task(tmp_path, **more)))
    assert line.startswith(f"--tasks={tmp_path}") and told in line


def with_function(folder: Path) -> Path:
    """A task whose YAML runs a function that leaves a file behind."""
    path = task(folder)
    (folder / "tools.py").write_text(
        f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n\n\ndef text(doc):\n    return doc['q']\n"
    )
    path.write_text(path.read_text().replace("doc_to_text: '{{q}}'", "doc_to_text: !function tools.text"))
    assert "!function" in path.read_text()
    return path


def test_code_runs_only_where_it_is_allowed(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = with_function(tmp_path / "own")
    line = refused(capsys, run[0], "--tasks", str(path))
    assert "the tag !function is not known" in line and line.endswith(own.CODE)
    assert not (tmp_path / "own" / "ran").exists()
    assert main(["eval", str(run[0]), "--tasks", str(path), "--allow-task-code", "--json"]) == 0
    assert (tmp_path / "own" / "ran").exists()
    with_code = json.loads(capsys.readouterr().out)["tasks"]
    assert main(["eval", str(run[0]), "--tasks", str(task(tmp_path / "plain")), "--json"]) == 0
    assert with_code == json.loads(capsys.readouterr().out)["tasks"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ q.__class__.__mro__[1].__subclasses__() }}",
        "{{ q|attr('__class__') }}",
        "{{ '{0.__class__}'.format(q) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    ],
)
def test_a_template_reaches_no_code(
    template: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, run[0], "--tasks", str(task(tmp_path, doc_to_text=template)))
    assert "cannot be used by lm-evaluation-harness" in line


def test_planted_templates_without_the_sandbox_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness that renders its templates elsewhere is not used for files."""
    from jinja2 import Environment
    from lm_eval import utils

    monkeypatch.setattr(utils, "apply_template", lambda text, doc: Environment().from_string(text).render(**doc))
    with pytest.raises(UserError, match="cannot be kept from running code"):
        load_tasks(Asked((str(ROOT / "configs/tasks/idioms.yaml"),), "--tasks"))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"task": None}, "task must be the task's name"),
    ({"output_type": "guess"}, "output_type='guess' must be one of"),
    ({"dataset_path": None}, "dataset_path must be json"),
    ({"test_split": None}, "test_split or validation_split must name"),
    ({"test_split": "dev"}, "test_split=dev is none of dataset_kwargs.data_files"),
    ({"metric_list": "acc"}, "metric_list='acc' must be a list"),
    ({"metric_list": [3]}, "each entry must be a map with metric: NAME"),
    ({"metric_list": [{"metric": "acc", "aggregation": "sum"}]}, "has aggregation='sum'"),
    ({"doc_to_target": "{{nothing}}"}, "'nothing' is undefined"),
    ({"doc_to_choice": "{{q"}, "cannot be used by lm-evaluation-harness"),
    ({"doc_to_choice": ["", ""]}, "cannot be used by lm-evaluation-harness"),
    ({"num_fewshot": 9}, "takes 9 examples"),
    ({"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, "gone.jsonl is not there"),
    ({"dataset_kwargs": {"data_files": {"test": "https://example.org/x.jsonl"}}}, "must be a file on this machine"),
    ({"dataset_kwargs": {"data_files": 3}}, "must name files"),
    ({"dataset_kwargs": {}}, "must name files"),
]


@pytest.mark.parametrize(("more", "told"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_task_is_one_line(
    more: dict[str, Any], told: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, run[0], "--tasks", str(task(tmp_path, **more)))
    assert line.startswith("--tasks") and told in line


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("test.jsonl", b"{", "line 1"),
        ("test.jsonl", b'{"q": 1}\n{"q": "a"}\n', "fields of one type each"),
        ("test.jsonl", b"[1]\n", "each document must be an object"),
        ("test.jsonl", b"", "has no document"),
        ("test.jsonl", b"\xff", "cannot be read as json"),
        ("pick.yaml", b"task: [", "not valid YAML"),
        ("pick.yaml", b"- task", "the file holds a list"),
        ("pick.yaml", b"include: pick.yaml\n", "includes itself"),
        ("pick.yaml", b"include: gone.yaml\n", "is no file"),
    ],
)
def test_a_broken_file_is_one_line(
    name: str, content: bytes, told: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = task(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert told in refused(capsys, run[0], "--tasks", str(path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "gone.yaml"], "--tasks=gone.yaml is no file"),
        (["--tasks", ","], "--tasks must name a task"),
        (["--tasks", "OWN", "--limit", "0"], "--limit=0 must be at least 1"),
        (["--tasks", "OWN", "--shots", "-1"], "--shots=-1 must lie between"),
        (["--tasks", "OWN", "--seed", "-1"], "--seed=-1 must lie between"),
        (["--tasks", "OWN", "--out", "no/where.json"], "--out=no/where.json must lie in a folder"),
        (["--tasks", "OWN", "--out", ""], "--out= must not be empty"),
        (["--tasks", "OWN", "--out", "a\0b"], "must not hold a NUL byte"),
        (["--tasks", "OWN", "--out", "x" * 300], "must have names of at most 255 bytes"),
        (["--tasks", "OWN,OWN"], "which is there already"),
        (["--tasks", "OWN", "--text", "x"], "--text does not go with --tasks"),
        (["--tasks", "OWN", "--sequences", "3"], "--sequences does not go with --tasks"),
        (["--limit", "3"], "--limit works with --tasks only"),
        (["--allow-task-code"], "--allow-task-code works with --tasks only"),
        (["--tasks", "no\x1b[31mtask"], r"no\x1b[31mtask is no task of lm-evaluation-harness"),
        (["--tasks", "hellaswagg"], "near it are hellaswag"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], told: str, run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(task(tmp_path))
    assert told in refused(capsys, run[0], *(each.replace("OWN", path) for each in arguments))


def test_a_named_task_without_a_network_is_one_line_at_once(
    run: tuple[Path, Decoder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(load, "why_unreachable", lambda name, kind: "no answer within a few seconds")
    monkeypatch.setattr(load, "load_named", lambda *given: pytest.fail("the harness is not asked"))
    line = refused(capsys, run[0], "--tasks", "arc_easy")
    assert "cannot be had (no answer within a few seconds); check the network" in line


@pytest.mark.slow
def test_tasks_of_the_harness(
    run: tuple[Path, Decoder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tag and a task by name, of documents that stand for the hub's; and without them, a line at once."""
    import datasets

    line = refused(capsys, run[0], "--tasks", "arc_easy")  # the tests' hub is offline, and its cache empty
    assert line.startswith("--tasks=arc_easy cannot be used by lm-evaluation-harness (")
    answers = {"text": ["red", "blue", "a dog", "7"], "label": ["A", "B", "C", "D"]}
    documents = [{"question": f"Which is {n}?", "choices": answers, "answerKey": "ABCD"[n % 4]} for n in range(6)]
    split = datasets.Dataset.from_list(documents)
    whole = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), split))
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: whole)
    assert main(["eval", str(run[0]), "--tasks", "ai2_arc", "--shots", "2", "--limit", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert {name: (task["documents"], task["shots"]) for name, task in found.items()} == {
        "arc_challenge": (4, 2),
        "arc_easy": (4, 2),
    }


def test_the_names_of_the_harness_are_found() -> None:
    names = set(names_in_harness())
    assert {"arc_easy", "hellaswag", "mmlu", "wikitext", "ai2_arc", "lambada_openai"} <= names


def test_a_missing_extra_is_one_line(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    line = refused(capsys, run[0], "--tasks", str(task(tmp_path)))
    assert line == "--tasks needs lm-evaluation-harness, which is not installed; pip install 'roundtable[eval]'"


@pytest.mark.parametrize(("top_k", "expected"), [(None, None), (0, None), (7, 7)])
def test_a_text_is_drawn_from_all_tokens_where_top_k_is_0(top_k: int | None, expected: int | None) -> None:
    wanted = wanted_of({"do_sample": True, "top_k": top_k}, "<end>", 512, SimpleNamespace(task_name="story"))
    assert wanted.top_k == expected
    token_B = choose(torch.ones(2, 9), wanted.temperature, wanted.top_k, wanted.top_p, torch.Generator())
    assert token_B.shape == (2,)


def test_hostile_documents_are_text(
    run: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "</script>[red]{{7*7}}\x1b[31m\u202e"
    (path,) = write_tasks(tmp_path, "pick", task=hostile, n=3)
    (tmp_path / "test.jsonl").write_text(json.dumps({"q": hostile, "choices": [hostile, "b"], "answer": 0}) + "\n")
    assert main(["eval", str(run[0]), "--tasks", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown and r"</script>[red]{{7*7}}\x1b[31m\u202e" in shown


def test_a_checkpoint_that_is_gone_or_has_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    path = str(task(tmp_path / "own"))
    assert "holds no checkpoint" in refused(capsys, tmp_path / "empty", "--tasks", path)


def test_the_examples_are_read_by_the_harness_as_they_are() -> None:
    for path in sorted((ROOT / "configs/tasks").glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        assert body["task"] == path.stem and set(KINDS["pick"]) & set(body)
        assert f"--tasks configs/tasks/{path.name}" in path.read_text()


def test_a_group_is_the_mean_of_its_tasks_by_their_documents(tmp_path: Path) -> None:
    """As the harness reckons it: 4 documents of one task, 12 of another."""
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    paths = [*write_tasks(tmp_path / "a", "pick", task="a", n=4), *write_tasks(tmp_path / "b", "pick", task="b")]
    asked = Asked(tuple(map(str, paths)), "--tasks")
    loaded = load_tasks(asked)
    config = GroupConfig(group="both", aggregate_metric_list=[{"metric": "acc"}])
    group = Group(name="both", aggregate_metric_list=config.aggregate_metric_list, _config=config)
    for each in loaded.tasks.values():
        group.add(each)
    requests = build_requests(Loaded(loaded.tasks, {"both": group}), asked)
    answers = {id(each): (float(-each.idx), False) for own in requests.instances.values() for each in own}
    found = results_of(requests, answers)  # the first choice of each document, which a third of them have
    accuracy = {name: task["metrics"]["acc"]["value"] for name, task in found["tasks"].items()}
    assert accuracy == {"a": 0.5, "b": pytest.approx(1 / 3)}
    both = found["groups"]["both"]
    assert both["documents"] == 16 and both["metrics"]["acc"]["value"] == pytest.approx((2 + 4) / 16)
    assert both["metrics"]["acc"]["stderr"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": -1}, "top_k=-1 must be at least 1; try 50"),
        ({"top_k": "many"}, "top_k='many' must be a whole number; "),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number; "),
        ({"top_p": 5}, "top_p=5.0 must lie above 0 and at most at 1; try 0.95"),
        ({"temperature": "hot"}, "temperature='hot' must be a number; "),
        ({"temperature": -1}, "temperature=-1.0 must be 0 (the likeliest token), or at least "),
        ({"temperature": float("nan")}, "temperature=nan must be 0 (the likeliest token), or at least "),
        ({"max_gen_toks": [4]}, "max_gen_toks=[4] must be a whole number; "),
        ({"max_gen_toks": 10**400}, "must be a whole number; "),
        ({"until": 5}, "until=5 must be a text, or a list of them; mend the task"),
    ],
    ids=str,
)
def test_how_a_task_draws_is_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        wanted_of(options, "<end>", 512, SimpleNamespace(task_name="story"))
    (line,) = refused.value.problems
    assert line.startswith("task story: generation_kwargs: ") and told in line


def test_numbers_of_a_task_may_be_text() -> None:
    options = {"top_k": "7", "temperature": "0.5", "top_p": "0.9", "max_gen_toks": "16", "do_sample": True}
    wanted = wanted_of(options, "<end>", 512, SimpleNamespace(task_name="story"))
    assert (wanted.top_k, wanted.temperature, wanted.top_p, wanted.max_new_tokens) == (7, 0.5, 0.9, 16)
