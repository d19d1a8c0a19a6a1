const { figures, axes } = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll(".plot")];
const switches = [...document.querySelectorAll(".switch input")];
const boxes = [...document.querySelectorAll("table [type=checkbox]")];

const logs = plots.map((plot) => plot.parentElement.querySelector(".log input"));

const chosen = (name) => switches.find((input) => input.name === name && input.checked)?.value;

// The scale "best" has a range only if a few values would flatten the curves.
function heights(yaxis, choice) {
  if (choice === "best") return yaxis;
  const { range, type, ...rest } = yaxis;
  const log = { type: "log", exponentformat: "power" };
  return { ...rest, ...(choice === "log" ? log : { type: "linear" }), autorange: true };
}

// Show the chosen running mean of a curve, above the faint curve of all values.
function smoothed(trace, window) {
  const own = trace.meta.window;
  if (own === null || own === undefined || window === undefined) return trace;
  const faint = own === 0 && window > 0;
  if (own !== 0 && own !== window) return null;
  return { ...trace, opacity: faint ? 0.25 : 1, ...(faint ? { hoverinfo: "skip", hovertemplate: null } : {}) };
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = chosen("axis");
  const height = chosen("height");
  const smoothing = chosen("smoothing");
  const window = smoothing === undefined ? undefined : Number(smoothing);
  const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => Number(box.value)));
  const line = { gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false };

  figures.forEach(({ data, layout }, index) => {
    const shown = data.map((trace) => smoothed(trace, window)).filter(Boolean);
    const traces = shown.map((trace) => ({
      ...trace, x: trace.meta.x[axis], visible: !hidden.has(trace.meta.run),
    }));
    Plotly.react(plots[index], traces, {
      ...layout,
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line") },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--ink") },
      xaxis: { ...layout.xaxis, ...line, title: { text: axes[axis] } },
      yaxis: { ...heights(layout.yaxis, logs[index]?.checked ? "log" : height), ...line },
    }, {
      responsive: true, displaylogo: false,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    });
  });
}

// A page that follows runs reloads itself, and restores the reader's choices.
function follow(workers) {
  const inputs = [...switches, ...boxes, ...logs.filter(Boolean)];
  const place = `choices ${location.pathname}`;
  const nameOf = (input) => (input.type === "radio" ? `${input.name} ${input.value}` : input.name);
  const choices = JSON.parse(sessionStorage.getItem(place) ?? "{}");
  inputs.forEach((input) => { input.checked = choices[nameOf(input)] ?? input.checked; });
  addEventListener("pagehide", () => {
    const made = inputs.map((input) => [nameOf(input), input.checked]);
    sessionStorage.setItem(place, JSON.stringify(Object.fromEntries(made)));
  });
  setInterval(() => {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - workers.dataset.written));
    workers.querySelector("caption span").textContent = `, ${seconds} s ago`;
  }, 1000);
  // Wait until the page is complete, because only then does a browser restore the scroll position.
  addEventListener("load", () => setTimeout(() => location.reload(), 1000 * workers.dataset.reload));
}

const followed = document.querySelector("[data-reload]");
if (followed) follow(followed);
if (figures.length) {
  draw();
  [...switches, ...boxes, ...logs.filter(Boolean)].forEach((input) => input.addEventListener("change", draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
