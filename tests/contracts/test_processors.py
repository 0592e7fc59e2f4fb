"""What every processor must do, one row each. Oracles: the encoder's own counts, the folder's tokenizer and template,
and the same prompt without the words in question.
"""

import itertools
import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_factory import make_checkpoint, make_glm_checkpoint, make_qwen3_checkpoint, make_step3_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from random_models import HAS_5_23, MAKERS, load
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from refvl import families, loading
from refvl.merge import find_media_spans
from refvl.paths import DATA
from refvl.pixels.media import Video
from refvl.processors.minicpmv import PLACEHOLDERS, MiniCPMVProcessor

CHECKPOINTS = DATA / "checkpoints"


@dataclass(frozen=True)
class Row:
    """source: a shipped folder, or what writes a random one into a folder. unread: files that no setting comes from."""

    source: object
    takes_videos: bool = True
    has_own_template: bool = False
    unread: tuple[str, ...] = ()


SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
ROWS = {
    "Qwen2.5-VL": Row(CHECKPOINTS / "tiny-qwen2_5_vl"),
    "Qwen2.5-VL, random": Row(make_checkpoint),
    "Qwen3-VL": Row(lambda folder: make_qwen3_checkpoint(folder, "qwen3_vl")),
    "Qwen3.5": Row(lambda folder: make_qwen3_checkpoint(folder, "qwen3_5")),
    "GLM-4.1V": Row(CHECKPOINTS / "tiny-glm4v"),
    "GLM-4.6V-Flash": Row(lambda folder: make_glm_checkpoint(folder, "glm4v", "Glm46VProcessor")),
    "GLM-GA": Row(lambda folder: make_glm_checkpoint(folder, "glmga", "Glm46VProcessor")),
    "GLM-OCR": Row(lambda folder: make_glm_checkpoint(folder, "glm_ocr", "Glm46VProcessor")),
    "Step3-VL": Row(CHECKPOINTS / "tiny-step3", takes_videos=False, unread=SETTINGS),
    "Step3-VL, random": Row(make_step3_checkpoint, takes_videos=False, unread=SETTINGS),
    **({"Step3-VL-10B": Row(MAKERS["Step3-VL-10B"], takes_videos=False, unread=SETTINGS)} if HAS_5_23 else {}),
    **({"MiniCPM-V 4.7": Row(MAKERS["MiniCPM-V 4.7"], unread=SETTINGS[1:2])} if HAS_5_23 else {}),
    "MiniCPM-V 2.0": Row(MAKERS["MiniCPM-V 2.0"], takes_videos=False, has_own_template=True, unread=SETTINGS[1:]),
    "MiniCPM-V 2.5": Row(MAKERS["MiniCPM-V 2.5"], takes_videos=False, unread=SETTINGS[1:]),
    "MiniCPM-V 2.6": Row(MAKERS["MiniCPM-V 2.6"], unread=SETTINGS[1:2]),
    "MiniCPM-V 4.0": Row(MAKERS["MiniCPM-V 4.0"], unread=SETTINGS[1:2]),
    "MiniCPM-V 4.5": Row(CHECKPOINTS / "tiny-minicpmv-4_5", unread=SETTINGS[1:2]),
}
WITH_VIDEOS = [name for name, row in ROWS.items() if row.takes_videos]
RELEASED = sorted(path.stem for path in (DATA / "configs").glob("*.json"))
NOISE = np.random.default_rng(0).integers(0, 256, (5, 150, 100, 3), dtype=np.uint8)
LARGE, SMALL = Image.fromarray(NOISE[0]), Image.fromarray(NOISE[1, :50, :60])
every = pytest.mark.parametrize("name", ROWS)


@dataclass(frozen=True)
class Parts:
    folder: Path
    processor: object
    encoder: object  # on meta: it counts and plans, but has no weights


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """name -> Parts, built when asked for."""

    @cache
    def build(name: str) -> Parts:
        folder = ROWS[name].source
        if not isinstance(folder, Path):
            folder = tmp_path_factory.mktemp("processors") / "folder"
            ROWS[name].source(folder)
        config = families.read_config(folder)
        return Parts(folder, families.load_processor(folder, config), meta_encoder(config))

    return build


@cache
def planners(name: str):
    """(processor, encoder) of a released config, without files and weights."""
    config = families.read_config(DATA / "configs" / f"{name}.json")
    return families.load_processor(None, config), meta_encoder(config)


def meta_encoder(config):
    return loading.empty_encoder(config, dtype=torch.float32, device="meta", attention="auto")


