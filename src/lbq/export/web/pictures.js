// Pictures and drawings for a network of lbq: the bytes are those that `lbq predict` gives it.

const MOST_PIXELS = 2 ** 26;
const INK = { side: 32, wide: 20, pen: 2, block: 4, edge: 0.06 }; // of a drawn digit, in pixels; edge: a share of its height

/** A picture file (PNG, JPEG, WebP, BMP) as {data, width, height}, RGBA, upright. */
export async function decoded(blob) {
  const options = { imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none" };
  const bitmap = await createImageBitmap(blob, options).catch(() => {
    throw new Error("this file is not a picture that the browser can read: give a PNG, JPEG, WebP or BMP");
  });
  const { width, height } = bitmap;
  if (width * height > MOST_PIXELS) throw new Error(`a picture of ${width} x ${height} pixels is too large: make it smaller`);
  const context = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const clear = data.some((value, i) => i % 4 === 3 && value < 255);
  return { data: (clear && await withoutAlpha(bitmap)) || data, width, height };
}

/** Transparency is dropped, as in lbq predict. A canvas mixes it into the colours; a video frame keeps them. */
async function withoutAlpha(bitmap) {
  if (!globalThis.VideoFrame) return null;
  const frame = new VideoFrame(bitmap, { timestamp: 0 }), order = frame.format;
  if (!/^(RGB|BGR)[AX]$/.test(order)) return null;
  const data = new Uint8Array(frame.allocationSize());
  await frame.copyTo(data);
  frame.close();
  if (order[0] === "B") for (let i = 0; i < data.length; i += 4) [data[i], data[i + 2]] = [data[i + 2], data[i]];
  return data;
}

/** A network's input from a picture: its shorter side scaled, its middle cut out, [C][H][W]. input: facts.input. */
export function pixelsOf({ data, width, height }, input) {
  const [channels, crop] = input.shape, short = Math.min(width, height);
  const [wide, high] = [width, height].map((side) => Math.floor((side * input.resize) / short));
  if (wide * high > MOST_PIXELS) throw new Error(`a picture of ${width} x ${height} pixels is too long: crop it`);
  const left = rounded((wide - crop) / 2), top = rounded((high - crop) / 2);
  const columns = weights(width, wide, left, crop), rows = weights(height, high, top, crop);
  const narrow = new Uint8ClampedArray(3 * height * crop); // all rows of the picture, `crop` columns; 8 bits as in Pillow
  for (let y = rows[0].first; y < rows[crop - 1].first + rows[crop - 1].factors.length; y++)
    for (let x = 0; x < crop; x++)
      for (let c = 0; c < 3; c++)
        narrow[3 * (y * crop + x) + c] = scaled(columns[x], (i) => data[4 * (y * width + i) + c]);
  const out = new Uint8Array(channels * crop * crop), area = crop * crop;
  for (let y = 0; y < crop; y++)
    for (let x = 0; x < crop; x++) {
      const [r, g, b] = [0, 1, 2].map((c) => scaled(rows[y], (i) => narrow[3 * (i * crop + x) + c]));
      const values = channels === 1 ? [0.299 * r + 0.587 * g + 0.114 * b] : [r, g, b];
      values.forEach((value, c) => { out[c * area + y * crop + x] = rounded(value * (input.max / 255)); });
    }
  return out;
}

/** Pillow's bilinear weights along one axis, in 22 bits, for `count` outputs from `start` on. */
function weights(size, target, start, count) {
  if (size === target) return Array.from({ length: count }, (_, i) => ({ first: start + i, factors: [1 << 22] }));
  const scale = size / target, support = Math.max(scale, 1);
  return Array.from({ length: count }, (_, i) => {
    const centre = (start + i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - support + 0.5), 0), end = Math.min(Math.trunc(centre + support + 0.5), size);
    const factors = Array.from({ length: end - first }, (_, j) => Math.max(1 - Math.abs((j + first - centre + 0.5) * (1 / support)), 0));
    const sum = factors.reduce((a, b) => a + b, 0);
    return { first, factors: factors.map((factor) => Math.trunc(0.5 + (factor / sum) * (1 << 22))) };
  });
}

function scaled({ first, factors }, at) {
  let sum = 1 << 21;
  for (let j = 0; j < factors.length; j++) sum += at(first + j) * factors[j];
  return Math.min(sum >> 22, 255);
}

/** To the nearest integer; halves to the even one. */
function rounded(value) {
  const down = Math.floor(value), rest = value - down;
  return rest > 0.5 || (rest === 0.5 && down % 2 !== 0) ? down + 1 : down;
}

/** Strokes, lists of points [x, y] with y downwards, as the 8 x 8 numbers from 0 to 16 of the digits dataset.
 *
 * As NIST's programs made the dataset: the slant is taken out, so that what is leftmost at the top stands above what is leftmost
 * at the bottom; the strokes are cut to their box, centred, at most 20 of 32 pixels wide; ink is counted in blocks of 4 x 4. */
export function digit(strokes) {
  const { side, wide, pen, block, edge } = INK, points = strokes.flat(), cells = side / block, out = new Uint8Array(cells * cells);
  if (!points.length) return out;
  const [upper, lower] = range(points, 1), height = lower - upper, near = edge * height;
  const leftmost = (chosen) => Math.min(...points.filter(([, y]) => chosen(y)).map(([x]) => x));
  const slant = height ? (leftmost((y) => y >= lower - near) - leftmost((y) => y <= upper + near)) / height : 0;
  const lean = Math.max(-1, Math.min(1, slant));
  const upright = strokes.map((stroke) => stroke.map(([x, y]) => [x - lean * (y - upper), y]));
  const [left, right] = range(upright.flat(), 0), width = right - left;
  const down = (side - 2 * pen) / (Math.max(height, width / 4) || 1), across = Math.min(down, (wide - 2 * pen) / (width || 1));
  const place = ([x, y]) => [side / 2 + (x - (left + right) / 2) * across, side / 2 + (y - (upper + lower) / 2) * down];
  const lines = upright.map((stroke) => stroke.map(place)).flatMap((stroke) => stroke.map((to, i) => [stroke[Math.max(i - 1, 0)], to]));
  for (let y = 0; y < side; y++)
    for (let x = 0; x < side; x++)
      if (lines.some(([from, to]) => distance([x + 0.5, y + 0.5], from, to) <= pen)) out[Math.floor(y / block) * cells + Math.floor(x / block)]++;
  return out;
}

function range(points, axis) {
  const values = points.map((point) => point[axis]);
  return [Math.min(...values), Math.max(...values)];
}

/** Of a point from the line between two others. */
function distance([x, y], [fromX, fromY], [toX, toY]) {
  const dx = toX - fromX, dy = toY - fromY, square = dx * dx + dy * dy;
  const along = square ? Math.max(0, Math.min(1, ((x - fromX) * dx + (y - fromY) * dy) / square)) : 0;
  return Math.hypot(x - fromX - along * dx, y - fromY - along * dy);
}
