"""oneDNN's linear layers, and fused MLPs. Oracles: float64, and the same weights in torch's layers."""

import copy
from functools import partial

import pytest
import torch
from closeness import assert_agree
from torch import nn

import refvl
from refvl.encoders.qwen2_5_vl import SwiGLU
from refvl.paths import DATA
from refvl.serving import linear
from refvl.serving.linear import SPARE, FusedSwiGLU, OneDnnLinear, choose_linear, fuse_layers, use_onednn

CHECKPOINTS = DATA / "checkpoints"
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
    """Oracle: float64. The weights are read at each call, not packed once and kept."""
    layer = onednn_layer(shape[-1], 320, bias)
    x = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT  # not contiguous
    for _ in range(2):
        exact = copy.deepcopy(layer).double()(x.double())
        result = layer(x)
        assert result.dtype == torch.float32
        assert_agree(result, exact, shape[-1])
        layer.weight.mul_(3)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 1), (torch.float32, 0), (torch.float64, 9), (torch.bfloat16, 9)], ids=str
)
@torch.no_grad()
def test_what_onednn_is_not_for_goes_to_torch(dtype, rows, calls):
    layer, x = onednn_layer().to(dtype), torch.randn(rows, 96, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert calls == []


@torch.no_grad()
def test_small_calls_and_autocast_go_to_torch(calls, monkeypatch):
    monkeypatch.setattr(linear, "MIN_WORK", 10 * 96 * 80)
    for rows in (9, 10):
        onednn_layer()(torch.randn(rows, 96))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onednn_layer()(torch.randn(11, 96)).dtype == torch.bfloat16
    assert calls == [10]


def test_gradients_are_torchs_own(calls):
    """Bit for bit those of nn.Linear, of second order, too: with gradients its kernel runs."""
    layer, x = onednn_layer(), torch.randn(9, 96, requires_grad=True)
    plain = nn.Linear(96, 80)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        [gradient] = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert calls == [] and torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [torch.func.vmap, partial(torch.compile, backend="eager")])
def test_transforms_of_torch_take_it(transform, calls):
    """Inductor cannot compile oneDNN's kernel as it is called here: torch's own is traced."""
    layer, x = onednn_layer(), torch.randn(4, 9, 96)
    found = torch.no_grad()(transform(layer))(x)
    assert_agree(found, copy.deepcopy(layer).double()(x.double()), 96)
    assert bool(calls) == (transform is torch.func.vmap)


def test_weights_stay_those_of_torch():
    """Not copied, and saved under the same names; subclasses of nn.Linear are left alone."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8))
    before = {name: weight.data_ptr() for name, weight in layers.state_dict().items()}
    use_onednn(layers)
    assert [type(layer) is OneDnnLinear for layer in layers] == [True, False]
    assert {name: weight.data_ptr() for name, weight in layers.state_dict().items()} == before


@pytest.mark.parametrize("name", ["tiny-qwen2_5_vl", "tiny-minicpmv-4_5"])
def test_both_halves_of_a_model_use_it(name, calls):
    """Oracle: the same checkpoint with torch's kernel: embeddings within rounding, the same answer."""
    question, images = "What color is the circle?", ["scene.png"]
    plain, faster = (refvl.load(CHECKPOINTS / name, linear=kernel, progress=False) for kernel in ("torch", "onednn"))
    want, found = (model.trace(question, images=images) for model in (plain, faster))
    for half in ("encoder", "language_model"):
        assert any(type(module) is OneDnnLinear for module in getattr(faster, half).modules())
    assert_agree(torch.cat(found.embeds), torch.cat(want.embeds), plain.encoder)
    assert calls and found.token_ids == want.token_ids


@pytest.mark.parametrize(("ratio", "kernel"), [(2.2, "onednn"), (1.1, "torch")])
def test_auto_takes_the_faster_one(ratio, kernel, monkeypatch):
    """torch's own, unless oneDNN is faster by more than a busy machine explains."""
    monkeypatch.setattr(linear, "times_as_fast", lambda: ratio)
    assert choose_linear("auto", CPU, torch.float32) == kernel
    for device, dtype in ((CPU, torch.bfloat16), (torch.device("cuda"), torch.float32)):
        assert choose_linear("auto", device, dtype) == "torch"
    assert choose_linear("torch", CPU, torch.float32) == "torch"


