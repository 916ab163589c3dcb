"""What importing a part brings along: seconds that every command, or each process of a run, would wait for."""

import functools
import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "transformers", "tokenizers", "datasets", "wandb")


# By one interpreter: what is there then is what this part and those before it need.
IN_TURN: tuple[tuple[str, set[str]], ...] = (
    ("modeling.families.weights, modeling.families.config_json, modeling.counts, modeling.generate", set()),
    ("launcher.training.start", set()),  # what refuses a config
    ("launcher.commands.trained", set()),  # what generates and exports
    ("launcher.training.loop", {"torch._dynamo"}),  # torch's pipelining and its optimizers import that
)
ALONE: tuple[tuple[str, set[str]], ...] = (("parallel.zero.patches", {"deepspeed"}),)  # of torch's compiler nothing


@functools.cache
def brought_along(*imported: str) -> list[set[str]]:
    """Those of HEAVY that are there in a new interpreter after each of ``imported``."""
    told = f"print('there:', *set({HEAVY}) & sys.modules.keys())"
    code = "\n".join(["import sys", *(line for modules in imported for line in (f"import {modules}", told))])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()[1:]) for line in result.stdout.splitlines() if line.startswith("there:")]


@pytest.mark.xdist_group("imports")
@pytest.mark.parametrize(
    ("together", "place"),
    [
        pytest.param(together, place, id=modules.rpartition(".")[2])
        for together in (IN_TURN, ALONE)
        for place, (modules, _) in enumerate(together)
    ],
)
def test_what_is_brought_along(together: tuple[tuple[str, set[str]], ...], place: int) -> None:
    found = brought_along(*(modules for modules, _ in together))
    assert len(found) == len(together) and found[place] == together[place][1], together[place][0]
