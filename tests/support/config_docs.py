"""The table of all keys in docs/config.md, from the dataclasses; run as a program, writes it there."""

import re
from pathlib import Path

from launcher.config.keys import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
TABLE = re.compile(r"^\| key \| default .*\n(\|.*\n)+", re.MULTILINE)


def table() -> str:
    """The table as Markdown."""
    head = "| key | default | values | meaning |\n|---|---|---|---|\n"
    return head + "".join(
        f"| `{each.key}` | `{each.default}` | {each.values} | {each.meaning} |\n" for each in all_keys()
    ).replace("| `required` |", "| required |")


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
