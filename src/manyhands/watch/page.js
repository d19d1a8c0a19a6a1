"use strict";
// Ask for the jobs once a second, and for the curves of those that have changed. All texts of a
// record are put on the page with textContent: they may be a stranger's.

const COLOURS = ["#3d85c6", "#e07b00", "#1f9e77", "#c2569b", "#7d6bd6", "#b8960c", "#d1495b", "#2aa5bd"];
const PARTS = {
  loading: "loading", compute: "compute", passes: "passes", sync: "waiting for ranks",
  fixed: "once a step", update: "optimizer", rounds: "sync rounds", other: "other",
};
const AXES = { progress: "progress", step: "optimizer steps", samples: "samples", time: "seconds" };
const EVERY = 1000; // milliseconds
const SVG = "http://www.w3.org/2000/svg";

const jobsPlace = document.getElementById("jobs");
const figuresPlace = document.getElementById("figures");
const eventsPlace = document.getElementById("events");
const connection = document.getElementById("connection");
const axisChoice = document.getElementById("axis");
const logChoice = document.getElementById("log");
const hidden = new Set(); // paths of jobs whose curves are not shown
const curves = new Map(); // by path: { version, ... }
const figures = new Map(); // by column: the elements of a figure
let latest = { jobs: [], panels: {}, crews: {} };

const colour = (index) => COLOURS[index % COLOURS.length];

