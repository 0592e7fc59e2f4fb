"""oneDNN's linear layers. Oracles: float64, and nn.Linear with the same weights."""

import copy
import pickle
from functools import partial

import pytest
import torch
from closeness import assert_agree
from torch import nn

import refvl
from refvl.paths import DATA
from refvl.serving import linear
from refvl.serving.linear import OneDnnLinear, choose_linear, use_faster_linear, use_onednn

CHECKPOINTS = DATA / "checkpoints"
SCENE = DATA / "pictures" / "scene.png"
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not linear.times_as_fast(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Rows of every call that reached oneDNN, whatever its size."""
    rows, kernel = [], linear._onednn

    def count(x, weight, bias):
        rows.append(x.numel() // weight.shape[1])
        return kernel(x, weight, bias)

    monkeypatch.setattr(linear, "_onednn", count)
    monkeypatch.setattr(linear, "MIN_WORK", 0)
    return rows


def onednn_layer(width=96, out=80, bias=True) -> OneDnnLinear:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, out, bias))
    use_onednn(layers)
    return layers[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(36, 96), (2, 9, 1280), (577, 3420)])
@torch.no_grad()
def test_result_is_the_product_within_rounding(shape, bias, calls):
    """Against float64: each element within what sums of so many products round, and all within 1e-5 in the norm."""
    layer = onednn_layer(shape[-1], 320, bias)
    x = torch.randn(shape)
    exact = copy.deepcopy(layer).double()(x.double())
    result = layer(x)
    assert len(calls) == 1 and result.dtype == torch.float32
    assert_agree(result, exact, shape[-1])
    assert float((result - exact).norm() / exact.norm()) < 1e-5


@torch.no_grad()
def test_kernel_reads_what_the_weights_hold_now(calls):
    """Rows that are not contiguous, and weights changed in place: nothing is packed once and kept."""
    layer, x = onednn_layer(), torch.randn(96, 40).T
    layer(x)
    layer.weight.mul_(3)
    assert_agree(layer(x), copy.deepcopy(layer).double()(x.double()), 96)
    assert calls == [40, 40]


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (1, 96)), (torch.float32, (0, 96)), (torch.float64, (9, 96)),
                         (torch.bfloat16, (9, 96))], ids=str,
)  # fmt: skip
@torch.no_grad()
def test_what_onednn_is_not_for_goes_to_torch(dtype, shape, calls):
    layer, x = onednn_layer().to(dtype), torch.randn(shape, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias)) and calls == []


@torch.no_grad()
def test_small_calls_go_to_torch(calls, monkeypatch):
    monkeypatch.setattr(linear, "MIN_WORK", 10 * 96 * 80)
    for rows in (9, 10):
        onednn_layer()(torch.randn(rows, 96))
    assert calls == [10]


def test_gradients_are_torchs_own(calls):
    """Bit for bit those of nn.Linear, of second order and forward mode, too: with gradients its kernel runs."""
    layer, x = onednn_layer(), torch.randn(9, 96, requires_grad=True)
    plain = nn.Linear(96, 80)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        [gradient] = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert calls == [] and torch.equal(layer.weight.grad, plain.weight.grad)
    products = [torch.func.jvp(module, (x,), (torch.ones_like(x),))[1] for module in (layer, plain)]
    assert torch.equal(*products)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [torch.func.vmap, partial(torch.compile, backend="eager")])
def test_transforms_of_torch_take_it(transform, calls):
    """Inductor cannot compile oneDNN's kernel as it is called here: torch's own is traced."""
    layer, x = onednn_layer(), torch.randn(4, 9, 96)
    with torch.no_grad():
        found = transform(layer)(x)
    assert_agree(found, copy.deepcopy(layer).double()(x.double()), 96)
    assert bool(calls) == (transform is torch.func.vmap)


def test_autocast_decides_the_dtype(calls):
    layer, x = onednn_layer(), torch.randn(9, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16 and calls == []


def test_weights_stay_those_of_torch():
    """Not copied, saved under the same names, and pickled; subclasses of nn.Linear are left alone."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8))
    before = {name: weight.data_ptr() for name, weight in layers.state_dict().items()}
    use_onednn(layers)
    assert [type(layer) is OneDnnLinear for layer in layers] == [True, False]
    assert {name: weight.data_ptr() for name, weight in layers.state_dict().items()} == before
    again = pickle.loads(pickle.dumps(layers))
    assert type(again[0]) is OneDnnLinear and torch.equal(again[0].weight, layers[0].weight)
    assert layers.to("meta")[0](torch.empty(9, 8, device="meta")).shape == (9, 8)


@pytest.mark.parametrize("name", ["tiny-qwen2_5_vl", "tiny-minicpmv-4_5"])
def test_both_halves_of_a_model_use_it(name, calls):
    """Oracle: the same checkpoint with torch's kernel: embeddings within rounding, the same answer, by graphs too."""
    question, images = "What color is the circle?", [SCENE]
    models = {kernel: refvl.load(CHECKPOINTS / name, linear=kernel, progress=False) for kernel in ("torch", "onednn")}
    traces = {kernel: model.trace(question, images=images) for kernel, model in models.items()}
    plain = [m for model in (models["torch"].encoder, models["torch"].language_model) for m in model.modules()]
    assert calls and not any(isinstance(module, OneDnnLinear) for module in plain)
    for half in ("encoder", "language_model"):
        assert any(type(module) is OneDnnLinear for module in getattr(models["onednn"], half).modules())
    embeds, expected = (torch.cat(traces[kernel].embeds) for kernel in ("onednn", "torch"))
    assert_agree(embeds, expected, models["torch"].encoder)
    assert traces["onednn"].token_ids == traces["torch"].token_ids
    captured = refvl.load(CHECKPOINTS / name, linear="onednn", graphs=True, progress=False)
    assert captured.chat(question, images=images) == traces["torch"].text


def test_auto_takes_the_faster_one(monkeypatch):
    """Measured for float32 on a CPU only; torch's own unless oneDNN is faster by more than a busy machine explains."""
    asked = []

    def measured(ratio):
        monkeypatch.setattr(linear, "times_as_fast", lambda: asked.append(ratio) or ratio)

    measured(2.2)
    assert choose_linear("auto", CPU, torch.float32) == "onednn"
    layers = nn.Sequential(nn.Linear(8, 8))
    assert use_faster_linear(layers) == "onednn" and type(layers[0]) is OneDnnLinear
    measured(1.1)
    assert choose_linear("auto", CPU, torch.float32) == "torch"
    layers = nn.Sequential(nn.Linear(8, 8))
    assert use_faster_linear(layers) == "torch" and type(layers[0]) is nn.Linear
    assert asked == [2.2, 2.2, 1.1, 1.1]
    for device, dtype in ((CPU, torch.bfloat16), (torch.device("cuda"), torch.float32), (torch.device("meta"), None)):
        assert choose_linear("auto", device, dtype) == "torch"
    assert choose_linear("torch", CPU, torch.float32) == "torch" and asked == [2.2, 2.2, 1.1, 1.1]


def gone(*args):
    """As torch says it of a name that is not there."""
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


def other_arguments(x, weight, bias, attr):
    """Another release's kernel."""


@pytest.mark.parametrize("kernel", [gone, other_arguments])
def test_a_torch_without_the_kernel_keeps_its_own(kernel, monkeypatch):
    """It is private to torch: another release may have none, or other arguments."""
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", kernel)
    monkeypatch.setattr(linear, "times_as_fast", linear.times_as_fast.__wrapped__)
    assert choose_linear("auto", CPU, torch.float32) == "torch"


def test_measuring_leaves_the_random_numbers_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert linear.times_as_fast.__wrapped__() > 0 and torch.equal(torch.get_rng_state(), state)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"linear: expected one of .*'onednn'.*, got 'mkl'"):
        refvl.load(CHECKPOINTS / "tiny-qwen2_5_vl", linear="mkl")
