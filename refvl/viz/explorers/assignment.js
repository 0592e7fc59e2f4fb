// One bar per device: its images, as long as they are large; hatched while the device waits for the slowest.
import { explorer } from "./shared.js";

export default explorer(view => {
  const ROW = () => (view.big ? 52 : 32), LEFT = 60, TEXT = 200;
  const narrow = () => view.fit(700) < 700, W = () => (narrow() ? view.fit(700) : view.fit(1120) - TEXT);
  const LINE = () => ROW() + (narrow() ? 24 : view.big ? 12 : 6);  // on a phone, the text of a device is below its bar
  const sizes = () => view.row.sizes, ranks = () => view.row.ranks;
  const longest = () => Math.max(1, ...ranks().map(rank => rank.load));
  const scale = () => (W() - LEFT) / longest();
  const rankOf = item => ranks().findIndex(rank => rank.items.includes(item));

  const several = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;

  const alone = () => { const full = ranks().find(rank => rank.load === longest()); return full?.items.length === 1 ? full.items[0] : -1; };

  const places = () => ranks().flatMap((rank, line) => {
    let x = LEFT;
    return rank.items.map(item => {
      const box = { item, x, y: line * LINE(), width: sizes()[item] * scale() };
      x += box.width;
      return box;
    });
  });

  function hatch(pen, x, y, width, height) {
    pen.save();
    pen.beginPath(); pen.rect(x, y, width, height); pen.clip();
    pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.beginPath();
    for (let k = -height; k < width; k += 7) { pen.moveTo(x + k, y + height); pen.lineTo(x + k + height, y); }
    pen.stroke(); pen.restore();
  }

  view.canvas({
    name: () => `${several(sizes().length, "image")} on ${several(ranks().length, "device")}, speed-up ${view.row.speed_up.toFixed(1)}`,
    caption: () => `Speed-up over one device: ${view.row.speed_up.toFixed(1)}, if time is proportional to ${view.shared.unit}. Hatched: the device waits` + (alone() < 0 ? "" : `. Image ${alone() + 1} fills a device by itself, so more devices would not help`),
    size: () => [narrow() ? W() : W() + TEXT, ranks().length * LINE()],
    at(x, y) {
      const hit = places().find(p => x >= p.x && x < p.x + p.width && y >= p.y && y < p.y + ROW());
      return hit ? hit.item : -1;
    },
    step(i, dx, dy) {  // along a device, and to the nearest one with images
      const line = rankOf(i), place = ranks()[line].items.indexOf(i);
      if (!dy) return ranks()[line].items[place + dx] ?? -1;
      for (let k = line + dy; ranks()[k]; k += dy) if (ranks()[k].items.length) return ranks()[k].items[Math.min(place, ranks()[k].items.length - 1)];
      return -1;
    },
    draw(pen) {
      pen.textBaseline = "middle";
      ranks().forEach((rank, line) => {
        const y = line * LINE(), end = LEFT + rank.load * scale();
        hatch(pen, end, y, W() - end, ROW());
        pen.fillStyle = view.colors.ink; pen.textAlign = "left"; pen.font = "12px sans-serif";
        pen.fillText(`device ${line + 1}`, 0, y + ROW() / 2);
        const says = `${several(rank.items.length, "image")}, ${rank.load} ${view.shared.unit}`;
        if (narrow()) pen.fillText(says, LEFT, y + ROW() + 10);
        else pen.fillText(says, W() + 8, y + ROW() / 2);
      });
      pen.textAlign = "center"; pen.font = "bold 12px sans-serif";
      places().forEach(({ item, ...to }) => {
        const [x, y, width] = ["x", "y", "width"].map(part => view.ease(`${part} ${item}`, to[part]));
        const chosen = item === view.item;
        pen.fillStyle = view.colors.sequence(item / Math.max(1, view.options("items").length - 1));
        pen.fillRect(x, y, width, ROW());
        pen.strokeStyle = chosen ? view.colors.highlight : view.colors.surface; pen.lineWidth = chosen ? 4 : 1;
        pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, Math.max(1, width - pen.lineWidth), ROW() - pen.lineWidth);
        if (width < 16) return;
        pen.strokeStyle = "#000"; pen.lineWidth = 3; pen.strokeText(item + 1, x + width / 2, y + ROW() / 2);
        pen.fillStyle = "#fff"; pen.fillText(item + 1, x + width / 2, y + ROW() / 2);
      });
    },
  });

  // the speed-up of every number of devices, by both rules
  const H = () => (view.big ? 360 : 280), SIDE = 28, most = () => view.shared.ranks, C = () => view.fit(960);
  const column = n => SIDE + (n - 1) * (C() - SIDE - 90) / Math.max(1, most() - 1);
  view.canvas({
    name: () => "speed-up over one device for every number of devices, with images assigned by size and by count",
    caption: () => `Speed-up over one device for ${several(sizes().length, "image")}; drag to change the number of devices`,
    size: () => [C(), H()],
    drag: x => view.choose("ranks", Math.max(0, Math.min(most() - 1, Math.round((x - SIDE) / (column(2) - column(1)))))),
    draw(pen, width, height) {
      const y = speed => height - 24 - (speed - 1) * (height - 44) / Math.max(1, most() - 1);
      pen.textBaseline = "middle"; pen.strokeStyle = view.colors.line; pen.lineWidth = 1; pen.fillStyle = view.colors.muted;
      for (let n = 1; n <= most(); n++) {
        pen.textAlign = "center"; pen.fillText(n, column(n), height - 8);
        if (n === most() && n > 1) { pen.textAlign = "left"; pen.fillText("devices", column(n) + 8, height - 8); }
        if (n % 2) { pen.textAlign = "right"; pen.fillText(`${n} x`, SIDE - 6, y(n)); }
      }
      pen.beginPath(); pen.moveTo(column(1), y(1)); pen.lineTo(column(most()), y(most())); pen.stroke();
      pen.textAlign = "left"; pen.fillText("ideal", column(most()) + 10, y(most()));
      const now = view.ease("ranks", column(ranks().length));
      pen.setLineDash([2, 3]); pen.beginPath(); pen.moveTo(now, 8); pen.lineTo(now, height - 20); pen.stroke(); pen.setLineDash([]);
      const last = [0, 1].map(rule => y(view.row.speed_ups[rule * most() + most() - 1]));
      ["by size", "by count"].forEach((name, rule) => {
        const speed = n => view.ease(`${rule} ${n}`, y(view.row.speed_ups[rule * most() + n - 1]));
        pen.strokeStyle = pen.fillStyle = view.colors[rule ? "video" : "kept"]; pen.lineWidth = 3; pen.setLineDash(rule ? [6, 4] : []);
        pen.beginPath(); for (let n = 1; n <= most(); n++) pen.lineTo(column(n), speed(n)); pen.stroke(); pen.setLineDash([]);
        const lift = Math.abs(last[0] - last[1]) < 18 ? (rule ? 9 : -9) : 0;
        pen.textAlign = "left"; pen.font = "bold 13px sans-serif"; pen.fillStyle = view.colors.ink;
        pen.fillText(name, column(most()) + 10, last[rule] + lift); pen.font = "12px sans-serif";
      });
    },
  });

  view.readout(() => {
    const line = rankOf(view.item), rank = ranks()[line], others = rank.items.length - 1, waits = longest() - rank.load;
    return `image ${view.item + 1}: on device ${line + 1} ${others ? `with ${several(others, "other image")}` : "alone"}; ` +
      `${waits ? "this device waits for the slowest one" : "no other device is slower"}`;
  }, () => {
    const rank = ranks()[rankOf(view.item)], unit = view.shared.unit;
    const waits = longest() - rank.load, rest = waits ? `then idles for as long as ${waits} more would take` : "does not wait";
    return `image ${view.item + 1} has ${sizes()[view.item]} ${unit}. Its device encodes ${rank.load} ${unit} in all and ${rest}`;
  });
  return { count: () => sizes().length };
});
