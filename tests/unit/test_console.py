"""What reaches the terminal: data is shown escaped, on every way out; and an output that nobody takes ends quietly."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from data.errors import DataError
from launcher.cli import main
from launcher.console import escaped, in_a_line, open_console, say, show_exception, text_column
from launcher.watch.progress import RunProgress
from launcher.watch.terminal import LiveView, PlainView
from sealed import reseal, write_run

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("launcher", "parallel", "modeling", "data") for path in (ROOT / package).rglob("*.py")]
HOME = ROOT / "launcher" / "console.py"
NASTY = "\x1b[2J[red]x\x9b1m\u202e\r\udc80[/]"
SHOWN = r"\x1b[2J[red]x\u009b1m\u202e\x0d\udc80[/]"


def raw_prints(path: Path) -> list[str]:
    """Calls that write to the terminal past launcher/console.py, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_markup = any(word.arg == "markup" and ast.unparse(word.value) != "False" for word in node.keywords)
        streams = [f"sys.{stream}.{act}" for stream in ("stdout", "stderr") for act in ("write", "writelines")]
        if name in ("print", "Console", "TextColumn", "Text.from_markup", "Text.from_ansi", *streams) or is_markup:
            found.append(f"{path.name}:{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", [p for p in SOURCES if p != HOME], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_is_printed_past_the_console(path):
    assert raw_prints(path) == [], "launcher.console has say, tell, open_console and text_column"


def test_planted_raw_prints_are_seen(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("print(name)\nConsole().print(name, markup=True)\nsys.stderr.write(name)\nview.print(name)\n")
    assert sorted(line.rpartition(" ")[2] for line in raw_prints(source)) == [
        "Console",
        "Console().print",
        "print",
        "sys.stderr.write",
    ]


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_escaped_is_harmless_and_the_rest_stays(text):
    line = in_a_line(text)
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in line)
    assert escaped(line) == line
    assert escaped("a\tb\nc é 漢 [x]") == "a\tb\nc é 漢 [x]"
    assert json.loads(escaped(json.dumps(text))) == text


def test_tables_bars_and_texts_with_styles_show_it():
    out = io.StringIO()
    console = open_console(width=200)
    console.file = out
    table = Table(NASTY)
    table.add_row(NASTY)
    table.add_row(Text(NASTY, style="bold"))
    with RichProgress(text_column("{task.description}"), console=console) as progress:
        progress.add_task(NASTY)
    for each in (table, NASTY, Text(NASTY)):
        console.print(each)
    assert "\x1b" not in out.getvalue() and "\u202e" not in out.getvalue()
    assert out.getvalue().count(r"\x1b[2J[red]x") == 6


def test_views_and_errors_show_it(capsys, tmp_path):
    progress = RunProgress(10, 1, NASTY, tmp_path / NASTY)
    view = PlainView(progress, sys.stdout)
    view.update({"step": 1, "event": NASTY, "message": NASTY})
    out = io.StringIO()
    console = open_console(width=200)
    console.file = out
    live = LiveView(progress, console)
    live.event(NASTY)
    live.close()
    show_exception(ValueError, ValueError(NASTY), None)
    captured = capsys.readouterr()
    for text in (captured.out, captured.err, out.getvalue()):
        assert r"\x1b[2J[red]x" in text and "\x1b[2J" not in text and "\u202e" not in text


def test_refusals_show_it_and_stay_one_line(capsys, monkeypatch, tmp_path):
    import launcher.config.checked

    def refuse(*_, **__):
        raise DataError(f"{NASTY}\nnot a line of its own")

    monkeypatch.setattr(launcher.config.checked, "load_checked", refuse)
    assert main(["config", "x.yaml", "--ranks", "1"]) == 2
    assert capsys.readouterr().err == SHOWN + "\\nnot a line of its own\n"


def test_a_stream_that_lacks_a_character_gets_its_number():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    say("é漢", file=stream)
    assert raw.getvalue() == b"\xe9\\u6f22\n"


def test_a_table_shows_what_the_stream_lacks_by_its_number(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    table = Table("name", "für")
    table.add_row("漢", Text("\ufffd"))
    open_console().print(table)
    rows = raw.getvalue().decode("ascii").splitlines()
    assert r"f\xfcr" in rows[1] and r"\u6f22" in rows[3] and r"\ufffd" in rows[3]


def test_pages_and_templates_are_read_as_utf8_under_any_locale(tmp_path):
    """`inspect`'s script has other characters than ASCII, as templates may."""
    (tmp_path / "chat_template.jinja").write_text("漢{{ messages }}", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from data.chat_template import template_of;"
        "from data.config import ChatConfig; from launcher.inspection.page import SCRIPTS;"
        "from launcher.report.page import one_script;"
        "print(ascii((template_of(ChatConfig(), Path(sys.argv[1])), '\\u201c' in one_script(SCRIPTS))))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "('\\u6f22{{ messages }}', True)\n", done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "run")


def test_a_manifest_whose_tensor_moves_the_cursor(capsys, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    reseal(copy, lambda body: body["tensors"].update({"\x1b[2J[red]x": [1]}))
    assert [main(["checkpoint", command, str(copy)]) for command in ("show", "verify")] == [1, 1]
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and r"\x1b[2J[red]x" in captured.out


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> io.TextIOWrapper:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    return open("/dev/full", "w")


@pytest.mark.parametrize("place", [closed_pipe, full_disk])
@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["verify"]], ids=" ".join)
def test_an_output_that_nobody_takes_ends_the_command(capsys, monkeypatch, checkpoint, command, place):
    with place() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["checkpoint", *command, str(checkpoint)]) == 1
    assert_told(capsys.readouterr().err, place)


def assert_told(errors: str, place) -> None:
    """A full disk in a line; a reader that has gone knows."""
    if place is closed_pipe:
        assert errors == ""
    else:
        (line,) = errors.splitlines()
        assert line.startswith("standard output takes no more: No space left on device")


@pytest.mark.parametrize("place", [closed_pipe, full_disk])
@pytest.mark.parametrize("command", [["config", "configs/quickstart.yaml"], ["--help"]], ids=" ".join)
def test_a_process_whose_output_nobody_takes_ends_with_code_1(command, place):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stderr": subprocess.PIPE, "text": True, "timeout": 120, "check": False, "cwd": ROOT}
    with place() as stream:
        arguments = [sys.executable, "-m", "launcher", *command]
        done = subprocess.run(arguments, stdout=stream, env=environment, **options)
    assert done.returncode == 1, done.stderr
    assert_told(done.stderr, place)


def test_a_corpus_whose_name_and_key_move_the_cursor(capsys, tmp_path):
    """A file that cannot be read is told by its name, a key that is not there with those that are."""
    corpus = tmp_path / "corpus\x1b#8"
    corpus.mkdir()
    (corpus / "\x1b#8[red]x.jsonl").write_text(json.dumps({"\x1b[2J": "text"}) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data: {{sources: [{{path: {json.dumps(str(corpus / '*.jsonl'))}}}], token_dir: {tmp_path}/t}}\n"
    )
    assert main(["prepare", str(config)]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    (line,) = captured.err.splitlines()
    assert r"\x1b#8[red]x.jsonl" in line
