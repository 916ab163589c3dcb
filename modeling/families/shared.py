"""Tables and functions that several families share: names of weights, keys of config.json, limits."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from modeling.config import ActivationName, ModelConfig
from modeling.families.family import Key, moe_of
from modeling.families.packed import Packed, head_groups, kv_head_groups, packed, turned_in_pairs
from modeling.families.values import checked
from modeling.moe_config import Balance, MoEConfig

# Roundtable's name ("ours") -> the name in transformers' files. {layer} and {expert} stand for numbers; a name with
# {expert} holds one expert of our stack. Shapes are equal: linear layers are (out, in) in both.
DECODER = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.feed_forward_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
}
ATTENTION = {
    "layers.{layer}.attention.q.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.k.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.v.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.o.weight": "model.layers.{layer}.self_attn.o_proj.weight",
}
NORM_BIAS = {  # of layer norms, beside the weights in DECODER
    "final_norm.bias": "model.norm.bias",
    "layers.{layer}.attention_norm.bias": "model.layers.{layer}.input_layernorm.bias",
    "layers.{layer}.feed_forward_norm.bias": "model.layers.{layer}.post_attention_layernorm.bias",
}
QK_NORM = {
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
QKV_BIAS = {
    "layers.{layer}.attention.q.bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers.{layer}.attention.k.bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers.{layer}.attention.v.bias": "model.layers.{layer}.self_attn.v_proj.bias",
}
# Instead of those in ATTENTION and QKV_BIAS, of classes that rotate channels (2c, 2c + 1).
PAIRED: dict[str, Packed] = {
    **turned_in_pairs("model.layers.{layer}.self_attn.q_proj.weight", "layers.{layer}.attention.q.weight", head_groups),
    **turned_in_pairs(
        "model.layers.{layer}.self_attn.k_proj.weight", "layers.{layer}.attention.k.weight", kv_head_groups
    ),
}
PAIRED_BIAS: dict[str, Packed] = {
    **turned_in_pairs("model.layers.{layer}.self_attn.q_proj.bias", "layers.{layer}.attention.q.bias", head_groups),
    **turned_in_pairs("model.layers.{layer}.self_attn.k_proj.bias", "layers.{layer}.attention.k.bias", kv_head_groups),
}
O_BIAS = {"layers.{layer}.attention.o_bias.bias": "model.layers.{layer}.self_attn.o_proj.bias"}
FEED_FORWARD = {
    "layers.{layer}.feed_forward.gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
GATE_UP = packed(  # instead of those in FEED_FORWARD, of classes that have both in one tensor
    "model.layers.{layer}.mlp.gate_up_proj.weight",
    "layers.{layer}.feed_forward.gate.weight",
    "layers.{layer}.feed_forward.up.weight",
)
FEED_FORWARD_BIAS = {
    "layers.{layer}.feed_forward.gate.bias": "model.layers.{layer}.mlp.gate_proj.bias",
    "layers.{layer}.feed_forward.up.bias": "model.layers.{layer}.mlp.up_proj.bias",
    "layers.{layer}.feed_forward.down_bias.bias": "model.layers.{layer}.mlp.down_proj.bias",
}
UNGATED = {
    "layers.{layer}.feed_forward.up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.up.bias": "model.layers.{layer}.mlp.up_proj.bias",
    "layers.{layer}.feed_forward.down.weight": "model.layers.{layer}.mlp.down_proj.weight",
    "layers.{layer}.feed_forward.down_bias.bias": "model.layers.{layer}.mlp.down_proj.bias",
}
EXPERTS = {
    "layers.{layer}.feed_forward.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.feed_forward.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.{layer}.feed_forward.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers.{layer}.feed_forward.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
BLOCK_SPARSE_EXPERTS = {
    "layers.{layer}.feed_forward.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "layers.{layer}.feed_forward.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.{layer}.feed_forward.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "layers.{layer}.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}
SELECTION_BIAS = {
    "layers.{layer}.feed_forward.router.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}
SHARED_EXPERTS = {
    "layers.{layer}.feed_forward.shared.gate.weight": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "layers.{layer}.feed_forward.shared.up.weight": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    "layers.{layer}.feed_forward.shared.down.weight": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
}

# The modules of multi-token prediction, beside their layers; and the copies of embedding and head that the files hold.
MTP = {
    "mtp.{layer}.embed_norm.weight": "model.layers.{layer}.enorm.weight",
    "mtp.{layer}.hidden_norm.weight": "model.layers.{layer}.hnorm.weight",
    "mtp.{layer}.project.weight": "model.layers.{layer}.eh_proj.weight",
    "mtp.{layer}.final_norm.weight": "model.layers.{layer}.shared_head.norm.weight",
}
MTP_COPIES = {
    "model.layers.{layer}.embed_tokens.weight": "embed.weight",
    "model.layers.{layer}.shared_head.head.weight": "head.weight",
}

# Key of config.json -> our field.
DECODER_KEYS: dict[str, str | Key] = {
    "attention_dropout": "attention_dropout",
    "hidden_size": "d_model",
    "initializer_range": "init_std",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": Key(
        ours=("n_kv_heads",),
        write=lambda config: config.n_kv_heads,
        read=lambda heads: {} if heads is None else {"n_kv_heads": heads},  # null: as many as query heads
    ),
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "vocab_size": "vocab_size",
}
HEAD_KEYS: dict[str, str | Key] = {
    "head_dim": Key(ours=("d_head",), write=lambda config: config.head_dim, read=lambda channels: {"d_head": channels}),
}
FEED_FORWARD_KEYS: dict[str, str | Key] = {"intermediate_size": "d_ff"}
EXPERT_KEYS: dict[str, str | Key] = {
    "moe_intermediate_size": "moe.d_ff",
    "norm_topk_prob": "moe.normalize_top_k",
    "num_experts_per_tok": "moe.top_k",
}
SHARED_EXPERT_KEYS: dict[str, str | Key] = {
    "first_k_dense_replace": "moe.n_dense_layers",
    "n_routed_experts": "moe.n_experts",
    "n_shared_experts": "moe.n_shared_experts",
    "routed_scaling_factor": "moe.routed_scale",
}
MTP_KEYS: dict[str, str | Key] = {
    "num_nextn_predict_layers": Key(
        ours=("mtp.depth",),
        write=lambda config: len(config.mtp_layers),
        read=lambda depth: {} if depth in (None, 0) else {"mtp.depth": depth},
    ),
}
DECODER_CONSTANTS = {"hidden_act": "silu"}
# transformers' balance loss is over the batch, not the sequence, and is computed only with output_router_logits.
ROUTER_LOSS = {"output_router_logits": False, "router_aux_loss_coef": 0.0}
DECODER_DEFAULTS = {
    "attention_dropout": 0.0,
    "head_dim": None,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def with_bias(ours: str, theirs: str) -> dict[str, str]:
    """A module's weight and bias: our names -> the names in the files."""
    return {f"{ours}.{each}": f"{theirs}.{each}" for each in ("weight", "bias")}


