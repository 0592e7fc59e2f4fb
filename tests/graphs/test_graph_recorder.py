"""The trace backend keeps the contract of a CUDA graph: replay equals the function on what the buffers hold now."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from refvl.graphs import CaptureError, TraceGraph

X = torch.arange(1.0, 7.0)
MASK, COUNTS, ONE = X > 2, torch.tensor([1, 2, 0, 1, 1, 1]), torch.tensor(1)

READS = {
    "item": lambda: X.sum().item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "math.sqrt": lambda: math.sqrt(X[0]),
    "print": lambda: str(X),
    "branch": lambda: X if X.sum() > 0 else -X,
    "is_nonzero": lambda: torch.is_nonzero(ONE),
    "in": lambda: 3 in X,
    "slice": lambda: X[:ONE],
    "index by a tensor without dimensions": lambda: X[ONE],
    "arange of a tensor": lambda: torch.arange(ONE),
    "tensor of tensors": lambda: torch.tensor([X[0], X[1]]),
    "equal": lambda: torch.equal(X, X),
    # shapes that depend on data
    "boolean index": lambda: X[MASK],
    "assignment through a mask": lambda: X.clone().__setitem__(MASK, torch.ones(4)),
    "nonzero": lambda: torch.nonzero(X),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "masked_select": lambda: X.masked_select(MASK),
    "repeat_interleave": lambda: X.repeat_interleave(COUNTS),
    "one_hot": lambda: F.one_hot(COUNTS),
}


def recorded(function):
    """A graph that has captured `function`."""
    graph = TraceGraph()
    graph.capture(function)
    return graph


def poison(graph):
    """Overwrite everything that the graph computes: what it does not compute again would show."""
    for operation in graph.operations:
        for out in operation.outputs:
            if not operation.is_in_place:
                out.fill_(float("nan") if out.is_floating_point() else 1)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore")
def test_reading_a_value_back_is_refused(name):
    """Host code would run once, at capture, and its value would be frozen without a word."""
    READS[name]()  # runs well outside of a capture
    with pytest.raises(CaptureError, match="capture: (.* reads a value back|aten.* has to read a value of its input)"):
        TraceGraph().capture(READS[name])


def zeroed_where_masked():
    x = X.clone()
    x[MASK] = 0
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda: X[COUNTS],
        lambda: torch.where(MASK, X, -X),
        lambda: X.clone().index_put_((COUNTS,), X),
        zeroed_where_masked,
        lambda: X.split([2, 4])[1] + X[4:].sum(),
        lambda: [row * 2 for row in X.view(2, 3)][1],
        lambda: X.clamp(max=X[0]),
    ],
)
def test_what_needs_no_value_is_not_refused(function):
    """Sizes are Python's, not the tensor's; integer indices, `where` with values and masks that fill keep shapes."""
    graph = recorded(function)
    X.neg_()
    try:
        assert torch.equal(graph.replay(), function())
    finally:
        X.neg_()


def test_a_refused_capture_leaves_nothing_and_the_graph_is_usable():
    graph, x = TraceGraph(), torch.ones(3)
    with pytest.raises(CaptureError, match="item"):
        graph.capture(lambda: (x * 2 + 1).sum().item())
    assert graph.operations == []
    assert graph.capture(lambda: x + 1).tolist() == [2, 2, 2]
    assert X[MASK].tolist() == [3, 4, 5, 6]  # nothing is refused outside


def test_a_graph_holds_one_capture_and_replays_only_then():
    graph = TraceGraph()
    with pytest.raises(CaptureError, match="replay: nothing has been captured"):
        graph.replay()
    graph.capture(lambda: X * 2)
    with pytest.raises(CaptureError, match="capture: this graph already has a recording"):
        graph.capture(lambda: X * 2)


# --- replayed ---------------------------------------------------------------------------------------------------------


def test_replay_equals_the_function_on_new_contents_whatever_memory_held():
    """A-B-A; matrix products, norms, softmax, gathers, concatenation, casts; all recorded memory poisoned between."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).eval()
    x, index = torch.randn(5, 8), torch.tensor([3, 1, 0, 2, 4])

    def function():
        y = block(x)[index]
        y = torch.cat([y, x.double().softmax(-1).float()], dim=-1)
        return F.scaled_dot_product_attention(y[None], y[None], y[None])[0].reshape(10, 8)

    graph = recorded(function)
    a, b = (torch.randn(5, 8), torch.tensor([3, 1, 0, 2, 4])), (torch.randn(5, 8), torch.tensor([0, 0, 4, 1, 1]))
    for new_x, new_index in (a, b, a):
        x.copy_(new_x)
        index.copy_(new_index)
        poison(graph)
        got = graph.replay().clone()
        with torch.no_grad():
            assert torch.equal(got, function())


