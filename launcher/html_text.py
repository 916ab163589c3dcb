"""Text in a page of HTML: whatever it holds is shown as text, and no markup in it takes effect."""

from html import escape

from launcher.console import escaped


def text(value: object) -> str:
    """As it stands in a page: markup escaped, and so are control characters and what reverses writing."""
    return escape(escaped(str(value)), quote=True)
