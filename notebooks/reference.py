"""The API reference of the site: every public name with its signature, docstring, source, test and notebook.

    PUBLIC      -> the modules whose names are public
    entries()   -> one Entry per name: from the docstring and the files that use the name
    page()      -> reference.html, with a search that runs in the page

A name that no test or notebook spells is shown where its file is tested and taught: `HOME`.
"""

import ast
import html
import importlib
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import refvl

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "refvl": "load a model, record a run, compare two",
    "refvl.encoders": "vision encoders, a class per family",
    "refvl.positions": "positions of tokens, and which video tokens are kept",
    "refvl.graphs": "encoder graphs: budgets, capture, replay",
    "refvl.parallel": "items shared by several processes",
    "refvl.boxes": "boxes and points in answers",
    "refvl.serving.adapters": "LoRA adapters",
    "refvl.serving.export": "embeddings for another engine",
    "refvl.viz": "figures and explorers",
}
HOME = {  # the file of a definition: its test, its notebook
    "encoders/glm4v.py": ("encoders/test_grid_towers.py", "06"),
    "encoders/glm_ocr.py": ("encoders/test_grid_towers.py", "06"),
    "encoders/minicpmv.py": ("encoders/test_minicpmv_encoder.py", "07"),
    "encoders/minicpmv4_6.py": ("journeys/test_families_generate.py", "07"),
    "encoders/navit_siglip.py": ("encoders/test_navit_siglip.py", "07"),
    "encoders/siglip_vit.py": ("encoders/test_siglip_vit.py", "07"),
    "encoders/resampler.py": ("encoders/test_resampler.py", "07"),
    "encoders/resampler2.py": ("encoders/test_resampler.py", "07"),
    "encoders/qwen2_5_vl.py": ("contracts/test_encoders.py", "01"),
    "encoders/qwen3_vl.py": ("journeys/test_families_generate.py", "12"),
    "encoders/vision_utils.py": ("encoders/test_vision_info.py", "10"),
    "viz/minicpmv.py": ("viz/test_image_figures.py", "07"),
    "viz/timings.py": ("viz/test_figures.py", "00"),
    "positions/evs.py": ("positions/test_evs.py", "03"),
    "positions/canvas.py": ("positions/test_canvas.py", "07"),
    "positions/mrope.py": ("positions/test_mrope.py", "02"),
    "positions/packed.py": ("positions/test_packed.py", "13"),
    "positions/tables.py": ("positions/test_tables.py", "07"),
    "positions/timestamps.py": ("positions/test_timestamps.py", "06"),
    "positions/vidcom2.py": ("positions/test_vidcom2.py", "03"),
    "graphs/budgets.py": ("graphs/test_graph_budgets.py", "05"),
    "graphs/manager.py": ("graphs/test_graph_manager.py", "04"),
    "model.py": ("journeys/test_generate.py", "00"),
    "serving/export.py": ("tools/test_export.py", "09"),
    "serving/parallel.py": ("journeys/test_parallel.py", "09"),
    "serving/adapters.py": ("journeys/test_adapters.py", "13"),
    "study/boxes.py": ("journeys/test_boxes.py", "12"),
    "study/report.py": ("journeys/test_compare.py", "00"),
    "viz/attention.py": ("journeys/test_watch.py", "02"),
    "viz/evs.py": ("viz/test_image_figures.py", "03"),
    "viz/explore.py": ("project/test_site.py", "00"),
    "viz/families.py": ("project/test_notebooks.py", "10"),
    "viz/glm4v.py": ("project/test_notebooks.py", "06"),
    "viz/graphs.py": ("project/test_notebooks.py", "04"),
    "viz/positions.py": ("viz/test_image_figures.py", "02"),
}
UNITS = {  # unit -> the numeric arguments and fields that count in it; "name.argument" goes before "argument"
    "pixels": "box crop_size image_size max_side patch_size picture resized scale_resolution sides window_size"
    " window_sizes plot_patch_values.size",
    "pixels, or the unit of the boxes": "new_size rescale.size",
    "the model's coordinates": "space xy",
    "patches, tokens or another number": "get_count_assignment.sizes get_load_balance_assignment.sizes grouped_sizes",
    "patches": "grid grid_hw max_size merge_kernel_size patch pictures slices spatial_merge_size tgt_size"
    " understand_projector_stride",
    "entries of the position table": "num_position_embeddings pos_emb_height pos_emb_width",
    "merged tokens": "budget budget_tokens budgets arrivals max_budget min_budget media_cache max_tokens crop_tokens"
    " image_tokens output_tokens path_tokens frame_tokens tokens tokens_per_frame query_num queries side MediaSpan.t"
    " MediaSpan.h MediaSpan.w merged_thw num_queries",
    "prompt tokens": "chunks max_cache_len max_new_tokens num_computed_tokens num_tokens offset pad_to passes"
    " prefill_chunk text delta",
    "token ids": "image_end image_start image_token_id newline slice_end slice_start token_ids video_token_id"
    " vision_start_token_id",
    "frames": "FrameSample.indices frames frames_indices max_frames num_frames pos_emb_time temporal_patch_size"
    " total_num_frames",
    "seconds": "duration max_duration second_per_grid seconds seconds_saved timestamps video_second_per_grid",
    "microseconds": "device_us launch_us",
    "tenths of a second": "max_temporal_size temporal_ids",
    "frames per second": "fps target_fps",
    "positions per second": "tokens_per_second",
    "positions per grid step": "t_factor",
    "positions": "length",
    "channels": "channel",
    "values": "embed_dim head_dim head_size hidden_size in_channels intermediate_size kv_dim num_channels"
    " out_hidden_size output_hidden_size",
    "cells of the table": "sincos_2d.size",
    "rotary pairs": "section",
    "layers": "deepstack_visual_indexes depth fullatt_block_indexes insert_layer_id max_possible_layers"
    " num_hidden_layers select_layers",
    "heads": "num_attention_heads num_heads",
    "queries along a side": "grid_size",
    "items": "assignment counts hits images indices max_items misses order",
    "merge blocks": "highlight",
    "patch rows": "count",
    "panels": "columns",
    "processes": "max_ranks num_gpus ranks",
    "number of the device": "device",
    "as in `unit`": "sizes",
    "pixels, or seconds of a video": "at",
    "(width, height)": "ratios",
    "a share or ratio": "accuracy atol largest layer_norm_eps limits mlp_ratio moved norm_eps pruning_rate q relative"
    " rms_norm_eps rtol speed_up theta waste",
}
SEARCH = """<script>
const box = document.getElementById("search"), found = document.getElementById("found");
const entries = [...document.querySelectorAll("section.entry")];
const texts = entries.map((entry) => entry.textContent.toLowerCase());
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  entries.forEach((entry, i) => {
    const hit = words.every((word) => texts[i].includes(word));
    entry.hidden = !hit;
    count += hit;
  });
  const parts = document.querySelectorAll("div.module");
  parts.forEach((part) => { part.hidden = !part.querySelector("section:not([hidden])"); });
  found.textContent = `${count} of ${entries.length} names`;
});
</script>"""
LOOK = """.entry { border-top: 1px solid var(--line); padding: .2rem 0 .6rem; overflow-wrap: anywhere }
.entry h3 { margin: .6rem 0 .2rem }
.entry .doc { white-space: pre-wrap; margin: .3rem 0 }
#found { display: block } #search { font: inherit; width: 97%; padding: .4rem }"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A public name, with the files that define, test and use it."""

    module: str
    name: str
    signature: str
    doc: str
    source: str  # file in the repository
    line: int  # of its definition; 0 for values
    test: str  # file in the repository
    notebook: str  # without its suffix
    is_shown: bool  # whether the notebook uses the name; otherwise it explains the file of the name

    @property
    def anchor(self) -> str:
        """The id of its section in the page."""
        return f"{self.module}.{self.name}"


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield (module, name, object) of every public name: those in `__all__`, or else defined in the module's file."""
    for module in PUBLIC:
        room = getattr(refvl, module.removeprefix("refvl."), None) or importlib.import_module(module)
        names = getattr(room, "__all__", None) or [
            name
            for name, value in vars(room).items()
            if not name.startswith("_")
            and (inspect.isroutine(value) or inspect.isclass(value))
            and value.__module__.split(".")[-1] == module.split(".")[-1]
        ]
        yield from ((module, name, unwrapped(getattr(room, name))) for name in names)


