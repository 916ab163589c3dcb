"""Nothing that a config says becomes a command of the shell's, or an option of sbatch's but those of slurm.options."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.checked import load_checked
from launcher.config.schema import hint_at, item_hint, leaf_keys, literal_values, members
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.slurm.checks import check_names
from launcher.slurm.profile import job_script
from launcher.slurm.rules import FURTHER_OPTIONS
from launcher.slurm.script import quote_for_sbatch, render

CANARY = "canary"
HOSTILE = [
    'x" --uid=0 "',
    "x' --uid=0 '",
    "x\n#SBATCH --uid=0",
    "x\r#SBATCH --uid=0",
    "x\x85#SBATCH --uid=0",
    "x\u2028#SBATCH --uid=0",
    "x --uid=0",
    "x\t--uid=0",
    "--uid=0",
    "-x",
    "x #",
    "x\\",
    'x\\" --uid=0',
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"x; touch {CANARY}",
    f"x && touch {CANARY} #",
    f"x | touch {CANARY}",
    f"x > {CANARY}",
    f"';touch {CANARY};'",
    f'";touch {CANARY};"',
    f"${{IFS}}touch {CANARY}",
    "${HOME}",
    "$HOME",
    "~root",
    "x%j",
    "*",
    "x\x00y",
    "x\x1b[2Jy",
    "",
    " ",
    "é",
    "../../x",
    "A=b",
    f"A=$(touch {CANARY})",
    f"A=b; touch {CANARY}",
    'A="b',
    "A='b",
    "A=b\nc",
    "A b=c",
    f"A$(touch {CANARY})=b",
    "LD=b=c",
    "IFS=x",
    "SLURM_JOB_ID=1",
    "RUN_DIR=/",
    "é=b",
    "-e=b",
]
STRING_KEYS = sorted(
    key
    for key in leaf_keys(RunConfig)
    if str in members(item_hint(hint_at(RunConfig, key.split("."))) or hint_at(RunConfig, key.split(".")))
    and not literal_values(hint_at(RunConfig, key.split(".")))
)
TEMPLATE = job_script("train")
OPTIONS = {  # every option of sbatch's that a script may hold
    *("job-name", "comment", "partition", "account", "qos", "constraint", "exclude", "nodes", "ntasks-per-node"),
    *("gpus-per-node", "cpus-per-task", "mem", "time", "signal", "open-mode", "output", "requeue"),
    *FURTHER_OPTIONS,
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "config.yaml").write_text("data: {sources: [{path: none.txt}]}\nslurm: {python: python3}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def options_of(script: str) -> dict[str, str]:
    """sbatch's options, each line of which must be one word."""
    found = {}
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            (option,) = shlex.split(line.removeprefix("#SBATCH"))
            name, _, value = option.removeprefix("--").partition("=")
            assert option.startswith("--")
            assert name not in found
            found[name] = value
    return found


def settings_of(script: str) -> str:
    return script.partition("# --- settings\n")[2].partition("# --- end of settings\n")[0]


