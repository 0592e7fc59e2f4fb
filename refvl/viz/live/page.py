"""The live page: a shipped checkpoint, the modules that run it and the page around them,
in one HTML file.

    model.safetensors   -> int8 rows with a float32 scale each, compressed, base64
    config.json         -> the sizes that `model.js` reads
    tokenizer, template -> the ids around a question, and the data that `tokenizer.js` needs
    *.js                -> one module for the page and one for its worker

`make site` writes one page per checkpoint of `LIVE`. A page loads nothing and runs without a
kernel.
"""

import base64
import html
import io
import json
import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from refvl.families import load_processor, read_config
from refvl.paths import DATA
from refvl.pixels.media import load_image
from refvl.viz.style import THEMES, filled, variables

FOLDER = Path(__file__).parent
SIDE = 84  # px of a painted scene
LIVE = {"tiny-qwen2_5_vl": "Qwen2.5-VL", "tiny-qwen3_vl": "Qwen3-VL"}  # checkpoints with a page, and their families
STILL = DATA / "figures" / "live.png"  # the initial view; written by tests/browser/test_live_page.py
BITES = DATA / "measurements" / "live_bites.json"  # written by tests/viz/test_live.py
ALT = "The same scene twice, the same weights: intact, the model says top right; with h and w exchanged, bottom left"
PHOTOS = {"coffee": "a cup of coffee", "chelsea": "a cat", "rocket": "a rocket", "astronaut": "an astronaut"}
PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}  # to the names in `model.js`
SITE = {"tiny-qwen2_5_vl": "live.html", "tiny-qwen3_vl": "live-qwen3_vl.html"}  # the checkpoints' pages
SIZES = (  # settings that `model.js` reads
    "hidden_size", "num_heads", "depth", "fullatt_block_indexes", "window_size", "num_position_embeddings",
    "deepstack_visual_indexes", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
    "rope_parameters",
)  # fmt: skip
IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"\./(\w+)\.js";\n', re.M)


def page(checkpoint: str = "tiny-qwen2_5_vl", *, index: str = "", links: Mapping[str, str] | None = None) -> str:
    """Return the live page of a checkpoint as one HTML file.

    checkpoint: a key of `LIVE`. index: the address of a page to go back to. links: the addresses of
    the other checkpoints' pages. Raises ValueError for other checkpoints.
    """
    folder = DATA / "checkpoints" / check_checkpoint(checkpoint)
    weights, meta = packed(folder)
    numbers = sum(rows * values for _, _, rows, values in meta.values())
    data = settings(folder) | {"meta": meta, "bites": bites(checkpoint)}
    addresses = {"all pages": index} | dict(links or {})
    return filled(
        FOLDER / "page.html",
        style=style(),
        family=html.escape(LIVE[checkpoint]),
        numbers=f"{numbers / 1e6:.2f} million",
        links=" ".join(f'<a href="{a}">{html.escape(text)}</a>' for text, a in addresses.items() if a),
        still=as_url(STILL.read_bytes(), "png"),
        alt=ALT,
        worker=source("worker"),
        app=source("app"),
        data=as_json(data),
        weights=base64.b64encode(zlib.compress(weights, 9)).decode(),
    )


def check_checkpoint(checkpoint: str) -> str:
    """Return the name of a checkpoint that has a page; raise ValueError for any other."""
    if checkpoint not in LIVE:
        raise ValueError(f"checkpoint: expected one of {', '.join(LIVE)}, got {checkpoint!r}")
    return checkpoint


def source(*names: str) -> str:
    """Return modules as one script, in which every imported module, even an indirect one, precedes its first use."""
    written = dict[str, str]()

    def write(module: str) -> None:
        text = (FOLDER / f"{module}.js").read_text(encoding="utf-8")
        for needed in IMPORT.findall(text):
            if needed not in written:
                write(needed)
        written[module] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.M)

    for name in names:
        if name not in written:
            write(name)
    return "\n".join(written.values())


def style() -> str:
    """Return the palette of figures and explorers as variables, followed by the style sheet."""
    light = ";".join(f"--{axis}:{THEMES['light'][axis]}" for axis in "thw")
    sheet = (FOLDER / "style.css").read_text(encoding="utf-8")
    return f"{variables(*'thw')}:root[data-theme=light]{{{light}}}\n{sheet}"


def bites(checkpoint: str) -> dict[str, Any]:
    """Return, for each thing that can be exchanged, an input and a question whose answer changes, and the counts."""
    return json.loads(BITES.read_text(encoding="utf-8"))[checkpoint]