def head_packed_layers(theirs: str, attention: str) -> dict[str, str | Packed]:
    """The names of a layer's weights in GPT-NeoX and BLOOM: no gate, biases everywhere.

    Each head's query, key and value are packed together. ``theirs`` is the files' name of the layer, with {layer};
    ``attention`` is that of its attention.
    """
    ours = "layers.{layer}"
    heads = [f"{ours}.attention.{each}" for each in "qkv"]
    return {
        **with_bias(f"{ours}.attention_norm", f"{theirs}.input_layernorm"),
        **packed(f"{attention}.query_key_value.weight", *(f"{each}.weight" for each in heads), groups=head_groups),
        **packed(f"{attention}.query_key_value.bias", *(f"{each}.bias" for each in heads), groups=head_groups),
        f"{ours}.attention.o.weight": f"{attention}.dense.weight",
        f"{ours}.attention.o_bias.bias": f"{attention}.dense.bias",
        **with_bias(f"{ours}.feed_forward_norm", f"{theirs}.post_attention_layernorm"),
        **with_bias(f"{ours}.feed_forward.up", f"{theirs}.mlp.dense_h_to_4h"),
        f"{ours}.feed_forward.down.weight": f"{theirs}.mlp.dense_4h_to_h.weight",
        f"{ours}.feed_forward.down_bias.bias": f"{theirs}.mlp.dense_4h_to_h.bias",
    }


