"""The house rules that no tool checks."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import MISSING, dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from launcher.config.schema import alternatives, field_default, field_hints, item_hint, leaf_keys
from launcher.config.tree import RunConfig
from launcher.config.words import show

pytestmark = pytest.mark.xdist_group("house")  # each source is read once
ROOT = Path(__file__).parents[2]
PACKAGES = ("launcher", "modeling", "parallel", "data")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@dataclass(frozen=True)
class Read:
    """What one file says, read once for all tests."""

    docstring: str | None
    n_statements: int  # at its top
    names: frozenset[str]  # of all attributes that it reads
    imports: frozenset[str]  # of modules, and of what is in them, at its top or later; not those for the type checker


@cache
def read(path: Path) -> Read:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    for_types = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    unseen = {node for each in for_types for node in ast.walk(each)}
    imports: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import) and node not in unseen:
            imports |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node not in unseen:
            imports |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    names = (node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    return Read(ast.get_docstring(tree), len(tree.body), frozenset(names), frozenset(imports))


@pytest.fixture(scope="module")
def names_read() -> set[str]:
    readers = [path for path in SOURCES if (ROOT / "launcher" / "config") not in path.parents]
    return set().union(*(read(path).names for path in readers))


@pytest.mark.parametrize("key", sorted(set(leaf_keys(RunConfig))))
def test_no_dead_knobs(key, names_read):
    """Some code outside the config package reads each key by its name."""
    assert key.rsplit(".", 1)[-1] in names_read, f"{key} is declared, but nothing reads it"


def test_planted_a_key_that_nothing_reads_is_seen(tmp_path):
    reader = tmp_path / "reader.py"
    reader.write_text("def build(config):\n    config.written = config.read\n    return 'quoted'\n")
    assert read(reader).names == {"read"}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.name == "__init__.py"], ids=lambda path: path.parent.name
)
def test_an_init_holds_one_docstring(path):
    assert read(path).n_statements == 1
    assert read(path).docstring


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_a_module_begins_with_a_docstring_and_is_not_too_long(path):
    assert read(path).docstring, "the first line says what the module holds"
    assert len(path.read_text().splitlines()) <= 500


def circle_among(files: dict[str, Path]) -> list[str]:
    """Modules that import each other in turn, or nothing."""
    try:
        TopologicalSorter({name: read(path).imports & files.keys() for name, path in files.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    """Imports inside functions count: they hide a circle, and do not undo it."""
    files = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in SOURCES}
    assert circle_among({name: path for name, path in files.items() if path.name != "__init__.py"}) == []


def test_planted_a_circle_is_seen(tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    from two import g\n")
    (tmp_path / "two.py").write_text("import one\n")
    assert set(circle_among({name: tmp_path / f"{name}.py" for name in ("one", "two")})) == {"one", "two"}


def assigned_twice(text: str) -> list[str]:
    """The names at a module's top that are assigned a second time, by a value that does not use the first one."""
    found, seen = [], set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            used = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            parts = [each for target in node.targets for each in ast.walk(target)]
            named = [each.id for each in parts if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
            found += [name for name in named if name in seen - used]
            seen |= {*named}
    return found


def test_no_constant_is_overwritten():
    """Whoever reads the first one gets the second: a planted fault ran with another's overrides for a day."""
    paths = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert {path.name: twice for path in paths if (twice := assigned_twice(path.read_text()))} == {}


def test_planted_constants_of_one_name_are_seen():
    assert assigned_twice("A, B = 1, 2\nC = A\nB = C\nC = C + 1") == ["B"]


def test_folders_under_tests_carry_no_init():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_links_in_the_docs_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.parent.name != "decisions"], ids=lambda path: path.name
)
def test_files_named_in_the_docs_are_there(path):
    """A page of docs/decisions/ may name what was there before it."""
    text = path.read_text()
    files = re.findall(rf"`((?:{'|'.join(PACKAGES)}|tests|configs|benchmarks|slurm)/[a-z0-9_/.]+)`", text)
    missing = [file for file in files if not (ROOT / file).exists()]
    tests = [name for name in re.findall(r"`(test_[a-z0-9_]+\.py)`", text) if not any((ROOT / "tests").rglob(name))]
    assert missing + tests == []


def test_constraints_pin_every_library_that_is_named():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    plain = [re.split(r"[\[<>=!~ ]", each)[0].lower().replace("_", "-") for each in wanted]
    assert set(plain) - {line.partition("==")[0].lower().replace("_", "-") for line in lines} == set()


def test_the_ci_script_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def documented_defaults() -> dict[str, str]:
    """Key to default, as the table of docs/config.md says."""
    rows = re.findall(r"^\| `([^`]+)` \| (`[^`]+`|\S+) \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    return {key: default.strip("`") for key, default in rows if "." in key or key in field_hints(RunConfig)}


def declared_defaults(section: type = RunConfig, prefix: str = "") -> dict[str, str]:
    """Key to default, as the dataclasses say; of several alternatives the first counts."""
    found: dict[str, str] = {}
    for name, hint in field_hints(section).items():
        inner = item_hint(hint) or hint
        default = field_default(section, name)
        if not alternatives(inner):
            shown = default if isinstance(default, str) else "required" if default is MISSING else show(default)
            found.setdefault(prefix + name, shown)
        for alternative in alternatives(inner):
            found = declared_defaults(alternative, f"{prefix}{name}.") | found
    return found


def test_the_docs_list_every_key_with_its_default():
    assert documented_defaults() == declared_defaults()


def test_tests_that_share_what_takes_long_to_make_share_a_worker(tmp_path):
    """xdist_group works with the versions at hand: where it did not, nothing said so but the time."""
    lines = (
        "import os, pytest",
        'pytestmark = pytest.mark.xdist_group("one")',
        "@pytest.mark.parametrize('n', range(6))",
    )
    body = f"def test_where(n): open(os.path.join({str(tmp_path)!r}, f'seen-{{os.getpid()}}'), 'w')"
    (tmp_path / "test_grouped.py").write_text("\n".join([*lines, body]) + "\n")
    options = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=outside)
    assert "6 passed" in result.stdout, result.stdout + result.stderr
    assert len(list(tmp_path.glob("seen-*"))) == 1
