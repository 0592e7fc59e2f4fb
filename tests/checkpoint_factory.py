"""Small checkpoints with random weights in the genuine layout, and transformers' model of the same weights.

Weights are drawn wide, so that greedy decoding wanders through the vocabulary: a wrong position or a shifted row
changes the ids.
"""

from functools import cache
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from data.tiny_checkpoint import hf_config, tiny_config, train_tokenizer, write_checkpoint


@cache
def tokenizer():
    return train_tokenizer()


def random_weights(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Under the checkpoint's original names, as transformers saves them."""
    model = Qwen2_5_VLForConditionalGeneration(hf_config(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.ndim > 1 else 1.0, generator=generator)
    return {original_name(name): tensor.clone() for name, tensor in model.state_dict().items()}


def original_name(name: str) -> str:
    """transformers' module name -> the name in the first released checkpoints."""
    return name.replace("model.visual.", "visual.", 1).replace("model.language_model.", "model.", 1)


def make_checkpoint(folder: Path, *, seed: int = 0, **changes) -> Path:
    """Write a random checkpoint to `folder`; changes go to the top of config.json (`text_config` ones are merged)."""
    config = tiny_config(tokenizer())
    config["text_config"] |= changes.pop("text_config", {})
    config |= changes
    write_checkpoint(folder, config, tokenizer(), random_weights(config, seed))
    return folder


def transformers_model(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """The oracle: the same folder, loaded by transformers in float32."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
