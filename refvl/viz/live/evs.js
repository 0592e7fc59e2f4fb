// EVS drops the share q of a video's tokens (M, D) that changed least since the previous frame; it keeps the first frame.

export function unchanged(tokens, M, q, perFrame = 9) {
  const width = tokens.length / M, row = m => tokens.subarray(m * width, (m + 1) * width);
  const product = (a, b) => a.reduce((sum, v, i) => sum + v * b[i], 0);
  const change = m => 1 - product(row(m),
    row(m - perFrame)) / Math.sqrt(product(row(m), row(m)) * product(row(m - perFrame), row(m - perFrame)));
  const later = Array.from({ length: M - perFrame }, (_, i) => [change(i + perFrame), i + perFrame]);
  const kept = Math.max(perFrame, Math.trunc(M * (1 - q)));
  const ranked = later.sort((a, b) => b[0] - a[0] || a[1] - b[1]);       // the most changed first, ties in order
  return ranked.slice(kept - perFrame).map(([, m]) => m).sort((a, b) => a - b);
}