def video(frames: int, width: int, height: int, fps: float = 2.0) -> Video:
    """Black frames that take no memory."""
    black = np.broadcast_to(np.uint8(0), (frames, height, width, 3))
    return Video(black, fps, fps, tuple(range(frames)), frames, frames / fps)


def user(*content) -> dict:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"role": "user", "content": parts}


def image(picture) -> dict:
    return {"type": "image", "image": picture}


def merged_of(processor, messages) -> list:
    return [patches.media_tokens for patches in processor.patchify(processor.decode(messages))]


def tokenize(processor, prompt, **options) -> list[int]:
    messages = processor.messages(prompt)
    return processor.tokenize(messages, merged_of(processor, messages), **options)


# --- one truth: layouts and tokens -----------------------------------------------------------------------------------


def check_tokens(processor, encoder, kind: str, medium) -> None:
    layout = processor.layout_of(medium)
    assert list(encoder.check_layouts([layout])) == [layout] and hash(layout) is not None
    rows, tokens, _ = encoder.item_size(layout)
    merged = processor.media_tokens(kind, layout)
    assert merged.num_tokens == tokens == sum(t * h * w for t, h, w in merged.runs)
    assert tokens % processor.tokens_at_once == 0 and rows >= 1


SIDES = st.integers(20, 3000)


@pytest.mark.parametrize("name", [*ROWS, *RELEASED])
@settings(max_examples=40)
@given(width=SIDES, height=SIDES, frames=st.integers(1, 40))
def test_processor_and_encoder_count_the_same_tokens(parts, name, width, height, frames):
    """Oracle: `encoder.item_size` of the processor's layout, from which it splits its output."""
    processor, encoder = planners(name) if name in RELEASED else (parts(name).processor, parts(name).encoder)
    check_tokens(processor, encoder, "image", Image.new("1", (width, height)))
    square = processor.media_tokens("image", processor.layout_of(Image.new("1", (width, width))))
    assert square.num_tokens <= processor.largest_picture
    if processor.video_config is not None:
        check_tokens(processor, encoder, "video", video(frames, width, height))


@every
@settings(max_examples=8)
@given(width=st.integers(28, 300), height=st.integers(28, 300), frames=st.integers(1, 7))
def test_layout_rows_and_placeholders_agree(parts, name, width, height, frames):
    """What is planned is what is patchified, is what stands in the prompt, is what is found there again."""
    processor, encoder = parts(name).processor, parts(name).encoder
    media = [Image.new("RGB", (width, height)), LARGE]
    content = [image(media[0]), "a", image(LARGE), "b"]
    if ROWS[name].takes_videos:
        media.append(video(frames, width, height))
        content += [{"type": "video", "video": media[-1]}, "c"]
    patches = processor.patchify(media)
    for medium, patched in zip(media, patches, strict=True):
        assert processor.layout_of(medium) == patched.layout
        rows, tokens, _ = encoder.item_size(patched.layout)
        assert len(patched.pixel_values) == rows and patched.pixel_values.dtype == torch.float32
        assert patched.pixel_values.shape[1] == encoder.config.patch_values
        assert patched.media_tokens.num_tokens == tokens and patched.source is medium
    merged = [patched.media_tokens for patched in patches]
    ids = torch.tensor(processor.tokenize(processor.messages([user(*content)]), merged))
    found = processor.placeholders(ids)
    for kind, token in processor.token_ids.items():
        assert (found == token).sum() == sum(m.num_tokens for m in merged if m.kind == kind)
    spans = find_media_spans(found, merged, processor.token_ids)
    assert [(s.t, s.h, s.w) for s in spans] == [thw for m in merged for thw in m.runs]
    assert [s.offset for s in spans] == sorted(s.offset for s in spans)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in WITH_VIDEOS])
def test_videos_are_refused_by_name(parts, name):
    processor = parts(name).processor
    assert processor.video_config is None
    with pytest.raises(ValueError, match="videos: .* images only"):
        processor.decode(processor.messages("Hi", videos=[NOISE]))


def test_blocks_of_another_size_are_refused(parts, tmp_path):
    """The rows would lie in another order than the encoder reads them."""
    folder = shutil.copytree(parts("Qwen2.5-VL").folder, tmp_path / "folder")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"merge_size": 4}))
    with pytest.raises(ValueError, match="merge_size: expected the tower's spatial_merge_size, 2, got {"):
        families.load_processor(folder, families.read_config(folder))


