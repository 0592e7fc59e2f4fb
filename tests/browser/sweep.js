// every slider moved to its end and back, every option of every menu chosen
async () => {
  const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  for (const control of document.querySelectorAll(".refvl input[type=range], .refvl select")) {
    const count = control.options?.length ?? 0;
    const values = count ? Array.from(control.options, option => option.value) : [control.max, control.min];
    for (const value of values) {
      control.value = value;
      control.dispatchEvent(new Event("input", { bubbles: true }));
      await frame();
    }
  }
}
