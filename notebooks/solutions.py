"""A correct version of each function in mine.py, at most 15 lines long. Read each only after
your own version passes the check.
"""

import math

import torch
import torch.nn.functional as F

# Notebook 17: what becomes of each function in its five models. s: survives, c: changes, -: gone
FAMILIES = ("cs-sssscs", "cs-sssscs", "-s--s---s", "-ss-ssc-s", "-s--s---s")


def target_size(height, width, factor, min_pixels, max_pixels):
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height, new_width = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height, new_width = (math.ceil(s * grow / factor) * factor for s in (height, width))
    return new_height, new_width


def patch_rows(pixels, patch, merge, steps):
    missing = -len(pixels) % steps
    pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    T, C, H, W = pixels.shape
    side = patch * merge
    x = pixels.view(T // steps, steps, C, H // side, merge, patch, W // side, merge, patch)
    #               0           1      2  3          4      5      6          7      8
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, C * steps * patch * patch)


def window_index(grids, side):
    index, lengths, start = [], [], 0
    for t, h, w in grids:
        for frame in torch.arange(start, start + t * h * w).view(t, h, w):
            squares = [s for band in frame.split(side) for s in band.split(side, dim=1)]
            index += [s.flatten() for s in squares]
            lengths += [s.numel() for s in squares]
        start += t * h * w
    index = torch.cat(index)
    return index, index.argsort(), lengths


def rotate(x, row, column, theta=10000.0):
    quarter = x.shape[-1] // 4
    speed = theta ** -(torch.arange(quarter) / quarter)
    angle = torch.cat([row[:, None] * speed, column[:, None] * speed], dim=1)[:, None]
    one, other = x.float().chunk(2, dim=-1)
    turned = one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()
    return torch.cat(turned, dim=-1).to(x.dtype)


def attend(q, k, v, lengths):
    pieces = []
    for q1, k1, v1 in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        q1, k1, v1 = (x.transpose(0, 1) for x in (q1, k1, v1))  # (H, S, K)
        pieces.append(F.scaled_dot_product_attention(q1, k1, v1).transpose(0, 1))
    return torch.cat(pieces)


def fold(x, merge, project, inverse):
    return project(x.reshape(-1, merge * merge * x.shape[1]))[inverse]


def mrope(length, spans):
    pieces, index, position = [], 0, 0
    for offset, t, h, w, factor in [*spans, (length, 0, 0, 0, 1.0)]:  # the last one ends the prompt
        text = torch.arange(offset - index) + position
        position += offset - index
        pieces.append(text.expand(3, -1))
        if t:
            times = (torch.arange(t, dtype=torch.float64) * factor).long()
            grid = torch.stack(torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)
            pieces.append(grid + position)
            index, position = offset + t * h * w, position + int(grid.max()) + 1
    return torch.cat(pieces, dim=1), position - length


def evs(embeds, steps, rate, positions, offset):
    frames = embeds.float().view(steps, -1, embeds.shape[1])
    change = 1 - F.cosine_similarity(frames[1:], frames[:-1], dim=-1)
    score = torch.cat([torch.full_like(frames[:1, :, 0], 255), change]).flatten()
    kept = max(frames.shape[1], int(len(embeds) * (1 - rate)))
    keep = torch.ones(positions.shape[1], dtype=torch.bool)
    keep[offset + score.argsort(descending=True, stable=True)[kept:]] = False
    positions = positions[:, keep]
    return keep, positions, int(positions.max()) + 1 - positions.shape[1]


def replay(graph, buffers, rules, batches):
    results = []
    for contents, tokens in batches:
        for name, values in contents.items():
            buffer, n = buffers[name], len(values)
            buffer[:n] = values
            if rules[name] == "identity":
                buffer[n:] = torch.arange(n, len(buffer))
            else:
                buffer[n:] = 0 if rules[name] == "zero" else values[-1]
        results.append(graph.replay()[:tokens].clone())
    return results
