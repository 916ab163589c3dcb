"""Every `roundtable ...` in the README and the docs is a command that there is, and so are its options and keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from launcher.cli import app, main
from launcher.config.schema import hint_at
from launcher.config.tree import RunConfig
from page_commands import commands_of, first_missing, run_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS: Any = typer.main.get_command(app)
SUMMARY_LETTERS = 82  # of a command in `roundtable --help`, which then takes one line of 100 columns


def faults(words: list[str]) -> Iterator[str]:
    """What no command knows of these words, which follow `roundtable`."""
    command, rest = COMMANDS, list(words)
    while rest and hasattr(command, "commands"):
        if rest[0].startswith("-") or not re.fullmatch(r"[a-z-]+", rest[0]):
            break
        if rest[0] not in command.commands:
            yield f"{rest[0]} is no command"
            return
        command = command.commands[rest.pop(0)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("-") and word.partition("=")[0] not in options | {"--help", "-h"}:
            yield f"{word} is no option of {command.name}"
        key = word.partition("=")[0]
        is_override = "=" in word and re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+|seed|name|run_dir|init_from", key)
        if is_override and hint_at(RunConfig, key.split(".")) is None:
            yield f"{key} is no key"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_on_a_page_is_one(path):
    page = path.read_text()
    found = [(line, fault) for line, words in commands_of(page) for fault in faults(words)]
    shown = {
        f"{key} is no key" for key in re.findall(r"^(\S+)=\S+ is not a known key; ", page, re.MULTILINE)
    }  # mistakes
    assert [(line, fault) for line, fault in found if fault not in shown] == []


def leaves(command: Any = COMMANDS, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of each command that there is, and the command."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*words, name))


def takes_a_run(command: Any) -> bool:
    """Whether its first argument is a run."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    return bool(arguments) and "RUN" in str(arguments[0].metavar)


def test_every_command_is_on_a_page():
    texts = "".join(path.read_text() for path in PAGES)
    assert [words for words, _ in leaves() if f"roundtable {' '.join(words)}" not in texts] == []


LEAVES = dict(leaves())


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_help_says_what_each_command_and_argument_is(words):
    summary, *_ = LEAVES[words].help.split("\n\n")
    assert summary.endswith(".") and len(summary) <= SUMMARY_LETTERS
    assert [each.name for each in LEAVES[words].params if each.name != "help" and not each.help] == []


OF_A_RUN = {words: command for words, command in LEAVES.items() if takes_a_run(command)}


@pytest.mark.parametrize("words", OF_A_RUN, ids=" ".join)
def test_a_run_that_is_not_there_is_one_line(words, tmp_path, monkeypatch, capsys):
    """By whatever command: so the next one, too, says so instead of ending in a traceback."""
    monkeypatch.chdir(tmp_path)
    given = []
    for each in OF_A_RUN[words].params:
        if each.required:
            given += ["absent"] if each.param_type_name == "argument" else [each.opts[0], "1"]
    assert main([*words, *given]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1 and told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_there_are_commands_on_the_pages():
    assert sum(len(commands_of(path.read_text())) for path in PAGES) > 80


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("    roundtable trane a.yaml\n", "trane is no command"),
        ("```sh\nsrun -n 8 roundtable train a.yaml --rank 2\n```\n", "--rank is no option of train"),
        ("```\n$ roundtable train a.yaml \\\n  train.stepz=2\n```\n", "train.stepz is no key"),
        ("    roundtable checkpoint shaw DIR    what it holds\n", "shaw is no command"),
    ],
)
def test_planted_commands_that_are_none_are_seen(page, fault):
    ((_, words),) = commands_of(page)
    assert list(faults(words)) == [fault]


def test_a_page_is_run_in_order_and_what_it_shows_is_looked_for(tmp_path):
    fences = ("```text file=a\nhello there\n```", "   ```sh run\n   cat a\n   echo two  words\n   ```")
    page = "\n\nThen:\n\n".join([*fences, "```text shown\nhel… there\ntwo words\n```\n"])
    assert run_page(page, tmp_path) == 1
    assert first_missing("two words\nhello", "hello there\ntwo  words\n") == "hello"


@pytest.mark.parametrize(
    "page",
    [
        "```sh run\nfalse\ntrue\n```\n",
        "```sh run\necho a\n```\n```text shown\nb\n```\n",
        "```sh runn\ntrue\n```\n",
    ],
)
def test_planted_pages_that_do_not_hold_are_seen(tmp_path, page):
    with pytest.raises(AssertionError, match="line "):
        run_page(page, tmp_path)
