// The page: takes drawings and pictures, runs the network, and shows what it did.

const LEVELS = { light: ["#de7a00", "#d03f55", "#97278f", "#561d86", "#1d0f45"], dark: ["#8c5fd9", "#d65c9c", "#f58a55", "#fcbf3f", "#fdf7a0"] };
const NEGATIVE = { light: ["#7ab8dd", "#00486f"], dark: ["#2f6f99", "#a5dcff"] };
const SHOWN_CLASSES = 10, KEY_STEP = 1 / 24, TIMED_MS = 12;
const EXAMPLE = [[[0.33, 0.34], [0.36, 0.22], [0.5, 0.16], [0.64, 0.22], [0.67, 0.36], [0.58, 0.52], [0.44, 0.68], [0.32, 0.84], [0.5, 0.83], [0.7, 0.83]]];

const $ = (id) => document.getElementById(id);
const count = (number) => Math.round(number).toLocaleString("en");
const made = (tag, text, properties = {}) => Object.assign(document.createElement(tag), { textContent: text, ...properties });
const state = { strokes: [], pen: [0.5, 0.5], lifted: true, example: false, step: 0, view: "levels", pixels: null };
let network;

// Theme: the system's, until the reader chooses -----------------------------------------------------------------------

const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  root.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light theme" : "Dark theme";
  if (network) { drawPad(); show(); }
}
$("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
setTheme(system.matches ? "dark" : "light");

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function themed(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

/** The colour of a level, evenly along the anchors. */
function levelColour(level, highest) {
  if (level === 0) return rgb(root.dataset.theme === "dark" ? "#14181d" : "#ffffff");
  const anchors = (level < 0 ? NEGATIVE : LEVELS)[root.dataset.theme];
  const share = highest > 1 ? (Math.abs(level) - 1) / (highest - 1) * (anchors.length - 1) : anchors.length - 1;
  const low = Math.min(Math.floor(share), anchors.length - 2), [from, to] = [rgb(anchors[low]), rgb(anchors[low + 1])];
  return from.map((value, i) => Math.round(value + (to[i] - value) * (share - low)));
}

// Drawing -------------------------------------------------------------------------------------------------------------

function drawPad() {
  const pad = $("pad"), context = pad.getContext("2d"), side = pad.width;
  context.clearRect(0, 0, side, side);
  Object.assign(context, { lineWidth: side / 13, lineCap: "round", lineJoin: "round", strokeStyle: themed(state.example ? "--soft" : "--ink") });
  for (const stroke of state.strokes) {
    context.beginPath();
    stroke.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](x * side, y * side));
    if (stroke.length === 1) context.lineTo(stroke[0][0] * side + 0.1, stroke[0][1] * side); // a line of no length is not drawn
    context.stroke();
  }
  if (document.activeElement === pad && state.keys) {
    Object.assign(context, { lineWidth: 3, strokeStyle: themed("--main") });
    context.beginPath();
    context.arc(state.pen[0] * side, state.pen[1] * side, side / 26, 0, 7);
    context.stroke();
  }
}

function drawn() {
  drawPad();
  const blank = !state.strokes.length;
  see(digit(state.strokes), blank ? "Nothing yet." : "Your ink in 8 x 8 blocks, each counted from 0 to 16.", blank);
}

function clearPad() {
  Object.assign(state, { strokes: [], lifted: true, example: false });
  drawn();
}

function addPoint(point, begin) {
  if (state.example) clearPad();
  if (begin) state.strokes.push([point]);
  else state.strokes.at(-1).push(point);
}

function watchPad() {
  const pad = $("pad");
  const at = (event) => {
    const box = pad.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  let drawing = false;
  pad.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    try { pad.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone, or a script's */ }
    Object.assign(state, { keys: false, lifted: true });
    drawing = true;
    addPoint(at(event), true);
    drawn();
  });
  pad.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    const moves = event.getCoalescedEvents?.() ?? [];
    for (const move of moves.length ? moves : [event]) addPoint(at(move), !state.strokes.length);
    requestAnimationFrame(drawn);
  });
  for (const end of ["pointerup", "pointercancel"]) pad.addEventListener(end, () => { drawing = false; });
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  pad.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) state.pen = state.pen.map((place, i) => Math.min(1, Math.max(0, place + KEY_STEP * moves[event.key][i])));
    else if (event.key === " ") { addPoint([...state.pen], state.lifted || !state.strokes.length); state.lifted = false; }
    else if (event.key === "Enter") state.lifted = true;
    else if (event.key === "Delete" || event.key === "Backspace") clearPad();
    else return;
    event.preventDefault();
    state.keys = true;
    if (event.key === " ") drawn();
    else drawPad();
  });
  pad.addEventListener("focus", () => { state.keys = pad.matches(":focus-visible"); drawPad(); });  // the pen shows where it is
  pad.addEventListener("blur", drawPad);
  $("clear").addEventListener("click", clearPad);
}

// Pictures ------------------------------------------------------------------------------------------------------------

