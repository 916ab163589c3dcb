"""Everything that the house calls of torch is there in each version that pyproject.toml allows, with these arguments.

The other versions' signatures are data: tests/data/torch_signatures.json (see torch_signatures).
"""

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from torch_signatures import (
    DATA,
    ROOT,
    VARLEN,
    Call,
    calls_in,
    home_of,
    house_calls,
    house_imports,
    house_methods,
    is_operator,
    schema_signature,
    takes,
)

REMEDY = "pass it where the version has it, or write the data anew as torch_signatures says"
KNOWN: dict[str, Any] = json.loads(DATA.read_text())
CALLS = house_calls()
# Looked up as this is imported: a compiler that another test starts wraps the constructor of modules.
HOMES = {call.name: home_of(call.name) for call in CALLS}


def problems(known: dict[str, Any], calls: list[Call]) -> Iterator[str]:
    """The calls that a version does not take."""
    for call in calls:
        home = HOMES[call.name] if call.name in HOMES else home_of(call.name)
        if is_operator(call):
            signatures = known["operators"].get(call.name)
        elif home is not None:
            signatures = known["functions"].get(home)
        else:
            continue
        if signatures is None:
            yield f"{call.place}: {call.name} is not known; {REMEDY}"
        elif not any(takes(each, call) for each in signatures):
            yield f"{call.place}: {call.name} takes no such arguments; {REMEDY}"


def test_every_call_is_one_that_each_version_takes() -> None:
    """Functions, names of tensors' methods, and imports. The installed version is what all other tests run with."""
    methods = house_methods()
    imports = {f"{module}.{name}" for module, name in house_imports()}
    for version, known in KNOWN.items():
        assert list(problems(known, CALLS)) == [], version
        assert imports - {*known["imports"]} == set(), version
        assert methods - {*known["tensor_methods"]} == set(), version


def test_the_versions_are_those_that_may_be_installed() -> None:
    """From the oldest that pyproject.toml allows, one of each minor release before the one that tests run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [found for each in project["dependencies"] if (found := Requirement(each)).name == "torch"]
    minors = [Version(version).release[:2] for version in KNOWN]
    assert all(version in wanted.specifier for version in KNOWN)
    assert minors == [(2, 11), (2, 12)]
    assert "2.10.9" not in wanted.specifier


def test_attention_is_told_of_grouped_heads_where_it_wants_to_be() -> None:
    """modeling.kernels.attention.varlen_kernel asks the signature: 2.11 has no option for them."""
    options = {version: known["functions"][home_of(VARLEN) or ""][0]["keyword"] for version, known in KNOWN.items()}
    assert {version: "enable_gqa" in names for version, names in options.items()} == {"2.11.0": False, "2.12.0": True}


def test_flash_attention_takes_the_same_arguments_in_all_versions() -> None:
    """What a ring's pieces are computed by; later versions' forward pass has more options, which we do not use."""
    names = [f"torch.ops.aten._flash_attention_{way}" for way in ("forward", "backward")]
    assert {*names} <= {call.name for call in CALLS if is_operator(call)}
    for name in names:
        schema = str(getattr(torch.ops.aten, name.rpartition(".")[2]).default._schema)
        ours = schema_signature(schema.removeprefix("aten::"))
        for known in KNOWN.values():
            theirs = known["operators"][name][0]
            assert theirs["positional"] == ours["positional"]
            assert theirs["keyword"] == ours["keyword"][: len(theirs["keyword"])]


def test_arguments_that_a_version_lacks_are_caught() -> None:
    """Planted: options that torch 2.11's attention does not have, and one argument too many."""
    source = """
import torch
import torch.distributed as dist
from torch.nn.attention import varlen
from torch.nn import functional as F
varlen.varlen_attn(q, k, v, a, b, c, d, enable_gqa=True)
dist.all_reduce(total, op, group, True, 5)
F.silu(x, inplace=True)
F.silu(x, in_place=True)
torch.ops.aten._flash_attention_forward(q, k, v, a, b, 1, 2, 0.0, True, False, num_splits=1)
"""
    calls = list(calls_in(source, "planted.py"))
    assert [call.name for call in calls] == [
        "torch.nn.attention.varlen.varlen_attn",
        "torch.distributed.all_reduce",
        "torch.nn.functional.silu",
        "torch.nn.functional.silu",
        "torch.ops.aten._flash_attention_forward",
    ]
    for version, lines in (("2.11.0", ["6", "7", "9", "10"]), ("2.12.0", ["7", "9"])):
        assert [each.split(":")[1] for each in problems(KNOWN[version], calls)] == lines
