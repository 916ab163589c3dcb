"""Text in a page of HTML: whatever it holds is shown as text, and no markup in it takes effect."""

from html import escape

from launcher.console import escaped


def text(value: object) -> str:
    """The value as HTML text: markup, control characters and characters that reverse writing are escaped."""
    return escape(escaped(str(value)), quote=True)
