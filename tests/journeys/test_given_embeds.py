"""Embeddings that were made before, instead of pixels.

Oracle: the same call with pixels, id for id.
"""

import pytest
import torch
from random_models import random_model

from refvl.paths import DATA

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "rocket")]
CLIP = DATA / "clips" / "scene.mp4"
CONTENT = [
    {"type": "image", "image": PHOTOS[0]},
    {"type": "text", "text": "and"},
    {"type": "video", "video": CLIP},
    {"type": "image", "image": PHOTOS[1]},
    {"type": "text", "text": "What is it?"},
]


def test_layouts_of_a_family_without_grids_go_where_grids_go():
    """Pixels and embeddings of images and a clip give the ids of `trace`.

    Images alone: `test_every_family.py`.
    """
    vlm = random_model("MiniCPM-V 4.5")
    run = vlm.trace("What is it?", images=PHOTOS, videos=[CLIP], max_new_tokens=8)
    arguments = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        items = [(p, e) for p, e in zip(run.patches, run.embeds, strict=True) if p.media_tokens.kind == kind]
        arguments[f"{kind}_grid_thw"] = [p.layout for p, _ in items]
        arguments[pixels] = torch.cat([p.pixel_values for p, _ in items])
        arguments[f"{kind}_embeds"] = [e for _, e in items]
    for given in ("pixel_values", "embeds"):
        chosen = {key: value for key, value in arguments.items() if "grid" in key or given in key}
        ids = vlm.generate(run.full_ids[None], max_new_tokens=8, **chosen)[0, len(run.full_ids) :]
        assert ids.tolist() == run.token_ids, given


@pytest.fixture(scope="module", params=["Qwen2.5-VL", "qwen3_vl", "GLM-4.1V", "GLM-OCR"])
def vlm(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def prompt(vlm):
    """(input_ids, both media as pixels, both media as embeddings)."""
    messages = [{"role": "user", "content": CONTENT}]
    patches = vlm.processor.patchify(vlm.processor.decode(messages))
    input_ids = torch.tensor([vlm.processor.tokenize(messages, [p.media_tokens for p in patches])])
    embeds = vlm.encode(images=PHOTOS) + vlm.encode(videos=[CLIP])
    first, clip, second = patches
    layouts = {"image_grid_thw": [first.layout, second.layout], "video_grid_thw": torch.tensor([clip.layout])}
    layouts["second_per_grid_ts"] = [0.5]
    pixels = {"pixel_values": torch.cat([first.pixel_values, second.pixel_values])}
    pixels["pixel_values_videos"] = clip.pixel_values
    given = {"image_embeds": torch.cat(embeds[:2]), "video_embeds": embeds[2]}
    return input_ids, layouts | pixels, layouts | given


@pytest.mark.parametrize("q", [0.0, 0.6])
def test_given_embeddings_give_the_same_ids(q, vlm, prompt):
    """With EVS as well: it prunes by embeddings, wherever they come from."""
    input_ids, pixels, embeds = prompt
    want = vlm.generate(input_ids, pruning_rate=q, max_new_tokens=8, **pixels)
    assert torch.equal(vlm.generate(input_ids, pruning_rate=q, max_new_tokens=8, **embeds), want)
    tokens = [vlm.encoder.item_size(grid)[1] for grid in embeds["image_grid_thw"]]
    in_pieces = embeds | {"image_embeds": list(embeds["image_embeds"].split(tokens))}
    assert torch.equal(vlm.generate(input_ids, pruning_rate=q, max_new_tokens=8, **in_pieces), want)
    assert len(set(want[0, input_ids.shape[1] :].tolist())) > 2


def test_pixels_of_one_kind_and_embeddings_of_the_other(vlm, prompt):
    input_ids, pixels, embeds = prompt
    mixed = pixels | {"pixel_values_videos": None, "video_embeds": embeds["video_embeds"].double()}
    want = vlm.generate(input_ids, max_new_tokens=8, **pixels)
    assert torch.equal(vlm.generate(input_ids, max_new_tokens=8, **mixed), want)


def test_the_encoder_does_not_run(vlm, prompt, monkeypatch):
    input_ids, pixels, embeds = prompt
    want = vlm.generate(input_ids, max_new_tokens=1, **pixels)
    monkeypatch.setattr(type(vlm.encoder), "forward", None)
    assert torch.equal(vlm.generate(input_ids, max_new_tokens=1, **embeds), want)
    with pytest.raises(TypeError):
        vlm.generate(input_ids, max_new_tokens=1, **pixels)


WRONG_EMBEDS = {  # the error, the argument, and what becomes of it
    r"dimension 0 must be \d+, got \d+ patches or tokens of": ("image_embeds", lambda x: x[:-1]),
    r"dimension 1 must be \d+, got \d+ channels": ("image_embeds", lambda x: x[:, :-1]),
    r"expected tensors of \[.*\] tokens, one for each": ("image_embeds", lambda x: [x]),
    "expected floating-point numbers": ("video_embeds", lambda x: x.long()),
    "expected both or neither": ("pixel_values", lambda _: torch.zeros(4, 4)),
    "expected one number for each": ("second_per_grid_ts", lambda _: [1.0, 2.0]),
}
WRONG_PIXELS = {
    r"got \d+ patches or tokens of image_grid_thw": ("pixel_values", lambda x: x[1:]),
    r"pixel_values: dimension 1 must be \d+": ("pixel_values_videos", lambda x: x[:, 1:]),
    r"video_grid_thw\[0\]: expected \(t, h, w\)": ("video_grid_thw", lambda _: [(1, 2)]),
}


@pytest.mark.parametrize("message", [*WRONG_EMBEDS, *WRONG_PIXELS])
def test_what_does_not_fit_is_named(vlm, prompt, message):
    input_ids, pixels, embeds = prompt
    given = embeds if message in WRONG_EMBEDS else pixels
    name, change = (WRONG_EMBEDS | WRONG_PIXELS)[message]
    with pytest.raises((ValueError, TypeError), match=message):
        vlm.generate(input_ids, max_new_tokens=1, **given | {name: change(given.get(name))})
