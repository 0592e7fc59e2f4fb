"""The vision side, written by you.

Nine functions, in the order in which an image or a video passes through them. Notebooks 00 to 04 ask for one after
another, and `track.check` writes each correct function into this file. You may also write here:

    import mine, track
    track.check(mine.window_index)    # named and 200 random cases: types, shapes, values
    track.run("window_index")         # the trained model answers with every function that is written

As long as a body is `...`, the library's function runs instead.

Sizes: T frames, C channels, H x W pixels; N patches, M tokens (merge * merge patches each), E numbers per patch;
L tokens in a prompt. t, h, w: time steps, rows and columns of a grid. All indices and positions are int64.
"""

import math  # noqa: F401 (for your functions, as are the next two)

import torch  # noqa: F401
import torch.nn.functional as F  # noqa: F401


def target_size(height, width, factor, min_pixels, max_pixels):
    """Compute the size to which an image is resized. -> (height, width), two ints.

    Both are multiples of `factor`, the side of a token in pixels: each side is rounded to the nearest multiple, as
    Python's `round` does. If the area is then above max_pixels, both *original* sides are divided by the same number
    so that the area would be exactly max_pixels, and rounded down (but never below one factor). If the area is below
    min_pixels, both original sides are enlarged to min_pixels in the same way, and rounded up.

    target_size(100, 60, factor=28, min_pixels=3136, max_pixels=10**6)  ->  (112, 56): 4 x 2 = 8 tokens
    """
    ...


def patch_rows(pixels, patch, merge, steps):
    """Cut pixels into patches. pixels: (T, C, H, W) -> (N, C * steps * patch * patch), of the same dtype.

    A patch is `patch` x `patch` pixels in `steps` consecutive frames. If T is not a multiple of `steps`, the last frame
    is repeated. The merge * merge patches that will become one token follow each other; tokens run row by row, then
    step by step. Inside a token, patches run row by row; inside a patch, numbers run by channel, frame, row, column.

    The patches of a 4 x 4 image with patch=1, merge=2, steps=1, named by their pixel (row, column):
    00 01 10 11   02 03 12 13   20 21 30 31   22 23 32 33
    """
    ...


def window_index(grids, side):
    """Put tokens that share a window next to each other. grids: [(t, h, w), ...] in tokens -> (index, inverse, lengths)

    Windows are squares of side x side tokens inside one time step, laid from the top left; at the right and bottom
    edges, they may be smaller. Windows come row by row, and so do the tokens inside a window; then come the next step
    and the next item.
    index: (M,), so that x[index] is in window order. inverse: (M,), so that x[index][inverse] is x again.
    lengths: a list with the number of tokens in each window; none is 0.

    window_index([(1, 2, 3)], side=2)  ->  index 0 1 3 4 2 5, inverse 0 1 4 2 3 5, lengths [4, 2]
    """
    ...


def rotate(x, row, column, theta=10000.0):
    """Rotate queries or keys by the rows and columns of their patches. x: (N, H, K); row, column: (N,) -> (N, H, K).

    Number i of a head and number i + K/2 are the two coordinates of a point, and there are K/2 points. The first K/4
    points are rotated by row * speed, the others by column * speed. In both groups, point i, counted from 0, has speed
    theta ** (-i / (K/4)).
    The rotation is (a, b) -> (a cos - b sin, a sin + b cos). The result has x's dtype; nothing else is rounded to it.

    K=4 has two points, both at speed 1. With row=0 and column=pi/2, (1, 2, 3, 4) becomes (1, -4, 3, 2).
    """
    ...


def attend(q, k, v, lengths):
    """Compute attention inside segments. q, k, v: (N, H, K) -> (N, H, K).

    lengths: a list; the first lengths[0] patches are a segment, the next lengths[1] are the next, and so on (none is
    empty, and they cover all N). A patch attends to the patches of its own segment, in each head separately; scores are
    divided by the root of K before the softmax.

    For a segment of one patch, the result is its v. Equal keys: the result is the mean of the segment's v.
    """
    ...


def fold(x, merge, project, inverse):
    """Turn patches into tokens and restore their order. x: (N, E), N = M * merge * merge -> (M, D).

    The patches of a token follow each other in x (you arranged that in patch_rows). Their numbers, one patch after the
    other, are the input of `project`, which maps (M, merge * merge * E) to (M, D). The tokens in x are in window order;
    the result is in reading order. `inverse`: (M,), from window_index.

    merge=2, E=1, x = 1 2 3 4 5 6 7 8: project reads the rows (1 2 3 4) and (5 6 7 8).
    """
    ...


def mrope(length, spans):
    """Give each token of a prompt three positions. -> (positions (3, length): time, row, column; delta, an int)

    spans: [(offset, t, h, w, factor), ...], sorted: t * h * w tokens from prompt index `offset` on are an image or a
    video; all others are text. Text starts at 0 and advances by one, the same on all three axes. An
    item begins where text would continue: its token at step i, row j, column k is int(i * factor), j, k further (the
    product in double precision). The next token is one after the item's largest position on any axis.
    delta: the largest position + 1 - length. New token k, counted from 0, will be at position length + k + delta.

    mrope(6, [(1, 1, 2, 2, 1.0)])  ->  0 1 1 1 1 3
                                       0 1 1 2 2 3
                                       0 1 2 1 2 3    and delta -2
    """
    ...


def evs(embeds, steps, rate, positions, offset):
    """Drop the tokens of a video that change least. -> (keep (L,) bool, the kept positions, delta)

    embeds: (M, D), the video's tokens, M / steps of them per time step; they start at prompt index `offset`.
    positions: (3, L) of the whole prompt. A token's score is 1 - its cosine similarity with the token in the same place
    one step earlier, in float32 whatever the dtype of embeds; if one of the two is all zeros, the similarity is 0. The
    whole first step is kept. max(M / steps, int(M * (1 - rate))) tokens are kept: those with the largest scores; if
    scores are equal, the earlier token. Text is always kept. Kept tokens keep their positions. delta: the largest kept
    position + 1 - the number of tokens that are kept, including text.

    Two steps of two tokens, rate 0.25: 3 are kept, both of the first step and the one of the second that changed more.
    """
    ...


def replay(graph, buffers, rules, batches):
    """Encode batches of different sizes with one recording. -> a list with one tensor per batch

    graph.replay() runs recorded operations again. They read the tensors in `buffers` (name -> tensor) at their fixed
    addresses, and always return the same tensor (capacity, D). batches: [(contents, tokens), ...]: contents has a
    tensor for each buffer, at most as long; the result is the first `tokens` rows. rules: the name of each buffer ->
    how the rest of it is filled: "zero"; "identity" (element i is i); "repeat_last" (the last value of the contents).
    All results must be valid when the function returns.

    A buffer of 6 gets 4 0 1. "zero": 4 0 1 0 0 0. "identity": 4 0 1 3 4 5. "repeat_last": 4 0 1 1 1 1.
    """
    ...
