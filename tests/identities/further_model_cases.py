"""Further small networks of transformers: `tools/frozen_groups.py` traces them beside those of `model_zoo_cases.py`."""

from typing import Any

import torch
from model_zoo_cases import BERT, LLAMA, MHA, PAIR, PIXELS, SEQ, T5, VIT, Model, causal, hugging_face, image, two_texts
from torch import Tensor, nn
from torch.nn.utils import parametrize


def sound(longer: bool) -> tuple[Tensor, ...]:
    return (torch.randn(2, 160 if longer else 120),)


def without_parametrisation(model: Model) -> Model:
    """Return a model whose weights are plain parameters."""

    def make() -> nn.Module:
        network = model.make()
        for module in network.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        return network

    return Model(make, model.inputs)


def masked(family: str, **settings: Any) -> Model:
    return causal(family, head="ForMaskedLM", **settings, **BERT)


def classifier(family: str, size: int, **settings: Any) -> Model:
    return hugging_face(family, "ForImageClassification", PIXELS, image(size), **settings)


WAVES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12, "conv_dim": (8, 8),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}  # fmt: skip
FOUR: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
FURTHER_TRANSFORMERS: dict[str, Model] = {
    "wav2vec2": without_parametrisation(hugging_face("Wav2Vec2", "Model", ("input_values",), sound, **WAVES)),
    "hubert": without_parametrisation(hugging_face("Hubert", "Model", ("input_values",), sound,
        do_stable_layer_norm=True, conv_bias=True, **WAVES)),
    "esm": masked("Esm", mask_token_id=3),
    "roformer": masked("RoFormer", embedding_size=16),
    "convbert": masked("ConvBert", embedding_size=16),
    "mobilebert": masked("MobileBert", embedding_size=8, intra_bottleneck_size=8),
    "squeezebert": masked("SqueezeBert", embedding_size=16),
    "camembert": masked("Camembert"),
    "megatron-bert": masked("MegatronBert"),
    "nystromformer": masked("Nystromformer", segment_means_seq_len=6, num_landmarks=6),
    "bert-decoder": causal("Bert", head="LMHeadModel", is_decoder=True, **BERT),
    "fnet": causal("FNet", head="ForMaskedLM", hidden_size=16, num_hidden_layers=2, intermediate_size=12,
        max_position_embeddings=32),
    "funnel": causal("Funnel", head="ForMaskedLM", block_sizes=[1, 1], d_model=16, n_head=4, d_head=4, d_inner=12),
    "xlnet": causal("XLNet", head="LMHeadModel", d_model=16, n_layer=2, n_head=4, d_inner=12),
    "xglm": causal("XGLM", d_model=16, ffn_dim=12, num_layers=2, attention_heads=4, max_position_embeddings=32),
    "biogpt": causal("BioGpt", **BERT),
    "blenderbot": hugging_face("Blenderbot", "ForConditionalGeneration", PAIR, two_texts, **SEQ),
    "m2m100": hugging_face("M2M100", "ForConditionalGeneration", PAIR, two_texts, **SEQ),
    "mt5": hugging_face("MT5", "ForConditionalGeneration", PAIR, two_texts, **T5),
    "smollm3": causal("SmolLM3", False, **LLAMA),
    "helium": causal("Helium", False, head_dim=4, **LLAMA),
    "mistral, head_dim": causal("Mistral", False, head_dim=8, **LLAMA),
    "exaone4": causal("Exaone4", False, head_dim=4, sliding_window=4, sliding_window_pattern=2, **LLAMA),
    "glm4": causal("Glm4", False, head_dim=4, **LLAMA),
    "qwen2-window": causal("Qwen2", False, use_sliding_window=True, sliding_window=4, max_window_layers=1, **LLAMA),
    "gemma3, one head of keys each": causal("Gemma3Text", network_of="Gemma3", head_dim=4, query_pre_attn_scalar=4,
        sliding_window=4, **MHA),
    "mamba2": causal("Mamba2", hidden_size=8, state_size=4, num_hidden_layers=2, expand=2, num_heads=4, head_dim=4,
        n_groups=1, chunk_size=4),
    "clip-projection": hugging_face("CLIPVision", "ModelWithProjection", PIXELS, image(16), projection_dim=6, **VIT),
    "vit_msn": hugging_face("ViTMSN", "Model", PIXELS, image(16), **VIT),
    "yolos": hugging_face("Yolos", "Model", PIXELS, image(16),
        **{**VIT, "image_size": [16, 16], "num_detection_tokens": 3}),
    "data2vec-vision": classifier("Data2VecVision", 16, use_relative_position_bias=True, **VIT),
    "ijepa": classifier("IJepa", 16, **VIT),
    "dinov2-registers": classifier("Dinov2WithRegisters", 16,
        **{name: value for name, value in VIT.items() if name != "intermediate_size"}),
    "swinv2": classifier("Swinv2", 32, image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4],
        window_size=4),
    "convnextv2": classifier("ConvNextV2", 32, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1]),
    "poolformer": classifier("PoolFormer", 64, **FOUR),
    "pvt": classifier("Pvt", 64, image_size=64, num_attention_heads=[1, 2, 2, 4], **FOUR),
    "mobilenet_v1": classifier("MobileNetV1", 32, depth_multiplier=0.25),
}  # fmt: skip
