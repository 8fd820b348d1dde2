"use strict";
// Draws charts as SVG: lines, points, bars, steps, areas and images, with values on hover.
// A chart is data (see charts/chart.py). All texts become text nodes, so none of them is markup.
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  let clips = 0;
  const DASHES = ["", "6 4", "2 3", "8 3 2 3"];
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const TIMES = [["µs", 1e-6], ["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600]];

  function svg(name, attributes = {}, text = null) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }
  function html(name, attributes = {}, ...inside) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside.filter((each) => each !== null));
    return element;
  }
  const colour = (value) => (typeof value === "number" ? `var(--c${value % 6})` : `var(--${value})`);
  const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

  // The unit in which values up to `peak` are shown, and how many base units it holds.
  function scaleOf(unit, peak) {
    peak = Math.abs(peak);
    if (unit === "B" || unit === "B/s") {
      const power = peak < 1 ? 0 : Math.min(5, Math.floor(Math.log2(peak) / 10));
      return [BYTES[power] + unit.slice(1), 1024 ** power];
    }
    if (unit === "s" && peak > 0) {
      const last = TIMES.filter(([, seconds]) => peak >= seconds * (seconds >= 60 ? 3 : 1)).pop();
      return last || TIMES[0];
    }
    if (unit.endsWith("/s") && peak >= 1e4) {
      const power = Math.min(4, Math.floor(Math.log10(peak) / 3));
      return [`${" kMGT"[power]} ${unit}`, 1000 ** power];
    }
    return [unit, 1];
  }
  function number(value, digits = 4) {
    if (!known(value)) return "-";
    if (value === 0) return "0"; // also for -0
    if (value !== 0 && (Math.abs(value) >= 1e15 || Math.abs(value) < 1e-4)) return value.toPrecision(digits);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const whole = Math.abs(value) >= 1000;
    return whole ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
  }
  // A value with its unit, such as "1.25 GiB".
  function withUnit(value, unit) {
    const [name, factor] = scaleOf(unit, value);
    return `${number(value / factor)} ${name}`.trim();
  }

  function ticksOf(low, high, log, most, whole) {
    if (log) {
      const ticks = [];
      for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
        for (const lead of high - low < 2 ? [1, 2, 5] : [1]) {
          const at = power + Math.log10(lead);
          if (at >= low - 1e-9 && at <= high + 1e-9) ticks.push(at);
        }
      }
      const every = Math.ceil(ticks.length / most);
      return ticks.filter((_, place) => place % every === 0);
    }
    const rough = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) ticks.push(at);
    return ticks;
  }

  // An axis: from values to pixels, with its ticks and its name.
  function axisOf(axis, values, begin, end, most) {
    const log = Boolean(axis.log) && values.every((value) => value > 0);
    const place = (value) => (log ? Math.log10(value) : value);
    let low = values.length ? values.reduce((a, b) => Math.min(a, b)) : 0;
    let high = values.length ? values.reduce((a, b) => Math.max(a, b)) : 1;
    if (axis.zero && !log) low = Math.min(0, low);
    if (known(axis.low)) low = axis.low;
    if (known(axis.high)) high = axis.high;
    [low, high] = [place(low), place(high)];
    if (!(high > low)) [low, high] = log ? [low - 0.5, high + 0.5] : [low - (axis.zero ? 0 : 0.5), high + (high || 1) * 0.5];
    const room = (high - low) * 0.04;
    if (!known(axis.high)) high += room;
    if (!known(axis.low) && !(axis.zero && low === 0)) low -= room;
    const to = (value) => begin + ((place(value) - low) / (high - low)) * (end - begin);
    if (axis.ticks && axis.ticks.length) {
      const ticks = axis.ticks.map((name, number_) => [to(number_), name]);
      return { to, ticks, label: axis.name, show: (value) => axis.ticks[value] ?? number(value) };
    }
    const peak = log ? 10 ** high : Math.max(Math.abs(low), Math.abs(high));
    const [unit, factor] = scaleOf(axis.unit || "", peak);
    const [first, last] = log ? [low, high] : [low / factor, high / factor];
    const ticks = ticksOf(first, last, log, most, axis.whole).map((tick) => {
      const value = log ? 10 ** tick : tick * factor;
      return [to(value), number(log ? value / factor : tick, 6)];
    });
    const label = unit ? `${axis.name} (${unit})` : axis.name;
    return { to, ticks, label, show: (value) => withUnit(value, axis.unit || "") };
  }

  function markerAt(x, y, kind, paint) {
    const size = 4;
    if (kind === "x") {
      const path = `M${x - 4} ${y - 4}L${x + 4} ${y + 4}M${x - 4} ${y + 4}L${x + 4} ${y - 4}`;
      return svg("path", { d: path, stroke: paint, "stroke-width": 2, fill: "none" });
    }
    const shapes = ["", `M${x - 4} ${y - 4}h8v8h-8z`, `M${x} ${y - 5}l5 5l-5 5l-5 -5z`, `M${x - 5} ${y - 4}h10l-5 9z`, `M${x - 5} ${y + 4}h10l-5 -9z`];
    const path = shapes[(kind || 0) % shapes.length];
    return path ? svg("path", { d: path, fill: paint }) : svg("circle", { cx: x, cy: y, r: size - 0.5, fill: paint });
  }

  function drawSeries(group, series, x, y, bottom) {
    const paint = colour(series.colour ?? 0);
    const points = series.x.map((at, place) => [at, series.y[place], place]).filter(([at, value]) => known(at) && known(value));
    const kind = series.kind || "line";
    if (kind === "bars") {
      const width = series.width ?? 0.6;
      for (const [at, value, place] of points) {
        const [left, right] = [x.to(at - width / 2), x.to(at + width / 2)];
        const from = series.base && series.base.length ? y.to(series.base[place]) : bottom;
        const top = Math.min(y.to(value), from);
        group.append(svg("rect", { x: left, y: top, width: Math.max(1, right - left), height: Math.abs(from - y.to(value)), fill: paint }));
      }
    } else if (kind === "area" && points.length) {
      const path = points.map(([at, value], place) => `${place ? "L" : "M"}${x.to(at)} ${y.to(value)}`);
      const back = [...points].reverse().map(([at, , place]) => `L${x.to(at)} ${series.base && series.base.length ? y.to(series.base[place]) : bottom}`);
      group.append(svg("path", { d: `${path.join("")}${back.join("")}Z`, fill: paint, "fill-opacity": series.faint ? 0.18 : 0.85 }));
    } else if (kind !== "points") {
      let path = "";
      let before = null;
      for (const [at, value, place] of points) {
        const move = before === null || place !== before + 1;
        const [px, py] = [x.to(at), y.to(value)];
        path += move ? `M${px} ${py}` : kind === "steps" ? `H${px}V${py}` : `L${px} ${py}`;
        before = place;
      }
      const width = series.faint ? 1 : 1.8;
      group.append(svg("path", { d: path, fill: "none", stroke: paint, "stroke-width": width, "stroke-dasharray": DASHES[(series.dashes || 0) % 4], opacity: series.faint ? 0.35 : 1 }));
    }
    for (const [at, value, place] of points) {
      if (series.low && known(series.low[place]) && known(series.high[place])) {
        group.append(svg("path", { d: `M${x.to(at)} ${y.to(series.low[place])}V${y.to(series.high[place])}`, stroke: kind === "bars" ? "var(--ink)" : paint, "stroke-width": 1.5 }));
      }
      if (kind === "points" || kind === "dots") group.append(markerAt(x.to(at), y.to(value), series.marker, paint));
      if (series.texts && series.texts[place]) {
        group.append(svg("text", { x: x.to(at), y: y.to(value) - 7, "text-anchor": "middle", class: "note" }, series.texts[place]));
      }
    }
  }

  function drawImage(figure, image, width) {
    const height = Math.min(520, (width * image.height) / image.width);
    const scale = height / image.height;
    figure.append(svg("image", { href: image.link, width: image.width * scale, height, preserveAspectRatio: "none", style: "image-rendering:pixelated" }));
    for (const boxes of image.boxes || []) {
      for (const [x0, y0, x1, y1] of boxes.places) {
        figure.append(svg("rect", { x: x0 * scale, y: y0 * scale, width: (x1 - x0) * scale, height: (y1 - y0) * scale, fill: "none", stroke: colour(boxes.colour), "stroke-width": 1.6, "stroke-dasharray": DASHES[boxes.dashes || 0] }));
      }
    }
    return height;
  }

  function drawAxes(figure, x, y, frame) {
    const { left, right, top, bottom } = frame;
    for (const [at, name] of y.ticks) {
      if (at < top - 1 || at > bottom + 1) continue;
      figure.append(svg("path", { d: `M${left} ${at}H${right}`, stroke: "var(--grid)" }), svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, name));
    }
    const room = (right - left) / Math.max(1, x.ticks.length);
    const every = frame.turned ? Math.ceil(x.ticks.length / 40) : Math.max(1, Math.ceil((7 * Math.max(0, ...x.ticks.map(([, name]) => name.length)) + 6) / room));
    x.ticks.forEach(([at, name], place) => {
      if (at < left - 1 || at > right + 1 || place % every) return;
      figure.append(svg("path", { d: `M${at} ${bottom}v4`, stroke: "var(--faint)" }), svg("text", frame.turned ? { "text-anchor": "end", transform: `translate(${Math.max(at, 5.2 * name.length)} ${bottom + 14}) rotate(-28)` } : { x: at, y: bottom + 17, "text-anchor": "middle" }, name));
    });
    figure.append(svg("path", { d: `M${left} ${top}V${bottom}H${right}`, fill: "none", stroke: "var(--faint)" }));
    figure.append(svg("text", { x: (left + right) / 2, y: bottom + (frame.turned ? 84 : 35), "text-anchor": "middle" }, x.label));
    figure.append(svg("text", { x: 4, y: 13 }, y.label));
  }

  // Shows the values beside the pointer: of each series the point that is nearest along x.
  function addHover(figure, box, series, x, y, frame) {
    const line = svg("path", { stroke: "var(--faint)", "stroke-dasharray": "3 3", visibility: "hidden" });
    const tip = html("div", { class: "tip", hidden: "" });
    figure.append(line);
    box.append(tip);
    figure.addEventListener("pointermove", (event) => {
      const bounds = figure.getBoundingClientRect();
      const at = ((event.clientX - bounds.left) * figure.viewBox.baseVal.width) / bounds.width;
      let nearest = null;
      const found = series.filter((each) => !each.silent).map((each) => {
        let best = null;
        each.x.forEach((value, place) => {
          if (!known(value) || !known(each.y[place])) return;
          const away = Math.abs(x.to(value) - at);
          if (best === null || away < best[0]) best = [away, place];
        });
        if (best !== null && (nearest === null || best[0] < nearest[0])) nearest = [best[0], x.to(each.x[best[1]]), each.x[best[1]]];
        return [each, best];
      });
      if (nearest === null) return;
      const shown = found.filter(([, best]) => best !== null && best[0] < nearest[0] + 12).slice(0, 12);
      tip.replaceChildren(html("b", {}, x.show(nearest[2])), ...shown.map(([each, [, place]]) => {
        const mark = html("i", {});
        mark.style.background = colour(each.colour ?? 0);
        const ends = each.low && known(each.low[place]) ? ` [${y.show(each.low[place])} - ${y.show(each.high[place])}]` : "";
        return html("span", {}, mark, `${each.label}: ${y.show(each.y[place])}${ends}`);
      }));
      line.setAttribute("d", `M${nearest[1]} ${frame.top}V${frame.bottom}`);
      line.setAttribute("visibility", "visible");
      tip.hidden = false;
      const side = nearest[1] > (frame.left + frame.right) / 2;
      tip.style.left = side ? "auto" : `${nearest[1] + 10}px`;
      tip.style.right = side ? `${figure.viewBox.baseVal.width - nearest[1] + 10}px` : "auto";
    });
    figure.addEventListener("pointerleave", () => {
      tip.hidden = true;
      line.setAttribute("visibility", "hidden");
    });
  }

  function drawPanel(box, panel, hidden) {
    const width = Math.max(240, box.clientWidth || 480);
    const figure = svg("svg", { role: "img", "aria-label": panel.title || "chart" });
    let height = Math.min(300, Math.max(190, width * 0.55));
    box.replaceChildren(figure);
    if (panel.image) height = drawImage(figure, panel.image, width);
    else {
      const series = (panel.series || []).filter((each) => !hidden.has(each.label));
      const values = series.flatMap((each) => [...each.y, ...(each.low || []), ...(each.high || []), ...(each.base || [])]).filter(known);
      const limits = panel.limits || [];
      values.push(...limits.map(([value]) => value));
      const wide = series.some((each) => each.kind === "bars") || (panel.x.ticks && panel.x.ticks.length);
      const along = series.flatMap((each) => each.x).filter(known);
      if (panel.x.ticks) along.push(...panel.x.ticks.map((_, place) => place));
      const ends = wide && along.length ? { low: Math.min(...along) - 0.5, high: Math.max(...along) + 0.5 } : {};
      const names = (panel.x.ticks || []).join("  ").length;
      const turned = 7 * names > width - 60;
      if (turned) height += 50;
      // The word above the highest point needs room below the name of the axis.
      const worded = series.some((each) => (each.texts || []).some(Boolean));
      const frame = { top: worded ? 38 : 24, bottom: height - (turned ? 92 : 42), right: width - 10, left: 0, turned };
      let y = axisOf({ zero: true, ...panel.y }, values, frame.bottom, frame.top, 5);
      frame.left = 14 + 7 * Math.max(2, ...y.ticks.map(([, name]) => name.length));
      const x = axisOf({ ...panel.x, zero: false, ...ends }, along, frame.left, frame.right, Math.max(4, Math.floor(width / 70)));
      drawAxes(figure, x, y, frame);
      const inside = svg("g", {});
      if (known(panel.y.high)) {
        // Values above the axis would be drawn over the title.
        const clip = svg("clipPath", { id: `clip-${(clips += 1)}` });
        clip.append(svg("rect", { x: 0, y: frame.top, width, height: height - frame.top }));
        figure.append(clip);
        inside.setAttribute("clip-path", `url(#${clip.id})`);
      }
      for (const each of series) drawSeries(inside, each, x, y, frame.bottom);
      for (const [value, name] of limits) {
        inside.append(svg("path", { d: `M${frame.left} ${y.to(value)}H${frame.right}`, stroke: "var(--limit)", "stroke-dasharray": "6 4" }));
        inside.append(svg("text", { x: frame.right, y: y.to(value) - 5, "text-anchor": "end" }, `${name} ${y.show(value)}`));
      }
      figure.append(inside);
      if (!along.length) figure.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, panel.note || "not recorded"));
      addHover(figure, box, series, x, y, frame);
    }
    figure.setAttribute("viewBox", `0 0 ${width} ${height}`);
    figure.setAttribute("width", width);
    figure.setAttribute("height", height);
  }

  function legendOf(panel, hidden, redraw) {
    const labels = new Map();
    for (const each of panel.series || []) {
      if (each.label && !each.silent && !labels.has(each.label)) labels.set(each.label, each);
    }
    const boxes = ((panel.image || {}).boxes || []).map((each) => [each.label, each]);
    if (labels.size + boxes.length < 2) return null;
    const entries = [...labels, ...boxes].slice(0, 24).map(([label, each]) => {
      const mark = html("i", {});
      mark.style.background = colour(each.colour ?? 0);
      const button = html("button", { type: "button", "aria-pressed": "true" }, mark, label);
      button.addEventListener("click", () => {
        if (!hidden.delete(label)) hidden.add(label);
        button.setAttribute("aria-pressed", String(!hidden.has(label)));
        redraw();
      });
      return button;
    });
    return html("div", { class: "legend" }, ...entries);
  }

  // Draws a figure into an element, and again when its width changes.
  function draw(element, figure) {
    element.replaceChildren();
    if (figure.title) element.append(html("p", { class: "chart-title" }, figure.title));
    if (figure.note) element.append(html("p", { class: "chart-note" }, figure.note));
    const grid = html("div", { class: "panels" });
    grid.style.setProperty("--across", figure.across || 1);
    for (const panel of figure.panels) {
      const [hidden, box] = [new Set(), html("div", { class: "panel" })];
      const redraw = () => drawPanel(box, panel, hidden);
      const title = panel.title && figure.panels.length > 1 && panel.title !== panel.y?.name ? html("p", { class: "panel-title" }, panel.title) : null;
      grid.append(html("div", {}, title, box, legendOf(panel, hidden, redraw)));
      let before = 0;
      new ResizeObserver(() => {
        if (box.clientWidth && box.clientWidth !== before) {
          before = box.clientWidth;
          redraw();
        }
      }).observe(box);
    }
    element.append(grid);
  }
  return { draw, html, number, withUnit, known };
})();
for (const element of document.querySelectorAll("script[type='application/json'][data-figure]")) {
  Charts.draw(document.getElementById(element.dataset.figure), JSON.parse(element.textContent));
}
