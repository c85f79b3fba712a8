// A network that lbq exported to WebAssembly. All its numbers are integers, and equal to lbq's own.
//
//   import { load } from "./network.js";
//   const network = await load(await (await fetch("model.wasm")).arrayBuffer());
//   const logits = network.run(pixels);   // Uint8Array, [C][H][W]; of an event network [T][C][H][W]
//   network.classes[network.best(logits)];

/** The network in a WebAssembly module. source: its bytes, or a WebAssembly.Module. */
export async function load(source) {
  const module = source instanceof WebAssembly.Module ? source : await WebAssembly.compile(source);
  const [facts] = WebAssembly.Module.customSections(module, "lbq");
  if (!facts) throw new Error("this WebAssembly module is not a network: give one that lbq export --format wasm wrote");
  const instance = await WebAssembly.instantiate(module);
  return new Network(instance.exports, JSON.parse(new TextDecoder().decode(facts)));
}

/** A network, ready to run. facts: what the module says of itself; classes: the names of its classes. */
export class Network {
  constructor(exports, facts) {
    this.exports = exports;
    this.facts = facts;
    this.classes = facts.classes;
    this.inputBytes = (facts.static ? 1 : facts.timesteps) * facts.input.shape.reduce((a, b) => a * b);
  }

  /** Logits, one for each class, of an input of `inputBytes` bytes, each from 0 to facts.input.max. */
  run(pixels) {
    if (!(pixels instanceof Uint8Array))
      throw new TypeError(`the network reads a Uint8Array of ${this.inputBytes} bytes, not something of type ${typeName(pixels)}`);
    if (pixels.length !== this.inputBytes)
      throw new RangeError(`the network reads a Uint8Array of ${this.inputBytes} bytes, not ${pixels.length}`);
    if (pixels.some((value) => value > this.facts.input.max))
      throw new RangeError(`the network was trained on values from 0 to ${this.facts.input.max}: scale them to that`);
    new Uint8Array(this.exports.memory.buffer, this.exports.input(), this.inputBytes).set(pixels);
    this.exports.run();
    return Array.from(new BigInt64Array(this.exports.memory.buffer, this.exports.logits(), this.classes.length), Number);
  }

  /** The class with the largest logit; of equal ones the first. */
  best(logits) {
    return logits.indexOf(Math.max(...logits));
  }

