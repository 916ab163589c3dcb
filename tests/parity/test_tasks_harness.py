"""`eval --tasks` against the harness's own class for transformers' models, over the exported checkpoint.

Log-likelihoods agree to 1e-5 of themselves: both are sums of up to 48 fp32 log-probabilities of the same weights, whose
matrix products add in another order. Texts are greedy and equal; metrics follow.
"""

import json
from typing import Any

import pytest

from launcher.cli import main
from launcher.commands.evaluate_tasks import score_windows
from launcher.commands.export import export
from task_runs import KINDS, harness_config, save_task_run, write_tasks

pytestmark = pytest.mark.xdist_group("harness")  # what its tests share takes long to make

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The harness's own results, and the folders."""
    import datasets
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    run, model = save_task_run(folder)
    paths = write_tasks(folder / "own", *KINDS)
    assert export(run, folder / "hf") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("DISABLE_MULTIPROC", "1")
        theirs = simple_evaluate(
            model=HFLM(pretrained=str(folder / "hf"), batch_size=4, device="cpu", dtype="float32"),
            tasks=[harness_config(path) for path in paths],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=1000,
        )
    assert theirs is not None
    return {"run": run, "model": model, "paths": paths, "theirs": theirs}


def evaluated(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    names = ",".join(map(str, found["paths"]))
    assert main(["eval", str(found["run"]), "--tasks", names, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_metrics_and_their_errors_are_the_harness_s(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ours = evaluated(found, capsys)
    for name, theirs in found["theirs"]["results"].items():
        assert ours["tasks"][name]["documents"] == theirs["sample_len"] == 12
        for metric, numbers in ours["tasks"][name]["metrics"].items():
            assert numbers["value"] == pytest.approx(theirs[f"{metric},none"], rel=TOLERANCE), (name, metric)
            error = theirs[f"{metric}_stderr,none"]
            assert numbers["stderr"] == (None if error == "N/A" else pytest.approx(error, rel=1e-4)), (name, metric)
    shots = {name: task["shots"] for name, task in ours["tasks"].items()}
    assert shots == {"pick": 1, "bare": 0, "roll": 0, "make": 0} == found["theirs"]["n-shot"]
    assert ours["n_cut"] > 0


def answers(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], list[Any]]:
    """Ours, by task and document."""
    import launcher.commands.evaluate_tasks as command

    kept: dict[tuple[str, int], list[Any]] = {}
    results_of = command.results_of

    def keeping(requests: Any, answers: Any) -> Any:
        result = results_of(requests, answers)
        for own in requests.instances.values():
            for each in own:
                kept.setdefault((each.task_name, each.doc_id), []).append(answers[id(each)])
        return result

    monkeypatch.setattr(command, "results_of", keeping)
    names = ",".join(map(str, found["paths"]))
    assert main(["eval", str(found["run"]), "--tasks", names, "--json"]) == 0
    return kept


def differences(found: dict[str, Any], ours: dict[tuple[str, int], list[Any]]) -> list[tuple[Any, ...]]:
    """Documents whose answers are not the harness's: of all of them, the prompts are the same."""
    wrong = []
    for name, samples in found["theirs"]["samples"].items():
        for sample in samples:
            mine = ours[name, sample["doc_id"]]
            for own, (theirs,) in zip(mine, sample["resps"], strict=True):
                flat = theirs if isinstance(theirs, tuple | list) else (theirs,)
                own = own if isinstance(own, tuple) else (own,)
                same = own[1:] == tuple(flat[1:]) and own[0] == (
                    flat[0] if isinstance(flat[0], str) else pytest.approx(float(flat[0]), rel=TOLERANCE)
                )
                if not same:
                    wrong.append((name, sample["doc_id"], own, flat))
    return wrong


def test_every_document_s_answers_are_the_harness_s(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = answers(found, monkeypatch)
    assert sum(map(len, ours.values())) == 12 * (3 + 1 + 1 + 1)
    assert differences(found, ours) == []


def test_planted_a_continuation_off_by_one_token_is_seen(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import launcher.tasks.model as model
    from launcher.tasks.windows import Window, window_of

    def shifted(context: Any, continuation: Any, max_length: int) -> Window:
        whole = window_of(context, continuation, max_length)
        return Window(whole.tokens, max(1, whole.n_scored - 1))

    monkeypatch.setattr(model, "window_of", shifted)
    wrong = {name for name, *_ in differences(found, answers(found, monkeypatch))}
    assert wrong == {"pick", "bare"}


def test_planted_a_continuation_tokenized_apart_is_seen(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first characters may be one token with the context's last ones, of which a space goes to the continuation."""
    import launcher.tasks.model as model

    def apart(self: Any, context: str, continuation: str) -> Any:
        return self.tok_encode(context), self.tok_encode(continuation)

    monkeypatch.setattr(model.RoundtableLM, "_encode_pair", apart)
    assert {name for name, *_ in differences(found, answers(found, monkeypatch))} == {"bare", "pick"}


def test_the_harness_itself_takes_our_model(found: dict[str, Any]) -> None:
    """What `eval --tasks` reckons with requests and metrics is what the harness's own loop does with our model."""
    import torch
    from lm_eval.evaluator import evaluate
    from transformers import AutoTokenizer

    from launcher.commands.trained import load_decoder, open_trained
    from launcher.tasks.load import Asked, load_tasks
    from launcher.tasks.model import RoundtableLM

    trained = open_trained(found["run"])
    decoder = load_decoder(trained, "cpu", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.tokenizer, trust_remote_code=False)
    ours = RoundtableLM(tokenizer, 48, lambda windows: score_windows(decoder, windows, torch.device("cpu")))
    loaded = load_tasks(Asked(tuple(map(str, found["paths"][:3])), "--tasks"))
    results = evaluate(ours, {"tasks": loaded.tasks, "groups": {}}, bootstrap_iters=0)
    assert results is not None
    for name, result in results["results"].items():
        theirs = found["theirs"]["results"][name]
        for key, value in result.items():
            if isinstance(value, float) and not key.startswith("sample"):
                assert value == pytest.approx(theirs[key], rel=TOLERANCE)