def unwrapped(value: Any) -> Any:
    """Return the function inside decorators such as torch's; return any other object unchanged."""
    return inspect.unwrap(value) if inspect.isfunction(value) else value


@cache
def texts(pattern: str) -> dict[str, str]:
    """Return the text of files by path in the repository; for notebooks, the text of the cells."""
    found = {}
    for path in sorted(ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found[path.relative_to(ROOT).as_posix()] = text
    return found


@cache
def words(pattern: str) -> dict[str, Counter[str]]:
    """Return how often each word stands in each of the `texts`."""
    return {path: Counter(re.findall(r"\w+", text)) for path, text in texts(pattern).items()}


def most_uses(name: str, pattern: str) -> str:
    """Return the file that contains the word `name` most often; "" if none does."""
    counts = words(pattern)
    best = max(counts, key=lambda path: counts[path][name])
    return best if counts[best][name] else ""


def entries() -> list[Entry]:
    """Return all public names. Raises KeyError, naming the file, for a name without a test or a notebook."""
    books = {Path(path).name[:2]: Path(path).stem for path in texts("notebooks/[0-9]*.ipynb")}
    made = []
    for module, name, value in public():
        if callable(value):
            source = Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT).as_posix()
            line = inspect.findsource(value)[1] + 1
            is_error = isinstance(value, type) and issubclass(value, Exception)
            signature = name + ("(message)" if is_error else str(inspect.signature(value)))
        else:
            source, line, signature = f"{module.replace('.', '/')}/vidcom2.py", 0, name
        home = source.removeprefix("refvl/")
        test = most_uses(name, "tests/**/test_*.py") or f"tests/{HOME[home][0]}"
        shown = Path(most_uses(name, "notebooks/[0-9]*.ipynb")).stem
        notebook = shown or books[HOME[home][1]]
        doc = (
            docstring(value) if callable(value) else f"Keys: {', '.join(map(repr, value))}; see `{module}.find_pruner`."
        )
        if counted := units(value, name):
            doc += "\n\nUnits: " + "; ".join(f"{argument}: {unit}" for argument, unit in counted.items()) + "."
        made.append(Entry(module, name, signature, doc, source, line, test, notebook, bool(shown)))
    return made


