"""No secret gets into a config: what looks like one is refused wherever it stands, and is never shown."""

import os

import pytest

from launcher.cli import main
from launcher.config.schema import leaf_keys
from launcher.config.secrets import MASK, is_secret_name, mask
from launcher.config.tree import RunConfig

SECRET = "Pl4nted/0fS0me+L3ngth"  # in no known form: only its place tells
KEYS = {
    "Hugging Face": "hf_" + "aB3dE" * 7,
    "AWS": "AKIA" + "Q2W3" * 4,
    "GitHub": "ghp_" + "a1B2" * 9,
    "OpenAI": "sk-proj-" + "a1B2" * 9,
    "private": "-----BEGIN RSA PRIVATE KEY-----MIIE",
}

SECRET_NAMES = (
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN PGPASSWORD MYSQL_PWD DB_PASS "
    "GITHUB_TOKEN accessToken OAUTH2_TOKEN HTTP_BASIC_AUTH OPENAI_APIKEY AUTHORIZATION X-Amz-Credential SECRET "
    "credentials SSH_PASSPHRASE AZURE_ACCOUNT_KEY password hf_token SESSION_COOKIE"
)
OTHER_NAMES = (
    "TOKENIZERS_PARALLELISM NCCL_IB_PKEY NCCL_ANY_KEY TORCH_NCCL_SOME_KEY UCX_IB_PKEY SSH_AUTH_SOCK HF_TOKEN_PATH "
    "AWS_SHARED_CREDENTIALS_FILE GOOGLE_APPLICATION_CREDENTIALS AUTHOR MONKEY PWD KEYBOARD COMPASS BYPASS MAX_TOKENS "
    "token_dir text_key tokenizer HF_HOME OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF SECRETARY"
)


def test_names_that_hold_secrets_are_told_from_others():
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_name(name)] == []


def test_no_key_of_the_config_has_the_name_of_a_secret():
    assert [key for key in leaf_keys(RunConfig) if is_secret_name(key.rpartition(".")[2])] == []


HARMLESS = (
    "docker://host:5000/image@sha256:abc",
    "docker://user@registry#image:tag",
    "nvcr.io#nvidia/pytorch:25.01",
    "s3://bucket/a:b@c",
    "/data/lang=en/token=x/part",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
    "write key=value, e.g. train.steps=100",
    "hf_internal_testing/tiny_random_model_of_a_long_name",
    "sk-learn-examples-and-other-long-words",
    "a" * 40,
)


def test_what_is_no_secret_is_shown():
    assert [mask(text) for text in HARMLESS] == list(HARMLESS)


# Where a secret is planted: the YAML (or, with an =, an override), and the beginning of the line that refuses it.
PLACES = {
    "environment": ("slurm: {environment: [A=b, HF_TOKEN=%s]}", "slurm.environment[1]=HF_TOKEN=*** must not hold a "),
    "environment, in quotes": ("slurm: {environment: ['MY_SECRET = \"%s\"']}", "slurm.environment[0]=MY_SECRET=*** "),
    "environment as a map": ("slurm: {environment: {HF_TOKEN: %s}}", "slurm.environment.HF_TOKEN=*** must not hold "),
    "environment as a list of maps": ("slurm: {environment: [{HF_TOKEN: %s}]}", "slurm.environment[0].HF_TOKEN=*** "),
    "an unknown key": ("hf_token: %s", "hf_token=*** must not hold a secret"),
    "an unknown section": ("wandb: {api_key: %s}", "wandb.api_key=*** must not hold a secret"),
    "a command": ("slurm: {python: 'env WANDB_API_KEY=%s python'}", "slurm.python=*** must not hold a secret"),
    "a bucket's URL": ("checkpoint: {dir: 's3://key:%s@bucket/x'}", "checkpoint.dir=*** must not hold a secret"),
    "a chained URL": ("checkpoint: {dir: 'simplecache::s3://key:%s@bucket'}", "checkpoint.dir=*** must not hold a "),
    "an encoded URL": ("checkpoint: {dir: 's3://key%%3A%s%%40bucket'}", "checkpoint.dir=*** must not hold a secret"),
    "a web page": ("data: {sources: [{path: 'https://u:%s@host/a.jsonl'}]}", "data.sources[0].path=*** must not hold "),
    "a query": ("data: {sources: [{path: 'https://host/a?b=1&token=%s'}]}", "data.sources[0].path=*** must not hold "),
    "a signature": ("data: {heldout_path: 'https://h/a?X-Amz-Signature=%s'}", "data.heldout_path=*** must not hold a "),
    "a shared access": ("data: {heldout_path: 'az://h/a?sv=1&sig=%s'}", "data.heldout_path=*** must not hold a secret"),
    "an image": ("slurm: {container: 'docker://me:%s@host/image'}", "slurm.container=*** must not hold a secret"),
    "an override": ("slurm.environment=[HF_TOKEN=%s]", "slurm.environment[0]=HF_TOKEN=*** must not hold a secret"),
    "an override of an item": ("slurm.environment.0=HF_TOKEN=%s", "slurm.environment.0=HF_TOKEN=*** must not hold a "),
    "an override of no key": ("HF_TOKEN=%s", "HF_TOKEN=*** must not hold a secret"),
    "an override that is no YAML": (
        "slurm.environment=[HF_TOKEN=%s",
        "slurm.environment='[HF_TOKEN=***: not valid YAML",
    ),
    "an override's own name": ("HF_TOKEN=[%s", "HF_TOKEN='***"),
}


