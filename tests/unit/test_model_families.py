"""The families as a whole: their names, and the page about them."""

import ast
import re
from dataclasses import replace
from pathlib import Path

from modeling.config import DROPOUTS, FAMILIES
from modeling.families.family import Family, family_of, field_defaults

SMALL_MODELS = (Path(__file__).parents[1] / "support" / "small_models.py").read_text()


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


def fields_never_set(families: list[Family]) -> set[str]:
    """The fields that a family is free in, or fixes to another value than the default, and no small model sets.

    Dropout is left out: it is for training alone, and has tests of its own.
    """
    defaults = field_defaults()
    calls = [node for node in ast.walk(ast.parse(SMALL_MODELS)) if isinstance(node, ast.Call)]
    given = {keyword.arg for call in calls for keyword in call.keywords}
    told = {name for family in families for name in family.told}
    fixed = {
        name
        for family in families
        for name, values in family.allowed.items()
        if name in defaults and tuple(values) != (defaults[name],)
    }
    return {name for name in told | fixed if name.rpartition(".")[2] not in given} - {*DROPOUTS}


def test_small_models_set_every_field_of_the_families() -> None:
    """Otherwise all tests of a family would pass with models that lack what the family is for."""
    unset = sorted(fields_never_set([family_of(name) for name in FAMILIES]))
    assert unset == [], f"tests/support/small_models.py sets none of {unset}"


def test_planted_field_that_no_small_model_sets_is_seen() -> None:
    llama = family_of("llama")
    added = replace(llama, keys={**llama.keys, "gate_rank": "gate_rank"}, allowed={**llama.allowed, "z_loss": (1e-4,)})
    assert fields_never_set([added]) == {"gate_rank", "z_loss"}
