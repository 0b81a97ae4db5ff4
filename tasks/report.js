// Draws the figures when they come into view, in the colours of the scheme, and lets a reader choose among them.
"use strict";

const root = document.documentElement;
const { charts, templates } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touched = matchMedia("(pointer: coarse)").matches; // dragging scrolls the page there
const button = document.getElementById("scheme");
const drawn = new Set();

const scheme = () => root.dataset.scheme ?? (dark.matches ? "dark" : "light");

function coloured(figure) {
  const colours = figure.layout.meta[scheme()];
  const traces = figure.data.map((trace, index) => ({
    ...trace,
    line: { ...trace.line, color: colours[index] },
    marker: { ...trace.marker, color: colours[index] },
  }));
  const layout = { ...figure.layout, template: templates[scheme()], autosize: !figure.layout.width };
  return [traces, touched ? { ...layout, dragmode: false } : layout];
}

function draw(place) {
  const buttons = [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  const config = { displaylogo: false, responsive: true, showSendToCloud: false, modeBarButtons: buttons };
  Plotly.newPlot(place, ...coloured(charts[place.id.slice("chart-".length)]), config);
  drawn.add(place);
}

function recolour() {
  const isDark = scheme() === "dark";
  button.setAttribute("aria-pressed", isDark);
  for (const place of drawn) {
    const [traces, layout] = coloured(charts[place.id.slice("chart-".length)]);
    const colours = traces.map((trace) => trace.line.color);
    Plotly.update(place, { "line.color": colours, "marker.color": colours }, { template: layout.template });
  }
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) {
        watcher.unobserve(target);
        draw(target);
      }
    }
  },
  { rootMargin: "400px" },
);
for (const place of document.querySelectorAll(".plot")) watcher.observe(place);
addEventListener("beforeprint", () => {
  for (const place of document.querySelectorAll("figure:not([hidden]) .plot")) if (!drawn.has(place)) draw(place);
});

button.addEventListener("click", () => {
  root.dataset.scheme = scheme() === "dark" ? "light" : "dark";
  recolour();
});
dark.addEventListener("change", recolour);
recolour();

for (const select of document.querySelectorAll("select[data-chooses]")) {
  const choose = () => {
    for (const figure of document.querySelectorAll(`#${select.dataset.chooses} > figure`)) {
      figure.hidden = figure.dataset.option !== select.value;
    }
  };
  select.addEventListener("change", choose);
  choose(); // a browser may have kept what was chosen before
}

function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) {
    target.closest("details")?.setAttribute("open", "");
    target.scrollIntoView();
  }
}
addEventListener("hashchange", reveal);
reveal();
