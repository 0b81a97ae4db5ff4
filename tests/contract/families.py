"""The model families of the contract: a tiny config of each, and what its blocks must become.

Expected units are worked out from the modeling sources by hand. Widths are odd where the family allows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    BertConfig,
    DeiTConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    ViTConfig,
)

from lsp_core.units import Side

VOCABULARY = 101
LABELS = 7
WIDTH, FFN = 40, 72
IMAGE = 12  # pixels a side, in patches of 4: 9 tokens and the special ones

Expected = tuple[str, Side, int, tuple[int, ...], tuple[str, ...]]  # members, side, D, other sides, roles


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. ``blocks``: by number of a block the prefix of its layers and its units, in order of their calls.

    ``alone``: shell patterns of the matrices inside the blocks that belong to no unit, each matching something.
    ``linear_head``: whether the logits are W h + b of some h.
    """

    auto: Any
    config: Callable[[], PreTrainedConfig]
    blocks: Mapping[int, tuple[str, list[Expected]]]
    kind: Literal["lm", "seq2seq", "classifier", "encoder"] = "lm"
    alone: tuple[str, ...] = ()
    linear_head: bool = True

    @property
    def generates(self) -> bool:
        return self.kind in ("lm", "seq2seq")


# generation never ends early, and 0 is the padding where a family has one
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": FFN}
UNTIED = {"tie_word_embeddings": False}
QKV = ("query", "key", "value")
FUSED = ("+".join(QKV),)


def tied(*layers: str, others: tuple[int, ...], roles: tuple[str, ...] | None = None) -> Expected:
    """Layers that read the block's hidden state together."""
    return "+".join(layers), "input", WIDTH, others, roles or ("",) * len(layers)


def single(layer: str, d_out: int, d_in: int, role: str = "") -> Expected:
    """A layer of its own: projected on its smaller side, a square one on its output side."""
    if d_in < d_out:
        return layer, "input", d_in, (d_out,), (role,)
    return layer, "output", d_out, (d_in,), (role,)


def grouped(prefix: str, query: int, key: int) -> list[Expected]:
    """Grouped-query attention: Q alone, K and V tied on their output."""
    names = f"{prefix}.k_proj+{prefix}.v_proj"
    return [
        single(f"{prefix}.q_proj", query, WIDTH, "query"),
        (names, "output", key, (WIDTH, WIDTH), ("key", "value")),
        single(f"{prefix}.o_proj", WIDTH, query),
    ]


def together(prefix: str, output: str) -> list[Expected]:
    """Attention of one width: Q, K and V tied on their input."""
    layers = tuple(f"{prefix}.{letter}_proj" for letter in "qkv")
    return [tied(*layers, others=(WIDTH,) * 3, roles=QKV), single(f"{prefix}.{output}", WIDTH, WIDTH)]


GATED_MLP = [tied("mlp.gate_proj", "mlp.up_proj", others=(FFN, FFN)), single("mlp.down_proj", WIDTH, FFN)]


def plain_mlp(up: str, down: str) -> list[Expected]:
    return [single(up, FFN, WIDTH), single(down, WIDTH, FFN)]


def t5_attention(prefix: str, *, cross: bool) -> list[Expected]:
    inner = 32  # 4 heads of 8, narrower than the model
    output = single(f"{prefix}.o", WIDTH, inner)
    if cross:  # Q reads the decoder, K and V the encoder
        keys = tied(f"{prefix}.k", f"{prefix}.v", others=(inner, inner), roles=("key", "value"))
        return [single(f"{prefix}.q", inner, WIDTH, "query"), keys, output]
    return [tied(*(f"{prefix}.{letter}" for letter in "qkv"), others=(inner,) * 3, roles=QKV), output]


