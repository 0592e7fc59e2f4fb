"""The tiny Qwen2.5-VL: the files of `data/checkpoints/tiny-qwen2_5_vl` except for the trained weights."""

from tokenizers import Tokenizer, normalizers
from torch import Tensor

from data.training.tiny_family import CLIP_MEAN, CLIP_STD, TinyFamily
from refvl.encoders import Qwen2_5_VisionTransformer
from refvl.pixels.patches import PatchConfig

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SYSTEM_PROMPT = "You are a helpful assistant."
MIN_PIXELS, MAX_PIXELS = 84 * 84, 112 * 112  # 9 to 16 merged tokens per image or frame

# Qwen2's rule for splitting text before bytes are merged: contractions, words with one leading sign, single digits,
# runs of punctuation, line ends, spaces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{{- 'Picture ' ~ seen.images ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{{- 'Video ' ~ seen.videos ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".replace("SYSTEM_PROMPT", SYSTEM_PROMPT)


class TinyQwen2_5_VL(TinyFamily):
    name = "qwen2_5_vl"
    special_tokens = SPECIAL_TOKENS
    end_of_turn = "<|im_end|>"
    end_of_media = {"image": "<|vision_end|>", "video": "<|vision_end|>"}  # noqa: RUF012
    chat_template = CHAT_TEMPLATE
    reads_places = reads_steps = reads_neighbours = reads_windows = True
    recipe = {  # noqa: RUF012
        "begin_with": "65333cd4545874e20eac54c71cd6aed99bca1f694e0e288cf939adcdb4371558", "seed": 3, "steps": 1600,
        "see": 100, "warmup": 30, "pictures": 12, "picture_batches": 2, "clips": 3, "asides": 2, "photos": 4,
        "lr": 1.2e-3, "muon_lr": 2e-3, "measure_on": 96, "measure_every": 200,
    }  # fmt: skip
    pieces = PIECES
    normalizer = normalizers.NFC()
    texts = (SYSTEM_PROMPT, "system\n", "user\n", "assistant\n")
    by_adam = ("embed_tokens", "lm_head", "merger.mlp.0")  # two tables, and a matrix that is too large for Muon

    def config(self, tokenizer: Tokenizer) -> dict:
        """Return the dict of `config.json`. The language model's rope theta is small because its positions are few."""
        token = tokenizer.token_to_id
        vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
            "vision_token_id": token("<|vision_pad|>"),
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                "dtype": "bfloat16",
                "bos_token_id": token("<|endoftext|>"),
                "eos_token_id": token("<|im_end|>"),
                "pad_token_id": token("<|endoftext|>"),
                "hidden_act": "silu",
                "hidden_size": 128,
                "intermediate_size": 320,
                "max_position_embeddings": 4096,
                "num_attention_heads": 4,
                "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "mrope_section": [4, 6, 6]},
                "use_sliding_window": False,
                "vocab_size": vocab_size,
            },
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "depth": 4,
                "fullatt_block_indexes": [1, 3],
                "hidden_act": "silu",
                "hidden_size": 96,
                "in_channels": 3,
                "intermediate_size": 256,
                "num_heads": 4,
                "out_hidden_size": 128,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "tokens_per_second": 2,
                "window_size": 56,
            },
        }

    def side_files(self, config: dict) -> dict[str, dict]:
        text = config["text_config"]
        pixels = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
        pixels |= {"do_convert_rgb": True, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
        pixels |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        pixels |= {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
        pixels |= {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}}
        return {
            "config.json": config,
            "generation_config.json": {
                "bos_token_id": text["bos_token_id"],
                "eos_token_id": [text["eos_token_id"], text["bos_token_id"]],
                "pad_token_id": text["pad_token_id"],
                "do_sample": False,
            },
            "tokenizer_config.json": {
                "tokenizer_class": "Qwen2Tokenizer",
                "add_prefix_space": False,
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": None,
                "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
                "clean_up_tokenization_spaces": False,
                "errors": "replace",
                "model_max_length": text["max_position_embeddings"],
            },
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2_5_VLProcessor",
                **pixels,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen2VLVideoProcessor",
                "processor_class": "Qwen2_5_VLProcessor",
                "do_sample_frames": False,
                "fps": 2,
                "min_frames": 4,
                "max_frames": 32,
                **pixels,
            },
        }

    def checkpoint_weights(self, weights: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
        c, name = config["vision_config"], "visual.patch_embed.proj.weight"
        kernel = (c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"])
        return weights | {name: weights[name].unflatten(1, kernel)}

    def tower(self, config: dict) -> Qwen2_5_VisionTransformer:
        return Qwen2_5_VisionTransformer.from_config(config["vision_config"], attention="sdpa")

    def target_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        return PatchConfig(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS).target_size(height, width, frames)

    def time_factor(self, seconds: tuple) -> float:
        """Return the positions per step on a video's time axis, at `tokens_per_second` (2)."""
        return 2 * (seconds[1] - seconds[0]) if len(seconds) > 1 else 1.0


FAMILY = TinyQwen2_5_VL()