async function take(file) {
  try {
    const picture = await decoded(file), pixels = pixelsOf(picture, network.facts.input);
    const { shape: [, side], max } = network.facts.input;
    if (network.facts.input.drawing) { Object.assign(state, { strokes: [], example: false }); drawPad(); }
    else {
      URL.revokeObjectURL($("preview").src);
      Object.assign($("preview"), { src: URL.createObjectURL(file), hidden: false, alt: `The picture ${file.name ?? ""}` });
    }
    see(pixels, `${file.name ?? "The picture"}: ${picture.width} x ${picture.height} pixels, scaled to ${side} x ${side}${max === 255 ? "" : `, values 0 to ${max}`}.`);
  } catch (error) { complain(`${file.name ?? "The picture"}: ${error.message}`); }
}

function watchPictures() {
  $("file").addEventListener("change", (event) => { if (event.target.files[0]) take(event.target.files[0]); event.target.value = ""; });
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
  for (const end of ["dragleave", "drop"]) addEventListener(end, () => document.body.classList.remove("over"));
  addEventListener("drop", (event) => { event.preventDefault(); given(event.dataTransfer); });
  addEventListener("paste", (event) => { if (event.clipboardData.files.length) given(event.clipboardData); });
}

function given(transfer) {
  if (transfer.files[0]) take(transfer.files[0]);
  else complain("What was dropped is no file: give a PNG, JPEG, WebP or BMP");
}

// Results -------------------------------------------------------------------------------------------------------------

function complain(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text;
}

/** blank: nobody has given anything yet, so there is no answer. */
function see(pixels, text, blank = false) {
  complain("");
  Object.assign(state, { pixels, blank });
  $("seen-text").textContent = text;
  show();
  clearTimeout(state.timer);
  state.timer = setTimeout(measure, 120);
}

/** Runs again and again: browsers' clocks are coarse. */
function measure() {
  let runs = 0;
  const start = performance.now();
  do { network.run(state.pixels); runs++; } while (performance.now() - start < TIMED_MS);
  const time = (performance.now() - start) / runs;
  $("time").textContent = `${time < 10 ? time.toFixed(2) : time.toFixed(0)} ms`;
}

function show() {
  if (!state.pixels) return;
  const logits = network.run(state.pixels), shares = network.shares(logits), { blank } = state;
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b), best = order[0];
  $("answer").textContent = blank ? "…" : network.classes[best];
  const shown = network.classes.length <= SHOWN_CLASSES ? [...logits.keys()] : order.slice(0, SHOWN_CLASSES);
  $("bars").replaceChildren(...shown.flatMap((i) => {
    const bar = made("i", "", { className: i === best && !blank ? "best" : "" });
    bar.style.width = `${blank ? 0 : 100 * shares[i]}%`;
    return [made("span", network.classes[i]), bar, made("span", blank ? "" : `${(100 * shares[i]).toFixed(1)} %`)];
  }));
  const synapses = network.accumulations();
  $("sum").textContent = count(synapses.reduce((sum, synapse) => sum + synapse.accumulations, 0));
  showSeen();
  network.facts.layers.forEach((layer, i) => showLayer(layer, i, synapses));
  showKey();
}

function showSeen() {
  const { shape: [channels, height, width], max } = network.facts.input, canvas = $("seen"), area = height * width;
  const dark = root.dataset.theme === "dark";
  paint(canvas, width, height, (x, y) => {
    const values = Array.from({ length: channels }, (_, c) => Math.round(255 * state.pixels[c * area + y * width + x] / max));
    if (channels === 3) return values;
    return Array(3).fill(network.facts.input.drawing && !dark ? 255 - values[0] : values[0]);
  });
}

function paint(canvas, width, height, colour) {
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let y = 0, i = 0; y < height; y++)
    for (let x = 0; x < width; x++, i += 4) image.data.set([...colour(x, y), 255], i);
  context.putImageData(image, 0, 0);
}

/** All channels of a layer side by side, at the chosen timestep: levels, or one of their bits. */
function showLayer({ name, shape: [channels, height, width], highest, planes, gate }, index, synapses) {
  const levels = network.levels(index), size = channels * height * width, start = state.step * size;
  const across = Math.min(channels, Math.max(8, 2 ** Math.ceil(Math.log2(Math.sqrt(channels * 4)))));
  const line = rgb(themed("--line")), on = rgb(themed("--ink")), off = levelColour(0, 1);
  const bit = state.view === "levels" ? -1 : Number(state.view);
  const colours = new Map();
  for (let level = -highest; level <= highest; level++)
    colours.set(level, bit < 0 ? levelColour(level, highest) : (Math.abs(level) >> bit) & 1 ? on : off);
  const canvas = $(`layer-${index}`), wide = across * (width + 1) + 1, high = Math.ceil(channels / across) * (height + 1) + 1;
  paint(canvas, wide, high, (x, y) => {
    const column = Math.floor((x - 1) / (width + 1)), row = Math.floor((y - 1) / (height + 1)), channel = row * across + column;
    const inX = (x - 1) - column * (width + 1), inY = (y - 1) - row * (height + 1);
    if (x === 0 || y === 0 || inX === width || inY === height || channel >= channels) return line;
    return colours.get(levels[start + (inY * width + inX) * channels + channel]);
  });
  let active = 0, sum = 0;
  for (let i = start; i < start + size; i++) { active += levels[i] !== 0; sum += Math.abs(levels[i]); }
  const into = synapses.filter((synapse) => synapse.layer === name).reduce((total, synapse) => total + synapse.accumulations, 0);
  const cost = into || index ? `${count(into)} accumulations into it` : `${count(network.facts.pixelProducts)} products with pixels`;
  const what = gate ? `of its products are not 0, colours go up to ${highest}` : "fire";
  const text = `${(100 * active / size).toFixed(1)} % ${what}, mean level ${(sum / size).toFixed(2)}`;
  $(`text-${index}`).textContent = `Timestep ${state.step + 1}: ${text}. All timesteps: ${cost}.`;
  canvas.setAttribute("aria-label", `${bit < 0 ? "Levels" : `Bit ${2 ** bit} of the levels`} of ${name}, timestep ${state.step + 1}: ${text}`);
  canvas.parentElement.classList.toggle("none", bit >= planes);
}

