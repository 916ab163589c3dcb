"""Finding secrets in text: a config is copied into run directories, checkpoints and W&B, so it must hold none."""

import re
from collections.abc import Iterator
from urllib.parse import unquote

# Words of a variable's name that mark a secret; a word is a run of letters and digits.
_SECRET_WORD = re.compile(
    r".*TOKEN|.*SECRETS?|PASS|PWD|.*PASS(WORD|WD|PHRASE)S?|.*CREDENTIALS?|.*AUTH\d?|AUTHORIZATION|BEARER|JWT|COOKIE"
    r"|KEYS?|.*(API|ACCESS|ACCOUNT|AUTH|ENCRYPTION|LICENSE|PRIVATE|SHARED|SSH)KEYS?"
)
_QUERY_WORD = re.compile(r"SIG|SIGNATURE|KEY")  # in a URL's query they let anybody in; elsewhere they say little
# Words that end the name of something else: where the secret lies, or how it is used.
_ENDINGS = {"FILE", "FILES", "PATH", "DIR", "SOCK", "NAME", "TYPE", "MODE", "SIZE", "LENGTH", "LIMIT", "TIMEOUT", "TTL"}
# Names without secrets: variables of libraries (InfiniBand's keys are none), paths, and fields of records (TEXT_KEY).
_HARMLESS = re.compile(
    r"((TORCH_)?(NCCL|UCX|FI|GLOO|OMPI|PMIX|OMP|KMP|MKL|CUDA|CUBLAS|CUDNN)_.*)"
    r"|(OLD)?PWD|GOOGLE_APPLICATION_CREDENTIALS|(TEXT|MESSAGES|PROMPT|COMPLETION)_KEYS?|KEYS?"
)
_SWITCH = re.compile(r"|0|1|true|false|yes|no|on|off|null|none", re.IGNORECASE)

_ASSIGNMENT = re.compile(r"(?:^|(?<=[\s;,&?\"'{\[(.]))([A-Za-z_][\w-]*)[\"']?\s*(?:=|:(?!//))\s*[\"']?(.*)", re.DOTALL)
_URL_PASSWORD = re.compile(r"://([^\s/:@#?]*:(?!\d+/)[^\s@]+)@")
_QUERY = re.compile(r"[?&;#]([\w.%-]+)=([^&;#\s\"']+)")
_KNOWN_VALUE = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"  # GitHub, GitLab
    r"|sk-(?=[\w-]*\d)[\w-]{20,}"  # OpenAI, Anthropic
    r"|AIza[\w-]{35}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{20,}|wandb_v1_\w{20,}"  # Google, Slack, NVIDIA, W&B
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|BEGIN [A-Z ]*PRIVATE KEY-.*"
    r")",
    re.DOTALL,
)
_WANDB_KEY = re.compile(r"(?<![A-Za-z0-9])([0-9a-f]{40})(?![A-Za-z0-9])")  # elsewhere a commit's hash
MASK = "***"


def is_secret_name(name: str) -> bool:
    """Whether a variable, key or query parameter of this name holds a secret: HF_TOKEN, wandb_api_key, PGPASSWORD."""
    words = re.findall(r"[A-Z0-9]+", name.upper())
    if not words or _HARMLESS.fullmatch(name.upper()) or words[-1] in _ENDINGS:
        return False
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def secret_spans(text: str, *, in_environment: bool = False) -> Iterator[tuple[int, int, str]]:
    """(start, end, what it is) of each secret in ``text``; a secret assigned to a name extends to the text's end.

    ``in_environment``: ``text`` is a variable's value, where 40 hexadecimal digits are taken for a W&B key.
    """
    for match in _ASSIGNMENT.finditer(text):
        if is_secret_name(match[1]) and not _SWITCH.fullmatch(match[2].strip("\"'}] ")):
            yield *match.span(2), f"the value of {match[1]}"
    if "://" in text:
        yield from ((*match.span(1), "a password in a URL") for match in _URL_PASSWORD.finditer(text))
        for match in _QUERY.finditer(text):
            name = unquote(match[1])
            if is_secret_name(name) or any(_QUERY_WORD.fullmatch(word) for word in re.findall(r"\w+", name.upper())):
                yield *match.span(2), f"the query parameter {name} of a URL"
    for pattern in (_KNOWN_VALUE, _WANDB_KEY) if in_environment else (_KNOWN_VALUE,):
        yield from ((*match.span(1), "what looks like a service's key") for match in pattern.finditer(text))


def mask(text: str) -> str:
    """``text`` with *** in the place of each secret."""
    shown, end = "", 0
    for start, stop, _ in sorted(secret_spans(text)):
        shown += text[end:start] + MASK if start >= end else ""
        end = max(end, stop)
    return shown + text[end:]
