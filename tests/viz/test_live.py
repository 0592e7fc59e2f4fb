"""The live page's modules in node, as the page bundles them. Oracle: refvl's own trace of the same pixels and words.

Tolerances: both sides compute in float32, in another order of sums; 1e-3 is about 1e5 roundings of
values of 30.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from shipped import shipped

import refvl
from data.training import scenes
from refvl.paths import DATA
from refvl.positions import mrope_axis_of_pairs
from refvl.positions.evs import compute_retention_mask
from refvl.viz.live import page as live_page

NODE = shutil.which("node")
pytestmark = [
    pytest.mark.skipif(
        NODE is None, reason="no node: these tests run the page's modules in it (apt-get install nodejs)"
    ),
    pytest.mark.thorough,
]
DRIVER, SEARCH = (Path(__file__).with_name(f"live_{name}.mjs") for name in ("driver", "search"))
MODULES = ["worker", "words", "tokenizer"]
CHECKPOINTS = list(live_page.LIVE)
CASES = [("tiny-qwen2_5_vl", "picture"), ("tiny-qwen2_5_vl", "clip"), ("tiny-qwen3_vl", "picture")]
LACKS = {"tiny-qwen2_5_vl": {"deep"}, "tiny-qwen3_vl": {"unsorted", "open", "unsortedBack", "back", "evs"}}
NAMES = set(re.findall(r"^  (\w+): \{ stage", (live_page.FOLDER / "breaks.js").read_text(), re.M))
STAGES = "rows order cuts states tokens deeper embeds positions logits lastStates look"
KINDS = {"picture": ["place", "color", "shape", "count", "thing_at", "row"], "clip": ["motion", "mover", "color"]}


def run_node(folder: Path, modules: list[str], script: str, *more: str, **given: np.ndarray) -> bytes:
    """The bytes that a script writes to `out` after the page's modules. given: arrays that it reads from files."""
    for name, values in given.items():
        (folder / name).write_bytes(np.ascontiguousarray(values).tobytes())
    parts = ['import fs from "node:fs";', live_page.source(*modules), script]
    (folder / "all.mjs").write_text("\n".join(parts), encoding="utf-8")
    command = [str(NODE), "all.mjs", str(folder), *more]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return (folder / "out").read_bytes()


def run_jobs(folder: Path, checkpoint: str, jobs: list[dict], *, quantized: bool) -> list[dict]:
    """Jobs of {kind, question, frames: (T, 84, 84, 3) uint8, ...}, answered by the page's model in one process."""
    source = DATA / "checkpoints" / checkpoint
    weights, meta = live_page.packed(source, quantized=quantized)
    (folder / "weights.bin").write_bytes(weights)
    (folder / "setup.json").write_text(json.dumps({"meta": meta} | live_page.settings(source)))
    frames, written = {}, []
    for number, job in enumerate(jobs):
        own = {f"{number}_{i}.rgb": frame for i, frame in enumerate(job.get("frames", ()))}
        written.append(job | ({"frames": list(own)} if own else {}))
        frames |= own
    (folder / "jobs.json").write_text(json.dumps(written))
    script = DRIVER.read_text(encoding="utf-8")
    return json.loads(run_node(folder, MODULES, script, **frames))


def asked(kind: str, number: int) -> dict:
    """Held-out scene `number` with a question about it."""
    scene = scenes.draw_scene("test", number, clip=kind == "clip")
    kinds = KINDS[kind]
    rng = np.random.default_rng(number)
    [question] = scenes.draw_questions(scene, [kinds[number % len(kinds)]], rng)
    frames = scenes.render(scene)
    return {"kind": kind, "question": question.text, "frames": frames.reshape(-1, 84, 84, 3)}


def media(job: dict) -> dict:
    """The same pixels for refvl."""
    if job["kind"] == "clip":
        return {"videos": [job["frames"]]}  # at the two frames per second of the checkpoint
    return {"images": [Image.fromarray(job["frames"][0])]}