def test_the_output_keeps_its_address_and_the_next_replay_overwrites_it():
    x = torch.ones(3)
    graph = TraceGraph()
    captured = graph.capture(lambda: x * 10)
    x.fill_(2)
    first = graph.replay()
    x.fill_(3)
    second = graph.replay()
    assert captured.data_ptr() == first.data_ptr() == second.data_ptr()
    assert first.tolist() == [30, 30, 30]


def test_in_place_operations_happen_at_every_replay():
    """On a buffer they accumulate; on what the graph computes they start anew, through views as well."""
    counter, x = torch.zeros(1), torch.ones(4)

    def function():
        counter.add_(1)
        y = x * 2
        y[1:3].mul_(10)
        y.view(2, 2)[0, 0] = 7
        return F.relu_(y - 3) + counter

    graph = recorded(function)
    x.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert graph.replay().tolist() == [6, 39, 59, 7]  # relu([7, 40, 60, 8] - 3) + 2
    assert graph.replay().tolist() == [7, 40, 60, 8]
    assert counter.item() == 3


VIEWS = [
    (lambda x: x.view(2, 3).T, [[10, 13], [11, 14], [12, 15]], 0),
    (lambda x: x.to(torch.float32)[4:], [14, 15], 0),
    (lambda x: x.to(torch.float64)[4:], [14, 15], 1),  # the schema is the same, the recording is not
]


@pytest.mark.parametrize(("function", "want", "operations"), VIEWS)
def test_views_see_the_new_contents_and_only_copies_are_recorded(function, want, operations):
    x = torch.arange(6.0)
    graph = recorded(lambda: function(x))
    x += 10
    assert graph.replay().tolist() == want
    assert len(graph.operations) == operations
    shares = graph.replay().untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert shares == (operations == 0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_any_grad_mode_around_capture_and_replay(mode):
    """The weights of an encoder require gradients; its static buffers may stem from inference mode."""
    with mode():
        layer, x = nn.Linear(2, 2), torch.ones(1, 2)
        graph = recorded(lambda: layer(x))
        assert not graph.output.requires_grad
    x.data.fill_(3)
    assert torch.equal(graph.replay(), layer(torch.full((1, 2), 3.0)).detach())


def test_memory_counts_what_is_computed_once_and_no_views():
    """Two results of 4 x 8 float32; neither the view of the first nor the buffer written in place."""
    x, buffer = torch.ones(4, 8), torch.zeros(100)

    def function():
        buffer.add_(1)
        y = x + 1
        return y.view(-1)[:8].sum() * 0 + y * 2

    graph = recorded(function)
    scalars = 2 * 4  # the sum, and it times zero
    assert graph.memory_bytes() == 3 * 4 * 8 * 4 + scalars


def test_operations_print_what_they_make():
    x = torch.ones(2, 3)
    graph = recorded(lambda: (x + 1).mul_(2))
    assert [*map(str, graph.operations)] == ["aten.add.Tensor -> (2, 3)", "aten.mul_.Tensor -> (2, 3), in place"]


def test_an_operation_knows_the_module_that_called_it():
    """Oracle: which layer's weight is among the arguments."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6)))
    graph = recorded(lambda: model(X) * 2)
    first, relu, second, outside = graph.operations
    assert first.module is model[0] and first.reads(model[0].weight) and not first.reads(model[1][1].weight)
    assert relu.module is model[1][0]
    assert second.module is model[1][1] and second.reads(model[1][1].weight)
    assert outside.module is None
    view = recorded(lambda: X[2:4] + 1).operations[0]
    assert view.reads(X) and not view.reads(COUNTS)