# --- text: only the template writes special tokens -------------------------------------------------------------------

ORDINARY = (
    "What is it?", "", "  spaces \n\n", "a < b, [x] (y) <b>bold</b> </div>", "用户 \ue000 é \U0001f600", "<|im_", "|>",
)  # fmt: skip


@every
@pytest.mark.parametrize("words", ORDINARY)
def test_ordinary_prompts_are_the_template_tokenized(parts, name, words):
    """Oracle: the folder's tokenizer on its template's text; some of MiniCPM-V
    begin with a token of their own."""
    folder, processor = parts(name).folder, parts(name).processor
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "Yes."}, user("And", words)]
    joined = messages
    if isinstance(processor, MiniCPMVProcessor):
        joined = [*messages[:2], {"role": "user", "content": f"And\n{words}"}]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = processor.tokenizer.chat_template
    written = tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
    expected = tokenizer(written, add_special_tokens=False)["input_ids"]
    ours = tokenize(processor, messages)
    if ours[0] == tokenizer.bos_token_id and expected[0] != ours[0]:
        expected = [ours[0], *expected]
    assert ours == expected
    assert processor.encode(*processor.render(processor.messages(messages))) == processor.encode(written)


def marks_of(processor) -> list[str]:
    """Every special token of the vocabulary, and what MiniCPM-V writes where a medium goes."""
    special = [t.content for t in processor.tokenizer.added_tokens_decoder.values() if t.special]
    return special + (list(PLACEHOLDERS.values()) if isinstance(processor, MiniCPMVProcessor) else [])


def typed(mark: str) -> list[list[dict]]:
    """Prompts in which a user types `mark`: before and behind an image, in an earlier turn, in two parts."""
    half = len(mark) // 2
    return [
        [user(mark, image(LARGE), f"a{mark}b{mark}")],
        [{"role": "user", "content": f"{mark} x"}, {"role": "assistant", "content": mark}, user(image(LARGE), "why?")],
        [{"role": "system", "content": f"x{mark}"}, user(mark[:half], mark[half:], image(LARGE), mark)],
    ]


@every
def test_special_tokens_in_a_users_text_are_text(parts, name):
    """Oracle: the same prompt with another word.

    Turns, media and placeholders are as many, and the words are read.
    """
    processor = parts(name).processor
    special = {i for i, t in processor.tokenizer.added_tokens_decoder.items() if t.special}
    merged = merged_of(processor, processor.messages([user(image(LARGE))]))
    for mark in marks_of(processor):
        for prompt, neutral in zip(typed(mark), typed("word"), strict=True):
            ids, other = (processor.tokenize(processor.messages(p), merged) for p in (prompt, neutral))
            assert [i for i in ids if i in special] == [i for i in other if i in special], mark
            spans = find_media_spans(processor.placeholders(torch.tensor(ids)), merged, processor.token_ids)
            assert sum(span.num_tokens for span in spans) == merged[0].num_tokens
            times = str(prompt).count(mark)
            assert processor.text(ids).replace("\n", "").count(mark) >= times, mark


@every
def test_special_tokens_may_be_allowed(parts, name):
    """Oracle: the tokenizer on the template's text, as before."""
    processor = parts(name).processor
    placeholders = {processor.tokenizer.convert_ids_to_tokens(i) for i in processor.token_ids.values() if i >= 0}
    for mark in set(marks_of(processor)) - placeholders - set(PLACEHOLDERS.values()):
        messages = processor.messages([user(f"a{mark}b")])
        ids = processor.tokenize(messages, [], allow_special_tokens=True)
        mark_id = processor.tokenizer.convert_tokens_to_ids(mark)
        assert ids.count(mark_id) == 1 + processor.tokenize(processor.messages([user("ab")]), []).count(mark_id)
    kinds = PLACEHOLDERS.keys() if isinstance(processor, MiniCPMVProcessor) else set()
    for mark in (placeholders - {"<unk>"}) | kinds:
        typed_in = processor.messages(f"a {PLACEHOLDERS.get(mark, mark)}")
        assert processor.tokenize(typed_in, [])
        with pytest.raises(ValueError, match=r"prompt: its placeholders are \['(image|video)'\], but the media given"):
            processor.tokenize(typed_in, [], allow_special_tokens=True)


# --- folders: what is missing or damaged is named ---------------------------------------------------------------------


