"""Every released config at its true size on fake CUDA tensors: shapes, dtypes and devices fit, in every backend.

A fake tensor has a shape, a dtype and a device, and no memory; torch's own rules for CUDA say what
comes of each call. Oracle: `item_size`, which counts tokens without a tower. Run by `make
test-shapes`.
"""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from simulated_cuda import Machine, _replaced, _set_device_guard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from refvl.families import read_config
from refvl.loading import empty_encoder
from refvl.paths import DATA
from refvl.pixels.slices import SliceGroup

CONFIGS = sorted(path.stem for path in (DATA / "configs").glob("*.json"))
PICTURES, CLIP = (SliceGroup(((32, 32),)), SliceGroup(((28, 37),))), (SliceGroup(((32, 32), (32, 32)), (0, 5)),)
LAYOUTS = {
    "Step": [(1, 2), (0, 0)],
    "MiniCPM-V-4_5": [PICTURES, CLIP],
    "MiniCPM-V-4_6": [((32, 32), (28, 36))],
    "MiniCPM-V-4.7": [((32, 32), (28, 36))],
    "MiniCPM": [PICTURES],
    "": [(1, 16, 16), (2, 18, 30), (1, 74, 74)],
}
CUDA = torch.device("cuda:0")

pytestmark = pytest.mark.shapes


@pytest.fixture(scope="module")
def mode():
    """A fake Hopper."""
    _set_device_guard()
    asked = ("is_available", "get_device_capability", "_lazy_init", "current_device")
    functions = Machine(1, (9, 0)).functions()
    with _replaced(torch.cuda, {name: functions[name] for name in asked}):
        yield FakeTensorMode(allow_non_fake_inputs=False)


def as_fake(mode, value):
    """A tensor, or every tensor in a plan, on the fake device."""
    if isinstance(value, torch.Tensor):
        return FakeTensor(mode, value.detach().to("meta"), CUDA)
    if isinstance(value, tuple):
        return tuple(as_fake(mode, item) for item in value)
    if is_dataclass(value):
        return replace(value, **{f.name: as_fake(mode, getattr(value, f.name)) for f in fields(value)})
    return value


def put_on_device(mode, encoder) -> None:
    """Its weights become fake tensors on the device."""
    for module in encoder.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(as_fake(mode, parameter), requires_grad=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_backend_takes_every_layout(mode, name):
    layouts = next(found for prefix, found in LAYOUTS.items() if name.startswith(prefix))
    config = read_config(DATA / "configs" / f"{name}.json")
    encoder = empty_encoder(config, dtype=torch.bfloat16, device="meta", attention="auto")
    layouts = encoder.check_layouts(layouts)
    plans = [encoder.plan([layout]) for layout in layouts]
    put_on_device(mode, encoder)
    for layout, plan in zip(layouts, plans, strict=True):
        rows, tokens, _ = encoder.item_size(layout)
        pixels = as_fake(mode, torch.empty(rows, encoder.config.patch_values, dtype=torch.bfloat16, device="meta"))
        metadata = as_fake(mode, plan)
        for attention in ("varlen", "sdpa", "masked"):
            with mode, torch.no_grad():
                out = encoder(pixels, metadata=metadata, attention=attention)
            assert (out.shape[0], out.dtype, out.device) == (tokens, torch.bfloat16, CUDA)