def assert_tame(script: str, folder: Path) -> None:
    """The script is bash, has no options but its own, and its settings do nothing but set."""
    assert set(options_of(script)) <= OPTIONS
    assert len(re.findall("^#SBATCH", script, re.MULTILINE)) == script.count("#SBATCH")
    head = "module() { :; }\nset -u\nSLURM_JOB_ID=7\n"
    program = f'{head}{settings_of(script)}\necho "$JOB|$REQUEUE|$#|${{#SRUN_OPTIONS[@]}}"\n'
    done = subprocess.run(
        ["bash", "-c", program],
        cwd=folder,
        env={"HOME": "/home", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    filled_in = "is not set on the node" in done.stderr or "is not set in the job" in done.stderr
    assert filled_in or done.stdout in ("7|yes|1|0\n", "7|yes|1|3\n"), done.stderr
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert not (folder / CANARY).exists()


def script_of(override: str) -> tuple[str | None, list[str]]:
    """The script of config.yaml with one override, as `submit` makes it, or None and the lines that refuse it."""
    try:
        config = load_checked("config.yaml", [override], world_size=None, data=False)
    except UserError as error:
        return None, error.problems
    lines = check_names(config)
    return (None, lines) if lines else (render(TEMPLATE, config, "python3"), [])


@pytest.mark.parametrize("key", STRING_KEYS)
def test_hostile_text_is_refused_or_quoted(folder, key):
    """Each hostile value at each key that is text: refused, or a script that does what it should."""
    is_list = item_hint(hint_at(RunConfig, key.split("."))) is not None
    place = key.replace("data.sources.", "data.sources.0.") + (".0" if is_list else "")
    is_in_script = key.startswith(("slurm.", "name", "run_dir"))
    plain, _ = script_of("seed=0")
    for value in HOSTILE if is_in_script else HOSTILE[:8]:
        script, lines = script_of(f'{place}="' + "".join(f"\\U{ord(letter):08x}" for letter in value) + '"')
        assert (script is None) == bool(lines)
        assert all(line.isprintable() for line in lines)
        if is_in_script and script is not None:
            assert_tame(script, folder)
        else:
            assert script in (plain, None), "the script does not depend on it"


LOCAL = {
    'name=a"b': "name='a\"b' must be of letters",
    "name=a$(b)": "name='a$(b)' must be of letters",
    "name=-x": "name='-x' must be of letters, digits, spaces and . , : + @ = _ - to name a job, and not begin with -",
    "run_dir='a`b`'": "run_dir='a`b`' must be of letters",
    'run_dir="a\\nb"': "run_dir='a\\nb' must be a path",
    "run_dir='-x'": "run_dir='-x' must be of letters",
    "slurm.account=--uid=0": "slurm.account='--uid=0' must be one word, as Slurm knows it",
    "slurm.partition='a b'": "slurm.partition='a b' must be one word, as Slurm knows it",
    "slurm.python=--uid=0": "slurm.python='--uid=0' must be a path or a name",
    "slurm.modules=[--help]": "slurm.modules[0]='--help' must be a module's name",
    "slurm.options=['uid=0']": "slurm.options[0]='uid=0' must be one of sbatch's options",
    "slurm.options=['wrap=x']": "slurm.options[0]='wrap=x' must be one of sbatch's options",
    "slurm.options=['begin=now --uid=0']": "slurm.options[0]='begin=now --uid=0' must be NAME, or NAME=value",
    "slurm.environment=[SLURM_JOB_ID=1]": "slurm.environment[0]='SLURM_JOB_ID=1' must not set SLURM_JOB_ID",
}


@pytest.mark.parametrize("override", LOCAL)
@pytest.mark.parametrize("dry_run", [True, False], ids=["dry run", ""])
def test_what_cannot_be_in_a_script_is_refused_not_warned_of(folder, capsys, override, dry_run):
    assert main(["submit", "config.yaml", override, *(["--dry-run"] if dry_run else [])]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[0].startswith(LOCAL[override])
    assert len(told.err.splitlines()) <= 2  # the path and its absolute form
    assert os.listdir(folder) == ["config.yaml"]


def test_a_folder_that_cannot_be_in_a_script_is_refused(folder, capsys, monkeypatch):
    here = folder / 'a"b'
    here.mkdir()
    (here / "config.yaml").write_text((folder / "config.yaml").read_text())
    monkeypatch.chdir(here)
    for arguments in ([], ["--sweep", "sweep.yaml"]):
        (here / "sweep.yaml").write_text("grid: {seed: [1, 2]}")
        assert main(["submit", "config.yaml", "--dry-run", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("run_dir=")
        assert "must be of letters" in line


def test_a_profile_is_held_to_the_same_rules(folder, capsys):
    for number, value in enumerate(("--uid=0", "a b", "a\\nb", 'a\\"b')):
        (folder / "site.yaml").write_text(f'account: "{value}"\npartition: main\n')
        assert main(["submit", "config.yaml", "--dry-run", "--cluster", "site.yaml"]) == 2, number
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("slurm.account='")


def test_planted_value_without_its_rule_is_stopped_by_the_quoting():
    for value in ('a"b', "a\\b", "a\nb", "a\u2028b"):
        with pytest.raises(ValueError, match="cannot be written"):
            quote_for_sbatch(value)
    assert quote_for_sbatch("a b") == '"a b"'