def vision(config: type[PreTrainedConfig], prefix: str, architecture: str) -> Family:
    return Family(
        auto=AutoModelForImageClassification,
        config=lambda: config(**SHAPE, image_size=IMAGE, patch_size=4, num_labels=LABELS, architectures=[architecture]),
        blocks={1: (prefix, [*together("attention", "o_proj"), *plain_mlp("mlp.fc1", "mlp.fc2")])},
        kind="classifier",
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(
        auto=AutoModelForCausalLM,
        config=lambda: LlamaConfig(**TOKENS, **SHAPE | {"num_hidden_layers": 3}),
        blocks={0: ("model.layers", [*together("self_attn", "o_proj"), *GATED_MLP])},
    ),
    # one window of 5 positions, two key heads for four query heads
    "mistral": Family(
        auto=AutoModelForCausalLM,
        config=lambda: MistralConfig(**TOKENS, **SHAPE, num_key_value_heads=2, sliding_window=5),
        blocks={0: ("model.layers", [*grouped("self_attn", 40, 20), *GATED_MLP])},
    ),
    # biases on Q, K and V; a single key head
    "qwen2": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Qwen2Config(**TOKENS, **SHAPE | {"num_attention_heads": 5}, **UNTIED, num_key_value_heads=1),
        blocks={0: ("model.layers", [*grouped("self_attn", 40, 8), *GATED_MLP])},
    ),
    # norms on Q and K; heads wider together than the model
    "qwen3": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Qwen3Config(**TOKENS, **SHAPE, **UNTIED, num_key_value_heads=2, head_dim=12),
        blocks={0: ("model.layers", [*grouped("self_attn", 48, 24), *GATED_MLP])},
    ),
    # soft caps on attention and logits, windows in every other block, tied embeddings, norms after each part
    "gemma2": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Gemma2Config(
            **TOKENS,
            **SHAPE,
            num_key_value_heads=2,
            head_dim=12,
            query_pre_attn_scalar=12,
            sliding_window=5,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        blocks={0: ("model.layers", [*grouped("self_attn", 48, 24), *GATED_MLP])},
        linear_head=False,
    ),
    "gemma3": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Gemma3TextConfig(
            **TOKENS,
            **SHAPE,
            num_key_value_heads=1,
            head_dim=12,
            query_pre_attn_scalar=12,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        blocks={1: ("model.layers", [*grouped("self_attn", 48, 12), *GATED_MLP])},
    ),
    # biases, learned positions, embeddings narrower than the blocks: two projections outside them
    "opt": Family(
        auto=AutoModelForCausalLM,
        config=lambda: OPTConfig(
            **TOKENS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=FFN,
            word_embed_proj_dim=24,
            max_position_embeddings=32,
        ),
        blocks={0: ("model.decoder.layers", [*together("self_attn", "out_proj"), *plain_mlp("fc1", "fc2")])},
    ),
    # Conv1D layers, fused QKV, tied embeddings
    "gpt2": Family(
        auto=AutoModelForCausalLM,
        config=lambda: GPT2Config(**TOKENS, n_embd=WIDTH, n_head=4, n_layer=2, n_inner=FFN, n_positions=32),
        blocks={
            0: (
                "transformer.h",
                [
                    tied("attn.c_attn", others=(3 * WIDTH,), roles=FUSED),
                    single("attn.c_proj", WIDTH, WIDTH),
                    *plain_mlp("mlp.c_fc", "mlp.c_proj"),
                ],
            )
        },
    ),
    # fused QKV by head, attention and MLP beside each other
    "gpt_neox": Family(
        auto=AutoModelForCausalLM,
        config=lambda: GPTNeoXConfig(**TOKENS, **SHAPE),
        blocks={
            1: (
                "gpt_neox.layers",
                [
                    tied("attention.query_key_value", others=(3 * WIDTH,), roles=FUSED),
                    single("attention.dense", WIDTH, WIDTH),
                    *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                ],
            )
        },
    ),
    # fused QKV of grouped heads, fused gate and up
    "phi3": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Phi3Config(**TOKENS, **SHAPE, num_key_value_heads=2),
        blocks={
            0: (
                "model.layers",
                [
                    tied("self_attn.qkv_proj", others=(WIDTH + 2 * 20,), roles=FUSED),
                    single("self_attn.o_proj", WIDTH, WIDTH),
                    tied("mlp.gate_up_proj", others=(2 * FFN,)),
                    single("mlp.down_proj", WIDTH, FFN),
                ],
            )
        },
    ),
    # one key head in the fused QKV; the MLP reads what the attention reads
    "falcon": Family(
        auto=AutoModelForCausalLM,
        config=lambda: FalconConfig(
            **TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=FFN
        ),
        blocks={
            0: (
                "transformer.h",
                [
                    tied("self_attention.query_key_value", others=(WIDTH + 2 * 10,), roles=FUSED),
                    single("self_attention.dense", WIDTH, WIDTH),
                    *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                ],
            )
        },
    ),
    # experts and router are no linear layers; the second block has an ordinary MLP
    "qwen3_moe": Family(
        auto=AutoModelForCausalLM,
        config=lambda: Qwen3MoeConfig(
            **TOKENS,
            **SHAPE,
            num_key_value_heads=2,
            moe_intermediate_size=24,
            num_experts=3,
            num_experts_per_tok=3,  # the choice of fewer jumps under rounding
            mlp_only_layers=[1],
        ),
        blocks={
            0: ("model.layers", grouped("self_attn", 40, 20)),
            1: ("model.layers", [*grouped("self_attn", 40, 20), *GATED_MLP]),
        },
        alone=("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.*"),
    ),
    # no head: the features are the output; a pooler outside the blocks
    "bert": Family(
        auto=AutoModel,
        config=lambda: BertConfig(**TOKENS, **SHAPE, max_position_embeddings=32),
        blocks={
            0: (
                "encoder.layer",
                [
                    tied(*(f"attention.self.{name}" for name in QKV), others=(WIDTH,) * 3, roles=QKV),
                    single("attention.output.dense", WIDTH, WIDTH),
                    *plain_mlp("intermediate.dense", "output.dense"),
                ],
            )
        },
        kind="encoder",
    ),
    # two stacks, positions as a bias that the first block computes for all; attention narrower than the model
    "t5": Family(
        auto=AutoModelForSeq2SeqLM,
        config=lambda: T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=FFN,
            num_heads=4,
            num_layers=3,
            num_decoder_layers=2,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
        blocks={
            0: (
                "encoder.block",
                [
                    *t5_attention("layer.0.SelfAttention", cross=False),
                    *plain_mlp("layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"),
                ],
            ),
            3: (
                "decoder.block",
                [
                    *t5_attention("layer.0.SelfAttention", cross=False),
                    *t5_attention("layer.1.EncDecAttention", cross=True),
                    *plain_mlp("layer.2.DenseReluDense.wi", "layer.2.DenseReluDense.wo"),
                ],
            ),
        },
        kind="seq2seq",
        alone=("*.relative_attention_bias.weight",),
    ),
    "vit": vision(ViTConfig, "vit.layers", "ViTForImageClassification"),
    # two classifiers, on two tokens, whose logits are averaged
    "deit": vision(DeiTConfig, "deit.layers", "DeiTForImageClassificationWithTeacher"),
}
QUICK = ("llama", "gpt2", "t5", "bert", "vit")  # in float32, not marked slow
