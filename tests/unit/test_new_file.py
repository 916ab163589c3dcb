"""A file takes its place in one act, and nothing stays of one that could not be written to its end."""

import errno
import signal
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from launcher.errors import UserError
from launcher.inspection import write
from launcher.plan import corrections
from launcher.report.at_end import write_page
from launcher.watch.picture import save_picture


def unheard(*_):
    pytest.fail("nobody hears SIGTERM")


@pytest.fixture(autouse=True)
def outlived():
    """Without it a SIGTERM that nobody hears would end the tests, and work in the background hears no Ctrl-C."""
    handlers = {signal.SIGTERM: unheard, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def break_off(how):
    """What goes wrong in the midst of writing."""
    if how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    signal.raise_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)


RAISED = {"full": (OSError, UserError), "Ctrl-C": KeyboardInterrupt, "SIGTERM": SystemExit}


@pytest.mark.parametrize("how", RAISED)
@pytest.mark.parametrize("name", ["curves.png", "a.b.svg"])
def test_a_picture_that_is_broken_off(tmp_path, monkeypatch, how, name):
    (tmp_path / name).write_text("the one before")

    def write_half(path, content):
        path.write_text("half")
        break_off(how)

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(RAISED[how]):
        save_picture(Figure(), tmp_path / name, "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "the one before")]


class Half(str):
    """A page of which a part is written."""

    how: str

    def __new__(cls, how):
        made = super().__new__(cls, "half")
        made.how = how
        return made


@pytest.fixture
def breaking(monkeypatch):
    """Path.write_text writes a Half, and then breaks off."""
    real = Path.write_text

    def write_text(path, text, *arguments, **options):
        real(path, str(text), *arguments, **options)
        if isinstance(text, Half):
            break_off(text.how)

    monkeypatch.setattr(Path, "write_text", write_text)


@pytest.mark.parametrize("how", ["full", "Ctrl-C"])
def test_a_page_that_is_broken_off(tmp_path, breaking, how):
    with pytest.raises(RAISED[how]):
        write_page(tmp_path / "report.html", Half(how))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", RAISED)
@pytest.mark.parametrize("out", ["page.html", "folder"])
def test_an_inspection_that_is_broken_off(tmp_path, breaking, monkeypatch, how, out):
    monkeypatch.setattr(write, "render", lambda *_: Half(how))
    with pytest.raises(RAISED[how]):
        write.write_out(tmp_path / out, {})
    assert not list(tmp_path.iterdir())


def test_calibrations_for_which_the_disk_has_no_room(tmp_path, breaking, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(corrections, "HEAD", type("Head", (), {"__add__": lambda *_: Half("full")})())
    with pytest.raises(UserError, match="No space left"):
        corrections._write([])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