def packed(folder: Path, *, quantized: bool = True) -> tuple[bytes, dict[str, list[int]]]:
    """Return all tensors as bytes, and a table {name: [offset, is int8, rows, values per row]}.

    Matrices become int8 with a float32 scale per row, or float32 if `quantized` is False; vectors
    are float32.
    """
    from safetensors.torch import load_file

    data, meta = bytearray(), dict[str, list[int]]()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        for prefix, short in PREFIXES.items():
            name = short + name.removeprefix(prefix) if name.startswith(prefix) else name
        values = tensor.float().numpy()
        rows = values.reshape(len(values) if values.ndim > 1 else 1, -1)
        is_int8 = quantized and values.ndim > 1
        meta[name] = [len(data), int(is_int8), *rows.shape]
        data += as_int8(rows) if is_int8 else rows.astype("<f4").tobytes()
        data += bytes(-len(data) % 4)
    return bytes(data), meta


def as_int8(rows: np.ndarray) -> bytes:
    """Return one float32 scale per row, followed by the rows,
    divided by their scales and rounded to -127 .. 127.
    """
    scale = np.abs(rows).max(1) / 127
    scale[scale == 0] = 1
    return scale.astype("<f4").tobytes() + np.round(rows / scale[:, None]).astype("i1").tobytes()


@cache
def settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `model.js`, `tokenizer.js` and the page,
    read from the checkpoint's own files.
    """
    config = read_config(folder)
    processor = load_processor(folder, config)
    vision, text = config.vision_config.to_dict(), config.text_config.to_dict()
    text["head_dim"] = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    image = processor.image_config
    height, _ = image.target_size(SIDE, SIDE)
    pixels = {
        "side": height, "patch": image.patch_size, "merge": image.merge_size,
        "mean": image.image_mean, "std": image.image_std, "timeStep": 0,
    }  # fmt: skip
    kinds = {"picture": prompt(processor, "image", Image.new("RGB", (SIDE, SIDE)))}
    if "tokens_per_second" in vision:  # in other families, timestamps precede frames; the page writes none
        video = processor.video_config
        pixels["timeStep"] = vision["tokens_per_second"] * video.temporal_patch_size / video.fps
        kinds["clip"] = prompt(processor, "video", DATA / "clips" / "scene.mp4")
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    model = {"vision": _sizes(vision), "text": _sizes(text)}
    photos = {name: {"what": what, "src": photo(name)} for name, what in PHOTOS.items()}
    return {
        "config": model | {"pixels": pixels, "tokens": {"eos": eos}},
        "tokenizer": vocabulary(folder), "prompts": kinds, "photos": photos,
    }  # fmt: skip


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that `SIZES` names."""
    return {name: value for name, value in config.items() if name in SIZES}


def prompt(processor: Any, kind: str, medium: Any) -> dict[str, Any]:
    """Return the prompt's ids around the placeholders and around the question,
    and the placeholder's id and count.
    """
    messages = processor.messages("?", [medium] * (kind == "image"), [medium] * (kind == "video"))
    [patches] = processor.patchify(processor.decode(messages))
    ids = processor.tokenize(messages, [patches.media_tokens])
    pad, [question] = processor.token_ids[kind], processor.tokenizer.encode("?", add_special_tokens=False)
    first, last = ids.index(pad), len(ids) - ids[::-1].index(pad)
    asked = ids.index(question, last)
    return {
        "before": ids[:first], "pad": pad, "count": last - first,
        "between": ids[last:asked], "after": ids[asked + 1 :],
    }  # fmt: skip


def vocabulary(folder: Path) -> dict[str, Any]:
    """Return the text of every id, with special tokens last,
    and the merges of the BPE tokenizer.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    merges = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    special = tokenizer.get_vocab_size(with_added_tokens=False)
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return {"pieces": pieces, "merges": [" ".join(pair) for pair in merges], "special": special}


def photo(name: str) -> str:
    """Return the central square of a shipped photograph as a `data:` URL."""
    picture = load_image(DATA / "pictures" / f"{name}.jpg").convert("RGB")
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    small = picture.crop((left, top, left + side, top + side)).resize((2 * SIDE, 2 * SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "jpeg", quality=80)
    return as_url(buffer.getvalue(), "jpeg")


def as_url(picture: bytes, kind: str) -> str:
    """Return an image file as a `data:` URL."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def as_json(value: Any) -> str:
    """Return JSON without any "<", which could end a script."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
