"""A random checkpoint with a released model's width but few layers, which needs no download.

The tokenizer, chat template and token ids are those of a small checkpoint, so the vocabulary is
also small. Everything that does not depend on depth or vocabulary - widths, heads, rotary sections,
pixel limits - comes from the release.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig
from transformers.initialization import no_init_weights

from refvl import families
from refvl.language.loading import progress_bars

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PIXEL_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")


def write_shallow(release: str | Path, folder: str | Path, *, like: str | Path, depth: int = 4, seed: int = 0) -> Path:
    """Write a random checkpoint in bfloat16 to the empty or new `folder`, and return its path.

    release: the JSON file of a released config; pixel limits come from the folder of the same name,
    if there is one. like: a checkpoint folder of the same family, which provides all text files.
    depth: the number of tower blocks and of text layers. seed: the seed for the weights, which
    transformers initialises as for training.

    Raises ValueError if `like` belongs to a different family, if the folder is not empty, or if the
    depth is less than the number of features that the tower passes to the text model.
    """
    release, folder, like = Path(release), Path(folder), Path(like)
    config, small = families.read_config(release), families.read_config(like)
    if config.model_type != small.model_type:
        raise ValueError(f"like: expected a checkpoint of {config.model_type}, got a checkpoint of {small.model_type}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"folder: expected a new or empty folder, got {folder}, which contains files")
    _make_shallow(config, depth)
    _take_vocabulary(config, small)

    with no_init_weights():  # otherwise, every matrix would be initialised twice
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # a random model would stop at arbitrary tokens
    with torch.random.fork_rng(devices=[]), progress_bars(False):
        torch.manual_seed(seed)
        model.init_weights()
        model.save_pretrained(folder)
    for name in TEXT_FILES:
        shutil.copy(like / name, folder / name)
    for name in PIXEL_FILES:
        own = release.with_suffix("") / name
        shutil.copy(own if own.is_file() else like / name, folder / name)
    return folder


def _make_shallow(config: PretrainedConfig, depth: int) -> None:
    """Cut tower and text model to `depth` layers each; the list of DeepStack layers keeps
    its length, because each entry has weights.
    """
    text, vision = config.text_config, config.vision_config
    features = getattr(vision, "deepstack_visual_indexes", None) or []
    if depth < max(1, len(features)):
        least = f"at least {max(1, len(features))} layers for {config.model_type}"
        raise ValueError(f"depth: expected {least}, got {depth}")
    if features:
        vision.deepstack_visual_indexes = list(range(len(features)))
    if getattr(vision, "fullatt_block_indexes", None):
        vision.fullatt_block_indexes = [depth - 1]
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    vision.depth = text.num_hidden_layers = depth


def _take_vocabulary(config: PretrainedConfig, small: PretrainedConfig) -> None:
    """Set the vocabulary size and every token id of `config` and its text config to the values in
    `small`.
    """
    config.text_config.vocab_size = small.text_config.vocab_size
    for own, other in ((config, small), (config.text_config, small.text_config)):
        for name in json.loads(other.to_json_string(use_diff=False)):
            if name.endswith("_token_id"):
                setattr(own, name, getattr(other, name))
