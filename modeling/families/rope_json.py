"""Rotary positions in a config.json, written (as transformers 4 and 5 read them) and read.

Version 4 has the base and the part that is rotated beside the other keys, and the scaling in rope_scaling. Version 5
has all in rope_parameters, but where there is rope_scaling as well, that is what it reads.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.values import checked, hints_of, shown
from modeling.rope_scaling import DynamicScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling

SCALINGS = {kind().name: kind for kind in get_args(RopeScaling)}  # transformers has the same names
ORIGINAL = "original_max_position_embeddings"
KEYS = {"original_seq_len": ORIGINAL, "query_growth": "llama_4_scaling_beta"}  # our field -> the key, where they differ
PLAIN = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Keys at which a class does not look where there is `alpha`.
BESIDE_ALPHA = frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
MOST_ALPHA = 1e12  # as large as a base may be (model.rope_theta)


def to_rope_json(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json for the rotary positions; none for a class without them."""
    if not family.turns:
        return {}
    rope: dict[str, Any] = {"rope_theta": config.rope_theta}
    if family.turns_a_part:
        rope["partial_rotary_factor"] = config.rope_fraction
    scaling: dict[str, Any] = {"rope_type": "default"}
    if isinstance(config.rope_scaling, LongRopeScaling):
        scaling = long_rope_json(config.rope_scaling)
    elif config.rope_scaling is not None:
        scaling["rope_type"] = config.rope_scaling.name
        for key, name in names_of(type(config.rope_scaling), family).items():
            value = getattr(config.rope_scaling, name)
            if isinstance(config.rope_scaling, DynamicScaling) and name == "original_seq_len":
                continue  # it is written as the longest sequence (``longest``)
            if value is not None and value is not True:  # those are what left out means
                scaling[key] = value
    is_read = not family.has_local_rope or family.since <= 4  # else it would take the place of both tables
    is_told = is_read and (config.rope_scaling is not None or family.tells_plain_rope)
    told = {"rope_scaling": scaling} if is_told else {}
    parameters = {**scaling, **rope}
    if isinstance(config.rope_scaling, LongRopeScaling):  # version 5 has all in one table
        original = {ORIGINAL: config.rope_scaling.original_seq_len}
        parameters |= {"rope_type": config.rope_scaling.name, **original}
    if not family.has_local_rope:
        return {**rope, **told, "rope_parameters": parameters}
    base = config.rope_theta if config.local_rope_theta is None else config.local_rope_theta
    local = {"rope_type": "default", "rope_theta": base}
    nested = {"full_attention": parameters, "sliding_attention": local}
    beside = {family.local_rope_key: base} if family.local_rope_key else {}
    return {**rope, **told, **beside, "rope_parameters": nested}


def names_of(scaling: type[RopeScaling], family: Family) -> dict[str, str]:
    """The keys of a scaling's table that the class reads -> our fields."""
    unread = set() if family.scales_queries else {"query_growth"}
    ours = [each.name for each in fields(scaling) if each.name not in {"name", *unread}]
    return {KEYS.get(name, name): name for name in ours}


def long_rope_json(scaling: LongRopeScaling) -> dict[str, Any]:
    """The table for LongRoPE: version 4 accepts only these three keys. Both lengths are keys beside the table."""
    table: dict[str, Any] = {"type": scaling.name}
    table |= {key: [*getattr(scaling, key)] for key in ("short_factor", "long_factor")}
    return table if scaling.attention_factor is None else {**table, "attention_factor": scaling.attention_factor}


def longest(config: ModelConfig, seq_len: int) -> int:
    """The longest sequence to write to config.json, for a model trained on sequences of ``seq_len`` tokens.

    It is the longest that the model's positions are made for.
    """
    if config.max_positions is not None:
        return config.max_positions
    match config.rope_scaling:
        case YarnScaling(factor=factor, original_seq_len=original):  # transformers warns about any other number
            return round(factor * original)
        case Llama3Scaling(factor=factor, original_seq_len=original):
            return seq_len if seq_len > original else round(factor * original)
        case DynamicScaling(original_seq_len=original):
            return original
        case LongRopeScaling(longest_seq_len=most):
            return most
        case _:
            return seq_len