@pytest.mark.parametrize(("checkpoint", "kind"), CASES)
def test_every_stage_is_refvls(checkpoint, kind, tmp_path):
    """Rows and indices are equal, also behind a resize; floats agree to 1e-3, in float32."""
    model = shipped(checkpoint)
    job = asked(kind, 3) | {"keep": STAGES.split()}
    [found] = run_jobs(tmp_path, checkpoint, [job], quantized=False)
    trace = model.trace(job["question"], **media(job), hidden_states=True, attentions=True)
    width = len(trace.inputs_embeds[0])

    def agree(got, want):
        torch.testing.assert_close(torch.tensor(got).flatten().float(), want.flatten().float(), rtol=0, atol=1e-3)

    assert found["ids"] == trace.full_ids.tolist()
    assert found["rows"] == trace.patches[0].pixel_values.flatten().tolist()
    plan = trace.metadata[0]
    if hasattr(plan, "window_index"):
        assert found["order"] == plan.window_index.tolist() and found["cuts"] == plan.cu_window_seqlens.tolist()
    else:
        assert found["cuts"] == plan.cu_seqlens.tolist()
    for got, want in zip(found["states"], trace.tower_hidden_states, strict=True):
        agree(got, want.unflatten(0, (-1, 4))[torch.tensor(found["order"])])
    first, *deeper = trace.embeds[0].split(width, dim=1)
    agree(found["tokens"], first)
    for got, want in zip(found["deeper"], deeper, strict=True):
        agree(got, want)
    agree(found["embeds"], trace.inputs_embeds)
    agree(found["positions"], trace.positions)
    last = len(trace.input_ids) - 1
    for got, want in zip(found["lastStates"][:-1], trace.hidden_states[:-1], strict=True):  # the last is normed
        agree(got, want[last])
    agree(found["logits"], model.language_model.lm_head(trace.hidden_states[-1][last]))
    agree(found["look"], torch.stack([layer[:, last, : last + 1] for layer in trace.attentions]))
    assert found["text"] == trace.text