  /** For each class its share of a softmax over the logits. */
  shares(logits) {
    const most = Math.max(...logits), powers = logits.map((logit) => Math.exp((logit - most) * this.facts.scale));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / sum);
  }

  /** The levels of layer or gate `index` of facts.layers in the last run, [T][H][W][C]: a view that the next run changes. */
  levels(index) {
    const { layers } = this.facts;
    if (!Number.isInteger(index) || !(index in layers))
      throw new RangeError(`the network has layers 0 to ${layers.length - 1}, and none of index ${String(index)}: see facts.layers`);
    return this.tensor(layers[index].tensor);
  }

  /** Additions in the last run, for every synapse without those that read pixels, and every product of levels. A set bit of a
      level adds a weight; two bits that meet in a product of levels add one. */
  accumulations() {
    const synapses = this.facts.synapses.map((synapse) => ({ ...synapse, accumulations: this.counted(synapse) }));
    const products = this.facts.products.map((one) => ({ ...one, accumulations: this.multiplied(one) }));
    return [...synapses, ...products];
  }

  multiplied(product) {
    switch (product.kind) {
      case "gate": return this.gated(product);
      case "scores": return this.scored(product);
      case "values": return this.weighed(product);
      default: return this.scored(product) + this.attended(product);
    }
  }

  /** Of a gate. */
  gated({ tensors: [factor, source] }) {
    const [by, levels] = [factor, source].map((index) => this.tensor(index));
    const [heads, rows, columns] = this.facts.tensors[factor].shape, [channels, height, width] = this.facts.tensors[source].shape;
    let total = 0;
    for (let i = 0; i < levels.length; i++) {
      const position = Math.floor(i / channels), place = rows * columns === 1 ? Math.floor(position / (height * width)) : position;
      total += setBits(levels[i]) * setBits(by[place * heads + Math.floor((i % channels) * heads / channels)]);
    }
    return total;
  }

  /** Of Q K^T: each channel of each query meets that of each key. */
  scored({ tensors }) {
    const [q, k] = tensors.map((index) => this.tensor(index)), [channels, height, width] = this.facts.tensors[tensors[0]].shape;
    const frame = height * width * channels;
    let total = 0;
    for (let start = 0; start < q.length; start += frame)
      for (let c = start; c < start + channels; c++) {
        let [left, right] = [0, 0];
        for (let i = c; i < start + frame; i += channels) { left += setBits(q[i]); right += setBits(k[i]); }
        total += left * right;
      }
    return total;
  }

  /** Of A V, levels A of scores: what all queries have for a key in a head meets the key's channels of that head. */
  weighed({ tensors, heads }) {
    const [a, v] = tensors.map((index) => this.tensor(index)), tokens = this.facts.tensors[tensors[0]].shape[2];
    const depth = this.facts.tensors[tensors[1]].shape[0] / heads, square = tokens * tokens * heads;
    let total = 0;
    for (let j = 0; j < v.length; j += depth) { // a key in one head
      const at = j / depth, start = Math.floor(at / (tokens * heads)) * square + at % (tokens * heads);
      let [bits, scores] = [0, 0];
      for (let c = 0; c < depth; c++) bits += setBits(v[j + c]);
      for (let i = start; i < start + square; i += tokens * heads) scores += setBits(a[i]);
      total += bits * scores;
    }
    return total;
  }

  /** Of the second product of (Q K^T) V: a set bit of V adds the scores of its token that are not 0. */
  attended({ tensors, heads }) {
    const [q, k, v] = tensors.map((index) => this.tensor(index)), [channels, height, width] = this.facts.tensors[tensors[0]].shape;
    const depth = channels / heads, frame = height * width * channels;
    let total = 0;
    for (let start = 0; start < q.length; start += frame) {
      const end = start + frame;
      for (let j = start; j < end; j += depth) { // a token of K and V in one head
        let [bits, scores] = [0, 0];
        for (let c = 0; c < depth; c++) bits += setBits(v[j + c]);
        for (let i = start + (j - start) % channels; bits && i < end; i += channels) {
          let score = 0;
          for (let c = 0; c < depth; c++) score += q[i + c] * k[j + c];
          scores += score !== 0;
        }
        total += bits * scores;
      }
    }
    return total;
  }

  /** Of a synapse. Events of a binary or ternary network add a weight each, also those that meet in a sum. */
  counted({ tensor, rows, columns, fanOut, readout }) {
    const values = this.tensor(tensor), channels = this.facts.tensors[tensor].shape[0];
    const { unitEvents } = this.facts, place = rows.length * columns.length * channels, frames = values.length / place;
    let total = 0;
    for (let i = 0; i < place; i++) {
      let bits = 0, sum = 0;
      for (let t = 0; t < frames; t++) {
        if (unitEvents) bits += Math.abs(values[t * place + i]);
        else if (readout) sum += values[t * place + i]; // the readout adds up levels over time first
        else bits += setBits(values[t * place + i]);
      }
      const position = Math.floor(i / channels);
      const taps = rows[Math.floor(position / columns.length)] * columns[position % columns.length];
      total += (readout && !unitEvents ? setBits(sum) : bits) * taps;
    }
    return total * fanOut;
  }

  tensor(index) {
    const { kind, frames, shape, offset } = this.facts.tensors[index], size = frames * shape.reduce((a, b) => a * b);
    const { buffer } = this.exports.memory;
    if (kind === "sums") return new Int32Array(buffer, this.exports.sums() + 4 * offset, size);
    return new (kind === "signed" ? Int8Array : Uint8Array)(buffer, this.exports.levels() + offset, size);
  }
}

function typeName(value) {
  return Object.prototype.toString.call(value).slice(8, -1); // "[object Float32Array]"
}

function setBits(level) {
  let count = 0;
  for (let rest = Math.abs(level); rest; rest &= rest - 1) count++;
  return count;
}
