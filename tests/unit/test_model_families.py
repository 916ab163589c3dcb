"""The families as a whole: their names, and the page about them."""

import re
from pathlib import Path

from modeling.config import FAMILIES
from modeling.families.family import family_of


def test_every_family_has_its_row_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    assert [f"docs/families.md has no row of {name}" for name in FAMILIES if f"\n| `{name}` |" not in page] == []


def test_a_model_type_is_one_family_s() -> None:
    """A family that is another one with changes would have its other names too, and one of both would never be read."""
    families = [family_of(name) for name in FAMILIES]
    within = [family.within for family in families if family.within]
    names = [*FAMILIES, *within, *(name for family in families for name in family.model_types)]
    assert len(names) == len({*names})


def test_every_family_that_version_4_lacks_is_told_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    (row,) = [line for line in page.splitlines() if line.endswith("| version 4 has no such class | version 5 |")]
    assert re.findall("`(.*?)`", row) == [name for name in FAMILIES if family_of(name).since > 4]