def with_weights_of_the_page(checkpoint: str, folder: Path):
    """refvl's model with the weights that the page reads: each row a scale times integers."""
    source = DATA / "checkpoints" / checkpoint
    copy = shutil.copytree(source, folder / checkpoint, dirs_exist_ok=True)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        if values.ndim < 2:
            return values
        packed = live_page.as_int8(values.float().flatten(1).numpy())
        count = len(values)
        levels = np.frombuffer(packed, "i1", offset=4 * count).reshape(values.shape)
        scale = np.frombuffer(packed, "<f4", count).reshape(-1, *[1] * (values.ndim - 1))
        return torch.from_numpy(levels * scale)

    tensors = {name: rounded(values) for name, values in load_file(source / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return refvl.load(copy, device="cpu", progress=False)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_answers_are_refvls(checkpoint, count, tmp_path):
    """Ids of held-out scenes, in float32, and in int8, where refvl has the same rounded weights."""
    kinds = [kind for name, kind in CASES if name == checkpoint]
    jobs = [asked(kinds[i % len(kinds)], 1000 + i) for i in range(count)]
    for quantized, model in ((False, shipped(checkpoint)), (True, with_weights_of_the_page(checkpoint, tmp_path))):
        eos = model.language_model.generation_config.eos_token_id
        want = [model.trace(job["question"], **media(job)).token_ids for job in jobs]
        found = [job["out"] for job in run_jobs(tmp_path, checkpoint, jobs, quantized=quantized)]
        assert found == [[i for i in ids if i not in eos] for ids in want]


def test_breaks_change_what_they_say(tmp_path):
    """Swapped h and w: the transposed place. Reversed t: the opposite way. Its place left out: no object.

    Oracle: the scene.
    """
    drawn = (scenes.draw_scene("test", i) for i in range(99))
    scene = next(scene for scene in drawn if scene.things[0].place in (1, 2, 3, 5, 6, 7))
    thing, place = scene.things[0], scene.things[0].place
    question = f"Where is the {thing.color} {thing.shape}?"
    job = {"kind": "picture", "question": question, "frames": scenes.render(scene)[None]}
    clip = scenes.draw_scene("test", 5, clip=True)
    moved = {"kind": "clip", "question": "Which way does the object move?", "frames": scenes.render(clip)}
    things = [{"shape": t.shape, "color": t.color, "place": t.place} for t in scene.things]
    jobs = [
        job,
        job | {"broken": "swap", "isBroken": True},
        job | {"broken": "drop", "isBroken": True, "things": things},
    ]
    jobs += [moved, moved | {"broken": "back", "isBroken": True}]
    said = [found["text"].strip() for found in run_jobs(tmp_path, "tiny-qwen2_5_vl", jobs, quantized=True)]
    assert said[:2] == [scenes.PLACES[place], scenes.PLACES[scenes.TRANSPOSED[place]]]
    assert said[2] == f"There is no {thing.color} {thing.shape}."
    assert said[3:] == [clip.direction, scenes.OPPOSITE[clip.direction]]


def apart(a, b) -> float:
    a, b = (np.asarray(values, np.float64).ravel() for values in (a, b))
    return float(np.linalg.norm(a - b) / np.sqrt(a @ a + b @ b))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_how_far_a_fault_travels_is_refvls(checkpoint, tmp_path):
    """Oracle: numpy, on refvl's traces of the image and of the image with red and blue exchanged; on its positions."""
    model, job = shipped(checkpoint), asked("picture", 3)
    jobs = [job | {"broken": broken, "isBroken": True} for broken in ("bgr", "swap")]
    bgr, swap = (found["change"] for found in run_jobs(tmp_path, checkpoint, jobs, quantized=False))
    a, b = (
        model.trace(job["question"], images=[Image.fromarray(p)])
        for p in (job["frames"][0], job["frames"][0][..., ::-1])
    )
    want = {"patches": apart(a.patches[0].pixel_values, b.patches[0].pixel_values), "positions": 0.0}
    want |= {
        "tokens": apart(*(t.embeds[0].split(128, dim=1)[0] for t in (a, b))),
        "prompt": apart(a.inputs_embeds, b.inputs_embeds),
    }
    assert {stage: bgr[stage] for stage in want} == pytest.approx(want, abs=1e-4)
    rope = model.language_model.config.rope_parameters
    axes = mrope_axis_of_pairs(rope["mrope_section"], interleaved=rope.get("mrope_interleaved", False)).numpy()
    turns = [
        a.positions.numpy()[order][axes] * 5.0 ** (-np.arange(16) / 16)[:, None] for order in ([0, 1, 2], [0, 2, 1])
    ]
    placed = a.full_ids == model.processor.token_ids["image"]
    turns[1][:, ~placed.numpy()] = turns[0][:, ~placed.numpy()]
    assert swap["positions"] == pytest.approx(apart(*(np.stack([np.cos(t), np.sin(t)]) for t in turns)), abs=1e-5)
    assert swap["prompt"] == swap["tokens"] == 0 < swap["attention"]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_each_thing_exchanged_has_an_answer_that_changes(checkpoint, tmp_path):
    """As live_search.mjs found them. RECORD=1 searches again, in minutes. Oracle: the scene, for the intact answers."""
    if os.environ.get("RECORD") == "1":
        run_jobs(tmp_path, checkpoint, [], quantized=True)
        kept = json.loads(live_page.BITES.read_text())
        kept[checkpoint] = json.loads(run_node(tmp_path, MODULES, SEARCH.read_text(), "24"))
        live_page.BITES.write_text(json.dumps(kept, indent=1) + "\n")
    bites = live_page.bites(checkpoint)
    assert set(bites) == NAMES - LACKS[checkpoint]
    jobs = [bite | {"question": bite["q"], "broken": name, "isBroken": True} for name, bite in bites.items()]
    for bite, found in zip(bites.values(), run_jobs(tmp_path, checkpoint, jobs, quantized=True), strict=True):
        assert [found["intact"], found["text"]] == bite["said"] and found["intact"] == found["truth"] != found["text"]
        assert found["sure"] == pytest.approx(bite["sure"], abs=1e-3)
        assert 0 < bite["changed"] <= bite["asked"]


def cause_of(broken: str, question: str, things: list[dict]) -> set[str]:
    """Why an answer may survive, from the scene alone."""
    named = [t for t in things if {t["shape"], t["color"]} & set(re.findall(r"\w+", question))]
    there = [t for t in things if question == f"What is in the {scenes.PLACES[t['place']]}?"]
    [place] = [t["place"] for t in named or there] or [None]
    if broken not in ("swap", "one"):
        return {"lead"}
    if place is None and "How many" not in question:
        return {"absent"}
    if not question.startswith(("Where", "Which row", "What is in")):
        return {"found", "lead"}
    if broken == "swap":
        return {"diagonal"} if place in (0, 4, 8) else {"row"} if question.startswith("Which row") else {"lead"}
    return {"corner"} if place == 0 or (place < 3 and question.startswith("Which row")) else {"lead"}


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_it_says_why_an_answer_survives(checkpoint, count, tmp_path):
    """Drawn scenes x everything that can be exchanged. Oracle: `cause_of`, which sees the scene and not the record."""
    jobs = []
    for number, name in itertools.product(range(count), sorted(NAMES - LACKS[checkpoint] - {"back", "evs"})):
        rng = np.random.default_rng([7, number])
        parts = (rng.permutation(values)[:3].tolist() for values in (scenes.SHAPES, list(scenes.COLORS), range(9)))
        things = [dict(zip(("shape", "color", "place"), part, strict=True)) for part in zip(*parts, strict=True)]
        absent = next(shape for shape in scenes.SHAPES if shape not in [t["shape"] for t in things])
        shape, color, place = things[number % 3].values()
        asks = [f"Where is the {shape}?", f"What shape is the {color} object?", f"Which row is the {shape} in?"]
        asks += [f"What is in the {scenes.PLACES[place]}?", "How many objects are there?", f"Where is the {absent}?"]
        jobs += [
            {"kind": "picture", "question": q, "things": things, "old": things[:1], "broken": name, "isBroken": True}
            for q in asks
        ]
    survived = set()
    for job, found in zip(jobs, run_jobs(tmp_path, checkpoint, jobs, quantized=True), strict=True):
        if found["text"] == found["intact"]:
            survived.add(found["cause"])
            assert found["cause"] in cause_of(job["broken"], job["question"], job["things"]), job
    assert survived >= {"absent", "found", "lead"}


@pytest.mark.parametrize(
    "size", [(84, 84, 96, 96), (168, 168, 84, 84), (300, 451, 84, 126), (61, 97, 112, 84), (5, 4, 9, 3)]
)
def test_resize_is_pillows(size, tmp_path):
    """Bit for bit. Oracle: Pillow."""
    height, width, new_height, new_width = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    sizes = ", ".join(map(str, size))
    script = f'fs.writeFileSync("out", resize(new Uint8Array(fs.readFileSync("pixels")), {sizes}));'
    found = np.frombuffer(run_node(tmp_path, ["pixels"], script, pixels=pixels), np.uint8)
    want = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BICUBIC))
    assert (found == want.ravel()).all()