# Our names of activations, and transformers' names of each; of these the first is written.
ACTIVATIONS: dict[ActivationName, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "relu": ("relu",),
    "relu2": ("relu2",),
}


def activation_of(theirs: Any) -> Mapping[str, str]:
    """Our field for an activation that transformers names ``theirs``. ValueError where Roundtable does not have it."""
    ours = [name for name, names in ACTIVATIONS.items() if theirs in names]
    if not ours:
        raise ValueError(f"it must be one of {', '.join(name for names in ACTIVATIONS.values() for name in names)}")
    return {"activation": ours[0]}


ACTIVATION = Key(ours=("activation",), write=lambda config: ACTIVATIONS[config.activation][0], read=activation_of)
ATTENTION_BIAS = Key(  # one key for q, k, v and o together; a family with it has EQUAL_BIASES in `equal`
    ours=("qkv_bias", "o_bias"),
    write=lambda config: config.qkv_bias,
    read=lambda has: {"qkv_bias": has, "o_bias": has},
)
EQUAL_BIASES = (("qkv_bias", "o_bias"),)
EXPERTS_ALONE = Key(  # the experts' width, in a class where no layer is dense
    ours=("moe.d_ff", "d_ff"),
    write=lambda config: moe_of(config).d_ff,
    read=lambda width: {"moe.d_ff": width, "d_ff": width},
)

# Our field -> what the class can express.
SOFTMAX_ROUTER: dict[str, tuple[Any, ...]] = {
    "moe.score": ("softmax",),
    "moe.routed_scale": (1.0,),
    "moe.n_shared_experts": (0,),
    "moe.balance.name": tuple(
        rule.name for rule in get_args(Balance) if not rule.moves_bias
    ),  # the router has no selection bias
}
# transformers' cache_utils.py keeps the last sliding_window - 1 keys as [-sliding_window + 1 :], which at 1 is all.
WINDOW = {"sliding_window": 2}
MOST_LAYERS = 10_000  # the largest model.n_layers
WINDOWED, LINEAR = "sliding_attention", "linear_attention"  # names in layer_types for layers without full attention


def without_experts(layers: Any) -> Mapping[str, Any]:
    """The field for a list of layers without experts. ValueError where it is not such a list."""
    layers = [] if layers is None else layers
    if not isinstance(layers, list) or not all(is_count(layer) for layer in layers):
        raise ValueError("it must be a list of layers")
    return {"moe.dense_layers": tuple(sorted({*layers}))}


def listed_without_experts(moe: MoEConfig) -> list[int]:
    """The layers to list as having no experts, among those that ``every_n_layers`` leaves with some."""
    layers = {*range(moe.n_dense_layers), *moe.dense_layers}
    return sorted(layer for layer in layers if (layer + 1) % moe.every_n_layers == 0)


# When a file is read, `modeling.families.config_json` turns leading layers of the list into n_dense_layers.
EXPERT_LAYER_KEYS: dict[str, str | Key] = {
    "decoder_sparse_step": "moe.every_n_layers",
    "mlp_only_layers": Key(
        ours=("moe.n_dense_layers", "moe.dense_layers"),
        write=lambda config: listed_without_experts(moe_of(config)),
        read=without_experts,
    ),
}


def types_by_pattern(values: Mapping[str, Any], full_of: Callable[[int], Iterable[int]], other: str = WINDOWED) -> Any:
    """``layer_types`` as in the file, or where it leaves them out, by the layers of full attention.

    ``full_of(n_layers)`` returns those. The list is empty for a number of layers that no model has, which another rule
    refuses.
    """
    types, n_layers = values["layer_types"], values["num_hidden_layers"]
    if types is None:
        types = layer_types(n_layers, full_of(n_layers), other) if is_count(n_layers) else []
    return types


def types_by_interval(values: Mapping[str, Any], interval: Any, other: str = WINDOWED) -> Any:
    """``layer_types`` as in the file, or where it leaves them out, with full attention in every ``interval``-th layer.

    An invalid interval is refused by its own rule (``interval_key``), and counts as none here.
    """
    step = interval if is_interval(interval) else MOST_LAYERS
    return types_by_pattern(values, lambda n_layers: range(step - 1, n_layers, step), other)


