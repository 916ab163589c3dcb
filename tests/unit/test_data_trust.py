"""Nothing that is read is ever run: every call that could import a stranger's code, or unpickle, is looked for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("launcher", "modeling", "parallel", "data", "tests", "benchmarks")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# What transformers loads by way of Auto classes, which import files that a folder's JSON names.
ASKS_TO_TRUST = ("from_pretrained", "from_config")
# Each place where something of the kind is called, and why it runs nothing of a stranger's.
ALLOWED = {
    ("data/hub.py", "load_dataset_builder"): "datasets runs no scripts since version 4, which pyproject.toml asks for",
    ("parallel/processes/start.py", "pickle.loads"): "a pipe between our own processes",
}
LOADERS = ("load_dataset", "load_from_disk", "load_dataset_builder", "get_class_from_dynamic_module")
UNPICKLERS = ("pickle.load", "pickle.loads", "torch.load", "joblib.load", "dill.load", "dill.loads", "yaml.load")
RUNNERS = ("eval", "exec")


def findings(text: str, name: str) -> Iterator[str]:
    """A line for each call in ``text`` that could run what is read."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        last = function.rpartition(".")[2]
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        line = f"{name}:{node.lineno}: {function}"
        trusts = "trust_remote_code" in keywords and not is_false(keywords["trust_remote_code"])
        if last in ASKS_TO_TRUST and "trust_remote_code" not in keywords:
            yield f"{line} without trust_remote_code=False"
        elif trusts or "allow_pickle" in keywords:
            yield f"{line} trusts what it reads"
        elif last in LOADERS or function in (*UNPICKLERS, *RUNNERS):
            yield from () if {(name, last), (name, function)} & set(ALLOWED) else (line,)


def is_false(node: ast.expr) -> bool:
    """Whether this is the constant False, and nothing that may come to something else."""
    return isinstance(node, ast.Constant) and node.value is False


def test_no_call_runs_what_it_reads() -> None:
    named = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in SOURCES]
    assert [line for name, text in named for line in findings(text, name)] == []


@pytest.mark.parametrize(
    "text",
    [
        "AutoTokenizer.from_pretrained(name)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=None)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=trusted)",
        "AutoModel.from_config(config)",
        "datasets.load_dataset(name)",
        "pickle.loads(data)",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "pipeline(model, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_planted_a_call_that_could_run_what_it_reads_is_seen(text: str) -> None:
    assert len(list(findings(text, "data/planted.py"))) == 1


def test_datasets_runs_no_scripts() -> None:
    """The version that never runs a loading script is the least that is asked for."""
    import tomllib

    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (datasets,) = [line for line in asked if line.startswith("datasets")]
    assert int(datasets.partition(">=")[2].partition(".")[0]) >= 4
