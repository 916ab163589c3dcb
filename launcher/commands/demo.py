"""`make demo`: from real text to a trained model that transformers loads. Every step is a command that a user types."""

import subprocess
import sys
import time
from pathlib import Path

from launcher.config.load import load_config
from launcher.console import say
from launcher.processor.narrow import SLOW, narrow_cost
from launcher.training.run_parts import METRICS
from launcher.watch.metrics import read_metrics
from launcher.watch.plot import plot_run

CONFIG = Path("configs/quickstart.yaml")
RANKS = 2
PROMPT = 'def read_lines(path):\n    """'
NEW_TOKENS = 60


def main() -> int:
    """Runs the demo from the checkout's folder; returns 0, or the exit code of the command that failed."""
    started = time.monotonic()
    run = load_config(CONFIG).run_path
    exported = Path("exports") / run.name
    picture = run / "demo.png"
    commands = [
        ("Real text to token files", ["prepare", str(CONFIG)]),
        (f"Train on {RANKS} local processes", ["train", str(CONFIG), "--ranks", str(RANKS), *precision()]),
        ("Held-out loss of the last checkpoint", ["eval", str(run)]),
    ]
    if not exported.exists():
        commands.append(("Export to Hugging Face format", ["export", str(run), str(exported)]))
    for number, (title, arguments) in enumerate(commands, 1):
        say(f"\n[{number}/{len(commands) + 1}] {title}\n$ roundtable {' '.join(arguments)}")
        code = subprocess.run([sys.executable, "-m", "launcher", *arguments]).returncode
        if code:
            return code
    plot_run(run, picture)
    say(f"\n[{len(commands) + 1}/{len(commands) + 1}] Load the export in transformers, and let it continue a prompt")
    say(complete(exported))
    say(summary(run, exported, picture, time.monotonic() - started))
    return 0


def precision() -> list[str]:
    """An override to fp32, with a line that says why, where training would run on a processor that is slow in bf16."""
    import torch

    if torch.cuda.is_available() or (times := narrow_cost()) < SLOW:
        return []
    say(f"This processor takes {times:.0f} times as long for products in bf16 as in fp32: the demo trains in fp32.")
    return ["train.precision=fp32"]


def complete(exported: Path) -> str:
    """The prompt and the exported model's greedy continuation, made with transformers' own classes alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  (an auto class names no model)
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.3
    )
    return f"--- {type(model).__name__}\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}\n---"


def summary(run: Path, exported: Path, picture: Path, seconds: float) -> str:
    """The demo's last lines: the losses, and the paths of everything that it has made."""
    rows = read_metrics(run / METRICS)
    updates = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    return "\n".join(
        [
            f"Loss {updates[0]['loss']:.2f} -> {updates[-1]['loss']:.2f} in {updates[-1]['step']} steps "
            f"({updates[-1]['tokens']:,} tokens); held-out {evaluations[-1]['eval_loss']:.2f}. {seconds:.0f} s in all.",
            f"  picture       {picture}",
            f"  metrics       {run / METRICS}",
            f"  checkpoints   {run / 'checkpoints'}",
            f"  export        {exported}",
            f"  W&B (offline) wandb sync {run}/wandb/offline-run-*   or, in the terminal: wandb leet",
            f'  try           roundtable generate {run} --prompt "import os"',
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