def docstring(value: Any) -> str:
    """Return the docstring and, for a class, those of its own public methods, each after the signature."""
    parts = [inspect.getdoc(value) or ""]
    for name, function in methods(value):
        parts.append(f"{name}{inspect.signature(function)}\n{textwrap.indent(inspect.getdoc(function) or '', '    ')}")
    return "\n\n".join(parts)


def units(value: Any, name: str) -> dict[str, str]:
    """Return the unit of every numeric argument of a function or class; "" for one that `UNITS` lacks."""
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
        return {}
    unit_of = {argument: unit for unit, arguments in UNITS.items() for argument in arguments.split()}
    numeric = [
        p.name for p in inspect.signature(value).parameters.values() if re.search(r"\b(int|float)\b", str(p.annotation))
    ]
    return {argument: unit_of.get(f"{name}.{argument}", unit_of.get(argument, "")) for argument in numeric}


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that a class defines itself, with their names."""
    if inspect.isclass(value):
        for name, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function


def raises(value: Any) -> bool:
    """Return whether the body of a function has a `raise` or calls a check; then its docstring names the errors."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    calls = [getattr(n.func, "id", getattr(n.func, "attr", "")) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree)) or any(
        name.lstrip("_").startswith("check_") for name in calls
    )


def body() -> str:
    """Return the page's HTML: a search, and a section per name under its module."""
    made = entries()
    parts = [
        '<p><a href="index.html">All notebooks and explorers</a></p><main><h1>API reference</h1>',
        "<p>Every public name. Shapes: N patches, M merged tokens, L prompt tokens, D width.</p>",
        '<p><label for="search">Search names, arguments and docstrings</label>'
        f'<input id="search" type="search" autocomplete="off"> <small id="found">{len(made)} names</small></p>',
    ]
    for module, what in PUBLIC.items():
        parts.append(f'<div class="module"><h2 id="{module}">{module}</h2><p>{what}</p>')
        parts += [section(entry) for entry in made if entry.module == module]
        parts.append("</div>")
    return "\n".join([*parts, "</main>", SEARCH])


def section(entry: Entry) -> str:
    """Return the section of a name: signature, docstring, and links to its source, its test and a notebook."""
    place = f"#L-{entry.line}" if entry.line else ""
    links = (
        (f"files/{entry.source}.html{place}", entry.source),
        (f"files/{entry.test}.html", entry.test),
        (
            f"notebooks/{entry.notebook}.html",
            f"{'used' if entry.is_shown else 'explained'} in notebook {entry.notebook[:2]}",
        ),
    )
    where = " · ".join(f'<a href="{address}">{html.escape(text)}</a>' for address, text in links)
    return (
        f'<section class="entry" id="{entry.anchor}"><h3>{entry.name}</h3><pre>{html.escape(entry.signature)}</pre>'
        f'<div class="doc">{html.escape(entry.doc)}</div><small>{where}</small></section>'
    )