def from_rope_json(content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Our fields for the rotary positions in a config.json. ValueError where Roundtable cannot express them."""
    if not family.turns:
        return {}
    key, given = table_of(content)
    if not isinstance(given, dict):
        raise ValueError(f"{key}={shown(given)} must be a table")
    if family.has_local_rope:
        return from_nested(content, given if key == "rope_scaling" else {}, family)
    return from_flat(key, given, content, family)


def table_of(content: Mapping[str, Any]) -> tuple[str, Any]:
    """The key under which a config.json has the table of its rotary positions, and the table; {} where it has none."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    return key, {} if content.get(key) is None else content[key]


def alpha_of(table: Any, family: Family) -> Any:
    """The factor by which the class stretches the base of the frequencies (NTK); None where the table has none.

    Such a table says "dynamic", but the base does not grow with the length of a pass.
    """
    if not family.has_rope_alpha or not isinstance(table, dict):
        return None
    return (table.get("alpha") or None) if table.get("rope_type", table.get("type")) == "dynamic" else None


def stretched_base(theta: float, given: Mapping[str, Any], content: Mapping[str, Any]) -> float:
    """The base that ``alpha`` makes of ``theta``, as the class computes it. ValueError where it makes none.

    ``content`` has all keys, the class's defaults among them.
    """
    unknown = sorted(given.keys() - {"alpha", *BESIDE_ALPHA})
    if unknown:
        raise ValueError(f"{unknown[0]} is not known with alpha")
    channels = content["head_dim"]
    if channels is None:
        channels = checked(content["hidden_size"], int) // max(1, checked(content["num_attention_heads"], int))
    if checked(channels, int) <= 2:
        raise ValueError(f"alpha needs heads of more than 2 channels, not {channels}")
    try:
        factor = checked(given["alpha"], float)
    except ValueError as error:
        raise ValueError(f"of alpha: {error}") from None
    if not 0 < factor <= MOST_ALPHA:
        raise ValueError(f"alpha must be above 0, and at most {MOST_ALPHA:.0e}")
    return theta * factor ** (channels / (channels - 2))


def from_nested(content: Mapping[str, Any], scaling: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Our fields, for a class whose layers with a window have rotary positions of their own."""
    tables = content.get("rope_parameters") or {}
    if not isinstance(tables, dict) or not all(table is None or isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"rope_parameters={shown(tables)} must be tables")
    unknown = sorted(tables.keys() - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"rope_parameters={shown(tables)} is not possible: {unknown[0]} is no kind of attention")
    full = {**(tables.get("full_attention") or {}), **scaling}
    local = tables.get("sliding_attention") or {}
    if local.keys() - {"rope_type", "rope_theta"} or local.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters={shown(tables)} is not possible: frequencies under a window are not scaled")
    base, usual = local.get("rope_theta"), family.defaults["rope_local_base_freq"]
    if base is None and not family.local_rope_key and content.get("rope_theta", usual) != usual:
        rule = "needs one in rope_parameters.sliding_attention too, else versions 4 and 5 differ in it"
        raise ValueError(f"rope_theta={shown(content['rope_theta'])} {rule}")
    if base is None:
        base = content.get(family.local_rope_key, usual)
    values = {"local_rope_theta": number({"rope_theta": base}, {}, "rope_theta", 0.0)}
    return values | from_flat("rope_parameters", full, content, family)


def from_flat(key: str, given: Mapping[str, Any], content: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Our fields from the one table ``given``, found under ``key``, and from the keys beside it."""
    values = {"rope_theta": number(given, content, "rope_theta", family.defaults["rope_theta"])}
    part = number(given, content, "partial_rotary_factor", family.defaults.get("partial_rotary_factor", 1.0))
    if family.turns_a_part:
        values["rope_fraction"] = part
    elif part != 1:
        raise ValueError(f"partial_rotary_factor={shown(part)} is not possible, all channels turn")
    kind = given.get("rope_type", given.get("type", "default"))
    kind = family.rope_aliases.get(kind, kind) if isinstance(kind, str) else kind
    extra = {name: value for name, value in given.items() if name not in PLAIN | family.rope_passed_over}
    if kind == "default" and not extra and not family.scales_queries:
        return values
    if not family.rope_scalings:
        raise ValueError(f"{key}={shown(given)} is not possible, frequencies are not scaled")
    try:
        if alpha_of(given, family) is not None:
            return {**values, "rope_theta": stretched_base(values["rope_theta"], extra, {**family.defaults, **content})}
        if family.has_rope_alpha and kind == "dynamic":  # 0 and null are none
            extra.pop("alpha", None)
        if kind == "longrope" and kind in family.rope_scalings:
            return {**values, "rope_scaling": read_long_rope(extra, {**family.defaults, **content})}
        return {**values, "rope_scaling": read_scaling(kind, extra, content, family)}
    except ValueError as error:
        raise ValueError(f"{key}={shown(given)} is not possible: {error}") from None


def number(given: Mapping[str, Any], content: Mapping[str, Any], name: str, default: float) -> float:
    """One number of the rotary positions, from ``given``, or else ``content``, or else ``default``."""
    value = given.get(name, content.get(name, default))
    try:
        return checked(value, float)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)} is not possible: {error}") from None


