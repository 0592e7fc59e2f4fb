// the first control at the top of the screen: its top, and the bottom of the first drawing that it changes
async root => {
  const control = root.querySelector("input[type=range], select");
  window.scrollBy(0, root.querySelector(".controls").getBoundingClientRect().top);
  const canvases = [...root.querySelectorAll("canvas")], before = canvases.map(c => c.toDataURL());
  control.value = +control.value ? +control.value - 1 : 1;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise(done => setTimeout(done, 500));
  const changed = canvases.find((c, i) => c.toDataURL() !== before[i] && c.getBoundingClientRect().height > 4);
  return [control.getBoundingClientRect().top, changed.getBoundingClientRect().bottom];
}