def test_a_torch_without_the_kernel_keeps_its_own(monkeypatch):
    """It is private to torch: another release may have none, or other arguments."""
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    monkeypatch.setattr(linear, "times_as_fast", linear.times_as_fast.__wrapped__)
    assert choose_linear("auto", CPU, torch.float32) == "torch"


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"linear: expected one of .*'onednn'.*, got 'mkl'"):
        refvl.load(CHECKPOINTS / "tiny-qwen2_5_vl", linear="mkl")


@pytest.mark.parametrize("bias", [True, False])
def test_a_spaced_layer_computes_what_the_same_weights_do(bias):
    """And can be trained. Oracle: nn.Linear."""
    tower, x = nn.ModuleDict({"qkv": nn.Linear(6, 9, bias=bias)}), torch.randn(5, 6)
    want = tower["qkv"](x)
    fuse_layers(tower)
    assert tower["qkv"](x).requires_grad
    found = torch.no_grad()(tower["qkv"])(x)
    assert_agree(found, want.detach(), 6)
    assert (found.storage_offset(), found.untyped_storage().nbytes()) == (SPARE, 4 * (5 * 9 + 2 * SPARE))


@pytest.mark.parametrize("rows", [9, 2])
def test_a_fused_mlp_computes_what_the_same_weights_do(rows, monkeypatch):
    """Also changed in place; copied, adapted or with gradients they are those of
    SwiGLU. Oracle: SwiGLU, in float64."""
    plain = SwiGLU(32, 99).double()
    mlp, x, used = copy.deepcopy(plain), torch.randn(2, rows, 32).double(), []
    monkeypatch.setattr(linear, "MANY_ROWS", 5)
    fuse_layers(mlp)
    assert type(mlp) is FusedSwiGLU and mlp.down_proj.weight.stride() == (100, 1)
    assert all(torch.equal(mlp.get_parameter(name), weight) for name, weight in plain.named_parameters())
    monkeypatch.setattr(SwiGLU, "forward", lambda self, *x, run=SwiGLU.forward: used.append(self) or run(self, *x))
    with torch.no_grad():
        for weight in (*plain.parameters(), *mlp.parameters()):
            weight.mul_(2)
        want = plain(*x)
        torch.testing.assert_close(mlp(*x.clone()), want)
        assert used == [plain]
        torch.testing.assert_close(copy.deepcopy(mlp)(*x), want)
    torch.testing.assert_close(mlp(*x), want)
    assert len(used) == 3


CHANGES = {
    "weight": lambda layer: setattr(layer, "weight", nn.Parameter(3 * layer.weight)),
    "bias": lambda layer: setattr(layer.bias, "data", 3 * layer.bias),
    "hook": lambda layer: layer.register_forward_hook(lambda *args: 3 * args[-1]),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_a_changed_mlp_computes_like_a_swiglu(layer, change):
    """Oracle: the same change of a SwiGLU. Under autocast, it runs as well."""
    plain, x = SwiGLU(32, 99), torch.randn(2, 9, 32)
    mlp = copy.deepcopy(plain)
    fuse_layers(mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(*x.clone()).dtype == plain(*x).dtype
    for module in (plain, mlp):
        CHANGES[change](module.get_submodule(layer))
    assert_agree(mlp(*x), plain(*x), 99)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_start_at_16_bytes_and_the_added_column_is_exactly_one(dtype):
    """Without `down_proj`, its bias comes back to the bit. On a CPU, `load` fuses nothing."""
    mlp, x = SwiGLU(8, 3420).to(dtype), torch.randn(5, 8).to(dtype)
    fuse_layers(mlp)
    assert mlp.down_proj.weight.stride() == (3424, 1)
    mlp.down_proj.weight.zero_()
    assert torch.equal(mlp(x, torch.zeros_like(x)), mlp.down_proj.bias.expand(5, 8))
    assert type(refvl.load(CHECKPOINTS / "tiny-qwen2_5_vl", dtype="bfloat16").encoder.blocks[0].mlp) is SwiGLU
