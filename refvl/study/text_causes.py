"""Causes of different states in two text models with the same inputs; they are tested one by one, not guessed.

    recorded states of two runs   -> the odd run: the one whose states the model does not reproduce
    the model, one thing changed  -> the state where the runs diverge: does it equal that of the odd run?
    the best change, all layers   -> how much of the difference it explains

A change is reported if it explains all but a thousandth of the difference, or as much as the unchanged model explains
of the other run. Layers after the divergence do not run, and layers before it are not changed.

Shape suffixes: L tokens of the prompt, D text model width, P rotary pairs, K head dimension, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refvl.serving.features import share_weights
from refvl.study.readout import Readout

LEFT = 1e-3  # a cause may leave this share of a difference unexplained
FACTORS = (0.125, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, 100.0)
THETAS = (1e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7, 1e8)  # the rope theta of released text models
SECTIONS = ((16, 24, 24), (24, 20, 20), (8, 12, 12), (11, 11, 10))  # the sections of Qwen2.5-VL, Qwen3-VL, GLM, Qwen3.5
EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
HALVES = (torch.bfloat16, torch.float16)
GOLDEN, STEPS = (math.sqrt(5) - 1) / 2, 24  # a search between two factors narrows their interval to 1e-5 of its width


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The inputs of the text model."""

    embeds_LD: Tensor
    positions_3L: Tensor  # integers or other numbers
    deepstack: Tensor | None  # (L, D * k), zeros for text
    causal: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The results to compare: the last prompt token's states, before layer 0 and after each layer; the first logits."""

    states: Tensor  # (layers + 1, D)
    logits: Tensor  # (V,)

    def row(self, row: int) -> Tensor:
        """Return the state with index `row`, or the logits, whose index follows that of the last state."""
        return (self.states[row] if row < len(self.states) else self.logits).float()


Change = Callable[[Any, Inputs], Inputs]  # a function that changes the given copy of a text model, or the inputs


def explain(text: Any, a: Mapping[str, Tensor], b: Mapping[str, Tensor], row: int) -> tuple[str, str] | None:
    """Return "a" or "b", and the change of `text` that reproduces that run's states ("" if no tested change does).

    text: the text model of one of the runs. a, b: recorded tensors by the names of `Stages`. row: where the runs
    diverge: a row of last_states, or the next index for the logits. Returns None if inputs or states were not recorded,
    or belong to a different model.
    """
    inputs, found = _inputs(a, b), [made for run in (a, b) if (made := _outputs(run))]
    if inputs is None or len(found) < 2 or row == 0:
        return None
    ours = prefill(text, inputs)
    if any(x.states.shape != ours.states.shape or x.logits.shape != ours.logits.shape for x in found):
        return None
    odd = int(_distance(ours, found[1], row) > _distance(ours, found[0], row))
    return "ab"[odd], _best_change(text, inputs, ours, found[odd], found[1 - odd], row)


def _inputs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Inputs | None:
    both = {**b, **a}
    if not {"merge/inputs_embeds", "positions/ids"} <= both.keys():
        return None
    return Inputs(both["merge/inputs_embeds"], both["positions/ids"], both.get("merge/deepstack"))


def _outputs(run: Mapping[str, Tensor]) -> Outputs | None:
    names = ("prefill/last_states", "prefill/first_logits")
    return Outputs(*(run[name] for name in names)) if all(name in run for name in names) else None


def _distance(x: Outputs, y: Outputs, row: int) -> float:
    return float((x.row(row) - y.row(row)).norm())


