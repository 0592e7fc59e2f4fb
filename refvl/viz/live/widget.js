// The live page in a notebook: asks the kernel for it and shows it in a frame; without a kernel, says where it is.
export default {
  render({ model, el }) {
    const note = document.createElement("p"), frame = document.createElement("iframe");
    const isSite = /\/notebooks\/[^/]+\.html$/.test(location.pathname),
      isFirst = model.get("checkpoint") === "tiny-qwen2_5_vl";
    frame.title = "Broken, and sure: a model with one thing exchanged";
    frame.style = "width: 100%; height: min(900px, 85vh); border: 1px solid #8a8f98; border-radius: 6px";
    note.textContent = isSite ? "" : "The kernel sends this page: run this cell, or run make site and open site/live.html.";
    if (isSite) {
      const link = document.createElement("a");
      link.href = isFirst ? "../live.html" : "../live-qwen3_vl.html";
      link.textContent = "Broken, and sure: the live page";
      note.append(link);
    }
    el.append(note);
    model.on("msg:custom", (message, buffers) => {
      if (message.page) {
        frame.srcdoc = new TextDecoder().decode(buffers[0]);
        note.replaceWith(frame);
      }
    });
    model.send({ page: true });
  },
};