def test_paint_is_that_of_the_training_scenes(tmp_path):
    """Every shape, colour and place, to one level of 255. Oracle: data/training/scenes.py without noise and slope."""
    places = enumerate((scenes.SHAPES * 2)[:9])
    things = [(shape, color, place) for place, shape in places for color in scenes.COLORS]
    script = f"""
const at = place => {{ const [x, y] = centre(place); return {{ x, y }}; }};
const painted = ([shape, color, place]) => paint([{{ shape, color, ...at(place) }}]);
fs.writeFileSync("out", Buffer.concat({json.dumps(things)}.map(painted)));"""
    found = np.frombuffer(run_node(tmp_path, ["pixels"], script), np.uint8).reshape(len(things), 84, 84, 3)
    for got, (shape, color, place) in zip(found, things, strict=True):
        center = (28 * (place % 3 + 0.5), 28 * (place // 3 + 0.5))
        rgb = tuple(map(float, scenes.COLORS[color]))
        thing = scenes.Thing(shape, color, place, center, 10.5, 0.0, rgb)
        scene = scenes.Scene((thing,), (226.0, 224.0, 219.0), (0.0, 0.0), 0.0, 0, None)
        assert abs(got.astype(int) - scenes.render(scene)).max() <= 1, (shape, color, place)


def test_tokenizer_is_that_of_the_checkpoint(tmp_path):
    """Ids of phrases, of special tokens as plain text, and of text in other scripts. Oracle: tokenizers."""
    phrases = itertools.chain(*scenes.PHRASES.values())
    texts = [phrase.format(x="red star") for phrase in phrases]
    texts += ["I'll  see\n\n what's 12 at <|im_end|>?", "naïve café", "e\u0301", "日本語 and Ελληνικά"]
    texts += ["🙂!? \t x", "a\r\nb", " "]
    for checkpoint in CHECKPOINTS:
        folder = DATA / "checkpoints" / checkpoint
        script = f"""
const words = makeTokenizer({json.dumps(live_page.vocabulary(folder))}), texts = {json.dumps(texts)};
const found = texts.map(text => [words.encode(text), words.decode(words.encode(text))]);
fs.writeFileSync("out", JSON.stringify(found));"""
        found = json.loads(run_node(tmp_path, ["tokenizer"], script))
        encode = shipped(checkpoint).processor.tokenizer
        want = [encode(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts]
        assert [ids for ids, _ in found] == want
        assert [said for _, said in found] == [unicodedata.normalize("NFC", text) for text in texts]


def test_half_of_a_clip_is_dropped_as_evs_does(tmp_path):
    """The rule of the page's button, in its words, on the embeddings.

    Oracle: `compute_retention_mask` at 0.5.
    """
    job = asked("clip", 7) | {"keep": ["tokens"]}
    [found] = run_jobs(tmp_path, "tiny-qwen2_5_vl", [job], quantized=False)
    tokens = json.dumps(found["tokens"])
    script = f'fs.writeFileSync("out", JSON.stringify(unchanged(Float32Array.from({tokens}), 27, 0.5)));'
    dropped = json.loads(run_node(tmp_path, ["evs"], script))
    mask = compute_retention_mask(torch.tensor(found["tokens"]).view(27, -1), (3, 3, 3), 1, 0.5)
    assert dropped == (~mask).nonzero().flatten().tolist()
