// Three lanes over one axis of time: the host's launches, the device in an eager run, and the device in a replay.
import { explorer } from "./shared.js";

export default explorer(view => {
  const LANES = ["host", "eager", "replay"], LEFT = 8, RIGHT = 20, HEAD = 22, GAP = 14, BOTTOM = 24;
  const HIGH = () => (view.big ? 150 : 56), W = () => view.fit(1120), top = lane => HEAD + lane * (HIGH() + HEAD + GAP);
  const count = () => view.row.host.shape[0];
  const times = (name, i) => [view.row[name][2 * i], view.row[name][2 * i + 1]];
  const end = name => view.row[name].at(-1);
  const us = n => `${+n.toFixed(1)} µs`;
  const scale = () => (W() - LEFT - RIGHT) / Math.max(end("eager"), end("replay"));
  const titles = () => [
    `host, eager: ${count()} launches`,
    `device, eager: done after ${us(end("eager"))}, ${Math.round(100 * view.row.idle)} % idle`,
    `device, replay: one launch, done after ${us(end("replay"))}`,
  ];
  const operation_at = (px, py) => {
    const lane = LANES.findIndex((_, i) => py >= top(i) && py < top(i) + HIGH()), time = (px - LEFT) / scale();
    if (lane < 0) return -1;
    for (let i = 0; i < count(); i++) {
      const [start, stop] = times(LANES[lane], i);
      if (time >= start && time < stop) return i;
    }
    return -1;
  };

  view.title(() => {
    const gain = end("eager") / end("replay"), why = view.row.idle > 0.02 ? `the device waits ${Math.round(100 * view.row.idle)} % of the time for its next launch` : "the device never waits";
    return `In an eager run, ${why}; a replay with one launch is ${gain.toFixed(1)} times as fast`;
  });
  view.canvas({
    name: () => `${titles().join("; ")}`,
    caption: () => "Time runs to the right. Each bar is one launch (gray) or one operation on the device",
    size: () => [W(), top(LANES.length - 1) + HIGH() + BOTTOM],
    at: operation_at,
    step: (i, dx) => i + dx,
    draw(pen, width, height) {
      const unit = view.ease("unit", scale());
      LANES.forEach((name, lane) => {
        pen.fillStyle = view.colors.ink; pen.font = "bold 13px sans-serif"; pen.textBaseline = "bottom"; pen.textAlign = "left";
        pen.fillText(titles()[lane], LEFT, top(lane) - 4);
        for (let i = 0; i < count(); i++) {
          const [start, stop] = times(name, i).map((time, k) => view.ease(`${name} ${i} ${k}`, time));
          pen.fillStyle = view.colors[i === view.item ? "highlight" : name === "host" ? "text" : name === "eager" ? "image" : "kept"];
          pen.fillRect(LEFT + start * unit, top(lane), Math.max(1, (stop - start) * unit - 1.5), HIGH());
        }
        if (name !== "replay") return;
        const launched = view.ease("launch", times(name, 0)[0]);
        pen.fillStyle = view.colors.text; pen.fillRect(LEFT, top(lane) + HIGH() / 3, launched * unit - 1.5, HIGH() / 3);
      });
      const longest = Math.max(end("eager"), end("replay")), every = [1, 2, 5, 10, 20, 50].find(n => longest / n <= 10);
      pen.font = "12px sans-serif"; pen.fillStyle = view.colors.muted; pen.textAlign = "center";
      for (let at = 0; at <= longest; at += every) pen.fillText(at ? at : "0 µs", Math.max(LEFT + 10, LEFT + at * unit), height);
    },
  });

  view.readout(() => {
    const [launched, eager] = LANES.map(name => times(name, view.item));
    const waited = eager[0] - launched[1];
    return `operation ${view.item + 1} starts ${waited > 0.01 ? `${us(waited)} after its launch, because the device is still busy` : "as soon as it is launched"}`;
  }, () => {
    const [launched, eager, replayed] = LANES.map(name => times(name, view.item));
    return `its launch ends at ${us(launched[1])}. The operation starts at ${us(eager[0])} in an eager run, and at ${us(replayed[0])} in a replay`;
  });
  return { count };
});
