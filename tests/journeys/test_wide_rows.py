"""Rows that are wider than the language model: deeper features of a tower travel beside the embeddings (deepstack).

The tower is Qwen2.5-VL's with two linear maps of its rows appended, the text model transformers' `Qwen3VLTextModel`.
Oracle: that model given the whole sequence at every step, without a cache and without padding, with the lists that its
authors' own code makes; so no code of refvl says where the deeper features go.
"""

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint
from torch import nn
from transformers import AutoConfig

import refvl
from refvl.language.model import CausalTextModel
from refvl.paths import DATA
from refvl.serving.export import encode_folder, read_embeddings

PHOTOS = [DATA / "pictures" / f"{name}.jpg" for name in ("coffee", "chelsea", "rocket")]
FRAMES = np.random.default_rng(0).integers(0, 256, (6, 90, 120, 3), dtype=np.uint8)
DEEPER, NEW_TOKENS = 2, 8


class WideEncoder(nn.Module):
    """(M, D * (1 + k)) rows from an encoder of (M, D) rows."""

    def __init__(self, inner, hidden_size):
        super().__init__()
        self.inner, self.deeper = inner, nn.Linear(hidden_size, DEEPER * hidden_size, bias=False)
        nn.init.normal_(self.deeper.weight, std=0.3, generator=torch.Generator().manual_seed(1))

    def __getattr__(self, name):
        """All that an encoder offers besides its rows."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, pixel_values, layouts=None, *, metadata=None, attention=None):
        embeds = self.inner(pixel_values, layouts, metadata=metadata, attention=attention)
        return torch.cat([embeds, self.deeper(embeds)], dim=1)


class DeepstackTextModel(CausalTextModel):
    """What a family with deeper features adds: how wide its rows are, and transformers' words for them."""

    @property
    def row_width(self):
        return self.config.hidden_size * (1 + DEEPER)

    def forward(self, *args, deepstack_embeds=None, **kwargs):
        if deepstack_embeds is not None:
            visual = deepstack_embeds.any(-1)
            kwargs |= {
                "visual_pos_masks": visual,
                "deepstack_visual_embeds": list(deepstack_embeds[visual].chunk(DEEPER, dim=-1)),
            }
        return super().forward(*args, **kwargs)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    narrow = refvl.load(make_checkpoint(tmp_path_factory.mktemp("checkpoint")), device="cpu", progress=False)
    sizes = narrow.language_model.config
    config = AutoConfig.for_model(
        "qwen3_vl_text", vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    text, generator = DeepstackTextModel(config).eval(), torch.Generator().manual_seed(1)
    for parameter in text.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3, generator=generator)
    return refvl.VLM(narrow.config, narrow.processor, WideEncoder(narrow.encoder, sizes.hidden_size).eval(), text)


@torch.inference_mode()
def oracle_ids(vlm, trace, new_tokens=NEW_TOKENS, *, deeper=True):
    """Greedy ids of a trace's prompt; embeddings and lists are put together here, from the rows of the tower."""
    text, hidden = vlm.language_model, vlm.language_model.config.hidden_size
    rows = [r if keep is None else r[keep] for r, keep in zip(trace.embeds, trace.keep_masks, strict=True)]
    rows = torch.cat(rows) if rows else torch.zeros(0, hidden * (1 + DEEPER))
    ids = trace.full_ids[trace.keep].tolist()
    visual = torch.tensor([i in vlm.token_ids.values() for i in ids])
    features = list(rows[:, hidden:].split(hidden, dim=1)) if deeper and len(rows) else None
    positions, prompt = trace.full_positions[:, trace.keep], len(ids)
    for _ in range(new_tokens):
        more = len(ids) - prompt
        embeds = text.model.embed_tokens(torch.tensor(ids))
        embeds[:prompt][visual] = rows[:, :hidden]
        after = positions.max() + 1 + torch.arange(more).expand(3, -1)
        out = text.model(
            inputs_embeds=embeds[None], position_ids=torch.cat([positions, after], dim=1)[:, None], use_cache=False,
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64), deepstack_visual_embeds=features,
            visual_pos_masks=torch.cat([visual, torch.zeros(more, dtype=torch.bool)])[None],
        )  # fmt: skip
        ids.append(int(text.lm_head(out.last_hidden_state[0, -1]).argmax()))
    return ids[prompt:]


