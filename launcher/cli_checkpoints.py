"""The commands on checkpoints: verify, show, evaluate, export, import, average, generate and inspect."""

from pathlib import Path
from typing import Annotated

import typer

from launcher.arguments import ANALYSIS, CHECKPOINTS, CheckpointArgument, DirArgument, JsonOption, switch
from launcher.completion import offer_checkpoints
from launcher.console import say
from launcher.errors import UserError

of_checkpoints = typer.Typer()  # without a name, so that its commands are top-level ones
checkpoint_app = typer.Typer(help="Show what a checkpoint or a run holds, or verify every byte of it.")
of_checkpoints.add_typer(checkpoint_app, name="checkpoint", rich_help_panel=CHECKPOINTS)


@checkpoint_app.command("verify")
def verify_checkpoint(directory: DirArgument, as_json: JsonOption = False) -> int:
    """Read every byte of a checkpoint, or of all of a run, and compare the hashes.

    Nothing is changed. Exit code 1: a file is damaged.
    """
    from launcher.commands.checkpoint import verify

    return verify(directory, as_json=as_json)


@checkpoint_app.command("show")
def show_checkpoint(directory: DirArgument, as_json: JsonOption = False) -> int:
    """List the tensors and files of a checkpoint, or the checkpoints of a run."""
    from launcher.commands.checkpoint import show

    return show(directory, as_json=as_json)


@of_checkpoints.command("eval", rich_help_panel=CHECKPOINTS)
def evaluate(
    checkpoint: CheckpointArgument,
    sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of held-out sequences, at most (default: the config's train.eval_sequences).",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Print the loss on this text instead: a text, jsonl or parquet file, a folder or a glob.",
            show_default=False,
        ),
    ] = None,
    text_key: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="In jsonl and parquet files: the field with the text (default: text).",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,...",
            help="Print scores on tasks instead: names in lm-evaluation-harness, or YAML files of your own.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --tasks: only the first N documents of each task (default: all).",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --tasks: number of examples before each document (default: what each task says).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --tasks: seed for drawing examples and sampled texts (default: 1234).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="With --tasks: also write the scores to this new file, as JSON.", show_default=False
        ),
    ] = None,
    allow_task_code: Annotated[
        bool,
        switch(
            "--allow-task-code", text="With --tasks: run the code in task files. Use it only for files that you trust."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Print a checkpoint's held-out loss, its loss on a text, or its scores on tasks."""
    of_tasks = {"--limit": limit, "--shots": shots, "--seed": seed, "--out": out}
    of_tasks["--allow-task-code"] = allow_task_code or None
    if tasks is not None:
        from launcher.commands.evaluate_tasks import evaluate_tasks
        from launcher.tasks.load import SEED, Asked

        of_text = {"--sequences": sequences, "--text": text, "--text-key": text_key}
        others = [option for option, value in of_text.items() if value is not None]
        if others:
            raise UserError(
                [f"{others[0]} does not go with --tasks, which have their own text; leave out one of the two"]
            )
        specs = tuple(spec.strip() for spec in tasks.split(",") if spec.strip())
        asked = Asked(specs, "--tasks", shots, limit, SEED if seed is None else seed, allow_task_code)
        return evaluate_tasks(checkpoint, asked, out, as_json=as_json)
    unused = [option for option, value in of_tasks.items() if value is not None]
    if unused:
        raise UserError([f"{unused[0]} works with --tasks only; leave it out"])
    if text is not None:
        from launcher.commands.evaluate_text import evaluate_text

        if sequences is not None:
            raise UserError(["--sequences does not go with --text, which is read to its end; leave out one of the two"])
        return evaluate_text(checkpoint, text, text_key or "text", as_json=as_json)
    if text_key is not None:
        raise UserError([f"--text-key={text_key} works with --text only, whose records it is of; leave it out"])
    from launcher.training.evaluation import evaluate_checkpoint

    return evaluate_checkpoint(checkpoint, sequences, as_json=as_json)


@of_checkpoints.command(rich_help_panel=CHECKPOINTS)
def export(
    checkpoint: CheckpointArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; must be new or empty.", show_default=False)
    ],
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Precision of the weights: fp32 (exact), bf16 or fp16.")
    ] = "fp32",
    shard_gb: Annotated[
        float, typer.Option("--shard-gb", metavar="GB", help="Largest size of a file of weights, in GB (10^9 bytes).")
    ] = 5.0,
    verify: Annotated[
        bool,
        switch(
            "--verify",
            text="Keep the folder only if transformers computes the same logits; needs the memory of two models.",
        ),
    ] = False,
    keep_mtp: Annotated[bool, switch("--keep-mtp", text="Write the modules of multi-token prediction, too.")] = False,
) -> int:
    """Write a checkpoint as a folder that Hugging Face transformers loads.

    `AutoModelForCausalLM.from_pretrained` loads it without custom code.
    """
    if dtype not in ("fp32", "bf16", "fp16"):
        raise UserError([f"--dtype={dtype} must be fp32, bf16 or fp16; fp32 keeps every bit of the trained weights"])
    if not 1e-6 <= shard_gb <= 1e6:
        raise UserError(
            [f"--shard-gb={shard_gb} must be at least 1e-6 and at most 1e6; leave it out for files of 5 GB"]
        )
    from launcher.commands.export import export as write_export

    code = write_export(checkpoint, out, dtype, int(shard_gb * 1e9), verified=verify, keeps_mtp=keep_mtp)
    if code == 0:
        say(f"{checkpoint} -> {out}{'; transformers computes the same logits from it' if verify else ''}")
    return code


