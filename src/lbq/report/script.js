"use strict";
// Sorting: by the number in data-v where there is one, by what is shown in tables of numbers, else by text. Empty cells stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const head = button.parentElement, index = head.cellIndex, body = table.tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => {
      const c = row.cells[index], text = c.textContent.trim();
      const number = c.dataset.v ?? (table.classList.contains("numbers") && text !== "" ? text : undefined);
      return number === undefined ? text : Number(number);
    };
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      return up ? order : -order;
    });
    body.append(...rows.map(([, row]) => row));
  });
}

// Theme: the system's unless the reader chose one.
const root = document.documentElement, theme = document.getElementById("theme");
const remembered = (value) => { try { if (value) localStorage.setItem("lbq-theme", value); return localStorage.getItem("lbq-theme"); } catch { return value; } };
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const show = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
if (remembered()) root.dataset.theme = remembered();
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remembered(root.dataset.theme); show(); });
show();

// What can be scrolled sideways fades out at the side where there is more.
const fade = (box) => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
const drawn = new ResizeObserver((entries) => { for (const { target } of entries) fade(target); });
document.addEventListener("scroll", (event) => { if (event.target.matches?.(".scroll, .drawing")) fade(event.target); }, true);
for (const box of document.querySelectorAll(".scroll, .drawing")) drawn.observe(box);

// One curve of many: while the pointer is on it or on its name in the legend, the others are faint.
for (const plot of document.querySelectorAll("svg.plot")) {
  const point = (event) => {
    const of = event.target.closest?.("[data-of]")?.dataset.of;
    for (const part of plot.querySelectorAll("[data-of]")) part.classList.toggle("faint", of !== undefined && part.dataset.of !== of);
  };
  plot.addEventListener("pointerover", point);
  plot.addEventListener("pointerleave", point);
}

// Comparing two runs: what differs, and their curves on common axes.
const holder = document.getElementById("runs-data");
if (holder) {
  const runs = JSON.parse(holder.textContent), a = document.getElementById("run-a"), b = document.getElementById("run-b");
  const out = document.getElementById("compared");
  const element = (name, text, parent) => { const e = document.createElement(name); if (text !== undefined) e.textContent = text; parent.append(e); return e; };
  const svg = (name, values, parent) => { const e = document.createElementNS("http://www.w3.org/2000/svg", name); for (const k in values) e.setAttribute(k, values[k]); parent.append(e); return e; };
  // Room around a single value, so that it lies in the middle of an axis.
  const span = (values) => { const low = Math.min(...values), high = Math.max(...values), room = high > low ? 0 : Math.abs(high) * 0.1 || 1; return [low - room, high + room]; };
  const ticks = (low, high, whole) => {
    const unit = 10 ** Math.floor(Math.log10((high - low) / 5));
    const step = [1, 2, 5, 10].map((m) => m * unit).find((t) => (high - low) / t <= 5);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(6)));
    return whole ? found.filter(Number.isInteger) : found;
  };
  const plot = (title, pair, parent) => {
    const shown = pair.map((r, i) => ({ ...r, i })).filter((r) => r.points.length);
    if (!shown.length) return;
    const both = shown.flatMap((r) => r.points);
    const [x0, x1] = span(both.map((p) => p[0])), [y0, y1] = span(both.map((p) => p[1]));
    const at = ([x, y]) => [50 + 415 * (x - x0) / (x1 - x0), 180 - 150 * (y - y0) / (y1 - y0)];
    const figure = element("figure", undefined, parent), drawing = element("div", undefined, figure);
    drawing.className = "drawing";
    drawing.tabIndex = 0;
    const s = svg("svg", { class: "plot", role: "img", viewBox: "0 0 480 205", "aria-label": title }, drawing);
    const write = (x, y, text, anchor, kind) => { svg("text", { x, y, "text-anchor": anchor, class: kind }, s).textContent = text; };
    write(50, 18, title, "start", "bold");
    for (const t of ticks(y0, y1)) { const y = at([x0, t])[1]; svg("path", { class: "grid", d: `M50 ${y}H465` }, s); write(45, y + 4, String(t), "end", "soft"); }
    for (const t of ticks(x0, x1, true)) { const x = at([t, y0])[0]; svg("path", { class: "axis", d: `M${x} 180v4` }, s); write(x, 198, String(t), "middle", "soft"); }
    svg("path", { class: "axis", d: "M50 25V180H465" }, s);
    for (const { points, i } of shown) {
      if (points.length > 1) svg("path", { class: `line s${i}`, "stroke-dasharray": i ? "6 3" : "none", d: "M" + points.map((p) => at(p).map((v) => v.toFixed(1)).join(" ")).join("L") }, s);
      const every = points.length > 20 ? Math.ceil(points.length / 8) : 1;
      points.forEach((p, j) => {
        const [x, y] = at(p), kind = `mark s${i}`;
        if (j % every === 0) i ? svg("rect", { class: kind, x: x - 3, y: y - 3, width: 6, height: 6 }, s) : svg("circle", { class: kind, cx: x, cy: y, r: 3.4 }, s);
      });
    }
    element("figcaption", shown.map((r) => `${r.i ? "dashed, squares" : "solid, circles"}: ${r.name}`).join("; "), figure);
    drawn.observe(drawing);
  };
  const compare = () => {
    const pair = [runs[a.value], runs[b.value]];
    out.replaceChildren();
    const scroll = element("div", undefined, out);
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    const table = element("table", undefined, scroll);
    element("caption", "What differs", table);
    const head = element("tr", undefined, element("thead", undefined, table));
    for (const text of ["", pair[0].name, pair[1].name, "difference"]) { const h = element("th", text, head); h.scope = "col"; h.style.padding = "6px 12px"; }
    const body = element("tbody", undefined, table);
    for (const key of [...new Set([...Object.keys(pair[0].facts), ...Object.keys(pair[1].facts)])]) {
      const [x, y] = pair.map((r) => r.facts[key]);
      if (x === y) continue;
      const row = element("tr", undefined, body);
      element("td", key, row);
      for (const value of [x, y]) element("td", value === undefined ? "" : String(value), row);
      element("td", typeof x === "number" && typeof y === "number" ? (y - x > 0 ? "+" : "") + Number((y - x).toPrecision(4)) : "", row);
    }
    if (!body.rows.length) element("td", "nothing", element("tr", undefined, body));
    drawn.observe(scroll);
    const figures = element("div", undefined, out);
    figures.className = "figures";
    for (const [key, title] of [["loss", "Training loss by epoch"], ["test_accuracy", "Test accuracy by epoch"], ["steps", "Step γ by layer"], ["active", "Active ratio by layer"]])
      plot(title, pair.map((r) => ({ name: r.name, points: r.curves[key] || [] })), figures);
  };
  for (const select of [a, b]) select.addEventListener("change", compare);
  compare();
}

// What is folded opens where a link leads into it, and for printing.
const unfold = () => { const e = location.hash && document.getElementById(location.hash.slice(1)); if (e && e.tagName === "DETAILS") { e.open = true; e.scrollIntoView(); } };
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("#tables details, #layers details, #costs details")) d.open = true; });
unfold();