REQUESTS = {
    "one image": {"prompt": "What is it?", "images": PHOTOS[:1]},
    "several images": {"prompt": "And these?", "images": PHOTOS},
    "text": {"prompt": "Where is the circle?"},
    "image and video": {"prompt": "What moves?", "images": PHOTOS[1:2], "videos": [FRAMES]},
    "pruned video": {"prompt": "What moves?", "videos": [FRAMES], "pruning_rate": 0.6},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_ids_equal_the_whole_sequence_without_a_cache(vlm, name):
    trace = vlm.trace(**REQUESTS[name], max_new_tokens=NEW_TOKENS)
    want = oracle_ids(vlm, trace)
    assert trace.token_ids == want and len(set(want)) > 2
    width = vlm.language_model.config.hidden_size
    assert all(embeds.shape[1] == width * (1 + DEEPER) for embeds in trace.embeds)
    assert trace.inputs_embeds.shape[1] == width and trace.deepstack.shape == (len(trace.input_ids), width * DEEPER)
    if trace.embeds:
        assert want != oracle_ids(vlm, trace, deeper=False), "the deeper features must count"


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_left_padded_batch_equals_single_prompts(vlm, options):
    names = ["one image", "text", "several images"]
    traces = [vlm.trace(**REQUESTS[name], max_new_tokens=NEW_TOKENS, **options) for name in names]
    assert vlm.chat_batch([REQUESTS[n] for n in names], max_new_tokens=NEW_TOKENS, **options) == [
        t.text for t in traces
    ]
    if not options:
        assert [t.token_ids for t in traces] == [oracle_ids(vlm, t) for t in traces]


def test_several_sequences_each_have_the_features(vlm):
    """With one candidate per step, sampling is greedy: every copy of the prompt gives the greedy ids."""
    trace = vlm.trace(**REQUESTS["one image"], max_new_tokens=NEW_TOKENS)
    ids = vlm.generate(
        trace.full_ids[None], image_embeds=trace.embeds, image_grid_thw=[p.layout for p in trace.patches],
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=1, num_return_sequences=3,
    )  # fmt: skip
    assert ids[:, len(trace.full_ids) :].tolist() == [trace.token_ids] * 3


@pytest.mark.parametrize("q", [0.0, 0.6])
def test_given_rows_give_the_same_ids(vlm, q):
    trace = vlm.trace("What moves?", images=PHOTOS[:1], videos=[FRAMES], pruning_rate=q, max_new_tokens=NEW_TOKENS)
    image, video = trace.patches
    seconds = [video.media_tokens.t_factor / vlm.config.vision_config.tokens_per_second]
    given = {"image_embeds": trace.embeds[:1], "video_embeds": trace.embeds[1], "second_per_grid_ts": seconds}
    layouts = {"image_grid_thw": [image.layout], "video_grid_thw": [video.layout]}
    ids = vlm.generate(trace.full_ids[None], pruning_rate=q, max_new_tokens=NEW_TOKENS, **given, **layouts)
    assert ids[0, len(trace.full_ids) :].tolist() == trace.token_ids == oracle_ids(vlm, trace)


def test_rows_survive_the_disk(vlm, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "coffee.jpg").write_bytes(PHOTOS[0].read_bytes())
    encode_folder(vlm, pictures, tmp_path / "out", progress=False)
    rows = read_embeddings(tmp_path / "out", "coffee.jpg")
    trace = vlm.trace(**REQUESTS["one image"], max_new_tokens=NEW_TOKENS)
    assert torch.equal(rows, trace.embeds[0])
    ids = vlm.generate(
        trace.full_ids[None], image_embeds=[rows], image_grid_thw=[trace.patches[0].layout], max_new_tokens=NEW_TOKENS
    )
    assert ids[0, len(trace.full_ids) :].tolist() == trace.token_ids


def test_rows_of_another_width_are_refused_by_both_widths(vlm, tmp_path):
    narrow = refvl.load(make_checkpoint(tmp_path), device="cpu", progress=False)
    mixed = refvl.VLM(narrow.config, narrow.processor, vlm.encoder, narrow.language_model)
    hidden = narrow.language_model.config.hidden_size
    with pytest.raises(ValueError, match=f"expected rows of {hidden} values for the language model, got {3 * hidden}"):
        mixed.chat("What is it?", images=PHOTOS[:1])
    trace = vlm.trace(**REQUESTS["one image"], max_new_tokens=1)
    for model, rows, want in ((vlm, trace.embeds[0][:, :hidden], 3 * hidden), (narrow, trace.embeds[0], hidden)):
        with pytest.raises(
            ValueError, match=f"image_embeds.0.: dimension 1 must be {want}, got {rows.shape[1]} channel"
        ):
            model.generate(trace.full_ids[None], image_embeds=[rows], image_grid_thw=[trace.patches[0].layout])