@of_checkpoints.command("import", rich_help_panel=CHECKPOINTS)
def import_folder(
    source: Annotated[
        str,
        typer.Argument(
            metavar="HF_DIR",
            help="The folder of a transformers model: config.json and safetensors files.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The run directory to write; must be new or empty.", show_default=False)
    ],
    drop_mtp: Annotated[bool, switch("--drop-mtp", text="Leave out the modules of multi-token prediction.")] = False,
) -> None:
    """Turn a Hugging Face transformers model into a run directory.

    eval, generate, inspect and export take it, and init_from starts a run with its weights, which become fp32.
    """
    from launcher.commands.import_model import import_model

    import_model(source, out, drops_mtp=drop_mtp)


@of_checkpoints.command("average", rich_help_panel=CHECKPOINTS)
def average(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... OUT",
            help="Run directories or checkpoints, then the run directory to write, which must be new or empty.",
            show_default=False,
            autocompletion=offer_checkpoints,
        ),
    ],
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            metavar="N",
            min=1,
            help="Average the last N checkpoints of each run (default: its newest good one).",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...", help="A weight for each checkpoint (default: all count alike).", show_default=False
        ),
    ] = None,
) -> None:
    """Average the weights of several checkpoints into a new run directory.

    eval, generate, inspect and export take it, and init_from starts a run with its weights.
    """
    if len(paths) < 2:
        raise UserError([f"OUT is missing after {paths[0]}; name the run directory to write last"])
    from launcher.commands.average import average_checkpoints

    average_checkpoints(paths[:-1], paths[-1], last, weights)


@of_checkpoints.command(rich_help_panel=CHECKPOINTS)
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Number of tokens to generate, unless the text ends before.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="How random the draws are; 0 always takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Draw only from the K likeliest tokens (default: from all).", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw only from the likeliest tokens that together have probability P (default: from all).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the draws.")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    from launcher.commands.generate import generate_from_checkpoint

    generate_from_checkpoint(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )


@of_checkpoints.command("inspect", rich_help_panel=ANALYSIS)
def inspect(
    checkpoint: CheckpointArgument,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="A text to run the model on; may be given several times."),
    ] = None,
    text_file: Annotated[
        list[str] | None,
        typer.Option(
            "--text-file",
            metavar="FILE",
            help="A text, jsonl or parquet file, a folder or a glob; may be given several times.",
        ),
    ] = None,
    text_key: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="In jsonl and parquet files: the field with the text (default: text).",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS", help="What to show: some of attention,experts,lens (default: all).", show_default=False
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N-N",
            help="Layers whose attention is shown, from 0: 0,4-6 or all (default: four).",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N-N",
            help="Heads whose attention is shown, from 0: 0,4-6 or all (default: the first eight).",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Number of tokens of each text to run, at most.")] = 256,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="For lens: number of predicted tokens to show for each token and layer.")
    ] = 5,
    sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For experts: number of held-out sequences of each data source (default: 8).",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Precision to compute in: fp32, bf16 or fp16.")] = "fp32",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE.html",
            help="Write an HTML page; into a new folder DIR: the page and pictures.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show attention, the routers' choices and each layer's predictions on a text.

    Exit code 1: a check fails that what is shown agrees with the model's output.
    """
    from launcher.commands.inspect import inspect_checkpoint
    from launcher.inspection.asked import Wishes

    wishes = Wishes(
        texts=text or (),
        files=text_file or (),
        text_key=text_key,
        show=show,
        layers=layers,
        heads=heads,
        max_tokens=max_tokens,
        top_k=top_k,
        sequences=sequences,
        dtype=dtype,
        out=out,
        as_json=as_json,
    )
    return inspect_checkpoint(checkpoint, wishes)
