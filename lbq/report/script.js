"use strict";
// Sorting: by the number in data-v where there is one, else by text. Empty cells stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const head = button.parentElement, index = head.cellIndex, body = table.tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => { const c = row.cells[index]; return c.dataset.v === undefined ? c.textContent.trim() : Number(c.dataset.v); };
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

// Comparing two runs: what differs, and their curves on common axes.
const holder = document.getElementById("runs-data");
if (holder) {
  const runs = JSON.parse(holder.textContent), a = document.getElementById("run-a"), b = document.getElementById("run-b");
  const out = document.getElementById("compared");
  const element = (name, text, parent) => { const e = document.createElement(name); if (text !== undefined) e.textContent = text; parent.append(e); return e; };
  const svg = (name, values, parent) => { const e = document.createElementNS("http://www.w3.org/2000/svg", name); for (const k in values) e.setAttribute(k, values[k]); parent.append(e); return e; };
  const plot = (title, pair, parent) => {
    const both = pair.flatMap((r) => r.points);
    if (!both.length) return;
    const xs = both.map((p) => p[0]), ys = both.map((p) => p[1]);
    const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const at = ([x, y]) => [50 + 415 * (x - x0) / (x1 - x0 || 1), 180 - 150 * (y - y0) / (y1 - y0 || 1)];
    const figure = element("figure", undefined, parent);
    const s = svg("svg", { class: "plot", role: "img", viewBox: "0 0 480 205", "aria-label": title }, figure);
    const write = (x, y, text, anchor, kind) => { svg("text", { x, y, "text-anchor": anchor, class: kind }, s).textContent = text; };
    write(50, 18, title, "start", "bold");
    write(45, 184, y0.toPrecision(3), "end", "soft");
    write(45, 34, y1.toPrecision(3), "end", "soft");
    write(50, 198, String(x0), "start", "soft");
    write(465, 198, String(x1), "end", "soft");
    svg("path", { class: "axis", d: "M50 25V180H465" }, s);
    pair.forEach((r, i) => { if (r.points.length) svg("path", { class: `line s${i}`, "stroke-dasharray": i ? "6 3" : "none", d: "M" + r.points.map((p) => at(p).map((v) => v.toFixed(1)).join(" ")).join("L") }, s); });
    element("figcaption", pair.map((r, i) => `${i ? "dashed" : "solid"}: ${r.name}`).join("; "), figure);
  };
  const compare = () => {
    const pair = [runs[a.value], runs[b.value]];
    out.replaceChildren();
    const scroll = element("div", undefined, out);
    scroll.className = "scroll";
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
addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("#tables details, #costs details")) d.open = true; });
unfold();
