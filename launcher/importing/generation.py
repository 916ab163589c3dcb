"""generation_config.json of a model folder: its authors' settings for generation, kept byte for byte."""

import json
import os
from pathlib import Path

from data.errors import reason_of
from launcher.errors import UserError
from launcher.importing.folder import GENERATION_JSON, refuse_constant, small_file

LARGEST_BYTES = 1 << 20
NAMING_CODE = ("auto_map", "custom_generate", "trust_remote_code")


def read_generation_config(path: Path) -> bytes | None:
    """The file's content; None where the folder has none. Raises UserError where it is no valid generation config."""
    if not os.path.lexists(path / GENERATION_JSON):
        return None
    content = small_file(path, GENERATION_JSON, LARGEST_BYTES)
    rule = why_unfit(content)
    if rule is not None:
        raise UserError([f"{path / GENERATION_JSON} {rule}; mend it, or remove it: an export then has its own"])
    return content


def why_unfit(content: bytes) -> str | None:
    """The rule that an untrusted generation_config.json breaks; None where ``transformers`` accepts it.

    A file that names code to run is refused.
    """
    if len(content) > LARGEST_BYTES:
        return f"has {len(content)} bytes, more than {LARGEST_BYTES}"
    try:
        tree = json.loads(content.decode(), parse_constant=refuse_constant)
        json.dumps(tree, ensure_ascii=False).encode()  # a lone surrogate would fail where it is saved again
    except (ValueError, RecursionError) as error:
        return f"must be JSON, and is not ({reason_of(error)})"
    if not isinstance(tree, dict):
        return f"must hold a JSON object, and holds {type(tree).__name__}"
    from transformers import GenerationConfig  # takes seconds to import
    from transformers.utils import logging

    code = [key for key in tree if key in NAMING_CODE or hasattr(GenerationConfig, key)]
    if code:
        return f"must hold options alone, and holds {code[0]}"
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        GenerationConfig.from_dict(tree)
    except Exception as error:  # values of other types make it raise anything
        return f"must be what transformers' GenerationConfig takes, and is not ({reason_of(error)})"
    finally:
        logging.set_verbosity(verbosity)
    return None