@torch.inference_mode()
def prefill(text: Any, inputs: Inputs) -> Outputs:
    """Run one forward over the whole prompt."""
    length = len(inputs.embeds_LD)
    given = {"inputs_embeds": inputs.embeds_LD[None].to(text.device, text.dtype)}
    given["position_ids"] = inputs.positions_3L[:, None].to(text.device)
    if inputs.deepstack is not None:
        given["deepstack_embeds"] = inputs.deepstack[None].to(text.device, text.dtype)
    mask_shape = (1, length) if inputs.causal else (1, 1, length, length)  # transformers does not change a 4-D mask
    given["attention_mask"] = torch.ones(mask_shape, dtype=torch.bool, device=text.device)
    readout = Readout(text, text.model.layers, length)
    try:
        text(logits_to_keep=1, use_cache=False, **given)
    finally:
        readout.remove()
    return Outputs(torch.stack(readout.states).cpu(), readout.first[0].cpu())


def _best_change(text: Any, inputs: Inputs, ours: Outputs, odd: Outputs, even: Outputs, row: int) -> str:
    """Return the change that leaves the smallest difference at `row`, as text; "" if that difference is too large."""
    short = share_weights(text)
    short.model.layers = short.model.layers[:row]
    before, kernels = _distance(ours, odd, row), _distance(ours, even, row)
    enough = min(max(LEFT, 4 * kernels / before), 0.5)  # different kernels separate `ours` and `even`, too

    def left(change: Change) -> float:
        changed = share_weights(short)
        return _distance(prefill(changed, change(changed, inputs)), odd, row) / before

    found, head = dict[str, float](), len(ours.states)
    for name, change in _changes(text, inputs, row, left):
        # later rows must agree as well, because DeepStack features missing at this layer may be added at a later one
        if left(change) <= enough:
            changed = share_weights(text)
            found[name] = _distance(prefill(changed, change(changed, inputs)), odd, head)
            if found[name] <= LEFT * _distance(ours, odd, head):
                break
    return min(found, key=found.__getitem__, default="")


def _changes(text: Any, inputs: Inputs, row: int, left: Callable[[Change], float]) -> Iterator[tuple[str, Change]]:
    """Yield every cause with its name; `left` returns the part of the difference that a change leaves unexplained."""
    is_head = row > len(text.model.layers)
    at = "head" if is_head else f"layer {row - 1}"
    if is_head:
        yield "head: final norm left out", _without_final_norm
        yield "head: the embedding's weights", _tied_head
        scale = _fitted(lambda factor: partial(_scale_logits, factor=factor), left, FACTORS)
        yield f"head: logits {scale:.4g} times as large", partial(_scale_logits, factor=scale)
    else:
        if inputs.deepstack is not None and row > 1:  # features added after a layer appear one row later
            for name, change in DEEPSTACK.items():
                yield f"layer {row - 2}: deepstack, {name}", change
        yield f"{at}: attention, not causal", lambda changed, given: replace(given, causal=False)
    for epsilon in EPSILONS:
        yield f"{at}: norms, epsilon {epsilon:g}", partial(_set_epsilon, row=row, epsilon=epsilon)
    for half in HALVES:
        yield f"{at}: norms, computed in {word(half)}", partial(_norms_in, row=row, half=half)
    for half in HALVES:
        yield f"{at}: precision, computed in {word(half)}", partial(_compute_in, half=half)
    kinds = getattr(text.config, "layer_types", None) or ["full_attention"]
    if not is_head and kinds[: row - 1].count("linear_attention") == row - 1:  # else an earlier layer would also differ
        for name, change in _rotary_changes(text, inputs, left):
            yield f"{at}: rotary, {name}", change


