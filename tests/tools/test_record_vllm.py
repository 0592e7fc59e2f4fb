"""What `benchmarks/record_vllm.py` keeps of an engine. Oracle: refvl's own trace of the same
request.

The engine stands in for vLLM's: its model has the names and shapes of vLLM's, layers that return
what they add and the residual apart and write over both later, and the weights of a shipped folder.
"""

import sys
from types import SimpleNamespace

import torch
from shipped import shipped
from torch import nn

import refvl
from benchmarks import record_vllm
from refvl.paths import DATA

FOLDER, PICTURE = DATA / "checkpoints" / "tiny-qwen2_5_vl", DATA / "pictures" / "scene.png"


class Layer(nn.Module):
    """A layer of transformers under the signature of vLLM's."""

    def __init__(self, text, layer):
        super().__init__()
        self.text, self.layer, self.past = [text], layer, None

    def forward(self, positions, hidden, residual):
        if residual is not None:
            residual += hidden  # as vLLM's fused norm: in place
            hidden = residual
        rows = hidden if self.past is None or len(hidden) > 1 else torch.cat([self.past[0], hidden])
        where = positions if rows is hidden else torch.cat([self.past[1], positions], dim=1)
        self.past = rows.clone(), where.clone()
        rotary = self.text[0].rotary_emb(rows[None], where[:, None])
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        made = self.layer(rows[None], attention_mask=mask, position_embeddings=rotary)
        made = (made[0] if isinstance(made, tuple) else made)[0][-len(hidden) :]
        return made - hidden, hidden.clone()


class Model(nn.Module):
    """Names that the recorder reads from vLLM's model."""

    def __init__(self, vlm):
        super().__init__()
        self.parts, text = [vlm], vlm.language_model.model
        layers = nn.ModuleList(Layer(text, layer) for layer in text.layers)
        self.language_model = SimpleNamespace(model=SimpleNamespace(layers=layers))

    def embed_multimodal(self, pixel_values, image_grid_thw):
        return self.parts[0].encoder(pixel_values, image_grid_thw).split((image_grid_thw.prod(1) // 4).tolist())

    def get_mrope_input_positions(self, trace):
        return trace.positions, trace.delta

    def compute_logits(self, hidden):
        return self.parts[0].language_model.lm_head(hidden)


class Engine:
    """As `vllm.LLM`: greedy, one request."""

    def __init__(self, vlm):
        self.vlm, self.model = vlm, Model(vlm)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)))
        core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
        self.llm_engine = SimpleNamespace(engine_core=core)

    @torch.inference_mode()
    def generate(self, requests, params, use_tqdm):
        trace = self.vlm.trace("What color is the circle?", images=requests[0]["multi_modal_data"]["image"])
        rows = torch.cat([patches.pixel_values for patches in trace.patches])
        self.model.embed_multimodal(pixel_values=rows, image_grid_thw=torch.tensor(trace.layouts))
        positions, delta = self.model.get_mrope_input_positions(trace)
        hidden, text, ids = trace.inputs_embeds.clone(), self.vlm.language_model, []
        for _ in range(params.max_tokens):
            residual = None
            for layer in self.model.language_model.model.layers:
                hidden, residual = layer(positions, hidden, residual)
            normed = text.model.norm(hidden + residual)
            ids.append(int(self.model.compute_logits(normed[-1:]).argmax()))
            if ids[-1] in text.generation_config.eos_token_id:
                break
            hidden = text.get_input_embeddings()(torch.tensor(ids[-1:])).detach().clone()
            positions = torch.full((3, 1), len(trace.input_ids) + len(ids) - 1 + delta)
        said = SimpleNamespace(token_ids=ids, text=self.vlm.processor.text(ids))
        return [SimpleNamespace(prompt_token_ids=trace.input_ids.tolist(), outputs=[said])]


def test_a_record_of_vllm_holds_every_stage(monkeypatch):
    vllm = SimpleNamespace(
        __version__="0", SamplingParams=lambda temperature, max_tokens: SimpleNamespace(max_tokens=max_tokens)
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(record_vllm, "start", lambda *args, **options: Engine(shipped(FOLDER.name)))
    trace = shipped(FOLDER.name).trace("What color is the circle?", images=[PICTURE], max_new_tokens=8)
    stages, answer = record_vllm.record(str(FOLDER), "What color is the circle?", [PICTURE], [], "float32", 8)
    compared = refvl.compare(trace, stages)
    assert compared.first is None, compared
    assert compared.not_in_both == [], compared
    assert answer == trace.text, compared
