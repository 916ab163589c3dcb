"""Records what the installed transformers does with exported folders; a program, so that another version can run it.

It imports nothing of Roundtable's. `python transformers_judge.py FOLDER...` answers each FOLDER/asked.safetensors and
FOLDER/asked.json about FOLDER/export, in FOLDER/seen.safetensors and FOLDER/seen.json.
"""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dispatched import dispatched
from warnings_seen import Messages

NEW_TOKENS = 6
DRAWS = 4000


def judge(folder: Path) -> None:
    """Loads FOLDER/export as a user would; writes logits, generations, tokenizer facts and warnings to FOLDER/seen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    asked = load_file(folder / "asked.safetensors")
    questions = json.loads((folder / "asked.json").read_text())
    texts = questions["texts"]
    messages = Messages()
    logger = logging.getLogger("transformers")
    logger.addHandler(messages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attention = {"attn_implementation": questions["attention"]}
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(
            folder / "export", trust_remote_code=False, **attention, **options
        )
        seen = tensors_seen(model.eval(), **asked, packs=questions["packed"])
        found = {
            "version": version(),
            "config_dtype": str(AutoConfig.from_pretrained(folder / "export", trust_remote_code=False).dtype),
        }
        found |= {"loading": {key: sorted(map(str, value)) for key, value in info.items() if value}}
        if texts:
            found |= tokenizer_seen(folder / "export", model, texts)
    logger.removeHandler(messages)
    if questions["accelerate"]:
        found["accelerate"], logits = accelerate_seen(folder, model, asked["tokens_BS"], **attention)
        seen |= {} if logits is None else {"dispatched_BSV": logits}
    found["warnings"] = messages.messages + [str(each.message) for each in caught]
    save_file(seen, folder / "seen.safetensors")
    (folder / "seen.json").write_text(json.dumps(found))


def version() -> str:
    """The version of transformers."""
    import transformers

    return transformers.__version__


@torch.no_grad()
def tensors_seen(
    model: Any, tokens_BS: Tensor, positions_BS: Tensor, prompts_BS: Tensor, *, packs: bool
) -> dict[str, Tensor]:
    """Logits of the rows as one document each, logits of packed rows (if ``packs``), and greedy continuations.

    Packed documents are separated by ``positions_BS``.
    """
    packed = {"packed_BSV": model(tokens_BS, position_ids=positions_BS, use_cache=False).logits} if packs else {}
    return {
        **packed,
        "logits_BSV": model(tokens_BS, use_cache=False).logits,
        "greedy_BS": model.generate(
            prompts_BS,
            attention_mask=torch.ones_like(prompts_BS),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            top_k=50,  # the value at which no version says that greedy search ignores it
        ),
    }


def accelerate_seen(
    folder: Path, model: Any, tokens_BS: Tensor, **options: Any
) -> tuple[dict[str, bool], Tensor | None]:
    """Whether accelerate fills an empty model from transformers' own save and from the export; the export's logits."""
    model.save_pretrained(folder / "saved")
    theirs, ours = (dispatched(folder / each, tokens_BS, **options)[0] for each in ("saved", "export"))
    return {"theirs": theirs is not None, "ours": ours is not None}, ours


def tokenizer_seen(export: Path, model: Any, texts: list[str]) -> dict[str, Any]:
    """The export's tokenizer on ``texts``, and the number of different tokens that its default `generate` samples."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    inputs = tokenizer(texts[0], return_tensors="pt")
    many = {name: value.expand(DRAWS, -1) for name, value in inputs.items()}
    torch.manual_seed(0)
    drawn_BS = model.generate(**many, max_new_tokens=1)
    return {
        "ids": [tokenizer(text)["input_ids"] for text in texts],
        "plain_ids": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts],
        "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "all_special_ids": sorted(tokenizer.all_special_ids),
        "backend": json.loads(tokenizer.backend_tokenizer.to_str()),
        "different_draws": len(drawn_BS[:, -1].unique()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        judge(Path(argument))
