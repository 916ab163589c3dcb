"""What importing a part brings along: seconds that every command, or each process of a run, would wait for."""

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed", "transformers", "tokenizers", "datasets", "wandb")


def brought_along(modules: str) -> set[str]:
    """Those of HEAVY that are there once a new interpreter has imported ``modules``."""
    code = f"import sys, {modules}\nprint(*set({HEAVY}) & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    ("modules", "needed"),
    [
        ("modeling.families.weights, modeling.families.config_json, modeling.counts, modeling.generate", set()),
        ("launcher.training.start", set()),  # what refuses a config
        ("launcher.commands.trained", set()),  # what generates and exports
        ("launcher.training.loop", {"torch._dynamo"}),  # torch's pipelining and its optimizers import that
        ("parallel.zero.patches", {"deepspeed"}),  # of torch's compiler nothing
    ],
)
def test_what_is_brought_along(modules: str, needed: set[str]) -> None:
    assert brought_along(modules) == needed
