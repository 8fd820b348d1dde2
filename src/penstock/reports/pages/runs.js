"use strict";
// The runs of a page: a list to pick from, and what the picked ones share and where they differ.
// The choices are in the address behind "#", so that a link shows the same again.
(() => {
  const source = document.getElementById("runs-data");
  if (!source) return;
  const { html, number, withUnit, known } = Charts;
  const PAGE = 25;
  const FIRST = { curves: 2, metrics: 5, settings: 5 };
  const PLACES = { step: ["Step", ""], epoch: ["Epoch", ""], seconds: ["Time since the start", "s"] };
  const FIELDS = ["name", "status", "kind", "workload", "model", "machine", "source"];
  let data = JSON.parse(source.textContent);
  let entries = new Map(); // a case with its launches, or one launch, by key
  const $ = (name) => document.getElementById(name);
  const many = (values) => values.length > 1;

  // --- the choices, as a link ---------------------------------------------------------------------

  const DEFAULTS = { find: "", order: "began", up: "", page: "1", x: "", smooth: "0", log: "", metric: "", knob: "", group: "", all: "" };
  const LISTS = ["pick", "curve", "machine"];
  const state = { ...DEFAULTS, pick: [], curve: [], machine: [] };
  function readLink() {
    const link = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(DEFAULTS)) state[name] = (link.get(name) ?? DEFAULTS[name]).slice(0, 300);
    for (const name of LISTS) state[name] = link.getAll(name).slice(0, 200);
    if (!(state.x in PLACES)) state.x = "";
    if (!link.has("pick")) state.pick = [...data.picked];
  }
  function writeLink() {
    const link = new URLSearchParams();
    for (const [name, usual] of Object.entries(DEFAULTS)) if (state[name] !== usual) link.set(name, state[name]);
    for (const name of LISTS) for (const value of state[name]) link.append(name, value);
    history.replaceState(null, "", `#${link}`);
  }
  function choose(changes) {
    Object.assign(state, changes);
    writeLink();
    show();
    if (data.live && changes.pick) renew();
  }

  // --- the list -------------------------------------------------------------------------------------

  function group(rows) {
    entries = new Map();
    for (const row of rows) {
      row.words = [...FIELDS.map((name) => row[name] || ""), timeOf(row.began), ...Object.entries(row.tags || {}).map((tag) => tag.join("="))].join(" ").toLowerCase();
      if (!entries.has(row.case)) entries.set(row.case, { key: row.case, name: row.title, runs: [] });
      entries.get(row.case).runs.push(row);
    }
    for (const entry of [...entries.values()]) {
      for (const run of entry.runs) if (!entries.has(run.key)) entries.set(run.key, { key: run.key, name: run.name, runs: [run], inside: entry });
    }
  }
  const timeOf = (began) => (known(began) ? new Date(began * 1000).toISOString().slice(0, 16).replace("T", " ") : "");
  const middle = (values) => {
    const sorted = values.filter(known).sort((a, b) => a - b);
    return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
  };
  function valueOf(entry, name) {
    if (name === "seconds") return middle(entry.runs.map((run) => run.seconds));
    if (name === "began") return Math.max(...entry.runs.map((run) => run.began || 0));
    return [...new Set(entry.runs.map((run) => (name === "name" ? entry.name : run[name] || "")))].join(", ");
  }
  function found() {
    const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
    const cases = [...entries.values()].filter((entry) => !entry.inside && entry.runs.some((run) => words.every((word) => run.words.includes(word))));
    const order = (a, b) => {
      const [x, y] = [valueOf(a, state.order), valueOf(b, state.order)];
      const empty = (value) => value === null || value === "" || value === 0;
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const sign = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return state.up ? sign : -sign;
    };
    return cases.sort(order);
  }
  function box(entry, label) {
    const input = html("input", { type: "checkbox", "aria-label": label, value: entry.key });
    input.checked = state.pick.includes(entry.key);
    input.addEventListener("change", () => choose({ pick: input.checked ? [...state.pick, entry.key].slice(-200) : state.pick.filter((key) => key !== entry.key) }));
    return input;
  }
  function showList() {
    const cases = found();
    const pages = Math.max(1, Math.ceil(cases.length / PAGE));
    const page = Math.min(pages, Math.max(1, Number(state.page) || 1));
    const shown = cases.slice((page - 1) * PAGE, page * PAGE);
    $("list").replaceChildren(...shown.map((entry) => {
      const name = html("label", {}, box(entry, `compare ${entry.name}`), html("b", {}, entry.name));
      const facts = [valueOf(entry, "status"), withUnitOr(valueOf(entry, "seconds"), "s"), many(entry.runs) ? `${entry.runs.length} launches` : "", timeOf(valueOf(entry, "began")), valueOf(entry, "machine")];
      const tags = [...new Set(entry.runs.flatMap((run) => Object.entries(run.tags || {}).map((tag) => tag.join("="))))];
      const item = html("li", {}, name, html("span", { class: "facts" }, [...facts, ...tags].filter(Boolean).join(" · ")));
      if (many(entry.runs)) {
        const inside = html("ul", {});
        const fold = html("details", {}, html("summary", {}, "launches"), inside);
        fold.addEventListener("toggle", () => fold.open && !inside.children.length && inside.append(...entry.runs.map((run) => html("li", {}, html("label", {}, box(entries.get(run.key), `compare ${run.name}`), run.name), html("span", { class: "facts" }, [run.status, withUnitOr(run.seconds, "s"), timeOf(run.began)].filter(Boolean).join(" · "))))));
        item.append(fold);
      }
      return item;
    }));
    const step = (by, name) => {
      const button = html("button", { type: "button" }, name);
      button.disabled = page + by < 1 || page + by > pages;
      button.addEventListener("click", () => choose({ page: String(page + by) }));
      return button;
    };
    const count = `${number(cases.length)} of ${number([...entries.values()].filter((entry) => !entry.inside).length)}`;
    $("pages").replaceChildren(step(-1, "‹ newer"), ` page ${page} of ${pages}, ${count} `, step(1, "older ›"));
    $("choose-head").textContent = `Choose runs (${state.pick.filter((key) => entries.has(key)).length} picked of ${count.split(" of ")[1]})`;
    $("notes").replaceChildren(...data.notes.map((note) => html("p", {}, note)));
  }
  const withUnitOr = (value, unit) => (known(value) ? withUnit(value, unit) : "");

  // --- the picked runs --------------------------------------------------------------------------

  const picked = () => state.pick.map((key) => entries.get(key)).filter(Boolean);
  const details = (entry) => entry.runs.map((run) => data.details[run.key]).filter(Boolean);
  const namesOf = (kept, part) => [...new Set(kept.flatMap((entry) => details(entry).flatMap((each) => Object.keys(each[part]))))];
  const words = (name) => data.words[name] || name;
  function settingOf(entry, name) {
    const values = [...new Set(details(entry).map((each) => each.settings[name] ?? "not set"))];
    return values.length > 3 ? `${values.length} values` : values.join(", ");
  }
  function metricOf(entry, name) {
    const values = details(entry).map((each) => each.metrics[name]).filter(known);
    if (!values.length) return { text: "-", value: null };
    const unit = data.units[name] || "";
    const [value, low, high] = [middle(values), Math.min(...values), Math.max(...values)];
    const [first, last] = [low, high].map((end) => withUnit(end, unit));
    const shared = last.replace(/^\S+/, ""); // both ends have one unit: it is written once
    const short = shared && first.endsWith(shared) ? first.slice(0, -shared.length) : first;
    const ends = low === high ? "" : ` [${short} - ${last}]`;
    return { text: withUnit(value, unit) + ends, value };
  }
  function tableOf(head, rows, caption) {
    const cells = (row) => row.map((text, place) => html(place ? "td" : "th", place ? {} : { scope: "row" }, text));
    return html("table", {}, html("caption", {}, caption), html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)))), html("tbody", {}, ...rows.map((row) => html("tr", {}, ...cells(row)))));
  }
  function showTables(kept) {
    // The two sides of a comparison have letters, which leave the heads of a phone's columns short.
    const letters = new Set(kept.map((entry) => /^[A-Z]: /.test(entry.name) ? entry.name[0] : ""));
    const names = letters.size === kept.length && !letters.has("") ? [...letters] : kept.map((entry) => entry.name);
    const rows = namesOf(kept, "settings").map((name) => [words(name), ...kept.map((entry) => settingOf(entry, name))]);
    const differ = rows.filter((row) => new Set(row.slice(1)).size > 1);
    const equal = rows.filter((row) => new Set(row.slice(1)).size === 1);
    const metrics = data.order.metrics.filter((name) => namesOf(kept, "metrics").includes(name));
    const two = kept.length === 2;
    const results = metrics.map((name) => {
      const values = kept.map((entry) => metricOf(entry, name));
      const ratio = two && values[0].value && known(values[1].value) ? [`${number(values[1].value / values[0].value, 3)} x`] : two ? ["-"] : [];
      return [words(name), ...values.map((each) => each.text), ...ratio];
    });
    const head = ["", ...names, ...(two ? ["ratio"] : [])];
    const lines = results.map((row, place) => [metrics[place], row]);
    const main = lines.slice(0, FIRST.metrics).map(([, row]) => row);
    const fold = (name, table) => html("details", {}, html("summary", {}, name), html("div", { class: "table" }, table));
    const first = [];
    if (many(kept)) first.push(differ.length ? html("div", { class: "table" }, tableOf(["", ...names], differ.slice(0, FIRST.settings), "Settings that differ")) : html("p", {}, "No setting differs"));
    if (main.length) first.push(html("div", { class: "table" }, tableOf(head, main, "Results")));
    if (differ.length > FIRST.settings) first.push(fold(`${differ.length - FIRST.settings} more settings differ`, tableOf(["", ...names], differ.slice(FIRST.settings), "More settings that differ")));
    if (lines.length > main.length) first.push(fold(`${lines.length - main.length} more results`, tableOf(head, lines.slice(FIRST.metrics).map(([, row]) => row), "More results")));
    if (equal.length) first.push(fold(many(kept) ? `${equal.length} settings are equal` : `${equal.length} settings`, tableOf(["", ...names], equal, "Settings that are equal")));
    for (const entry of kept) for (const each of details(entry)) if (each.error) first.push(html("p", { class: "error" }, `${entry.name}: ${each.error}`));
    const lost = kept.filter((entry) => details(entry).length < entry.runs.length);
    if (lost.length && !data.live) first.push(html("p", {}, `This page has no room for details of ${lost.map((entry) => entry.name).join(", ")}: make one of fewer runs.`));
    $("tables").replaceChildren(...first);
  }

  // --- curves -------------------------------------------------------------------------------------

  function smoothed(values, share) {
    const reach = Math.round((share / 200) * values.length);
    if (!reach) return values;
    return values.map((value, place) => {
      if (!known(value)) return value;
      const near = values.slice(Math.max(0, place - reach), place + reach + 1).filter(known);
      return near.reduce((a, b) => a + b, 0) / near.length;
    });
  }
  // The values of curves at common places: within the range of all, between points along a line.
  function together(curves) {
    const low = Math.max(...curves.map((curve) => curve.x[0]));
    const high = Math.min(...curves.map((curve) => curve.x[curve.x.length - 1]));
    const x = curves[0].x.filter((at) => at >= low && at <= high);
    const columns = curves.map((curve) => {
      let place = 0;
      return x.map((at) => {
        while (place < curve.x.length - 2 && curve.x[place + 1] < at) place += 1;
        const [a, b] = [place, Math.min(place + 1, curve.x.length - 1)];
        const share = curve.x[b] > curve.x[a] ? (at - curve.x[a]) / (curve.x[b] - curve.x[a]) : 0;
        return curve.y[a] + Math.min(1, Math.max(0, share)) * (curve.y[b] - curve.y[a]);
      });
    });
    const rows = x.map((_, place) => columns.map((column) => column[place]));
    return { x, mean: rows.map((row) => row.reduce((a, b) => a + b, 0) / row.length), low: rows.map((row) => Math.min(...row)), high: rows.map((row) => Math.max(...row)) };
  }
  function curveOf(each, name, axis) {
    const curve = each.curves[name];
    if (!curve || !curve[axis]) return null;
    const kept = curve[axis].map((at, place) => [at, curve.values[place]]).filter(([at, value]) => known(at) && known(value)).sort((a, b) => a[0] - b[0]);
    return kept.length ? { x: kept.map(([at]) => at), y: kept.map(([, value]) => value) } : null;
  }
  function linesOf(label, curves, place, share) {
    const look = { colour: place, dashes: Math.floor(place / 6) };
    if (curves.length > 1) {
      const all = together(curves);
      if (all.x.length) {
        const [mean, low, high] = [all.mean, all.low, all.high].map((values) => smoothed(values, share));
        return [{ ...look, label: "", silent: true, kind: "area", faint: true, x: all.x, y: high, base: low }, { ...look, label: `${label} (mean of ${curves.length}, least to most)`, kind: "line", x: all.x, y: mean, low: null }];
      }
    }
    return curves.flatMap((curve) => {
      const kind = curve.x.length <= 30 ? "dots" : "line";
      if (!share) return [{ ...look, label, kind, x: curve.x, y: curve.y }];
      return [{ ...look, label: "", silent: true, kind: "line", faint: true, x: curve.x, y: curve.y }, { ...look, label, kind: "line", x: curve.x, y: smoothed(curve.y, share) }];
    });
  }
  // The runs by what they are grouped by: by entry, or by a tag or setting, whose values have a colour.
  function groupsOf(kept) {
    if (!state.group) return kept.map((entry) => [entry.name, details(entry)]);
    const groups = new Map();
    for (const entry of kept) {
      for (const run of entry.runs) {
        const each = data.details[run.key];
        const name = `${state.group} ${groupOf(run, each)}`;
        if (each) groups.set(name, [...(groups.get(name) || []), each]);
      }
    }
    return [...groups];
  }
  const groupOf = (run, each) => (run.tags || {})[state.group] ?? run[state.group] ?? (each && each.settings[state.group]) ?? "not set";
  function figureOf(kept, names, axis, share) {
    const groups = groupsOf(kept);
    const panels = names.map((name) => {
      const series = groups.flatMap(([label, all], place) => {
        const curves = all.map((each) => curveOf(each, name, axis)).filter(Boolean);
        return curves.length ? linesOf(label, curves, place, share) : [];
      });
      const [place, unit] = PLACES[axis];
      return { title: words(name), x: { name: place, unit, whole: axis !== "seconds" }, y: { name: words(name), unit: data.units[name] || "", zero: false, log: Boolean(state.log) }, series, note: `no value of ${words(name)} by ${place.toLowerCase()}` };
    });
    return { panels, across: 2 };
  }
  function showCurves(kept) {
    for (const [part, machine, axis] of [["curve", false, state.x], ["machine", true, "seconds"]]) {
      const held = kept.flatMap(details);
      const names = data.order.curves.filter((name) => held.some((each) => each.curves[name] && Boolean(each.curves[name].machine) === machine));
      const chosen = state[part].filter((name) => names.includes(name));
      const shown = chosen.length ? chosen : names.slice(0, machine ? 4 : FIRST.curves);
      const usual = Object.keys(PLACES).find((place) => held.some((each) => shown.some((name) => curveOf(each, name, place)))) || "step";
      $(`${part}-part`).hidden = !names.length;
      fill($(`${part}-names`), names, shown);
      if (part === "curve") $("x").value = state.x || usual;
      if (names.length) Charts.draw($(`${part}-figure`), figureOf(kept, shown, axis || usual, Number(state.smooth)));
    }
  }
  function fill(select, names, shown, first = null) {
    const options = names.map((name) => html("option", { value: name }, words(name)));
    if (first !== null) options.unshift(html("option", { value: "" }, first));
    select.replaceChildren(...options);
    for (const option of select.options) option.selected = shown.includes(option.value);
  }

  // --- a metric against a setting, and by group --------------------------------------------------

  function showMetric(kept) {
    const metrics = data.order.metrics.filter((name) => namesOf(kept, "metrics").includes(name));
    const settings = namesOf(kept, "settings");
    const differ = settings.filter((name) => new Set(kept.map((entry) => settingOf(entry, name))).size > 1);
    const knobs = [...differ, ...settings.filter((name) => !differ.includes(name))].sort((a, b) => (b === "devices") - (a === "devices"));
    const tags = [...new Set(kept.flatMap((entry) => entry.runs.flatMap((run) => Object.keys(run.tags || {}))))];
    $("metric-part").hidden = !metrics.length || !many(kept);
    const [metric, knob] = [metrics.includes(state.metric) ? state.metric : metrics[0], knobs.includes(state.knob) ? state.knob : knobs[0]];
    fill($("metric"), metrics, [metric]);
    fill($("knob"), knobs, [knob]);
    fill($("group"), [...tags, "model", "machine", "workload", ...differ], [state.group], "nothing");
    if ($("metric-part").hidden) return;
    const points = kept.flatMap((entry) => entry.runs.map((run) => [entry, run, data.details[run.key]])).filter(([, , each]) => each && known(each.metrics[metric]));
    const texts = [...new Set(points.map(([, , each]) => each.settings[knob] ?? "not set"))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const numeric = texts.every((text) => text !== "" && known(Number(text)));
    const at = (each) => (numeric ? Number(each.settings[knob]) : texts.indexOf(each.settings[knob] ?? "not set"));
    const groups = new Map();
    for (const [entry, run, each] of points) {
      const name = state.group ? groupOf(run, each) : entry.name;
      groups.set(name, [...(groups.get(name) || []), [at(each), each.metrics[metric]]]);
    }
    const series = [...groups].map(([label, pairs], place) => ({ label, kind: "points", colour: place, marker: place, x: pairs.map(([x]) => x), y: pairs.map(([, y]) => y) }));
    const whole = points.every(([, , each]) => Number.isInteger(at(each)));
    const x = numeric ? { name: words(knob), log: Boolean(state.log), whole } : { name: words(knob), ticks: texts };
    Charts.draw($("metric-figure"), { panels: [{ title: `${words(metric)} against ${words(knob)}`, x, y: { name: words(metric), unit: data.units[metric] || "", log: Boolean(state.log) }, series }] });
    const unit = data.units[metric] || "";
    const rows = [...groups].map(([name, pairs]) => {
      const values = pairs.map(([, y]) => y);
      return [name, number(values.length), withUnit(middle(values), unit), withUnit(Math.min(...values), unit), withUnit(Math.max(...values), unit)];
    });
    $("group-table").replaceChildren(tableOf([words(state.group || "run"), "launches", `median ${words(metric)}`, "least", "most"], rows, `${words(metric)} by ${words(state.group || "run")}`));
  }

  // --- pictures, CSV --------------------------------------------------------------------------------

  function showPictures(kept) {
    const named = new Map();
    for (const entry of kept) for (const each of details(entry)) for (const picture of each.pictures || []) named.set(picture.name, [...(named.get(picture.name) || []), [entry.name, picture]]);
    $("picture-part").hidden = !named.size;
    $("pictures").replaceChildren(...[...named].map(([name, all]) => html("div", {}, html("h3", {}, name), html("div", { class: "beside" }, ...all.map(([run, picture]) => pictureOf(picture, `${name} of ${run}`, run))))));
  }
  function pictureOf(picture, alt, run) {
    const shown = html("div", { class: "drawing", role: "img", "aria-label": alt });
    Charts.draw(shown, picture.figure);
    return html("figure", {}, shown, html("figcaption", {}, run));
  }
  // No cell is a formula in a spreadsheet.
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = /^[=+\-@\t\r]/.test(text) && !known(Number(text)) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  function csvOf(kept) {
    const [settings, metrics] = [namesOf(kept, "settings"), namesOf(kept, "metrics")];
    const tags = [...new Set(kept.flatMap((entry) => entry.runs.flatMap((run) => Object.keys(run.tags || {}))))];
    const rows = [["run", ...FIELDS.slice(1), "began", ...tags.map((name) => `tag ${name}`), ...settings.map(words), ...metrics.map((name) => (data.units[name] ? `${words(name)} (${data.units[name]})` : words(name)))]];
    for (const entry of kept) {
      for (const run of entry.runs) {
        const each = data.details[run.key] || { settings: {}, metrics: {} };
        rows.push([run.name, ...FIELDS.slice(1).map((name) => run[name]), timeOf(run.began), ...tags.map((name) => (run.tags || {})[name]), ...settings.map((name) => each.settings[name]), ...metrics.map((name) => each.metrics[name])]);
      }
    }
    return rows.map((row) => row.map(cell).join(",")).join("\n");
  }
  function curvesCsv(kept) {
    const rows = [["run", "metric", "unit", "step", "epoch", "seconds", "value"]];
    for (const entry of kept) {
      for (const run of entry.runs) {
        for (const [name, curve] of Object.entries((data.details[run.key] || { curves: {} }).curves)) {
          curve.values.forEach((value, place) => rows.push([run.name, words(name), data.units[name], ...Object.keys(PLACES).map((axis) => (curve[axis] || [])[place]), value]));
        }
      }
    }
    return rows.map((row) => row.map(cell).join(",")).join("\n");
  }
  function save(name, text) {
    const link = html("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // --- the page ---------------------------------------------------------------------------------------

  function show() {
    const kept = picked();
    showList();
    $("compared").hidden = !kept.length;
    if (!kept.length) return;
    showTables(kept);
    showCurves(kept);
    showMetric(kept);
    showPictures(kept);
  }
  async function renew() {
    const asked = picked().flatMap((entry) => entry.runs.map((run) => run.key)).slice(0, 200);
    const link = new URLSearchParams([["version", data.version], ...asked.map((key) => ["run", key])]);
    const lacks = asked.some((key) => !data.details[key]);
    const answer = await fetch(`data.json?${lacks ? `again=1&${link}` : link}`).catch(() => null);
    if (!answer || answer.status !== 200) return;
    data = await answer.json();
    group(data.rows);
    show();
  }
  group(data.rows);
  readLink();
  for (const name of ["x", "smooth", "metric", "knob", "group", "find", "order"]) {
    $(name).value = state[name];
    $(name).addEventListener(name === "smooth" || name === "find" ? "input" : "change", () => choose({ [name]: $(name).value, ...(name === "find" ? { page: "1" } : {}) }));
  }
  for (const name of ["log", "up"]) {
    $(name).checked = Boolean(state[name]);
    $(name).addEventListener("change", () => choose({ [name]: $(name).checked ? "1" : "" }));
  }
  for (const name of ["curve", "machine"]) $(`${name}-names`).addEventListener("change", (event) => choose({ [name]: [...event.target.selectedOptions].map((option) => option.value) }));
  $("runs-csv").addEventListener("click", () => save("runs.csv", csvOf(picked())));
  $("all-csv").addEventListener("click", () => save("list.csv", csvOf(found())));
  $("curves-csv").addEventListener("click", () => save("curves.csv", curvesCsv(picked())));
  addEventListener("hashchange", () => (readLink(), show()));
  $("choose").open = innerWidth > 900 || !picked().length;
  show();
  if (data.live) {
    renew();
    setInterval(renew, 2000);
  }
})();
