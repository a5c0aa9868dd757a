"""Small random networks of many families, made from configurations of transformers, timm and torchvision.

Nothing is downloaded. A case says how the network is made and on which two inputs it runs: an example, and another one
of another length or image size where the network takes such.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 41


@dataclass(frozen=True)
class Model:
    """A network of some library, and inputs for it."""

    make: Callable[[], nn.Module]  # makes the network
    # makes an input, as keyword arguments or as a tuple; takes True for one of another length or size
    inputs: Callable[[bool], Any]


def tokens(longer: bool) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCABULARY - 3, (2, 9 if longer else 6)),)


def tokens_and_mask(longer: bool) -> tuple[Tensor, ...]:
    (ids,) = tokens(longer)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return ids, mask


def two_texts(longer: bool) -> tuple[Tensor, ...]:
    return (*tokens(longer), torch.randint(3, VOCABULARY - 3, (2, 7 if longer else 4)))


def image(size: int, larger: int | None = None) -> Callable[[bool], tuple[Tensor, ...]]:
    return lambda other: (torch.randn(2, 3, *[(larger or size) if other else size] * 2),)


def hugging_face(
    family: str,
    head: str,
    names: tuple[str, ...] = ("input_ids",),
    inputs: Callable[[bool], tuple[Any, ...]] = tokens,
    network_of: str | None = None,
    **settings: Any,
) -> Model:
    """Return a network of transformers: `family` + "Config" gives the configuration, `family` + `head` the network."""

    def make() -> nn.Module:
        import transformers

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, f"{family}Config")(**settings)
            config.use_cache = False
            config._experts_implementation = "batched_mm"
            network = getattr(transformers, (network_of or family) + head)(config)
        return network.eval()

    return Model(make, lambda other: dict(zip(names, inputs(other), strict=True)))


def causal(family: str, tied: bool | None = None, **settings: Any) -> Model:
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if tied is not None:
        common["tie_word_embeddings"] = tied
    return hugging_face(family, settings.pop("head", "ForCausalLM"), **common | settings)


LLAMA: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
MHA = {**LLAMA, "num_key_value_heads": 4}
BERT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32}  # fmt: skip
NEOX = {**BERT, "num_attention_heads": 2}
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
VIT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4}  # fmt: skip
SEQ: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "max_position_embeddings": 32}  # fmt: skip
T5: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
PAIR = ("input_ids", "decoder_input_ids")
PIXELS = ("pixel_values",)
MASKED = ("input_ids", "attention_mask")
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}

TRANSFORMERS: dict[str, Model] = {
    "gpt2": causal("GPT2", head="LMHeadModel", **GPT2),
    "gpt2-untied": causal("GPT2", False, head="LMHeadModel", **GPT2),
    "gpt2-eager": causal("GPT2", head="LMHeadModel", attn_implementation="eager", **GPT2),
    "gpt2-mask": causal("GPT2", head="LMHeadModel", names=MASKED, inputs=tokens_and_mask, **GPT2),
    "gpt_neo": causal("GPTNeo", hidden_size=16, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32, window_size=4, intermediate_size=12),
    "gpt_neox": causal("GPTNeoX", **NEOX),
    "gpt_neox-sequential": causal("GPTNeoX", use_parallel_residual=False, **NEOX),
    "gptj": causal("GPTJ", **GPT2, rotary_dim=4),
    "gpt_bigcode": causal("GPTBigCode", **GPT2),
    "codegen": causal("CodeGen", **{**GPT2, "rotary_dim": 4}),
    "opt": causal("OPT", hidden_size=16, ffn_dim=12, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=16),
    "bloom": causal("Bloom", hidden_size=16, n_layer=2, n_head=4),
    "llama": causal("Llama", False, **MHA),
    "llama-grouped": causal("Llama", False, **LLAMA),
    "llama-tied": causal("Llama", True, **LLAMA),
    "llama-eager": causal("Llama", False, attn_implementation="eager", **LLAMA),
    "llama-mask": causal("Llama", False, names=MASKED, inputs=tokens_and_mask, **LLAMA),
    "mistral-window": causal("Mistral", False, sliding_window=4, **LLAMA),
    "mixtral": causal("Mixtral", False, **EXPERTS),
    "qwen2": causal("Qwen2", False, **LLAMA),
    "qwen2-tied": causal("Qwen2", True, **LLAMA),
    "qwen3": causal("Qwen3", False, head_dim=4, **LLAMA),
    "qwen3-moe": causal("Qwen3Moe", False, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
        **LLAMA),
    "olmoe": causal("Olmoe", False, num_experts=4, num_experts_per_tok=2, **LLAMA),
    "qwen2-moe": causal("Qwen2Moe", False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=6, **LLAMA),
    "deepseek_v3": causal("DeepseekV3", False, **MHA, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, moe_intermediate_size=6, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4),
    "gpt_oss": causal("GptOss", False, head_dim=4, sliding_window=4, **EXPERTS),
    "gemma": causal("Gemma", head_dim=4, **LLAMA),
    "gemma2": causal("Gemma2", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **LLAMA),
    "gemma2-untied": causal("Gemma2", False, head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **LLAMA),
    "gemma3": causal("Gemma3Text", network_of="Gemma3", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **LLAMA),
    "phi": causal("Phi", partial_rotary_factor=0.5, **LLAMA),
    "phi3": causal("Phi3", **LLAMA),
    "falcon": causal("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        new_decoder_architecture=False),
    "falcon-alibi": causal("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, parallel_attn=False, bias=True),
    "falcon-new": causal("Falcon", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True),
    "mpt": causal("Mpt", d_model=16, n_heads=4, n_layers=2, max_seq_len=32, expansion_ratio=2),
    "olmo": causal("Olmo", False, **LLAMA),
    "olmo2": causal("Olmo2", False, **LLAMA),
    "stablelm": causal("StableLm", False, partial_rotary_factor=0.5, **LLAMA),
    "starcoder2": causal("Starcoder2", **LLAMA),
    "cohere": causal("Cohere", **LLAMA),
    "granite": causal("Granite", False, **LLAMA),
    "persimmon": causal("Persimmon", **BERT),
    "nemotron": causal("Nemotron", head_dim=4, **LLAMA),
    "glm": causal("Glm", head_dim=4, **LLAMA),
    "mamba": causal("Mamba", hidden_size=8, state_size=4, num_hidden_layers=2, expand=2),
    "rwkv": causal("Rwkv", hidden_size=8, attention_hidden_size=8, num_hidden_layers=2, intermediate_size=12,
        context_length=32),
    "bert": causal("Bert", head="ForMaskedLM", **BERT),
    "bert-untied": causal("Bert", False, head="ForMaskedLM", **BERT),
    "bert-mask": causal("Bert", head="ForMaskedLM", names=MASKED, inputs=tokens_and_mask, **BERT),
    "bert-classifier": causal("Bert", head="ForSequenceClassification", **BERT),
    "roberta": causal("Roberta", head="ForMaskedLM", **BERT),
    "albert": causal("Albert", head="ForMaskedLM", embedding_size=8, **BERT),
    "distilbert": causal("DistilBert", head="ForMaskedLM", dim=16, hidden_dim=12, n_layers=2, n_heads=4,
        max_position_embeddings=32),
    "electra": causal("Electra", head="ForMaskedLM", embedding_size=8, **BERT),
    "deberta": causal("Deberta", head="ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], **BERT),
    "deberta_v2": causal("DebertaV2", head="ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, **BERT),
    "mpnet": causal("MPNet", head="ForMaskedLM", **BERT),
    "modernbert": causal("ModernBert", head="ForMaskedLM", **BERT),
    "xlm_roberta": causal("XLMRoberta", head="ForMaskedLM", **BERT),
    "t5": hugging_face("T5", "ForConditionalGeneration", PAIR, two_texts, **T5),
    "t5-gated": hugging_face("T5", "ForConditionalGeneration", PAIR, two_texts, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, **T5),
    "bart": hugging_face("Bart", "ForConditionalGeneration", PAIR, two_texts, **SEQ),
    "mbart": hugging_face("MBart", "ForConditionalGeneration", PAIR, two_texts, **SEQ),
    "pegasus": hugging_face("Pegasus", "ForConditionalGeneration", PAIR, two_texts, **SEQ),
    "marian": hugging_face("Marian", "MTModel", PAIR, two_texts, **SEQ),
    "whisper": hugging_face("Whisper", "ForConditionalGeneration", ("input_features", "decoder_input_ids"),
        lambda other: (torch.randn(2, 8, 16), torch.randint(3, VOCABULARY, (2, 6 if other else 4))), num_mel_bins=8,
        max_source_positions=8, max_target_positions=16,
        **{k: v for k, v in SEQ.items() if k != "max_position_embeddings"}),
    "vit": hugging_face("ViT", "ForImageClassification", PIXELS, image(16), **VIT),
    "deit": hugging_face("DeiT", "ForImageClassification", PIXELS, image(16), **VIT),
    "beit": hugging_face("Beit", "ForImageClassification", PIXELS, image(16), **VIT),
    "dinov2": hugging_face("Dinov2", "ForImageClassification", PIXELS, image(16, 24),
        **{k: v for k, v in VIT.items() if k != "intermediate_size"}),
    "swin": hugging_face("Swin", "ForImageClassification", PIXELS, image(32), image_size=32, patch_size=4, embed_dim=8,
        depths=[2, 2], num_heads=[2, 4], window_size=4),
    "convnext": hugging_face("ConvNext", "ForImageClassification", PIXELS, image(32, 64), hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 2, 1]),
    "resnet": hugging_face("ResNet", "ForImageClassification", PIXELS, image(32, 64), embedding_size=8,
        hidden_sizes=[8, 16], depths=[1, 1]),
    "segformer": hugging_face("Segformer", "ForImageClassification", PIXELS, image(32, 64), hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]),
    "clip-vision": hugging_face("CLIPVision", "Model", PIXELS, image(16), **VIT),
    "clip-text": hugging_face("CLIPText", "Model",
        **{**BERT, "vocab_size": VOCABULARY, "eos_token_id": 2, "bos_token_id": 1}),
    "siglip-vision": hugging_face("SiglipVision", "Model", PIXELS, image(16), **VIT),
}  # fmt: skip


def timm_model(name: str, size: int = 32, larger: int | None = None, /, **settings: Any) -> Model:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **settings).eval()

    return Model(make, image(size, larger))


VIT_OF_TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}
ROTARY: dict[str, Any] = VIT_OF_TIMM | {"num_heads": 2}
SWIN: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
CONVNEXT: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}
FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}
TIMM: dict[str, Model] = {
    "vit": timm_model("vit_tiny_patch16_224", **VIT_OF_TIMM),
    "vit, any size": timm_model("vit_tiny_patch16_224", 32, 48, dynamic_img_size=True, **VIT_OF_TIMM),
    "vit, norms of queries and keys": timm_model("vit_tiny_patch16_224", qk_norm=True, **VIT_OF_TIMM),
    "vit, registers": timm_model("vit_little_patch16_reg4_gap_256", **VIT_OF_TIMM),
    "vit, shared relative positions": timm_model("vit_srelpos_small_patch16_224", **VIT_OF_TIMM),
    "vit, relative positions": timm_model("vit_relpos_small_patch16_224", **VIT_OF_TIMM),
    "siglip": timm_model("vit_base_patch16_siglip_224", **VIT_OF_TIMM),
    "vit, LayerScale": timm_model("vit_small_patch16_36x1_224", **VIT_OF_TIMM),
    "deit3": timm_model("deit3_small_patch16_224", **VIT_OF_TIMM),
    "deit, distilled": timm_model("deit_tiny_distilled_patch16_224", **VIT_OF_TIMM),
    "eva02": timm_model("eva02_tiny_patch14_224", **ROTARY),
    "eva02, any size": timm_model("eva02_tiny_patch14_224", 32, 48, dynamic_img_size=True, **ROTARY),
    "vit, rotary": timm_model("vit_small_patch16_rope_224", **ROTARY),
    "vit, learned rotary": timm_model("vit_small_patch16_rope_mixed_224", **ROTARY),
    "dinov3": timm_model("vit_small_patch16_dinov3", **ROTARY),
    "beit": timm_model("beit_base_patch16_224", **VIT_OF_TIMM),
    "cait": timm_model("cait_xxs24_224", **VIT_OF_TIMM),
    "xcit": timm_model("xcit_nano_12_p16_224", **VIT_OF_TIMM),
    "convit": timm_model("convit_tiny", **VIT_OF_TIMM),
    "sam": timm_model("samvit_base_patch16", 64,
        **ROTARY | {"img_size": 64, "global_attn_indexes": (1,), "window_size": 4, "neck_chans": 8}),
    "swin": timm_model("swin_tiny_patch4_window7_224", **SWIN),
    "swinv2": timm_model("swinv2_tiny_window8_256", **SWIN),
    "pit": timm_model("pit_ti_224", 64, img_size=64, patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1),
        heads=(2, 2, 2)),
    "twins": timm_model("twins_svt_small", 64, img_size=64, num_heads=(2, 2, 2, 2), wss=(4, 4, 4, 2), **FOUR),
    "pvt_v2": timm_model("pvt_v2_b0", 64, 96, num_heads=(1, 2, 2, 2), **FOUR),
    "davit": timm_model("davit_tiny", 64, 96, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4),
    "hiera": timm_model("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)),
    "coatnet": timm_model("coatnet_pico_rw_224", 64, img_size=64, embed_dim=(8, 16), depths=(1, 1), stem_width=8),
    "coat": timm_model("coat_lite_tiny", 64, img_size=64, embed_dims=(8, 8, 16, 16), serial_depths=(1, 1, 1, 1)),
    "tnt": timm_model("tnt_s_legacy_patch16_224", 32, img_size=32, patch_size=8, depth=2),
    "visformer": timm_model("visformer_tiny", 64, img_size=64),
    "levit": timm_model("levit_128s", 64, img_size=64),
    "mobilevit": timm_model("mobilevit_xxs", 64, 128),
    "mobilevitv2": timm_model("mobilevitv2_050", 64, 128),
    "poolformer": timm_model("poolformer_s12", 64, 96),
    "edgenext": timm_model("edgenext_xx_small", 64, 96),
    "fastvit": timm_model("fastvit_t8", 64),
    "sequencer": timm_model("sequencer2d_s", 64, img_size=64, layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16),
        hidden_sizes=(4, 4, 4, 4)),
    "mixer": timm_model("mixer_s32_224", 224),
    "resmlp": timm_model("resmlp_12_224", 224),
    "gmlp": timm_model("gmlp_ti16_224", 224),
    "convnext": timm_model("convnext_atto", 64, 96, **CONVNEXT),
    "convnextv2": timm_model("convnextv2_atto", 64, 96, **CONVNEXT),
    "inception_next": timm_model("inception_next_atto", 64, 96),
    "starnet": timm_model("starnet_s050", 64, 96),
    "resnet": timm_model("resnet10t", 64, 96),
    "resnetv2": timm_model("resnetv2_50", 64, 96, layers=(1, 1), channels=(16, 32)),
    "resnext": timm_model("resnext26ts", 64, 96),
    "seresnet": timm_model("seresnet18", 64, 96),
    "ecaresnet": timm_model("ecaresnet26t", 64, 96),
    "skresnet": timm_model("skresnet18", 64, 96),
    "resnest": timm_model("resnest14d", 64, 96),
    "botnet": timm_model("botnet26t_256", 64, img_size=64),
    "lambda_resnet": timm_model("lambda_resnet26t", 64),
    "regnetx": timm_model("regnetx_002", 64, 96),
    "regnety": timm_model("regnety_002", 64, 96),
    "efficientnet": timm_model("efficientnet_b0", 64, 96),
    "mobilenetv2": timm_model("mobilenetv2_050", 64, 96),
    "mobilenetv3": timm_model("mobilenetv3_small_050", 64, 96),
    "mobilenetv4": timm_model("mobilenetv4_conv_small_050", 64, 96),
    "mnasnet": timm_model("mnasnet_small", 64, 96),
    "mobileone": timm_model("mobileone_s0", 64, 96),
    "ghostnet": timm_model("ghostnet_050", 64, 96),
    "densenet": timm_model("densenet121", 64, 96, growth_rate=4, block_config=(2, 2, 2, 2)),
    "dla": timm_model("dla46_c", 64, 96),
    "cspresnet": timm_model("cspresnet50", 64, 96),
    "rexnet": timm_model("rexnetr_100", 64, 96),
    "repvgg": timm_model("repvgg_a0", 64, 96),
    "selecsls": timm_model("selecsls42", 64, 96),
}  # fmt: skip


def of_torch(make: Callable[[], nn.Module], inputs: Callable[[bool], Any]) -> Model:
    return Model(lambda: make().eval(), inputs)


def steps(longer: bool) -> tuple[Tensor, ...]:
    return (torch.randn(2, 7 if longer else 5, 16),)


def queries_and_keys(longer: bool) -> dict[str, Tensor]:
    keys = torch.randn(2, 6 if longer else 4, 16)
    padding = torch.zeros(keys.shape[:2], dtype=torch.bool)
    padding[0, -1] = True
    return {"query": torch.randn(2, 3, 16), "key": keys, "value": torch.randn_like(keys), "key_padding_mask": padding}


def source_and_target(longer: bool) -> tuple[Tensor, ...]:
    return (*steps(longer), torch.randn(2, 6 if longer else 3, 16))


LAYER: dict[str, Any] = {"d_model": 16, "nhead": 4, "dim_feedforward": 12, "batch_first": True}
TORCH: dict[str, Model] = {
    "encoder": of_torch(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2), steps),
    "encoder, norm first": of_torch(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(norm_first=True,
        activation="gelu", **LAYER), 2), steps),
    "encoder and decoder": of_torch(lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **LAYER),
        source_and_target),
    "attention": of_torch(lambda: nn.MultiheadAttention(16, 4, batch_first=True), queries_and_keys),
    "attention, keys of their own": of_torch(lambda: nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True,
        add_zero_attn=True), queries_and_keys),
}  # fmt: skip