function make(kind, { text, ...attributes } = {}, children = []) {
  const element = document.createElement(kind);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "background") element.style.background = value;
    else if (name === "width") element.style.width = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function draw(kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// -- numbers ----------------------------------------------------------------------------------

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value); // "nan", "inf"
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || typeof seconds !== "number") return "–";
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.round(hours / 24)} days`;
}

const percent = (fraction) => `${Math.round(100 * fraction)} %`;

// -- a job ------------------------------------------------------------------------------------

function stats(job) {
  const rows = job.own.slice(0, 6).map((key) => [key, number(job.latest[key])]);
  const add = (name, value, detail) => {
    if (value !== null && value !== undefined) rows.push([name, value, detail]);
  };
  const has = (key) => typeof job.latest[key] === "number";
  add("step", job.step.toLocaleString("en"));
  if (job.progress !== null) add("progress", number(job.progress, 5));
  if (has("gain")) {
    add("gain", number(job.latest.gain, 3), has("scale") ? `of ${number(job.latest.scale, 3)}` : "");
  }
  if (has("efficiency")) add("efficiency", percent(job.latest.efficiency));
  if (job.batch !== null) add("batch", number(job.batch), job.batch_unit);
  if (job.samples_per_second !== null) add("samples a second", number(job.samples_per_second));
  if (job.steps_per_second !== null) add("steps a second", number(job.steps_per_second, 3));
  add("workers", job.workers, job.members);
  add("rounds", job.rounds);
  const faults = Object.entries(job.faults).map(([kind, count]) => `${count} ${kind.replace("_", " ")}`);
  if (faults.length) add("faults", faults.join(", "));
  add("time", duration(job.seconds), job.starts > 1 ? `${job.starts} starts` : "");
  return rows;
}

function progressBar(job) {
  const at = job.progress ?? job.step;
  if (job.until === null || typeof at !== "number") return [];
  const done = Math.min(1, Math.max(0, at / job.until));
  const unit = job.progress === null ? "steps" : "progress";
  const left = ["running", "silent"].includes(job.state) && job.left !== null
    ? ` · about ${duration(job.left)} left` : "";
  return [
    make("div", { class: "bar", role: "progressbar", "aria-valuenow": Math.round(100 * done), "aria-label": "done" },
      [make("i", { width: `${100 * done}%` })]),
    make("p", { class: "note left", text: `${percent(done)} of ${unit} ${number(job.until, 6)}${left}` }),
  ];
}

function partsBar(job) {
  const parts = Object.keys(PARTS).filter((part) => typeof job.parts[part] === "number" && part in job.parts);
  const total = parts.reduce((sum, part) => sum + job.parts[part], 0);
  if (!(total > 0)) return [];
  const shown = parts.filter((part) => job.parts[part] > 0);
  return [
    make("div", { class: "bar parts", "aria-hidden": "true" }, shown.map((part) =>
      make("i", { width: `${100 * job.parts[part] / total}%`, background: `var(--${part})` }))),
    make("ul", { class: "legend", "aria-label": "What a step's time goes into" }, [
      make("li", { text: `a step: ${duration(total)}` }),
      ...shown.map((part) => make("li", {}, [
        make("i", { background: `var(--${part})` }),
        `${PARTS[part]} ${percent(job.parts[part] / total)}`,
      ])),
    ]),
  ];
}

function card(job, index) {
  const box = make("input", { type: "checkbox", "aria-label": `show the curves of ${job.name}` });
  box.checked = !hidden.has(job.path);
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(job.path); else hidden.add(job.path);
    drawFigures();
  });
  let text = job.text;
  if (job.behind > 0.01) text = `reading the record: ${percent(1 - job.behind)}`;
  const about = [job.path, job.process, job.date].filter(Boolean).join("\n");
  const config = Object.keys(job.config).length ? JSON.stringify(job.config, null, 2) : "";
  const open = jobsPlace.querySelector(`[data-job="${index}"] details`)?.open;
  const details = make("details", {}, [
    make("summary", { text: "configuration" }),
    make("pre", { text: [about, ...job.sources, config].filter(Boolean).join("\n\n") }),
  ]);
  details.open = Boolean(open);
  return make("article", { "data-job": index, "data-state": job.state }, [
    make("div", { class: "name" }, [
      box, make("span", { class: "dot", background: colour(index) }),
      make("h2", { text: job.name }), make("span", { class: `state ${job.state}`, text: job.state }),
    ]),
    ...(text ? [make("p", { class: `text${["died", "failed", "damaged"].includes(job.state) ? " bad" : ""}`, text })] : []),
    ...progressBar(job),
    make("dl", {}, stats(job).map(([name, value, detail]) => make("div", {}, [
      make("dt", { text: name }),
      make("dd", { "data-name": name }, detail ? [String(value), " ", make("small", { text: detail })] : [String(value)]),
    ]))),
    ...partsBar(job),
    details,
  ]);
}

function drawJobs() {
  jobsPlace.replaceChildren(...latest.jobs.map(card));
  const events = latest.jobs.flatMap((job) => job.events.map((event) => ({ ...event, job: job.name })));
  eventsPlace.hidden = !events.length;
  const newest = events.reverse().slice(0, 60);
  eventsPlace.querySelector("tbody").replaceChildren(...newest.map((event) =>
    make("tr", { class: event.kind }, [
      make("td", { text: event.job }), make("td", { text: event.step.toLocaleString("en") }),
      make("td", { text: duration(event.seconds) }), make("td", { text: event.text }),
    ])));
}

// -- figures ----------------------------------------------------------------------------------

// The columns to draw: the user's own as they were given, then ours in the order of the panels.
function columns() {
  const own = [...new Set(latest.jobs.flatMap((job) => job.own))];
  const ours = Object.entries(latest.panels).filter(([, panel]) => panel.drawn && !panel.own);
  ours.sort(([, a], [, b]) => a.order - b.order);
  return [...own, "rate", ...ours.map(([key]) => key)];
}

function positions(run, axis) {
  return run.x[axis] ?? (axis === "progress" ? run.x.step : undefined);
}

function linesOf(key, axis) {
  return latest.jobs.flatMap((job, index) => {
    const run = curves.get(job.path);
    const x = run && positions(run, axis);
    if (!x || hidden.has(job.path)) return [];
    const mean = key === "rate" ? run.rate : run.mean[key];
    if (!mean) return [];
    const all = x.map((at, i) => [at, mean[i], run.low[key]?.[i] ?? mean[i], run.high[key]?.[i] ?? mean[i]]);
    const points = all.filter((point) => point.every((value) => typeof value === "number"));
    return points.length ? [{ name: job.name, colour: colour(index), points }] : [];
  });
}

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-9 * span; at += 1) found.push(at * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : [1, 2, 5];
  for (let power = first; power <= last; power += 1) {
    for (const factor of factors) {
      const at = factor * 10 ** power;
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found.length > 1 ? found : [low, high];
}

// Values at the outermost 2 % of all curves do not decide the scale, as in the report.
function bounds(lines, log) {
  const means = lines.flatMap((line) => line.points.map((point) => point[1]))
    .filter((value) => !log || value > 0).sort((a, b) => a - b);
  if (!means.length) return null;
  const cut = means.length >= 50 ? Math.ceil(0.02 * means.length) : 0;
  const [low, high] = [means[cut], means[means.length - 1 - cut]];
  const room = high - low;
  const whole = [means[0], means[means.length - 1]];
  return log ? whole : [Math.max(whole[0], low - room), Math.min(whole[1], high + room)];
}

const RATE = { title: "Throughput", meaning: "Samples a second, or steps a second where the size of a batch is unknown." };
const panelOf = (key) => (key === "rate" ? RATE : latest.panels[key]);

function figureOf(key) {
  if (figures.has(key)) return figures.get(key);
  const panel = panelOf(key);
  const element = make("figure", { "data-column": key });
  const figure = { element, plot: make("div", { class: "plot" }), values: make("div", { class: "values", hidden: "" }) };
  element.append(make("h2", { text: panel.title }));
  if (panel.meaning) element.append(make("figcaption", { text: panel.meaning }));
  element.append(figure.plot, figure.values);
  figures.set(key, figure);
  return figure;
}

function drawFigure(key) {
  const panel = panelOf(key);
  const figure = figureOf(key);
  const axis = axisChoice.value, log = logChoice.checked;
  const lines = linesOf(key, axis);
  figure.element.hidden = !lines.length;
  if (!lines.length) return;

  const flat = lines.flatMap((line) => line.points.flatMap((point) => point.slice(1)));
  const same = flat.every((value) => value === flat[0]);
  figure.element.classList.toggle("same", same);
  if (same) {
    figure.plot.replaceChildren(make("p", { class: "note", text: `always ${number(flat[0])}` }));
    return;
  }
  const range = bounds(lines, log && flat.some((value) => value > 0));
  const logarithmic = log && range !== null && range[0] > 0;
  const width = Math.max(200, figure.plot.clientWidth || 420), height = 224;
  const [left, right, top, bottom] = [58, width - 8, 8, height - 34];
  const xs = lines.flatMap((line) => [line.points[0][0], line.points[line.points.length - 1][0]]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = range[1] > range[0] ? range : [range[0] - Math.abs(range[0] || 1) / 10, range[1] + Math.abs(range[1] || 1) / 10];
  const place = logarithmic ? Math.log : (value) => value;
  const margin = 0.04 * (place(y1) - place(y0));
  const toX = (value) => left + (right - left) * (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5);
  const toY = (value) => {
    const clipped = logarithmic ? Math.max(value, y0 / 10) : value;
    const share = (place(clipped) - place(y0) + margin) / (place(y1) - place(y0) + 2 * margin);
    return bottom - (bottom - top) * Math.min(1.02, Math.max(-0.02, share));
  };
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
  for (const value of logarithmic ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: right, y1: toY(value), y2: toY(value) }));
    svg.append(draw("text", { x: left - 6, y: toY(value) + 4, "text-anchor": "end" }, number(value, 3)));
  }
  for (const value of ticks(x0, x1, 6)) {
    svg.append(draw("text", { x: toX(value), y: bottom + 15, "text-anchor": "middle" }, number(value, 3)));
  }
  svg.append(draw("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, AXES[axis]));
  for (const line of lines) {
    const at = (index) => line.points.map((point) => `${toX(point[0]).toFixed(1)},${toY(point[index]).toFixed(1)}`);
    if (line.points.some((point) => point[3] > point[2])) {
      const outline = [...at(3), ...at(2).reverse()].join("L");
      svg.append(draw("path", { class: "band", d: `M${outline}Z`, fill: line.colour }));
    }
    svg.append(draw("path", { class: "curve", d: `M${at(1).join("L")}`, stroke: line.colour }));
    if (line.points.length === 1) {
      svg.append(draw("circle", { cx: toX(line.points[0][0]), cy: toY(line.points[0][1]), r: 3, fill: line.colour }));
    }
  }
  const cursor = draw("line", { class: "at", y1: top, y2: bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const value = x0 + (x1 - x0) * (((event.clientX - frame.left) * width / frame.width - left) / (right - left));
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", toX(value));
    cursor.setAttribute("x2", toX(value));
    figure.values.hidden = false;
    figure.values.replaceChildren(...lines.map((line) => {
      const near = line.points.reduce((best, point) =>
        (Math.abs(point[0] - value) < Math.abs(best[0] - value) ? point : best));
      return make("div", {}, [make("i", { background: line.colour }), `${line.name}: ${number(near[1], 5)} at ${number(near[0], 5)}`]);
    }));
  });
  svg.addEventListener("pointerleave", () => {
    figure.values.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  });
  figure.plot.replaceChildren(svg);
}

function drawFigures() {
  const keys = columns();
  const elements = keys.map((key) => figureOf(key).element);
  if (elements.some((element, index) => figuresPlace.children[index] !== element)
      || elements.length !== figuresPlace.children.length) {
    figuresPlace.replaceChildren(...elements);
  }
  keys.forEach(drawFigure); // on the page, where its width is known
}

// -- asking -----------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  return answer.json();
}

let seen = null; // when the last answer came

async function update() {
  try {
    latest = await ask("/jobs");
    let changed = false;
    await Promise.all(latest.jobs.map(async (job, index) => {
      if (curves.get(job.path)?.version === job.version) return;
      curves.set(job.path, await ask(`/curves/${index}`));
      changed = true;
    }));
    seen = new Date();
    const running = latest.jobs.filter((job) => job.state === "running").length;
    connection.className = "";
    connection.textContent = `${running} of ${latest.jobs.length} running · ${seen.toLocaleTimeString()}`;
    drawJobs();
    if (changed || !figuresPlace.children.length) drawFigures();
  } catch (error) {
    connection.className = "lost";
    connection.textContent = `manyhands watch does not answer (${error.message})`
      + (seen ? `: what is here is of ${seen.toLocaleTimeString()}` : "");
  }
  setTimeout(update, document.hidden ? 5 * EVERY : EVERY);
}

axisChoice.addEventListener("change", drawFigures);
logChoice.addEventListener("change", drawFigures);
addEventListener("resize", drawFigures);
update();