def copy_of(folder: Path, tmp_path: Path) -> Path:
    """The folder's files without its weights."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, copy)
    return copy


def set_template(folder: Path, template: str | None) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    values = {key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}
    file.write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


@every
@pytest.mark.parametrize("template", [None, "", " \n"], ids=["missing", "empty", "blank"])
def test_a_folder_without_chat_template_is_named(parts, name, template, tmp_path):
    """Every family but MiniCPM-V 2.0, whose releases have none."""
    folder = copy_of(parts(name).folder, tmp_path)
    set_template(folder, template)
    config = families.read_config(folder)
    if ROWS[name].has_own_template and template != " \n":
        assert tokenize(families.load_processor(folder, config), "Hi")
    else:
        with pytest.raises(ValueError, match=rf"^{folder}: expected chat_template.jinja, or a chat template in"):
            families.load_processor(folder, config)


@every
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "expected token|unexpected|Expected"),
        ("{{ messages[0].role + 3 }}", "concatenate"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_a_clear_error(parts, name, template, reason, tmp_path):
    folder = copy_of(parts(name).folder, tmp_path)
    set_template(folder, template)
    processor = families.load_processor(folder, families.read_config(folder))
    with pytest.raises(ValueError, match=rf"^prompt: the chat template of this checkpoint .*({reason})"):
        tokenize(processor, "Hi")


JSON_FILES = (
    "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip


DAMAGED = [*itertools.product(JSON_FILES, ("[]", '{"a": ', "\xff")), ("chat_template.jinja", "\xff")]


@every
@pytest.mark.parametrize(("file", "content"), DAMAGED)
def test_damaged_files_are_named(parts, name, file, content, tmp_path):
    """A file that the family does not read may be damaged."""
    folder = copy_of(parts(name).folder, tmp_path)
    config = families.read_config(folder)
    (folder / file).write_bytes(content.encode("latin-1"))
    message = rf"{file}(: expected a JSON object| is not valid JSON)|tokenizer .* cannot be read"
    with pytest.raises(ValueError, match=message) if file not in ROWS[name].unread else nullcontext():
        families.load_processor(folder, config)


SAMPLED = {  # the frames of a file of 132 frames at 25 per second: as the checkpoint says, and as a message says
    "Qwen2.5-VL, random": (10, ({"fps": 1.0}, 4), ({"num_frames": 6}, 6)),
    "Qwen3-VL": (10, ({"fps": 1}, 5), ({"num_frames": 6}, 6), ({"max_frames": 4}, 4), ({"num_frames": 6, "fps": 1}, 0)),
    "GLM-4.1V": (10, ({"fps": 1}, 5), ({"num_frames": 6}, 6), ({"max_frames": 4}, 0)),
    "GLM-4.6V-Flash": (31, ({"max_frames": 8}, 8), ({"fps": 1}, 0)),
    "MiniCPM-V 2.6": (6, ({"max_frames": 3}, 3), ({"num_frames": 5}, 5), ({"min_frames": 3}, 0)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_message_may_set_how_a_video_is_sampled(parts, name):
    """By hand, from the rule of each family; 0 stands for options that the family does not have."""
    usual, *others = SAMPLED[name]
    for options, count in [({}, usual), *others]:
        content = [{"type": "video", "video": str(DATA / "clips" / "bigbuckbunny.mp4"), **options}]
        messages = [{"role": "user", "content": content}]
        if count:
            assert len(parts(name).processor.decode(messages)[0].frames) == count, options
            continue
        with pytest.raises(ValueError, match="for a video, expected .*, or num_frames alone, got"):
            parts(name).processor.decode(messages)


EXTRA = {  # weights of layers that predict more tokens, which no answer needs, and a name that is nobody's
    "Qwen3.5": (["mtp.fc.weight"], "model.language_model.layers.99.input_layernorm.weight"),
    "GLM-OCR": (["model.language_model.layers.16.eh_proj.weight"], "model.language_model.layers.17.eh_proj.weight"),
}


@pytest.mark.parametrize("name", EXTRA)
def test_layers_that_predict_more_tokens_are_left_out_and_only_they(name, tmp_path):
    ROWS[name].source(tmp_path)
    expected = load(tmp_path).trace("Hi", max_new_tokens=4).token_ids
    weights = load_file(tmp_path / "model.safetensors")
    left_out, unknown = EXTRA[name]
    extra = {key: torch.ones(2) for key in left_out}
    save_file(weights | extra, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path).trace("Hi", max_new_tokens=4).token_ids == expected
    save_file(weights | {unknown: torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected \(1\)"):
        load(tmp_path)
