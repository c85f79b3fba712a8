"use strict";
// Sorting: by the number in data-v where there is one, by what is shown in tables of numbers, else by text. Empty cells stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  if (!table.classList.contains("numbers")) {  // on a phone each row is a block, and its cells say their columns
    table.classList.add("rows");
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
    for (const row of table.tBodies[0].rows) for (const cell of row.cells) cell.dataset.label = heads[cell.cellIndex];
  }
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
const show = () => { theme.textContent = dark() ? "Light" : "Dark"; };
if (remembered()) root.dataset.theme = remembered();
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remembered(root.dataset.theme); show(); });
show();

// What can be scrolled sideways fades out at the side where there is more.
const fade = (box) => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
const drawn = new ResizeObserver((entries) => { for (const { target } of entries) fade(target); });
document.addEventListener("scroll", (event) => { if (event.target.matches?.(".scroll, nav ul")) fade(event.target); }, true);
for (const box of document.querySelectorAll(".scroll, nav ul")) drawn.observe(box);

// The line of navigation marks the section that is being read.
const links = [...document.querySelectorAll("nav a")];
const here = () => {
  const read = links.filter((link) => document.querySelector(link.hash).getBoundingClientRect().top < 120).at(-1) ?? links[0];
  if (!read || read.hasAttribute("aria-current")) return;
  for (const link of links) link === read ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  read.parentElement.parentElement.scrollLeft = read.offsetLeft - read.parentElement.parentElement.offsetLeft - 20;
};
addEventListener("scroll", here, { passive: true });
here();

// One curve of many: while the pointer is on it or on its name in the legend, the others are faint.
for (const plot of document.querySelectorAll("svg.plot")) {
  const point = (event) => {
    const of = event.target.closest?.("[data-of]")?.dataset.of;
    for (const part of plot.querySelectorAll("[data-of]")) part.classList.toggle("faint", of !== undefined && part.dataset.of !== of);
  };
  plot.addEventListener("pointerover", point);
  plot.addEventListener("pointerleave", point);
}

// What is folded opens where a link leads into it, and for printing.
const unfold = () => { const e = location.hash && document.getElementById(location.hash.slice(1)); if (e && e.tagName === "DETAILS") { e.open = true; e.scrollIntoView(); } };
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("section:not(#details) details")) d.open = true; });
unfold();