def word(value: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(value).removeprefix("torch.")


# -------------------------------------------------------------------------------------------------- deepstack


def _shifted(changed: Any, given: Inputs) -> Inputs:
    assert given.deepstack is not None
    width = given.embeds_LD.shape[1]
    return replace(given, deepstack=nn.functional.pad(given.deepstack, (width, 0)))


def _reversed(changed: Any, given: Inputs) -> Inputs:
    assert given.deepstack is not None
    features = given.deepstack.split(given.embeds_LD.shape[1], dim=1)
    return replace(given, deepstack=torch.cat(features[::-1], dim=1))


DEEPSTACK: dict[str, Change] = {
    "left out": lambda changed, given: replace(given, deepstack=None),
    "one layer late": _shifted,
    "features in reverse order": _reversed,
}


# ----------------------------------------------------------------------------------------------------- rotary


def _rotary_changes(text: Any, inputs: Inputs, left: Callable[[Change], float]) -> Iterator[tuple[str, Change]]:
    """Yield changes to axes, sections, angles and theta."""
    t, h, w = inputs.positions_3L
    if not (torch.equal(t, h) and torch.equal(t, w)):
        for order in itertools.permutations(range(3)):
            moved = [axis for axis in range(3) if order[axis] != axis]
            if moved:
                is_pair = len(moved) == 2
                name = f"{_axes(moved, ' and ')} exchanged" if is_pair else f"axes in the order {_axes(order)}"
                yield name, partial(_permute, order=order)
        yield "one position per token on every axis", _counted
        for name, axes in _sections(text).items():
            yield name, partial(_assign, axes=axes)
    factor = _fitted(lambda factor: partial(_scale_angles, factor=factor), left, FACTORS)
    yield f"angles {factor:.4g} times as large", partial(_scale_angles, factor=factor)
    if theta := (getattr(text.config, "rope_parameters", None) or {}).get("rope_theta"):
        others = [factor for factor in (*FACTORS, *(known / theta for known in THETAS)) if factor * theta > 1]
        factor = _fitted(lambda factor: partial(_set_theta, theta=factor * theta), left, others)
        yield f"theta {factor * theta:.4g} instead of {theta:g}", partial(_set_theta, theta=factor * theta)


def _axes(order: Sequence[int], between: str = ", ") -> str:
    return between.join("thw"[axis] for axis in order)


def _permute(changed: Any, given: Inputs, order: Sequence[int]) -> Inputs:
    return replace(given, positions_3L=given.positions_3L[list(order)])


def _counted(changed: Any, given: Inputs) -> Inputs:
    return replace(given, positions_3L=torch.arange(given.positions_3L.shape[1]).expand(3, -1))


def _scale_angles(changed: Any, given: Inputs, factor: float) -> Inputs:
    return replace(given, positions_3L=given.positions_3L * factor)


def _set_theta(changed: Any, given: Inputs, theta: float) -> Inputs:
    """Set theta. Frequencies are theta^(-2i/K), so the existing ones are raised to log(theta) / log(old theta)."""
    config, rotary = changed.model.config, getattr(changed.model, "rotary_emb", None)
    if rotary is not None:
        rotary.inv_freq = rotary.inv_freq ** (math.log(theta) / math.log(config.rope_parameters["rope_theta"]))
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    return given


def _sections(text: Any) -> dict[str, list[int]]:
    """Return the axis of each rotary pair for several `mrope_section`s, contiguous and interleaved, by name."""
    own = (text.config.rope_parameters or {}).get("mrope_section")
    if not own:
        return {}
    pairs, found = sum(own), {}
    scaled = [tuple(n * pairs // sum(known) for n in known) for known in SECTIONS]
    for section in dict.fromkeys([*itertools.permutations(own), *(s for s in scaled if sum(s) == pairs)]):
        t, h, w = section
        in_turns = [1 if i % 3 == 1 and i < 3 * h else 2 if i % 3 == 2 and i < 3 * w else 0 for i in range(pairs)]
        found[f"mrope_section {list(section)} contiguous"] = [0] * t + [1] * h + [2] * w
        found[f"mrope_section {list(section)} interleaved"] = in_turns
    return found


def _assign(changed: Any, given: Inputs, axes: list[int]) -> Inputs:
    """Rotate each pair by the axis that `axes` assigns to it, with one call of the module per axis."""
    rotary = changed.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor, inner: Callable = rotary.forward) -> tuple[Tensor, ...]:
        by_axis = [inner(x, position_ids[axis].expand(3, -1, -1)) for axis in range(3)]  # (cos, sin), (B, L, K) each
        cos, twice = by_axis[0][0], torch.tensor(axes, device=x.device)[:, None].expand(-1, 2)
        in_halves = torch.equal(*cos.chunk(2, dim=-1))  # otherwise the two dimensions of a pair are adjacent, as in GLM
        chosen = (twice.T if in_halves else twice).flatten()
        return tuple(
            torch.stack(factors).gather(0, chosen.expand(1, *factors[0].shape))[0]
            for factors in zip(*by_axis, strict=True)
        )

    rotary.forward = forward
    return given


def _fitted(change: Callable[[float], Change], left: Callable[[Change], float], factors: Sequence[float]) -> float:
    """Return the factor that explains most of a difference: the best of `factors`, refined by golden-section search."""
    ordered = sorted(factors)
    shares = [left(change(factor)) for factor in ordered]
    best = shares.index(min(shares))
    if not LEFT / 10 < shares[best] < 0.9:  # the best factor is already exact, or explains nothing
        return ordered[best]
    low, high = ordered[max(best - 1, 0)], ordered[min(best + 1, len(ordered) - 1)]
    for _ in range(STEPS):
        width = GOLDEN * (high - low)
        if left(change(high - width)) < left(change(low + width)):
            high = low + width
        else:
            low = high - width
    return min((low + high) / 2, ordered[best], key=lambda factor: left(change(factor)))


# -------------------------------------------------------------------------------------- norms, precision, head


def norms_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the norms: RMSNorm or LayerNorm from torch, transformers or refvl."""
    return [module for module in modules if type(module).__name__.endswith("Norm")]


def set_epsilon(norms: Iterable[nn.Module], epsilon: float) -> None:
    """Set the epsilon of each norm, under any attribute name."""
    for norm in norms:
        for name in {"eps", "variance_epsilon"} & vars(norm).keys():
            setattr(norm, name, epsilon)


def compute_norms_in(norms: Iterable[nn.Module], half: torch.dtype) -> None:
    """Round the squares, means and products of RMSNorms to `half`, as code does that never converts to float32."""
    for norm in norms:

        def forward(x: Tensor, norm: nn.Module = norm, inner: Callable = norm.forward) -> Tensor:
            rounded, gain = x.to(half), inner(torch.ones_like(x)).to(half)
            epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0
            inverse = (rounded.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
            return (rounded * inverse * gain).to(x.dtype)

        norm.forward = forward


def _norms(changed: Any, row: int) -> list[nn.Module]:
    """Return the norms of layer row - 1 and of all later layers, and the final norm.

    After the last layer, only the final norm is left.
    """
    return norms_of([*changed.model.layers[row - 1 :].modules(), changed.model.norm])


def _set_epsilon(changed: Any, given: Inputs, row: int, epsilon: float) -> Inputs:
    set_epsilon(_norms(changed, row), epsilon)
    return given


def _norms_in(changed: Any, given: Inputs, row: int, half: torch.dtype) -> Inputs:
    compute_norms_in(_norms(changed, row), half)
    return given


def _compute_in(changed: Any, given: Inputs, half: torch.dtype) -> Inputs:
    tensors = itertools.chain(changed.parameters(), changed.buffers())
    cast = {id(x): nn.Parameter(x.to(half), False) for x in tensors if x.is_floating_point()}
    for module in changed.modules():
        module._parameters |= {name: cast.get(id(x), x) for name, x in module._parameters.items()}
    return given


def _without_final_norm(changed: Any, given: Inputs) -> Inputs:
    changed.model.norm = nn.Identity()
    return given


def _tied_head(changed: Any, given: Inputs) -> Inputs:
    changed.lm_head.weight = changed.get_input_embeddings().weight
    return given


def _scale_logits(changed: Any, given: Inputs, factor: float) -> Inputs:
    changed.lm_head.weight = nn.Parameter(changed.lm_head.weight * factor, False)
    return given
