"""Shell completion: the config keys, their values, runs and checkpoints offered after <TAB>, without importing torch.

Only words of letters, digits and a few safe signs are offered, because shells split and expand completions again.
"""

import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import typer

from data.partial import is_partial

RUNS_DIR = "runs"
SHELLS = ("bash", "zsh", "fish")
PLAIN = re.compile(r"[\w.,+@%/-]+")
MOST = 500  # completions that are offered at most; nobody reads more


def offer_files(incomplete: str) -> list[str]:
    """No completions, so that the shell offers file names."""
    return []


def offer_shells(incomplete: str) -> list[str]:
    """The shells that `roundtable completion` knows."""
    return [shell for shell in SHELLS if shell.startswith(incomplete)]


def offer_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completions of a ``key=value`` word: keys that begin with it, each with ``=``; after the ``=`` the key's values.

    An empty word offers only sections and top-level keys. A single matching key is offered with its default too, since
    a shell would put a space behind the ``=`` of a sole completion.
    """
    before = list(ctx.params.get("overrides") or ())
    if before[-1:] == ["="]:  # bash takes key=value for three words
        return [value for value in values_of(before[-2]) if value.startswith(incomplete)] if len(before) > 1 else []
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={offered}" for offered in values_of(key) if offered.startswith(value)]
    keys = [known for known in all_keys() if known.startswith(incomplete)]
    if len(keys) == 1:
        (key,) = keys
        return [f"{key}=", f"{key}={(values_of(key) or [''])[0]}"]
    if not incomplete:  # the sections, and what lies in none
        return list(dict.fromkeys("".join(known.partition(".")[:2]) if "." in known else f"{known}=" for known in keys))
    return [f"{known}=" for known in keys]


def all_keys() -> list[str]:
    """Every dotted key of a plain value, of a list, or of a section that may be null; none below ``data.sources``."""
    from launcher.config.schema import leaf_keys
    from launcher.config.tree import RunConfig

    keys = leaf_keys(RunConfig, with_nullable=True)
    return list(dict.fromkeys(key for key in keys if not key.startswith("data.sources.")))


def values_of(key: str) -> list[str]:
    """The values that the key can take, its default first; only the default where there is no fixed set of them."""
    from launcher.config.schema import alternatives, field_default, field_hints, is_nullable, literal_values, members
    from launcher.config.tree import RunConfig

    sections, values = [RunConfig], list[Any]()
    for name in key.split("."):
        holders = [section for section in sections if name in field_hints(section)]
        hints = [field_hints(section)[name] for section in holders]
        values = [field_default(section, name) for section in holders]
        for hint in hints:
            values += literal_values(hint) + ((True, False) if bool in members(hint) else ())
            values += (None,) if is_nullable(hint) else ()
        sections = [section for hint in hints for section in alternatives(hint)]
    words = {_written(value) for value in values if value is None or isinstance(value, bool | int | float | str)}
    ordered = [_written(value) for value in values if _written(value) in words]
    return [word for word in dict.fromkeys(ordered) if PLAIN.fullmatch(word)]


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def offer_runs(incomplete: str) -> list[str]:
    """The runs in the folder ``runs`` that begin with the word: their names, or their paths if it contains a slash."""
    return [path for path in _plain_paths(_runs(incomplete)) if path.startswith(incomplete)][:MOST]


def offer_checkpoints(incomplete: str) -> list[str]:
    """The run directories that begin with the word; once it names one, that run and its checkpoints, newest first."""
    run, found, _ = incomplete.rpartition("/checkpoints/")
    if not found and (Path(incomplete) / "checkpoints").is_dir():
        run, found = incomplete.rstrip("/"), "/"
    folder = Path(run) / "checkpoints"
    if found and folder.is_dir():
        names = sorted((path for path in folder.glob("step-*[0-9]")), reverse=True)
        paths = [f"{run}/checkpoints/{path.name}" for path in names]
        return [path for path in _plain_paths([run, *paths]) if path.startswith(incomplete)][:MOST]
    return [f"{RUNS_DIR}/{name}" for name in _names() if f"{RUNS_DIR}/{name}".startswith(incomplete)][:MOST]


def _runs(incomplete: str) -> list[str]:
    return [f"{RUNS_DIR}/{name}" for name in _names()] if "/" in incomplete else _names()


def _names() -> list[str]:
    runs = (path.parent for path in Path(RUNS_DIR).glob("*/config.yaml"))
    return list(_plain_paths(sorted(run.name for run in runs if not is_partial(run))))


def _plain_paths(paths: list[str]) -> Iterator[str]:
    return (path for path in paths if PLAIN.fullmatch(path))


def mend_bash_words(environment: MutableMapping[str, str] = os.environ) -> None:
    """Moves bash's cursor from the word ``=`` to the one behind it, so that the value after ``key=`` is completed.

    Bash splits ``key=value`` at the ``=``. Changes COMP_CWORD in ``environment``, and only for bash's completion.
    """
    if environment.get("_ROUNDTABLE_COMPLETE") != "complete_bash":
        return
    words, at = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if at.isdigit() and int(at) < len(words) and words[int(at)] == "=":
        environment["COMP_CWORD"] = str(int(at) + 1)