def told_by_interval(values: Mapping[str, Any], key: str, other: str = WINDOWED) -> dict[str, Any]:
    """``layer_types``, and the key of their interval.

    The interval is ignored, and returned as 1, where the file has the types themselves.
    """
    interval = values[key] if values["layer_types"] is None else 1
    return {"layer_types": types_by_interval(values, interval, other), key: interval}


def is_interval(value: Any) -> bool:
    """Whether a value can be an interval of layers: an integer of at least 1."""
    return type(value) is int and value > 0


def interval_key(usual: int) -> Key:
    """A key for the interval of full attention, which does not matter beside ``layer_types``; ``usual`` is written."""

    def read(interval: Any) -> Mapping[str, Any]:
        if not is_interval(interval):
            raise ValueError("it must be a whole number of at least 1 where layer_types is left out")
        return {}

    return Key(ours=(), write=lambda config: usual, read=read)


def types_from_first_window(values: Mapping[str, Any], window: Any) -> Any:
    """``layer_types`` as in the file, or where it leaves them out, with windows from layer max_window_layers on.

    ``window`` is None where no layer has one.
    """
    first = values["max_window_layers"]
    n_full = first if window is not None and is_count(first) else MOST_LAYERS
    return types_by_pattern(values, lambda n_layers: range(min(n_full, n_layers)))


def types_from_first_full(values: Mapping[str, Any]) -> Any:
    """``layer_types`` as in the file, or where it leaves them out, with full attention in layers 0, 4, 8 and so on."""
    return types_by_pattern(values, lambda n_layers: range(0, n_layers, 4))


def is_count(value: Any) -> bool:
    """Whether a value can be a number of layers."""
    return type(value) is int and 0 <= value <= MOST_LAYERS


def flag(value: Any) -> Mapping[str, Any]:
    """Sets no field. ValueError where the value is neither true nor false."""
    checked(value, bool)
    return {}


def whole_number(value: Any) -> Mapping[str, Any]:
    """Sets no field. ValueError where the value is not an integer."""
    checked(value, int)
    return {}


def number(value: Any) -> Mapping[str, Any]:
    """Sets no field. ValueError where the value is not a number."""
    checked(value, float)
    return {}


def layer_types(n_layers: int, full: Iterable[int], other: str = WINDOWED) -> list[str]:
    """The list, as transformers has it, of each layer's attention: full in ``full``, ``other`` in all other layers."""
    those = {*full}
    return ["full_attention" if layer in those else other for layer in range(n_layers)]


def kinds_of_layers(types: Any, other: str = WINDOWED) -> tuple[int, ...]:
    """The layers of full attention in such a list. ValueError where it has kinds other than full and ``other``."""
    kinds = {"full_attention", other}
    if not isinstance(types, list) or not all(isinstance(each, str) and each in kinds for each in types):
        raise ValueError(f"it must be a list of {' and '.join(sorted(kinds))}")
    return tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")


def full_layers(types: Any) -> Mapping[str, Any]:
    """Our fields for a list of layer types. ValueError where it has kinds other than full and sliding attention."""
    full = kinds_of_layers(types)
    return {"full_attention_layers": full} if len(full) < len(types) else {"sliding_window": None}


LAYER_TYPES = Key(  # to be read after sliding_window, which it sets to None where no layer has a window
    ours=("full_attention_layers", "sliding_window"),
    write=lambda config: layer_types(
        config.n_layers, range(config.n_layers) if config.sliding_window is None else config.full_attention_layers
    ),
    read=full_layers,
)


def unwindowed(config: ModelConfig) -> tuple[int, ...]:
    """The layers without a window. Empty for a number of layers that no model has, which its own rule refuses."""
    layers = range(config.n_layers if is_count(config.n_layers) else 0)
    return tuple(layer for layer in layers if config.window_of(layer) is None)


ALWAYS_MASKED = Key(  # not null: the class makes the mask of a window even where no layer uses it
    ours=("sliding_window",),
    write=lambda config: config.sliding_window or 4096,
    read=lambda width: {"sliding_window": width},
)
USED_WINDOW_KEYS = {  # written beside layer_types, which alone decide
    "use_sliding_window": Key(ours=(), write=lambda config: config.sliding_window is not None, read=flag),
    "max_window_layers": Key(ours=(), write=lambda config: config.n_layers, read=whole_number),
}
