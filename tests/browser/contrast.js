// texts of a page, canvases aside, whose contrast is below 4.5
() => {
  const light = color => {
    const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\d.]+/g).map(c => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b + .05;
  };
  const behind = node => {
    for (let n = node; n; n = n.parentElement) {
      const color = getComputedStyle(n).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return getComputedStyle(document.documentElement).backgroundColor;
  };
  const isShown = e => e.checkVisibility() && !e.closest("script, :disabled");
  const texts = [...document.querySelectorAll("body *")].filter(e => isShown(e)
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return texts.map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    return [Math.max(a, b) / Math.min(a, b), e.textContent.trim().slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
}