def read_long_rope(given: Mapping[str, Any], content: Mapping[str, Any]) -> LongRopeScaling:
    """LongRoPE's scaling, with the lengths of the keys beside the table, even if the table has other ones."""
    lengths = {"original_seq_len": "original_max_position_embeddings", "longest_seq_len": "max_position_embeddings"}
    unknown = sorted(given.keys() - {"short_factor", "long_factor", "attention_factor", "factor", *lengths.values()})
    if unknown:
        raise ValueError(f"{unknown[0]} is not known with rope_type=longrope")
    told = {name: content[key] for name, key in lengths.items()}
    told |= {key: value for key, value in given.items() if key.endswith("_factor") and value is not None}
    missing = sorted({"short_factor", "long_factor"} - told.keys())
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    scaling = LongRopeScaling(**of_hints(LongRopeScaling, told))
    factor = checked(given.get("factor"), float | None)
    if factor is not None and factor * scaling.original_seq_len != scaling.longest_seq_len:
        ratio = f"{scaling.longest_seq_len} / {scaling.original_seq_len}"
        raise ValueError(f"factor must be max_position_embeddings / original_max_position_embeddings = {ratio}")
    return scaling


def read_scaling(kind: Any, given: Mapping[str, Any], content: Mapping[str, Any], family: Family) -> RopeScaling:
    """The scaling with these keys. A factor that is left out is the longest sequence over the original one."""
    if not isinstance(kind, str) or kind not in family.rope_scalings:
        plain = () if family.scales_queries else ("default",)
        raise ValueError(f"rope_type must be one of {', '.join((*plain, *family.rope_scalings))}")
    scaling = SCALINGS[kind]
    names = names_of(scaling, family)
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} is not known with rope_type={kind}")
    values = {names[key]: value for key, value in given.items() if value is not None}
    if scaling is DynamicScaling:  # the classes take this length as the original one, whatever the table says
        longest = content.get("max_position_embeddings")
        if values.setdefault("original_seq_len", longest) != longest:
            raise ValueError(f"original_max_position_embeddings must be max_position_embeddings={shown(longest)}")
    elif "factor" not in values and "original_seq_len" in values:
        longest, original = content.get("max_position_embeddings"), checked(values["original_seq_len"], int)
        if type(longest) is int and 0 < original <= longest:
            values["factor"] = checked(longest, float) / original
    needed = {"factor", "original_seq_len", "low_freq_factor", "high_freq_factor", "query_growth"} & {*names.values()}
    missing = sorted(KEYS.get(name, name) for name in needed - values.keys())
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return scaling(**of_hints(scaling, values))


def of_hints(scaling: type[RopeScaling], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each checked against its field's type. ValueError names the key of one that does not fit."""
    hints = hints_of(scaling)
    found = {}
    for name, value in values.items():
        try:
            found[name] = checked(value, hints[name])
        except ValueError as error:
            raise ValueError(f"of {KEYS.get(name, name)}: {error}") from None
    return found