function showKey() {
  const neurons = network.facts.layers.filter((layer) => !layer.gate);
  const highest = Math.max(...neurons.map((layer) => layer.highest)), key = $("key");
  const item = (colour, text) => {
    const swatch = made("i", "");
    swatch.style.background = `rgb(${colour})`;
    const span = made("span", "");
    span.append(swatch, text);
    return span;
  };
  if (state.view !== "levels") key.replaceChildren(item(rgb(themed("--ink")), `this bit of the level, worth ${2 ** state.view}, is set: one addition for each weight it meets`));
  else {
    const every = Math.ceil(highest / 10), shown = Array.from({ length: highest + 1 }, (_, level) => level).filter((level) => level % every === 0 || level === highest);
    key.replaceChildren(...shown.map((level) => item(levelColour(level, highest), level ? String(level) : "silent")));
  }
}

// Start ---------------------------------------------------------------------------------------------------------------

function choices(box, name, entries, chosen) {
  for (const [value, text] of entries) {
    const label = made("label", ""), input = made("input", "", { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => { state[name] = name === "step" ? Number(value) : value; show(); });
    label.append(input, text);
    box.append(label);
  }
}

function furnish() {
  const { facts } = network, { input } = facts, planes = Math.max(...facts.layers.map((layer) => layer.planes));
  $("title").textContent = `${facts.title}, a spiking network${input.drawing ? " that reads digits" : ""}`;
  $("about").textContent = `${count(facts.weights)} weights, ${count(facts.neurons)} neurons, ${facts.timesteps} timestep${facts.timesteps > 1 ? "s" : ""}, integers only. It runs in this page: nothing leaves your device.`;
  $("draw-card").hidden = !input.drawing;
  $("drop-card").hidden = input.drawing;
  choices($("steps"), "step", Array.from({ length: facts.timesteps }, (_, t) => [String(t), String(t + 1)]), "0");
  choices($("views"), "view", [["levels", "levels"], ...Array.from({ length: planes }, (_, k) => [String(planes - 1 - k), `bit ${2 ** (planes - 1 - k)}`])], "levels");
  for (const [id, name, value] of [
    ["sum", "accumulations", "–"],
    ["products", "products with pixels", count(facts.pixelProducts)],
    ["ann", "products as an ANN", count(facts.annProducts)],
    ["timesteps", "timesteps", String(facts.timesteps)],
    ["time", "a run, this device", "–"],
  ]) {
    const box = made("div", "");
    box.append(made("dt", name), made("dd", value, { id }));
    $("numbers").append(box);
  }
  facts.layers.forEach((layer, i) => {
    const box = made("div", "", { className: "layer" }), [channels, height, width] = layer.shape;
    const canvas = made("canvas", "", { id: `layer-${i}`, className: "pixels" });
    canvas.setAttribute("role", "img");
    box.append(made("h3", `${layer.name}${layer.gate ? ", a gate" : ""}: ${channels} channels of ${height} x ${width}`), made("p", "", { id: `text-${i}`, className: "soft small" }), canvas);
    $("layers").append(box);
  });
  $("origin").textContent = `Written by ${facts.written}${facts.dataset ? `; trained on ${facts.dataset}` : ""}. The network's file has SHA-256 ${facts.sha256}. It names one of its classes for any input.`;
}

try {
  network = await load(Uint8Array.from(atob($("module").textContent), (character) => character.charCodeAt(0)));
  furnish();
  watchPictures();
  if (network.facts.input.drawing) {
    watchPad();
    Object.assign(state, { strokes: structuredClone(EXAMPLE), example: true });
    drawn();
    $("seen-text").textContent = "An example. Draw your own over it.";
  } else {
    see(new Uint8Array(network.inputBytes), "Nothing yet: the numbers are of a black picture.", true);
  }
  globalThis.lbq = { network, load, decoded, pixelsOf, digit, take }; // for the console
} catch (error) {
  complain(`This browser cannot run the network (${error.message}). It needs WebAssembly with SIMD: Chrome 91, Firefox 89, Safari 16.4, or newer.`);
}