def commands(tmp_path, text: str) -> list[list[str]]:
    """Commands that read a config with ``text``, or take it as an override."""
    is_override = "=" in text.partition(":")[0] or text.startswith("--")
    (tmp_path / "config.yaml").write_text("name: small\n" if is_override else text)
    override = [text.removeprefix("--")] if is_override else []
    return [
        ["config", "--json", "config.yaml", *override],
        ["submit", "config.yaml", "--dry-run", *override],
    ]


@pytest.mark.parametrize("name", PLACES)
def test_planted_secret_is_refused_and_never_shown(tmp_path, monkeypatch, capsys, name):
    text, start = PLACES[name]
    monkeypatch.chdir(tmp_path)
    for command in commands(tmp_path, text % SECRET):
        assert main(command) == 2
        told = capsys.readouterr()
        assert told.out == ""
        (line,) = told.err.splitlines()
        assert line.removeprefix("config.yaml: ").startswith(start)
        assert SECRET not in line
        assert SECRET[:4] not in line
    assert os.listdir(tmp_path) == ["config.yaml"] if (tmp_path / "config.yaml").exists() else True


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    "text",
    [
        "name: %s",
        "slurm: {environment: ['A=%s']}",
        "slurm: {account: '%s'}",
        "model: {d_model: '%s'}",
        "data: {tokenizer: 'x %s'}",
        "metrics: {wandb: {entity: '%s', mode: 3}}",
        "'%s': 3",
        "model: {'%s': 3}",
        "a: *%s",
        "train.steps=%s",
        "train.steps=[%s",
        "--%s",
        "%s=3",
    ],
)
def test_planted_key_of_a_known_service_is_never_shown(tmp_path, monkeypatch, capsys, kind, text):
    monkeypatch.chdir(tmp_path)
    command, _ = commands(tmp_path, text % KEYS[kind])
    assert main(command) == 2
    told = capsys.readouterr()
    assert KEYS[kind][8:] not in told.out + told.err
    assert len(told.err.splitlines()) == 1


def test_40_hexadecimal_digits_are_a_key_in_the_environment_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    key = "0123456789abcdef" * 2 + "01234567"
    for text, code in ((f"slurm: {{environment: [A={key}]}}", 2), (f"data: {{tokenizer: '{key}'}}", 0)):
        (tmp_path / "config.yaml").write_text(text)
        assert main(["config", "config.yaml"]) == code
        told = capsys.readouterr()
        assert (key in told.err, key in told.out) == (False, code == 0)


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("sweep.yaml", "grid: {data.tokenizer: ['https://u:%s@h']}", ["--sweep", "sweep.yaml"]),
        ("sweep.yaml", "runs: [{HF_TOKEN: %s}]", ["--sweep", "sweep.yaml"]),
        ("sweep.yaml", "grid: {slurm.environment: [[HF_TOKEN=%s]]}", ["--sweep", "sweep.yaml"]),
        ("site.yaml", "environment: [HF_TOKEN=%s]", ["--cluster", "site.yaml"]),
    ],
)
def test_planted_secret_in_a_sweep_or_a_profile(tmp_path, monkeypatch, capsys, file, text, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: small")
    (tmp_path / file).write_text(text % SECRET)
    assert main(["submit", "config.yaml", "--dry-run", *command]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith(f"{file}: ")
    assert MASK in line
    assert SECRET[:4] not in line


def test_a_name_alone_takes_the_submitting_shells_value(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.delenv("SBATCH_EXPORT", raising=False)
    (tmp_path / "config.yaml").write_text("name: small\nslurm: {environment: [HF_TOKEN, A=b], gpus_per_node: 0}")
    assert main(["submit", "config.yaml", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert ': "${HF_TOKEN:?is not set in the job; submit from a shell that exports it}"\n' in told.out
    assert "export A=b\n" in told.out
    assert "HF_TOKEN" not in told.err
    assert SECRET not in told.out + told.err

    monkeypatch.setenv("SBATCH_EXPORT", "A,B")
    main(["submit", "config.yaml", "--dry-run"])
    assert (
        "slurm.environment[0]=HF_TOKEN must be passed on to the job, and SBATCH_EXPORT='A,B'" in capsys.readouterr().err
    )
    monkeypatch.delenv("HF_TOKEN")
    main(["submit", "config.yaml", "--dry-run"])
    line = "slurm.environment[0]=HF_TOKEN must be set in the shell that submits, and is not; export HF_TOKEN, or "
    assert line in capsys.readouterr().err
